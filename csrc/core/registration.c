/* Registration of parameters on modules; see registration.h. Owns nothing. The callbacks run Python
 * code: a module's own __setattr__ may raise. This file uses no stream. */
#include "registration.h"

#include <assert.h>

#include "../bridge/error.h"

static int swap_one(const fc_group_base *base, size_t i, fc_sharded_state state,
                    int (*swap)(void *param, fc_sharded_state state)) {
    fc_param *p = base->params[i];
    int failed = swap(p->owner, state);
    p->registered_state = failed ? (fc_sharded_state)0 : state;
    return failed;
}

fc_status fc_registration_swap(fc_group_base *base, fc_sharded_state own, fc_sharded_state state,
                               bool *dirty) {
    assert(own >= FC_SHARDED && own <= FC_UNSHARDED);
    assert(state >= FC_SHARDED && state <= FC_UNSHARDED);
    const fc_callbacks *callbacks = base->callbacks;
    bool by_method = fc_group_base_uses_fallback(base, FC_FALLBACK_SWAP);
    for (size_t i = 0; i < base->count; i++) {
        if (swap_one(base, i, state, by_method ? callbacks->swap_by_method : callbacks->swap) ==
            0) {
            continue;
        }
        void *error = fct_error_set_aside();
        size_t changed = *dirty ? base->count : i + 1;
        bool restored = own != state;
        while (own != state && changed-- > 0) {
            if (swap_one(base, changed, own, callbacks->swap) != 0) {
                restored = false;
                fct_error_put_back(NULL); /* the next swap must not run with a pending exception */
            }
        }
        *dirty = !restored;
        fct_error_put_back(error);
        return FC_ERAISED;
    }
    *dirty = false;
    return FC_OK;
}

fc_status fc_registration_check(const fc_group_base *base, fc_sharded_state state) {
    for (size_t i = 0; i < base->count; i++) {
        const fc_param *p = base->params[i];
        if (p->registered_state != state) {
            return fc_error_set(&base->comm->error, FC_ESTATE,
                                "parameter %zu has sharded state %d in a group of sharded state %d",
                                i, (int)p->registered_state, (int)state);
        }
    }
    return FC_OK;
}
