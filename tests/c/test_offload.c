/* Uploads of offloaded shards, and copies of gradients to host memory. Whole steps with offload are
 * in sim_scenarios.c. */
#include "core/offload.h"

#include <string.h>

#include "sim.h"

/* The last of `world` ranks, with shards of 4 and 2 elements. On CUDA each shard takes a multiple
 * of 16 bytes, so a rank shard has 8 float32 elements. */
typedef struct fixture {
    fc_param params[2];
    fc_param *list[2];
    fc_gather_plan plan;
    fc_error err;
} fixture;

static const double SHARDS[2][4] = {{5, 6, 7, 8}, {9, 10}};

static void begin(fixture *f, int64_t world, bool pinned, fct_dtype compute) {
    memset(f, 0, sizeof *f);
    sim_begin((sim_config){.seed = 5, .streams = true});
    for (int i = 0; i < 2; i++) {
        fc_param *p = &f->params[i];
        const int64_t size = world * (i == 0 ? 4 : 2);
        assert_int_equal(fc_param_init(p, p, 1, &size, 0, world, world - 1, &f->err), FC_OK);
        p->orig_dtype = FCK_FLOAT32;
        p->param_dtype = compute;
        p->offloaded = true;
        p->pinned = pinned;
        fct_tensor *data =
            sim_tensor_new_in_host(FCK_FLOAT32, p->layout.padded_numel, pinned, SHARDS[i]);
        fc_param_set_sharded_data(p, data);
        fct_tensor_release(data);
        f->list[i] = p;
    }
    assert_int_equal(
        fc_gather_plan_build(&f->plan, f->list, 2, world, false, sim_device(), &f->err), FC_OK);
    assert_true(f->plan.from_host);
    sim_calls_clear();
}

static void end(fixture *f) {
    fc_gather_plan_fini(&f->plan);
    fc_param_fini(&f->params[0]);
    fc_param_fini(&f->params[1]);
    sim_end();
}

static fct_tensor *new_ones(int64_t numel) {
    const double values[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    return sim_tensor_new(FCK_FLOAT32, 1, &numel, values);
}

static void offloaded_shards_without_cast_are_uploaded_to_gather_buffer(void **state) {
    (void)state;
    for (int pinned = 0; pinned < 2; pinned++) {
        fixture f;
        const double expected[16] = {1, 1, 1, 1, 1, 1, 1, 1, 5, 6, 7, 8, 9, 10, 1, 1};
        begin(&f, 2, pinned != 0, FCT_NO_DTYPE);
        fct_tensor *buffer = new_ones(16);
        assert_int_equal(fc_offload_upload(&f.plan, f.list, buffer, 32, &f.err), FC_OK);
        assert_string_equal(sim_calls_text(), "fct_tensor_upload fct_tensor_upload");
        sim_tensor_expect(buffer, expected, "the buffer");
        fct_tensor_release(buffer);
        end(&f);
    }
}

static void offloaded_shards_with_cast_are_staged_for_pack(void **state) {
    (void)state;
    fixture f;
    begin(&f, 2, true, FCK_BFLOAT16);
    assert_true(f.plan.casts);
    assert_int_equal(fc_offload_stage(&f.plan, f.list, sim_device(), &f.err), FC_OK);
    for (int i = 0; i < 2; i++) {
        assert_ptr_equal(fc_param_shard(f.list[i], f.plan.post_forward), f.params[i].staged);
        sim_tensor_expect(f.params[i].staged, SHARDS[i], "a staged shard");
    }
    fc_offload_unstage(&f.plan, f.list);
    for (int i = 0; i < 2; i++) {
        assert_ptr_equal(fc_param_shard(f.list[i], f.plan.post_forward), f.params[i].sharded_data);
    }
    end(&f);
}

static void offloaded_shards_of_one_rank_fill_flat_tensors(void **state) {
    (void)state;
    static const fct_dtype types[2] = {FCT_NO_DTYPE, FCK_BFLOAT16};
    for (int k = 0; k < 2; k++) {
        fixture f;
        begin(&f, 1, true, types[k]);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(fc_param_alloc_flat(f.list[i], sim_device(), &f.err), FC_OK);
        }
        assert_int_equal(fc_offload_fill(&f.plan, f.list, sim_device(), &f.err), FC_OK);
        for (int i = 0; i < 2; i++) {
            sim_tensor_expect(f.params[i].flat, SHARDS[i], "a flat tensor");
            assert_null(f.params[i].staged);
        }
        end(&f);
    }
}

static void unstage_after_failed_upload_releases_staged_copies(void **state) {
    (void)state;
    for (int64_t n = 1;; n++) {
        fixture f;
        begin(&f, 2, true, FCK_BFLOAT16);
        sim_fault_arm(n, SIM_ONCE);
        fc_status status = fc_offload_stage(&f.plan, f.list, sim_device(), &f.err);
        bool fired = sim_fault_fired(NULL) != SIM_NO_FAULT;
        assert_int_equal(status, fired ? FC_ERAISED : FC_OK);
        fc_offload_unstage(&f.plan, f.list);
        assert_null(f.params[0].staged);
        assert_null(f.params[1].staged);
        end(&f);
        if (!fired) {
            assert_true(n > 4);
            return;
        }
    }
}

/* ---- gradients ---- */

static bool has_gradient;
static bool is_hooked;

static bool has_grad(void *param) {
    (void)param;
    return has_gradient;
}

static bool needs_grad_now(void *param) {
    (void)param;
    return is_hooked;
}

static const fc_callbacks callbacks = {.has_grad = has_grad, .needs_grad_now = needs_grad_now};

/* Sends a gradient and checks the copy. Returns true if the copy was only queued. */
static bool send_gradient(bool pinned, bool has_earlier, bool hooked) {
    fixture f;
    fct_tensor *local = NULL;
    fct_event *sent = NULL;
    bool queued = false;
    const double values[4] = {1, 1, 1, 1};
    has_gradient = has_earlier;
    is_hooked = hooked;
    begin(&f, 2, pinned, FCT_NO_DTYPE);
    fct_tensor *view = new_ones(4);
    assert_int_equal(fc_offload_copy_gradient(f.list[0], &callbacks, view, &local, &queued), FC_OK);
    fct_tensor_release(view); /* its memory belongs to this stream, so reuse is ordered */
    if (queued) {
        assert_int_equal(fct_event_new(sim_device(), &sent), 0);
        assert_int_equal(fct_event_record(sent, fct_stream_current(sim_device())), 0);
        assert_int_equal(fct_event_synchronize(sent), 0);
        fct_event_free(sent);
    }
    sim_tensor_expect(local, values, "the gradient");
    fct_tensor_release(local);
    end(&f);
    return queued;
}

static void gradient_copy_is_queued_if_no_callback_reads_gradient_now(void **state) {
    (void)state;
    assert_true(send_gradient(true, false, false));
    assert_false(send_gradient(false, false, false));
    assert_false(send_gradient(true, true, false));
    assert_false(send_gradient(true, false, true));
}

static void simulator_reports_early_read_of_queued_gradient(void **state) {
    (void)state;
    fixture f;
    fct_tensor *local = NULL;
    bool queued = false;
    const double values[4] = {1, 1, 1, 1};
    has_gradient = is_hooked = false;
    begin(&f, 2, true, FCT_NO_DTYPE);
    fct_tensor *view = new_ones(4);
    assert_int_equal(fc_offload_copy_gradient(f.list[0], &callbacks, view, &local, &queued), FC_OK);
    sim_tensor_expect(local, values, "the gradient");
    assert_true(sim_take_failures() > 0);
    fct_tensor_release(view);
    fct_tensor_release(local);
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(offloaded_shards_without_cast_are_uploaded_to_gather_buffer),
        cmocka_unit_test(offloaded_shards_with_cast_are_staged_for_pack),
        cmocka_unit_test(offloaded_shards_of_one_rank_fill_flat_tensors),
        cmocka_unit_test(unstage_after_failed_upload_releases_staged_copies),
        cmocka_unit_test(gradient_copy_is_queued_if_no_callback_reads_gradient_now),
        cmocka_unit_test(simulator_reports_early_read_of_queued_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
