/* Process groups and their collectives; see link.h. Owns the resolved process group of each link.
 * Collectives run on the current stream. Error messages are formatted only after a failure. */
#include "link.h"

#include <stdio.h>

#include "../bridge/error.h"

void fc_link_set(fc_link *link, const char *name, int64_t world, int64_t rank) {
    fct_pg_release(link->pg);
    *link = (fc_link){.name = name, .world = world, .rank = rank};
}

void fc_link_fini(fc_link *link) {
    fc_link_set(link, NULL, 0, 0);
}

fc_status fc_link_open(fc_link *link) {
    return link->pg != NULL || fct_pg_resolve(link->name, &link->pg) == 0 ? FC_OK : FC_ERAISED;
}

fc_status fc_link_announce(const fc_link *link, size_t more) {
    for (size_t i = 0; link->name != NULL && i < more; i++) {
        if (fct_pg_announce_user(link->name) != 0) {
            return FC_ERAISED;
        }
    }
    return FC_OK;
}

/* Prefixes the message of the pending exception with operation, modules and rank. */
static fc_status add_context(const fc_link *link, const char *whose, fc_operation operation) {
    static const char *const names[] = {"all-gather", "reduce-scatter", "all-reduce"};
    char text[512];
    bool named = whose != NULL && whose[0] != '\0';
    (void)snprintf(text, sizeof text,
                   "%s of %s%s%s failed on rank %lld of %lld of process group '%s'",
                   names[operation], named ? "parameter group '" : "the root's parameter group",
                   named ? whose : "", named ? "'" : "", (long long)link->rank,
                   (long long)link->world, link->name != NULL ? link->name : "?");
    fct_error_explain(text);
    return FC_ERAISED;
}

fc_status fc_link_all_gather(fc_link *link, const char *whose, fct_tensor *output,
                             fct_tensor *input, bool async_op, fct_work **work) {
    fc_status status = FC_OK;
    FC_TRY(fc_link_open(link));
    if (fct_all_gather(link->pg, output, input, async_op, work) != 0) {
        return add_context(link, whose, FC_ALL_GATHER);
    }
done:
    return status;
}

fc_status fc_link_reduce_scatter(fc_link *link, const char *whose, fct_tensor *output,
                                 fct_tensor *input, fct_reduce_op op, double factor, bool async_op,
                                 fct_work **work) {
    fc_status status = FC_OK;
    FC_TRY(fc_link_open(link));
    if (fct_reduce_scatter(link->pg, output, input, op, factor, async_op, work) != 0) {
        return add_context(link, whose, FC_REDUCE_SCATTER);
    }
done:
    return status;
}

fc_status fc_link_all_reduce(fc_link *link, const char *whose, fct_tensor *tensor, fct_reduce_op op,
                             bool async_op, fct_work **work) {
    fc_status status = FC_OK;
    FC_TRY(fc_link_open(link));
    if (fct_all_reduce(link->pg, tensor, op, 1.0, async_op, work) != 0) {
        return add_context(link, whose, FC_ALL_REDUCE);
    }
done:
    return status;
}

bool fc_link_is_copied(fc_link *link, int64_t row_bytes) {
    void *before = fct_error_set_aside();
    const bool open = fc_link_open(link) == FC_OK;
    fct_error_put_back(before);
    return open && fct_gather_is_copied(link->pg, row_bytes);
}

fc_status fc_link_takes_chunks(fc_link *link, fct_device device, fc_operation operation,
                               bool *takes) {
    fc_status status = FC_OK;
    FC_TRY(fc_link_open(link));
    FC_TRY_RAISED(fct_pg_takes_chunks(link->pg, device, operation == FC_ALL_GATHER, takes));
done:
    return status;
}

fc_status fc_link_gather_chunks(fc_link *link, const char *whose, fct_tensor *const *chunks,
                                size_t count, const fct_chunk_layout *layout, fct_work **work) {
    return fct_gather_chunks(link->pg, chunks, count, layout, work) == 0
               ? FC_OK
               : add_context(link, whose, FC_ALL_GATHER);
}

fc_status fc_link_reduce_chunks(fc_link *link, const char *whose, fct_tensor *output,
                                fct_tensor *const *chunks, size_t count,
                                const fct_chunk_layout *layout, fct_reduce_op op, fct_work **work) {
    return fct_reduce_chunks(link->pg, output, chunks, count, layout, op, work) == 0
               ? FC_OK
               : add_context(link, whose, FC_REDUCE_SCATTER);
}

fc_status fc_link_wait(const fc_link *link, const char *whose, fc_operation operation,
                       fct_work **work) {
    if (*work == NULL) {
        return FC_OK;
    }
    if (fct_work_wait(*work) != 0) {
        return add_context(link, whose, operation);
    }
    fct_work_release(*work);
    *work = NULL;
    return FC_OK;
}
