/* The IterationContext type. */
#ifndef FSDP_C_PYTHON_ITERATION_CONTEXT_H
#define FSDP_C_PYTHON_ITERATION_CONTEXT_H

#include "objects.h"

extern PyType_Spec fcpy_iteration_spec;

#endif
