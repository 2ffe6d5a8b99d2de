/* Tests of the simulation itself. Most tests run steps with a mistake, which the simulation must
 * report, and the same steps without the mistake. */
#include "sim.h"

#include <string.h>

static const int64_t eight[1] = {8};
static const int64_t one_step[1] = {1};

static fct_tensor *vector_of(double value) {
    double values[8];
    for (int i = 0; i < 8; i++) {
        values[i] = value;
    }
    return sim_tensor_new(FCK_FLOAT32, 1, eight, values);
}

static fct_stream side_stream(void) {
    fct_stream s;
    assert_int_equal(fct_stream_new(sim_device(), false, &s), 0);
    return s;
}

/* Orders everything queued later on `then` after everything queued so far on `first`. */
static void order(fct_stream first, fct_stream then) {
    fct_event *e = NULL;
    assert_int_equal(fct_event_new(sim_device(), &e), 0);
    assert_int_equal(fct_event_record(e, first), 0);
    assert_int_equal(fct_event_wait(e, then), 0);
    fct_event_free(e);
}

static void copy(fct_tensor *to, const fct_tensor *from) {
    assert_int_equal(fct_tensor_copy(to, from), 0);
}

/* ---- streams ---- */

static void sim_reports_read_not_ordered_after_write(void **state) {
    (void)state;
    for (int is_ordered = 0; is_ordered < 2; is_ordered++) {
        sim_begin((sim_config){.seed = 1, .streams = true});
        fct_stream main = fct_stream_current(sim_device());
        fct_stream side = side_stream();
        fct_tensor *a = vector_of(1.0);
        fct_tensor *b = vector_of(2.0);
        sim_drain();
        copy(a, b);
        if (is_ordered) {
            order(main, side);
        }
        (void)fct_stream_set_current(side);
        sim_tensor_expect(a, (const double[8]){2, 2, 2, 2, 2, 2, 2, 2}, "a");
        (void)fct_stream_set_current(main);
        assert_int_equal(sim_take_failures() > 0, !is_ordered);
        fct_tensor_release(a);
        fct_tensor_release(b);
        sim_drain();
        (void)sim_take_failures(); /* the wrong order may still give correct values */
        sim_end();
    }
}

static void sim_reports_write_not_ordered_after_read(void **state) {
    (void)state;
    for (int is_ordered = 0; is_ordered < 2; is_ordered++) {
        sim_begin((sim_config){.seed = 2, .streams = true});
        fct_stream main = fct_stream_current(sim_device());
        fct_stream side = side_stream();
        fct_tensor *a = vector_of(1.0);
        fct_tensor *b = vector_of(2.0);
        fct_tensor *c = vector_of(3.0);
        sim_drain();
        copy(b, a); /* reads a on main */
        (void)fct_stream_set_current(side);
        if (is_ordered) {
            order(main, side);
        }
        copy(a, c); /* writes a on side */
        (void)fct_stream_set_current(main);
        assert_int_equal(sim_take_failures() > 0, !is_ordered);
        sim_drain();
        fct_tensor_release(a);
        fct_tensor_release(b);
        fct_tensor_release(c);
        sim_end();
    }
}

/* A stream must not reuse a block that it has freed while another stream reads the block. */
static void sim_reports_reuse_of_memory_still_in_use(void **state) {
    (void)state;
    for (int is_ordered = 0; is_ordered < 2; is_ordered++) {
        sim_begin((sim_config){.seed = 3, .streams = true});
        fct_stream main = fct_stream_current(sim_device());
        fct_stream side = side_stream();
        fct_tensor *a = vector_of(1.0);
        fct_tensor *b = vector_of(2.0);
        sim_drain();
        (void)fct_stream_set_current(side);
        copy(b, a);
        (void)fct_stream_set_current(main);
        fct_tensor_release(a);
        assert_int_equal(sim_take_failures(), 0);
        if (is_ordered) {
            order(side, main);
        }
        fct_tensor *c = vector_of(3.0);
        assert_int_equal(sim_take_failures() > 0, !is_ordered);
        sim_drain();
        fct_tensor_release(b);
        fct_tensor_release(c);
        sim_end();
    }
}

static void sim_event_covers_work_up_to_its_record(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 4, .streams = true});
    fct_stream main = fct_stream_current(sim_device());
    fct_stream side = side_stream();
    fct_tensor *a = vector_of(1.0);
    fct_tensor *b = vector_of(2.0);
    fct_event *e = NULL;
    sim_drain();
    assert_int_equal(fct_event_new(sim_device(), &e), 0);
    assert_int_equal(fct_event_wait(e, side), 0); /* never recorded: no wait */
    assert_int_equal(fct_event_record(e, main), 0);
    copy(a, b); /* after the record */
    assert_int_equal(fct_event_wait(e, side), 0);
    (void)fct_stream_set_current(side);
    sim_tensor_expect(b, (const double[8]){2, 2, 2, 2, 2, 2, 2, 2}, "b");
    assert_int_equal(sim_take_failures(), 0);
    copy(b, a);
    assert_true(sim_take_failures() > 0);
    (void)fct_stream_set_current(main);
    sim_drain();
    fct_event_free(e);
    fct_tensor_release(a);
    fct_tensor_release(b);
    sim_end();
}

static void sim_streams_run_in_different_orders_per_seed(void **state) {
    (void)state;
    bool orders[2] = {false, false};
    for (uint64_t seed = 0; seed < 32; seed++) {
        sim_begin((sim_config){.seed = seed, .streams = true});
        fct_stream side = side_stream();
        fct_tensor *a = vector_of(0.0);
        double values[8];
        sim_drain();
        sim_tensor_write(a, (const double[8]){1, 1, 1, 1, 1, 1, 1, 1}, "one write");
        fct_stream main = fct_stream_set_current(side);
        sim_tensor_write(a, (const double[8]){2, 2, 2, 2, 2, 2, 2, 2}, "another write");
        (void)fct_stream_set_current(main);
        sim_tensor_read(a, values);
        assert_true(sim_take_failures() > 0);
        orders[values[0] == 2.0] = true;
        fct_tensor_release(a);
        sim_end();
    }
    assert_true(orders[0] && orders[1]);
}

/* ---- collectives ---- */

static void write_shard(void *context, int64_t rank, void *shard, int64_t bytes) {
    float *values = (float *)shard;
    (void)context;
    for (int64_t i = 0; i < bytes / (int64_t)sizeof *values; i++) {
        values[i] = (float)(10 * rank + i);
    }
}

typedef struct pending_all_gather {
    fct_pg *pg;
    fct_tensor *all; /* 2 rank shards of 4 elements */
    fct_tensor *own; /* rank shard 1 of `all` */
    fct_work *work;
} pending_all_gather;

static pending_all_gather start_all_gather(bool is_shard_correct) {
    pending_all_gather x = {NULL, NULL, NULL, NULL};
    const int64_t four[1] = {4};
    double first = is_shard_correct ? 10 : 0;
    sim_pg_register("world", 2, 1, write_shard, NULL);
    assert_int_equal(fct_pg_resolve("world", &x.pg), 0);
    x.all =
        sim_tensor_new(FCK_FLOAT32, 1, eight,
                       (const double[8]){-1, -1, -1, -1, first, first + 1, first + 2, first + 3});
    assert_int_equal(fct_tensor_alias(x.all, 1, four, one_step, 4, &x.own), 0);
    assert_int_equal(fct_all_gather(x.pg, NULL, x.all, x.own, true, &x.work), 0);
    return x;
}

static void end_all_gather(const pending_all_gather *x) {
    fct_work_release(x->work);
    fct_tensor_release(x->own);
    fct_tensor_release(x->all);
    fct_pg_release(x->pg);
}

static void sim_all_gather_returns_shards_of_all_ranks(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        sim_begin((sim_config){.seed = 5, .streams = streams != 0});
        pending_all_gather x = start_all_gather(true);
        assert_non_null(x.work);
        assert_int_equal(fct_work_wait(x.work), 0);
        sim_tensor_expect(x.all, (const double[8]){0, 1, 2, 3, 10, 11, 12, 13},
                          "the gathered shards");
        end_all_gather(&x);
        sim_end();
    }
}

static void sim_reports_wrong_shard_in_all_gather(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 5});
    pending_all_gather x = start_all_gather(false);
    assert_int_equal(fct_work_wait(x.work), 0);
    assert_int_equal(sim_take_failures(), 1);
    end_all_gather(&x);
    sim_end();
}

static void sim_reports_write_to_gathered_buffer_before_wait(void **state) {
    (void)state;
    for (int streams = 0; streams < 2; streams++) {
        sim_begin((sim_config){.seed = 5, .streams = streams != 0});
        pending_all_gather x = start_all_gather(true);
        sim_tensor_write(x.all, (const double[8]){0}, "an early write");
        assert_true(sim_take_failures() > 0);
        end_all_gather(&x);
        sim_drain();
        (void)sim_take_failures(); /* the shard that was sent may have been overwritten */
        sim_end();
    }
}

static void sim_reports_memory_freed_during_collective(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 5});
    sim_collectives_stall(true);
    pending_all_gather x = start_all_gather(true);
    fct_storage_free(x.all);
    assert_true(sim_take_failures() > 0);
    end_all_gather(&x);
    sim_end();
}

static void sim_collective_holds_tensors_until_complete(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 5});
    sim_collectives_stall(true);
    pending_all_gather x = start_all_gather(true);
    assert_false(fct_work_done(x.work));
    end_all_gather(&x);
    assert_int_equal(sim_count_alive().tensors, 2);
    sim_drain();
    assert_int_equal(sim_count_alive().tensors, 0);
    sim_end();
}

static void sim_reduce_scatter_adds_gradients_of_simulated_peers(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 6});
    const int64_t four[1] = {4};
    fct_pg *pg = NULL;
    fct_work *work = NULL;
    sim_pg_register("world", 2, 1, write_shard, NULL);
    assert_int_equal(fct_pg_resolve("world", &pg), 0);
    fct_tensor *in =
        sim_tensor_new(FCK_FLOAT32, 1, eight, (const double[8]){0, 0, 0, 0, 2, 4, 6, 8});
    fct_tensor *out = sim_tensor_new(FCK_FLOAT32, 1, four, (const double[4]){0});
    assert_int_equal(fct_reduce_scatter(pg, NULL, out, in, FCT_AVG, 1.0, true, &work), 0);
    assert_int_equal(fct_work_wait(work), 0);
    sim_tensor_expect(out, (const double[4]){1.5, 3, 4.5, 6}, "(1 + 2) / 2 times rank 0's part");
    fct_work_release(work);
    fct_tensor_release(in);
    fct_tensor_release(out);
    fct_pg_release(pg);
    sim_end();
}

/* ---- memory, faults ---- */

static void sim_freed_memory_is_reused_and_filled_with_nan(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 7});
    double values[8];
    fct_facts before;
    fct_facts after;
    fct_tensor *a = vector_of(1.0);
    fct_tensor *b = NULL;
    fct_tensor_facts(a, &before);
    fct_tensor_release(a);
    assert_int_equal(fct_tensor_empty(8, FCK_FLOAT32, sim_device(), &b), 0);
    fct_tensor_facts(b, &after);
    assert_ptr_equal(before.data, after.data);
    sim_tensor_read(b, values);
    assert_true(values[0] != values[0]);
    fct_tensor_release(b);
    sim_end();
}

static void sim_reports_leak(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 8});
    fct_tensor *a = vector_of(1.0);
    assert_int_equal(sim_count_alive().tensors, 1);
    assert_int_equal(sim_live_bytes(), 32);
    sim_check_nothing_alive();
    assert_int_equal(sim_take_failures(), 1);
    fct_tensor_release(a);
    assert_int_equal(sim_live_bytes(), 0);
    sim_check_nothing_alive();
    assert_int_equal(sim_take_failures(), 0);
    sim_end();
}

static int count_call(void *owner) {
    *(int *)owner += 1;
    return 0;
}

static void sim_reports_two_subscriptions_of_a_leaf(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 7});
    int calls = 0;
    const fct_hook hook = {.owner = &calls, .call = count_call};
    fct_tensor *leaf = vector_of(1.0);
    fct_grad_subscription *first = NULL;
    fct_grad_subscription *second = NULL;
    assert_int_equal(fct_autograd_subscribe(leaf, &hook, &first), 0);
    assert_int_equal(sim_subscriptions_run(leaf), 0);
    assert_int_equal(sim_take_failures(), 0);
    assert_int_equal(fct_autograd_subscribe(leaf, &hook, &second), 0);
    assert_int_equal(sim_subscriptions_run(leaf), 0);
    assert_int_equal(sim_take_failures(), 1);
    assert_int_equal(calls, 2);
    fct_grad_subscription_free(first);
    fct_grad_subscription_free(second);
    fct_tensor_release(leaf);
    sim_end();
}

/* Divides a tensor by 2 in five calls. Returns the number of the first call that fails, or 0.
 * `later_fail`: whether the calls after it must fail, too. */
static int first_failed_division(bool later_fail) {
    const double value = 64.0;
    fct_tensor *a = vector_of(value);
    double values[8];
    int first = 0, failed = 0;
    for (int i = 1; i <= 5; i++) {
        const bool fails = fct_tensor_div(a, 2.0) != 0;
        first = first == 0 && fails ? i : first;
        failed += fails ? 1 : 0;
    }
    assert_int_equal(failed, first == 0 ? 0 : later_fail ? 6 - first : 1);
    sim_tensor_read(a, values);
    assert_true(values[0] == value / (1 << (5 - failed))); /* a failed call has no effect */
    fct_tensor_release(a);
    return first;
}

static void sim_fault_fails_only_nth_call(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 9});
    const char *name = NULL;
    assert_int_equal(first_failed_division(false), 0);
    assert_int_equal(sim_fault_fired(&name), SIM_NO_FAULT);
    assert_false(sim_error_pending());
    sim_fault_arm(3, SIM_ONCE);
    assert_int_equal(first_failed_division(false), 3);
    assert_int_equal(sim_fault_fired(&name), SIM_FAULT_BOUNDARY);
    assert_string_equal(name, "fct_tensor_div");
    assert_true(sim_error_pending());
    sim_end();
}

static void sim_fault_of_span_all_after_fails_later_calls(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 9});
    sim_fault_arm(3, SIM_ALL_AFTER);
    assert_int_equal(first_failed_division(true), 3);
    assert_true(sim_fault(SIM_FAULT_CALLBACK, "a callback"));
    sim_end();
}

static void sim_fault_of_span_callbacks_after_fails_later_callbacks_only(void **state) {
    (void)state;
    sim_begin((sim_config){.seed = 9});
    sim_fault_arm(3, SIM_CALLBACKS_AFTER);
    assert_int_equal(first_failed_division(false), 3);
    assert_true(sim_fault(SIM_FAULT_CALLBACK, "a callback"));
    assert_false(sim_fault(SIM_FAULT_KERNEL, "a launch"));
    sim_end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sim_reports_read_not_ordered_after_write),
        cmocka_unit_test(sim_reports_write_not_ordered_after_read),
        cmocka_unit_test(sim_reports_reuse_of_memory_still_in_use),
        cmocka_unit_test(sim_event_covers_work_up_to_its_record),
        cmocka_unit_test(sim_streams_run_in_different_orders_per_seed),
        cmocka_unit_test(sim_all_gather_returns_shards_of_all_ranks),
        cmocka_unit_test(sim_reports_wrong_shard_in_all_gather),
        cmocka_unit_test(sim_reports_write_to_gathered_buffer_before_wait),
        cmocka_unit_test(sim_reports_memory_freed_during_collective),
        cmocka_unit_test(sim_collective_holds_tensors_until_complete),
        cmocka_unit_test(sim_reduce_scatter_adds_gradients_of_simulated_peers),
        cmocka_unit_test(sim_freed_memory_is_reused_and_filled_with_nan),
        cmocka_unit_test(sim_reports_leak),
        cmocka_unit_test(sim_reports_two_subscriptions_of_a_leaf),
        cmocka_unit_test(sim_fault_fails_only_nth_call),
        cmocka_unit_test(sim_fault_of_span_all_after_fails_later_calls),
        cmocka_unit_test(sim_fault_of_span_callbacks_after_fails_later_callbacks_only),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
