/* The layout of the table's memory. Only the files that implement the table include it.
 *
 *   header     one page: the file's format, the clock's offset, the state of the slab
 *   owners     a generation for each process that may have the file open
 *   accounts   how much of the slab each rule holds
 *   segments   each: a lock, a journal, buckets of eight tags and eight states
 *   map        a bit for each free block of the slab
 *   slab       blocks of 64 bytes × a power of two, for the rings of sliding window logs
 *   end        a mark: a file that was truncated and extended again does not have it
 *
 * A table of allowances (allowances.c) has header, owners, segments and end only.
 */
#ifndef RK_LAYOUT_H
#define RK_LAYOUT_H

#include <stdatomic.h>

#include "table.h"

enum {
    RK_VERSION = 4,
    RK_PAGE = 4096,
    RK_SLOTS_PER_BUCKET = 8, /* eight tags are one cache line */
    RK_BUCKETS_MAX = 256,
    RK_GROUP_BITS = 16,
    /* Of the slots of two buckets, those that one subject may fill under one rule; see table.c. */
    RK_GROUP_SLOTS_MAX = 5,
    RK_OWNERS_MAX = 4096, /* 12 bits of an owner's number */
    RK_OWNER_BITS = 12,
    RK_WRITES_MAX = 2 * RK_LIMITS_MAX, /* a state, and a credit or a debt, for each limit */
    RK_CLAIMS_MAX = 3 * RK_LIMITS_MAX, /* the slots of these */
    RK_BLOCK_BYTES = 64,
    RK_BLOCK_CLASSES = 18, /* 64 bytes to 8 MiB: the largest log has a million entries */
    RK_BLOCK_REF_BITS = 24,
    RK_MAP_LEVELS = 4, /* 64 to the power of 4 is the maximum number of blocks */
    RK_ACCOUNTS = 512,
    /* What a check reclaims at most if there is no free slot, or no free block: 10 or 50 µs. */
    RK_SWEEP_SLOTS = 64,
    RK_SWEEP_BLOCKS = 512,
    RK_SWEEP_SEGMENTS = 2,
    RK_ALLOWANCES_PER_BUCKET = 16, /* sixteen tags are one cache line */
    RK_ALLOWANCE_BUCKETS_MAX = 64,
    RK_ALLOWANCE_SLOTS = RK_ALLOWANCE_BUCKETS_MAX * RK_ALLOWANCES_PER_BUCKET,
};

/* Slots of one segment, and how many of them may be filled. Measured on random keys: while a
 * segment is at most 90 % full, every key found a slot in one of its buckets after moving at most
 * one other key. */
#define RK_SEGMENT_SLOTS (RK_BUCKETS_MAX * RK_SLOTS_PER_BUCKET)
#define RK_SEGMENT_DESIGN (RK_SEGMENT_SLOTS * 80 / 100)
#define RK_SEGMENT_LIMIT (RK_SEGMENT_SLOTS * 90 / 100)

/* The same for allowances. Of 3,000 simulated segments, none rejected a record before it was 85 %
 * full. */
#define RK_ALLOWANCES_DESIGN (RK_ALLOWANCE_SLOTS * 80 / 100)
#define RK_ALLOWANCES_LIMIT (RK_ALLOWANCE_SLOTS * 90 / 100)

/* A lock is 0, or its owner's number: generation << RK_OWNER_BITS | index. */
typedef _Atomic uint32_t rk_lock;

typedef struct {
    uint32_t slot;
    uint32_t unused;
    uint64_t meta;
    int64_t last_ns;
    uint64_t value;
} rk_write;

/* Entries to write into a ring: `at_ns`, `count` times, starting at position `first`. */
typedef struct {
    uint32_t block;
    uint32_t first;
    uint32_t count;
    uint32_t unused;
    int64_t at_ns;
} rk_push;

typedef struct {
    rk_lock lock;
    _Atomic uint32_t journal_count; /* writes to apply or to repeat; see table.c */
    uint32_t push_count;
    uint32_t filled; /* slots with a tag, including expired ones */
    rk_write writes[RK_WRITES_MAX];
    rk_push pushes[RK_LIMITS_MAX];
    uint64_t expired, repaired;
    _Atomic uint64_t refused, crowded;
} rk_segment;

/* A slot is a word and a cell. The word has, from its upper bits on:
 *
 *   tag 47, debt 1, log 1, credit 1, time to live or kind 14
 *
 * A state has the time to live in nanoseconds, as 6 bits of exponent and 8 of mantissa. No exponent
 * is above 54. With all six bits set, the slot is no state: the lower 8 bits are its kind, and
 * last_ns is the time of its end, from which on it is free.
 *
 *   kind             value
 *   RK_KIND_CREDIT   granted units; the state has the bit for it
 *   RK_KIND_DEBT     what the state owes as of its last_ns; the state has the bit for it
 *   RK_KIND_MARKS    names of settlements, in a block: see rk_mark
 *   RK_KIND_LEASE    units taken << 32 | units left; the lease ends at last_ns
 *
 * A credit or a debt of which the state has no bit counts nothing, and ends by itself. */
typedef struct {
    int64_t last_ns;
    uint64_t value;
} rk_cell;

enum { RK_KIND_CREDIT, RK_KIND_DEBT, RK_KIND_MARKS, RK_KIND_LEASE };

/* Eight slots: the cache line that is searched, and the states beside it. */
typedef struct {
    uint64_t tags[RK_SLOTS_PER_BUCKET]; /* the tag, flags and time to live; 0: empty */
    rk_cell cells[RK_SLOTS_PER_BUCKET];
} rk_bucket;

/* The part of the header that never changes once the file is complete. A process copies it when it
 * opens the file and uses only its copy: memory is never indexed by a field of the file that
 * another program may have overwritten since. */
typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t byte_order;
    uint64_t bytes;
    uint64_t capacity;
    uint32_t segments;
    uint32_t buckets; /* of a segment; a power of two */
    uint32_t segment_limit;
    uint32_t blocks; /* of the slab */
    uint64_t seed[2];
    uint64_t checksum; /* of all the above */
} rk_format;

typedef struct {
    rk_format format;
    /* The fields from here on change while the table is in use. */
    _Atomic int64_t epoch_offset_ns;
    char boot_id[40];
    uint64_t time_namespace; /* boot clocks differ between time namespaces */
    uint32_t slab_taken;     /* in units of the smallest block */
    rk_lock slab_lock;
    uint32_t slab_used;      /* units that were ever free or taken, from the front */
    uint64_t slab_moving;    /* units << 32 | the block that is being split or joined; 0: none */
    uint64_t epoch_checksum; /* of the offset: after damage, the file gets a new one */
} rk_header;

typedef struct {
    uint64_t rule;  /* the hash of its name */
    uint32_t units; /* of the slab that its logs hold; 0: another rule may use this account */
    uint32_t unused;
} rk_account;

/* The last bytes of a file. */
typedef struct {
    char magic[8];
    uint64_t checksum; /* that of the format */
} rk_end;

/* What happened to the file while it was in use. */
typedef enum { RK_NOT_LOST, RK_TRUNCATED, RK_REMOVED, RK_REPLACED, RK_OVERWRITTEN } rk_loss;

struct rk_table {
    rk_format format; /* our copy; the file's is only compared with it */
    uint8_t *base;
    rk_header *header;
    const rk_end *end;
    int64_t epoch_offset_ns; /* our copy */
    int64_t seen_ns;         /* the latest time of a call; 0: none */
    int64_t verify_at_ns;    /* by the boot clock: when to examine the file next */
    _Atomic rk_loss lost;    /* set once, also by the signal handler in loss.c */
    char *path;              /* NULL: memory of this process */
    _Atomic uint32_t *generations;
    rk_account *accounts;
    uint8_t *segments;
    uint64_t *free_map[RK_BLOCK_CLASSES][RK_MAP_LEVELS];
    uint8_t *slab;
    size_t segment_bytes;
    size_t bytes;
    uint32_t slots; /* of a segment */
    uint32_t bucket_mask;
    bool shared;
    bool allowances; /* instead of quotas */
    int fd;
    _Atomic uint32_t owner;     /* 0: this process may not use the table */
    uint32_t sweep_next;        /* the segment at which the next search for blocks starts */
    bool slab_filling;          /* this check has taken a block of a slab that is nearly full */
    bool opening;               /* not usable yet: after a fork, the child must release it */
    uint64_t device, inode;     /* the file of `fd`; other code may close our descriptor */
    struct rk_table *next_open; /* the list of this process's shared tables, for fork */
};

typedef struct {
    uint32_t segments, buckets, segment_limit, blocks;
    size_t segment_bytes, accounts_at, segments_at, map_at, slab_at, end_at, bytes;
} rk_geometry;

rk_geometry rk_geometry_for(uint64_t capacity, uint64_t log_bytes);
rk_geometry rk_allowances_geometry_for(uint64_t capacity);
size_t rk_segment_size(uint32_t buckets);
void rk_attach(rk_table *table, const rk_format *format, uint8_t *base);

/* locks.c */
rk_status rk_lock_try(const rk_table *table, rk_lock *lock);
/* Like rk_lock_try, but sleeps. Sets `repaired` if it took the lock from a dead owner. */
rk_status rk_lock_wait(const rk_table *table, rk_lock *lock, int64_t timeout_ns, bool *repaired);
static inline void rk_unlock(const rk_table *table, rk_lock *lock)
{
    if (table->shared)
        atomic_store_explicit(lock, 0, memory_order_release);
}
bool rk_register(rk_table *table);
/* Return whether `fd` still refers to the file that it was opened on. */
bool rk_descriptor_intact(const rk_table *table);

/* loss.c */
extern const char RK_END_MAGIC[8];
/* Handle bus errors in the table's memory. Call with the list of open tables locked. */
bool rk_guard(rk_table *table);
void rk_unguard(rk_table *table);
/* Examine the file; set `lost` if it is no longer the one that was opened. */
void rk_verify(rk_table *table, int64_t boot_ns);
/* The status of a call that may have run while the file was lost. */
static inline rk_status rk_settled(const rk_table *table, rk_status status)
{
    bool lost = atomic_load_explicit(&table->lost, memory_order_relaxed) != RK_NOT_LOST;
    return __builtin_expect(lost, 0) ? RK_LOST : status;
}

/* table.c */
rk_segment *rk_segment_at(const rk_table *table, uint32_t index);
void rk_recover(rk_table *table, rk_segment *segment);
/* Add the numbers of a segment with so many slots. Call with its lock held, or on a copy. */
void rk_add_stats(const rk_segment *segment, uint32_t slots, rk_stats *stats);
/* Call `visit` with the block of every log. Only while no other process has the table open. */
void rk_each_log(const rk_table *table, void (*visit)(void *context, uint32_t block),
                 void *context);

/* allowances.c */
size_t rk_allowance_segment_bytes(uint32_t buckets);
/* Complete what killed processes left unfinished. Only while no other process has it open. */
void rk_mend_allowances(rk_table *table);
/* End all leases and budgets: their times are those of another clock. The rest of a lease is
 * claimed, and pending units stay pending. Likewise. */
void rk_end_allowances(rk_table *table);

/* slab.c */
typedef struct {
    int64_t *times;
    uint32_t capacity;
    uint32_t size_class;
    uint32_t account;
} rk_block;

size_t rk_slab_map_words(uint32_t blocks);
void rk_slab_attach(rk_table *table, uint64_t *map);
/* Return whether a used block starts at `block`, and describe it. */
bool rk_block_at(const rk_table *table, uint32_t block, rk_block *found);
/* Take a block for at least `entries`; RK_LOG_FULL if the slab has none for this rule, RK_BUSY if
 * it is locked. A block that `replaces` one of the same rule may exceed the room of the rule. */
rk_status rk_block_take(rk_table *table, uint64_t rule, uint32_t entries, bool replaces,
                        uint32_t *block);
void rk_block_give(rk_table *table, uint32_t block);
uint64_t rk_log_bytes_taken(const rk_table *table);
rk_status rk_slab_wait(rk_table *table, int64_t timeout_ns);
/* Reclaim the blocks that killed processes leaked. Only while no other process has it open. */
void rk_slab_rebuild(rk_table *table);

#endif
