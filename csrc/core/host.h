/* What the core asks of the layer above it (csrc/python; a fake in tests/c): the few things that
 * need Python objects. `param` is fc_param.owner, `group` is fc_group.owner. int results: 0, or -1
 * with the error set. */
#ifndef FSDP_C_CORE_HOST_H
#define FSDP_C_CORE_HOST_H

#include <stdbool.h>

#include "../torch/torch_abi.h"
#include "param.h"

/* What moves data, or is about to: the host may do it in the core's place. */
typedef enum fc_move {
    FC_MOVE_GATHER, /* gather() and copy_out() in place of pack, all-gather, copy-out */
    FC_MOVE_REDUCE, /* reduce() in place of pack, reduce-scatter, all-reduce, views */
    FC_MOVE_EARLY,  /* like that one, or the host wants to be asked when a backward ends: no bucket
                       is reduced before that */
    FC_MOVE_FREE,   /* free_unsharded() for every parameter */
    FC_MOVE_SWAP,   /* swap_by_method() in place of swap() */
    FC_MOVE_GRADS   /* fold_grad(), stash_grad() and collect_grad() in place of the parameter's
                       own */
} fc_move;

typedef struct fc_host {
    /* Makes the parameter that modules see while unsharded, over `flat` (1-D, world * padded
     * elements, its storage allocated). Called once per parameter, and again where the flat tensor
     * had to be replaced. *unsharded is borrowed from the host, which keeps it alive until it makes
     * the next one or the parameter dies. */
    int (*make_unsharded)(void *param, fct_tensor *flat, fct_tensor **unsharded);
    /* Extended parameters (fc_param.extended); both may be NULL where there are none.
     * Before a gather, on the stream that the inputs are packed on: gives fc_param.extension the
     * inputs of this gather. FC_ENOMEM, FC_ERAISED. */
    fc_status (*extend_inputs)(void *param);
    /* In place of make_unsharded(), after each gather, once the outputs of the whole group are
     * there: has the parameter made of its outputs, the first time a new one, which the fc_param
     * gets, with the inner tensors. FC_ENOMEM, FC_ERAISED. */
    fc_status (*extend_unsharded)(void *param);
    /* Makes the parameter that modules see while resharded to the smaller group, over `data` (1-D,
     * this rank's padded rows of the forward layout). The host keeps it until it makes the next or
     * `data` is NULL: then it lets it go, and does not fail. */
    int (*make_post_forward)(void *param, fct_tensor *data);
    /* Registers one face of the parameter on every module that holds it. Fails only where a module
     * overrides __setattr__; a swap to what is registered already never fails. */
    int (*swap)(void *param, fc_sharded_state face);
    /* The same by the method that somebody has overridden. Only where it moves FC_MOVE_SWAP. */
    int (*swap_by_method)(void *param, fc_sharded_state face);
    /* Whether the sharded parameter requires grad now. (Users may swap the tensor behind the
     * parameter object, so the core keeps no handle of it.) */
    bool (*requires_grad)(void *param);
    /* Makes it so, or not. */
    int (*require_grad)(void *param, bool value);
    /* A number that grows with every write to the sharded parameter that its own version counter
     * sees; the counter of sharded_data sees the rest. NULL: there is only the latter. Never fails.
     */
    uint32_t (*shard_version)(void *param);
    /* Before a gather: gives the fc_param the shard that the user has put in the place of the one
     * it had, where there is another. Fails where that cannot be this parameter's. NULL: shards
     * stay. */
    int (*follow_shard)(void *param);
    /* Gives the sharded parameter its reduced gradient: sets .grad or adds to it, then runs
     * post-accumulate-grad hooks. Borrows `local` (this rank's shard of the gradient). */
    int (*take_grad)(void *param, fct_tensor *local);
    /* Whether the sharded parameter has a gradient, which take_grad() will add to. Asked for
     * offloaded parameters. */
    bool (*has_grad)(void *param);
    /* True where somebody must see the gradient as soon as it is reduced (post-accumulate-grad
     * hooks). */
    bool (*wants_grad_now)(void *param);
    /* What autograd is to call when it has accumulated into the unsharded parameter: calls
     * fc_bucket_arrived, and fc_group_reduce_buckets where that says so. */
    int (*grad_arrived)(void *param);
    /* The plain local tensor behind a gradient of a wrapped parameter. *local new. */
    int (*unwrap_grad)(void *param, fct_tensor *grad, fct_tensor **local);
    /* What the functions of the same name in param.h and gradient.c do, by the host's own code.
     * Only where it moves FC_MOVE_GRADS. *local new, or NULL: no gradient. */
    int (*fold_grad)(void *param);
    int (*stash_grad)(void *param);
    int (*collect_grad)(void *param, fct_tensor **local);
    /* A user's all-reduce: changes the reduced row in place, before it is divided and handed out.
     * Only for groups with has_hook. */
    int (*reduce_hook)(void *group, fct_tensor *row);

    /* Whether the host moves the group's data itself (custom collectives, patched functions,
     * tensors without memory); asked once for each move: it must be cheap. NULL: it never does.
     * Never fails. */
    bool (*moves)(void *group, fc_move move);
    /* Starts a gather; `overlaps`: on the context's gather streams, where there are any. */
    int (*gather)(void *group, bool async_op, bool overlaps);
    /* Waits for it, allocates, copies out, and gives each fc_param its unsharded tensor. *rows:
     * new, what was copied from, which the core keeps as long as its own; NULL where that may
     * go. */
    int (*copy_out)(void *group, fct_tensor **rows);
    /* Forgets a gather without waiting. Never fails. */
    void (*drop_gather)(void *group);
    /* Forgets the partial results of reduce(), if there are any. NULL: there never are. Never
     * fails. */
    void (*drop_reduce)(void *group);
    /* Frees an unsharded parameter's memory. Only where it moves FC_MOVE_FREE. Never fails. */
    void (*free_unsharded)(void *param);
    /* Reduces `count` gradients and hands them to their parameters. Takes each gradient, as early
     * as it can, and leaves NULL in its place (what is left on failure is the caller's). */
    int (*reduce)(void *group, fc_param *const *params, fct_tensor **grads, size_t count,
                  bool order_compute);
    /* The current stream waits for what reduce() has queued, if it ever has. NULL: it does not. */
    int (*finalize)(void *group);

    /* A debug line "FSDP::label (modules)" where they are wanted. NULL: never. Never fails. */
    void (*log)(void *group, const char *label);
} fc_host;

#endif
