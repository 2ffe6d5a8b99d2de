"""Runs trainings of the GPU check's step ``races`` over NCCL.

Their process group is that of tests/gpu/workers/one_rank_group.cpp, which calls NCCL.
``one_rank.py IMPLEMENTATION`` prints, for each training of ``VARIANTS``, the races that the device
has found, and the number of calls of each NCCL function. ``scatters`` is whether this torch calls
NCCL for a reduce-scatter of one rank. No kernel runs, so the results of the trainings are not
compared.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import stub_runtime

GPU_WORKERS = Path(__file__).resolve().parents[2] / "gpu/workers"
VARIANTS = ("mixed", "hsdp_partial", "asynchronous_gathers", "smaller_group")


def main() -> None:
    device = stub_runtime.start()
    sys.path.append(str(GPU_WORKERS))
    import loop_group
    import race
    import torch
    import variants
    from outcome import start_device
    from torch.torch_version import TorchVersion

    cuda = start_device()
    device.observe()
    loop_group.join(variants.WORLD, cuda, native=True)
    tools = race.make_tools(sys.argv[1], cuda)
    loop_group.DELAYS.seed(1)
    results = {}
    for name in VARIANTS:
        device.reset()
        variants.VARIANTS[name](tools)
        counts = {key: n for key, n in device.counts().items() if key.startswith("nccl")}
        results[name] = {
            "findings": device.findings(),
            "NCCL": counts,
            "scatters": TorchVersion(torch.__version__) >= (2, 15),
        }
    print(json.dumps(results), flush=True)
    os._exit(0)  # without the destructors of the process group, which wait for the device


if __name__ == "__main__":
    main()
