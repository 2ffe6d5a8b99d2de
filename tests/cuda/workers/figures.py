"""Prints what one training step does on the host and in memory, under torch's FSDP2 and fsdp_c.

``python figures.py`` runs every job in a process per implementation, on the simulated CUDA device.
torch is the unmodified CUDA build. Substitutes of its CUDA libraries (``stub_runtime.py``) count
launches, events, collectives and allocations. The table shows CPU times of a process minus those of
the bare model, which is not sharded. Each time is the minimum over steps and ``--rounds``
processes. ``--json FILE`` writes the numbers, with absolute times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COUNTS = {
    "launch": "launches",
    "record": "records",
    "wait": "waits",
    "collective": "NCCL",
    "memcpy": "copies",
    "malloc": "cudaMalloc",
    "launch with GIL": "launches with GIL",
}
TIMES = ("CPU ms", "optimizer ms")
"""CPU milliseconds of forward and backward, and of the optimizer."""
OPTIONAL_FUNCTIONS = ("cuLogsRegisterCallback", "cuGetExportTable")
"""Functions of the driver without which torch and NVRTC work."""
IMPLEMENTATIONS = ("bare", "torch", "fsdp_c")


def measure(implementation: str, name: str, size: str, blocks: int, steps: int) -> dict[str, Any]:
    """Runs a job in this process. Returns counts per step, MiB, and CPU milliseconds."""
    import stub_runtime

    device = stub_runtime.start()
    device.set(copies=0)  # copies within the device move no data; they are still counted
    import jobs
    import torch

    training = jobs.start_training(implementation, name, size, blocks)
    torch.cuda.reset_peak_memory_stats()
    before, memory = device.counts(), torch.cuda.memory_stats()
    passes, optimizer = [], []
    for _ in range(steps):
        begin = time.process_time()
        training.accumulate()
        middle = time.process_time()
        training.optimize()
        passes.append(middle - begin)
        optimizer.append(time.process_time() - middle)
    after, stats = device.counts(), torch.cuda.memory_stats()
    result: dict[str, Any] = {
        kind: (after.get(kind, 0) - before.get(kind, 0)) / steps for kind in COUNTS
    }
    allocations = stats["allocation.all.allocated"] - memory["allocation.all.allocated"]
    result["allocations"] = allocations / steps
    result["peak MiB"] = stats["allocated_bytes.all.peak"] / 2**20
    result["reserved MiB"] = stats["reserved_bytes.all.peak"] / 2**20
    result["CPU ms"] = 1000 * min(passes)
    result["optimizer ms"] = 1000 * min(optimizer)
    result["malloc with GIL"] = after.get("malloc with GIL", 0)  # since the start, not per step
    result["not supported"] = [
        key
        for key in after
        if key.startswith("not supported") and not key.endswith(OPTIONAL_FUNCTIONS)
    ]
    return result


def run(implementation: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs :func:`measure` in a new process."""
    command = [sys.executable, __file__, "--measure", implementation, name]
    command += ["--size", arguments.size, "--blocks", str(arguments.blocks)]
    command += ["--steps", str(arguments.steps)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{implementation}, {name}: {result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def run_rounds(name: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Runs all implementations in turn. Returns counts of the last round, and minimal times."""
    results: dict[str, dict[str, Any]] = {}
    for _ in range(arguments.rounds):
        for implementation in IMPLEMENTATIONS:
            result, earlier = run(implementation, name, arguments), results.get(implementation, {})
            times = {key: min(result[key], earlier.get(key, result[key])) for key in TIMES}
            results[implementation] = result | times
    return results


def format_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Formats a Markdown table. A cell is "torch / fsdp_c"; times without the bare model's."""
    columns = [*COUNTS.values(), "allocations", "peak MiB", "reserved MiB", *TIMES]
    keys = [*COUNTS, "allocations", "peak MiB", "reserved MiB", *TIMES]
    lines = ["| job | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, result in results.items():
        cells = []
        for key in keys:
            base = result["bare"][key] if key in TIMES else 0
            digits = 1 if key in TIMES else 0
            values = [f"{result[i][key] - base:.{digits}f}" for i in ("torch", "fsdp_c")]
            cells.append(" / ".join(values))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="LLAMA_8B", help="a Size constant of jobs.py")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.measure:
        implementation, name = arguments.names
        values = measure(implementation, name, arguments.size, arguments.blocks, arguments.steps)
        print(json.dumps(values), flush=True)
        os._exit(0)  # without the destructors of the process group, which wait for the device
    import stub_runtime

    stub_runtime.start()
    import jobs

    results: dict[str, dict[str, dict[str, Any]]] = {}
    for name in arguments.names or jobs.JOBS:
        results[name] = run_rounds(name, arguments)
        print(format_table({name: results[name]}).splitlines()[-1], flush=True)
    print(format_table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
