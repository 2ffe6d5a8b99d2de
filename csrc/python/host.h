/* The callbacks of the core (core/host.h), implemented by calls into Python. */
#ifndef FSDP_C_PYTHON_HOST_H
#define FSDP_C_PYTHON_HOST_H

#include "objects.h"

extern const fc_host fcpy_host;

#endif
