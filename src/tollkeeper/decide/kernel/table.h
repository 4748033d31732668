/* The table: quotas in one block of memory, of this process or of a file that many processes map.
 * Plain C without Python, so that sanitizers and fuzzers can run it alone. */
#ifndef TK_TABLE_H
#define TK_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "algorithms.h"
#include "siphash.h"

enum {
    TK_LIMITS_MAX = 16,   /* of one check */
    TK_BUSIEST_MAX = 128, /* keys remembered as busy */
    TK_ERROR_BYTES = 512,
};

#define TK_CAPACITY_MAX 1000000000u

typedef enum {
    TK_OK,
    TK_FULL,        /* no room for another state */
    TK_LOG_FULL,    /* no room for a log's entries */
    TK_SWEPT,       /* internal: start over after a sweep */
    TK_BUSY,        /* the lock stayed taken for some microseconds: tk_wait, then retry */
    TK_CAPACITY,    /* the cost can never fit limits[decision.speaker] */
    TK_UNAVAILABLE, /* the file cannot be used; the message says why */
    TK_LOST,        /* the file was removed, replaced or damaged while in use: tk_loss_text */
    TK_DAMAGED,     /* internal: create the file again */
    TK_MISMATCH,    /* the file is valid, but was created with other options */
} tk_status;

typedef struct {
    const char *path;        /* NULL: memory of this process */
    uint64_t capacity;       /* the number of states; 0: that of the file, or the default */
    uint64_t log_bytes;      /* the bytes for sliding window logs; 0: likewise */
    int64_t epoch_offset_ns; /* memory only: epoch time minus the boot clock */
    unsigned mode;           /* who may open the file: 0600 (also 0), 0660 or 0666 */
    bool allowances;         /* a table of allowances, and `capacity` of them */
} tk_options;

typedef struct tk_table tk_table;

/* Open the table, and create it if necessary. On failure, NULL with a status and a message. With
 * TK_OK, a message that is not empty says why a damaged file was created again. */
tk_table *tk_open(const tk_options *options, tk_status *status, char error[TK_ERROR_BYTES]);
void tk_close(tk_table *table);

/* The table's time. It also examines the file, at most every 20 ms. */
int64_t tk_now_ns(tk_table *table);
/* After TK_LOST: what happened to the file. Return whether the table is still lost. */
bool tk_loss_text(const tk_table *table, char text[TK_ERROR_BYTES]);
bool tk_is_shared(const tk_table *table);
/* The bytes that a log of this many entries needs at most while its ring grows. */
uint64_t tk_log_bytes_needed(int64_t entries);
uint64_t tk_log_bytes(const tk_table *table);
/* The salt of a limit: the location of its states follows from it and from the subject's hash. */
tk_hash tk_limit_salt(const void *name, size_t length);
tk_hash tk_subject_hash(const tk_table *table, const void *subject, size_t length);

typedef struct {
    bool allowed;
    int speaker; /* index of the tightest limit */
    int64_t remaining;
    int64_t retry_after_ns;
    int64_t reset_after_ns;
    int64_t delay_ns;
    int64_t decided_ns; /* the time from which the waits count */
    int64_t granted;    /* granted units that the tightest limit has left */
    int64_t charged_ns; /* the earliest time that a limit was charged at, or TK_NO_TIME */
} tk_decision;

/* Decide on all limits at once. With `spend`, charge all of them if all allow. */
tk_status tk_check(tk_table *table, tk_hash subject, const tk_limit *limits, int count,
                   int64_t now_ns, int64_t cost, bool spend, tk_decision *decision);
/* Count a request that the table finally rejected with TK_FULL. */
void tk_note_refused(tk_table *table, tk_hash subject);
/* Refund `units` that were charged at `charged_ns`; TK_NO_TIME if that is not known. */
tk_status tk_give_back(tk_table *table, tk_hash subject, const tk_limit *limits, int count,
                       int64_t now_ns, int64_t units, int64_t charged_ns);
/* A ttl_ns below 0 means one window of each limit. */
tk_status tk_grant(tk_table *table, tk_hash subject, const tk_limit *limits, int count,
                   int64_t now_ns, int64_t units, int64_t ttl_ns);
tk_status tk_reset(tk_table *table, tk_hash subject, const tk_limit *limits, int count);

/* Sleep until the subject's lock is free or a dead owner's work is repaired. Return TK_BUSY if
 * neither happens within timeout_ns. Call without the interpreter's lock. */
tk_status tk_wait(tk_table *table, tk_hash subject, int64_t timeout_ns);

typedef struct {
    uint64_t states, states_max, bytes, expired, refused, repaired;
    uint64_t log_bytes_used, log_bytes_max;
} tk_stats;

/* Both take every lock in turn and wait for each; they return TK_BUSY if one stays taken. */
tk_status tk_sweep(tk_table *table, int64_t now_ns, uint64_t *dropped);
tk_status tk_read_stats(tk_table *table, tk_stats *stats);

/* On average one in this many checks of a process is sampled for `tk_busiest`. */
enum { TK_SAMPLE_EVERY = 64 };
bool tk_sample_due(tk_table *table);
void tk_note_busy(tk_table *table, tk_hash subject, const char *name, size_t length);

typedef struct {
    uint64_t checks; /* an estimate: samples times TK_SAMPLE_EVERY, halved over time */
    uint16_t length;
    char name[236]; /* truncated, never within a character */
} tk_busy;

/* Write the busiest subjects to `found`, most checks first; return their number. */
int tk_busiest(tk_table *table, tk_busy *found, int most);

#endif
