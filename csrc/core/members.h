/* Who is in a parameter group, whom it talks to, and whose memory that takes. Fixed within a step:
 * what changes from one transition to the next is in the rooms above (gather, reducer, buckets,
 * group), which borrow this. */
#ifndef FSDP_C_CORE_MEMBERS_H
#define FSDP_C_CORE_MEMBERS_H

#include "comm.h"
#include "host.h"
#include "link.h"
#include "param.h"

/* Neighbours among a group's parameters: [first, end). */
typedef struct fc_span {
    size_t first;
    size_t end;
} fc_span;

typedef struct fc_members {
    void *owner;         /* the host's object for the group; borrowed */
    const fc_host *host; /* borrowed */
    const char *name;    /* FQN of the modules, for messages and ranges; borrowed, may be NULL */
    fc_comm *comm;       /* borrowed: the host keeps it alive; NULL: made and never initialised */
    fc_param **params;   /* [count] owned array of borrowed parameters */
    size_t count;
    fct_device device;
    fc_link shard;        /* gathers and reduce-scatters; world 1: neither */
    fc_link scatter;      /* reduce-scatters where they have a group of their own */
    fc_link replicate;    /* all-reduces after the reduce-scatter (HSDP, replicate) */
    fc_link post_forward; /* gathers in backward, where forward reshards to a smaller group */
    /* Whose allocator the buffers of gathers and of reduce-scatters are from, where it has one;
     * counted. NULL: torch's. */
    fct_pg *gather_memory;
    fct_pg *reduce_memory;
} fc_members;

/* Takes the array of `count` borrowed parameters (freed by fini). */
void fc_members_init(fc_members *m, void *owner, const fc_host *host, fc_comm *comm,
                     fc_param **params, size_t count, fct_device device, int64_t world,
                     int64_t rank);
void fc_members_fini(fc_members *m);

fc_span fc_members_all(const fc_members *m);
/* The link that reduce-scatters. */
fc_link *fc_members_scatter_link(fc_members *m);
/* Opens the links that only a reduction uses. Backward may run in another thread than forward,
 * where ranks that are threads of one process cannot look their groups up. */
FC_CHECK fc_status fc_members_open_reduction(fc_members *m);
/* Takes both, which may be NULL. */
void fc_members_set_memory(fc_members *m, fct_pg *gather, fct_pg *reduce);
/* Whether a group, one of the two above, has memory to give. Asked each time, as torch asks. */
FC_CHECK fc_status fc_members_has_memory(const fc_members *m, fct_pg *memory, bool *has);
/* New 1-D tensor of uninitialised elements on the current stream: the group's memory where it has
 * any, else torch's. */
FC_CHECK fc_status fc_members_buffer(const fc_members *m, fct_pg *memory, int64_t numel,
                                     fct_dtype dtype, fct_tensor **out);
/* Whether gradients are all-reduced over replicas. */
bool fc_members_replicated(const fc_members *m);
/* Whether the host moves the data, see fc_host.moves. */
bool fc_members_host_moves(const fc_members *m, fc_move move);

/* A profiler range with stock's name, "FSDP::label (modules)"; NULL where nobody records. */
void *fc_members_enter_range(const fc_members *m, const char *label);
/* The same for a prefetch, as stock names it; `pass`: "forward" or "backward". */
void *fc_members_enter_prefetch(const fc_members *m, const char *pass);
/* A debug line with the same text, where somebody wants those. */
void fc_members_log(const fc_members *m, const char *label);

/* A number that changes whenever a shard is written, replaced or moved: through its local tensor
 * and by optimizers (the version of sharded_data), or by operations on the parameter as a whole
 * (the host's count). */
uint64_t fc_members_shard_version(const fc_members *m);

#endif
