/* Fixed parts of a group; see members.h. Owns the array of parameters, the resolved process groups
 * and the references to allocators. */
#include "members.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fc_members_init(fc_members *m, void *owner, const fc_host *host, fc_comm *comm,
                     fc_param **params, size_t count, fct_device device, int64_t world,
                     int64_t rank) {
    memset(m, 0, sizeof *m);
    m->owner = owner;
    m->host = host;
    m->comm = comm;
    m->params = params;
    m->count = count;
    m->device = device;
    fc_link_set(&m->shard, NULL, world, rank);
}

void fc_members_fini(fc_members *m) {
    fc_link_fini(&m->shard);
    fc_link_fini(&m->scatter);
    fc_link_fini(&m->replicate);
    fc_link_fini(&m->post_forward);
    fc_members_set_memory(m, NULL, NULL);
    free((void *)m->params);
    memset(m, 0, sizeof *m);
}

fc_span fc_members_all(const fc_members *m) {
    return (fc_span){0, m->count};
}

fc_link *fc_members_scatter_link(fc_members *m) {
    return m->scatter.name != NULL ? &m->scatter : &m->shard;
}

fc_status fc_members_open_reduction(fc_members *m) {
    fc_status status = FC_OK;
    if (m->scatter.name != NULL && m->scatter.world > 1) {
        FC_TRY(fc_link_open(&m->scatter));
    }
    if (m->replicate.name != NULL && m->replicate.world > 1) {
        FC_TRY(fc_link_open(&m->replicate));
    }
done:
    return status;
}

void fc_members_set_memory(fc_members *m, fct_pg *gather, fct_pg *reduce) {
    fct_pg *const before[2] = {m->gather_memory, m->reduce_memory};
    m->gather_memory = gather;
    m->reduce_memory = reduce;
    fct_pg_release(before[0]);
    fct_pg_release(before[1]);
}

fc_status fc_members_has_memory(const fc_members *m, fct_pg *memory, bool *has) {
    *has = false;
    return memory == NULL || fct_pg_allocates(memory, m->device, has) == 0 ? FC_OK : FC_ERAISED;
}

fc_status fc_members_buffer(const fc_members *m, fct_pg *memory, int64_t numel, fct_dtype dtype,
                            fct_tensor **out) {
    fc_status status = FC_OK;
    bool has = false;
    FC_TRY(fc_members_has_memory(m, memory, &has));
    FC_TRY_RAISED(has ? fct_pg_empty(memory, numel, dtype, m->device, out)
                      : fct_tensor_empty(numel, dtype, m->device, out));
done:
    return status;
}

bool fc_members_replicated(const fc_members *m) {
    return m->replicate.name != NULL;
}

bool fc_group_base_uses_fallback(const fc_members *m, fc_fallback movement) {
    return (m->fallbacks & (uint32_t)movement) != 0;
}

void *fc_members_enter_range(const fc_members *m, const char *label) {
    char name[256];
    if (!fct_profile_active()) {
        return NULL;
    }
    const char *fqn = m->name != NULL ? m->name : "";
    /* In torch this range has its brackets for the root, too. */
    if (fqn[0] != '\0' || strcmp(label, "post_backward_rs_wait") == 0) {
        (void)snprintf(name, sizeof name, "FSDP::%s (%s)", label, fqn);
    } else {
        (void)snprintf(name, sizeof name, "FSDP::%s", label);
    }
    return fct_profile_enter(name);
}

void *fc_members_enter_prefetch(const fc_members *m, const char *pass) {
    char name[256];
    if (!fct_profile_active()) {
        return NULL;
    }
    (void)snprintf(name, sizeof name, "FSDP::%s_prefetch for %s", pass,
                   m->name != NULL ? m->name : "None");
    return fct_profile_enter(name);
}

void fc_members_log(const fc_members *m, const char *label) {
    if (m->logs) {
        m->host->log(m->owner, label);
    }
}

/* Address and versions are hashed one after the other: a lower address must not cancel a higher
 * version. */
uint64_t fc_members_shard_version(const fc_members *m) {
    const uint64_t prime = UINT64_C(1099511628211);
    uint64_t hash = 0;
    for (size_t i = 0; i < m->count; i++) {
        const fct_tensor *data = m->params[i]->sharded_data;
        uint64_t versions = data != NULL ? fct_tensor_version(data) : 0;
        if (m->host->shard_version != NULL) {
            versions |= (uint64_t)m->host->shard_version(m->params[i]->owner) << 32;
        }
        hash = (hash * prime + (uint64_t)(uintptr_t)data) * prime + versions;
    }
    return hash;
}
