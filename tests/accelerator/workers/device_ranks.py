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
if os.environ.get("FSDP_C_PARITY_DEVICE") == "sim":  # in a rank: before its process group is made
    simulated.start()


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
        device = simulated.start()
        device.forget()
        entries = run_one(self, setting, meshes)
        return [("findings", device.findings()), *entries]

    worker._Rank._run_one = watched  # type: ignore[method-assign]
    assert dist.is_initialized()
    return worker.run_on_processes(
        rank, processes, world_size, implementation, settings, folder, ours
    )
