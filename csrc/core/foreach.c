/* Transfers with torch's multi-tensor operations; see foreach.h. A parameter that is cut on another
 * dim than 0 is [outer, world, chunk] where it is whole and [world, outer, chunk] where it is in
 * rows, so that it needs a copy of its own between the two; torch's FSDP2 makes the same copy (a
 * cat). Where at most one other parameter is left, all are copied like that, straight. */
#include "foreach.h"

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
    clear(f);
    free((void *)f->dst); /* all of them: one block */
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

/* A new place at the end, without tensors. */
static size_t append(fc_foreach *f, int64_t size) {
    f->dst[f->count] = NULL;
    f->src[f->count] = NULL;
    f->sizes[f->count] = size;
    return f->count++;
}

/* ---- aliases ---- */

/* `numel` elements from element `offset` of the storage on. */
static fc_status line(const fct_tensor *base, fct_dtype dtype, int64_t numel, int64_t offset,
                      fct_tensor **out) {
    const int64_t stride[1] = {1};
    return fct_tensor_alias_as(base, dtype, 1, &numel, stride, offset, out) == 0 ? FC_OK
                                                                                 : FC_ERAISED;
}

/* `rows` rows of `numel` elements, `pitch` apart. */
static fc_status table(const fct_tensor *base, fct_dtype dtype, int64_t rows, int64_t numel,
                       int64_t pitch, int64_t offset, fct_tensor **out) {
    const int64_t sizes[2] = {rows, numel};
    const int64_t strides[2] = {pitch, 1};
    return fct_tensor_alias_as(base, dtype, 2, sizes, strides, offset, out) == 0 ? FC_OK
                                                                                 : FC_ERAISED;
}

/* Blocks of `chunk` elements: where rank r's block o stands, `row` and `block` elements apart. */
typedef struct blocks {
    const fct_tensor *base;
    int64_t offset;
    int64_t row;
    int64_t block;
    fct_dtype dtype;
} blocks;

static fc_status copy_blocks(const blocks *from, const blocks *to, int64_t world, int64_t outer,
                             int64_t chunk) {
    fc_status status = FC_OK;
    fct_tensor *src = NULL;
    fct_tensor *dst = NULL;
    const int64_t sizes[3] = {world, outer, chunk};
    const int64_t read[3] = {from->row, from->block, 1};
    const int64_t written[3] = {to->row, to->block, 1};
    FC_TRY_RAISED(fct_tensor_alias_as(from->base, from->dtype, 3, sizes, read, from->offset, &src));
    FC_TRY_RAISED(fct_tensor_alias_as(to->base, to->dtype, 3, sizes, written, to->offset, &dst));
    FC_TRY_RAISED(fct_tensor_copy(dst, src));
done:
    fct_tensor_release(src);
    fct_tensor_release(dst);
    return status;
}

/* ---- pack ---- */

/* A copy of `numel` elements to come, `from` and `to` being element types. */
static fc_status add_copy(fc_foreach *f, fct_dtype from, const fct_tensor *source,
                          int64_t source_offset, fct_dtype to, const fct_tensor *target,
                          int64_t target_offset, int64_t numel) {
    fc_status status = FC_OK;
    size_t i = append(f, ((int64_t)from << 32) + to); /* what must be equal in one operation */
    FC_TRY(line(source, from, numel, source_offset, &f->src[i]));
    FC_TRY(line(target, to, numel, target_offset, &f->dst[i]));
done:
    return status;
}

static void swap_places(fc_foreach *f, size_t i, size_t j) {
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

/* The copies that were added, in one operation for each pair of types. */
static fc_status copy_all(fc_foreach *f) {
    fc_status status = FC_OK;
    for (size_t first = 0, end = 0; first < f->count; first = end) {
        end = first + 1;
        for (size_t i = end; i < f->count; i++) {
            if (f->sizes[i] == f->sizes[first]) {
                swap_places(f, i, end++);
            }
        }
        FC_TRY_RAISED(fct_foreach_copy(f->dst + first, f->src + first, end - first));
    }
done:
    return status;
}

/* A slot's input, to `at` bytes into the storage of `target`. */
static fc_status add_input(fc_foreach *f, const fc_gather_plan *plan, const fc_slot *slot,
                           fc_param *const *params, const fct_tensor *target, int64_t at,
                           fc_error *err) {
    fc_status status = FC_OK;
    fct_facts facts;
    fct_tensor *cast = NULL;
    const fct_tensor *source = fc_slot_input(plan, slot, params);
    int32_t size = fc_dtype_size(slot->compute);
    bool casts = slot->source != slot->compute;
    bool apart = at % size != 0 ||
                 (fc_dtype_is_complex(slot->source) && !fc_dtype_is_complex(slot->compute));
    FC_TRY(fc_slot_input_facts(plan, slot, params, &facts, err));
    if (casts && !apart) {
        return add_copy(f, slot->source, source, facts.offset_bytes / facts.itemsize, slot->compute,
                        target, at / size, slot->numel);
    }
    if (casts) { /* no element starts there among bytes, or the real parts are meant */
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

/* Sizes in the row's elements, which are bytes where the parameters have several dtypes. */
static int64_t slot_units(const fc_gather_plan *plan, const fc_slot *slot) {
    return slot->numel * fc_dtype_size(slot->compute) / fc_dtype_size(plan->dtype);
}

/* One slot's blocks, from where they stand in rows to the output. */
static fc_status unpack_blocks(const fc_gather_plan *plan, const fc_slot *slot,
                               fc_param *const *params, const fct_tensor *rows, int64_t offset,
                               int64_t pitch) {
    int64_t chunk = slot_units(plan, slot) / slot->outer;
    const blocks from = {rows, offset, pitch, chunk, plan->dtype};
    const blocks to = {fc_slot_output(slot, params), 0, chunk, plan->world * chunk, plan->dtype};
    return copy_blocks(&from, &to, plan->world, slot->outer, chunk);
}

/* What the split has to write besides the outputs, in elements of one row. */
typedef struct spare_room {
    int64_t blocks; /* of slots with several blocks, one after the other: copied from there */
    int64_t gap;    /* the widest between two slots: nobody reads it */
} spare_room;

static spare_room room_beside(const fc_gather_plan *plan) {
    spare_room a = {0, 0};
    int64_t end = 0;
    for (size_t i = 0; i <= plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        int64_t next =
            i < plan->count ? slot->offset / fc_dtype_size(plan->dtype) : plan->row_numel;
        a.gap = next - end > a.gap ? next - end : a.gap;
        if (i < plan->count) {
            a.blocks += slot->outer != 1 ? slot_units(plan, slot) : 0;
            end = next + slot_units(plan, slot);
        }
    }
    return a;
}

/* The parts of a row: outputs, blocks that are put aside, gaps behind those. */
static fc_status list_parts(fc_foreach *f, const fc_gather_plan *plan, fc_param *const *params,
                            const fct_tensor *spare, int64_t blocks_end) {
    fc_status status = FC_OK;
    int64_t end = 0;
    int64_t put = 0;
    for (size_t i = 0; i <= plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        int64_t next =
            i < plan->count ? slot->offset / fc_dtype_size(plan->dtype) : plan->row_numel;
        if (next > end) {
            size_t at = append(f, next - end);
            FC_TRY(table(spare, plan->dtype, plan->world, next - end, next - end,
                         plan->world * blocks_end, &f->dst[at]));
        }
        if (i == plan->count || slot->numel == 0) {
            end = next;
            continue;
        }
        int64_t units = slot_units(plan, slot);
        size_t at = append(f, units);
        const fct_tensor *base = slot->outer == 1 ? fc_slot_output(slot, params) : spare;
        FC_TRY(table(base, plan->dtype, plan->world, units, units,
                     slot->outer == 1 ? 0 : plan->world * put, &f->dst[at]));
        put += slot->outer == 1 ? 0 : units;
        end = next + units;
    }
done:
    return status;
}

/* All slots in one operation, and those of several blocks once more from where they were put. */
static fc_status unpack_split(fc_foreach *f, const fc_gather_plan *plan, fc_param *const *params,
                              const fct_tensor *buffer, int64_t offset, fct_device device) {
    fc_status status = FC_OK;
    fct_tensor *rows = NULL;
    fct_tensor *spare = NULL;
    const spare_room a = room_beside(plan);
    int64_t put = 0;
    FC_TRY(reserve(f, 2 * plan->count + 1));
    if (a.blocks + a.gap > 0) {
        FC_TRY_RAISED(
            fct_tensor_empty(plan->world * (a.blocks + a.gap), plan->dtype, device, &spare));
    }
    FC_TRY(
        table(buffer, plan->dtype, plan->world, plan->row_numel, plan->row_numel, offset, &rows));
    FC_TRY(list_parts(f, plan, params, spare, a.blocks));
    FC_TRY_RAISED(fct_split_copy(rows, f->sizes, f->dst, f->count));
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        int64_t units = slot_units(plan, slot);
        if (slot->outer != 1 && units > 0) {
            FC_TRY(unpack_blocks(plan, slot, params, spare, plan->world * put, units));
            put += units;
        }
    }
done:
    clear(f);
    fct_tensor_release(rows);
    fct_tensor_release(spare);
    return status;
}

fc_status fc_foreach_unpack(fc_foreach *f, const fc_gather_plan *plan, fc_param *const *params,
                            const fct_tensor *buffer, int64_t start, fct_device device) {
    fc_status status = FC_OK;
    size_t whole = 0;
    size_t cut = 0;
    int64_t unit = fc_dtype_size(plan->dtype);
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->slots[i].numel > 0) {
            *(plan->slots[i].outer == 1 ? &whole : &cut) += 1;
        }
    }
    if (whole + cut == 0) {
        return FC_OK;
    }
    if (whole > 1) {
        return unpack_split(f, plan, params, buffer, start / unit, device);
    }
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        if (slot->numel > 0) {
            FC_TRY(unpack_blocks(plan, slot, params, buffer, (start + slot->offset) / unit,
                                 plan->row_numel));
        }
    }
done:
    return status;
}

/* ---- pack gradients ---- */

/* How the gradients are dealt. */
typedef struct deal {
    fct_dtype dtype;   /* in this one: their own, or the plan's where they have several */
    bool straight;     /* all are cut on other dims: each goes to the rows by itself */
    fct_tensor *aside; /* those that are cast or turned before, one after the other; or NULL */
} deal;

static fct_dtype dtype_of(const fct_tensor *t) {
    fct_facts facts;
    fct_tensor_facts(t, &facts);
    return facts.dtype;
}

static bool goes_aside(const fc_reduce_plan *plan, size_t i, const deal *d) {
    const fc_layout *layout = &plan->params[i]->layout;
    return layout->outer != 1 ? !d->straight : dtype_of(plan->grads[i]) != d->dtype;
}

static fc_status make_deal(const fc_reduce_plan *plan, fct_device device, deal *d) {
    fc_status status = FC_OK;
    bool uniform = true;
    int64_t numel = 0;
    *d = (deal){.straight = true};
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        uniform = uniform && dtype_of(plan->grads[i]) == dtype_of(plan->grads[0]);
        d->straight = d->straight && (layout->outer != 1 || layout->numel == 0);
    }
    d->dtype = uniform ? dtype_of(plan->grads[0]) : plan->dtype;
    for (size_t i = 0; i < plan->count; i++) {
        numel += goes_aside(plan, i, d) ? plan->params[i]->layout.numel : 0;
    }
    if (numel > 0) {
        FC_TRY_RAISED(fct_tensor_empty(numel, d->dtype, device, &d->aside));
    }
done:
    return status;
}

/* One gradient's blocks, in the order of ranks. */
static fc_status turn(const fc_reduce_plan *plan, size_t i, const fct_tensor *target,
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

static fc_status put_aside(fc_foreach *f, const fc_reduce_plan *plan, const deal *d) {
    fc_status status = FC_OK;
    int64_t put = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        fct_facts facts;
        if (layout->numel == 0 || !goes_aside(plan, i, d)) {
            continue;
        }
        fct_tensor_facts(plan->grads[i], &facts);
        if (layout->outer != 1) {
            FC_TRY(turn(plan, i, d->aside, d->dtype, put, layout->numel / layout->world));
        } else {
            FC_TRY(add_copy(f, facts.dtype, plan->grads[i], facts.offset_bytes / facts.itemsize,
                            d->dtype, d->aside, put, layout->numel));
        }
        put += layout->numel;
    }
    FC_TRY(copy_all(f));
done:
    clear(f);
    return status;
}

/* The gradients as tables whose rows are dealt to the ranks. */
static fc_status list_tables(fc_foreach *f, const fc_reduce_plan *plan, const deal *d) {
    fc_status status = FC_OK;
    int64_t put = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        bool aside = goes_aside(plan, i, d);
        int64_t rows = layout->outer != 1 ? layout->world : layout->rows;
        fct_facts facts;
        if (layout->numel == 0) {
            continue;
        }
        fct_tensor_facts(plan->grads[i], &facts);
        size_t at = append(f, 0);
        FC_TRY(table(aside ? d->aside : plan->grads[i], d->dtype, rows, layout->numel / rows,
                     layout->numel / rows, aside ? put : facts.offset_bytes / facts.itemsize,
                     &f->dst[at]));
        put += aside ? layout->numel : 0;
    }
done:
    return status;
}

static fc_status deal_out(fc_foreach *f, const fc_reduce_plan *plan, const deal *d, int64_t world,
                          const fct_tensor *buffer, int64_t offset) {
    fc_status status = FC_OK;
    fct_tensor *rows = NULL;
    for (size_t i = 0; d->straight && i < plan->count; i++) {
        if (plan->params[i]->layout.numel > 0) {
            FC_TRY(turn(plan, i, buffer, plan->dtype, offset + plan->slots[i].offset,
                        plan->row_numel));
        }
    }
    if (!d->straight) {
        FC_TRY(put_aside(f, plan, d));
        FC_TRY(list_tables(f, plan, d));
        FC_TRY(table(buffer, plan->dtype, world, plan->row_numel, plan->row_numel, offset, &rows));
        FC_TRY_RAISED(fct_chunk_cat(f->dst, f->count, world, rows));
    }
done:
    clear(f);
    fct_tensor_release(rows);
    return status;
}

fc_status fc_foreach_pack_gradients(fc_foreach *f, const fc_reduce_plan *plan, int64_t world,
                                    const fct_tensor *buffer, int64_t start, fct_device device) {
    fc_status status = FC_OK;
    deal d = {.aside = NULL};
    if (plan->count == 0 || plan->row_numel == 0) {
        return FC_OK;
    }
    FC_TRY(reserve(f, plan->count));
    FC_TRY(make_deal(plan, device, &d));
    FC_TRY(deal_out(f, plan, &d, world, buffer, start / fc_dtype_size(plan->dtype)));
done:
    fct_tensor_release(d.aside);
    return status;
}
