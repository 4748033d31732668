/* The slab: memory for the rings of sliding window logs, in blocks of 64 bytes times a power of
 * two.
 *
 * A block comes from the list of free blocks of its size, or from the start of the unused part; if
 * there is neither, a larger free block is halved. Free neighbours are joined only if no block is
 * large enough, because the rings of one limit all have the same few sizes. The first word of a
 * used block is its size class with a mark; that of a free block is the next block in its list.
 *
 * Taking and returning a block commit by one store each. A kill therefore leaves the lists intact
 * and leaks at most one block; a kill during joining leaks the blocks that were being joined.
 * Leaked blocks are found when a process next opens the file alone. Every value read from the slab
 * is checked before use: after a power cut the file may contain anything. */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t IN_USE = 0x746b2d72696e6700u; /* "tk-ring", and the class in the last byte */
/* How long returning a block waits for the lock. A dead owner is detected in less time. */
static const int64_t GIVE_WAIT_NS = 5000000;

static uint64_t *word_of(const tk_table *table, uint32_t block)
{
    return (uint64_t *)(table->slab + (size_t)block * TK_BLOCK_BYTES);
}

static uint32_t class_of(const tk_table *table, uint32_t block)
{
    return (uint32_t)(*word_of(table, block) & 0xff);
}

bool tk_block_valid(const tk_table *table, uint32_t block)
{
    uint32_t blocks = table->format.blocks;
    if (block >= blocks || (*word_of(table, block) & ~(uint64_t)0xff) != IN_USE)
        return false;
    uint32_t size_class = class_of(table, block);
    return size_class < TK_BLOCK_CLASSES && (uint64_t)block + (1u << size_class) <= blocks;
}

uint32_t tk_block_capacity(const tk_table *table, uint32_t block)
{
    return (TK_BLOCK_BYTES / 8u << class_of(table, block)) - 1;
}

int64_t *tk_block_times(const tk_table *table, uint32_t block)
{
    return (int64_t *)word_of(table, block) + 1;
}

static void push_free(tk_table *table, uint32_t block, uint32_t size_class)
{
    *word_of(table, block) = table->header->slab_free[size_class];
    atomic_thread_fence(memory_order_release);
    table->header->slab_free[size_class] = block + 1;
    table->header->slab_given++;
}

static bool pop_free(tk_table *table, uint32_t size_class, uint32_t *block)
{
    uint32_t first = table->header->slab_free[size_class];
    if (first == 0 || first - 1 + ((uint64_t)1 << size_class) > table->format.blocks)
        return false;
    *block = first - 1;
    uint64_t next = *word_of(table, *block);
    table->header->slab_free[size_class] = next <= table->format.blocks ? (uint32_t)next : 0;
    return true;
}

static bool take_locked(tk_table *table, uint32_t size_class, uint32_t *block)
{
    tk_header *header = table->header;
    if (pop_free(table, size_class, block))
        return true;
    if (header->slab_used <= table->format.blocks &&
        table->format.blocks - header->slab_used >= 1u << size_class) {
        *block = header->slab_used;
        header->slab_used += 1u << size_class;
        return true;
    }
    for (uint32_t larger = size_class + 1; larger < TK_BLOCK_CLASSES; larger++) {
        if (!pop_free(table, larger, block))
            continue;
        while (larger-- > size_class)
            push_free(table, *block + (1u << larger), larger);
        return true;
    }
    return false;
}

static void free_run(tk_table *table, uint32_t from, uint32_t to)
{
    while (from < to) {
        uint32_t size_class = TK_BLOCK_CLASSES - 1;
        while (1u << size_class > to - from)
            size_class--;
        push_free(table, from, size_class);
        from += 1u << size_class;
    }
}

/* Rebuild the lists from a map of the used blocks: each free run is cut into powers of two. */
static void rebuild_lists(tk_table *table, const uint8_t *taken, uint32_t used)
{
    memset(table->header->slab_free, 0, sizeof table->header->slab_free);
    for (uint32_t from = 0; from < used;) {
        uint32_t to = from;
        while (to < used && !taken[to])
            to++;
        free_run(table, from, to);
        from = to;
        while (from < used && taken[from])
            from++;
    }
    table->header->slab_given = 0;
}

/* Join free neighbours; return false if that cannot have changed anything. */
static bool join_free(tk_table *table)
{
    tk_header *header = table->header;
    uint32_t used =
        header->slab_used < table->format.blocks ? header->slab_used : table->format.blocks;
    uint8_t *taken = header->slab_given > 0 ? malloc(used) : NULL;
    if (taken == NULL)
        return false;
    memset(taken, 1, used);
    for (uint32_t size_class = 0; size_class < TK_BLOCK_CLASSES; size_class++) {
        uint32_t block, left = used; /* only a list with a cycle is longer */
        while (left-- > 0 && pop_free(table, size_class, &block))
            if (block + ((uint64_t)1 << size_class) <= used)
                memset(taken + block, 0, (size_t)1 << size_class);
    }
    rebuild_lists(table, taken, used);
    free(taken);
    return true;
}

tk_status tk_block_take(tk_table *table, uint32_t entries, uint32_t *block)
{
    uint32_t size_class = 0;
    while ((TK_BLOCK_BYTES / 8u << size_class) - 1 < entries)
        if (++size_class == TK_BLOCK_CLASSES)
            return TK_LOG_FULL;
    /* Does not wait: the caller holds its segment's lock, and waits after releasing it. */
    tk_status status = tk_lock_try(table, &table->header->slab_lock);
    if (status != TK_OK)
        return status;
    bool taken = take_locked(table, size_class, block) ||
                 (join_free(table) && take_locked(table, size_class, block));
    if (taken)
        *word_of(table, *block) = IN_USE | size_class;
    tk_unlock(table, &table->header->slab_lock);
    return taken ? TK_OK : TK_LOG_FULL;
}

tk_status tk_slab_wait(tk_table *table, int64_t timeout_ns)
{
    bool repaired; /* nothing to repair: see above */
    tk_status status = tk_lock_wait(table, &table->header->slab_lock, timeout_ns, &repaired);
    if (status == TK_OK)
        tk_unlock(table, &table->header->slab_lock);
    return status;
}

void tk_block_give(tk_table *table, uint32_t block)
{
    bool repaired;
    if (!tk_block_valid(table, block) ||
        tk_lock_wait(table, &table->header->slab_lock, GIVE_WAIT_NS, &repaired) != TK_OK)
        return; /* leaked until a process next opens the file alone */
    push_free(table, block, class_of(table, block));
    tk_unlock(table, &table->header->slab_lock);
}

uint64_t tk_log_bytes(const tk_table *table)
{
    return (uint64_t)table->format.blocks * TK_BLOCK_BYTES;
}

/* A ring doubles until it holds all entries, so it used blocks of every size up to the last one. */
uint64_t tk_log_bytes_needed(int64_t entries)
{
    uint64_t bytes = TK_BLOCK_BYTES;
    while ((int64_t)(bytes / 8) - 1 < entries)
        bytes *= 2;
    return 2 * bytes;
}

/* ---- finding leaks ---- */

typedef struct {
    const tk_table *table;
    uint8_t *live; /* a byte per block: whether it is part of a ring */
} marks;

static void mark(void *context, uint32_t block)
{
    marks *found = context;
    if (tk_block_valid(found->table, block))
        memset(found->live + block, 1, (size_t)1 << class_of(found->table, block));
}

void tk_slab_rebuild(tk_table *table)
{
    tk_header *header = table->header;
    if (header->slab_used == 0)
        return;
    marks found = {.table = table, .live = calloc(table->format.blocks, 1)};
    if (found.live == NULL)
        return; /* leaked blocks remain until the next rebuild */
    tk_each_log(table, mark, &found);
    uint32_t used =
        header->slab_used < table->format.blocks ? header->slab_used : table->format.blocks;
    while (used > 0 && !found.live[used - 1])
        used--;
    header->slab_used = used;
    rebuild_lists(table, found.live, used);
    free(found.live);
}
