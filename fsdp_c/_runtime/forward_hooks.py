"""Replaces the forward hooks that torch registers by C hooks with the same attributes."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch.distributed.fsdp._fully_shard._fsdp_state as torch_state
import torch.nn as nn

import fsdp_c._C as _C

_FULLY_SHARD_FOLDER = os.path.dirname(torch_state.__file__) + os.sep


def replace_hooks(state: Any) -> None:
    """Replaces the forward hooks of the modules of ``state``.

    A hook stays in Python if a module has registered another function in its place. torch's hooks
    for a list of modules own these modules; afterwards they have weak references.
    """
    modules = state._modules
    module_set = weakref.WeakSet(modules) if len(modules) > 1 else None
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    if module_set is not None:
        handles = handles[0].handles
    new_hooks: dict[int, _C.Hook] = {}
    for module in modules:
        for is_post in (False, True):
            hooks = module._forward_hooks if is_post else module._forward_pre_hooks
            for key in [handle.id for handle in handles if handle.id in hooks]:
                hook = hooks[key]
                if not _is_hook(hook, state._post_forward if is_post else state._pre_forward):
                    continue
                if id(hook) not in new_hooks:
                    _weaken_closure(hook, modules)
                    new_hooks[id(hook)] = _C.Hook(state, is_post, hook, module_set)
                hooks[key] = new_hooks[id(hook)]


def _is_hook(hook: Any, method: Any) -> bool:
    """Whether ``hook`` is ``method``, or torch's wrapper of it for lists of modules."""
    if isinstance(hook, MethodType):
        return hook == method
    return (
        isinstance(hook, FunctionType)
        and hook.__code__.co_filename.startswith(_FULLY_SHARD_FOLDER)
        and inspect.unwrap(hook) is inspect.unwrap(method)
    )


class _WeakKey:
    """Equal to a module, with the same hash."""

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)
        self._hash = hash(module)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self._reference() is other


def _weaken_closure(function: Callable[..., Any], modules: tuple[nn.Module, ...]) -> None:
    """Replaces ``modules``, and the set of them, in the closures of torch's hook ``function``."""
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        if isinstance(content, FunctionType):
            _weaken_closure(content, modules)
        elif isinstance(content, nn.Module) and content in modules:
            cell.cell_contents = _WeakKey(content)
        elif isinstance(content, set) and content == set(modules):
            cell.cell_contents = weakref.WeakSet(content)
