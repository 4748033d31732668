/* Locks that survive their owner.
 *
 * Problem. If a process is killed while it holds a lock in shared memory, all other processes would
 * wait forever. Linux's robust mutexes solve this, but cost 40 bytes and about 40 ns per lock, a
 * third of a whole check. Process ids do not identify an owner: they are reused and differ between
 * containers.
 *
 * Approach. Each process that opens the file claims a free index, by an exclusive record lock on
 * one byte of the file far behind its data, and increments that index's generation. A lock word
 * holds generation and index. The operating system drops the record lock when the process ends,
 * however it ends. A process that waits too long tests whether the owner's generation is still
 * current and its byte still locked. If not, the owner is dead, and the waiting process takes the
 * lock by compare-and-swap.
 *
 * The record locks belong to the open file description (F_OFD_SETLK), not to the process: closing
 * another descriptor of the same file does not drop them. But the child of a fork shares its
 * parent's description, and would make a dead parent look alive. So a fork handler gives the child
 * its own description and index, maps the file again through it (a mapping also keeps its
 * description), and closes the inherited one.
 *
 * Bound. Taking a free lock is one compare-and-swap. A dead owner delays the others by
 * SUSPECT_AFTER_NS. A stopped owner is not dead: then the wait ends with the caller's timeout. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "layout.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* About 50 µs: longer than any critical section runs, shorter than a time slice. */
static const int SPINS_MAX = 4000;
/* Reading a lock takes its cache line away from the process that uses it. If waiting processes read
 * it rarely, the line stays there for some dozen checks in a row. Two processes that alternate
 * strictly would fetch every line from each other on every check, and together be three times
 * slower than one alone. */
static const int PAUSE_MIN = 64;
static const int PAUSE_MAX = 512;
static const int64_t SLEEP_NS_MIN = 20000;
static const int64_t SLEEP_NS_MAX = 1000000;
static const int64_t SUSPECT_AFTER_NS = 2000000;
/* The offset of the record locks: no file is this long. */
static const off_t OWNER_BYTES_AT = (off_t)1 << 60;

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static bool take(const rk_table *table, rk_lock *lock)
{
    uint32_t unlocked = 0;
    return atomic_compare_exchange_strong_explicit(lock, &unlocked, table->owner,
                                                   memory_order_acquire, memory_order_relaxed);
}

rk_status rk_lock_try(const rk_table *table, rk_lock *lock)
{
    if (!table->shared)
        return RK_OK;
    if (table->owner == 0) /* the file was lost, or we are a forked child that got no index */
        return rk_settled(table, RK_UNAVAILABLE);
    if (take(table, lock))
        return RK_OK;
    for (int spins = 0, pause = PAUSE_MIN; spins < SPINS_MAX; spins += pause) {
        for (int i = 0; i < pause; i++)
            relax();
        pause = pause < PAUSE_MAX ? 2 * pause : PAUSE_MAX;
        if (atomic_load_explicit(lock, memory_order_relaxed) == 0 && take(table, lock))
            return RK_OK;
    }
    return RK_BUSY;
}

#ifdef F_OFD_SETLK

bool rk_descriptor_intact(const rk_table *table)
{
    struct stat info;
    return table->fd >= 0 && fstat(table->fd, &info) == 0 && info.st_dev == table->device &&
           info.st_ino == table->inode;
}

static bool owner_alive(const rk_table *table, uint32_t owner)
{
    uint32_t index = owner & (RK_OWNERS_MAX - 1);
    if (owner == table->owner || !rk_descriptor_intact(table))
        return true;
    if (atomic_load(&table->generations[index]) != owner >> RK_OWNER_BITS)
        return false;
    struct flock probe = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = OWNER_BYTES_AT + index, .l_len = 1};
    if (fcntl(table->fd, F_OFD_GETLK, &probe) != 0)
        return true; /* unknown: waiting is safer than taking the lock of a live owner */
    return probe.l_type != F_UNLCK;
}

bool rk_register(rk_table *table)
{
    uint32_t start = (uint32_t)getpid();
    for (uint32_t tried = 0; tried < RK_OWNERS_MAX - 1; tried++) {
        uint32_t index = 1 + (start + tried) % (RK_OWNERS_MAX - 1);
        struct flock claim = {
            .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = OWNER_BYTES_AT + index, .l_len = 1};
        if (fcntl(table->fd, F_OFD_SETLK, &claim) != 0)
            continue;
        uint32_t mask = UINT32_MAX >> RK_OWNER_BITS;
        uint32_t generation = (atomic_load(&table->generations[index]) + 1) & mask;
        atomic_store(&table->generations[index], generation);
        table->owner = generation << RK_OWNER_BITS | index;
        return true;
    }
    table->owner = 0;
    return false;
}

/* Return whether no other process has the file open. Reliable only under the opening lock. */
bool rk_alone(int fd)
{
    struct flock probe = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = OWNER_BYTES_AT, .l_len = RK_OWNERS_MAX};
    return fcntl(fd, F_OFD_GETLK, &probe) == 0 && probe.l_type == F_UNLCK;
}

#else

static bool owner_alive(const rk_table *table, uint32_t owner)
{
    (void)table, (void)owner;
    return true;
}

#endif

static int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

rk_status rk_lock_wait(const rk_table *table, rk_lock *lock, int64_t timeout_ns, bool *repaired)
{
    *repaired = false;
    rk_status status = rk_lock_try(table, lock);
    if (status != RK_BUSY)
        return status;
    int64_t start_ns = monotonic_ns(), sleep_ns = SLEEP_NS_MIN;
    for (;;) {
        struct timespec pause = {.tv_sec = 0, .tv_nsec = (long)sleep_ns};
        nanosleep(&pause, NULL);
        status = rk_lock_try(table, lock);
        if (status != RK_BUSY)
            return status;
        int64_t waited_ns = monotonic_ns() - start_ns;
        uint32_t owner = atomic_load_explicit(lock, memory_order_relaxed);
        if (owner != 0 && waited_ns > SUSPECT_AFTER_NS && !owner_alive(table, owner) &&
            atomic_compare_exchange_strong_explicit(lock, &owner, table->owner,
                                                    memory_order_acquire, memory_order_relaxed)) {
            *repaired = true;
            return RK_OK;
        }
        if (waited_ns > timeout_ns)
            return RK_BUSY;
        sleep_ns = sleep_ns * 2 < SLEEP_NS_MAX ? sleep_ns * 2 : SLEEP_NS_MAX;
    }
}
