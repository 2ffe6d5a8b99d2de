/* Simulated comparisons between ranks: of plans, and of collectives at the end of a backward. Tests
 * set the results. */
#include "sim_internal.h"

#include <stdio.h>
#include <string.h>

enum { CHECKSUMS_MAX = 16384 };

static _Thread_local fct_plan_state plan_state;
static _Thread_local bool has_agreement;
static _Thread_local const char *agreed_difference;
static _Thread_local int agreements_in_flight;
static _Thread_local sim_checksum checksums[CHECKSUMS_MAX];
static _Thread_local size_t checksum_count;
static _Thread_local size_t interval_count;
static _Thread_local uint64_t latest_number;        /* of an interval of checksums */
static _Thread_local bool has_ended[CHECKSUMS_MAX]; /* by number of the interval */

void sim_agreements_begin(void) {
    plan_state = FCT_PLANS_EQUAL;
    checksum_count = 0;
    interval_count = 0;
    latest_number = 0;
    memset(has_ended, 0, sizeof has_ended);
    sim_set_agreement(false, "");
}

int fct_compare_plan(fct_pg *pg, fct_device device, uint64_t plan, bool waits,
                     fct_plan_result *result) {
    (void)pg, (void)device;
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_compare_plan")) {
        return -1;
    }
    *result = (fct_plan_result){.rank = 1, .hashes = {1, plan}};
    result->state = plan == 0 ? FCT_PLANS_EQUAL : !waits ? FCT_PLANS_UNKNOWN : plan_state;
    return 0;
}

void sim_set_plans_differ(bool differ) {
    plan_state = differ ? FCT_PLANS_DIFFER : FCT_PLANS_EQUAL;
}

void fct_add_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum) {
    if (pg == NULL || checksum_count == CHECKSUMS_MAX) {
        fail_msg("a checksum has no process group, or there are too many");
    }
    checksums[checksum_count++] = (sim_checksum){tag->kind, tag->label.step, checksum};
}

void fct_add_device_checksum(fct_pg *pg, const fct_op_tag *tag, uint64_t checksum) {
    fct_add_checksum(pg, tag, checksum);
}

/* Counts an interval only once. */
void fct_end_checksum_interval(fct_pg *pg, uint64_t number) {
    if (pg == NULL || number == 0 || number > latest_number || number >= CHECKSUMS_MAX) {
        fail_msg("an interval of checksums has no process group, or no number");
    }
    interval_count += has_ended[number] ? 0 : 1;
    has_ended[number] = true;
}

uint64_t fct_number_checksum_interval(fct_pg *pg) {
    return pg != NULL ? ++latest_number : 0;
}

size_t sim_checksum_intervals(void) {
    return interval_count;
}

void fct_drop_checksums(fct_pg *pg) {
    if (pg == NULL) {
        fail_msg("the dropped checksums have no process group");
    }
    checksum_count = 0;
}

size_t sim_checksums(const sim_checksum **list) {
    *list = checksums;
    return checksum_count;
}

int fct_agree_start(fct_pg *pg, bool *issued) {
    (void)pg;
    *issued = false;
    if (!has_agreement) {
        return 0;
    }
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_agree_start")) {
        return -1;
    }
    agreements_in_flight++;
    *issued = true;
    return 0;
}

bool fct_agree_start_waits(fct_pg *pg) {
    return pg != NULL && has_agreement;
}

int fct_agree_await(fct_pg *pg, fct_difference *difference) {
    (void)pg;
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_agree_await")) {
        return -1;
    }
    agreements_in_flight--;
    (void)snprintf(difference->text, sizeof difference->text, "%s", agreed_difference);
    return 0;
}

void sim_set_agreement(bool enabled, const char *difference) {
    has_agreement = enabled;
    agreed_difference = difference;
    agreements_in_flight = 0;
}

int sim_agreements_in_flight(void) {
    return agreements_in_flight;
}
