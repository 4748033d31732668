/* Counts the steps of checks that look for room for a log, in a table with 200,000 logs, and of
 * claims on 100,000 allowances.
 *
 * A step is a basic block: a run of instructions without a branch. The compiler puts a call into
 * each of them (-fsanitize-coverage=trace-pc). So the number does not depend on the load of the
 * machine. It must not depend on how many logs or allowances there are, how scattered the memory of
 * logs is, or how many of them have expired.
 *
 *   bound_driver STEPS */
#include "allowances.h"
#include "limits.h"

static long steps;

void __sanitizer_cov_trace_pc(void);
__attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc(void) { steps++; }

enum { LOG_BYTES = 16 << 20, NEW_KEY = 1 << 30 };
static const int64_t NOW_NS = 1000 * 1000000000ll;

static rk_hash subject_of(const rk_table *table, const char *name, int number)
{
    char text[32];
    int length = snprintf(text, sizeof text, "%s-%d", name, number);
    return rk_subject_hash(table, text, (size_t)length);
}

static void forget(rk_table *table, rk_hash subject, const rk_limit *limit)
{
    rk_apply(table,
             &(rk_change){.verb = RK_RESET, .subject = subject, .limits = limit, .count = 1});
}

static rk_status check(rk_table *table, const rk_limit *limit, int number, int64_t now_ns,
                       int64_t cost)
{
    rk_decision decision;
    rk_hash subject = subject_of(table, "key", number);
    return rk_check(table, subject, limit, 1, now_ns, cost, true, &decision);
}

static long count_steps(rk_table *table, const rk_limit *limit, int64_t now_ns, int64_t cost,
                        rk_status expected)
{
    steps = 0;
    rk_status status = check(table, limit, NEW_KEY, now_ns, cost);
    long taken = steps;
    REQUIRE(status == expected, "status %d", status);
    forget(table, subject_of(table, "key", NEW_KEY), limit);
    return taken;
}

static const rk_allowance_gate BUDGETS = {
    .number = 7, .lifetime_ns = SECOND_NS, .capacity = 1000, .limits = 1};

static void put_budget(rk_table *table, int number)
{
    char text[32];
    int length = snprintf(text, sizeof text, "key-%d", number);
    rk_subject subject = {.bytes = text, .length = (size_t)length};
    subject.hash = rk_subject_hash(table, text, subject.length);
    rk_answer answer = {.allowed = true, .units = 5, .lasts_ns = 1000 * SECOND_NS};
    rk_returned returned;
    rk_decision decision;
    bool decided;
    rk_put(table, &BUDGETS, &subject, NOW_NS, &answer, &returned);
    if (number % 50000 == 0)
        rk_spend(table, &BUDGETS, &subject, NOW_NS, 1, true, &decided, &decision);
}

static long claim_steps(rk_table *table, size_t expected)
{
    static rk_claim claims[100];
    rk_claiming claiming = {.now_ns = NOW_NS, .numbers = &BUDGETS.number, .numbers_count = 1};
    size_t found;
    steps = 0;
    REQUIRE(rk_claim_units(table, &claiming, claims, 100, &found) == RK_OK, "claim");
    REQUIRE(found == expected, "%zu claims", found);
    return steps;
}

/* Two of 100,000 allowances have pending units; then the table is full of allowances in use. */
static void bound_allowances(long most)
{
    rk_table *table = open_or_die(&(rk_options){.allowances = true, .capacity = 100000});
    for (int i = 0; i < 100000; i++)
        put_budget(table, i);
    long two = claim_steps(table, 2), none = claim_steps(table, 0), full = 0;
    for (int i = 100000; i < 130000; i++) {
        steps = 0;
        put_budget(table, i);
        full = steps > full ? steps : full;
    }
    printf("claim of two %ld, of none %ld, into a full table %ld\n", two, none, full);
    REQUIRE(two < most / 4 && none < most / 10 && full < most / 10, "%ld", most);
    rk_close(table);
}

int main(int count, char **arguments)
{
    REQUIRE(count == 2, "usage: bound_driver STEPS");
    long most = strtol(arguments[1], NULL, 10);
    rk_table *table = open_or_die(&(rk_options){.capacity = 500000, .log_bytes = LOG_BYTES});
    rk_limit small = make_limit(RK_SLIDING_WINDOW_LOG, 5, 60 * SECOND_NS, 0, 1);
    rk_limit large = make_limit(RK_SLIDING_WINDOW_LOG, 500000, 60 * SECOND_NS, 0, 2);
    rk_limit other = make_limit(RK_SLIDING_WINDOW_LOG, 5, 60 * SECOND_NS, 0, 3);
    int keys = 0;
    while (check(table, &small, keys, NOW_NS, 1) == RK_OK)
        keys++;
    REQUIRE(keys > 200000, "%d keys", keys);
    long full = count_steps(table, &small, NOW_NS, 1, RK_LOG_FULL);
    long elsewhere = count_steps(table, &other, NOW_NS, 1, RK_OK);
    for (int i = 0; i < keys; i += 2)
        forget(table, subject_of(table, "key", i), &small);
    long scattered = count_steps(table, &large, NOW_NS, 500000, RK_LOG_FULL);
    for (int i = 0; check(table, &small, i, NOW_NS, 1) == RK_OK;)
        i++;
    long expired = count_steps(table, &small, NOW_NS + 100 * SECOND_NS, 1, RK_OK);
    printf("full %ld, another rule %ld, expired %ld, scattered %ld\n", full, elsewhere, expired,
           scattered);
    fflush(stdout);
    REQUIRE(full < most && elsewhere < most && expired < most && scattered < most, "%ld", most);
    bound_allowances(most);
    return 0;
}
