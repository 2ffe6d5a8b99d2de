"""A rank ends, or issues another collective, while its peers wait for it in the simulated NCCL.

``python peers.py CASE RANK WORLD FILE`` is one rank. In the case "ended" the last rank ends, and in
"differs" it issues another collective. A rank that does not end waits until a communicator was
aborted. Then it prints a JSON object: the outcome of the step, and the findings of the device.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import data
import watchdog
from failures import outcome_of


def differ(rank: int, world: int) -> None:
    """Reduces on the last rank, and gathers on the others."""
    import torch
    import torch.distributed as dist

    own, rows = torch.ones(4, device="cuda"), torch.ones(4 * world, device="cuda")
    if rank == world - 1:
        dist.all_reduce(own)
    else:
        dist.all_gather_into_tensor(rows, own)
    torch.cuda.synchronize()


def main(case: str, rank: int, world: int, file: str) -> dict[str, Any]:
    os.environ.update(watchdog.CLEAN_UP | watchdog.NO_DUMP)
    device = data.join(rank, world, file)
    import data_jobs

    tools = data_jobs.variant_tools("fsdp_c", rank, world)
    model = tools.shard(tools.blocks())
    tools.train(model)
    if case == "ended" and rank == world - 1:
        os._exit(0)
    step = (lambda: differ(rank, world)) if case == "differs" else (lambda: tools.train(model))
    outcome = outcome_of(step)
    watchdog.wait_for_abort(device)
    return {"outcome": outcome, "findings": device.findings()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    case, *numbers = sys.argv[1:]
    result = main(case, int(numbers[0]), int(numbers[1]), numbers[2])
    print(json.dumps(result), flush=True)
    os._exit(0)
