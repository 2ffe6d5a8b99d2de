/* What the core asks of the layer above it (csrc/python; a fake in tests/c): the few things that
 * need Python objects. `param` is fc_param.owner, `group` is fc_group.owner. int results: 0, or -1
 * with the error set. */
#ifndef FSDP_C_CORE_HOST_H
#define FSDP_C_CORE_HOST_H

#include <stdbool.h>

#include "../torch/torch_abi.h"

typedef struct fc_host {
    /* Makes the parameter that modules see while unsharded, over `flat` (1-D, world * padded
     * elements, its storage allocated). Called once per parameter, and again where the flat tensor
     * had to be replaced. *unsharded is borrowed from the host, which keeps it alive until it makes
     * the next one or the parameter dies. */
    int (*make_unsharded)(void *param, fct_tensor *flat, fct_tensor **unsharded);
    /* Registers the unsharded (true) or sharded (false) parameter on every module that holds it.
     * Fails only where a module overrides __setattr__; a swap to what is registered already never
     * fails. */
    int (*swap)(void *param, bool unsharded);
    /* Whether the sharded parameter requires grad now. (Users may swap the tensor behind the
     * parameter object, so the core keeps no handle of it.) */
    bool (*requires_grad)(void *param);
    /* A number that grows with every write to the sharded parameter that its own version counter
     * sees; the counter of sharded_data sees the rest. NULL: there is only the latter. Never fails.
     */
    uint32_t (*shard_version)(void *param);
    /* Gives the sharded parameter its reduced gradient: sets .grad or adds to it, then runs
     * post-accumulate-grad hooks. Borrows `local` (this rank's shard of the gradient). */
    int (*take_grad)(void *param, fct_tensor *local);
    /* True where somebody must see the gradient as soon as it is reduced (post-accumulate-grad
     * hooks). */
    bool (*wants_grad_now)(void *param);
} fc_host;

#endif
