/* What the core may ask of Python: the answers to core/host.h. */
#ifndef FSDP_C_PYTHON_HOST_H
#define FSDP_C_PYTHON_HOST_H

#include "objects.h"

extern const fc_host fcpy_host;

#endif
