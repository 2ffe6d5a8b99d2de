/* Implements the tensors and storages of csrc/bridge for the dry run, without memory. The callers
 * own the objects that this file creates.
 *
 * Invariant: the sum of fcd_storage.bytes over all storages of a purpose equals fcd_record.live of
 * that purpose. */
#include "boundary.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../core/dtype.h"

struct fct_tensor {
    size_t refs;
    fcd_storage *storage;
    fct_dtype dtype;
    bool requires_grad;
    uint32_t version;
    fct_tensor *grad;                     /* owned, or NULL */
    fct_grad_subscription *subscriptions; /* of this leaf; each is owned by its caller */
    int64_t offset;                       /* in elements, from the start of the storage */
    int32_t ndim;
    int64_t dims[]; /* [2 * ndim] sizes, then strides */
};

/* ---- storages ---- */

fcd_storage *fcd_storage_new(int64_t bytes, fcd_purpose purpose, bool on_host) {
    fcd_storage *storage = (fcd_storage *)calloc(1, sizeof *storage);
    if (storage == NULL) {
        (void)fcd_fail("out of memory for a fake storage");
        return NULL;
    }
    assert(bytes >= 0);
    storage->refs = 1;
    storage->number = fcd_current_record->storages_made++;
    storage->bytes = bytes;
    storage->on_host = on_host && fcd_current_record->has_streams;
    storage->purpose = storage->on_host ? FCD_HOST : purpose;
    fcd_current_record->storages++;
    fcd_append_memory_event(storage->purpose, storage->number, bytes);
    return storage;
}

void fcd_storage_release(fcd_storage *storage) {
    if (storage == NULL || --storage->refs > 0) {
        return;
    }
    fcd_append_memory_event(storage->purpose, storage->number, -storage->bytes);
    fcd_current_record->storages--;
    free(storage);
}

void fcd_storage_reassign(fcd_storage *storage, int64_t bytes, fcd_purpose purpose) {
    fcd_append_memory_event(storage->purpose, storage->number, -storage->bytes);
    storage->bytes = bytes;
    storage->purpose = purpose;
    fcd_append_memory_event(storage->purpose, storage->number, bytes);
}

/* Returns a unique address that is never dereferenced. The core adds offsets to addresses and
 * compares addresses. */
static char *fake_address(const fcd_storage *storage) {
    const uintptr_t first = (uintptr_t)1 << 20;
    return storage->bytes > 0 ? (char *)(first + ((uintptr_t)storage->number << 8)) : NULL;
}

int fct_storage_alloc(fct_tensor *t, int64_t nbytes) {
    fcd_storage *storage = t->storage;
    if (storage->bytes == nbytes) {
        return 0;
    }
    if (storage->bytes != 0) {
        return fcd_fail("a storage of %lld bytes gets %lld bytes", (long long)storage->bytes,
                        (long long)nbytes);
    }
    fcd_storage_reassign(storage, nbytes,
                         storage->on_host ? FCD_HOST : fcd_current_record->purpose);
    return 0;
}

void fct_storage_free(fct_tensor *t) {
    fcd_storage_reassign(t->storage, 0, t->storage->purpose);
}

bool fct_storage_can_free(const fct_tensor *t) {
    (void)t;
    return true;
}

bool fct_storage_is_shared(const fct_tensor *t) {
    return t->storage->refs > 1;
}

/* Records no event, because the memory stays allocated. The storages exchange their numbers, so
 * that the later `free` event has the number of the `alloc` event. */
void fct_storage_move(fct_tensor *from, fct_tensor *to) {
    const fcd_storage moved = *from->storage;
    assert(to->storage->bytes == 0 && to->storage->on_host == moved.on_host);
    from->storage->number = to->storage->number;
    from->storage->bytes = 0;
    to->storage->number = moved.number;
    to->storage->bytes = moved.bytes;
    to->storage->purpose = moved.purpose;
}

void fct_memory_begin_round(void) {}

void fct_memory_trim(void) {}

/* ---- tensors ---- */

static int64_t numel_of(const fct_tensor *t) {
    int64_t numel = 1;
    for (int32_t d = 0; d < t->ndim; d++) {
        numel *= t->dims[d];
    }
    return numel;
}

static int64_t bytes_of(const fct_tensor *t) {
    return numel_of(t) * fc_dtype_size(t->dtype);
}

static bool is_contiguous(const fct_tensor *t) {
    int64_t expected = 1;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        if (t->dims[d] != 1 && t->dims[t->ndim + d] != expected) {
            return numel_of(t) == 0;
        }
        expected *= t->dims[d];
    }
    return true;
}

/* Creates a tensor, which adds a reference to the storage. `strides` NULL: contiguous. */
static fct_tensor *new_tensor(fcd_storage *storage, fct_dtype dtype, int32_t ndim,
                              const int64_t *sizes, const int64_t *strides, int64_t offset) {
    fct_tensor *t = (fct_tensor *)calloc(1, sizeof *t + 2 * (size_t)ndim * sizeof t->dims[0]);
    if (t == NULL) {
        (void)fcd_fail("out of memory for a fake tensor");
        return NULL;
    }
    t->refs = 1;
    t->storage = storage;
    t->dtype = dtype;
    t->offset = offset;
    t->ndim = ndim;
    int64_t stride = 1;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        t->dims[d] = sizes[d];
        t->dims[ndim + d] = strides != NULL ? strides[d] : stride;
        stride *= sizes[d] > 1 ? sizes[d] : 1;
    }
    storage->refs++;
    fcd_current_record->tensors++;
    return t;
}

fct_tensor *fcd_tensor_over(fcd_storage *storage, fct_dtype dtype, int32_t ndim,
                            const int64_t *sizes) {
    return new_tensor(storage, dtype, ndim, sizes, NULL, 0);
}

/* Creates a contiguous tensor with memory of its own. */
static int allocate_tensor(fct_dtype dtype, int32_t ndim, const int64_t *sizes, bool on_host,
                           fct_tensor **out) {
    int64_t bytes = fc_dtype_size(dtype);
    for (int32_t d = 0; d < ndim; d++) {
        bytes *= sizes[d];
    }
    fcd_storage *storage = fcd_storage_new(bytes, fcd_current_record->purpose, on_host);
    if (storage == NULL) {
        return -1;
    }
    *out = new_tensor(storage, dtype, ndim, sizes, NULL, 0);
    fcd_storage_release(storage);
    return *out != NULL ? 0 : -1;
}

void fct_tensor_retain(fct_tensor *t) {
    t->refs++;
}

void fct_tensor_release(fct_tensor *t) {
    if (t == NULL || --t->refs > 0) {
        return;
    }
    while (t->subscriptions != NULL) {
        fcd_remove_subscription(t, t->subscriptions);
    }
    fct_tensor_release(t->grad);
    fcd_storage_release(t->storage);
    fcd_current_record->tensors--;
    free(t);
}

void fct_tensor_facts(const fct_tensor *t, fct_facts *out) {
    const int64_t itemsize = fc_dtype_size(t->dtype);
    char *base = fake_address(t->storage);
    const bool cpu = t->storage->on_host || !fcd_current_record->has_streams;
    *out = (fct_facts){.data = base != NULL ? base + t->offset * itemsize : NULL,
                       .numel = numel_of(t),
                       .itemsize = itemsize,
                       .offset_bytes = t->offset * itemsize,
                       .storage_bytes = t->storage->bytes,
                       .dtype = t->dtype,
                       .device = {.type = cpu ? FCT_DEVICE_CPU : FCT_DEVICE_CUDA, .index = -1},
                       .contiguous = is_contiguous(t),
                       .strided = true};
}

bool fct_tensor_requires_grad(const fct_tensor *t) {
    return t->requires_grad;
}

bool fct_tensor_is_sole(const fct_tensor *t) {
    return t->refs == 1 && t->storage->refs == 1;
}

uint32_t fct_tensor_version(const fct_tensor *t) {
    return t->version;
}

int fct_tensor_set_requires_grad(fct_tensor *t, bool value) {
    t->requires_grad = value;
    return 0;
}

int fct_tensor_set_grad_dtype(fct_tensor *t, fct_dtype dtype) {
    (void)t;
    (void)dtype;
    return 0;
}

int fct_tensor_empty(int64_t numel, fct_dtype dtype, fct_device device, fct_tensor **out) {
    return allocate_tensor(dtype, 1, &numel, device.type == FCT_DEVICE_CPU, out);
}

int fct_tensor_alias_as(const fct_tensor *base, fct_dtype dtype, int32_t ndim, const int64_t *sizes,
                        const int64_t *strides, int64_t offset, fct_tensor **out) {
    int64_t end = offset + 1;
    bool empty = false;
    for (int32_t d = 0; d < ndim; d++) {
        empty = empty || sizes[d] == 0;
        end += (sizes[d] - 1) * strides[d];
    }
    if (!empty && end * fc_dtype_size(dtype) > base->storage->bytes) {
        return fcd_fail("an alias ends at element %lld of a storage of %lld bytes", (long long)end,
                        (long long)base->storage->bytes);
    }
    *out = new_tensor(base->storage, dtype, ndim, sizes, strides, offset);
    return *out != NULL ? 0 : -1;
}

int fct_tensor_alias(const fct_tensor *base, int32_t ndim, const int64_t *sizes,
                     const int64_t *strides, int64_t offset, fct_tensor **out) {
    return fct_tensor_alias_as(base, base->dtype, ndim, sizes, strides, offset, out);
}

/* ---- operations ---- */

int fct_tensor_contiguous(fct_tensor *t, fct_tensor **out) {
    if (is_contiguous(t)) {
        fct_tensor_retain(t);
        *out = t;
        return 0;
    }
    if (allocate_tensor(t->dtype, t->ndim, t->dims, t->storage->on_host, out) != 0) {
        return -1;
    }
    fcd_append_event(FCD_COPY, -1, 0, bytes_of(*out), NULL);
    return 0;
}

int fct_tensor_cast(fct_tensor *t, fct_dtype dtype, fct_tensor **out) {
    if (t->dtype == dtype) {
        fct_tensor_retain(t);
        *out = t;
        return 0;
    }
    if (allocate_tensor(dtype, t->ndim, t->dims, t->storage->on_host, out) != 0) {
        return -1;
    }
    fcd_append_event(FCD_CAST, -1, 0, bytes_of(*out), NULL);
    return 0;
}

int fct_tensor_zeros_like(const fct_tensor *t, fct_tensor **out) {
    if (allocate_tensor(t->dtype, t->ndim, t->dims, t->storage->on_host, out) != 0) {
        return -1;
    }
    fcd_append_event(FCD_FILL, -1, 0, bytes_of(*out), NULL);
    return 0;
}

int fct_tensor_copy(fct_tensor *dst, const fct_tensor *src) {
    (void)src;
    fcd_append_event(FCD_COPY, -1, 0, bytes_of(dst), NULL);
    return 0;
}

int fct_tensor_add(fct_tensor *dst, const fct_tensor *src) {
    (void)src;
    dst->version++;
    fcd_append_event(FCD_ADD, -1, 0, bytes_of(dst), NULL);
    return 0;
}

int fct_tensor_div(fct_tensor *t, double divisor) {
    (void)divisor;
    fcd_append_event(FCD_DIVIDE, -1, 0, bytes_of(t), NULL);
    return 0;
}

int fct_tensor_upload(fct_tensor *dst, const fct_tensor *src) {
    (void)src;
    fcd_append_event(FCD_UPLOAD, -1, 0, bytes_of(dst), NULL);
    return 0;
}

int fct_tensor_to_host(fct_tensor *t, bool non_blocking, fct_tensor **out) {
    (void)non_blocking;
    if (allocate_tensor(t->dtype, t->ndim, t->dims, true, out) != 0) {
        return -1;
    }
    fcd_append_event(FCD_DOWNLOAD, -1, 0, bytes_of(*out), NULL);
    return 0;
}

int fct_foreach_copy(fct_tensor *const *dst, fct_tensor *const *src, size_t count) {
    int64_t bytes = 0;
    (void)src;
    for (size_t i = 0; i < count; i++) {
        bytes += bytes_of(dst[i]);
    }
    fcd_append_event(FCD_COPY, -1, 0, bytes, NULL);
    return 0;
}

int fct_foreach_add(fct_tensor *const *dst, fct_tensor *const *src, size_t count) {
    int64_t bytes = 0;
    (void)src;
    for (size_t i = 0; i < count; i++) {
        bytes += bytes_of(dst[i]);
    }
    fcd_append_event(FCD_ADD, -1, 0, bytes, NULL);
    return 0;
}

int fct_split_copy(const fct_tensor *src, const int64_t *sizes, fct_tensor *const *out,
                   size_t count) {
    (void)sizes;
    (void)out;
    (void)count;
    fcd_append_event(FCD_UNPACK, -1, 0, bytes_of(src), NULL);
    return 0;
}

int fct_chunk_cat(fct_tensor *const *tensors, size_t count, int64_t chunks, fct_tensor *out) {
    (void)tensors;
    (void)count;
    (void)chunks;
    fcd_append_event(FCD_PACK_GRADIENTS, -1, 0, bytes_of(out), NULL);
    return 0;
}

/* ---- deferred release ---- */

void fcd_defer_release(fct_tensor *t) {
    fcd_record *r = fcd_current_record;
    if (t == NULL) {
        return;
    }
    fct_tensor **grown =
        (fct_tensor **)realloc((void *)r->deferred, (r->deferred_count + 1) * sizeof *grown);
    if (grown == NULL) {
        r->failed = true;
        fct_tensor_release(t);
        return;
    }
    r->deferred = grown;
    r->deferred[r->deferred_count++] = t;
}

void fcd_release_deferred(void) {
    fcd_record *r = fcd_current_record;
    for (size_t i = 0; i < r->deferred_count; i++) {
        fct_tensor_release(r->deferred[i]);
    }
    r->deferred_count = 0;
}

/* ---- gradients ---- */

bool fct_grad_has(const fct_tensor *t) {
    return t->grad != NULL;
}

const void *fct_grad_identity(const fct_tensor *t) {
    return t->grad;
}

void fct_grad_take(fct_tensor *t, fct_tensor **out) {
    *out = t->grad;
    t->grad = NULL;
}

void fct_grad_put(fct_tensor *t, fct_tensor *grad) {
    fct_tensor_retain(grad);
    fct_tensor_release(t->grad);
    t->grad = grad;
}

void fcd_accumulate_grad(fct_tensor *leaf, fct_tensor *grad) {
    if (leaf->grad == NULL) {
        leaf->grad = grad;
        return;
    }
    leaf->grad->version++;
    fct_tensor_release(grad);
}

void fcd_add_subscription(fct_tensor *leaf, fct_grad_subscription *subscription) {
    subscription->leaf = leaf;
    subscription->next = leaf->subscriptions;
    leaf->subscriptions = subscription;
}

void fcd_remove_subscription(fct_tensor *leaf, fct_grad_subscription *subscription) {
    fct_grad_subscription **link = &leaf->subscriptions;
    while (*link != subscription) {
        assert(*link != NULL);
        link = &(*link)->next;
    }
    *link = subscription->next;
    subscription->leaf = NULL;
}

int fcd_run_subscriptions(const fct_tensor *leaf) {
    int result = 0;
    for (fct_grad_subscription *subscription = leaf->subscriptions, *next = NULL;
         result == 0 && subscription != NULL; subscription = next) {
        next = subscription->next;
        result = subscription->hook.call(subscription->hook.owner);
    }
    return result;
}
