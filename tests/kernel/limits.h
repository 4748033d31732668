/* Shared by the C drivers: limits to check, and a random generator that prints its seed. */
#ifndef RK_TEST_LIMITS_H
#define RK_TEST_LIMITS_H

#include <stdio.h>
#include <stdlib.h>

#include "numbers.h"
#include "table.h"

static const int64_t SECOND_NS = 1000000000;

#define REQUIRE(condition, ...)                                                                    \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static inline int64_t greatest_divisor(int64_t a, int64_t b)
{
    return b == 0 ? a : greatest_divisor(b, a % b);
}

/* The same as model.Limit creates. `id` distinguishes limits. */
static inline rk_limit make_limit(rk_algorithm algorithm, int64_t limit, int64_t window_ns,
                                  int64_t capacity, uint64_t id)
{
    int64_t common = greatest_divisor(limit * RK_MICROS_PER_UNIT, window_ns);
    int64_t soon = rk_mul_div_floor(limit, INT64_C(600000000000), window_ns);
    capacity = capacity ? capacity : limit;
    return (rk_limit){
        .algorithm = algorithm,
        .limit = limit,
        .capacity = capacity,
        .window_ns = window_ns,
        .numerator = limit * RK_MICROS_PER_UNIT / common,
        .denominator = window_ns / common,
        .debt_max = rk_min(rk_max(capacity, soon), RK_UNITS_MAX),
        .salt = {rk_mix(id + 1), rk_mix(~id)},
        .rule = rk_mix(id),
    };
}

static inline uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return rk_mix(*state);
}

static inline rk_table *open_or_die(const rk_options *options)
{
    rk_status status;
    char error[RK_ERROR_BYTES] = "";
    rk_table *table = rk_open(options, &status, error);
    REQUIRE(table != NULL, "%s", error);
    return table;
}

#endif
