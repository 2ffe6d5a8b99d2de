"""Policies of ``auto_shard``: they select the modules that become units, and their arguments.

Policies do not change the model. Every policy returns a list of ``(modules, kwargs)``, one entry
for each unit below the root, inner units before outer ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import torch
import torch.nn as nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, _Policy
from torch.nn.utils.parametrize import is_parametrized

Kwargs = dict[str, Any]
Policy: TypeAlias = (
    Literal["blocks"]
    | int
    | type[nn.Module]
    | Iterable[type[nn.Module]]
    | _Policy
    | Callable[..., bool]
)
Selection = list[tuple[tuple[nn.Module, ...], Kwargs]]


def run_policy(
    policy: Policy,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    kwargs: Kwargs,
    always: tuple[type[nn.Module], ...] = (),
) -> Selection:
    """Returns the units that ``policy`` selects below ``root``.

    Args:
        policy: See :func:`fsdp_c.auto_shard`.
        ignored_modules: Modules that never become units.
        ignored_params: Parameters that do not count for sizes.
        kwargs: The default arguments of units, copied for each unit.
        always: Classes whose instances always become units.

    Raises:
        ValueError: The policy selects a container that cannot be a unit, or nothing.
        TypeError: ``policy`` is not a policy.
    """
    if isinstance(policy, _Policy):
        named = _run_class_policy(policy, root, ignored_modules, kwargs, always)
        return _sort_in_post_order(root, named)
    if isinstance(policy, bool) or policy is None:
        raise TypeError(f"auto_shard does not know the policy {policy!r}")
    if isinstance(policy, (int, str)):
        separate = {m for m in root.modules() if isinstance(m, always)} - ignored_modules - {root}
        excluded = ignored_modules | separate
        if isinstance(policy, int):
            size_of = _SizeCounter(ignored_params, kwargs.get("mp_policy"))
            units = split_by_budget(root, policy, excluded, size_of)
        elif policy == "blocks":
            blocks = find_repeated_blocks(root, excluded)
            size_of = _SizeCounter(ignored_params, kwargs.get("mp_policy"))
            ends = find_large_ends(root, blocks, excluded, size_of)
            return _sort_by_last_module(root, [(m,) for m in (*blocks, *ends, *separate)], kwargs)
        else:
            raise ValueError(f'auto_shard knows one policy by name, "blocks", and not {policy!r}')
        return _sort_by_last_module(root, [*units, *((m,) for m in separate)], kwargs)
    classes = _parse_classes(policy)
    if classes is not None:
        return run_policy(
            ModuleWrapPolicy(classes), root, ignored_modules, ignored_params, kwargs, always
        )
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(f"auto_shard does not know the policy {policy!r}")
    selected = _run_callable(policy, root, ignored_modules, ignored_params, always)
    return [(modules, dict(kwargs)) for modules in selected]


def _parse_classes(policy: Any) -> list[type[nn.Module]] | None:
    """Returns the classes of a policy that is one or several module classes; else None.

    Raises:
        TypeError: An element is not a module class.
    """
    if isinstance(policy, type):
        policy = (policy,)
    if not isinstance(policy, (list, tuple, set, frozenset)):
        return None
    for item in policy:
        if not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise TypeError(f"auto_shard expects classes of modules, not {item!r}")
    return list(policy)


# ---- torch's policy objects


def _run_class_policy(
    policy: _Policy,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    kwargs: Kwargs,
    always: tuple[type[nn.Module], ...],
) -> dict[nn.Module, Kwargs]:
    targets = policy._run_policy(root, ignored_modules, dict(kwargs))
    for module in root.modules():
        if isinstance(module, always) and module not in ignored_modules:
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


def _sort_in_post_order(root: nn.Module, targets: dict[nn.Module, Kwargs]) -> Selection:
    ordered = [m for m in iterate_children_first(root) if m in targets]
    return [((module,), targets[module]) for module in ordered]


def iterate_children_first(root: nn.Module) -> Iterator[nn.Module]:
    """Yields every module once in post-order, children in registration order, ``root`` last."""
    seen = {root}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for _, child in module.named_children():
            if child is not None and child not in seen:
                seen.add(child)
                yield from visit(child)
        yield module

    return visit(root)


def _sort_by_last_module(
    root: nn.Module, units: list[tuple[nn.Module, ...]], kwargs: Kwargs
) -> Selection:
    """Sorts ``units`` in post-order of their last modules, so that inner units come first."""
    position = {module: i for i, module in enumerate(iterate_children_first(root))}
    ordered = sorted(units, key=lambda unit: max(position[module] for module in unit))
    return [(unit, dict(kwargs)) for unit in ordered]


# ---- callables


def _run_callable(
    policy: Callable[..., bool],
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    always: tuple[type[nn.Module], ...],
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
        # If the policy returns False, only instances of `always` become units below the module.
        recurse = recurse and policy(module=module, recurse=True, nonwrapped_numel=numel)
        wrapped = 0
        if recurse or always:
            children = [child for _, child in module.named_children()]
            inner = (child for child in children if child not in ignored_modules)
            wrapped = sum(visit(child, recurse) for child in inner)
        if module is root or is_bare_container(module):
            return wrapped
        rest = numel - wrapped
        selected = recurse and policy(module=module, recurse=False, nonwrapped_numel=rest)
        if selected or isinstance(module, always):
            units[module] = numel
            return numel
        return wrapped

    visit(root, True)
    return [(module,) for module in units]


def is_bare_container(module: nn.Module) -> bool:
    """Whether the module has no forward, so that no hook could gather its parameters."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


# ---- "blocks"


def find_repeated_blocks(root: nn.Module, ignored_modules: set[nn.Module]) -> list[nn.Module]:
    """Returns the repeated layers of ``root``, in post-order.

    These are two or more elements of one class in a ``ModuleList`` or ``Sequential``. The outermost
    ones are selected, so experts inside a layer do not become units. The first of three searches
    with a result decides: modules with children and equal parameter names and shapes, modules with
    children, modules without children.

    Raises:
        ValueError: The model has no repeated layers.
    """
    for search in (_find_same_structure, _find_same_class, _find_same_leaf):
        blocks = _find_repeated(root, ignored_modules, search)
        if blocks:
            return [module for module in iterate_children_first(root) if module in blocks]
    raise ValueError(
        f'the policy "blocks" finds no repeated layers in {type(root).__name__}: no ModuleList or '
        "Sequential with two elements of one class. Pass the classes of the layers, or a number "
        "of bytes"
    )


def find_large_ends(
    root: nn.Module,
    blocks: list[nn.Module],
    ignored_modules: set[nn.Module],
    size_of: Callable[[Iterable[nn.Parameter]], int],
) -> list[nn.Module]:
    """Returns untied embeddings and heads outside the blocks, of at least the largest block's size.

    A tied weight stays in the unit that contains both modules.
    """
    inside = {inner for block in blocks for inner in block.modules()} | ignored_modules
    holders = Counter(id(p) for m in root.modules() for p in m._parameters.values())
    largest = max(size_of(block.parameters()) for block in blocks)

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child in inside or _is_sealed(child):
                continue
            own = list(child.parameters(recurse=False))
            if isinstance(child, (nn.Embedding, nn.Linear)) and not any(child.children()):
                if size_of(own) >= largest and all(holders[id(p)] == 1 for p in own):
                    yield child
            else:
                yield from visit(child)

    return list(dict.fromkeys(visit(root)))


def split_unit(
    modules: tuple[nn.Module, ...],
    budget: int,
    others: set[nn.Module],
    ignored_params: set[nn.Parameter],
    mp_policy: Any,
    ranks: int,
) -> list[tuple[nn.Module, ...]]:
    """Splits a unit into units of at most ``budget`` bytes, without the ``others`` inside it.

    Returns an empty list if the unit is small enough.
    """
    taken = {p for module in others for p in module.parameters()}
    size_of = _SizeCounter(ignored_params | taken, mp_policy, ranks)
    if size_of({p for module in modules for p in module.parameters()}) <= budget:
        return []
    return [unit for module in modules for unit in split_by_budget(module, budget, others, size_of)]


def _find_repeated(
    module: nn.Module,
    ignored_modules: set[nn.Module],
    search: Callable[[list[nn.Module]], set[nn.Module]],
) -> set[nn.Module]:
    children = [
        child
        for child in module.children()
        if child not in ignored_modules and any(True for _ in child.parameters())
    ]
    blocks = search(children) if isinstance(module, (nn.ModuleList, nn.Sequential)) else set()
    repeated = set(blocks)
    for child in children:
        if child not in blocks and not _is_sealed(child):
            repeated |= _find_repeated(child, ignored_modules, search)
    return repeated


def _list_composites(modules: list[nn.Module]) -> list[nn.Module]:
    return [m for m in modules if not is_bare_container(m) and any(True for _ in m.children())]


def _find_same_structure(modules: list[nn.Module]) -> set[nn.Module]:
    counts = Counter((type(m), _get_signature(m)) for m in _list_composites(modules))
    classes = {kind for (kind, _), count in counts.items() if count > 1}
    return {module for module in _list_composites(modules) if type(module) in classes}


def _get_signature(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, param.shape) for name, param in module.named_parameters())


def _find_same_class(modules: list[nn.Module]) -> set[nn.Module]:
    counts = Counter(type(module) for module in _list_composites(modules))
    return {module for module in _list_composites(modules) if counts[type(module)] > 1}


def _find_same_leaf(modules: list[nn.Module]) -> set[nn.Module]:
    leaves = [m for m in modules if not any(True for _ in m.children())]
    counts = Counter(type(module) for module in leaves)
    return {module for module in leaves if counts[type(module)] > 1}


def _is_sealed(module: nn.Module) -> bool:
    """Whether the module's forward uses its children's parameters without calling the children."""
    return isinstance(module, nn.MultiheadAttention) or is_parametrized(module)


# ---- bytes


@dataclasses.dataclass
class _SizeCounter:
    """Computes the gathered bytes of parameters: in the compute dtype, padded for all ranks."""

    ignored_params: set[nn.Parameter]
    mp_policy: Any = None
    ranks: int = 1

    def __call__(self, params: Iterable[nn.Parameter]) -> int:
        dtype: torch.dtype | None = getattr(self.mp_policy, "param_dtype", None)
        total = 0
        for param in params:
            if param not in self.ignored_params:
                computed = dtype if dtype and param.is_floating_point() else param.dtype
                total += count_padded_elements(param, self.ranks) * computed.itemsize
        return total


def count_padded_elements(param: nn.Parameter, ranks: int) -> int:
    """Returns the elements of a parameter with padding, so that all ranks have equal rows."""
    rows = param.size(0) if param.ndim else 1
    return -(-rows // ranks) * ranks * (param.numel() // max(rows, 1))


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
    the rest fits. Neighbors in a ``ModuleList`` or ``Sequential`` are combined while they fit. A
    unit exceeds ``budget`` only if one module's own parameters do.

    Raises:
        ValueError: ``budget`` is not positive.
    """
    if budget <= 0:
        raise ValueError(f"auto_shard expects a positive number of bytes, not {budget}")
    units: list[tuple[nn.Module, ...]] = []

    def shrink(module: nn.Module) -> int:
        """Makes units from parts of the module until the rest fits; returns the rest's bytes."""
        total = size_of(module.parameters())
        if total <= budget or _is_sealed(module):
            return total
        rest, parts = parts_of(module)
        rest += sum(part.size for part in parts)
        for part in sorted(parts, key=lambda part: -part.size):
            if rest <= budget:
                break
            units.append(part.modules)
            rest -= part.size
        return rest

    def parts_of(module: nn.Module) -> tuple[int, list[_UnitCandidate]]:
        """Returns the bytes of the module's own parameters, and the parts that may become units."""
        own = size_of(module.parameters(recurse=False))
        parts: list[_UnitCandidate] = []
        for child in module.children():
            if child in ignored_modules:
                continue
            if is_bare_container(child):
                more, inside = parts_of(child)
                own += more
                parts += inside
            else:
                rest = shrink(child)
                if rest > 0:
                    parts.append(_UnitCandidate(rest, (child,)))
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            parts = _join_neighbors(parts, budget)
        return own, parts

    shrink(root)
    return units


def _join_neighbors(parts: list[_UnitCandidate], budget: int) -> list[_UnitCandidate]:
    """Combines neighbors while they fit into ``budget``."""
    runs: list[_UnitCandidate] = []
    for part in parts:
        if runs and runs[-1].size + part.size <= budget:
            runs[-1] = _UnitCandidate(runs[-1].size + part.size, runs[-1].modules + part.modules)
        else:
            runs.append(part)
    return runs
