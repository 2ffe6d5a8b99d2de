/* Hooks and nodes of autograd, functorch, and ranges of the profiler. */
#ifndef FSDP_C_BRIDGE_AUTOGRAD_H
#define FSDP_C_BRIDGE_AUTOGRAD_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fct_grad_subscription
    fct_grad_subscription; /* a post-accumulation hook of a leaf; one owner */

/* A callback with an owner. `call` runs with the GIL, on the thread that runs backward. It returns
 * 0, or -1 with a Python exception set. retain and release change the owner's reference count, with
 * the GIL. The destruction of a graph may call release. */
typedef struct fct_hook {
    void *owner;
    int (*call)(void *owner);
    void (*retain)(void *owner);
    void (*release)(void *owner);
} fct_hook;

bool fct_grad_enabled(void);
/* Whether a dispatch mode or a jit trace is active on this thread. */
bool fct_has_observer(void);
/* Whether a TorchFunctionMode receives the calls of torch's Python functions on this thread. */
bool fct_has_function_mode(void);
bool fct_in_backward(void); /* torch._C._current_graph_task_id() != -1 on this thread */
/* Makes one identity node for n tensors that require grad. The name of the node is
 * "RegisterPostBackwardFunctionBackward". Each out[i] (new) is an alias of in[i] whose grad_fn is
 * the node, like the output of a torch.autograd.Function that returns its input. In backward the
 * node calls hook, then passes the gradients through. */
FCT_CHECK int fct_autograd_node(fct_tensor *const *in, size_t n, const fct_hook *hook,
                                fct_tensor **out);
/* Returns the gradients of the node whose hook runs on this thread, and writes their number to
 * *count. Returns NULL and writes 0 outside of such a hook. The array is valid until the next call
 * in the same hook. set_grad replaces the gradient at `index` and borrows `grad`. */
fct_tensor *const *fct_autograd_node_grads(size_t *count);
void fct_autograd_node_set_grad(size_t index, fct_tensor *grad);
/* Calls hook whenever the gradient of t has been computed, like Tensor.register_hook with a hook
 * that returns None. t requires grad, and may be a leaf. The owner is a Python object. On a leaf
 * the hook refers to the owner weakly, and a second call with the same hook has no effect. */
FCT_CHECK int fct_autograd_on_grad(fct_tensor *t, const fct_hook *hook);
/* Calls hook each time autograd has accumulated into .grad of this leaf, on the thread that runs
 * backward, until the subscription is freed. The subscription holds no reference to the owner:
 * retain and release are not used. */
FCT_CHECK int fct_autograd_subscribe(fct_tensor *leaf, const fct_hook *hook,
                                     fct_grad_subscription **out);
/* Whether only the subscription holds the leaf's node, and no graph. The node holds a reference to
 * the leaf. */
bool fct_grad_subscription_owns_node(const fct_grad_subscription *subscription);
void fct_grad_subscription_free(fct_grad_subscription *subscription); /* NULL is allowed */
/* Calls hook at the end of the current backward pass. */
FCT_CHECK int fct_autograd_at_end(const fct_hook *hook);
/* Returns a new tensor, t.to(dtype) with autograd history. For forward inputs and outputs. */
FCT_CHECK int fct_cast_differentiable(fct_tensor *t, fct_dtype dtype, fct_tensor **out);
/* Whether functorch transforms are active on this thread. Always false before torch 2.13, because
 * its FSDP2 hooks do not support them. */
bool fct_has_functorch(void);
/* Disables functorch's transforms on this thread, so that tensors are plain. Returns NULL if none
 * is active. resume enables the transforms again, and accepts NULL. Pauses on a thread must be
 * nested. */
void *fct_functorch_pause(void);
void fct_functorch_resume(void *pause);

/* ---- profiler -------------------------------------------------------------------------------- */

/* A user-scope record_function range. Ranges may be nested. fct_profile_enter returns NULL if no
 * profiler is active. */
bool fct_profile_active(void);
void *fct_profile_enter(const char *name);
void fct_profile_exit(void *token); /* NULL is allowed */

#ifdef __cplusplus
}
#endif

#endif
