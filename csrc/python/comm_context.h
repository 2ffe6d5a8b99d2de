/* The CommContext type: streams and pending collectives of one root; see comm_context.c. */
#ifndef FSDP_C_PYTHON_COMM_CONTEXT_H
#define FSDP_C_PYTHON_COMM_CONTEXT_H

#include "objects.h"

extern PyType_Spec fcpy_comm_spec;

#endif
