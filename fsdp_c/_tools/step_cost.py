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

    ``replica_traffic``: bytes received in all-reduces over replicas. ``shard_traffic``: bytes
    received in all other collectives.
    """

    gathers: int
    all_reduces: int
    shard_traffic: int
    replica_traffic: int
    stored_bytes: int

    @property
    def received(self) -> int:
        return self.shard_traffic + self.replica_traffic

    def subtract(self, other: StepCost) -> StepCost:
        return StepCost(*(a - b for a, b in zip(self, other)))


def measure_step(sharding: Sharding, calls: Sequence[Call]) -> StepCost:
    """Returns the cost of the second of two equal steps of ``calls``."""
    counts: Counter[str] = Counter()
    shard_traffic, replica_traffic = 0.0, 0.0
    for event in dry_run.run(sharding, [*calls, *calls]):
        if event.call < len(calls):
            continue
        counts[event.kind] += 1
        if event.kind in ("all_gather", "reduce_scatter"):
            unit = sharding.units[event.unit]
            ranks = int(unit.reshard) if event.label == "smaller" else unit.world
            shard_traffic += event.bytes * (ranks - 1) / ranks
        elif event.kind == "all_reduce":
            ranks = sharding.units[event.unit].replicas
            replica_traffic += 2 * event.bytes * (ranks - 1) / ranks
    return StepCost(
        counts["all_gather"],
        counts["all_reduce"],
        int(shard_traffic),
        int(replica_traffic),
        sum(unit.shard_bytes for unit in sharding.units),
    )
