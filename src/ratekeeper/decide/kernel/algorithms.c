#include "algorithms.h"

#include "numbers.h"

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

static void decide_bucket(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                          int64_t cost, rk_outcome *outcome, rk_state *after)
{
    int64_t capacity = limit->capacity * RK_MICROS_PER_UNIT;
    int64_t cost_micros = cost * RK_MICROS_PER_UNIT;
    int64_t last_ns = now_ns, used = 0, used_now = 0, elapsed_ns = 0;
    if (before->present) {
        last_ns = before->last_ns;
        used = rk_min((int64_t)before->value, capacity);
        elapsed_ns = now_ns > last_ns ? whole_steps(limit, now_ns - last_ns) : 0;
        used_now = elapsed_ns > 0 ? rk_max(used - drained(limit, elapsed_ns), 0) : used;
    }
    int64_t free = capacity - used_now - cost_micros;
    if (free < 0) {
        int64_t excess = used + cost_micros - capacity;
        outcome->allowed = false;
        outcome->remaining = (free + cost_micros) / RK_MICROS_PER_UNIT;
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
    outcome->remaining = free / RK_MICROS_PER_UNIT;
    if (used_now > 0 || cost > 0)
        outcome->reset_after_ns = last_ns + time_to_drain(limit, used) - now_ns;
}

static void decide_fixed_window(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                                int64_t cost, rk_outcome *outcome, rk_state *after)
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

static void decide_counter(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                           int64_t cost, rk_outcome *outcome, rk_state *after)
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

/* The index of the first entry later than `time`: the entries before it have left the window. */
static uint32_t first_after(const rk_ring *ring, int64_t time)
{
    uint32_t low = 0, high = ring->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (rk_ring_at(ring, middle) <= time)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void decide_log(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t cost,
                       rk_outcome *outcome, rk_state *after)
{
    const rk_ring *ring = &before->ring;
    uint32_t count = before->present ? ring->count : 0;
    int64_t at_ns = now_ns, remaining = limit->limit;
    uint32_t gone = 0;
    if (count > 0) {
        int64_t last_ns = rk_ring_at(ring, count - 1);
        at_ns = rk_max(now_ns, last_ns);
        gone = first_after(ring, at_ns - limit->window_ns);
        remaining -= count - gone;
        if (gone < count)
            outcome->reset_after_ns = rk_max(last_ns + limit->window_ns - now_ns, 0);
    }
    outcome->allowed = cost == 0 || cost <= remaining;
    outcome->remaining = rk_max(remaining, 0);
    if (!outcome->allowed) {
        uint32_t blocking = (uint32_t)(count - limit->limit + cost - 1);
        /* Positive, unless the file is damaged and the times are not in order. */
        outcome->retry_after_ns = rk_max(rk_ring_at(ring, blocking) + limit->window_ns - now_ns, 1);
    } else if (cost > 0) {
        outcome->remaining = remaining - cost;
        outcome->reset_after_ns = at_ns + limit->window_ns - now_ns;
        outcome->charged_ns = at_ns;
        after->present = true;
        after->last_ns = at_ns;
        if (ring->capacity > 0)
            after->ring.head = (ring->head + gone) % ring->capacity;
        after->ring.count = count - gone + (uint32_t)cost;
    }
}

bool rk_decide(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t cost,
               rk_outcome *outcome, rk_state *after)
{
    *outcome = (rk_outcome){.allowed = false, .charged_ns = RK_NO_TIME};
    *after = *before;
    if (cost > limit->capacity)
        return false;
    switch (limit->algorithm) {
    case RK_TOKEN_BUCKET:
    case RK_LEAKY_BUCKET:
        decide_bucket(limit, before, now_ns, cost, outcome, after);
        break;
    case RK_FIXED_WINDOW:
        decide_fixed_window(limit, before, now_ns, cost, outcome, after);
        break;
    case RK_SLIDING_WINDOW_COUNTER:
        decide_counter(limit, before, now_ns, cost, outcome, after);
        break;
    case RK_SLIDING_WINDOW_LOG:
        decide_log(limit, before, now_ns, cost, outcome, after);
        break;
    }
    return true;
}

static void refund_bucket(const rk_limit *limit, const rk_state *before, int64_t units,
                          int64_t charged_ns, rk_state *after)
{
    int64_t capacity = limit->capacity * RK_MICROS_PER_UNIT;
    int64_t micros = rk_min(units, limit->capacity) * RK_MICROS_PER_UNIT;
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
    used -= micros;
    after->present = used > 0;
    after->value = (uint64_t)rk_max(used, 0);
}

static int64_t window_start(const rk_limit *limit, int64_t time_ns)
{
    return time_ns - rk_floor_mod(time_ns, limit->window_ns);
}

static void refund_fixed_window(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                                int64_t units, int64_t charged_ns, rk_state *after)
{
    if (charged_ns == RK_NO_TIME)
        charged_ns = rk_max(now_ns, before->last_ns);
    if (window_start(limit, charged_ns) != window_start(limit, before->last_ns))
        return;
    after->present = (int64_t)before->value > units;
    after->value = after->present ? before->value - (uint64_t)units : 0;
}

static void refund_counter(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                           int64_t units, int64_t charged_ns, rk_state *after)
{
    counters c = rolled(limit, before, now_ns);
    int64_t start_ns = charged_ns == RK_NO_TIME ? c.start_ns : window_start(limit, charged_ns);
    if (start_ns == c.start_ns)
        c.current = rk_max(c.current - units, 0);
    else if (start_ns == c.start_ns - limit->window_ns)
        c.previous = rk_max(c.previous - units, 0);
    else
        return;
    after->last_ns = c.at_ns;
    after->value = (uint64_t)c.previous << 32 | (uint64_t)c.current;
    after->present = after->value != 0;
}

static uint32_t refund_log(const rk_limit *limit, const rk_state *before, int64_t now_ns,
                           int64_t units, int64_t charged_ns, rk_state *after)
{
    const rk_ring *ring = &before->ring;
    int64_t last_ns = rk_ring_at(ring, ring->count - 1);
    if (charged_ns == RK_NO_TIME) { /* the oldest entries of the window */
        uint32_t gone = first_after(ring, rk_max(now_ns, last_ns) - limit->window_ns);
        after->present = ring->count - gone > units;
        gone = after->present ? gone + (uint32_t)units : ring->count;
        after->ring.head = (ring->head + gone) % ring->capacity;
        after->ring.count = ring->count - gone;
        return 0;
    }
    uint32_t older = first_after(ring, charged_ns), newer = ring->count - older;
    after->ring.count = ring->count - (uint32_t)rk_min(units, older);
    after->present = after->ring.count > 0;
    if (after->present && newer == 0)
        after->last_ns = rk_ring_at(ring, after->ring.count - 1);
    return newer;
}

uint32_t rk_refund(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t units,
                   int64_t charged_ns, rk_state *after)
{
    *after = *before;
    if (!before->present || units == 0)
        return 0;
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
    }
    return 0;
}
