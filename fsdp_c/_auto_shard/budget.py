"""Splits modules into units of at most a number of bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._runtime import mixed_precision
from .module_tree import is_bare_container, is_sealed


def get_compute_dtype(param: nn.Parameter, mp_policy: Any) -> torch.dtype:
    """Returns the dtype in which ``param`` computes.

    ``mp_policy`` may be any object: ``fully_shard`` raises if it is not a policy.
    """
    dtype = None
    if isinstance(mp_policy, MixedPrecisionPolicy) and param.is_floating_point():
        dtype = mixed_precision.get_param_dtype(mp_policy, param)
    return dtype or param.dtype


@dataclasses.dataclass
class SizeCounter:
    """Computes the gathered bytes of parameters: in the compute dtype, padded for all ranks."""

    ignored_params: set[nn.Parameter]
    mp_policy: Any = None
    ranks: int = 1

    def __call__(self, params: Iterable[nn.Parameter]) -> int:
        total = 0
        for param in params:
            if param not in self.ignored_params:
                compute_dtype = get_compute_dtype(param, self.mp_policy)
                total += count_padded_elements(param, self.ranks) * compute_dtype.itemsize
        return total


def count_padded_elements(param: nn.Parameter, ranks: int) -> int:
    """Returns the elements of a parameter with padding, so that all ranks have equal rows."""
    rows = param.size(0) if param.ndim else 1
    return -(-rows // ranks) * ranks * (param.numel() // max(rows, 1))


def split_unit(
    modules: tuple[nn.Module, ...],
    budget: int,
    excluded: set[nn.Module],
    ignored_params: set[nn.Parameter],
    mp_policy: Any,
    ranks: int,
) -> list[tuple[nn.Module, ...]]:
    """Splits a unit into units of at most ``budget`` bytes. Leaves out the modules ``excluded``.

    Returns an empty list if the unit is small enough.
    """
    excluded_params = {p for module in excluded for p in module.parameters()}
    size_of = SizeCounter(ignored_params | excluded_params, mp_policy, ranks)
    if size_of({p for module in modules for p in module.parameters()}) <= budget:
        return []
    units: list[tuple[nn.Module, ...]] = []
    for module in modules:
        found = {part for unit in units for part in unit}
        units += split_by_budget(module, budget, excluded | found, size_of)
    return units


@dataclasses.dataclass
class _UnitCandidate:
    """Neighboring modules that may become one unit, and the bytes that this unit would gather."""

    size: int
    modules: tuple[nn.Module, ...]


def split_by_budget(
    root: nn.Module,
    budget: int,
    ignored_modules: set[nn.Module],
    size_of: Callable[[Iterable[nn.Parameter]], int],
) -> list[tuple[nn.Module, ...]]:
    """Returns units of at most ``budget`` bytes, as few and as large as the module tree allows.

    A module that fits is not split. For a larger module, the largest children become units until
    the remaining children fit. Neighbors in a ``ModuleList`` or ``Sequential`` are combined while
    their sum fits. A unit exceeds ``budget`` only if one module's parameters do: its own and those
    of children that its forward does not call.

    Raises:
        ValueError: ``budget`` is not positive.
    """
    if budget <= 0:
        raise ValueError(f"auto_shard expects a positive number of bytes, not {budget}")
    units: list[tuple[nn.Module, ...]] = []
    visited: set[nn.Module] = set()

    def split_module(module: nn.Module) -> int:
        """Makes units from parts of the module until the rest fits; returns the rest's bytes."""
        total = size_of(module.parameters())
        if total <= budget or is_sealed(module):
            return total
        remaining, parts = list_parts(module)
        remaining += sum(part.size for part in parts)
        for part in sorted(parts, key=lambda part: -part.size):
            if remaining <= budget:
                break
            units.append(part.modules)
            remaining -= part.size
        return remaining

    def list_parts(module: nn.Module) -> tuple[int, list[_UnitCandidate]]:
        """Returns the bytes of the module's own parameters, and the parts that may become units."""
        own_size = size_of(module.parameters(recurse=False))
        parts: list[_UnitCandidate] = []
        for child in module.children():
            if child in ignored_modules or child in visited:  # registered a second time
                continue
            visited.add(child)
            if is_bare_container(child):
                container_size, container_parts = list_parts(child)
                own_size += container_size
                parts += container_parts
            else:
                remaining = split_module(child)
                if remaining > 0:
                    parts.append(_UnitCandidate(remaining, (child,)))
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            parts = _join_neighbors(parts, budget)
        return own_size, parts

    split_module(root)
    return units


def _join_neighbors(parts: list[_UnitCandidate], budget: int) -> list[_UnitCandidate]:
    """Combines neighbors while their sum is at most ``budget``."""
    runs: list[_UnitCandidate] = []
    for part in parts:
        if runs and runs[-1].size + part.size <= budget:
            runs[-1] = _UnitCandidate(runs[-1].size + part.size, runs[-1].modules + part.modules)
        else:
            runs.append(part)
    return runs
