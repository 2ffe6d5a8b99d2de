/* The GIL during calls for devices with streams.
 *
 * A call that launches or allocates on such a device may block: the launch queue is full, or the
 * allocator waits for the device. Like torch's operators, these functions of the boundary release
 * the GIL. After each release, the calling thread waits for a busy Python thread, by default up
 * to 5 ms (sys.getswitchinterval). A scope therefore releases the GIL once for all calls
 * inside it.
 *
 * Inside a scope another thread may run Python code. Functions of the boundary that need Python
 * take the GIL themselves. The callbacks of the core do not, so no scope contains one. */
#ifndef FSDP_C_BRIDGE_GIL_H
#define FSDP_C_BRIDGE_GIL_H

#ifdef __cplusplus
extern "C" {
#endif

/* Begins a scope of the calling thread. Precondition: the thread holds the GIL. The first call in
 * the scope that launches or allocates on a device with streams releases the GIL until the end of
 * the scope. Scopes do not nest: the call is a no-op in a scope. */
void fct_gil_enter(void);
/* Ends the scope. The thread holds the GIL afterwards. No-op outside of a scope. */
void fct_gil_leave(void);

#ifdef __cplusplus
}
#endif

#endif
