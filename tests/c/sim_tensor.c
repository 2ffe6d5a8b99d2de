/* Simulated tensors: counted handles on strided views of counted storages, with .grad and a version
 * counter.
 *
 * Every operation on elements is queued on the current stream, with the storages that it uses. It
 * computes in double and rounds once to the dtype. For the values used here torch's kernels give
 * the same results. */
#include "sim_internal.h"

#include <stdlib.h>
#include <string.h>

enum { USES_MAX = 2 };

typedef struct sim_storage {
    size_t refs;
    sim_block *block; /* NULL while freed, or without bytes */
    int64_t bytes;
    fct_device device;
    bool pinned; /* pinned host memory: the device copies asynchronously */
} sim_storage;

struct fct_tensor {
    size_t refs;
    sim_storage *storage;
    int64_t offset; /* elements */
    int32_t ndim;
    int64_t sizes[SIM_DIMS_MAX];
    int64_t strides[SIM_DIMS_MAX];
    fct_dtype dtype;
    bool requires_grad;
    uint32_t version;
    fct_tensor *grad;
};

/* ---- life ---- */

static sim_storage *storage_new(int64_t bytes) {
    sim_storage *storage = (sim_storage *)sim_alloc(sizeof *storage);
    storage->refs = 1;
    storage->bytes = bytes;
    storage->device = sim_device();
    storage->block = bytes > 0 ? sim_block_alloc((size_t)bytes, false) : NULL;
    sim_living.storages++;
    return storage;
}

static void storage_release(sim_storage *storage) {
    if (--storage->refs > 0) {
        return;
    }
    if (storage->block != NULL) {
        sim_block_free(storage->block, false);
    }
    sim_living.storages--;
    free(storage);
}

/* Takes the storage. `strides` NULL: contiguous. */
static fct_tensor *tensor_over(sim_storage *storage, fct_dtype dtype, int32_t ndim,
                               const int64_t *sizes, const int64_t *strides, int64_t offset) {
    fct_tensor *t = (fct_tensor *)sim_alloc(sizeof *t);
    int64_t stride = 1;
    t->refs = 1;
    t->storage = storage;
    t->dtype = dtype;
    t->ndim = ndim;
    t->offset = offset;
    for (int32_t d = ndim; d-- > 0;) {
        t->sizes[d] = sizes[d];
        t->strides[d] = strides != NULL ? strides[d] : stride;
        stride *= sizes[d] > 1 ? sizes[d] : 1;
    }
    sim_living.tensors++;
    return t;
}

int64_t sim_tensor_numel(const fct_tensor *t) {
    int64_t numel = 1;
    for (int32_t d = 0; d < t->ndim; d++) {
        numel *= t->sizes[d];
    }
    return numel;
}

fct_tensor *sim_tensor_in_host(fct_dtype dtype, int32_t ndim, const int64_t *sizes, bool pinned) {
    fct_tensor *t = tensor_over(storage_new(0), dtype, ndim, sizes, NULL, 0);
    sim_storage *storage = t->storage;
    storage->bytes = sim_tensor_numel(t) * sim_itemsize(dtype);
    storage->device = (fct_device){.type = FCT_DEVICE_CPU, .index = -1};
    storage->pinned = pinned;
    storage->block = storage->bytes > 0 ? sim_block_alloc((size_t)storage->bytes, true) : NULL;
    return t;
}

static fct_tensor *tensor_like(const fct_tensor *t, fct_dtype dtype) {
    return tensor_over(storage_new(sim_tensor_numel(t) * sim_itemsize(dtype)), dtype, t->ndim,
                       t->sizes, NULL, 0);
}

/* Finds NULL. Only AddressSanitizer finds a tensor that was freed. */
static void check_alive(const fct_tensor *t, const char *what) {
    if (t == NULL || t->refs == 0) {
        fail_msg("%s of a tensor that is gone", what);
    }
}

void fct_tensor_retain(fct_tensor *t) {
    check_alive(t, "retain");
    t->refs++;
}

void fct_tensor_release(fct_tensor *t) {
    if (t == NULL) {
        return;
    }
    check_alive(t, "release");
    if (--t->refs > 0) {
        return;
    }
    fct_tensor_release(t->grad);
    storage_release(t->storage);
    sim_living.tensors--;
    free(t);
}

size_t sim_tensor_refs(const fct_tensor *t) {
    return t->refs;
}

bool sim_tensor_is_pinned(const fct_tensor *t) {
    return t->storage->pinned;
}

bool sim_tensor_is_of_host(const fct_tensor *t) {
    return sim_now.streams && t->storage->device.type == FCT_DEVICE_CPU;
}

sim_block *sim_tensor_block(const fct_tensor *t) {
    return t->storage->block;
}

bool sim_tensor_has_memory(const fct_tensor *t) {
    return t->storage->bytes > 0;
}

/* ---- facts ---- */

static bool is_contiguous(const fct_tensor *t) {
    int64_t stride = 1;
    bool empty = sim_tensor_numel(t) == 0;
    for (int32_t d = t->ndim; d-- > 0;) {
        if (!empty && t->sizes[d] != 1 && t->strides[d] != stride) {
            return false;
        }
        stride *= t->sizes[d];
    }
    return true;
}

void fct_tensor_facts(const fct_tensor *t, fct_facts *out) {
    check_alive(t, "facts");
    const sim_block *block = t->storage->block;
    int64_t itemsize = sim_itemsize(t->dtype);
    *out = (fct_facts){
        .data = block != NULL ? block->base + t->offset * itemsize : NULL,
        .numel = sim_tensor_numel(t),
        .itemsize = itemsize,
        .offset_bytes = t->offset * itemsize,
        .storage_bytes = t->storage->bytes,
        .dtype = t->dtype,
        .device = t->storage->device,
        .contiguous = is_contiguous(t),
        .strided = true,
    };
}

bool fct_tensor_requires_grad(const fct_tensor *t) {
    check_alive(t, "requires_grad");
    return t->requires_grad;
}

void sim_tensor_relocate(fct_tensor *t, fct_device device) {
    t->storage->device = device;
}

uint32_t fct_tensor_version(const fct_tensor *t) {
    check_alive(t, "version");
    return t->version;
}

void fct_tensor_bump(fct_tensor *t) {
    check_alive(t, "bump");
    t->version++;
}

int fct_tensor_set_requires_grad(fct_tensor *t, bool value) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_set_requires_grad")) {
        return -1;
    }
    t->requires_grad = value;
    return 0;
}

/* ---- views for queued operations ---- */

sim_view sim_view_of(const fct_tensor *t, const char *what) {
    check_alive(t, what);
    sim_view view = {.dtype = t->dtype, .ndim = t->ndim, .numel = sim_tensor_numel(t)};
    memcpy(view.sizes, t->sizes, sizeof view.sizes);
    memcpy(view.strides, t->strides, sizeof view.strides);
    if (view.numel > 0 && t->storage->block == NULL) {
        sim_fail("%s uses a tensor whose memory is freed", what);
        view.numel = 0;
    } else if (view.numel > 0) {
        view.data = t->storage->block->base + t->offset * sim_itemsize(t->dtype);
    }
    return view;
}

void *sim_view_at(const sim_view *view, int64_t index) {
    int64_t at = 0;
    for (int32_t d = view->ndim; d-- > 0;) {
        at += index % view->sizes[d] * view->strides[d];
        index /= view->sizes[d];
    }
    return view->data + at * sim_itemsize(view->dtype);
}

typedef struct elementwise {
    sim_view to;
    sim_view from; /* numel 0: none */
    double factor; /* to = factor * to + from */
} elementwise;

static void run_elementwise(void *args) {
    const elementwise *e = (const elementwise *)args;
    for (int64_t i = 0; i < e->to.numel; i++) {
        void *at = sim_view_at(&e->to, i);
        double value = e->factor != 0.0 ? e->factor * sim_get(e->to.dtype, at) : 0.0;
        if (e->from.numel > 0) {
            value += sim_get(e->from.dtype, sim_view_at(&e->from, i));
        }
        sim_put(e->to.dtype, at, value);
    }
}

static sim_point push(int stream, fct_tensor *to, const fct_tensor *from, double factor,
                      const char *what) {
    elementwise *e = (elementwise *)sim_scratch(sizeof *e);
    sim_use uses[USES_MAX];
    size_t count = 0;
    e->to = sim_view_of(to, what);
    e->factor = factor;
    if (from != NULL) {
        e->from = sim_view_of(from, what);
        if (e->from.numel != e->to.numel) {
            sim_fail("%s of %lld elements to %lld", what, (long long)e->from.numel,
                     (long long)e->to.numel);
            e->to.numel = 0;
        }
    }
    if (from != NULL && e->from.numel > 0) {
        uses[count++] = (sim_use){from->storage->block, false};
    }
    if (e->to.numel > 0) {
        uses[count++] = (sim_use){to->storage->block, true};
    }
    sim_point end;
    const sim_op op = {.what = what,
                       .uses = uses,
                       .use_count = count,
                       .run = run_elementwise,
                       .args = e,
                       .crosses = from != NULL &&
                                  sim_tensor_is_of_host(from) != sim_tensor_is_of_host(to) &&
                                  stream == sim_stream_current()};
    sim_stream_push(stream, &op, &end);
    return end;
}

sim_point sim_tensor_cross(fct_tensor *to, const fct_tensor *from, const char *what) {
    return push(sim_stream_current(), to, from, 0.0, what);
}

void sim_queue_elementwise(fct_tensor *to, const fct_tensor *from, double factor,
                           const char *what) {
    if (from != NULL && sim_tensor_is_of_host(from) != sim_tensor_is_of_host(to)) {
        sim_fail("%s between the host's memory and the device's makes the host wait", what);
    }
    (void)push(sim_stream_of(to), to, from, factor, what);
}

/* ---- the boundary's operations ---- */

int fct_tensor_empty(int64_t numel, fct_dtype dtype, fct_device device, fct_tensor **out) {
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_empty")) {
        return -1;
    }
    if (device.type != sim_device().type || numel < 0) {
        sim_fail("a tensor of %lld elements on device type %d", (long long)numel, (int)device.type);
    }
    *out = tensor_over(storage_new(numel * sim_itemsize(dtype)), dtype, 1, &numel, NULL, 0);
    return 0;
}

/* Creates an alias. `offset` is relative to the storage, in elements of `dtype`. */
static fct_tensor *alias(const fct_tensor *base, fct_dtype dtype, int32_t ndim,
                         const int64_t *sizes, const int64_t *strides, int64_t offset) {
    int64_t last = 0;
    bool empty = false;
    for (int32_t d = 0; d < ndim; d++) {
        empty = empty || sizes[d] == 0;
        last += (sizes[d] - 1) * strides[d];
    }
    int64_t end = offset + (empty ? 0 : last + 1);
    if (end * sim_itemsize(dtype) > base->storage->bytes) {
        sim_fail("an alias needs %lld bytes, and its storage has %lld",
                 (long long)(end * sim_itemsize(dtype)), (long long)base->storage->bytes);
    }
    base->storage->refs++;
    return tensor_over(base->storage, dtype, ndim, sizes, strides, offset);
}

int fct_tensor_alias(const fct_tensor *base, int32_t ndim, const int64_t *sizes,
                     const int64_t *strides, int64_t offset, fct_tensor **out) {
    check_alive(base, "alias");
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_alias")) {
        return -1;
    }
    *out = alias(base, base->dtype, ndim, sizes, strides, offset);
    return 0;
}

int fct_tensor_alias_as(const fct_tensor *base, fct_dtype dtype, int32_t ndim, const int64_t *sizes,
                        const int64_t *strides, int64_t offset, fct_tensor **out) {
    check_alive(base, "alias_as");
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_alias_as")) {
        return -1;
    }
    *out = alias(base, dtype, ndim, sizes, strides, offset);
    return 0;
}

fct_tensor *sim_tensor_slice(const fct_tensor *t, int32_t ndim, const int64_t *sizes,
                             const int64_t *strides, int64_t offset) {
    return alias(t, t->dtype, ndim, sizes, strides, t->offset + offset);
}

int fct_tensor_contiguous(fct_tensor *t, fct_tensor **out) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_contiguous")) {
        return -1;
    }
    if (is_contiguous(t)) {
        fct_tensor_retain(t);
        *out = t;
        return 0;
    }
    *out = tensor_like(t, t->dtype);
    sim_queue_elementwise(*out, t, 0.0, "contiguous()");
    return 0;
}

int fct_tensor_cast(fct_tensor *t, fct_dtype dtype, fct_tensor **out) {
    check_alive(t, "cast");
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_cast")) {
        return -1;
    }
    if (t->dtype == dtype) {
        fct_tensor_retain(t);
        *out = t;
        return 0;
    }
    *out = tensor_like(t, dtype);
    sim_queue_elementwise(*out, t, 0.0, "a cast");
    return 0;
}

int fct_tensor_zeros_like(const fct_tensor *t, fct_tensor **out) {
    check_alive(t, "zeros_like");
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_zeros_like")) {
        return -1;
    }
    *out = tensor_like(t, t->dtype);
    sim_queue_elementwise(*out, NULL, 0.0, "zeros_like()");
    return 0;
}

int fct_tensor_copy(fct_tensor *dst, const fct_tensor *src) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_copy")) {
        return -1;
    }
    sim_queue_elementwise(dst, src, 0.0, "a copy");
    return 0;
}

int fct_tensor_add(fct_tensor *dst, const fct_tensor *src) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_add")) {
        return -1;
    }
    sim_queue_elementwise(dst, src, 1.0, "an addition");
    dst->version++;
    return 0;
}

int fct_tensor_div(fct_tensor *t, double divisor) {
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_tensor_div")) {
        return -1;
    }
    sim_queue_elementwise(t, NULL, 1.0 / divisor, "a division");
    return 0;
}

/* ---- storages ---- */

int fct_storage_alloc(fct_tensor *t, int64_t nbytes) {
    check_alive(t, "storage_alloc");
    sim_tick();
    if (sim_fault(SIM_FAULT_BOUNDARY, "fct_storage_alloc")) {
        return -1;
    }
    if (t->storage->bytes == nbytes) {
        return 0;
    }
    if (t->storage->bytes != 0) {
        sim_fail("memory is given to a storage that holds some");
        return 0;
    }
    t->storage->bytes = nbytes;
    t->storage->block = sim_block_alloc((size_t)nbytes, false);
    return 0;
}

void fct_storage_free(fct_tensor *t) {
    check_alive(t, "storage_free");
    if (t->storage->block != NULL) {
        sim_block_free(t->storage->block, true);
    }
    t->storage->block = NULL;
    t->storage->bytes = 0;
}

bool fct_storage_is_shared(const fct_tensor *t) {
    return t->storage->refs > 1;
}

void fct_storage_move(fct_tensor *from, fct_tensor *to) {
    check_alive(from, "storage_move");
    check_alive(to, "storage_move");
    if (to->storage->block != NULL) {
        sim_fail("memory is moved to a storage that holds some");
    }
    to->storage->block = from->storage->block;
    to->storage->bytes = from->storage->bytes;
    from->storage->block = NULL;
    from->storage->bytes = 0;
}

/* ---- gradients ---- */

bool fct_tensor_is_sole(const fct_tensor *t) {
    check_alive(t, "is_sole");
    return t->refs == 1 && t->storage->refs == 1;
}

bool fct_grad_has(const fct_tensor *t) {
    check_alive(t, "grad");
    return t->grad != NULL;
}

void fct_grad_take(fct_tensor *t, fct_tensor **out) {
    check_alive(t, "grad");
    *out = t->grad;
    t->grad = NULL;
}

fct_tensor *sim_grad_peek(const fct_tensor *t) {
    return t->grad;
}

void sim_grad_accumulate(fct_tensor *t, fct_tensor *grad) {
    if (t->grad == NULL) {
        t->grad = grad;
        return;
    }
    sim_queue_elementwise(t->grad, grad, 1.0, "gradient accumulation");
    fct_tensor_release(grad);
}

/* ---- for tests ---- */

typedef struct transfer {
    sim_view view;
    double *values; /* behind the struct */
    const char *what;
    double *out;
} transfer;

static void run_write(void *args) {
    const transfer *w = (const transfer *)args;
    for (int64_t i = 0; i < w->view.numel; i++) {
        sim_put(w->view.dtype, sim_view_at(&w->view, i), w->values[i]);
    }
}

static void run_expect(void *args) {
    const transfer *e = (const transfer *)args;
    for (int64_t i = 0; i < e->view.numel; i++) {
        double found = sim_get(e->view.dtype, sim_view_at(&e->view, i));
        if (!(found == e->values[i]) && !sim_data_is_lost) {
            sim_fail("element %lld of %s is %g, expected %g", (long long)i, e->what, found,
                     e->values[i]);
            return;
        }
    }
}

static void run_touch(void *args) {
    const transfer *e = (const transfer *)args;
    for (int64_t i = 0; i < e->view.numel; i++) {
        double found = sim_get(e->view.dtype, sim_view_at(&e->view, i));
        if (found != found && !sim_data_is_lost) {
            sim_fail("%s finds NaN in element %lld", e->what, (long long)i);
            return;
        }
    }
}

static void run_read(void *args) {
    const transfer *r = (const transfer *)args;
    for (int64_t i = 0; i < r->view.numel; i++) {
        r->out[i] = sim_get(r->view.dtype, sim_view_at(&r->view, i));
    }
}

static void queue_transfer(const fct_tensor *t, const double *values, double *out,
                           void (*run)(void *), const char *what) {
    int64_t numel = sim_tensor_numel(t);
    transfer *args = (transfer *)sim_scratch(sizeof *args + (size_t)numel * sizeof(double));
    args->view = sim_view_of(t, what);
    args->what = what;
    args->out = out;
    args->values = (double *)(void *)(args + 1);
    if (values != NULL) {
        memcpy(args->values, values, (size_t)numel * sizeof *values);
    }
    const sim_use use = {t->storage->block, run == run_write};
    const sim_op op = {.what = what,
                       .uses = &use,
                       .use_count = t->storage->block != NULL ? 1 : 0,
                       .run = run,
                       .args = args};
    sim_stream_push(sim_stream_of(t), &op, NULL);
}

fct_tensor *sim_tensor_new(fct_dtype dtype, int32_t ndim, const int64_t *sizes,
                           const double *values) {
    int64_t numel = 1;
    for (int32_t d = 0; d < ndim; d++) {
        numel *= sizes[d];
    }
    fct_tensor *t =
        tensor_over(storage_new(numel * sim_itemsize(dtype)), dtype, ndim, sizes, NULL, 0);
    if (values != NULL) {
        queue_transfer(t, values, NULL, run_write, "a new tensor's write");
    }
    return t;
}

void sim_tensor_write(fct_tensor *t, const double *values, const char *what) {
    queue_transfer(t, values, NULL, run_write, what);
    t->version++;
}

void sim_tensor_touch(const fct_tensor *t, const char *what) {
    queue_transfer(t, NULL, NULL, run_touch, what);
}

fct_tensor *sim_tensor_view(const fct_tensor *t, int32_t ndim, const int64_t *sizes,
                            const int64_t *strides) {
    t->storage->refs++;
    return tensor_over(t->storage, t->dtype, ndim, sizes, strides, t->offset);
}

void sim_tensor_expect(const fct_tensor *t, const double *values, const char *what) {
    queue_transfer(t, values, NULL, run_expect, what);
}

void sim_tensor_read(const fct_tensor *t, double *out) {
    sim_drain();
    queue_transfer(t, NULL, out, run_read, "a read");
    sim_drain();
}
