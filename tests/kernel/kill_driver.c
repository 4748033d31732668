/* Kills a process at every machine instruction of a call.
 *
 * A child process makes one call on a shared table. The parent single-steps it (ptrace) through all
 * machine instructions. After each one that changes the file it copies it: the copy is what other
 * processes would find if the child had been killed there. The parent opens the copy and checks
 * that it does not hang, and that every limit of the call is charged completely or not at all.
 *
 * At every KILL_EVERY-th instruction it also kills the child with SIGKILL, on the file that the
 * parent has open itself, so that the parent really takes the lock of a dead owner. While the
 * child is stopped inside the lock, the parent's own call must return RK_BUSY and not hang.
 *
 * A call of several charges holds several locks. Killed in between, each charge is made completely
 * or not at all, and the others find all locks free.
 *
 *   kill_driver FOLDER */
#include "layout.h"
#include "stepping.h"

typedef struct {
    const char *name;
    rk_limit limits[3];
    int count;
    int64_t cost;
    int fill;   /* spent one by one before, so that rings have grown to where the call finds them */
    bool grant; /* granted some units before, which the call will draw on */
    int others; /* keys that were there before and must not be touched */
    bool owes;  /* the call charges beyond the room */
} scene;

static const long KILL_EVERY = 211;
static const int64_t NOW_NS = 1000 * 1000000000ll;
static const int64_t YEAR_NS = 365 * 86400ll * 1000000000ll;

static rk_status change(rk_table *table, rk_verb verb, rk_hash subject, const rk_limit *limits,
                        int count, int64_t units)
{
    return rk_apply(table, &(rk_change){.verb = verb,
                                        .subject = subject,
                                        .limits = limits,
                                        .count = count,
                                        .now_ns = NOW_NS,
                                        .units = units,
                                        .time_ns = -1});
}

static rk_status patiently(rk_table *table, rk_hash subject, rk_status status)
{
    return status == RK_BUSY ? rk_wait(table, subject, 5 * SECOND_NS) : RK_OK;
}

static int64_t remaining(rk_table *table, rk_hash subject, const rk_limit *limit)
{
    rk_decision decision;
    rk_status status;
    while ((status = rk_check(table, subject, limit, 1, NOW_NS, 0, false, &decision)) != RK_OK)
        REQUIRE(patiently(table, subject, status) == RK_OK, "the lock stays taken: %d", status);
    return decision.remaining;
}

static bool spend_if_room(rk_table *table, rk_hash subject, const scene *s, int64_t cost)
{
    static int64_t stamp = 1000; /* another request in flight each time */
    rk_limit limits[3];
    rk_decision decision;
    rk_status status;
    stamp++;
    for (int i = 0; i < s->count; i++) {
        limits[i] = s->limits[i];
        limits[i].stamp = stamp;
    }
    while ((status = rk_check(table, subject, limits, s->count, NOW_NS, cost, true, &decision)) ==
           RK_BUSY)
        REQUIRE(patiently(table, subject, status) == RK_OK, "the lock stays taken");
    REQUIRE(status == RK_FULL || (status == RK_OK && decision.allowed), "status %d", status);
    return status == RK_OK;
}

static void spend(rk_table *table, rk_hash subject, const scene *s, int64_t cost)
{
    REQUIRE(spend_if_room(table, subject, s, cost), "%s: no room", s->name);
}

static pid_t start_child(rk_table *table, rk_hash subject, const scene *s)
{
    pid_t child = fork();
    REQUIRE(child >= 0, "%s", strerror(errno));
    if (child == 0) {
        rk_decision decision;
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGSTOP);
        if (s->owes)
            change(table, RK_OWE, subject, s->limits, s->count, s->cost);
        else
            rk_check(table, subject, s->limits, s->count, NOW_NS, s->cost, true, &decision);
        _exit(0);
    }
    int state;
    REQUIRE(waitpid(child, &state, 0) == child && WIFSTOPPED(state), "the child: %d", state);
    return child;
}

static bool stands_inside(rk_table *table, rk_hash subject, const scene *s)
{
    rk_decision decision;
    return rk_check(table, subject, s->limits, s->count, NOW_NS, 0, false, &decision) == RK_BUSY;
}

static const int64_t OTHERS_LEFT = 999;

static rk_hash other_subject(const rk_table *table, int number)
{
    char name[32];
    int length = snprintf(name, sizeof name, "other-%d", number);
    return rk_subject_hash(table, name, (size_t)length);
}

/* The remaining units of each limit before the call. */
static void prepare(rk_table *table, rk_hash subject, const scene *s, int64_t before[3])
{
    REQUIRE(change(table, RK_RESET, subject, s->limits, s->count, 0) == RK_OK, "reset");
    for (int i = 0; i < s->fill; i++)
        spend(table, subject, s, 1);
    if (s->grant)
        REQUIRE(change(table, RK_GRANT, subject, s->limits, s->count, 7) == RK_OK, "grant");
    for (int i = 0; i < s->count; i++)
        before[i] = remaining(table, subject, &s->limits[i]);
}

/* The debt of a token bucket and of a log, by the time until they have room for one unit. */
static void check_owed(rk_table *table, rk_hash subject, const scene *s, const int64_t before[3],
                       long instructions)
{
    for (int i = 0; i < s->count; i++) {
        const rk_limit *limit = &s->limits[i];
        rk_decision d;
        REQUIRE(rk_check(table, subject, limit, 1, NOW_NS, 1, false, &d) == RK_OK, "peek");
        int64_t owed = s->cost - before[i], unit_ns = limit->window_ns / limit->limit;
        int64_t least_ns =
            limit->algorithm == RK_TOKEN_BUCKET ? (owed + 1) * unit_ns : limit->window_ns;
        REQUIRE(!d.allowed && d.retry_after_ns >= least_ns,
                "%s killed after %ld: limit %d owes %lld", s->name, instructions, i,
                (long long)owed);
        REQUIRE(d.reset_after_ns > limit->window_ns, "limit %d forgets its debt", i);
    }
}

/* Check that all limits are charged or none; return which. */
static bool check_charged(rk_table *table, rk_hash subject, const scene *s, const int64_t before[3],
                          long instructions)
{
    bool charged = remaining(table, subject, &s->limits[0]) != before[0];
    for (int i = 0; i < s->count; i++) {
        int64_t left = remaining(table, subject, &s->limits[i]);
        int64_t most = s->owes && before[i] < s->cost ? before[i] : s->cost;
        REQUIRE(left == before[i] - (charged ? most : 0),
                "%s killed after %ld: limit %d had %lld and has %lld, but limit 0 was%s charged",
                s->name, instructions, i, (long long)before[i], (long long)left,
                charged ? "" : " not");
    }
    for (int i = 0; i < s->others; i++)
        REQUIRE(remaining(table, other_subject(table, i), &s->limits[0]) == OTHERS_LEFT,
                "%s killed after %ld: key %d lost its count", s->name, instructions, i);
    if (charged && s->owes)
        check_owed(table, subject, s, before, instructions);
    if (charged ? before[0] > s->cost : before[0] > 0)
        spend(table, subject, s, 1); /* and life goes on */
    return charged;
}

enum { FULL_CAPACITY = 2000, FULL_LOG_BYTES = 64 };

/* Check every instruction of the call, on copies; return their number. */
static long walk(rk_table *table, const char *path, const scene *s)
{
    char copy[520];
    int64_t before[3];
    long instructions = 0;
    int charged = 0, changes = 0;
    snprintf(copy, sizeof copy, "%s.copy", path);
    rk_hash subject = rk_subject_hash(table, s->name, strlen(s->name));
    prepare(table, subject, s, before);
    pid_t child = start_child(table, subject, s);
    for (; run_child(child, 1); instructions++) {
        if (!has_changed(table, changes == 0))
            continue;
        changes++;
        copy_file(path, copy);
        rk_table *left_behind = open_or_die(&(rk_options){.path = copy});
        charged += check_charged(left_behind, subject, s, before, instructions);
        rk_close(left_behind);
    }
    unlink(copy);
    REQUIRE(charged > 0 && charged < changes, "%s: %d of %d charged: this tested nothing", s->name,
            charged, changes);
    printf("%s: %ld instructions, %d change the file, charged after %d\n", s->name, instructions,
           changes, changes - charged);
    return instructions;
}

/* Kill the child at some instructions; return how many kills were inside the lock. */
static int kill_here_and_there(rk_table *table, const scene *s, long instructions)
{
    int inside = 0;
    for (long at = KILL_EVERY; at < instructions; at += KILL_EVERY) {
        int64_t before[3];
        rk_hash subject = rk_subject_hash(table, s->name, strlen(s->name));
        prepare(table, subject, s, before);
        pid_t child = start_child(table, subject, s);
        if (!run_child(child, at))
            break; /* the walk's call was longer: it was the first to split a free block */
        inside += stands_inside(table, subject, s);
        kill(child, SIGKILL);
        REQUIRE(waitpid(child, NULL, 0) == child, "%s", strerror(errno));
        check_charged(table, subject, s, before, at);
    }
    return inside;
}

/* Find a key whose two buckets are full, so that another key must move: its insertion then changes
 * two tags, its own and the other's. */
static bool moves_another(const char *path, const char *copy, const scene *s)
{
    static uint64_t before[FILE_BYTES_MAX / 8], after[FILE_BYTES_MAX / 8];
    copy_file(path, copy);
    rk_table *table = open_or_die(&(rk_options){.path = copy});
    rk_geometry g = rk_geometry_for(FULL_CAPACITY, FULL_LOG_BYTES);
    read_file(copy, before);
    bool fits = spend_if_room(table, rk_subject_hash(table, s->name, strlen(s->name)), s, 1);
    read_file(copy, after);
    rk_close(table);
    int changed = 0;
    for (size_t i = 0; i < g.segments; i++) {
        size_t at = g.segments_at + i * g.segment_bytes + (sizeof(rk_segment) + 63) / 64 * 64;
        const rk_bucket *old = (rk_bucket *)&before[at / 8], *new = (rk_bucket *)&after[at / 8];
        for (size_t slot = 0; slot < g.buckets * RK_SLOTS_PER_BUCKET; slot++)
            changed += old[slot / 8].tags[slot % 8] != new[slot / 8].tags[slot % 8];
    }
    return fits && changed == 2;
}

/* The same check in a table so full that the new key makes an old one move. */
static void walk_in_a_full_table(const char *folder, rk_limit limit)
{
    char path[512], copy[520], name[48];
    scene s = {name, {limit}, 1, 1, 0, false, .others = 0, .owes = false};
    snprintf(path, sizeof path, "%s/full.limits", folder);
    snprintf(copy, sizeof copy, "%s.copy", path);
    rk_table *table = open_or_die(
        &(rk_options){.path = path, .capacity = FULL_CAPACITY, .log_bytes = FULL_LOG_BYTES});
    snprintf(name, sizeof name, "full");
    while (spend_if_room(table, other_subject(table, s.others), &s, 1))
        s.others++;
    for (int i = 0; i < 20; i++)
        REQUIRE(change(table, RK_RESET, other_subject(table, --s.others), s.limits, 1, 0) == RK_OK,
                "reset");
    int number = 0;
    do
        snprintf(name, sizeof name, "key %d that moves another", number++);
    while (number < 5000 && !moves_another(path, copy, &s));
    REQUIRE(number < 5000, "no key moves another");
    walk(table, path, &s);
    rk_close(table);
}

/* ---- several charges in one call ---- */

enum { CHARGES = 5, SEVERAL_CAPACITY = 4000 };

static void set_charges(const rk_table *table, const rk_limit limits[4], rk_charge *charges)
{
    /* Two are of the same states. The last three are of one rule, and so of one segment. */
    static const char *const names[CHARGES] = {"a new key", "two", "one", "one", "one"};
    static const int firsts[CHARGES] = {0, 0, 0, 2, 2}, counts[CHARGES] = {1, 2, 1, 2, 1};
    for (int i = 0; i < CHARGES; i++) {
        rk_hash subject = rk_subject_hash(table, names[i], strlen(names[i]));
        charges[i] = (rk_charge){.subject = rk_group_hash(subject, i < 2 ? (uint64_t)i : 7),
                                 .limits = &limits[firsts[i]],
                                 .count = counts[i],
                                 .cost = 3 + i,
                                 .status = RK_OK};
    }
}

static void charge_several(rk_table *table, const rk_limit limits[4])
{
    rk_charge charges[CHARGES];
    rk_status status;
    int at;
    set_charges(table, limits, charges);
    while ((status = rk_check_all(table, charges, CHARGES, NOW_NS, true, &at)) == RK_BUSY)
        REQUIRE(patiently(table, charges[at].subject, status) == RK_OK, "a lock stays taken");
    REQUIRE(status == RK_OK && at == -1, "status %d at %d", status, at);
}

/* The units that the charges have spent of each limit, apart from `before`; all limits of a charge
 * lose its cost or none does. Return the number of charges that were made. */
static int charges_made(rk_table *table, const rk_limit limits[4], const int64_t before[CHARGES][2],
                        int64_t left[CHARGES][2], long killed)
{
    rk_charge charges[CHARGES];
    int made = 0;
    set_charges(table, limits, charges);
    for (int i = 0; i < CHARGES; i++)
        for (int k = 0; k < charges[i].count; k++)
            left[i][k] = remaining(table, charges[i].subject, &charges[i].limits[k]);
    for (int i = 0; before != NULL && i < 3; i++)
        for (int k = 0; k < charges[i].count; k++) {
            REQUIRE(before[i][k] - left[i][k] == (before[i][0] == left[i][0] ? 0 : charges[i].cost),
                    "killed after %ld: charge %d, limit %d: %lld", killed, i, k,
                    (long long)left[i][k]);
            made += k == 0 && before[i][0] != left[i][0];
        }
    if (before != NULL) { /* the units of both charges of the log are written at once */
        int64_t log = before[3][0] - left[3][0], journal = before[3][1] - left[3][1];
        bool first = journal == charges[3].cost, both = log == charges[3].cost + charges[4].cost;
        REQUIRE((journal == 0 || first) && (log == 0 || both), "killed after %ld: %lld and %lld",
                killed, (long long)log, (long long)journal);
        made += first + both;
    }
    return made;
}

static void walk_several(const char *folder, const rk_limit limits[4])
{
    char path[512], copy[520];
    int64_t before[CHARGES][2], left[CHARGES][2];
    int made = 0, changes = 0, partly = 0;
    long instructions = 0;
    snprintf(path, sizeof path, "%s/several.limits", folder);
    snprintf(copy, sizeof copy, "%s.copy", path);
    rk_table *table = open_or_die(
        &(rk_options){.path = path, .capacity = SEVERAL_CAPACITY, .log_bytes = 1 << 14});
    for (int i = 0; i < 2; i++)
        charge_several(table, limits); /* the next one finds rings that have to grow */
    rk_charge charges[CHARGES];
    set_charges(table, limits, charges);
    REQUIRE(change(table, RK_RESET, charges[0].subject, charges[0].limits, 1, 0) == RK_OK, "reset");
    charges_made(table, limits, NULL, before, 0);
    pid_t child = fork();
    REQUIRE(child >= 0, "%s", strerror(errno));
    if (child == 0) {
        int at;
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGSTOP);
        rk_check_all(table, charges, CHARGES, NOW_NS, true, &at);
        _exit(0);
    }
    int state;
    REQUIRE(waitpid(child, &state, 0) == child && WIFSTOPPED(state), "the child: %d", state);
    for (; run_child(child, 1); instructions++) {
        if (!has_changed(table, changes == 0))
            continue;
        changes++;
        copy_file(path, copy);
        rk_table *left_behind = open_or_die(&(rk_options){.path = copy});
        int now = charges_made(left_behind, limits, before, left, instructions);
        REQUIRE(now >= made, "killed after %ld: a charge was undone", instructions);
        made = now;
        partly += made > 0 && made < CHARGES;
        charge_several(left_behind, limits); /* and life goes on */
        rk_close(left_behind);
    }
    unlink(copy);
    REQUIRE(made == CHARGES && partly > 0, "%d made, %d partly: this tested nothing", made, partly);
    printf("several: %ld instructions, %d change the file\n", instructions, changes);
    rk_close(table);
}

int main(int count, char **arguments)
{
    REQUIRE(count == 2, "usage: kill_driver FOLDER");
    rk_limit token = make_limit(RK_TOKEN_BUCKET, 1000, YEAR_NS, 0, 1);
    rk_limit counter = make_limit(RK_SLIDING_WINDOW_COUNTER, 1000, YEAR_NS, 0, 2);
    rk_limit journal = make_limit(RK_SLIDING_WINDOW_LOG, 1000, YEAR_NS, 0, 3);
    rk_limit small = make_limit(RK_SLIDING_WINDOW_LOG, 20, YEAR_NS, 0, 4);
    rk_limit bucket = make_limit(RK_TOKEN_BUCKET, 20, YEAR_NS, 0, 5);
    rk_limit slots = make_limit(RK_IN_FLIGHT, 20, YEAR_NS, 0, 6);
    slots.stamp = 7;
    const scene scenes[] = {
        {"a new key", {token}, 1, 1, 0, false, 0, false},
        {"a known key", {token}, 1, 1, 3, false, 0, false},
        {"a new log", {journal}, 1, 2, 0, false, 0, false},
        {"a log that grows", {journal}, 1, 2, 7, false, 0, false},
        {"three limits at once", {token, counter, journal}, 3, 5, 7, false, 0, false},
        {"a grant drawn on", {token, small}, 2, 17, 8, true, 0, false},
        {"a debt", {bucket, small}, 2, 17, 8, false, 0, true},
        {"a request in flight", {slots, token}, 2, 1, 0, false, 0, false},
        {"another in flight", {token, slots, journal}, 3, 1, 2, false, 0, false},
        {"slots that grow", {slots, journal}, 2, 1, 3, false, 0, false},
    };
    char path[512];
    snprintf(path, sizeof path, "%s/kill.limits", arguments[1]);
    rk_table *table =
        open_or_die(&(rk_options){.path = path, .capacity = 100, .log_bytes = 1 << 16});
    int inside = 0;
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        long instructions = walk(table, path, &scenes[i]);
        inside += kill_here_and_there(table, &scenes[i], instructions);
    }
    walk_in_a_full_table(arguments[1], token);
    walk_several(arguments[1], (const rk_limit[]){token, counter, journal, small});
    REQUIRE(inside > 10, "only %d were killed inside the lock: this tested nothing", inside);
    printf("%d killed inside the lock\n", inside);
    rk_close(table);
    return 0;
}
