"""Start-up cost of torch's FSDP2 and fsdp_c: ``fully_shard``, imports, first call.

Method. One process with a fake process group of 8 ranks shards models block by block. A block has
nine small parameters, so the time of copies is negligible. A model has as many blocks as
``--params`` parameters suffice for: 2000 make 222 blocks with 1998 parameters. The two
implementations take turns in each round, each on its own model. The script reports minima of
process time over the rounds in milliseconds, and medians of the rounds' ratios. Imports, and a
process's first call on one layer, are measured in separate processes after
``torch.distributed.fsdp`` was imported.

    python benchmarks/cold.py [--params 216 2000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from report import format_table, parse_positive, write_json
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_c import fully_shard

_FIRST_USE_SCRIPT = """
import time, torch, torch.distributed.tensor, torch.distributed.fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
begin = time.process_time()
from {package} import fully_shard
imported = time.process_time()
fully_shard(torch.nn.Linear(8, 8))
print((imported - begin) * 1000, (time.process_time() - imported) * 1000)
"""


PACKAGES = {"torch": "torch.distributed.fsdp", "fsdp_c": "fsdp_c"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up cost of torch and fsdp_c.")
    parser.add_argument("--params", type=parse_positive, nargs="+", default=[216, 2000])
    parser.add_argument("--rounds", type=parse_positive, default=7)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    rows: list[list[object]] = []
    for count in options.params:
        rows += measure(count, options.rounds)
    print(format_table(["call", "parameters", "torch ms", "fsdp_c ms", "torch / fsdp_c"], rows))
    first = {name: measure_first_use(package) for name, package in PACKAGES.items()}
    for name, (imports, call) in first.items():
        print(f"{name}: imports {imports:.0f} ms, first call {call:.0f} ms")
    write_json(options.json, "cold", {"rows": rows, "first_use_ms": first, **vars(options)})
    dist.destroy_process_group()


def measure(count: int, rounds: int) -> list[list[object]]:
    """Returns the row of ``fully_shard`` for models of ``count`` parameters."""
    calls = {"torch": torch_fully_shard, "fsdp_c": fully_shard}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, function in calls.items():
            model = nn.Sequential(*(make_block() for _ in range(count // 9)))
            gc.collect()
            elapsed = measure_milliseconds(lambda: shard_blocks(function, model))  # noqa: B023
            if i:  # the first round imports and fills caches
                times[name].append(elapsed)
    return [make_row("fully_shard", count, times)]


def make_block() -> nn.Module:
    """Returns a block with nine parameters."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.RMSNorm(8))


def shard_blocks(function: Callable[..., object], model: nn.Sequential) -> None:
    for layer in model:
        function(layer)
    function(model)


def measure_milliseconds(call: Callable[[], object]) -> float:
    """Returns the call's process time in milliseconds."""
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1000


def make_row(call: str, count: int, times: dict[str, list[float]]) -> list[object]:
    ratio = statistics.median(a / b for a, b in zip(times["torch"], times["fsdp_c"], strict=True))
    return [call, count, min(times["torch"]), min(times["fsdp_c"]), ratio]


def measure_first_use(package: str) -> tuple[float, float]:
    """Returns milliseconds of the imports and of the first call, minima of three processes."""
    root = Path(__file__).resolve().parents[1]
    times = []
    for _ in range(3):
        command = [sys.executable, "-c", _FIRST_USE_SCRIPT.format(package=package)]
        process = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        imports, call = process.stdout.split()[-2:]
        times.append((float(imports), float(call)))
    return min(imports for imports, _ in times), min(call for _, call in times)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
