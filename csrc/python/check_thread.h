/* Checks the calling thread before a state's forward or backward. */
#ifndef FSDP_C_PYTHON_CHECK_THREAD_H
#define FSDP_C_PYTHON_CHECK_THREAD_H

#include "objects.h"

/* Call these before any other work of a forward or backward. They return -1 with an exception if
 * another thread is in a forward or backward that excludes this one (check_thread.c). The check of
 * a forward also refuses tracers and training during interpreter shutdown.
 * fcpy_check_backward_thread requires an initialized state (check_initialized.h). */
int fcpy_check_forward_thread(fcpy_state *self);
int fcpy_check_backward_thread(fcpy_state *self);

#endif
