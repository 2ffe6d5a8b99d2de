"""Order of units, the parameters that they own, and tied weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator

import torch.nn as nn

from .unit import Kwargs, Unit


def iterate_enclosing_units(
    root: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Yields every module, once per registration, with the modules of ``units`` that contain it.

    The containing modules are ordered from the outermost to the innermost.
    """

    def visit(
        module: nn.Module, around: tuple[nn.Module, ...]
    ) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
        yield module, around
        inner = (*around, module) if module in units else around
        for _, child in module.named_children():
            if child is not None:
                yield from visit(child, inner)

    return visit(root, ())


def find_owners(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter] = ()
) -> dict[nn.Parameter, dict[Unit, str]]:
    """Maps each parameter to the units that have it, each with its first name there."""
    unit_of = {module: unit for unit in units for module in unit.modules}
    owners: dict[nn.Parameter, dict[Unit, str]] = {}

    def visit(module: nn.Module, prefix: str, unit: Unit) -> None:
        unit = unit_of.get(module, unit)
        for name, param in module._parameters.items():
            if param is not None and param not in ignored_params:
                owners.setdefault(param, {}).setdefault(unit, prefix + name)
        for name, child in module.named_children():
            if child is not None:
                visit(child, f"{prefix}{name}.", unit)

    visit(model, "", units[-1])
    return owners


def merge_tied(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter]
) -> list[Unit]:
    """Merges or removes units until every parameter is in one unit only; returns the units.

    Raises:
        ValueError: Tied weights are in units with different arguments.
    """
    while True:
        owners = find_owners(model, units, ignored_params)
        shared = next((param for param, holders in owners.items() if len(holders) > 1), None)
        if shared is None:
            return units
        (first, name), (second, other) = list(owners[shared].items())[:2]
        tied = f"'{name}' of the unit {first} and '{other}' of the unit {second} are one parameter"
        if not _are_equal(first.kwargs, second.kwargs):
            raise ValueError(
                f"{tied}, and the two units have different arguments: let the policy select "
                "neither of them, or give them the same arguments"
            )
        inner = first if _is_below(first, second) else second
        if _is_below(first, second) or _is_below(second, first):
            units = [unit for unit in units if unit is not inner]
            outcome = f"{inner} does not become a unit"
            changed = {inner}
        else:
            merged = Unit(first.modules + second.modules, first.names + second.names, first.kwargs)
            units = [merged if unit is first else unit for unit in units if unit is not second]
            outcome = "the two become one unit"
            changed = {first, second}
        unshared = sum(
            p.numel() for p, holders in owners.items() if len(changed & holders.keys()) == 1
        )
        if unshared > shared.numel():
            warnings.warn(f"{tied}: {outcome}", stacklevel=4)


def _are_equal(a: Kwargs, b: Kwargs) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] or a[key] == b[key] for key in a)


def _is_below(inner: Unit, outer: Unit) -> bool:
    below = {m for module in outer.modules for m in module.modules() if m is not module}
    return any(module in below for module in inner.modules)


def sort_units(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Returns the units sorted stably, so that inner units precede the units around them.

    Raises:
        ValueError: Merged units contain one another.
    """
    unit_of = {module: unit for unit in units for module in unit.modules}
    inside: dict[Unit, set[Unit]] = {unit: set() for unit in units}
    for module, around in iterate_enclosing_units(model, unit_of):
        if module in unit_of and around:
            for outer in around:
                if unit_of[outer] is not unit_of[module]:
                    inside[unit_of[outer]].add(unit_of[module])
    ordered: dict[Unit, None] = {}
    pending = list(units)
    while pending:
        ready = next((unit for unit in pending if inside[unit] <= ordered.keys()), None)
        if ready is None:
            names = "; ".join(str(unit) for unit in pending)
            raise ValueError(f"tied weights put these units inside one another: {names}")
        pending.remove(ready)
        ordered[ready] = None
    return list(ordered)


def list_owned_params(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter] = ()
) -> dict[Unit, list[nn.Parameter]]:
    owned: dict[Unit, list[nn.Parameter]] = {unit: [] for unit in units}
    for param, holders in find_owners(model, units, ignored_params).items():
        owned[next(iter(holders))].append(param)
    return owned
