/* The callbacks of the core (core/callbacks.h), implemented by calls into Python. */
#ifndef FSDP_C_PYTHON_CALLBACKS_H
#define FSDP_C_PYTHON_CALLBACKS_H

#include "objects.h"

extern const fc_callbacks fcpy_callbacks;

#endif
