"""Trains jobs on ranks that exchange data over the simulated NCCL, under torch or fsdp_c.

``python data.py IMPLEMENTATION RANK WORLD FILE SEED`` is one rank. It prints a JSON object with the
record of each job (``data_jobs.py``), the findings of the device and its counts. FILE is the
rendezvous file of the ranks. The device executes torch's operators, fsdp_c's kernels, copies and
collectives in the order that SEED selects.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import stub_runtime

TESTS = Path(__file__).resolve().parents[2]
FOLDERS = ("harness", "parity/workers", "gpu/workers")


def join(rank: int, world: int, file: str, seed: int = 0, **options: Any) -> stub_runtime.Device:
    """Joins an NCCL group whose ranks exchange data. Returns the device.

    Afterwards the workers of other tests can be imported.
    """
    device = stub_runtime.start()
    import torch
    import torch.distributed as dist

    device.execute(seed)
    sys.path += [str(TESTS / folder) for folder in FOLDERS]
    torch.cuda.set_device(0)
    store = dist.FileStore(file, world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, **options)
    return device


def main(implementation: str, rank: int, world: int, file: str, seed: int) -> dict[str, Any]:
    device = join(rank, world, file, seed)
    import data_jobs
    import torch

    records: dict[str, Any] = {}
    for name, job in data_jobs.jobs_of(implementation, rank, world).items():
        try:
            records[name] = job()
            torch.cuda.synchronize()
        except Exception as error:
            records[name] = [f"raised {type(error).__name__}: {error}"]
    return {"records": records, "findings": device.findings(), "counts": device.counts()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    name, *numbers = sys.argv[1:]
    result = main(name, int(numbers[0]), int(numbers[1]), numbers[2], int(numbers[3]))
    print(json.dumps(result), flush=True)
    os._exit(0)
