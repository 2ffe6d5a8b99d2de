"""Python imports this module at its start if its folder is in PYTHONPATH.

If FSDP_C_CUDA_SIM is the folder of the simulated CUDA device, the process loads that device before
torch. The device executes the work. At the end of the process its findings are added to the file
FSDP_C_CUDA_FINDINGS.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

WORKERS = Path(__file__).resolve().parents[1] / "workers"


def load_device() -> Any:
    sys.path.insert(0, str(WORKERS))
    try:
        from stub_runtime import Device
    finally:
        sys.path.remove(str(WORKERS))
    return Device(Path(os.environ["FSDP_C_CUDA_SIM"]))


def write_findings(device: Any) -> None:
    with open(os.environ["FSDP_C_CUDA_FINDINGS"], "a") as file:
        file.writelines(f"{sys.argv[0]}: {finding}\n" for finding in device.findings())


def omit_kernels(torch: Any) -> None:
    """Replaces or disables operators that the device does not execute."""
    torch.cuda._sleep = lambda cycles: None
    # Attention then uses matrix products and softmax.
    torch.backends.cudnn.enabled = False
    for name in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)


class TorchFinder(importlib.abc.MetaPathFinder):
    """Loads the device before torch, and configures it afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        device = load_device()
        execute_module = spec.loader.exec_module

        def execute(module: Any) -> None:
            execute_module(module)
            omit_kernels(module)
            device.execute(int(os.environ.get("FSDP_C_CUDA_SEED", "0")))
            atexit.register(write_findings, device)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


if "FSDP_C_CUDA_SIM" in os.environ:
    sys.meta_path.insert(0, TorchFinder())
