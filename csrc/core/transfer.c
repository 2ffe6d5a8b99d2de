/* Moving memory. Owns the memory of descriptors, and nothing beyond a call. The address checks here
 * are the last ones before raw copies: extents of both sides against their storages, in release
 * builds too. */
#include "transfer.h"

#include <stdlib.h>
#include <string.h>

#include "offload.h"

void fc_transfer_fini(fc_transfer *t) {
    free(t->descriptors);
    fc_foreach_fini(&t->foreach);
    memset(t, 0, sizeof *t);
}

/* Room for `count` descriptors of `size` bytes, whose contents are lost. */
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

/* What the three kernels need to know of where they run. */
typedef struct launch {
    fct_device device;
    fct_device before; /* that was current, on devices with streams */
    void *stream;
} launch;

static fc_status begin_launch(fct_device device, launch *l) {
    *l = (launch){.device = device, .before = device, .stream = NULL};
    if (!fct_device_has_streams(device)) {
        return FC_OK;
    }
    return fct_launch_enter(device, &l->before, &l->stream) == 0 ? FC_OK : FC_ERAISED;
}

/* `failure`: what the kernel said. */
static fc_status end_launch(const launch *l, const char *failure, fc_error *err) {
    if (fct_device_has_streams(l->device)) {
        fct_launch_leave(l->before);
    }
    return failure == NULL ? FC_OK
                           : fc_error_set(err, FC_ESTATE, "a copy kernel failed: %s", failure);
}

/* Whether there are `bytes` bytes of contiguous memory. */
static fc_status check_extent(const fct_facts *facts, int64_t bytes, fc_error *err) {
    int64_t end = 0;
    if (!facts->strided || !facts->contiguous || facts->numel * facts->itemsize < bytes ||
        !fc_size_add(facts->offset_bytes, bytes, &end) || end > facts->storage_bytes ||
        (bytes > 0 && facts->data == NULL)) {
        return fc_error_set(err, FC_EASSERT, "a transfer of %lld bytes does not fit its buffer",
                            (long long)bytes);
    }
    return FC_OK;
}

/* Reads the facts of a buffer and checks that it holds `bytes` bytes of contiguous memory. */
static fc_status buffer_facts(const fct_tensor *buffer, int64_t bytes, fct_facts *facts,
                              fc_error *err) {
    fct_tensor_facts(buffer, facts);
    return check_extent(facts, bytes, err);
}

/* Whether a kernel takes the segment: it moves anything, but converts only types that it knows, and
 * on a GPU only at addresses that are multiples of an element. */
static bool fits_kernel(const fck_segment *s) {
    return s->src_dtype == s->dst_dtype ||
           (fck_can_cast(s->src_dtype, s->dst_dtype) != 0 &&
            (uintptr_t)s->src % (uintptr_t)s->itemsize == 0 &&
            (uintptr_t)s->dst % (uintptr_t)fc_dtype_size(s->dst_dtype) == 0);
}

/* Elements lie at multiples of their size, except in rows of several types. */
static bool all_fit_kernels(const fc_gather_plan *plan, const fck_segment *segments) {
    bool fit = plan->native;
    for (size_t i = 0; fit && plan->dtype == FCK_UINT8 && i < plan->count; i++) {
        fit = fits_kernel(&segments[i]);
    }
    return fit;
}

static void release_all(fct_tensor **tensors, size_t count) {
    for (size_t i = 0; tensors != NULL && i < count; i++) {
        fct_tensor_release(tensors[i]);
    }
    free((void *)tensors);
}

/* Casts the inputs that no kernel can cast, with torch, and points the segments at the casts.
 * *casts: new array of [count], NULL where none was needed. */
static fc_status cast_with_torch(const fc_gather_plan *plan, fc_param *const *params,
                                 fck_segment *segments, fct_tensor ***casts, fc_error *err) {
    fc_status status = FC_OK;
    fct_tensor **made = (fct_tensor **)calloc(plan->count, sizeof *made);
    if (made == NULL) {
        return FC_ENOMEM;
    }
    for (size_t i = 0; i < plan->count; i++) {
        fck_segment *s = &segments[i];
        fct_facts facts;
        if (fits_kernel(s)) {
            continue;
        }
        FC_TRY_RAISED(
            fct_tensor_cast(fc_slot_input(plan, &plan->slots[i], params), s->dst_dtype, &made[i]));
        FC_TRY(buffer_facts(made[i], s->count * fc_dtype_size(s->dst_dtype), &facts, err));
        s->src = facts.data;
        s->src_dtype = s->dst_dtype;
        s->itemsize = (int32_t)facts.itemsize;
    }
    *casts = made;
    return FC_OK;
done:
    release_all(made, plan->count);
    return status;
}

/* Runs the pack kernel over segments whose addresses are filled in. */
static fc_status pack_segments(const fc_gather_plan *plan, fc_param *const *params,
                               fck_segment *segments, const fck_backend *kernels, fct_device device,
                               fc_error *err) {
    fc_status status = FC_OK;
    fct_tensor **casts = NULL;
    launch l;
    if (!all_fit_kernels(plan, segments)) {
        FC_TRY(cast_with_torch(plan, params, segments, &casts, err));
    }
    FC_TRY(begin_launch(device, &l));
    FC_TRY(end_launch(&l, kernels->pack(segments, plan->count, l.stream), err));
done:
    release_all(casts, plan->count);
    return status;
}

/* The input's facts; a kernel can read it only on its own device. */
static fc_status source_facts(const fc_gather_plan *plan, const fc_slot *slot,
                              fc_param *const *params, fct_device device, fct_facts *facts,
                              fc_error *err) {
    fc_status status = fc_slot_input_facts(plan, slot, params, facts, err);
    if (status == FC_OK && facts->device.type != device.type) {
        const fc_param *p = params[slot->param];
        return fc_error_set(err, FC_EASSERT,
                            "sharded data of parameter '%s' is not on its group's device any more",
                            p->name != NULL ? p->name : "?");
    }
    return status;
}

static fck_segment segment_of(const fc_slot *slot, const fct_facts *source, void *target) {
    return (fck_segment){.src = source->data,
                         .dst = target,
                         .count = slot->numel,
                         .itemsize = (int32_t)source->itemsize,
                         .src_dtype = slot->source,
                         .dst_dtype = slot->compute};
}

/* The inputs' segments, to where they go in pieces. */
static fc_status describe_pieces(const fc_gather_plan *plan, fc_param *const *params,
                                 fct_tensor *buffer, fct_tensor *const *own, int64_t row,
                                 fck_segment *segments, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts rest = {0};
    size_t piece = 0;
    if (plan->rest_bytes > 0) {
        FC_TRY(buffer_facts(buffer, (row + 1) * plan->rest_bytes, &rest, err));
    }
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        const int64_t bytes = slot->numel * fc_dtype_size(slot->compute);
        fct_facts source;
        fct_facts target;
        void *to = NULL;
        FC_TRY(
            source_facts(plan, slot, params, (fct_device){.type = FCT_DEVICE_CPU}, &source, err));
        if (slot->rest == FC_OWN_PIECE) {
            FC_TRY(buffer_facts(own[piece++], (row + 1) * bytes, &target, err));
            to = (char *)target.data + row * bytes;
        } else if (bytes > 0) {
            to = (char *)rest.data + row * plan->rest_bytes + slot->rest;
        }
        segments[i] = segment_of(slot, &source, to);
    }
done:
    return status;
}

static fc_status pack_pieces(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                             fct_tensor *buffer, fct_tensor *const *own, int64_t row,
                             fc_error *err) {
    fc_status status = FC_OK;
    const fct_device device = {.type = FCT_DEVICE_CPU};
    FC_TRY(reserve(t, plan->count, sizeof(fck_segment)));
    fck_segment *segments = (fck_segment *)t->descriptors;
    FC_TRY(describe_pieces(plan, params, buffer, own, row, segments, err));
    FC_TRY(pack_segments(plan, params, segments, fck_backend_of(device.type), device, err));
done:
    return status;
}

/* The inputs into the row that starts `start` bytes into the buffer, whose facts are `target`. */
static fc_status pack_row(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                          const fct_tensor *buffer, fct_facts target, int64_t start,
                          fc_error *err) {
    fc_status status = FC_OK;
    fct_facts source;
    const fck_backend *kernels = fck_backend_of(target.device.type);
    if (kernels == NULL) {
        return fc_foreach_pack(&t->foreach, plan, params, buffer, target.offset_bytes + start, err);
    }
    FC_TRY(reserve(t, plan->count, sizeof(fck_segment)));
    fck_segment *segments = (fck_segment *)t->descriptors;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        FC_TRY(source_facts(plan, slot, params, target.device, &source, err));
        segments[i] = segment_of(slot, &source, (char *)target.data + start + slot->offset);
    }
    FC_TRY(pack_segments(plan, params, segments, kernels, target.device, err));
done:
    return status;
}

fc_status fc_transfer_pack(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                           fct_tensor *buffer, fct_tensor *const *own, int64_t row, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts target;
    const int64_t start = row * plan->row_bytes;
    if (own != NULL) {
        return pack_pieces(t, plan, params, buffer, own, row, err);
    }
    FC_TRY(buffer_facts(buffer, start + plan->row_bytes, &target, err));
    if (plan->from_host && !plan->casts && !plan->extended) {
        return fc_offload_place(plan, params, buffer, target.offset_bytes + start, err);
    }
    if (plan->from_host) {
        FC_TRY(fc_offload_stage(plan, params, target.device, err));
    }
    FC_TRY(pack_row(t, plan, params, buffer, target, start, err));
done:
    if (plan->from_host) {
        fc_offload_unstage(plan, params);
    }
    return status;
}

fc_status fc_transfer_fill(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                           fct_device device, fc_error *err) {
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
        FC_TRY(source_facts(plan, slot, params, device, &source, err));
        FC_TRY(buffer_facts(fc_slot_output(slot, params),
                            slot->numel * fc_dtype_size(slot->compute), &target, err));
        segments[i] = segment_of(slot, &source, target.data);
    }
    FC_TRY(pack_segments(plan, params, segments, kernels, device, err));
done:
    return status;
}

fc_status fc_transfer_unpack(fc_transfer *t, const fc_gather_plan *plan, fc_param *const *params,
                             const fct_tensor *buffer, bool rest, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts source;
    fct_facts target;
    launch l;
    size_t count = 0;
    const char *failure = NULL;
    const int64_t row_bytes = rest ? plan->rest_bytes : plan->row_bytes;
    FC_TRY(buffer_facts(buffer, plan->world * row_bytes, &source, err));
    const fck_backend *kernels = fck_backend_of(source.device.type);
    if (kernels == NULL) {
        return fc_foreach_unpack(&t->foreach, plan, params, buffer, source.offset_bytes,
                                 source.device);
    }
    FC_TRY(reserve(t, plan->count, sizeof(fck_column)));
    fck_column *columns = (fck_column *)t->descriptors;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_slot *slot = &plan->slots[i];
        if (rest && slot->rest == FC_OWN_PIECE) {
            continue;
        }
        int64_t itemsize = fc_dtype_size(slot->compute);
        int64_t bytes = slot->outer > 0 ? slot->numel / slot->outer * itemsize : 0;
        FC_TRY(buffer_facts(fc_slot_output(slot, params), plan->world * slot->numel * itemsize,
                            &target, err));
        columns[count++] = (fck_column){.dst = target.data,
                                        .offset = rest ? slot->rest : slot->offset,
                                        .bytes = bytes,
                                        .blocks = slot->outer};
    }
    FC_TRY(begin_launch(source.device, &l));
    failure = kernels->unpack(source.data, row_bytes, plan->world, columns, count, l.stream);
    FC_TRY(end_launch(&l, failure, err));
done:
    return status;
}

/* Casts the gradients that no kernel can cast. *casts: new array of [count], NULL where none was
 * needed. */
static fc_status cast_gradients(const fc_reduce_plan *plan, fct_tensor ***casts) {
    fc_status status = FC_OK;
    fct_tensor **made = (fct_tensor **)calloc(plan->count, sizeof *made);
    if (made == NULL) {
        return FC_ENOMEM;
    }
    for (size_t i = 0; i < plan->count; i++) {
        fct_facts facts;
        fct_tensor_facts(plan->grads[i], &facts);
        if (plan->params[i]->layout.outer > 0 && fck_can_cast(facts.dtype, plan->dtype) == 0) {
            FC_TRY_RAISED(fct_tensor_cast(plan->grads[i], plan->dtype, &made[i]));
        }
    }
    *casts = made;
    return FC_OK;
done:
    release_all(made, plan->count);
    return status;
}

static bool is_meant(const fc_reduce_plan *plan, ptrdiff_t which, size_t i) {
    return which == FC_ALL_GRADIENTS || which == (ptrdiff_t)i ||
           (which == FC_REST_OF_GRADIENTS && plan->rests[i] != FC_OWN_PIECE);
}

/* Where a gradient's part begins in a row of those that are meant. */
static int64_t offset_of(const fc_reduce_plan *plan, ptrdiff_t which, size_t i) {
    return which == FC_ALL_GRADIENTS ? plan->offsets[i] : which < 0 ? plan->rests[i] : 0;
}

/* Fills in the descriptors, of the gradients or, where there are, of their casts. */
static fc_status describe_gradients(const fc_reduce_plan *plan, ptrdiff_t which,
                                    fct_tensor *const *casts, fck_gradient *gradients,
                                    size_t *count, fc_error *err) {
    fc_status status = FC_OK;
    *count = 0;
    for (size_t i = 0; i < plan->count; i++) {
        if (!is_meant(plan, which, i)) {
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
                                               .offset = offset_of(plan, which, i),
                                               .blocks = layout->outer,
                                               .itemsize = (int32_t)facts.itemsize,
                                               .src_dtype = facts.dtype};
    }
done:
    return status;
}

static int64_t row_of(const fc_reduce_plan *plan, ptrdiff_t which) {
    return which == FC_ALL_GRADIENTS       ? plan->row_numel
           : which == FC_REST_OF_GRADIENTS ? plan->rest_numel
                                           : plan->params[which]->layout.padded_numel;
}

fc_status fc_transfer_pack_gradients(fc_transfer *t, const fc_reduce_plan *plan, ptrdiff_t which,
                                     int64_t world, fct_tensor *buffer, fc_error *err) {
    fc_status status = FC_OK;
    fct_facts target;
    fct_tensor **casts = NULL;
    launch l;
    size_t count = 0;
    const char *failure = NULL;
    const int64_t row_numel = row_of(plan, which);
    FC_TRY(buffer_facts(buffer, world * row_numel * fc_dtype_size(plan->dtype), &target, err));
    const fck_backend *kernels = fck_backend_of(target.device.type);
    if (kernels == NULL) {
        return fc_foreach_pack_gradients(&t->foreach, plan, world, buffer, target.offset_bytes,
                                         target.device);
    }
    FC_TRY(reserve(t, plan->count, sizeof(fck_gradient)));
    if (!plan->native) {
        FC_TRY(cast_gradients(plan, &casts));
    }
    FC_TRY(describe_gradients(plan, which, casts, (fck_gradient *)t->descriptors, &count, err));
    FC_TRY(begin_launch(target.device, &l));
    failure = kernels->pack_gradients((const fck_gradient *)t->descriptors, count, world,
                                      target.data, row_numel, plan->dtype, l.stream);
    FC_TRY(end_launch(&l, failure, err));
done:
    release_all(casts, plan->count);
    return status;
}
