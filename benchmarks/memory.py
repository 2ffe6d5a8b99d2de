"""Transient memory of a training step in units of one group's parameters, torch's FSDP2 and fsdp_c.

Method. One process with a fake process group of 8 ranks. Collectives complete immediately, so only
the implementation determines the lifetime of buffers. The model has ``--groups`` equal groups of a
few square weights below a root without parameters, resharded after forward. The input has one row.
After two warm-up steps, one step runs under torch's profiler, which records the address of every
allocation and free of the CPU allocator.

An allocation that is still live after backward is persistent (the sharded gradients); all others
are transient. The result is the highest sum of transient bytes during forward and during backward,
divided by a unit. A unit is the bytes of one group's full parameters in the compute dtype (fp32, or
bf16 when mixed). Sharded parameters exist before the step and are not counted. Activations are
counted and amount to about 0.01 units. The JSON has the persistent memory, too.

    python benchmarks/memory.py [--groups N] [--params 1 4] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from report import (
    POLICIES,
    FullyShard,
    format_table,
    get_implementations,
    make_fake_mesh,
    parse_positive,
    write_json,
)
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

WORLD_SIZE = 8
ELEMENTS = 1_000_000
"""Approximate elements of a group: each weight is a square matrix of ELEMENTS / params elements."""

FORWARD, BACKWARD = "memory.py forward", "memory.py backward"

Peaks = dict[str, float]
"""Peak transient units in "forward" and "backward", and persistent units ("persistent")."""


def compute_side(params: int) -> int:
    """Returns the rows of a square weight: a multiple of the world size, to avoid padding."""
    return round((ELEMENTS / params) ** 0.5 / WORLD_SIZE) * WORLD_SIZE


def measure(shard: FullyShard, mesh: DeviceMesh, precision: str, groups: int, params: int) -> Peaks:
    """Returns the peaks of one implementation in units."""
    side, policy = compute_side(params), POLICIES[precision]
    model = nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(params)))
            for _ in range(groups)
        )
    )
    for group in model:
        shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    shard(model, mesh=mesh, mp_policy=policy)
    x = torch.randn(1, side)

    def step() -> None:
        with record_function(FORWARD):
            loss = model(x).sum()
        with record_function(BACKWARD):
            loss.backward()

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    unit = params * side * side * (policy.param_dtype or torch.float32).itemsize
    return {name: value / unit for name, value in measure_peaks(step).items()}


def measure_peaks(step: Callable[[], object]) -> dict[str, int]:
    """Returns the transient peaks and the persistent memory of ``step`` in bytes.

    ``step`` must record the ranges FORWARD and BACKWARD.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return _compute_peaks(sorted(read_events(profiler), key=lambda event: event.start_time_ns))


def read_events(profiler: profile) -> Iterator[Any]:
    """Yields all events of the profile, including nested ones."""
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        yield event


def _compute_peaks(events: list[Any]) -> dict[str, int]:
    """Returns peak transient bytes by phase, and persistent bytes. Requires sorted events."""
    [backward] = [event.start_time_ns for event in events if event.name == BACKWARD]
    events = [event for event in events if event.tag == _EventType.Allocation]
    peaks = {"forward": 0, "backward": 0, "persistent": 0}
    live: dict[int, int] = {}
    total = 0
    for event, transient in zip(events, _find_freed(events), strict=True):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size < 0:
            # Memory allocated before the profile is not in ``live``; its free is ignored.
            total -= live.pop(address, 0)
        elif transient:
            live[address] = size
            total += size
        else:
            peaks["persistent"] += size
        phase = "backward" if event.start_time_ns >= backward else "forward"
        peaks[phase] = max(peaks[phase], total)
    return peaks


def _find_freed(events: list[Any]) -> list[bool]:
    """Returns for each event whether its address is freed before it is allocated again."""
    results = []
    freed: set[int] = set()
    for event in reversed(events):
        address = event.extra_fields.ptr
        results.append(address in freed)
        if event.extra_fields.alloc_size < 0:
            freed.add(address)
        else:
            freed.discard(address)
    return results[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Transient memory in units of a group.")
    parser.add_argument("--groups", type=parse_positive, default=8)
    parser.add_argument("--params", type=parse_positive, nargs="+", default=[1, 4])
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    mesh = make_fake_mesh(WORLD_SIZE)
    implementations = get_implementations()
    results: dict[str, Any] = {"groups": options.groups, "world_size": WORLD_SIZE}
    table = []
    for precision in POLICIES:
        for params in options.params:
            peaks = {
                name: measure(shard, mesh, precision, options.groups, params)
                for name, shard in implementations.items()
            }
            results[f"{precision}_{params}"] = peaks
            for phase in ("forward", "backward"):
                torch_value, fsdp_c_value = (peaks[name][phase] for name in ("torch", "fsdp_c"))
                quotient = torch_value / fsdp_c_value
                table.append([precision, str(params), phase, torch_value, fsdp_c_value, quotient])
    print("peak transient memory, in units of one group's full parameters")
    print(
        format_table(["precision", "parameters", "phase", "torch", "fsdp_c", "torch/fsdp_c"], table)
    )
    write_json(options.json, "memory", results)


if __name__ == "__main__":
    main()
