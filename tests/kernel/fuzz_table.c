/* A coverage-guided fuzzer of the plain table (libFuzzer): `make fuzz`.
 *
 * The input is a program: its first bytes choose the table and its limits, and each further group
 * of four bytes is one call. The fuzzer checks the invariants of every answer; the sanitizers check
 * the memory accesses.
 */
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

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length)
{
    input in = {.bytes = bytes, .left = length};
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
