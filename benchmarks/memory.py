"""Transient memory of a training step in units of one group's parameters, beside stock FSDP2.

Method. A fake process group of 8 ranks (collectives complete at once, so nothing stays in flight
longer than the code keeps it), ``--groups`` equal groups of a few square weights below a root
without parameters, resharded after forward, one row of activations. After two steps of warm-up one
step runs under torch's profiler, which sees every allocation and free of the CPU allocator with its
address. An allocation still alive after the backward was produced to stay (the sharded gradients);
all others are transient. The figures are the highest sums of transient bytes alive at one time
during the forward and during the backward, divided by a unit: the bytes of one group's full
parameters in the dtype of the computation (fp32, or bf16 when mixed). Sharded parameters existed
before the step and are never counted; activations are, but amount to about 0.01 units. "kept" in
the JSON is what the step leaves behind. (Counting the gradient shards of the group in reduction as
produced already lowers the backward figures by 1/8 unit, or 2/8 when mixed: 3.9 and 4.8 of stock.)

    python benchmarks/memory.py [--groups N] [--params 1 4] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from report import POLICIES, FullyShard, fake_mesh, implementations, table, write_json
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

WORLD_SIZE = 8
ELEMENTS = 1_000_000
"""Parameters of a group, about: each weight is a square of ELEMENTS / params."""

FORWARD, BACKWARD = "memory.py forward", "memory.py backward"

Peaks = dict[str, float]
"""Highest transient units in "forward" and "backward", and units left behind ("kept")."""


def side_of(params: int) -> int:
    """Rows and columns of a weight, a multiple of the world size: no padding in the figures."""
    return round((ELEMENTS / params) ** 0.5 / WORLD_SIZE) * WORLD_SIZE


def measure(shard: FullyShard, mesh: DeviceMesh, precision: str, groups: int, params: int) -> Peaks:
    """The peaks of one implementation."""
    side, policy = side_of(params), POLICIES[precision]
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
    return {name: value / unit for name, value in peaks_of(step).items()}


def peaks_of(step: Callable[[], object]) -> dict[str, int]:
    """Bytes of a call that records the ranges FORWARD and BACKWARD: transient peaks, and kept."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return _peaks(sorted(_events(profiler), key=lambda event: event.start_time_ns))


def _events(profiler: profile) -> Iterator[Any]:
    """All events of the profile, nested ones included."""
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        yield event


def _peaks(events: list[Any]) -> dict[str, int]:
    """Peak transient bytes by phase and bytes kept, from a profile's events in order of time."""
    [backward] = [event.start_time_ns for event in events if event.name == BACKWARD]
    events = [event for event in events if event.tag == _EventType.Allocation]
    peaks = {"forward": 0, "backward": 0, "kept": 0}
    alive: dict[int, int] = {}
    total = 0
    for event, transient in zip(events, _freed_later(events), strict=True):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size < 0:
            # Memory from before the profile is not in the table: its free changes nothing here.
            total -= alive.pop(address, 0)
        elif transient:
            alive[address] = size
            total += size
        else:
            peaks["kept"] += size
        phase = "backward" if event.start_time_ns >= backward else "forward"
        peaks[phase] = max(peaks[phase], total)
    return peaks


def _freed_later(events: list[Any]) -> list[bool]:
    """For each allocation event, whether its address is freed before it is allocated again."""
    found = []
    freed: set[int] = set()
    for event in reversed(events):
        address = event.extra_fields.ptr
        found.append(address in freed)
        if event.extra_fields.alloc_size < 0:
            freed.add(address)
        else:
            freed.discard(address)
    return found[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Transient memory in units of a group.")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--params", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    mesh = fake_mesh(WORLD_SIZE)
    shards = implementations()
    results: dict[str, Any] = {"groups": options.groups, "world_size": WORLD_SIZE}
    lines = []
    for precision in POLICIES:
        for params in options.params:
            peaks = {
                name: measure(shard, mesh, precision, options.groups, params)
                for name, shard in shards.items()
            }
            results[f"{precision}_{params}"] = peaks
            for phase in ("forward", "backward"):
                stock, ours = peaks["stock"][phase], peaks.get("ours", {}).get(phase)
                quotient = stock / ours if ours else None
                lines.append([precision, str(params), phase, stock, ours, quotient])
    print("peak transient memory, in units of one group's full parameters")
    print(table(["precision", "parameters", "phase", "stock", "ours", "stock/ours"], lines))
    write_json(options.json, "memory", results)


if __name__ == "__main__":
    main()
