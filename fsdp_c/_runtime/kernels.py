"""Logs which kernels pack and unpack parameters on a device, once per device type."""

from __future__ import annotations

import logging

import torch

import fsdp_c._C as _C

from . import jit

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

_logged_devices: set[str] = set()


def describe_kernels(device: torch.device) -> str:
    """Returns a name of the implementation that packs and unpacks on ``device``."""
    name = _C.kernels_of(device)
    if name != "torch":
        return f"fsdp_c's {name} kernels"
    return "torch's foreach operations"


def log_kernels(device: torch.device) -> None:
    """Logs one line per device type and process; a warning if CUDA kernels are missing.

    With ``FSDP_C_JIT=1``, NVRTC first compiles missing kernels.
    """
    if device.type in _logged_devices:
        return
    _logged_devices.add(device.type)
    if device.type == "cuda" and _C.kernels_of(device) == "torch" and jit.is_jit_requested():
        try:
            jit.install_kernels(device)
        except (RuntimeError, OSError, AttributeError) as error:
            logger.warning("fsdp_c: NVRTC did not compile kernels: %s", error)
    has_no_cuda_kernels = (
        device.type == "cuda" and _C.kernels_of(device) == "torch" and not torch.version.hip
    )
    logger.log(
        logging.WARNING if has_no_cuda_kernels else logging.INFO,
        "fsdp_c: memory is packed and unpacked on %s by %s%s",
        device.type,
        describe_kernels(device),
        ": fsdp_c was built without nvcc, or for another CUDA release (FSDP_C_JIT=1 compiles "
        "kernels with NVRTC)"
        if has_no_cuda_kernels
        else "",
    )
