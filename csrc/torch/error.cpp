// Python's error indicator, for a core that knows no Python.
#include <torch/csrc/python_headers.h>

#include "torch_abi.h"

extern "C" void fct_error_clear(void) { PyErr_Clear(); }
