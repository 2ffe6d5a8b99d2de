/* Substitute for libcuda.so.1, with the functions that fsdp_c/_runtime/jit.py uses. Its "device" is
 * this processor, which runs the source of the GPU kernels thread by thread. Loaded machine code is
 * checked but not executed. For tests/unit/test_jit.py. */
#include <cuda_runtime.h>

#include <cstring>

#include "kernels/checksums.cuh"
#include "kernels/lines.cuh"

static int launches;
static int refuses_next;     /* the next launch is refused */
static int omits_last_block; /* launches omit their last block */
static int omits_large;      /* kernels with large arguments are not found */
static int bound = 1;        /* the thread has a context */
static int has_no_context;   /* the process has no context */

extern "C" int cuLibraryLoadData(void **library, const void *code, void *, void *, unsigned, void *,
                                 void *, unsigned) {
    static char loaded;
    if (std::memcmp(code,
                    "\x7f"
                    "ELF",
                    4) != 0) {
        return 200; /* CUDA_ERROR_INVALID_IMAGE */
    }
    *library = &loaded;
    return 0;
}

extern "C" int cuLibraryGetKernel(void **kernel, void *, const char *name) {
    if (std::strcmp(name, "fck_move_lines") == 0) {
        *kernel = reinterpret_cast<void *>(fck_move_lines);
    } else if (std::strcmp(name, "fck_cast_lines") == 0) {
        *kernel = reinterpret_cast<void *>(fck_cast_lines);
    } else if (std::strcmp(name, "fck_move_many_lines") == 0 && omits_large == 0) {
        *kernel = reinterpret_cast<void *>(fck_move_many_lines);
    } else if (std::strcmp(name, "fck_cast_many_lines") == 0 && omits_large == 0) {
        *kernel = reinterpret_cast<void *>(fck_cast_many_lines);
    } else if (std::strcmp(name, "fck_add_checksums") == 0) {
        *kernel = reinterpret_cast<void *>(fck_add_checksums);
    } else {
        return 500; /* CUDA_ERROR_NOT_FOUND */
    }
    return 0;
}

extern "C" int cuCtxGetCurrent(void **context) {
    *context = has_no_context != 0 ? nullptr : &bound;
    return 0;
}

extern "C" int cuCtxSetCurrent(void *context) {
    bound = context == &bound ? 1 : 0;
    return bound != 0 ? 0 : 201; /* CUDA_ERROR_INVALID_CONTEXT */
}

extern "C" int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                              unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                              void *, void **arguments, void **extra) {
    if (refuses_next != 0 || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 ||
        shared != 0 || extra != nullptr) {
        refuses_next = 0;
        return 1; /* CUDA_ERROR_INVALID_VALUE */
    }
    if (bound == 0) {
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    }
    launches++;
    const dim3 grid(grid_x - static_cast<unsigned>(omits_last_block));
    if (function == reinterpret_cast<void *>(fck_add_checksums)) {
        return cudaLaunchKernel(fck_add_checksums, grid, dim3(block_x), arguments, 0, nullptr);
    }
    if (function == reinterpret_cast<void *>(fck_move_many_lines) ||
        function == reinterpret_cast<void *>(fck_cast_many_lines)) {
        const auto kernel = reinterpret_cast<void (*)(const fck::large_line_batch)>(function);
        return cudaLaunchKernel(kernel, grid, dim3(block_x), arguments, 0, nullptr);
    }
    const auto kernel = reinterpret_cast<void (*)(const fck::line_batch)>(function);
    return cudaLaunchKernel(kernel, grid, dim3(block_x), arguments, 0, nullptr);
}

extern "C" int cuStreamIsCapturing(void *, int *status) {
    *status = 0;
    return 0;
}

/* Returns the number of launches since the previous call. */
extern "C" int take_launches() {
    const int count = launches;
    launches = 0;
    return count;
}

extern "C" void omit_last_block(int on) {
    omits_last_block = on;
}

/* Libraries that are loaded later have no kernels with large arguments. */
extern "C" void omit_large_kernels(int on) {
    omits_large = on;
}

/* Ends the binding of the context, as in a new thread. */
extern "C" void unbind() {
    bound = 0;
}

extern "C" void remove_context(int on) {
    has_no_context = on;
}

extern "C" void refuse_next() {
    refuses_next = 1;
}
