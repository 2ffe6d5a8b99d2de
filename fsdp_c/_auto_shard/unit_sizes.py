"""Splits units that use too much memory, and combines small neighbors."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from .._runtime.mixed_precision import get_reduce_dtype
from .budget import count_padded_elements, get_compute_dtype, split_unit
from .unit import Unit
from .unit_order import have_equal_kwargs


def split_large_units(
    units: list[Unit],
    max_transient: int,
    ranks: int,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    names: dict[nn.Module, str],
) -> list[Unit]:
    """Returns ``units``, and splits units that would temporarily use over ``max_transient`` bytes.

    A unit that cannot be split is returned unchanged. Outputs of parts are not cast: the rest of
    the unit computes in the dtype of the parts.
    """
    result: list[Unit] = []
    unit_modules = {module for unit in units for module in unit.modules}
    for unit in units:
        inner_modules = {m for module in unit.modules for m in module.modules()}
        policy: Any = unit.kwargs.get("mp_policy")
        params = {p for module in unit.modules for p in module.parameters()}
        ratio = _estimate_transient_per_byte(params, policy, ranks)
        budget = max(1, int(max_transient / ratio)) if ratio > 0 else sys.maxsize
        excluded = ((unit_modules - set(unit.modules)) & inner_modules) | ignored_modules
        parts = split_unit(unit.modules, budget, excluded, ignored_params, policy, ranks)
        unit_modules |= {module for part in parts for module in part}
        kwargs = unit.kwargs
        if getattr(policy, "output_dtype", None) is not None:
            kwargs = kwargs | {"mp_policy": replace(policy, output_dtype=None)}
        result += [Unit(part, tuple(names[m] for m in part), dict(kwargs)) for part in parts]
        result.append(unit)
    return result


def check_unit_sizes(
    owned: Mapping[Unit, Collection[nn.Parameter]], max_transient: int, ranks: int
) -> None:
    """Checks that no unit temporarily uses more than ``max_transient`` bytes.

    Raises:
        ValueError: A unit exceeds the bound. The message names the unit and its largest parameter.
    """
    for unit, params in owned.items():
        needed_bytes = count_transient_bytes(params, unit.kwargs.get("mp_policy"), ranks)
        if needed_bytes > max_transient:
            largest = max(params, key=lambda param: param.numel())
            name = next(n for m in unit.modules for n, p in m.named_parameters() if p is largest)
            raise ValueError(
                f"max_transient={max_transient} is too small: the unit {unit} temporarily needs "
                f"{needed_bytes} bytes, most of them for '{name}' {tuple(largest.shape)}, and "
                "auto_shard cannot split it"
            )


def count_transient_bytes(params: Iterable[nn.Parameter], mp_policy: Any, ranks: int) -> int:
    """Returns the most bytes that a unit of ``params`` temporarily uses beyond its shard.

    ``ranks`` is 1 for units of ``replicate``.
    """
    params = list(params)
    gathered, reduced, gradients = 0, 0, 0
    for param in params:
        compute_dtype = get_compute_dtype(param, mp_policy)
        elements = count_padded_elements(param, ranks)
        gathered += elements * compute_dtype.itemsize
        if param.requires_grad:
            reduced += elements * _get_reduce_dtype(param, compute_dtype, mp_policy).itemsize
            gradients += param.numel() * compute_dtype.itemsize
    output = reduced // ranks if ranks > 1 else 0  # an all-reduce is in place
    return max(_count_copies(params, mp_policy, ranks) * gathered, gradients + reduced + output)


def _count_copies(params: Iterable[nn.Parameter], mp_policy: Any, ranks: int) -> int:
    """Returns the temporary copies of unsharded parameters: in the gather buffer, and as tensors.

    On one rank, unsharded parameters are cast shards, or without a cast aliases of the shards.
    """
    if ranks > 1:
        return 2
    return int(any(get_compute_dtype(param, mp_policy) != param.dtype for param in params))


def _get_reduce_dtype(
    param: nn.Parameter, compute_dtype: torch.dtype, mp_policy: Any
) -> torch.dtype:
    dtype = (
        get_reduce_dtype(mp_policy, param.dtype, compute_dtype) if mp_policy is not None else None
    )
    return dtype or compute_dtype


def _estimate_transient_per_byte(
    params: Collection[nn.Parameter], mp_policy: Any, ranks: int
) -> float:
    """Returns the temporary bytes of a unit per byte that it gathers.

    The result is the larger of two sums: parameters with gather buffer, and gradients with
    reduction buffers.
    """
    reduced = 0.0
    for param in params:
        compute_dtype = get_compute_dtype(param, mp_policy)
        reduced_itemsize = _get_reduce_dtype(param, compute_dtype, mp_policy).itemsize
        if param.requires_grad:
            buffers = 1 + 1 / ranks if ranks > 1 else 1
            reduced = max(reduced, 1 + reduced_itemsize * buffers / compute_dtype.itemsize)
    return max(float(_count_copies(params, mp_policy, ranks)), reduced)


def join_small_units(
    units: Iterable[Unit],
    owned: Mapping[Unit, Collection[nn.Parameter]],
    min_unit: int,
    max_transient: int | None,
    ranks: int,
) -> list[Unit]:
    """Returns ``units`` in order, with small neighbors combined.

    Neighbors are added until the unit gathers at least ``min_unit`` bytes. A neighbor with which
    it would temporarily use more than ``max_transient`` bytes is not added. A collective has a
    fixed cost of tens of microseconds, which each unit has three times per step.

    Neighbors are consecutive children of one parent with equal arguments. The root and units of
    several modules are not combined.
    """
    result: list[Unit] = []
    waiting: dict[str, list[Unit]] = {}

    def count_gathered(unit: Unit) -> int:
        policy = unit.kwargs.get("mp_policy")
        return sum(p.numel() * get_compute_dtype(p, policy).itemsize for p in owned[unit])

    def can_join(parent: str, unit: Unit) -> bool:
        params = [param for member in (*waiting[parent], unit) for param in owned[member]]
        needed_bytes = count_transient_bytes(params, unit.kwargs.get("mp_policy"), ranks)
        return max_transient is None or needed_bytes <= max_transient

    def join_waiting(parent: str) -> None:
        group = waiting.pop(parent, [])
        if group:
            result.append(_join_units(group))

    for unit in units:
        parent = unit.names[0].rpartition(".")[0]
        size = count_gathered(unit)
        if len(unit.modules) > 1 or unit.names == ("",) or size >= min_unit:
            join_waiting(parent)
            result.append(unit)
            continue
        if parent in waiting and not (
            _have_equal_arguments(waiting[parent][0], unit) and can_join(parent, unit)
        ):
            join_waiting(parent)
        waiting.setdefault(parent, []).append(unit)
        if sum(map(count_gathered, waiting[parent])) >= min_unit:
            join_waiting(parent)
    for parent in list(waiting):
        join_waiting(parent)
    return result


def _have_equal_arguments(a: Unit, b: Unit) -> bool:
    return a.unshard_in_backward == b.unshard_in_backward and have_equal_kwargs(a.kwargs, b.kwargs)


def _join_units(group: list[Unit]) -> Unit:
    modules = tuple(module for unit in group for module in unit.modules)
    return replace(group[0], modules=modules, names=tuple(n for u in group for n in u.names))
