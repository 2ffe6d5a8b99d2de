"""Counts the collectives of an optimizer step, and the bytes that this rank receives in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from . import dry_run
from .dry_run import Call
from .unit_bytes import Sharding


class StepCost(NamedTuple):
    """Collectives of one optimizer step, bytes that this rank receives in them, bytes of shards.

    ``replicas`` counts the received bytes of all-reduces over replicas, ``shards`` all others.
    """

    gathers: int
    all_reduces: int
    shards: int
    replicas: int
    stored: int

    @property
    def received(self) -> int:
        return self.shards + self.replicas

    def subtract(self, other: StepCost) -> StepCost:
        return StepCost(*(a - b for a, b in zip(self, other)))


def measure_step(sharding: Sharding, calls: Sequence[Call]) -> StepCost:
    """Returns the cost of the second of two equal steps of ``calls``."""
    counts: Counter[str] = Counter()
    shards, replicas = 0.0, 0.0
    for event in dry_run.run(sharding, [*calls, *calls]):
        if event.call < len(calls):
            continue
        counts[event.kind] += 1
        if event.kind in ("all_gather", "reduce_scatter"):
            unit = sharding.units[event.unit]
            ranks = int(unit.reshard) if event.label == "smaller" else unit.world
            shards += event.bytes * (ranks - 1) / ranks
        elif event.kind == "all_reduce":
            ranks = sharding.units[event.unit].replicas
            replicas += 2 * event.bytes * (ranks - 1) / ranks
    stored = sum(unit.shard_bytes for unit in sharding.units)
    return StepCost(counts["all_gather"], counts["all_reduce"], int(shards), int(replicas), stored)
