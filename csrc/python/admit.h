/* Who may enter a state's forward or backward. */
#ifndef FSDP_C_PYTHON_ADMIT_H
#define FSDP_C_PYTHON_ADMIT_H

#include "objects.h"

/* To be called before anything of a forward or backward is done; -1 with RuntimeError where another
 * thread is in it, or a tracer runs it. For backward the state is ready. */
int fcpy_admit_forward(fcpy_state *self);
int fcpy_admit_backward(fcpy_state *self);

#endif
