/* csrc/core/registration.c: which parameter objects the modules hold after a swap that succeeds,
 * that fails, and whose rollback fails. The callbacks record the state of each parameter. */
#include "sim.h"

#include <string.h>

#include "core/registration.h"

enum { COUNT = 3 };

/* State of the parameters that the modules hold. Bit n of `failing`: call n of swap(), counted from
 * 0, sets an exception. As a module's __setattr__, swap() must not run with a pending exception. */
static struct {
    fc_sharded_state held[COUNT];
    unsigned calls;
    unsigned failing;
} modules;

static int swap(void *param, fc_sharded_state state) {
    const bool fails = (modules.failing >> modules.calls++ & 1) != 0;
    assert_false(sim_error_pending());
    fct_error_put_back(fails ? &modules : NULL);
    *(fc_sharded_state *)param = fails ? (fc_sharded_state)0 : state;
    return fails ? -1 : 0;
}

static const fc_callbacks CALLBACKS = {.swap = swap};

typedef struct fixture {
    fc_group_base base;
    fc_comm_ctx comm;
    fc_param params[COUNT];
    bool dirty;
} fixture;

/* Returns a group whose modules hold the parameters of `own`. */
static fixture *make_fixture(fc_sharded_state own, unsigned failing) {
    static fixture f;
    static fc_param *params[COUNT];
    memset(&f, 0, sizeof f);
    modules.calls = 0;
    modules.failing = failing;
    sim_discard_error();
    for (size_t i = 0; i < COUNT; i++) {
        modules.held[i] = own;
        f.params[i] = (fc_param){.owner = &modules.held[i], .registered_state = own};
        params[i] = &f.params[i];
    }
    f.base =
        (fc_group_base){.callbacks = &CALLBACKS, .comm = &f.comm, .params = params, .count = COUNT};
    return &f;
}

static void expect_all(const fixture *f, fc_sharded_state state) {
    for (size_t i = 0; i < COUNT; i++) {
        assert_int_equal(modules.held[i], state);
        assert_int_equal(f->params[i].registered_state, state);
    }
}

static void swap_registers_every_parameter(void **state) {
    (void)state;
    fixture *f = make_fixture(FC_SHARDED, 0);
    f->dirty = true;
    assert_int_equal(fc_registration_swap(&f->base, FC_SHARDED, FC_UNSHARDED, &f->dirty), FC_OK);
    expect_all(f, FC_UNSHARDED);
    assert_false(f->dirty);
    assert_int_equal(fc_registration_check(&f->base, FC_UNSHARDED), FC_OK);
}

static void failed_swap_restores_the_previous_parameters(void **state) {
    (void)state;
    fixture *f = make_fixture(FC_SHARDED, 1U << 1);
    assert_int_equal(fc_registration_swap(&f->base, FC_SHARDED, FC_UNSHARDED, &f->dirty),
                     FC_ERAISED);
    expect_all(f, FC_SHARDED);
    assert_false(f->dirty);
}

/* The second call fails, and the third, which restores the second parameter. */
static void failed_rollback_of_registration_sets_dirty_until_next_swap(void **state) {
    (void)state;
    fixture *f = make_fixture(FC_SHARDED, 1U << 1 | 1U << 2);
    assert_int_equal(fc_registration_swap(&f->base, FC_SHARDED, FC_UNSHARDED, &f->dirty),
                     FC_ERAISED);
    assert_true(f->dirty);
    assert_int_equal(modules.held[0], FC_SHARDED);
    assert_int_equal(fc_registration_check(&f->base, FC_SHARDED), FC_ESTATE);
    assert_string_equal(f->comm.error.message,
                        "parameter 1 has sharded state 0 in a group of sharded state 1");
    assert_true(sim_error_pending());
    sim_discard_error();
    assert_int_equal(fc_registration_swap(&f->base, FC_SHARDED, FC_SHARDED, &f->dirty), FC_OK);
    expect_all(f, FC_SHARDED);
    assert_false(f->dirty);
}

/* A swap to the group's own state repairs the registration, so it has no state to roll back to. */
static void failed_swap_to_own_state_sets_dirty(void **state) {
    (void)state;
    fixture *f = make_fixture(FC_UNSHARDED, 1U << 2);
    assert_int_equal(fc_registration_swap(&f->base, FC_UNSHARDED, FC_UNSHARDED, &f->dirty),
                     FC_ERAISED);
    assert_true(f->dirty);
    assert_int_equal(modules.calls, COUNT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(swap_registers_every_parameter),
        cmocka_unit_test(failed_swap_restores_the_previous_parameters),
        cmocka_unit_test(failed_rollback_of_registration_sets_dirty_until_next_swap),
        cmocka_unit_test(failed_swap_to_own_state_sets_dirty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
