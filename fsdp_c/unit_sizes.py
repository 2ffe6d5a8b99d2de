"""Units: those that need too much memory are divided, small neighbours joined."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .mixed_precision import reduce_dtype
from .wrap_policy import Kwargs, bounded


@dataclass(frozen=True, eq=False)
class Unit:
    """Modules that ``fully_shard`` is called on together, and its arguments.

    ``names`` are the modules' names below the root; the root's is empty. ``regathers``: whether
    backward needs the parameters (of an embedding it does not).
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    kwargs: Kwargs
    regathers: bool = True

    def __str__(self) -> str:
        return ", ".join(f"'{name}'" if name else "the root" for name in self.names)


def within(
    units: list[Unit],
    max_transient: int,
    ranks: int | None,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    names: dict[nn.Module, str],
) -> list[Unit]:
    """``units``, those divided that would need more than ``max_transient`` bytes for a while."""
    found: list[Unit] = []
    taken = {module for unit in units for module in unit.modules}
    for unit in units:
        inside = {m for one in unit.modules for m in one.modules()}
        budget = _budget(unit, max_transient, ranks)
        others = ((taken - set(unit.modules)) & inside) | ignored_modules
        policy = unit.kwargs.get("mp_policy")
        parts = bounded(unit.modules, budget, others, ignored_params, policy)
        found += [
            replace(unit, modules=part, names=tuple(names[m] for m in part), regathers=True)
            for part in parts
        ]
        found.append(unit)
    taken = {module for unit in found for module in unit.modules}
    for unit in found:
        _refuse_larger(unit, _budget(unit, max_transient, ranks), taken, ignored_params)
    return found


def _budget(unit: Unit, max_transient: int, ranks: int | None) -> int:
    """Bytes that the unit may gather."""
    params = {p for module in unit.modules for p in module.parameters()}
    policy = unit.kwargs.get("mp_policy")
    return max(1, int(max_transient / _transient_of_a_byte(params, policy, ranks)))


def _refuse_larger(
    unit: Unit, budget: int, taken: set[nn.Module], ignored_params: set[nn.Parameter]
) -> None:
    inside = {m for one in unit.modules for m in one.modules() if m is not one}
    below = {p for module in inside & taken for p in module.parameters()} | ignored_params
    own = [p for m in unit.modules for p in m.parameters() if p not in below]
    size = sum(p.numel() * compute_dtype(p, unit.kwargs.get("mp_policy")).itemsize for p in own)
    if size > budget:
        largest = max(own, key=lambda param: param.numel())
        name = next(n for m in unit.modules for n, p in m.named_parameters() if p is largest)
        raise ValueError(
            f"max_transient is too small for the unit {unit}, which cannot be divided: it gathers "
            f"{size} bytes, '{name}' {tuple(largest.shape)} the most of them, and {budget} would do"
        )


def compute_dtype(param: nn.Parameter, mp_policy: Any) -> torch.dtype:
    dtype = getattr(mp_policy, "param_dtype", None)
    return dtype if dtype is not None and param.is_floating_point() else param.dtype


def _transient_of_a_byte(
    params: Collection[nn.Parameter], mp_policy: Any, ranks: int | None
) -> float:
    """Bytes that a unit needs for a while, for each byte that it gathers: parameters and buffer, or
    gradients, all rows to reduce and this rank's."""
    if ranks is None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    reduced = 0.0
    for param in params:
        computed = compute_dtype(param, mp_policy)
        wanted = reduce_dtype(mp_policy, param.dtype, computed) if mp_policy is not None else None
        row = (wanted or computed).itemsize
        if param.requires_grad:
            reduced = max(reduced, 1 + row * (1 + 1 / ranks) / computed.itemsize)
    return max(2.0, reduced)


def joined(
    units: Iterable[Unit], owned: Mapping[Unit, Collection[nn.Parameter]], smallest: int
) -> list[Unit]:
    """``units`` in their order, with neighbours joined until they gather ``smallest`` bytes.

    A collective costs tens of microseconds whatever it moves, and a model of many small layers
    pays that for each of them three times a step; ``fully_shard([a, b])`` makes one unit of both.

    Neighbours are modules of one parent (layers of a list), one after the other, whose arguments
    are the same. Units of several modules stay as they are, and so does the root.
    """
    found: list[Unit] = []
    waiting: dict[str, list[Unit]] = {}

    def gathered(unit: Unit) -> int:
        policy = unit.kwargs.get("mp_policy")
        return sum(p.numel() * compute_dtype(p, policy).itemsize for p in owned[unit])

    def close(parent: str) -> None:
        group = waiting.pop(parent, [])
        if group:
            found.append(_joined(group))

    for unit in units:
        parent = unit.names[0].rpartition(".")[0]
        size = gathered(unit)
        if len(unit.modules) > 1 or unit.names == ("",) or size >= smallest:
            close(parent)
            found.append(unit)
            continue
        if parent in waiting and not _alike(waiting[parent][0], unit):
            close(parent)
        waiting.setdefault(parent, []).append(unit)
        if sum(map(gathered, waiting[parent])) >= smallest:
            close(parent)
    for parent in list(waiting):
        close(parent)
    return found


def _alike(a: Unit, b: Unit) -> bool:
    """Whether both are sharded in the same way."""
    if a.regathers != b.regathers or a.kwargs.keys() != b.kwargs.keys():
        return False
    return all(a.kwargs[key] is b.kwargs[key] or a.kwargs[key] == b.kwargs[key] for key in a.kwargs)


def _joined(group: list[Unit]) -> Unit:
    modules = tuple(module for unit in group for module in unit.modules)
    return replace(group[0], modules=modules, names=tuple(n for u in group for n in u.names))
