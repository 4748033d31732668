#include "algorithms.h"

#include "numbers.h"

/* For a copy without debt, which is the usual case. */
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define RARE __attribute__((noinline))

/* As in the reference: spent units round up and free units round down, so rounding never admits a
 * request. Waiting times round up, so waiting always suffices. */

static int64_t whole_steps(const rk_limit *limit, int64_t elapsed_ns)
{
    return limit->step_ns > 1 ? elapsed_ns - elapsed_ns % limit->step_ns : elapsed_ns;
}

/* As whole_steps, rounded up. The sum of a century and a window fits. */
static int64_t started_steps(const rk_limit *limit, int64_t elapsed_ns)
{
    return limit->step_ns > 1 ? whole_steps(limit, elapsed_ns + limit->step_ns - 1) : elapsed_ns;
}

static int64_t drained(const rk_limit *limit, int64_t elapsed_ns)
{
    return rk_mul_div_floor(elapsed_ns, limit->numerator, limit->denominator);
}

static int64_t time_to_drain(const rk_limit *limit, int64_t micros)
{
    return started_steps(limit, rk_mul_div_ceil(micros, limit->denominator, limit->numerator));
}

/* Only a log has a ring. */
static ALWAYS_INLINE void copy_state(const rk_limit *limit, const rk_state *from, rk_state *to)
{
    to->present = from->present;
    to->last_ns = from->last_ns;
    to->value = from->value;
    to->debt = from->debt;
    if (limit->algorithm == RK_SLIDING_WINDOW_LOG) {
        to->ring = from->ring;
    } else if (limit->algorithm == RK_IN_FLIGHT) {
        to->ring = from->ring;
        to->stamp = from->stamp;
        to->ends_ns = from->ends_ns;
        to->earlier = from->earlier;
    }
}

/* ---- debt; see debt.py ---- */

static int64_t debt_micros(const rk_limit *limit, const rk_state *state)
{
    return state->debt > 0 ? rk_min(state->debt, limit->debt_max * RK_MICROS_PER_UNIT) : 0;
}

static int64_t debt_units(const rk_limit *limit, const rk_state *state)
{
    return state->debt > 0 ? rk_min(state->debt, limit->debt_max) : 0;
}

/* Carry debt over so many edges. Room that a raised limit or a refund has made takes debt at once.
 */
static void carry(const rk_limit *limit, int64_t *count, int64_t *debt, int64_t windows)
{
    int64_t charged = rk_min(*debt, rk_max(limit->limit - *count, 0));
    *count += charged;
    *debt -= charged;
    if (windows == 0)
        return;
    /* A debt lasts for less than a billion windows; more would overflow. */
    *debt = rk_max(*debt - (rk_min(windows, RK_UNITS_MAX) - 1) * limit->limit, 0);
    *count = rk_min(*debt, limit->limit);
    *debt -= *count;
}

/* After how many edges a full window that owes has room for the cost. */
static int64_t windows_until_room(const rk_limit *limit, int64_t debt, int64_t cost)
{
    return rk_max((debt + cost + limit->limit - 1) / limit->limit, 1);
}

/* Return units to the debt first, and then to the count. */
static void refund_units(int64_t *count, int64_t *debt, int64_t units)
{
    *count = rk_max(*count - rk_max(units - *debt, 0), 0);
    *debt = rk_max(*debt - units, 0);
}

int64_t rk_owed_at(const rk_ring *ring, uint32_t index)
{
    if (index < ring->stored)
        return rk_stored_at(ring, index);
    /* The limit was raised: debt has entered the log with its last entry. */
    int64_t limit = ring->owing->limit, entries = rk_max(limit, ring->stored);
    if (index < entries)
        return rk_stored_at(ring, ring->stored - 1);
    int64_t again = index - entries;
    int64_t first = rk_min(entries - limit + again % limit, ring->stored - 1);
    return rk_stored_at(ring, (uint32_t)first) + (1 + again / limit) * ring->owing->window_ns;
}

const rk_ring *rk_extended(const rk_limit *limit, const rk_state *before, rk_state *state)
{
    rk_ring *ring = &state->ring;
    copy_state(limit, before, state);
    int64_t debt = debt_units(limit, before);
    if (debt == 0 || !before->present)
        return ring;
    ring->owing = limit;
    ring->stored = ring->count;
    ring->skipped = 0;
    ring->count += (uint32_t)debt;
    state->debt = 0;
    return ring;
}

/* `owed` are micro-units. */
static ALWAYS_INLINE void decide_bucket(const rk_limit *limit, const rk_state *before, int64_t owed,
                                        int64_t now_ns, int64_t cost, rk_outcome *outcome,
                                        rk_state *after)
{
    int64_t capacity = limit->capacity * RK_MICROS_PER_UNIT;
    int64_t cost_micros = cost * RK_MICROS_PER_UNIT;
    int64_t last_ns = now_ns, used = 0, used_now = 0, elapsed_ns = 0;
    if (before->present) {
        last_ns = before->last_ns;
        used = rk_min((int64_t)before->value, capacity) + owed;
        elapsed_ns = now_ns > last_ns ? whole_steps(limit, now_ns - last_ns) : 0;
        used_now = elapsed_ns > 0 ? rk_max(used - drained(limit, elapsed_ns), 0) : used;
    }
    int64_t free = capacity - used_now - cost_micros;
    if (free < 0 && (owed == 0 || cost > 0)) {
        int64_t excess = used + cost_micros - capacity;
        outcome->allowed = false;
        free += cost_micros;
        outcome->remaining = (owed == 0 ? free : rk_max(free, 0)) / RK_MICROS_PER_UNIT;
        outcome->retry_after_ns = last_ns + time_to_drain(limit, excess) - now_ns;
        outcome->reset_after_ns = last_ns + time_to_drain(limit, used) - now_ns;
        return;
    }
    if (limit->algorithm == RK_LEAKY_BUCKET && used_now > 0)
        outcome->delay_ns = last_ns + time_to_drain(limit, used) - now_ns;
    if (cost > 0) {
        outcome->charged_ns = rk_max(last_ns, now_ns);
        last_ns = used_now > 0 ? last_ns + elapsed_ns : outcome->charged_ns;
        used = used_now + cost_micros;
        after->present = true;
        after->last_ns = last_ns;
        after->value = (uint64_t)used;
    }
    outcome->allowed = true;
    outcome->remaining = (owed == 0 ? free : rk_max(free, 0)) / RK_MICROS_PER_UNIT;
    if (used_now > 0 || cost > 0)
        outcome->reset_after_ns = last_ns + time_to_drain(limit, used) - now_ns;
}

static ALWAYS_INLINE void decide_fixed_window(const rk_limit *limit, const rk_state *before,
                                              int64_t now_ns, int64_t cost, rk_outcome *outcome,
                                              rk_state *after)
{
    int64_t at_ns = before->present ? rk_max(now_ns, before->last_ns) : now_ns;
    int64_t start_ns = at_ns - rk_floor_mod(at_ns, limit->window_ns);
    int64_t count = before->present && before->last_ns >= start_ns ? (int64_t)before->value : 0;
    int64_t window_left_ns = start_ns + limit->window_ns - now_ns;
    outcome->allowed = cost == 0 || count + cost <= limit->limit;
    if (outcome->allowed && cost > 0) {
        count += cost;
        after->present = true;
        after->last_ns = at_ns;
        after->value = (uint64_t)count;
        outcome->charged_ns = at_ns;
    }
    outcome->remaining = rk_max(limit->limit - count, 0);
    outcome->retry_after_ns = outcome->allowed ? 0 : window_left_ns;
    outcome->reset_after_ns = count > 0 ? window_left_ns : 0;
}

typedef struct {
    int64_t at_ns, start_ns, previous, current;
} counters;

static counters rolled(const rk_limit *limit, const rk_state *before, int64_t now_ns)
{
    counters now = {.at_ns = before->present ? rk_max(now_ns, before->last_ns) : now_ns};
    now.start_ns = now.at_ns - rk_floor_mod(now.at_ns, limit->window_ns);
    if (!before->present)
        return now;
    if (before->last_ns >= now.start_ns) {
        now.previous = (int64_t)(before->value >> 32);
        now.current = (int64_t)(before->value & UINT32_MAX);
    } else if (before->last_ns >= now.start_ns - limit->window_ns) {
        now.previous = (int64_t)(before->value & UINT32_MAX);
    }
    return now;
}

static ALWAYS_INLINE void decide_counter(const rk_limit *limit, const rk_state *before,
                                         int64_t now_ns, int64_t cost, rk_outcome *outcome,
                                         rk_state *after)
{
    int64_t window_ns = limit->window_ns;
    counters c = rolled(limit, before, now_ns);
    int64_t left_ns = c.start_ns + window_ns - c.at_ns;
    int64_t faded = c.previous ? rk_mul_div_ceil(c.previous, left_ns, window_ns) : 0;
    int64_t room = limit->limit - c.current - faded;
    outcome->allowed = cost == 0 || cost <= room;
    if (outcome->allowed) {
        if (cost > 0) {
            c.current += cost;
            after->present = true;
            after->last_ns = c.at_ns;
            after->value = (uint64_t)c.previous << 32 | (uint64_t)c.current;
            outcome->charged_ns = c.at_ns;
        }
        outcome->remaining = rk_max(room - cost, 0);
    } else {
        int64_t need = limit->limit - c.current - cost;
        int64_t fits_ns;
        if (need >= 0)
            fits_ns = c.start_ns + window_ns - rk_mul_div_floor(need, window_ns, c.previous);
        else
            fits_ns = c.start_ns + 2 * window_ns -
                      rk_mul_div_floor(limit->limit - cost, window_ns, c.current);
        outcome->remaining = rk_max(room, 0);
        outcome->retry_after_ns = fits_ns - now_ns;
    }
    if (c.current > 0)
        outcome->reset_after_ns = c.start_ns + 2 * window_ns - now_ns;
    else if (c.previous > 0)
        outcome->reset_after_ns = c.start_ns + window_ns - now_ns;
}

/* As rk_ring_at, without a test whether the log owes. */
static ALWAYS_INLINE int64_t entry_at(const rk_ring *ring, uint32_t index, bool owing)
{
    if (owing)
        return rk_ring_at(ring, index);
    return index < ring->count - ring->pending ? rk_stored_at(ring, index) : ring->pending_ns;
}

/* The index of the first entry later than `time`: the entries before it have left the window. */
static ALWAYS_INLINE uint32_t first_after(const rk_ring *ring, int64_t time, bool owing)
{
    uint32_t low = 0, high = ring->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (entry_at(ring, middle, owing) <= time)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The last entry of which the time has come: debt enters the log later. */
static int64_t last_entry(const rk_ring *ring)
{
    if (ring->owing != NULL && ring->pending == 0)
        return rk_stored_at(ring, ring->stored - 1);
    return rk_ring_at(ring, ring->count - 1);
}

static ALWAYS_INLINE void decide_log(const rk_limit *limit, const rk_state *before, bool owing,
                                     int64_t now_ns, int64_t cost, rk_outcome *outcome,
                                     rk_state *after)
{
    const rk_ring *ring = &before->ring;
    uint32_t count = before->present ? ring->count : 0;
    int64_t at_ns = now_ns, remaining = limit->limit;
    uint32_t gone = 0;
    if (count > 0) {
        int64_t last_ns = entry_at(ring, count - 1, owing);
        at_ns = rk_max(now_ns, owing ? last_entry(ring) : last_ns);
        gone = first_after(ring, at_ns - limit->window_ns, owing);
        remaining -= count - gone;
        if (gone < count)
            outcome->reset_after_ns = rk_max(last_ns + limit->window_ns - now_ns, 0);
    }
    outcome->allowed = cost == 0 || cost <= remaining;
    outcome->remaining = rk_max(remaining, 0);
    if (!outcome->allowed) {
        uint32_t blocking = (uint32_t)(count - limit->limit + cost - 1);
        /* Positive, unless the file is damaged and the times are not in order. */
        outcome->retry_after_ns =
            rk_max(entry_at(ring, blocking, owing) + limit->window_ns - now_ns, 1);
    } else if (cost > 0) {
        outcome->remaining = remaining - cost;
        outcome->reset_after_ns = at_ns + limit->window_ns - now_ns;
        outcome->charged_ns = at_ns;
        after->present = true;
        after->last_ns = at_ns;
        if (owing && ring->owing != NULL) { /* not if its bound is 0 */
            after->ring = *ring;
            after->ring.skipped += gone;
        } else if (ring->capacity > 0) {
            after->ring.head = (ring->head + gone) % ring->capacity;
        }
        after->ring.count = count - gone + (uint32_t)cost;
    }
}

/* ---- requests in flight; see in_flight.py ---- */

static const int64_t RETRY_MIN_NS = 10000000;

rk_slot rk_slot_at(const rk_ring *ring, uint32_t index)
{
    rk_slot slot = {.stamp = ring->times[2 * index], .ends_ns = ring->times[2 * index + 1]};
    if (slot.ends_ns > ring->latest_ns) /* only damage explains it */
        slot.ends_ns = 0;
    return slot;
}

static void note_slot(rk_slots *found, rk_slot slot, int64_t stamp)
{
    if (slot.ends_ns <= found->at_ns)
        return;
    if (slot.stamp == stamp)
        found->own_ns = slot.ends_ns;
    found->first_ns = found->used > 0 ? rk_min(found->first_ns, slot.ends_ns) : slot.ends_ns;
    found->last_ns = rk_max(found->last_ns, slot.ends_ns);
    found->used++;
}

/* Whether a later charge of the call has renewed a slot, or taken it again. */
static bool replaced(const rk_state *newest, const rk_state *until, int64_t stamp)
{
    for (const rk_state *each = newest; each != until; each = each->earlier)
        if (each->stamp == stamp)
            return true;
    return false;
}

rk_slots rk_find_slots(const rk_state *state, int64_t now_ns, int64_t stamp)
{
    rk_slots found = {.at_ns = now_ns};
    if (!state->present)
        return found;
    found.at_ns = rk_max(now_ns, state->last_ns);
    const rk_state *newest = state->stamp ? state : NULL;
    for (const rk_state *each = newest; each != NULL; each = each->earlier)
        if (!replaced(newest, each, each->stamp))
            note_slot(&found, (rk_slot){.stamp = each->stamp, .ends_ns = each->ends_ns}, stamp);
    for (uint32_t i = 0; i < state->ring.count / 2; i++) {
        rk_slot slot = rk_slot_at(&state->ring, i);
        if (newest == NULL || !replaced(newest, NULL, slot.stamp))
            note_slot(&found, slot, stamp);
    }
    return found;
}

static RARE void decide_in_flight(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                                  int64_t cost, rk_outcome *outcome, rk_state *after)
{
    rk_slots found = rk_find_slots(before, now_ns, limit->stamp);
    int64_t room = rk_max(limit->limit - found.used, 0), at_ns = found.at_ns;
    bool taken = found.own_ns > 0;
    outcome->allowed = cost == 0 || room > 0 || taken;
    outcome->remaining = room;
    outcome->reset_after_ns = found.used > 0 ? found.last_ns - now_ns : 0;
    if (cost == 0)
        return;
    if (!outcome->allowed) {
        int64_t guess_ns = at_ns + rk_max(at_ns - before->last_ns, RETRY_MIN_NS);
        outcome->retry_after_ns = rk_min(guess_ns, found.first_ns) - now_ns;
        return;
    }
    outcome->remaining = rk_max(room - !taken, 0);
    if (limit->stamp == 0)
        return;
    outcome->charged_ns = at_ns;
    outcome->reset_after_ns = rk_max(found.last_ns, at_ns + limit->window_ns) - now_ns;
    after->stamp = limit->stamp;
    after->ends_ns = rk_max(found.own_ns, at_ns + limit->window_ns);
    after->earlier = NULL; /* rk_check_all links it to an earlier charge */
    if (!taken || !before->present)
        after->last_ns = at_ns;
    after->present = true;
}

static int64_t window_start(const rk_limit *limit, int64_t time_ns)
{
    return time_ns - rk_floor_mod(time_ns, limit->window_ns);
}

/* The state of a window that owes, with its debt carried over the edges until now. */
static rk_state carried(const rk_limit *limit, const rk_state *before, int64_t now_ns)
{
    rk_state now;
    copy_state(limit, before, &now);
    now.last_ns = rk_max(now_ns, before->last_ns);
    now.debt = debt_units(limit, before);
    int64_t windows = (window_start(limit, now.last_ns) - window_start(limit, before->last_ns)) /
                      limit->window_ns;
    int64_t count = (int64_t)before->value;
    if (limit->algorithm == RK_FIXED_WINDOW) {
        carry(limit, &count, &now.debt, windows);
        now.value = (uint64_t)count;
        return now;
    }
    uint64_t previous = before->value >> 32;
    count &= UINT32_MAX;
    carry(limit, &count, &now.debt, rk_max(windows - 1, 0));
    if (windows > 0) {
        previous = (uint64_t)count;
        carry(limit, &count, &now.debt, 1);
    }
    now.value = previous << 32 | (uint64_t)count;
    return now;
}

/* The outcome of a window that is full and has debt left. */
static void decide_owing_window(const rk_limit *limit, const rk_state *state, int64_t now_ns,
                                int64_t cost, rk_outcome *outcome)
{
    bool counter = limit->algorithm == RK_SLIDING_WINDOW_COUNTER;
    int64_t window_ns = limit->window_ns;
    int64_t start_ns = window_start(limit, state->last_ns) - now_ns;
    int64_t whole = windows_until_room(limit, state->debt, 0) + (counter ? 2 : 1);
    int64_t waits = windows_until_room(limit, state->debt, cost);
    outcome->allowed = cost == 0;
    outcome->reset_after_ns = start_ns + whole * window_ns;
    if (cost > 0)
        outcome->retry_after_ns = start_ns + waits * window_ns;
    if (cost == 0 || !counter)
        return;
    /* The cost fits in the first window in which it fits beside the debt, once the window before
     * has faded. */
    int64_t debt = state->debt, current = (int64_t)(state->value & UINT32_MAX);
    carry(limit, &current, &debt, waits - 1);
    int64_t faded = current;
    carry(limit, &current, &debt, 1);
    int64_t need = limit->limit - current - cost;
    outcome->retry_after_ns += window_ns - rk_mul_div_floor(need, window_ns, faded);
}

static ALWAYS_INLINE void decide(const rk_limit *limit, const rk_state *before, int64_t owed,
                                 bool owing, int64_t now_ns, int64_t cost, rk_outcome *outcome,
                                 rk_state *after)
{
    switch (limit->algorithm) {
    case RK_TOKEN_BUCKET:
    case RK_LEAKY_BUCKET:
        decide_bucket(limit, before, owed, now_ns, cost, outcome, after);
        break;
    case RK_FIXED_WINDOW:
        decide_fixed_window(limit, before, now_ns, cost, outcome, after);
        break;
    case RK_SLIDING_WINDOW_COUNTER:
        decide_counter(limit, before, now_ns, cost, outcome, after);
        break;
    case RK_SLIDING_WINDOW_LOG:
        decide_log(limit, before, owing, now_ns, cost, outcome, after);
        break;
    case RK_IN_FLIGHT:
        decide_in_flight(limit, before, now_ns, cost, outcome, after);
        break;
    }
}

static RARE void decide_owing(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                              int64_t cost, rk_outcome *outcome, rk_state *after)
{
    rk_state now;
    copy_state(limit, before, &now);
    int64_t owed = 0;
    if (limit->algorithm == RK_SLIDING_WINDOW_LOG) {
        rk_extended(limit, before, &now);
    } else if (limit->algorithm <= RK_LEAKY_BUCKET) {
        owed = debt_micros(limit, before);
    } else {
        now = carried(limit, before, now_ns);
        if (now.debt > 0) {
            decide_owing_window(limit, &now, now_ns, cost, outcome);
            return;
        }
    }
    decide(limit, &now, owed, true, now_ns, cost, outcome, after);
    if (outcome->charged_ns != RK_NO_TIME)
        after->debt = 0;
}

bool rk_decide(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t cost,
               rk_outcome *outcome, rk_state *after)
{
    *outcome = (rk_outcome){.allowed = false, .charged_ns = RK_NO_TIME};
    copy_state(limit, before, after);
    if (cost > limit->capacity && limit->algorithm != RK_IN_FLIGHT)
        return false;
    bool owing = before->debt > 0;
    if (limit->algorithm == RK_SLIDING_WINDOW_LOG) /* or another charge of the call has paid it */
        owing = owing || before->ring.owing != NULL;
    if (__builtin_expect(owing, 0))
        decide_owing(limit, before, now_ns, cost, outcome, after);
    else
        decide(limit, before, 0, false, now_ns, cost, outcome, after);
    return true;
}

static void refund_bucket(const rk_limit *limit, const rk_state *before, int64_t units,
                          int64_t charged_ns, rk_state *after)
{
    int64_t capacity = limit->capacity * RK_MICROS_PER_UNIT;
    int64_t debt = debt_micros(limit, before);
    int64_t micros = (debt > 0 ? units : rk_min(units, limit->capacity)) * RK_MICROS_PER_UNIT;
    if (charged_ns != RK_NO_TIME && charged_ns < before->last_ns) {
        /* Steps round up: the bucket may have made one that began before the charge. Micro-units
         * round down, as in each refill that the bucket has made since. */
        int64_t elapsed_ns = started_steps(limit, before->last_ns - charged_ns);
        micros -= rk_mul_div_floor(elapsed_ns, limit->numerator, limit->denominator);
        if (micros <= 0)
            return;
    }
    int64_t used = (int64_t)before->value;
    if (charged_ns == RK_NO_TIME) /* a correction gives room, also if the capacity was lowered */
        used = rk_min(used, capacity);
    refund_units(&used, &debt, micros);
    after->present = used > 0;
    after->value = (uint64_t)used;
    after->debt = debt;
}

static void refund_fixed_window(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                                int64_t units, int64_t charged_ns, rk_state *after)
{
    rk_state now;
    copy_state(limit, before, &now);
    if (before->debt > 0)
        now = carried(limit, before, charged_ns == RK_NO_TIME ? now_ns : before->last_ns);
    if (charged_ns == RK_NO_TIME)
        charged_ns = rk_max(now_ns, before->last_ns);
    if (window_start(limit, charged_ns) != window_start(limit, now.last_ns))
        return;
    int64_t count = (int64_t)now.value;
    refund_units(&count, &now.debt, units);
    copy_state(limit, &now, after);
    after->present = count > 0;
    after->value = (uint64_t)count;
}

static void refund_counter(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                           int64_t units, int64_t charged_ns, rk_state *after)
{
    rk_state now;
    copy_state(limit, before, &now);
    if (before->debt > 0)
        now = carried(limit, before, now_ns);
    counters c = rolled(limit, &now, now_ns);
    int64_t start_ns = charged_ns == RK_NO_TIME ? c.start_ns : window_start(limit, charged_ns);
    if (start_ns == c.start_ns)
        refund_units(&c.current, &now.debt, units);
    else if (start_ns == c.start_ns - limit->window_ns)
        c.previous = rk_max(c.previous - units, 0);
    else
        return;
    after->last_ns = c.at_ns;
    after->value = (uint64_t)c.previous << 32 | (uint64_t)c.current;
    after->present = after->value != 0;
    after->debt = now.debt;
}

/* The entries that a log that owes has at a time: from `first` up to `end`. Those after it are the
 * debt that has not entered the log. */
typedef struct {
    rk_state state;
    int64_t at_ns;
    uint32_t first, end;
} extended;

static extended extended_at(const rk_limit *limit, const rk_state *before, int64_t now_ns)
{
    extended e = {.at_ns = now_ns};
    const rk_ring *ring = rk_extended(limit, before, &e.state);
    if (!before->present)
        return e;
    e.at_ns = rk_max(now_ns, last_entry(ring));
    e.end = first_after(ring, e.at_ns, true);
    /* Never more than these, unless the file is damaged and the times are not in order. */
    int64_t most = rk_max(limit->limit, ring->owing != NULL ? ring->stored : ring->count);
    e.first = (uint32_t)rk_min(first_after(ring, e.at_ns - limit->window_ns, true), e.end);
    e.first = (uint32_t)rk_max(e.first, e.end - most);
    return e;
}

/* Add `units` of debt to the log as far as there is `room`, and write the ring anew. */
static rk_rewrite enter_debt(const rk_limit *limit, const extended *e, rk_rewrite rewrite,
                             int64_t room, int64_t units, rk_state *after)
{
    rewrite.needed = true;
    rewrite.added = (uint32_t)rk_min(rk_max(room, 0), units);
    after->ring.count = e->end - rewrite.first - rewrite.removed + rewrite.added;
    after->present = after->ring.count > 0;
    after->last_ns = e->at_ns;
    after->ring.latest_ns = rk_max(after->ring.latest_ns, e->at_ns);
    after->debt = rk_min(units - rewrite.added, limit->debt_max);
    return rewrite;
}

static rk_rewrite refund_owing_log(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                                   int64_t units, int64_t charged_ns, rk_state *after)
{
    extended e = extended_at(limit, before, now_ns);
    rk_rewrite rewrite = {.first = e.first};
    int64_t debt = e.state.ring.count - e.end;
    if (charged_ns != RK_NO_TIME && charged_ns < last_entry(&before->ring)) {
        uint32_t cut = first_after(&e.state.ring, charged_ns, true);
        cut = (uint32_t)rk_min(rk_max(cut, e.first), e.end);
        rewrite.removed = (uint32_t)rk_min(units, cut - e.first);
        rewrite.newer = e.end - cut;
        return enter_debt(limit, &e, rewrite, rewrite.removed, debt, after);
    }
    uint32_t removed = (uint32_t)rk_min(rk_max(units - debt, 0), e.end - e.first);
    if (charged_ns == RK_NO_TIME)
        rewrite.first += removed; /* the oldest entries of the window */
    else
        rewrite.removed = removed; /* the newest ones, which were charged last */
    return enter_debt(limit, &e, rewrite, 0, rk_max(debt - units, 0), after);
}

static rk_rewrite refund_log(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                             int64_t units, int64_t charged_ns, rk_state *after)
{
    const rk_ring *ring = &before->ring;
    if (before->debt > 0)
        return refund_owing_log(limit, before, now_ns, units, charged_ns, after);
    int64_t last_ns = rk_ring_at(ring, ring->count - 1);
    if (charged_ns == RK_NO_TIME) { /* the oldest entries of the window */
        uint32_t gone = first_after(ring, rk_max(now_ns, last_ns) - limit->window_ns, false);
        after->present = ring->count - gone > units;
        gone = after->present ? gone + (uint32_t)units : ring->count;
        after->ring.head = (ring->head + gone) % ring->capacity;
        after->ring.count = ring->count - gone;
        return (rk_rewrite){.needed = false};
    }
    uint32_t older = first_after(ring, charged_ns, false), newer = ring->count - older;
    uint32_t removed = (uint32_t)rk_min(units, older);
    after->ring.count = ring->count - removed;
    after->present = after->ring.count > 0;
    if (after->present && newer == 0)
        after->last_ns = rk_ring_at(ring, after->ring.count - 1);
    return (rk_rewrite){.needed = newer > 0 && removed > 0, .removed = removed, .newer = newer};
}

rk_rewrite rk_refund(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t units,
                     int64_t charged_ns, rk_state *after)
{
    copy_state(limit, before, after);
    if (!before->present || units == 0)
        return (rk_rewrite){.needed = false};
    switch (limit->algorithm) {
    case RK_TOKEN_BUCKET:
    case RK_LEAKY_BUCKET:
        refund_bucket(limit, before, units, charged_ns, after);
        break;
    case RK_FIXED_WINDOW:
        refund_fixed_window(limit, before, now_ns, units, charged_ns, after);
        break;
    case RK_SLIDING_WINDOW_COUNTER:
        refund_counter(limit, before, now_ns, units, charged_ns, after);
        break;
    case RK_SLIDING_WINDOW_LOG:
        return refund_log(limit, before, now_ns, units, charged_ns, after);
    case RK_IN_FLIGHT: /* the table frees the slot */
        break;
    }
    return (rk_rewrite){.needed = false};
}

/* As the functions below, it returns the units that the bound of the debt forgave. */
static int64_t owe_bucket(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                          int64_t units, rk_state *after)
{
    int64_t capacity = limit->capacity * RK_MICROS_PER_UNIT, level = 0;
    after->last_ns = now_ns;
    if (before->present) {
        int64_t elapsed_ns = whole_steps(limit, rk_max(now_ns - before->last_ns, 0));
        level = rk_min((int64_t)before->value, capacity) + debt_micros(limit, before);
        level = rk_max(level - drained(limit, elapsed_ns), 0);
        after->last_ns = level > 0 ? before->last_ns + elapsed_ns : rk_max(now_ns, before->last_ns);
    }
    level += units * RK_MICROS_PER_UNIT;
    after->value = (uint64_t)rk_min(level, capacity);
    int64_t debt = rk_max(level - capacity, 0);
    after->debt = rk_min(debt, limit->debt_max * RK_MICROS_PER_UNIT);
    return (debt - after->debt + RK_MICROS_PER_UNIT - 1) / RK_MICROS_PER_UNIT;
}

static int64_t owe_window(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                          int64_t units, rk_state *after)
{
    rk_state now;
    copy_state(limit, before, &now);
    if (before->present && before->debt > 0)
        now = carried(limit, before, now_ns);
    counters c = {.at_ns = before->present ? rk_max(now_ns, now.last_ns) : now_ns};
    if (limit->algorithm == RK_SLIDING_WINDOW_COUNTER)
        c = rolled(limit, &now, now_ns);
    else if (before->present && now.last_ns >= window_start(limit, c.at_ns))
        c.current = (int64_t)now.value;
    int64_t debt = now.debt + units;
    carry(limit, &c.current, &debt, 0);
    after->last_ns = c.at_ns;
    after->value = (uint64_t)c.previous << 32 | (uint64_t)c.current;
    after->debt = rk_min(debt, limit->debt_max);
    return debt - after->debt;
}

static rk_rewrite owe_log(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                          int64_t units, rk_state *after, int64_t *forgiven)
{
    extended e = extended_at(limit, before, now_ns);
    int64_t outstanding = before->present ? e.state.ring.count - e.end : 0;
    int64_t room = limit->limit - (e.end - e.first);
    rk_rewrite rewrite =
        enter_debt(limit, &e, (rk_rewrite){.first = e.first}, room, outstanding + units, after);
    *forgiven = outstanding + units - rewrite.added - after->debt;
    return rewrite;
}

rk_rewrite rk_owe(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t units,
                  rk_state *after, int64_t *forgiven)
{
    copy_state(limit, before, after);
    if (limit->algorithm == RK_SLIDING_WINDOW_LOG)
        return owe_log(limit, before, now_ns, units, after, forgiven);
    after->present = true;
    if (limit->algorithm <= RK_LEAKY_BUCKET)
        *forgiven = owe_bucket(limit, before, now_ns, units, after);
    else
        *forgiven = owe_window(limit, before, now_ns, units, after);
    return (rk_rewrite){.needed = false};
}

int64_t rk_debt_of(const rk_limit *limit, const rk_state *state, int64_t now_ns)
{
    if (!state->present || state->debt == 0)
        return 0;
    if (limit->algorithm == RK_SLIDING_WINDOW_LOG) {
        extended e = extended_at(limit, state, now_ns);
        return e.state.ring.count - e.end;
    }
    if (limit->algorithm > RK_LEAKY_BUCKET)
        return carried(limit, state, now_ns).debt;
    rk_state now;
    copy_state(limit, state, &now);
    owe_bucket(limit, state, now_ns, 0, &now);
    return (now.debt + RK_MICROS_PER_UNIT - 1) / RK_MICROS_PER_UNIT;
}
