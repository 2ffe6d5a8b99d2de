/* Post-forward order: the order in which groups finished their forwards. Backward prefetches groups
 * in the reverse order. A group that ran several forwards occurs several times. Groups are
 * borrowed; fc_order_remove must run before a group is freed.
 *
 * Precondition of all functions: the struct is zeroed or was changed by these functions only. */
#ifndef FSDP_C_CORE_ORDER_H
#define FSDP_C_CORE_ORDER_H

#include <stddef.h>

#include "status.h"

struct fc_group;

typedef struct fc_order {
    struct fc_group **items; /* NULL: the group was freed or has no outstanding backward */
    size_t count;
    size_t capacity;
} fc_order;

/* Stack of one group's indices in the order: one for each forward whose backward has not run. */
typedef struct fc_index_stack {
    size_t *items;
    size_t count;
    size_t capacity;
} fc_index_stack;

/* Appends the group and writes its index to *position. Returns FC_ENOMEM on failure. */
FC_CHECK fc_status fc_order_append(fc_order *o, struct fc_group *group, size_t *position);
/* Replaces every entry of `group` with NULL. The indices of other groups stay valid. */
void fc_order_remove(fc_order *o, const struct fc_group *group);
void fc_order_fini(fc_order *o);

/* Pushes an index in the order. Returns FC_ENOMEM on failure. */
FC_CHECK fc_status fc_index_stack_push(fc_index_stack *p, size_t position);
void fc_index_stack_fini(fc_index_stack *p);

#endif
