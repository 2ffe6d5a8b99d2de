/* State of an extended parameter: lists of tensors, and memory that is allocated and freed. */
#include "core/extension.h"

#include <string.h>

#include "sim.h"

static fc_extension extension;
static fc_error error;

static fct_tensor *vector(int64_t numel, fct_dtype dtype) {
    double zeros[64] = {0};
    return sim_tensor_new(dtype, 1, &numel, zeros);
}

/* Sets two inputs: 3 floats and `bytes` bytes. */
static void set_inputs(int64_t bytes) {
    fct_tensor *inputs[2] = {vector(3, FCK_FLOAT32), vector(bytes, FCK_UINT8)};
    assert_int_equal(fc_extension_set_inputs(&extension, inputs, 2), FC_OK);
    fct_tensor_release(inputs[0]);
    fct_tensor_release(inputs[1]);
}

static void begin(void) {
    memset(&extension, 0, sizeof extension);
    error.message[0] = '\0';
    sim_begin((sim_config){.seed = 1});
}

static void end(void) {
    fc_extension_fini(&extension);
    sim_end();
}

static fc_status alloc(void) {
    return fc_extension_alloc(&extension, 2, sim_device(), "weight", &error);
}

static void drop_inputs_releases_tensors_and_keeps_sizes(void **state) {
    (void)state;
    begin();
    set_inputs(5);
    assert_int_equal(sim_tensor_refs(extension.inputs[0].tensor), 1);
    fc_extension_drop_inputs(&extension);
    assert_int_equal(sim_count_alive().tensors, 0);
    assert_null(extension.inputs[1].tensor);
    assert_int_equal(extension.inputs[1].numel, 5);
    assert_int_equal(extension.inputs[1].dtype, FCK_UINT8);
    end();
}

static void extension_outputs_have_memory_between_alloc_and_free(void **state) {
    (void)state;
    begin();
    set_inputs(5);
    fc_extension_drop_inputs(&extension);
    assert_int_equal(alloc(), FC_OK);
    const fct_tensor *first = extension.outputs[0].tensor;
    assert_int_equal(sim_tensor_numel(first), 6);
    assert_int_equal(fc_extension_bytes(&extension), 6 * 4 + 10);
    for (int again = 0; again < 2; again++) {
        fc_extension_free(&extension);
        assert_int_equal(fc_extension_bytes(&extension), 0);
        assert_int_equal(sim_live_bytes(), 0);
        assert_int_equal(alloc(), FC_OK);
        assert_ptr_equal(extension.outputs[0].tensor, first);
        assert_int_equal(fc_extension_bytes(&extension), 6 * 4 + 10);
    }
    end();
}

/* The inner tensor is a view in the middle of a larger storage; the whole storage is allocated and
 * freed. */
static void inner_tensor_size_is_its_whole_storage(void **state) {
    (void)state;
    begin();
    const int64_t two[1] = {2};
    const int64_t one[1] = {1};
    fct_tensor *storage = vector(7, FCK_FLOAT32);
    fct_tensor *part = NULL;
    assert_int_equal(fct_tensor_alias(storage, 1, two, one, 4, &part), 0);
    assert_int_equal(fc_extension_set_inner(&extension, &part, 1), FC_OK);
    assert_int_equal(extension.inner[0].bytes, 28);
    fc_extension_free(&extension);
    assert_false(sim_tensor_has_memory(storage));
    assert_int_equal(fc_extension_set_inner(&extension, &part, 1), FC_OK); /* while freed */
    assert_int_equal(extension.inner[0].bytes, (4 + 2) * 4);
    assert_int_equal(alloc(), FC_OK);
    assert_int_equal(fc_extension_bytes(&extension), 24);
    fct_tensor_release(part);
    fct_tensor_release(storage);
    end();
}

static void outputs_are_replaced_if_input_sizes_change(void **state) {
    (void)state;
    begin();
    set_inputs(5);
    assert_int_equal(alloc(), FC_OK);
    const fct_tensor *first = extension.outputs[0].tensor;
    fc_extension_free(&extension);
    set_inputs(6);
    assert_int_equal(alloc(), FC_OK);
    assert_ptr_equal(extension.outputs[0].tensor, first);
    assert_int_equal(sim_tensor_numel(extension.outputs[1].tensor), 12);
    assert_int_equal(sim_count_alive().storages, 2 + 2);
    /* Fewer inputs, then none. */
    fct_tensor *only[1] = {vector(3, FCK_FLOAT32)};
    assert_int_equal(fc_extension_set_inputs(&extension, only, 1), FC_OK);
    fct_tensor_release(only[0]);
    assert_int_equal(alloc(), FC_OK);
    assert_int_equal(extension.output_count, 1);
    assert_ptr_equal(extension.outputs[0].tensor, first);
    assert_int_equal(fc_extension_set_inputs(&extension, NULL, 0), FC_OK);
    assert_int_equal(alloc(), FC_OK);
    assert_int_equal(extension.output_count, 0);
    assert_int_equal(sim_count_alive().tensors, 0);
    end();
}

static void output_shared_with_inner_tensor_is_not_replaced(void **state) {
    (void)state;
    begin();
    const int64_t two[1] = {2};
    const int64_t one[1] = {1};
    fct_tensor *view = NULL;
    set_inputs(5);
    assert_int_equal(alloc(), FC_OK);
    assert_int_equal(fct_tensor_alias(extension.outputs[1].tensor, 1, two, one, 0, &view), 0);
    fc_extension_free(&extension);
    set_inputs(6);
    assert_int_equal(alloc(), FC_ESTATE);
    assert_non_null(strstr(error.message, "parameter 'weight': fsdp_pre_all_gather returned"));
    fct_tensor *only[1] = {vector(3, FCK_FLOAT32)};
    assert_int_equal(fc_extension_set_inputs(&extension, only, 1), FC_OK);
    fct_tensor_release(only[0]);
    assert_int_equal(alloc(), FC_ESTATE);
    set_inputs(5);
    assert_int_equal(alloc(), FC_OK);
    fct_tensor_release(view);
    end();
}

static void failed_extension_call_can_be_repeated(void **state) {
    (void)state;
    size_t failures = 0;
    for (int64_t nth = 1; failures + 1 == (size_t)nth; nth++) {
        begin();
        fct_tensor *inputs[2] = {vector(3, FCK_FLOAT32), vector(4, FCK_UINT8)};
        fct_tensor *inner[1] = {vector(6, FCK_FLOAT32)};
        sim_fault_arm(nth, SIM_ONCE);
        fc_status status = fc_extension_set_inner(&extension, inner, 1);
        fc_extension_free(&extension);
        status = status == FC_OK ? fc_extension_set_inputs(&extension, inputs, 2) : status;
        status = status == FC_OK ? alloc() : status;
        failures += status != FC_OK;
        sim_fault_arm(0, SIM_ONCE);
        sim_discard_error();
        fc_extension_free(&extension);
        assert_int_equal(fc_extension_bytes(&extension), 0);
        assert_int_equal(fc_extension_set_inner(&extension, inner, 1), FC_OK);
        assert_int_equal(fc_extension_set_inputs(&extension, inputs, 2), FC_OK);
        assert_int_equal(alloc(), FC_OK);
        assert_int_equal(fc_extension_bytes(&extension), (6 + 6) * 4 + 8);
        fct_tensor_release(inputs[0]);
        fct_tensor_release(inputs[1]);
        fct_tensor_release(inner[0]);
        end();
    }
    assert_true(failures >= 6);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(drop_inputs_releases_tensors_and_keeps_sizes),
        cmocka_unit_test(extension_outputs_have_memory_between_alloc_and_free),
        cmocka_unit_test(inner_tensor_size_is_its_whole_storage),
        cmocka_unit_test(outputs_are_replaced_if_input_sizes_change),
        cmocka_unit_test(output_shared_with_inner_tensor_is_not_replaced),
        cmocka_unit_test(failed_extension_call_can_be_repeated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
