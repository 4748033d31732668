/* The table.
 *
 * Problem. Every check reads and writes a few words per limit, for all limits of a subject together
 * or not at all. Many processes check at once, and each may be killed between two instructions. A
 * check must take tens of nanoseconds, a state tens of bytes.
 *
 * Layout. The 128-bit keyed hash of a subject, mixed with the rule, selects a segment. All limits
 * of the rule are there, so one lock covers a whole check. The other rules of the subject are in
 * other segments: a subject that many rules count fills none. Within the segment, hash and limit
 * determine a 47-bit tag and two buckets of eight slots. A state is in one of the two. A new state
 * goes to the first bucket while that is at most half full, and otherwise to the emptier one. There
 * are no chains to follow or to repair: a slot whose state has expired is free. If both buckets are
 * full of live states, one of the sixteen moves to its other bucket, which follows from its tag. A
 * slot has 24 bytes: 8 of metadata (tag, flags, time to live) and 16 of state. The few states with
 * granted units or a debt have further slots for these, in the same segment; see rk_cell.
 *
 * One group. The states of one subject under one rule have 16 bits of their tags in common. A group
 * gets no more of two buckets in which it fills RK_GROUP_SLOTS_MAX of the sixteen slots already. So
 * whatever limits a caller invents under one name, it takes less than half of a segment, and the
 * other subjects find room there. Measured: about a hundred states fit before one is rejected, and
 * 840 in all. A rule has 16 limits at most: of two million subjects that such a rule counts, about
 * one is rejected. So is one in 65,536 of the other subjects in a segment with such a group.
 *
 * Two keys are confused only if they agree in segment, bucket and tag. For ten million keys in one
 * table, the probability that any two of them do is below one in a million; that two limits of any
 * subject do, one in thirty thousand. An attacker without the seed cannot choose such keys.
 *
 * Time to live. A slot must expire without knowledge of its limit. 14 bits hold the time from
 * last_ns to its expiry, as a float with 8 bits of precision, rounded up: a state is kept at most
 * 0.4 % too long.
 *
 * Locks. One word per segment: 0, or the owner's number. It is taken by compare-and-swap and held
 * for about 30 ns. A process that holds it may take only the slab's lock in addition, and waits for
 * that at most a few milliseconds. `locks.c` explains how a dead owner is detected.
 *
 * Killed during a check. A check first writes its changes to the segment's journal. Then it sets
 * the number of journal entries, and from that moment the check has happened. Then it applies the
 * changes and clears the number. A process that takes a dead owner's lock applies the journal again
 * if the number is not zero; applying it twice has the same effect as once. So a check is charged
 * completely or not at all. Blocks of the slab are taken before and returned afterwards. A kill in
 * between leaks the block, and the next process that opens the file alone reclaims it.
 *
 * Several charges. A request of several rules, or a batch, makes several charges: all or none.
 * rk_check_all takes the locks of their segments in ascending order, so that two calls never wait
 * for each other. If a lock stays taken, it releases the others, and the caller waits for that one
 * and calls again. Under the locks it first decides all charges. Charges of the same state see each
 * other's units: the later one begins with what the earlier one leaves, and writes for both. If all
 * allow, it does everything that can fail: it finds slots, and takes blocks for logs. If that
 * fails, it returns the blocks, and nothing has been charged, so there is nothing to undo; at most
 * a state has moved to its other bucket, and expired ones are gone. Then it writes, charge by
 * charge, each through the journal of its segment. Only a kill between two of them leaves some of
 * the charges made and others not. Nobody has an answer to such a call, and the units that it
 * charged only make later calls admit fewer. The next process that needs one of its locks finds
 * each segment consistent. A kill before the writes leaks the blocks that were taken.
 *
 * Data is not trusted. After a power cut the file may contain anything, so every time, count and
 * reference is clamped when it is loaded: the worst result is a wrong count, not a crash. A time is
 * at most a window ahead of the latest time that this process has seen, so no wait is longer than
 * the limit can cause. A state of more than a year ahead is dropped: otherwise it would deny its
 * subject for decades.
 *
 * What may look wrong. An expired slot that is still found by its tag is used as it is: under the
 * limit that wrote it, it is equivalent to an absent one, and under a limit that was changed since,
 * it is correct while it exists. `filled` is not journaled: recovery counts it again. */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

#include "numbers.h"

#define META_TTL_MASK 0x3fffu
#define META_KINDS 0x3f00u  /* in place of a time to live: the slot is no state; see rk_cell */
#define META_CREDIT 0x4000u /* a credit slot exists for this state */
#define META_LOG 0x8000u    /* the value refers to a block of the slab */
#define META_DEBT 0x10000u  /* a debt slot exists for this state */
#define META_TAG_SHIFT 17
#define GROUP_SHIFT (64 - RK_GROUP_BITS)

/* Parts of a check of one subject, which is worth a copy of them of its own. */
#define PLAIN_CHECK inline __attribute__((always_inline))
/* What few checks need, kept out of the way of the others. */
#define RARE __attribute__((noinline))

/* The maximum of a bucket in micro-units. We never write a higher value. */
static const uint64_t VALUE_MAX = (uint64_t)RK_UNITS_MAX * RK_MICROS_PER_UNIT;
/* The longest window, 366 days. */
#define AHEAD_NS_MAX INT64_C(31622400000000000)
static const uint64_t CREDIT_SALT = 0x637265646974u;
static const uint64_t DEBT_SALT = 0x64656274u;
/* The marks of settlements are kept as the entries of a log. */
static const rk_limit MARKS = {.algorithm = RK_SLIDING_WINDOW_LOG,
                               .limit = RK_MARKS_MAX,
                               .window_ns = AHEAD_NS_MAX,
                               .salt = {0x736574746c65u, 0x6d61726b73u},
                               .rule = RK_MARKS_RULE};

/* ---- time to live: 6 bits of exponent, 8 of mantissa ---- */

static uint64_t ttl_encode(int64_t ttl_ns)
{
    uint64_t ttl = ttl_ns > 0 ? (uint64_t)ttl_ns : 0;
    if (ttl < 256)
        return ttl;
    int shift = 55 - __builtin_clzll(ttl);
    uint64_t mantissa = (ttl + ((uint64_t)1 << shift) - 1) >> shift;
    if (mantissa == 512)
        mantissa = 256, shift++;
    return (uint64_t)(shift + 1) << 8 | (mantissa - 256);
}

static int64_t ttl_decode(uint64_t code)
{
    uint64_t exponent = code >> 8, mantissa = code & 255;
    if (exponent == 0)
        return (int64_t)mantissa;
    if (exponent > 54) /* a kind, whose last_ns is its end */
        return 0;
    return (int64_t)((256 + mantissa) << (exponent - 1));
}

static bool has_kind(uint64_t meta, unsigned kind)
{
    return (meta & META_TTL_MASK) == (META_KINDS | kind);
}

static bool is_state(uint64_t meta) { return meta && (meta & META_KINDS) != META_KINDS; }

static bool expired(uint64_t meta, int64_t last_ns, int64_t now_ns)
{
    last_ns = rk_time_in_range(last_ns);
    return now_ns >= last_ns && now_ns - last_ns >= ttl_decode(meta & META_TTL_MASK);
}

/* ---- finding slots ---- */

rk_segment *rk_segment_at(const rk_table *table, uint32_t index)
{
    return (rk_segment *)(table->segments + table->segment_bytes * index);
}

static rk_bucket *buckets_of(rk_segment *segment)
{
    return (rk_bucket *)((uint8_t *)segment + ((sizeof(rk_segment) + 63) & ~(size_t)63));
}

static uint64_t *tag_at(rk_segment *segment, uint32_t slot)
{
    return &buckets_of(segment)[slot / RK_SLOTS_PER_BUCKET].tags[slot % RK_SLOTS_PER_BUCKET];
}

static rk_cell *cell_at(rk_segment *segment, uint32_t slot)
{
    return &buckets_of(segment)[slot / RK_SLOTS_PER_BUCKET].cells[slot % RK_SLOTS_PER_BUCKET];
}

static uint32_t segment_index(const rk_table *table, rk_hash subject)
{
    /* The upper half of the product is always below `segments`. */
    return (uint32_t)((rk_u128)rk_spread(subject.low) * table->format.segments >> 64);
}

static rk_segment *segment_of(const rk_table *table, rk_hash subject)
{
    return rk_segment_at(table, segment_index(table, subject));
}

/* A place whose tag begins with the lowest bits of `group`. It is never 0. */
static uint64_t in_group(uint64_t group, uint64_t mixed)
{
    uint64_t place = group << GROUP_SHIFT | mixed >> RK_GROUP_BITS;
    return place >> META_TAG_SHIFT ? place : place | (uint64_t)1 << META_TAG_SHIFT;
}

/* The location of a subject's state for a limit: the upper 48 bits are its tag, the lower bits its
 * bucket. */
static uint64_t place_of(rk_hash subject, const uint64_t salt[2])
{
    return in_group(subject.low,
                    rk_mix((subject.high ^ salt[0]) + rk_spread(subject.low ^ salt[1])));
}

static uint64_t credit_place(uint64_t place)
{
    return in_group(place >> GROUP_SHIFT, rk_mix(place ^ CREDIT_SALT));
}

static uint64_t debt_place(uint64_t place)
{
    return in_group(place >> GROUP_SHIFT, rk_mix(place ^ DEBT_SALT));
}

static uint32_t other_bucket(const rk_table *table, uint32_t bucket, uint64_t tag)
{
    return bucket ^ ((uint32_t)((tag * 0x9e3779b97f4a7c15u >> 56) | 1) & table->bucket_mask);
}

static int find(const rk_table *table, rk_segment *segment, uint64_t place)
{
    uint64_t tag = place >> META_TAG_SHIFT;
    uint32_t bucket = (uint32_t)place & table->bucket_mask;
    for (int choice = 0; choice < 2; choice++) {
        const rk_bucket *searched = &buckets_of(segment)[bucket];
        /* The states are two cache lines further on. Prefetched now, they arrive together with
         * the tags instead of after them. */
        __builtin_prefetch(&searched->cells[0], 1);
        __builtin_prefetch(&searched->cells[RK_SLOTS_PER_BUCKET / 2], 1);
        for (uint32_t i = 0; i < RK_SLOTS_PER_BUCKET; i++)
            if (searched->tags[i] >> META_TAG_SHIFT == tag)
                return (int)(bucket * RK_SLOTS_PER_BUCKET + i);
        bucket = other_bucket(table, bucket, tag);
    }
    return -1;
}

/* ---- the journal ---- */

/* Read the slot of a write once: the file may change at any time. Return false if it has no such
 * slot. */
static bool slot_of(const rk_table *table, const rk_write *write, uint32_t *slot)
{
    *slot = *(const volatile uint32_t *)&write->slot;
    return *slot < table->slots;
}

static void apply_journal(const rk_table *table, rk_segment *segment, uint32_t count)
{
    for (uint32_t i = 0; i < segment->push_count && i < RK_LIMITS_MAX; i++) {
        const rk_push *push = &segment->pushes[i];
        rk_block block;
        if (!rk_block_at(table, push->block, &block))
            continue;
        for (uint32_t k = 0, at = push->first; k < push->count && k < block.capacity; k++, at++)
            block.times[at % block.capacity] = push->at_ns;
    }
    for (uint32_t i = 0; i < count && i < RK_WRITES_MAX; i++) {
        const rk_write *write = &segment->writes[i];
        uint32_t slot;
        if (!slot_of(table, write, &slot))
            continue;
        *cell_at(segment, slot) = (rk_cell){.last_ns = write->last_ns, .value = write->value};
        /* The tag is usually unchanged. Then the cache line stays shared, and another processor
         * that looks this key up still has it. */
        if (*tag_at(segment, slot) != write->meta)
            *tag_at(segment, slot) = write->meta;
    }
}

/* Once journal_count is stored, the writes will be applied, by us or by the process that recovers.
 * The fences keep the three steps in order for a process that reads them after we were killed. */
static void commit(const rk_table *table, rk_segment *segment, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot;
        if (!slot_of(table, &segment->writes[i], &slot))
            continue;
        uint64_t before = *tag_at(segment, slot), after = segment->writes[i].meta;
        segment->filled += (before == 0) - (after == 0);
        segment->expired += before && after && before >> META_TAG_SHIFT != after >> META_TAG_SHIFT;
    }
    atomic_store_explicit(&segment->journal_count, count, memory_order_release);
    atomic_thread_fence(memory_order_release);
    apply_journal(table, segment, count);
    atomic_store_explicit(&segment->journal_count, 0, memory_order_release);
    /* The next transaction must not enter the journal before this one has ended. After a kill,
     * every earlier store is visible and no later one, so a compiler barrier is enough. */
    atomic_signal_fence(memory_order_seq_cst);
    segment->push_count = 0;
}

static void count_filled(const rk_table *table, rk_segment *segment)
{
    uint32_t filled = 0;
    for (uint32_t slot = 0; slot < table->slots; slot++)
        filled += *tag_at(segment, slot) != 0;
    segment->filled = filled;
}

/* Complete what a dead owner left unfinished. Call with the lock held. */
void rk_recover(rk_table *table, rk_segment *segment)
{
    uint32_t count = atomic_load_explicit(&segment->journal_count, memory_order_acquire);
    if (count > 0) {
        apply_journal(table, segment, count);
        atomic_store_explicit(&segment->journal_count, 0, memory_order_release);
    }
    segment->push_count = 0;
    count_filled(table, segment);
    segment->repaired++;
}

rk_status rk_wait(rk_table *table, rk_hash subject, int64_t timeout_ns)
{
    rk_segment *segment = segment_of(table, subject);
    bool repaired = false;
    rk_status status = rk_lock_wait(table, &segment->lock, timeout_ns, &repaired);
    if (status != RK_OK)
        return status;
    if (repaired)
        rk_recover(table, segment);
    rk_unlock(table, &segment->lock);
    return rk_settled(table, rk_slab_wait(table, timeout_ns));
}

/* Note the time of a call. Later times are damage. (A test's clock may go back by any time.) */
static void see(rk_table *table, int64_t now_ns)
{
    if (now_ns > table->seen_ns)
        table->seen_ns = now_ns;
}

/* ---- one limit's part in a check ---- */

enum { WANTS_CREDIT = 1, WANTS_DEBT = 2 };

typedef struct part {
    const rk_limit *limit;
    struct part *earlier; /* in rk_check_all: of another charge of the same state; or NULL */
    uint64_t place;
    int slot;            /* -1: not in the table */
    int credit_slot;     /* -1: none granted */
    int debt_slot;       /* -1: nothing owed */
    uint32_t block;      /* the log's ring before, if `before.ring.capacity` */
    uint32_t wants;      /* slots: of a grant WANTS_CREDIT, of a debt WANTS_DEBT */
    bool follows;        /* in rk_check_all: slots of the same state are taken before this one */
    bool takes_block;    /* `ring_block` was taken from the slab for this call */
    bool writes;         /* in rk_check_all: false if another charge writes the state, or none */
    uint32_t ring_block; /* the log's ring after */
    int64_t credit_units, credit_until_ns;
    int64_t credit_left; /* units left after `after` is written */
    int64_t own;         /* the part of the cost that the limit itself pays */
    rk_state before, after;
    rk_outcome outcome;
} part;

/* A log's value: block << 40 | head << 20 | count. */
static uint64_t log_value(uint32_t block, const rk_ring *ring)
{
    return (uint64_t)block << 40 | (uint64_t)ring->head << 20 | ring->count;
}

static bool load_ring(const rk_table *table, uint64_t value, uint32_t *block, rk_ring *ring)
{
    rk_block found;
    *block = (uint32_t)(value >> 40);
    if (!rk_block_at(table, *block, &found))
        return false;
    ring->times = found.times;
    ring->capacity = found.capacity;
    ring->head = (uint32_t)(value >> 20) & 0xfffff;
    ring->count = (uint32_t)value & 0xfffff;
    /* A ring that a power cut damaged is dropped, so that it is never read out of bounds. */
    return ring->head < ring->capacity && ring->count > 0 && ring->count <= ring->capacity;
}

/* Whether the state of a limit has a block of the slab. */
static bool has_ring(const rk_limit *limit)
{
    return limit->algorithm == RK_SLIDING_WINDOW_LOG || limit->algorithm == RK_IN_FLIGHT;
}

static uint64_t clamped(uint64_t value) { return value < VALUE_MAX ? value : VALUE_MAX; }

/* Load the credit and the debt of a state that has them. Few have. */
static RARE void load_more(const rk_table *table, rk_segment *segment, part *p, uint64_t meta)
{
    if (meta & META_CREDIT) {
        p->credit_slot = find(table, segment, credit_place(p->place));
        if (p->credit_slot >= 0) {
            rk_cell credit = *cell_at(segment, p->credit_slot);
            p->credit_units = (int64_t)(credit.value & INT64_MAX) % (RK_UNITS_MAX + 1);
            p->credit_until_ns = rk_time_in_range(credit.last_ns);
        }
    }
    if ((meta & META_DEBT) && p->before.present) {
        p->debt_slot = find(table, segment, debt_place(p->place));
        if (p->debt_slot >= 0)
            p->before.debt = (int64_t)clamped(cell_at(segment, p->debt_slot)->value);
    }
}

/* Clamp a time that only damage explains. Return false if it is so late that the state is dropped.
 */
static RARE bool repair_time(const rk_table *table, int64_t latest_ns, int64_t *last_ns)
{
    bool kept = !table->seen_ns || *last_ns <= table->seen_ns + AHEAD_NS_MAX;
    *last_ns = *last_ns < RK_NOW_NS_MIN ? RK_NOW_NS_MIN : latest_ns;
    return kept;
}

static void load(const rk_table *table, rk_segment *segment, rk_hash subject, const rk_limit *limit,
                 part *p)
{
    int64_t latest_ns =
        table->seen_ns ? rk_min(table->seen_ns + limit->window_ns, RK_NOW_NS_MAX) : RK_NOW_NS_MAX;
    p->limit = limit;
    p->place = place_of(subject, limit->salt);
    p->slot = find(table, segment, p->place);
    p->credit_slot = p->debt_slot = -1;
    p->wants = 0;
    p->follows = false;
    p->credit_units = p->credit_until_ns = 0;
    p->before.present = false;
    p->before.last_ns = p->before.debt = 0;
    p->before.value = 0;
    if (has_ring(limit)) {
        p->before.ring = (rk_ring){.count = 0};
        p->before.stamp = 0;
        p->before.earlier = NULL;
    }
    if (p->slot < 0)
        return;
    uint64_t meta = *tag_at(segment, p->slot);
    rk_cell cell = *cell_at(segment, p->slot);
    p->before.last_ns = cell.last_ns;
    p->before.value = cell.value;
    bool kept = true;
    /* A branch, which takes no time if it is foreseen, as rk_min and rk_max do. */
    if (__builtin_expect(cell.last_ns < RK_NOW_NS_MIN || cell.last_ns > latest_ns, 0))
        kept = repair_time(table, latest_ns, &p->before.last_ns);
    if (!kept) {
        p->before.present = false;
    } else if (has_ring(limit)) {
        /* A slot may have been taken under a longer window. */
        p->before.ring.latest_ns = limit->algorithm == RK_IN_FLIGHT
                                       ? latest_ns - limit->window_ns + AHEAD_NS_MAX
                                       : latest_ns;
        p->before.present =
            (meta & META_LOG) && load_ring(table, cell.value, &p->block, &p->before.ring);
    } else {
        p->before.present = cell.value != 0; /* 0: present only to refer to a credit */
        if (limit->algorithm != RK_SLIDING_WINDOW_COUNTER)
            p->before.value = clamped(cell.value);
    }
    if (meta & (META_CREDIT | META_DEBT))
        load_more(table, segment, p, meta);
}

/* As decide/credit.py: granted units pay only the part of the cost that the limit cannot. */
static bool decide_with_credit(part *p, int64_t now_ns, int64_t cost)
{
    rk_outcome look;
    rk_state unchanged;
    rk_decide(p->limit, &p->before, now_ns, 0, &look, &unchanged);
    int64_t own = rk_min(cost, look.remaining);
    int64_t left = p->credit_units - (cost - own);
    if (left >= 0) {
        rk_decide(p->limit, &p->before, now_ns, own, &p->outcome, &p->after);
        p->outcome.remaining += left;
        p->credit_left = left;
        p->own = own;
        return true;
    }
    p->credit_left = p->credit_units;
    if (rk_decide(p->limit, &p->before, now_ns, cost - p->credit_units, &p->outcome, &p->after) &&
        now_ns + p->outcome.retry_after_ns < p->credit_until_ns) {
        p->outcome.remaining += p->credit_units;
        return true;
    }
    if (!rk_decide(p->limit, &p->before, now_ns, cost, &p->outcome, &p->after))
        return false;
    p->outcome.remaining += p->credit_units;
    return true;
}

static PLAIN_CHECK bool decide(part *p, int64_t now_ns, int64_t cost)
{
    p->credit_left = 0;
    p->own = cost;
    if (p->credit_units > 0 && now_ns < p->credit_until_ns)
        return decide_with_credit(p, now_ns, cost);
    return rk_decide(p->limit, &p->before, now_ns, cost, &p->outcome, &p->after);
}

/* ---- free slots ---- */

/* Slots that the current transaction uses, so that nothing else is put there. */
typedef struct claims {
    int slots[RK_CLAIMS_MAX];
    int count;
    uint32_t freed[RK_CLAIMS_MAX]; /* blocks of expired logs whose slots are reused */
    int freed_count;
    const struct claims *next; /* of another charge in the segment; the last one's is the first */
} claims;

static bool claimed(const claims *claim, uint32_t slot)
{
    const claims *each = claim;
    do {
        for (int i = 0; i < each->count; i++)
            if (each->slots[i] == (int)slot)
                return true;
        each = each->next;
    } while (each != claim);
    return false;
}

enum { NO_SLOT = -1, GROUP_FULL = -2 };

static void claim_slot(claims *claim, int slot) { claim->slots[claim->count++] = slot; }

/* Find the best free slot of a bucket (empty before expired), and the number of free ones. Add the
 * number of slots that the group of `place` fills to `own`. */
static int free_in(rk_segment *segment, uint32_t bucket, int64_t now_ns, const claims *claim,
                   uint64_t place, int *found, int *own)
{
    int empty = -1, reusable = -1;
    *found = 0;
    uint32_t first = bucket * RK_SLOTS_PER_BUCKET;
    for (uint32_t slot = first; slot < first + RK_SLOTS_PER_BUCKET; slot++) {
        uint64_t meta = *tag_at(segment, slot);
        bool is_empty = meta == 0;
        if (!is_empty && !expired(meta, cell_at(segment, slot)->last_ns, now_ns)) {
            *own += meta >> GROUP_SHIFT == place >> GROUP_SHIFT;
            continue;
        }
        if (claimed(claim, slot))
            continue;
        ++*found;
        if (is_empty)
            empty = (int)slot;
        else
            reusable = (int)slot;
    }
    return empty >= 0 ? empty : reusable;
}

/* Move one live state of a full bucket to its other bucket; return the slot it left, or -1. */
static int make_room_in(rk_table *table, rk_segment *segment, uint32_t bucket, int64_t now_ns,
                        claims *claim)
{
    uint32_t first = bucket * RK_SLOTS_PER_BUCKET;
    for (uint32_t slot = first; slot < first + RK_SLOTS_PER_BUCKET; slot++) {
        if (claimed(claim, slot))
            continue;
        uint32_t other = other_bucket(table, bucket, *tag_at(segment, slot) >> META_TAG_SHIFT);
        int found, own = 0;
        int target = free_in(segment, other, now_ns, claim, 0, &found, &own);
        if (target < 0)
            continue;
        bool had_block = *tag_at(segment, target) & META_LOG;
        uint32_t block = (uint32_t)(cell_at(segment, target)->value >> 40);
        segment->writes[0] = (rk_write){.slot = (uint32_t)target,
                                        .meta = *tag_at(segment, slot),
                                        .last_ns = cell_at(segment, slot)->last_ns,
                                        .value = cell_at(segment, slot)->value};
        segment->writes[1] = (rk_write){.slot = slot};
        segment->push_count = 0;
        commit(table, segment, 2);
        if (had_block)
            rk_block_give(table, block);
        return (int)slot;
    }
    return -1;
}

/* Find a slot of marks in a bucket; return it, or -1. */
static int marks_in(rk_segment *segment, uint32_t bucket, const claims *claim)
{
    uint32_t first = bucket * RK_SLOTS_PER_BUCKET;
    for (uint32_t slot = first; slot < first + RK_SLOTS_PER_BUCKET; slot++)
        if (has_kind(*tag_at(segment, slot), RK_KIND_MARKS) && !claimed(claim, slot))
            return (int)slot;
    return -1;
}

/* Return a slot for a state that has none. NO_SLOT if both buckets are full and no state can move,
 * GROUP_FULL if the subject fills too much of them under this rule. A small table is not divided:
 * otherwise a rule of many limits would not fit. Only states take the slots of `marks`: a sweep
 * drops marks of other buckets, so both buckets may be full of them in a segment that is not. */
static int choose_slot(rk_table *table, rk_segment *segment, uint64_t place, int64_t now_ns,
                       bool marks, claims *claim)
{
    uint32_t one = (uint32_t)place & table->bucket_mask;
    uint32_t two = other_bucket(table, one, place >> META_TAG_SHIFT);
    int free_one, free_two, own = 0;
    int slot_one = free_in(segment, one, now_ns, claim, place, &free_one, &own);
    int slot_two = free_in(segment, two, now_ns, claim, place, &free_two, &own);
    if (own >= RK_GROUP_SLOTS_MAX && table->bucket_mask == RK_BUCKETS_MAX - 1)
        return GROUP_FULL;
    /* The first bucket, unless it is half full. So a look-up rarely needs the second one, which is
     * another cache miss. While the segment is at most 90 % full, this fills the buckets as evenly
     * as always taking the emptier one. */
    int slot = free_one >= RK_SLOTS_PER_BUCKET / 2 || free_one >= free_two ? slot_one : slot_two;
    if (slot < 0)
        slot = make_room_in(table, segment, one, now_ns, claim);
    if (slot < 0)
        slot = make_room_in(table, segment, two, now_ns, claim);
    if (slot < 0 && marks)
        slot = marks_in(segment, one, claim);
    if (slot < 0 && marks)
        slot = marks_in(segment, two, claim);
    if (slot < 0)
        return NO_SLOT;
    if (*tag_at(segment, slot) & META_LOG)
        claim->freed[claim->freed_count++] = (uint32_t)(cell_at(segment, slot)->value >> 40);
    claim_slot(claim, slot);
    return slot;
}

/* Empty up to `most` expired slots, also those of `marks` that have not expired; return their
 * number. Each is one store, so no journal is needed. */
static uint32_t sweep_segment(rk_table *table, rk_segment *segment, int64_t now_ns, uint32_t most,
                              bool marks)
{
    uint32_t dropped = 0, filled = 0;
    for (uint32_t slot = 0; slot < table->slots; slot++) {
        uint64_t meta = *tag_at(segment, slot);
        if (meta == 0)
            continue;
        filled++;
        if (dropped == most || !(expired(meta, cell_at(segment, slot)->last_ns, now_ns) ||
                                 (marks && has_kind(meta, RK_KIND_MARKS))))
            continue;
        uint32_t block = (uint32_t)(cell_at(segment, slot)->value >> 40);
        *tag_at(segment, slot) = 0;
        if (meta & META_LOG)
            rk_block_give(table, block);
        dropped++;
    }
    segment->filled = filled - dropped;
    segment->expired += dropped;
    return dropped;
}

/* ---- writing ---- */

static void journal(rk_segment *segment, uint32_t *count, int slot, uint64_t meta, int64_t last_ns,
                    uint64_t value)
{
    segment->writes[(*count)++] =
        (rk_write){.slot = (uint32_t)slot, .meta = meta, .last_ns = last_ns, .value = value};
}

/* Take a block for a ring of `count` entries. */
static rk_status take_block(rk_table *table, const rk_limit *limit, uint32_t count, bool replaces,
                            uint32_t *block, rk_block *found)
{
    rk_status status = rk_block_take(table, limit->rule, count, replaces, block);
    if (status != RK_OK)
        return status;
    bool intact = rk_block_at(table, *block, found) && found->capacity >= count;
    return intact ? RK_OK : RK_LOG_FULL; /* the file was overwritten since */
}

static void move_ring(rk_ring *ring, const rk_block *block)
{
    ring->times = block->times;
    ring->capacity = block->capacity;
    ring->head = 0;
    ring->owing = NULL;
}

/* The ring for `after`: the current one, or another one with the live entries copied, because it is
 * larger, or because debt has entered the log. */
static rk_status fit_ring(rk_table *table, part *p, uint32_t *block)
{
    rk_ring *ring = &p->after.ring;
    bool fits = p->before.present && ring->count <= ring->capacity;
    *block = p->block;
    if (fits && ring->owing == NULL)
        return RK_OK;
    rk_block larger;
    rk_status status = take_block(table, p->limit, ring->count, fits, block, &larger);
    if (status != RK_OK)
        return status;
    for (uint32_t i = 0; i < ring->count - (uint32_t)p->own; i++)
        larger.times[i] = rk_ring_at(ring, i);
    move_ring(ring, &larger);
    return RK_OK;
}

static bool takes_slot(const part *p)
{
    return p->limit->algorithm == RK_IN_FLIGHT && p->outcome.charged_ns != RK_NO_TIME;
}

static bool pushes(const part *p)
{
    return (p->limit->algorithm == RK_SLIDING_WINDOW_LOG && p->own > 0) || takes_slot(p);
}

/* The index of the slot of a stamp; otherwise of one that has ended, or behind all of them. */
static uint32_t slot_index(const rk_ring *ring, int64_t stamp, int64_t at_ns)
{
    uint32_t ended = ring->count / 2;
    for (uint32_t i = ring->count / 2; i-- > 0;) {
        rk_slot slot = rk_slot_at(ring, i);
        if (slot.ends_ns <= at_ns)
            ended = i;
        else if (slot.stamp == stamp)
            return i;
    }
    return ended;
}

/* Take a block for the slot of a part, unless there is room for it and for the slots that earlier
 * charges of the call take. */
static rk_status fit_slot(rk_table *table, part *p, uint32_t *block)
{
    const rk_ring *ring = &p->before.ring;
    rk_slots found = rk_find_slots(&p->before, p->outcome.charged_ns, p->limit->stamp);
    uint32_t wanted = (uint32_t)found.used + 1;
    for (const rk_state *each = &p->after; each->earlier != NULL; each = each->earlier)
        wanted++;
    bool present = p->before.present;
    *block = p->block;
    if (found.own_ns > 0 || (present && 2 * wanted <= ring->capacity))
        return RK_OK;
    rk_block larger;
    return take_block(table, p->limit, 2 * wanted, present, block, &larger);
}

/* Return the blocks that fit_rings took. */
static void return_rings(rk_table *table, const part *parts, int count)
{
    for (int i = 0; i < count; i++)
        if (pushes(&parts[i]) && parts[i].takes_block)
            rk_block_give(table, parts[i].ring_block);
}

/* Prepare the rings of all parts that log something. */
static PLAIN_CHECK rk_status fit_rings(rk_table *table, part *parts, int count)
{
    for (int i = 0; i < count; i++) {
        part *p = &parts[i];
        if (!pushes(p))
            continue;
        rk_status status =
            takes_slot(p) ? fit_slot(table, p, &p->ring_block) : fit_ring(table, p, &p->ring_block);
        if (status != RK_OK) {
            return_rings(table, parts, i);
            return status;
        }
        p->takes_block = !p->before.present || p->ring_block != p->block;
    }
    return RK_OK;
}

/* The ring that a slot is written to, as earlier charges of the call have left it. */
static rk_ring current_ring(const rk_table *table, rk_segment *segment, part *p, uint32_t *block)
{
    rk_ring ring = {.count = 0};
    if (p->follows)
        p->slot = find(table, segment, p->place);
    uint64_t meta = *tag_at(segment, p->slot);
    if (meta >> META_TAG_SHIFT != p->place >> META_TAG_SHIFT || !(meta & META_LOG) ||
        !load_ring(table, cell_at(segment, p->slot)->value, block, &ring))
        ring = (rk_ring){.count = 0};
    ring.latest_ns = INT64_MAX; /* a slot that only damage explains stays until it is read */
    return ring;
}

/* Note the end of a slot to push. The stamp of a slot that has ended is of no use, so that of the
 * new one is written at once: a process killed before it pushes the end has taken no slot. */
static RARE void push_slot(rk_table *table, rk_segment *segment, part *p, claims *claim)
{
    uint32_t block = 0;
    rk_block taken;
    int64_t at_ns = p->outcome.charged_ns;
    rk_ring ring = current_ring(table, segment, p, &block);
    uint32_t index = slot_index(&ring, p->limit->stamp, at_ns);
    bool fits = 2 * index + 2 <= ring.capacity;
    if (!fits && p->takes_block && rk_block_at(table, p->ring_block, &taken)) {
        uint32_t live = 0;
        for (uint32_t i = 0; i < ring.count / 2 && 2 * live + 2 <= taken.capacity; i++) {
            rk_slot slot = rk_slot_at(&ring, i);
            if (slot.ends_ns > at_ns) {
                taken.times[2 * live] = slot.stamp;
                taken.times[2 * live++ + 1] = slot.ends_ns;
            }
        }
        if (ring.capacity > 0)
            claim->freed[claim->freed_count++] = block;
        block = p->ring_block;
        ring = (rk_ring){.times = taken.times, .capacity = taken.capacity, .count = 2 * live};
        index = live;
        fits = 2 * index + 2 <= ring.capacity;
    } else if (p->takes_block) {
        claim->freed[claim->freed_count++] = p->ring_block;
    }
    if (!fits) { /* the file was overwritten since */
        p->after.present = false;
        return;
    }
    ring.times[2 * index] = p->limit->stamp;
    segment->pushes[segment->push_count++] =
        (rk_push){.block = block, .first = 2 * index + 1, .count = 1, .at_ns = p->after.ends_ns};
    ring.count = ring.count > 2 * index + 2 ? ring.count : 2 * index + 2;
    p->after.value = log_value(block, &ring);
}

/* Note the entries to push into the rings. Blocks that became too small are remembered, and
 * returned once nothing refers to them. */
static PLAIN_CHECK void push_entries(rk_table *table, rk_segment *segment, part *parts, int count,
                                     claims *claim)
{
    segment->push_count = 0;
    for (int i = 0; i < count; i++) {
        part *p = &parts[i];
        if (!pushes(p))
            continue;
        if (p->limit->algorithm == RK_IN_FLIGHT) {
            push_slot(table, segment, p, claim);
            continue;
        }
        if (p->before.present && p->takes_block)
            claim->freed[claim->freed_count++] = p->block;
        rk_ring *ring = &p->after.ring;
        segment->pushes[segment->push_count++] = (rk_push){
            .block = p->ring_block,
            .first = (ring->head + ring->count - (uint32_t)p->own) % ring->capacity,
            .count = (uint32_t)p->own,
            .at_ns = p->after.last_ns,
        };
        p->after.value = log_value(p->ring_block, ring);
    }
}

/* The word of a slot that is no state. */
static uint64_t word_of(uint64_t place, unsigned kind)
{
    return place >> META_TAG_SHIFT << META_TAG_SHIFT | META_KINDS | kind;
}

/* Write what the part owes, if it has changed, and give its state the bit. The debt ends when the
 * state does, which is rounded up. */
static RARE void journal_debt(rk_segment *segment, uint32_t *count, const part *p, rk_write *state)
{
    if (p->debt_slot < 0)
        return;
    state->meta |= META_DEBT;
    int64_t ends_ns = state->last_ns + ttl_decode(state->meta & META_TTL_MASK);
    if (p->wants & WANTS_DEBT || p->after.debt != p->before.debt)
        journal(segment, count, p->debt_slot, word_of(debt_place(p->place), RK_KIND_DEBT), ends_ns,
                (uint64_t)p->after.debt);
}

/* Write the part's new state to the journal, with the rest of its credit or its debt. No call
 * writes both: a settlement that owes more has used the credit up, whose slot then counts nothing,
 * because the state has no bit for it. */
static void journal_part(rk_segment *segment, uint32_t *count, const part *p, int64_t now_ns,
                         int64_t expires_ns)
{
    uint64_t meta = p->place >> META_TAG_SHIFT << META_TAG_SHIFT;
    if (has_ring(p->limit) && p->after.present)
        meta |= META_LOG;
    int64_t last_ns = p->after.present ? p->after.last_ns : now_ns;
    if (p->credit_left > 0) {
        meta |= META_CREDIT;
        expires_ns = rk_max(expires_ns, p->credit_until_ns);
    }
    meta |= ttl_encode(rk_max(expires_ns - last_ns, 1));
    rk_write *state = &segment->writes[*count];
    journal(segment, count, p->slot, meta, last_ns, p->after.present ? p->after.value : 0);
    if (p->credit_slot >= 0 && p->credit_left != p->credit_units && !(p->wants & WANTS_DEBT)) {
        if (p->credit_left > 0)
            journal(segment, count, p->credit_slot, word_of(credit_place(p->place), RK_KIND_CREDIT),
                    p->credit_until_ns, (uint64_t)p->credit_left);
        else
            journal(segment, count, p->credit_slot, 0, 0, 0);
    }
    if (__builtin_expect(p->after.debt > 0, 0))
        journal_debt(segment, count, p, state);
}

static uint32_t slots_wanted(const part *parts, int count)
{
    uint32_t wanted = 0;
    for (int i = 0; i < count; i++) {
        const part *p = &parts[i];
        wanted += p->slot < 0 && !p->follows;
        if (__builtin_expect(p->wants != 0, 0))
            wanted += ((p->wants & WANTS_CREDIT) && p->credit_slot < 0) +
                      ((p->wants & WANTS_DEBT) && p->debt_slot < 0);
    }
    return wanted;
}

/* Find out whether a segment has so many free slots. RK_SWEPT if it had to be swept: that may have
 * emptied our own slots, so the caller starts over, once. Only states take the room of `marks`. */
static rk_status make_room(rk_table *table, rk_segment *segment, uint32_t wanted, int64_t now_ns,
                           bool may_sweep, bool marks)
{
    uint32_t limit = table->format.segment_limit;
    if (segment->filled + wanted <= limit)
        return RK_OK;
    if (!may_sweep)
        return RK_FULL;
    sweep_segment(table, segment, now_ns, RK_SWEEP_SLOTS, false);
    if (segment->filled + wanted > limit && marks)
        sweep_segment(table, segment, now_ns, RK_SWEEP_SLOTS, true);
    return RK_SWEPT;
}

static void claim_found(const part *parts, int count, claims *claim)
{
    for (int i = 0; i < count; i++) {
        if (parts[i].slot >= 0)
            claim_slot(claim, parts[i].slot);
        if (parts[i].credit_slot >= 0)
            claim_slot(claim, parts[i].credit_slot);
        if (parts[i].debt_slot >= 0)
            claim_slot(claim, parts[i].debt_slot);
    }
}

static rk_status choose_slots(rk_table *table, rk_segment *segment, part *parts, int count,
                              int64_t now_ns, claims *claim)
{
    bool marks = parts[0].limit != &MARKS;
    int chosen = 0;
    for (int i = 0; i < count && chosen >= 0; i++) {
        part *p = &parts[i];
        if (p->slot < 0 && !p->follows)
            p->slot = chosen = choose_slot(table, segment, p->place, now_ns, marks, claim);
        if (chosen >= 0 && (p->wants & WANTS_CREDIT) && p->credit_slot < 0)
            p->credit_slot = chosen =
                choose_slot(table, segment, credit_place(p->place), now_ns, marks, claim);
        if (chosen >= 0 && (p->wants & WANTS_DEBT) && p->debt_slot < 0)
            p->debt_slot = chosen =
                choose_slot(table, segment, debt_place(p->place), now_ns, marks, claim);
    }
    return chosen >= 0 ? RK_OK : chosen == GROUP_FULL ? RK_CROWDED : RK_FULL;
}

static void no_claims(claims *claim)
{
    claim->count = claim->freed_count = 0;
    claim->next = claim;
}

/* Find a slot for each state and credit that has none; RK_FULL if there is none, or RK_SWEPT. */
static rk_status place_parts(rk_table *table, rk_segment *segment, part *parts, int count,
                             int64_t now_ns, bool may_sweep, claims *claim)
{
    uint32_t wanted = slots_wanted(parts, count);
    no_claims(claim);
    if (wanted == 0)
        return RK_OK;
    bool marks = parts[0].limit != &MARKS;
    rk_status status = make_room(table, segment, wanted, now_ns, may_sweep, marks);
    if (status != RK_OK)
        return status;
    claim_found(parts, count, claim);
    return choose_slots(table, segment, parts, count, now_ns, claim);
}

static void give_blocks(rk_table *table, const claims *claim)
{
    for (int i = 0; i < claim->freed_count; i++)
        rk_block_give(table, claim->freed[i]);
}

/* Write the parts, for which there is room. */
static PLAIN_CHECK void write_parts(rk_table *table, rk_segment *segment, part *parts, int count,
                                    int64_t now_ns, claims *claim)
{
    uint32_t writes = 0;
    push_entries(table, segment, parts, count, claim);
    for (int i = 0; i < count; i++)
        journal_part(segment, &writes, &parts[i], now_ns, now_ns + parts[i].outcome.reset_after_ns);
    commit(table, segment, writes);
    give_blocks(table, claim);
}

static rk_status spend_parts(rk_table *table, rk_segment *segment, part *parts, int count,
                             int64_t now_ns, bool may_sweep)
{
    claims claim;
    rk_status status = place_parts(table, segment, parts, count, now_ns, may_sweep, &claim);
    if (status == RK_OK)
        status = fit_rings(table, parts, count);
    if (status == RK_OK)
        write_parts(table, segment, parts, count, now_ns, &claim);
    return status;
}

/* ---- the verbs ---- */

static bool tighter(const rk_outcome *a, const rk_outcome *b)
{
    if (a->remaining != b->remaining)
        return a->remaining < b->remaining;
    if (a->retry_after_ns != b->retry_after_ns)
        return a->retry_after_ns > b->retry_after_ns;
    return a->reset_after_ns > b->reset_after_ns;
}

/* As decide/combine.py: report the tightest of the limits that denied, or of all if none did. */
static PLAIN_CHECK void combine(const part *parts, int count, bool allowed, int64_t now_ns,
                                rk_decision *decision)
{
    int speaker = -1;
    int64_t retry_ns = 0, delay_ns = 0, charged_ns = INT64_MAX;
    for (int i = 0; i < count; i++) {
        const rk_outcome *outcome = &parts[i].outcome;
        if (outcome->charged_ns != RK_NO_TIME)
            charged_ns = rk_min(charged_ns, outcome->charged_ns);
        retry_ns = rk_max(retry_ns, outcome->retry_after_ns);
        delay_ns = rk_max(delay_ns, outcome->delay_ns);
        if (outcome->allowed == allowed &&
            (speaker < 0 || tighter(outcome, &parts[speaker].outcome)))
            speaker = i;
    }
    *decision = (rk_decision){
        .allowed = allowed,
        .speaker = speaker,
        .remaining = parts[speaker].outcome.remaining,
        .retry_after_ns = retry_ns,
        .reset_after_ns = parts[speaker].outcome.reset_after_ns,
        .delay_ns = allowed ? delay_ns : 0,
        .charged_ns = allowed && charged_ns < INT64_MAX ? charged_ns : RK_NO_TIME,
        .decided_ns = now_ns,
        .granted = parts[speaker].credit_left,
    };
}

/* As credit.wait_together: other limits that pass now may depend on a credit that will have expired
 * by then. Return false if the cost can never fit without it; decision->speaker is that limit. */
static bool wait_together(const part *parts, int count, int64_t now_ns, int64_t cost,
                          rk_decision *decision)
{
    bool any_credit = false;
    for (int i = 0; i < count; i++)
        any_credit = any_credit || parts[i].credit_units > 0;
    if (!any_credit || count == 1)
        return true;
    for (int i = 0; i < count; i++) {
        part then = parts[i];
        if (then.limit->algorithm == RK_IN_FLIGHT) /* when a request ends is not known */
            continue;
        if (!decide(&then, now_ns + decision->retry_after_ns, cost)) {
            decision->speaker = i;
            return false;
        }
        if (!then.outcome.allowed) {
            decision->retry_after_ns += then.outcome.retry_after_ns;
            i = -1; /* decide all of them again, at that time */
        }
    }
    return true;
}

static rk_status check_locked(rk_table *table, rk_segment *segment, rk_hash subject,
                              const rk_limit *limits, int count, int64_t now_ns, int64_t cost,
                              bool spend, bool may_sweep, rk_decision *decision)
{
    part parts[RK_LIMITS_MAX];
    bool allowed = true;
    for (int i = 0; i < count; i++) {
        load(table, segment, subject, &limits[i], &parts[i]);
        if (!decide(&parts[i], now_ns, cost)) {
            decision->speaker = i;
            return RK_CAPACITY;
        }
        allowed = allowed && parts[i].outcome.allowed;
    }
    if (allowed && cost > 0) {
        if (spend) {
            rk_status status = spend_parts(table, segment, parts, count, now_ns, may_sweep);
            if (status != RK_OK)
                return status;
        } else {
            for (int i = 0; i < count; i++)
                decide(&parts[i], now_ns, 0);
        }
    }
    combine(parts, count, allowed, now_ns, decision);
    if (!allowed && !wait_together(parts, count, now_ns, cost, decision))
        return RK_CAPACITY;
    return RK_OK;
}

static rk_status check_once(rk_table *table, rk_hash subject, const rk_limit *limits, int count,
                            int64_t now_ns, int64_t cost, bool spend, rk_decision *decision)
{
    rk_segment *segment = segment_of(table, subject);
    see(table, now_ns);
    rk_status status = rk_lock_try(table, &segment->lock);
    if (status != RK_OK)
        return status;
    status =
        check_locked(table, segment, subject, limits, count, now_ns, cost, spend, true, decision);
    if (status == RK_SWEPT)
        status = check_locked(table, segment, subject, limits, count, now_ns, cost, spend, false,
                              decision);
    rk_unlock(table, &segment->lock);
    return rk_settled(table, status);
}

/* Expired logs keep their blocks until their slots are reused. So a check that finds the slab full,
 * or nearly so, sweeps a few segments, and the next check the next ones. */
static void sweep_for_blocks(rk_table *table, int64_t now_ns, uint32_t segments)
{
    uint32_t left = RK_SWEEP_BLOCKS;
    for (uint32_t i = 0; i < segments && i < table->format.segments && left > 0; i++) {
        rk_segment *segment = rk_segment_at(table, table->sweep_next % table->format.segments);
        if (segment->filled > 0 && rk_lock_try(table, &segment->lock) == RK_OK) {
            left -= sweep_segment(table, segment, now_ns, left, true);
            rk_unlock(table, &segment->lock);
        }
        table->sweep_next += left > 0; /* otherwise there may be more in this one */
    }
}

static void sweep_if_filling(rk_table *table, int64_t now_ns)
{
    if (__builtin_expect(table->slab_filling, 0)) {
        table->slab_filling = false;
        sweep_for_blocks(table, now_ns, 1);
    }
}

rk_status rk_check(rk_table *table, rk_hash subject, const rk_limit *limits, int count,
                   int64_t now_ns, int64_t cost, bool spend, rk_decision *decision)
{
    rk_status status = check_once(table, subject, limits, count, now_ns, cost, spend, decision);
    if (status == RK_LOG_FULL) {
        sweep_for_blocks(table, now_ns, RK_SWEEP_SEGMENTS);
        status = check_once(table, subject, limits, count, now_ns, cost, spend, decision);
    }
    sweep_if_filling(table, now_ns);
    return status;
}

/* ---- several charges ---- */

/* One charge of a call. The entries are in the order of their segments; those of one segment are a
 * run. */
typedef struct {
    rk_charge *charge;
    rk_segment *segment;
    part *parts;
    int count; /* of the parts: those that are loaded, and later those that write */
    int index; /* of the charge */
    claims claim;
} entry;

typedef struct {
    rk_table *table;
    entry *entries;
    int count;
    int64_t now_ns;
} batch;

static bool starts_run(const batch *b, int at)
{
    return at == 0 || b->entries[at].segment != b->entries[at - 1].segment;
}

static int end_of_run(const batch *b, int from)
{
    int to = from + 1;
    while (to < b->count && !starts_run(b, to))
        to++;
    return to;
}

/* The part of an earlier charge that would write the same state; NULL if there is none. */
static part *earlier_part(const batch *b, int at, uint64_t place)
{
    for (; !starts_run(b, at); at--) {
        const entry *before = &b->entries[at - 1];
        for (int i = 0; i < before->count; i++)
            if (before->parts[i].writes && before->parts[i].place == place)
                return &before->parts[i];
    }
    return NULL;
}

/* Let a part begin with the state that an earlier part leaves. */
static void begin_after(part *p, const part *earlier)
{
    p->before = earlier->after;
    p->before.ring.pending = (uint32_t)earlier->own;
    p->before.ring.pending_ns = earlier->after.last_ns;
    p->credit_units = earlier->credit_left;
}

/* Make the part write the units of the earlier one too, on the state that is in the table. */
static void write_both(part *p)
{
    part *earlier = p->earlier;
    p->before = earlier->before;
    p->credit_units = earlier->credit_units;
    if (!p->writes)
        return;
    if (p->limit->algorithm == RK_IN_FLIGHT) { /* each writes its own slot, one after the other */
        p->follows = true;
        p->after.earlier = &earlier->after;
        return;
    }
    p->own += earlier->own;
    earlier->writes = false;
}

static rk_status decide_entry(const batch *b, int at)
{
    entry *e = &b->entries[at];
    rk_charge *c = e->charge;
    bool fits = true, allowed = true;
    for (e->count = 0; e->count < c->count && fits; e->count++) {
        part *p = &e->parts[e->count];
        load(b->table, e->segment, c->subject, &c->limits[e->count], p);
        p->earlier = earlier_part(b, at, p->place);
        if (p->earlier != NULL)
            begin_after(p, p->earlier);
        fits = decide(p, b->now_ns, c->cost);
        allowed = allowed && p->outcome.allowed;
    }
    if (!fits) {
        c->decision.speaker = e->count - 1;
    } else {
        combine(e->parts, c->count, allowed, b->now_ns, &c->decision);
        fits = allowed || wait_together(e->parts, c->count, b->now_ns, c->cost, &c->decision);
    }
    for (int i = 0; i < e->count; i++) {
        e->parts[i].writes = allowed && fits && c->cost > 0 &&
                             (e->parts[i].limit->algorithm != RK_IN_FLIGHT ||
                              e->parts[i].outcome.charged_ns != RK_NO_TIME);
        if (e->parts[i].earlier != NULL)
            write_both(&e->parts[i]);
    }
    return fits ? RK_OK : RK_CAPACITY;
}

/* Decide on all charges that have not failed. RK_CAPACITY is about the first of them at `at`. */
static rk_status decide_all(const batch *b, bool *allowed, int *at)
{
    rk_status status = RK_OK;
    *allowed = true;
    for (int i = 0; i < b->count; i++) {
        entry *e = &b->entries[i];
        e->count = 0;
        if (e->charge->status != RK_OK)
            continue;
        if (decide_entry(b, i) != RK_OK) {
            *at = status == RK_OK || e->index < *at ? e->index : *at;
            status = RK_CAPACITY;
        }
        *allowed = *allowed && e->charge->decision.allowed;
    }
    return status;
}

/* Nothing is charged: answer the allowed charges with the units that remain now. */
static void answer_with_looks(const batch *b)
{
    for (int i = 0; i < b->count; i++) {
        entry *e = &b->entries[i];
        rk_charge *c = e->charge;
        if (c->status != RK_OK || !c->decision.allowed)
            continue;
        for (int k = 0; k < c->count; k++)
            decide(&e->parts[k], b->now_ns, 0);
        combine(e->parts, c->count, true, b->now_ns, &c->decision);
    }
}

static void keep_writing_parts(entry *e)
{
    int kept = 0;
    for (int i = 0; i < e->count; i++) {
        if (!e->parts[i].writes)
            continue;
        if (kept < i)
            e->parts[kept] = e->parts[i];
        kept++;
    }
    e->count = kept;
}

/* Find slots for the new states of a run. `failed` is the entry that has none, or RK_SWEPT. */
static rk_status place_run(const batch *b, int from, int to, bool may_sweep, int *failed)
{
    rk_segment *segment = b->entries[from].segment;
    rk_status status = RK_OK;
    uint32_t wanted = 0;
    for (*failed = from; *failed < to; ++*failed) {
        entry *e = &b->entries[*failed];
        keep_writing_parts(e);
        no_claims(&e->claim);
        wanted += slots_wanted(e->parts, e->count);
        if (wanted > 0)
            status = make_room(b->table, segment, wanted, b->now_ns, may_sweep, true);
        if (status != RK_OK)
            return status;
    }
    if (wanted == 0)
        return RK_OK;
    for (int i = from; i < to; i++) { /* a slot that one of them uses is taken for all of them */
        entry *e = &b->entries[i];
        claim_found(e->parts, e->count, &e->claim);
        e->claim.next = &b->entries[i + 1 < to ? i + 1 : from].claim;
    }
    for (*failed = from; *failed < to; ++*failed) {
        entry *e = &b->entries[*failed];
        status = choose_slots(b->table, segment, e->parts, e->count, b->now_ns, &e->claim);
        if (status != RK_OK)
            return status;
    }
    return RK_OK;
}

static void return_rings_of(const batch *b, int from, int to)
{
    for (int i = from; i < to; i++)
        return_rings(b->table, b->entries[i].parts, b->entries[i].count);
}

/* Do everything that can fail about charging a run, without charging it. */
static rk_status prepare_run(const batch *b, int from, int to, int *failed)
{
    rk_status status;
    int sweeps = to - from;
    while ((status = place_run(b, from, to, sweeps-- > 0, failed)) == RK_SWEPT)
        for (int i = from; i < to; i++) {
            *failed = i;
            /* Expired states deny nothing. So this is a file that was overwritten since. */
            if (decide_entry(b, i) != RK_OK || !b->entries[i].charge->decision.allowed)
                return RK_FULL;
        }
    for (int i = from; status == RK_OK && i < to; i++) {
        *failed = i;
        status = fit_rings(b->table, b->entries[i].parts, b->entries[i].count);
        if (status != RK_OK)
            return_rings_of(b, from, i);
    }
    return status;
}

/* Charge all, or none if `failed` finds no room. */
static rk_status charge_all(const batch *b, int *failed)
{
    for (int from = 0, to; from < b->count; from = to) {
        to = end_of_run(b, from);
        rk_status status = prepare_run(b, from, to, failed);
        if (status != RK_OK) {
            return_rings_of(b, 0, from);
            return status;
        }
    }
    for (int i = 0; i < b->count; i++) {
        entry *e = &b->entries[i];
        if (e->count > 0)
            write_parts(b->table, e->segment, e->parts, e->count, b->now_ns, &e->claim);
    }
    return RK_OK;
}

static rk_status check_all_locked(const batch *b, bool spend, int *at)
{
    bool allowed;
    rk_status status = decide_all(b, &allowed, at);
    if (status != RK_OK)
        return status;
    if (allowed && spend) {
        int failed;
        status = charge_all(b, &failed);
        if (status == RK_OK)
            return RK_OK;
        *at = b->entries[failed].index;
        if (status != RK_FULL && status != RK_CROWDED && status != RK_LOG_FULL)
            return status;
        b->entries[failed].charge->status = status;
        status = decide_all(b, &allowed, at); /* again: states may have moved */
    }
    answer_with_looks(b);
    return status;
}

static void unlock_all(const batch *b, int count)
{
    for (int i = 0; i < count; i++)
        if (starts_run(b, i))
            rk_unlock(b->table, &b->entries[i].segment->lock);
}

static rk_status check_all_once(const batch *b, bool spend, int *at)
{
    for (int i = 0; i < b->count; i++) {
        entry *e = &b->entries[i];
        rk_status status = starts_run(b, i) ? rk_lock_try(b->table, &e->segment->lock) : RK_OK;
        if (status == RK_OK)
            continue;
        unlock_all(b, i);
        *at = e->index;
        return status;
    }
    rk_status status = check_all_locked(b, spend, at);
    unlock_all(b, b->count);
    return rk_settled(b->table, status);
}

/* Shell's sort: in place, and fast for two as for thousands. */
static void sort_keys(uint64_t *keys, int count)
{
    for (int gap = count / 2; gap > 0; gap /= 2)
        for (int i = gap; i < count; i++) {
            uint64_t key = keys[i];
            int at = i;
            for (; at >= gap && keys[at - gap] > key; at -= gap)
                keys[at] = keys[at - gap];
            keys[at] = key;
        }
}

/* Make the entries of the charges that are not left out. A key is a segment and a charge, so that
 * the charges of one segment keep their order. */
static void make_entries(batch *b, rk_charge *charges, int count, uint64_t *keys, part *parts)
{
    for (int i = 0; i < count; i++)
        if (charges[i].status == RK_OK)
            keys[b->count++] =
                (uint64_t)segment_index(b->table, charges[i].subject) << 32 | (uint32_t)i;
    sort_keys(keys, b->count);
    for (int i = 0; i < b->count; i++) {
        entry *e = &b->entries[i];
        e->index = (int)(uint32_t)keys[i];
        e->charge = &charges[e->index];
        e->segment = rk_segment_at(b->table, (uint32_t)(keys[i] >> 32));
        e->parts = parts;
        parts += e->charge->count;
    }
}

enum { CHARGES_ON_STACK = 8, PARTS_ON_STACK = 16 };

rk_status rk_check_all(rk_table *table, rk_charge *charges, int count, int64_t now_ns, bool spend,
                       int *at)
{
    entry entries[CHARGES_ON_STACK];
    uint64_t keys[CHARGES_ON_STACK];
    part parts[PARTS_ON_STACK];
    batch b = {.table = table, .entries = entries, .now_ns = now_ns};
    size_t parts_count = 0;
    for (int i = 0; i < count; i++)
        parts_count += (size_t)charges[i].count;
    bool small = count <= CHARGES_ON_STACK && parts_count <= PARTS_ON_STACK;
    part *more_parts = small ? NULL : malloc(parts_count * sizeof *parts);
    uint64_t *more_keys = small ? NULL : malloc((size_t)count * sizeof *keys);
    entry *more_entries = small ? NULL : malloc((size_t)count * sizeof *entries);
    rk_status status = RK_NO_MEMORY;
    *at = -1;
    if (small || (more_parts && more_keys && more_entries)) {
        b.entries = small ? entries : more_entries;
        make_entries(&b, charges, count, small ? keys : more_keys, small ? parts : more_parts);
        see(table, now_ns);
        status = check_all_once(&b, spend, at);
        if (status == RK_OK && *at >= 0 && charges[*at].status == RK_LOG_FULL) {
            sweep_for_blocks(table, now_ns, RK_SWEEP_SEGMENTS);
            charges[*at].status = RK_OK;
            *at = -1;
            status = check_all_once(&b, spend, at);
        }
        sweep_if_filling(table, now_ns);
    }
    free(more_parts);
    free(more_keys);
    free(more_entries);
    return status;
}

void rk_note_refused(rk_table *table, rk_hash subject, rk_status status)
{
    rk_segment *segment = segment_of(table, subject);
    atomic_fetch_add_explicit(status == RK_CROWDED ? &segment->crowded : &segment->refused, 1,
                              memory_order_relaxed);
}

/* The latest expiry of any state: a century after the latest time. */
static const int64_t EXPIRY_NS_MAX = RK_NOW_NS_MAX + INT64_C(3200000000000000000);

/* The time at which the slot's state expires. */
static int64_t expiry_of(rk_segment *segment, int slot)
{
    int64_t last_ns = rk_time_in_range(cell_at(segment, slot)->last_ns);
    return rk_min(last_ns + ttl_decode(*tag_at(segment, slot) & META_TTL_MASK), EXPIRY_NS_MAX);
}

/* Write a log anew, in another block, so that a process killed meanwhile leaves it as it was. */
static rk_status rewrite_ring(rk_table *table, part *p, const rk_rewrite *how, uint32_t *block)
{
    rk_ring *ring = &p->after.ring;
    rk_block other;
    rk_status status = take_block(table, p->limit, ring->count, p->before.present, block, &other);
    if (status != RK_OK)
        return status;
    rk_state owing;
    const rk_ring *from = rk_extended(p->limit, &p->before, &owing);
    uint32_t kept = ring->count - how->added;
    for (uint32_t i = 0; i < kept; i++)
        other.times[i] =
            rk_ring_at(from, how->first + (i < kept - how->newer ? i : i + how->removed));
    for (uint32_t i = kept; i < ring->count; i++)
        other.times[i] = p->after.last_ns;
    move_ring(ring, &other);
    return RK_OK;
}

/* Make the log of `after`, and set `block` to its block. */
static rk_status finish_log(rk_table *table, part *p, const rk_rewrite *how, uint32_t *block)
{
    *block = p->block;
    if (p->limit->algorithm != RK_SLIDING_WINDOW_LOG || !p->after.present)
        return RK_OK;
    rk_status status = how->needed ? rewrite_ring(table, p, how, block) : RK_OK;
    if (status == RK_OK)
        p->after.value = log_value(*block, &p->after.ring);
    return status;
}

/* Free the slot of a stamp. The state goes with the last slot. */
static void free_slot(rk_segment *segment, uint32_t *writes, const part *p, int64_t now_ns,
                      claims *claim)
{
    const rk_ring *ring = &p->before.ring;
    rk_slots found = rk_find_slots(&p->before, now_ns, p->limit->stamp);
    uint32_t index = slot_index(ring, p->limit->stamp, found.at_ns);
    if (!p->before.present || (found.used > 0 && found.own_ns == 0))
        return;
    if (found.used <= (found.own_ns > 0)) {
        claim->freed[claim->freed_count++] = p->block;
        journal(segment, writes, p->slot, 0, 0, 0);
        return;
    }
    segment->pushes[segment->push_count++] =
        (rk_push){.block = p->block, .first = 2 * index + 1, .count = 1, .at_ns = 0};
    journal(segment, writes, p->slot, *tag_at(segment, p->slot), p->before.last_ns,
            p->before.value);
}

static rk_status give_back(rk_table *table, rk_segment *segment, const rk_change *c)
{
    claims claim;
    no_claims(&claim);
    uint32_t writes = 0, taken[RK_LIMITS_MAX];
    int taken_count = 0;
    segment->push_count = 0;
    for (int i = 0; i < c->count; i++) {
        part p;
        uint32_t block;
        load(table, segment, c->subject, &c->limits[i], &p);
        if (p.slot < 0)
            continue;
        if (p.limit->algorithm == RK_IN_FLIGHT) {
            free_slot(segment, &writes, &p, c->now_ns, &claim);
            continue;
        }
        p.credit_left = p.credit_units;
        rk_rewrite how = rk_refund(p.limit, &p.before, c->now_ns, c->units, c->time_ns, &p.after);
        rk_status status = finish_log(table, &p, &how, &block);
        if (status != RK_OK) {
            while (taken_count > 0)
                rk_block_give(table, taken[--taken_count]);
            return status;
        }
        bool had_block = p.limit->algorithm == RK_SLIDING_WINDOW_LOG && p.before.present;
        if (had_block && (!p.after.present || block != p.block))
            claim.freed[claim.freed_count++] = p.block;
        if (had_block && block != p.block)
            taken[taken_count++] = block;
        rk_state unchanged;
        rk_decide(p.limit, &p.after, c->now_ns, 0, &p.outcome, &unchanged);
        if (p.after.present || p.credit_left > 0)
            journal_part(segment, &writes, &p, c->now_ns, c->now_ns + p.outcome.reset_after_ns);
        else
            journal(segment, &writes, p.slot, 0, 0, 0);
    }
    if (writes > 0)
        commit(table, segment, writes);
    give_blocks(table, &claim);
    return RK_OK;
}

/* As decide/credit.py: charge what a grant does not pay. Set its rest, and the units forgiven. */
static rk_rewrite owe_part(part *p, int64_t now_ns, int64_t units, int64_t *forgiven)
{
    *forgiven = 0;
    p->credit_left = 0;
    if (p->credit_units > 0 && now_ns < p->credit_until_ns) {
        rk_outcome look;
        rk_state unchanged;
        rk_decide(p->limit, &p->before, now_ns, 0, &look, &unchanged);
        int64_t paid = rk_min(rk_max(units - look.remaining, 0), p->credit_units);
        units -= paid;
        p->credit_left = p->credit_units - paid;
    }
    p->after = p->before;
    if (units == 0)
        return (rk_rewrite){.needed = false};
    return rk_owe(p->limit, &p->before, now_ns, units, &p->after, forgiven);
}

static rk_status owe(rk_table *table, rk_segment *segment, rk_change *c, bool may_sweep)
{
    c->found = 0;
    part parts[RK_LIMITS_MAX];
    rk_rewrite how[RK_LIMITS_MAX];
    uint32_t blocks[RK_LIMITS_MAX];
    claims claim;
    for (int i = 0; i < c->count; i++) {
        part *p = &parts[i];
        load(table, segment, c->subject, &c->limits[i], p);
        int64_t forgiven;
        how[i] = owe_part(p, c->now_ns, c->units, &forgiven);
        c->found = rk_max(c->found, forgiven);
        p->wants = p->after.debt > 0 && p->credit_left == 0 ? WANTS_DEBT : 0;
        if (p->debt_slot < 0) /* as of a credit: one that counts nothing may be there */
            p->debt_slot = find(table, segment, debt_place(p->place));
    }
    rk_status status = place_parts(table, segment, parts, c->count, c->now_ns, may_sweep, &claim);
    for (int i = 0; status == RK_OK && i < c->count; i++) {
        status = finish_log(table, &parts[i], &how[i], &blocks[i]);
        for (int taken = 0; status != RK_OK && taken < i; taken++)
            if (how[taken].needed)
                rk_block_give(table, blocks[taken]);
    }
    if (status != RK_OK)
        return status;
    uint32_t writes = 0;
    segment->push_count = 0;
    for (int i = 0; i < c->count; i++) {
        part *p = &parts[i];
        rk_state unchanged;
        if (how[i].needed && p->before.present)
            claim.freed[claim.freed_count++] = p->block;
        rk_decide(p->limit, &p->after, c->now_ns, 0, &p->outcome, &unchanged);
        journal_part(segment, &writes, p, c->now_ns, c->now_ns + p->outcome.reset_after_ns);
    }
    commit(table, segment, writes);
    give_blocks(table, &claim);
    return RK_OK;
}

static rk_status owed(rk_table *table, rk_segment *segment, rk_change *c)
{
    c->found = 0;
    for (int i = 0; i < c->count; i++) {
        part p;
        load(table, segment, c->subject, &c->limits[i], &p);
        c->found = rk_max(c->found, rk_debt_of(p.limit, &p.before, c->now_ns));
    }
    return RK_OK;
}

static rk_status grant(rk_table *table, rk_segment *segment, const rk_change *c, bool may_sweep)
{
    part parts[RK_LIMITS_MAX];
    claims claim;
    for (int i = 0; i < c->count; i++) {
        part *p = &parts[i];
        load(table, segment, c->subject, &c->limits[i], p);
        p->wants = WANTS_CREDIT;
        /* A credit whose state is gone may still exist, expired. It must not get a second slot:
         * either could be found first. */
        if (p->credit_slot < 0)
            p->credit_slot = find(table, segment, credit_place(p->place));
    }
    rk_status status = place_parts(table, segment, parts, c->count, c->now_ns, may_sweep, &claim);
    if (status != RK_OK)
        return status;
    uint32_t writes = 0;
    segment->push_count = 0;
    for (int i = 0; i < c->count; i++) {
        part *p = &parts[i];
        int64_t until_ns = c->now_ns + (c->time_ns < 0 ? p->limit->window_ns : c->time_ns);
        int64_t held = p->credit_units;
        bool live = held > 0 && c->now_ns < p->credit_until_ns;
        p->credit_left = live ? rk_min(held + c->units, RK_UNITS_MAX) : c->units;
        p->credit_until_ns = live ? rk_max(p->credit_until_ns, until_ns) : until_ns;
        p->credit_units = -1; /* always written: the time may have changed */
        p->after = p->before;
        bool known = *tag_at(segment, p->slot) >> META_TAG_SHIFT == p->place >> META_TAG_SHIFT;
        journal_part(segment, &writes, p, c->now_ns,
                     known ? expiry_of(segment, p->slot) : until_ns);
    }
    commit(table, segment, writes);
    give_blocks(table, &claim);
    return RK_OK;
}

static rk_status reset(rk_table *table, rk_segment *segment, const rk_change *c)
{
    claims claim;
    no_claims(&claim);
    uint32_t writes = 0;
    segment->push_count = 0;
    for (int i = 0; i < c->count; i++) {
        part p;
        load(table, segment, c->subject, &c->limits[i], &p);
        if (p.slot < 0)
            continue;
        if (has_ring(p.limit) && p.before.present)
            claim.freed[claim.freed_count++] = p.block;
        journal(segment, &writes, p.slot, 0, 0, 0);
        if (p.credit_slot >= 0)
            journal(segment, &writes, p.credit_slot, 0, 0, 0);
    }
    if (writes > 0)
        commit(table, segment, writes);
    give_blocks(table, &claim);
    return RK_OK;
}

static rk_status apply_locked(rk_table *table, rk_segment *segment, rk_change *c, bool may_sweep)
{
    switch (c->verb) {
    case RK_REFUND:
        return give_back(table, segment, c);
    case RK_OWE:
        return owe(table, segment, c, may_sweep);
    case RK_OWED:
        return owed(table, segment, c);
    case RK_GRANT:
        return grant(table, segment, c, may_sweep);
    default:
        return reset(table, segment, c);
    }
}

static rk_status apply_once(rk_table *table, rk_change *c)
{
    rk_segment *segment = segment_of(table, c->subject);
    see(table, c->now_ns);
    rk_status status = rk_lock_try(table, &segment->lock);
    if (status != RK_OK)
        return status;
    status = apply_locked(table, segment, c, true);
    if (status == RK_SWEPT)
        status = apply_locked(table, segment, c, false);
    rk_unlock(table, &segment->lock);
    return rk_settled(table, status);
}

static rk_status apply_or_sweep(rk_table *table, rk_change *c)
{
    rk_status status = apply_once(table, c);
    if (status != RK_LOG_FULL)
        return status;
    sweep_for_blocks(table, c->now_ns, RK_SWEEP_SEGMENTS);
    return apply_once(table, c);
}

rk_status rk_apply(rk_table *table, rk_change *c)
{
    if (c->units == 0 && c->verb != RK_RESET && c->verb != RK_OWED && c->limits[0].stamp == 0)
        return RK_OK; /* without units, a refund frees the slot of a stamp */
    rk_limit counted[RK_LIMITS_MAX];
    const rk_limit *limits = c->limits;
    int count = c->count;
    if (c->verb == RK_OWE || c->verb == RK_OWED || c->verb == RK_GRANT) { /* not of slots */
        c->limits = counted;
        c->count = 0;
        for (int i = 0; i < count; i++)
            if (limits[i].algorithm != RK_IN_FLIGHT)
                counted[c->count++] = limits[i];
        rk_status done = c->count > 0 ? apply_or_sweep(table, c) : RK_OK;
        c->limits = limits;
        c->count = count;
        return done;
    }
    return apply_or_sweep(table, c);
}

/* ---- marks ----
 *
 * The names of a subject's last settlements, so that none is applied twice. They are the entries of
 * a ring, as the times of a log, and the slot expires as a whole. Marks use only room that is left:
 * a state that finds its segment or its buckets full takes their slots. They take a block only
 * while a part of it is free: a ring grows while less than a quarter is in use, and the first name
 * of a subject finds room until that is a half. So no number of settlements makes a check fail, and
 * subjects with many names leave room for those with few. */

/* The ring of the subject's marks. One that has expired is empty. */
static void load_marks(const rk_table *table, rk_segment *segment, rk_hash subject, int64_t now_ns,
                       part *p, claims *claim)
{
    no_claims(claim);
    load(table, segment, subject, &MARKS, p);
    p->before.ring.latest_ns = RK_NOW_NS_MAX; /* names, not times */
    p->credit_left = 0;
    p->own = 1;
    if (!p->before.present || !expired(*tag_at(segment, p->slot), p->before.last_ns, now_ns))
        return;
    claim->freed[claim->freed_count++] = p->block;
    p->before.present = false;
}

/* The position of a name in the ring; -1 if it is not there. */
static int64_t mark_index(const rk_state *state, int64_t name)
{
    for (uint32_t i = 0; state->present && i < state->ring.count; i++)
        if (rk_ring_at(&state->ring, i) == name)
            return (state->ring.head + i) % state->ring.capacity;
    return -1;
}

static void commit_marks(const rk_table *table, rk_segment *segment, const part *p,
                         int64_t until_ns)
{
    uint32_t writes = 0;
    uint64_t meta = word_of(p->place, RK_KIND_MARKS) | META_LOG;
    journal(segment, &writes, p->slot, meta, until_ns, p->after.value);
    commit(table, segment, writes);
}

static rk_status mark_locked(rk_table *table, rk_segment *segment, rk_hash subject, int64_t name,
                             int64_t now_ns, int64_t until_ns, bool may_sweep, bool *is_new)
{
    part p;
    claims expired_ring, claim;
    load_marks(table, segment, subject, now_ns, &p, &expired_ring);
    *is_new = mark_index(&p.before, name) < 0;
    if (!*is_new)
        return RK_OK;
    p.after = p.before;
    rk_ring *ring = &p.after.ring;
    bool is_first = !p.before.present;
    uint64_t taken = rk_log_bytes_taken(table), most = rk_log_bytes(table);
    if (is_first)
        *ring = (rk_ring){.count = 0};
    if (ring->count == RK_MARKS_MAX ||
        (!is_first && ring->count == ring->capacity && taken > most / 4))
        ring->head = (ring->head + 1) % ring->capacity; /* the oldest is forgotten */
    else
        ring->count++;
    p.after.present = true;
    p.after.last_ns = name; /* the entry that push_entries pushes */
    rk_status status = place_parts(table, segment, &p, 1, now_ns, may_sweep, &claim);
    if (status == RK_OK && is_first && taken > most / 2)
        status = RK_LOG_FULL;
    if (status == RK_OK)
        status = fit_rings(table, &p, 1);
    if (status != RK_OK)
        return status;
    push_entries(table, segment, &p, 1, &claim);
    commit_marks(table, segment, &p, until_ns);
    give_blocks(table, &claim);
    give_blocks(table, &expired_ring);
    return RK_OK;
}

rk_status rk_mark(rk_table *table, rk_hash subject, int64_t name, int64_t now_ns, int64_t lasts_ns,
                  bool *is_new)
{
    rk_segment *segment = segment_of(table, subject);
    see(table, now_ns);
    rk_status status = rk_lock_try(table, &segment->lock);
    if (status != RK_OK)
        return status;
    int64_t until_ns = now_ns + lasts_ns;
    status = mark_locked(table, segment, subject, name, now_ns, until_ns, true, is_new);
    if (status == RK_SWEPT)
        status = mark_locked(table, segment, subject, name, now_ns, until_ns, false, is_new);
    rk_unlock(table, &segment->lock);
    return rk_settled(table, status);
}

rk_status rk_unmark(rk_table *table, rk_hash subject, int64_t name, int64_t now_ns)
{
    part p;
    claims claim;
    rk_segment *segment = segment_of(table, subject);
    see(table, now_ns);
    rk_status status = rk_lock_try(table, &segment->lock);
    if (status != RK_OK)
        return status;
    load_marks(table, segment, subject, now_ns, &p, &claim);
    int64_t index = mark_index(&p.before, name);
    if (index >= 0) {
        p.after = p.before;
        segment->pushes[0] =
            (rk_push){.block = p.block, .first = (uint32_t)index, .count = 1, .at_ns = 0};
        segment->push_count = 1;
        commit_marks(table, segment, &p, p.before.last_ns);
    }
    rk_unlock(table, &segment->lock);
    return rk_settled(table, RK_OK);
}

/* ---- the whole table ---- */

/* How long the functions on the whole table wait for each lock. */
static const int64_t WHOLE_TABLE_WAIT_NS = 1000000000;

static rk_status lock_for_whole(rk_table *table, rk_segment *segment)
{
    bool repaired = false;
    rk_status status = rk_lock_wait(table, &segment->lock, WHOLE_TABLE_WAIT_NS, &repaired);
    if (status == RK_OK && repaired)
        rk_recover(table, segment);
    return status;
}

rk_status rk_sweep(rk_table *table, int64_t now_ns, uint64_t *dropped)
{
    *dropped = 0;
    for (uint32_t i = 0; i < table->format.segments; i++) {
        rk_segment *segment = rk_segment_at(table, i);
        if (segment->filled == 0) /* avoids touching pages that were never used */
            continue;
        rk_status status = lock_for_whole(table, segment);
        if (status != RK_OK)
            return status;
        *dropped += sweep_segment(table, segment, now_ns, UINT32_MAX, false);
        rk_unlock(table, &segment->lock);
    }
    return rk_settled(table, RK_OK);
}

void rk_add_stats(const rk_segment *segment, uint32_t slots, rk_stats *stats)
{
    stats->expired += segment->expired;
    stats->refused += segment->refused;
    stats->crowded += segment->crowded;
    stats->repaired += segment->repaired;
    for (uint32_t slot = 0; slot < slots; slot++)
        stats->states += is_state(*tag_at((rk_segment *)segment, slot));
}

rk_status rk_read_stats(rk_table *table, rk_stats *stats)
{
    *stats = (rk_stats){
        .states_max = (uint64_t)table->format.segments * table->format.segment_limit,
        .log_bytes_used = rk_log_bytes_taken(table),
        .log_bytes_max = rk_log_bytes(table),
    };
    stats->bytes = table->bytes - stats->log_bytes_max + stats->log_bytes_used;
    for (uint32_t i = 0; i < table->format.segments; i++) {
        rk_segment *segment = rk_segment_at(table, i);
        bool in_use = segment->filled > 0;
        rk_status status = in_use ? lock_for_whole(table, segment) : RK_OK;
        if (status != RK_OK)
            return status;
        rk_add_stats(segment, in_use ? table->slots : 0, stats);
        if (in_use)
            rk_unlock(table, &segment->lock);
    }
    return rk_settled(table, RK_OK);
}

void rk_each_log(const rk_table *table, void (*visit)(void *context, uint32_t block), void *context)
{
    for (uint32_t i = 0; i < table->format.segments; i++) {
        rk_segment *segment = rk_segment_at(table, i);
        for (uint32_t slot = 0; segment->filled > 0 && slot < table->slots; slot++)
            if (*tag_at(segment, slot) & META_LOG)
                visit(context, (uint32_t)(cell_at(segment, slot)->value >> 40));
    }
}

rk_hash rk_limit_salt(const void *name, size_t length)
{
    static const uint64_t KEY[2] = {0x726174656b656570u, 0x6c696d6974u};
    return rk_siphash(KEY, name, length);
}

rk_hash rk_subject_hash(const rk_table *table, const void *subject, size_t length)
{
    return rk_siphash(table->format.seed, subject, length);
}
