/* Random programs for fuzz_session.c, to run under the address and undefined-behaviour sanitizers.
 *
 *   session_driver SEED ROUNDS */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length);

static uint64_t next_random(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

int main(int count, char **arguments)
{
    static uint8_t program[16384];
    if (count != 3)
        return 2;
    uint64_t random = strtoull(arguments[1], NULL, 10);
    unsigned long rounds = strtoul(arguments[2], NULL, 10);
    for (unsigned long round = 0; round < rounds; round++) {
        size_t length = 1u << (4 + next_random(&random) % 11);
        for (size_t i = 0; i < length; i++)
            program[i] = (uint8_t)(next_random(&random) >> 32);
        LLVMFuzzerTestOneInput(program, length);
    }
    printf("%lu rounds\n", rounds);
    return 0;
}
