/* Keeps dynamo away from what a hook calls. */
#ifndef FSDP_C_PYTHON_DYNAMO_H
#define FSDP_C_PYTHON_DYNAMO_H

#include "objects.h"

/* Stops dynamo on this thread until resume; what it returns is for resume only, NULL: not
 * active. */
PyObject *fcpy_dynamo_pause(fcpy_module *mod);
void fcpy_dynamo_resume(fcpy_module *mod, PyObject *callback);

#endif
