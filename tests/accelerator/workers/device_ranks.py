"""Rank entry point that trains settings of the parity grid on the simulated device.

Each record begins with an entry of the device's findings. The other entries are those of the grid.
"""

from __future__ import annotations

import os
from typing import Any

import simulated
import torch.distributed as dist
import worker
from record import Entry
from setting import Setting

BACKEND = "cpu:gloo,sim:sccl"
if os.environ.get("FSDP_C_PARITY_DEVICE") == "sim":  # in a rank, before init_process_group()
    simulated.start()


def run(
    rank: int,
    processes: int,
    world_size: int,
    implementation: str,
    settings: list[Setting],
    folder: str,
    is_fsdp_c: bool,
) -> None:
    """A rank on one device, with the parameters of ``worker.run_on_processes``."""
    if is_fsdp_c:
        simulated.use_kernels(os.environ.get("FSDP_C_SIM_KERNELS", "1") != "0")
    original_run_one = worker._Rank._run_one

    def run_one_and_prepend_findings(self: Any, setting: Setting, meshes: Any) -> list[Entry]:
        device = simulated.start()
        device.reset()
        entries = original_run_one(self, setting, meshes)
        return [("findings", device.findings()), *entries]

    worker._Rank._run_one = run_one_and_prepend_findings  # type: ignore[method-assign]
    assert dist.is_initialized()
    worker.run_on_processes(
        rank, processes, world_size, implementation, settings, folder, is_fsdp_c
    )
