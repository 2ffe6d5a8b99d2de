"""Finds configuration changes that avoid collectives or received bytes, one function per rule.

A rule reads the facts of a model and yields changes. The saving of a change is the difference of
two dry runs. Changes that save nothing are not reported, except that of ``find_norms_of_replicas``,
which corrects a result. ``advice.py`` finds the changes that lower the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch.nn as nn

from .._runtime.hints import format_names
from ..names import clean_tensor_name
from .byte_format import format_bytes
from .dry_run import make_step_calls
from .fake_step import Trace
from .step_cost import StepCost, measure_step
from .step_memory import estimate_memory
from .unit_bytes import Layout, ParamSize, Sharding, UnitSizes

_MAX_PADDING = 0.05  # as a fraction of the unpadded bytes
_MAX_GROWTH = 1.25  # of the peak, for a smaller shard mesh without a memory limit


@dataclass(frozen=True)
class Facts:
    """A model and its step.

    Attributes:
        model: The model, sharded or not.
        layout, sharding: Its units.
        trace: One forward and backward; ``None``: all units run in order.
        microbatches: The number of backwards of an optimizer step.
        ranks_per_node: The number of ranks that one node has.
        memory: The memory of a rank in bytes, or ``None``.
    """

    model: nn.Module
    layout: Layout
    sharding: Sharding
    trace: Trace | None = None
    microbatches: int = 1
    ranks_per_node: int = 8
    memory: int | None = None

    def measure(self) -> StepCost:
        """Returns the cost of a step that follows an equal step."""
        backward = make_step_calls(self.sharding, self.trace)
        return measure_step(self.sharding, backward * self.microbatches)


@dataclass(frozen=True)
class Advice:
    """A change of the configuration or of a call, its saving in one step, and the code to write.

    Attributes:
        finding: The units, and the reason for the change.
        code: The line to write.
        saves: The saving.
        describe: Formats the saving.
        microbatches: The number of backwards of the step.
    """

    finding: str
    code: str
    saves: StepCost
    describe: Callable[[StepCost], str] = field(compare=False, repr=False)
    microbatches: int = 1

    def __str__(self) -> str:
        saving = self.describe(self.saves)
        step = "a step" if self.microbatches == 1 else f"a step of {self.microbatches} microbatches"
        return f"{self.finding}{saving and f'. Saves {saving} in {step}'}: {self.code}"


def find_step_advice(facts: Facts) -> list[Advice]:
    """Returns the advice of all rules, largest saving of received bytes first."""
    now = facts.measure()
    found = []
    for rule in _RULES:
        for change in rule(facts):
            after = change.after if isinstance(change.after, StepCost) else change.after.measure()
            saves = now.subtract(after)
            if change.is_saving(saves):
                text = change.finding, change.code
                found.append(Advice(*text, saves, change.describe, facts.microbatches))
    return sorted(found, key=lambda advice: -advice.saves.received)


class _Change(NamedTuple):
    """A candidate: the facts or the cost after the change, and how its saving is reported."""

    finding: str
    code: str
    after: Facts | StepCost
    describe: Callable[[StepCost], str]
    is_saving: Callable[[StepCost], bool] = lambda saves: saves.received > 0


# ---- text ----------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_gathers(saves: StepCost) -> str:
    return f"{_count(saves.gathers, 'gather')} and {format_bytes(saves.received)} received"


def _describe_shards(saves: StepCost) -> str:
    stored, received = format_bytes(saves.stored_bytes), format_bytes(saves.received)
    return f"{stored} of shards and {received} received"


def _describe_all_reduces(saves: StepCost) -> str:
    return f"{_count(saves.all_reduces, 'all-reduce')} and {format_bytes(saves.received)} received"


# ---- units ---------------------------------------------------------------------------------------


def _map_units(facts: Facts, change: Callable[[UnitSizes], UnitSizes]) -> Facts:
    units = tuple(map(change, facts.sharding.units))
    return replace(facts, sharding=replace(facts.sharding, units=units))


def _list_owners(facts: Facts) -> list[list[nn.Module]]:
    """Returns, for each unit, the modules that hold its parameters."""
    owners: list[dict[nn.Module, None]] = [{} for _ in facts.sharding.units]
    for module in facts.model.modules():
        for param in module._parameters.values():
            position = facts.layout.param_indices.get(id(param))
            if position is not None:
                owners[position[0]][module] = None
    return [list(modules) for modules in owners]


def _name_param(facts: Facts, unit: int, index: int) -> str:
    """Returns the name of a parameter from the root of the model."""
    for name, param in facts.model.named_parameters():
        if facts.layout.param_indices.get(id(param)) == (unit, index):
            return clean_tensor_name(name)
    return facts.sharding.units[unit].params[index].name


def _name_target(unit: UnitSizes) -> str:
    """Returns an expression for the first module of a unit."""
    name = unit.name.partition(" [")[0].partition(", ")[0]
    return "model" if name == "(root)" else f'model.get_submodule("{name}")'


# ---- rules ---------------------------------------------------------------------------------------


def find_gathers_of_recomputation(facts: Facts) -> Iterator[_Change]:
    """Finds gathers that a recomputed forward repeats, for example with forward prefetch."""
    if facts.trace is None:
        return
    without_recomputation = replace(facts, trace=_remove_recomputation(facts.trace))
    states = tuple(replace(state, forward_prefetch=()) for state in facts.sharding.states)
    without_prefetch = replace(facts, sharding=replace(facts.sharding, states=states))
    if without_prefetch.measure().gathers < facts.measure().gathers:
        yield _Change(
            "reentrant activation checkpointing repeats the forward prefetch in backward, so "
            "units are gathered once more",
            "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            without_recomputation,
            _describe_gathers,
        )
        return
    yield _Change(
        "activation checkpointing recomputes modules whose units are gathered for that only",
        "call outside of torch.utils.checkpoint the modules whose backward needs no parameters",
        without_recomputation,
        _describe_gathers,
        lambda saves: saves.gathers > 0,
    )


def _remove_recomputation(trace: Trace) -> Trace:
    """Returns the trace without the forwards that backward recomputes."""
    events = []
    in_backward = False
    for event in trace.events:
        in_backward = in_backward or event[0] == "backward"
        if not (in_backward and event[0] in ("pre_forward", "post_forward")):
            events.append(event)
    return Trace(events)


def find_gathers_of_embeddings(facts: Facts) -> Iterator[_Change]:
    """Finds units of embeddings: backward gathers them, although it does not read the weights."""
    for unit, owners in zip(facts.sharding.units, _list_owners(facts)):
        if not unit.unshard_in_backward or not owners or not all(map(_needs_no_weight, owners)):
            continue

        def change(unit: UnitSizes, embedding: UnitSizes = unit) -> UnitSizes:
            return replace(unit, unshard_in_backward=False) if unit is embedding else unit

        yield _Change(
            f"the unit '{unit.name}' is gathered in backward, which does not read the weights of "
            "embeddings",
            f"{_name_target(unit)}.set_unshard_in_backward(False)",
            _map_units(facts, change),
            _describe_gathers,
        )


def _needs_no_weight(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and module.max_norm is None and not module.sparse


def find_gathers_of_frozen_units(facts: Facts) -> Iterator[_Change]:
    """Finds frozen units: each forward gathers them, although their weights do not change."""
    frozen = [
        unit
        for unit in facts.sharding.units
        if unit.params and not unit.trained_params and unit.world > 1 and not unit.offloads
    ]
    if not frozen:
        return

    def change(unit: UnitSizes) -> UnitSizes:
        if unit not in frozen:
            return unit
        return replace(
            unit, reshard=False, settings=unit.settings | {"reshard_after_backward": False}
        )

    kept = sum(p.numel * p.compute_dtype.itemsize for unit in frozen for p in unit.params)
    yield _Change(
        f"{format_names([unit.name for unit in frozen])} are frozen and gathered again for each "
        f"microbatch. Unsharded, they take {format_bytes(kept)} of memory",
        "for each of these units: unit.set_reshard_after_forward(False, recurse=False); "
        "unit.set_reshard_after_backward(False, recurse=False)",
        _map_units(facts, change),
        _describe_gathers,
    )


def find_early_all_reduces(facts: Facts) -> Iterator[_Change]:
    """Finds replicas (HSDP) that all-reduce after each microbatch, not only after the last one."""
    if facts.microbatches < 2 or not any(unit.replicas > 1 for unit in facts.sharding.units):
        return

    def change(unit: UnitSizes) -> UnitSizes:
        return replace(unit, settings=unit.settings | {"all_reduce_grads": False})

    single = replace(facts, microbatches=1)
    last, others = single.measure(), _map_units(single, change).measure()
    count = facts.microbatches - 1
    after = [once + count * repeated for once, repeated in zip(last, others)]
    yield _Change(
        f"the replicas all-reduce gradients after each of {facts.microbatches} microbatches",
        "model.set_requires_all_reduce(is_last_microbatch)  # before each forward",
        StepCost(*after)._replace(stored_bytes=last.stored_bytes),
        _describe_all_reduces,
        lambda saves: saves.all_reduces > 0,
    )


def find_norms_of_replicas(facts: Facts) -> Iterator[_Change]:
    """Finds replicas (HSDP): a gradient norm that is summed over all ranks counts each of them."""
    replicas = max((unit.replicas for unit in facts.sharding.units), default=1)
    if replicas > 1 and any(unit.world > 1 for unit in facts.sharding.units):
        yield _Change(
            f"a gradient norm that is summed over all ranks counts each of {replicas} replicas and "
            f"is {replicas**0.5:.3g} times too large. Sum over the ranks of one replica only, as "
            "these functions do",
            "fsdp_c.clip_grad_norm_(model.parameters(), max_norm), or torch.nn.utils'",
            facts,
            lambda _: "",
            lambda _: True,
        )


def find_padding(facts: Facts) -> Iterator[_Change]:
    """Finds units whose shards have more than 5 % of padding, although dim 1 is divisible."""
    padded = [unit for unit in facts.sharding.units if _compute_padding(unit) > _MAX_PADDING]
    changed = {id(unit): _shard_evenly(unit) for unit in padded}
    padded = [unit for unit in padded if changed[id(unit)] != unit]
    if not padded:
        return
    worst = max(padded, key=_compute_padding)
    movable = [p for p, after in zip(worst.params, changed[id(worst)].params) if p != after]
    moved = max(movable, key=lambda param: _compute_param_padding(param, worst.world))
    name = _name_param(facts, facts.sharding.units.index(worst), worst.params.index(moved))
    yield _Change(
        f"the shards of {format_names([unit.name for unit in padded])} are padded by up to "
        f"{_compute_padding(worst):.0%} on {worst.world} ranks, for example '{name}' with "
        f"{moved.sizes[moved.dim]} rows",
        "fully_shard(..., shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 and "
        f"param.shape[0] % {worst.world} and param.shape[1] % {worst.world} == 0 else None)",
        _map_units(facts, lambda unit: changed.get(id(unit), unit)),
        _describe_shards,
        lambda saves: saves.stored_bytes > 0,
    )


def _compute_param_padding(param: ParamSize, world: int) -> int:
    """Returns the bytes of padding of one parameter on all ranks."""
    return (param.padded_numel(world) * world - param.numel) * param.orig_dtype.itemsize


def _compute_padding(unit: UnitSizes) -> float:
    """Returns the padding of a unit as a fraction of its unpadded bytes."""
    stored = sum(param.numel * param.orig_dtype.itemsize for param in unit.params)
    padding = sum(_compute_param_padding(param, unit.world) for param in unit.params)
    return padding / max(stored, 1)


def _shard_evenly(unit: UnitSizes) -> UnitSizes:
    """Returns the unit with dim 1 sharded where dim 0 is padded and dim 1 is not."""

    def change(param: ParamSize) -> ParamSize:
        sizes, world = param.sizes, unit.world
        if param.dim != 0 or len(sizes) < 2 or sizes[0] % world == 0 or sizes[1] % world:
            return param
        return param._replace(dim=1)

    return replace(unit, params=tuple(map(change, unit.params)))


def find_mixed_dtypes(facts: Facts) -> Iterator[_Change]:
    """Finds units that reduce gradients of several dtypes in the widest of them."""
    units = [u for u in facts.sharding.units if len({p.orig_dtype for p in u.trained_params}) > 1]
    mixed = [u for u in units if len({p.reduce_dtype for p in u.trained_params}) > 1]
    if not mixed:
        return
    dtype = min((p.orig_dtype for u in mixed for p in u.trained_params), key=lambda d: d.itemsize)

    def change(unit: UnitSizes) -> UnitSizes:
        params = tuple(map(change_param, unit.params)) if unit in mixed else unit.params
        return replace(unit, params=params)

    def change_param(param: ParamSize) -> ParamSize:
        compute_dtype = dtype if param.compute_dtype == param.orig_dtype else param.compute_dtype
        return param._replace(orig_dtype=dtype, compute_dtype=compute_dtype, reduce_dtype=dtype)

    yield _Change(
        f"{format_names([unit.name for unit in mixed])} have parameters of several dtypes, whose "
        "gradients are reduced in the widest one. torch's FSDP2 refuses such units",
        f"module.to({dtype})  # before fully_shard",
        _map_units(facts, change),
        lambda saves: f"{format_bytes(saves.received)} received",
    )


def find_smaller_mesh(facts: Facts) -> Iterator[_Change]:
    """Finds models sharded over several nodes, although the ranks of one node can hold them."""
    node, units = facts.ranks_per_node, facts.sharding.units
    worlds = {unit.world for unit in units}
    world = max(worlds, default=1)
    if len(worlds) != 1 or world <= node or world % node or not all(map(_can_replicate, units)):
        return
    nodes = world // node
    sharding = replace(
        _map_units(facts, lambda unit: replace(unit, world=node, replicas=nodes)).sharding,
        optimizer_bytes=facts.sharding.optimizer_bytes * nodes,
        step_bytes=facts.sharding.step_bytes * nodes,
    )
    after = replace(facts, sharding=sharding)
    before, peak = (
        estimate_memory(f.sharding, make_step_calls(f.sharding, f.trace)).peak.total
        for f in (facts, after)
    )
    if peak > (_MAX_GROWTH * before if facts.memory is None else facts.memory):
        return
    cost = after.measure()
    yield _Change(
        f"the model is sharded over {nodes} nodes of {node} ranks. With replicas on each node the "
        f"peak is {format_bytes(peak)}, and only all-reduces cross nodes",
        f'mesh = init_device_mesh("cuda", ({nodes}, {node}), mesh_dim_names=("replicate", '
        '"shard")); fully_shard(..., mesh=mesh)',
        cost._replace(shard_traffic=0),  # these bytes stay inside of nodes
        lambda saves: f"{format_bytes(saves.received)} received through groups that span nodes",
    )


def _can_replicate(unit: UnitSizes) -> bool:
    """Whether a unit has no replicas, no DTensors, and no smaller group to reshard to."""
    has_dtensors = any(param.is_dtensor for param in unit.params)  # on more ranks than unit.world
    return unit.replicas == 1 and isinstance(unit.reshard, bool) and not has_dtensors


_RULES: tuple[Callable[[Facts], Iterator[_Change]], ...] = (
    find_gathers_of_recomputation,
    find_gathers_of_embeddings,
    find_gathers_of_frozen_units,
    find_early_all_reduces,
    find_norms_of_replicas,
    find_padding,
    find_mixed_dtypes,
    find_smaller_mesh,
)
