/* The busiest subjects, by name.
 *
 * The table stores hashes, so names must be recorded during checks. One check in RK_SAMPLE_EVERY is
 * sampled, on average and at random, so that no pattern of requests hides a subject. A space-saving
 * sketch holds RK_BUSIEST_MAX names: a new name replaces the one with the fewest samples and
 * inherits its count. So the sketch contains every subject with clearly more than 1 /
 * RK_BUSIEST_MAX of all checks. Counts are halved regularly, so that recent checks weigh more.
 * Sampling never waits: if the lock is taken, the sample is dropped. */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

#include "numbers.h"

static const uint64_t HALVE_EVERY = 16384; /* samples: a million checks */
static const int64_t LIST_WAIT_NS = 100000000;

/* After this many consecutive dropped samples, test whether the lock's owner is dead. */
static const uint32_t MISSES_MAX = 1000;

bool rk_sample_due(rk_table *table)
{
    if (table->sample_in > 1) {
        table->sample_in--;
        return false;
    }
    /* xorshift32; any seed except 0 works. */
    uint32_t x = table->random ? table->random : (uint32_t)(uintptr_t)table | 1;
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    bool first = table->random == 0;
    table->random = x;
    table->sample_in = 1 + x % (2 * RK_SAMPLE_EVERY - 1);
    return !first;
}

static bool lock_for_note(rk_table *table)
{
    rk_busy_table *busiest = table->busiest;
    uint32_t unlocked = 0;
    bool repaired = false;
    if (!table->shared)
        return true;
    if (table->owner == 0)
        return false;
    if (atomic_compare_exchange_strong(&busiest->lock, &unlocked, table->owner)) {
        table->busy_misses = 0;
        return true;
    }
    if (++table->busy_misses < MISSES_MAX)
        return false;
    table->busy_misses = 0;
    if (rk_lock_wait(table, &busiest->lock, LIST_WAIT_NS / 10, &repaired) != RK_OK)
        return false;
    if (repaired)
        busiest->count = 0;
    return true;
}

static uint16_t whole_characters(const char *name, size_t length, size_t most)
{
    if (length <= most)
        return (uint16_t)length;
    while (most > 0 && ((uint8_t)name[most] & 0xc0) == 0x80)
        most--;
    return (uint16_t)most;
}

static rk_busy_cell *cell_for(rk_busy_table *busiest, rk_hash subject)
{
    rk_busy_cell *least = &busiest->cells[0];
    for (uint32_t i = 0; i < busiest->count; i++) {
        rk_busy_cell *cell = &busiest->cells[i];
        if (cell->subject.low == subject.low && cell->subject.high == subject.high)
            return cell;
        if (cell->samples < least->samples)
            least = cell;
    }
    if (busiest->count < RK_BUSIEST_MAX)
        least = &busiest->cells[busiest->count++], least->samples = 0;
    least->length = 0;
    return least;
}

void rk_note_busy(rk_table *table, rk_hash subject, const char *name, size_t length)
{
    rk_busy_table *busiest = table->busiest;
    if (!lock_for_note(table))
        return;
    if (busiest->count > RK_BUSIEST_MAX)
        busiest->count = 0;
    rk_busy_cell *cell = cell_for(busiest, subject);
    if (cell->length == 0) {
        cell->subject = subject;
        cell->length = whole_characters(name, length, sizeof cell->name);
        memcpy(cell->name, name, cell->length);
    }
    cell->samples++;
    if (++busiest->noted % HALVE_EVERY == 0)
        for (uint32_t i = 0; i < busiest->count; i++)
            busiest->cells[i].samples /= 2;
    rk_unlock(table, &busiest->lock);
}

static int by_checks(const void *a, const void *b)
{
    const rk_busy *one = a, *two = b;
    return (one->checks < two->checks) - (one->checks > two->checks);
}

int rk_busiest(rk_table *table, rk_busy *found, int most)
{
    rk_busy_table *busiest = table->busiest;
    rk_busy all[RK_BUSIEST_MAX];
    bool repaired;
    if (rk_lock_wait(table, &busiest->lock, LIST_WAIT_NS, &repaired) != RK_OK)
        return 0;
    if (repaired) /* the owner died while it wrote a name */
        busiest->count = 0;
    int count = 0;
    for (uint32_t i = 0; i < busiest->count && i < RK_BUSIEST_MAX; i++) {
        const rk_busy_cell *cell = &busiest->cells[i];
        if (cell->length > sizeof cell->name || cell->samples == 0)
            continue;
        all[count].checks = cell->samples * RK_SAMPLE_EVERY;
        all[count].length = cell->length;
        memcpy(all[count++].name, cell->name, cell->length);
    }
    rk_unlock(table, &busiest->lock);
    qsort(all, (size_t)count, sizeof all[0], by_checks);
    count = (int)rk_min(count, most);
    memcpy(found, all, (size_t)count * sizeof all[0]);
    return count;
}
