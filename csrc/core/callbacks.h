/* Callbacks of the core for operations that need Python objects. csrc/python, csrc/dry_run and the
 * simulator of tests/c implement them. `param` is fc_param.owner and `group` is
 * fc_group_base.owner. A callback that returns int returns 0, or -1 with a Python exception set.
 * The caller holds the GIL. */
#ifndef FSDP_C_CORE_CALLBACKS_H
#define FSDP_C_CORE_CALLBACKS_H

#include <stdbool.h>

#include "../transport/transport.h"
#include "param.h"

/* Bits of fc_group_base.fallbacks: operations that Python performs in place of the core. */
typedef enum fc_fallback {
    FC_FALLBACK_GATHER = 1 << 0, /* gather() and copy_out() replace pack, all-gather, copy-out */
    FC_FALLBACK_REDUCE = 1 << 1, /* reduce() replaces pack, reduce-scatter, all-reduce, views */
    FC_FALLBACK_EAGER = 1 << 2,  /* no backward is eager (bucket.h) */
    FC_FALLBACK_FREE = 1 << 3,   /* free_unsharded() runs before the core's free, per parameter */
    FC_FALLBACK_SWAP = 1 << 4,   /* swap_by_method() replaces swap() */
    FC_FALLBACK_GRADS = 1 << 5 /* accumulate_grad(), to_accumulated_grad() and collect_grad() run */
} fc_fallback;

typedef struct fc_callbacks {
    /* Creates the unsharded parameter over `flat` (1-D, fc_param.flat_numel elements, allocated
     * storage). Called once per parameter, and again if `flat` was replaced. *unsharded is
     * borrowed. The owner of the callback keeps *unsharded alive until the next call or the end of
     * the parameter. */
    int (*make_unsharded)(void *param, fct_tensor *flat, fct_tensor **unsharded);
    /* For parameters with all-gather extensions (fc_param.extended). Both callbacks may be NULL if
     * no parameter is extended.
     *
     * extend_inputs runs before a gather, on the stream of the pack. It passes the inputs of this
     * gather to fc_param.extension. Returns FC_ENOMEM or FC_ERAISED on failure. */
    fc_status (*extend_inputs)(void *param);
    /* Replaces make_unsharded() for extended parameters. Runs after each gather, when the outputs
     * of the whole group are complete. The callback updates the unsharded parameter from its
     * outputs. The first call creates the parameter and passes the parameter and its inner tensors
     * to fc_param. Returns FC_ENOMEM or FC_ERAISED on failure. */
    fc_status (*extend_unsharded)(void *param);
    /* Creates the parameter that is registered after a reshard to the smaller group, over `data`
     * (1-D, this rank's padded shard of the post-forward layout). The owner keeps that parameter
     * until the next call. A call with `data` NULL releases the parameter and never fails. */
    int (*make_post_forward)(void *param, fct_tensor *data);
    /* Registers the parameter object of `state` on every module that holds the
     * parameter. Fails only if a module's own __setattr__ raises. A swap to the registered state
     * never fails. */
    int (*swap)(void *param, fc_sharded_state state);
    /* Performs swap() through a method that the user has overridden. Called only if
     * FC_FALLBACK_SWAP is set. */
    int (*swap_by_method)(void *param, fc_sharded_state state);
    /* Returns requires_grad of the sharded parameter. The core keeps no handle of that object,
     * because users may swap its tensor. */
    bool (*requires_grad)(void *param);
    /* Sets requires_grad of the sharded parameter. */
    int (*set_requires_grad)(void *param, bool value);
    /* Returns the version counter of the sharded parameter, which grows with writes to the
     * parameter object. The counter of sharded_data records all other writes. If NULL, only the
     * counter of sharded_data is checked. Never fails. */
    uint32_t (*shard_version)(void *param);
    /* Runs before a gather. If the user has replaced the shard of the parameter, the callback
     * passes the new shard to fc_param. Fails if the replacement does not fit the parameter. May be
     * NULL if shards are never replaced. */
    int (*refresh_shard)(void *param);
    /* Sets .grad of the sharded parameter or adds to it, then runs the post-accumulate-grad hooks.
     * Borrows `local`, this rank's shard of the reduced gradient. */
    int (*set_sharded_grad)(void *param, fct_tensor *local);
    /* Returns true if the sharded parameter has a gradient, which set_sharded_grad() will add to.
     * Called for offloaded parameters. */
    bool (*has_grad)(void *param);
    /* Returns true if user code must run as soon as the gradient is reduced (post-accumulate-grad
     * hooks). */
    bool (*needs_grad_now)(void *param);
    /* Called when autograd has accumulated into the unsharded parameter. The callback calls
     * fc_bucket_arrived, and fc_group_reduce_buckets if fc_bucket_arrived returns true. */
    int (*grad_arrived)(void *param);
    /* Writes the plain local tensor of a DTensor gradient to *local, as a new reference. */
    int (*unwrap_grad)(void *param, fct_tensor *grad, fct_tensor **local);
    /* Replace the functions of the same name in param.h and gradient.c. Called only if
     * FC_FALLBACK_GRADS is set. *local is a new reference, or NULL if there is no gradient. */
    int (*accumulate_grad)(void *param);
    int (*to_accumulated_grad)(void *param);
    int (*collect_grad)(void *param, fct_tensor **local);
    /* Runs the user's all-reduce hook, which changes the reduced gradients in place before they are
     * divided and their views become gradients. Called only for groups with has_hook. */
    int (*reduce_hook)(void *group, fct_tensor *output);

    /* Starts a gather. Called only if FC_FALLBACK_GATHER is set. `overlaps`: the gather runs on the
     * context's gather streams. */
    int (*gather)(void *group, bool async_op, bool overlaps);
    /* Waits for the gather, allocates, copies out and passes each fc_param its unsharded tensor.
     * Runs once per gather: after a failure the core calls drop_gather(). Writes to *buffer a new
     * reference to the gathered buffer, or NULL if the buffer can be freed at once. The core keeps
     * *buffer as long as it would keep its own gather buffer. */
    int (*copy_out)(void *group, fct_tensor **buffer);
    /* Discards a gather without waiting. Never fails. */
    void (*drop_gather)(void *group);
    /* Discards the partial results of reduce(). Called only if reduce() has run before. May be NULL
     * if reduce() keeps none. Never fails. */
    void (*drop_reduce)(void *group);
    /* Frees the memory of an unsharded parameter. Never fails. Called only if FC_FALLBACK_FREE is
     * set. */
    void (*free_unsharded)(void *param);
    /* Reduces `count` gradients and passes them to their parameters. Called only if
     * FC_FALLBACK_REDUCE is set or no plan fits the gradients. Takes each gradient as early as
     * possible and writes NULL in its place. On failure the remaining gradients belong to the
     * caller. */
    int (*reduce)(void *group, fc_param *const *params, fct_tensor **grads, size_t count,
                  bool order_compute);
    /* Makes the current stream wait for the work of reduce(). Called only if reduce() has run
     * before. May be NULL if reduce() queues no work. */
    int (*finalize)(void *group);

    /* Raises an exception, because the plans of two ranks differ (`result`). Always returns -1. If
     * NULL, the core sets an error. */
    int (*raise_plan_difference)(void *group, const char *process_group,
                                 const fct_plan_result *result);

    /* Logs the debug line "FSDP::label (modules)". Called only if fc_group_base.logs is set. Never
     * fails. */
    void (*log)(void *group, const char *label);
} fc_callbacks;

#endif
