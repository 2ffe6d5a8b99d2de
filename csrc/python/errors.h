/* From a core status to a Python exception. */
#ifndef FSDP_C_PYTHON_ERRORS_H
#define FSDP_C_PYTHON_ERRORS_H

#include "objects.h"

/* Raises the exception of `status` (nothing for FC_ERAISED) with `message`; returns -1. */
int fcpy_raise(fc_status status, const char *message);

#endif
