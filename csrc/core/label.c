/* Labels of collectives; see label.h. */
#include "label.h"

#include <assert.h>
#include <string.h>

static uint64_t bits_of(double value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void set_position(fct_op_label *label, const fc_comm_ctx *comm, fct_op_pass pass) {
    label->step = comm->step;
    label->pass = (uint16_t)pass;
}

void fc_label_set_gather(fct_op_label *label, const fc_comm_ctx *comm, fct_op_pass pass,
                         int64_t rank_bytes) {
    assert(rank_bytes >= 0);
    set_position(label, comm, pass);
    label->params = 0;
    label->divisor = 0;
    label->contents = label->size = (uint64_t)rank_bytes;
    label->reduce_op = 0;
}

/* Both arrays usually have the same order, so the search continues behind the last match. */
void fc_label_set_reduction(fct_op_label *label, const fc_comm_ctx *comm, fc_label_params params,
                            int64_t rank_numel, const fc_divide *divide) {
    assert(params.reduced_count <= params.group_count && rank_numel >= 0);
    uint64_t hash = fct_hash_add((uint64_t)rank_numel, (uint64_t)divide->op);
    size_t at = 0;
    set_position(label, comm, FCT_PASS_BACKWARD);
    label->params = 0;
    for (size_t i = 0; i < params.reduced_count; i++) {
        const size_t begin = at;
        while (params.group[at] != params.reduced[i]) {
            at = at + 1 < params.group_count ? at + 1 : 0;
            assert(at != begin); /* the group has the parameter */
        }
        (void)begin;
        label->params |= at < 64 ? UINT64_C(1) << at : 0;
        hash = fct_hash_add(hash, at + 1);
    }
    hash = fct_hash_add(hash, bits_of(divide->before));
    hash = fct_hash_add(hash, bits_of(divide->after));
    hash = fct_hash_add(hash, bits_of(divide->premultiply));
    label->size = (uint64_t)rank_numel;
    label->reduce_op = (uint16_t)divide->op;
    label->divisor = divide->total;
    label->contents = hash;
}
