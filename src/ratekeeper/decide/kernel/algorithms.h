/* The six algorithms in C. Every decision equals that of the Python reference
 * (decide/algorithms/). They are pure: no clock, no lock, no state. */
#ifndef RK_ALGORITHMS_H
#define RK_ALGORITHMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RK_MICROS_PER_UNIT = 1000000, RK_UNITS_MAX = 1000000000 };

/* The range of times, 1938 to 2096: within it, no sum of a time, a window and a refill overflows.
 * The caller rejects other times; those read from a file are clamped. */
#define RK_NOW_NS_MIN INT64_C(-1000000000000000000)
#define RK_NOW_NS_MAX INT64_C(4000000000000000000)

/* The time of a charge that was not made, or that is not known. */
#define RK_NO_TIME INT64_MIN

static inline int64_t rk_time_in_range(int64_t time_ns)
{
    return time_ns < RK_NOW_NS_MIN   ? RK_NOW_NS_MIN
           : time_ns > RK_NOW_NS_MAX ? RK_NOW_NS_MAX
                                     : time_ns;
}

typedef enum {
    RK_TOKEN_BUCKET,
    RK_LEAKY_BUCKET,
    RK_SLIDING_WINDOW_LOG,
    RK_SLIDING_WINDOW_COUNTER,
    RK_FIXED_WINDOW,
    RK_IN_FLIGHT,
} rk_algorithm;

/* A limit's numbers. The refill is numerator / denominator micro-units per nanosecond. */
typedef struct {
    rk_algorithm algorithm;
    int64_t limit;
    int64_t capacity;
    int64_t window_ns;
    int64_t numerator;
    int64_t denominator;
    int64_t step_ns;  /* token bucket: the time between two refills; at most 1: continuous */
    int64_t debt_max; /* the units that it owes at most */
    uint64_t salt[2]; /* hash of the rule and the limit's identity, which locates its states */
    uint64_t rule;    /* hash of the rule: limits of one rule share the room for their logs */
    int64_t stamp;    /* in flight: of the request; 0: none */
} rk_limit;

/* A ring of admission times, oldest first. A later time than `latest_ns` is read as that one. The
 * last `pending` entries are not in memory yet: they are charges at `pending_ns` that another
 * charge of the same call has decided and not written.
 *
 * If the log owes, `owing` is its limit. Its entries are then those of the sequence that
 * sliding_window_log.py describes, from the one at `skipped` on: `stored` entries in memory, and
 * those that the debt will be. */
typedef struct {
    int64_t *times;
    int64_t latest_ns;
    int64_t pending_ns;
    uint32_t capacity;
    uint32_t head;
    uint32_t count;
    uint32_t pending;
    const rk_limit *owing;
    uint32_t stored;
    uint32_t skipped;
} rk_ring;

/* The entry at an index of the sequence of a log that owes. */
__attribute__((pure)) int64_t rk_owed_at(const rk_ring *ring, uint32_t index);

/* The entry at an index of those in memory. */
static inline int64_t rk_stored_at(const rk_ring *ring, uint32_t index)
{
    uint32_t place = ring->head + index;
    int64_t time_ns = ring->times[place < ring->capacity ? place : place - ring->capacity];
    return time_ns < RK_NOW_NS_MIN     ? RK_NOW_NS_MIN
           : time_ns > ring->latest_ns ? ring->latest_ns
                                       : time_ns;
}

static inline int64_t rk_ring_at(const rk_ring *ring, uint32_t index)
{
    /* Both are the same for all entries, so that a search tests one of them in each step. */
    uint32_t plain = ring->owing != NULL ? 0 : ring->count - ring->pending;
    if (__builtin_expect(index < plain, 1))
        return rk_stored_at(ring, index);
    return index < ring->count - ring->pending ? rk_owed_at(ring, index + ring->skipped)
                                               : ring->pending_ns;
}

/* One limit's state of one subject. `value` is
 *   token_bucket, leaky_bucket   micro-units used as of last_ns
 *   fixed_window                 the count of last_ns's window
 *   sliding_window_counter       the previous window's count << 32 | the count of last_ns's window
 *   sliding_window_log           unused; the ring has all times
 *   in_flight                    unused; the ring has the slots, each a stamp and an end, and its
 *                                head is 0. last_ns is the time at which the last one was taken
 * `debt` is owed beside it, as of last_ns: micro-units of a bucket, otherwise units. */
typedef struct rk_state {
    bool present;
    int64_t last_ns; /* of the last admission or, in a bucket, of the last refill */
    uint64_t value;
    int64_t debt;
    rk_ring ring;
    /* A slot that is not in memory yet: another charge of the same call takes or renews it. */
    int64_t stamp, ends_ns;
    const struct rk_state *earlier; /* the state before it, if that has such a slot too */
} rk_state;

/* The slot at an index of a ring of slots. */
typedef struct {
    int64_t stamp, ends_ns;
} rk_slot;

rk_slot rk_slot_at(const rk_ring *ring, uint32_t index);

/* What is known of the slots that have not ended by `at_ns`; see in_flight.py. */
typedef struct {
    int64_t at_ns, used, first_ns, last_ns, own_ns;
} rk_slots;

rk_slots rk_find_slots(const rk_state *state, int64_t now_ns, int64_t stamp);

typedef struct {
    bool allowed;
    int64_t remaining;
    int64_t retry_after_ns;
    int64_t reset_after_ns;
    int64_t delay_ns;
    int64_t charged_ns; /* the time that the units were charged at; RK_NO_TIME if none were */
} rk_outcome;

/* Decide, and set `after` to the state to write. For the log, `after->ring` has the new head and
 * count; the caller must still write the last `cost` entries, each with the time after->last_ns.
 * If the request is denied or its cost is 0, `after` equals `before`. Return false if the cost can
 * never fit. */
bool rk_decide(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t cost,
               rk_outcome *outcome, rk_state *after);

/* How to write the ring of `after` from that of `before`: its entries from `first` on, without
 * `removed` ones that are followed by `newer` others, and then `added` ones, each with the time
 * after->last_ns. */
typedef struct {
    bool needed; /* otherwise only head and count differ */
    uint32_t first, removed, newer, added;
} rk_rewrite;

/* Set `after` to the state without the `units` that were charged at `charged_ns`, or RK_NO_TIME.
 * after->present is false if no state is needed. */
rk_rewrite rk_refund(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t units,
                     int64_t charged_ns, rk_state *after);

/* The ring of a state; if it owes, that of `owing`, which is set to the state with its sequence. */
const rk_ring *rk_extended(const rk_limit *limit, const rk_state *state, rk_state *owing);

/* Set `after` to the state with the `units`, whether or not there is room for them: the limit owes
 * the excess. Set `forgiven` to the units that exceed what it may owe. */
rk_rewrite rk_owe(const rk_limit *limit, const rk_state *before, int64_t now_ns, int64_t units,
                  rk_state *after, int64_t *forgiven);

/* The units that a state owes at a time. Those of a bucket are rounded up. */
int64_t rk_debt_of(const rk_limit *limit, const rk_state *state, int64_t now_ns);

#endif
