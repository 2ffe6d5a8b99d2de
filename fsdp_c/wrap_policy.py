"""Policies: which modules of a model become units of their own, and with which arguments.

Nothing here changes the model. Every policy ends as a list of ``(modules, kwargs)``, one entry for
each unit below the root, inner units before outer ones.
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
Wanted = list[tuple[tuple[nn.Module, ...], Kwargs]]


def run_policy(
    policy: Policy,
    root: nn.Module,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    kwargs: Kwargs,
    always: tuple[type[nn.Module], ...] = (),
) -> Wanted:
    """The units that ``policy`` wants below ``root``.

    Args:
        policy: See :func:`fsdp_c.auto_shard`.
        ignored_modules: Modules that never become units.
        ignored_params: Parameters that count for nothing.
        kwargs: What units get where the policy says nothing else; copied for each unit.
        always: Classes whose instances become units whatever the policy says.

    Raises:
        ValueError: the policy names a container that cannot be a unit, or finds nothing.
        TypeError: ``policy`` is none of the kinds of policies.
    """
    if isinstance(policy, _Policy):
        named = _run_class_policy(policy, root, ignored_modules, kwargs, always)
        return _in_post_order(root, named)
    if isinstance(policy, bool) or policy is None:
        raise TypeError(f"auto_shard does not know the policy {policy!r}")
    if isinstance(policy, (int, str)):
        separate = {m for m in root.modules() if isinstance(m, always)} - ignored_modules - {root}
        left = ignored_modules | separate
        if isinstance(policy, int):
            size_of = _SizeOf(ignored_params, kwargs.get("mp_policy"))
            units = budget_units(root, policy, left, size_of)
        elif policy == "blocks":
            blocks = repeated_blocks(root, left)
            ends = large_ends(root, blocks, left, _SizeOf(ignored_params, kwargs.get("mp_policy")))
            return _by_last_module(root, [(m,) for m in (*blocks, *ends, *separate)], kwargs)
        else:
            raise ValueError(f'auto_shard knows one policy by name, "blocks", and not {policy!r}')
        return _by_last_module(root, [*units, *((m,) for m in separate)], kwargs)
    classes = _as_classes(policy)
    if classes is not None:
        return run_policy(
            ModuleWrapPolicy(classes), root, ignored_modules, ignored_params, kwargs, always
        )
    if isinstance(policy, type) or not callable(policy):
        raise TypeError(f"auto_shard does not know the policy {policy!r}")
    found = _run_callable(policy, root, ignored_modules, ignored_params, always)
    return [(modules, dict(kwargs)) for modules in found]


def _as_classes(policy: Any) -> list[type[nn.Module]] | None:
    """The classes of a policy that is a module class or some of them; None for anything else."""
    if isinstance(policy, type):
        policy = (policy,)
    if not isinstance(policy, (list, tuple, set, frozenset)):
        return None
    for one in policy:
        if not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise TypeError(f"auto_shard expects classes of modules, not {one!r}")
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


def _in_post_order(root: nn.Module, targets: dict[nn.Module, Kwargs]) -> Wanted:
    ordered = [m for m in children_first(root) if m in targets]
    return [((module,), targets[module]) for module in ordered]


def children_first(root: nn.Module) -> Iterator[nn.Module]:
    """Every module once, children as registered before their parent, ``root`` last."""
    seen = {root}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for _, child in module.named_children():
            if child is not None and child not in seen:
                seen.add(child)
                yield from visit(child)
        yield module

    return visit(root)


def _by_last_module(root: nn.Module, units: list[tuple[nn.Module, ...]], kwargs: Kwargs) -> Wanted:
    """``units`` in post-order of their last modules, so that inner ones come first."""
    position = {module: i for i, module in enumerate(children_first(root))}
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
    """Asks ``policy(module=, recurse=, nonwrapped_numel=)`` in the order in which FSDP1 asks.

    Going down it is asked with ``recurse=True`` and all elements below the module; coming back up
    with ``recurse=False`` and those that no inner unit took.
    """
    found: dict[nn.Module, int] = {}

    def visit(module: nn.Module, asked: bool) -> int:
        """Asks about the module and all below; the number of elements that units took."""
        if module in found:
            return found[module]  # registered at a second place
        numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
        # Below a module that the policy does not go into only `always` is looked for.
        asked = asked and policy(module=module, recurse=True, nonwrapped_numel=numel)
        taken = 0
        if asked or always:
            children = [child for _, child in module.named_children()]
            taken = sum(visit(child, asked) for child in children if child not in ignored_modules)
        if module is root or is_bare_container(module):
            return taken
        rest = numel - taken
        wanted = asked and policy(module=module, recurse=False, nonwrapped_numel=rest)
        if wanted or isinstance(module, always):
            found[module] = numel
            return numel
        return taken

    visit(root, True)
    return [(module,) for module in found]


def is_bare_container(module: nn.Module) -> bool:
    """A module that is never called and so cannot gather its parameters before it is."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


# ---- "blocks"


def repeated_blocks(root: nn.Module, ignored_modules: set[nn.Module]) -> list[nn.Module]:
    """The repeated layers of ``root``, in post-order.

    Looked for in lists (``ModuleList``, ``Sequential``): at least two elements of one class. The
    outermost such elements win, so that experts inside a layer do not become units. Three searches,
    the first that finds any decides: modules with children and the very same parameters (names and
    shapes) twice; modules with children; single layers.

    Raises:
        ValueError: there is nothing repeated.
    """
    for search in (_same_structure, _same_class, _same_leaf):
        found = _repeated(root, ignored_modules, search)
        if found:
            return [module for module in children_first(root) if module in found]
    raise ValueError(
        f'the policy "blocks" finds no repeated layers in {type(root).__name__}: no ModuleList or '
        "Sequential with two elements of one class. Pass the classes of the layers, or a number "
        "of bytes"
    )


def large_ends(
    root: nn.Module,
    blocks: list[nn.Module],
    ignored_modules: set[nn.Module],
    size_of: Callable[[Iterable[nn.Parameter]], int],
) -> list[nn.Module]:
    """Embeddings and heads beside the blocks that are as large as the largest block.

    Untied ones: a weight that two modules have stays with what is around both.
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


def bounded(
    modules: tuple[nn.Module, ...],
    budget: int,
    others: set[nn.Module],
    ignored_params: set[nn.Parameter],
    mp_policy: Any,
    ranks: int,
) -> list[tuple[nn.Module, ...]]:
    """Units of at most ``budget`` bytes out of one unit, besides those of ``others`` inside of it.

    Empty where it is small enough already.
    """
    taken = {p for module in others for p in module.parameters()}
    size_of = _SizeOf(ignored_params | taken, mp_policy, ranks)
    if size_of({p for module in modules for p in module.parameters()}) <= budget:
        return []
    return [unit for module in modules for unit in budget_units(module, budget, others, size_of)]


def _repeated(
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
    found = set(blocks)
    for child in children:
        if child not in blocks and not _is_sealed(child):
            found |= _repeated(child, ignored_modules, search)
    return found


def _composite(modules: list[nn.Module]) -> list[nn.Module]:
    return [m for m in modules if not is_bare_container(m) and any(True for _ in m.children())]


def _same_structure(modules: list[nn.Module]) -> set[nn.Module]:
    counts = Counter((type(m), _signature(m)) for m in _composite(modules))
    classes = {kind for (kind, _), count in counts.items() if count > 1}
    return {module for module in _composite(modules) if type(module) in classes}


def _signature(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, param.shape) for name, param in module.named_parameters())


def _same_class(modules: list[nn.Module]) -> set[nn.Module]:
    counts = Counter(type(module) for module in _composite(modules))
    return {module for module in _composite(modules) if counts[type(module)] > 1}


def _same_leaf(modules: list[nn.Module]) -> set[nn.Module]:
    leaves = [m for m in modules if not any(True for _ in m.children())]
    counts = Counter(type(module) for module in leaves)
    return {module for module in leaves if counts[type(module)] > 1}


def _is_sealed(module: nn.Module) -> bool:
    """Whether the module uses its children's parameters itself, without calling the children."""
    return isinstance(module, nn.MultiheadAttention) or is_parametrized(module)


# ---- bytes


@dataclasses.dataclass
class _SizeOf:
    """Bytes that parameters take while they are gathered: in the dtype of computation, with rows
    for all ranks."""

    ignored_params: set[nn.Parameter]
    mp_policy: Any = None
    ranks: int = 1

    def __call__(self, params: Iterable[nn.Parameter]) -> int:
        dtype: torch.dtype | None = getattr(self.mp_policy, "param_dtype", None)
        total = 0
        for param in params:
            if param not in self.ignored_params:
                computed = dtype if dtype and param.is_floating_point() else param.dtype
                total += padded(param, self.ranks) * computed.itemsize
        return total


def padded(param: nn.Parameter, ranks: int) -> int:
    """Elements of a parameter with as many rows on each rank."""
    rows = param.size(0) if param.ndim else 1
    return -(-rows // ranks) * ranks * (param.numel() // max(rows, 1))


@dataclasses.dataclass
class _Part:
    """Neighbouring modules that may become one unit, and the bytes that this unit would gather."""

    size: int
    modules: tuple[nn.Module, ...]


def budget_units(
    root: nn.Module,
    budget: int,
    ignored_modules: set[nn.Module],
    size_of: Callable[[Iterable[nn.Parameter]], int],
) -> list[tuple[nn.Module, ...]]:
    """Units of at most ``budget`` bytes, as few and as large as the tree allows.

    A module that fits stays whole. Of one that does not, the largest children become units until
    the rest fits; neighbours in a list (``ModuleList``, ``Sequential``) are put together as long as
    they fit. A unit is larger only where one module's own parameters are.

    Raises:
        ValueError: ``budget`` is not positive.
    """
    if budget <= 0:
        raise ValueError(f"auto_shard expects a positive number of bytes, not {budget}")
    units: list[tuple[nn.Module, ...]] = []

    def shrink(module: nn.Module) -> int:
        """Takes units out of the module until the rest fits, if it can; bytes of the rest."""
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

    def parts_of(module: nn.Module) -> tuple[int, list[_Part]]:
        """Bytes that stay with the module in any case, and what may be taken out of it."""
        own = size_of(module.parameters(recurse=False))
        parts: list[_Part] = []
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
                    parts.append(_Part(rest, (child,)))
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            parts = _joined(parts, budget)
        return own, parts

    shrink(root)
    return units


def _joined(parts: list[_Part], budget: int) -> list[_Part]:
    """Neighbours put together as long as they fit."""
    runs: list[_Part] = []
    for part in parts:
        if runs and runs[-1].size + part.size <= budget:
            runs[-1] = _Part(runs[-1].size + part.size, runs[-1].modules + part.modules)
        else:
            runs.append(part)
    return runs
