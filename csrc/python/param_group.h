/* The ParamGroup type: wraps the core's parameter group; see param_group.c. */
#ifndef FSDP_C_PYTHON_PARAM_GROUP_H
#define FSDP_C_PYTHON_PARAM_GROUP_H

#include "objects.h"

extern PyType_Spec fcpy_group_spec;

#endif
