/* Fixed parts of a group: process groups, allocators, fallbacks, and names of profiler ranges. */
#include "core/group_base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static int owner;

static void log_label(void *group, const char *label) {
    assert_ptr_equal(group, &owner);
    sim_log("%s", label);
}

static fc_group_base begin(const fc_callbacks *callbacks, bool profile) {
    static fc_param zeroed;
    fc_group_base base;
    fc_param **params = (fc_param **)calloc(3, sizeof *params);
    assert_non_null(params);
    params[0] = params[1] = params[2] = &zeroed;
    sim_begin((sim_config){.seed = 1, .profile = profile});
    fc_group_base_init(&base, &owner, callbacks, NULL, params, 3, sim_device(), 4, 2);
    return base;
}

static void end(fc_group_base *base) {
    fc_group_base_fini(base);
    assert_null(base->params);
    sim_end();
}

static void shard_process_group_has_world_and_rank_of_shard_group(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, false);
    assert_int_equal(base.shard.world, 4);
    assert_int_equal(base.shard.rank, 2);
    assert_int_equal(fc_group_base_all(&base).first, 0);
    assert_int_equal(fc_group_base_all(&base).end, 3);
    end(&base);
}

static void reduce_scatter_uses_own_process_group_if_set(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, false);
    assert_ptr_equal(fc_group_base_scatter_group(&base), &base.shard);
    assert_false(fc_group_base_is_replicated(&base));
    fc_process_group_set(&base.replicate, "replicas", 2, 0);
    assert_ptr_equal(fc_group_base_scatter_group(&base), &base.shard);
    fc_process_group_set(&base.scatter, "scatter", 4, 2);
    assert_ptr_equal(fc_group_base_scatter_group(&base), &base.scatter);
    assert_true(fc_group_base_is_replicated(&base));
    end(&base);
}

static void group_base_fini_releases_every_process_group(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, false);
    fc_process_group *const process_groups[4] = {&base.shard, &base.scatter, &base.replicate,
                                                 &base.post_forward};
    sim_pg_register("world", 4, 2, NULL, NULL);
    for (size_t i = 0; i < 4; i++) {
        fc_process_group_set(process_groups[i], "world", 4, 2);
        assert_int_equal(fc_process_group_open(process_groups[i]), FC_OK);
    }
    assert_int_equal(sim_count_alive().groups, 4);
    end(&base); /* fails if a process group is still referenced */
}

static void buffer_comes_from_process_group_allocator_if_available(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, false);
    fct_pg *groups[2] = {NULL, NULL};
    sim_pg_register("world", 4, 2, NULL, NULL);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(fct_pg_resolve("world", &groups[i]), 0);
    }
    fc_process_group_set(&base.shard, "world", 4, 2);
    assert_int_equal(fc_process_group_open(&base.shard), FC_OK);
    fc_group_base_set_memory(&base, sim_allocator_new(groups[0]), sim_allocator_new(groups[1]));
    for (int has_allocator = 0; has_allocator < 2; has_allocator++) {
        fct_tensor *buffer = NULL;
        bool has = !has_allocator;
        sim_pg_has_memory("world", has_allocator != 0);
        assert_int_equal(fc_group_base_has_memory(&base, base.gather_memory, &has), FC_OK);
        assert_int_equal(has, has_allocator);
        sim_calls_clear();
        assert_int_equal(
            fc_group_base_buffer(&base, base.reduce_memory, &base.shard, 5, FCK_FLOAT32, &buffer),
            FC_OK);
        assert_string_equal(sim_calls_text(), has_allocator
                                                  ? "fct_allocator_serves fct_allocator_empty"
                                                  : "fct_allocator_serves fct_tensor_empty");
        assert_int_equal(sim_tensor_numel(buffer), 5);
        fct_tensor_release(buffer);
    }
    assert_int_equal(fct_pg_resolve("world", &groups[1]), 0);
    fc_group_base_set_memory(&base, NULL, sim_allocator_new(groups[1]));
    fct_tensor *buffer = NULL;
    sim_calls_clear();
    assert_int_equal(
        fc_group_base_buffer(&base, base.gather_memory, &base.shard, 5, FCK_FLOAT32, &buffer),
        FC_OK);
    assert_string_equal(sim_calls_text(), "fct_tensor_empty"); /* no process group is queried */
    fct_tensor_release(buffer);
    end(&base);
}

static void allocator_receives_open_process_group_of_several_ranks(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, false);
    fct_pg *group = NULL;
    sim_pg_register("world", 4, 2, NULL, NULL);
    sim_pg_register("single", 1, 0, NULL, NULL);
    sim_pg_has_memory("world", true);
    assert_int_equal(fct_pg_resolve("world", &group), 0);
    fc_group_base_set_memory(&base, sim_allocator_new(group), NULL);
    for (int64_t world = 1; world <= 4; world += 3) {
        fct_tensor *buffer = NULL;
        fc_process_group_set(&base.shard, world > 1 ? "world" : "single", world, 0);
        assert_int_equal(
            fc_group_base_buffer(&base, base.gather_memory, &base.shard, 5, FCK_FLOAT32, &buffer),
            FC_OK);
        assert_ptr_equal(sim_tensor_user(buffer), world > 1 ? group : NULL);
        assert_ptr_equal(base.shard.handle, world > 1 ? group : NULL);
        fct_tensor_release(buffer);
    }
    end(&base);
}

static void failing_process_group_allocator_fails_the_allocation_of_a_buffer(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, false);
    fct_pg *group = NULL;
    sim_pg_register("world", 4, 2, NULL, NULL);
    sim_pg_has_memory("world", true);
    assert_int_equal(fct_pg_resolve("world", &group), 0);
    fc_process_group_set(&base.shard, "world", 4, 2);
    assert_int_equal(fc_process_group_open(&base.shard), FC_OK);
    fc_group_base_set_memory(&base, sim_allocator_new(group), NULL);
    for (int64_t nth = 1; nth <= 2; nth++) {
        fct_tensor *buffer = NULL;
        const char *name = NULL;
        sim_fault_arm(nth, SIM_ONCE);
        assert_int_equal(
            fc_group_base_buffer(&base, base.gather_memory, &base.shard, 5, FCK_FLOAT32, &buffer),
            FC_ERAISED);
        assert_int_equal(sim_fault_fired(&name), SIM_FAULT_BOUNDARY);
        assert_string_equal(name, nth == 1 ? "fct_allocator_serves" : "fct_allocator_empty");
        assert_null(buffer);
        sim_fault_arm(0, SIM_ONCE);
    }
    end(&base);
}

static void group_uses_exactly_the_fallbacks_of_its_mask(void **state) {
    (void)state;
    static const fc_fallback all[] = {FC_FALLBACK_GATHER, FC_FALLBACK_REDUCE, FC_FALLBACK_EAGER,
                                      FC_FALLBACK_FREE,   FC_FALLBACK_SWAP,   FC_FALLBACK_GRADS};
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, false);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        assert_false(fc_group_base_uses_fallback(&base, all[i]));
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        base.fallbacks = (uint32_t)all[i];
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++) {
            assert_int_equal(fc_group_base_uses_fallback(&base, all[j]), i == j);
        }
    }
    end(&base);
}

static void profiler_ranges_contain_module_names(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, true);
    base.name = "blocks.3";
    fct_profile_exit(fc_group_base_enter_range(&base, "all_gather"));
    base.name = NULL; /* the root */
    fct_profile_exit(fc_group_base_enter_range(&base, "all_gather"));
    fct_profile_exit(fc_group_base_enter_range(&base, "post_backward_rs_wait"));
    assert_string_equal(sim_log_text(), "<FSDP::all_gather (blocks.3)> <FSDP::all_gather> "
                                        "<FSDP::post_backward_rs_wait ()>");
    end(&base);
}

static void profiler_range_of_long_name_is_complete(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = NULL}, true);
    char name[400], expected[sizeof name + 40];
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    base.name = name;
    (void)snprintf(expected, sizeof expected, "<FSDP::all_gather (%s)>", name);
    fct_profile_exit(fc_group_base_enter_range(&base, "all_gather"));
    assert_string_equal(sim_log_text(), expected);
    end(&base);
}

static void no_range_or_log_without_profiler_and_logging(void **state) {
    (void)state;
    fc_group_base base = begin(&(const fc_callbacks){.log = log_label}, false);
    assert_null(fc_group_base_enter_range(&base, "all_gather"));
    base.logs = true;
    fc_group_base_log(&base, "unshard");
    assert_string_equal(sim_log_text(), "unshard");
    base.logs = false;
    fc_group_base_log(&base, "reshard");
    assert_string_equal(sim_log_text(), "unshard");
    end(&base);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shard_process_group_has_world_and_rank_of_shard_group),
        cmocka_unit_test(reduce_scatter_uses_own_process_group_if_set),
        cmocka_unit_test(group_base_fini_releases_every_process_group),
        cmocka_unit_test(buffer_comes_from_process_group_allocator_if_available),
        cmocka_unit_test(allocator_receives_open_process_group_of_several_ranks),
        cmocka_unit_test(failing_process_group_allocator_fails_the_allocation_of_a_buffer),
        cmocka_unit_test(group_uses_exactly_the_fallbacks_of_its_mask),
        cmocka_unit_test(profiler_ranges_contain_module_names),
        cmocka_unit_test(profiler_range_of_long_name_is_complete),
        cmocka_unit_test(no_range_or_log_without_profiler_and_logging),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
