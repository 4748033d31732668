/* The table: quotas in one block of memory, of this process or of a file that many processes map.
 * Plain C without Python, so that sanitizers and fuzzers can run it alone. */
#ifndef RK_TABLE_H
#define RK_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "algorithms.h"
#include "siphash.h"

enum {
    RK_LIMITS_MAX = 16,     /* of one check */
    RK_CHARGES_MAX = 10000, /* of one call of rk_check_all */
    RK_MARKS_MAX = 1023,    /* names of settlements remembered for one subject */
    RK_ERROR_BYTES = 512,
};

#define RK_CAPACITY_MAX 1000000000u
/* In place of the hash of a rule, for the marks of settlements: see rk_mark. */
#define RK_MARKS_RULE UINT64_C(0x736574746c656421)

typedef enum {
    RK_OK,
    RK_FULL,        /* no room for another state */
    RK_CROWDED,     /* the subject has too many states under this rule */
    RK_LOG_FULL,    /* no room for a log's entries */
    RK_SWEPT,       /* internal: start over after a sweep */
    RK_BUSY,        /* the lock stayed taken for some microseconds: rk_wait, then retry */
    RK_CAPACITY,    /* the cost can never fit limits[decision.speaker] */
    RK_UNAVAILABLE, /* the file cannot be used; the message says why */
    RK_LOST,        /* the file was removed, replaced or damaged while in use: rk_loss_text */
    RK_NO_MEMORY,   /* the process has no memory for a call of many charges */
    RK_DAMAGED,     /* the file has to be created again; rk_open does that */
    RK_MISMATCH,    /* the file is valid, but was created with other options */
} rk_status;

typedef struct {
    const char *path;        /* NULL: memory of this process */
    uint64_t capacity;       /* the number of states; 0: that of the file, or the default */
    uint64_t log_bytes;      /* the bytes for sliding window logs; 0: likewise */
    int64_t epoch_offset_ns; /* memory only: epoch time minus the boot clock */
    unsigned mode;           /* who may open the file: 0600 (also 0), 0660 or 0666 */
    bool allowances;         /* a table of allowances, and `capacity` of them */
} rk_options;

typedef struct rk_table rk_table;

/* Open the table, and create it if necessary. On failure, NULL with a status and a message. With
 * RK_OK, a message that is not empty says why a damaged file was created again. */
rk_table *rk_open(const rk_options *options, rk_status *status, char error[RK_ERROR_BYTES]);
void rk_close(rk_table *table);

/* The table's time. It also examines the file, at most every 20 ms. */
int64_t rk_now_ns(rk_table *table);
/* After RK_LOST: what happened to the file. Return whether the table is still lost. */
bool rk_loss_text(const rk_table *table, char text[RK_ERROR_BYTES]);
bool rk_is_shared(const rk_table *table);
/* The bytes that a log of this many entries needs at most while its ring grows. */
uint64_t rk_log_bytes_needed(int64_t entries);
uint64_t rk_log_bytes(const rk_table *table);
/* The salt of a limit: the location of its states follows from it and from the subject's hash. */
rk_hash rk_limit_salt(const void *name, size_t length);
rk_hash rk_subject_hash(const rk_table *table, const void *subject, size_t length);
/* The hash of a subject under one rule: the states of the pair are in one segment. The functions
 * below that take limits or wait expect this one, so that a subject of many rules fills no segment.
 */
static inline rk_hash rk_group_hash(rk_hash subject, uint64_t rule)
{
    return (rk_hash){.low = subject.low ^ rule, .high = subject.high};
}

typedef struct {
    bool allowed;
    int speaker; /* index of the tightest limit */
    int64_t remaining;
    int64_t retry_after_ns;
    int64_t reset_after_ns;
    int64_t delay_ns;
    int64_t decided_ns; /* the time from which the waits count */
    int64_t granted;    /* granted units that the tightest limit has left */
    int64_t charged_ns; /* the earliest time that a limit was charged at, or RK_NO_TIME */
} rk_decision;

/* Decide on all limits at once. With `spend`, charge all of them if all allow. */
rk_status rk_check(rk_table *table, rk_hash subject, const rk_limit *limits, int count,
                   int64_t now_ns, int64_t cost, bool spend, rk_decision *decision);
/* One charge of rk_check_all. */
typedef struct {
    rk_hash subject; /* rk_group_hash */
    const rk_limit *limits;
    int count;
    int64_t cost;
    rk_status status; /* before the call: anything but RK_OK leaves the charge out */
    rk_decision decision;
} rk_charge;

/* Decide on several charges in one step. With `spend`, charge all of them if all allow; otherwise
 * each allowed one is answered as by rk_check without `spend`. If a charge finds no room for its
 * state, nothing is charged, and its status says so; `at` is that charge, and -1 if there is none.
 * RK_CAPACITY and RK_BUSY are about the charge at `at`: its cost can never fit, or its lock stayed
 * taken. With every status but RK_OK, nothing is charged and no charge has an answer. */
rk_status rk_check_all(rk_table *table, rk_charge *charges, int count, int64_t now_ns, bool spend,
                       int *at);
/* Count a request that the table finally rejected with RK_FULL, RK_LOG_FULL or RK_CROWDED. */
void rk_note_refused(rk_table *table, rk_hash subject, rk_status status);
typedef enum {
    RK_REFUND, /* return units that were charged at `time_ns`; RK_NO_TIME if that is not known */
    RK_OWE,    /* charge units whether or not there is room for them: the excess is owed */
    RK_GRANT,  /* add units for `time_ns`; below 0: for one window of each limit */
    RK_RESET,  /* forget the subject */
    RK_OWED,   /* change nothing: read what is owed */
} rk_verb;

/* A change of a subject's states under all limits, or none. */
typedef struct {
    rk_verb verb;
    rk_hash subject; /* rk_group_hash */
    const rk_limit *limits;
    int count;
    int64_t now_ns, units, time_ns;
    /* Set by RK_OWE: the most units of a limit that exceeded its bound. Set by RK_OWED: the most
     * units that a limit owes. */
    int64_t found;
} rk_change;

rk_status rk_apply(rk_table *table, rk_change *change);

/* Remember a name for a subject, for `lasts_ns` and until RK_MARKS_MAX newer ones have come;
 * `is_new` says whether it was not known. The name is from 1 to 2^61. */
rk_status rk_mark(rk_table *table, rk_hash subject, int64_t name, int64_t now_ns, int64_t lasts_ns,
                  bool *is_new);
rk_status rk_unmark(rk_table *table, rk_hash subject, int64_t name, int64_t now_ns);

/* Sleep until the subject's lock is free or a dead owner's work is repaired. Return RK_BUSY if
 * neither happens within timeout_ns. Call without the interpreter's lock. */
rk_status rk_wait(rk_table *table, rk_hash subject, int64_t timeout_ns);

typedef struct {
    uint64_t states, states_max, bytes, expired, refused, crowded, repaired;
    uint64_t log_bytes_used, log_bytes_max;
} rk_stats;

/* Both take every lock in turn and wait for each; they return RK_BUSY if one stays taken. */
rk_status rk_sweep(rk_table *table, int64_t now_ns, uint64_t *dropped);
rk_status rk_read_stats(rk_table *table, rk_stats *stats);
/* Read the statistics of the file at `options->path` without changing a byte of it. It may be in
 * use: a count may be off by the calls that run meanwhile. RK_DAMAGED: rk_open would replace it. */
rk_status rk_examine(const rk_options *options, rk_stats *stats, char error[RK_ERROR_BYTES]);

#endif
