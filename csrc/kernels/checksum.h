/* Checksums of memory. Functions take raw pointers, like those of kernels.h, and keep no state. */
#ifndef FSDP_C_KERNELS_CHECKSUM_H
#define FSDP_C_KERNELS_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* Returns a 64-bit checksum of `bytes` bytes on the host. Two arrays of equal length that differ in
 * one 64-bit word have different checksums. Few other differences give equal checksums. `data` may
 * be NULL if `bytes` is 0, and need not be aligned. */
uint64_t fck_checksum(const void *data, size_t bytes);

#endif
