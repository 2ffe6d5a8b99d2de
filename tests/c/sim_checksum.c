/* Checksums of gathered chunks, as the transport computes them. */
#include "kernels/checksum.h"
#include "sim_internal.h"
#include "transport/hash.h"

/* The elements of a run in its chunk. */
typedef struct shard_place {
    const char *data; /* of rank 0 */
    size_t stride, bytes;
} shard_place;

struct sim_shard_places {
    size_t count;
    shard_place runs[];
};

sim_shard_places *sim_shard_places_new(fct_tensor *const *chunks, const fct_chunk_layout *layout,
                                       int64_t world) {
    sim_shard_places *places =
        (sim_shard_places *)sim_alloc(sizeof *places + layout->count * sizeof places->runs[0]);
    places->count = layout->count;
    for (size_t i = 0; i < layout->count; i++) {
        const fct_run *run = &layout->runs[i];
        const sim_view chunk = sim_view_of(chunks[run->chunk], "a gather of chunks");
        const size_t size = (size_t)sim_itemsize(chunk.dtype);
        places->runs[i] = (shard_place){.data = chunk.data + (size_t)run->offset * size,
                                        .stride = (size_t)(chunk.numel / world) * size,
                                        .bytes = (size_t)run->numel * size};
    }
    return places;
}

bool sim_shard_checksum(const sim_shard_places *places, size_t run, int64_t rank,
                        uint64_t *checksum) {
    if (places == NULL || run >= places->count) {
        return false;
    }
    const shard_place *place = &places->runs[run];
    *checksum = FCT_HASH_EMPTY;
    for (size_t done = 0, bytes = 0; done < place->bytes; done += bytes) {
        const size_t rest = place->bytes - done;
        bytes = rest < FCK_CHECKSUM_PIECE ? rest : FCK_CHECKSUM_PIECE;
        const char *piece = place->data + (size_t)rank * place->stride + done;
        *checksum = fct_hash_add(*checksum, fck_checksum(piece, bytes));
    }
    return true;
}
