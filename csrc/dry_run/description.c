/* Checks of a description; see description.h. Owns nothing. */
#include "description.h"

#include "../core/layout.h"

/* More than the bytes of an element of any dtype, so that sizes in bytes do not overflow. */
enum { ELEMENT_BYTES_BOUND = 32 };

static fc_status check_prefetch(const fcd_description *d, size_t state, const int32_t *targets,
                                size_t count, const char *key, fc_error *error) {
    for (size_t i = 0; i < count; i++) {
        if (targets[i] < 0 || (size_t)targets[i] >= d->state_count) {
            return fc_error_set(error, FC_EVALUE,
                                "states[%zu].%s[%zu]: %d is not a state; expected 0 to %zu", state,
                                key, i, (int)targets[i], d->state_count - 1);
        }
    }
    return FC_OK;
}

static fc_status check_state(const fcd_description *d, size_t index, fc_error *error) {
    const fcd_state_description *s = &d->states[index];
    fc_status status = FC_OK;
    if (s->root < 0 || (size_t)s->root > index || d->states[s->root].root != s->root) {
        return fc_error_set(error, FC_EVALUE,
                            "states[%zu].root: %d is not a root; expected its own index, or that "
                            "of an earlier root",
                            index, (int)s->root);
    }
    if (s->modules < 1) {
        return fc_error_set(error, FC_EVALUE, "states[%zu].modules: %d; expected at least 1", index,
                            (int)s->modules);
    }
    FC_TRY(
        check_prefetch(d, index, s->forward_prefetch, s->forward_count, "forward_prefetch", error));
    FC_TRY(check_prefetch(d, index, s->backward_prefetch, s->backward_count, "backward_prefetch",
                          error));
done:
    return status;
}

/* Checks with the core's layout that the parameter can be sharded over `world` ranks. */
static fc_status check_param(const fcd_unit_description *u, size_t unit, size_t index,
                             fc_error *error) {
    const fcd_param_description *p = &u->params[index];
    fc_layout layout, post_forward = {.world = 1};
    fc_error reason;
    int64_t bytes = 0;
    if (p->ndim > FCD_DIMS_MAX) {
        return fc_error_set(error, FC_EVALUE,
                            "units[%zu].params[%zu].sizes: %d dimensions; expected at most %d",
                            unit, index, (int)p->ndim, FCD_DIMS_MAX);
    }
    if (fc_layout_init(&layout, p->ndim, p->sizes, p->dim, u->world, 0, &reason) != FC_OK ||
        (u->post_forward_world > 0 && fc_layout_init(&post_forward, p->ndim, p->sizes, 0,
                                                     u->post_forward_world, 0, &reason) != FC_OK)) {
        return fc_error_set(error, FC_EVALUE, "units[%zu].params[%zu].sizes: %s", unit, index,
                            reason.message);
    }
    if (!fc_size_mul(layout.padded_numel * layout.world, ELEMENT_BYTES_BOUND, &bytes) ||
        !fc_size_mul(post_forward.padded_numel * post_forward.world, ELEMENT_BYTES_BOUND, &bytes)) {
        return fc_error_set(error, FC_EVALUE, "units[%zu].params[%zu].sizes: too many elements",
                            unit, index);
    }
    return FC_OK;
}

static fc_status check_unit(const fcd_description *d, size_t index, fc_error *error) {
    const fcd_unit_description *u = &d->units[index];
    fc_status status = FC_OK;
    if (u->state < 0 || (size_t)u->state >= d->state_count) {
        return fc_error_set(error, FC_EVALUE,
                            "units[%zu].state: %d is not a state; expected 0 to %zu", index,
                            (int)u->state, d->state_count - 1);
    }
    const struct {
        const char *key;
        int64_t value;
        int64_t min;
    } limits[] = {{"world", u->world, 1},
                  {"replicas", u->replicas, 1},
                  {"post_forward_world", u->post_forward_world, 0},
                  {"bucket_bytes", u->bucket_bytes, 0},
                  {"max_input_buffers", u->max_input_buffers, 1}};
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        if (limits[i].value < limits[i].min) {
            return fc_error_set(error, FC_EVALUE, "units[%zu].%s: %lld; expected at least %lld",
                                index, limits[i].key, (long long)limits[i].value,
                                (long long)limits[i].min);
        }
    }
    for (size_t i = 0; i < u->count; i++) {
        FC_TRY(check_param(u, index, i, error));
    }
done:
    return status;
}

fc_status fcd_description_check(const fcd_description *description, fc_error *error) {
    fc_status status = FC_OK;
    if (description->state_count == 0) {
        return fc_error_set(error, FC_EVALUE, "states: empty; expected at least one state");
    }
    for (size_t i = 0; i < description->state_count; i++) {
        FC_TRY(check_state(description, i, error));
    }
    for (size_t i = 0; i < description->unit_count; i++) {
        FC_TRY(check_unit(description, i, error));
    }
done:
    return status;
}
