"""The cold side beside torch's: ``fully_shard``, and the imports of the first call.

Method. One process, a fake process group of 8 ranks. Models of ``--params`` parameters, blocks of
nine (small: what is measured is not the copying), sharded block by block. Torch's and
ours take turns in each round, each on a model of its own; the figures are minima of the process
time over the rounds, in milliseconds, and the medians of the rounds' ratios. Imports and the first
call of a process, on one layer, are measured in processes of their own, after torch's
``fully_shard`` was imported.

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
from report import table, write_json
from torch.distributed.fsdp import fully_shard as stock
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdp_c import fully_shard

_IMPORT = """
import time, torch, torch.distributed.tensor, torch.distributed.fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
begin = time.process_time()
from {package} import fully_shard
imported = time.process_time()
fully_shard(torch.nn.Linear(8, 8))
print((imported - begin) * 1000, (time.process_time() - imported) * 1000)
"""


PACKAGES = {"stock": "torch.distributed.fsdp", "ours": "fsdp_c"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cold start beside torch's.")
    parser.add_argument("--params", type=int, nargs="+", default=[216, 2000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    rows: list[list[object]] = []
    for count in options.params:
        rows += measure(count, options.rounds)
    print(table(["what", "parameters", "stock ms", "ours ms", "stock / ours"], rows))
    first = {name: first_use(package) for name, package in PACKAGES.items()}
    for name, (imports, call) in first.items():
        print(f"{name}: imports {imports:.0f} ms, first call {call:.0f} ms")
    write_json(options.json, "cold", {"rows": rows, "first_use_ms": first, **vars(options)})
    dist.destroy_process_group()


def measure(count: int, rounds: int) -> list[list[object]]:
    """The row of ``fully_shard`` for models of ``count`` parameters."""
    calls = {"stock": stock, "ours": fully_shard}
    shards: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, function in calls.items():
            model = nn.Sequential(*(block() for _ in range(count // 9)))
            gc.collect()
            shard = timed(lambda: shard_blocks(function, model))  # noqa: B023
            if i:  # the first round imports and fills caches
                shards[name].append(shard)
    return [row("fully_shard", count, shards)]


def block() -> nn.Module:
    """Nine parameters."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.RMSNorm(8))


def shard_blocks(function: Callable[..., object], model: nn.Sequential) -> None:
    for layer in model:
        function(layer)
    function(model)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of the process's time."""
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1000


def row(what: str, count: int, found: dict[str, list[float]]) -> list[object]:
    ratio = statistics.median(a / b for a, b in zip(found["stock"], found["ours"], strict=True))
    numbers = (f"{min(found['stock']):.1f}", f"{min(found['ours']):.1f}", f"{ratio:.2f}")
    return [what, count, *numbers]


def first_use(package: str) -> tuple[float, float]:
    """Milliseconds of imports, and of the first call; the best of three."""
    root = Path(__file__).resolve().parents[1]
    found = []
    for _ in range(3):
        command = [sys.executable, "-c", _IMPORT.format(package=package)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        imports, call = done.stdout.split()[-2:]
        found.append((float(imports), float(call)))
    return min(one[0] for one in found), min(one[1] for one in found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
