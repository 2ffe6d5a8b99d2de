/* The IterationContext type: the states of one root; see iteration_context.c. */
#ifndef FSDP_C_PYTHON_ITERATION_CONTEXT_H
#define FSDP_C_PYTHON_ITERATION_CONTEXT_H

#include "objects.h"

extern PyType_Spec fcpy_iteration_spec;

#endif
