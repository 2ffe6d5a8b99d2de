/* Disables dynamo for the code that a hook calls. */
#ifndef FSDP_C_PYTHON_DYNAMO_H
#define FSDP_C_PYTHON_DYNAMO_H

#include "objects.h"

/* Disables dynamo on this thread until fcpy_dynamo_resume. Returns the argument for resume; NULL if
 * dynamo is not active. */
PyObject *fcpy_dynamo_pause(fcpy_module *mod);
void fcpy_dynamo_resume(fcpy_module *mod, PyObject *callback);

#endif
