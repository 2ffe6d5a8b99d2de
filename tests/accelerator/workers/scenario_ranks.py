"""The targets of launches on the simulated device, in a process of their own."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import scenarios
import simulated
from features import Record


class Seen(NamedTuple):
    """What the device saw of one scenario."""

    record: Record
    findings: list[str]
    counts: dict[str, int]
    peak: int
    """Bytes."""


def see(name: str, implementation: str, kernels: bool) -> Seen:
    """Runs a scenario. An exception is its record."""
    device = simulated.start()
    device.forget()
    device.reset_peak(0)
    start = device.max_memory_allocated(0)
    simulated.use_kernels(kernels)
    tools: Any = scenarios.SimTools(0, scenarios.WORLD, implementation)
    try:
        record = scenarios.SCENARIOS[name](tools)
    except Exception as error:
        record = [f"{type(error).__name__}: {error}"]
    peak = device.max_memory_allocated(0) - start
    return Seen(record, device.findings(), device.counts(), peak)


def run(rank: int, world_size: int) -> dict[str, dict[str, Seen]]:
    """Every scenario under torch, and under fsdp_c with kernels of its own and without."""
    warnings.simplefilter("ignore")
    scenarios.join_loop_group()
    return {
        name: {
            "torch": see(name, "torch", False),
            "fsdp_c": see(name, "fsdp_c", True),
            "fsdp_c without kernels": see(name, "fsdp_c", False),
        }
        for name in scenarios.SCENARIOS
    }
