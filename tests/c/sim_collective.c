/* Simulated process groups and works. Owns the registered groups.
 *
 * A group computes the data of its peers (sim.h), so a collective returns the results of real
 * ranks. An all-gather also checks that this rank's shard has the values that its peers expect.
 *
 * With streams a collective runs on a stream that all groups share. If it is not asynchronous, it
 * runs on the current stream for about half of the seeds, as in newer releases of torch. On the CPU
 * it runs later, at a random time. */
#include "sim_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS_MAX = 64 };

struct fct_pg {
    const char *name;
    int64_t world;
    int64_t rank;
    sim_shard_fn write_shard;
    void *context;
    double base, step;
    int stream;
    size_t refs;
    bool has_allocator;
    bool needs_allocator; /* its collectives require memory of an allocator */
};

struct fct_work {
    sim_point end;
    sim_shard_places *places; /* NULL: the work computes no checksums */
    sim_collective *shared;   /* with the other ranks; NULL: none */
};

static _Thread_local fct_pg groups[GROUPS_MAX];
static _Thread_local size_t group_count;
static _Thread_local bool sync_on_current;
static _Thread_local bool are_cpu_bound;
static _Thread_local int registered_users;
static _Thread_local int shared_stream;

void sim_groups_begin(void) {
    group_count = 0;
    are_cpu_bound = false;
    registered_users = 0;
    sim_agreements_begin();
    sync_on_current = sim_now.streams && sim_random() % 2 == 0;
    shared_stream = sim_stream_reserve(true);
}

void sim_groups_end(void) {
    group_count = 0;
}

/* All groups of a test share one stream, as the groups of one mesh share one communicator. */
void sim_pg_register(const char *name, int64_t world, int64_t rank, sim_shard_fn write_shard,
                     void *context) {
    if (group_count == GROUPS_MAX) {
        fail_msg("the simulation supports no further process group");
    }
    groups[group_count++] = (fct_pg){.name = name,
                                     .world = world,
                                     .rank = rank,
                                     .write_shard = write_shard,
                                     .context = context,
                                     .base = 1.0,
                                     .step = 1.0,
                                     .stream = shared_stream};
}

static fct_pg *find(const char *name) {
    for (size_t i = 0; i < group_count; i++) {
        if (strcmp(groups[i].name, name) == 0) {
            return &groups[i];
        }
    }
    fail_msg("no process group is called %s", name);
    return NULL;
}

void sim_pg_weigh(const char *name, double base, double step) {
    fct_pg *pg = find(name);
    pg->base = base;
    pg->step = step;
}

void sim_pg_has_memory(const char *name, bool has_allocator) {
    fct_pg *pg = find(name);
    pg->has_allocator = has_allocator;
    pg->needs_allocator = true;
}

struct fct_allocator {
    fct_pg *pg;
};

fct_allocator *sim_allocator_new(fct_pg *pg) {
    fct_allocator *allocator = (fct_allocator *)malloc(sizeof *allocator);
    allocator->pg = pg;
    return allocator;
}

void fct_allocator_free(fct_allocator *allocator) {
    if (allocator != NULL) {
        fct_pg_release(allocator->pg);
        free(allocator);
    }
}

int fct_allocator_serves(fct_allocator *allocator, fct_device device, bool *serves) {
    (void)device;
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_allocator_serves")) {
        return -1;
    }
    *serves = allocator->pg->has_allocator;
    return 0;
}

int fct_allocator_empty(fct_allocator *allocator, fct_pg *user, int64_t numel, fct_dtype dtype,
                        fct_device device, fct_tensor **out) {
    const fct_pg *pg = allocator->pg;
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_allocator_empty")) {
        return -1;
    }
    if (!pg->has_allocator || device.type != sim_device().type || numel < 0) {
        sim_fail("%s: unexpected allocation of %lld elements", pg->name, (long long)numel);
    }
    *out = sim_tensor_new(dtype, 1, &numel, NULL);
    if (sim_tensor_block(*out) != NULL) {
        sim_tensor_block(*out)->of_group = true;
        sim_tensor_block(*out)->user = user;
    }
    return 0;
}

const fct_pg *sim_tensor_user(const fct_tensor *t) {
    const sim_block *block = sim_tensor_block(t);
    return block != NULL ? block->user : NULL;
}

/* Records a failure if rank shards must be in memory of a process group and are not, or are not
 * exactly that memory. */
static void check_memory(const fct_pg *pg, const fct_tensor *shard, bool is_exact,
                         const char *what) {
    const sim_block *block = sim_tensor_block(shard);
    fct_facts facts;
    fct_tensor_facts(shard, &facts);
    if (!pg->needs_allocator || facts.numel == 0) {
        return;
    }
    if (block == NULL || !block->of_group) {
        sim_fail("%s of %s in memory that is not from a process group's allocator", what, pg->name);
    } else if (is_exact && facts.storage_bytes != facts.numel * facts.itemsize) {
        sim_fail("%s of %s over a part of %lld bytes", what, pg->name,
                 (long long)facts.storage_bytes);
    } else if (block->user != pg) {
        sim_fail("%s of %s in memory for collectives of %s", what, pg->name,
                 block->user != NULL ? block->user->name : "no process group");
    }
}

int fct_pg_register_user(const char *name) {
    (void)name;
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_pg_register_user")) {
        return -1;
    }
    registered_users++;
    return 0;
}

int sim_registered_users(void) {
    return registered_users;
}

int fct_pg_resolve(const char *name, fct_pg **out) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_pg_resolve")) {
        return -1;
    }
    *out = find(name);
    (*out)->refs++;
    sim_living.groups++;
    return 0;
}

void fct_pg_retain(fct_pg *pg) {
    pg->refs++;
    sim_living.groups++;
}

void fct_pg_release(fct_pg *pg) {
    if (pg != NULL) {
        pg->refs--;
        sim_living.groups--;
    }
}

bool fct_pg_has_premul(fct_pg *pg, fct_device device) {
    (void)pg;
    (void)device;
    return sim_now.premul;
}

/* ---- issuing ---- */

static fct_work *new_work(sim_point end) {
    fct_work *work = (fct_work *)sim_alloc(sizeof *work);
    work->end = end;
    sim_living.works++;
    return work;
}

/* Queues a collective that reads `input` and writes `output` (the same tensor: in place). The
 * arguments of `op` begin with a sim_shared. Replaces *out. */
static int issue(const fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                 bool async_op, sim_op op, fct_work **out) {
    bool on_current = sim_now.streams && sync_on_current && !async_op;
    int stream = on_current ? sim_stream_current() : pg->stream;
    sim_use uses[2];
    size_t count = 0;
    if (sim_tensor_block(input) != NULL && sim_tensor_block(input) != sim_tensor_block(output)) {
        uses[count++] = (sim_use){sim_tensor_block(input), false};
    }
    if (sim_tensor_block(output) != NULL) {
        uses[count++] = (sim_use){sim_tensor_block(output), true};
    }
    op.uses = uses;
    op.use_count = count;
    if (!on_current) {
        sim_point issued = sim_stream_now(sim_stream_current());
        sim_stream_wait(stream, &issued);
        fct_tensor_retain(output);
        fct_tensor_retain(input);
        op.held[0] = output;
        op.held[1] = input;
    }
    sim_point end;
    sim_collective *shared = sim_share(&op, pg->name, tag);
    sim_stream_push(stream, &op, &end);
    fct_work *work = new_work(end);
    work->shared = shared;
    fct_work_release(*out);
    *out = NULL;
    if (on_current ? sim_random() % 2 == 0 : !sim_now.streams && sim_random() % 8 == 0) {
        /* No work is returned: the current stream is ordered, and on the CPU the collective is
         * complete. */
        sim_stream_wait(sim_stream_current(), &work->end);
        const int result = sim_check_shared(work->shared);
        fct_work_release(work);
        return result;
    }
    *out = work;
    return 0;
}

int fct_work_wait(fct_work *work) {
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_work_wait")) {
        return -1; /* interrupted: the collective continues */
    }
    if (!sim_wait_is_dropped(SIM_WORK_WAIT)) {
        sim_stream_wait(sim_stream_current(), &work->end);
    }
    return sim_check_shared(work->shared);
}

bool fct_work_is_cpu_bound(const fct_work *work) {
    (void)work;
    return are_cpu_bound;
}

bool fct_gather_is_cpu_bound(fct_pg *pg, int64_t rank_bytes) {
    (void)pg;
    return are_cpu_bound && rank_bytes > 0;
}

void sim_set_cpu_bound(bool is_bound) {
    are_cpu_bound = is_bound;
}

bool fct_work_rank_checksum(const fct_work *work, size_t run, int64_t rank, uint64_t *checksum) {
    return sim_point_passed(&work->end) && sim_shard_checksum(work->places, run, rank, checksum);
}

bool fct_work_done(fct_work *work) {
    sim_tick();
    if (!sim_point_passed(&work->end)) {
        return false;
    }
    sim_host_observe(&work->end);
    return true;
}

void fct_work_release(fct_work *work) {
    if (work != NULL) {
        sim_living.works--;
        free(work->places);
        free(work);
    }
}

/* Records a failure if the tag of a collective has another kind or no name of modules. NULL is
 * allowed. */
static void check_tag(const fct_op_tag *tag, fct_op_kind kind) {
    if (tag != NULL && (tag->kind != kind || tag->group == NULL)) {
        sim_fail("a collective of kind %d has a tag of kind %d", (int)kind, (int)tag->kind);
    }
}

/* ---- all-gather ---- */

typedef struct gathering {
    sim_shared peers;
    sim_view output;
    sim_view input;
    int64_t world;
    int64_t rank;
    int64_t rank_bytes;
    char *shards; /* behind the struct: of all ranks, then this rank's again */
} gathering;

/* Returns true if this rank sends the expected shard. The two copies were generated over different
 * bytes: where they differ is a gap with undefined contents. */
static bool sends_own_shard(const gathering *g) {
    const char *own = g->shards + g->rank * g->rank_bytes;
    const char *again = g->shards + g->world * g->rank_bytes;
    for (int64_t i = 0; i < g->rank_bytes; i++) {
        if (own[i] == again[i] && g->input.data[i] != own[i]) {
            return false;
        }
    }
    return true;
}

static void run_all_gather(void *args) {
    const gathering *g = (const gathering *)args;
    if (sim_is_lost(&g->peers) || g->output.numel == 0) {
        return;
    }
    if (!sim_data_is_lost && !sends_own_shard(g)) {
        sim_fail("rank %lld sends a shard to an all-gather that is not its own",
                 (long long)g->rank);
    }
    for (int64_t r = 0; r < g->world; r++) {
        const void *shard = g->peers.collective != NULL ? sim_ranks->data_of(g->peers.collective, r)
                                                        : g->shards + r * g->rank_bytes;
        memcpy(g->output.data + r * g->rank_bytes, shard, (size_t)g->rank_bytes);
    }
}

int fct_all_gather(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                   bool async_op, fct_work **work) {
    check_tag(tag, FCT_OP_ALL_GATHER);
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_all_gather")) {
        return -1;
    }
    sim_view to = sim_view_of(output, "an all-gather");
    sim_view from = sim_view_of(input, "an all-gather");
    int64_t rank_bytes = from.numel * sim_itemsize(from.dtype);
    if (to.numel != from.numel * pg->world || to.dtype != from.dtype || to.ndim != 1 ||
        from.ndim != 1) {
        sim_fail("an all-gather of %lld to %lld elements", (long long)from.numel,
                 (long long)to.numel);
        to.numel = 0;
    }
    if (to.numel > 0 && from.data != to.data + pg->rank * rank_bytes) {
        sim_fail("the input of an all-gather is not this rank's shard of the output");
    }
    gathering *g = (gathering *)sim_scratch(sizeof *g + (size_t)((pg->world + 1) * rank_bytes));
    g->output = to;
    g->input = from;
    g->world = pg->world;
    g->rank = pg->rank;
    g->rank_bytes = rank_bytes;
    g->peers.data = from.data;
    g->peers.bytes = rank_bytes;
    g->shards = (char *)(g + 1);
    memset(g->shards, 0xff, (size_t)(pg->world * rank_bytes)); /* NaN */
    for (int64_t r = 0; r < pg->world; r++) {
        pg->write_shard(pg->context, r, g->shards + r * rank_bytes, rank_bytes);
    }
    pg->write_shard(pg->context, pg->rank, g->shards + pg->world * rank_bytes, rank_bytes);
    check_memory(pg, output, true, "an all-gather");
    sim_log("gather:%s", pg->name);
    *work = NULL;
    return issue(pg, tag, output, input, async_op,
                 (sim_op){.what = "an all-gather", .run = run_all_gather, .args = g}, work);
}

/* Fills in all ranks' parts of one chunk from their rank shards. `size`: bytes per element. */
static void fill_chunk(const fct_pg *pg, gathering *g, size_t chunk, const fct_chunk_layout *layout,
                       int64_t size) {
    const int64_t rank_bytes = layout->rank_numel * size;
    char *shard = (char *)sim_alloc((size_t)rank_bytes);
    for (int64_t r = 0; r <= pg->world; r++) { /* the last one is this rank's shard again */
        memset(shard, r < pg->world ? 0xff : 0, (size_t)rank_bytes);
        pg->write_shard(pg->context, r < pg->world ? r : pg->rank, shard, rank_bytes);
        const char *next = shard;
        for (size_t i = 0; i < layout->count; i++) {
            const fct_run *run = &layout->runs[i];
            if (run->chunk == chunk) {
                memcpy(g->shards + r * g->rank_bytes + run->offset * size, next,
                       (size_t)(run->numel * size));
            }
            next += run->numel * size;
        }
    }
    free(shard);
}

int fct_gather_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *const *chunks, size_t count,
                      const fct_chunk_layout *layout, fct_work **work) {
    check_tag(tag, FCT_OP_ALL_GATHER);
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_gather_chunks")) {
        return -1;
    }
    sim_check_layout(pg->world, chunks, count, layout);
    check_memory(pg, chunks[0], false, "chunks");
    *work = NULL;
    for (size_t k = 0; k < count; k++) {
        sim_view to = sim_view_of(chunks[k], "a gather of chunks");
        const int64_t size = sim_itemsize(to.dtype);
        const int64_t rank_bytes = to.numel / pg->world * size;
        gathering *g = (gathering *)sim_scratch(sizeof *g + (size_t)((pg->world + 1) * rank_bytes));
        *g = (gathering){.output = to,
                         .input = to,
                         .world = pg->world,
                         .rank = pg->rank,
                         .rank_bytes = rank_bytes};
        g->peers.data = g->input.data = to.data + pg->rank * rank_bytes;
        g->peers.bytes = rank_bytes;
        g->shards = (char *)(g + 1);
        fill_chunk(pg, g, k, layout, size);
        if (issue(pg, tag, chunks[k], chunks[k], true,
                  (sim_op){.what = "a gather of chunks", .run = run_all_gather, .args = g},
                  work) != 0) {
            return -1;
        }
    }
    if (layout->checksums) {
        *work = *work != NULL ? *work : new_work(sim_stream_now(sim_stream_current()));
        (*work)->places = sim_shard_places_new(chunks, layout, pg->world);
    }
    sim_log("gather:%s", pg->name);
    return 0;
}

/* ---- reductions ---- */

typedef struct reducing {
    sim_shared peers;
    sim_view output;
    sim_view input;
    int64_t first; /* first element of this rank's shard in the input */
    int64_t world;
    int64_t rank;
    double base, step;
    double scale;
} reducing;

static double sent_by(const reducing *r, int64_t rank, int64_t element) {
    const char *data = (const char *)sim_ranks->data_of(r->peers.collective, rank);
    return sim_get(r->input.dtype, data + element * sim_itemsize(r->input.dtype));
}

/* Sums the inputs of all ranks. Without sim_ranks they are computed: the input of rank j is `base +
 * j * step` times a common value, so this rank's input determines those of its peers. */
static void run_reduce(void *args) {
    const reducing *r = (const reducing *)args;
    if (sim_is_lost(&r->peers)) {
        return;
    }
    for (int64_t i = 0; i < r->output.numel; i++) {
        double own = sim_get(r->input.dtype, sim_view_at(&r->input, r->first + i));
        double sum = 0.0;
        for (int64_t j = 0; j < r->world; j++) {
            if (r->peers.collective != NULL) {
                sum += sent_by(r, j, r->first + i);
                continue;
            }
            sum += own / (r->base + (double)r->rank * r->step) * (r->base + (double)j * r->step);
        }
        sim_put(r->output.dtype, sim_view_at(&r->output, i), sum * r->scale);
    }
}

static reducing *reducing_new(const fct_pg *pg, fct_tensor *input, fct_reduce_op op,
                              double factor) {
    reducing *r = (reducing *)sim_scratch(sizeof *r);
    r->input = sim_view_of(input, "a reduction");
    r->peers.data = r->input.data;
    r->peers.bytes = r->input.numel * sim_itemsize(r->input.dtype);
    r->world = pg->world;
    r->rank = pg->rank;
    r->base = pg->base;
    r->step = pg->step;
    r->scale = op == FCT_AVG ? 1.0 / (double)pg->world : (op == FCT_PREMUL_SUM ? factor : 1.0);
    if (op == FCT_PREMUL_SUM && !sim_now.premul) {
        sim_fail("the backend does not support PREMUL_SUM");
    }
    return r;
}

int fct_reduce_scatter(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output, fct_tensor *input,
                       fct_reduce_op op, double factor, bool async_op, fct_work **work) {
    check_tag(tag, FCT_OP_REDUCE_SCATTER);
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_reduce_scatter")) {
        return -1;
    }
    reducing *r = reducing_new(pg, input, op, factor);
    r->output = sim_view_of(output, "a reduce-scatter");
    if (r->input.numel != r->output.numel * pg->world || r->input.dtype != r->output.dtype ||
        r->input.ndim != 1 || r->output.ndim != 1) {
        sim_fail("a reduce-scatter of %lld to %lld elements", (long long)r->input.numel,
                 (long long)r->output.numel);
        r->output.numel = 0;
    }
    r->first = pg->rank * r->output.numel;
    check_memory(pg, input, true, "a reduce-scatter");
    check_memory(pg, output, false, "a reduce-scatter");
    sim_log("scatter:%s", pg->name);
    *work = NULL;
    return issue(pg, tag, output, input, async_op,
                 (sim_op){.what = "a reduce-scatter", .run = run_reduce, .args = r}, work);
}

int fct_reduce_chunks(fct_pg *pg, const fct_op_tag *tag, fct_tensor *output,
                      fct_tensor *const *chunks, size_t count, const fct_chunk_layout *layout,
                      fct_reduce_op op, fct_work **work) {
    int64_t begin = 0; /* start of the run in the rank shard */
    check_tag(tag, FCT_OP_REDUCE_SCATTER);
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_reduce_chunks")) {
        return -1;
    }
    sim_check_layout(pg->world, chunks, count, layout);
    check_memory(pg, chunks[0], false, "chunks");
    *work = NULL;
    for (size_t i = 0; i < layout->count; i++) {
        const fct_run *run = &layout->runs[i];
        reducing *r = reducing_new(pg, chunks[run->chunk], op, 1.0);
        r->output = sim_view_of(output, "a reduction of chunks");
        r->output.data += begin * sim_itemsize(r->output.dtype);
        r->output.numel = run->numel;
        r->first = pg->rank * (r->input.numel / pg->world) + run->offset;
        begin += run->numel;
        if (issue(pg, tag, output, chunks[run->chunk], true,
                  (sim_op){.what = "a reduction of chunks", .run = run_reduce, .args = r},
                  work) != 0) {
            return -1;
        }
    }
    sim_log("scatter:%s", pg->name);
    return 0;
}

int fct_all_reduce(fct_pg *pg, const fct_op_tag *tag, fct_tensor *tensor, fct_reduce_op op,
                   double factor, bool async_op, fct_work **work) {
    check_tag(tag, FCT_OP_ALL_REDUCE);
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_all_reduce")) {
        return -1;
    }
    reducing *r = reducing_new(pg, tensor, op, factor);
    r->output = r->input;
    sim_log("all-reduce:%s", pg->name);
    *work = NULL;
    return issue(pg, tag, tensor, tensor, async_op,
                 (sim_op){.what = "an all-reduce", .run = run_reduce, .args = r}, work);
}
