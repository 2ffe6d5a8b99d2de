/* The order in which groups finished their forwards, for prefetching the other way round in
 * backward. A group that ran several forwards stands in it several times. Groups are borrowed; a
 * dying group is forgotten first. */
#ifndef FSDP_C_CORE_ORDER_H
#define FSDP_C_CORE_ORDER_H

#include <stddef.h>

#include "status.h"

struct fc_group;

typedef struct fc_order {
    struct fc_group **items; /* NULL where the group has died */
    size_t count;
    size_t capacity;
} fc_order;

/* A stack of positions in the order, one for each forward of a group that has not been through
 * backward. */
typedef struct fc_positions {
    size_t *items;
    size_t count;
    size_t capacity;
} fc_positions;

/* Appends; *position is where. FC_ENOMEM. */
FC_CHECK fc_status fc_order_append(fc_order *o, struct fc_group *group, size_t *position);
void fc_order_forget(fc_order *o, const struct fc_group *group);
void fc_order_fini(fc_order *o);

FC_CHECK fc_status fc_positions_push(fc_positions *p, size_t position);
void fc_positions_fini(fc_positions *p);

#endif
