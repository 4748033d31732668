/* Losing the file while it is in use.
 *
 * Problem. Another program can truncate, remove, replace or overwrite the file of a table that
 * processes have mapped: an operator, a clean-up job, a restored backup. Access to a page behind
 * the new end of a truncated file raises SIGBUS, which ends the process. On a removed or replaced
 * file, old processes would count in the old file and new ones in the new one.
 *
 * Approach. Two parts, both free for an ordinary check. (1) A process examines the file at most
 * every VERIFY_EVERY_NS, when it reads the table's time: the path must still be the same file, with
 * the same size, header and end mark. (2) No interval is short enough for a truncated file. So a
 * handler of SIGBUS maps zeroed memory of this process over the whole table, marks the table as
 * lost, and returns. The interrupted call continues on zeros, which are a valid table, and its
 * answer is discarded (rk_settled). Nothing is unwound, so no lock of the interpreter, of malloc or
 * of another thread stays taken, as it might with siglongjmp.
 *
 * After either, every call returns RK_LOST, and the binding opens the path again.
 *
 * Other handlers. A fault outside of our tables belongs to the handler that was installed before.
 * We install that handler again and return: the instruction faults again, and the handler sees the
 * fault with its own flags and mask. If the application installs a handler after us, the next
 * examination puts ours in front of it. If such a handler passes a fault on to us, we are no longer
 * the installed one, and install the handler that was there first: so there are no cycles. A SIGBUS
 * that was sent, and not caused by an access, has no address. faulthandler sends one after it has
 * printed a traceback; then we examine the size of every file.
 *
 * Bound. A table that was replaced or overwritten is used for up to 20 ms more. ADR 10 has the
 * alternatives. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "layout.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

const char RK_END_MAGIC[8] = "RATE-END";

/* Examining takes about 2 µs. */
static const int64_t VERIFY_EVERY_NS = 20000000;

/* The memory of an open table. The handler walks this list without a lock, so entries are reused
 * and never freed. */
typedef struct range {
    _Atomic(rk_table *) table; /* NULL: unused */
    _Atomic uintptr_t from, to;
    struct range *next;
} range;

static _Atomic(range *) ranges;

static void lose(rk_table *table, rk_loss loss)
{
    rk_loss none = RK_NOT_LOST;
    atomic_compare_exchange_strong(&table->lost, &none, loss);
    atomic_store(&table->owner, 0);
}

/* ---- the handler of SIGBUS ---- */

static struct sigaction first_handler; /* installed before ours */
static struct sigaction inner_handler; /* the one that ours is in front of */
static bool installed_before;

static bool cover(rk_table *table)
{
    lose(table, RK_TRUNCATED);
    return mmap(table->base, table->bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                0) == (void *)table->base;
}

static bool shrunk(const rk_table *table)
{
    struct stat info;
    return fstat(table->fd, &info) == 0 && info.st_dev == table->device &&
           info.st_ino == table->inode && (uint64_t)info.st_size < table->bytes;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    int error = errno;
    bool ours = false, has_address = info->si_code > 0;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (range *each = atomic_load(&ranges); each != NULL; each = each->next) {
        rk_table *table = atomic_load(&each->table);
        if (table == NULL || table->lost == RK_TRUNCATED)
            continue;
        if (has_address ? atomic_load(&each->from) <= at && at < atomic_load(&each->to)
                        : shrunk(table))
            ours = cover(table) || ours;
    }
    if (!ours) {
        struct sigaction current;
        sigaction(number, NULL, &current);
        bool outermost = current.sa_sigaction == on_bus_error;
        sigaction(number, outermost ? &inner_handler : &first_handler, NULL);
        if (!has_address)
            raise(number); /* delivered when we return */
    }
    errno = error;
}

static void install_handler(void)
{
    struct sigaction current,
        ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    if (sigaction(SIGBUS, NULL, &current) != 0 || current.sa_sigaction == on_bus_error)
        return;
    sigemptyset(&ours.sa_mask);
    if (!installed_before)
        first_handler = current;
    inner_handler = current;
    installed_before = true;
    sigaction(SIGBUS, &ours, NULL);
}

bool rk_guard(rk_table *table)
{
    range *found = atomic_load(&ranges);
    while (found != NULL && atomic_load(&found->table) != NULL)
        found = found->next;
    bool is_new = found == NULL;
    if (is_new && (found = calloc(1, sizeof *found)) == NULL)
        return false;
    atomic_store(&found->from, (uintptr_t)table->base);
    atomic_store(&found->to, (uintptr_t)table->base + table->bytes);
    atomic_store(&found->table, table);
    if (is_new) {
        found->next = atomic_load(&ranges);
        atomic_store(&ranges, found);
    }
    install_handler();
    return true;
}

void rk_unguard(rk_table *table)
{
    for (range *each = atomic_load(&ranges); each != NULL; each = each->next)
        if (atomic_load(&each->table) == table)
            atomic_store(&each->table, NULL);
}

/* ---- examining the file ---- */

static bool same_file(const rk_table *table, const struct stat *info)
{
    return info->st_dev == table->device && info->st_ino == table->inode;
}

/* A path that cannot be reached proves nothing: the process may have changed its root or its user.
 * A file without a name is certainly removed. */
static rk_loss examine(const rk_table *table)
{
    struct stat info;
    if (lstat(table->path, &info) == 0) {
        if (!same_file(table, &info))
            return RK_REPLACED;
    } else if (fstat(table->fd, &info) != 0 || !same_file(table, &info)) {
        return RK_NOT_LOST; /* the application has closed our descriptor */
    }
    if (info.st_nlink == 0)
        return RK_REMOVED;
    if ((uint64_t)info.st_size < table->bytes)
        return RK_TRUNCATED;
    bool intact = memcmp(&table->header->format, &table->format, sizeof table->format) == 0 &&
                  memcmp(table->end->magic, RK_END_MAGIC, sizeof RK_END_MAGIC) == 0 &&
                  table->end->checksum == table->format.checksum;
    return intact ? RK_NOT_LOST : RK_OVERWRITTEN;
}

void rk_verify(rk_table *table, int64_t boot_ns)
{
    table->verify_at_ns = boot_ns + VERIFY_EVERY_NS;
    if (atomic_load(&table->lost) != RK_NOT_LOST)
        return;
    int error = errno;
    install_handler();
    rk_loss loss = examine(table);
    if (loss != RK_NOT_LOST)
        lose(table, loss);
    errno = error;
}

bool rk_loss_text(const rk_table *table, char text[RK_ERROR_BYTES])
{
    rk_loss loss = atomic_load(&table->lost);
    static const char *const HAPPENED[] = {
        [RK_NOT_LOST] = "was lost and opened again",
        [RK_TRUNCATED] = "was truncated, or its disk failed,",
        [RK_REMOVED] = "was removed",
        [RK_REPLACED] = "was replaced by another file",
        [RK_OVERWRITTEN] = "was overwritten",
    };
    snprintf(text, RK_ERROR_BYTES, "%s %s while it was in use", table->path, HAPPENED[loss]);
    return loss != RK_NOT_LOST;
}
