/* Programs for fuzz_session.c, to run under the address and undefined-behaviour sanitizers: random
 * ones, and a few calls that are answered, of which first the first allocation fails, then the
 * second, and so on.
 *
 *   session_driver SEED ROUNDS */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALLOCATIONS = 500, CALLS = 6 };

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length);

static uint64_t next_random(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* The steps are those of fuzz_session.c. */
static size_t write_calls(uint8_t *program)
{
    static const uint8_t CALL[] = {0, 0, 0, 0, /* HEADERS */ 3, 5, 1, 0, 0 /* DATA */};
    static const uint8_t STREAM[] = {0, 1, 0, 0, /* HEADERS */ 3, 5, 0, 0, 0 /* DATA */};
    uint8_t *at = program + 2;
    for (int i = 0; i < CALLS; i++, at += sizeof CALL)
        memcpy(at, i % 2 ? STREAM : CALL, sizeof CALL);
    *at++ = 9; /* receive */
    *at++ = 15;
    for (int i = 0; i < CALLS; i++) {
        *at++ = 6; /* reply, or send */
        *at++ = 201;
        *at++ = (uint8_t)(128 + i);
    }
    *at++ = 11; /* to_send */
    *at++ = 19;
    return (size_t)(at - program);
}

static void fail_each_allocation(uint8_t *program)
{
    size_t length = write_calls(program);
    for (unsigned at = 0; at < ALLOCATIONS; at++) {
        program[0] = (uint8_t)(1 | at >> 8 << 5);
        program[1] = (uint8_t)at;
        LLVMFuzzerTestOneInput(program, length);
    }
}

int main(int count, char **arguments)
{
    static uint8_t program[16384];
    if (count != 3)
        return 2;
    uint64_t random = strtoull(arguments[1], NULL, 10);
    unsigned long rounds = strtoul(arguments[2], NULL, 10);
    fail_each_allocation(program);
    for (unsigned long round = 0; round < rounds; round++) {
        size_t length = 1u << (4 + next_random(&random) % 11);
        for (size_t i = 0; i < length; i++)
            program[i] = (uint8_t)(next_random(&random) >> 32);
        LLVMFuzzerTestOneInput(program, length);
    }
    printf("%lu rounds\n", rounds);
    return 0;
}
