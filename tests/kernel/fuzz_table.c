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

static tk_limit next_limit(input *in, uint64_t id)
{
    static const int64_t windows_ns[] = {1000000, 1000000000, 60000000000, 31622400000000000};
    static const int64_t mosts[] = {1, 3, 20, 1000};
    tk_algorithm algorithm = (tk_algorithm)(next(in) % 5);
    int64_t limit = mosts[next(in) % 4] + next(in) % 8;
    int64_t capacity = algorithm <= TK_LEAKY_BUCKET ? next(in) % 32 : 0;
    return make_limit(algorithm, limit, windows_ns[next(in) % 4], capacity, id);
}

static void call(tk_table *table, const tk_limit *limits, int count, int64_t *now_ns, input *in)
{
    uint8_t verb = next(in), key = next(in) % 32, units = next(in), time = next(in);
    tk_hash subject = tk_subject_hash(table, &key, 1);
    tk_decision decision = {.speaker = 0};
    uint64_t dropped;
    *now_ns += time < 128 ? (int64_t)time << (time % 40) : -(int64_t)(time - 128) * 1000;
    *now_ns = tk_time_in_range(*now_ns);
    switch (verb % 8) {
    case 0:
        tk_give_back(table, subject, limits, count, *now_ns, units,
                     units % 4 ? tk_time_in_range(*now_ns - ((int64_t)units << (time % 40)))
                               : TK_NO_TIME);
        return;
    case 1:
        tk_grant(table, subject, limits, count, *now_ns, units, (int64_t)time * 1000000 - 1);
        return;
    case 2:
        tk_reset(table, subject, limits, count);
        return;
    case 3:
        tk_sweep(table, *now_ns, &dropped);
        return;
    default:
        if (tk_check(table, subject, limits, count, *now_ns, units, verb % 8 != 4, &decision) !=
            TK_OK)
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
    return units < 200 ? units % 8 : units < 250 ? units : TK_ALLOWANCE_UNITS_MAX + units - 252;
}

static tk_answer next_answer(input *in, int64_t now_ns, int64_t cost)
{
    uint8_t kind = next(in);
    return (tk_answer){
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

static void fuzz_spend(tk_table *table, const tk_allowance_gate *gate, const tk_subject *subject,
                       int64_t now_ns, int64_t cost)
{
    tk_decision decision;
    bool decided, done;
    REQUIRE(tk_spend(table, gate, subject, now_ns, cost, true, &decided, &decision) == TK_OK,
            "spend");
    if (!decided)
        return;
    REQUIRE(decision.remaining >= 0, "remaining %lld", (long long)decision.remaining);
    REQUIRE(decision.allowed == (decision.retry_after_ns == 0), "retry");
    if (decision.allowed && cost % 8 == 5)
        tk_unspend(table, gate, subject, now_ns, cost, decision.charged_ns, &done);
}

static void fuzz_claims(tk_table *table, int64_t now_ns, uint8_t kind)
{
    static const uint64_t numbers[] = {0, 1};
    tk_claim claims[8];
    size_t count;
    tk_claiming claiming = {.now_ns = now_ns,
                            .flush_ns = (int64_t)kind << 22,
                            .ending = kind % 5 == 0,
                            .numbers = numbers,
                            .numbers_count = kind % 3};
    REQUIRE(tk_claim_units(table, &claiming, claims, kind % 9, &count) == TK_OK, "claim");
    for (size_t i = 0; i < count; i++) {
        tk_subject subject = {.bytes = claims[i].subject, .length = claims[i].length};
        subject.hash = tk_subject_hash(table, subject.bytes, subject.length);
        REQUIRE(claims[i].units > 0, "a claim without units");
        if (kind % 2)
            tk_confirm(table, claims[i].number, &subject, claims[i].token);
    }
}

static void fuzz_allowances(input *in)
{
    tk_table *table =
        open_or_die(&(tk_options){.allowances = true, .capacity = 1 + next(in) % 40u});
    int64_t now_ns = INT64_C(1790000000000000000);
    while (in->left > 0) {
        uint8_t verb = next(in), key = next(in), time = next(in);
        int64_t units = next_units(in);
        tk_allowance_gate gate = {
            .number = key % 2, .lifetime_ns = 1 << 28, .capacity = TK_UNITS_MAX, .limits = 2};
        gate.leased = gate.number == 0;
        char text[TK_SUBJECT_BYTES_MAX + 8] = {(char)(key / 2 % 64)};
        tk_subject subject = {.bytes = text, .length = key < 250 ? 1u + key % 4 : 132u};
        subject.hash = tk_subject_hash(table, text, subject.length);
        now_ns += time < 200 ? (int64_t)time << time % 36 : -(int64_t)(time - 200) * 1000000;
        now_ns = tk_time_in_range(now_ns);
        tk_returned returned;
        tk_answer answer;
        switch (verb % 8) {
        case 0:
            answer = next_answer(in, now_ns, units);
            tk_put(table, &gate, &subject, now_ns, &answer, &returned);
            break;
        case 1:
            tk_deny(table, &gate, &subject, now_ns, units, (int64_t)time << 24);
            break;
        case 2:
            tk_stop(table, &gate, &subject, &returned);
            break;
        case 3:
            fuzz_claims(table, now_ns, verb);
            break;
        default:
            fuzz_spend(table, &gate, &subject, now_ns, units);
        }
    }
    tk_allowance_stats stats;
    REQUIRE(tk_read_allowance_stats(table, &stats) == TK_OK && stats.held <= stats.held_max,
            "stats");
    tk_close(table);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length)
{
    input in = {.bytes = bytes, .left = length};
    if (next(&in) % 2) {
        fuzz_allowances(&in);
        return 0;
    }
    tk_limit limits[3];
    int count = 1 + next(&in) % 3;
    tk_table *table = open_or_die(&(tk_options){
        .capacity = 1 + next(&in) % 40,
        .log_bytes = 64u << next(&in) % 12,
    });
    for (int i = 0; i < count; i++)
        limits[i] = next_limit(&in, (uint64_t)i);
    int64_t now_ns = INT64_C(1790000000000000000);
    while (in.left > 0)
        call(table, limits, count, &now_ns, &in);
    tk_close(table);
    return 0;
}
