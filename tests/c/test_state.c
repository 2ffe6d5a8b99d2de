/* The beginning of an iteration, and the agreement at the end of a backward: the comparison of the
 * ranks' collectives. Whole steps are in test_train.c, resets in test_reset.c. */
#include "core/state.h"

#include <string.h>

#include "sim_model.h"

static const sim_scenario with_agreement = {.world = 2,
                                            .replicas = 2,
                                            .layers = 3,
                                            .has_agreement = true,
                                            .shape_count = 1,
                                            .shapes = {{.ndim = 1, .sizes = {4}}}};

static sim_model *begin(bool streams) {
    sim_scenario scenario = with_agreement;
    scenario.device.seed = 7; /* no collective completes at once */
    scenario.device.streams = streams;
    sim_begin(scenario.device);
    return sim_model_new(&scenario);
}

static void end(sim_model *m) {
    sim_model_free(m);
    sim_end();
}

static void begin_iteration_without_after_compute_skips_compute_stream(void **state) {
    (void)state;
    for (int after = 0; after < 2; after++) {
        sim_model *m = begin(true);
        assert_int_equal(fc_comm_init_streams(&m->comm), FC_OK);
        sim_fault_arm(1, SIM_ONCE); /* the call that orders the streams */
        const fc_status status = fc_state_begin_iteration(&m->layers[0].core, after != 0);
        assert_int_equal(status, after != 0 ? FC_ERAISED : FC_OK);
        sim_fault_arm(0, SIM_ONCE);
        sim_discard_error();
        end(m);
    }
}

static void different_collectives_of_ranks_fail_the_backward(void **state) {
    (void)state;
    sim_model *m = begin(false);
    sim_set_agreement(true, "collective mismatch: rank 0 gathers 'a', rank 1 gathers 'b'");
    assert_int_equal(sim_model_step(m), FC_ESTATE);
    assert_non_null(strstr(m->comm.error.message, "rank 1 gathers 'b' (process group '"));
    assert_non_null(strstr(m->comm.error.message, "call reset_iter_state() and zero_grad()"));
    assert_int_equal(sim_agreements_in_flight(), 0); /* those of all process groups are read */
    sim_set_agreement(true, "");
    assert_int_equal(fc_state_reset(&m->layers[0].core), FC_OK);
    sim_model_zero_grad(m);
    sim_model_discard_step(m);
    assert_int_equal(sim_model_step(m), FC_OK);
    end(m);
}

static int most_in_flight;

static int count_agreements_and_set_sharded_grad(void *owner, fct_tensor *local) {
    const int in_flight = sim_agreements_in_flight();
    most_in_flight = in_flight > most_in_flight ? in_flight : most_in_flight;
    return sim_callbacks.set_sharded_grad(owner, local);
}

static void agreement_runs_while_reductions_complete(void **state) {
    (void)state;
    fc_callbacks callbacks = sim_callbacks;
    sim_model *m = begin(false);
    callbacks.set_sharded_grad = count_agreements_and_set_sharded_grad;
    for (size_t i = 0; i < m->layer_count; i++) {
        m->layers[i].groups[0].core.base.callbacks = &callbacks;
    }
    most_in_flight = 0;
    assert_int_equal(sim_model_step(m), FC_OK);
    assert_true(most_in_flight > 0);
    assert_int_equal(sim_agreements_in_flight(), 0);
    end(m);
}

/* The checksums of all-reduced gradients are known only after the reductions. */
static void agreement_on_checksums_starts_after_the_reductions(void **state) {
    (void)state;
    fc_callbacks callbacks = sim_callbacks;
    const sim_checksum *list;
    size_t all_reduces = 0;
    sim_model *m = begin(false);
    callbacks.set_sharded_grad = count_agreements_and_set_sharded_grad;
    for (size_t i = 0; i < m->layer_count; i++) {
        m->layers[i].groups[0].core.base.callbacks = &callbacks;
    }
    m->comm.checksums = true;
    most_in_flight = 0;
    assert_int_equal(sim_model_step(m), FC_OK);
    assert_int_equal(most_in_flight, 0);
    const size_t count = sim_checksums(&list);
    for (size_t i = 0; i < count; i++) {
        all_reduces += list[i].kind == FCT_OP_ALL_REDUCE ? 1 : 0;
        assert_true(list[i].value != 0);
    }
    assert_int_equal(all_reduces, m->layer_count);
    assert_true(count >= 2 * m->layer_count);
    end(m);
}

static void device_with_streams_has_no_agreement(void **state) {
    (void)state;
    sim_model *m = begin(true);
    sim_set_agreement(true, "collective mismatch");
    assert_int_equal(sim_model_step(m), FC_OK);
    end(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(begin_iteration_without_after_compute_skips_compute_stream),
        cmocka_unit_test(different_collectives_of_ranks_fail_the_backward),
        cmocka_unit_test(agreement_runs_while_reductions_complete),
        cmocka_unit_test(agreement_on_checksums_starts_after_the_reductions),
        cmocka_unit_test(device_with_streams_has_no_agreement),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
