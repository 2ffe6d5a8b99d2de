"""Measures a training step of a 1.3 B GPT as rank 0 of eight: milliseconds and peak memory.

loop_group.py simulates the other ranks, here without pauses and poison. The numbers contain no
network time: they compare two implementations on one device and do not predict a cluster's speed.
torch and fsdp_c run alternately.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import loop_group
import torch
from gpt import GPT, GPTConfig, next_byte_loss
from outcome import DEVICE, ON_CUDA, conclude, start_device
from variants import MIXED, WORLD, Tools

CONFIG = (
    GPTConfig(layers=26, width=2048, heads=16, context=1024)
    if ON_CUDA
    else GPTConfig(layers=2, width=32, heads=2, context=16)
)
BATCH = 4 if ON_CUDA else 1
STEPS, WARM = (8, 3) if ON_CUDA else (1, 1)
TURNS = 2 if ON_CUDA else 1


@dataclass
class Figures:
    """Results of one run. Memory is in bytes above the memory in use before the run."""

    ms: list[float]
    held: int
    peak: int
    loss: float


class Job:
    """A sharded model on the device with its optimizer and batch."""

    def __init__(self, tools: Tools, config: GPTConfig = CONFIG, batch: int = BATCH) -> None:
        torch.manual_seed(0)
        with tools.device:
            self.model = GPT(config)
        for unit in (*self.model.blocks, self.model):
            tools.fully_shard(unit, mesh=tools.flat, mp_policy=MIXED)
        fused = tools.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=fused, foreach=not fused
        )
        data = torch.randint(0, 256, (batch, config.context + 1))
        self.tokens = data.to(tools.device)

    def step(self) -> torch.Tensor:
        loss = next_byte_loss(self.model(self.tokens[:, :-1]), self.tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class MemoryMeter:
    """Measures device memory. On the CPU all values are 0."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        gc.collect()
        self.synchronize()
        self.before = self.now()

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def now(self) -> int:
        return int(self.module.memory_allocated()) if self.module else 0

    def reset(self) -> None:
        if self.module is not None:
            self.module.reset_peak_memory_stats()

    def peak(self) -> int:
        return int(self.module.max_memory_allocated()) - self.before if self.module else 0


def measure(implementation: str, device: torch.device) -> Figures:
    meter = MemoryMeter(device)
    job = Job(Tools(implementation, device))
    for _ in range(WARM):
        job.step()
    meter.synchronize()
    meter.reset()
    held, times, loss = meter.now() - meter.before, [], torch.zeros(())
    for _ in range(STEPS):
        begin = time.perf_counter()
        loss = job.step()
        meter.synchronize()
        times.append((time.perf_counter() - begin) * 1000)
    return Figures(times, held, meter.peak(), loss.item())


def main() -> None:
    device = start_device()
    loop_group.join(WORLD, device)
    runs: dict[str, list[Figures]] = {"torch": [], "fsdp_c": []}
    with loop_group.without_pauses():
        for _ in range(TURNS):
            for name, figures in runs.items():
                figures.append(measure(name, device))
                print(name, figures[-1], flush=True)
    ms = {
        name: statistics.median(x for figures in runs_of_name for x in figures.ms)
        for name, runs_of_name in runs.items()
    }
    peak = {
        name: max(figures.peak for figures in runs_of_name) for name, runs_of_name in runs.items()
    }
    losses = [figures.loss for runs_of_name in runs.values() for figures in runs_of_name]
    # The attention kernels are nondeterministic, so the losses are not compared bit for bit.
    passed = max(losses) - min(losses) < 0.01 * max(losses)
    if ON_CUDA:
        passed = passed and peak["fsdp_c"] <= peak["torch"] and ms["fsdp_c"] <= 1.05 * ms["torch"]
    numbers = [f"{ms[name]:.1f} ms, {peak[name] / 2**30:.2f} GiB" for name in runs]
    line = f"torch {numbers[0]}; fsdp_c {numbers[1]}; losses {min(losses):.4f} to {max(losses):.4f}"
    line += "" if ON_CUDA else f" (small model on {DEVICE}: not a measurement)"
    conclude(passed, line, ms=ms, peak_bytes=peak, runs=runs)


if __name__ == "__main__":
    main()
