"""Compiles missing CUDA kernels, and logs once per device type which kernels move memory."""

from __future__ import annotations

import logging

import torch

import fsdp_c._C as _C

from . import jit

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

_logged_device_types: set[str] = set()


def describe_kernels(device: torch.device) -> str:
    """Returns the name of the implementation that packs and unpacks on ``device``."""
    name = _C.kernels_of(device)
    if name != "torch":
        return f"fsdp_c's {name} kernels"
    return "torch's foreach operations"


def add_missing_kernels(device: torch.device) -> str:
    """Compiles kernels with NVRTC if fsdp_c has none for a CUDA device.

    Never raises, because torch's operations replace missing kernels. Returns "", or the reason why
    the kernels are still missing.
    """
    if device.type != "cuda" or torch.version.hip or _C.kernels_of(device) != "torch":
        return ""
    cause = "fsdp_c was built without nvcc, or for another CUDA release"
    if not jit.is_jit_enabled():
        return f"{cause}, and FSDP_C_JIT is off"
    try:
        jit.install_kernels(device)
    except Exception as error:
        return f"{cause}, and NVRTC did not compile kernels ({error})"
    return ""


def log_kernels(device: torch.device) -> None:
    """Compiles missing kernels, and logs one line per device type and process.

    The line is a warning if CUDA kernels are still missing.
    """
    if device.type in _logged_device_types:
        return
    _logged_device_types.add(device.type)
    reason = add_missing_kernels(device)
    logger.log(
        logging.WARNING if reason else logging.INFO,
        "fsdp_c: memory is packed and unpacked on %s by %s%s",
        device.type,
        describe_kernels(device),
        f": {reason}" if reason else "",
    )
