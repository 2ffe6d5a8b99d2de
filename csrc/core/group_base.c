/* Fixed parts of a group; see group_base.h. Owns the array of parameters, the resolved process
 * groups and the references to allocators. */
#include "group_base.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fc_group_base_init(fc_group_base *base, void *owner, const fc_callbacks *callbacks,
                        fc_comm_ctx *comm, fc_param **params, size_t count, fct_device device,
                        int64_t world, int64_t rank) {
    assert(callbacks != NULL && (count == 0 || params != NULL));
    memset(base, 0, sizeof *base);
    base->owner = owner;
    base->callbacks = callbacks;
    base->comm = comm;
    base->params = params;
    base->count = count;
    base->device = device;
    base->reduce_dtype = FCT_NO_DTYPE;
    fc_process_group_set(&base->shard, NULL, world, rank);
    fc_group_base_refresh(base);
}

static bool any_defers_cast(const fc_group_base *base) {
    for (size_t i = 0; i < base->count; i++) {
        if (base->params[i]->defers_cast) {
            return true;
        }
    }
    return false;
}

void fc_group_base_refresh(fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    base->defers_casts = any_defers_cast(base);
}

fc_status fc_group_base_check(const fc_group_base *base) {
    return base->defers_casts == any_defers_cast(base)
               ? FC_OK
               : fc_error_set(&base->comm->error, FC_ESTATE,
                              "a parameter has changed whether it defers its cast, and the group "
                              "was not invalidated");
}

void fc_group_base_fini(fc_group_base *base) {
    assert(base->count == 0 || base->params != NULL);
    fc_process_group_fini(&base->shard);
    fc_process_group_fini(&base->scatter);
    fc_process_group_fini(&base->replicate);
    fc_process_group_fini(&base->post_forward);
    fc_group_base_set_memory(base, NULL, NULL);
    free((void *)base->params);
    memset(base, 0, sizeof *base);
}

fc_span fc_group_base_all(const fc_group_base *base) {
    return (fc_span){0, base->count};
}

fc_status fc_group_base_adopt_replaced_shards(const fc_group_base *base) {
    assert(base->comm != NULL);
    for (size_t i = 0; base->callbacks->refresh_shard != NULL && i < base->count; i++) {
        if (base->callbacks->refresh_shard(base->params[i]->owner) != 0) {
            return FC_ERAISED;
        }
    }
    return FC_OK;
}

fc_process_group *fc_group_base_scatter_group(fc_group_base *base) {
    assert(base->scatter.name == NULL || base->scatter.world == base->shard.world);
    return base->scatter.name != NULL ? &base->scatter : &base->shard;
}

fc_status fc_group_base_open_reduction(fc_group_base *base) {
    assert(base->callbacks != NULL);
    fc_status status = FC_OK;
    if (base->scatter.name != NULL && base->scatter.world > 1) {
        FC_TRY(fc_process_group_open(&base->scatter));
    }
    if (base->replicate.name != NULL && base->replicate.world > 1) {
        FC_TRY(fc_process_group_open(&base->replicate));
    }
done:
    return status;
}

fc_status fc_group_base_compare_plan(fc_group_base *base, fc_process_group *pg, bool waits) {
    assert(base->comm != NULL);
    fc_status status = FC_OK;
    fct_plan_result result;
    const fc_operation next = pg == &base->replicate ? FC_ALL_REDUCE : FC_ALL_GATHER;
    FC_TRY(fc_process_group_compare_plan(pg, base->name, next, base->device, waits, &result));
    if (result.state != FCT_PLANS_DIFFER) {
        return FC_OK;
    }
    if (base->callbacks->raise_plan_difference == NULL) {
        return fc_error_set(&base->comm->error, FC_ESTATE,
                            "the model of rank %lld differs from that of rank 0",
                            (long long)result.rank);
    }
    FC_TRY_RAISED(base->callbacks->raise_plan_difference(base->owner, pg->name, &result));
done:
    return status;
}

void fc_group_base_add_checksum(const fc_group_base *base, fc_process_group *pg,
                                fc_operation operation, uint64_t checksum) {
    assert(pg != NULL);
    if (base->comm == NULL || !base->comm->checksums || pg->world == 1) {
        return;
    }
    if (base->comm->has_streams) {
        assert(checksum == 0);
        fc_group_base_add_device_sum(base, pg, operation, &(fc_device_sum){.at = NULL});
    } else {
        fc_process_group_add_checksum(pg, base->name, operation, checksum);
    }
}

void fc_group_base_add_device_sum(const fc_group_base *base, fc_process_group *pg,
                                  fc_operation operation, const fc_device_sum *sum) {
    assert(base->comm->has_streams);
    fc_device_checksums_complete(&base->comm->device_checksums, base->device, sum, pg, base->name,
                                 operation);
}

void fc_group_base_drop_checksums(const fc_group_base *base) {
    const fc_process_group *const used[] = {&base->shard, &base->replicate, &base->post_forward};
    fc_device_checksums_drop(base->comm->device_checksums);
    const bool on_host = base->comm->checksums && !base->comm->has_streams;
    for (size_t i = 0; on_host && i < sizeof used / sizeof used[0]; i++) {
        if (used[i]->handle != NULL) {
            fct_drop_checksums(used[i]->handle);
        }
    }
}

fc_status fc_group_base_start_agreement(fc_group_base *base) {
    assert(base->comm != NULL);
    fc_process_group *const used[] = {&base->shard, &base->scatter, &base->replicate,
                                      &base->post_forward};
    fc_status status = FC_OK;
    for (size_t i = 0; !base->comm->has_streams && i < sizeof used / sizeof used[0]; i++) {
        FC_TRY(fc_process_group_start_agreement(used[i], base->name));
    }
done:
    return status;
}

/* After a difference the loop continues: the ranks of each process group find their first
 * difference together. */
fc_status fc_group_base_await_agreement(fc_group_base *base, fc_error *error) {
    assert(base->comm != NULL);
    fc_process_group *const used[] = {&base->shard, &base->scatter, &base->replicate,
                                      &base->post_forward};
    fc_status first = FC_OK;
    for (size_t i = 0; i < sizeof used / sizeof used[0]; i++) {
        const fc_status status =
            fc_process_group_await_agreement(used[i], base->name, first == FC_OK ? error : NULL);
        if (status == FC_ERAISED) {
            return status;
        }
        first = first == FC_OK ? status : first;
    }
    return first;
}

void fc_group_base_set_memory(fc_group_base *base, fct_allocator *gather, fct_allocator *reduce) {
    assert(base->callbacks != NULL || (gather == NULL && reduce == NULL));
    fct_allocator *const previous[2] = {base->gather_memory, base->reduce_memory};
    base->gather_memory = gather;
    base->reduce_memory = reduce;
    fct_allocator_free(previous[0]);
    fct_allocator_free(previous[1]);
}

fc_status fc_group_base_has_memory(const fc_group_base *base, fct_allocator *memory, bool *has) {
    *has = false;
    return memory == NULL || fct_allocator_serves(memory, base->device, has) == 0 ? FC_OK
                                                                                  : FC_ERAISED;
}

fc_status fc_group_base_buffer(const fc_group_base *base, fct_allocator *memory,
                               fc_process_group *pg, int64_t numel, fct_dtype dtype,
                               fct_tensor **out) {
    fc_status status = FC_OK;
    bool has = false;
    FC_TRY(fc_group_base_has_memory(base, memory, &has));
    const bool issues = pg->world > 1; /* a collective uses the buffer */
    FC_TRY(has && issues ? fc_process_group_open(pg) : FC_OK);
    FC_TRY_RAISED(has ? fct_allocator_empty(memory, issues ? pg->handle : NULL, numel, dtype,
                                            base->device, out)
                      : fct_tensor_empty(numel, dtype, base->device, out));
done:
    return status;
}

bool fc_group_base_is_replicated(const fc_group_base *base) {
    return base->replicate.name != NULL;
}

bool fc_group_base_uses_fallback(const fc_group_base *base, fc_fallback operation) {
    return (base->fallbacks & (uint32_t)operation) != 0;
}

static void *enter_range(const char *format, ...) FC_PRINTF(1, 2);

/* Enters a profiler range. A long name is cut only if malloc fails. */
static void *enter_range(const char *format, ...) {
    char name[256];
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    const int length = vsnprintf(name, sizeof name, format, args);
    char *whole = length >= (int)sizeof name ? (char *)malloc((size_t)length + 1) : NULL;
    if (whole != NULL) {
        (void)vsnprintf(whole, (size_t)length + 1, format, again);
    } else {
        fc_text_trim_end(name);
    }
    va_end(again);
    va_end(args);
    void *range = fct_profile_enter(whole != NULL ? whole : name);
    free(whole);
    return range;
}

void *fc_group_base_enter_range(const fc_group_base *base, const char *label) {
    if (!fct_profile_active()) {
        return NULL;
    }
    const char *fqn = base->name != NULL ? base->name : "";
    /* torch appends the parentheses of this range for the root, too. */
    if (fqn[0] != '\0' || strcmp(label, "post_backward_rs_wait") == 0) {
        return enter_range("FSDP::%s (%s)", label, fqn);
    }
    return enter_range("FSDP::%s", label);
}

void *fc_group_base_enter_prefetch(const fc_group_base *base, const char *pass) {
    if (!fct_profile_active()) {
        return NULL;
    }
    return enter_range("FSDP::%s_prefetch for %s", pass, base->name != NULL ? base->name : "None");
}

void fc_group_base_log(const fc_group_base *base, const char *label) {
    if (base->logs) {
        base->callbacks->log(base->owner, label);
    }
}

uint64_t fc_group_base_version_of(const fc_group_base *base, const fc_param *p) {
    assert(base->callbacks != NULL);
    uint64_t version = p->sharded_data != NULL ? fct_tensor_version(p->sharded_data) : 0;
    if (base->callbacks->shard_version != NULL) {
        version |= (uint64_t)base->callbacks->shard_version(p->owner) << 32;
    }
    return version;
}

/* Hashes address and versions in separate steps, so that a lower address cannot cancel a higher
 * version. */
uint64_t fc_group_base_shard_version(const fc_group_base *base) {
    const uint64_t prime = UINT64_C(1099511628211);
    uint64_t hash = 0;
    for (size_t i = 0; i < base->count; i++) {
        const fc_param *p = base->params[i];
        const uint64_t data = (uint64_t)(uintptr_t)p->sharded_data;
        hash = (hash * prime + data) * prime + fc_group_base_version_of(base, p);
    }
    return hash;
}
