/* Types and conventions of the boundary between the C layers and libtorch.
 *
 * The headers (.h) of this folder are valid C11 and include no header of torch or Python. Each
 * header declares opaque handles and functions of one topic. The .cpp files implement them for
 * libtorch; csrc/dry_run and tests/c contain simulated implementations. Headers of C++ (.hpp) are
 * private to this folder. csrc/core uses all of these headers except progress.h, pyobject.h and
 * shm_methods.h.
 *
 * Conventions
 *   - An `int` result is 0, or -1 with a Python exception set. Functions with another result
 *     type cannot fail, unless their comment states it. The caller holds the GIL.
 *   - Output parameters come last and are written only on success.
 *   - "new": the caller owns one reference and releases it. "borrows": the callee takes no
 *     reference. "takes": the callee steals the caller's reference, on failure too.
 *   - No function bumps a tensor's version counter or records autograd history unless its comment
 *     states it. Every operation on tensors runs with grad mode off and below autograd.
 *   - Mutable state that differs between ranks is keyed by process group, because ranks may be
 *     threads of one process. State that all ranks of a process may share (the memory pool, the
 *     recorder, switches for tests) may be global. */
#ifndef FSDP_C_BRIDGE_TYPES_H
#define FSDP_C_BRIDGE_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FCT_CHECK __attribute__((warn_unused_result))
#else
#define FCT_CHECK
#endif

typedef struct fct_tensor fct_tensor; /* c10::TensorImpl, reference-counted */

typedef int32_t fct_dtype; /* torch's ScalarType number; -1: none */
#define FCT_NO_DTYPE (-1)

typedef struct fct_device {
    int8_t type;  /* torch's DeviceType number: 0 CPU, 1 CUDA, 14 meta ... */
    int8_t index; /* -1: none */
} fct_device;
enum { FCT_DEVICE_CPU = 0, FCT_DEVICE_CUDA = 1, FCT_DEVICE_META = 14, FCT_DEVICE_MTIA = 19 };

#endif
