/* Post-forward order; see order.h. Owns its arrays. The order is a list, not a set or a hash table,
 * so that every rank prefetches in the same order. */
#include "order.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Grows the array to hold at least count + 1 items of `size` bytes. Returns the array, or NULL
 * if malloc fails. */
static void *grow(void *items, size_t count, size_t *capacity, size_t size) {
    if (count < *capacity) {
        return items;
    }
    size_t new_capacity = *capacity == 0 ? 16 : 2 * *capacity;
    void *grown = realloc(items, new_capacity * size);
    if (grown != NULL) {
        *capacity = new_capacity;
    }
    return grown;
}

fc_status fc_order_append(fc_order *o, struct fc_group *group, size_t *position) {
    assert(group != NULL && o->count <= o->capacity);
    struct fc_group **items =
        (struct fc_group **)grow(o->items, o->count, &o->capacity, sizeof *items);
    if (items == NULL) {
        return FC_ENOMEM;
    }
    o->items = items;
    *position = o->count;
    o->items[o->count++] = group;
    return FC_OK;
}

void fc_order_remove(fc_order *o, const struct fc_group *group) {
    assert(group != NULL && o->count <= o->capacity);
    for (size_t i = 0; i < o->count; i++) {
        if (o->items[i] == group) {
            o->items[i] = NULL;
        }
    }
}

void fc_order_fini(fc_order *o) {
    assert(o->count <= o->capacity);
    free(o->items);
    memset(o, 0, sizeof *o);
}

fc_status fc_index_stack_push(fc_index_stack *p, size_t position) {
    assert(p->count <= p->capacity);
    size_t *items = (size_t *)grow(p->items, p->count, &p->capacity, sizeof *items);
    if (items == NULL) {
        return FC_ENOMEM;
    }
    p->items = items;
    p->items[p->count++] = position;
    return FC_OK;
}

void fc_index_stack_fini(fc_index_stack *p) {
    assert(p->count <= p->capacity);
    free(p->items);
    memset(p, 0, sizeof *p);
}
