/* Fixed parts of a parameter group: its parameters, process groups, comm context and allocators.
 * Within a step only `fallbacks`, `logs` and the state of the process groups change. The modules
 * above (gather, reducer, buckets, group) own the state that changes per transition and borrow this
 * struct.
 *
 * Preconditions: fc_group_base_init, except for fini, which accepts a zeroed struct. `params` is
 * not NULL unless `count` is 0. */
#ifndef FSDP_C_CORE_GROUP_BASE_H
#define FSDP_C_CORE_GROUP_BASE_H

#include "../bridge/allocator.h"
#include "callbacks.h"
#include "comm_ctx.h"
#include "param.h"
#include "process_group.h"

/* A range of adjacent parameters of a group: [first, end). */
typedef struct fc_span {
    size_t first;
    size_t end;
} fc_span;

typedef struct fc_group_base {
    /* the Python object ParamGroup (fcd_unit in a dry run); borrowed */
    void *owner;
    const fc_callbacks *callbacks; /* borrowed */
    const char *name;              /* FQNs of the modules, for messages; borrowed, may be NULL */
    fc_comm_ctx *comm;             /* borrowed; kept alive by `owner`; NULL before initialization */
    fc_param **params;             /* [count] owned array of borrowed parameters */
    size_t count;
    /* Whether a parameter defers its cast (fc_param.defers_cast). Computed from the parameters by
     * fc_group_base_refresh; fc_group_base_check compares. */
    bool defers_casts;
    fct_device device;
    fct_dtype reduce_dtype;     /* dtype of reductions; FCT_NO_DTYPE: widest of the gradients */
    fc_process_group shard;     /* all-gather and reduce-scatter; world 1: neither is issued */
    fc_process_group scatter;   /* reduce-scatter, if it has a process group of its own */
    fc_process_group replicate; /* all-reduce after the reduce-scatter (HSDP, replicate) */
    /* All-gather in backward over the smaller group, to which forward reshards if
     * reshard_after_forward is a number of ranks. */
    fc_process_group post_forward;
    /* Allocators of the buffers of gathers and reduce-scatters. Owned. NULL: torch's default
     * allocator. */
    fct_allocator *gather_memory;
    fct_allocator *reduce_memory;
    /* The caller of a transition sets `fallbacks` and `logs` before the call. The core only reads
     * these fields. */
    uint32_t fallbacks; /* FC_FALLBACK_*: operations that Python performs; 0: none */
    bool logs;          /* the debug log level is enabled */
} fc_group_base;

/* Takes the array of `count` borrowed parameters, which fini frees. Borrows everything else. */
void fc_group_base_init(fc_group_base *base, void *owner, const fc_callbacks *callbacks,
                        fc_comm_ctx *comm, fc_param **params, size_t count, fct_device device,
                        int64_t world, int64_t rank);
void fc_group_base_fini(fc_group_base *base);
/* Adds the checksum of data that the ranks of `pg` share after a collective. 0: unknown, never a
 * mismatch. Precondition on devices with streams: 0. No effect unless `checksums` of the comm
 * context is set. */
void fc_group_base_add_checksum(const fc_group_base *base, fc_process_group *pg,
                                fc_operation operation, uint64_t checksum);
/* The same for a sum in the memory of a device with streams. Precondition: `checksums` of the comm
 * context is set, and `pg` has several ranks. */
void fc_group_base_add_device_sum(const fc_group_base *base, fc_process_group *pg,
                                  fc_operation operation, const fc_device_sum *sum);
/* Drops the checksums since the last agreement; on devices with streams they become unknown. Call
 * it when all ranks reset the model. */
void fc_group_base_drop_checksums(const fc_group_base *base);
/* Computes the fields that depend on settings of the parameters. Call it after a change of them. */
void fc_group_base_refresh(fc_group_base *base);
/* Returns FC_ESTATE with a message if refresh would change a field. */
FC_CHECK fc_status fc_group_base_check(const fc_group_base *base);

/* Returns the span of all parameters. */
fc_span fc_group_base_all(const fc_group_base *base);
/* Adopts shards that users have replaced. Call it before each unshard. Fails if a replacement does
 * not fit its parameter. */
FC_CHECK fc_status fc_group_base_adopt_replaced_shards(const fc_group_base *base);
/* Returns the process group that issues reduce-scatters. Borrowed. */
fc_process_group *fc_group_base_scatter_group(fc_group_base *base);
/* Opens the process groups that only a reduction uses, in forward's thread. If ranks are threads of
 * one process, process groups cannot be resolved in backward's thread. */
FC_CHECK fc_status fc_group_base_open_reduction(fc_group_base *base);
/* Compares the plan of the process group `pg` with the other ranks, unless that was done. Fails if
 * a rank has another plan. `waits`: the caller waits for its next collective at once. */
FC_CHECK fc_status fc_group_base_compare_plan(fc_group_base *base, fc_process_group *pg,
                                              bool waits);
/* Start and await the agreements on the collectives of all process groups of the group; see
 * fc_process_group_start_agreement. No effect on devices with streams. `error` receives the first
 * difference; NULL is allowed. */
FC_CHECK fc_status fc_group_base_start_agreement(fc_group_base *base);
FC_CHECK fc_status fc_group_base_await_agreement(fc_group_base *base, fc_error *error);
/* Takes both allocators, which may be NULL. */
void fc_group_base_set_memory(fc_group_base *base, fct_allocator *gather, fct_allocator *reduce);
/* Writes to *has whether `memory` (gather_memory or reduce_memory) serves the group's device. The
 * allocator is queried at each call, as in torch. */
FC_CHECK fc_status fc_group_base_has_memory(const fc_group_base *base, fct_allocator *memory,
                                            bool *has);
/* Allocates a 1-D tensor of uninitialized elements on the current stream, from `memory` if it
 * serves the device, else from torch's allocator. `pg` is the process group whose collective uses
 * the tensor; a group of one rank has none. *out is a new reference. */
FC_CHECK fc_status fc_group_base_buffer(const fc_group_base *base, fct_allocator *memory,
                                        fc_process_group *pg, int64_t numel, fct_dtype dtype,
                                        fct_tensor **out);
/* Returns true if gradients are all-reduced over replicas. */
bool fc_group_base_is_replicated(const fc_group_base *base);
/* Returns true if Python performs the operation. */
bool fc_group_base_uses_fallback(const fc_group_base *base, fc_fallback operation);

/* Opens a profiler range with torch's name, "FSDP::label (modules)". Returns NULL if no profiler is
 * active. */
void *fc_group_base_enter_range(const fc_group_base *base, const char *label);
/* Opens the profiler range of a prefetch, with torch's name. `pass` is "forward" or "backward". */
void *fc_group_base_enter_prefetch(const fc_group_base *base, const char *pass);
/* Logs the debug line "FSDP::label (modules)", if `logs` is set. */
void fc_group_base_log(const fc_group_base *base, const char *label);

/* Returns a number that changes whenever the shard is written. Combines the version of sharded_data
 * (local tensor, optimizers) with the callbacks' count of writes to the parameter object. */
uint64_t fc_group_base_version_of(const fc_group_base *base, const fc_param *p);
/* Returns a number that changes whenever a shard of the group is written, replaced or moved. */
uint64_t fc_group_base_shard_version(const fc_group_base *base);

#endif
