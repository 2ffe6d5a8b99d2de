/* A 64-bit hash of integers: FNV-1a over 64-bit words instead of bytes. */
#ifndef FSDP_C_TRANSPORT_HASH_H
#define FSDP_C_TRANSPORT_HASH_H

#include <stdint.h>

#define FCT_HASH_EMPTY UINT64_C(14695981039346656037)

/* Returns the hash of the sequence of `hash`, followed by `value`. */
static inline uint64_t fct_hash_add(uint64_t hash, uint64_t value) {
    return (hash ^ value) * UINT64_C(1099511628211);
}

#endif
