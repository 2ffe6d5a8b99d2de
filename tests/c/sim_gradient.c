/* The simulator's versions of the bridge functions that set gradients. */
#include "sim_internal.h"

/* The simulator casts no gradients. */
int fct_tensor_set_grad_dtype(fct_tensor *t, fct_dtype dtype) {
    (void)t;
    (void)dtype;
    return sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_set_grad_dtype") ? -1 : 0;
}

void fct_grad_put(fct_tensor *t, fct_tensor *grad) {
    fct_tensor *old = NULL;
    fct_grad_take(t, &old);
    fct_tensor_release(old);
    fct_tensor_retain(grad);
    sim_grad_accumulate(t, grad); /* t has no gradient, so this sets it */
}
