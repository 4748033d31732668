/* Integer arithmetic that cannot overflow. Every function names the direction of its rounding. */
#ifndef RK_NUMBERS_H
#define RK_NUMBERS_H

#include <stdint.h>

typedef unsigned __int128 rk_u128;

/* a * b / c, rounded down, and at most INT64_MAX. a, b >= 0 and c > 0. A 128-bit division costs
 * about 30 ns, so it is used only if the product needs it. A rate in lowest terms often has the
 * denominator 1, which needs no division at all. */
static inline int64_t rk_mul_div_floor(int64_t a, int64_t b, int64_t c)
{
    uint64_t product;
    if (!__builtin_mul_overflow((uint64_t)a, (uint64_t)b, &product)) {
        uint64_t quotient = c == 1 ? product : product / (uint64_t)c;
        return quotient > INT64_MAX ? INT64_MAX : (int64_t)quotient;
    }
    rk_u128 wide = (rk_u128)(uint64_t)a * (uint64_t)b / (uint64_t)c;
    return wide > INT64_MAX ? INT64_MAX : (int64_t)wide;
}

/* a * b / c, rounded up, and at most INT64_MAX. */
static inline int64_t rk_mul_div_ceil(int64_t a, int64_t b, int64_t c)
{
    uint64_t product;
    if (!__builtin_mul_overflow((uint64_t)a, (uint64_t)b, &product) &&
        product <= UINT64_MAX - (uint64_t)c) {
        uint64_t quotient = c == 1 ? product : (product + (uint64_t)c - 1) / (uint64_t)c;
        return quotient > INT64_MAX ? INT64_MAX : (int64_t)quotient;
    }
    rk_u128 wide = ((rk_u128)(uint64_t)a * (uint64_t)b + (uint64_t)c - 1) / (uint64_t)c;
    return wide > INT64_MAX ? INT64_MAX : (int64_t)wide;
}

/* a modulo b as in Python: never negative for b > 0. */
static inline int64_t rk_floor_mod(int64_t a, int64_t b)
{
    int64_t rest = a % b;
    return rest < 0 ? rest + b : rest;
}

static inline int64_t rk_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t rk_min(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
