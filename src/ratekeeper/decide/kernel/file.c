/* Opening: the memory of a table, in this process or in a file.
 *
 * The first process creates the file under a record lock on one byte, and all others wait for that
 * lock. So two processes never create it at once, and none sees half of it. Its space is allocated
 * before it is mapped: a full disk is an error here, and not a bus error during a check. The file
 * has mode 0600. Until the header is complete the file carries another magic number, so if its
 * creator is killed, the next process creates it again.
 *
 * Time in a file is the boot clock, which all processes of the machine share and which cannot be
 * set, plus an offset to the epoch that the first process after each boot writes. So all processes
 * agree to the nanosecond, and a step of the wall clock changes nothing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "layout.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/random.h>
#endif

#ifdef CLOCK_BOOTTIME
#define BOOT_CLOCK CLOCK_BOOTTIME
#else
#define BOOT_CLOCK CLOCK_MONOTONIC
#endif

static const char MAGIC[8] = "RATEKEEP";
static const char MAGIC_ALLOWANCES[8] = "RATENODE";
static const char MAKING[8] = "RK-MAKE";
static const uint32_t BYTE_ORDER_MARK = 0x01020304;
static const uint64_t CHECKSUM_SEED[2] = {0x726174656b656570u, 0x68656164657276u};
static const uint64_t CAPACITY_DEFAULT = 1000000;
static const uint64_t ALLOWANCES_DEFAULT = 100000;
static const uint64_t LOG_BYTES_PER_STATE = 64;
static const uint64_t LOG_BYTES_MIN = 1 << 20;
static const uint64_t LOG_BYTES_MAX = (((uint64_t)1 << RK_BLOCK_REF_BITS) - 1) * RK_BLOCK_BYTES;
/* Memory of this process costs nothing until it is touched, so the default can be large. */
static const uint64_t LOG_BYTES_MEMORY_MIN = 64 << 20;
static const int OPEN_WAIT_MS_MAX = 10000;

bool rk_alone(int fd);

/* ---- geometry ---- */

static size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

size_t rk_segment_size(uint32_t buckets)
{
    return round_up(sizeof(rk_segment), 64) + (size_t)buckets * sizeof(rk_bucket);
}

rk_geometry rk_geometry_for(uint64_t capacity, uint64_t log_bytes)
{
    rk_geometry g = {.segments = 1, .buckets = 2, .segment_limit = (uint32_t)capacity};
    if (capacity > RK_SEGMENT_DESIGN) {
        g.segments = (uint32_t)((capacity + RK_SEGMENT_DESIGN - 1) / RK_SEGMENT_DESIGN);
        g.buckets = RK_BUCKETS_MAX;
        g.segment_limit = RK_SEGMENT_LIMIT;
    } else {
        /* A small table has few buckets to choose from, so it may be only half full. */
        while (g.buckets < RK_BUCKETS_MAX && g.buckets * RK_SLOTS_PER_BUCKET / 2 < capacity)
            g.buckets *= 2;
    }
    g.blocks = (uint32_t)((log_bytes + RK_BLOCK_BYTES - 1) / RK_BLOCK_BYTES);
    g.segment_bytes = rk_segment_size(g.buckets);
    g.accounts_at = round_up(RK_PAGE + RK_OWNERS_MAX * sizeof(uint32_t), 64);
    g.segments_at = round_up(g.accounts_at + RK_ACCOUNTS * sizeof(rk_account), RK_PAGE);
    g.map_at = round_up(g.segments_at + g.segment_bytes * g.segments, 64);
    g.slab_at = round_up(g.map_at + rk_slab_map_words(g.blocks) * sizeof(uint64_t), RK_PAGE);
    g.bytes = round_up(g.slab_at + (size_t)g.blocks * RK_BLOCK_BYTES + sizeof(rk_end), RK_PAGE);
    g.end_at = g.bytes - sizeof(rk_end);
    return g;
}

rk_geometry rk_allowances_geometry_for(uint64_t capacity)
{
    rk_geometry g = {.segments = 1, .buckets = 2, .segment_limit = (uint32_t)capacity};
    if (capacity > RK_ALLOWANCES_DESIGN) {
        g.segments = (uint32_t)((capacity + RK_ALLOWANCES_DESIGN - 1) / RK_ALLOWANCES_DESIGN);
        g.segment_limit = RK_ALLOWANCES_LIMIT;
    }
    while (g.buckets < RK_ALLOWANCE_BUCKETS_MAX &&
           g.buckets * RK_ALLOWANCES_PER_BUCKET / 2 < capacity)
        g.buckets *= 2;
    g.segment_bytes = rk_allowance_segment_bytes(g.buckets);
    g.segments_at = round_up(RK_PAGE + RK_OWNERS_MAX * sizeof(uint32_t), RK_PAGE);
    g.bytes = round_up(g.segments_at + g.segment_bytes * g.segments + sizeof(rk_end), RK_PAGE);
    g.end_at = g.bytes - sizeof(rk_end);
    return g;
}

static const char *magic_of(bool allowances) { return allowances ? MAGIC_ALLOWANCES : MAGIC; }

static rk_geometry geometry_of(const rk_format *format, bool allowances)
{
    return allowances
               ? rk_allowances_geometry_for(format->capacity)
               : rk_geometry_for(format->capacity, (uint64_t)format->blocks * RK_BLOCK_BYTES);
}

static uint64_t log_bytes_for(const rk_options *options, uint64_t capacity)
{
    if (options->log_bytes > 0)
        return options->log_bytes;
    uint64_t bytes = capacity * LOG_BYTES_PER_STATE;
    uint64_t least = options->path ? LOG_BYTES_MIN : LOG_BYTES_MEMORY_MIN;
    return bytes < least ? least : bytes < LOG_BYTES_MAX ? bytes : LOG_BYTES_MAX;
}

/* The geometry of a new table, and its capacity. */
static rk_geometry new_geometry(const rk_options *options, uint64_t *capacity)
{
    uint64_t usual = options->allowances ? ALLOWANCES_DEFAULT : CAPACITY_DEFAULT;
    *capacity = options->capacity ? options->capacity : usual;
    return options->allowances ? rk_allowances_geometry_for(*capacity)
                               : rk_geometry_for(*capacity, log_bytes_for(options, *capacity));
}

static uint64_t checksum_of(const rk_format *format)
{
    return rk_siphash(CHECKSUM_SEED, format, offsetof(rk_format, checksum)).low;
}

void rk_attach(rk_table *table, const rk_format *format, uint8_t *base)
{
    table->format = *format;
    table->base = base;
    table->bytes = format->bytes;
    table->header = (rk_header *)base;
    table->generations = (_Atomic uint32_t *)(base + RK_PAGE);
    rk_geometry g = geometry_of(format, table->allowances);
    table->end = (const rk_end *)(base + g.end_at);
    table->segments = base + g.segments_at;
    table->segment_bytes = g.segment_bytes;
    table->slots = g.buckets * (table->allowances ? RK_ALLOWANCES_PER_BUCKET : RK_SLOTS_PER_BUCKET);
    table->bucket_mask = g.buckets - 1;
    if (table->allowances)
        return;
    table->slab = base + g.slab_at;
    table->accounts = (rk_account *)(base + g.accounts_at);
    rk_slab_attach(table, (uint64_t *)(base + g.map_at));
}

/* ---- time ---- */

static int64_t read_clock(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

int64_t rk_now_ns(rk_table *table)
{
    int64_t boot_ns = read_clock(BOOT_CLOCK);
    if (__builtin_expect(boot_ns >= table->verify_at_ns, 0))
        rk_verify(table, boot_ns);
    return rk_time_in_range(boot_ns + table->epoch_offset_ns);
}

bool rk_is_shared(const rk_table *table) { return table->shared; }

/* ---- creating and checking a header ---- */

static bool random_seed(uint64_t seed[2])
{
#ifdef __linux__
    return getrandom(seed, 16, 0) == 16;
#else
    arc4random_buf(seed, 16);
    return true;
#endif
}

static bool fill_format(rk_format *format, bool allowances, uint64_t capacity, const rk_geometry *g)
{
    memset(format, 0, sizeof *format);
    format->version = RK_VERSION;
    format->byte_order = BYTE_ORDER_MARK;
    format->bytes = g->bytes;
    format->capacity = capacity;
    format->segments = g->segments;
    format->buckets = g->buckets;
    format->segment_limit = g->segment_limit;
    format->blocks = g->blocks;
    memcpy(format->magic, magic_of(allowances), sizeof format->magic);
    if (!random_seed(format->seed))
        return false;
    format->checksum = checksum_of(format);
    return true;
}

static rk_status fail(rk_status status, char error[RK_ERROR_BYTES], const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, RK_ERROR_BYTES, format, arguments);
    va_end(arguments);
    return status;
}

static rk_table *open_memory(const rk_options *options, rk_status *status,
                             char error[RK_ERROR_BYTES])
{
    uint64_t capacity;
    rk_geometry g = new_geometry(options, &capacity);
    rk_table *table = calloc(1, sizeof *table);
    void *base = mmap(NULL, g.bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    rk_format format;
    if (table == NULL || base == MAP_FAILED ||
        !fill_format(&format, options->allowances, capacity, &g)) {
        *status = fail(RK_UNAVAILABLE, error, "no memory for %zu bytes of quotas", g.bytes);
        if (base != MAP_FAILED)
            munmap(base, g.bytes);
        free(table);
        return NULL;
    }
    table->fd = -1;
    table->allowances = options->allowances;
    rk_attach(table, &format, base);
    table->epoch_offset_ns = rk_time_in_range(options->epoch_offset_ns);
    table->verify_at_ns = INT64_MAX;
    return table;
}

#ifdef F_OFD_SETLK

static const char RECREATE[] = "delete it to start with fresh quotas, or use another path";
static const off_t OPENING_BYTE_AT = ((off_t)1 << 60) - 1;

/* One process at a time creates or checks the file. The wait is bounded, because that is all that
 * the process with the lock does. */
static bool lock_opening(int fd)
{
    struct flock claim = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = OPENING_BYTE_AT, .l_len = 1};
    struct timespec pause = {.tv_nsec = 1000000};
    for (int waited_ms = 0; waited_ms < OPEN_WAIT_MS_MAX; waited_ms++) {
        if (fcntl(fd, F_OFD_SETLK, &claim) == 0)
            return true;
        if (errno != EAGAIN && errno != EACCES)
            return false;
        nanosleep(&pause, NULL);
    }
    return false;
}

static void unlock_opening(int fd)
{
    struct flock claim = {
        .l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = OPENING_BYTE_AT, .l_len = 1};
    fcntl(fd, F_OFD_SETLK, &claim);
}

static rk_status make_file(int fd, const rk_options *options, char error[RK_ERROR_BYTES])
{
    uint64_t capacity;
    rk_geometry g = new_geometry(options, &capacity);
    rk_format format;
    if (ftruncate(fd, 0) != 0 || pwrite(fd, MAKING, sizeof MAKING, 0) != sizeof MAKING)
        return fail(RK_UNAVAILABLE, error, "%s cannot be written: %s", options->path,
                    strerror(errno));
    int problem = posix_fallocate(fd, 0, (off_t)g.bytes);
    if (problem != 0) {
        if (ftruncate(fd, 0) != 0)
            problem = errno;
        return fail(RK_UNAVAILABLE, error,
                    "%s needs %zu bytes, which cannot be allocated: %s; free some space, or choose "
                    "a smaller capacity",
                    options->path, g.bytes, strerror(problem));
    }
    if (!fill_format(&format, options->allowances, capacity, &g))
        return fail(RK_UNAVAILABLE, error, "no random seed: %s", strerror(errno));
    rk_end end = {.checksum = format.checksum};
    memcpy(end.magic, RK_END_MAGIC, sizeof RK_END_MAGIC);
    /* The magic number is written last: it marks the file as complete. */
    size_t rest = sizeof format - sizeof MAGIC;
    if (pwrite(fd, &end, sizeof end, (off_t)g.end_at) != (ssize_t)sizeof end ||
        pwrite(fd, (char *)&format + sizeof MAGIC, rest, sizeof MAGIC) != (ssize_t)rest ||
        pwrite(fd, format.magic, sizeof MAGIC, 0) != sizeof MAGIC)
        return fail(RK_UNAVAILABLE, error, "%s cannot be written: %s", options->path,
                    strerror(errno));
    return RK_OK;
}

/* Return whether the file is or was ours: it starts with our magic number, or ends with our mark.
 * Other files are never changed. */
static bool is_ours(int fd, const rk_format *format, off_t size)
{
    rk_end end;
    if (memcmp(format->magic, MAGIC, sizeof MAGIC) == 0 ||
        memcmp(format->magic, MAGIC_ALLOWANCES, sizeof MAGIC) == 0)
        return true;
    return size >= (off_t)sizeof end &&
           pread(fd, &end, sizeof end, size - (off_t)sizeof end) == (ssize_t)sizeof end &&
           memcmp(end.magic, RK_END_MAGIC, sizeof RK_END_MAGIC) == 0;
}

static rk_status check_damage(const rk_format *format, int fd, off_t size,
                              const rk_options *options, char error[RK_ERROR_BYTES])
{
    rk_end end;
    const char *path = options->path;
    if (format->checksum != checksum_of(format) || format->capacity > RK_CAPACITY_MAX)
        return fail(RK_DAMAGED, error, "%s had a damaged header", path);
    rk_geometry g = geometry_of(format, options->allowances);
    if (g.bytes != format->bytes || g.segments != format->segments ||
        g.buckets != format->buckets || g.segment_limit != format->segment_limit)
        return fail(RK_DAMAGED, error, "%s had a header that contradicts itself", path);
    if (format->bytes != (uint64_t)size)
        return fail(RK_DAMAGED, error, "%s had %lld bytes instead of %llu", path, (long long)size,
                    (unsigned long long)format->bytes);
    if (pread(fd, &end, sizeof end, (off_t)g.end_at) != (ssize_t)sizeof end ||
        memcmp(end.magic, RK_END_MAGIC, sizeof RK_END_MAGIC) != 0 ||
        end.checksum != format->checksum)
        return fail(RK_DAMAGED, error, "%s had been truncated and extended again", path);
    return RK_OK;
}

static rk_status check_format(const rk_format *format, int fd, off_t size,
                              const rk_options *options, char error[RK_ERROR_BYTES])
{
    const char *path = options->path, *name = options->allowances ? "allowances" : "capacity";
    if (memcmp(format->magic, magic_of(options->allowances), sizeof MAGIC) != 0)
        return fail(RK_DAMAGED, error, "%s had a damaged header", path);
    if (format->byte_order != BYTE_ORDER_MARK)
        return fail(RK_UNAVAILABLE, error,
                    "%s was created on a machine with another byte order; %s", path, RECREATE);
    if (format->version != RK_VERSION)
        return fail(RK_UNAVAILABLE, error,
                    "%s has format version %u, which is %s than this one's, %u; %s", path,
                    format->version, format->version < RK_VERSION ? "older" : "newer",
                    (unsigned)RK_VERSION, RECREATE);
    rk_status status = check_damage(format, fd, size, options, error);
    if (status != RK_OK)
        return status;
    if (options->capacity && options->capacity != format->capacity)
        return fail(RK_MISMATCH, error,
                    "%s was created with %s=%llu, not %llu; omit %s, or delete the file to create "
                    "it again",
                    path, name, (unsigned long long)format->capacity,
                    (unsigned long long)options->capacity, name);
    uint64_t log_bytes = (uint64_t)format->blocks * RK_BLOCK_BYTES;
    if (options->log_bytes && rk_geometry_for(1, options->log_bytes).blocks != format->blocks)
        return fail(RK_MISMATCH, error,
                    "%s was created with log_bytes=%llu, not %llu; omit log_bytes, or delete the "
                    "file to create it again",
                    path, (unsigned long long)log_bytes, (unsigned long long)options->log_bytes);
    return RK_OK;
}

/* A user who can write the file can lift or exhaust any limit, and its owner can make it writable.
 * So both must be trusted: this process's user, root, or those that the option `mode` allows. */
static rk_status check_kind(int fd, const rk_options *options, struct stat *info,
                            char error[RK_ERROR_BYTES])
{
    const char *path = options->path;
    unsigned trusted = options->mode & (S_IWGRP | S_IWOTH);
    if (fstat(fd, info) != 0)
        return fail(RK_UNAVAILABLE, error, "%s cannot be examined: %s", path, strerror(errno));
    if (!S_ISREG(info->st_mode))
        return fail(RK_UNAVAILABLE, error, "%s is not a regular file; use another path", path);
    if (!trusted && info->st_uid != geteuid() && info->st_uid != 0)
        return fail(RK_UNAVAILABLE, error,
                    "%s belongs to user %u, who could lift or exhaust any limit, and not to this "
                    "process's user %u or to root; run as that user, or add ?mode=660 if you "
                    "trust that user",
                    path, (unsigned)info->st_uid, (unsigned)geteuid());
    unsigned writable = info->st_mode & (S_IWGRP | S_IWOTH) & ~trusted;
    if (writable)
        return fail(RK_UNAVAILABLE, error,
                    "%s is writable for %s, who could lift or exhaust any limit; chmod 600 it, or "
                    "add ?mode=%s if you trust them",
                    path, writable & S_IWOTH ? "every user" : "its group",
                    writable & S_IWOTH ? "666" : "660");
    return RK_OK;
}

/* Whether the file is empty, or was not completed. */
static bool is_unfinished(int fd, const struct stat *info)
{
    char mark[sizeof MAKING] = "";
    return info->st_size == 0 || (pread(fd, mark, sizeof mark, 0) == (ssize_t)sizeof mark &&
                                  memcmp(mark, MAKING, sizeof mark) == 0);
}

/* Read and check the format of a complete file. */
static rk_status read_format(int fd, const rk_options *options, off_t size, rk_format *format,
                             char error[RK_ERROR_BYTES])
{
    memset(format, 0, sizeof *format);
    ssize_t length = pread(fd, format, sizeof *format, 0);
    if (length < 0)
        return fail(RK_UNAVAILABLE, error, "%s cannot be read: %s", options->path, strerror(errno));
    if (memcmp(format->magic, magic_of(!options->allowances), sizeof MAGIC) == 0)
        return fail(RK_UNAVAILABLE, error,
                    "%s is a Ratekeeper file of %s and was not changed; use another path",
                    options->path, options->allowances ? "quotas" : "allowances");
    if (!is_ours(fd, format, size))
        return fail(RK_UNAVAILABLE, error,
                    "%s is not a Ratekeeper file and was not changed; use another path",
                    options->path);
    return check_format(format, fd, size, options, error);
}

/* Create the file if necessary; after RK_OK it is complete. Call with the opening lock held. */
static rk_status make_or_check(int fd, const rk_options *options, rk_format *format,
                               char error[RK_ERROR_BYTES])
{
    struct stat info;
    rk_status status = check_kind(fd, options, &info, error);
    if (status != RK_OK)
        return status;
    if (is_unfinished(fd, &info)) {
        /* Processes that use it have not noticed yet, and would write into the new content. */
        if (!rk_alone(fd))
            return fail(RK_DAMAGED, error, "%s had been emptied", options->path);
        status = make_file(fd, options, error);
        if (status != RK_OK || (status = check_kind(fd, options, &info, error)) != RK_OK)
            return status;
    }
    return read_format(fd, options, info.st_size, format, error);
}

static void read_boot_id(char id[40])
{
    memset(id, 0, 40);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t length = read(fd, id, 36);
    if (length < 0)
        id[0] = 0;
    close(fd);
}

static uint64_t time_namespace(void)
{
    struct stat info;
    return stat("/proc/self/ns/time", &info) == 0 ? info.st_ino : 0;
}

static uint64_t epoch_checksum_of(int64_t offset_ns) { return ~rk_mix((uint64_t)offset_ns); }

/* All processes with the file open must read the same boot clock. Return false if we do not. */
static bool settle_clock(rk_table *table, bool alone)
{
    rk_header *header = table->header;
    char boot_id[40];
    uint64_t namespace = time_namespace();
    read_boot_id(boot_id);
    bool same = memcmp(header->boot_id, boot_id, sizeof boot_id) == 0 &&
                header->time_namespace == namespace &&
                header->epoch_checksum == epoch_checksum_of(atomic_load(&header->epoch_offset_ns));
    if (same || !alone)
        return same;
    if (table->allowances) /* the wall clock, which continues these times, may have been set back */
        rk_end_allowances(table);
    int64_t offset_ns = read_clock(CLOCK_REALTIME) - read_clock(BOOT_CLOCK);
    atomic_store(&header->epoch_offset_ns, offset_ns);
    header->epoch_checksum = epoch_checksum_of(offset_ns);
    memcpy(header->boot_id, boot_id, sizeof boot_id);
    header->time_namespace = namespace;
    return true;
}

/* Complete what killed processes left unfinished. Only while no other process has it open. */
static void mend(rk_table *table)
{
    if (table->allowances) {
        rk_mend_allowances(table);
        return;
    }
    for (uint32_t i = 0; i < table->format.segments; i++) {
        rk_segment *segment = rk_segment_at(table, i);
        if (segment->lock == 0)
            continue;
        rk_recover(table, segment);
        rk_unlock(table, &segment->lock);
    }
    rk_unlock(table, &table->header->slab_lock);
    rk_slab_rebuild(table);
}

static rk_table *open_tables; /* of this process; protected by the lock below */
static pthread_mutex_t open_tables_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_handlers = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&open_tables_lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&open_tables_lock); }

/* Unmap and close, except for a descriptor that other code has closed. */
static void let_go(rk_table *table)
{
    rk_unguard(table);
    if (table->base != NULL)
        munmap(table->base, table->bytes);
    if (rk_descriptor_intact(table))
        close(table->fd);
    table->base = NULL;
    table->fd = -1;
}

/* Give the child of a fork its own description, index and mapping, and then release its parent's.
 * The child registers before it gives up the inherited description. Otherwise, with the parent
 * dead, another process could find the file unused for a moment and repair it as its only user. */
static bool open_anew(rk_table *table)
{
    char path[64];
    int inherited = table->fd;
    if (!rk_descriptor_intact(table))
        return false;
    snprintf(path, sizeof path, "/proc/self/fd/%d", inherited);
    table->fd = open(path, O_RDWR | O_CLOEXEC);
    bool opened = table->fd >= 0 && rk_register(table) &&
                  mmap(table->base, table->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                       table->fd, 0) == table->base;
    close(inherited);
    return opened;
}

static void after_fork_in_child(void)
{
    for (rk_table **link = &open_tables; *link != NULL;) {
        rk_table *table = *link;
        if (table->opening) { /* opened by a thread that the child does not have */
            *link = table->next_open;
            let_go(table);
            continue;
        }
        if (table->lost != RK_NOT_LOST || !open_anew(table))
            table->owner = 0;
        link = &table->next_open;
    }
    pthread_mutex_unlock(&open_tables_lock);
}

static void install_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void remember_open(rk_table *table)
{
    pthread_once(&fork_handlers, install_fork_handlers);
    pthread_mutex_lock(&open_tables_lock);
    table->next_open = open_tables;
    open_tables = table;
    pthread_mutex_unlock(&open_tables_lock);
}

static void forget_open(rk_table *table)
{
    pthread_mutex_lock(&open_tables_lock);
    for (rk_table **link = &open_tables; *link != NULL; link = &(*link)->next_open)
        if (*link == table) {
            *link = table->next_open;
            break;
        }
    pthread_mutex_unlock(&open_tables_lock);
}

static bool guard(rk_table *table)
{
    pthread_mutex_lock(&open_tables_lock);
    bool guarded = rk_guard(table);
    pthread_mutex_unlock(&open_tables_lock);
    return guarded;
}

static rk_status map_file(rk_table *table, const rk_options *options, char error[RK_ERROR_BYTES])
{
    rk_format format;
    rk_status status = make_or_check(table->fd, options, &format, error);
    if (status != RK_OK)
        return status;
    bool alone = rk_alone(table->fd);
    void *base = mmap(NULL, format.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, table->fd, 0);
    if (base == MAP_FAILED)
        return fail(RK_UNAVAILABLE, error, "%s cannot be mapped: %s", options->path,
                    strerror(errno));
    rk_attach(table, &format, base);
    if (!guard(table))
        return fail(RK_UNAVAILABLE, error, "out of memory");
    if (!rk_register(table))
        return fail(RK_UNAVAILABLE, error, "%s is open in %d processes, which is the maximum",
                    options->path, RK_OWNERS_MAX - 1);
    if (!settle_clock(table, alone))
        return fail(
            RK_UNAVAILABLE, error,
            "%s is in use by processes with another clock (a time namespace); share it only "
            "within one time namespace",
            options->path);
    table->epoch_offset_ns = rk_time_in_range(atomic_load(&table->header->epoch_offset_ns));
    if (alone)
        mend(table);
    status = rk_settled(table, RK_OK);
    if (status != RK_OK)
        rk_loss_text(table, error);
    return status;
}

/* Under the lock that a fork waits for, so that a child knows every descriptor it inherits. */
static void open_descriptor(rk_table *table, const rk_options *options)
{
    struct stat info;
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    pthread_mutex_lock(&open_tables_lock);
    for (int tries = 0; table->fd < 0 && tries < 10; tries++) { /* it may be removed in between */
        table->fd = open(options->path, flags | O_CREAT | O_EXCL, 0600);
        if (table->fd >= 0) {
            fchmod(table->fd, options->mode ? options->mode : 0600);
        } else {
            if (errno != EEXIST)
                break;
            table->fd = open(options->path, flags);
            if (errno != ENOENT)
                break;
        }
    }
    if (table->fd >= 0 && fstat(table->fd, &info) == 0) {
        table->device = info.st_dev;
        table->inode = info.st_ino;
    }
    pthread_mutex_unlock(&open_tables_lock);
}

/* If the file was replaced between opening and locking it, open the new one. */
static bool still_there(rk_table *table, const rk_options *options)
{
    for (int tries = 0; tries < 10; tries++) {
        struct stat info;
        if (lstat(options->path, &info) == 0 && info.st_dev == table->device &&
            info.st_ino == table->inode)
            return true;
        close(table->fd);
        table->fd = -1;
        open_descriptor(table, options);
        if (table->fd < 0 || !lock_opening(table->fd))
            return false;
    }
    errno = ESTALE;
    return false;
}

/* Replace a damaged file by a new one: nothing in it can be read any more. Processes that still
 * have it open notice that, and open the new one. */
static rk_status map_or_replace(rk_table *table, const rk_options *options,
                                char error[RK_ERROR_BYTES])
{
    static const char REPLACED[] = "; it was replaced by a new file with fresh quotas";
    char damage[RK_ERROR_BYTES];
    rk_status status = map_file(table, options, error);
    if (status != RK_DAMAGED)
        return status;
    snprintf(damage, sizeof damage, "%.*s%s", (int)(sizeof damage - sizeof REPLACED), error,
             REPLACED);
    if (unlink(options->path) != 0 || !still_there(table, options))
        return fail(RK_UNAVAILABLE, error, "%s is damaged and cannot be replaced: %s; %s",
                    options->path, strerror(errno), RECREATE);
    status = map_file(table, options, error);
    if (status == RK_OK)
        memcpy(error, damage, sizeof damage);
    return status == RK_DAMAGED ? RK_UNAVAILABLE : status;
}

/* The reason why a file cannot be opened, with the remedy for the mistakes of a first deployment.
 */
static const char *reason(int number)
{
    switch (number) {
    case ELOOP:
        return "it is a symbolic link";
    case ENOENT:
        return "No such file or directory; create its folder, and let this process write to it";
    case EACCES:
    case EPERM:
        return "Permission denied; use a folder that this process can write to, such as systemd's "
               "RuntimeDirectory";
    case EISDIR:
        return "Is a directory; name a file in it";
    default:
        return strerror(number);
    }
}

static void open_table(rk_table *table, const rk_options *options, rk_status *status,
                       char error[RK_ERROR_BYTES])
{
    open_descriptor(table, options);
    if (table->fd < 0)
        *status = fail(RK_UNAVAILABLE, error, "%s cannot be opened for writing: %s", options->path,
                       reason(errno));
    else if (!lock_opening(table->fd) || !still_there(table, options))
        *status = fail(RK_UNAVAILABLE, error, "%s cannot be locked: %s", options->path,
                       errno == EAGAIN   ? "another process has been opening it for 10 s"
                       : errno == ESTALE ? "it keeps being replaced"
                                         : strerror(errno));
    else {
        *status = map_or_replace(table, options, error);
        unlock_opening(table->fd);
    }
}

static rk_table *open_file(const rk_options *options, rk_status *status, char error[RK_ERROR_BYTES])
{
    rk_table *table = calloc(1, sizeof *table);
    char *path = strdup(options->path);
    if (table == NULL || path == NULL) {
        *status = fail(RK_UNAVAILABLE, error, "out of memory");
        free(table);
        free(path);
        return NULL;
    }
    table->path = path;
    table->allowances = options->allowances;
    table->shared = table->opening = true;
    table->fd = -1;
    remember_open(table);
    open_table(table, options, status, error);
    if (*status == RK_OK) {
        table->opening = false;
        return table;
    }
    forget_open(table);
    let_go(table);
    free(table->path);
    free(table);
    return NULL;
}

/* Add the numbers of each segment, from copies: the file is only read. */
static bool read_segments(int fd, const rk_format *format, rk_stats *stats)
{
    rk_header header;
    rk_geometry g = geometry_of(format, false);
    rk_segment *copy = malloc(g.segment_bytes);
    bool intact = copy != NULL && pread(fd, &header, sizeof header, 0) == (ssize_t)sizeof header;
    for (uint32_t i = 0; intact && i < g.segments; i++) {
        off_t at = (off_t)(g.segments_at + g.segment_bytes * i);
        intact = pread(fd, copy, g.segment_bytes, at) == (ssize_t)g.segment_bytes;
        if (intact)
            rk_add_stats(copy, g.buckets * RK_SLOTS_PER_BUCKET, stats);
    }
    free(copy);
    uint64_t taken = intact && header.slab_taken < g.blocks ? header.slab_taken : 0;
    stats->states_max = (uint64_t)g.segments * g.segment_limit;
    stats->log_bytes_max = (uint64_t)g.blocks * RK_BLOCK_BYTES;
    stats->log_bytes_used = taken * RK_BLOCK_BYTES;
    stats->bytes = format->bytes - stats->log_bytes_max + stats->log_bytes_used;
    return intact;
}

rk_status rk_examine(const rk_options *options, rk_stats *stats, char error[RK_ERROR_BYTES])
{
    struct stat info;
    rk_format format;
    error[0] = 0;
    *stats = (rk_stats){.states = 0};
    /* Otherwise opening a named pipe would wait for a process that writes into it. */
    int fd = open(options->path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return fail(RK_UNAVAILABLE, error, "%s cannot be opened: %s", options->path, reason(errno));
    rk_status status = check_kind(fd, options, &info, error);
    if (status == RK_OK && is_unfinished(fd, &info))
        status = fail(RK_DAMAGED, error, "%s is empty, or the process that created it was killed",
                      options->path);
    if (status == RK_OK)
        status = read_format(fd, options, info.st_size, &format, error);
    if (status == RK_OK && !read_segments(fd, &format, stats))
        status =
            fail(RK_UNAVAILABLE, error, "%s cannot be read: %s", options->path, strerror(errno));
    close(fd);
    return status;
}

#else

rk_status rk_examine(const rk_options *options, rk_stats *stats, char error[RK_ERROR_BYTES])
{
    *stats = (rk_stats){.states = 0};
    return fail(RK_UNAVAILABLE, error, "%s: shared:// needs Linux", options->path);
}

static void forget_open(rk_table *table) { (void)table; }
static void let_go(rk_table *table) { munmap(table->base, table->bytes); }

static rk_table *open_file(const rk_options *options, rk_status *status, char error[RK_ERROR_BYTES])
{
    *status =
        fail(RK_UNAVAILABLE, error,
             "%s: shared:// needs Linux, where file locks end with their process; use memory://",
             options->path);
    return NULL;
}

#endif

rk_table *rk_open(const rk_options *options, rk_status *status, char error[RK_ERROR_BYTES])
{
    *status = RK_OK;
    error[0] = 0;
    if (options->capacity > RK_CAPACITY_MAX || options->log_bytes > LOG_BYTES_MAX) {
        *status = fail(RK_MISMATCH, error, "capacity is at most %u and log_bytes at most %llu",
                       RK_CAPACITY_MAX, (unsigned long long)LOG_BYTES_MAX);
        return NULL;
    }
    return options->path == NULL ? open_memory(options, status, error)
                                 : open_file(options, status, error);
}

void rk_close(rk_table *table)
{
    if (table->shared)
        forget_open(table);
    let_go(table);
    free(table->path);
    free(table);
}
