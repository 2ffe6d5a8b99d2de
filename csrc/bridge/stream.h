/* Streams, events, and scopes for kernel launches. */
#ifndef FSDP_C_BRIDGE_STREAM_H
#define FSDP_C_BRIDGE_STREAM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fct_event fct_event; /* a device event; counts its owners */

/* A packed c10::Stream. Valid only if fct_device_has_streams(). */
typedef struct fct_stream {
    int64_t id;
    fct_device device;
} fct_stream;

/* Whether the device has streams. If not, the functions below must not be called. */
bool fct_device_has_streams(fct_device device);
fct_stream fct_stream_current(fct_device device);
/* A new stream, or one of torch's pool. */
FCT_CHECK int fct_stream_new(fct_device device, bool high_priority, fct_stream *out);
/* Makes s the current stream of its device and returns the previous one. */
fct_stream fct_stream_set_current(fct_stream s);
/* A scope for kernel launches on the current stream of a device. Enter makes the device current. It
 * writes the previous device to *before, and to *native the native stream handle (cudaStream_t or
 * similar). Leave makes `before` current again. Call it only after a successful enter.
 * Without an active dispatch mode, enter also releases the GIL, so the scope must not use Python
 * objects. Leave takes the GIL again, except inside a scope of gil.h. */
FCT_CHECK int fct_launch_enter(fct_device device, fct_device *before, void **native);
void fct_launch_leave(fct_device before);

FCT_CHECK int fct_event_new(fct_device device, fct_event **out);
FCT_CHECK int fct_event_record(fct_event *e, fct_stream s);
/* Makes s wait for e. No-op for an event that was never recorded. */
FCT_CHECK int fct_event_wait(fct_event *e, fct_stream s);
/* Blocks the host until e has completed, with the GIL released. No-op for an unrecorded event. */
FCT_CHECK int fct_event_synchronize(fct_event *e);
/* Whether e has completed, without a wait. True for an unrecorded event. */
FCT_CHECK int fct_event_is_done(fct_event *e, bool *done);
/* share adds an owner, which must call unshare. unshare removes an owner and returns true. For the
 * only owner, unshare has no effect and returns false. */
void fct_event_share(fct_event *e);
bool fct_event_unshare(fct_event *e);
void fct_event_free(fct_event *e); /* only by the only owner; NULL is allowed */

#ifdef __cplusplus
}
#endif

#endif
