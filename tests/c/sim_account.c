/* Expected values of a simulated model: the position and value of every element on every rank. The
 * arithmetic is independent of csrc/core/layout.c. Owns nothing. */
#include "sim_internal.h"
#include "sim_model.h"

/* The tensor as [outer, rows, inner]; `rows` is the sharded dim. */
typedef struct cut {
    int64_t outer;
    int64_t rows;
    int64_t inner;
    int64_t chunk;
} cut;

static cut cut_for(const sim_param *p, int32_t dim, int64_t world) {
    cut c = {.outer = 1, .rows = p->shape.sizes[dim], .inner = 1};
    for (int32_t d = 0; d < p->shape.ndim; d++) {
        c.outer *= d < dim ? p->shape.sizes[d] : 1;
        c.inner *= d > dim ? p->shape.sizes[d] : 1;
    }
    c.chunk = (c.rows + world - 1) / world;
    return c;
}

int64_t sim_padded_numel(const sim_param *p, int32_t dim, int64_t world) {
    cut c = cut_for(p, dim, world);
    return c.outer * c.chunk * c.inner;
}

int64_t sim_local_numel(const sim_param *p, int32_t dim, int64_t world, int64_t rank) {
    cut c = cut_for(p, dim, world);
    int64_t left = c.rows - rank * c.chunk;
    return c.outer * (left < 0 ? 0 : (left < c.chunk ? left : c.chunk)) * c.inner;
}

void sim_shard_values(const sim_param *p, const double *full, int32_t dim, int64_t world,
                      int64_t rank, double *out) {
    cut c = cut_for(p, dim, world);
    for (int64_t o = 0; o < c.outer; o++) {
        for (int64_t r = 0; r < c.chunk; r++) {
            int64_t row = rank * c.chunk + r;
            for (int64_t i = 0; i < c.inner; i++) {
                *out++ = row < c.rows ? full[(o * c.rows + row) * c.inner + i] : 0.0;
            }
        }
    }
}

fct_dtype sim_compute_dtype(const sim_param *p) {
    return p->shape.compute != 0 ? p->shape.compute : p->shape.dtype;
}

/* Returns the start of the next slot of a rank shard that ends at `at`. */
static int64_t align_offset(int64_t at) {
    int64_t align = sim_device().type == FCT_DEVICE_CUDA ? 16 : 1;
    return (at + align - 1) / align * align;
}

/* Writes the inputs that one rank sends of one parameter at `at`, and returns the new end of the
 * shard. `shard` NULL: only computes the end. `grown`: elements of inputs whose size changes. */
static int64_t write_inputs(const sim_param *p, int32_t dim, int64_t world, int64_t rank,
                            int64_t grown, char *shard, int64_t at) {
    int64_t padded = sim_padded_numel(p, dim, world);
    /* An all-gather that splits another dim has not filled the padding of this one. */
    int64_t defined = dim == p->shape.dim ? padded : sim_local_numel(p, dim, world, rank);
    fct_dtype dtypes[3] = {sim_compute_dtype(p)};
    int64_t numels[3] = {padded};
    size_t inputs =
        p->core.extended ? sim_describe_extension_inputs(p, padded, grown, dtypes, numels) : 1;
    double *values = (double *)sim_scratch((size_t)(padded + 1) * sizeof *values);
    sim_shard_values(p, p->full, dim, world, rank, values);
    for (size_t i = 0; i < inputs; i++) {
        at = numels[i] > 0 ? align_offset(at) : at;
        for (int64_t k = 0; k < numels[i]; k++, at += sim_itemsize(dtypes[i])) {
            double half = i < 2 ? sim_round(dtypes[0], values[k]) / 2.0 : 0.0;
            if (shard != NULL && k < defined) {
                sim_put(dtypes[i], shard + at, p->core.extended ? half : values[k]);
            }
        }
    }
    sim_scratch_free(values);
    return at;
}

static int64_t write_group(const sim_group *g, bool forward, int64_t world, int64_t rank,
                           int64_t grown, char *shard) {
    int64_t at = 0;
    for (size_t i = 0; i < g->count; i++) {
        const sim_param *p = &g->params[i];
        at = write_inputs(p, forward ? 0 : p->shape.dim, world, rank, grown, shard, at);
    }
    return align_offset(at);
}

/* Writes one rank's inputs of all parameters in order, in the compute dtypes; on CUDA each at a
 * multiple of 16 bytes. At most one input has a size that depends on the number of gathers. Because
 * abandoned gathers count too, the size is computed from that of the rank shard. */
static void write_shards(const sim_group *g, bool forward, int64_t world, int64_t rank, void *shard,
                         int64_t bytes) {
    const int64_t fixed = write_group(g, forward, world, rank, 0, NULL);
    const int64_t grown = bytes > fixed ? (bytes - fixed) / 8 : 0;
    const int64_t length = write_group(g, forward, world, rank, grown, NULL);
    if (length != bytes || grown > 6) {
        sim_fail("rank %lld sends %lld bytes to an all-gather of %s, its peers expect %lld",
                 (long long)rank, (long long)bytes, g->name, (long long)length);
        return;
    }
    (void)write_group(g, forward, world, rank, grown, (char *)shard);
}

void sim_write_shard(void *context, int64_t rank, void *shard, int64_t bytes) {
    const sim_group *g = (const sim_group *)context;
    write_shards(g, false, g->core.base.shard.world, rank, shard, bytes);
}

void sim_write_forward_shard(void *context, int64_t rank, void *shard, int64_t bytes) {
    const sim_group *g = (const sim_group *)context;
    write_shards(g, true, g->core.base.post_forward.world, rank, shard, bytes);
}

double sim_gradient_weight(const sim_scenario *s) {
    return (double)(s->replica * s->world + s->rank + 1);
}

double sim_reduced_scale(const sim_scenario *s) {
    double ranks = (double)(s->world * (s->replicas > 0 ? s->replicas : 1));
    double sum = ranks * (ranks + 1.0) / 2.0 * (s->user_reduce ? 2.0 : 1.0);
    return sum / (s->divide_factor != 0.0 ? s->divide_factor : ranks);
}
