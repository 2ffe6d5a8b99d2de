/* All-gather extensions; see extension.h. Owns the lists and the references in them. Memory is
 * allocated and freed on the device's current stream. */
#include "extension.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/tensor.h"

/* ---- lists ---- */

static void release_list(fc_kept_tensor **list, size_t *count) {
    for (size_t i = 0; i < *count; i++) {
        fct_tensor_release((*list)[i].tensor);
    }
    free(*list);
    *list = NULL;
    *count = 0;
}

/* Returns the bytes that the tensor's storage has now; 0 for NULL. */
static int64_t allocated_bytes(const fct_tensor *t) {
    fct_facts facts = {0};
    if (t != NULL) {
        fct_tensor_facts(t, &facts);
    }
    return facts.strided ? facts.storage_bytes : 0;
}

/* Returns the bytes that the tensor's storage has, or would need if it has no memory. */
static int64_t required_bytes(const fct_tensor *t) {
    fct_facts facts;
    fct_tensor_facts(t, &facts);
    return !facts.strided             ? 0
           : facts.storage_bytes != 0 ? facts.storage_bytes
                                      : facts.offset_bytes + facts.numel * facts.itemsize;
}

/* Replaces the list and adds references. `tensors` may contain tensors of the old list. */
static fc_status replace_list(fc_kept_tensor **list, size_t *count, fct_tensor *const *tensors,
                              size_t new_count) {
    fc_kept_tensor *new_list = NULL;
    if (new_count > 0) {
        new_list = (fc_kept_tensor *)calloc(new_count, sizeof *new_list);
        if (new_list == NULL) {
            return FC_ENOMEM;
        }
    }
    for (size_t i = 0; i < new_count; i++) {
        fct_tensor_retain(tensors[i]);
        new_list[i] = (fc_kept_tensor){.tensor = tensors[i], .bytes = required_bytes(tensors[i])};
    }
    release_list(list, count);
    *list = new_list;
    *count = new_count;
    return FC_OK;
}

void fc_extension_release_outputs(fc_extension *e) {
    assert((e->outputs == NULL) == (e->output_count == 0));
    release_list(&e->outputs, &e->output_count);
}

void fc_extension_release(fc_extension *e) {
    assert((e->inner == NULL) == (e->inner_count == 0));
    fc_extension_release_outputs(e);
    release_list(&e->inner, &e->inner_count);
}

void fc_extension_fini(fc_extension *e) {
    assert((e->inputs == NULL) == (e->input_count == 0));
    fc_extension_drop_inputs(e);
    free(e->inputs);
    fc_extension_release(e);
    memset(e, 0, sizeof *e);
}

fc_status fc_extension_set_inputs(fc_extension *e, fct_tensor *const *inputs, size_t count) {
    assert(count == 0 || inputs != NULL);
    fc_extension_drop_inputs(e);
    if (count != e->input_count) {
        fc_input *new_inputs = count > 0 ? (fc_input *)calloc(count, sizeof *new_inputs) : NULL;
        if (new_inputs == NULL && count > 0) {
            return FC_ENOMEM;
        }
        free(e->inputs);
        e->inputs = new_inputs;
        e->input_count = count;
    }
    for (size_t i = 0; i < count; i++) {
        fct_facts facts;
        fct_tensor_facts(inputs[i], &facts);
        fct_tensor_retain(inputs[i]);
        e->inputs[i] = (fc_input){.tensor = inputs[i], .numel = facts.numel, .dtype = facts.dtype};
    }
    return FC_OK;
}

void fc_extension_drop_inputs(fc_extension *e) {
    assert((e->inputs == NULL) == (e->input_count == 0));
    for (size_t i = 0; i < e->input_count; i++) {
        fct_tensor_release(e->inputs[i].tensor);
        e->inputs[i].tensor = NULL;
    }
}

fc_status fc_extension_set_outputs(fc_extension *e, fct_tensor *const *outputs, size_t count) {
    assert(count == 0 || outputs != NULL);
    return replace_list(&e->outputs, &e->output_count, outputs, count);
}

fc_status fc_extension_set_inner(fc_extension *e, fct_tensor *const *inner, size_t count) {
    assert(count == 0 || inner != NULL);
    return replace_list(&e->inner, &e->inner_count, inner, count);
}

/* ---- memory ---- */

static bool matches(const fc_kept_tensor *output, int64_t numel, fct_dtype dtype) {
    fct_facts facts;
    if (output->tensor == NULL) {
        return false;
    }
    fct_tensor_facts(output->tensor, &facts);
    return facts.numel == numel && facts.dtype == dtype;
}

static fc_status refuse_shared_output(const fc_kept_tensor *output, const char *name,
                                      fc_error *err) {
    if (output->tensor == NULL || !fct_storage_is_shared(output->tensor)) {
        return FC_OK;
    }
    return fc_error_set(err, FC_ESTATE,
                        "parameter '%s': fsdp_pre_all_gather returned inputs of other sizes or "
                        "dtypes than before, but a tensor that fsdp_post_all_gather created "
                        "shares the memory that they were gathered into",
                        name != NULL ? name : "?");
}

/* Adjusts the number of outputs to the number of inputs. New entries have no tensor. */
static fc_status match_output_count(fc_extension *e, const char *name, fc_error *err) {
    fc_kept_tensor *new_outputs = NULL;
    if (e->output_count == e->input_count) {
        return FC_OK;
    }
    for (size_t i = e->input_count; i < e->output_count; i++) {
        fc_status status = refuse_shared_output(&e->outputs[i], name, err);
        if (status != FC_OK) {
            return status;
        }
    }
    if (e->input_count > 0) {
        new_outputs = (fc_kept_tensor *)calloc(e->input_count, sizeof *new_outputs);
        if (new_outputs == NULL) {
            return FC_ENOMEM;
        }
    }
    for (size_t i = 0; i < e->output_count && i < e->input_count; i++) {
        new_outputs[i] = e->outputs[i];
        e->outputs[i].tensor = NULL;
    }
    release_list(&e->outputs, &e->output_count);
    e->outputs = new_outputs;
    e->output_count = e->input_count;
    return FC_OK;
}

static fc_status alloc_storage(const fc_kept_tensor *kept) {
    return allocated_bytes(kept->tensor) == kept->bytes ||
                   fct_storage_alloc(kept->tensor, kept->bytes) == 0
               ? FC_OK
               : FC_ERAISED;
}

fc_status fc_extension_alloc(fc_extension *e, int64_t world, fct_device device, const char *name,
                             fc_error *err) {
    assert(world > 0);
    fc_status status = FC_OK;
    FC_TRY(match_output_count(e, name, err));
    for (size_t i = 0; i < e->input_count; i++) {
        fc_kept_tensor *output = &e->outputs[i];
        const int64_t numel = world * e->inputs[i].numel; /* the plan has checked the product */
        if (!matches(output, numel, e->inputs[i].dtype)) {
            fct_tensor *tensor = NULL;
            FC_TRY(refuse_shared_output(output, name, err));
            FC_TRY_RAISED(fct_tensor_empty(numel, e->inputs[i].dtype, device, &tensor));
            fct_tensor_release(output->tensor);
            *output = (fc_kept_tensor){.tensor = tensor, .bytes = allocated_bytes(tensor)};
        }
        FC_TRY(alloc_storage(output));
    }
    for (size_t i = 0; i < e->inner_count; i++) {
        FC_TRY(alloc_storage(&e->inner[i]));
    }
done:
    return status;
}

static bool can_free(const fc_kept_tensor *list, size_t count) {
    bool can = true;
    for (size_t i = 0; can && i < count; i++) {
        can = list[i].tensor == NULL || fct_storage_can_free(list[i].tensor);
    }
    return can;
}

bool fc_extension_can_free(const fc_extension *e) {
    return can_free(e->outputs, e->output_count) && can_free(e->inner, e->inner_count);
}

static void free_all(const fc_kept_tensor *list, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (allocated_bytes(list[i].tensor) > 0) {
            fct_storage_free(list[i].tensor);
        }
    }
}

void fc_extension_free(fc_extension *e) {
    assert((e->outputs == NULL) == (e->output_count == 0));
    free_all(e->outputs, e->output_count);
    free_all(e->inner, e->inner_count);
}

int64_t fc_extension_bytes(const fc_extension *e) {
    int64_t bytes = 0;
    for (size_t i = 0; i < e->output_count; i++) {
        bytes += allocated_bytes(e->outputs[i].tensor);
    }
    for (size_t i = 0; i < e->inner_count; i++) {
        bytes += allocated_bytes(e->inner[i].tensor);
    }
    return bytes;
}
