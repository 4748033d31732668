/* Whole-number arithmetic that cannot overflow. Every function names the way it rounds. */
#ifndef TK_NUMBERS_H
#define TK_NUMBERS_H

#include <stdint.h>

typedef unsigned __int128 tk_u128;

/* a * b / c, rounded down, and at most INT64_MAX. All of them >= 0, c > 0. The 128-bit division
 * costs about 30 ns, so it is taken only where the product needs it; and a rate in lowest terms
 * often divides by 1, which is not worth a division at all. */
static inline int64_t tk_mul_div_floor(int64_t a, int64_t b, int64_t c)
{
    uint64_t product;
    if (!__builtin_mul_overflow((uint64_t)a, (uint64_t)b, &product)) {
        uint64_t quotient = c == 1 ? product : product / (uint64_t)c;
        return quotient > INT64_MAX ? INT64_MAX : (int64_t)quotient;
    }
    tk_u128 wide = (tk_u128)(uint64_t)a * (uint64_t)b / (uint64_t)c;
    return wide > INT64_MAX ? INT64_MAX : (int64_t)wide;
}

/* a * b / c, rounded up, and at most INT64_MAX. */
static inline int64_t tk_mul_div_ceil(int64_t a, int64_t b, int64_t c)
{
    uint64_t product;
    if (!__builtin_mul_overflow((uint64_t)a, (uint64_t)b, &product) &&
        product <= UINT64_MAX - (uint64_t)c) {
        uint64_t quotient = c == 1 ? product : (product + (uint64_t)c - 1) / (uint64_t)c;
        return quotient > INT64_MAX ? INT64_MAX : (int64_t)quotient;
    }
    tk_u128 wide = ((tk_u128)(uint64_t)a * (uint64_t)b + (uint64_t)c - 1) / (uint64_t)c;
    return wide > INT64_MAX ? INT64_MAX : (int64_t)wide;
}

/* a modulo b as Python has it: never negative for b > 0. */
static inline int64_t tk_floor_mod(int64_t a, int64_t b)
{
    int64_t rest = a % b;
    return rest < 0 ? rest + b : rest;
}

static inline int64_t tk_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t tk_min(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
