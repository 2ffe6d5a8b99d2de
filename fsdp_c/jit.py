"""CUDA kernels without nvcc: compiled by NVRTC at first use, loaded and launched by the driver.

Only where ``FSDP_C_JIT=1`` asks for it: it has compiled for every architecture, and its launches
have run under a stand-in for the driver, but not on a GPU yet.
"""

from __future__ import annotations

import ctypes

import torch

import fsdp_c._C as _C

from .nvrtc import ENTRIES, Nvrtc, installed
from .switches import is_on

_kept: list[object] = []
"""What the extension has addresses of."""


def wanted() -> bool:
    """Whether the environment asks for it."""
    return is_on("FSDP_C_JIT")


def _checked(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(f"{what} failed with CUresult {code}")


def load(driver: ctypes.CDLL, code: bytes) -> tuple[int, int, int]:
    """Addresses of ``cuLaunchKernel`` and of the two kernels in ``code``, for all devices.

    Raises:
        RuntimeError: the driver does not take it.
        AttributeError: the driver is older than CUDA 12.
    """
    library = ctypes.c_void_p()
    text = ctypes.create_string_buffer(code, len(code))
    none = (None, None, ctypes.c_uint(0), None, None, ctypes.c_uint(0))
    _checked(driver.cuLibraryLoadData(ctypes.byref(library), text, *none), "cuLibraryLoadData")
    functions = []
    for name in ENTRIES:
        kernel = ctypes.c_void_p()
        found = driver.cuLibraryGetKernel(ctypes.byref(kernel), library, name.encode())
        _checked(found, f"cuLibraryGetKernel of {name}")
        functions.append(kernel.value or 0)
    _kept[:] = [driver, library, text]
    launch = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value or 0
    return launch, functions[0], functions[1]


def kernels_for(device: torch.device) -> tuple[int, int, int]:
    """Compiles them for the architecture of ``device``; gives what :func:`load` gives.

    Raises:
        RuntimeError, OSError, AttributeError: what is not there or does not work.
    """
    libraries = installed()
    if not libraries:
        raise RuntimeError("no libnvrtc beside torch")
    major, minor = torch.cuda.get_device_capability(device)
    code = Nvrtc(libraries[-1]).compile(10 * major + minor)
    torch.cuda.init()
    return load(ctypes.CDLL("libcuda.so.1"), code)


def compile_for(device: torch.device) -> None:
    """Makes the kernels of CUDA devices; raises as :func:`kernels_for`."""
    _C.use_jit(*kernels_for(device))
