/* The ring buffer of collectives: states, overwritten records, files. */
#define _POSIX_C_SOURCE 200809L /* fileno */
#include "core/recorder.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

static int works[2];

static uint64_t add(const char *modules) {
    const fc_record facts = {.step = 3, .pass = 1, .kind = FC_RECORD_REDUCE_SCATTER, .world = 4};
    return fc_recorder_add(&facts, "7", modules);
}

static fc_record all[FC_RECORDS];

static fc_record newest(void) {
    assert_in_range(fc_recorder_copy(all, 1), 1, FC_RECORDS);
    return all[0];
}

static void record_has_the_facts_and_the_end_of_long_names(void **state) {
    (void)state;
    const char *name = "encoder.layers.11.attention.self_attention.projection.weight_group";
    const uint64_t number = add(name);
    const fc_record record = newest();
    assert_int_equal(record.number, number);
    assert_int_equal(record.step, 3);
    assert_int_equal(record.world, 4);
    assert_int_equal(record.kind, FC_RECORD_REDUCE_SCATTER);
    assert_int_equal(record.state, FC_RECORD_WAITING);
    assert_string_equal(record.group, "7");
    assert_string_equal(record.modules, name + strlen(name) + 1 - FC_RECORD_MODULES_BYTES);
    fc_record copy;
    assert_true(fc_recorder_read(number, &copy));
    assert_int_equal(copy.number, number);
    add(NULL);
    assert_string_equal(newest().modules, "");
}

static void state_of_a_record_follows_issue_wait_and_end(void **state) {
    (void)state;
    const uint64_t number = add("a");
    fc_recorder_issued(number, &works[0]);
    assert_int_equal(newest().state, FC_RECORD_ISSUED);
    assert_int_equal(newest().end, 0);
    assert_int_equal(fc_recorder_wait(&works[1]), 0);
    assert_int_equal(fc_recorder_wait(&works[0]), number);
    assert_int_equal(newest().state, FC_RECORD_WAITING);
    assert_true(newest().waiting >= newest().begin);
    fc_recorder_end(number, FC_RECORD_COMPLETE);
    assert_int_equal(newest().state, FC_RECORD_COMPLETE);
    assert_true(newest().end >= newest().waiting);
    assert_int_equal(fc_recorder_wait(&works[0]), 0); /* the address may belong to a later work */
    fc_recorder_issued(add("b"), NULL);
    assert_int_equal(newest().state, FC_RECORD_COMPLETE);
}

static void oldest_of_two_records_with_one_address_is_not_found(void **state) {
    (void)state;
    fc_recorder_issued(add("old"), &works[0]);
    const uint64_t number = add("new");
    fc_recorder_issued(number, &works[0]);
    assert_int_equal(fc_recorder_wait(&works[0]), number);
}

static void overwritten_record_does_not_change(void **state) {
    (void)state;
    const uint64_t number = add("lost");
    for (int i = 0; i < FC_RECORDS; i++) {
        fc_recorder_issued(add("later"), NULL);
    }
    fc_recorder_issued(number, &works[0]);
    fc_recorder_end(number, FC_RECORD_FAILED);
    fc_recorder_end(0, FC_RECORD_FAILED);
    fc_record unchanged = {.number = 1};
    assert_false(fc_recorder_read(number, &unchanged) || fc_recorder_read(0, &unchanged));
    assert_int_equal(unchanged.number, 1);
    assert_int_equal(fc_recorder_copy(all, FC_RECORDS), FC_RECORDS);
    for (int i = 0; i < FC_RECORDS; i++) {
        assert_int_equal(all[i].number, number + (uint64_t)(FC_RECORDS - i));
        assert_int_equal(all[i].state, FC_RECORD_COMPLETE);
    }
}

static void copy_of_records_includes_older_ones_that_a_thread_waits_for(void **state) {
    (void)state;
    for (int i = 0; i < FC_RECORDS; i++) {
        fc_recorder_issued(add("complete"), NULL);
    }
    assert_int_equal(fc_recorder_copy(all, 2), 2);
    const uint64_t waiting = add("waiting");
    for (int i = 0; i < 300; i++) {
        fc_recorder_issued(add("issued"), &works[0]);
    }
    assert_int_equal(fc_recorder_copy(all, 2), 3);
    assert_int_equal(all[1].number, waiting + 299);
    assert_int_equal(all[2].number, waiting);
    fc_recorder_end(waiting, FC_RECORD_COMPLETE);
    assert_int_equal(fc_recorder_copy(all, 2), 2);
}

static void record_file_has_every_record(void **state) {
    (void)state;
    static fc_record written[FC_RECORDS + 1];
    FILE *file = tmpfile();
    assert_non_null(file);
    const uint64_t last = add("last");
    assert_int_equal(fc_recorder_write(fileno(file)), 0);
    assert_int_equal(pread(fileno(file), written, sizeof written, 0),
                     FC_RECORDS * (int)sizeof(fc_record));
    bool has_last = false;
    for (int i = 0; i < FC_RECORDS; i++) {
        fc_record record = {0};
        assert_int_equal(fc_recorder_read(written[i].number, &record), written[i].number != 0);
        assert_memory_equal(&written[i], &record, sizeof record);
        has_last = has_last || record.number == last;
    }
    assert_true(has_last);
    assert_int_equal(sizeof(fc_record), 128);
    fclose(file);
    assert_int_equal(fc_recorder_write(-1), -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(record_has_the_facts_and_the_end_of_long_names),
        cmocka_unit_test(state_of_a_record_follows_issue_wait_and_end),
        cmocka_unit_test(oldest_of_two_records_with_one_address_is_not_found),
        cmocka_unit_test(overwritten_record_does_not_change),
        cmocka_unit_test(copy_of_records_includes_older_ones_that_a_thread_waits_for),
        cmocka_unit_test(record_file_has_every_record),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
