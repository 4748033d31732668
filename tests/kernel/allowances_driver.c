/* A random driver of the table of allowances, to run under the address and undefined-behaviour
 * sanitizers.
 *
 * It makes all calls with random subjects, units and times, in memory and in a file, on small
 * tables that are full half of the time. In half of the runs with a file it overwrites random bytes
 * while the file is in use, as a power cut might leave them, and sometimes truncates the file. Then
 * the units may be wrong, but the table must not crash, hang or access other memory. In the other
 * runs it checks that units are conserved:
 *
 *   leases    put = spent + left + given back
 *   budgets   spent = confirmed + pending
 *
 *   allowances_driver FOLDER SEED ROUNDS */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "allowances.h"
#include "limits.h"

enum { STEPS = 10000, SUBJECTS = 60, CLAIMS = 40 };

static const uint64_t NUMBERS[] = {7, 11};

typedef struct {
    rk_table *table;
    rk_options options;
    bool damaged;
    uint64_t random;
    int64_t now_ns;
    int64_t charged_ns; /* of the last spent units */
    rk_claim claims[CLAIMS];
    size_t claims_count;
    int64_t leased, given_back, spent_leases, spent_budgets, confirmed;
} run;

static uint64_t below(run *r, uint64_t bound) { return next_random(&r->random) % bound; }

static int64_t random_units(run *r)
{
    uint64_t dice = below(r, 20);
    return (int64_t)(dice < 12 ? dice % 3 : below(r, dice < 18 ? 40 : RK_ALLOWANCE_UNITS_MAX + 2));
}

static rk_allowance_gate random_gate(run *r)
{
    bool leased = below(r, 2) == 0;
    return (rk_allowance_gate){.number = NUMBERS[leased],
                               .lifetime_ns = SECOND_NS,
                               .capacity = RK_UNITS_MAX,
                               .limits = 2,
                               .leased = leased};
}

static void random_subject(run *r, char name[140], rk_subject *subject)
{
    int number = (int)below(r, SUBJECTS);
    int length = snprintf(name, 140, "s%d-%0*d", number, number * 3 % 130, 0);
    *subject = (rk_subject){.bytes = name, .length = (size_t)length};
    subject->hash = rk_subject_hash(r->table, name, (size_t)length);
}

static void spend(run *r, const rk_allowance_gate *gate, const rk_subject *subject, int64_t cost)
{
    rk_decision d = {.speaker = 0};
    bool decided;
    if (rk_spend(r->table, gate, subject, r->now_ns, cost, true, &decided, &d) != RK_OK || !decided)
        return;
    REQUIRE(d.speaker >= 0 && d.speaker < gate->limits, "speaker %d", d.speaker);
    REQUIRE(d.allowed == (d.retry_after_ns == 0), "retry %lld", (long long)d.retry_after_ns);
    REQUIRE(d.remaining >= 0 && d.reset_after_ns >= d.retry_after_ns, "remaining and reset");
    if (d.allowed) {
        *(gate->leased ? &r->spent_leases : &r->spent_budgets) += cost;
        r->charged_ns = d.charged_ns;
    }
}

static void put(run *r, const rk_allowance_gate *gate, const rk_subject *subject, int64_t cost)
{
    rk_returned returned;
    bool allowed = below(r, 4) > 0;
    rk_answer answer = {
        .allowed = allowed,
        .place = (int)below(r, 3),
        .cost = cost,
        .units = allowed ? random_units(r) % (RK_ALLOWANCE_UNITS_MAX + 1) : 0,
        .ends_store_ns = r->now_ns + 5,
        .lasts_ns = (int64_t)below(r, 3) * SECOND_NS,
        .denied_ns = allowed ? 0 : (int64_t)below(r, 2000) * 1000000,
        .remaining = random_units(r),
        .reset_after_ns = (int64_t)below(r, 100) * SECOND_NS,
        .decided_store_ns = r->now_ns + 17,
        .charged_store_ns = r->now_ns + 17,
    };
    if (rk_put(r->table, gate, subject, r->now_ns, &answer, &returned) != RK_OK)
        return;
    REQUIRE(gate->leased || returned.units == 0 || r->damaged, "a budget is not given back");
    if (gate->leased)
        r->leased += answer.units;
    r->given_back += returned.units;
}

static void unspend(run *r, const rk_allowance_gate *gate, const rk_subject *subject, int64_t count)
{
    bool done;
    if (rk_unspend(r->table, gate, subject, r->now_ns, count, r->charged_ns, &done) == RK_OK &&
        done)
        *(gate->leased ? &r->spent_leases : &r->spent_budgets) -= count;
}

static void claim(run *r)
{
    rk_claiming claiming = {.now_ns = r->now_ns,
                            .flush_ns = (int64_t)below(r, 2) * SECOND_NS,
                            .ending = below(r, 8) == 0,
                            .numbers = NUMBERS,
                            .numbers_count = below(r, 3)};
    if (rk_claim_units(r->table, &claiming, r->claims, below(r, CLAIMS + 1), &r->claims_count) !=
        RK_OK)
        r->claims_count = 0;
    for (size_t i = 0; i < r->claims_count; i++) {
        const rk_claim *each = &r->claims[i];
        REQUIRE(each->units > 0 && each->length <= RK_SUBJECT_BYTES_MAX, "claim %zu", i);
        REQUIRE(each->age_ns >= 0, "age %lld", (long long)each->age_ns);
        if (each->leased)
            r->given_back += each->units;
    }
}

static void confirm(run *r)
{
    for (size_t i = 0; i < r->claims_count; i++) {
        const rk_claim *each = &r->claims[i];
        if (each->leased || below(r, 3) == 0)
            continue;
        rk_subject subject = {.bytes = each->subject, .length = each->length};
        subject.hash = rk_subject_hash(r->table, each->subject, each->length);
        if (rk_confirm(r->table, each->number, &subject, each->token) == RK_OK)
            r->confirmed += each->units;
    }
    r->claims_count = 0;
}

static void check_conserved(run *r)
{
    rk_allowance_stats stats;
    if (rk_read_allowance_stats(r->table, &stats) != RK_OK || r->damaged)
        return;
    REQUIRE(stats.held <= stats.held_max, "%llu held", (unsigned long long)stats.held);
    REQUIRE(r->leased == r->spent_leases + (int64_t)stats.leased_units + r->given_back,
            "leases: %lld put, %lld spent, %llu left, %lld given back", (long long)r->leased,
            (long long)r->spent_leases, (unsigned long long)stats.leased_units,
            (long long)r->given_back);
    REQUIRE(r->spent_budgets == r->confirmed + (int64_t)stats.pending_units,
            "budgets: %lld spent, %lld confirmed, %llu pending", (long long)r->spent_budgets,
            (long long)r->confirmed, (unsigned long long)stats.pending_units);
}

static void reopen(run *r)
{
    if (r->options.path == NULL)
        return;
    rk_close(r->table);
    r->table = open_or_die(&r->options);
}

static void damage(run *r)
{
    struct stat info;
    int file = open(r->options.path, O_RDWR);
    REQUIRE(file >= 0 && fstat(file, &info) == 0, "the file");
    for (int i = 0; i < 200; i++) {
        uint64_t word = below(r, 4) ? next_random(&r->random) : below(r, 2) ? UINT64_MAX : 0;
        size_t length = 1 + below(r, 8);
        off_t at = 4096 + (off_t)below(r, (uint64_t)info.st_size - 4096 - length - 16);
        REQUIRE(pwrite(file, &word, length, at) == (ssize_t)length, "pwrite");
    }
    if (below(r, 20) == 0)
        REQUIRE(ftruncate(file, (off_t)below(r, (uint64_t)info.st_size)) == 0, "ftruncate");
    close(file);
    r->damaged = true;
}

static void step(run *r)
{
    char name[140], text[RK_ERROR_BYTES];
    rk_subject subject;
    rk_returned returned;
    rk_look look;
    rk_allowance_gate gate = random_gate(r);
    random_subject(r, name, &subject);
    if (below(r, 3) == 0)
        r->now_ns += (int64_t)below(r, below(r, 50) ? 100000000 : 15000000000u);
    uint64_t verb = below(r, 100);
    if (verb < 45)
        spend(r, &gate, &subject, random_units(r));
    else if (verb < 65)
        put(r, &gate, &subject, random_units(r));
    else if (verb < 75)
        unspend(r, &gate, &subject, random_units(r));
    else if (verb < 82)
        claim(r);
    else if (verb < 88)
        confirm(r);
    else if (verb < 91)
        rk_deny(r->table, &gate, &subject, r->now_ns, random_units(r),
                (int64_t)below(r, SECOND_NS));
    else if (verb < 94) {
        if (rk_stop(r->table, &gate, &subject, &returned) == RK_OK)
            r->given_back += returned.units;
    } else if (verb < 97)
        rk_look_at(r->table, &gate, &subject, r->now_ns, &look);
    else
        check_conserved(r);
    if (rk_is_shared(r->table)) {
        rk_now_ns(r->table); /* examines the file */
        if (rk_loss_text(r->table, text))
            reopen(r);
    }
}

static void round_of(const char *folder, uint64_t seed)
{
    static run r;
    char path[512];
    memset(&r, 0, sizeof r);
    r.random = seed;
    r.now_ns = INT64_C(1790000000000000000);
    bool in_file = below(&r, 2), damages = in_file && below(&r, 2);
    snprintf(path, sizeof path, "%s/allowances", folder);
    unlink(path);
    r.options = (rk_options){.path = in_file ? path : NULL,
                             .allowances = true,
                             .capacity = (uint64_t[]){1, 20, 70, 2000}[below(&r, 4)]};
    r.table = open_or_die(&r.options);
    for (int i = 0; i < STEPS; i++) {
        step(&r);
        if (damages && below(&r, 500) == 0)
            damage(&r);
        if (below(&r, 1000) == 0)
            reopen(&r);
    }
    check_conserved(&r);
    rk_close(r.table);
}

int main(int count, char **arguments)
{
    REQUIRE(count == 4, "usage: allowances_driver FOLDER SEED ROUNDS");
    uint64_t seed = strtoull(arguments[2], NULL, 10), rounds = strtoull(arguments[3], NULL, 10);
    for (uint64_t i = 0; i < rounds; i++)
        round_of(arguments[1], seed + i);
    printf("%llu rounds of %d steps\n", (unsigned long long)rounds, STEPS);
    return 0;
}
