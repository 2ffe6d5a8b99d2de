/* Hashes of plans, and the results of their comparison between ranks.
 *
 * A plan describes the modules and settings of a root (fsdp_c/_runtime/plan_hash.py). The lists
 * belong to the negotiation of the process group, and the GIL guards them. */
#ifndef FSDP_C_TRANSPORT_PLANS_H
#define FSDP_C_TRANSPORT_PLANS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../bridge/group.h"

/* These values take the place of the hash of a plan. */
enum {
    FCT_PLAN_OFF = 0,     /* the guard is off */
    FCT_PLAN_UNKNOWN = 1, /* the guard is on; the root of the unit has not run yet */
};

/* The result of a comparison of plans. For FCT_PLANS_DIFFER, `rank` is the first rank whose plan
 * differs from that of rank 0. `hashes` are those of rank 0 and of that rank. */
typedef enum fct_plan_state {
    FCT_PLANS_UNKNOWN = 0, /* the answers of the other ranks are not read yet */
    FCT_PLANS_EQUAL,       /* or not compared */
    FCT_PLANS_DIFFER,
} fct_plan_state;
typedef struct fct_plan_result {
    fct_plan_state state;
    int64_t rank;
    uint64_t hashes[2];
} fct_plan_result;

/* The hash of a plan, and the comparison with the other ranks. */
typedef struct op_plan {
    uint64_t hash;
    fct_exchange *round; /* NULL: not issued, or read */
    fct_plan_result result;
} op_plan;

/* Precondition of the functions: the struct was zeroed before its first use. */
typedef struct op_plan_list {
    op_plan *plans; /* [count] */
    size_t count;
} op_plan_list;

void op_plans_fini(op_plan_list *list);
/* Returns NULL if there is no plan with this hash. */
op_plan *op_plans_find(const op_plan_list *list, uint64_t hash);
/* Adds a plan whose result is unknown. Returns NULL if malloc fails. Invalidates other pointers
 * into the list. */
op_plan *op_plans_add(op_plan_list *list, uint64_t hash);
/* Whether the value is the hash of a plan. */
bool op_is_plan(int64_t value);
/* Compares the hashes of all ranks with that of rank 0. The hash of rank r is hashes[r * stride]. A
 * rank without a plan counts as equal. The negotiation uses the result only if all ranks have a
 * plan, so ranks compare nothing if one of them has none. */
fct_plan_result op_plans_compare(const int64_t *hashes, int64_t world, int64_t stride);

#endif
