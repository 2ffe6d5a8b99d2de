"""Measures training steps of GPTs as rank 0 of eight: milliseconds and peak memory.

The models have from 85 M to 1.6 B parameters. The host limits the steps with few tokens, and the
device those with wide blocks.

loop_group.py simulates the other ranks, here without the random pauses of the check ``races``. The
numbers contain no network time: they compare two implementations on one device, and do not predict
a cluster's speed. torch and fsdp_c run alternately.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import loop_group
import torch
from gpt import GPT, GPTConfig, next_byte_loss
from outcome import DEVICE, ON_CUDA, SMALL, conclude, start_device
from variants import MIXED, WORLD, Tools

SIZES: dict[str, tuple[GPTConfig, int]] = (
    {"small": (GPTConfig(layers=2, width=32, heads=2, context=16), 1)}
    if SMALL
    else {
        "1.3 B": (GPTConfig(layers=26, width=2048, heads=16, context=1024), 4),
        "85 M": (GPTConfig(layers=12, width=768, heads=12, context=1024), 8),
        "85 M, short": (GPTConfig(layers=12, width=768, heads=12, context=512), 1),
        "1.6 B, wide": (GPTConfig(layers=8, width=4096, heads=32, context=2048), 2),
    }
)
"""Maps a title to the model and the number of sequences in a batch."""

STEPS, WARM = (1, 1) if SMALL else (8, 3)
TURNS = 1 if SMALL else 2
HIGHEST_PEAK = 1.002
"""Highest peak relative to torch's. The allocator does not split a block if less than 1 MiB would
remain, so equal requests in another order have another peak."""


@dataclass
class Figures:
    """Results of one run. Memory is in bytes above the memory in use before the run: ``held`` after
    the warm-up, and the highest value as ``peak``."""

    ms: list[float]
    held: int
    peak: int
    loss: float


class Job:
    """A sharded model on the device with its optimizer and batch."""

    def __init__(self, tools: Tools, config: GPTConfig, batch: int) -> None:
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


def measure(implementation: str, device: torch.device, config: GPTConfig, batch: int) -> Figures:
    meter = MemoryMeter(device)
    job = Job(Tools(implementation, device), config, batch)
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


@dataclass
class Comparison:
    """Results of both implementations for one size."""

    ms: dict[str, float]
    """Medians."""
    peak_bytes: dict[str, int]
    losses: dict[str, list[float]]

    def failure(self) -> str:
        """Returns what is wrong with the results, or ``""``.

        The attention kernels are nondeterministic, so losses are not compared bit for bit.
        """
        losses = [loss for values in self.losses.values() for loss in values]
        if not all(map(math.isfinite, losses)):
            return f"losses {losses}"
        if max(losses) - min(losses) >= 0.01 * max(losses):
            return f"losses from {min(losses)} to {max(losses)}"
        if not SMALL and self.ms["fsdp_c"] > 1.05 * self.ms["torch"]:
            return "slower than torch"
        if ON_CUDA and self.peak_bytes["fsdp_c"] > HIGHEST_PEAK * self.peak_bytes["torch"]:
            return "higher peak than torch"
        return ""

    def __str__(self) -> str:
        parts = [f"{name} {self.ms[name]:.1f} ms" for name in self.ms]
        peaks = "/".join(f"{peak / 2**30:.2f}" for peak in self.peak_bytes.values())
        return f"{', '.join(parts)}, {peaks} GiB"


def compare(device: torch.device, config: GPTConfig, batch: int) -> Comparison:
    """Measures both implementations in turns."""
    runs: dict[str, list[Figures]] = {"torch": [], "fsdp_c": []}
    for _ in range(TURNS):
        for name, figures in runs.items():
            figures.append(measure(name, device, config, batch))
            print(name, config, figures[-1], flush=True)
    return Comparison(
        {
            name: statistics.median(x for f in figures for x in f.ms)
            for name, figures in runs.items()
        },
        {name: max(f.peak for f in figures) for name, figures in runs.items()},
        {name: [f.loss for f in figures] for name, figures in runs.items()},
    )


def main() -> None:
    device = start_device()
    loop_group.join(WORLD, device)
    with loop_group.without_pauses():
        results = {title: compare(device, *size) for title, size in SIZES.items()}
    failures = [
        f"{title}: {failure}" for title, result in results.items() if (failure := result.failure())
    ]
    line = "; ".join(f"{title}: {result}" for title, result in results.items())
    line += f" (small model on {DEVICE}: not a measurement)" if SMALL else ""
    line += f"; FAILED: {failures[0]}" if failures else ""
    sizes = {title: asdict(result) for title, result in results.items()}
    conclude(not failures, line, sizes=sizes, failures=failures)


if __name__ == "__main__":
    main()
