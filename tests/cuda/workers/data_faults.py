"""Faults that a comparison of bits must find: each changes the results of a training.

``python data_faults.py RANK WORLD FILE`` is one rank of fsdp_c. It prints a JSON object, which has
for each fault the number of trainings until the results differed, or 0. It also has whether results
differ without a fault, and the findings of the device. Faults of NCCL are armed on rank 0. A
dropped wait is a call by which fsdp_c orders streams. The call has no effect, on all ranks. Each
training for such a fault drops another call and has another order of operations.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import warnings
from typing import Any

import data
import stub_runtime
from cuda_bugs import BUGS, LIBRARY, Bug, matches

NCCL_FAULTS = {
    "a reduce-scatter takes the next rank's slice": {"wrong_slice": 2},
    "an all-gather exchanges two shards": {"wrong_shard": 2},
    "a reduction omits a rank": {"missing_rank": 2},
}
VARIANTS = {"fsdp": "mixed", "offload": "offload", "replicate": "replicated"}
"""The variant of ``variants.py`` for a job of the bugs."""
SEEDS = (1, 2, 3, 4)
IDLE_MS = 2000
"""So long that only waits of the host start operations. No host waits for another rank, so the
operations need no other start."""
LAYERS = 4
"""Bugs that need another number of blocks do not run."""
LIMIT = 60
"""The maximum number of trainings of one fault."""


class Trainings:
    """Runs variants on this rank, which must run in the same order on all ranks."""

    def __init__(self, rank: int, world: int) -> None:
        import data_jobs

        self.device = stub_runtime.start()
        self.tools = data_jobs.variant_tools("fsdp_c", rank, world, layers=LAYERS, steps=3)
        self.expected = {name: self.digest(name, 0) for name in VARIANTS.values()}

    def digest(
        self,
        name: str,
        seed: int,
        site: stub_runtime.CallSite | None = None,
        occurrence: int = 0,
        **faults: int,
    ) -> str:
        """Returns the digest of a training on this rank, or the message that it is not finite.

        Call number ``occurrence`` of ``site`` is broken.
        """
        import torch
        import torch.distributed as dist
        import variants

        torch.cuda.synchronize()
        dist.barrier()
        self.device.set(order_seed=seed, **faults)
        if site is not None:
            self.device.break_call(LIBRARY, site, occurrence)
        try:
            results = variants.VARIANTS[name](self.tools)
        finally:
            self.device.log_calls()
        torch.cuda.synchronize()
        self.device.set(order_seed=0)
        try:
            return variants.digest(results)
        except ValueError as error:
            return str(error)

    def calls(self, name: str) -> list[stub_runtime.CallSite]:
        """Returns the calls of a training that order streams."""
        import variants

        import fsdp_c._C as _C

        self.device.log_calls(LIBRARY)
        variants.VARIANTS[name](self.tools)
        calls = self.device.calls(str(_C.__file__))
        self.device.log_calls()
        return calls

    def differs(self, name: str, *arguments: Any, **faults: int) -> bool:
        """Whether the digest of a training differs on a rank from that without a fault."""
        import torch
        import torch.distributed as dist

        differs = self.digest(name, *arguments, **faults) != self.expected[name]
        any_differs = torch.tensor([int(differs)], device="cuda")
        dist.all_reduce(any_differs, dist.ReduceOp.MAX)
        return bool(any_differs.item())

    def count_until_found(self, bug: Bug) -> int:
        """Returns the number of trainings until one differed, or 0."""
        name = VARIANTS[bug.job]
        found = collections.Counter(call for call in self.calls(name) if matches(call, bug))
        calls = [(site, n) for site, count in found.items() for n in range(count, 0, -1)]
        for number in range(1, LIMIT + 1 if calls else 0):
            site, occurrence = calls[number % len(calls)]
            if self.differs(name, number, site, occurrence):  # another order in each training
                return number
        return 0


def main(rank: int, world: int, file: str) -> dict[str, Any]:
    device = data.join(rank, world, file)
    device.set(idle_ms=IDLE_MS)
    trainings = Trainings(rank, world)
    name = VARIANTS["fsdp"]
    differs_without_fault = [trainings.differs(name, seed) for seed in SEEDS]
    trainings_until_found: dict[str, int] = {}
    for fault, settings in NCCL_FAULTS.items():
        armed = settings if rank == 0 else {}
        trainings_until_found[fault] = int(trainings.differs(name, 0, **armed))
    for fault, bug in BUGS.items():
        if bug.job in VARIANTS and bug.blocks == LAYERS:
            trainings_until_found[fault] = trainings.count_until_found(bug)
    return {
        "differs without fault": differs_without_fault,
        "trainings until found": trainings_until_found,
        "findings": trainings.device.findings(),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])), flush=True)
    os._exit(0)
