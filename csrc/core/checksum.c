/* Checksums of the data of collectives; see checksum.h. */
#include "checksum.h"

#include <assert.h>

#include "../bridge/tensor.h"
#include "../kernels/kernels.h"

/* The memory of a tensor. */
typedef struct memory {
    const char *data;
    int64_t bytes;
    const fck_backend *kernels; /* NULL: no checksum is possible */
} memory;

/* Fails if the tensor does not lie within its storage. */
static fc_status read_memory(const fct_tensor *tensor, memory *m, fc_error *error) {
    fct_facts facts;
    int64_t end = 0;
    fct_tensor_facts(tensor, &facts);
    const fck_backend *kernels = fck_backend_of(facts.device.type);
    const bool is_readable = facts.data != NULL && kernels != NULL && kernels->checksum != NULL;
    *m = (memory){.data = (const char *)facts.data,
                  .bytes = facts.numel * facts.itemsize,
                  .kernels = is_readable ? kernels : NULL};
    if (!facts.strided || !facts.contiguous || !fc_size_add(facts.offset_bytes, m->bytes, &end) ||
        end > facts.storage_bytes) {
        return fc_error_set(error, FC_EASSERT, "a checksum of %lld bytes does not fit its buffer",
                            (long long)m->bytes);
    }
    return FC_OK;
}

/* Returns a checksum that is not 0. */
static uint64_t checksum_of(const memory *m, int64_t offset, int64_t bytes) {
    const uint64_t checksum = m->kernels->checksum(m->data + offset, (size_t)bytes);
    return checksum != 0 ? checksum : 1;
}

/* Writes the checksum of one rank's parts of all chunks. */
static fc_status add_parts(const fc_chunks *chunks, int64_t world, int64_t rank, uint64_t *checksum,
                           fc_error *error) {
    fc_status status = FC_OK;
    memory m;
    uint64_t sum = FCT_HASH_EMPTY;
    *checksum = 0;
    for (size_t i = 0; i < chunks->count; i++) {
        FC_TRY(read_memory(chunks->tensors[i], &m, error));
        if (m.kernels == NULL) {
            return FC_OK;
        }
        const int64_t part = m.bytes / world;
        sum = fct_hash_add(sum, checksum_of(&m, rank * part, part));
    }
    *checksum = sum != 0 ? sum : 1;
done:
    return status;
}

fc_status fc_checksum_pack(const fc_group_base *base, const fc_process_group *pg,
                           const fc_chunks *chunks, uint64_t *packed) {
    assert(pg->rank >= 0 && pg->rank < pg->world);
    *packed = 0;
    return base->comm->checksums
               ? add_parts(chunks, pg->world, pg->rank, packed, &base->comm->error)
               : FC_OK;
}

fc_status fc_checksum_add_gather(const fc_group_base *base, fc_process_group *pg,
                                 const fc_chunks *chunks, uint64_t packed) {
    assert(pg->world > 0);
    fc_status status = FC_OK;
    uint64_t sum = FCT_HASH_EMPTY; /* 0: unknown */
    if (!base->comm->checksums || pg->world < 2) {
        return FC_OK;
    }
    for (int64_t rank = 0; chunks != NULL && sum != 0 && rank < pg->world; rank++) {
        uint64_t part = 0;
        FC_TRY(add_parts(chunks, pg->world, rank, &part, &base->comm->error));
        sum = part != 0 ? fct_hash_add(sum, part) : 0;
        sum = rank == pg->rank && part != packed ? ~sum : sum;
    }
    FC_TRY(fc_process_group_add_checksum(pg, base->name, FC_ALL_GATHER, chunks != NULL ? sum : 0));
done:
    return status;
}

fc_status fc_checksum_add_all_reduce(fc_group_base *base, const fct_tensor *row) {
    assert(base->comm != NULL);
    fc_status status = FC_OK;
    memory m = {NULL, 0, NULL};
    if (!base->comm->checksums || base->replicate.world < 2) {
        return FC_OK;
    }
    if (row != NULL) {
        FC_TRY(read_memory(row, &m, &base->comm->error));
    }
    FC_TRY(fc_process_group_add_checksum(&base->replicate, base->name, FC_ALL_REDUCE,
                                         m.kernels != NULL ? checksum_of(&m, 0, m.bytes) : 0));
done:
    return status;
}
