/* The random numbers of the C tests. */
#ifndef FSDP_C_TESTS_SPLITMIX_H
#define FSDP_C_TESTS_SPLITMIX_H

#include <stdint.h>

/* Returns 64 random bits, and changes the state. The generator is SplitMix64. */
static inline uint64_t splitmix64(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#endif
