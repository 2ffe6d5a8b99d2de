/* Memory transfers of a plan; see transfer.h. Owns the memory of descriptors. Between calls this
 * file keeps no tensor and no address.
 *
 * The address checks in this file are the last checks before raw copies. They compare the extents
 * of source and target with their storages, also in release builds. All work runs on the device's
 * current stream. */
#include "transfer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/device.h"
#include "../bridge/stream.h"
#include "offload.h"

void fc_transfer_fini(fc_transfer *t) {
    assert(t->descriptors != NULL || t->capacity == 0);
    free(t->descriptors);
    fc_foreach_fini(&t->foreach);
    memset(t, 0, sizeof *t);
}

/* Reserves space for `count` descriptors of `size` bytes. Previous contents are lost. */
static fc_status reserve(fc_transfer *t, size_t count, size_t size) {
    const size_t bytes = count * size;
    if (bytes <= t->capacity) {
        return FC_OK;
    }
    void *grown = malloc(bytes);
    if (grown == NULL) {
        return FC_ENOMEM;
    }
    free(t->descriptors);
    t->descriptors = grown;
    t->capacity = bytes;
    return FC_OK;
}

/* Arguments of a kernel launch. */
typedef struct launch {
    fct_device device;
    fct_device before; /* current device before the launch; used on devices with streams */
    void *stream;
} launch;

static fc_status begin_launch(fct_device device, launch *l) {
    *l = (launch){.device = device, .before = device, .stream = NULL};
    if (!fct_device_has_streams(device)) {
        return FC_OK;
    }
    return fct_launch_enter(device, &l->before, &l->stream) == 0 ? FC_OK : FC_ERAISED;
}

/* Ends the launch. `failure`: error message of the kernel, or NULL. */
static fc_status end_launch(const launch *l, const char *failure, fc_error *err) {
    if (fct_device_has_streams(l->device)) {
        fct_launch_leave(l->before);
    }
    return failure == NULL ? FC_OK
                           : fc_error_set(err, FC_ESTATE, "a copy kernel failed: %s", failure);
}

/* Checks that the tensor has at least `bytes` bytes of contiguous memory. */
static fc_status check_extent(const fct_facts *facts, int64_t bytes, fc_error *err) {
    if (!fct_facts_has_bytes(facts, bytes)) {
        return fc_error_set(err, FC_EASSERT, "a transfer of %lld bytes does not fit its buffer",
                            (long long)bytes);
    }
    return FC_OK;
}

/* Writes the metadata of a buffer to *facts and checks that the buffer holds `bytes` bytes of
 * contiguous memory. */
static fc_status read_buffer_facts(const fct_tensor *buffer, int64_t bytes, fct_facts *facts,
                                   fc_error *err) {
    fct_tensor_facts(buffer, facts);
    return check_extent(facts, bytes, err);
}

/* Returns true if a kernel can process the segment. A kernel copies any dtype, but converts only
 * supported dtypes. On a GPU it converts only at addresses aligned to the element size. */
static bool fits_kernel(const fc_gather_plan *plan, const fck_segment *s) {
    return s->src_dtype == s->dst_dtype ||
           (fck_can_cast(plan->device_type, s->src_dtype, s->dst_dtype) != 0 &&
            (uintptr_t)s->src % (uintptr_t)s->itemsize == 0 &&
            (uintptr_t)s->dst % (uintptr_t)fc_dtype_size(s->dst_dtype) == 0);
}

/* Returns true if kernels can process all segments. Alignment is checked only for plans of several
 * dtypes, because in all other plans slots are aligned to the element size. */
static bool all_fit_kernels(const fc_gather_plan *plan, const fck_segment *segments) {
    bool fit = plan->native;
    for (size_t i = 0; fit && plan->dtype == FCK_UINT8 && i < plan->count; i++) {
        fit = fits_kernel(plan, &segments[i]);
    }
    return fit;
}

static void release_all(fct_tensor **tensors, size_t count) {
    for (size_t i = 0; tensors != NULL && i < count; i++) {
        fct_tensor_release(tensors[i]);
    }
    free((void *)tensors);
}

/* Casts with torch the inputs that no kernel can cast, and points the segments at the casts.
 * *casts: new array of [count], with NULL for inputs that need no cast. */
static fc_status cast_with_torch(const fc_gather_plan *plan, fc_param *const *params,
                                 fck_segment *segments, fct_tensor ***casts, fc_error *err) {
    fc_status status = FC_OK;
    fct_tensor **cast_tensors = (fct_tensor **)calloc(plan->count, sizeof *cast_tensors);
    if (cast_tensors == NULL) {
        return FC_ENOMEM;
    }
    for (size_t i = 0; i < plan->count; i++) {
        fck_segment *s = &segments[i];
        fct_facts facts;
        if (fits_kernel(plan, s)) {
            continue;
        }
        FC_TRY_RAISED(fct_tensor_cast(fc_slot_input(plan, &plan->slots[i], params), s->dst_dtype,
                                      &cast_tensors[i]));
        FC_TRY(read_buffer_facts(cast_tensors[i], s->count * fc_dtype_size(s->dst_dtype), &facts,
                                 err));
        s->src = facts.data;
        s->src_dtype = s->dst_dtype;
        s->itemsize = (int32_t)facts.itemsize;
    }
    *casts = cast_tensors;
    return FC_OK;
done:
    release_all(cast_tensors, plan->count);
    return status;
}

/* Returns the checksum if the kernels can read the memory, else marks it as unknown. NULL: none. */
static fc_checksum *readable(fc_checksum *checksum, const fck_backend *kernels) {
    const bool reads = kernels != NULL && kernels->checksum != NULL;
    if (checksum != NULL && !reads) {
        checksum->unknown = true;
    }
    return reads ? checksum : NULL;
}

/* Runs the pack kernel. Precondition: the addresses of the segments are set. */
static fc_status pack_segments(const fc_gather_plan *plan, fc_param *const *params,
                               fck_segment *segments, const fck_backend *kernels, fct_device device,
                               fc_checksum *checksum, fc_error *err) {
    fc_status status = FC_OK;
    fct_tensor **casts = NULL;
    const char *failure = NULL;
    launch l;
    if (!all_fit_kernels(plan, segments)) {
        FC_TRY(cast_with_torch(plan, params, segments, &casts, err));
    }
    FC_TRY(begin_launch(device, &l));
    if (checksum == NULL) {
        failure = kernels->pack(segments, plan->count, l.stream);
    }
    for (size_t i = 0; checksum != NULL && failure == NULL && i < plan->count; i++) {
        failure = fc_checksum_pack(checksum, i, &segments[i], kernels);
    }
    FC_TRY(end_launch(&l, failure, err));
done:
    release_all(casts, plan->count);
    return status;
}

/* Writes the metadata of an input to *facts. Fails if the input is on another device type than the
 * kernel. */
static fc_status read_input_facts(const fc_gather_plan *plan, const fc_slot *slot,
                                  fc_param *const *params, fct_device device, fct_facts *facts,
                                  fc_error *err) {
    fc_status status = fc_slot_input_facts(plan, slot, params, facts, err);
    if (status == FC_OK && !fct_device_is_same_type(facts->device, device)) {
        const fc_param *p = params[slot->param];
        return fc_error_set(err, FC_EASSERT,
                            "sharded data of parameter '%s' is not on its group's device any more",
                            p->name != NULL ? p->name : "?");
    }
    return status;
}

static fck_segment make_segment(const fc_slot *slot, const fct_facts *source, void *target) {
    return (fck_segment){.src = source->data,
                         .dst = target,
                         .count = slot->numel,
                         .itemsize = (int32_t)source->itemsize,
                         .src_dtype = slot->source,
                         .dst_dtype = slot->compute};
}

/* Fills in one segment per slot: source is the input, target is the slot's offset in part `rank` of
 * its chunk. */
static fc_status describe_inputs(const fc_gather_plan *plan, fc_param *const *params,
                                 fct_tensor *const *chunks, int64_t rank, fct_device device,
                                 fck_segment *segments, fc_error *err) {
    fc_status status = FC_OK;
    const int64_t itemsize = fc_dtype_size(plan->dtype);
    fct_facts source;
    fct_facts target = {0};
    size_t current = plan->chunks.count; /* chunk that `target` describes; initially none */
    int64_t part = 0;                    /* offset of part `rank` in that chunk, in bytes */
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        FC_TRY(read_input_facts(plan, slot, params, device, &source, err));
        if (slot->numel > 0 && slot->chunk != current) {
            const int64_t bytes = plan->chunks.chunks[slot->chunk].numel * itemsize;
            current = slot->chunk;
            part = rank * bytes;
            FC_TRY(read_buffer_facts(chunks[current], part + bytes, &target, err));
        }
        segments[i] = make_segment(
            slot, &source, slot->numel > 0 ? (char *)target.data + part + slot->offset : NULL);
    }
done:
    return status;
}

fc_status fc_transfer_pack(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                           fct_tensor *const *chunks, int64_t rank, fc_checksum *checksum,
                           fc_error *err) {
    assert(plan->valid && rank >= 0 && rank < plan->world);
    fc_status status = FC_OK;
    fct_facts first;
    const int64_t part = plan->chunks.chunks[0].numel * fc_dtype_size(plan->dtype);
    FC_TRY(read_buffer_facts(chunks[0], (rank + 1) * part, &first, err));
    const fck_backend *kernels = fck_backend_of(first.device.type);
    assert(!plan->chunks.split || (kernels != NULL && !plan->from_host));
    checksum = readable(checksum, plan->from_host ? NULL : kernels);
    if (plan->from_host && !plan->casts && !plan->extended) {
        return fc_offload_upload(plan, params, chunks[0], first.offset_bytes + rank * part, err);
    }
    if (plan->from_host) {
        FC_TRY(fc_offload_stage(plan, params, first.device, err));
    }
    if (kernels == NULL) {
        status = fc_foreach_pack(&t->foreach, plan, params, chunks[0],
                                 first.offset_bytes + rank * part, err);
        goto done;
    }
    FC_TRY(reserve(t, plan->count, sizeof(fck_segment)));
    fck_segment *segments = (fck_segment *)t->descriptors;
    FC_TRY(describe_inputs(plan, params, chunks, rank, first.device, segments, err));
    FC_TRY(pack_segments(plan, params, segments, kernels, first.device, checksum, err));
done:
    if (plan->from_host) {
        fc_offload_unstage(plan, params);
    }
    return status;
}

fc_status fc_transfer_fill(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                           fct_device device, fc_error *err) {
    assert(plan->valid && plan->world == 1);
    fc_status status = FC_OK;
    fct_facts target;
    fct_facts source;
    const fck_backend *kernels = fck_backend_of(device.type);
    if (plan->from_host) {
        return fc_offload_fill(plan, params, device, err);
    }
    if (kernels == NULL) {
        return fc_foreach_pack(&t->foreach, plan, params, NULL, 0, err);
    }
    FC_TRY(reserve(t, plan->count, sizeof(fck_segment)));
    fck_segment *segments = (fck_segment *)t->descriptors;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        FC_TRY(read_input_facts(plan, slot, params, device, &source, err));
        FC_TRY(read_buffer_facts(fc_slot_output(slot, params),
                                 slot->numel * fc_dtype_size(slot->compute), &target, err));
        segments[i] = make_segment(slot, &source, target.data);
    }
    FC_TRY(pack_segments(plan, params, segments, kernels, device, NULL, err));
done:
    return status;
}

/* Adds one slot of all ranks to the checksum, and copies it if each rank's data is contiguous in
 * the output. Sets *copied. `gathered`: the parts of all ranks, of `part` bytes each. */
static const char *checksum_slot(const fc_gather_plan *plan, size_t slot, const fck_slot *copy,
                                 const char *gathered, int64_t part, int64_t rank,
                                 const fck_backend *kernels, fc_checksum *checksum, bool *copied) {
    const char *failure = NULL;
    const int64_t bytes = copy->bytes * copy->blocks;
    *copied = copy->blocks == 1;
    for (int64_t r = 0; failure == NULL && r < plan->world; r++) {
        const char *data = gathered + r * part + copy->offset;
        const fc_checksum_shard shard = {r, r == rank};
        char *to = *copied ? (char *)copy->dst + r * bytes : NULL;
        failure = fc_checksum_add(checksum, slot, shard, data, bytes, to, kernels);
    }
    return failure;
}

fc_status fc_transfer_unpack(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                             size_t chunk, const fct_tensor *buffer, int64_t rank,
                             fc_checksum *checksum, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts source;
    fct_facts target;
    launch l;
    size_t count = 0;
    const char *failure = NULL;
    assert(chunk < plan->chunks.count && !plan->chunks.chunks[chunk].owned);
    const int64_t part = plan->chunks.chunks[chunk].numel * fc_dtype_size(plan->dtype);
    FC_TRY(read_buffer_facts(buffer, plan->world * part, &source, err));
    const fck_backend *kernels = fck_backend_of(source.device.type);
    checksum = readable(checksum, kernels);
    if (kernels == NULL) {
        return fc_foreach_unpack(&t->foreach, plan, params, buffer, source.offset_bytes,
                                 source.device);
    }
    FC_TRY(reserve(t, plan->count, sizeof(fck_slot)));
    fck_slot *copies = (fck_slot *)t->descriptors;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        if (slot->chunk != chunk) {
            continue;
        }
        int64_t itemsize = fc_dtype_size(slot->compute);
        int64_t bytes = slot->outer > 0 ? slot->numel / slot->outer * itemsize : 0;
        FC_TRY(read_buffer_facts(fc_slot_output(slot, params), plan->world * slot->numel * itemsize,
                                 &target, err));
        copies[count] = (fck_slot){
            .dst = target.data, .offset = slot->offset, .bytes = bytes, .blocks = slot->outer};
        bool copied = false;
        if (checksum != NULL) {
            failure = checksum_slot(plan, i, &copies[count], (const char *)source.data, part, rank,
                                    kernels, checksum, &copied);
        }
        if (failure != NULL) {
            return fc_error_set(err, FC_ESTATE, "a copy kernel failed: %s", failure);
        }
        count += copied ? 0 : 1;
    }
    FC_TRY(begin_launch(source.device, &l));
    failure = kernels->unpack(source.data, part, plan->world, copies, count, l.stream);
    FC_TRY(end_launch(&l, failure, err));
done:
    return status;
}

/* Casts with torch the gradients that no kernel can cast. *casts: new array of [count], with NULL
 * for gradients that need no cast. */
static fc_status cast_gradients(const fc_reduce_plan *plan, fct_tensor ***casts) {
    fc_status status = FC_OK;
    fct_tensor **cast_tensors = (fct_tensor **)calloc(plan->count, sizeof *cast_tensors);
    if (cast_tensors == NULL) {
        return FC_ENOMEM;
    }
    for (size_t i = 0; i < plan->count; i++) {
        fct_facts facts;
        fct_tensor_facts(plan->grads[i], &facts);
        if (fck_can_cast(facts.device.type, facts.dtype, plan->dtype) == 0) {
            FC_TRY_RAISED(fct_tensor_cast(plan->grads[i], plan->dtype, &cast_tensors[i]));
        }
    }
    *casts = cast_tensors;
    return FC_OK;
done:
    release_all(cast_tensors, plan->count);
    return status;
}

/* Fills in the descriptors of the gradients, or of their casts, and of the gaps after them, which
 * the kernel fills with zeros. */
static fc_status describe_gradients(const fc_reduce_plan *plan, size_t chunk,
                                    fct_tensor *const *casts, fck_gradient *gradients,
                                    size_t *count, fc_error *err) {
    fc_status status = FC_OK;
    *count = 0;
    for (size_t i = 0; i < plan->count; i++) {
        if (plan->slots[i].chunk != chunk) {
            continue;
        }
        const fct_tensor *grad = casts != NULL && casts[i] != NULL ? casts[i] : plan->grads[i];
        const fc_layout *layout = &plan->params[i]->layout;
        fct_facts facts;
        fct_tensor_facts(grad, &facts);
        FC_TRY(check_extent(&facts, layout->numel * facts.itemsize, err));
        gradients[(*count)++] = (fck_gradient){.src = facts.data,
                                               .numel = layout->rows * layout->row_numel,
                                               .chunk = layout->chunk_rows * layout->row_numel,
                                               .offset = plan->slots[i].offset,
                                               .blocks = layout->outer,
                                               .itemsize = (int32_t)facts.itemsize,
                                               .src_dtype = facts.dtype};
        if (!plan->chunks.split && fc_reduce_plan_gap(plan, i) > 0) {
            gradients[(*count)++] =
                (fck_gradient){.chunk = fc_reduce_plan_gap(plan, i),
                               .offset = plan->slots[i].offset + layout->padded_numel,
                               .blocks = 1,
                               .itemsize = fc_dtype_size(plan->dtype),
                               .src_dtype = plan->dtype};
        }
    }
done:
    return status;
}

fc_status fc_transfer_pack_gradients(fc_transfer *t, const fc_reduce_plan *plan, size_t chunk,
                                     int64_t world, fct_tensor *buffer, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts target;
    fct_tensor **casts = NULL;
    launch l;
    size_t count = 0;
    const char *failure = NULL;
    assert(chunk < plan->chunks.count);
    const int64_t part_numel = plan->chunks.chunks[chunk].numel;
    FC_TRY(
        read_buffer_facts(buffer, world * part_numel * fc_dtype_size(plan->dtype), &target, err));
    const fck_backend *kernels = fck_backend_of(target.device.type);
    if (kernels == NULL) {
        return fc_foreach_pack_gradients(&t->foreach, plan, world, buffer, target.offset_bytes,
                                         target.device);
    }
    FC_TRY(reserve(t, 2 * plan->count, sizeof(fck_gradient)));
    if (!plan->native) {
        FC_TRY(cast_gradients(plan, &casts));
    }
    FC_TRY(describe_gradients(plan, chunk, casts, (fck_gradient *)t->descriptors, &count, err));
    FC_TRY(begin_launch(target.device, &l));
    failure = kernels->pack_gradients((const fck_gradient *)t->descriptors, count, world,
                                      target.data, part_numel, plan->dtype, l.stream);
    FC_TRY(end_launch(&l, failure, err));
done:
    release_all(casts, plan->count);
    return status;
}
