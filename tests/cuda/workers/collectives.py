"""Calls collectives of c10d on ranks that exchange data over the simulated NCCL.

``python collectives.py RANK WORLD FILE`` is one rank. It prints a JSON object. ``results``: for
each collective whether its result has the bits of the definition. ``files``: this rank's files in
/dev/shm. ``findings``: those of the device. This rank computes the definition from the inputs of
all ranks, in the order of the ranks.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from typing import Any

import data

SIZE = 37
DTYPES = ("float32", "bfloat16", "float16")
FACTOR = 0.3


class Ranks:
    """The inputs of all ranks, and the results of their reductions by definition."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def inputs(self, dtype: Any, size: int) -> list[Any]:
        """Returns one CPU tensor per rank."""
        import torch

        generator = torch.Generator().manual_seed(0)
        values = torch.randn((self.world, size), generator=generator) * 3
        return list(values.to(dtype))

    def reduced(self, op: str, inputs: list[Any]) -> Any:
        """Returns the reduction in the order of the ranks. Each step is rounded to the dtype."""
        import torch

        if op == "avg":
            inputs = [x * (1 / self.world) for x in inputs]
        if op == "premul":
            inputs = [x * torch.tensor(FACTOR, dtype=x.dtype).item() for x in inputs]
        return functools.reduce(torch.maximum if op == "max" else torch.add, inputs)


def operation_of(op: str) -> Any:
    import torch.distributed as dist

    if op == "premul":
        return dist._make_nccl_premul_sum(FACTOR)
    return {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}[op]


def reductions(ranks: Ranks) -> dict[str, bool]:
    import torch
    import torch.distributed as dist

    results = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        for op in ("sum", "avg", "max", "premul"):
            inputs = ranks.inputs(dtype, ranks.world * SIZE)
            own = inputs[ranks.rank].cuda()
            expected = ranks.reduced(op, inputs)
            scattered = torch.empty(SIZE, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(scattered, own, operation_of(op))
            part = expected[ranks.rank * SIZE : (ranks.rank + 1) * SIZE]
            results[f"reduce_scatter {name} {op}"] = torch.equal(scattered.cpu(), part)
            dist.all_reduce(own, operation_of(op))
            results[f"all_reduce {name} {op}"] = torch.equal(own.cpu(), expected)
    count = torch.tensor([2**40 + ranks.rank], device="cuda")
    dist.all_reduce(count)
    results["all_reduce int64"] = count.item() == ranks.world * 2**40 + sum(range(ranks.world))
    return results


def moves(ranks: Ranks) -> dict[str, bool]:
    import torch
    import torch.distributed as dist

    inputs = ranks.inputs(torch.float32, ranks.world * SIZE)
    own = inputs[ranks.rank].cuda()
    rows = torch.empty(ranks.world, own.numel(), device="cuda")
    dist.all_gather_into_tensor(rows, own)
    results = {"all_gather": torch.equal(rows.cpu(), torch.stack(inputs))}
    copy = own.clone()
    dist.broadcast(copy, 1)
    results["broadcast"] = torch.equal(copy.cpu(), inputs[1])
    columns = torch.empty_like(own)
    dist.all_to_all_single(columns, own)
    slices = [x[ranks.rank * SIZE : (ranks.rank + 1) * SIZE] for x in inputs]
    results["all_to_all"] = torch.equal(columns.cpu(), torch.cat(slices))
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    received = torch.empty_like(own)
    messages = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    results["messages in a ring"] = torch.equal(received.cpu(), inputs[before])
    return results


def parts(ranks: Ranks) -> dict[str, bool]:
    """Reduces in a part of the group, which ncclCommSplit makes."""
    import torch
    import torch.distributed as dist

    members = [0, ranks.world - 1]
    group: Any = dist.new_group(members)
    inputs = ranks.inputs(torch.float32, SIZE)
    own = inputs[ranks.rank].cuda()
    if ranks.rank in members:
        dist.all_reduce(own, group=group)
        expected = ranks.reduced("sum", [inputs[r] for r in members])
    else:
        expected = inputs[ranks.rank]
    return {"all_reduce in a part": torch.equal(own.cpu(), expected)}


def main(rank: int, world: int, file: str) -> dict[str, Any]:
    import stub_runtime

    stub_runtime.start()
    import torch

    device = data.join(rank, world, file, device_id=torch.device("cuda", 0))
    ranks = Ranks(rank, world)
    results = reductions(ranks) | moves(ranks) | parts(ranks)
    files = [
        name for name in os.listdir("/dev/shm") if name.startswith(f"fsdp_c-nccl-{os.getpid()}-")
    ]
    return {"results": results, "files": files, "findings": device.findings()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])), flush=True)
    os._exit(0)
