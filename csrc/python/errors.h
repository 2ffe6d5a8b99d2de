/* Converts a core status to a Python exception. */
#ifndef FSDP_C_PYTHON_ERRORS_H
#define FSDP_C_PYTHON_ERRORS_H

#include "objects.h"

/* Sets the exception of `status`, with `message`. FC_ERAISED keeps the exception that is set.
 * Returns -1. */
int fcpy_raise(fc_status status, const char *message);

#endif
