/* Shared by the C drivers: limits to check, and a random generator that prints its seed. */
#ifndef TK_TEST_LIMITS_H
#define TK_TEST_LIMITS_H

#include <stdio.h>
#include <stdlib.h>

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
static inline tk_limit make_limit(tk_algorithm algorithm, int64_t limit, int64_t window_ns,
                                  int64_t capacity, uint64_t id)
{
    int64_t common = greatest_divisor(limit * TK_MICROS_PER_UNIT, window_ns);
    return (tk_limit){
        .algorithm = algorithm,
        .limit = limit,
        .capacity = capacity ? capacity : limit,
        .window_ns = window_ns,
        .numerator = limit * TK_MICROS_PER_UNIT / common,
        .denominator = window_ns / common,
        .salt = {tk_mix(id + 1), tk_mix(~id)},
        .rule = tk_mix(id),
    };
}

static inline uint64_t next_random(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return tk_mix(*state);
}

static inline tk_table *open_or_die(const tk_options *options)
{
    tk_status status;
    char error[TK_ERROR_BYTES] = "";
    tk_table *table = tk_open(options, &status, error);
    REQUIRE(table != NULL, "%s", error);
    return table;
}

#endif
