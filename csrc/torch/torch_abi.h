/* The boundary between the C core and libtorch. Valid C11, no torch header: opaque handles and
 * functions whose ownership is stated. The .cpp files here are the only real implementation;
 * tests/c/ has a simulated one.
 *
 * Conventions
 *   - `int` results: 0, or -1 with a Python exception set (the GIL is held on every entry and on
 * every exit). Functions returning void, bool or a value cannot fail.
 *   - Output parameters come last and are written only on success.
 *   - "new": the caller owns one reference and releases it. "borrows": the callee takes no
 * reference. "takes": the callee steals the caller's reference, on failure too.
 *   - No function bumps a tensor's version counter or records autograd history unless it says so:
 * every operation on tensors runs with grad mode off and below autograd.
 *   - No process-global mutable state but what is told apart by process group, and the pool: ranks
 * may be threads of one process. */
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
typedef struct fct_watch fct_watch;   /* a hook behind a leaf; heap object with one owner */
struct _object;                       /* CPython's PyObject */

typedef int32_t fct_dtype; /* torch's ScalarType number; -1: none */
#define FCT_NO_DTYPE (-1)

typedef struct fct_device {
    int8_t type;  /* torch's DeviceType number: 0 CPU, 1 CUDA, 14 meta ... */
    int8_t index; /* -1: none */
} fct_device;
enum { FCT_DEVICE_CPU = 0, FCT_DEVICE_CUDA = 1, FCT_DEVICE_META = 14, FCT_DEVICE_MTIA = 19 };

/* A stream by value (c10::Stream packed). Only meaningful where fct_device_has_streams(). */
typedef struct fct_stream {
    int64_t id;
    fct_device device;
} fct_stream;

/* ---- faults ---------------------------------------------------------------------------------- */

/* For tests: the n-th fallible boundary call of this thread from now on fails with
 * RuntimeError("injected fault ..."). 0 switches it off. fct_fault_left() is what is left of n (0:
 * off or already fired). The counter is thread-local. While it is armed fct_work_done() says false,
 * so that the order of calls does not depend on timing. */
void fct_fault_arm(int64_t n);
int64_t fct_fault_left(void);

/* Sets the pending exception aside (NULL: there is none) before clean-up that may fail itself;
 * put_back takes it again and forgets whatever the clean-up left pending. */
void *fct_error_set_aside(void);
void fct_error_put_back(void *error);
/* Puts "text: " in front of the pending exception's message where it is a RuntimeError (what
 * backends raise, in all its subclasses); the exception as it was becomes the cause. Other ones, of
 * a signal's handler for example, stay as they are. */
void fct_error_explain(const char *text);

/* ---- tensors --------------------------------------------------------------------------------- */

/* Facts read from a tensor, valid until somebody changes it. */
typedef struct fct_facts {
    void *data;            /* address of the first element; NULL if there is no memory behind it */
    int64_t numel;         /* elements */
    int64_t itemsize;      /* bytes per element */
    int64_t offset_bytes;  /* of data inside the storage */
    int64_t storage_bytes; /* size of the storage now (0 while freed) */
    fct_dtype dtype;
    fct_device device;
    bool contiguous; /* and the memory has the values themselves, no conjugates or negatives */
    bool strided;    /* plain dense layout (not sparse, not a wrapper without memory) */
} fct_facts;

void fct_tensor_retain(fct_tensor *t);
void fct_tensor_release(fct_tensor *t); /* NULL is fine */
/* Reads the facts; never fails (a wrapper or sparse tensor gives strided=false, data=NULL). */
void fct_tensor_facts(const fct_tensor *t, fct_facts *out);
bool fct_tensor_requires_grad(const fct_tensor *t);
/* Whether nobody else has the tensor, or another over its memory, or the memory itself. */
bool fct_tensor_is_sole(const fct_tensor *t);
/* The version counter's value; 0 for inference tensors. */
uint32_t fct_tensor_version(const fct_tensor *t);
/* Counts a write that went through a raw pointer (nothing happens for inference tensors). */
void fct_tensor_bump(fct_tensor *t);

/* New 1-D tensor of `numel` uninitialised elements, allocated on the device's current stream; a
 * normal one in inference mode, too. */
FCT_CHECK int fct_tensor_empty(int64_t numel, fct_dtype dtype, fct_device device, fct_tensor **out);
/* New tensor aliasing base's storage, with base's dtype and its own version counter, no autograd
 * relation. `offset` in elements from the start of the STORAGE. Checked: offset + extent <= storage
 * bytes. */
FCT_CHECK int fct_tensor_alias(const fct_tensor *base, int32_t ndim, const int64_t *sizes,
                               const int64_t *strides, int64_t offset, fct_tensor **out);
/* The same with another dtype; `offset` in elements of that one. */
FCT_CHECK int fct_tensor_alias_as(const fct_tensor *base, fct_dtype dtype, int32_t ndim,
                                  const int64_t *sizes, const int64_t *strides, int64_t offset,
                                  fct_tensor **out);
/* New contiguous copy of t (or a new reference to t where it is contiguous already). */
FCT_CHECK int fct_tensor_contiguous(fct_tensor *t, fct_tensor **out);
/* New tensor of `dtype` with t's values (or a new reference to t where the dtype is right already);
 * of complex values the real parts, where `dtype` is real. */
FCT_CHECK int fct_tensor_cast(fct_tensor *t, fct_dtype dtype, fct_tensor **out);
/* New tensor of zeros, like t in shape, dtype and device. */
FCT_CHECK int fct_tensor_zeros_like(const fct_tensor *t, fct_tensor **out);
/* Copies `length` rows of t, from `start` on of `dim`, to the beginning of new memory of `padded`
 * rows, the others zeros. *local: new, these rows; *row: new, all of that memory, 1-D. Both are
 * views that share one version counter. Goes through all layers of the dispatcher, without grad. */
FCT_CHECK int fct_tensor_cut(fct_tensor *t, int32_t dim, int64_t start, int64_t length,
                             int64_t padded, fct_tensor **local, fct_tensor **row);
/* dst.copy_(src), which casts; dst.add_(src), which counts in dst's version; t.div_(divisor). */
FCT_CHECK int fct_tensor_copy(fct_tensor *dst, const fct_tensor *src);
FCT_CHECK int fct_tensor_add(fct_tensor *dst, const fct_tensor *src);
FCT_CHECK int fct_tensor_div(fct_tensor *t, double divisor);
/* dst.copy_(src, non_blocking=True) of the host's memory to a device's, or within a device: what it
 * reads of pinned memory is not to be changed before the copy is done. Releases the GIL. */
FCT_CHECK int fct_tensor_upload(fct_tensor *dst, const fct_tensor *src);
/* t.to("cpu", non_blocking): a new tensor in the host's memory. non_blocking: that is pinned, and
 * the copy only queued. Else it is done, and the GIL was released meanwhile. */
FCT_CHECK int fct_tensor_to_host(fct_tensor *t, bool non_blocking, fct_tensor **out);
/* requires_grad_() of a leaf. */
FCT_CHECK int fct_tensor_set_requires_grad(fct_tensor *t, bool value);

/* dst[i].copy_(src[i]) for all `count`: one launch for lists of one source and one destination
 * dtype with equal shapes and strides, where the device has such a kernel. */
FCT_CHECK int fct_foreach_copy(fct_tensor *const *dst, fct_tensor *const *src, size_t count);
/* rows: 2-D. Its columns, split into parts of `sizes`, are copied to out[i], each [rows, sizes[i]]
 * of the same dtype and contiguous. */
FCT_CHECK int fct_split_copy(const fct_tensor *rows, const int64_t *sizes, fct_tensor *const *out,
                             size_t count);
/* Deals the rows of 2-D tensors of one dtype, none of them empty, to `chunks` rows of out: chunk c
 * of each, one after the other, padded with zeros. out: [chunks, sum of padded sizes], casts. */
FCT_CHECK int fct_chunk_cat(fct_tensor *const *tensors, size_t count, int64_t chunks,
                            fct_tensor *out);

/* The CPU's buffers come from a pool (kernels/pool.h), where freed ones wait. A round, an iteration
 * of a model, begins; what waits goes back to the system. */
void fct_memory_round(void);
void fct_memory_trim(void);

/* Gives the storage of t `nbytes` bytes of fresh uninitialised memory from the storage's own
 * allocator (the storage must hold none: storage bytes 0; same size already: nothing happens). */
FCT_CHECK int fct_storage_alloc(fct_tensor *t, int64_t nbytes);
/* Frees the storage's memory; size becomes 0. Nothing happens where it is 0 already. */
void fct_storage_free(fct_tensor *t);
/* Whether it may do that: not where an array (numpy()) or another process shares the memory. */
bool fct_storage_can_free(const fct_tensor *t);
/* Whether another tensor lies over the memory of t, or did so before that was freed. */
bool fct_storage_is_shared(const fct_tensor *t);
/* `to`, whose storage holds none, gets the memory of `from`'s, which holds none then. Both on one
 * device. */
void fct_storage_move(fct_tensor *from, fct_tensor *to);

/* .grad of a leaf. has: whether one is set. identity: tells gradients apart, only to be compared.
 * take: moves it out (leaving None); *out is new, or NULL if none. */
bool fct_grad_has(const fct_tensor *t);
const void *fct_grad_identity(const fct_tensor *t);
void fct_grad_take(fct_tensor *t, fct_tensor **out);

/* ---- process groups and collectives ---------------------------------------------------------- */

/* Every collective goes through the ProcessGroup's method and so through the dispatcher ops of
 * namespace c10d, which CommDebugMode, the flight recorder and tests count: one call here, one op
 * there, also where rows go through shared memory (direct.h). Complex tensors travel as
 * the pairs that they are, gathered ones of types that a backend does not know as bytes. */
typedef enum fct_reduce_op { FCT_SUM = 0, FCT_AVG = 1, FCT_PREMUL_SUM = 2 } fct_reduce_op;

/* A handle by the group's registered name (pg.group_name); shared by all who ask for it. */
FCT_CHECK int fct_pg_resolve(const char *name, fct_pg **out);
void fct_pg_release(fct_pg *pg); /* NULL is fine */
/* Says that one parameter group more gathers over the group of that name, or one bucket more is
 * all-reduced: as many gathers or all-reduces as there are such may be under way of which none has
 * been waited for. */
FCT_CHECK int fct_pg_announce_user(const char *name);
/* Whether the backend that serves `device` is to be given ReduceOp.PREMUL_SUM: all but gloo, which
 * has none. */
bool fct_pg_has_premul(fct_pg *pg, fct_device device);

/* Whether the backend that serves `device` has an allocator of its own (NCCL's memory is registered
 * with the network). Then: a new 1-D tensor of `numel` uninitialised elements from it, on the
 * device's current stream; a normal one in inference mode, too. */
FCT_CHECK int fct_pg_allocates(fct_pg *pg, fct_device device, bool *allocates);
FCT_CHECK int fct_pg_empty(fct_pg *pg, int64_t numel, fct_dtype dtype, fct_device device,
                           fct_tensor **out);

/* Each issues one asynchronous collective; *work is new, or NULL where the backend finished at
 * once. The tensors are 1-D contiguous; the backend keeps its own references until it is done.
 * `factor` only for FCT_PREMUL_SUM. */
FCT_CHECK int fct_all_gather(fct_pg *pg, fct_tensor *output, fct_tensor *input, bool async_op,
                             fct_work **work);
FCT_CHECK int fct_reduce_scatter(fct_pg *pg, fct_tensor *output, fct_tensor *input,
                                 fct_reduce_op op, double factor, bool async_op, fct_work **work);
/* Of a row of gradients, which may go directly. */
FCT_CHECK int fct_all_reduce(fct_pg *pg, fct_tensor *tensor, fct_reduce_op op, double factor,
                             bool async_op, fct_work **work);
/* Of anything else: the group's own all-reduce, which other ranks may call by themselves. */
FCT_CHECK int fct_sum_over_ranks(fct_pg *pg, fct_tensor *tensor, fct_work **work);

/* Consecutive elements of a rank's row, and where they lie in this rank's memory. */
typedef struct fct_run {
    size_t chunk;   /* index of the tensor that holds them */
    int64_t offset; /* in each rank's part of that tensor, in elements */
    int64_t numel;
} fct_run;
/* A row as the sequence of its runs. Chunk k holds parts of all ranks' rows, rank after rank, all
 * of one size. Private to this rank: rows travel in row order, so peers may have other layouts. */
typedef struct fct_chunk_layout {
    const fct_run *runs;
    size_t count;
    int64_t row_numel;
} fct_chunk_layout;

/* Whether the transport of `device` moves rows between separate chunks, and no observer of c10d's
 * ops (dispatch mode, profiler) needs to see one buffer. `gathers`: for an all-gather, of which the
 * first ones of a group use one buffer. The answer may differ between ranks. */
FCT_CHECK int fct_pg_takes_chunks(fct_pg *pg, fct_device device, bool gathers, bool *takes);
/* An all-gather in place: chunks are 1-D contiguous, and this rank's parts are filled in. The work
 * is new and keeps references to the chunks; `layout` is read before the call returns. */
FCT_CHECK int fct_gather_chunks(fct_pg *pg, fct_tensor *const *chunks, size_t count,
                                const fct_chunk_layout *layout, fct_work **work);
/* The reduce-scatter (FCT_SUM, FCT_AVG) of chunks, which hold what goes to each rank, into a whole
 * row. Only reads the chunks. The work is new and keeps references to all. */
FCT_CHECK int fct_reduce_chunks(fct_pg *pg, fct_tensor *output, fct_tensor *const *chunks,
                                size_t count, const fct_chunk_layout *layout, fct_reduce_op op,
                                fct_work **work);

/* Waits for a work. On devices with streams this orders the current stream after it and returns at
 * once. On the CPU it blocks with the GIL released, in slices: between slices pending signals are
 * handled (KeyboardInterrupt is seen within 0.2 s), and when a handler raises, the wait is
 * abandoned: -1, and the work is still running. An error of the collective itself is raised with
 * torch's own exception type. */
FCT_CHECK int fct_work_wait(fct_work *work);
/* Finished, successfully or not; true where the backend cannot tell. */
bool fct_work_done(fct_work *work);
/* Whether its rows are copied in time that is computation's: by threads of this process, through
 * memory that the ranks of a host share and that is too small for all of them, while there are
 * fewer than two processors for each of those ranks. */
bool fct_work_is_copied(const fct_work *work);
/* Whether a gather of rows of so many bytes would be such a work, if it were issued now. All ranks
 * are told the same at the same point of their collectives. */
bool fct_gather_is_copied(const fct_pg *pg, int64_t row_bytes);
void fct_work_release(fct_work *work); /* NULL is fine */

/* ---- streams and events ---------------------------------------------------------------------- */

/* false: none of the functions below is to be called. */
bool fct_device_has_streams(fct_device device);
fct_stream fct_stream_current(fct_device device);
/* From torch's pool. */
FCT_CHECK int fct_stream_new(fct_device device, bool high_priority, fct_stream *out);
/* Makes s the device's current stream and returns the one that was. */
fct_stream fct_stream_set_current(fct_stream s);
/* Around launches of kernels on the stream that is current on a device with streams. enter makes
 * the device current (*before: the one that was) and gives the stream's native handle (cudaStream_t
 * and the like); leave, only after an enter that did not fail, makes `before` current again. */
FCT_CHECK int fct_launch_enter(fct_device device, fct_device *before, void **native);
void fct_launch_leave(fct_device before);

FCT_CHECK int fct_event_new(fct_device device, fct_event **out);
FCT_CHECK int fct_event_record(fct_event *e, fct_stream s);
/* s waits for e; for an event that was never recorded it does not. */
FCT_CHECK int fct_event_wait(fct_event *e, fct_stream s);
/* The host waits for e, with the GIL released; for an event that was never recorded it does not. */
FCT_CHECK int fct_event_synchronize(fct_event *e);
/* One more owner, who has to let it go. Lets one go: true where others are left, and otherwise the
 * caller still owns it. */
void fct_event_share(fct_event *e);
bool fct_event_unshare(fct_event *e);
void fct_event_free(fct_event *e); /* its only owner; NULL is fine */

/* ---- autograd -------------------------------------------------------------------------------- */

/* A call-back with an owner. `call` returns 0, or -1 with a Python exception set; it runs with the
 * GIL held, on whichever thread runs backward. retain/release count the owner (GIL held); release
 * may run when a graph dies. */
typedef struct fct_hook {
    void *owner;
    int (*call)(void *owner);
    void (*retain)(void *owner);
    void (*release)(void *owner);
} fct_hook;

bool fct_grad_enabled(void);
bool fct_in_backward(void); /* torch._C._current_graph_task_id() != -1 on this thread */
/* Puts one identity node named "RegisterPostBackwardFunctionBackward" above n tensors that require
 * grad: out[i] (new) is an alias of in[i] whose grad_fn is the node (a view-like output, as
 * torch.autograd.Function gives for inputs returned unchanged). When the node runs in backward,
 * hook is called first, then the gradients pass through. */
FCT_CHECK int fct_autograd_node(fct_tensor *const *in, size_t n, const fct_hook *hook,
                                fct_tensor **out);
/* While such a node's hook runs, on its thread: the gradients that pass through it, *count of them.
 * set replaces one (borrows it). NULL and 0 at all other times. */
fct_tensor *const *fct_autograd_node_grads(size_t *count);
void fct_autograd_node_set_grad(size_t index, fct_tensor *grad);
/* Calls hook whenever the gradient of t (non-leaf or leaf, requires grad) has been computed; like
 * Tensor.register_hook with a hook that returns the gradient unchanged. The owner is a Python
 * object; a leaf holds it weakly, and a hook that it has already is not added again. */
FCT_CHECK int fct_autograd_on_grad(fct_tensor *t, const fct_hook *hook);
/* Calls hook each time autograd has accumulated into .grad of this leaf, on the thread that runs
 * backward, until the watch is freed. Unlike other hooks it does not count its owner: retain and
 * release are not used. */
FCT_CHECK int fct_autograd_watch(fct_tensor *leaf, const fct_hook *hook, fct_watch **out);
void fct_watch_free(fct_watch *watch); /* NULL is fine */
/* Calls hook at the end of the backward pass that is running now. */
FCT_CHECK int fct_autograd_at_end(const fct_hook *hook);

/* ---- profiler -------------------------------------------------------------------------------- */

/* A user-scope record_function range, only while somebody records: *token is NULL where nobody
 * does. Ranges nest. */
bool fct_profile_active(void);
void *fct_profile_enter(const char *name); /* NULL: no range */
void fct_profile_exit(void *token);        /* NULL is fine */

/* ---- Python objects -------------------------------------------------------------------------- */

bool fct_py_is_tensor(struct _object *obj); /* isinstance(obj, torch.Tensor), fast */
/* The tensor behind a torch.Tensor object; borrows (valid while obj lives). NULL if obj is no
 * tensor; sets nothing. */
fct_tensor *fct_py_tensor(struct _object *obj);
/* The identity of the storage behind an object that is known to be a tensor, only to be
 * compared. */
const void *fct_py_storage(struct _object *tensor);
/* New Python object for t (the one that exists already where there is one). */
FCT_CHECK int fct_py_from_tensor(fct_tensor *t, struct _object **out);
/* A new object of `type`, a subclass of torch.Tensor that handles its operations itself
 * (__torch_dispatch__): of these sizes and strides, with local's dtype, device and offset, without
 * memory and without gradient. *out NULL, without an exception: that takes torch's own function,
 * since this torch cannot make one here, or local is not that simple (it requires grad, say). */
FCT_CHECK int fct_py_wrapper(const fct_tensor *local, struct _object *type, const int64_t *sizes,
                             const int64_t *strides, int64_t dims, struct _object **out);
/* Whether nothing but their objects tells two such tensors apart: layout, dtype, device, dispatch
 * keys, size of the storage. */
bool fct_tensor_is_like(const fct_tensor *t, const fct_tensor *other);
/* param.grad as torch.Tensor has it, whatever the object's class says; new reference, None
 * without. */
FCT_CHECK int fct_py_grad(struct _object *param, struct _object **out);
/* sharded_param.grad = grad without the checks of the Python setter; both are torch.Tensor objects.
 * grad NULL: None. */
FCT_CHECK int fct_py_set_grad(struct _object *param, struct _object *grad);
/* Borrows: the dict of param's post-accumulate-grad hooks; NULL (no error) where it has none.
 * Unlike the attribute it asks no __torch_function__. */
struct _object *fct_py_grad_hooks(struct _object *param);
/* t._base is not None */
bool fct_tensor_is_view(const fct_tensor *t);
bool fct_dtype_is_floating(fct_dtype dtype);
/* torch.dtype objects; the first returns FCT_NO_DTYPE for None, and -2 with TypeError set for
 * anything else. */
fct_dtype fct_py_dtype(struct _object *obj);
FCT_CHECK int fct_py_from_dtype(fct_dtype dtype, struct _object **out);
/* Whether somebody looks at each operation that runs on this thread: traces it, with fake, proxy or
 * functional tensors or by jit, or has a dispatch mode. */
bool fct_watched(void);
/* Whether the interpreter is ending: modules are taken apart, and functions run in __del__ only. */
bool fct_py_ending(void);
/* A handle of a ProcessGroup object, shared by all who ask for it. */
FCT_CHECK int fct_py_pg(struct _object *obj, fct_pg **out);
/* The ProcessGroup that moves a group's rows on the CPU (direct.h) as a new object, or None where
 * its backend does. All ranks have to call it at the same point: it waits for their answers. */
FCT_CHECK int fct_py_pg_direct(struct _object *group, struct _object **out);
typedef enum fct_use { FCT_USE_GATHER = 0, FCT_USE_REDUCE, FCT_USE_ALL_REDUCE } fct_use;
/* From enter to leave the group itself moves its rows so, whoever calls its collectives: in one of
 * its gathers or reductions, or in this thread's all-reduce of a row of gradients. *entered is for
 * leave; NULL (which leave takes, too) where its backend moves them. */
FCT_CHECK int fct_py_pg_enter_direct(struct _object *group, fct_use use, void **entered);
void fct_py_pg_leave_direct(void *entered);
/* Whether all-reduces of this thread are of rows of gradients, as from enter to leave of one, or of
 * anything else. Returns what was before. */
bool fct_all_reduces_rows(bool rows);
/* Whether the backend is to move them nevertheless, from now on; all ranks say so at the same point
 * of their programs. */
FCT_CHECK int fct_py_pg_pause_direct(struct _object *group, bool paused);
/* torch.device objects. */
FCT_CHECK int fct_py_device(struct _object *obj, fct_device *out);
/* tensor.to(dtype) WITH autograd history (differentiable); new. For forward inputs and outputs. */
FCT_CHECK int fct_cast_differentiable(fct_tensor *t, fct_dtype dtype, fct_tensor **out);
/* True while functorch transforms are active on this thread, and torch's own FSDP2 has hooks that
 * go through them (since 2.13). */
bool fct_functorch_hooked(void);
/* Takes this thread out of functorch's transforms, so that tensors are plain ones; NULL where none
 * is active. resume ends that; NULL is fine. Strictly nested. */
void *fct_functorch_pause(void);
void fct_functorch_resume(void *pause);

#ifdef __cplusplus
}
#endif

#endif
