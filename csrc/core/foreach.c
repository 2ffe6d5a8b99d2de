/* Transfers with torch's multi-tensor operations; see foreach.h. Owns the argument lists. All work
 * runs on the device's current stream.
 *
 * A parameter that is sharded on another dim than 0 has the layout [outer, world, chunk] when
 * unsharded. In rank shards its layout is [world, outer, chunk]. Such a parameter needs one more
 * copy between these layouts, like torch.cat in torch's FSDP2. If at most one parameter is sharded
 * on dim 0, each parameter is copied by itself, without a split. */
#include "foreach.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* ---- lists ---- */

static void clear(fc_foreach *f) {
    for (size_t i = 0; i < f->count; i++) {
        fct_tensor_release(f->dst[i]);
        fct_tensor_release(f->src[i]);
    }
    f->count = 0;
}

void fc_foreach_fini(fc_foreach *f) {
    assert(f->count <= f->capacity);
    clear(f);
    free((void *)f->dst); /* one block holds all three arrays */
    memset(f, 0, sizeof *f);
}

static fc_status reserve(fc_foreach *f, size_t capacity) {
    clear(f);
    if (capacity <= f->capacity) {
        return FC_OK;
    }
    char *block = (char *)malloc(capacity * (2 * sizeof(fct_tensor *) + sizeof(int64_t)));
    if (block == NULL) {
        return FC_ENOMEM;
    }
    fc_foreach_fini(f);
    f->dst = (fct_tensor **)(void *)block;
    f->src = f->dst + capacity;
    f->sizes = (int64_t *)(void *)(f->src + capacity);
    f->capacity = capacity;
    return FC_OK;
}

/* Appends an entry without tensors and returns its index. */
static size_t append(fc_foreach *f, int64_t size) {
    f->dst[f->count] = NULL;
    f->src[f->count] = NULL;
    f->sizes[f->count] = size;
    return f->count++;
}

/* ---- aliases ---- */

/* Creates a 1-D view of `numel` elements at element `offset` of the storage. */
static fc_status view_1d(const fct_tensor *base, fct_dtype dtype, int64_t numel, int64_t offset,
                         fct_tensor **out) {
    const int64_t stride[1] = {1};
    return fct_tensor_alias_as(base, dtype, 1, &numel, stride, offset, out) == 0 ? FC_OK
                                                                                 : FC_ERAISED;
}

/* Creates a 2-D view of `rows` rows of `numel` elements, `pitch` elements apart, from element
 * `offset` of the storage. */
static fc_status view_2d(const fct_tensor *base, fct_dtype dtype, int64_t rows, int64_t numel,
                         int64_t pitch, int64_t offset, fct_tensor **out) {
    const int64_t sizes[2] = {rows, numel};
    const int64_t strides[2] = {pitch, 1};
    return fct_tensor_alias_as(base, dtype, 2, sizes, strides, offset, out) == 0 ? FC_OK
                                                                                 : FC_ERAISED;
}

/* Addresses of blocks of `chunk` elements: block o of rank r is at offset + r * rank_stride + o *
 * block_stride. All counts are elements. */
typedef struct blocks {
    const fct_tensor *base;
    int64_t offset;
    int64_t rank_stride;
    int64_t block_stride;
    fct_dtype dtype;
} blocks;

static fc_status copy_blocks(const blocks *from, const blocks *to, int64_t world, int64_t outer,
                             int64_t chunk) {
    fc_status status = FC_OK;
    fct_tensor *src = NULL;
    fct_tensor *dst = NULL;
    const int64_t sizes[3] = {world, outer, chunk};
    const int64_t read[3] = {from->rank_stride, from->block_stride, 1};
    const int64_t written[3] = {to->rank_stride, to->block_stride, 1};
    FC_TRY_RAISED(fct_tensor_alias_as(from->base, from->dtype, 3, sizes, read, from->offset, &src));
    FC_TRY_RAISED(fct_tensor_alias_as(to->base, to->dtype, 3, sizes, written, to->offset, &dst));
    FC_TRY_RAISED(fct_tensor_copy(dst, src));
done:
    fct_tensor_release(src);
    fct_tensor_release(dst);
    return status;
}

/* ---- pack ---- */

/* Appends a copy of `numel` elements from dtype `from` to dtype `to`. */
static fc_status add_copy(fc_foreach *f, fct_dtype from, const fct_tensor *source,
                          int64_t source_offset, fct_dtype to, const fct_tensor *target,
                          int64_t target_offset, int64_t numel) {
    fc_status status = FC_OK;
    size_t i = append(f, ((int64_t)from << 32) + to); /* copy_all groups entries by this key */
    FC_TRY(view_1d(source, from, numel, source_offset, &f->src[i]));
    FC_TRY(view_1d(target, to, numel, target_offset, &f->dst[i]));
done:
    return status;
}

static void swap_entries(fc_foreach *f, size_t i, size_t j) {
    fct_tensor *dst = f->dst[i];
    fct_tensor *src = f->src[i];
    int64_t size = f->sizes[i];
    f->dst[i] = f->dst[j];
    f->src[i] = f->src[j];
    f->sizes[i] = f->sizes[j];
    f->dst[j] = dst;
    f->src[j] = src;
    f->sizes[j] = size;
}

/* Executes the appended copies, in one operation per pair of dtypes. */
static fc_status copy_all(fc_foreach *f) {
    fc_status status = FC_OK;
    for (size_t first = 0, end = 0; first < f->count; first = end) {
        end = first + 1;
        for (size_t i = end; i < f->count; i++) {
            if (f->sizes[i] == f->sizes[first]) {
                swap_entries(f, i, end++);
            }
        }
        FC_TRY_RAISED(fct_foreach_copy(f->dst + first, f->src + first, end - first));
    }
done:
    return status;
}

/* Appends the copy of a slot's input to the storage of `target`, at byte `at`. */
static fc_status add_input(fc_foreach *f, const fc_gather_plan *plan, const fc_slot *slot,
                           fc_param *const *params, const fct_tensor *target, int64_t at,
                           fc_error *err) {
    fc_status status = FC_OK;
    fct_facts facts;
    fct_tensor *cast = NULL;
    const fct_tensor *source = fc_slot_input(plan, slot, params);
    int32_t size = fc_dtype_size(slot->compute);
    bool casts = slot->source != slot->compute;
    bool needs_tensor_cast = at % size != 0 || (fc_dtype_is_complex(slot->source) &&
                                                !fc_dtype_is_complex(slot->compute));
    FC_TRY(fc_slot_input_facts(plan, slot, params, &facts, err));
    if (casts && !needs_tensor_cast) {
        return add_copy(f, slot->source, source, facts.offset_bytes / facts.itemsize, slot->compute,
                        target, at / size, slot->numel);
    }
    if (casts) { /* the target is not aligned to its dtype, or the cast keeps only real parts */
        FC_TRY_RAISED(fct_tensor_cast(fc_slot_input(plan, slot, params), slot->compute, &cast));
        source = cast;
        fct_tensor_facts(cast, &facts);
    }
    int32_t unit = fc_dtype_size(plan->dtype);
    FC_TRY(add_copy(f, plan->dtype, source, facts.offset_bytes / unit, plan->dtype, target,
                    at / unit, slot->numel * size / unit));
done:
    fct_tensor_release(cast);
    return status;
}

fc_status fc_foreach_pack(fc_foreach *f, const fc_gather_plan *plan, fc_param *const *params,
                          const fct_tensor *buffer, int64_t start, fc_error *err) {
    assert(plan->valid && !plan->chunks.split && start >= 0);
    fc_status status = FC_OK;
    FC_TRY(reserve(f, plan->count));
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        const fct_tensor *target = buffer != NULL ? buffer : fc_slot_output(slot, params);
        int64_t at = buffer != NULL ? start + slot->offset : 0;
        if (slot->numel > 0) {
            FC_TRY(add_input(f, plan, slot, params, target, at, err));
        }
    }
    FC_TRY(copy_all(f));
done:
    clear(f);
    return status;
}

/* ---- unpack ---- */

/* Returns the slot's size in elements of plan->dtype. */
static int64_t slot_units(const fc_gather_plan *plan, const fc_slot *slot) {
    return slot->numel * fc_dtype_size(slot->compute) / fc_dtype_size(plan->dtype);
}

/* Copies the blocks of one slot from `source` to its output. The blocks of a rank begin `pitch`
 * elements after those of the rank before. */
static fc_status unpack_blocks(const fc_gather_plan *plan, const fc_slot *slot,
                               fc_param *const *params, const fct_tensor *source, int64_t offset,
                               int64_t pitch) {
    int64_t chunk = slot_units(plan, slot) / slot->outer;
    const blocks from = {source, offset, pitch, chunk, plan->dtype};
    const blocks to = {fc_slot_output(slot, params), 0, chunk, plan->world * chunk, plan->dtype};
    return copy_blocks(&from, &to, plan->world, slot->outer, chunk);
}

/* Extra memory that the split writes besides the outputs, in elements per rank. */
typedef struct extra_sizes {
    /* elements of slots with several blocks; unpack_blocks copies them from here to the outputs */
    int64_t blocks;
    int64_t gap; /* widest gap between two slots; never read */
} extra_sizes;

static extra_sizes measure_extra(const fc_gather_plan *plan) {
    extra_sizes sizes = {0, 0};
    int64_t end = 0;
    for (size_t i = 0; i <= plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        int64_t next =
            i < plan->count ? slot->offset / fc_dtype_size(plan->dtype) : plan->rank_numel;
        sizes.gap = next - end > sizes.gap ? next - end : sizes.gap;
        if (i < plan->count) {
            sizes.blocks += slot->outer != 1 ? slot_units(plan, slot) : 0;
            end = next + slot_units(plan, slot);
        }
    }
    return sizes;
}

/* Lists the parts of a rank shard: outputs, blocks in extra memory, and the gaps between them. */
static fc_status list_parts(fc_foreach *f, const fc_gather_plan *plan, fc_param *const *params,
                            const fct_tensor *extra, int64_t blocks_end) {
    fc_status status = FC_OK;
    int64_t end = 0;
    int64_t used = 0;
    for (size_t i = 0; i <= plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        int64_t next =
            i < plan->count ? slot->offset / fc_dtype_size(plan->dtype) : plan->rank_numel;
        if (next > end) {
            size_t at = append(f, next - end);
            FC_TRY(view_2d(extra, plan->dtype, plan->world, next - end, next - end,
                           plan->world * blocks_end, &f->dst[at]));
        }
        if (i == plan->count || slot->numel == 0) {
            end = next;
            continue;
        }
        int64_t units = slot_units(plan, slot);
        size_t at = append(f, units);
        const fct_tensor *base = slot->outer == 1 ? fc_slot_output(slot, params) : extra;
        FC_TRY(view_2d(base, plan->dtype, plan->world, units, units,
                       slot->outer == 1 ? 0 : plan->world * used, &f->dst[at]));
        used += slot->outer == 1 ? 0 : units;
        end = next + units;
    }
done:
    return status;
}

/* Unpacks all slots in one operation. Slots with several blocks are copied once more, from the
 * extra memory. */
static fc_status unpack_split(fc_foreach *f, const fc_gather_plan *plan, fc_param *const *params,
                              const fct_tensor *buffer, int64_t offset, fct_device device) {
    fc_status status = FC_OK;
    fct_tensor *rank_shards = NULL;
    fct_tensor *extra = NULL;
    const extra_sizes sizes = measure_extra(plan);
    int64_t used = 0;
    FC_TRY(reserve(f, 2 * plan->count + 1));
    if (sizes.blocks + sizes.gap > 0) {
        FC_TRY_RAISED(fct_tensor_empty(plan->world * (sizes.blocks + sizes.gap), plan->dtype,
                                       device, &extra));
    }
    FC_TRY(view_2d(buffer, plan->dtype, plan->world, plan->rank_numel, plan->rank_numel, offset,
                   &rank_shards));
    FC_TRY(list_parts(f, plan, params, extra, sizes.blocks));
    FC_TRY_RAISED(fct_split_copy(rank_shards, f->sizes, f->dst, f->count));
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        int64_t units = slot_units(plan, slot);
        if (slot->outer != 1 && units > 0) {
            FC_TRY(unpack_blocks(plan, slot, params, extra, plan->world * used, units));
            used += units;
        }
    }
done:
    clear(f);
    fct_tensor_release(rank_shards);
    fct_tensor_release(extra);
    return status;
}

fc_status fc_foreach_unpack(fc_foreach *f, const fc_gather_plan *plan, fc_param *const *params,
                            const fct_tensor *buffer, int64_t start, fct_device device) {
    assert(plan->valid && !plan->chunks.split && start >= 0);
    fc_status status = FC_OK;
    size_t single = 0;
    size_t several = 0;
    int64_t unit = fc_dtype_size(plan->dtype);
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->slots[i].numel > 0) {
            *(plan->slots[i].outer == 1 ? &single : &several) += 1;
        }
    }
    if (single + several == 0) {
        return FC_OK;
    }
    if (single > 1) {
        return unpack_split(f, plan, params, buffer, start / unit, device);
    }
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        if (slot->numel > 0) {
            FC_TRY(unpack_blocks(plan, slot, params, buffer, (start + slot->offset) / unit,
                                 plan->rank_numel));
        }
    }
done:
    return status;
}

/* ---- pack gradients ---- */

/* Distribution of the gradients to the rank shards. */
typedef struct distribution {
    /* common dtype of the gradients, or the plan's dtype */
    fct_dtype dtype;
    /* every gradient is sharded on a dim other than 0: no temporary is needed */
    bool direct;
    /* copies of the gradients that are cast or transposed first; NULL: none */
    fct_tensor *temporary;
    fct_tensor *zeros; /* as many as the widest gap; NULL: there are no gaps */
} distribution;

static fct_dtype tensor_dtype(const fct_tensor *t) {
    fct_facts facts;
    fct_tensor_facts(t, &facts);
    return facts.dtype;
}

static bool needs_temporary(const fc_reduce_plan *plan, size_t i, const distribution *d) {
    const fc_layout *layout = &plan->params[i]->layout;
    return layout->outer != 1 ? !d->direct : tensor_dtype(plan->grads[i]) != d->dtype;
}

/* Creates zeros for the gaps. Gaps exist on devices that align slots, after a slot that does not
 * end at a multiple of the alignment. */
static fc_status make_zeros(const fc_reduce_plan *plan, fct_device device, distribution *d) {
    fc_status status = FC_OK;
    fct_tensor *like = NULL;
    int64_t widest = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const int64_t gap = fc_reduce_plan_gap(plan, i);
        widest = gap > widest ? gap : widest;
    }
    if (widest > 0) {
        FC_TRY_RAISED(fct_tensor_empty(widest, d->dtype, device, &like));
        FC_TRY_RAISED(fct_tensor_zeros_like(like, &d->zeros));
    }
done:
    fct_tensor_release(like);
    return status;
}

static fc_status init_distribution(const fc_reduce_plan *plan, fct_device device, distribution *d) {
    fc_status status = FC_OK;
    bool uniform = true;
    int64_t numel = 0;
    *d = (distribution){.direct = true};
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        uniform = uniform && tensor_dtype(plan->grads[i]) == tensor_dtype(plan->grads[0]);
        d->direct = d->direct && (layout->outer != 1 || layout->numel == 0);
    }
    d->dtype = uniform ? tensor_dtype(plan->grads[0]) : plan->dtype;
    for (size_t i = 0; i < plan->count; i++) {
        numel += needs_temporary(plan, i, d) ? plan->params[i]->layout.numel : 0;
    }
    if (numel > 0) {
        FC_TRY_RAISED(fct_tensor_empty(numel, d->dtype, device, &d->temporary));
    }
    FC_TRY(make_zeros(plan, device, d));
done:
    return status;
}

/* Copies one gradient to `target`, with its blocks in rank order. */
static fc_status copy_in_rank_order(const fc_reduce_plan *plan, size_t i, const fct_tensor *target,
                                    fct_dtype dtype, int64_t offset, int64_t pitch) {
    const fc_layout *layout = &plan->params[i]->layout;
    fct_facts facts;
    fct_tensor_facts(plan->grads[i], &facts);
    int64_t chunk = layout->chunk_rows * layout->row_numel;
    const blocks from = {plan->grads[i], facts.offset_bytes / facts.itemsize, chunk,
                         layout->world * chunk, facts.dtype};
    const blocks to = {target, offset, pitch, chunk, dtype};
    return copy_blocks(&from, &to, layout->world, layout->outer, chunk);
}

static fc_status fill_temporary(fc_foreach *f, const fc_reduce_plan *plan, const distribution *d) {
    fc_status status = FC_OK;
    int64_t used = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        fct_facts facts;
        if (layout->numel == 0 || !needs_temporary(plan, i, d)) {
            continue;
        }
        fct_tensor_facts(plan->grads[i], &facts);
        if (layout->outer != 1) {
            FC_TRY(copy_in_rank_order(plan, i, d->temporary, d->dtype, used,
                                      layout->numel / layout->world));
        } else {
            FC_TRY(add_copy(f, facts.dtype, plan->grads[i], facts.offset_bytes / facts.itemsize,
                            d->dtype, d->temporary, used, layout->numel));
        }
        used += layout->numel;
    }
    FC_TRY(copy_all(f));
done:
    clear(f);
    return status;
}

/* Lists the gradients, and zeros for the gaps, as 2-D views. Their rows are distributed to the
 * ranks. */
static fc_status list_views(fc_foreach *f, const fc_reduce_plan *plan, const distribution *d) {
    fc_status status = FC_OK;
    int64_t used = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        bool temporary = needs_temporary(plan, i, d);
        int64_t rows = layout->outer != 1 ? layout->world : layout->rows;
        int64_t gap = fc_reduce_plan_gap(plan, i);
        fct_facts facts;
        if (layout->numel == 0) {
            continue;
        }
        fct_tensor_facts(plan->grads[i], &facts);
        size_t at = append(f, 0);
        FC_TRY(view_2d(temporary ? d->temporary : plan->grads[i], d->dtype, rows,
                       layout->numel / rows, layout->numel / rows,
                       temporary ? used : facts.offset_bytes / facts.itemsize, &f->dst[at]));
        used += temporary ? layout->numel : 0;
        if (gap > 0) { /* one row of zeros: the operation pads it to a row per rank */
            at = append(f, 0);
            FC_TRY(view_2d(d->zeros, d->dtype, 1, gap, gap, 0, &f->dst[at]));
        }
    }
done:
    return status;
}

static fc_status distribute(fc_foreach *f, const fc_reduce_plan *plan, const distribution *d,
                            int64_t world, const fct_tensor *buffer, int64_t offset) {
    fc_status status = FC_OK;
    fct_tensor *rank_shards = NULL;
    for (size_t i = 0; d->direct && i < plan->count; i++) {
        const int64_t at = offset + plan->slots[i].offset;
        if (plan->params[i]->layout.numel > 0) {
            FC_TRY(copy_in_rank_order(plan, i, buffer, plan->dtype, at, plan->rank_numel));
        }
        if (fc_reduce_plan_gap(plan, i) > 0) {
            const int64_t end = at + plan->params[i]->layout.padded_numel;
            const blocks from = {.base = d->zeros, .dtype = d->dtype};
            const blocks to = {buffer, end, plan->rank_numel, 0, plan->dtype};
            FC_TRY(copy_blocks(&from, &to, world, 1, fc_reduce_plan_gap(plan, i)));
        }
    }
    if (!d->direct) {
        FC_TRY(fill_temporary(f, plan, d));
        FC_TRY(list_views(f, plan, d));
        FC_TRY(view_2d(buffer, plan->dtype, world, plan->rank_numel, plan->rank_numel, offset,
                       &rank_shards));
        FC_TRY_RAISED(fct_chunk_cat(f->dst, f->count, world, rank_shards));
    }
done:
    clear(f);
    fct_tensor_release(rank_shards);
    return status;
}

fc_status fc_foreach_pack_gradients(fc_foreach *f, const fc_reduce_plan *plan, int64_t world,
                                    const fct_tensor *buffer, int64_t start, fct_device device) {
    assert(plan->count <= plan->capacity && world > 0 && start >= 0);
    fc_status status = FC_OK;
    distribution d = {.temporary = NULL};
    if (plan->count == 0 || plan->rank_numel == 0) {
        return FC_OK;
    }
    FC_TRY(reserve(f, 2 * plan->count));
    FC_TRY(init_distribution(plan, device, &d));
    FC_TRY(distribute(f, plan, &d, world, buffer, start / fc_dtype_size(plan->dtype)));
done:
    fct_tensor_release(d.temporary);
    fct_tensor_release(d.zeros);
    return status;
}
