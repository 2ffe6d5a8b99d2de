"""What the host does for a unit and step: benchmarks/host.py by two clocks.

By the CPU time of the process, and by the wall from an idle device on, which is what a step waits
for while the queue is empty. Both above the bare model's.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import host
import torch
from outcome import ON_CUDA, conclude
from report import fake_mesh, implementations

GROUPS, PARAMS, ROUNDS = (16, 9, 15) if ON_CUDA else (2, 2, 2)
JOBS = ("fp32", "mixed") if ON_CUDA else ("mixed",)


class Wall(host.Timed):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clock = time.perf_counter_ns


def main() -> None:
    device = "cuda" if ON_CUDA else "cpu"
    mesh = fake_mesh(host.WORLD_SIZE, device)
    shards = implementations()
    figures: dict[str, dict[str, float]] = {}
    for name in JOBS:
        for clock, timed in (("cpu", host.Timed), ("wall", Wall)):
            with mock.patch.object(host, "Timed", timed):
                found = host.measure(shards, mesh, host.JOBS[name], GROUPS, PARAMS, ROUNDS)
            figures[f"{name} {clock}"] = found
            if ON_CUDA:
                torch.cuda.synchronize()
    parts = [f"{name} {one['stock']:.0f}/{one['ours']:.0f}" for name, one in figures.items()]
    slower = [name for name, one in figures.items() if one["ours"] > one["stock"]]
    line = f"us per unit of {PARAMS} parameters and step, stock/ours: {', '.join(parts)}"
    conclude(not (slower and ON_CUDA), line, us_per_group_step=figures, slower=slower)


if __name__ == "__main__":
    main()
