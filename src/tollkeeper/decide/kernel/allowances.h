/* The node's table of allowances; see decide/allowances.py, whose answers it gives. Plain C without
 * Python. The table is opened with `tk_open` and the option `allowances`. */
#ifndef TK_ALLOWANCES_H
#define TK_ALLOWANCES_H

#include "table.h"

enum {
    TK_SUBJECT_BYTES_MAX = 128,
    TK_ALLOWANCE_UNITS_MAX = (1 << 21) - 1, /* left, pending or claimed; more is cut */
};

/* One rule's limits. */
typedef struct {
    uint64_t number;
    int64_t lifetime_ns; /* demand is measured over this time */
    int64_t capacity;    /* the least of the limits: a higher cost never fits */
    int limits;
    bool leased; /* or a budget, whose spent units are reported */
} tk_allowance_gate;

typedef struct {
    tk_hash hash; /* tk_subject_hash */
    const char *bytes;
    size_t length;
} tk_subject;

/* Spend `cost` if there are units. Sets `decided` to false if the authority has to decide. With
 * `note_miss`, such a check is part of the demand, too. */
tk_status tk_spend(tk_table *table, const tk_allowance_gate *gate, const tk_subject *subject,
                   int64_t now_ns, int64_t cost, bool note_miss, bool *decided,
                   tk_decision *decision);
tk_status tk_unspend(tk_table *table, const tk_allowance_gate *gate, const tk_subject *subject,
                     int64_t now_ns, int64_t units, int64_t charged_store_ns, bool *done);

typedef struct {
    int64_t demand, held;
} tk_look;

tk_status tk_look_at(tk_table *table, const tk_allowance_gate *gate, const tk_subject *subject,
                     int64_t now_ns, tk_look *look);

/* The authority's answer to a check. */
typedef struct {
    bool allowed;
    int place; /* the tightest limit */
    int64_t cost;
    int64_t units, ends_store_ns, lasts_ns; /* of the lease */
    int64_t denied_ns;                      /* how long the cost is denied from now on */
    int64_t remaining, reset_after_ns;
    int64_t decided_store_ns, charged_store_ns;
} tk_answer;

/* Units of a lease that the caller gives back; 0: none. */
typedef struct {
    int64_t units, ends_store_ns;
} tk_returned;

tk_status tk_put(tk_table *table, const tk_allowance_gate *gate, const tk_subject *subject,
                 int64_t now_ns, const tk_answer *answer, tk_returned *returned);
tk_status tk_deny(tk_table *table, const tk_allowance_gate *gate, const tk_subject *subject,
                  int64_t now_ns, int64_t cost, int64_t lasts_ns);
tk_status tk_stop(tk_table *table, const tk_allowance_gate *gate, const tk_subject *subject,
                  tk_returned *returned);

typedef struct {
    uint64_t number;
    int64_t units, ends_store_ns, age_ns, token;
    bool leased;
    uint8_t length;
    char subject[TK_SUBJECT_BYTES_MAX];
} tk_claim;

typedef struct {
    int64_t now_ns, flush_ns;
    bool ending;
    const uint64_t *numbers; /* of the gates whose units the caller can report, in order */
    size_t numbers_count;
} tk_claiming;

/* Claim up to `most` units; return how many in `count`. Takes every lock in turn and waits. */
tk_status tk_claim_units(tk_table *table, const tk_claiming *claiming, tk_claim *claims,
                         size_t most, size_t *count);
/* Claim the pending units of one subject, due or not; 0 units if there are none. */
tk_status tk_claim_pending(tk_table *table, const tk_allowance_gate *gate,
                           const tk_subject *subject, int64_t now_ns, tk_claim *claim);
tk_status tk_confirm(tk_table *table, uint64_t number, const tk_subject *subject, int64_t token);

/* As tk_wait. */
tk_status tk_wait_for_allowance(tk_table *table, tk_hash subject, int64_t timeout_ns);

typedef struct {
    uint64_t held, held_max, leased_units, pending_units, refused, repaired;
} tk_allowance_stats;

tk_status tk_read_allowance_stats(tk_table *table, tk_allowance_stats *stats);

#endif
