/* The model of the dry run: the order of memory events of one step, the release of every object
 * after any call, and the messages about invalid descriptions and calls. */
#include "dry_run/step.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"

enum { UNITS = 2, WORLD = 2 };

static fcd_record record;
static fcd_model model;

static const int64_t sizes[2] = {4, 2};
static const fcd_param_description param = {.name = "weight",
                                            .ndim = 2,
                                            .sizes = sizes,
                                            .dtype = FCK_FLOAT32,
                                            .compute = FCK_FLOAT32,
                                            .reduce = FCK_FLOAT32,
                                            .requires_grad = true};

/* A root with a child, each with one parameter of 32 bytes on two ranks. */
typedef struct fixture {
    fcd_param_description params[UNITS];
    fcd_unit_description units[UNITS];
    fcd_state_description states[UNITS];
    fcd_description description;
} fixture;

static fixture two_units(void) {
    fixture f;
    memset(&f, 0, sizeof f);
    for (int32_t i = 0; i < UNITS; i++) {
        f.params[i] = param;
        f.units[i] = (fcd_unit_description){.state = i,
                                            .world = WORLD,
                                            .replicas = 1,
                                            .reduce = FCT_NO_DTYPE,
                                            .max_input_buffers = 1,
                                            .reshard_after_forward = i > 0,
                                            .reshard_after_backward = true,
                                            .unshard_in_backward = true,
                                            .reduce_grads = true,
                                            .all_reduce_grads = true,
                                            .overlap = true,
                                            .count = 1};
        f.states[i] = (fcd_state_description){.root = 0, .modules = 1};
    }
    return f;
}

/* Sets the pointers of a fixture, which must not move afterwards. */
static fcd_description *describe(fixture *f, bool streams) {
    for (size_t i = 0; i < UNITS; i++) {
        f->units[i].params = &f->params[i];
    }
    f->description = (fcd_description){.streams = streams,
                                       .states = f->states,
                                       .state_count = UNITS,
                                       .units = f->units,
                                       .unit_count = UNITS};
    return &f->description;
}

static const fcd_call step[] = {
    {FCD_CALL_PRE_FORWARD, {0}},
    {FCD_CALL_PRE_FORWARD, {1}},
    {FCD_CALL_ALLOC, {0, 100}},
    {FCD_CALL_POST_FORWARD, {1}},
    {FCD_CALL_POST_FORWARD, {0}},
    {FCD_CALL_BACKWARD, {0}},
    {FCD_CALL_PRE_BACKWARD, {0}},
    {FCD_CALL_ALLOC, {1, 40}},
    {FCD_CALL_GRADIENT, {0, 0, 1, 40}},
    {FCD_CALL_PRE_BACKWARD, {1}},
    {FCD_CALL_FREE, {0}},
    {FCD_CALL_GRADIENT, {1, 0, -1, 32}},
    {FCD_CALL_POST_BACKWARD, {1}},
    {FCD_CALL_END, {0}},
    {FCD_CALL_ZERO_GRAD, {0}},
};
enum { STEP = sizeof step / sizeof step[0] };

static void begin(const fcd_description *d) {
    fcd_current_record = NULL; /* a test before may have failed */
    fcd_record_init(&record, d->streams);
    assert_int_equal(fcd_model_init(&model, d, STEP), FC_OK);
}

static void end(void) {
    record.closed = true;
    fcd_model_fini(&model);
    assert_false(record.failed);
    assert_int_equal(fcd_record_objects(&record), 0);
    assert_int_equal(record.device_live + record.live[FCD_HOST], 0);
    fcd_record_fini(&record);
}

static void run(size_t first, size_t last) {
    for (size_t i = first; i < last; i++) {
        record.call = (int32_t)i;
        assert_int_equal(fcd_model_call(&model, &step[i]), FC_OK);
    }
}

/* Lists the events of one call: memory ("alloc gathered 32"), kernels, collectives, and the ends of
 * ranges ("leave all_gather"). */
static const char *events_of(int32_t call) {
    static char text[2048];
    size_t length = 0;
    text[0] = '\0';
    for (size_t i = 0; i < record.count; i++) {
        const fcd_event *e = &record.events[i];
        const bool memory = e->kind == FCD_ALLOC || e->kind == FCD_FREE;
        const bool labeled = memory || e->kind == FCD_LEAVE;
        const bool listed = labeled || (e->kind >= FCD_PACK && e->kind <= FCD_PACK_GRADIENTS) ||
                            (e->kind >= FCD_ALL_GATHER && e->kind <= FCD_WAIT_WORK);
        if (e->call == call && listed) {
            length += (size_t)snprintf(text + length, sizeof text - length, "%s%s%s%s",
                                       length > 0 ? "; " : "", fcd_kind_names[e->kind],
                                       labeled ? " " : "", labeled ? e->label : "");
        }
        if (e->call == call && memory) {
            length +=
                (size_t)snprintf(text + length, sizeof text - length, " %lld", (long long)e->bytes);
        }
    }
    return text;
}

/* ---- order ---- */

static void gather_buffer_is_freed_at_the_end_of_its_copy_out(void **state) {
    fixture f = two_units();
    (void)state;
    begin(describe(&f, false));
    run(0, STEP);
    assert_string_equal(events_of(1),
                        "alloc gathered 32; pack; all_gather; leave all_gather; wait_work; "
                        "alloc gathered 32; unpack; free gathered 32; leave all_gather_copy_out; "
                        "leave pre_forward");
    assert_string_equal(events_of(3), "free gathered 32; leave post_forward");
    assert_string_equal(events_of(4), "leave post_forward"); /* the root stays unsharded */
    end();
}

static void reduction_frees_gradient_before_its_output_exists(void **state) {
    fixture f = two_units();
    (void)state;
    begin(describe(&f, false));
    run(0, STEP);
    assert_string_equal(events_of(12),
                        "leave post_backward_accumulate; free gathered 32; "
                        "leave post_backward_reshard; alloc gradients 32; pack_gradients; "
                        "free gradients 32; alloc gradients 16; reduce_scatter; wait_work; "
                        "free gradients 32; leave post_backward_reduce");
    assert_string_equal(events_of(14), "free gradients 16; free gradients 16");
    end();
}

static void gather_buffer_is_kept_until_the_next_gather_on_devices_with_streams(void **state) {
    fixture f = two_units();
    (void)state;
    begin(describe(&f, true));
    run(0, STEP);
    assert_string_equal(events_of(1),
                        "alloc gathered 32; pack; all_gather; wait_work; leave all_gather; "
                        "free gathered 32; alloc gathered 32; unpack; leave all_gather_copy_out; "
                        "leave pre_forward");
    assert_string_equal(events_of(4), "leave post_forward; free gathered 32");
    end();
}

static void reduction_without_overlap_ends_in_its_call(void **state) {
    fixture f = two_units();
    (void)state;
    f.units[1].overlap = false;
    begin(describe(&f, true));
    run(0, STEP);
    assert_non_null(strstr(events_of(12), "free gradients 32; leave post_backward_reduce"));
    end();
}

/* Call 8 makes the storage of 40 bytes the memory of a gradient. */
static void memory_of_a_gradient_is_no_activation_any_more(void **state) {
    fixture f = two_units();
    (void)state;
    begin(describe(&f, false));
    run(0, 8);
    assert_int_equal(record.live[FCD_ACTIVATIONS], 140);
    run(8, 9);
    assert_int_equal(record.live[FCD_ACTIVATIONS], 100);
    assert_int_equal(record.live[FCD_GRADIENTS], 40);
    run(9, 13);
    assert_int_equal(record.live[FCD_ACTIVATIONS], 0);
    assert_int_equal(record.live[FCD_GRADIENTS], 40 + 16);
    end();
}

static void second_gradient_in_a_storage_is_added_to_the_first(void **state) {
    const fcd_call second = {FCD_CALL_GRADIENT, {0, 0, 0, 100}};
    fixture f = two_units();
    int64_t added = 0;
    (void)state;
    begin(describe(&f, false));
    run(0, 9);
    record.call = STEP;
    assert_int_equal(fcd_model_call(&model, &second), FC_OK);
    for (size_t i = 0; i < record.count; i++) {
        added += record.events[i].kind == FCD_ADD ? record.events[i].bytes : 0;
    }
    assert_int_equal(added, 32);
    assert_string_equal(events_of(STEP),
                        "free activations 100; alloc gradients 100; free gradients 100");
    assert_int_equal(record.live[FCD_GRADIENTS], 40);
    end();
}

static void offloaded_shards_and_gradients_use_no_device_memory(void **state) {
    fixture f = two_units();
    (void)state;
    for (size_t i = 0; i < UNITS; i++) {
        f.units[i].offload = true;
        f.units[i].pinned = true;
    }
    begin(describe(&f, true));
    assert_int_equal(record.device_live, 0);
    assert_int_equal(record.live[FCD_HOST], 2 * 16);
    run(0, 14);
    assert_int_equal(record.device_live, 0);
    assert_int_equal(record.live[FCD_HOST], 4 * 16);
    end();
}

/* ---- release ---- */

static void all_objects_are_released_after_any_call(void **state) {
    (void)state;
    for (size_t streams = 0; streams < 2; streams++) {
        for (size_t calls = 0; calls <= STEP; calls++) {
            fixture f = two_units();
            f.units[1].replicas = 2;
            f.units[1].post_forward_world = 2;
            begin(describe(&f, streams != 0));
            run(0, calls);
            end();
        }
    }
}

/* ---- errors ---- */

static const char *message_of(const fixture *changed) {
    static fc_error error;
    fixture f = *changed;
    error.message[0] = '\0';
    const fc_status status = fcd_description_check(describe(&f, false), &error);
    assert_true(status == FC_OK || status == FC_EVALUE);
    return error.message;
}

static void invalid_description_is_refused_with_the_name_of_the_item(void **state) {
    const int32_t targets[1] = {5};
    const int64_t negative[2] = {4, -2};
    fixture f = two_units();
    (void)state;
    assert_string_equal(message_of(&f), "");
    f.units[1].state = 2;
    assert_string_equal(message_of(&f), "units[1].state: 2 is not a state; expected 0 to 1");
    f = two_units();
    f.units[0].world = 0;
    assert_string_equal(message_of(&f), "units[0].world: 0; expected at least 1");
    f = two_units();
    f.units[1].max_input_buffers = 0;
    assert_string_equal(message_of(&f), "units[1].max_input_buffers: 0; expected at least 1");
    f = two_units();
    f.states[1].root = 2;
    assert_string_equal(
        message_of(&f),
        "states[1].root: 2 is not a root; expected its own index, or that of an earlier root");
    f = two_units();
    f.states[0].forward_prefetch = targets;
    f.states[0].forward_count = 1;
    assert_string_equal(message_of(&f),
                        "states[0].forward_prefetch[0]: 5 is not a state; expected 0 to 1");
    f = two_units();
    f.params[1].dim = 2;
    assert_string_equal(message_of(&f),
                        "units[1].params[0].sizes: cannot shard dim 2 of a tensor of 2 dimensions");
    f = two_units();
    f.params[1].sizes = negative;
    assert_non_null(strstr(message_of(&f), "units[1].params[0].sizes: "));
}

static void refuse(const fcd_call *call, const char *message) {
    assert_int_equal(fcd_model_call(&model, call), FC_EVALUE);
    assert_string_equal(model.error.message, message);
    model.error.message[0] = '\0';
}

static void error_of_an_invalid_call_contains_the_value(void **state) {
    const fcd_call calls[] = {
        {FCD_CALL_PRE_FORWARD, {2}},         {FCD_CALL_GRADIENT, {0, 1, -1, 32}},
        {FCD_CALL_ALLOC, {STEP, 1}},         {FCD_CALL_ALLOC, {0, -1}},
        {FCD_CALL_GRADIENT, {1, 0, -1, 32}}, {FCD_CALL_GRADIENT, {0, 0, -1, 31}},
    };
    fixture f = two_units();
    (void)state;
    begin(describe(&f, false));
    refuse(&calls[0], "state 2; expected 0 to 1");
    refuse(&calls[1], "parameter 1; expected 0 to 0");
    refuse(&calls[2], "storage 15; expected 0 to 14");
    refuse(&calls[3], "-1 bytes; expected at least 0");
    refuse(&calls[4], "parameter 'weight' is not unsharded, or is frozen");
    run(0, 5);
    refuse(&step[2], "storage 0 is allocated already");
    refuse(&calls[5], "31 bytes; the gradient of 'weight' needs 32");
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gather_buffer_is_freed_at_the_end_of_its_copy_out),
        cmocka_unit_test(reduction_frees_gradient_before_its_output_exists),
        cmocka_unit_test(gather_buffer_is_kept_until_the_next_gather_on_devices_with_streams),
        cmocka_unit_test(reduction_without_overlap_ends_in_its_call),
        cmocka_unit_test(memory_of_a_gradient_is_no_activation_any_more),
        cmocka_unit_test(second_gradient_in_a_storage_is_added_to_the_first),
        cmocka_unit_test(offloaded_shards_and_gradients_use_no_device_memory),
        cmocka_unit_test(all_objects_are_released_after_any_call),
        cmocka_unit_test(invalid_description_is_refused_with_the_name_of_the_item),
        cmocka_unit_test(error_of_an_invalid_call_contains_the_value),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
