"""Searches the module tree for repeated layers, large embeddings and heads, containers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized


def iterate_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and children. An override of ``named_children()`` may yield None as a child."""
    for name, child in module.named_children():
        if child is not None:
            yield name, child


def iterate_children_first(root: nn.Module) -> Iterator[nn.Module]:
    """Yields every module once in post-order, children in registration order, ``root`` last."""
    visited = {root}

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for _, child in iterate_children(module):
            if child not in visited:
                visited.add(child)
                yield from visit(child)
        yield module

    return visit(root)


def is_bare_container(module: nn.Module) -> bool:
    """Whether the module has no forward, so that no hook could gather its parameters."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def is_sealed(module: nn.Module) -> bool:
    """Whether the module's forward uses its children's parameters without calling the children."""
    return isinstance(module, nn.MultiheadAttention) or is_parametrized(module)


def find_repeated_blocks(root: nn.Module, ignored_modules: set[nn.Module]) -> list[nn.Module]:
    """Returns the repeated layers of ``root``, in post-order.

    Repeated layers are two or more elements of one class in a ``ModuleList`` or ``Sequential``.
    Only the outermost are selected, so experts inside a layer do not become units. Three searches
    run until one has a result. They select the elements of a class: if two of them have children
    and equal parameter names and shapes; if two have children; if two have no children.

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
    excluded = {inner for block in blocks for inner in block.modules()} | ignored_modules
    holders = Counter(id(p) for m in root.modules() for p in m._parameters.values())
    largest = max(size_of(block.parameters()) for block in blocks)

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child in excluded or is_sealed(child):
                continue
            own_params = list(child.parameters(recurse=False))
            if isinstance(child, (nn.Embedding, nn.Linear)) and not any(child.children()):
                if size_of(own_params) >= largest and all(holders[id(p)] == 1 for p in own_params):
                    yield child
            else:
                yield from visit(child)

    return list(dict.fromkeys(visit(root)))


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
        if child not in blocks and not is_sealed(child):
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
