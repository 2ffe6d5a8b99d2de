/* The Hook type: the callable in a module's forward hooks; see hook.c. */
#ifndef FSDP_C_PYTHON_HOOK_H
#define FSDP_C_PYTHON_HOOK_H

#include "objects.h"

extern PyType_Spec fcpy_hook_spec;

#endif
