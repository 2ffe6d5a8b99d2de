"""Settings of the parity grid on the simulated device: the target of a launch.

Each record begins with what the device has found; nothing of the grid's own is changed.
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
DEVICE = simulated.start()  # before the process group is made


def run(
    rank: int,
    processes: int,
    world_size: int,
    implementation: str,
    settings: list[Setting],
    folder: str,
    ours: bool,
) -> float:
    """As ``worker.run_on_processes``."""
    if ours:
        simulated.use_kernels(os.environ.get("FSDP_C_SIM_KERNELS", "1") != "0")
    run_one = worker._Rank._run_one

    def watched(self: Any, setting: Setting, meshes: Any) -> list[Entry]:
        DEVICE.forget()
        entries = run_one(self, setting, meshes)
        return [("findings", DEVICE.findings()), *entries]

    worker._Rank._run_one = watched  # type: ignore[method-assign]
    assert dist.is_initialized()
    return worker.run_on_processes(
        rank, processes, world_size, implementation, settings, folder, ours
    )
