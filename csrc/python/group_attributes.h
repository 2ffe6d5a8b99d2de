/* Getters and setters of the ParamGroup type. */
#ifndef FSDP_C_PYTHON_GROUP_ATTRIBUTES_H
#define FSDP_C_PYTHON_GROUP_ATTRIBUTES_H

#include "objects.h"

extern PyGetSetDef fcpy_group_getset[];

#endif
