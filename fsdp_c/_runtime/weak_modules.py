"""Weak references of states, groups and parameters to the modules that own them.

A module owns its state through its forward hooks, and the state owns the groups and parameters.
If these owned the modules, too, only the garbage collector could free a deleted model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo

from . import roots


class WeakModules:
    """An attribute with a tuple of modules: those of the last assignment that are not freed.

    Args:
        when_freed: Name of a method without arguments. It is called when the last module is freed.
    """

    def __init__(self, when_freed: str | None = None) -> None:
        self._when_freed = when_freed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_weak_{name.lstrip('_')}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        references = instance.__dict__.get(self._name, ())
        return tuple(m for reference in references if (m := reference()) is not None)

    def __set__(self, instance: Any, modules: Iterable[nn.Module]) -> None:
        callback = partial(self._notify, weakref.ref(instance)) if self._when_freed else None
        instance.__dict__[self._name] = tuple(weakref.ref(m, callback) for m in modules)

    def _notify(self, reference: weakref.ref[Any], _: object) -> None:
        instance = reference()
        if instance is not None and not self.__get__(instance):
            getattr(instance, str(self._when_freed))()


class WeakModuleInfo(ParamModuleInfo):
    """torch's ``ParamModuleInfo``, with weak references to the modules.

    In place of a freed module, the attributes return a new module without parameters.
    """

    @property
    def module(self) -> nn.Module:
        return _get_target(self._module)

    @module.setter
    def module(self, value: nn.Module) -> None:
        self._module = weakref.ref(value)

    @property
    def shared_modules(self) -> list[nn.Module]:
        return [_get_target(reference) for reference in self._shared_modules]

    @shared_modules.setter
    def shared_modules(self, value: list[nn.Module]) -> None:
        self._shared_modules = [weakref.ref(module) for module in value]


def _get_target(reference: weakref.ref[nn.Module]) -> nn.Module:
    module = reference()
    return nn.Module() if module is None else module


def leave_lists(state: Any) -> None:
    """Removes the state from the lists of the other states, and empties its prefetch lists.

    The core calls it when the modules of the state are freed. Then neither a copy of a module nor
    an autograd graph has its hooks.
    """
    if state._is_root:
        roots.note_freed(state)
    others = [other for other in state._state_ctx.all_states if other is not state]
    state._state_ctx.all_states = others
    state._states_to_forward_prefetch = state._states_to_backward_prefetch = []
    for other in others:
        for name in ("_states_to_forward_prefetch", "_states_to_backward_prefetch"):
            targets = getattr(other, name)
            if state in targets:
                setattr(other, name, [target for target in targets if target is not state])
