/* The node's table of allowances; see decide/allowances.py, whose answers it gives. Plain C without
 * Python. The table is opened with `rk_open` and the option `allowances`. */
#ifndef RK_ALLOWANCES_H
#define RK_ALLOWANCES_H

#include "table.h"

enum {
    RK_SUBJECT_BYTES_MAX = 128,
    RK_ALLOWANCE_UNITS_MAX = (1 << 21) - 1, /* left, pending or claimed; more is cut */
};

/* One rule's limits. */
typedef struct {
    uint64_t number;
    int64_t lifetime_ns; /* demand is measured over this time */
    int64_t capacity;    /* the least of the limits: a higher cost never fits */
    int limits;
    bool leased; /* or a budget, whose spent units are reported */
} rk_allowance_gate;

typedef struct {
    rk_hash hash; /* rk_subject_hash */
    const char *bytes;
    size_t length;
} rk_subject;

/* Spend `cost` if there are units. Sets `decided` to false if the authority has to decide. With
 * `note_miss`, such a check is part of the demand, too. */
rk_status rk_spend(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                   int64_t now_ns, int64_t cost, bool note_miss, bool *decided,
                   rk_decision *decision);
rk_status rk_unspend(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                     int64_t now_ns, int64_t units, int64_t charged_store_ns, bool *done);

typedef struct {
    int64_t demand, held;
} rk_look;

rk_status rk_look_at(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                     int64_t now_ns, rk_look *look);

/* The authority's answer to a check. */
typedef struct {
    bool allowed;
    int place; /* the tightest limit */
    int64_t cost;
    int64_t units, ends_store_ns, lasts_ns; /* of the lease */
    int64_t denied_ns;                      /* how long the cost is denied from now on */
    int64_t remaining, reset_after_ns;
    int64_t decided_store_ns, charged_store_ns;
} rk_answer;

/* Units of a lease that the caller gives back; 0: none. */
typedef struct {
    int64_t units, ends_store_ns;
} rk_returned;

rk_status rk_put(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                 int64_t now_ns, const rk_answer *answer, rk_returned *returned);
rk_status rk_deny(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                  int64_t now_ns, int64_t cost, int64_t lasts_ns);
rk_status rk_stop(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                  rk_returned *returned);

typedef struct {
    uint64_t number;
    int64_t units, ends_store_ns, age_ns, token;
    bool leased;
    uint8_t length;
    char subject[RK_SUBJECT_BYTES_MAX];
} rk_claim;

typedef struct {
    int64_t now_ns, flush_ns;
    bool ending;
    const uint64_t *numbers; /* of the gates whose units the caller can report, in order */
    size_t numbers_count;
} rk_claiming;

/* Claim up to `most` units; return how many in `count`. Takes every lock in turn and waits. */
rk_status rk_claim_units(rk_table *table, const rk_claiming *claiming, rk_claim *claims,
                         size_t most, size_t *count);
/* Claim the pending units of one subject, due or not; 0 units if there are none. */
rk_status rk_claim_pending(rk_table *table, const rk_allowance_gate *gate,
                           const rk_subject *subject, int64_t now_ns, rk_claim *claim);
rk_status rk_confirm(rk_table *table, uint64_t number, const rk_subject *subject, int64_t token);

/* As rk_wait. */
rk_status rk_wait_for_allowance(rk_table *table, rk_hash subject, int64_t timeout_ns);

typedef struct {
    uint64_t held, held_max, leased_units, pending_units, refused, repaired;
} rk_allowance_stats;

rk_status rk_read_allowance_stats(rk_table *table, rk_allowance_stats *stats);

#endif
