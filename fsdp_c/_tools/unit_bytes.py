"""Computes the sizes of units, for a sharded model or for the units of a plan."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.tensor import DTensor

from .._auto_shard.budget import get_compute_dtype
from .._auto_shard.unit import Unit
from .._runtime import fsdp_units
from .._runtime.mixed_precision import APPLIED_REDUCE_DTYPE, get_reduce_dtype
from .compare_digests import count_bytes
from .fake_step import StateModules


class ParamSize(NamedTuple):
    """One parameter. ``sizes`` are those of the unsharded local tensor, ``dim`` is the sharded dim.

    ``is_dtensor``: the parameter was a DTensor before ``fully_shard`` (tensor parallelism).
    """

    name: str
    sizes: tuple[int, ...]
    dim: int
    orig_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    requires_grad: bool
    is_dtensor: bool = False

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def padded_numel(self, world: int) -> int:
        """Returns the number of elements of one rank's shard, with padding."""
        rows = self.sizes[self.dim]
        return -(-rows // world) * (self.numel // max(rows, 1))


@dataclass(frozen=True)
class UnitSizes:
    """One unit and the settings that determine its memory. Bytes are those of one rank.

    Attributes:
        name: The unit's name from the root; ``(root)`` for the root's unit.
        state: The index of the unit's state in ``Layout.states``.
        world: The number of ranks that the unit is sharded over.
        replicas: The number of ranks that its shards are replicated over.
        params: The unit's parameters.
        reshard: Whether parameters are freed after forward, or the number of ranks to reshard to.
        offloads: Whether shards, gradients and optimizer states are in CPU memory.
        unshard_in_backward: Whether backward gathers parameters that were freed after forward.
        bucket_bytes: Bytes of gradients at which a reduction is started; 0: one reduction.
        overlaps: Whether reductions overlap with backward on devices with streams.
        settings: Other settings of the parameter group, by their names in ``_dry_run.run``.
    """

    name: str
    state: int
    world: int
    replicas: int
    params: tuple[ParamSize, ...]
    reshard: bool | int
    offloads: bool = False
    unshard_in_backward: bool = True
    bucket_bytes: int = 0
    overlaps: bool = True
    settings: dict[str, bool | int] = field(default_factory=dict)

    @property
    def trained_params(self) -> list[ParamSize]:
        """The parameters that get gradients."""
        return [param for param in self.params if param.requires_grad]

    @property
    def shard_bytes(self) -> int:
        """Bytes of the sharded parameters, with padding."""
        return sum(
            param.padded_numel(self.world) * param.orig_dtype.itemsize for param in self.params
        )

    @property
    def unsharded_gradient_bytes(self) -> int:
        """Bytes of the unsharded gradients in the compute dtype, without padding."""
        return sum(param.numel * param.compute_dtype.itemsize for param in self.trained_params)

    @property
    def reduce_input_bytes(self) -> int:
        """Bytes of the unsharded gradients in the reduce dtype, with padding."""
        sizes = (
            param.padded_numel(self.world) * param.reduce_dtype.itemsize
            for param in self.trained_params
        )
        return sum(sizes) * self.world

    def count_transient_bytes(self, reductions: list[int]) -> int:
        """Returns the peak of bytes beyond the shards while the unit gathers or reduces.

        Args:
            reductions: Unsharded bytes of each reduction, in order. Empty: one reduction.
        """
        casts = any(param.orig_dtype != param.compute_dtype for param in self.params)
        shard = sum(p.padded_numel(self.world) * p.compute_dtype.itemsize for p in self.params)
        padded = shard * self.world
        peak = 2 * padded if self.world > 1 else padded if casts else 0
        remaining, previous, outputs = self.unsharded_gradient_bytes, 0, 0
        total = max(1, sum(reductions))
        for size in reductions or [self.reduce_input_bytes]:
            outputs += size // self.world if self.world > 1 else 0
            peak = max(peak, remaining + previous + size + outputs)
            remaining, previous = remaining - self.unsharded_gradient_bytes * size // total, size
        return peak

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of the unit's reductions; ``None`` if it has no parameters."""
        dtypes = {param.reduce_dtype for param in self.params}
        if len(dtypes) > 1:
            dtypes = {
                functools.reduce(torch.promote_types, (param.orig_dtype for param in self.params))
            }
        return next(iter(dtypes), None)


@dataclass(frozen=True)
class StateSizes:
    """One ``fully_shard`` call.

    Attributes:
        root: The index of the state whose forward is outermost; its own index for a root.
        modules: The number of modules of the call.
        forward_prefetch, backward_prefetch: Indices of the states that the state prefetches.
    """

    root: int
    modules: int = 1
    forward_prefetch: tuple[int, ...] = ()
    backward_prefetch: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sharding:
    """The units of a model, and its memory outside of units.

    Attributes:
        units: The units in module order, including the root's.
        states: The ``fully_shard`` calls in module order.
        buffer_bytes: Bytes of buffers and ignored parameters.
        optimizer_bytes: Bytes of optimizer states on this rank.
        step_bytes: Bytes that the optimizer's step allocates temporarily.
        streams: Whether the device has streams, so that collectives overlap with computation.
    """

    units: tuple[UnitSizes, ...]
    states: tuple[StateSizes, ...]
    buffer_bytes: int = 0
    optimizer_bytes: int = 0
    step_bytes: int = 0
    streams: bool = False

    @property
    def offloads(self) -> bool:
        return any(unit.offloads for unit in self.units)


@dataclass(frozen=True)
class Layout:
    """The units of a model, and the modules and tensors that belong to them.

    Attributes:
        state_modules: The modules of each state.
        states: The ``fully_shard`` calls in module order.
        units: The sizes of each unit.
        modules: The modules of each unit.
        dtypes: Maps the ``id`` of a registered parameter to its compute dtype.
        param_indices: Maps the ``id`` of a registered parameter to (unit, index in the unit).
    """

    state_modules: list[StateModules] = field(default_factory=list)
    states: list[StateSizes] = field(default_factory=list)
    units: list[UnitSizes] = field(default_factory=list)
    modules: list[tuple[nn.Module, ...]] = field(default_factory=list)
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    param_indices: dict[int, tuple[int, int]] = field(default_factory=dict)


# ---- layout of a sharded model -------------------------------------------------------------------


def make_sharded_layout(model: nn.Module) -> Layout:
    """Returns the layout of a sharded model."""
    layout = Layout()
    states = fsdp_units.list_states(model)
    index_of = {state: index for index, state in enumerate(states)}
    for state in states:
        layout.state_modules.append(
            StateModules(tuple(state._modules), state._input_dtype, state._output_dtype)
        )
        layout.states.append(_make_state_sizes(state, layout.states, states, index_of))
    units = list(fsdp_units.iterate_groups(model))
    units_of_root = Counter(layout.states[index_of[state]].root for _, state, _ in units)
    for name, state, group in units:
        unit_index, index = len(layout.units), index_of[state]
        root = layout.states[index].root
        reshard = _get_reshard(state, group, is_root=root == index)
        bucket_bytes = fsdp_units.get_bucket_bytes(state, group, units_of_root[root] == 1)
        layout.units.append(_make_unit_sizes(name, index, group, reshard, bucket_bytes))
        layout.modules.append(tuple(group.modules))
        for number, param in enumerate(group.fsdp_params):
            for registered in fsdp_units.list_registered_params(param):
                layout.dtypes[id(registered)] = fsdp_units.get_compute_dtype(param)
                layout.param_indices[id(registered)] = unit_index, number
    return layout


def _make_state_sizes(
    state: Any, earlier: list[StateSizes], states: list[Any], index_of: dict[Any, int]
) -> StateSizes:
    """Returns the sizes of a state.

    ``earlier`` has the sizes of all states that precede it in module order.
    """
    root = len(earlier)
    for index, sizes in enumerate(earlier):
        if sizes.root == index and fsdp_units.belongs_to_root(state, states[index]):
            root = index
            break

    def find_indices(name: str) -> tuple[int, ...]:
        targets = getattr(state, name, None) or ()
        return tuple(index_of[target] for target in targets if target in index_of)

    return StateSizes(
        root,
        len(state._modules),
        find_indices("_states_to_forward_prefetch"),
        find_indices("_states_to_backward_prefetch"),
    )


_SETTINGS = ("reshard_after_backward", "reduce_grads", "all_reduce_grads")


def _make_unit_sizes(
    name: str, state: int, group: Any, reshard: bool | int, bucket_bytes: int
) -> UnitSizes:
    info = group.mesh_info
    offload = group.offload_policy
    offloads = isinstance(offload, CPUOffloadPolicy) and group.device.type != "cpu"
    settings: dict[str, bool | int] = {key: bool(getattr(group, key)) for key in _SETTINGS}
    settings["max_input_buffers"] = group.reduce_scatter_max_input_buffers
    return UnitSizes(
        name=name,
        state=state,
        world=info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1,
        replicas=info.replicate_mesh_size if isinstance(info, DDPMeshInfo) else 1,
        params=tuple(_make_param_sizes(param) for param in group.fsdp_params),
        reshard=reshard,
        offloads=offloads,
        unshard_in_backward=group.unshard_in_backward,
        bucket_bytes=bucket_bytes,
        overlaps=getattr(group, "_reduction_overlap", None) is not False,
        settings=settings | ({"pinned": bool(offload.pin_memory)} if offloads else {}),
    )


def _make_param_sizes(param: Any) -> ParamSize:
    compute_dtype = fsdp_units.get_compute_dtype(param)
    return ParamSize(
        name=getattr(param, "_param_fqn", None) or param._module_info.param_name,
        sizes=tuple(param._orig_size) or (1,),
        dim=getattr(getattr(param, "fsdp_placement", None), "dim", 0),
        orig_dtype=param.orig_dtype,
        compute_dtype=compute_dtype,
        reduce_dtype=APPLIED_REDUCE_DTYPE.__get__(param) or compute_dtype,
        requires_grad=param.sharded_param.requires_grad,
        is_dtensor=param.is_dtensor,
    )


def _get_reshard(state: Any, group: Any, is_root: bool) -> bool | int:
    """Whether a group reshards after forward, or to how many ranks.

    A root whose first forward has not run yet stays unsharded, like an initialized root.
    """
    may_become_root = state._is_root is None and state._auto_reshard_after_forward
    if (may_become_root and is_root) or not group._reshard_after_forward:
        return False
    if group._use_post_forward_mesh:
        return int(group._smaller_mesh_info.shard_mesh_size)
    return True


# ---- layout of a planned model -------------------------------------------------------------------


def make_planned_layout(
    model: nn.Module, units: list[Unit], mesh: tuple[int, int], on_cpu: bool
) -> Layout:
    """Returns the layout of planned units on a mesh of (replicas, ranks to shard over)."""
    layout = Layout()
    position = {module: index for index, module in enumerate(model.modules())}
    names = {param: name for name, param in model.named_parameters()}
    params = _assign_params(model, units)
    inner_units = sorted(units[:-1], key=lambda unit: position[unit.modules[0]])
    for unit in [units[-1], *inner_units]:  # the root first, then in module order
        policy = unit.kwargs.get("mp_policy")
        casts = getattr(policy, "cast_forward_inputs", True)
        dtype = getattr(policy, "param_dtype", None) if casts else None
        state = len(layout.states)
        layout.states.append(StateSizes(0, len(unit.modules)))
        layout.state_modules.append(
            StateModules(unit.modules, dtype, getattr(policy, "output_dtype", None))
        )
        sizes = [
            _make_planned_param_sizes(names.get(param, ""), param, policy) for param in params[unit]
        ]
        if not sizes:
            continue
        for index, (param, size) in enumerate(zip(params[unit], sizes)):
            layout.dtypes[id(param)] = size.compute_dtype
            layout.param_indices[id(param)] = len(layout.units), index
        layout.units.append(_make_planned_unit_sizes(unit, state, sizes, mesh, on_cpu))
        layout.modules.append(unit.modules)
    return layout


def _assign_params(model: nn.Module, units: list[Unit]) -> dict[Unit, dict[nn.Parameter, None]]:
    """Maps each unit to its parameters, in module order."""
    owner = {module: unit for unit in units for module in unit.modules}
    params: dict[Unit, dict[nn.Parameter, None]] = {unit: {} for unit in units}
    assigned: set[int] = set()
    visited: set[nn.Module] = set()

    def visit(module: nn.Module, unit: Unit) -> None:
        unit = owner.get(module, unit)
        if module in visited:
            return
        visited.add(module)
        ignored = unit.kwargs.get("ignored_params") or ()
        for param in module._parameters.values():
            if param is not None and param not in ignored and id(param) not in assigned:
                assigned.add(id(param))
                params[unit][param] = None
        for child in module.children():
            visit(child, unit)

    visit(model, units[-1])
    return params


def _make_planned_unit_sizes(
    unit: Unit, state: int, params: Iterable[ParamSize], mesh: tuple[int, int], on_cpu: bool
) -> UnitSizes:
    reshard = unit.kwargs.get("reshard_after_forward")
    if reshard is None:
        reshard = state != 0
    if reshard is not True and reshard in (1, mesh[1]):
        reshard = reshard != 1  # a shard of one rank is the whole parameter
    offload: Any = unit.kwargs.get("offload_policy")
    offloads = isinstance(offload, CPUOffloadPolicy) and not on_cpu
    return UnitSizes(
        name=", ".join(fqn or "(root)" for fqn in unit.names),
        state=state,
        world=mesh[1],
        replicas=mesh[0],
        params=tuple(params),
        reshard=reshard,
        offloads=offloads,
        unshard_in_backward=unit.unshard_in_backward,
        settings={"pinned": bool(offload.pin_memory)} if offloads else {},
    )


def _make_planned_param_sizes(name: str, param: nn.Parameter, policy: Any) -> ParamSize:
    compute_dtype = get_compute_dtype(param, policy)
    reduce_dtype = None if policy is None else get_reduce_dtype(policy, param.dtype, compute_dtype)
    dtypes = (param.dtype, compute_dtype, reduce_dtype or compute_dtype)
    sizes = tuple(getattr(param, "_local_tensor", param).shape) or (1,)
    return ParamSize(name, sizes, 0, *dtypes, param.requires_grad, isinstance(param, DTensor))


# ---- tensors outside of units --------------------------------------------------------------------


def count_bytes_outside_units(model: nn.Module, dtypes: dict[int, torch.dtype]) -> int:
    """Returns the bytes of buffers and of parameters that belong to no unit."""
    params = (param for param in model.parameters() if id(param) not in dtypes)
    return sum(map(count_bytes, (*model.buffers(), *params)))
