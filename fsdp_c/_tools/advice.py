"""Finds the changes that lower the peak memory of a step most, by a dry run with each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .dry_run import step_calls
from .fake_step import Trace
from .step_memory import estimate
from .unit_bytes import Sharding, UnitSizes

_SHOWN = 3
_WORTH = 0.01  # of the peak


@dataclass(frozen=True)
class Change:
    """A change, and the bytes by which it lowers the peak."""

    text: str
    saves: int


def changes(sharding: Sharding, trace: Trace | None) -> list[Change]:
    """Returns the changes that save most, the best first.

    ``trace`` has the events of the model's step. ``None``: the step has no activations.
    """
    peak = estimate(sharding, step_calls(sharding, trace)).peak.total
    useful = []
    for text, other, events, factor in _candidates(sharding, trace):
        saves = peak - estimate(other, step_calls(other, events, factor)).peak.total
        if saves > _WORTH * peak:
            useful.append(Change(text, saves))
    return sorted(useful, key=lambda change: -change.saves)[:_SHOWN]


_Candidate = tuple[str, Sharding, Trace | None, float]


def _candidates(sharding: Sharding, trace: Trace | None) -> Iterator[_Candidate]:
    units = sharding.units
    if any(_computes_in_float32(unit) for unit in units):
        other = tuple(_computed_in_bfloat16(unit) for unit in units)
        yield (
            "compute in bfloat16: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32)",
            replace(sharding, units=other),
            trace,
            0.5,
        )
    wide = [u for u in units if u.reduced > u.whole_gradients * 3 // 2]
    if wide:
        other = tuple(_reduced_as_computed(u) if u in wide else u for u in units)
        narrow = replace(sharding, units=other)
        yield "reduce in bfloat16: reduce_dtype=None in mp_policy", narrow, trace, 1.0
    kept = [u for u in units[1:] if u.reshard is False and u.world > 1]
    if kept:
        other = tuple(replace(u, reshard=True) if u in kept else u for u in units)
        freed = replace(sharding, units=other)
        yield "free parameters after forward: reshard_after_forward=True", freed, trace, 1.0
    if sharding.step:
        text = "an optimizer with fused=True, whose step needs no copies"
        yield text, replace(sharding, step=0), trace, 1.0
    if sharding.streams and not sharding.offloads:
        away = replace(sharding, units=tuple(replace(u, offloads=True) for u in units))
        yield "shards and states in CPU memory: offload_policy=CPUOffloadPolicy()", away, trace, 1.0
    if any(u.world > 1 for u in units):
        yield "twice as many ranks to shard over", _on_twice_the_ranks(sharding), trace, 1.0
    if trace is not None:
        yield "half the batch, and twice as many backwards for a step", sharding, trace, 0.5
        blocks = {unit.state for unit in units[1:]}
        if blocks:
            text = "checkpoint the units' activations: torch.utils.checkpoint around each block"
            yield text, sharding, checkpointed(trace, blocks), 1.0


def _computes_in_float32(unit: UnitSizes) -> bool:
    return any(param.compute == torch.float32 for param in unit.params)


def _computed_in_bfloat16(unit: UnitSizes) -> UnitSizes:
    """Returns the unit with bfloat16 for computation, and the same dtypes for reduction."""
    params = (
        p._replace(compute=torch.bfloat16) if p.compute == torch.float32 else p for p in unit.params
    )
    return replace(unit, params=tuple(params))


def _reduced_as_computed(unit: UnitSizes) -> UnitSizes:
    """Returns the unit with gradients that are reduced in the dtype of computation."""
    return replace(unit, params=tuple(p._replace(reduce=p.compute) for p in unit.params))


def _on_twice_the_ranks(sharding: Sharding) -> Sharding:
    units = tuple(replace(u, world=2 * u.world) if u.world > 1 else u for u in sharding.units)
    optimizer, step = sharding.optimizer // 2, sharding.step // 2
    return replace(sharding, units=units, optimizer=optimizer, step=step)


def checkpointed(trace: Trace, blocks: set[int]) -> Trace:
    """Returns the trace with activation checkpointing of the states ``blocks``.

    Storages that a state saves for backward are freed after forward and allocated in backward.
    """
    made = Trace()
    sizes: dict[int, int] = {}
    inside: dict[int, set[int]] = {}  # state -> living storages made in its forward
    saved: dict[int, set[int]] = {}
    gone: set[int] = set()
    current = -1
    for what, which, value in trace.events:
        if what == "alloc":
            sizes[which] = value
            if current >= 0:
                inside[current].add(which)
        elif what == "free":
            for storages in inside.values():
                storages.discard(which)
            if which in gone:
                gone.discard(which)
                continue
        elif what == "pre_forward" and which in blocks and not value:
            current = which
            inside[current] = set()
        elif what == "post_forward" and which == current:
            made.note(what, which, value)
            saved[which] = inside[which] - set(value)
            for storage in saved[which]:
                made.note("free", storage)
            gone |= saved[which]
            current = -1
            continue
        elif what == "pre_backward" and which in saved:
            made.note(what, which, value)
            for storage in sorted(saved.pop(which) & gone):
                made.note("alloc", storage, sizes[storage])
                gone.discard(storage)
            continue
        made.note(what, which, value)
    return made
