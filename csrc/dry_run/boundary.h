/* Tensors and storages of the dry run's boundary (csrc/bridge), which have sizes and a dtype but no
 * memory. All functions count their objects in the record of this thread (fcd_record_init).
 *
 * The addresses of a storage are numbers that are never dereferenced. */
#ifndef FSDP_C_DRY_RUN_BOUNDARY_H
#define FSDP_C_DRY_RUN_BOUNDARY_H

#include "../core/param.h"
#include "record.h"

/* Memory that tensors share. */
typedef struct fcd_storage {
    size_t refs;
    int64_t number; /* identifies the storage in events */
    int64_t bytes;  /* 0: freed */
    bool on_host;   /* host memory of a device with streams */
    fcd_purpose purpose;
} fcd_storage;

/* Returns NULL with the record's error set if there is no memory. Release with
 * fcd_storage_release(). `on_host`: host memory of a device with streams. */
fcd_storage *fcd_storage_new(int64_t bytes, fcd_purpose purpose, bool on_host);
/* Releases one reference. The last release frees the storage. NULL is allowed. */
void fcd_storage_release(fcd_storage *storage);
/* Frees the storage's bytes and allocates `bytes` for `purpose`. */
void fcd_storage_reassign(fcd_storage *storage, int64_t bytes, fcd_purpose purpose);
/* Creates a contiguous tensor over the storage. The tensor adds a reference to the storage. Returns
 * NULL on failure. */
fct_tensor *fcd_tensor_over(fcd_storage *storage, fct_dtype dtype, int32_t ndim,
                            const int64_t *sizes);
/* Sets .grad of a leaf, or adds to .grad, as autograd does. Takes `grad`. */
void fcd_accumulate_grad(fct_tensor *leaf, fct_tensor *grad);
/* Takes `t` and releases it at the end of the call, like csrc/python, whose objects live until the
 * hook returns. NULL is allowed. */
void fcd_defer_release(fct_tensor *t);
/* Releases the deferred references. Runs at the end of each call. */
void fcd_release_deferred(void);
/* Calls the notifications of the leaf, as autograd does after a gradient was accumulated. Returns
 * 0, or the first result that is not 0. */
int fcd_run_subscriptions(const fct_tensor *leaf);
/* Adds and removes notifications; called by fct_autograd_subscribe() and
 * fct_grad_subscription_free(). */
void fcd_add_subscription(fct_tensor *leaf, fct_grad_subscription *subscription);
void fcd_remove_subscription(fct_tensor *leaf, fct_grad_subscription *subscription);

struct fct_grad_subscription {
    fct_tensor *leaf; /* NULL after the leaf was released */
    fct_hook hook;
    struct fct_grad_subscription *next;
};

#endif
