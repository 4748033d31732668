/* A random driver of the C table, to run under the address and undefined-behaviour sanitizers.
 *
 * It makes all calls with random limits, subjects, costs and times, in memory and in a file, on
 * small tables that are full half of the time. Sometimes it closes the file and opens it again. In
 * half of the runs with a file it overwrites random bytes while the file is in use, as a power cut
 * might leave them, and sometimes truncates the file. Then the counts may be wrong, but the table
 * must not crash, hang or access other memory. A lost file is opened again.
 *
 *   random_driver FOLDER SEED ROUNDS */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "limits.h"

enum { STEPS = 20000, SUBJECTS = 300, LIMITS = 4, CHARGES = 20 };

typedef struct {
    rk_table *table;
    rk_options options;
    bool damaged, changed, owes;
    uint64_t random;
    rk_limit limits[LIMITS];
    int count;
    int64_t now_ns, latest_ns;
} run;

static uint64_t below(run *r, uint64_t bound) { return next_random(&r->random) % bound; }

static rk_limit random_limit(run *r, uint64_t id)
{
    static const int64_t windows_ns[] = {1000000, 1000000000, 60000000000, 31622400000000000};
    rk_algorithm algorithm = (rk_algorithm)below(r, 5);
    int64_t most = (int64_t[]){5, 1000, RK_UNITS_MAX}[below(r, 3)];
    if (algorithm == RK_SLIDING_WINDOW_LOG)
        most = 300;
    int64_t limit = 1 + (int64_t)below(r, (uint64_t)most);
    int64_t capacity = 0;
    if (algorithm <= RK_LEAKY_BUCKET && below(r, 2))
        capacity = 1 + (int64_t)below(r, (uint64_t)limit);
    return make_limit(algorithm, limit, windows_ns[below(r, 4)], capacity, id);
}

static rk_hash random_subject(run *r)
{
    char name[16];
    int length = snprintf(name, sizeof name, "s%d", (int)below(r, SUBJECTS));
    return rk_subject_hash(r->table, name, (size_t)length);
}

static int64_t random_cost(run *r)
{
    uint64_t dice = below(r, 20);
    if (dice < 14)
        return dice < 12;
    return (int64_t)below(r, dice < 19 ? 20 : RK_UNITS_MAX);
}

/* The invariants of every answer, also of a damaged table. */
static void check_answer(run *r, const rk_decision *d, int64_t cost)
{
    REQUIRE(d->speaker >= 0 && d->speaker < r->count, "speaker %d", d->speaker);
    const rk_limit *limit = &r->limits[d->speaker];
    REQUIRE(d->granted >= 0 && d->granted <= RK_UNITS_MAX, "granted %lld", (long long)d->granted);
    REQUIRE(d->remaining >= 0 && d->remaining <= limit->capacity + d->granted, "remaining %lld",
            (long long)d->remaining);
    REQUIRE(d->allowed ? d->retry_after_ns == 0 : d->retry_after_ns > 0, "retry %lld",
            (long long)d->retry_after_ns);
    /* A state is at most a window ahead of the latest time. A counter counts for two windows. */
    int64_t longest_ns = (3 + limit->capacity / limit->limit) * limit->window_ns;
    if (r->owes) /* a debt is paid after as long, or after ten minutes */
        longest_ns = 2 * longest_ns + 600 * SECOND_NS;
    longest_ns += r->latest_ns - r->now_ns;
    REQUIRE(d->reset_after_ns >= 0 && d->reset_after_ns <= longest_ns, "reset %lld",
            (long long)d->reset_after_ns);
    REQUIRE(r->damaged || d->allowed || d->remaining < cost, "denied %lld with %lld left",
            (long long)cost, (long long)d->remaining);
}

static void reopen(run *r)
{
    if (r->options.path == NULL)
        return;
    rk_close(r->table);
    r->table = open_or_die(&r->options);
}

static void check_or_peek(run *r, bool spend)
{
    rk_decision decision = {.speaker = -1}, look;
    rk_hash subject = random_subject(r);
    int64_t cost = random_cost(r);
    rk_status status =
        rk_check(r->table, subject, r->limits, r->count, r->now_ns, cost, spend, &decision);
    REQUIRE(status != RK_LOST || r->damaged, "an intact file is lost");
    if (status == RK_LOST)
        reopen(r);
    if (status == RK_BUSY && r->damaged)
        REQUIRE(rk_wait(r->table, subject, SECOND_NS) == RK_OK, "a damaged lock stays taken");
    if (status != RK_OK)
        return;
    check_answer(r, &decision, cost);
    if (!spend || r->damaged || !decision.allowed)
        return;
    /* A second look finds the same units remaining. */
    status = rk_check(r->table, subject, r->limits, r->count, r->now_ns, 0, false, &look);
    REQUIRE(status == RK_OK && look.remaining == decision.remaining, "%lld left, then %lld",
            (long long)decision.remaining, (long long)look.remaining);
}

/* The units that remain in each limit of the charges, one limit after the other. */
static void read_remaining(run *r, const rk_charge *charges, int count, int64_t *remaining)
{
    for (int i = 0; i < count; i++)
        for (int k = 0; k < charges[i].count; k++) {
            rk_decision look = {.remaining = 0};
            rk_check(r->table, charges[i].subject, &r->limits[k], 1, r->now_ns, 0, false, &look);
            remaining[i * LIMITS + k] = look.remaining;
        }
}

/* Units are charged to all limits of all charges, or to none. */
static void check_conserved(const rk_charge *charges, int count, const int64_t *before,
                            const int64_t *after, bool charged)
{
    for (int i = 0; i < count; i++)
        for (int k = 0; k < charges[i].count; k++) {
            int64_t units = 0;
            for (int j = 0; j < count; j++)
                if (charges[j].status == RK_OK && charges[j].subject.low == charges[i].subject.low)
                    units += charges[j].count > k ? charges[j].cost : 0;
            int at = i * LIMITS + k;
            REQUIRE(after[at] == before[at] - (charged ? units : 0),
                    "limit %d of charge %d had %lld and has %lld; %s %lld", k, i,
                    (long long)before[at], (long long)after[at], charged ? "charged" : "not",
                    (long long)units);
        }
}

static void check_several(run *r)
{
    rk_charge charges[CHARGES];
    int64_t before[CHARGES * LIMITS], after[CHARGES * LIMITS];
    int count = 1 + (int)below(r, below(r, 4) ? 4 : CHARGES), at;
    bool spend = below(r, 8) > 0, charged = spend;
    for (int i = 0; i < count; i++)
        charges[i] = (rk_charge){.subject = random_subject(r),
                                 .limits = r->limits,
                                 .count = 1 + (int)below(r, (uint64_t)r->count),
                                 .cost = random_cost(r),
                                 .status = below(r, 10) ? RK_OK : RK_BUSY};
    read_remaining(r, charges, count, before);
    rk_status status = rk_check_all(r->table, charges, count, r->now_ns, spend, &at);
    REQUIRE(status != RK_LOST || r->damaged, "an intact file is lost");
    if (status == RK_LOST)
        reopen(r);
    if (status == RK_BUSY && r->damaged)
        REQUIRE(rk_wait(r->table, charges[at].subject, SECOND_NS) == RK_OK, "a lock stays taken");
    for (int i = 0; i < count && status == RK_OK; i++) {
        if (charges[i].status == RK_OK)
            check_answer(r, &charges[i].decision, charges[i].cost);
        charged = charged && (charges[i].status == RK_OK ? charges[i].decision.allowed : i != at);
    }
    if (r->damaged || r->changed)
        return;
    read_remaining(r, charges, count, after);
    check_conserved(charges, count, before, after, charged && status == RK_OK);
}

static void damage(run *r)
{
    struct stat info;
    int fd = open(r->options.path, O_RDWR);
    REQUIRE(fd >= 0 && fstat(fd, &info) == 0, "%s", r->options.path);
    if (below(r, 4) == 0)
        REQUIRE(ftruncate(fd, (off_t)below(r, (uint64_t)info.st_size)) == 0, "ftruncate");
    for (int i = 0; i < 50; i++) {
        uint64_t bytes = next_random(&r->random);
        /* After the bytes with a checksum: damage in those is rejected when the file is opened. */
        off_t at = 96 + (off_t)below(r, (uint64_t)info.st_size - 96 - 8);
        size_t length = 1 + below(r, 8);
        if (below(r, 3) == 0)
            bytes = 0;
        if (fstat(fd, &info) != 0 || at + (off_t)length > info.st_size)
            continue;
        REQUIRE(pwrite(fd, &bytes, length, at) == (ssize_t)length, "pwrite");
    }
    close(fd);
}

/* A name is not new once it is marked, unless it is forgotten, or states take its room. */
static void mark(run *r)
{
    bool is_new, again = false;
    rk_hash subject = random_subject(r);
    int64_t name = 1 + (int64_t)below(r, below(r, 2) ? 40 : 1 << 30);
    rk_status status = rk_mark(r->table, subject, name, r->now_ns, SECOND_NS, &is_new);
    if (status == RK_OK && !r->damaged)
        REQUIRE(rk_mark(r->table, subject, name, r->now_ns, SECOND_NS, &again) == RK_OK && !again,
                "the name is new again");
    if (below(r, 8) == 0 && rk_unmark(r->table, subject, name, r->now_ns) == RK_OK && !r->damaged) {
        status = rk_mark(r->table, subject, name, r->now_ns, SECOND_NS, &again);
        REQUIRE(status != RK_OK || again, "a forgotten name is known");
    }
}

static void change(run *r, rk_verb verb, int64_t time_ns)
{
    rk_apply(r->table, &(rk_change){.verb = verb,
                                    .subject = random_subject(r),
                                    .limits = r->limits,
                                    .count = r->count,
                                    .now_ns = r->now_ns,
                                    .units = random_cost(r),
                                    .time_ns = time_ns});
}

static void step(run *r)
{
    uint64_t dropped, dice = below(r, 1000);
    rk_stats stats;
    if (dice < 300)
        r->now_ns += (int64_t)below(r, 1000000000);
    else if (dice < 310)
        r->now_ns -= (int64_t)below(r, 2000000000);
    r->latest_ns = r->now_ns > r->latest_ns ? r->now_ns : r->latest_ns;
    if (dice < 780)
        check_or_peek(r, true);
    else if (dice < 850)
        check_several(r);
    else if (dice < 900)
        check_or_peek(r, false);
    else if (dice < 940)
        change(r, RK_REFUND, below(r, 4) ? r->now_ns - (int64_t)below(r, 2000000000) : RK_NO_TIME);
    else if (dice < 970)
        change(r, RK_GRANT, (int64_t)below(r, 3000000000u) - 1);
    else if (dice < 980 && r->owes)
        change(r, RK_OWE, 0);
    else if (dice < 990)
        change(r, RK_RESET, 0);
    else if (dice < 994)
        rk_sweep(r->table, r->now_ns, &dropped);
    else if (dice < 998)
        rk_read_stats(r->table, &stats);
    else
        reopen(r);
    if (below(r, 50) == 0)
        rk_now_ns(r->table);
    if (below(r, 4) == 0)
        mark(r);
}

static void drive(const char *folder, uint64_t seed)
{
    run r = {.random = seed, .now_ns = INT64_C(1790000000000000000)};
    char path[512];
    uint64_t kind = seed % 3;
    snprintf(path, sizeof path, "%s/random.limits", folder);
    unlink(path);
    r.options = (rk_options){
        .path = kind == 0 ? NULL : path,
        .capacity = (uint64_t[]){1, 10, 200, 3000}[below(&r, 4)],
        .log_bytes = (uint64_t[]){64, 4096, 1 << 20}[below(&r, 3)],
    };
    r.damaged = kind == 2;
    r.owes = seed % 2;
    r.table = open_or_die(&r.options);
    r.count = 1 + (int)below(&r, LIMITS);
    for (int i = 0; i < r.count; i++)
        r.limits[i] = random_limit(&r, (uint64_t)i);
    for (int i = 0; i < STEPS; i++) {
        step(&r);
        if (r.damaged && below(&r, 500) == 0)
            damage(&r);
        if (below(&r, 20000) == 0) {
            r.limits[0] = random_limit(&r, 100 + below(&r, 3));
            r.changed = true; /* a state may expire by its old limit and count by the new one */
        }
    }
    rk_close(r.table);
    unlink(path);
}

int main(int count, char **arguments)
{
    REQUIRE(count == 4, "usage: random_driver FOLDER SEED ROUNDS");
    uint64_t seed = strtoull(arguments[2], NULL, 10), rounds = strtoull(arguments[3], NULL, 10);
    for (uint64_t round = 0; round < rounds; round++) {
        fprintf(stderr, "seed %llu\n", (unsigned long long)(seed + round));
        drive(arguments[1], seed + round);
    }
    printf("%llu rounds of %d steps\n", (unsigned long long)rounds, STEPS);
    return 0;
}
