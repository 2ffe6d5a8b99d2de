/* All-gather extensions of simulated parameters: their hooks, and the inputs of the other ranks.
 *
 *   inputs:    the padded shard divided by 2, in the compute dtype, twice. SIM_EXTENDED_TYPES makes
 *              the second input float64. SIM_EXTENDED_GROWS adds a third input of 2, 4 or 6 float64
 *              elements; its size changes at each gather
 *   unsharded: a separate tensor, the sum of the first two outputs
 *
 * All work is queued on the current stream, so a hook on the wrong stream is a detected race. */
#include <string.h>

#include "sim_internal.h"
#include "sim_model.h"

/* ---- inputs ---- */

static fct_dtype second_dtype(const sim_param *p) {
    return p->shape.extended == SIM_EXTENDED_TYPES ? (fct_dtype)FCK_FLOAT64 : sim_compute_dtype(p);
}

/* Returns the shard on the device, as a new reference. */
static int shard_on_device(sim_param *p, fct_tensor **shard) {
    fct_tensor *data = p->core.sharded_data;
    fct_facts facts;
    fct_tensor_facts(data, &facts);
    if (facts.device.type == sim_device().type) {
        fct_tensor_retain(data);
        *shard = data;
        return 0;
    }
    if (fct_tensor_empty(facts.numel, facts.dtype, sim_device(), shard) != 0) {
        return -1;
    }
    return fct_tensor_upload(*shard, data);
}

/* Creates a tensor of `numel` elements: `from` cast and divided, or zeros if `from` is NULL. */
static int new_copy(const fct_tensor *from, int64_t numel, fct_dtype dtype, double divisor,
                    fct_tensor **out) {
    if (fct_tensor_empty(numel, dtype, sim_device(), out) != 0) {
        return -1;
    }
    if (from == NULL) {
        sim_queue_elementwise(*out, NULL, 0.0, "an input that grows");
        return 0;
    }
    return fct_tensor_copy(*out, from) != 0 || fct_tensor_div(*out, divisor) != 0 ? -1 : 0;
}

fc_status sim_extend_inputs(void *owner) {
    sim_param *p = (sim_param *)owner;
    fct_tensor *shard = NULL;
    fct_tensor *inputs[3] = {NULL, NULL, NULL};
    size_t count = p->shape.extended == SIM_EXTENDED_GROWS ? 3 : 2;
    fc_status status = FC_ERAISED;
    sim_callback("extend_inputs");
    if (!p->core.extended) {
        sim_fail("extend_inputs of %s, which has no hooks", p->name);
    }
    if (sim_fault(SIM_FAULT_CALLBACK, "extend_inputs")) {
        return FC_ERAISED;
    }
    p->hooked_gathers++;
    sim_log("inputs:%s", p->name);
    if (shard_on_device(p, &shard) == 0 &&
        new_copy(shard, sim_tensor_numel(shard), sim_compute_dtype(p), 2.0, &inputs[0]) == 0 &&
        new_copy(inputs[0], sim_tensor_numel(shard), second_dtype(p), 1.0, &inputs[1]) == 0 &&
        (count < 3 || new_copy(NULL, (int64_t)(2 + 2 * (p->hooked_gathers % 3)), FCK_FLOAT64, 1.0,
                               &inputs[2]) == 0)) {
        status = fc_extension_set_inputs(&p->core.extension, inputs, count);
    }
    fct_tensor_release(shard);
    for (size_t i = 0; i < count; i++) {
        fct_tensor_release(inputs[i]);
    }
    return status;
}

/* ---- the unsharded parameter ---- */

/* Creates a view of an output without the padding at its end. */
static int make_unpadded_view(const sim_param *p, size_t output, fct_tensor **unpadded) {
    const int64_t stride[1] = {1};
    return fct_tensor_alias(p->core.extension.outputs[output].tensor, 1, &p->numel, stride, 0,
                            unpadded);
}

/* target (1-D) = first output + second output. */
static int sum_outputs(const sim_param *p, fct_tensor *target) {
    fct_tensor *parts[2] = {NULL, NULL};
    int failed = -1;
    if (make_unpadded_view(p, 0, &parts[0]) == 0 && make_unpadded_view(p, 1, &parts[1]) == 0 &&
        fct_tensor_copy(target, parts[0]) == 0 && fct_tensor_add(target, parts[1]) == 0) {
        failed = 0;
    }
    fct_tensor_release(parts[0]);
    fct_tensor_release(parts[1]);
    return failed;
}

static void check_outputs(const sim_param *p) {
    const fc_extension *e = &p->core.extension;
    if (e->output_count != e->input_count) {
        sim_fail("%s has %zu outputs of %zu inputs", p->name, e->output_count, e->input_count);
        return;
    }
    for (size_t i = 0; i < e->output_count; i++) {
        if (sim_tensor_numel(e->outputs[i].tensor) != p->core.layout.world * e->inputs[i].numel) {
            sim_fail("output %zu of %s has another size than its inputs", i, p->name);
        }
        if (e->inputs[i].tensor != NULL) {
            sim_fail("input %zu of %s was not released", i, p->name);
        }
    }
}

/* Creates the inner tensor (torch: FSDPParam._unsharded_inner_tensors), and the unsharded parameter
 * over its memory. */
static fc_status create_unsharded(sim_param *p) {
    fct_tensor *inner = NULL;
    fct_tensor *made = NULL;
    fc_status status = FC_ERAISED;
    if (fct_tensor_empty(p->numel, sim_compute_dtype(p), sim_device(), &inner) == 0 &&
        sum_outputs(p, inner) == 0 && sim_whole_tensor(p, inner, &made) == 0 &&
        fct_tensor_set_requires_grad(made, fct_tensor_requires_grad(p->sharded)) == 0) {
        status = fc_extension_set_inner(&p->core.extension, &inner, 1);
    }
    if (status == FC_OK) {
        fct_tensor_release(p->unsharded);
        p->unsharded = made;
        fct_tensor_retain(made);
        fc_param_set_unsharded(&p->core, made);
    }
    fct_tensor_release(inner);
    fct_tensor_release(made);
    return status;
}

fc_status sim_extend_unsharded(void *owner) {
    sim_param *p = (sim_param *)owner;
    sim_callback("extend_unsharded");
    if (sim_fault(SIM_FAULT_CALLBACK, "extend_unsharded")) {
        return FC_ERAISED;
    }
    sim_log("made:%s", p->name);
    check_outputs(p);
    if (p->core.unsharded == NULL) {
        return create_unsharded(p);
    }
    return sum_outputs(p, p->core.extension.inner[0].tensor) == 0 ? FC_OK : FC_ERAISED;
}

/* ---- inputs of the other ranks ---- */

size_t sim_describe_extension_inputs(const sim_param *p, int64_t padded, int64_t grown,
                                     fct_dtype *dtypes, int64_t *numels) {
    const fct_dtype types[3] = {sim_compute_dtype(p), second_dtype(p), FCK_FLOAT64};
    const int64_t sizes[3] = {padded, padded, grown};
    memcpy(dtypes, types, sizeof types);
    memcpy(numels, sizes, sizeof sizes);
    return p->shape.extended == SIM_EXTENDED_GROWS ? 3 : 2;
}
