/* Hashes of plans; see plans.h. */
#include "plans.h"

#include <assert.h>
#include <stdlib.h>

void op_plans_fini(op_plan_list *list) {
    assert(list->plans != NULL || list->count == 0);
    for (size_t i = 0; i < list->count; i++) {
        fct_exchange_release(list->plans[i].round);
    }
    free(list->plans);
    *list = (op_plan_list){0};
}

op_plan *op_plans_find(const op_plan_list *list, uint64_t hash) {
    for (size_t i = 0; i < list->count; i++) {
        if (list->plans[i].hash == hash) {
            return &list->plans[i];
        }
    }
    return NULL;
}

op_plan *op_plans_add(op_plan_list *list, uint64_t hash) {
    assert(op_plans_find(list, hash) == NULL);
    op_plan *plans = (op_plan *)realloc(list->plans, (list->count + 1) * sizeof *plans);
    if (plans == NULL) {
        return NULL;
    }
    list->plans = plans;
    list->plans[list->count] = (op_plan){.hash = hash};
    return &list->plans[list->count++];
}

bool op_is_plan(int64_t value) {
    return (uint64_t)value > FCT_PLAN_UNKNOWN;
}

fct_plan_result op_plans_compare(const int64_t *hashes, int64_t world, int64_t stride) {
    assert(world > 0 && stride > 0);
    for (int64_t rank = 1; rank < world; rank++) {
        const int64_t hash = hashes[rank * stride];
        if (op_is_plan(hash) && op_is_plan(hashes[0]) && hash != hashes[0]) {
            return (fct_plan_result){FCT_PLANS_DIFFER, rank, {(uint64_t)hashes[0], (uint64_t)hash}};
        }
    }
    return (fct_plan_result){.state = FCT_PLANS_EQUAL};
}
