/* One parameter; see param.h. Owns counted references to its tensors and all partial gradients. A
 * failed backward, or one without synchronization, leaves its gradient in `accumulated` or in .grad
 * of `unsharded`.
 *
 * Memory of `flat` is allocated and freed on the device's current stream. fc_param_shard_facts and
 * fc_param_input_facts check that a tensor lies inside its storage before its address is used. */
#include "param.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../bridge/device.h"
#include "dtype.h"

static void replace(fct_tensor **slot, fct_tensor *value) {
    fct_tensor *old = *slot;
    if (value != NULL) {
        fct_tensor_retain(value);
    }
    *slot = value;
    fct_tensor_release(old);
}

fc_status fc_param_init(fc_param *p, void *owner, int32_t ndim, const int64_t *sizes, int32_t dim,
                        int64_t world, int64_t rank, fc_error *err) {
    assert(ndim < 1 || sizes != NULL);
    memset(p, 0, sizeof *p);
    p->owner = owner;
    p->registered_state = FC_SHARDED;
    p->orig_dtype = FCT_NO_DTYPE;
    p->param_dtype = FCT_NO_DTYPE;
    p->reduce_dtype = FCT_NO_DTYPE;
    p->grad_dtype = FCT_NO_DTYPE;
    p->sharded_grad_dtype = FCT_NO_DTYPE;
    fc_status status = fc_layout_init(&p->layout, ndim, sizes, dim, world, rank, err);
    if (status != FC_OK) {
        return status;
    }
    p->ndim = ndim;
    p->flat_numel = p->layout.padded_numel * world; /* fc_layout_init has checked the product */
    p->local_sizes = (int64_t *)malloc(2 * (size_t)ndim * sizeof *p->local_sizes);
    if (p->local_sizes == NULL) {
        return fc_error_set(err, FC_ENOMEM, "out of memory");
    }
    p->strides = p->local_sizes + ndim;
    int64_t stride = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        p->local_sizes[d] = d == dim ? p->layout.local_rows : sizes[d];
        p->strides[d] = stride;
        stride *= p->local_sizes[d] > 1 ? p->local_sizes[d] : 1;
    }
    return FC_OK;
}

fc_status fc_param_init_post_forward(fc_param *p, const int64_t *sizes, int64_t world, int64_t rank,
                                     fc_error *err) {
    assert(p->layout.world > 0 && p->flat == NULL);
    fc_layout layout;
    fc_status status = fc_layout_init(&layout, p->ndim, sizes, 0, world, rank, err);
    if (status != FC_OK) {
        return status;
    }
    int64_t needed = layout.padded_numel * world;
    p->post_forward_layout = layout;
    p->flat_numel = needed > p->flat_numel ? needed : p->flat_numel;
    return FC_OK;
}

static void unsubscribe(fc_param *p) {
    fct_grad_subscription_free(p->subscription);
    p->subscription = NULL;
}

void fc_param_release_unsharded(fc_param *p) {
    assert(!p->aliased || p->flat != NULL);
    unsubscribe(p);
    replace(&p->unsharded, NULL);
    replace(&p->flat, NULL);
    fc_extension_release(&p->extension);
    p->aliased = false;
}

void fc_param_fini(fc_param *p) {
    assert((p->local_sizes == NULL) == (p->strides == NULL));
    replace(&p->sharded_data, NULL);
    replace(&p->staged, NULL);
    replace(&p->post_forward_data, NULL);
    replace(&p->accumulated, NULL);
    replace(&p->partial, NULL);
    fc_param_release_unsharded(p);
    fc_extension_fini(&p->extension);
    free(p->local_sizes);
    p->local_sizes = NULL;
    p->strides = NULL;
}

void fc_param_set_sharded_data(fc_param *p, fct_tensor *data) {
    replace(&p->sharded_data, data);
}

void fc_param_set_accumulated(fc_param *p, fct_tensor *grad) {
    replace(&p->accumulated, grad);
}

void fc_param_set_partial(fc_param *p, fct_tensor *partial) {
    replace(&p->partial, partial);
}

void fc_param_set_unsharded(fc_param *p, fct_tensor *unsharded) {
    assert(p->subscription == NULL || p->unsharded != NULL);
    if (unsharded != p->unsharded) {
        unsubscribe(p);
    }
    replace(&p->unsharded, unsharded);
}

void fc_param_set_flat(fc_param *p, fct_tensor *flat) {
    assert(!p->aliased || p->flat != NULL);
    replace(&p->flat, flat);
    p->aliased = false;
}

fct_dtype fc_param_sharded_grad_dtype(const fc_param *p) {
    return p->overrides_grad_dtype ? p->sharded_grad_dtype : p->orig_dtype;
}

fct_dtype fc_param_compute_dtype(const fc_param *p) {
    return p->param_dtype != FCT_NO_DTYPE ? p->param_dtype : p->orig_dtype;
}

/* Returns the reason why the shard cannot be sent, or NULL if it can. */
static const char *find_defect(const fct_facts *facts, int64_t numel, fct_dtype dtype) {
    int64_t bytes = 0;
    if (!facts->strided) {
        return "has no memory of its own that can be read";
    }
    if (facts->numel != numel) {
        return "changed its number of elements since it was initialized";
    }
    if (!facts->contiguous) {
        return "is not contiguous";
    }
    if (facts->dtype != dtype) {
        return "changed its dtype since it was initialized";
    }
    if (!fc_size_mul(facts->numel, facts->itemsize, &bytes) ||
        !fc_size_add(bytes, facts->offset_bytes, &bytes) || bytes > facts->storage_bytes ||
        (facts->numel > 0 && facts->data == NULL)) {
        return "lies outside its storage";
    }
    return NULL;
}

size_t fc_param_input_count(const fc_param *p) {
    return p->extended ? p->extension.input_count : 1;
}

fc_status fc_param_input_facts(const fc_param *p, size_t i, int64_t numel, fct_dtype dtype,
                               fct_facts *facts, fc_error *err) {
    const fc_extension *e = &p->extension;
    const char *name = p->name != NULL ? p->name : "?";
    if (i >= e->input_count || e->inputs[i].tensor == NULL) {
        return fc_error_set(err, FC_ESTATE, "parameter '%s' has no all-gather input %zu", name, i);
    }
    fct_tensor_facts(e->inputs[i].tensor, facts);
    const char *reason = find_defect(facts, numel, dtype);
    return reason == NULL
               ? FC_OK
               : fc_error_set(err, FC_EASSERT, "all-gather input %zu of parameter '%s' %s", i, name,
                              reason);
}

fct_tensor *fc_param_shard(const fc_param *p, bool post_forward) {
    return post_forward ? p->post_forward_data : p->staged != NULL ? p->staged : p->sharded_data;
}

fc_status fc_param_shard_facts(const fc_param *p, bool post_forward, fct_facts *facts,
                               fc_error *err) {
    const char *name = p->name != NULL ? p->name : "?";
    const fct_tensor *data = fc_param_shard(p, post_forward);
    int64_t numel = post_forward ? p->post_forward_layout.padded_numel : p->layout.padded_numel;
    fct_dtype dtype = post_forward ? fc_param_compute_dtype(p) : p->orig_dtype;
    if (data == NULL) {
        return fc_error_set(err, FC_ESTATE, "parameter '%s' has no sharded data", name);
    }
    fct_tensor_facts(data, facts);
    const char *reason = find_defect(facts, numel, dtype);
    if (reason != NULL) {
        return fc_error_set(err, FC_EASSERT,
                            "the shard of parameter '%s' %s: %lld elements of %s in a storage of "
                            "%lld bytes; expected %lld of %s",
                            name, reason, (long long)facts->numel, fc_dtype_name(facts->dtype),
                            (long long)facts->storage_bytes, (long long)numel,
                            fc_dtype_name(dtype));
    }
    return FC_OK;
}

/* Selects the unsharded tensor whose part `post_forward_layout.rank` becomes the shard of the
 * smaller group. *numel is the size of one part. For an extended parameter the tensor is its only
 * output, split evenly as in torch. */
static fc_status select_whole(const fc_param *p, const fct_tensor **whole, int64_t *numel,
                              fc_error *err) {
    const fc_extension *e = &p->extension;
    const int64_t world = p->post_forward_layout.world;
    fct_facts facts;
    *whole = p->flat;
    *numel = p->post_forward_layout.padded_numel;
    if (p->flat != NULL) {
        return FC_OK;
    }
    if (e->output_count != 1) {
        return fc_error_set(err, FC_EASSERT, "Expected 1 all_gather_output, got %zu",
                            e->output_count);
    }
    *whole = e->outputs[0].tensor;
    fct_tensor_facts(*whole, &facts);
    *numel = facts.numel / world;
    return facts.numel % world == 0
               ? FC_OK
               : fc_error_set(err, FC_EASSERT,
                              "All-gather output size (%lld) must be divisible by the shard world "
                              "size (%lld)",
                              (long long)facts.numel, (long long)world);
}

fc_status fc_param_keep_post_forward(fc_param *p, fct_device device, fc_error *err) {
    assert(p->post_forward_layout.world > 0);
    fc_status status = FC_OK;
    const fct_tensor *whole = NULL;
    fct_tensor *part = NULL;
    fct_tensor *copy = NULL;
    fct_facts facts;
    int64_t numel = 0;
    FC_TRY(select_whole(p, &whole, &numel, err));
    fct_tensor_facts(whole, &facts);
    FC_TRY_RAISED(fct_tensor_empty(numel, facts.dtype, device, &copy));
    FC_TRY_RAISED(fct_tensor_alias_1d(whole, numel, p->post_forward_layout.rank * numel, &part));
    FC_TRY_RAISED(fct_tensor_copy(copy, part));
    replace(&p->post_forward_data, copy);
done:
    fct_tensor_release(part);
    fct_tensor_release(copy);
    return status;
}

void fc_param_drop_post_forward(fc_param *p) {
    assert(p->post_forward_data == NULL || p->post_forward_layout.world > 0);
    replace(&p->post_forward_data, NULL);
}

fc_status fc_param_can_alias(const fc_param *p, fct_device device, bool *can, fc_error *err) {
    fct_facts shard;
    if (p->extended) {
        *can = false;
        return FC_OK;
    }
    fc_status status = fc_param_shard_facts(p, false, &shard, err);
    *can = status == FC_OK && p->layout.world == 1 && p->flat_numel == shard.numel &&
           shard.numel > 0 && shard.dtype == fc_param_compute_dtype(p) &&
           fct_device_is_same_type(shard.device, device);
    return status;
}

fc_status fc_param_alias_flat(fc_param *p) {
    assert(p->layout.world == 1 && !p->extended && p->sharded_data != NULL);
    fc_status status = FC_OK;
    fct_facts shard;
    fct_facts flat;
    fct_tensor *alias = NULL;
    fct_tensor_facts(p->sharded_data, &shard);
    if (p->aliased && p->flat != NULL) {
        fct_tensor_facts(p->flat, &flat);
        if (flat.data == shard.data && flat.numel == shard.numel && flat.dtype == shard.dtype) {
            return FC_OK;
        }
    }
    FC_TRY_RAISED(fct_tensor_alias_1d(p->sharded_data, shard.numel,
                                      shard.offset_bytes / shard.itemsize, &alias));
    FC_TRY(fc_param_keep_grad(p));
    fc_param_release_unsharded(p);
    replace(&p->flat, alias);
    p->aliased = true;
done:
    fct_tensor_release(alias);
    return status;
}

fc_status fc_param_alloc_flat(fc_param *p, fct_device device, fc_error *err) {
    assert(!p->extended);
    fc_status status = FC_OK;
    fct_facts facts;
    int64_t numel = p->flat_numel;
    int64_t bytes = 0;
    if (p->aliased || p->extension.output_count > 0) {
        FC_TRY(fc_param_keep_grad(p));
        fc_param_release_unsharded(p);
    }
    if (p->flat == NULL) {
        fct_tensor *flat = NULL;
        FC_TRY_RAISED(fct_tensor_empty(numel, fc_param_compute_dtype(p), device, &flat));
        p->flat = flat;
    }
    fct_tensor_facts(p->flat, &facts);
    if (facts.numel != numel || !fc_size_mul(numel, facts.itemsize, &bytes)) {
        return fc_error_set(err, FC_EASSERT, "unsharded tensor of parameter '%s' was changed",
                            p->name != NULL ? p->name : "?");
    }
    if (facts.storage_bytes != bytes) {
        FC_TRY_RAISED(fct_storage_alloc(p->flat, bytes));
    }
done:
    return status;
}

fc_status fc_param_adopt_flat(fc_param *p, fct_device device, fct_tensor *gathered, fc_error *err) {
    assert(!p->extended && gathered != p->flat);
    fc_status status = FC_OK;
    fct_facts from;
    fct_facts to;
    if (p->flat == NULL || p->aliased) {
        FC_TRY(fc_param_alloc_flat(p, device, err));
    }
    fct_tensor_facts(gathered, &from);
    fct_tensor_facts(p->flat, &to);
    if (to.numel != from.numel || to.dtype != from.dtype || to.offset_bytes != 0 ||
        from.storage_bytes != from.numel * from.itemsize) {
        return fc_error_set(err, FC_EASSERT, "unsharded tensor of parameter '%s' was changed",
                            p->name != NULL ? p->name : "?");
    }
    fct_storage_free(p->flat);
    fct_storage_move(gathered, p->flat);
done:
    return status;
}

void fc_param_return_flat(fc_param *p, fct_tensor *gathered) {
    assert(gathered != p->flat);
    fct_facts facts;
    fct_tensor_facts(gathered, &facts);
    if (p->flat != NULL && facts.storage_bytes == 0) {
        fct_storage_move(p->flat, gathered);
    }
}

fc_status fc_param_alloc_outputs(fc_param *p, int64_t world, fct_device device, fc_error *err) {
    assert(p->extended && world > 0);
    fc_status status = FC_OK;
    if (p->flat != NULL) { /* flat is left from a time when the parameter was not extended */
        FC_TRY(fc_param_keep_grad(p));
        fc_param_release_unsharded(p);
    }
    FC_TRY(fc_extension_alloc(&p->extension, world, device, p->name, err));
done:
    return status;
}

bool fc_param_can_free(const fc_param *p) {
    return (p->flat == NULL || p->aliased || fct_storage_can_free(p->flat)) &&
           fc_extension_can_free(&p->extension);
}

void fc_param_free(fc_param *p) {
    assert(!p->aliased || p->flat != NULL);
    if (!fc_param_can_free(p)) {
        if (p->accumulated == NULL && p->unsharded != NULL) {
            fct_grad_take(p->unsharded, &p->accumulated); /* see fc_param_keep_grad */
        }
        fc_param_release_unsharded(p);
        return;
    }
    if (p->flat != NULL && !p->aliased) {
        fct_storage_free(p->flat);
    }
    fc_extension_free(&p->extension);
}

fc_status fc_param_begin_grad(fc_param *p, bool reduces) {
    assert(!p->defers_cast || p->grad_dtype != FCT_NO_DTYPE);
    fc_status status = FC_OK;
    if (p->defers_cast && p->unsharded != NULL && fct_tensor_requires_grad(p->unsharded) &&
        (reduces || fct_grad_has(p->unsharded))) {
        FC_TRY_RAISED(fct_tensor_set_grad_dtype(p->unsharded, FCT_NO_DTYPE));
    }
done:
    return status;
}

fc_status fc_param_end_grad(fc_param *p) {
    assert(!p->defers_cast || p->grad_dtype != FCT_NO_DTYPE);
    fc_status status = FC_OK;
    fct_tensor *grad = NULL;
    fct_tensor *cast = NULL;
    if (!p->defers_cast || p->unsharded == NULL || !fct_tensor_requires_grad(p->unsharded)) {
        return FC_OK;
    }
    if (fct_grad_has(p->unsharded)) {
        fct_grad_take(p->unsharded, &grad);
        const int failed = fct_tensor_cast(grad, p->grad_dtype, &cast);
        fct_grad_put(p->unsharded, failed ? grad : cast);
        FC_TRY_RAISED(failed);
    }
    FC_TRY_RAISED(fct_tensor_set_grad_dtype(p->unsharded, p->grad_dtype));
done:
    fct_tensor_release(cast);
    fct_tensor_release(grad);
    return status;
}

fc_status fc_param_accumulate_grad(fc_param *p) {
    assert(p->layout.world > 0);
    fc_status status = FC_OK;
    fct_tensor *grad = NULL;
    fct_tensor *accumulated = p->accumulated;
    if (accumulated == NULL || p->unsharded == NULL || !fct_grad_has(p->unsharded)) {
        return FC_OK;
    }
    fct_tensor_retain(accumulated); /* other code may drop the gradients during the addition */
    fct_grad_take(p->unsharded, &grad);
    FC_TRY_RAISED(fct_tensor_add(accumulated, grad));
done:
    fct_tensor_release(grad);
    fct_tensor_release(accumulated);
    return status;
}

fc_status fc_param_keep_grad(fc_param *p) {
    assert(p->subscription == NULL || p->unsharded != NULL);
    if (p->accumulated == NULL && p->unsharded != NULL) {
        fct_grad_take(p->unsharded, &p->accumulated);
        return FC_OK;
    }
    return fc_param_accumulate_grad(p);
}

fc_status fc_param_to_accumulated_grad(fc_param *p) {
    assert(p->layout.world > 0);
    fc_status status = FC_OK;
    fct_tensor *grad = NULL;
    fct_tensor *cast = NULL;
    if (p->grad_dtype != FCT_NO_DTYPE || p->reduce_dtype == FCT_NO_DTYPE ||
        p->reduce_dtype == fc_param_compute_dtype(p) || p->unsharded == NULL ||
        !fct_grad_has(p->unsharded)) {
        /* no cast: the gradient stays in .grad, where users can read it, as in torch */
        return FC_OK;
    }
    fct_grad_take(p->unsharded, &grad);
    FC_TRY_RAISED(fct_tensor_cast(grad, p->reduce_dtype, &cast));
    replace(&p->accumulated, cast);
done:
    fct_tensor_release(cast);
    fct_tensor_release(grad);
    return status;
}

void fc_param_take_grad(fc_param *p, fct_tensor **grad) {
    assert(p->layout.world > 0);
    if (p->accumulated != NULL) {
        *grad = p->accumulated;
        p->accumulated = NULL;
        return;
    }
    *grad = NULL;
    if (p->unsharded != NULL) {
        fct_grad_take(p->unsharded, grad);
    }
}

void fc_param_drop_grad(fc_param *p) {
    assert(p->subscription == NULL || p->unsharded != NULL);
    fct_tensor *grad = NULL;
    replace(&p->accumulated, NULL);
    replace(&p->partial, NULL);
    if (p->unsharded != NULL) {
        fct_grad_take(p->unsharded, &grad);
        fct_tensor_release(grad);
    }
}
