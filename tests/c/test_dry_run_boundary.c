/* The boundary of the dry run: bytes by purpose, the peak, and the life of tensors, storages and
 * events. */
#include "dry_run/boundary.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "bridge/stream.h"
#include "kernels/kernels.h"
#include "transport/transport.h"

static fcd_record record;

static const fct_device cpu = {.type = FCT_DEVICE_CPU, .index = -1};
static const fct_device cuda = {.type = FCT_DEVICE_CUDA, .index = -1};

static void begin(bool streams) {
    fcd_current_record = NULL; /* an earlier test may have failed */
    fcd_record_init(&record, streams);
    record.purpose = FCD_GATHERED;
}

static void end(void) {
    assert_int_equal(fcd_record_objects(&record), 0);
    for (size_t i = 0; i < FCD_PURPOSE_COUNT; i++) {
        assert_int_equal(record.live[i], 0);
    }
    fcd_record_fini(&record);
}

static fct_tensor *new_tensor(int64_t numel, fct_device device) {
    fct_tensor *t = NULL;
    assert_int_equal(fct_tensor_empty(numel, FCK_FLOAT32, device, &t), 0);
    return t;
}

static void bytes_are_counted_by_purpose(void **state) {
    (void)state;
    begin(true);
    fct_tensor *gathered = new_tensor(10, cuda);
    record.purpose = FCD_GRADIENTS;
    fct_tensor *gradient = new_tensor(3, cuda);
    assert_int_equal(record.live[FCD_GATHERED], 40);
    assert_int_equal(record.live[FCD_GRADIENTS], 12);
    assert_int_equal(record.device_live, 52);
    fct_tensor_release(gathered);
    assert_int_equal(record.live[FCD_GATHERED], 0);
    assert_int_equal(record.device_live, 12);
    assert_int_equal(record.device_peak, 52);
    fct_tensor_release(gradient);
    end();
}

static void host_memory_is_not_part_of_the_peak(void **state) {
    fct_tensor *copy = NULL;
    (void)state;
    begin(true);
    fct_tensor *t = new_tensor(10, cuda);
    assert_int_equal(fct_tensor_to_host(t, true, &copy), 0);
    assert_int_equal(record.live[FCD_HOST], 40);
    assert_int_equal(record.device_peak, 40);
    fct_tensor_release(copy);
    fct_tensor_release(t);
    end();
}

static void memory_of_the_cpu_is_device_memory_without_streams(void **state) {
    (void)state;
    begin(false);
    fct_tensor *t = new_tensor(10, cpu);
    assert_int_equal(record.live[FCD_HOST], 0);
    assert_int_equal(record.device_peak, 40);
    fct_tensor_release(t);
    end();
}

static void alias_keeps_memory_until_its_release(void **state) {
    const int64_t size[1] = {4};
    const int64_t stride[1] = {1};
    fct_tensor *alias = NULL;
    (void)state;
    begin(false);
    fct_tensor *t = new_tensor(10, cpu);
    assert_int_equal(fct_tensor_alias(t, 1, size, stride, 6, &alias), 0);
    fct_tensor_release(t);
    assert_int_equal(record.live[FCD_GATHERED], 40);
    fct_tensor_release(alias);
    end();
}

static void alias_beyond_the_storage_fails_with_the_end_of_the_alias(void **state) {
    const int64_t size[1] = {5};
    const int64_t stride[1] = {1};
    fct_tensor *alias = NULL;
    (void)state;
    begin(false);
    fct_tensor *t = new_tensor(10, cpu);
    assert_int_equal(fct_tensor_alias(t, 1, size, stride, 6, &alias), -1);
    assert_string_equal(record.error, "an alias ends at element 11 of a storage of 40 bytes");
    fct_tensor_release(t);
    end();
}

static void freed_storage_has_no_memory_until_its_next_allocation(void **state) {
    fct_facts facts;
    (void)state;
    begin(false);
    fct_tensor *t = new_tensor(10, cpu);
    fct_storage_free(t);
    assert_int_equal(record.live[FCD_GATHERED], 0);
    fct_tensor_facts(t, &facts);
    assert_null(facts.data);
    assert_int_equal(facts.numel, 10);
    record.purpose = FCD_GRADIENTS;
    assert_int_equal(fct_storage_alloc(t, 40), 0);
    assert_int_equal(record.live[FCD_GRADIENTS], 40);
    assert_int_equal(fct_storage_alloc(t, 44), -1);
    fct_tensor_facts(t, &facts);
    assert_non_null(facts.data);
    fct_tensor_release(t);
    end();
}

static void moved_memory_is_counted_once(void **state) {
    (void)state;
    begin(false);
    fct_tensor *from = new_tensor(10, cpu);
    fct_tensor *to = new_tensor(10, cpu);
    fct_storage_free(to);
    const size_t count = record.count;
    fct_storage_move(from, to);
    assert_int_equal(record.count, count);
    fct_tensor_release(from);
    assert_int_equal(record.live[FCD_GATHERED], 40);
    fct_tensor_release(to);
    end();
}

static void cast_to_the_same_dtype_allocates_nothing(void **state) {
    fct_tensor *same = NULL;
    fct_tensor *half = NULL;
    (void)state;
    begin(false);
    fct_tensor *t = new_tensor(10, cpu);
    assert_int_equal(fct_tensor_cast(t, FCK_FLOAT32, &same), 0);
    assert_ptr_equal(same, t);
    assert_int_equal(fct_tensor_cast(t, FCK_BFLOAT16, &half), 0);
    assert_int_equal(record.live[FCD_GATHERED], 60);
    fct_tensor_release(half);
    fct_tensor_release(same);
    fct_tensor_release(t);
    end();
}

static void wait_for_an_unrecorded_event_is_left_out_of_the_record(void **state) {
    fct_event *e = NULL;
    fct_stream s;
    (void)state;
    begin(true);
    assert_int_equal(fct_stream_new(cuda, true, &s), 0);
    assert_int_equal(fct_event_new(cuda, &e), 0);
    assert_int_equal(fct_event_wait(e, s), 0);
    assert_int_equal(record.count, 0);
    assert_int_equal(fct_event_record(e, fct_stream_current(cuda)), 0);
    assert_int_equal(fct_event_wait(e, s), 0);
    assert_int_equal(record.count, 2);
    assert_int_equal(record.events[0].stream, 0);
    assert_int_equal(record.events[1].stream, s.id);
    fct_event_free(e);
    end();
}

static void work_is_recorded_with_the_unit_of_its_group(void **state) {
    fct_pg *pg = NULL;
    fct_work *work = NULL;
    (void)state;
    begin(false);
    fct_tensor *t = new_tensor(10, cpu);
    assert_int_equal(fct_pg_resolve("7 shard", &pg), 0);
    fct_pg_retain(pg);
    fct_pg_release(pg);
    assert_int_equal(fct_all_gather(pg, NULL, t, t, false, &work), 0);
    const fcd_event *e = &record.events[record.count - 1];
    assert_int_equal(e->kind, FCD_ALL_GATHER);
    assert_int_equal(e->unit, 7);
    assert_int_equal(e->bytes, 40);
    assert_string_equal(e->label, "shard");
    fct_work_release(work);
    fct_pg_release(pg);
    fct_tensor_release(t);
    end();
}

static void events_have_unit_and_label_of_innermost_range(void **state) {
    (void)state;
    begin(false);
    void *outer = fct_profile_enter("FSDP::pre_forward (#3)");
    void *inner = fct_profile_enter("FSDP::backward_prefetch for #4");
    fct_tensor *t = new_tensor(10, cpu);
    fct_profile_exit(inner);
    fct_profile_exit(outer);
    assert_string_equal(record.events[0].label, "pre_forward");
    assert_string_equal(record.events[1].label, "backward_prefetch");
    assert_int_equal(record.events[0].unit, 3);
    assert_int_equal(record.events[2].unit, 4); /* the allocation */
    assert_int_equal(record.range_count, 0);
    fct_tensor_release(t);
    end();
}

static void deferred_reference_is_released_at_the_end_of_the_call(void **state) {
    (void)state;
    begin(false);
    fcd_defer_release(new_tensor(10, cpu));
    assert_int_equal(record.live[FCD_GATHERED], 40);
    fcd_release_deferred();
    assert_int_equal(record.live[FCD_GATHERED], 0);
    end();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_counted_by_purpose),
        cmocka_unit_test(host_memory_is_not_part_of_the_peak),
        cmocka_unit_test(memory_of_the_cpu_is_device_memory_without_streams),
        cmocka_unit_test(alias_keeps_memory_until_its_release),
        cmocka_unit_test(alias_beyond_the_storage_fails_with_the_end_of_the_alias),
        cmocka_unit_test(freed_storage_has_no_memory_until_its_next_allocation),
        cmocka_unit_test(moved_memory_is_counted_once),
        cmocka_unit_test(cast_to_the_same_dtype_allocates_nothing),
        cmocka_unit_test(wait_for_an_unrecorded_event_is_left_out_of_the_record),
        cmocka_unit_test(work_is_recorded_with_the_unit_of_its_group),
        cmocka_unit_test(events_have_unit_and_label_of_innermost_range),
        cmocka_unit_test(deferred_reference_is_released_at_the_end_of_the_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
