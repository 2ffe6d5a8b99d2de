/* Communication context: event pool, order between streams, and memory that is kept until its last
 * use. */
#include "core/comm_ctx.h"

#include "sim.h"

static const int64_t eight[1] = {8};

static fct_tensor *vector_of(double value) {
    double values[8];
    for (int i = 0; i < 8; i++) {
        values[i] = value;
    }
    return sim_tensor_new(FCK_FLOAT32, 1, eight, values);
}

static fc_comm_ctx begin(bool streams) {
    fc_comm_ctx c;
    sim_begin((sim_config){.seed = 7, .streams = streams});
    fc_comm_init(&c, sim_device());
    assert_int_equal(fc_comm_init_streams(&c), FC_OK);
    assert_int_equal(c.streams_ready, streams);
    return c;
}

static void end(fc_comm_ctx *c) {
    fc_comm_fini(c);
    sim_end();
}

/* A pending reduce-scatter with its tensors. */
typedef struct pending {
    fct_pg *pg;
    fct_tensor *in;
    fct_tensor *out;
    fct_work *work;
} pending;

static pending start_reduce_scatter(void) {
    pending f = {NULL, vector_of(1.0), NULL, NULL};
    const int64_t four[1] = {4};
    sim_collectives_stall(true);
    sim_pg_register("world", 2, 0, NULL, NULL);
    assert_int_equal(fct_pg_resolve("world", &f.pg), 0);
    f.out = sim_tensor_new(FCK_FLOAT32, 1, four, (const double[4]){0});
    assert_int_equal(fct_reduce_scatter(f.pg, NULL, f.out, f.in, FCT_AVG, 1.0, true, &f.work), 0);
    assert_non_null(f.work);
    fct_pg_release(f.pg);
    return f;
}

/* ---- deferred collectives ---- */

static void deferred_buffers_are_held_until_work_completes(void **state) {
    (void)state;
    fc_comm_ctx c = begin(false);
    pending f = start_reduce_scatter();
    fc_comm_defer_release(&c, f.work, f.in, f.out);
    fc_comm_collect(&c);
    assert_non_null(c.deferred);
    assert_int_equal(sim_count_alive().works, 1);
    sim_drain();
    fc_comm_collect(&c);
    assert_null(c.deferred);
    sim_check_nothing_alive();
    end(&c);
}

static void release_of_completed_work_is_not_deferred(void **state) {
    (void)state;
    fc_comm_ctx c = begin(false);
    pending f = start_reduce_scatter();
    sim_drain();
    fc_comm_defer_release(&c, f.work, f.in, f.out);
    assert_null(c.deferred);
    fc_comm_defer_release(&c, NULL, vector_of(1.0), NULL);
    fc_comm_defer_release(&c, NULL, NULL, NULL);
    assert_null(c.deferred);
    sim_check_nothing_alive();
    end(&c);
}

static void deferred_release_without_memory_relies_on_backend_references(void **state) {
    (void)state;
    fc_comm_ctx c = begin(false);
    pending f = start_reduce_scatter();
    sim_fault_arm(1, SIM_ONCE);
    fc_comm_defer_release(&c, f.work, f.in, f.out);
    assert_int_equal(sim_fault_fired(NULL), SIM_FAULT_MEMORY);
    assert_null(c.deferred);
    assert_int_equal(sim_count_alive().tensors, 2);
    sim_drain();
    sim_check_nothing_alive();
    end(&c);
}

static void comm_ctx_fini_releases_deferred_collectives(void **state) {
    (void)state;
    fc_comm_ctx c = begin(false);
    pending f = start_reduce_scatter();
    fc_comm_defer_release(&c, f.work, f.in, f.out);
    end(&c); /* the backend completes the collective by itself */
}

/* ---- streams and events ---- */

static void streams_are_created_once_and_retried_after_failure(void **state) {
    (void)state;
    for (int64_t n = 1; n <= 4; n++) {
        fc_comm_ctx c;
        sim_begin((sim_config){.seed = 7, .streams = true});
        fc_comm_init(&c, sim_device());
        sim_fault_arm(n, SIM_ONCE);
        assert_int_equal(fc_comm_init_streams(&c), FC_ERAISED);
        assert_false(c.streams_ready);
        assert_int_equal(fc_comm_init_streams(&c), FC_OK);
        assert_true(c.streams_ready);
        int64_t taken = c.gather_stream.id;
        assert_int_equal(fc_comm_init_streams(&c), FC_OK);
        assert_int_equal(c.gather_stream.id, taken);
        end(&c);
    }
}

static void put_event_returns_event_to_pool(void **state) {
    (void)state;
    fc_comm_ctx c = begin(true);
    fct_event *a = NULL;
    fct_event *b = NULL;
    assert_int_equal(fc_comm_record(&c, c.gather_stream, &a), FC_OK);
    fc_comm_put_event(&c, a);
    fc_comm_put_event(&c, NULL);
    assert_int_equal(fc_comm_get_event(&c, &b), FC_OK);
    assert_ptr_equal(a, b);
    fc_comm_put_event(&c, b);
    assert_int_equal(sim_count_alive().events, 1);
    end(&c);
}

static void put_event_frees_event_if_pool_cannot_grow(void **state) {
    (void)state;
    fc_comm_ctx c = begin(true);
    fct_event *e = NULL;
    assert_int_equal(fc_comm_get_event(&c, &e), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    fc_comm_put_event(&c, e);
    assert_int_equal(sim_fault_fired(NULL), SIM_FAULT_MEMORY);
    assert_int_equal(sim_count_alive().events, 0);
    end(&c);
}

static void failed_record_returns_its_event(void **state) {
    (void)state;
    fc_comm_ctx c = begin(true);
    fct_event *e = NULL;
    sim_fault_arm(2, SIM_ONCE);
    assert_int_equal(fc_comm_record(&c, c.gather_stream, &e), FC_ERAISED);
    assert_null(e);
    assert_int_equal(c.free_event_count, 1);
    end(&c);
}

/* ---- memory across streams ---- */

enum { STREAMS = 5 };

/* One stream reads a tensor of the current stream. Another stream then writes it. */
static void read_and_write(int reader, int writer, bool quiesces) {
    fc_comm_ctx c = begin(true);
    fct_tensor *t = vector_of(1.0);
    const fct_stream current = fct_stream_current(sim_device());
    const fct_stream streams[STREAMS] = {current, c.copy_in_stream, c.gather_stream,
                                         c.reduce_stream, c.all_reduce_stream};
    assert_int_equal(fc_comm_order_streams(&c, streams[reader], current), FC_OK);
    (void)fct_stream_set_current(streams[reader]);
    sim_tensor_touch(t, "a read");
    (void)fct_stream_set_current(current);
    if (quiesces) {
        assert_int_equal(fc_comm_quiesce(&c), FC_OK);
    }
    (void)fct_stream_set_current(streams[writer]);
    sim_tensor_write(t, (const double[8]){0}, "a write");
    (void)fct_stream_set_current(current);
    assert_int_equal(sim_take_failures() > 0, !quiesces);
    sim_drain();
    (void)sim_take_failures();
    fct_tensor_release(t);
    end(&c);
}

static void quiesce_orders_all_streams(void **state) {
    (void)state;
    for (int reader = 0; reader < STREAMS; reader++) {
        for (int writer = 0; writer < STREAMS; writer++) {
            if (reader != writer) {
                read_and_write(reader, writer, false);
                read_and_write(reader, writer, true);
            }
        }
    }
}

/* A kept gather buffer is memory of the copy-in stream, and the current stream reads it. */
static void kept_gather_buffer_is_released_after_its_copy_out(void **state) {
    (void)state;
    fc_comm_ctx c = begin(true);
    fct_stream current = fct_stream_set_current(c.copy_in_stream);
    fct_tensor *buffer = vector_of(1.0);
    (void)fct_stream_set_current(current);
    assert_int_equal(fc_comm_order_streams(&c, current, c.copy_in_stream), FC_OK);
    sim_tensor_touch(buffer, "the copy-out");
    c.kept_gather.buffer = buffer;
    assert_int_equal(fc_comm_record(&c, current, &c.kept_gather.copied), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_comm_release_gather(&c), FC_ERAISED);
    assert_ptr_equal(c.kept_gather.buffer, buffer); /* ordering failed: the buffer stays */
    assert_int_equal(fc_comm_release_gather(&c), FC_OK);
    assert_null(c.kept_gather.buffer);
    (void)fct_stream_set_current(c.copy_in_stream);
    fct_tensor *next = vector_of(2.0); /* the simulator checks whether the block may be reused */
    (void)fct_stream_set_current(current);
    fct_tensor_release(next);
    end(&c);
}

static fct_tensor *output_on_all_reduce_stream(fc_comm_ctx *c, fct_event **done) {
    fct_stream current = fct_stream_set_current(c->reduce_stream);
    fct_tensor *output = vector_of(1.0);
    assert_int_equal(fc_comm_order_streams(c, c->all_reduce_stream, c->reduce_stream), FC_OK);
    (void)fct_stream_set_current(c->all_reduce_stream);
    sim_tensor_touch(output, "the cast of an output");
    (void)fct_stream_set_current(current);
    assert_int_equal(fc_comm_record(c, c->all_reduce_stream, done), FC_OK);
    return output;
}

/* The context keeps as many outputs as reductions may be in flight, and at least two. */
static void last_all_reduced_outputs_are_kept(void **state) {
    (void)state;
    const size_t max_reductions[] = {1, 2, 3, 7};
    const int kept[] = {2, 2, 3, 7};
    for (int k = 0; k < 4; k++) {
        fc_comm_ctx c = begin(true);
        c.max_reductions = max_reductions[k];
        for (int i = 0; i < 10; i++) {
            fct_event *done = NULL;
            fct_tensor *output = output_on_all_reduce_stream(&c, &done);
            assert_int_equal(fc_comm_keep_output(&c, output, done), FC_OK);
            assert_int_equal(sim_count_alive().tensors, i < kept[k] ? i + 1 : kept[k]);
        }
        end(&c);
    }
}

static void failed_keep_output_leaves_output_with_caller(void **state) {
    (void)state;
    fc_comm_ctx c = begin(true);
    fct_event *done = NULL;
    for (int i = 0; i < 2; i++) {
        fct_tensor *output = output_on_all_reduce_stream(&c, &done);
        assert_int_equal(fc_comm_keep_output(&c, output, done), FC_OK);
    }
    fct_tensor *output = output_on_all_reduce_stream(&c, &done);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_comm_keep_output(&c, output, done), FC_ERAISED);
    assert_int_equal(sim_tensor_refs(output), 1);
    assert_int_equal(sim_count_alive().tensors, 3);
    assert_int_equal(fc_comm_quiesce(&c), FC_OK);
    fct_tensor_release(output);
    end(&c);
}

/* After a backward all outputs are released: the next reduce-scatter may reuse their memory. */
static void kept_outputs_are_released_after_their_casts(void **state) {
    (void)state;
    fc_comm_ctx c = begin(true);
    fct_event *done = NULL;
    fct_tensor *output = output_on_all_reduce_stream(&c, &done);
    assert_int_equal(fc_comm_keep_output(&c, output, done), FC_OK);
    sim_fault_arm(1, SIM_ONCE);
    assert_int_equal(fc_comm_release_outputs(&c), FC_ERAISED);
    assert_int_equal(sim_count_alive().tensors, 1); /* ordering failed: the output stays */
    assert_int_equal(fc_comm_release_outputs(&c), FC_OK);
    assert_int_equal(sim_count_alive().tensors, 0);
    assert_int_equal(c.events_out, 0);
    fct_stream current = fct_stream_set_current(c.reduce_stream);
    fct_tensor *next = vector_of(2.0); /* the simulator checks whether the block may be reused */
    (void)fct_stream_set_current(current);
    fct_tensor_release(next);
    end(&c);
}

/* Two threads that share a context may each keep a buffer before either is released. */
static void second_kept_gather_buffer_replaces_first(void **state) {
    (void)state;
    for (int fails = 0; fails < 2; fails++) {
        fc_comm_ctx c = begin(true);
        fct_stream current = fct_stream_current(sim_device());
        for (int i = 0; i < 2; i++) {
            fct_event *copied = NULL;
            assert_int_equal(fc_comm_record(&c, current, &copied), FC_OK);
            sim_fault_arm(fails && i == 1 ? 1 : 0, SIM_ONCE);
            fc_comm_keep_gather(&c, vector_of(1.0), copied);
            sim_fault_arm(0, SIM_ONCE);
            assert_false(sim_error_pending());
            assert_int_equal(sim_count_alive().tensors, 1);
            assert_int_equal(c.events_out, 1);
        }
        assert_int_equal(fc_comm_release_gather(&c), FC_OK);
        assert_int_equal(sim_count_alive().tensors, 0);
        end(&c);
    }
}

static void shared_event_returns_to_pool_with_its_last_owner(void **state) {
    (void)state;
    fc_comm_ctx c = begin(true);
    fct_event *first = NULL;
    fct_event *second = NULL;
    assert_int_equal(fc_comm_record(&c, c.reduce_stream, &first), FC_OK);
    assert_int_equal(fc_comm_record(&c, c.reduce_stream, &second), FC_OK);
    fc_comm_share_event(&c, first, &second);
    assert_ptr_equal(first, second);
    assert_int_equal(c.free_event_count, 1); /* the slot's previous event */
    assert_int_equal(c.events_out, 2);
    fc_comm_put_event(&c, first);
    assert_int_equal(c.free_event_count, 1);
    assert_int_equal(fc_comm_wait_and_put(&c, &second), FC_OK);
    assert_null(second);
    assert_int_equal(c.free_event_count, 2);
    assert_int_equal(c.events_out, 0);
    end(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deferred_buffers_are_held_until_work_completes),
        cmocka_unit_test(release_of_completed_work_is_not_deferred),
        cmocka_unit_test(deferred_release_without_memory_relies_on_backend_references),
        cmocka_unit_test(comm_ctx_fini_releases_deferred_collectives),
        cmocka_unit_test(streams_are_created_once_and_retried_after_failure),
        cmocka_unit_test(put_event_returns_event_to_pool),
        cmocka_unit_test(put_event_frees_event_if_pool_cannot_grow),
        cmocka_unit_test(failed_record_returns_its_event),
        cmocka_unit_test(quiesce_orders_all_streams),
        cmocka_unit_test(kept_gather_buffer_is_released_after_its_copy_out),
        cmocka_unit_test(last_all_reduced_outputs_are_kept),
        cmocka_unit_test(failed_keep_output_leaves_output_with_caller),
        cmocka_unit_test(kept_outputs_are_released_after_their_casts),
        cmocka_unit_test(second_kept_gather_buffer_replaces_first),
        cmocka_unit_test(shared_event_returns_to_pool_with_its_last_owner),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
