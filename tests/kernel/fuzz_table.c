/* A coverage-guided fuzzer of the plain tables (libFuzzer): `make fuzz`.
 *
 * The input is a program: its first bytes choose the table and its limits, and each further group
 * of a few bytes is one call. The fuzzer checks the invariants of every answer; the sanitizers
 * check the memory accesses.
 */
#include "allowances.h"
#include "limits.h"

typedef struct {
    const uint8_t *bytes;
    size_t left;
} input;

static uint8_t next(input *in)
{
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->bytes++;
}

static rk_limit next_limit(input *in, uint64_t id)
{
    static const int64_t windows_ns[] = {1000000, 1000000000, 60000000000, 31622400000000000};
    static const int64_t mosts[] = {1, 3, 20, 1000};
    rk_algorithm algorithm = (rk_algorithm)(next(in) % 6);
    int64_t limit = mosts[next(in) % 4] + next(in) % 8;
    int64_t capacity = algorithm <= RK_LEAKY_BUCKET ? next(in) % 32 : 0;
    return make_limit(algorithm, limit, windows_ns[next(in) % 4], capacity, id);
}

/* Several charges of some keys, each under the first limits. */
static void fuzz_several(rk_table *table, const rk_limit *limits, int count, int64_t now_ns,
                         input *in)
{
    rk_charge charges[12];
    int most = 1 + next(in) % 12, at;
    for (int i = 0; i < most; i++) {
        uint8_t key = next(in), units = next(in), left_out = units > 250;
        key %= 32;
        charges[i] = (rk_charge){.subject = rk_subject_hash(table, &key, 1),
                                 .limits = limits,
                                 .count = 1 + units % count,
                                 .cost = units / 4,
                                 .status = left_out ? RK_BUSY : RK_OK};
    }
    if (rk_check_all(table, charges, most, now_ns, most % 5 > 0, &at) != RK_OK)
        return;
    for (int i = 0; i < most; i++) {
        const rk_decision *d = &charges[i].decision;
        if (charges[i].status != RK_OK)
            continue;
        REQUIRE(d->remaining >= 0, "remaining %lld", (long long)d->remaining);
        REQUIRE(d->allowed == (d->retry_after_ns == 0), "retry %lld", (long long)d->retry_after_ns);
        REQUIRE(d->allowed || d->remaining < charges[i].cost, "denied");
    }
}

static void call(rk_table *table, rk_limit *limits, int count, int64_t *now_ns, input *in)
{
    uint8_t verb = next(in), key = next(in) % 32, units = next(in), time = next(in);
    for (int i = 0; i < count; i++)
        limits[i].stamp = units % 16; /* of a request in flight */
    rk_hash subject = rk_subject_hash(table, &key, 1);
    rk_decision decision = {.speaker = 0};
    uint64_t dropped;
    bool is_new;
    *now_ns += time < 128 ? (int64_t)time << (time % 40) : -(int64_t)(time - 128) * 1000;
    *now_ns = rk_time_in_range(*now_ns);
    rk_change change = {
        .subject = subject, .limits = limits, .count = count, .now_ns = *now_ns, .units = units};
    switch (verb % 8) {
    case 0:
        change.verb = RK_REFUND;
        change.time_ns =
            units % 4 ? rk_time_in_range(*now_ns - ((int64_t)units << (time % 40))) : RK_NO_TIME;
        rk_apply(table, &change);
        return;
    case 1:
        change.verb = RK_GRANT;
        change.time_ns = (int64_t)time * 1000000 - 1;
        rk_apply(table, &change);
        return;
    case 2:
        change.verb = units % 2 ? RK_OWE : RK_RESET;
        rk_apply(table, &change);
        return;
    case 3:
        rk_sweep(table, *now_ns, &dropped);
        return;
    case 5:
        if (time % 4 == 0)
            rk_unmark(table, subject, 1 + units, *now_ns);
        else
            rk_mark(table, subject, 1 + units, *now_ns, (int64_t)time << 24, &is_new);
        return;
    case 6:
        fuzz_several(table, limits, count, *now_ns, in);
        return;
    default:
        if (rk_check(table, subject, limits, count, *now_ns, units, verb % 8 != 4, &decision) !=
            RK_OK)
            return;
        REQUIRE(decision.remaining >= 0, "remaining %lld", (long long)decision.remaining);
        REQUIRE(decision.allowed == (decision.retry_after_ns == 0), "retry %lld",
                (long long)decision.retry_after_ns);
        REQUIRE(decision.reset_after_ns >= 0, "reset %lld", (long long)decision.reset_after_ns);
    }
}

/* ---- allowances ---- */

static int64_t next_units(input *in)
{
    int64_t units = next(in);
    return units < 200 ? units % 8 : units < 250 ? units : RK_ALLOWANCE_UNITS_MAX + units - 252;
}

static rk_answer next_answer(input *in, int64_t now_ns, int64_t cost)
{
    uint8_t kind = next(in);
    return (rk_answer){
        .allowed = kind % 4 > 0,
        .place = kind % 3,
        .cost = cost,
        .units = kind % 4 > 0 ? next_units(in) : 0,
        .lasts_ns = ((int64_t)next(in) - 8) * (1 << 25),
        .denied_ns = kind < 128 ? 0 : (int64_t)next(in) << 24,
        .remaining = (int64_t)next(in) << kind % 32,
        .reset_after_ns = (int64_t)next(in) << kind % 56,
        .decided_store_ns = now_ns - 1000,
        .charged_store_ns = now_ns - 1000,
    };
}

static void fuzz_spend(rk_table *table, const rk_allowance_gate *gate, const rk_subject *subject,
                       int64_t now_ns, int64_t cost)
{
    rk_decision decision;
    bool decided, done;
    REQUIRE(rk_spend(table, gate, subject, now_ns, cost, true, &decided, &decision) == RK_OK,
            "spend");
    if (!decided)
        return;
    REQUIRE(decision.remaining >= 0, "remaining %lld", (long long)decision.remaining);
    REQUIRE(decision.allowed == (decision.retry_after_ns == 0), "retry");
    if (decision.allowed && cost % 8 == 5)
        rk_unspend(table, gate, subject, now_ns, cost, decision.charged_ns, &done);
}

static void fuzz_claims(rk_table *table, int64_t now_ns, uint8_t kind)
{
    static const uint64_t numbers[] = {0, 1};
    rk_claim claims[8];
    size_t count;
    rk_claiming claiming = {.now_ns = now_ns,
                            .flush_ns = (int64_t)kind << 22,
                            .ending = kind % 5 == 0,
                            .numbers = numbers,
                            .numbers_count = kind % 3};
    REQUIRE(rk_claim_units(table, &claiming, claims, kind % 9, &count) == RK_OK, "claim");
    for (size_t i = 0; i < count; i++) {
        rk_subject subject = {.bytes = claims[i].subject, .length = claims[i].length};
        subject.hash = rk_subject_hash(table, subject.bytes, subject.length);
        REQUIRE(claims[i].units > 0, "a claim without units");
        if (kind % 2)
            rk_confirm(table, claims[i].number, &subject, claims[i].token);
    }
}

static void fuzz_allowances(input *in)
{
    rk_table *table =
        open_or_die(&(rk_options){.allowances = true, .capacity = 1 + next(in) % 40u});
    int64_t now_ns = INT64_C(1790000000000000000);
    while (in->left > 0) {
        uint8_t verb = next(in), key = next(in), time = next(in);
        int64_t units = next_units(in);
        rk_allowance_gate gate = {
            .number = key % 2, .lifetime_ns = 1 << 28, .capacity = RK_UNITS_MAX, .limits = 2};
        gate.leased = gate.number == 0;
        char text[RK_SUBJECT_BYTES_MAX + 8] = {(char)(key / 2 % 64)};
        rk_subject subject = {.bytes = text, .length = key < 250 ? 1u + key % 4 : 132u};
        subject.hash = rk_subject_hash(table, text, subject.length);
        now_ns += time < 200 ? (int64_t)time << time % 36 : -(int64_t)(time - 200) * 1000000;
        now_ns = rk_time_in_range(now_ns);
        rk_returned returned;
        rk_answer answer;
        switch (verb % 8) {
        case 0:
            answer = next_answer(in, now_ns, units);
            rk_put(table, &gate, &subject, now_ns, &answer, &returned);
            break;
        case 1:
            rk_deny(table, &gate, &subject, now_ns, units, (int64_t)time << 24);
            break;
        case 2:
            rk_stop(table, &gate, &subject, &returned);
            break;
        case 3:
            fuzz_claims(table, now_ns, verb);
            break;
        default:
            fuzz_spend(table, &gate, &subject, now_ns, units);
        }
    }
    rk_allowance_stats stats;
    REQUIRE(rk_read_allowance_stats(table, &stats) == RK_OK && stats.held <= stats.held_max,
            "stats");
    rk_close(table);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length)
{
    input in = {.bytes = bytes, .left = length};
    if (next(&in) % 2) {
        fuzz_allowances(&in);
        return 0;
    }
    rk_limit limits[3];
    int count = 1 + next(&in) % 3;
    rk_table *table = open_or_die(&(rk_options){
        .capacity = 1 + next(&in) % 40,
        .log_bytes = 64u << next(&in) % 12,
    });
    for (int i = 0; i < count; i++)
        limits[i] = next_limit(&in, (uint64_t)i);
    int64_t now_ns = INT64_C(1790000000000000000);
    while (in.left > 0)
        call(table, limits, count, &now_ns, &in);
    rk_close(table);
    return 0;
}
