/* The Param type: one parameter; see param.c. */
#ifndef FSDP_C_PYTHON_PARAM_H
#define FSDP_C_PYTHON_PARAM_H

#include "objects.h"

extern PyType_Spec fcpy_param_spec;

#endif
