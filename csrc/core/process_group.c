/* Process groups and their collectives; see process_group.h. Owns the resolved handle of each
 * process group. Collectives run on the current stream. Error messages are formatted only after a
 * failure. */
#include "process_group.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "../bridge/error.h"
#include "recorder.h"

void fc_process_group_set(fc_process_group *pg, const char *name, int64_t world, int64_t rank) {
    fct_pg_release(pg->handle);
    *pg = (fc_process_group){.name = name, .world = world, .rank = rank};
}

void fc_process_group_fini(fc_process_group *pg) {
    fc_process_group_set(pg, NULL, 0, 0);
}

fc_status fc_process_group_open(fc_process_group *pg) {
    assert(pg->name != NULL || pg->handle != NULL);
    return pg->handle != NULL || fct_pg_resolve(pg->name, &pg->handle) == 0 ? FC_OK : FC_ERAISED;
}

/* Returns whether the process group is resolved, after an attempt. Preserves a pending exception.
 * An object of a user with the interface of a process group cannot be resolved. */
static bool is_resolvable(fc_process_group *pg) {
    void *pending_exception = fct_error_set_aside();
    const bool is_open = fc_process_group_open(pg) == FC_OK;
    fct_error_put_back(pending_exception);
    return is_open;
}

void fc_process_group_set_plan(fc_process_group *pg, uint64_t plan, uint64_t root) {
    assert(pg->world >= 0);
    pg->plan = plan;
    pg->root = root;
    pg->number = 0;
    pg->compared = false;
}

fc_status fc_process_group_register_users(const fc_process_group *pg, size_t more) {
    for (size_t i = 0; pg->name != NULL && i < more; i++) {
        if (fct_pg_register_user(pg->name) != 0) {
            return FC_ERAISED;
        }
    }
    return FC_OK;
}

enum { AGREEMENT = FC_ALL_REDUCE + 1 };

/* Writes step and pass of a record, or "" if the record is overwritten. */
static void describe_position(uint64_t record, char *text, size_t bytes) {
    fc_record facts;
    text[0] = '\0';
    if (fc_recorder_read(record, &facts)) {
        (void)snprintf(text, bytes, " (step %u, %s)", (unsigned)facts.step,
                       fct_pass_name(facts.pass));
    }
}

/* Writes the names of a group's modules. A long list is shortened to its first and last name, a
 * long name to its begin and end. */
static void describe_modules(const char *modules, char *text, size_t bytes) {
    enum { LONGEST = 80 };
    const size_t length = strlen(modules);
    if (length < bytes) {
        memcpy(text, modules, length + 1);
        return;
    }
    size_t count = 1;
    const char *last = modules;
    for (const char *next = modules; (next = strstr(next, ", ")) != NULL; count++) {
        next += 2;
        last = next;
    }
    char first[LONGEST + 1];
    const size_t first_length = count > 1 ? strcspn(modules, ",") : LONGEST;
    (void)snprintf(first, sizeof first, "%.*s", (int)first_length, modules);
    fc_text_trim_end(first);
    const size_t last_length = strlen(last);
    last = last_length > LONGEST ? fc_text_trim_start(last + last_length - LONGEST) : last;
    if (count > 1) {
        (void)snprintf(text, bytes, "%s, ... %s (%zu modules)", first, last, count);
    } else {
        (void)snprintf(text, bytes, "%s...%s", first, last);
    }
}

/* Prefixes the message of the pending exception with operation (an fc_operation, or AGREEMENT),
 * modules, step and pass of the record, and rank. Returns FC_ERAISED. */
static fc_status add_context(const fc_process_group *pg, const char *modules, int operation,
                             uint64_t record) {
    static const char *const names[] = {"all-gather", "reduce-scatter", "all-reduce",
                                        "comparison of collectives at the end of the backward"};
    char text[512], position[48], names_of_modules[256];
    bool has_modules = modules != NULL && modules[0] != '\0';
    describe_position(record, position, sizeof position);
    describe_modules(has_modules ? modules : "", names_of_modules, sizeof names_of_modules);
    (void)snprintf(
        text, sizeof text, "%s of %s%s%s%s failed on rank %lld of %lld of process group '%s'",
        names[operation], has_modules ? "parameter group '" : "the root's parameter group",
        names_of_modules, has_modules ? "'" : "", position, (long long)pg->rank,
        (long long)pg->world, pg->name != NULL ? pg->name : "?");
    fct_error_explain(text);
    return FC_ERAISED;
}

/* Sets unit and name of the label. The unit is a hash of the plan, the number of the root and the
 * name. Without a root there is no name. If the guard is off, the label stays unknown. */
static void name_label(const fc_process_group *pg, const char *modules, fct_op_label *label) {
    label->unit = pg->plan == FCT_PLAN_UNKNOWN ? FCT_LABEL_NO_ROOT : 0;
    label->name[0] = '\0';
    if (pg->plan <= FCT_PLAN_UNKNOWN) {
        return;
    }
    uint64_t hash = fct_hash_add(pg->plan, pg->number);
    const char *end = modules;
    for (; *end != '\0'; end++) {
        hash = fct_hash_add(hash, (uint8_t)*end);
    }
    label->unit = hash > FCT_LABEL_NO_ROOT ? hash : FCT_LABEL_NO_ROOT + 1;
    const size_t length = (size_t)(end - modules);
    const size_t kept = length < sizeof label->name ? length : sizeof label->name - 1;
    const char *begin = fc_text_trim_start(end - kept);
    memcpy(label->name, begin, (size_t)(end - begin) + 1);
}

/* Adds a record of an operation that this rank begins. */
static uint64_t add_record(const fc_process_group *pg, const char *modules, fc_record_kind kind) {
    const fc_record facts = {.step = pg->label.step,
                             .pass = pg->label.pass,
                             .kind = (uint8_t)kind,
                             .rank = (int32_t)pg->rank,
                             .world = (int32_t)pg->world};
    return fc_recorder_add(&facts, pg->name, modules);
}

/* A collective that is being issued. */
typedef struct issue {
    fct_op_tag tag;
    uint64_t record;
} issue;

static issue begin_issue(const fc_process_group *pg, const char *modules, fct_op_kind kind) {
    issue next = {
        .tag = {.kind = kind, .group = modules != NULL ? modules : "", .label = pg->label}};
    name_label(pg, next.tag.group, &next.tag.label);
    next.record = add_record(pg, modules, (fc_record_kind)kind);
    return next;
}

/* `result`: the result of the call that issued the collective, `work`: its work. */
static fc_status end_issue(const fc_process_group *pg, const issue *issued, int result,
                           const fct_work *work) {
    static const fc_operation operations[] = {FC_ALL_GATHER, FC_REDUCE_SCATTER, FC_ALL_REDUCE};
    if (result != 0) {
        fc_recorder_end(issued->record, FC_RECORD_FAILED);
        return add_context(pg, issued->tag.group, operations[issued->tag.kind], issued->record);
    }
    fc_recorder_issued(issued->record, work);
    return FC_OK;
}

bool fc_process_group_describe_checksum(fc_process_group *pg, const char *modules,
                                        fc_operation operation, fct_op_tag *tag) {
    assert(operation != FC_REDUCE_SCATTER);
    *tag = (fct_op_tag){
        .kind = operation == FC_ALL_GATHER ? FCT_OP_ALL_GATHER : FCT_OP_ALL_REDUCE,
        .group = modules != NULL ? modules : "",
        .label = pg->label,
    };
    if (pg->handle == NULL && !is_resolvable(pg)) {
        return false;
    }
    name_label(pg, tag->group, &tag->label);
    return true;
}

void fc_process_group_add_checksum(fc_process_group *pg, const char *modules,
                                   fc_operation operation, uint64_t checksum) {
    assert(operation != FC_REDUCE_SCATTER);
    fct_op_tag tag;
    if (fc_process_group_describe_checksum(pg, modules, operation, &tag)) {
        fct_add_checksum(pg->handle, &tag, checksum);
    }
}

fc_status fc_process_group_number_root(fc_process_group *pg, fct_device device) {
    assert(pg->world >= 0);
    fc_status status = FC_OK;
    if (pg->world > 1 && pg->root != 0 && pg->number == 0 && is_resolvable(pg)) {
        FC_TRY_RAISED(fct_number_root(pg->handle, device, pg->root, &pg->number));
    }
done:
    return status;
}

fc_status fc_process_group_compare_plan(fc_process_group *pg, const char *modules,
                                        fc_operation operation, fct_device device, bool waits,
                                        fct_plan_result *result) {
    assert(pg->name != NULL || pg->handle != NULL);
    fc_status status = FC_OK;
    *result = (fct_plan_result){.state = FCT_PLANS_EQUAL};
    if (pg->compared) {
        return FC_OK;
    }
    FC_TRY(fc_process_group_open(pg));
    FC_TRY(fc_process_group_number_root(pg, device));
    const uint64_t record = add_record(pg, modules, FC_RECORD_COMPARE);
    const bool failed = fct_compare_plan(pg->handle, device, pg->plan, waits, result) != 0;
    fc_recorder_end(record, failed ? FC_RECORD_FAILED : FC_RECORD_COMPLETE);
    if (failed) {
        return add_context(pg, modules, operation, record);
    }
    pg->compared = result->state == FCT_PLANS_EQUAL;
done:
    return status;
}

fc_status fc_process_group_start_agreement(fc_process_group *pg, const char *modules) {
    assert(pg->world >= 0);
    pg->agreeing = false; /* still true if the previous agreement was never awaited */
    if (pg->handle == NULL || pg->world < 2) {
        return FC_OK;
    }
    /* The record shows a wait for other ranks to the stall monitor. */
    const bool waits = fct_agree_start_waits(pg->handle);
    const uint64_t record = waits ? add_record(pg, modules, FC_RECORD_AGREE) : 0;
    const bool failed = fct_agree_start(pg->handle, &pg->agreeing) != 0;
    if (waits) {
        fc_recorder_end(record, failed ? FC_RECORD_FAILED : FC_RECORD_COMPLETE);
    }
    return failed ? add_context(pg, modules, AGREEMENT, record) : FC_OK;
}

fc_status fc_process_group_await_agreement(fc_process_group *pg, const char *modules,
                                           fc_error *error) {
    assert(!pg->agreeing || pg->handle != NULL);
    fct_difference difference;
    if (!pg->agreeing) {
        return FC_OK;
    }
    pg->agreeing = false;
    const uint64_t record = add_record(pg, modules, FC_RECORD_AGREE);
    const bool failed = fct_agree_await(pg->handle, &difference) != 0;
    fc_recorder_end(record, failed ? FC_RECORD_FAILED : FC_RECORD_COMPLETE);
    if (failed) {
        return add_context(pg, modules, AGREEMENT, record);
    }
    return difference.text[0] == '\0'
               ? FC_OK
               : fc_error_set(error, FC_ESTATE,
                              "%s (process group '%s'). The gradients are wrong: call "
                              "reset_iter_state() and zero_grad()",
                              difference.text, pg->name != NULL ? pg->name : "?");
}

fc_status fc_process_group_all_gather(fc_process_group *pg, const char *modules, fct_tensor *output,
                                      fct_tensor *input, bool async_op, fct_work **work) {
    assert(*work == NULL);
    fc_status status = FC_OK;
    FC_TRY(fc_process_group_open(pg));
    const issue next = begin_issue(pg, modules, FCT_OP_ALL_GATHER);
    const int result = fct_all_gather(pg->handle, &next.tag, output, input, async_op, work);
    status = end_issue(pg, &next, result, *work);
done:
    return status;
}

fc_status fc_process_group_reduce_scatter(fc_process_group *pg, const char *modules,
                                          fct_tensor *output, fct_tensor *input, fct_reduce_op op,
                                          double factor, bool async_op, fct_work **work) {
    assert(*work == NULL);
    fc_status status = FC_OK;
    FC_TRY(fc_process_group_open(pg));
    const issue next = begin_issue(pg, modules, FCT_OP_REDUCE_SCATTER);
    const int result =
        fct_reduce_scatter(pg->handle, &next.tag, output, input, op, factor, async_op, work);
    status = end_issue(pg, &next, result, *work);
done:
    return status;
}

fc_status fc_process_group_all_reduce(fc_process_group *pg, const char *modules, fct_tensor *tensor,
                                      fct_reduce_op op, bool async_op, fct_work **work) {
    assert(*work == NULL);
    fc_status status = FC_OK;
    FC_TRY(fc_process_group_open(pg));
    const issue next = begin_issue(pg, modules, FCT_OP_ALL_REDUCE);
    const int result = fct_all_reduce(pg->handle, &next.tag, tensor, op, 1.0, async_op, work);
    status = end_issue(pg, &next, result, *work);
done:
    return status;
}

bool fc_process_group_is_cpu_bound(fc_process_group *pg, int64_t rank_bytes) {
    assert(rank_bytes >= 0);
    return is_resolvable(pg) && fct_gather_is_cpu_bound(pg->handle, rank_bytes);
}

fc_status fc_process_group_takes_chunks(fc_process_group *pg, fct_device device,
                                        fc_operation operation, bool *takes) {
    assert(operation == FC_ALL_GATHER || operation == FC_REDUCE_SCATTER);
    fc_status status = FC_OK;
    FC_TRY(fc_process_group_open(pg));
    FC_TRY_RAISED(fct_pg_takes_chunks(pg->handle, device, operation == FC_ALL_GATHER, takes));
done:
    return status;
}

fc_status fc_process_group_gather_chunks(fc_process_group *pg, const char *modules,
                                         fct_tensor *const *chunks, size_t count,
                                         const fct_chunk_layout *layout, fct_work **work) {
    assert(pg->handle != NULL && count > 0 && *work == NULL);
    const issue next = begin_issue(pg, modules, FCT_OP_ALL_GATHER);
    const int result = fct_gather_chunks(pg->handle, &next.tag, chunks, count, layout, work);
    return end_issue(pg, &next, result, *work);
}

fc_status fc_process_group_reduce_chunks(fc_process_group *pg, const char *modules,
                                         fct_tensor *output, fct_tensor *const *chunks,
                                         size_t count, const fct_chunk_layout *layout,
                                         fct_reduce_op op, fct_work **work) {
    assert(pg->handle != NULL && count > 0 && *work == NULL);
    const issue next = begin_issue(pg, modules, FCT_OP_REDUCE_SCATTER);
    const int result =
        fct_reduce_chunks(pg->handle, &next.tag, output, chunks, count, layout, op, work);
    return end_issue(pg, &next, result, *work);
}

fc_status fc_process_group_complete(const fc_process_group *pg, const char *modules,
                                    fc_operation operation, fct_work *work) {
    if (work == NULL) {
        return FC_OK;
    }
    const uint64_t record = fc_recorder_wait(work);
    const bool failed = fct_work_wait(work) != 0;
    fc_recorder_end(record, failed ? FC_RECORD_FAILED : FC_RECORD_COMPLETE);
    return failed ? add_context(pg, modules, operation, record) : FC_OK;
}

fc_status fc_process_group_wait(const fc_process_group *pg, const char *modules,
                                fc_operation operation, fct_work **work) {
    fc_status status = FC_OK;
    FC_TRY(fc_process_group_complete(pg, modules, operation, *work));
    fct_work_release(*work);
    *work = NULL;
done:
    return status;
}
