"""Measures the host time per unit and step with benchmarks/host.py, by two clocks.

The first clock is CPU time: of the process on CUDA, of the thread on the CPU. The second clock is
wall time. On CUDA each step begins with an idle device. So this is the time in which the host
issues a step while the device's queue is empty. Both exclude the unsharded model's time.
"""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import host
import torch
from outcome import ON_CUDA, SMALL, conclude
from report import get_implementations, make_fake_mesh

GROUPS, PARAMS, ROUNDS = (2, 2, 2) if SMALL else (16, 9, 15)
JOBS = ("mixed",) if SMALL else ("fp32", "mixed")


class WallTimedModel(host.TimedModel):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clock = time.perf_counter_ns


def main() -> None:
    device = "cuda" if ON_CUDA else "cpu"
    mesh = make_fake_mesh(host.WORLD_SIZE, device)
    shards = get_implementations()
    figures: dict[str, dict[str, float]] = {}
    for name in JOBS:
        for clock, timed in (("cpu", host.TimedModel), ("wall", WallTimedModel)):
            with mock.patch.object(host, "TimedModel", timed):
                times = host.measure(shards, mesh, host.JOBS[name], GROUPS, PARAMS, ROUNDS)
            figures[f"{name} {clock}"] = times
            if ON_CUDA:
                torch.cuda.synchronize()
    parts = [
        f"{name} {times['torch']:.0f}/{times['fsdp_c']:.0f}" for name, times in figures.items()
    ]
    slower = [name for name, times in figures.items() if times["fsdp_c"] > times["torch"]]
    line = f"us per unit of {PARAMS} parameters and step, torch/fsdp_c: {', '.join(parts)}"
    conclude(SMALL or not slower, line, us_per_group_step=figures, slower=slower)


if __name__ == "__main__":
    main()
