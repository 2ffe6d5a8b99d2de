"""CUDA kernels without nvcc: NVRTC compiles them at first use, and the driver loads them.

``FSDP_C_JIT=0`` disables this module. ``make cuda-check`` compiles for every architecture.
tests/unit/test_jit.py launches with a simulated driver, and the step ``jit`` of
tests/gpu/gpu_check.sh on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

import fsdp_c._C as _C

from .env import is_env_enabled
from .nvrtc import KERNELS, LARGE_BATCH_KERNELS, Nvrtc, find_libraries

_NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND
_objects_in_use: list[object] = []
"""Objects whose addresses the extension uses. This list keeps them until the process ends."""


def is_jit_enabled() -> bool:
    """Whether ``FSDP_C_JIT`` permits this module. The default is yes."""
    return is_env_enabled("FSDP_C_JIT", "1")


def _check_result(code: int, operation: str) -> None:
    if code != 0:
        raise RuntimeError(f"{operation} failed with CUresult {code}")


def _get_address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def load_kernels(driver: ctypes.CDLL, cubin: bytes) -> dict[str, int]:
    """Loads ``cubin``. Returns the arguments of ``use_jit``.

    The arguments are the addresses of the kernels and of functions of the driver, and the current
    context.

    Raises:
        RuntimeError: The driver cannot load the cubin, or the thread has no context.
        AttributeError: The driver is older than CUDA 12.
    """
    library = ctypes.c_void_p()
    image = ctypes.create_string_buffer(cubin, len(cubin))
    no_options = (None, None, ctypes.c_uint(0), None, None, ctypes.c_uint(0))
    _check_result(
        driver.cuLibraryLoadData(ctypes.byref(library), image, *no_options), "cuLibraryLoadData"
    )
    kernels = {}
    for name in (*KERNELS, *LARGE_BATCH_KERNELS):
        kernel = ctypes.c_void_p()
        status = driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode())
        # NVRTC before 13 does not compile LARGE_BATCH_KERNELS. Their address is then 0.
        if name not in LARGE_BATCH_KERNELS or status != _NOT_FOUND:
            _check_result(status, f"cuLibraryGetKernel of {name}")
        kernels[name] = kernel.value or 0
    _objects_in_use[:] = [driver, library, image]
    context = ctypes.c_void_p()
    _check_result(driver.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if context.value is None:
        raise RuntimeError("cuCtxGetCurrent returned no context")
    return {
        "launch": _get_address(driver.cuLaunchKernel),
        "moves": kernels["fck_move_lines"],
        "casts": kernels["fck_cast_lines"],
        "checksums": kernels["fck_add_checksums"],
        "many_moves": kernels["fck_move_many_lines"],
        "many_casts": kernels["fck_cast_many_lines"],
        "capture": _get_address(driver.cuStreamIsCapturing),
        "bind": _get_address(driver.cuCtxSetCurrent),
        "context": context.value,
    }


def build_kernels(device: torch.device) -> dict[str, int]:
    """Compiles and loads the kernels for ``device``; returns the result of :func:`load_kernels`.

    Raises:
        RuntimeError, OSError, AttributeError: NVRTC or the driver is missing, too old, or fails.
    """
    libraries = find_libraries()
    if not libraries:
        raise RuntimeError(
            "found no libnvrtc that pip installed with torch; install the package "
            "nvidia-cuda-nvrtc of torch's CUDA release (CUDA 12: nvidia-cuda-nvrtc-cu12)"
        )
    major, minor = torch.cuda.get_device_capability(device)
    cubin = Nvrtc(libraries[0]).compile_cached(10 * major + minor)
    with torch.cuda.device(device):
        torch.cuda.mem_get_info()  # makes the primary context current in this thread
        return load_kernels(ctypes.CDLL("libcuda.so.1"), cubin)


def install_kernels(device: torch.device) -> None:
    """Builds the kernels and passes them to the core. Raises as :func:`build_kernels`."""
    _C.use_jit(**build_kernels(device))
