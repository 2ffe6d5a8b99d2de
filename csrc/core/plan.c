/* Transfer plans; see plan.h. Plans own their arrays and borrow parameters. A reduce plan is laid
 * out in each backward, because the set of gradients can change. The layout costs a few additions
 * per parameter.
 *
 * This file uses no stream and reads no tensor contents. */
#include "plan.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/stream.h"

/* Upper bound of the elements between two slots of a reduce plan, and of its alignment. */
enum { MAX_GAP = 16 };

enum { MAX_ITEMSIZE = 16 }; /* in bytes, of complex128 */

/* Minimum size of a parameter with its own chunk. Below this size a copy costs less than one more
 * message. */
static int64_t min_owned_chunk_bytes = 1 << 18;

void fc_set_min_owned_chunk_bytes(int64_t bytes) {
    min_owned_chunk_bytes = bytes;
}

/* ---- chunks ---- */

static void chunk_list_fini(fc_chunk_list *list) {
    free(list->chunks);
    free(list->runs);
    memset(list, 0, sizeof *list);
}

static fc_status chunk_list_reserve(fc_chunk_list *list, size_t capacity) {
    if (capacity <= list->capacity && list->chunks != NULL) {
        return FC_OK;
    }
    fc_chunk_list grown = {.capacity = capacity};
    grown.chunks = (fc_chunk *)calloc(capacity + 1, sizeof *grown.chunks);
    grown.runs = (fct_run *)calloc(capacity + 1, sizeof *grown.runs);
    if (grown.chunks == NULL || grown.runs == NULL) {
        chunk_list_fini(&grown);
        return FC_ENOMEM;
    }
    chunk_list_fini(list);
    *list = grown;
    return FC_OK;
}

/* Describes the whole rank shard as one chunk. */
static void chunk_list_pack(fc_chunk_list *list, int64_t rank_numel) {
    assert(list->chunks != NULL);
    list->split = false;
    list->count = 1;
    list->chunks[0] = (fc_chunk){.numel = rank_numel, .owned = false};
    list->run_count = 1;
    list->runs[0] = (fct_run){.chunk = 0, .offset = 0, .numel = rank_numel};
    list->rank_numel = rank_numel;
}

/* Starts a split rank shard. The chunks of single parameters come first, the packed tail last. */
static void chunk_list_begin_split(fc_chunk_list *list) {
    assert(list->owners > 0 && list->owners <= list->capacity);
    memset(list->chunks, 0, (list->owners + 1) * sizeof *list->chunks);
    list->split = true;
    list->count = list->owners;
    list->run_count = 0;
    list->rank_numel = 0;
}

/* Appends `numel` elements of the rank shard to a chunk and returns their offset in the chunk. */
static int64_t chunk_list_append(fc_chunk_list *list, size_t chunk, bool owned, int64_t numel) {
    assert(list->split && chunk <= list->capacity);
    fc_chunk *c = &list->chunks[chunk];
    const int64_t offset = c->numel;
    fct_run *last = list->run_count > 0 ? &list->runs[list->run_count - 1] : NULL;
    c->numel += numel;
    c->owned = owned;
    list->rank_numel += numel;
    if (chunk == list->owners && numel > 0) {
        list->count = list->owners + 1; /* the packed tail is not empty */
    }
    if (last != NULL && last->chunk == chunk) {
        last->numel += numel;
    } else if (numel > 0) {
        assert(list->run_count < list->capacity);
        list->runs[list->run_count++] = (fct_run){.chunk = chunk, .offset = offset, .numel = numel};
    }
    return offset;
}

bool fc_chunk_list_can_split(const fc_chunk_list *list) {
    return list->owners > 0;
}

fct_chunk_layout fc_chunk_list_layout(const fc_chunk_list *list) {
    return (fct_chunk_layout){
        .runs = list->runs, .count = list->run_count, .rank_numel = list->rank_numel};
}

static bool is_real(fct_dtype dtype) {
    return dtype == FCK_FLOAT16 || dtype == FCK_FLOAT32 || dtype == FCK_FLOAT64 ||
           dtype == FCK_BFLOAT16;
}

/* Returns true if a split plan gives the parameter its own chunk: the parameter is large, all
 * dimensions before the sharded one have size 1, and every transport can sum its dtype. */
static bool can_own_chunk(const fc_layout *layout, fct_dtype dtype, int64_t world) {
    return world > 1 && layout->outer == 1 && layout->padded_numel > 0 && is_real(dtype) &&
           layout->padded_numel * world >= min_owned_chunk_bytes / fc_dtype_size(dtype);
}

/* ---- gather plans ---- */

void fc_gather_plan_fini(fc_gather_plan *plan) {
    assert(plan->count == 0 || plan->slots != NULL);
    free(plan->slots);
    chunk_list_fini(&plan->chunks);
    memset(plan, 0, sizeof *plan);
}

static const fc_layout *layout_of(const fc_param *p, bool post_forward) {
    return post_forward ? &p->post_forward_layout : &p->layout;
}

static fc_status reserve_slots(fc_gather_plan *plan, size_t count) {
    fc_status status = FC_OK;
    FC_TRY(chunk_list_reserve(&plan->chunks, count));
    if (plan->count == count) {
        return FC_OK;
    }
    free(plan->slots);
    plan->slots = NULL;
    plan->count = 0;
    if (count == 0) {
        return FC_OK;
    }
    plan->slots = (fc_slot *)calloc(count, sizeof *plan->slots);
    if (plan->slots == NULL) {
        return FC_ENOMEM;
    }
    plan->count = count;
done:
    return status;
}

/* Rounds up to a multiple of `align`. Returns false on overflow. */
static bool round_up(int64_t offset, int64_t align, int64_t *out) {
    if (!fc_size_add(offset, align - 1, &offset)) {
        return false;
    }
    *out = offset - offset % align;
    return true;
}

/* Describes one input, except for its chunk and offset. */
static fc_slot describe_slot(const fc_gather_plan *plan, size_t param, const fc_param *p,
                             size_t input) {
    const fc_layout *layout = layout_of(p, plan->post_forward);
    fct_dtype compute = fc_param_compute_dtype(p);
    fc_slot slot = {.param = param,
                    .numel = layout->padded_numel,
                    .outer = layout->outer,
                    .source = plan->post_forward ? compute : p->orig_dtype,
                    .compute = compute};
    if (p->extended) {
        const fc_input *extension_input = &p->extension.inputs[input];
        slot.input = input;
        slot.extended = true;
        slot.outer = extension_input->numel == layout->padded_numel ? layout->outer : 1;
        slot.numel = extension_input->numel;
        slot.source = slot.compute = extension_input->dtype;
    }
    return slot;
}

/* Checks that the slot can be appended to a rank shard of `offset` bytes without overflow. Writes
 * the new size of the rank shard to *end and updates the plan's flags. */
static fc_status measure_slot(fc_gather_plan *plan, const fc_slot *slot, const fc_param *p,
                              int64_t offset, int64_t *end, fc_error *err) {
    const char *name = p->name != NULL ? p->name : "?";
    int32_t size = fc_dtype_size(slot->compute);
    int64_t bytes = 0;
    int64_t total = 0;
    if (size == 0 || fc_dtype_size(slot->source) == 0) {
        return fc_error_set(err, FC_EVALUE, "parameter '%s' has a dtype that cannot be gathered",
                            name);
    }
    if (!round_up(offset, slot->numel > 0 ? plan->align : 1, &offset) ||
        !fc_size_mul(slot->numel, size, &bytes) || !fc_size_add(offset, bytes, end) ||
        !round_up(*end, plan->align, &total) || !fc_size_mul(total, plan->world, &total)) {
        return fc_error_set(err, FC_EASSERT, "the gather buffer's size overflows at parameter '%s'",
                            name);
    }
    plan->native =
        plan->native && fck_can_cast(plan->device_type, slot->source, slot->compute) != 0;
    plan->casts = plan->casts || slot->source != slot->compute;
    plan->extended = plan->extended || slot->extended;
    plan->from_host = plan->from_host || (p->offloaded && !plan->post_forward && !slot->extended);
    return FC_OK;
}

static size_t count_inputs(fc_param *const *params, size_t count) {
    size_t inputs = 0;
    for (size_t i = 0; i < count; i++) {
        inputs += fc_param_input_count(params[i]);
    }
    return inputs;
}

/* Marks the slots that get their own chunk in a split plan. */
static void choose_owners(fc_gather_plan *plan, fc_param *const *params) {
    const bool can_split = plan->align == 1 && plan->dtype != FCK_UINT8 && !plan->extended;
    plan->chunks.owners = 0;
    for (size_t i = 0; i < plan->count; i++) {
        fc_slot *slot = &plan->slots[i];
        const fc_param *p = params[slot->param];
        slot->owns_chunk =
            can_split && slot->numel * plan->world == p->flat_numel &&
            can_own_chunk(layout_of(p, plan->post_forward), slot->compute, plan->world);
        plan->chunks.owners += slot->owns_chunk ? 1 : 0;
    }
}

/* Computes the offsets of a packed rank shard. lay_out_slots() has checked the sums. */
static void pack_slots(fc_gather_plan *plan) {
    int64_t end = 0;
    for (size_t i = 0; i < plan->count; i++) {
        fc_slot *slot = &plan->slots[i];
        const int64_t align = slot->numel > 0 ? plan->align : 1;
        slot->chunk = 0;
        slot->offset = (end + align - 1) / align * align;
        end = slot->offset + slot->numel * fc_dtype_size(slot->compute);
    }
    chunk_list_pack(&plan->chunks, plan->rank_numel);
}

void fc_gather_plan_set_split(fc_gather_plan *plan, bool split) {
    assert(plan->valid && (!split || fc_chunk_list_can_split(&plan->chunks)));
    if (plan->chunks.split == split) {
        return;
    }
    if (!split) {
        pack_slots(plan);
        return;
    }
    size_t owned = 0;
    chunk_list_begin_split(&plan->chunks);
    for (size_t i = 0; i < plan->count; i++) {
        fc_slot *slot = &plan->slots[i];
        slot->chunk = slot->owns_chunk ? owned++ : plan->chunks.owners;
        slot->offset =
            chunk_list_append(&plan->chunks, slot->chunk, slot->owns_chunk, slot->numel) *
            fc_dtype_size(slot->compute);
    }
}

/* Fills in all slots in order. *end is the end of the rank shard in bytes. */
static fc_status lay_out_slots(fc_gather_plan *plan, fc_param *const *params, size_t count,
                               int64_t *end, fc_error *err) {
    fc_status status = FC_OK;
    size_t filled = 0;
    *end = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < fc_param_input_count(params[i]); k++) {
            fc_slot *slot = &plan->slots[filled++];
            *slot = describe_slot(plan, i, params[i], k);
            FC_TRY(measure_slot(plan, slot, params[i], *end, end, err));
        }
    }
done:
    return status;
}

/* Returns the common dtype of all slots, or uint8 (bytes) if the slots have several dtypes. */
static fct_dtype common_dtype(const fc_gather_plan *plan) {
    bool uniform = plan->count > 0;
    for (size_t i = 1; i < plan->count; i++) {
        uniform = uniform && plan->slots[i].compute == plan->slots[0].compute;
    }
    return uniform ? plan->slots[0].compute : (fct_dtype)FCK_UINT8;
}

fc_status fc_gather_plan_build(fc_gather_plan *plan, fc_param *const *params, size_t count,
                               int64_t world, bool post_forward, fct_device device, fc_error *err) {
    assert(world > 0 && (count == 0 || params != NULL));
    fc_status status = FC_OK;
    int64_t end = 0;
    plan->valid = false;
    FC_TRY(reserve_slots(plan, count_inputs(params, count)));
    plan->native = true;
    plan->casts = false;
    plan->extended = false;
    plan->from_host = false;
    plan->post_forward = post_forward;
    plan->world = world;
    plan->device_type = device.type;
    plan->align = fck_slot_alignment(device.type);
    FC_TRY(lay_out_slots(plan, params, count, &end, err));
    plan->dtype = common_dtype(plan);
    plan->from_host = plan->from_host && fct_device_has_streams(device);
    plan->rank_bytes = (end + plan->align - 1) / plan->align * plan->align;
    plan->rank_numel = plan->rank_bytes / fc_dtype_size(plan->dtype);
    choose_owners(plan, params);
    pack_slots(plan);
    plan->valid = true;
done:
    return status;
}

static bool is_same_input(const fc_slot *a, const fc_slot *b) {
    return a->param == b->param && a->input == b->input && a->extended == b->extended &&
           a->numel == b->numel && a->outer == b->outer && a->source == b->source &&
           a->compute == b->compute;
}

bool fc_gather_plan_fits(const fc_gather_plan *plan, fc_param *const *params, size_t count) {
    bool fits = plan->valid && plan->count == count_inputs(params, count);
    size_t index = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; fits && k < fc_param_input_count(params[i]); k++) {
            const fc_slot current = describe_slot(plan, i, params[i], k);
            fits = is_same_input(&plan->slots[index++], &current);
        }
    }
    return fits;
}

fc_status fc_gather_plan_check(const fc_gather_plan *plan, fc_param *const *params, size_t count,
                               fc_error *err) {
    return !plan->valid || fc_gather_plan_fits(plan, params, count)
               ? FC_OK
               : fc_error_set(err, FC_ESTATE, "a gather plan is stale");
}

fct_tensor *fc_slot_input(const fc_gather_plan *plan, const fc_slot *slot,
                          fc_param *const *params) {
    const fc_param *p = params[slot->param];
    return slot->extended ? p->extension.inputs[slot->input].tensor
                          : fc_param_shard(p, plan->post_forward);
}

fct_tensor *fc_slot_output(const fc_slot *slot, fc_param *const *params) {
    const fc_param *p = params[slot->param];
    return slot->extended ? p->extension.outputs[slot->input].tensor : p->flat;
}

fc_status fc_slot_input_facts(const fc_gather_plan *plan, const fc_slot *slot,
                              fc_param *const *params, fct_facts *facts, fc_error *err) {
    const fc_param *p = params[slot->param];
    return slot->extended
               ? fc_param_input_facts(p, slot->input, slot->numel, slot->source, facts, err)
               : fc_param_shard_facts(p, plan->post_forward, facts, err);
}

fc_status fc_reduce_plan_reserve(fc_reduce_plan *plan, size_t capacity) {
    assert(plan->count <= plan->capacity);
    if (capacity <= plan->capacity) {
        return FC_OK;
    }
    fc_reduce_plan grown = {.capacity = capacity};
    grown.params = (fc_param **)calloc(capacity, sizeof *grown.params);
    grown.grads = (fct_tensor **)calloc(capacity, sizeof *grown.grads);
    grown.slots = (fc_gradient_slot *)calloc(capacity, sizeof *grown.slots);
    if (grown.params == NULL || grown.grads == NULL || grown.slots == NULL ||
        chunk_list_reserve(&grown.chunks, capacity) != FC_OK) {
        fc_reduce_plan_fini(&grown);
        return FC_ENOMEM;
    }
    fc_reduce_plan_fini(plan);
    *plan = grown;
    return FC_OK;
}

void fc_reduce_plan_drop_grads(fc_reduce_plan *plan) {
    assert(plan->count <= plan->capacity);
    for (size_t i = 0; i < plan->count; i++) {
        fct_tensor_release(plan->grads[i]);
        plan->grads[i] = NULL;
    }
    plan->count = 0;
}

void fc_reduce_plan_fini(fc_reduce_plan *plan) {
    assert(plan->count <= plan->capacity);
    fc_reduce_plan_drop_grads(plan);
    free((void *)plan->params);
    free((void *)plan->grads);
    free(plan->slots);
    chunk_list_fini(&plan->chunks);
    memset(plan, 0, sizeof *plan);
}

/* Checks one gradient and writes its metadata to *facts. A gradient that is not contiguous is
 * replaced by a contiguous copy. For a tensor subclass without own memory facts->strided is false.
 */
static fc_status check_gradient(fc_reduce_plan *plan, size_t i, fct_facts *facts, fc_error *err) {
    fc_status status = FC_OK;
    const fc_param *p = plan->params[i];
    const char *name = p->name != NULL ? p->name : "?";
    int64_t end = 0;
    fct_tensor_facts(plan->grads[i], facts);
    if (facts->strided && !facts->contiguous) {
        fct_tensor *copy = NULL;
        FC_TRY_RAISED(fct_tensor_contiguous(plan->grads[i], &copy));
        fct_tensor_release(plan->grads[i]);
        plan->grads[i] = copy;
        fct_tensor_facts(copy, facts);
    }
    if (facts->numel != p->layout.numel) {
        return fc_error_set(err, FC_EASSERT,
                            "the gradient of parameter '%s' has %lld elements; expected %lld", name,
                            (long long)facts->numel, (long long)p->layout.numel);
    }
    if (!facts->strided) {
        return FC_OK;
    }
    if (!fc_size_mul(facts->numel, facts->itemsize, &end) ||
        !fc_size_add(end, facts->offset_bytes, &end) || end > facts->storage_bytes ||
        (facts->numel > 0 && facts->data == NULL)) {
        return fc_error_set(err, FC_EASSERT,
                            "the gradient of parameter '%s' lies outside its storage", name);
    }
done:
    return status;
}

void fc_reduce_plan_set_split(fc_reduce_plan *plan, bool split) {
    int64_t offset = 0;
    size_t owned = 0;
    assert(!split || fc_chunk_list_can_split(&plan->chunks));
    if (split) {
        chunk_list_begin_split(&plan->chunks);
    } else {
        chunk_list_pack(&plan->chunks, plan->rank_numel);
    }
    for (size_t i = 0; i < plan->count; i++) {
        const int64_t numel = plan->params[i]->layout.padded_numel;
        fc_gradient_slot *slot = &plan->slots[i];
        if (split) {
            slot->chunk = slot->owns_chunk ? owned++ : plan->chunks.owners;
            slot->offset = chunk_list_append(&plan->chunks, slot->chunk, slot->owns_chunk, numel);
        } else {
            slot->chunk = 0;
            slot->offset = offset;
            offset = fc_reduce_plan_next_offset(plan->align, offset, numel);
        }
    }
}

int64_t fc_reduce_plan_next_offset(int64_t align, int64_t offset, int64_t numel) {
    assert(align > 0 && offset % align == 0);
    return (offset + numel + align - 1) / align * align;
}

int64_t fc_reduce_plan_gap(const fc_reduce_plan *plan, size_t i) {
    assert(i < plan->count && !plan->chunks.split);
    const int64_t end = plan->slots[i].offset + plan->params[i]->layout.padded_numel;
    return (i + 1 < plan->count ? plan->slots[i + 1].offset : plan->rank_numel) - end;
}

/* Marks the gradients that get their own chunk in a split plan. */
static void choose_owned_gradients(fc_reduce_plan *plan) {
    plan->chunks.owners = 0;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        plan->slots[i].owns_chunk =
            plan->align == 1 && can_own_chunk(layout, plan->dtype, layout->world);
        plan->chunks.owners += plan->slots[i].owns_chunk ? 1 : 0;
    }
}

/* Sets the alignment and the elements of the rank shard. */
static void choose_alignment(fc_reduce_plan *plan, int device_type) {
    const int64_t size = fc_dtype_size(plan->dtype);
    const int64_t bytes = plan->count > 0 ? fck_slot_alignment(device_type) : 1;
    assert(bytes <= MAX_GAP);
    plan->align = size > 0 && bytes > size ? bytes / size : 1;
    plan->rank_numel = 0;
    for (size_t i = 0; i < plan->count; i++) {
        plan->rank_numel = fc_reduce_plan_next_offset(plan->align, plan->rank_numel,
                                                      plan->params[i]->layout.padded_numel);
    }
}

fc_status fc_reduce_plan_lay_out(fc_reduce_plan *plan, fct_dtype reduce_dtype, bool *needs_fallback,
                                 fc_error *err) {
    assert(plan->count <= plan->capacity);
    int64_t offset = 0; /* upper bound of the elements of a rank shard */
    fct_dtype grad_dtype = FCT_NO_DTYPE;
    bool complex = false;
    uint64_t dtypes = 0; /* one bit per dtype of a gradient; torch has fewer than 64 dtypes */
    int device_type = 0; /* device type of the gradients */
    *needs_fallback = false;
    for (size_t i = 0; i < plan->count; i++) {
        const fc_layout *layout = &plan->params[i]->layout;
        fct_facts facts;
        int64_t total = 0;
        fc_status status = check_gradient(plan, i, &facts, err);
        if (status != FC_OK || !facts.strided) {
            *needs_fallback = status == FC_OK;
            return status;
        }
        fct_dtype common = i == 0 ? facts.dtype : fc_dtype_wider(grad_dtype, facts.dtype);
        if (common == FCT_NO_DTYPE && reduce_dtype == FCT_NO_DTYPE) {
            return fc_error_set(
                err, FC_EASSERT,
                "FSDP reduce-scatter expects uniform gradient dtype but got {%s, %s}",
                fc_dtype_name(grad_dtype), fc_dtype_name(facts.dtype));
        }
        assert(facts.dtype >= 0 && facts.dtype < 64);
        dtypes |= UINT64_C(1) << facts.dtype;
        device_type = facts.device.type;
        grad_dtype = common != FCT_NO_DTYPE ? common : grad_dtype;
        complex = complex || fc_dtype_is_complex(facts.dtype);
        if (!fc_size_add(offset, layout->padded_numel, &offset) ||
            !fc_size_add(offset, MAX_GAP, &offset) || !fc_size_mul(offset, layout->world, &total) ||
            !fc_size_mul(total, MAX_ITEMSIZE, &total)) {
            return fc_error_set(err, FC_EASSERT, "the reduce buffer's size overflows");
        }
    }
    plan->dtype = reduce_dtype == FCT_NO_DTYPE ? grad_dtype
                  : complex                    ? fc_dtype_complex(reduce_dtype)
                                               : reduce_dtype;
    plan->native = true;
    for (fct_dtype dtype = 0; dtypes >> dtype != 0; dtype++) {
        plan->native = plan->native && ((dtypes >> dtype & 1) == 0 ||
                                        fck_can_cast(device_type, dtype, plan->dtype) != 0);
    }
    choose_alignment(plan, device_type);
    choose_owned_gradients(plan);
    fc_reduce_plan_set_split(plan, false);
    return FC_OK;
}
