/* Collectives over shared memory, between processes: data, errors, and the life of operations. */
#define _GNU_SOURCE 1
#include "kernels/checksum.h"
#include "transport/hash.h"
#include "transport_ranks.h"

/* ---- data ---- */

/* The value of an element of one rank's input: small integers, so that sums are exact. */
static float value_of(int rank, int64_t element) {
    return (float)((element * 7 + rank * 13) % 31);
}

static float sum_of(int world, int64_t element) {
    float sum = 0;
    for (int rank = 0; rank < world; rank++) {
        sum += value_of(rank, element);
    }
    return sum;
}

static shm_request request_of(fct_op_kind kind, int64_t numel) {
    return (shm_request){.kind = kind,
                         .dtype = FCK_FLOAT32,
                         .itemsize = sizeof(float),
                         .rank = me.rank,
                         .world = me.world,
                         .bytes = (size_t)numel * sizeof(float),
                         .timeout_ms = 60000,
                         .dtype_name = name_dtype};
}

/* Divides each rank's shard into two segments. `first` contains segment 0 of all ranks, `second`
 * contains segment 1. */
static void split(shm_segment segments[2], float *first, float *second, int64_t numel) {
    const size_t bytes = (size_t)numel * sizeof(float), cut = bytes / 3 / 4 * 4;
    segments[0] = (shm_segment){(char *)first, cut, 0, cut};
    segments[1] = (shm_segment){(char *)second, bytes - cut, cut, bytes - cut};
}

/* Returns the address of an element of the shard of `rank`. */
static float *element_of(const shm_segment segments[2], int rank, int64_t element) {
    const size_t at = (size_t)element * sizeof(float);
    const shm_segment *s = &segments[at >= segments[1].begin];
    return (float *)(void *)(s->data + (size_t)rank * s->stride + (at - s->begin));
}

static void gather_once(int64_t numel) {
    const size_t all = (size_t)numel * (size_t)me.world;
    float *first = (float *)calloc(all, sizeof *first),
          *second = (float *)calloc(all, sizeof *second);
    shm_segment segments[2];
    split(segments, first, second, numel);
    for (int64_t i = 0; i < numel; i++) {
        *element_of(segments, me.rank, i) = value_of(me.rank, i);
    }
    shm_request request = request_of(FCT_OP_ALL_GATHER, numel);
    request.segments = segments;
    request.segment_count = 2;
    run_to_end(&request);
    for (int rank = 0; rank < me.world; rank++) {
        for (int64_t i = 0; i < numel; i++) {
            require(*element_of(segments, rank, i) == value_of(rank, i));
        }
    }
    free(first);
    free(second);
}

/* The hash of the checksums of the pieces of FCK_CHECKSUM_PIECE bytes, in order. */
static uint64_t checksum_of(const char *data, size_t bytes) {
    uint64_t hash = FCT_HASH_EMPTY;
    for (size_t at = 0; at < bytes; at += FCK_CHECKSUM_PIECE) {
        const size_t rest = bytes - at;
        const size_t piece = rest < FCK_CHECKSUM_PIECE ? rest : FCK_CHECKSUM_PIECE;
        hash = fct_hash_add(hash, fck_checksum(data + at, piece));
    }
    return hash;
}

static void gather_with_checksums(int64_t numel) {
    const size_t all = (size_t)numel * (size_t)me.world;
    float *first = (float *)calloc(all, sizeof *first),
          *second = (float *)calloc(all, sizeof *second);
    shm_segment segments[2];
    uint64_t checksum = 0;
    issued op;
    split(segments, first, second, numel);
    for (int64_t i = 0; i < numel; i++) {
        *element_of(segments, me.rank, i) = value_of(me.rank, i);
    }
    shm_request request = request_of(FCT_OP_ALL_GATHER, numel);
    request.segments = segments;
    request.segment_count = 2;
    request.checksums = true;
    require(start(&op, &request) != SHM_SUBMIT_FAILED);
    require(wait_for(&op, 0) == 1 && op.work.error[0] == '\0');
    shm_collective_drop_segments(op.collective);
    for (size_t k = 0; k < 2; k++) {
        for (int rank = 0; rank < me.world; rank++) {
            const char *shard = segments[k].data + (size_t)rank * segments[k].stride;
            require(shm_collective_rank_checksum(op.collective, k, rank, &checksum));
            require(checksum == checksum_of(shard, segments[k].bytes));
        }
    }
    require(!shm_collective_rank_checksum(op.collective, 2, 0, &checksum));
    require(!shm_collective_rank_checksum(op.collective, 0, me.world, &checksum));
    require(!shm_collective_rank_checksum(op.collective, 0, -1, &checksum));
    shm_collective_free(op.collective);
    free(first);
    free(second);
}

/* A rank shard fits in one message, needs two, or exceeds the ring. Message boundaries divide some
 * pieces of segment 1. */
static void gather_all_sizes_with_checksums(void) {
    static const int64_t sizes[] = {3, 100003, 300001, 1500000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        gather_with_checksums(sizes[i]);
    }
}

static void gathered_shards_have_the_checksums_of_their_bytes(void **state) {
    (void)state;
    run_ranks(gather_all_sizes_with_checksums, 2);
    run_ranks(gather_all_sizes_with_checksums, 3);
}

/* The first message of rank 0 contains only a part of its shard. */
static void read_checksums_too_early(void) {
    static float gathered[2 * 1500000];
    const size_t bytes = sizeof gathered / 2;
    const shm_segment segment = {(char *)gathered, bytes, 0, bytes};
    uint64_t checksum = 0;
    issued op;
    shm_request request = request_of(FCT_OP_ALL_GATHER, 1500000);
    request.segments = &segment;
    request.segment_count = 1;
    request.checksums = true;
    if (me.rank == 1) {
        barrier();
    }
    require(start(&op, &request) != SHM_SUBMIT_FAILED);
    if (me.rank == 0) {
        require(!shm_collective_rank_checksum(op.collective, 0, 0, &checksum));
        require(!shm_collective_rank_checksum(op.collective, 0, 1, &checksum));
        barrier();
    }
    require(wait_for(&op, 0) == 1);
    require(shm_collective_rank_checksum(op.collective, 0, 1, &checksum));
    shm_collective_free(op.collective);
}

static void shards_that_are_not_complete_have_no_checksum(void **state) {
    (void)state;
    run_ranks(read_checksums_too_early, 2);
}

static void reduce_scatter_once(int64_t numel) {
    const size_t all = (size_t)numel * (size_t)me.world;
    float *first = (float *)calloc(all, sizeof *first),
          *second = (float *)calloc(all, sizeof *second);
    float *output = (float *)calloc((size_t)numel, sizeof *output);
    shm_segment segments[2];
    split(segments, first, second, numel);
    for (int rank = 0; rank < me.world; rank++) {
        for (int64_t i = 0; i < numel; i++) {
            *element_of(segments, rank, i) = value_of(me.rank, rank * numel + i);
        }
    }
    shm_request request = request_of(FCT_OP_REDUCE_SCATTER, numel);
    request.segments = segments;
    request.segment_count = 2;
    request.output = (char *)output;
    run_to_end(&request);
    for (int64_t i = 0; i < numel; i++) {
        require(output[i] == sum_of(me.world, me.rank * numel + i));
    }
    free(first);
    free(second);
    free(output);
}

static void all_reduce_once(int64_t numel) {
    float *tensor = (float *)calloc((size_t)numel, sizeof *tensor);
    for (int64_t i = 0; i < numel; i++) {
        tensor[i] = value_of(me.rank, i);
    }
    shm_request request = request_of(FCT_OP_ALL_REDUCE, numel);
    request.output = (char *)tensor;
    run_to_end(&request);
    for (int64_t i = 0; i < numel; i++) {
        require(tensor[i] == sum_of(me.world, i));
    }
    free(tensor);
}

/* The data is one element, fits in one message, needs two messages, or exceeds the ring. */
static void run_all_sizes(void) {
    static const int64_t sizes[] = {1, 1000, 300001, 1500000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        gather_once(sizes[i]);
        reduce_scatter_once(sizes[i]);
        all_reduce_once(sizes[i]);
    }
}

static void collectives_of_all_sizes_have_the_expected_values(void **state) {
    (void)state;
    run_ranks(run_all_sizes, 2);
    run_ranks(run_all_sizes, 3);
}

/* ---- order and completion ---- */

/* Three all-reduces in flight. A wait for the last one completes the earlier ones, too. */
static void wait_in_reverse_order(void) {
    float values[3];
    issued ops[3];
    for (int k = 0; k < 3; k++) {
        values[k] = value_of(me.rank, k);
        shm_request request = request_of(FCT_OP_ALL_REDUCE, 1);
        request.output = (char *)&values[k];
        require(start(&ops[k], &request) == SHM_SUBMIT_WRITTEN);
    }
    for (int k = 2; k >= 0; k--) {
        require(wait_for(&ops[k], 0) == 1 && ops[k].work.error[0] == '\0');
        require(ops[0].work.completions == 1 && ops[1].work.completions == 1);
        require(values[k] == sum_of(me.world, k));
    }
    for (int k = 0; k < 3; k++) {
        require(ops[k].work.completions == 1 && ops[k].work.releases == 1);
        shm_collective_free(ops[k].collective);
    }
}

static void operations_complete_in_order_of_issue_and_once(void **state) {
    (void)state;
    run_ranks(wait_in_reverse_order, 3);
}

/* Rank 1 issues its collective after rank 0 has polled without success. */
static void poll_before_the_peer(void) {
    float value = value_of(me.rank, 0);
    shm_request request = request_of(FCT_OP_ALL_REDUCE, 1);
    request.output = (char *)&value;
    issued op;
    if (me.rank == 0) {
        require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
        shm_transport_progress(me.transport);
        require(op.work.completions == 0);
        require(wait_for(&op, 1) == -1 && strcmp(me.error, "Timed out waiting 1ms") == 0);
    }
    barrier();
    if (me.rank != 0) {
        require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
    }
    require(wait_for(&op, 0) == 1 && op.work.error[0] == '\0');
    require(value == sum_of(me.world, 0));
    shm_collective_free(op.collective);
}

static void wait_with_a_limit_leaves_the_operation_pending(void **state) {
    (void)state;
    run_ranks(poll_before_the_peer, 2);
}

/* ---- failures ---- */

#define REMEDY                                                                                     \
    ". The process group cannot be used any more: restart the ranks, or shard the model over a "   \
    "new process group"

static void issue_different_collectives(void) {
    float values[2] = {0};
    const shm_segment segment = {(char *)values, sizeof(float), 0, sizeof(float)};
    shm_request request = request_of(me.rank == 0 ? FCT_OP_ALL_GATHER : FCT_OP_ALL_REDUCE, 1);
    request.segments = &segment;
    request.segment_count = 1;
    request.output = (char *)values;
    issued op, next;
    require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
    require(wait_for(&op, 0) == 1);
    if (me.rank == 0) {
        require(strcmp(op.work.error,
                       "collective mismatch: rank 0 issued all_gather of Float, up to 64 bytes per "
                       "rank (message of 4 bytes), rank 1 issued all_reduce of Float, up to 64 "
                       "bytes per rank (message of 4 bytes)" REMEDY) == 0);
    } else {
        require(op.work.error[0] != '\0');
    }
    require(start(&next, &request) == SHM_SUBMIT_FAILED);
    require(strcmp(me.error, op.work.error) == 0 && next.work.completions == 0);
    shm_collective_free(op.collective);
    shm_collective_free(next.collective);
}

static void different_collectives_fail_on_all_ranks_and_later_ones_too(void **state) {
    (void)state;
    run_ranks(issue_different_collectives, 2);
}

/* Sizes and operations are equal: only the labels differ. Every rank of the group reports it, also
 * a rank that waits for a third rank. */
static void issue_different_units(void) {
    float value = 0;
    shm_request request = request_of(FCT_OP_ALL_REDUCE, 1);
    request.output = (char *)&value;
    fct_op_label label = {
        .unit = 5, .params = 3, .contents = 1, .divisor = 2, .step = 17, .pass = FCT_PASS_BACKWARD};
    label.unit = me.rank == 1 ? 6 : 5;
    strcpy(label.name, me.rank == 1 ? "blocks.4" : "blocks.3");
    op_label_set_next(&label);
    issued op;
    require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
    require(wait_for(&op, 0) == 1);
    const char *expected[] = {"collective mismatch: rank 0 all-reduces 'blocks.3' (step 17, "
                              "backward), rank 1 all-reduces "
                              "'blocks.4' (step 17, backward)" REMEDY,
                              "", /* rank 0 or rank 2 */
                              "collective mismatch: rank 1 all-reduces 'blocks.4' (step 17, "
                              "backward), rank 2 all-reduces "
                              "'blocks.3' (step 17, backward)" REMEDY};
    require(strncmp(op.work.error, "collective mismatch: rank ", 26) == 0);
    require(me.rank == 1 || strcmp(op.work.error, expected[me.rank]) == 0);
    shm_collective_free(op.collective);
}

static void different_units_of_equal_size_fail_on_all_ranks(void **state) {
    (void)state;
    run_ranks(issue_different_units, 3);
}

/* A collective without a label, as issued by torch's functions, matches every label. */
static void issue_without_a_label_on_one_rank(void) {
    float value = value_of(me.rank, 0);
    shm_request request = request_of(FCT_OP_ALL_REDUCE, 1);
    request.output = (char *)&value;
    const fct_op_label label = {.unit = 5};
    op_label_set_next(me.rank == 0 ? &label : NULL);
    issued op;
    require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
    require(op_label_take_next().unit == 0);
    require(wait_for(&op, 0) == 1 && op.work.error[0] == '\0');
    require(value == sum_of(me.world, 0));
    shm_collective_free(op.collective);
}

static void collective_without_label_matches_every_label(void **state) {
    (void)state;
    run_ranks(issue_without_a_label_on_one_rank, 2);
}

static void let_one_rank_time_out(void) {
    float value = 0;
    shm_request request = request_of(FCT_OP_ALL_REDUCE, 1);
    request.output = (char *)&value;
    request.timeout_ms = 20;
    issued op;
    if (me.rank == 0) {
        require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
        require(wait_for(&op, 0) == 1);
        require(strcmp(op.work.error, "Timed out waiting 20ms for the data of other ranks") == 0);
        shm_collective_free(op.collective);
    }
    barrier();
    if (me.rank == 1) { /* rank 0 has sent its data, and its ring is closed after that */
        request.timeout_ms = 60000;
        require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
        require(wait_for(&op, 0) == 1 && op.work.error[0] == '\0');
        shm_collective_free(op.collective);
        require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
        require(wait_for(&op, 0) == 1);
        require(strcmp(op.work.error,
                       "Connection closed by peer: rank 0 has closed its process group or ended; "
                       "rank 1 waits for its data") == 0);
        shm_collective_free(op.collective);
    }
}

static void timeout_fails_this_rank_and_later_collectives_of_peers(void **state) {
    (void)state;
    run_ranks(let_one_rank_time_out, 2);
}

static void end_one_rank(void) {
    float value = 0;
    shm_request request = request_of(FCT_OP_ALL_REDUCE, 1);
    request.output = (char *)&value;
    issued op;
    if (me.rank == 1) {
        _exit(0); /* without closing its ring */
    }
    require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
    require(wait_for(&op, 0) == 1);
    require(strcmp(op.work.error,
                   "Connection closed by peer: the process of rank 1 has ended or closed its "
                   "process group") == 0);
    shm_collective_free(op.collective);
}

static void exit_of_a_peer_fails_the_wait(void **state) {
    (void)state;
    run_ranks(end_one_rank, 2);
}

static void abort_a_large_collective(void) {
    const int64_t numel = 3000000;
    float *tensor = (float *)calloc((size_t)numel, sizeof *tensor);
    shm_request request = request_of(FCT_OP_ALL_REDUCE, numel);
    request.output = (char *)tensor;
    issued op;
    require(start(&op, &request) == SHM_SUBMIT_PENDING);
    shm_transport_abort(me.transport, "the test ends");
    require(op.work.completions == 1 && strcmp(op.work.error, "the test ends") == 0);
    require(op.work.releases == 1);
    shm_collective_free(op.collective);
    free(tensor);
}

static void abort_completes_pending_operations_with_the_reason(void **state) {
    (void)state;
    run_ranks(abort_a_large_collective, 2);
}

static void use_the_transport_in_a_forked_child(void) {
    float value = 0;
    shm_request request = request_of(FCT_OP_ALL_REDUCE, 1);
    request.output = (char *)&value;
    issued op, other;
    require(start(&op, &request) == SHM_SUBMIT_WRITTEN);
    const pid_t child = fork();
    if (child == 0) {
        require(start(&other, &request) == SHM_SUBMIT_FAILED);
        require(strcmp(me.error, "a child of fork() cannot use its parent's process group") == 0);
        if (op.work.completions == 0) {
            require(wait_for(&op, 0) == -1);
            require(strcmp(me.error,
                           "a child of fork() cannot wait for its parent's collectives") == 0);
        }
        shm_transport_abort(me.transport, "by the child");
        shm_transport_release(me.transport);
        _exit(0);
    }
    int status = -1;
    require(waitpid(child, &status, 0) == child && status == 0);
    require(wait_for(&op, 0) == 1 && op.work.error[0] == '\0');
    shm_collective_free(op.collective);
}

static void forked_child_cannot_use_or_close_the_transport(void **state) {
    (void)state;
    run_ranks(use_the_transport_in_a_forked_child, 2);
}

/* ---- threads ---- */

enum { SHARED_OPS = 4, SHARED_NUMEL = 1500000 }; /* 5.7 MiB: exceeds the ring */

static issued shared_ops[SHARED_OPS];

/* Waits for every second operation, as the progress thread does beside the caller. */
static void *wait_for_even_operations(void *unused) {
    (void)unused;
    for (int i = 0; i < SHARED_OPS; i += 2) {
        char error[SHM_ERROR_BYTES];
        require(shm_collective_wait(shared_ops[i].collective, me.transport, 0, error) == 1);
    }
    return NULL;
}

static void wait_in_two_threads(void) {
    float *tensors[SHARED_OPS];
    pthread_t thread;
    for (int i = 0; i < SHARED_OPS; i++) {
        tensors[i] = (float *)malloc(SHARED_NUMEL * sizeof *tensors[i]);
        for (int64_t k = 0; k < SHARED_NUMEL; k++) {
            tensors[i][k] = value_of(me.rank, k + i);
        }
        shm_request request = request_of(FCT_OP_ALL_REDUCE, SHARED_NUMEL);
        request.output = (char *)tensors[i];
        require(start(&shared_ops[i], &request) != SHM_SUBMIT_FAILED);
    }
    require(pthread_create(&thread, NULL, wait_for_even_operations, NULL) == 0);
    for (int i = 1; i < SHARED_OPS; i += 2) {
        require(wait_for(&shared_ops[i], 0) == 1);
    }
    require(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < SHARED_OPS; i++) {
        require(shared_ops[i].work.completions == 1 && shared_ops[i].work.releases == 1);
        for (int64_t k = 0; k < SHARED_NUMEL; k++) {
            require(tensors[i][k] == sum_of(me.world, k + i));
        }
        shm_collective_free(shared_ops[i].collective);
        free(tensors[i]);
    }
}

static void two_threads_of_a_rank_complete_operations_of_one_transport(void **state) {
    (void)state;
    run_ranks(wait_in_two_threads, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(collectives_of_all_sizes_have_the_expected_values),
        cmocka_unit_test(gathered_shards_have_the_checksums_of_their_bytes),
        cmocka_unit_test(shards_that_are_not_complete_have_no_checksum),
        cmocka_unit_test(operations_complete_in_order_of_issue_and_once),
        cmocka_unit_test(wait_with_a_limit_leaves_the_operation_pending),
        cmocka_unit_test(different_collectives_fail_on_all_ranks_and_later_ones_too),
        cmocka_unit_test(different_units_of_equal_size_fail_on_all_ranks),
        cmocka_unit_test(collective_without_label_matches_every_label),
        cmocka_unit_test(timeout_fails_this_rank_and_later_collectives_of_peers),
        cmocka_unit_test(exit_of_a_peer_fails_the_wait),
        cmocka_unit_test(abort_completes_pending_operations_with_the_reason),
        cmocka_unit_test(forked_child_cannot_use_or_close_the_transport),
        cmocka_unit_test(two_threads_of_a_rank_complete_operations_of_one_transport),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
