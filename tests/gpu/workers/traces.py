"""Writes a profiler trace and a memory snapshot of a step of a small GPT, for torch and fsdp_c."""

from __future__ import annotations

import collections
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import loop_group
import torch
from gpt import GPTConfig
from gpt_step import Job
from outcome import ON_CUDA, SMALL, conclude, out_file, start_device
from torch.profiler import ProfilerActivity, profile
from variants import WORLD, Tools

CONFIG = (
    GPTConfig(layers=2, width=32, heads=2, context=16)
    if SMALL
    else GPTConfig(layers=6, width=1024, heads=8, context=512)
)
IMPLEMENTATIONS = ("torch", "fsdp_c")


def trace(job: Job, name: str) -> dict[str, int]:
    """Writes the trace of one step. Returns the number of events by category."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_CUDA else [])]
    with profile(activities=activities) as profiler:
        job.step()
        if ON_CUDA:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        data = path.read_bytes()
    out_file(f"trace-{name}.json.gz").write_bytes(gzip.compress(data))
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    kinds = collections.Counter(str(event.get("cat")) for event in events)
    kinds["launches"] = sum("Launch" in str(event.get("name")) for event in events)
    return dict(kinds)


def snapshot(job: Job, name: str) -> bool:
    """Writes a snapshot of the allocations of one step. Returns whether the device supports it."""
    if not ON_CUDA:
        return False
    torch.cuda.memory._record_memory_history(max_entries=50_000, stacks="python")
    job.step()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "memory.pickle")
        torch.cuda.memory._dump_snapshot(str(path))
        out_file(f"memory-{name}.pickle.gz").write_bytes(gzip.compress(path.read_bytes()))
    torch.cuda.memory._record_memory_history(enabled=None)
    return True


def main() -> None:
    device = start_device()
    loop_group.join(WORLD, device)
    events: dict[str, dict[str, int]] = {}
    with loop_group.without_pauses():
        for name in IMPLEMENTATIONS:
            job = Job(Tools(name, device), CONFIG, batch=2)
            for _ in range(2):
                job.step()
            events[name] = trace(job, name)
            snapshots = snapshot(job, name)
    launches = [f"{name} {kinds['launches']}" for name, kinds in events.items()]
    line = f"launches in a step: {', '.join(launches)}" if ON_CUDA else "traces written"
    line += "" if snapshots else "; snapshots need CUDA"
    conclude(True, line, events=events)


if __name__ == "__main__":
    main()
