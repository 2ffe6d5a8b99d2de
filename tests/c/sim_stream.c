/* Simulated streams and events. Owns the queues.
 *
 * An operation may run after all earlier ones of its stream and, if it is a wait, after the point
 * that it waits for. The seed selects the next one of those that may run. On a device without
 * streams the operations of stream 0 are the host's own and run at once.
 *
 * Vector clocks. An operation is ordered after all earlier ones of its stream and after the points
 * that its stream has waited for. It is also ordered after everything whose end the host had
 * observed when it queued the operation. */
#include "sim_internal.h"

#include <stdlib.h>
#include <string.h>

typedef struct queued {
    void (*run)(void *args);
    bool (*may_run)(void *args);
    void *args;
    fct_tensor *held[2];
    sim_point end;
    bool waits;
    sim_point wait; /* point to wait for, if `waits` */
    struct queued *next;
} queued;

typedef struct stream {
    sim_clock clock; /* everything that the next operation is ordered after */
    uint32_t issued;
    uint32_t executed;
    queued *first;
    queued *last;
    bool collective;
} stream;

struct fct_event {
    bool recorded;
    size_t owners;
    sim_point point;
};

_Thread_local int sim_stream_count;

static _Thread_local stream streams[SIM_STREAMS_MAX];
static _Thread_local int current;
static _Thread_local sim_clock host; /* ends that the host has observed */
static _Thread_local bool stalled;
static _Thread_local int host_stream; /* 0: sim_host_stream() has not reserved it yet */

static void join_clock(sim_clock *into, const sim_clock *other) {
    for (int s = 0; s < sim_stream_count; s++) {
        into->at[s] = into->at[s] > other->at[s] ? into->at[s] : other->at[s];
    }
}

void sim_streams_begin(void) {
    memset(streams, 0, sizeof streams);
    memset(&host, 0, sizeof host);
    sim_stream_count = 1;
    current = 0;
    stalled = false;
    host_stream = 0;
}

int sim_stream_reserve(bool collective) {
    if (sim_stream_count == SIM_STREAMS_MAX) {
        fail_msg("the simulation supports no further stream");
    }
    streams[sim_stream_count].collective = collective;
    return sim_stream_count++;
}

int sim_host_stream(void) {
    if (host_stream == 0) {
        host_stream = sim_stream_reserve(false);
    }
    return host_stream;
}

int sim_stream_current(void) {
    return current;
}

sim_clock sim_clock_of(int s) {
    sim_clock clock = streams[s].clock;
    join_clock(&clock, &host);
    return clock;
}

sim_point sim_stream_now(int s) {
    return (sim_point){.stream = s, .seq = streams[s].issued, .clock = sim_clock_of(s)};
}

/* ---- execution ---- */

bool sim_point_passed(const sim_point *point) {
    return streams[point->stream].executed >= point->seq;
}

void sim_host_observe(const sim_point *point) {
    join_clock(&host, &point->clock);
}

static bool may_run(const stream *s) {
    const queued *op = s->first;
    return op != NULL && (!op->waits || sim_point_passed(&op->wait)) &&
           (op->may_run == NULL || op->may_run(op->args));
}

static void run_first(stream *s) {
    queued *op = s->first;
    s->first = op->next;
    if (s->first == NULL) {
        s->last = NULL;
    }
    if (op->run != NULL) {
        op->run(op->args);
    }
    s->executed++;
    if (op->held[0] != NULL || op->held[1] != NULL) {
        /* The backend releases the memory only after it has observed the end of its operation. */
        if (sim_now.streams) {
            join_clock(&host, &op->end.clock);
        }
        fct_tensor_release(op->held[0]);
        fct_tensor_release(op->held[1]);
    }
    sim_scratch_free(op->args);
    sim_scratch_free(op);
}

void sim_tick(void) {
    for (uint64_t i = sim_random() % 4; i > 0; i--) {
        stream *s = &streams[sim_random() % (uint64_t)sim_stream_count];
        if (may_run(s) && !(stalled && s->collective)) {
            run_first(s);
        }
    }
}

/* Runs what may run. If there is nothing, waits for other ranks. */
static void run_any(void) {
    bool ran = false;
    for (int i = 0; i < sim_stream_count; i++) {
        while (may_run(&streams[i])) {
            run_first(&streams[i]);
            ran = true;
        }
    }
    if (!ran) {
        sim_ranks->wait();
    }
}

static void run_until(const sim_point *point) {
    stream *s = &streams[point->stream];
    while (s->executed < point->seq) {
        if (may_run(s)) {
            run_first(s);
        } else if (s->first->waits && !sim_point_passed(&s->first->wait)) {
            sim_point wait = s->first->wait;
            run_until(&wait);
        } else {
            run_any();
        }
    }
}

void sim_host_waits(const sim_point *point) {
    run_until(point);
    sim_host_observe(point);
}

void sim_drain(void) {
    bool again = true;
    while (again) {
        again = false;
        for (int i = 0; i < sim_stream_count; i++) {
            /* Each iteration selects a random stream and runs a random number of its operations, so
             * that the order is random while draining, too. */
            stream *s = &streams[((uint64_t)i + sim_random()) % (uint64_t)sim_stream_count];
            again = again || s->first != NULL;
            while (may_run(s) && sim_random() % 4 != 0) {
                run_first(s);
            }
        }
        bool is_queued = false;
        for (int i = 0; i < sim_stream_count; i++) {
            is_queued = is_queued || streams[i].first != NULL;
        }
        if (is_queued && sim_ranks != NULL) {
            run_any();
        }
        again = again || is_queued;
    }
    for (int i = 0; i < sim_stream_count; i++) {
        join_clock(&host, &streams[i].clock);
    }
    join_clock(&streams[0].clock, &host);
}

void sim_streams_end(void) {
    sim_drain();
}

void sim_collectives_stall(bool stall) {
    stalled = stall;
}

/* ---- queueing ---- */

static queued *append(int index, const sim_op *op) {
    stream *s = &streams[index];
    queued *q = (queued *)sim_scratch(sizeof *q);
    join_clock(&s->clock, &host);
    s->clock.at[index] = ++s->issued;
    for (size_t i = 0; i < op->use_count; i++) {
        if (op->uses[i].block->of_host != (index != 0 && index == host_stream) && !op->crosses) {
            sim_fail("%s on stream %d uses memory of the %s", op->what, index,
                     op->uses[i].block->of_host ? "host" : "device");
        }
        sim_block_touch(op->uses[i].block, op->uses[i].write, index, s->issued, &s->clock,
                        op->what);
    }
    q->run = op->run;
    q->may_run = op->may_run;
    q->args = op->args;
    memcpy(q->held, op->held, sizeof q->held);
    q->end = (sim_point){.stream = index, .seq = s->issued, .clock = s->clock};
    if (s->last != NULL) {
        s->last->next = q;
    } else {
        s->first = q;
    }
    s->last = q;
    return q;
}

/* Stream 0 of a device without streams is the host, which does not queue. The host's stream of a
 * device with streams does not queue either. Everything queued later is ordered after its
 * operations. */
static void run_host_operations(int index) {
    if (index != 0 && index == host_stream) {
        sim_host_waits(&streams[index].last->end);
    }
    if (!sim_now.streams && index == 0) {
        run_until(&(sim_point){.stream = 0, .seq = streams[0].issued});
    }
}

void sim_stream_push(int index, const sim_op *op, sim_point *point) {
    const queued *q = append(index, op);
    if (point != NULL) {
        *point = q->end;
    }
    run_host_operations(index);
}

void sim_stream_wait(int index, const sim_point *point) {
    const sim_op nothing = {.what = "a wait"};
    join_clock(&streams[index].clock, &point->clock);
    queued *q = append(index, &nothing);
    q->waits = true;
    q->wait = *point;
    run_host_operations(index);
}

/* ---- functions of bridge/stream.h ---- */

bool fct_device_has_streams(fct_device device) {
    return sim_now.streams && device.type == sim_device().type;
}

static void must_have_streams(const char *call) {
    if (!sim_now.streams) {
        sim_fail("%s is called on a device without streams", call);
    }
}

fct_stream fct_stream_current(fct_device device) {
    must_have_streams("fct_stream_current");
    return (fct_stream){.id = current, .device = device};
}

int fct_stream_new(fct_device device, bool high_priority, fct_stream *out) {
    (void)high_priority;
    must_have_streams("fct_stream_new");
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_stream_new")) {
        return -1;
    }
    *out = (fct_stream){.id = sim_stream_reserve(false), .device = device};
    return 0;
}

fct_stream fct_stream_set_current(fct_stream s) {
    fct_stream before = fct_stream_current(s.device);
    current = (int)s.id;
    return before;
}

int fct_launch_enter(fct_device device, fct_device *before, void **native) {
    must_have_streams("fct_launch_enter");
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_launch_enter")) {
        return -1;
    }
    *before = device;
    *native = (void *)(uintptr_t)(current + 1);
    sim_living.launches++;
    return 0;
}

void fct_launch_leave(fct_device before) {
    (void)before;
    sim_living.launches--;
}

int sim_stream_of_native(void *native) {
    if (!sim_now.streams) {
        return 0;
    }
    uintptr_t id = (uintptr_t)native;
    if (id == 0 || id > (uintptr_t)sim_stream_count) {
        sim_fail("a kernel is launched on no stream");
        return 0;
    }
    return (int)(id - 1);
}

int fct_event_new(fct_device device, fct_event **out) {
    (void)device;
    must_have_streams("fct_event_new");
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_event_new")) {
        return -1;
    }
    *out = (fct_event *)sim_alloc(sizeof **out);
    (*out)->owners = 1;
    sim_living.events++;
    return 0;
}

int fct_event_record(fct_event *e, fct_stream s) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_event_record")) {
        return -1;
    }
    e->recorded = true;
    e->point = sim_stream_now((int)s.id);
    return 0;
}

/* A wait covers the work at the event's latest record. A later record does not change it. */
int fct_event_wait(fct_event *e, fct_stream s) {
    if (s.device.type != sim_device().type) {
        sim_fail("a stream of another device waits for an event");
    }
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_event_wait")) {
        return -1;
    }
    if (e->recorded && !sim_wait_is_dropped(SIM_EVENT_WAIT)) {
        sim_stream_wait((int)s.id, &e->point);
    }
    return 0;
}

int fct_event_synchronize(fct_event *e) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_event_synchronize")) {
        return -1;
    }
    if (e->recorded) {
        sim_host_waits(&e->point);
    }
    return 0;
}

int fct_event_is_done(fct_event *e, bool *done) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_event_is_done")) {
        return -1;
    }
    if (sim_captures()) {
        sim_fail("an event is queried during a capture");
    }
    *done = !e->recorded || sim_point_passed(&e->point);
    if (e->recorded && *done) {
        sim_host_observe(&e->point);
    }
    return 0;
}

void fct_event_share(fct_event *e) {
    e->owners++;
}

bool fct_event_unshare(fct_event *e) {
    if (e->owners == 1) {
        return false;
    }
    e->owners--;
    return true;
}

void fct_event_free(fct_event *e) {
    if (e != NULL) {
        sim_living.events--;
        free(e);
    }
}
