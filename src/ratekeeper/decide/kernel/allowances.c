/* The node's table of allowances.
 *
 * Problem. All processes of a node spend from the same allowances, tens of nanoseconds a check, and
 * each may be killed between two instructions. No unit may be spent twice, no pending unit may be
 * lost, and the process that reports must find the few records with something to report among a
 * million.
 *
 * Layout. A subject's keyed hash selects a segment, which has a lock. Hash and gate determine a tag
 * of 32 bits and two buckets of 16 slots; a record is in one of them. A record never moves, so
 * there are no chains to follow or to repair. It has the subject's text, which is compared: two
 * subjects are never confused.
 *
 * Killed during a call. The units of a record (left, pending, claimed) are one word of 64 bits, and
 * every change of them is one store. Where other fields belong to the units, the units to spend are
 * set to 0 first, then the fields are written, then the units. A new record gets its tag last. So
 * a record is complete at every instruction. A kill in between loses at most the units of the lease
 * that the call was about to put here: fewer requests are admitted, never more. A process that
 * takes a dead owner's lock counts the slots again, and marks all of them.
 *
 * Claims. Each segment has a bit for every slot that may have units to claim, and the earliest time
 * at which one of them is due. A claim skips segments that have nothing due.
 *
 * Data is not trusted. After a power cut the file may contain anything, so every number is clamped
 * when it is used. */
#include "allowances.h"

#include <string.h>

#include "layout.h"
#include "numbers.h"

enum {
    UNIT_BITS = 21,
    SWEEP_SLOTS = 64, /* a full table reclaims among so many slots at most: 2 µs */
};

static const int64_t SECOND_NS = 1000000000;
/* As in decide/allowances.py. */
#define CLAIM_NS (5 * SECOND_NS)
#define DENIED_NS_MAX SECOND_NS
#define LEASE_NS_MAX (2 * SECOND_NS)
#define BUDGET_NS_MAX (20 * SECOND_NS)
#define IDLE_NS (10 * SECOND_NS)
#define FORGET_NS (600 * SECOND_NS)
/* The latest time at which a quota is whole: a century after the latest time. */
static const int64_t WHOLE_NS_MAX = RK_NOW_NS_MAX + INT64_C(3200000000000000000);
/* The highest difference between the clocks of the authority and of the table. */
static const int64_t OFFSET_NS_MAX = INT64_C(5000000000000000000);
/* How long the functions on the whole table wait for each lock. A claim passes over a segment whose
 * owner is stopped: the units in the others are due, too. */
static const int64_t LOCK_WAIT_NS = 1000000000;
static const int64_t CLAIM_WAIT_NS = 20000000;

typedef struct {
    uint64_t gate;
    _Atomic uint64_t units; /* left | pending << 21 | claimed << 42 */
    int64_t until_ns;
    int64_t denied_until_ns;
    uint32_t denied_cost;
    uint32_t lease_units; /* when it was put here */
    int64_t seen_since_ns;
    uint32_t seen, seen_before, cost;
    uint8_t place, leased, length, unused;
    /* The last answer of the authority. */
    int64_t offset_ns, whole_ns;
    uint32_t elsewhere, unused_too;
    int64_t claimed_spent_ns, claimed_at_ns;
    union {
        struct {
            int64_t ends_store_ns, charged_store_ns;
        }; /* a lease */
        struct {
            int64_t first_ns, last_ns;
        }; /* pending units */
    };
    char subject[RK_SUBJECT_BYTES_MAX];
    char padding[8];
} record;

_Static_assert(sizeof(record) == 256, "a record is four cache lines");

typedef struct {
    rk_lock lock;
    uint32_t filled;
    uint32_t hand; /* the slot at which the next search for idle records starts */
    uint32_t unused;
    int64_t due_ns;     /* the earliest end of a lease or of a claim, or earlier */
    int64_t pending_ns; /* the earliest time of a pending unit, or earlier */
    uint64_t refused, repaired;
    uint64_t marks[RK_ALLOWANCE_SLOTS / 64]; /* slots that may have units to claim */
} __attribute__((aligned(64))) segment;

/* ---- finding records ---- */

size_t rk_allowance_segment_bytes(uint32_t buckets)
{
    size_t slots = (size_t)buckets * RK_ALLOWANCES_PER_BUCKET;
    size_t bytes = sizeof(segment) + slots * sizeof(uint32_t);
    return (bytes + 63) / 64 * 64 + slots * sizeof(record);
}

static segment *segment_at(const rk_table *table, uint32_t index)
{
    return (segment *)(table->segments + table->segment_bytes * index);
}

static segment *segment_of(const rk_table *table, rk_hash subject)
{
    /* The upper half of the product is always below `segments`. */
    return segment_at(table, (uint32_t)((rk_u128)subject.low * table->format.segments >> 64));
}

static uint32_t *tags_of(segment *s) { return (uint32_t *)(s + 1); }

static record *record_at(const rk_table *table, segment *s, uint32_t slot)
{
    uint8_t *end = (uint8_t *)s + table->segment_bytes;
    return (record *)end - table->slots + slot;
}

/* The two buckets of a record, and its tag, which is not 0. */
typedef struct {
    uint32_t tag, buckets[2];
} place;

static place place_of(const rk_table *table, rk_hash subject, uint64_t gate)
{
    uint64_t mixed = rk_mix(subject.high ^ rk_mix(gate));
    uint32_t first = (uint32_t)mixed & table->bucket_mask;
    uint32_t other = first ^ ((uint32_t)(mixed >> 16 | 1) & table->bucket_mask);
    return (place){.tag = (uint32_t)(mixed >> 32) | 1, .buckets = {first, other}};
}

static bool is_of(const record *r, uint64_t gate, const rk_subject *subject)
{
    return r->gate == gate && r->length == subject->length &&
           memcmp(r->subject, subject->bytes, subject->length) == 0;
}

static record *find(const rk_table *table, segment *s, uint64_t gate, const rk_subject *subject)
{
    if (subject->length > RK_SUBJECT_BYTES_MAX)
        return NULL;
    place at = place_of(table, subject->hash, gate);
    for (int choice = 0; choice < 2; choice++) {
        uint32_t slot = at.buckets[choice] * RK_ALLOWANCES_PER_BUCKET;
        for (uint32_t end = slot + RK_ALLOWANCES_PER_BUCKET; slot < end; slot++)
            if (tags_of(s)[slot] == at.tag && is_of(record_at(table, s, slot), gate, subject))
                return record_at(table, s, slot);
    }
    return NULL;
}

/* ---- one record ---- */

static int64_t bounded(int64_t units) { return rk_max(0, rk_min(units, RK_ALLOWANCE_UNITS_MAX)); }

typedef struct {
    int64_t left, pending, claimed;
} units;

static units units_of(const record *r)
{
    uint64_t word = atomic_load_explicit(&r->units, memory_order_relaxed);
    return (units){
        .left = (int64_t)(word & RK_ALLOWANCE_UNITS_MAX),
        .pending = (int64_t)(word >> UNIT_BITS & RK_ALLOWANCE_UNITS_MAX),
        .claimed = (int64_t)(word >> 2 * UNIT_BITS & RK_ALLOWANCE_UNITS_MAX),
    };
}

/* Write all units at once, after everything that was written before. */
static void set_units(record *r, units after)
{
    uint64_t word = (uint64_t)bounded(after.left) | (uint64_t)bounded(after.pending) << UNIT_BITS |
                    (uint64_t)bounded(after.claimed) << 2 * UNIT_BITS;
    atomic_store_explicit(&r->units, word, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst); /* and before everything that follows */
}

static int64_t time_of(int64_t time_ns) { return rk_time_in_range(time_ns); }

static int64_t offset_of(int64_t ns) { return rk_max(-OFFSET_NS_MAX, rk_min(ns, OFFSET_NS_MAX)); }

static void note_demand(record *r, int64_t cost, int64_t now_ns, int64_t lifetime_ns)
{
    int64_t seen = bounded((int64_t)r->seen + r->cost);
    int64_t elapsed_ns = now_ns - time_of(r->seen_since_ns);
    if (elapsed_ns >= lifetime_ns) {
        r->seen_before = elapsed_ns - lifetime_ns < lifetime_ns ? (uint32_t)seen : 0;
        r->seen_since_ns = now_ns;
        seen = 0;
    }
    r->seen = (uint32_t)seen;
    r->cost = (uint32_t)bounded(cost);
}

/* Deny a cost until a time, unless a denial is known that covers it. */
static void deny(record *r, int64_t cost, int64_t until_ns)
{
    if (r->denied_cost > cost || r->denied_until_ns < until_ns) {
        r->denied_until_ns = 0;
        atomic_signal_fence(memory_order_seq_cst);
        r->denied_cost = (uint32_t)cost;
        atomic_signal_fence(memory_order_seq_cst);
        r->denied_until_ns = until_ns;
    }
    if (!r->leased) {
        units now = units_of(r);
        now.left = 0;
        set_units(r, now);
    }
    r->elsewhere = (uint32_t)rk_min(r->elsewhere, rk_max(cost - 1, 0));
}

/* Whether units may be spent now. A budget without units may last longer, and is asked for 0. */
static bool is_live(const record *r, int64_t cost, int64_t now_ns)
{
    int64_t lasts_ns = time_of(r->until_ns) - now_ns;
    int64_t longest_ns = r->leased ? LEASE_NS_MAX : cost > 0 ? BUDGET_NS_MAX : INT64_MAX;
    return lasts_ns > 0 && lasts_ns <= longest_ns;
}

static bool is_idle(const record *r, int64_t now_ns)
{
    units has = units_of(r);
    /* A budget without units says that the subject is warm, which must not be forgotten. */
    if (((has.left > 0 || !r->leased) && is_live(r, 0, now_ns)) || now_ns < r->denied_until_ns)
        return false;
    int64_t since_ns = time_of(r->seen_since_ns);
    if (r->leased ? has.left > 0 : has.pending + has.claimed > 0)
        return now_ns >= rk_max(since_ns, time_of(r->claimed_at_ns)) + FORGET_NS;
    return now_ns >= since_ns + IDLE_NS;
}

/* Note that a record has, or will have, units to claim. Before they are written. */
static void mark(const rk_table *table, segment *s, const record *r)
{
    uint32_t slot = (uint32_t)(r - record_at(table, s, 0));
    s->marks[slot / 64] |= (uint64_t)1 << slot % 64;
    atomic_signal_fence(memory_order_seq_cst);
}

/* ---- adding records ---- */

static void drop(segment *s, uint32_t slot)
{
    tags_of(s)[slot] = 0;
    atomic_signal_fence(memory_order_seq_cst);
    s->filled -= s->filled > 0;
}

static bool drop_if_idle(const rk_table *table, segment *s, uint32_t slot, int64_t now_ns)
{
    if (tags_of(s)[slot] == 0 || !is_idle(record_at(table, s, slot), now_ns))
        return false;
    drop(s, slot);
    return true;
}

/* Return a free slot of a bucket, or -1, and count its free slots. */
static int free_slot(segment *s, uint32_t bucket, int *count)
{
    int found = -1;
    *count = 0;
    for (uint32_t i = 0; i < RK_ALLOWANCES_PER_BUCKET; i++)
        if (tags_of(s)[bucket * RK_ALLOWANCES_PER_BUCKET + i] == 0) {
            found = (int)(bucket * RK_ALLOWANCES_PER_BUCKET + i);
            ++*count;
        }
    return found;
}

/* Return a free slot in the emptier bucket; -1 if both are full of records in use. */
static int make_room(const rk_table *table, segment *s, const place *at, int64_t now_ns)
{
    for (uint32_t i = 0; i < SWEEP_SLOTS && s->filled >= table->format.segment_limit; i++)
        drop_if_idle(table, s, s->hand++ % table->slots, now_ns);
    if (s->filled >= table->format.segment_limit)
        return -1;
    int counts[2], slots[2];
    for (int choice = 0; choice < 2; choice++)
        slots[choice] = free_slot(s, at->buckets[choice], &counts[choice]);
    if (counts[0] + counts[1] > 0)
        return slots[counts[0] < counts[1]];
    for (int choice = 0; choice < 2; choice++)
        for (uint32_t i = 0; i < RK_ALLOWANCES_PER_BUCKET; i++) {
            uint32_t slot = at->buckets[choice] * RK_ALLOWANCES_PER_BUCKET + i;
            if (drop_if_idle(table, s, slot, now_ns))
                return (int)slot;
        }
    return -1;
}

static record *find_or_add(const rk_table *table, segment *s, const rk_allowance_gate *gate,
                           const rk_subject *subject, int64_t now_ns)
{
    record *found = find(table, s, gate->number, subject);
    if (found != NULL)
        return found;
    place at = place_of(table, subject->hash, gate->number);
    int slot = subject->length > RK_SUBJECT_BYTES_MAX ? -1 : make_room(table, s, &at, now_ns);
    if (slot < 0) {
        s->refused++;
        return NULL;
    }
    found = record_at(table, s, (uint32_t)slot);
    memset(found, 0, sizeof *found);
    found->gate = gate->number;
    found->leased = gate->leased;
    found->seen_since_ns = now_ns;
    found->length = (uint8_t)subject->length;
    memcpy(found->subject, subject->bytes, subject->length);
    s->filled++;
    atomic_signal_fence(memory_order_seq_cst);
    tags_of(s)[slot] = at.tag; /* from here on the record exists */
    return found;
}

/* ---- locks ---- */

static void recover(const rk_table *table, segment *s)
{
    s->filled = 0;
    for (uint32_t slot = 0; slot < table->slots; slot++)
        s->filled += tags_of(s)[slot] != 0;
    memset(s->marks, 0xff, sizeof s->marks);
    s->due_ns = s->pending_ns = 0;
    s->repaired++;
}

static rk_status lock_waiting(rk_table *table, segment *s, int64_t timeout_ns)
{
    bool repaired = false;
    rk_status status = rk_lock_wait(table, &s->lock, timeout_ns, &repaired);
    if (status == RK_OK && repaired)
        recover(table, s);
    return status;
}

rk_status rk_wait_for_allowance(rk_table *table, rk_hash subject, int64_t timeout_ns)
{
    segment *s = segment_of(table, subject);
    rk_status status = lock_waiting(table, s, timeout_ns);
    if (status == RK_OK)
        rk_unlock(table, &s->lock);
    return rk_settled(table, status);
}

void rk_mend_allowances(rk_table *table)
{
    for (uint32_t i = 0; i < table->format.segments; i++) {
        segment *s = segment_at(table, i);
        if (s->lock == 0)
            continue;
        recover(table, s);
        rk_unlock(table, &s->lock);
    }
}

void rk_end_allowances(rk_table *table)
{
    for (uint32_t i = 0; i < table->format.segments; i++) {
        segment *s = segment_at(table, i);
        if (s->filled == 0) /* avoids touching pages that were never used */
            continue;
        for (uint32_t slot = 0; slot < table->slots; slot++)
            if (tags_of(s)[slot] != 0 && units_of(record_at(table, s, slot)).left > 0)
                record_at(table, s, slot)->until_ns = 0;
        s->due_ns = s->pending_ns = 0;
    }
}

static rk_status unlock(rk_table *table, segment *s)
{
    rk_unlock(table, &s->lock);
    return rk_settled(table, RK_OK);
}

/* ---- spending ---- */

static void describe(const record *r, const rk_allowance_gate *gate, int64_t now_ns, int64_t left,
                     int64_t retry_after_ns, bool charged, rk_decision *decision)
{
    int64_t whole_ns = rk_max(RK_NOW_NS_MIN, rk_min(r->whole_ns, WHOLE_NS_MAX));
    int64_t decided_ns = now_ns + offset_of(r->offset_ns);
    *decision = (rk_decision){
        .allowed = retry_after_ns == 0,
        .speaker = r->place < gate->limits ? r->place : 0,
        .remaining = r->elsewhere + left,
        .retry_after_ns = retry_after_ns,
        .reset_after_ns = rk_max(whole_ns - now_ns, retry_after_ns),
        .decided_ns = decided_ns,
        .charged_ns = !charged       ? RK_NO_TIME
                      : gate->leased ? r->charged_store_ns
                                     : decided_ns,
    };
}

static void spend_units(const rk_table *table, segment *s, record *r, units has, int64_t cost,
                        int64_t now_ns)
{
    if (!r->leased && cost > 0) {
        if (has.pending == 0) {
            r->first_ns = now_ns;
            s->pending_ns = rk_min(s->pending_ns, now_ns);
            mark(table, s, r);
        }
        r->last_ns = now_ns;
        has.pending += cost;
    }
    has.left -= cost;
    set_units(r, has);
}

rk_status rk_spend(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                   int64_t now_ns, int64_t cost, bool note_miss, bool *decided,
                   rk_decision *decision)
{
    *decided = false;
    if (cost > gate->capacity)
        return RK_OK; /* the authority raises an error for it, or knows of a grant */
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    if (status != RK_OK)
        return status;
    record *r = find(table, s, gate->number, subject);
    if (r == NULL)
        return unlock(table, s);
    units has = units_of(r);
    int64_t denied_ns = time_of(r->denied_until_ns) - now_ns;
    bool is_denied = denied_ns > 0 && denied_ns <= DENIED_NS_MAX && cost >= r->denied_cost;
    bool has_units = cost <= has.left && is_live(r, cost, now_ns);
    bool spends = has_units && (r->leased || !is_denied);
    *decided = spends || is_denied;
    if (*decided || note_miss)
        note_demand(r, cost, now_ns, gate->lifetime_ns);
    if (spends) {
        spend_units(table, s, r, has, cost, now_ns);
        describe(r, gate, now_ns, has.left - cost, 0, cost > 0, decision);
    } else if (is_denied) {
        describe(r, gate, now_ns, has.left, denied_ns, false, decision);
    }
    return unlock(table, s);
}

static bool put_back(record *r, int64_t now_ns, int64_t count, int64_t charged_store_ns)
{
    units has = units_of(r);
    if (r->leased) {
        bool is_here = charged_store_ns == r->charged_store_ns && is_live(r, count, now_ns);
        if (!is_here || has.left + count > r->lease_units)
            return false;
    } else {
        if (count > has.pending ||
            charged_store_ns < time_of(r->first_ns) + offset_of(r->offset_ns))
            return false;
        has.pending -= count;
    }
    has.left += count;
    set_units(r, has);
    return true;
}

rk_status rk_unspend(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                     int64_t now_ns, int64_t count, int64_t charged_store_ns, bool *done)
{
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    *done = false;
    if (status != RK_OK)
        return status;
    record *r = find(table, s, gate->number, subject);
    if (r != NULL && r->leased) { /* a lease that was spent and claimed may have lost its mark */
        s->due_ns = rk_min(s->due_ns, r->until_ns);
        mark(table, s, r);
    }
    *done = r != NULL && put_back(r, now_ns, count, charged_store_ns);
    return unlock(table, s);
}

rk_status rk_look_at(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                     int64_t now_ns, rk_look *look)
{
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    *look = (rk_look){.demand = 0};
    if (status != RK_OK)
        return status;
    const record *r = find(table, s, gate->number, subject);
    if (r != NULL) {
        units has = units_of(r);
        look->demand = bounded(rk_max(r->seen, r->seen_before));
        look->held = !r->leased ? -has.pending - has.claimed : is_live(r, 1, now_ns) ? has.left : 0;
    }
    return unlock(table, s);
}

/* ---- answers of the authority ---- */

static int64_t later(int64_t now_ns, int64_t ns)
{
    return time_of(now_ns + rk_max(RK_NOW_NS_MIN, rk_min(ns, RK_NOW_NS_MAX)));
}

/* Replace the units of a record by those of the answer, and return the old ones of a lease. In
 * between there are none to spend, so that none are ever spent after their end. */
static void put_units(const rk_table *table, segment *s, record *r, const rk_answer *answer,
                      int64_t now_ns, rk_returned *returned)
{
    units has = units_of(r);
    int64_t given = bounded(answer->units), beside = given;
    if (r->leased && given == 0)
        return;
    if (r->leased)
        *returned = (rk_returned){.units = has.left, .ends_store_ns = r->ends_store_ns};
    has.left = 0;
    set_units(r, has);
    int64_t longest_ns = r->leased ? LEASE_NS_MAX : given > 0 ? BUDGET_NS_MAX : INT64_MAX;
    r->until_ns = later(now_ns, rk_min(answer->lasts_ns, longest_ns));
    if (r->leased) {
        r->lease_units = (uint32_t)given;
        r->ends_store_ns = answer->ends_store_ns;
        r->charged_store_ns = answer->charged_store_ns;
        s->due_ns = rk_min(s->due_ns, r->until_ns);
        mark(table, s, r);
        has.left = given;
    } else {
        has.left = rk_max(given - has.pending - has.claimed, 0);
        beside = has.left + has.pending + has.claimed;
    }
    r->elsewhere = (uint32_t)rk_max((int64_t)r->elsewhere - beside, 0);
    set_units(r, has);
}

static void put_answer(const rk_table *table, segment *s, record *r, const rk_answer *answer,
                       int64_t now_ns, rk_returned *returned)
{
    if (r->seen == 0 && r->seen_before == 0 && r->cost == 0)
        r->cost = (uint32_t)bounded(answer->cost);
    r->place = (uint8_t)answer->place;
    r->whole_ns = rk_min(now_ns + rk_max(0, rk_min(answer->reset_after_ns, WHOLE_NS_MAX - now_ns)),
                         WHOLE_NS_MAX);
    r->offset_ns = offset_of(time_of(answer->decided_store_ns) - now_ns);
    r->elsewhere = (uint32_t)rk_max(0, rk_min(answer->remaining, UINT32_MAX));
    if (answer->allowed || !r->leased)
        put_units(table, s, r, answer, now_ns, returned);
    if (answer->allowed && answer->cost >= r->denied_cost)
        r->denied_until_ns = 0;
    if (answer->denied_ns > 0)
        deny(r, answer->cost, later(now_ns, rk_min(answer->denied_ns, DENIED_NS_MAX)));
}

rk_status rk_put(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                 int64_t now_ns, const rk_answer *answer, rk_returned *returned)
{
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    *returned = (rk_returned){.units = 0};
    if (status != RK_OK)
        return status;
    record *r = find_or_add(table, s, gate, subject, now_ns);
    if (r != NULL)
        put_answer(table, s, r, answer, now_ns, returned);
    else if (gate->leased)
        *returned = (rk_returned){.units = answer->units, .ends_store_ns = answer->ends_store_ns};
    return unlock(table, s);
}

rk_status rk_deny(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                  int64_t now_ns, int64_t cost, int64_t lasts_ns)
{
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    if (status != RK_OK)
        return status;
    record *r = find_or_add(table, s, gate, subject, now_ns);
    if (r != NULL && lasts_ns > 0)
        deny(r, cost, later(now_ns, rk_min(lasts_ns, DENIED_NS_MAX)));
    return unlock(table, s);
}

rk_status rk_stop(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                  rk_returned *returned)
{
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    *returned = (rk_returned){.units = 0};
    if (status != RK_OK)
        return status;
    record *r = find(table, s, gate->number, subject);
    if (r != NULL) {
        units has = units_of(r);
        if (r->leased)
            *returned = (rk_returned){.units = has.left, .ends_store_ns = r->ends_store_ns};
        has.left = 0;
        set_units(r, has);
        r->denied_until_ns = r->until_ns = 0;
    }
    return unlock(table, s);
}

/* ---- claims ---- */

static bool can_report(const rk_claiming *claiming, uint64_t number)
{
    size_t from = 0, to = claiming->numbers_count;
    while (from < to) {
        size_t middle = from + (to - from) / 2;
        if (claiming->numbers[middle] == number)
            return true;
        if (claiming->numbers[middle] < number)
            from = middle + 1;
        else
            to = middle;
    }
    return false;
}

/* Return the units of a record that are due now, and take them. */
static int64_t take_due(record *r, units has, const rk_claiming *claiming)
{
    int64_t now_ns = claiming->now_ns;
    if (r->leased) {
        if (!claiming->ending && now_ns < r->until_ns)
            return 0;
        set_units(r, (units){.left = 0});
        return has.left;
    }
    int64_t claimed_at_ns = time_of(r->claimed_at_ns);
    if (has.claimed > 0) {
        if (!claiming->ending && now_ns < claimed_at_ns + CLAIM_NS)
            return 0;
        r->claimed_at_ns = rk_max(now_ns, claimed_at_ns + 1);
        return has.claimed;
    }
    int64_t first_ns = time_of(r->first_ns), last_ns = time_of(r->last_ns);
    if (!claiming->ending && now_ns - first_ns < claiming->flush_ns)
        return 0;
    /* Without claimed units, these two mean nothing until the units are written. */
    r->claimed_spent_ns = first_ns + ((last_ns - first_ns) >> 1);
    r->claimed_at_ns = rk_max(now_ns, claimed_at_ns + 1);
    set_units(r, (units){.left = has.left, .claimed = has.pending});
    return has.pending;
}

static void fill_claim(const record *r, int64_t count, int64_t now_ns, rk_claim *claim)
{
    uint8_t length = r->length;
    *claim = (rk_claim){
        .number = r->gate,
        .units = count,
        .leased = r->leased,
        .ends_store_ns = r->leased ? r->ends_store_ns : 0,
        .age_ns = r->leased ? 0 : rk_max(now_ns - time_of(r->claimed_spent_ns), 0),
        .token = r->leased ? 0 : r->claimed_at_ns,
        .length = length < RK_SUBJECT_BYTES_MAX ? length : RK_SUBJECT_BYTES_MAX,
    };
    memcpy(claim->subject, r->subject, claim->length);
}

typedef struct {
    int64_t due_ns, pending_ns;
} earliest;

/* Claim the due units of one record. Return true if the record still has units to claim later. */
static bool visit(record *r, const rk_claiming *claiming, rk_claim *claims, size_t *count,
                  earliest *next)
{
    units has = units_of(r);
    if (r->leased ? has.left == 0 : has.pending + has.claimed == 0)
        return false;
    if (can_report(claiming, r->gate)) {
        int64_t due = take_due(r, has, claiming);
        if (due > 0)
            fill_claim(r, due, claiming->now_ns, &claims[(*count)++]);
        has = units_of(r);
    }
    if (r->leased) {
        next->due_ns = rk_min(next->due_ns, r->until_ns);
        return has.left > 0;
    }
    if (has.claimed > 0)
        next->due_ns = rk_min(next->due_ns, time_of(r->claimed_at_ns) + CLAIM_NS);
    if (has.pending > 0)
        next->pending_ns = rk_min(next->pending_ns, time_of(r->first_ns));
    return true;
}

/* Claim the due units of a segment. Return false if there was no room for all of them. */
static bool visit_marked(const rk_table *table, segment *s, const rk_claiming *claiming,
                         rk_claim *claims, size_t most, size_t *count)
{
    earliest next = {.due_ns = INT64_MAX, .pending_ns = INT64_MAX};
    for (uint32_t word = 0; word * 64 < table->slots; word++)
        for (uint64_t bits = s->marks[word]; bits != 0; bits &= bits - 1) {
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(bits);
            if (*count == most)
                return false;
            if (slot >= table->slots || tags_of(s)[slot] == 0 ||
                !visit(record_at(table, s, slot), claiming, claims, count, &next))
                s->marks[word] &= ~(bits & -bits);
        }
    s->due_ns = next.due_ns;
    s->pending_ns = next.pending_ns;
    return true;
}

/* Read without the lock: a segment that has just become due is visited the next time. */
static bool has_due(const segment *s, const rk_claiming *claiming)
{
    int64_t pending_ns = *(const volatile int64_t *)&s->pending_ns;
    int64_t due_ns = *(const volatile int64_t *)&s->due_ns;
    return s->filled > 0 && (claiming->ending || claiming->now_ns >= due_ns ||
                             claiming->now_ns - time_of(pending_ns) >= claiming->flush_ns);
}

rk_status rk_claim_units(rk_table *table, const rk_claiming *claiming, rk_claim *claims,
                         size_t most, size_t *count)
{
    *count = 0;
    for (uint32_t i = 0; i < table->format.segments && *count < most; i++) {
        segment *s = segment_at(table, table->sweep_next % table->format.segments);
        if (has_due(s, claiming)) {
            rk_status status = lock_waiting(table, s, CLAIM_WAIT_NS);
            if (status == RK_OK) {
                bool whole = visit_marked(table, s, claiming, claims, most, count);
                rk_unlock(table, &s->lock);
                if (!whole) /* the next call continues here */
                    break;
            } else if (status != RK_BUSY) {
                return *count > 0 ? RK_OK : status; /* those that were claimed are reported */
            }
        }
        table->sweep_next++;
    }
    return rk_settled(table, RK_OK);
}

rk_status rk_claim_pending(rk_table *table, const rk_allowance_gate *gate,
                           const rk_subject *subject, int64_t now_ns, rk_claim *claim)
{
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    *claim = (rk_claim){.units = 0};
    if (status != RK_OK)
        return status;
    record *r = find(table, s, gate->number, subject);
    if (r != NULL && !r->leased) {
        units has = units_of(r);
        rk_claiming claiming = {.now_ns = now_ns, .flush_ns = INT64_MIN}; /* all are due */
        mark(table, s, r);
        s->due_ns = rk_min(s->due_ns, now_ns + CLAIM_NS);
        int64_t due = has.pending + has.claimed > 0 ? take_due(r, has, &claiming) : 0;
        if (due > 0)
            fill_claim(r, due, now_ns, claim);
    }
    return unlock(table, s);
}

rk_status rk_confirm(rk_table *table, uint64_t number, const rk_subject *subject, int64_t token)
{
    segment *s = segment_of(table, subject->hash);
    rk_status status = rk_lock_try(table, &s->lock);
    if (status != RK_OK)
        return status;
    record *r = find(table, s, number, subject);
    if (r != NULL && !r->leased && r->claimed_at_ns == token) {
        units has = units_of(r);
        has.claimed = 0;
        set_units(r, has);
    }
    return unlock(table, s);
}

/* Records with units are always marked. So a million idle ones are not touched. */
static void sum_marked(const rk_table *table, segment *s, rk_allowance_stats *stats)
{
    for (uint32_t word = 0; word * 64 < table->slots; word++)
        for (uint64_t bits = s->marks[word]; bits != 0; bits &= bits - 1) {
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(bits);
            if (slot >= table->slots || tags_of(s)[slot] == 0)
                continue;
            const record *r = record_at(table, s, slot);
            units has = units_of(r);
            stats->leased_units += r->leased ? (uint64_t)has.left : 0;
            stats->pending_units += (uint64_t)(has.pending + has.claimed);
        }
}

rk_status rk_read_allowance_stats(rk_table *table, rk_allowance_stats *stats)
{
    *stats = (rk_allowance_stats){
        .held_max = (uint64_t)table->format.segments * table->format.segment_limit,
    };
    for (uint32_t i = 0; i < table->format.segments; i++) {
        segment *s = segment_at(table, i);
        stats->refused += s->refused;
        stats->repaired += s->repaired;
        if (s->filled == 0) /* avoids touching pages that were never used */
            continue;
        rk_status status = lock_waiting(table, s, LOCK_WAIT_NS);
        if (status != RK_OK)
            return status;
        stats->held += s->filled;
        sum_marked(table, s, stats);
        rk_unlock(table, &s->lock);
    }
    return rk_settled(table, RK_OK);
}
