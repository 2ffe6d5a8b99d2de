/* The State type. */
#ifndef FSDP_C_PYTHON_STATE_H
#define FSDP_C_PYTHON_STATE_H

#include "objects.h"

extern PyType_Spec fcpy_state_spec;

#endif
