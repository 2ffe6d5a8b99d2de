/* The Hook type. */
#ifndef FSDP_C_PYTHON_HOOK_H
#define FSDP_C_PYTHON_HOOK_H

#include "objects.h"

extern PyType_Spec fcpy_hook_spec;

#endif
