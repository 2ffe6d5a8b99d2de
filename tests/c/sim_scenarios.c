/* The training scenarios that test_train.c runs and test_faults.c breaks: every setting of the core at least once,
 * each on every kind of device. */
#include "sim_model.h"

#define MATRIX(...) {.ndim = 2, .sizes = {5, 3}, __VA_ARGS__}
#define VECTOR(...) {.ndim = 1, .sizes = {3}, __VA_ARGS__}
#define PLAIN .shape_count = 2, .shapes = {MATRIX(.dtype = 0), VECTOR(.dtype = 0)}

static const sim_scenario scenarios[] = {
    {.name = "one rank", .world = 1, .layers = 2, PLAIN},
    {.name = "two ranks", .world = 2, .rank = 1, .layers = 2, PLAIN},
    {.name = "four ranks, the default of fully_shard",
     .world = 4,
     .rank = 2,
     .layers = 3,
     .root_stays = true,
     PLAIN},
    {.name = "uneven, empty and tiny shards",
     .world = 4,
     .rank = 3,
     .layers = 2,
     .shape_count = 4,
     .shapes = {{.ndim = 2, .sizes = {5, 3}},
                {.ndim = 1, .sizes = {1}},
                {.ndim = 1, .sizes = {7}},
                {.ndim = 3, .sizes = {2, 0, 3}}}},
    {.name = "an empty parameter on one rank",
     .world = 1,
     .layers = 1,
     .shape_count = 2,
     .shapes = {{.ndim = 1, .sizes = {0}}, {.ndim = 1, .sizes = {4}}}},
    {.name = "nothing to send at all",
     .world = 2,
     .layers = 2,
     .shape_count = 1,
     .shapes = {{.ndim = 2, .sizes = {0, 3}}}},
    {.name = "groups without parameters", .world = 2, .layers = 2, .shape_count = 0},
    {.name = "computed in bfloat16, reduced in float32",
     .world = 2,
     .rank = 1,
     .layers = 2,
     .reduce_dtype = FCK_FLOAT32,
     .shape_count = 2,
     .shapes = {MATRIX(.compute = FCK_BFLOAT16), VECTOR(.compute = FCK_BFLOAT16)}},
    {.name = "computed and reduced in float16",
     .world = 4,
     .rank = 1,
     .layers = 2,
     .shape_count = 2,
     .shapes = {MATRIX(.compute = FCK_FLOAT16), VECTOR(.compute = FCK_FLOAT16)}},
    {.name = "one rank computes in bfloat16",
     .world = 1,
     .layers = 2,
     .reduce_dtype = FCK_FLOAT32,
     .shape_count = 2,
     .shapes = {MATRIX(.compute = FCK_BFLOAT16), VECTOR(.compute = FCK_BFLOAT16)}},
    {.name = "bfloat16 throughout",
     .world = 2,
     .layers = 2,
     .shape_count = 1,
     .shapes = {MATRIX(.dtype = FCK_BFLOAT16)}},
    {.name = "frozen and unused parameters",
     .world = 2,
     .layers = 2,
     .shape_count = 3,
     .shapes = {MATRIX(.frozen = true), VECTOR(.unused = true), VECTOR(.dtype = 0)}},
    {.name = "unused parameters are reduced",
     .world = 2,
     .rank = 1,
     .layers = 2,
     .reduce_unused = true,
     .shape_count = 2,
     .shapes = {MATRIX(.unused = true), VECTOR(.dtype = 0)}},
    {.name = "all frozen",
     .world = 2,
     .layers = 2,
     .shape_count = 1,
     .shapes = {MATRIX(.frozen = true)}},
    {.name = "tied parameters, gradients that are not contiguous",
     .world = 2,
     .layers = 2,
     .shape_count = 2,
     .shapes = {MATRIX(.tied = true, .transposed = true), VECTOR(.tied = true)}},
    {.name = "hooks on gradients",
     .world = 2,
     .layers = 3,
     .shape_count = 1,
     .shapes = {VECTOR(.hooked = true)}},
    {.name = "two groups in a layer", .world = 2, .layers = 2, .layer_groups = 2, PLAIN},
    {.name = "two forwards before a backward",
     .world = 2,
     .rank = 1,
     .layers = 3,
     .forwards = 2,
     PLAIN},
    {.name = "gradient accumulation",
     .world = 2,
     .rank = 1,
     .layers = 2,
     .unsynced = 2,
     .reduce_dtype = FCK_FLOAT32,
     .shape_count = 2,
     .shapes = {MATRIX(.compute = FCK_BFLOAT16), VECTOR(.compute = FCK_BFLOAT16)}},
    {.name = "gradient accumulation without resharding",
     .world = 2,
     .layers = 2,
     .unsynced = 1,
     .stay_while_unsynced = true,
     .stay_after_forward = true,
     PLAIN},
    {.name = "stays unsharded after forward",
     .world = 2,
     .rank = 1,
     .layers = 3,
     .stay_after_forward = true,
     PLAIN},
    {.name = "explicit prefetch",
     .world = 2,
     .layers = 4,
     .forward_prefetch = 2,
     .backward_prefetch = 2,
     PLAIN},
    {.name = "asynchronous unshard with prefetch",
     .world = 2,
     .rank = 1,
     .layers = 3,
     .async_unshard = true,
     .forward_prefetch = 1,
     PLAIN},
    {.name = "activation checkpointing", .world = 2, .layers = 2, .recompute = true, PLAIN},
    {.name = "many reductions in flight",
     .world = 2,
     .rank = 1,
     .layers = 4,
     .max_reductions = 3,
     PLAIN},
    {.name = "a divide factor", .world = 4, .rank = 1, .layers = 2, .divide_factor = 8.0, PLAIN},
    {.name = "a divide factor inside the collective",
     .device = {.premul = true},
     .world = 2,
     .layers = 2,
     .divide_factor = 8.0,
     PLAIN},
    {.name = "a divide factor on one rank", .world = 1, .layers = 1, .divide_factor = 4.0, PLAIN},
    {.name = "sums only", .world = 4, .rank = 1, .layers = 2, .force_sum = true, PLAIN},
    {.name = "modules that share a group",
     .device = {.profile = true},
     .world = 2,
     .layers = 2,
     .modules_share_group = true,
     PLAIN},
};

static const size_t scenario_count = sizeof scenarios / sizeof scenarios[0];

/* Several types in one group need the kernels. */
static const sim_scenario kernel_scenarios[] = {
    {.name = "several types in one group",
     .world = 2,
     .rank = 1,
     .layers = 2,
     .shape_count = 4,
     .shapes = {MATRIX(.compute = FCK_BFLOAT16), VECTOR(.frozen = true),
                VECTOR(.dtype = 4, .frozen = true), VECTOR(.compute = FCK_BFLOAT16)}},
    {.name = "float64 beside float32",
     .world = 4,
     .rank = 3,
     .layers = 1,
     .shape_count = 3,
     .shapes = {VECTOR(.dtype = FCK_UINT8, .frozen = true),
                VECTOR(.dtype = FCK_FLOAT64, .frozen = true), MATRIX(.dtype = 0)}},
    {.name = "a cast that no kernel does",
     .world = 2,
     .layers = 2,
     .shape_count = 2,
     .shapes = {VECTOR(.dtype = 4, .compute = FCK_FLOAT32, .frozen = true), MATRIX(.dtype = 0)}},
};

static const size_t kernel_scenario_count = sizeof kernel_scenarios / sizeof kernel_scenarios[0];

static const struct {
    const char *name;
    bool streams;
    bool no_kernels;
} devices[] = {
    {"CPU", false, false},
    {"CUDA", true, false},
    {"a device with neither streams nor kernels", false, true},
    {"a device with streams and no kernels", true, true},
};

static void on_each_device(const sim_scenario *scenario, bool needs_kernels,
                           void (*visit)(const sim_scenario *, const char *)) {
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        sim_scenario s = *scenario;
        s.device.streams = devices[i].streams;
        s.device.no_kernels = devices[i].no_kernels;
        if (!needs_kernels || !devices[i].no_kernels) {
            visit(&s, devices[i].name);
        }
    }
}

void sim_each_scenario(void (*visit)(const sim_scenario *scenario, const char *device)) {
    for (size_t i = 0; i < scenario_count; i++) {
        on_each_device(&scenarios[i], false, visit);
    }
    for (size_t i = 0; i < kernel_scenario_count; i++) {
        on_each_device(&kernel_scenarios[i], true, visit);
    }
}
