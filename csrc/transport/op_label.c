/* Labels of collectives; see op_label.h. Owns the label of the next collective of each thread. */
#include "op_label.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

static _Thread_local fct_op_label next_label;

void op_label_set_next(const fct_op_label *label) {
    if (label != NULL) {
        next_label = *label;
    } else {
        next_label.unit = 0;
    }
}

fct_op_label op_label_take_next(void) {
    const fct_op_label label = next_label;
    next_label.unit = 0;
    return label;
}

bool op_label_is_equal(const fct_op_label *a, const fct_op_label *b) {
    return a->unit == 0 || b->unit == 0 ||
           (a->unit == b->unit && a->params == b->params && a->contents == b->contents);
}

/* Writes the indices of the bits, for example "0, 2, 3". If there is no space for all, the list
 * begins at `first` and ends with "...". */
static void list_params(uint64_t params, int first, char *text, size_t bytes) {
    enum { LONGEST = 8 }; /* characters of an index and of the end */
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < 64; i++) {
        if ((params >> i & 1) == 0) {
            continue;
        }
        if (used + LONGEST >= bytes) {
            if (first > 0) {
                list_params(params >> first << first, 0, text, bytes);
            } else {
                (void)snprintf(text + used, bytes - used, ", ...");
            }
            return;
        }
        used += (size_t)snprintf(text + used, bytes - used, "%s%d", used > 0 ? ", " : "", i);
    }
    if (used == 0) {
        (void)snprintf(text, bytes, "none");
    }
}

/* Writes how two labels differ; "" if their names or kinds differ, which the caller writes. */
static void describe_difference(const fct_op_label *label, const fct_op_label *peer, char *text,
                                size_t bytes) {
    static const char *const reduce_ops[] = {"sum", "average", "scaled sum"};
    char params[96];
    text[0] = '\0';
    if (strncmp(label->name, peer->name, sizeof label->name) != 0 ||
        (label->unit == FCT_LABEL_NO_ROOT) != (peer->unit == FCT_LABEL_NO_ROOT) ||
        (label->divisor == 0) != (peer->divisor == 0)) {
        return; /* other units, or a gather and a reduction */
    }
    if (label->unit != peer->unit) {
        (void)snprintf(text, bytes, " of another model");
    } else if (label->params != peer->params) {
        int first = 0;
        while (((label->params ^ peer->params) >> first & 1) == 0) {
            first++;
        }
        list_params(label->params, first, params, sizeof params);
        (void)snprintf(text, bytes, " with the gradients of parameters %s", params);
    } else if (label->divisor != peer->divisor) {
        (void)snprintf(text, bytes, " with divisor %g", label->divisor);
    } else if (label->size != peer->size) {
        (void)snprintf(text, bytes, " of %llu %s per rank", (unsigned long long)label->size,
                       label->divisor == 0 ? "bytes" : "elements");
    } else if (label->reduce_op != peer->reduce_op) {
        (void)snprintf(text, bytes, " by %s",
                       reduce_ops[label->reduce_op <= FCT_PREMUL_SUM ? label->reduce_op : 0]);
    } else if (label->contents != peer->contents) {
        (void)snprintf(text, bytes, " with other parameters from index 64 on, or other factors");
    }
}

void op_label_describe(const fct_op_label *label, const fct_op_label *peer, fct_op_kind kind,
                       int rank, char *text, size_t bytes) {
    static const char *const verbs[] = {"gathers", "reduce-scatters", "all-reduces"};
    fct_op_label own = *label, other = *peer;
    char difference[160];
    assert(kind <= FCT_OP_ALL_REDUCE);
    own.name[sizeof own.name - 1] = other.name[sizeof other.name - 1] = '\0';
    describe_difference(&own, &other, difference, sizeof difference);
    const bool is_named = own.name[0] != '\0';
    const char *unnamed = own.unit == FCT_LABEL_NO_ROOT
                              ? "a unit before the first forward of its root"
                              : "the root's unit";
    (void)snprintf(text, bytes, "rank %d %s %s%s%s%s (step %u, %s)", rank, verbs[kind],
                   is_named ? "'" : unnamed, own.name, is_named ? "'" : "", difference,
                   (unsigned)own.step, fct_pass_name(own.pass));
}
