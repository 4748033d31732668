/* Kills a process at every machine instruction of a call on the table of allowances.
 *
 * As kill_driver.c: a child makes one call, and the parent single-steps it. After each instruction
 * that changes the file, the parent opens a copy of it, as other processes would find it if the
 * child had been killed there, and checks:
 *
 *   - the units are those before the call or those after it; only a lease that is being put there
 *     may be missing, with the one that it replaces,
 *   - no unit is spent after the end of its lease,
 *   - another process goes on: it spends, reports and confirms.
 *
 * At every KILL_EVERY-th instruction it also kills the child on the file that the parent has open.
 *
 *   allowances_kill_driver FOLDER */
#include "allowances.h"
#include "layout.h"
#include "stepping.h"

static const long KILL_EVERY = 149;
static const int64_t NOW_NS = 1000 * 1000000000ll;
static const int64_t LATER_NS = 2000 * 1000000000ll; /* the end of the later lease */
static const int64_t STORE_NS = 5000 * 1000000000ll;
static const uint64_t NUMBERS[] = {7, 11};

enum { LEASE = 10, LATER_LEASE = 40, SPENT = 3 };

typedef struct scene scene;
struct scene {
    const char *name;
    bool leased;
    void (*prepare)(rk_table *table, const scene *s);
    void (*call)(rk_table *table, const scene *s);
    bool puts; /* units may be missing while it writes them */
};

static rk_allowance_gate gate_of(const scene *s)
{
    return (rk_allowance_gate){.number = NUMBERS[!s->leased],
                               .lifetime_ns = SECOND_NS,
                               .capacity = RK_UNITS_MAX,
                               .limits = 1,
                               .leased = s->leased};
}

static rk_subject subject_of(const rk_table *table, const char *name)
{
    return (rk_subject){
        .bytes = name, .length = strlen(name), .hash = rk_subject_hash(table, name, strlen(name))};
}

/* Repeat a call while a dead owner has the lock. */
#define PATIENTLY(table, subject, call)                                                            \
    do {                                                                                           \
        rk_status status;                                                                          \
        while ((status = (call)) == RK_BUSY)                                                       \
            REQUIRE(rk_wait_for_allowance(table, (subject).hash, 5 * SECOND_NS) == RK_OK,          \
                    "the lock stays taken");                                                       \
        REQUIRE(status == RK_OK, "status %d", status);                                             \
    } while (0)

/* ---- calls ---- */

static void put_units(rk_table *table, const scene *s, const char *name, int64_t units,
                      int64_t ends_ns)
{
    rk_allowance_gate gate = gate_of(s);
    rk_subject subject = subject_of(table, name);
    rk_returned returned;
    rk_answer answer = {.allowed = true,
                        .cost = 1,
                        .units = units,
                        .ends_store_ns = STORE_NS + ends_ns,
                        .lasts_ns = ends_ns - NOW_NS,
                        .remaining = 500,
                        .decided_store_ns = STORE_NS,
                        .charged_store_ns = STORE_NS};
    PATIENTLY(table, subject, rk_put(table, &gate, &subject, NOW_NS, &answer, &returned));
}

static void put(rk_table *table, const scene *s)
{
    put_units(table, s, "ada", LEASE, NOW_NS + SECOND_NS);
}

static void put_later(rk_table *table, const scene *s)
{
    put_units(table, s, "ada", LATER_LEASE, LATER_NS);
}

static int64_t spend_at(rk_table *table, const scene *s, int64_t cost, int64_t now_ns)
{
    rk_allowance_gate gate = gate_of(s);
    rk_subject subject = subject_of(table, "ada");
    rk_decision decision;
    bool decided;
    PATIENTLY(table, subject,
              rk_spend(table, &gate, &subject, now_ns, cost, true, &decided, &decision));
    return decided && decision.allowed ? cost : 0;
}

static void spend(rk_table *table, const scene *s) { spend_at(table, s, SPENT, NOW_NS); }

static void unspend(rk_table *table, const scene *s)
{
    rk_allowance_gate gate = gate_of(s);
    rk_subject subject = subject_of(table, "ada");
    bool done;
    PATIENTLY(table, subject, rk_unspend(table, &gate, &subject, NOW_NS, SPENT, STORE_NS, &done));
}

static size_t claim_at(rk_table *table, int64_t now_ns, rk_claim claims[4])
{
    size_t count;
    rk_claiming claiming = {
        .now_ns = now_ns, .ending = true, .numbers = NUMBERS, .numbers_count = 2};
    REQUIRE(rk_claim_units(table, &claiming, claims, 4, &count) == RK_OK, "claim");
    return count;
}

static void claim(rk_table *table, const scene *s)
{
    (void)s;
    rk_claim claims[4];
    claim_at(table, NOW_NS, claims);
}

static void confirm_at(rk_table *table, int64_t now_ns)
{
    rk_claim claims[4];
    size_t count = claim_at(table, now_ns, claims);
    for (size_t i = 0; i < count; i++) {
        rk_subject subject = {.bytes = claims[i].subject, .length = claims[i].length};
        subject.hash = rk_subject_hash(table, subject.bytes, subject.length);
        PATIENTLY(table, subject, rk_confirm(table, claims[i].number, &subject, claims[i].token));
    }
}

static void confirm(rk_table *table, const scene *s)
{
    (void)s;
    confirm_at(table, NOW_NS);
}

static void deny(rk_table *table, const scene *s)
{
    rk_allowance_gate gate = gate_of(s);
    rk_subject subject = subject_of(table, "ada");
    PATIENTLY(table, subject, rk_deny(table, &gate, &subject, NOW_NS, 1, SECOND_NS / 2));
}

static void stop(rk_table *table, const scene *s)
{
    rk_allowance_gate gate = gate_of(s);
    rk_subject subject = subject_of(table, "ada");
    rk_returned returned;
    PATIENTLY(table, subject, rk_stop(table, &gate, &subject, &returned));
}

/* ---- states before a call ---- */

static void nothing(rk_table *table, const scene *s) { (void)table, (void)s; }

static void has_units(rk_table *table, const scene *s) { put(table, s); }

static void has_spent(rk_table *table, const scene *s)
{
    put(table, s);
    spend(table, s);
}

static void has_claimed(rk_table *table, const scene *s)
{
    has_spent(table, s);
    claim(table, s);
    spend(table, s);
}

/* The table is full of records that are idle by now. */
static void is_full(rk_table *table, const scene *s)
{
    char name[8];
    rk_allowance_gate gate = gate_of(s);
    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "s%d", i);
        rk_subject subject = subject_of(table, name);
        PATIENTLY(table, subject, rk_deny(table, &gate, &subject, NOW_NS / 2, 1, 1));
    }
}

static const scene SCENES[] = {
    {"a new lease", true, nothing, put, true},
    {"a new lease in a full table", true, is_full, put, true},
    {"a lease replaced", true, has_units, put_later, true},
    {"a lease spent", true, has_units, spend, false},
    {"a lease claimed", true, has_spent, claim, false},
    {"a lease unspent", true, has_spent, unspend, false},
    {"a lease stopped", true, has_spent, stop, false},
    {"a denial", true, has_units, deny, false},
    {"a new budget", false, nothing, put, true},
    {"a budget with pending units", false, has_spent, put_later, true},
    {"a budget spent", false, has_units, spend, false},
    {"a budget spent again", false, has_spent, spend, false},
    {"a budget spent while claimed", false, has_claimed, spend, false},
    {"pending units claimed", false, has_spent, claim, false},
    {"pending units confirmed", false, has_spent, confirm, false},
    {"pending units unspent", false, has_spent, unspend, false},
    {"a budget denied", false, has_spent, deny, false},
};

/* ---- what must hold ---- */

typedef struct {
    int64_t left, pending;
} counts;

/* What may be spent at NOW_NS, and what is reported in the end. It uses the table up. */
static counts counts_of(rk_table *table, const scene *s)
{
    rk_allowance_stats stats;
    REQUIRE(rk_read_allowance_stats(table, &stats) == RK_OK, "stats");
    counts found = {.pending = (int64_t)stats.pending_units};
    while (spend_at(table, s, 1, NOW_NS))
        found.left++;
    return found;
}

static bool same(counts a, counts b) { return a.left == b.left && a.pending == b.pending; }

/* Check a table whose last process was killed. Return whether the call has happened. */
static bool check(rk_table *table, const scene *s, counts before, counts after, long instructions)
{
    /* The earlier lease has ended: only units of the later one can be spent. */
    int64_t late = spend_at(table, s, LEASE + 1, NOW_NS + SECOND_NS) +
                   spend_at(table, s, 1, NOW_NS + SECOND_NS);
    REQUIRE(late == 0 || s->call == put_later, "%s killed after %ld: %lld were spent after the end",
            s->name, instructions, (long long)late);
    counts found = counts_of(table, s);
    if (s->leased)
        found.left += late;
    else /* they are pending now */
        found = (counts){.left = found.left + late, .pending = found.pending - late};
    bool missing = s->puts && found.left == 0 && found.pending == before.pending;
    REQUIRE(same(found, before) || same(found, after) || missing,
            "%s killed after %ld: %lld left and %lld pending", s->name, instructions,
            (long long)found.left, (long long)found.pending);
    confirm_at(table, NOW_NS + 100 * SECOND_NS); /* also what was claimed before the kill */
    confirm_at(table, NOW_NS + 200 * SECOND_NS);
    rk_allowance_stats stats;
    REQUIRE(rk_read_allowance_stats(table, &stats) == RK_OK, "stats");
    REQUIRE(stats.pending_units == 0, "%s: units stay pending", s->name);
    put_later(table, s);
    REQUIRE(spend_at(table, s, LATER_LEASE, NOW_NS) == LATER_LEASE || s->call == deny,
            "%s killed after %ld: nothing more is spent", s->name, instructions);
    return same(found, after);
}

static pid_t start_child(rk_table *table, const scene *s)
{
    pid_t child = fork();
    REQUIRE(child >= 0, "%s", strerror(errno));
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGSTOP);
        s->call(table, s);
        _exit(0);
    }
    int state;
    REQUIRE(waitpid(child, &state, 0) == child && WIFSTOPPED(state), "the child: %d", state);
    return child;
}

static rk_table *open_prepared(const char *path, const scene *s)
{
    unlink(path);
    rk_table *table = open_or_die(&(rk_options){.path = path, .allowances = true, .capacity = 20});
    s->prepare(table, s);
    return table;
}

static counts counts_of_copy(const char *path, const char *copy, const scene *s, bool called)
{
    copy_file(path, copy);
    rk_table *table = open_or_die(&(rk_options){.path = copy, .allowances = true});
    if (called)
        s->call(table, s);
    counts found = counts_of(table, s);
    rk_close(table);
    return found;
}

/* Check every instruction of the call, on copies; return their number. */
static long walk(const char *path, const char *copy, const scene *s, counts *before, counts *after)
{
    rk_table *table = open_prepared(path, s);
    *before = counts_of_copy(path, copy, s, false);
    *after = counts_of_copy(path, copy, s, true);
    long instructions = 0;
    int happened = 0, changes = 0;
    pid_t child = start_child(table, s);
    for (; run_child(child, 1); instructions++) {
        if (!has_changed(table, changes == 0))
            continue;
        changes++;
        copy_file(path, copy);
        rk_table *left_behind = open_or_die(&(rk_options){.path = copy, .allowances = true});
        happened += check(left_behind, s, *before, *after, instructions);
        rk_close(left_behind);
    }
    rk_close(table);
    REQUIRE(same(*before, *after) || (happened > 0 && happened < changes),
            "%s: %d of %d: this tested nothing", s->name, happened, changes);
    printf("%s: %ld instructions, %d change the file, done after %d\n", s->name, instructions,
           changes, changes - happened);
    return instructions;
}

static bool stands_inside(rk_table *table, const scene *s)
{
    rk_allowance_gate gate = gate_of(s);
    rk_subject subject = subject_of(table, "ada");
    rk_look look;
    return rk_look_at(table, &gate, &subject, NOW_NS, &look) == RK_BUSY;
}

int main(int count, char **arguments)
{
    char path[512], copy[520];
    int inside = 0;
    REQUIRE(count == 2, "usage: allowances_kill_driver FOLDER");
    snprintf(path, sizeof path, "%s/allowances", arguments[1]);
    snprintf(copy, sizeof copy, "%s.copy", path);
    for (size_t i = 0; i < sizeof SCENES / sizeof *SCENES; i++) {
        const scene *s = &SCENES[i];
        counts before, after;
        long instructions = walk(path, copy, s, &before, &after);
        for (long at = KILL_EVERY; at < instructions; at += KILL_EVERY) {
            rk_table *table = open_prepared(path, s);
            pid_t child = start_child(table, s);
            if (!run_child(child, at)) { /* in this file, its record is found sooner */
                rk_close(table);
                break;
            }
            if (stands_inside(table, s)) {
                rk_claim claims[4];
                inside++;
                REQUIRE(claim_at(table, NOW_NS, claims) == 0, "claimed in a locked segment");
            }
            kill(child, SIGKILL);
            REQUIRE(waitpid(child, NULL, 0) == child, "%s", strerror(errno));
            check(table, s, before, after, at);
            rk_close(table);
        }
    }
    REQUIRE(inside > 10, "only %d were killed inside the lock: this tested nothing", inside);
    printf("%d killed inside the lock\n", inside);
    return 0;
}
