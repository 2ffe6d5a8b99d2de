/* The pending Python exception, and injected faults. */
#ifndef FSDP_C_BRIDGE_ERROR_H
#define FSDP_C_BRIDGE_ERROR_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For tests. fct_fault_arm() makes a call of a fallible function fail with RuntimeError("injected
 * fault ..."): the n-th call that this thread makes from now on. All fallible functions of this
 * folder count, except fct_exchange_start, fct_exchange_wait and fct_py_dtype. Functions that call
 * fct_fault count, too. With n = 0 the fault is disarmed. fct_fault_left() returns the number of
 * remaining calls (0: disarmed or fired). The counter is thread-local. While a fault is armed,
 * fct_work_done() returns false, so that the order of calls does not depend on timing. */
void fct_fault_arm(int64_t n);
int64_t fct_fault_left(void);
/* A fallible function outside of this folder calls this first, with its own name. Returns 0, or -1
 * with the injected fault as exception. */
FCT_CHECK int fct_fault(const char *function);
/* Raises MemoryError. */
void fct_error_no_memory(void);
/* Raises RuntimeError. */
void fct_error_runtime(const char *text);

/* Takes the pending exception (NULL: none) before a clean-up that may fail. fct_error_put_back
 * restores the exception and discards an exception of the clean-up. */
void *fct_error_set_aside(void);
void fct_error_put_back(void *error);
/* Prefixes the message of a pending RuntimeError with "text: ". The original exception becomes the
 * cause. Backends raise RuntimeError and its subclasses. Other exceptions do not change. */
void fct_error_explain(const char *text);

#ifdef __cplusplus
}
#endif

#endif
