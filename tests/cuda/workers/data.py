"""Trains jobs on ranks that exchange data over the simulated NCCL, under torch or fsdp_c.

``python data.py IMPLEMENTATION RANK WORLD FILE`` is one rank. It prints a JSON object: for each
case its record, which contains digests of parameters, gradients and losses. FILE is the rendezvous
file of the ranks. The device executes torch's operators, fsdp_c's kernels, copies and collectives,
in the order of ``--seed``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import stub_runtime

TESTS = Path(__file__).resolve().parents[2]
FOLDERS = ("harness", "parity/workers", "gpu/workers")


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("implementation", choices=("torch", "fsdp_c"))
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="*", default=())
    options = parser.parse_args()
    device = stub_runtime.start()
    import torch
    import torch.distributed as dist
    sys.path += [str(TESTS / folder) for folder in FOLDERS]
    device.execute(options.seed)
    if os.environ.get("CHECK"): device.observe()
    import time
    import data_jobs

    torch.cuda.set_device(0)
    store = dist.FileStore(options.file, options.world)
    dist.init_process_group("nccl", store=store, rank=options.rank, world_size=options.world)
    cases = data_jobs.cases(options.implementation, options.rank, options.world)
    records = {}
    for name, case in cases.items():
        if options.cases and name not in options.cases:
            continue
        t=time.time()
        try:
            records[name] = case()
            torch.cuda.synchronize()
        except Exception as error:
            import traceback; traceback.print_exc()
            records[name] = [f"raised {type(error).__name__}: {error}"]
        print(name, time.time()-t, file=sys.stderr)
    return {"records": records, "findings": device.findings(), "counts": device.counts()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main()), flush=True)
    os._exit(0)
