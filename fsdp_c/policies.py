"""Policies of ``auto_shard`` select the modules that become units, and the units' arguments.

Policies do not change the model. Every policy returns the units below the root, inner units before
outer ones. A ``CustomPolicy`` may also return arguments for the root.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, SupportsIndex, TypeAlias

import torch.nn as nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, _Policy

from ._auto_shard.budget import SizeCounter, split_by_budget
from ._auto_shard.module_tree import (
    find_large_ends,
    find_repeated_blocks,
    is_bare_container,
    iterate_children,
    iterate_children_first,
)
from ._auto_shard.unit import Kwargs, Unit

Policy: TypeAlias = (
    Literal["blocks"]
    | SupportsIndex
    | type[nn.Module]
    | Iterable[type[nn.Module]]
    | _Policy
    | Callable[..., bool]
)


def run_policy(
    policy: Policy,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    kwargs: Kwargs,
    always_selected: tuple[type[nn.Module], ...] = (),
    separate_ends: bool = True,
) -> list[Unit]:
    """Returns the units that ``policy`` selects.

    Args:
        policy: See :func:`fsdp_c.auto_shard`.
        ignored_modules: Modules that never become units.
        ignored_params: Parameters that sizes do not include.
        kwargs: The default arguments of units, copied for each unit.
        always_selected: Classes whose instances always become units.
        separate_ends: Whether the policy "blocks" selects embeddings and heads.

    Raises:
        ValueError: The policy selects a container that cannot be a unit, or is another name than
            "blocks". Or "blocks" finds no repeated layers, there are no classes, or no module is an
            instance of them. Other policies may select nothing.
        TypeError: ``policy`` is not a policy.
    """
    if isinstance(policy, _Policy):
        class_units = _run_class_policy(policy, root, ignored_modules, kwargs, always_selected)
        return _sort_in_post_order(root, class_units)
    if isinstance(policy, bool) or policy is None:
        raise TypeError(f"auto_shard does not support the policy {policy!r}")
    if isinstance(policy, (SupportsIndex, str)):
        separate_modules = (
            {m for m in root.modules() if isinstance(m, always_selected)} - ignored_modules - {root}
        )
        excluded = ignored_modules | separate_modules
        size_of = SizeCounter(ignored_params, kwargs.get("mp_policy"))
        ends: list[nn.Module] = []
        if isinstance(policy, SupportsIndex):
            parts = split_by_budget(root, operator.index(policy), excluded, size_of)
        elif policy == "blocks":
            blocks = find_repeated_blocks(root, excluded)
            if separate_ends:
                ends = find_large_ends(root, blocks, excluded, size_of)
            parts = [(m,) for m in (*blocks, *ends)]
        else:
            raise ValueError(f'auto_shard has one policy name, "blocks", and not {policy!r}')
        units = _sort_by_last_module(root, [*parts, *((m,) for m in separate_modules)], kwargs)
        return [_tune_end(unit) if unit.modules[0] in ends else unit for unit in units]
    classes = _parse_classes(policy)
    if classes is not None:
        if not classes:
            raise ValueError(
                "the policy has no classes: pass module classes, or call fully_shard for one unit"
            )
        if not any(isinstance(module, classes) for module in root.modules()):
            names = ", ".join(cls.__name__ for cls in classes)
            raise ValueError(
                f"no module of {type(root).__name__} is an instance of the classes [{names}]: pass "
                "classes of its modules, or call fully_shard for one unit"
            )
        return run_policy(
            ModuleWrapPolicy(classes),
            root,
            ignored_modules,
            ignored_params,
            kwargs,
            always_selected,
        )
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(f"auto_shard does not support the policy {policy!r}")
    selected = _run_callable(policy, root, ignored_modules, ignored_params, always_selected)
    return _make_units(root, ((modules, dict(kwargs)) for modules in selected))


def _make_units(
    root: nn.Module, selected: Iterable[tuple[tuple[nn.Module, ...], Kwargs]]
) -> list[Unit]:
    names = {module: name for name, module in root.named_modules()}
    return [
        Unit(modules, tuple(names[m] for m in modules), arguments)
        for modules, arguments in selected
    ]


def _tune_end(unit: Unit) -> Unit:
    """Returns the unit of an embedding or a head, with other settings.

    Backward does not gather an embedding, whose gradient needs no weights. A head stays unsharded
    after forward, because backward starts with it.
    """
    module, kwargs = unit.modules[0], unit.kwargs
    if isinstance(module, nn.Embedding):
        return replace(unit, unshard_in_backward=module.max_norm is not None or module.sparse)
    if kwargs.get("reshard_after_forward") is None:
        kwargs = kwargs | {"reshard_after_forward": False}
    return replace(unit, kwargs=kwargs)


def _parse_classes(policy: Any) -> tuple[type[nn.Module], ...] | None:
    """Returns the classes of a policy that is one or several module classes; else None.

    Raises:
        TypeError: An element is not a module class.
    """
    if isinstance(policy, type):
        policy = (policy,)
    if callable(policy) or not isinstance(policy, Iterable):
        return None
    policy = tuple(policy)
    for item in policy:
        if not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise TypeError(f"auto_shard expects classes of modules, not {item!r}")
    return policy


# ---- torch's policy objects


def _run_class_policy(
    policy: _Policy,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    kwargs: Kwargs,
    always_selected: tuple[type[nn.Module], ...],
) -> dict[nn.Module, Kwargs]:
    targets = policy._run_policy(root, ignored_modules, dict(kwargs))
    for module in root.modules():
        if isinstance(module, always_selected) and module not in ignored_modules:
            targets.setdefault(module, dict(kwargs))
    names = {module: name for name, module in root.named_modules()}
    for module in targets:
        if module is not root and is_bare_container(module):
            raise ValueError(
                f"the policy {policy!r} selects '{names.get(module)}', a {type(module).__name__} "
                "without forward: it never runs, so its parameters would never be gathered; "
                "select its children"
            )
    return targets


def _sort_in_post_order(root: nn.Module, targets: dict[nn.Module, Kwargs]) -> list[Unit]:
    sorted_modules = [m for m in iterate_children_first(root) if m in targets]
    return _make_units(root, (((module,), targets[module]) for module in sorted_modules))


def _sort_by_last_module(
    root: nn.Module, units: list[tuple[nn.Module, ...]], kwargs: Kwargs
) -> list[Unit]:
    """Sorts ``units`` in post-order of their last modules, so that inner units come first."""
    position = {module: i for i, module in enumerate(iterate_children_first(root))}
    sorted_units = sorted(units, key=lambda unit: max(position[module] for module in unit))
    return _make_units(root, ((unit, dict(kwargs)) for unit in sorted_units))


# ---- callables


def _run_callable(
    policy: Callable[..., bool],
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    always_selected: tuple[type[nn.Module], ...],
) -> list[tuple[nn.Module, ...]]:
    """Calls ``policy(module=, recurse=, nonwrapped_numel=)`` in the order of FSDP1.

    Before the children, the policy gets ``recurse=True`` and the elements of the whole module.
    After the children, it gets ``recurse=False`` and the elements outside of inner units.
    """
    units: dict[nn.Module, int] = {}

    def visit(module: nn.Module, recurse: bool) -> int:
        """Returns the number of elements in units at or below the module."""
        if module in units:
            return units[module]  # registered a second time
        numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
        # If the policy returns False, only instances of `always_selected` become units below.
        recurse = recurse and policy(module=module, recurse=True, nonwrapped_numel=numel)
        wrapped_numel = 0
        if recurse or always_selected:
            inner = [child for _, child in iterate_children(module) if child not in ignored_modules]
            wrapped_numel = sum(visit(child, recurse) for child in inner)
        if module is root or is_bare_container(module):
            return wrapped_numel
        remaining = numel - wrapped_numel
        selected = recurse and policy(module=module, recurse=False, nonwrapped_numel=remaining)
        if selected or isinstance(module, always_selected):
            units[module] = numel
            return numel
        return wrapped_numel

    visit(root, True)
    return [(module,) for module in units]
