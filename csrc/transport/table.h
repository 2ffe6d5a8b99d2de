/* The table of functions of a transport. */
#ifndef FSDP_C_TRANSPORT_TABLE_H
#define FSDP_C_TRANSPORT_TABLE_H

#include "../bridge/collective.h"
#include "negotiation.h"
#include "op_tag.h"

/* A transport. All ranks of a process group use the same transport. */
typedef struct fct_transport {
    /* Writes to *accepted whether all ranks use this transport for the next collective of the
     * group. Returns -1 with a Python exception. NULL: the table of the group's own backend. */
    int (*negotiate)(fct_pg *pg, fct_device device, fct_use use, bool *accepted);
    /* Whether the group uses this transport, and an all-gather of rank shards of `shard_bytes`
     * bytes takes CPU time from computation. Not NULL if `negotiate` is not NULL. */
    bool (*is_cpu_bound)(fct_pg *pg, size_t shard_bytes);
    bool has_chunks; /* all_gather_chunks and reduce_scatter_chunks are not NULL */
    int (*all_gather)(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                      bool async_op, fct_work **work);
    int (*reduce_scatter)(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                          fct_reduce_op op, double factor, bool async_op, fct_work **work);
    int (*all_reduce)(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor, fct_reduce_op op,
                      double factor, bool async_op, fct_work **work);
    int (*all_gather_chunks)(fct_pg *pg, const fct_op_tag *tag, fct_tensor *const *chunks,
                             size_t count, const fct_chunk_layout *layout, fct_work **work);
    int (*reduce_scatter_chunks)(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                                 fct_tensor *const *chunks, size_t count,
                                 const fct_chunk_layout *layout, fct_reduce_op op, fct_work **work);
} fct_transport;

#endif
