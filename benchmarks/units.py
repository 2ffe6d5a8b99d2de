"""Transient memory of a step on real ranks, in units of one group's parameters: transport included.

Method. ``--ranks`` gloo processes; ``--groups`` equal groups of one square weight below a root
without parameters, resharded after forward, ``--rows`` rows of activations: so few that these,
which any step needs, hardly count. What counts is resident memory (``VmHWM``, reset at the begin of
each group's forward and backward) above that at the step's begin, less the gradient shards that are
there already when it is read: those are produced to stay. A unit is a group's full parameters in
the dtype of the computation. After two steps of warm-up the least of three steps counts: memory
that the C library keeps free is given back before each, and so are the buffers that fsdp_c keeps.
Ours is measured twice, the second time with reductions that overlap with backward
(``set_reduction_overlap``). ``memory.py`` counts allocations instead, over a fake group that needs
no memory of its own.

    python benchmarks/units.py [--groups N] [--side N] [--rows N] [--ranks N] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from meter import give_back, peak, reset_peak, resident
from ranks import start_ranks
from report import POLICIES, FullyShard, implementations, table, write_json
from torch.distributed.device_mesh import init_device_mesh

import fsdp_c

STEPS = 3
OVERLAP = "with overlap"


class Watched:
    """A model whose groups say how much memory there was since the last of them said so."""

    def __init__(
        self, shard: FullyShard, precision: str, groups: int, side: int, rows: int
    ) -> None:
        policy = POLICIES[precision]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(groups)))
        for group in self.model:
            group.register_forward_pre_hook(self._say)
            group.register_full_backward_pre_hook(self._say)
            shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        shard(self.model, mesh=mesh, mp_policy=policy)
        self.x = torch.randn(rows, side, requires_grad=True)
        self.unit = side * side * (policy.param_dtype or torch.float32).itemsize
        self.begin = self.highest = 0

    def _say(self, *_: object) -> None:
        kept = sum(
            p.grad.to_local().untyped_storage().nbytes()
            for p in self.model.parameters()
            if p.grad is not None
        )
        self.highest = max(self.highest, peak() - self.begin - kept)
        reset_peak()

    def _most(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """The most units during a call, and what it returned."""
        self.highest = 0
        reset_peak()
        returned = call()
        self._say()
        return self.highest / self.unit, returned

    def step(self) -> tuple[float, float]:
        """The most units in forward and in backward."""
        self.model.zero_grad(set_to_none=True)
        give_back()
        dist.barrier()
        self.begin = resident()
        forward, loss = self._most(lambda: self.model(self.x).sum())
        backward, _ = self._most(loss.backward)
        return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a step on real ranks, in units.")
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--side", type=int, default=4096, help="rows and columns of a weight")
    parser.add_argument("--rows", type=int, default=16, help="of the input")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(options.ranks):
        return
    results: dict[str, Any] = {"groups": options.groups, "side": options.side}
    lines = []
    for precision in POLICIES:
        found = {}
        shards = implementations()
        for name in [*shards, OVERLAP]:
            shard = shards.get(name, fsdp_c.fully_shard)
            watched = Watched(shard, precision, options.groups, options.side, options.rows)
            if name == OVERLAP:
                fsdp_c.set_reduction_overlap(watched.model, overlap=True)
            steps = [watched.step() for _ in range(2 + STEPS)][2:]
            found[name] = dict(zip(("forward", "backward"), map(min, zip(*steps))))
            del watched
        results[precision] = found
        for phase in ("forward", "backward"):
            stock, ours = found["stock"][phase], found["ours"][phase]
            lines.append([precision, phase, stock, ours, stock / ours, found[OVERLAP][phase]])
    if dist.get_rank() == 0:
        print("peak resident memory of a step, in units of one group's full parameters")
        titles = ["precision", "phase", "stock", "ours", "stock/ours", OVERLAP]
        print(table(titles, lines))
        write_json(options.json, "units", results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
