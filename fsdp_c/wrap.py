"""``wrap.plan``: the units that ``auto_shard`` would make of a model.

Planning validates the arguments, runs the policy, merges units with tied weights and orders the
units. Planning does not change the model. ``fsdp_c.plan`` is another function: it also estimates
the memory of the units.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from ._auto_shard.checks import (
    check_nested_wrapping,
    warn_on_overridden_mixed_precision,
)
from ._auto_shard.unit import Kwargs, Unit
from ._auto_shard.unit_order import (
    iterate_enclosing_units,
    list_owned_params,
    merge_tied_units,
    sort_units,
)
from ._auto_shard.unit_sizes import check_unit_sizes, join_small_units, split_large_units
from ._compat.torch_releases import ShardPlacementFnResult
from ._runtime.fsdp_units import require_module
from ._runtime.hints import with_hint
from ._runtime.mixed_precision import make_dtype_error
from .policies import Policy, run_policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims


class UnitKwargs(TypedDict, total=False):
    """Keyword arguments of ``fully_shard`` for one unit."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    dp_mesh_dims: DataParallelMeshDims | None


class ShardKwargs(UnitKwargs, total=False):
    """Keyword arguments for all units. ``bucket_cap_mb`` requires ``shard_fn=replicate``."""

    mesh: DeviceMesh | None
    bucket_cap_mb: float | None


def plan(
    model: nn.Module,
    policy: Policy = "blocks",
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    full_precision_classes: Iterable[type[nn.Module]] = (_BatchNorm,),
    separate_ends: bool = True,
    max_transient: int | None = None,
    min_unit: int | None = None,
    ranks: int | None = None,
    **fully_shard_kwargs: Unpack[ShardKwargs],
) -> list[Unit]:
    """Returns the units that :func:`auto_shard` would make, inner units before outer units.

    Does not change the model, and needs no process group. ``ranks`` is the number of ranks to shard
    over. Other arguments and the exceptions are those of :func:`auto_shard`.

    Raises:
        ValueError: Also if ``ranks`` is not positive.
    """
    classes, kwargs = tuple(full_precision_classes), dict(fully_shard_kwargs)
    modules, params = set(ignored_modules), set(ignored_params)
    units, _ = plan_units(
        model,
        policy,
        modules,
        params,
        classes,
        kwargs,
        separate_ends,
        max_transient,
        ranks,
        min_unit,
    )
    return units


def plan_units(
    model: nn.Module,
    policy: Policy,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    full_precision_classes: tuple[type[nn.Module], ...],
    kwargs: Kwargs,
    separate_ends: bool = True,
    max_transient: int | None = None,
    ranks: int | None = None,
    min_unit: int | None = None,
) -> tuple[list[Unit], set[nn.Parameter]]:
    """Returns the units and all ignored parameters."""
    _check_arguments(model, kwargs.get("mp_policy"), ranks)
    max_transient = _check_size("max_transient", max_transient)
    min_unit = _check_size("min_unit", min_unit)
    check_nested_wrapping(model)
    ignored_modules = {inner for module in ignored_modules for inner in module.modules()}
    ignored_params = ignored_params | {
        param for module in ignored_modules for param in module.parameters()
    }
    if ignored_params:
        kwargs = kwargs | {"ignored_params": ignored_params}
    has_param_dtype = getattr(kwargs.get("mp_policy"), "param_dtype", None) is not None
    overridden = (
        _find_instances(model, full_precision_classes, ignored_modules) if has_param_dtype else {}
    )
    always_selected = full_precision_classes if overridden else ()
    units = run_policy(
        policy, model, ignored_modules, ignored_params, kwargs, always_selected, separate_ends
    )
    root = Unit((model,), ("",), dict(kwargs))
    for unit in units:
        if unit.modules == (model,):  # a CustomPolicy may return arguments for the root
            root = unit
    units = [unit for unit in units if unit is not root] + [root]
    if ranks is None:
        ranks = _count_ranks(kwargs.get("mesh"), kwargs.get("dp_mesh_dims"))
    if overridden:
        warn_on_overridden_mixed_precision(set(map(type, overridden)))
        units = _apply_full_precision(model, units, overridden)
    if max_transient is not None:
        names = {module: name for name, module in model.named_modules()}
        units = split_large_units(
            units, max_transient, ranks, ignored_modules, ignored_params, names
        )
    units = sort_units(model, merge_tied_units(model, units, ignored_params))
    if min_unit is not None:
        owned_params = list_owned_params(model, units, ignored_params)
        units = sort_units(
            model, join_small_units(units, owned_params, min_unit, max_transient, ranks)
        )
    if max_transient is not None:
        check_unit_sizes(list_owned_params(model, units, ignored_params), max_transient, ranks)
    return units, ignored_params


def _check_arguments(model: Any, mp_policy: Any, ranks: int | None) -> None:
    require_module(model, "auto_shard")
    dtype = getattr(mp_policy, "param_dtype", None)
    if isinstance(dtype, str):
        note = f"mp_policy.param_dtype: a torch.dtype, not {dtype!r}: torch.bfloat16, for example."
        raise with_hint(make_dtype_error(dtype), note)
    if ranks is not None and ranks < 1:
        raise ValueError(f"a number of ranks is positive, not {ranks}")


def _check_size(name: str, size: Any) -> int | None:
    """Returns a number of bytes as an int. Infinity is more bytes than any model has."""
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, (float, SupportsIndex)):
        kind = type(size).__name__
        raise TypeError(f"{name} is a number of bytes, such as 2 * 2**30, not {size!r} ({kind})")
    number = size if isinstance(size, float) else operator.index(size)
    if not number > 0:
        raise ValueError(f"{name} is a positive number of bytes, not {size}")
    return sys.maxsize if number == math.inf else int(number)


def _count_ranks(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> int:
    """Returns the number of ranks that a parameter is sharded over."""
    if isinstance(mesh, DeviceMesh) and dims is not None:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
        return math.prod(sizes.get(name, 1) for name in dims.shard_names)
    if isinstance(mesh, DeviceMesh) and mesh.ndim <= 2:
        return mesh.size(mesh.ndim - 1)
    return dist.get_world_size() if dist.is_initialized() else 1


def _find_instances(
    model: nn.Module, classes: tuple[type[nn.Module], ...], ignored: set[nn.Module]
) -> dict[nn.Module, None]:
    instances = (m for m in model.modules() if isinstance(m, classes))
    return dict.fromkeys(m for m in instances if m is not model and m not in ignored)


def _apply_full_precision(
    model: nn.Module, units: list[Unit], overridden: Collection[nn.Module]
) -> list[Unit]:
    """Returns ``units`` with other policies for the units of ``overridden`` modules.

    These units compute in the dtype of their parameters. Their outputs have the compute dtype of
    the unit around them. A ``reduce_dtype`` of less precision is dropped.
    """
    unit_of = {module: unit for unit in units for module in unit.modules}
    own_dtypes = {
        module: next((p.dtype for p in module.parameters()), torch.float32) for module in overridden
    }
    output_dtypes: dict[nn.Module, torch.dtype | None] = {}
    for module, parents in iterate_enclosing_units(model, unit_of):
        if module in overridden:
            outer_policy = unit_of[parents[-1]].kwargs.get("mp_policy")
            outer_dtype = getattr(outer_policy, "param_dtype", None)
            output_dtypes[module] = own_dtypes.get(parents[-1], outer_dtype)
    result = []
    for unit in units:
        if unit.modules[0] in overridden:
            own_dtype = own_dtypes[unit.modules[0]]
            reduce_dtype = unit.kwargs["mp_policy"].reduce_dtype
            if reduce_dtype and torch.promote_types(own_dtype, reduce_dtype) != reduce_dtype:
                reduce_dtype = None
            policy = MixedPrecisionPolicy(
                param_dtype=own_dtype,
                reduce_dtype=reduce_dtype,
                output_dtype=output_dtypes[unit.modules[0]],
            )
            unit = replace(unit, kwargs=unit.kwargs | {"mp_policy": policy})
        result.append(unit)
    return result
