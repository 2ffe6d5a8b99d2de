"""Finds the configuration changes that lower a step's peak memory most: one dry run for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .dry_run import make_step_calls
from .fake_step import Trace
from .step_memory import estimate_memory
from .unit_bytes import Sharding, UnitSizes

_MAX_CHANGES = 3
_MIN_SAVING = 0.01  # fraction of the peak
_BUCKET_MIB = 1024
"""Size of the buckets that are suggested for units with more gradients."""


@dataclass(frozen=True)
class Change:
    """A configuration change, and the bytes by which it lowers the peak."""

    text: str
    saves: int


def find_changes(sharding: Sharding, trace: Trace | None) -> list[Change]:
    """Returns the changes that save the most memory, largest saving first.

    ``trace`` has the events of the model's step. Without a trace, the step has no activations.
    """
    peak = estimate_memory(sharding, make_step_calls(sharding, trace)).peak.total
    changes = []
    for text, changed_sharding, changed_trace, activation_factor in _iterate_candidates(
        sharding, trace
    ):
        calls = make_step_calls(changed_sharding, changed_trace, activation_factor)
        saves = peak - estimate_memory(changed_sharding, calls).peak.total
        if saves > _MIN_SAVING * peak:
            changes.append(Change(text, saves))
    return sorted(changes, key=lambda change: -change.saves)[:_MAX_CHANGES]


_Candidate = tuple[str, Sharding, Trace | None, float]
"""Text, sharding, trace, and a factor that scales the activations."""


def _iterate_candidates(sharding: Sharding, trace: Trace | None) -> Iterator[_Candidate]:
    units = sharding.units
    if any(_has_float32_compute(unit) for unit in units):
        changed = tuple(_set_bfloat16_compute(unit) for unit in units)
        yield (
            "compute in bfloat16: mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32)",
            replace(sharding, units=changed),
            trace,
            0.5,
        )
    # The factor 3/2, because padding alone also makes the input larger.
    with_wider_reduction = [
        u for u in units if u.reduce_input_bytes > u.unsharded_gradient_bytes * 3 // 2
    ]
    if with_wider_reduction:
        params = (param for unit in with_wider_reduction for param in unit.trained_params)
        dtype = min((param.compute_dtype for param in params), key=lambda dtype: dtype.itemsize)
        changed = tuple(
            _set_reduce_dtype(u, dtype) if u in with_wider_reduction else u for u in units
        )
        # reduce_dtype=None would mean the parameters' dtype with torch 2.15.
        text = f"reduce in {str(dtype).removeprefix('torch.')}: reduce_dtype={dtype} in mp_policy"
        yield text, replace(sharding, units=changed), trace, 1.0
    if any(not u.bucket_bytes and u.reduce_input_bytes > _BUCKET_MIB * 2**20 for u in units):
        changed = tuple(replace(u, bucket_bytes=_BUCKET_MIB * 2**20) for u in units)
        text = f"reduce large units in buckets: fsdp_c.set_bucket_cap(model, {_BUCKET_MIB})"
        yield text, replace(sharding, units=changed), trace, 1.0
    unsharded_units = [u for u in units[1:] if u.reshard is False and u.world > 1]
    if unsharded_units:
        changed = tuple(replace(u, reshard=True) if u in unsharded_units else u for u in units)
        freed = replace(sharding, units=changed)
        yield "free parameters after forward: reshard_after_forward=True", freed, trace, 1.0
    if sharding.step_bytes:
        text = "an optimizer with fused=True, whose step needs no copies"
        yield text, replace(sharding, step_bytes=0), trace, 1.0
    if sharding.streams and not sharding.offloads:
        offloaded = replace(sharding, units=tuple(replace(u, offloads=True) for u in units))
        yield (
            "shards and states in CPU memory: offload_policy=CPUOffloadPolicy()",
            offloaded,
            trace,
            1.0,
        )
    if any(u.world > 1 for u in units) and all(map(_can_double_ranks, units)):
        yield "twice as many ranks to shard over", _double_ranks(sharding), trace, 1.0
    if trace is not None:
        yield "half the batch, and twice as many backwards for a step", sharding, trace, 0.5
        states = {unit.state for unit in units[1:]}
        if states:
            text = "checkpoint the units' activations: torch.utils.checkpoint around each block"
            yield text, sharding, checkpoint_states(trace, states), 1.0


def _has_float32_compute(unit: UnitSizes) -> bool:
    return any(param.compute_dtype == torch.float32 for param in unit.params)


def _set_bfloat16_compute(unit: UnitSizes) -> UnitSizes:
    """Returns the unit with compute dtype bfloat16 in place of float32; reduce dtypes stay."""
    params = (
        p._replace(compute_dtype=torch.bfloat16) if p.compute_dtype == torch.float32 else p
        for p in unit.params
    )
    return replace(unit, params=tuple(params))


def _set_reduce_dtype(unit: UnitSizes, dtype: torch.dtype) -> UnitSizes:
    return replace(unit, params=tuple(p._replace(reduce_dtype=dtype) for p in unit.params))


def _can_double_ranks(unit: UnitSizes) -> bool:
    """Whether twice as many ranks can hold the unit. Only dim 0 can be sharded unevenly."""
    return all(p.dim == 0 or p.sizes[p.dim] % (2 * unit.world) == 0 for p in unit.params)


def _double_ranks(sharding: Sharding) -> Sharding:
    units = tuple(replace(u, world=2 * u.world) if u.world > 1 else u for u in sharding.units)
    optimizer_bytes, step_bytes = sharding.optimizer_bytes // 2, sharding.step_bytes // 2
    return replace(sharding, units=units, optimizer_bytes=optimizer_bytes, step_bytes=step_bytes)


def checkpoint_states(trace: Trace, states: set[int]) -> Trace:
    """Returns the trace with activation checkpointing of the ``states``.

    Storages that a state saves for backward are freed after forward and allocated in backward.
    """
    result = Trace()
    sizes: dict[int, int] = {}
    live_storages: dict[int, set[int]] = {}  # state -> live storages that its forward allocated
    saved_storages: dict[int, set[int]] = {}
    freed_storages: set[int] = set()
    current_state = -1
    for name, number, value in trace.events:
        if name == "alloc":
            sizes[number] = value
            if current_state >= 0:
                live_storages[current_state].add(number)
        elif name == "free":
            for storages in live_storages.values():
                storages.discard(number)
            if number in freed_storages:
                freed_storages.discard(number)
                continue
        elif name == "pre_forward" and number in states and not value:
            current_state = number
            live_storages[current_state] = set()
        elif name == "post_forward" and number == current_state:
            result.add_event(name, number, value)
            saved_storages[number] = live_storages[number] - set(value)
            for storage in saved_storages[number]:
                result.add_event("free", storage)
            freed_storages |= saved_storages[number]
            current_state = -1
            continue
        elif name == "pre_backward" and number in saved_storages:
            result.add_event(name, number, value)
            for storage in sorted(saved_storages.pop(number) & freed_storages):
                result.add_event("alloc", storage, sizes[storage])
                freed_storages.discard(storage)
            continue
        result.add_event(name, number, value)
    return result
