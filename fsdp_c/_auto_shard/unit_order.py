"""Order of units, the parameters that they own, and tied weights."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator

import torch.nn as nn

from .module_tree import iterate_children
from .unit import Kwargs, Unit


def iterate_enclosing_units(
    root: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Yields every module, once per registration, with the modules of ``units`` that contain it.

    The containing modules are ordered from the outermost to the innermost.
    """

    def visit(
        module: nn.Module, enclosing: tuple[nn.Module, ...]
    ) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
        yield module, enclosing
        inner = (*enclosing, module) if module in units else enclosing
        for _, child in iterate_children(module):
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
        for name, child in iterate_children(module):
            visit(child, f"{prefix}{name}.", unit)

    visit(model, "", units[-1])
    return owners


def merge_tied_units(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter]
) -> list[Unit]:
    """Merges or removes units until every parameter is in one unit only; returns the units.

    Raises:
        ValueError: Tied weights are in units with different arguments.
    """
    while True:
        owners = find_owners(model, units, ignored_params)
        shared_param = next((param for param, holders in owners.items() if len(holders) > 1), None)
        if shared_param is None:
            return units
        (first, first_name), (second, second_name) = list(owners[shared_param].items())[:2]
        description = (
            f"'{first_name}' of the unit {first} and '{second_name}' of the unit {second} "
            "are one parameter"
        )
        if not have_equal_kwargs(first.kwargs, second.kwargs):
            raise ValueError(
                f"{description}, and the two units have different arguments: let the policy select "
                "neither of them, or give them the same arguments"
            )
        inner = first if _is_below(first, second) else second
        if _is_below(first, second) or _is_below(second, first):
            units = [unit for unit in units if unit is not inner]
            outcome = f"{inner} does not become a unit"
            changed_units = {inner}
        else:
            merged = Unit(first.modules + second.modules, first.names + second.names, first.kwargs)
            units = [merged if unit is first else unit for unit in units if unit is not second]
            outcome = "the two become one unit"
            changed_units = {first, second}
        # Warns if the dropped unit has another parameter, or if the other parameters of the merged
        # units have more elements than the tied weight.
        other_elements = sum(
            p.numel() for p, holders in owners.items() if len(changed_units & holders.keys()) == 1
        )
        if other_elements > shared_param.numel():
            warnings.warn(f"{description}: {outcome}", stacklevel=4)


def have_equal_kwargs(a: Kwargs, b: Kwargs) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] or a[key] == b[key] for key in a)


def _is_below(inner: Unit, outer: Unit) -> bool:
    inner_modules = {m for module in outer.modules for m in module.modules() if m is not module}
    return any(module in inner_modules for module in inner.modules)


def sort_units(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Returns the units sorted stably, so that inner units precede the units around them.

    Raises:
        ValueError: Merged units contain one another.
    """
    unit_of = {module: unit for unit in units for module in unit.modules}
    inner_units: dict[Unit, set[Unit]] = {unit: set() for unit in units}
    for module, enclosing in iterate_enclosing_units(model, unit_of):
        if module in unit_of and enclosing:
            for outer in enclosing:
                if unit_of[outer] is not unit_of[module]:
                    inner_units[unit_of[outer]].add(unit_of[module])
    sorted_units: dict[Unit, None] = {}
    pending = list(units)
    while pending:
        next_unit = next(
            (unit for unit in pending if inner_units[unit] <= sorted_units.keys()), None
        )
        if next_unit is None:
            names = "; ".join(str(unit) for unit in pending)
            raise ValueError(f"tied weights put these units inside one another: {names}")
        pending.remove(next_unit)
        sorted_units[next_unit] = None
    return list(sorted_units)


def list_owned_params(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter] = ()
) -> dict[Unit, list[nn.Parameter]]:
    """Maps each unit to the parameters that it owns. A parameter in several units has one owner."""
    owned: dict[Unit, list[nn.Parameter]] = {unit: [] for unit in units}
    for param, holders in find_owners(model, units, ignored_params).items():
        owned[next(iter(holders))].append(param)
    return owned
