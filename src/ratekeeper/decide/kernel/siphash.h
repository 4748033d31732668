/* SipHash-1-3 with a 128-bit result: a keyed hash, so that an attacker who does not know the seed
 * cannot choose keys that collide. CPython and Rust also use one round per block and three final
 * rounds for their hash tables. */
#ifndef RK_SIPHASH_H
#define RK_SIPHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint64_t low, high;
} rk_hash;

static inline uint64_t rk_rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

#define RK_SIP_ROUND                                                                               \
    do {                                                                                           \
        v0 += v1, v1 = rk_rotate(v1, 13), v1 ^= v0, v0 = rk_rotate(v0, 32);                        \
        v2 += v3, v3 = rk_rotate(v3, 16), v3 ^= v2;                                                \
        v0 += v3, v3 = rk_rotate(v3, 21), v3 ^= v0;                                                \
        v2 += v1, v1 = rk_rotate(v1, 17), v1 ^= v2, v2 = rk_rotate(v2, 32);                        \
    } while (0)

static inline rk_hash rk_siphash(const uint64_t seed[2], const void *data, size_t length)
{
    const uint8_t *bytes = data;
    uint64_t v0 = seed[0] ^ 0x736f6d6570736575u, v1 = seed[1] ^ 0x646f72616e646f6du ^ 0xee;
    uint64_t v2 = seed[0] ^ 0x6c7967656e657261u, v3 = seed[1] ^ 0x7465646279746573u;
    uint64_t block, last = (uint64_t)length << 56;
    for (; length >= 8; length -= 8, bytes += 8) {
        memcpy(&block, bytes, 8);
        v3 ^= block;
        RK_SIP_ROUND;
        v0 ^= block;
    }
    for (size_t i = 0; i < length; i++)
        last |= (uint64_t)bytes[i] << (8 * i);
    v3 ^= last;
    RK_SIP_ROUND;
    v0 ^= last;
    v2 ^= 0xee;
    RK_SIP_ROUND;
    RK_SIP_ROUND;
    RK_SIP_ROUND;
    rk_hash hash = {.low = v0 ^ v1 ^ v2 ^ v3};
    v1 ^= 0xdd;
    RK_SIP_ROUND;
    RK_SIP_ROUND;
    RK_SIP_ROUND;
    hash.high = v0 ^ v1 ^ v2 ^ v3;
    return hash;
}

/* A bijection that spreads values which differ in any bits. Faster than rk_mix. */
static inline uint64_t rk_spread(uint64_t x)
{
    x *= 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
}

/* A bijection in which every input bit affects all 64 output bits. */
static inline uint64_t rk_mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
}

#endif
