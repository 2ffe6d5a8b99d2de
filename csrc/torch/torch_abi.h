/* The boundary between the C core and libtorch. Valid C11, no torch header: opaque handles and
 * functions whose ownership is stated. The .cpp files here are the only real implementation;
 * tests/c/ has a simulated one.
 *
 * Conventions
 *   - `int` results: 0, or -1 with a Python exception set. Functions that return void, bool or a
 * value cannot fail. The caller holds the GIL.
 *   - Output parameters come last and are written only on success.
 *   - "new": the caller owns one reference and releases it. "borrows": the callee takes no
 * reference. "takes": the callee steals the caller's reference, on failure too.
 *   - No function bumps a tensor's version counter or records autograd history unless it says so:
 * every operation on tensors runs with grad mode off and below autograd.
 *   - Process-global mutable state is keyed by process group, except the pool: ranks may be threads
 * of one process. */
#ifndef FSDP_C_TORCH_ABI_H
#define FSDP_C_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define FCT_CHECK __attribute__((warn_unused_result))
#else
#define FCT_CHECK
#endif

typedef struct fct_tensor fct_tensor; /* c10::TensorImpl, counted */
typedef struct fct_pg fct_pg;         /* c10d::ProcessGroup, counted */
typedef struct fct_work fct_work;     /* c10d::Work, counted */
typedef struct fct_event fct_event;   /* a device event; counted */
typedef struct fct_grad_subscription
    fct_grad_subscription; /* a post-accumulation hook of a leaf; one owner */
struct _object;            /* CPython's PyObject */

typedef int32_t fct_dtype; /* torch's ScalarType number; -1: none */
#define FCT_NO_DTYPE (-1)

typedef struct fct_device {
    int8_t type;  /* torch's DeviceType number: 0 CPU, 1 CUDA, 14 meta ... */
    int8_t index; /* -1: none */
} fct_device;
enum { FCT_DEVICE_CPU = 0, FCT_DEVICE_CUDA = 1, FCT_DEVICE_META = 14, FCT_DEVICE_MTIA = 19 };

/* A packed c10::Stream. Valid only if fct_device_has_streams(). */
typedef struct fct_stream {
    int64_t id;
    fct_device device;
} fct_stream;

/* ---- faults ---------------------------------------------------------------------------------- */

/* For tests: the n-th fallible boundary call of this thread from now on fails with
 * RuntimeError("injected fault ..."). 0 disarms. fct_fault_left() returns the remaining calls (0:
 * disarmed or fired). The counter is thread-local. While it is armed, fct_work_done() returns
 * false, so that the order of calls does not depend on timing. */
void fct_fault_arm(int64_t n);
int64_t fct_fault_left(void);

/* Takes the pending exception (NULL: none) before a clean-up that may fail. put_back restores it
 * and discards an exception of the clean-up. */
void *fct_error_set_aside(void);
void fct_error_put_back(void *error);
/* Prefixes the message of a pending RuntimeError with "text: ". The original exception becomes the
 * cause. Backends raise RuntimeError and its subclasses. Other exceptions do not change. */
void fct_error_explain(const char *text);

/* ---- tensors --------------------------------------------------------------------------------- */

/* Properties of a tensor at the time of the call. */
typedef struct fct_facts {
    void *data;            /* address of the first element; NULL if there is no memory behind it */
    int64_t numel;         /* elements */
    int64_t itemsize;      /* bytes per element */
    int64_t offset_bytes;  /* of data inside the storage */
    int64_t storage_bytes; /* size of the storage now (0 while freed) */
    fct_dtype dtype;
    fct_device device;
    bool contiguous; /* and not a lazy conjugate or negative view */
    bool strided;    /* plain dense layout (not sparse, not a wrapper without memory) */
} fct_facts;

void fct_tensor_retain(fct_tensor *t);
void fct_tensor_release(fct_tensor *t); /* NULL is allowed */
/* Never fails: a wrapper or a sparse tensor gives strided=false and data=NULL. */
void fct_tensor_facts(const fct_tensor *t, fct_facts *out);
bool fct_tensor_requires_grad(const fct_tensor *t);
/* Whether the caller has the only reference to the tensor, its storage and its memory. */
bool fct_tensor_is_sole(const fct_tensor *t);
/* The version counter. 0 for inference tensors. */
uint32_t fct_tensor_version(const fct_tensor *t);
/* Bumps the version after a write through a raw pointer. No-op for inference tensors. */
void fct_tensor_bump(fct_tensor *t);

/* New 1-D tensor of `numel` uninitialized elements, allocated on the device's current stream. Not
 * an inference tensor, even in inference mode. */
FCT_CHECK int fct_tensor_empty(int64_t numel, fct_dtype dtype, fct_device device, fct_tensor **out);
/* New tensor aliasing base's storage, with base's dtype and its own version counter, no autograd
 * relation. `offset` is in elements from the start of the storage. Fails if the alias exceeds the
 * storage. */
FCT_CHECK int fct_tensor_alias(const fct_tensor *base, int32_t ndim, const int64_t *sizes,
                               const int64_t *strides, int64_t offset, fct_tensor **out);
/* The same with another dtype. `offset` is in elements of `dtype`. */
FCT_CHECK int fct_tensor_alias_as(const fct_tensor *base, fct_dtype dtype, int32_t ndim,
                                  const int64_t *sizes, const int64_t *strides, int64_t offset,
                                  fct_tensor **out);
/* New contiguous copy of t, or a new reference to t if it is contiguous. */
FCT_CHECK int fct_tensor_contiguous(fct_tensor *t, fct_tensor **out);
/* New tensor of `dtype` with t's values, or a new reference to t if it has the dtype. A cast from
 * complex to real takes the real parts. */
FCT_CHECK int fct_tensor_cast(fct_tensor *t, fct_dtype dtype, fct_tensor **out);
/* New tensor of zeros, like t in shape, dtype and device. */
FCT_CHECK int fct_tensor_zeros_like(const fct_tensor *t, fct_tensor **out);
/* Copies t.narrow(dim, start, length) to new memory, padded with zeros to `padded` along `dim`.
 * *local: new, the copy without padding. *row: new, all of the memory, 1-D. Both are views that
 * share one version counter. Goes through all layers of the dispatcher, without grad. */
FCT_CHECK int fct_tensor_cut(fct_tensor *t, int32_t dim, int64_t start, int64_t length,
                             int64_t padded, fct_tensor **local, fct_tensor **row);
/* dst.copy_(src), which casts. dst.add_(src), which bumps dst's version. t.div_(divisor). */
FCT_CHECK int fct_tensor_copy(fct_tensor *dst, const fct_tensor *src);
FCT_CHECK int fct_tensor_add(fct_tensor *dst, const fct_tensor *src);
FCT_CHECK int fct_tensor_div(fct_tensor *t, double divisor);
/* dst.copy_(src, non_blocking=True) from the host to a device, or within a device. Pinned memory of
 * src must not change before the copy is done. Releases the GIL. */
FCT_CHECK int fct_tensor_upload(fct_tensor *dst, const fct_tensor *src);
/* t.to("cpu", non_blocking=...): a new CPU tensor. With non_blocking it is pinned and the copy is
 * only queued. Releases the GIL. */
FCT_CHECK int fct_tensor_to_host(fct_tensor *t, bool non_blocking, fct_tensor **out);
/* requires_grad_() of a leaf. */
FCT_CHECK int fct_tensor_set_requires_grad(fct_tensor *t, bool value);

/* dst[i].copy_(src[i]) for all i. One launch if the lists have one source dtype, one destination
 * dtype and equal shapes and strides, and if the device has such a kernel. */
FCT_CHECK int fct_foreach_copy(fct_tensor *const *dst, fct_tensor *const *src, size_t count);
/* Splits a 2-D tensor along dim 1 into parts of `sizes` and copies them to out[i]. Each out[i] is
 * [rows, sizes[i]], contiguous, of the same dtype. */
FCT_CHECK int fct_split_copy(const fct_tensor *rows, const int64_t *sizes, fct_tensor *const *out,
                             size_t count);
/* torch._chunk_cat along dim 0: row c of out holds chunk c of each tensor, padded with zeros. The
 * tensors are 2-D, not empty, of one dtype. out: [chunks, sum of padded sizes]. Casts. */
FCT_CHECK int fct_chunk_cat(fct_tensor *const *tensors, size_t count, int64_t chunks,
                            fct_tensor *out);

/* CPU buffers come from a pool (kernels/pool.h), which keeps freed memory. round: an iteration of a
 * model begins. trim: returns the free memory to the system. */
void fct_memory_round(void);
void fct_memory_trim(void);

/* Allocates `nbytes` bytes of uninitialized memory for the empty storage of t, from the storage's
 * own allocator. No-op if the storage has that size. */
FCT_CHECK int fct_storage_alloc(fct_tensor *t, int64_t nbytes);
/* Frees the storage's memory. The size becomes 0. No-op if it is 0. */
void fct_storage_free(fct_tensor *t);
/* Whether fct_storage_free is allowed: false if an array (numpy()) or another process shares the
 * memory. */
bool fct_storage_can_free(const fct_tensor *t);
/* Whether another tensor refers to the storage of t. */
bool fct_storage_is_shared(const fct_tensor *t);
/* Moves the memory of from's storage to to's empty storage. Both are on one device. */
void fct_storage_move(fct_tensor *from, fct_tensor *to);

/* .grad of a leaf. has: whether it is set. identity: an address, for comparison only. take: moves
 * it out and leaves None. *out is new, or NULL if there is none. */
bool fct_grad_has(const fct_tensor *t);
const void *fct_grad_identity(const fct_tensor *t);
void fct_grad_take(fct_tensor *t, fct_tensor **out);

/* ---- process groups and collectives ---------------------------------------------------------- */

/* Every collective goes through the ProcessGroup's method, and so through the dispatcher ops of
 * namespace c10d. One call is one op, also over shared memory (direct.h), so CommDebugMode, the
 * flight recorder and tests count the same ops. Complex tensors are passed as pairs of real
 * numbers. Gathers pass dtypes that the backend does not support as bytes.
 *
 * A rank shard ("row" in names) is the elements of a collective's buffer that belong to one rank.
 */
typedef enum fct_reduce_op { FCT_SUM = 0, FCT_AVG = 1, FCT_PREMUL_SUM = 2 } fct_reduce_op;

/* A handle by the group's registered name (pg.group_name). Handles of one group are shared. */
FCT_CHECK int fct_pg_resolve(const char *name, fct_pg **out);
void fct_pg_release(fct_pg *pg); /* NULL is allowed */
/* Registers a parameter group that gathers over the process group `name`, or a bucket that is
 * all-reduced over it. The negotiation needs their number: as many collectives may be in flight
 * before a rank waits. */
FCT_CHECK int fct_pg_register_user(const char *name);
/* Whether ReduceOp.PREMUL_SUM may be passed to the backend of `device`. False only for gloo. */
bool fct_pg_has_premul(fct_pg *pg, fct_device device);

/* allocates: whether the backend of `device` has an allocator (NCCL registers its memory with the
 * network). empty: a new 1-D tensor of `numel` uninitialized elements from it, on the device's
 * current stream. Not an inference tensor, even in inference mode. */
FCT_CHECK int fct_pg_allocates(fct_pg *pg, fct_device device, bool *allocates);
FCT_CHECK int fct_pg_empty(fct_pg *pg, int64_t numel, fct_dtype dtype, fct_device device,
                           fct_tensor **out);

/* Each issues one asynchronous collective. *work is new, or NULL if the backend finished at once.
 * The tensors are 1-D and contiguous. The backend keeps references to them until it is done.
 * `factor` is used only for FCT_PREMUL_SUM. */
FCT_CHECK int fct_all_gather(fct_pg *pg, fct_tensor *output, fct_tensor *input, bool async_op,
                             fct_work **work);
FCT_CHECK int fct_reduce_scatter(fct_pg *pg, fct_tensor *output, fct_tensor *input,
                                 fct_reduce_op op, double factor, bool async_op, fct_work **work);
/* All-reduces a buffer of gradients, which may use shared memory. */
FCT_CHECK int fct_all_reduce(fct_pg *pg, fct_tensor *tensor, fct_reduce_op op, double factor,
                             bool async_op, fct_work **work);
/* All-reduces other values. Always uses the group's backend, because peers may call it through
 * torch. */
FCT_CHECK int fct_sum_over_ranks(fct_pg *pg, fct_tensor *tensor, fct_work **work);

/* Consecutive elements of a rank shard, and their place in this rank's memory. */
typedef struct fct_run {
    size_t chunk;   /* index of the tensor that holds them */
    int64_t offset; /* in elements, in each rank's part of that tensor */
    int64_t numel;
} fct_run;
/* A rank shard as a sequence of runs. Chunk k holds parts of all rank shards, in rank order, of one
 * size. The layout is private to this rank: the transport sends shards in element order, so peers
 * may have other layouts. */
typedef struct fct_chunk_layout {
    const fct_run *runs;
    size_t count;
    int64_t row_numel;
} fct_chunk_layout;

/* Whether the transport of `device` supports separate chunks, and no observer of the c10d ops
 * (dispatch mode, profiler) needs one packed buffer. `gathers`: for an all-gather. The first
 * all-gathers of a group use packed buffers. The result may differ between ranks. */
FCT_CHECK int fct_pg_takes_chunks(fct_pg *pg, fct_device device, bool gathers, bool *takes);
/* An in-place all-gather. Chunks are 1-D and contiguous, and contain this rank's parts. The work is
 * new and keeps references to the chunks. `layout` is not used after the call. */
FCT_CHECK int fct_gather_chunks(fct_pg *pg, fct_tensor *const *chunks, size_t count,
                                const fct_chunk_layout *layout, fct_work **work);
/* A reduce-scatter (FCT_SUM, FCT_AVG) of chunks into `output`, which holds one rank shard. Does not
 * write to the chunks. The work is new and keeps references to all tensors. */
FCT_CHECK int fct_reduce_chunks(fct_pg *pg, fct_tensor *output, fct_tensor *const *chunks,
                                size_t count, const fct_chunk_layout *layout, fct_reduce_op op,
                                fct_work **work);

/* Waits for a work. On devices with streams this orders the current stream after it and returns at
 * once. On the CPU it blocks with the GIL released, in slices. Signal handlers run between slices,
 * at most 0.2 s after the signal. If a handler raises, the function returns -1 and the work still
 * runs. An error of the collective is raised with torch's exception type. */
FCT_CHECK int fct_work_wait(fct_work *work);
/* Whether the work has completed, with or without an error. True if the backend cannot be polled.
 */
bool fct_work_done(fct_work *work);
/* Whether the work takes CPU time from computation: it copies through shared memory, is larger than
 * the ring, and the ranks have fewer than two CPUs each. */
bool fct_work_is_cpu_bound(const fct_work *work);
/* Whether a gather of rank shards of `row_bytes` bytes, issued now, would be such a work. Returns
 * the same on all ranks at the same point of their collectives. */
bool fct_gather_is_cpu_bound(const fct_pg *pg, int64_t row_bytes);
void fct_work_release(fct_work *work); /* NULL is allowed */

/* ---- streams and events ---------------------------------------------------------------------- */

/* If false, the functions below must not be called. */
bool fct_device_has_streams(fct_device device);
fct_stream fct_stream_current(fct_device device);
/* From torch's pool. */
FCT_CHECK int fct_stream_new(fct_device device, bool high_priority, fct_stream *out);
/* Makes s the current stream of its device and returns the previous one. */
fct_stream fct_stream_set_current(fct_stream s);
/* A scope for kernel launches on the current stream of a device. fct_launch_enter makes the device
 * current. It writes the previous device to *before and the native stream handle (cudaStream_t or
 * similar) to *native. fct_launch_leave makes `before` current again. Call it only after a
 * successful enter. */
FCT_CHECK int fct_launch_enter(fct_device device, fct_device *before, void **native);
void fct_launch_leave(fct_device before);

FCT_CHECK int fct_event_new(fct_device device, fct_event **out);
FCT_CHECK int fct_event_record(fct_event *e, fct_stream s);
/* Makes s wait for e. No-op for an event that was never recorded. */
FCT_CHECK int fct_event_wait(fct_event *e, fct_stream s);
/* Blocks the host until e has completed, with the GIL released. No-op for an unrecorded event. */
FCT_CHECK int fct_event_synchronize(fct_event *e);
/* share adds an owner, which must call unshare. unshare removes one and returns true if others
 * remain. It returns false without effect for the only owner. */
void fct_event_share(fct_event *e);
bool fct_event_unshare(fct_event *e);
void fct_event_free(fct_event *e); /* only by the only owner; NULL is allowed */

/* ---- autograd -------------------------------------------------------------------------------- */

/* A callback with an owner. `call` runs with the GIL, on the thread that runs backward. It returns
 * 0, or -1 with a Python exception set. retain and release count the owner, with the GIL. release
 * may run when a graph is destroyed. */
typedef struct fct_hook {
    void *owner;
    int (*call)(void *owner);
    void (*retain)(void *owner);
    void (*release)(void *owner);
} fct_hook;

bool fct_grad_enabled(void);
bool fct_in_backward(void); /* torch._C._current_graph_task_id() != -1 on this thread */
/* Makes one identity node for n tensors that require grad. Its name is
 * "RegisterPostBackwardFunctionBackward". Each out[i] (new) is an alias of in[i] whose grad_fn is
 * the node, like the output of a torch.autograd.Function that returns its input. In backward the
 * node calls hook, then passes the gradients through. */
FCT_CHECK int fct_autograd_node(fct_tensor *const *in, size_t n, const fct_hook *hook,
                                fct_tensor **out);
/* The gradients of the node whose hook runs on this thread, *count of them. NULL and 0 outside of
 * such a hook. set replaces one (borrows it). */
fct_tensor *const *fct_autograd_node_grads(size_t *count);
void fct_autograd_node_set_grad(size_t index, fct_tensor *grad);
/* Calls hook whenever the gradient of t has been computed, like Tensor.register_hook with a hook
 * that returns None. t requires grad, and may be a leaf. The owner is a Python object. A leaf holds
 * it weakly, and does not add the same hook twice. */
FCT_CHECK int fct_autograd_on_grad(fct_tensor *t, const fct_hook *hook);
/* Calls hook each time autograd has accumulated into .grad of this leaf, on the thread that runs
 * backward, until the subscription is freed. Does not count the owner: retain and release are not
 * used. */
FCT_CHECK int fct_autograd_subscribe(fct_tensor *leaf, const fct_hook *hook,
                                     fct_grad_subscription **out);
void fct_grad_subscription_free(fct_grad_subscription *watch); /* NULL is allowed */
/* Calls hook at the end of the current backward pass. */
FCT_CHECK int fct_autograd_at_end(const fct_hook *hook);

/* ---- profiler -------------------------------------------------------------------------------- */

/* A user-scope record_function range. enter returns NULL if no profiler is active. Ranges nest. */
bool fct_profile_active(void);
void *fct_profile_enter(const char *name); /* NULL: no range */
void fct_profile_exit(void *token);        /* NULL is allowed */

/* ---- Python objects -------------------------------------------------------------------------- */

bool fct_py_is_tensor(struct _object *obj); /* isinstance(obj, torch.Tensor), fast */
/* The tensor of a torch.Tensor object, borrowed from obj. Returns NULL without an exception if obj
 * is not a tensor. */
fct_tensor *fct_py_tensor(struct _object *obj);
/* The address of the storage of a torch.Tensor object, for comparison only. */
const void *fct_py_storage(struct _object *tensor);
/* New reference to the Python object of t, which is made if it does not exist. */
FCT_CHECK int fct_py_from_tensor(fct_tensor *t, struct _object **out);
/* A new wrapper of `type`, a subclass of torch.Tensor with __torch_dispatch__. It has the given
 * sizes and strides, and local's dtype, device and offset, without memory and gradient. Writes NULL
 * to *out, without an exception, if the caller must use torch's own function. That is so if this
 * torch release does not export it, or if `local` is not plain (it requires grad, for example). */
FCT_CHECK int fct_py_wrapper(const fct_tensor *local, struct _object *type, const int64_t *sizes,
                             const int64_t *strides, int64_t dims, struct _object **out);
/* Whether two tensors have equal sizes, strides, offset, dtype, device, dispatch keys and storage
 * size. */
bool fct_tensor_is_like(const fct_tensor *t, const fct_tensor *other);
/* torch.Tensor.grad of param, also if its class overrides it. New reference, None if unset. */
FCT_CHECK int fct_py_grad(struct _object *param, struct _object **out);
/* param.grad = grad without the checks of the Python setter. Both are torch.Tensor objects. grad
 * NULL: None. */
FCT_CHECK int fct_py_set_grad(struct _object *param, struct _object *grad);
/* Borrows the dict of param's post-accumulate-grad hooks. Returns NULL without an exception if
 * there is none. Does not call __torch_function__. */
struct _object *fct_py_grad_hooks(struct _object *param);
/* t._base is not None */
bool fct_tensor_is_view(const fct_tensor *t);
bool fct_dtype_is_floating(fct_dtype dtype);
/* Conversions of torch.dtype objects. fct_py_dtype returns FCT_NO_DTYPE for None, and -2 with a
 * TypeError for other objects. */
fct_dtype fct_py_dtype(struct _object *obj);
FCT_CHECK int fct_py_from_dtype(fct_dtype dtype, struct _object **out);
/* Whether a dispatch mode or a jit trace is active on this thread. */
bool fct_has_observer(void);
/* Whether the interpreter finalizes. Then modules are cleared, and code runs only in __del__. */
bool fct_py_ending(void);
/* A handle of a ProcessGroup object. Handles of one group are shared. */
FCT_CHECK int fct_py_pg(struct _object *obj, fct_pg **out);
/* A new reference to the direct ProcessGroup of a group (direct.h), or None if the group uses its
 * own backend. Waits for the negotiation, so all ranks must call it at the same point. */
FCT_CHECK int fct_py_pg_direct(struct _object *group, struct _object **out);
typedef enum fct_use { FCT_USE_GATHER = 0, FCT_USE_REDUCE, FCT_USE_ALL_REDUCE } fct_use;
/* Between enter and leave the collectives of the group itself use the direct backend, for any
 * caller. `use` is the collective that follows. *entered is for leave. It is NULL, which leave
 * accepts, if the group uses its own backend. */
FCT_CHECK int fct_py_pg_enter_direct(struct _object *group, fct_use use, void **entered);
void fct_py_pg_leave_direct(void *entered);
/* Sets whether all-reduces of this thread reduce buffers of gradients, as between enter and leave
 * of FCT_USE_ALL_REDUCE. Returns the previous value. */
bool fct_set_gradient_all_reduce(bool rows);
/* Pauses or resumes the direct backend of a group. All ranks must call it at the same point of
 * their programs. */
FCT_CHECK int fct_py_pg_pause_direct(struct _object *group, bool paused);
/* Converts a torch.device object. */
FCT_CHECK int fct_py_device(struct _object *obj, fct_device *out);
/* tensor.to(dtype) with autograd history, for forward inputs and outputs. New. */
FCT_CHECK int fct_cast_differentiable(fct_tensor *t, fct_dtype dtype, fct_tensor **out);
/* Whether functorch transforms are active on this thread and torch's FSDP2 hooks support them
 * (since 2.13). */
bool fct_functorch_hooked(void);
/* Disables functorch's transforms on this thread, so that tensors are plain. Returns NULL if none
 * is active. resume enables them again, and accepts NULL. Strictly nested. */
void *fct_functorch_pause(void);
void fct_functorch_resume(void *pause);

#ifdef __cplusplus
}
#endif

#endif
