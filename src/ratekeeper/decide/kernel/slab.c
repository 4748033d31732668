/* The slab: memory for the rings of sliding window logs, in blocks of 64 bytes times a power of
 * two.
 *
 * Finding a block. This is a buddy allocator: a block of size class c starts at a multiple of
 * 2^c units, and two free halves of the same block are joined at once. A free block is one bit in
 * the map of its class. Above each map are summary levels with a bit for each word that is not
 * zero, so the first free block is found in at most four words per class. Taking and returning a
 * block therefore takes at most a few hundred instructions, however full or fragmented the slab is.
 * Blocks at low addresses are taken first, so memory that was never needed is never touched.
 *
 * Room for each rule. All rules share the slab, and a client may be able to make a rule need as
 * much as there is. So each rule has an account of the blocks it holds, and may take more only
 * while it holds at most ROOM_FACTOR times what is still free (a dynamic threshold, as switches use
 * it for shared buffers). One rule alone can hold four fifths of the slab. Of the rest, the next
 * rule gets four fifths in turn; so there is room for every rule, without a division that would be
 * wrong most of the time. With more than some hundred rules that hold logs at once, a few share one
 * account.
 *
 * Killed during a call. Each step is one store to a bit or a word. A kill in between leaks the
 * block that was being moved, or leaves a summary bit for a word that is zero, which the next
 * search clears. Leaked blocks and wrong accounts are mended when a process next opens the file
 * alone. Every value read from the slab is checked before use: the file may contain anything. */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

/* The first word of a used block: this mark, the account << 8, and the class. */
static const uint64_t IN_USE = 0x746b726700000000u;
static const uint64_t IN_USE_MASK = 0xffffffff00000000u;
/* How long returning a block waits for the lock. A dead owner is detected in less time. */
static const int64_t GIVE_WAIT_NS = 5000000;
static const uint64_t ROOM_FACTOR = 4;
/* A search that meets more stale summary bits than this has met a damaged file. */
static const int STALE_MAX = 64;
enum { SHARED_ACCOUNT = 0, ACCOUNT_WAYS = 8 };

/* ---- the maps of free blocks ---- */

static uint32_t words_for(uint32_t bits) { return (bits + 63) / 64; }

size_t rk_slab_map_words(uint32_t blocks)
{
    size_t words = 0;
    for (uint32_t size_class = 0; size_class < RK_BLOCK_CLASSES; size_class++) {
        uint32_t bits = blocks >> size_class;
        for (int level = 0; level < RK_MAP_LEVELS; level++, bits = words_for(bits))
            words += words_for(bits);
    }
    return words;
}

void rk_slab_attach(rk_table *table, uint64_t *map)
{
    for (uint32_t size_class = 0; size_class < RK_BLOCK_CLASSES; size_class++) {
        uint32_t bits = table->format.blocks >> size_class;
        for (int level = 0; level < RK_MAP_LEVELS; level++, bits = words_for(bits)) {
            table->free_map[size_class][level] = map;
            map += words_for(bits);
        }
    }
}

static bool is_free(const rk_table *table, uint32_t size_class, uint32_t index)
{
    return table->free_map[size_class][0][index / 64] >> (index % 64) & 1;
}

/* From the top, so that a kill leaves at most a summary bit too many. */
static void set_free(rk_table *table, uint32_t size_class, uint32_t index)
{
    for (int level = RK_MAP_LEVELS - 1; level >= 0; level--) {
        uint32_t at = index >> (6 * level);
        table->free_map[size_class][level][at / 64] |= (uint64_t)1 << (at % 64);
        atomic_signal_fence(memory_order_seq_cst);
    }
}

static void clear_free(rk_table *table, uint32_t size_class, uint32_t index)
{
    for (int level = 0; level < RK_MAP_LEVELS; level++, index /= 64) {
        uint64_t *word = &table->free_map[size_class][level][index / 64];
        *word &= ~((uint64_t)1 << (index % 64));
        if (*word != 0)
            return;
        atomic_signal_fence(memory_order_seq_cst);
    }
}

/* Find the free block with the lowest address. */
static bool find_free(rk_table *table, uint32_t size_class, uint32_t *index)
{
    uint32_t bits = table->format.blocks >> size_class;
    for (int stale = 0; stale < STALE_MAX && bits > 0; stale++) {
        uint32_t at = 0; /* a word of this level, which is a bit of the level above */
        int level = RK_MAP_LEVELS - 1;
        for (; level >= 0; level--) {
            uint64_t *word = &table->free_map[size_class][level][at], found = *word;
            uint32_t bit = at * 64 + (found ? (uint32_t)__builtin_ctzll(found) : 0);
            if (found != 0 && (uint64_t)bit << (6 * level) >= bits)
                *word = found = 0; /* bits of blocks that do not exist: the file is damaged */
            if (found == 0)
                break;
            at = bit;
        }
        *index = at;
        if (level < 0 || level == RK_MAP_LEVELS - 1)
            return level < 0;
        table->free_map[size_class][level + 1][at / 64] &= ~((uint64_t)1 << (at % 64));
    }
    return false;
}

/* ---- blocks ---- */

static uint64_t *word_of(const rk_table *table, uint32_t block)
{
    return (uint64_t *)(table->slab + (size_t)block * RK_BLOCK_BYTES);
}

bool rk_block_at(const rk_table *table, uint32_t block, rk_block *found)
{
    if (block >= table->format.blocks)
        return false;
    uint64_t word = *(volatile uint64_t *)word_of(table, block); /* once: it may change */
    uint32_t size_class = word & 0xff;
    if ((word & IN_USE_MASK) != IN_USE || size_class >= RK_BLOCK_CLASSES)
        return false;
    uint32_t units = 1u << size_class;
    *found = (rk_block){
        .times = (int64_t *)word_of(table, block) + 1,
        .capacity = (RK_BLOCK_BYTES / 8u << size_class) - 1,
        .size_class = size_class,
        .account = (uint32_t)(word >> 8) % RK_ACCOUNTS,
    };
    return block % units == 0 && (uint64_t)block + units <= table->format.blocks;
}

/* Note the block that is about to be split or joined; 0 units: none. */
static void note_moving(rk_table *table, uint32_t block, uint32_t units)
{
    atomic_signal_fence(memory_order_seq_cst);
    *(volatile uint64_t *)&table->header->slab_moving = (uint64_t)units << 32 | block;
    atomic_signal_fence(memory_order_seq_cst);
}

/* Free the block that a dead owner was moving, and no part of it twice. */
static void recover(rk_table *table)
{
    uint64_t moving = *(volatile uint64_t *)&table->header->slab_moving;
    uint32_t block = (uint32_t)moving, units = (uint32_t)(moving >> 32), whole = 0;
    while (whole + 1 < RK_BLOCK_CLASSES && 1u << whole < units)
        whole++;
    bool valid = units == 1u << whole && block % units == 0 &&
                 (uint64_t)block + units <= table->format.blocks;
    for (uint32_t part = 0; valid && part < whole; part++)
        for (uint32_t i = block >> part; i < (block + units) >> part; i++)
            if (is_free(table, part, i))
                clear_free(table, part, i);
    if (valid) {
        if (table->header->slab_used < block + units)
            table->header->slab_used = block + units;
        set_free(table, whole, block >> whole);
    }
    note_moving(table, 0, 0);
}

/* The class of the largest block that starts at `from` and ends by `to`. */
static uint32_t largest_class(uint32_t from, uint32_t to)
{
    uint32_t size_class = 0;
    while (size_class + 1 < RK_BLOCK_CLASSES && from % (2u << size_class) == 0 &&
           (2u << size_class) <= to - from)
        size_class++;
    return size_class;
}

/* Add the next part of the slab that was never used to the free blocks. */
static bool extend(rk_table *table)
{
    uint32_t start = *(volatile uint32_t *)&table->header->slab_used;
    if (start >= table->format.blocks)
        return false;
    uint32_t size_class = largest_class(start, table->format.blocks);
    note_moving(table, start, 1u << size_class);
    table->header->slab_used = start + (1u << size_class);
    set_free(table, size_class, start >> size_class);
    note_moving(table, 0, 0);
    return true;
}

static bool take_locked(rk_table *table, uint32_t size_class, uint32_t *block)
{
    do {
        for (uint32_t from = size_class; from < RK_BLOCK_CLASSES; from++) {
            uint32_t index;
            if (!find_free(table, from, &index))
                continue;
            *block = index << from;
            note_moving(table, *block, 1u << from);
            clear_free(table, from, index);
            while (from-- > size_class)
                set_free(table, from, (*block >> from) + 1);
            return true;
        }
    } while (extend(table));
    return false;
}

static void give_locked(rk_table *table, uint32_t block, uint32_t size_class)
{
    for (; size_class + 1 < RK_BLOCK_CLASSES; size_class++) {
        uint32_t buddy = block >> size_class ^ 1;
        if (buddy >= table->format.blocks >> size_class || !is_free(table, size_class, buddy))
            break;
        block &= ~(1u << size_class);
        note_moving(table, block, 2u << size_class);
        clear_free(table, size_class, buddy);
    }
    set_free(table, size_class, block >> size_class);
    note_moving(table, 0, 0);
}

/* ---- the room of each rule ---- */

static uint32_t account_of(rk_table *table, uint64_t rule)
{
    uint32_t first = (uint32_t)(rk_mix(rule) % (RK_ACCOUNTS / ACCOUNT_WAYS)) * ACCOUNT_WAYS;
    uint32_t unused = SHARED_ACCOUNT;
    for (uint32_t i = first; i < first + ACCOUNT_WAYS; i++) {
        if (i == SHARED_ACCOUNT)
            continue;
        if (table->accounts[i].rule == rule)
            return i;
        if (table->accounts[i].units == 0)
            unused = i;
    }
    if (unused != SHARED_ACCOUNT)
        table->accounts[unused].rule = rule;
    return unused;
}

static uint64_t units_taken(const rk_table *table)
{
    uint32_t taken = *(volatile uint32_t *)&table->header->slab_taken;
    return taken < table->format.blocks ? taken : table->format.blocks;
}

/* The first blocks are not divided: otherwise a slab of one block would be of no use. */
static bool may_take(const rk_table *table, uint32_t account, uint64_t units)
{
    uint64_t unused = table->format.blocks - units_taken(table);
    return units <= unused &&
           table->accounts[account].units + units <= ROOM_FACTOR * (unused - units + 1);
}

static void count_taken(rk_table *table, uint32_t account, uint32_t units)
{
    table->header->slab_taken += units;
    table->accounts[account].units += units;
}

static void count_given(rk_table *table, uint32_t account, uint32_t units)
{
    uint32_t *taken = &table->header->slab_taken, *held = &table->accounts[account].units;
    *taken -= units < *taken ? units : *taken;
    *held -= units < *held ? units : *held;
}

rk_status rk_block_take(rk_table *table, uint64_t rule, uint32_t entries, bool replaces,
                        uint32_t *block)
{
    uint32_t size_class = 0;
    while ((RK_BLOCK_BYTES / 8u << size_class) - 1 < entries)
        if (++size_class == RK_BLOCK_CLASSES)
            return RK_LOG_FULL;
    /* Does not wait: the caller holds its segment's lock, and waits after releasing it. */
    rk_status status = rk_lock_try(table, &table->header->slab_lock);
    if (status != RK_OK)
        return status;
    uint32_t units = 1u << size_class, account = account_of(table, rule);
    bool taken =
        (replaces || may_take(table, account, units)) && take_locked(table, size_class, block);
    if (taken) {
        *word_of(table, *block) = IN_USE | (uint64_t)account << 8 | size_class;
        note_moving(table, 0, 0);
        count_taken(table, account, units);
    }
    table->slab_filling = taken && units_taken(table) > table->format.blocks / 4 * 3;
    rk_unlock(table, &table->header->slab_lock);
    return taken ? RK_OK : RK_LOG_FULL;
}

rk_status rk_slab_wait(rk_table *table, int64_t timeout_ns)
{
    bool repaired;
    rk_status status = rk_lock_wait(table, &table->header->slab_lock, timeout_ns, &repaired);
    if (status != RK_OK)
        return status;
    if (repaired)
        recover(table);
    rk_unlock(table, &table->header->slab_lock);
    return RK_OK;
}

void rk_block_give(rk_table *table, uint32_t block)
{
    bool repaired;
    rk_block given;
    if (!rk_block_at(table, block, &given) ||
        rk_lock_wait(table, &table->header->slab_lock, GIVE_WAIT_NS, &repaired) != RK_OK)
        return; /* leaked until a process next opens the file alone */
    if (repaired)
        recover(table);
    note_moving(table, block, 1u << given.size_class);
    *word_of(table, block) = 0;
    count_given(table, given.account, 1u << given.size_class);
    give_locked(table, block, given.size_class);
    rk_unlock(table, &table->header->slab_lock);
}

uint64_t rk_log_bytes(const rk_table *table)
{
    return (uint64_t)table->format.blocks * RK_BLOCK_BYTES;
}

uint64_t rk_log_bytes_taken(const rk_table *table) { return units_taken(table) * RK_BLOCK_BYTES; }

/* A ring doubles until it holds all entries, so it used blocks of every size up to the last one. */
uint64_t rk_log_bytes_needed(int64_t entries)
{
    uint64_t bytes = RK_BLOCK_BYTES;
    while ((int64_t)(bytes / 8) - 1 < entries)
        bytes *= 2;
    return 2 * bytes;
}

/* ---- finding leaks ---- */

typedef struct {
    rk_table *table;
    uint8_t *live; /* a byte per block: whether it is part of a ring */
} marks;

static void mark(void *context, uint32_t block)
{
    marks *found = context;
    rk_block used;
    if (!rk_block_at(found->table, block, &used) || found->live[block])
        return;
    memset(found->live + block, 1, (size_t)1 << used.size_class);
    count_taken(found->table, used.account, 1u << used.size_class);
}

/* Cut the free blocks from `from` to `to` into powers of two. */
static void free_run(rk_table *table, uint32_t from, uint32_t to)
{
    while (from < to) {
        uint32_t size_class = largest_class(from, to);
        set_free(table, size_class, from >> size_class);
        from += 1u << size_class;
    }
}

void rk_slab_rebuild(rk_table *table)
{
    rk_header *header = table->header;
    if (header->slab_used == 0)
        return;
    marks found = {.table = table, .live = calloc(table->format.blocks, 1)};
    if (found.live == NULL)
        return; /* leaked blocks remain until the next rebuild */
    note_moving(table, 0, 0);
    header->slab_taken = 0;
    for (uint32_t i = 0; i < RK_ACCOUNTS; i++)
        table->accounts[i].units = 0;
    memset(table->free_map[0][0], 0, rk_slab_map_words(table->format.blocks) * sizeof(uint64_t));
    rk_each_log(table, mark, &found);
    uint32_t used = header->slab_used;
    used = used < table->format.blocks ? used : table->format.blocks;
    while (used > 0 && !found.live[used - 1])
        used--;
    header->slab_used = used;
    for (uint32_t from = 0; from < used;) {
        uint32_t to = from;
        while (to < used && !found.live[to])
            to++;
        free_run(table, from, to);
        from = to;
        while (from < used && found.live[from])
            from++;
    }
    free(found.live);
}
