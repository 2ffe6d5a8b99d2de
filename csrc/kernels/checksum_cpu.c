/* Checksums of host memory; see checksum.h.
 *
 * There are 16 partial checksums: 8 vectors of 2 lanes. Word i updates partial checksum i % 16. The
 * update multiplies it by an odd base, adds the word, and combines high bits with low bits. Each
 * step is a bijection, so a change of one word always changes the checksum. The product is a shift
 * and an addition, because vector units of most processors have no fast product of 64-bit integers.
 * Without the last step, changes of the highest bits of two words would cancel. The vectors are
 * independent, so that the additions of one vector do not wait for those of another. A vector fits
 * in one register of every supported processor. */
#include "checksum.h"

#include <assert.h>
#include <string.h>

enum { LANES = 2, VECTORS = 8, SHIFT = 5, MIX = 32 }; /* base 2^5 + 1 */
enum { BLOCK_BYTES = VECTORS * LANES * sizeof(uint64_t) };

typedef uint64_t lanes __attribute__((vector_size(LANES * sizeof(uint64_t))));

/* The argument is a pointer, because the calling convention for vectors depends on the instruction
 * set. */
static inline void add_words(lanes *sum, const unsigned char *data) {
    lanes words;
    memcpy(&words, data, sizeof words);
    *sum = (*sum << SHIFT) + *sum + words;
    *sum ^= *sum >> MIX;
}

static inline void add_block(lanes sums[VECTORS], const unsigned char *block) {
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        add_words(&sums[i], block + (size_t)i * sizeof(lanes));
    }
}

/* Bijective for each `word`, and for each `sum`. */
static uint64_t mix(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return sum ^ sum >> 32;
}

uint64_t fck_checksum(const void *data, size_t bytes) {
    assert(data != NULL || bytes == 0);
    lanes sums[VECTORS] = {{0}};
    const unsigned char *at = (const unsigned char *)data;
    const size_t rest = bytes % BLOCK_BYTES;
    for (size_t i = 0; i < bytes / BLOCK_BYTES; i++, at += BLOCK_BYTES) {
        add_block(sums, at);
    }
    if (rest > 0) {
        unsigned char last[BLOCK_BYTES] = {0};
        memcpy(last, at, rest);
        add_block(sums, last);
    }
    uint64_t sum = bytes;
    for (int i = 0; i < VECTORS; i++) {
        for (int lane = 0; lane < LANES; lane++) {
            sum = mix(sum, sums[i][lane]);
        }
    }
    return sum;
}
