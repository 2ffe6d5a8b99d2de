/* The State type: the state of one fully_shard call; see state.c. */
#ifndef FSDP_C_PYTHON_STATE_H
#define FSDP_C_PYTHON_STATE_H

#include "objects.h"

extern PyType_Spec fcpy_state_spec;

#endif
