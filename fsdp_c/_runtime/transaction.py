"""Rollback for calls that change several modules, and for attributes that a context changes.

KeyboardInterrupt can be raised at any line. Therefore a call takes a snapshot before its first
change, and ``restore`` does not depend on the progress of the call. The outermost function returns
inside its ``try``. After a call that raised, all modules are as before the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._composable_state import _module_state_mapping
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class ModuleSnapshot:
    """A copy of modules' class, attributes, parameters, buffers and hooks.

    Tensors are kept by reference, because sharding does not write to the original parameters. The
    snapshot therefore keeps all full parameters alive.

    Args:
        modules: The modules to save, without their submodules.
        tensors: Parameters and buffers that the call may move to another device.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor]) -> None:
        self._modules = [(module, _Attributes(module)) for module in dict.fromkeys(modules)]
        self._saved_data: dict[torch.Tensor, torch.Tensor] = {
            tensor: tensor.data for tensor in tensors if not is_traceable_wrapper_subclass(tensor)
        }

    def release(self, params: Iterable[nn.Parameter]) -> None:
        """Restores the data of sharded ``params`` that were moved, which frees the moved copies."""
        for param in params:
            if param in self._saved_data and param.device != self._saved_data[param].device:
                param.data = self._saved_data[param]

    def restore(self) -> None:
        """Restores all modules and tensors. If one step raises, the other steps still run."""
        with contextlib.ExitStack() as steps:
            for tensor, data in self._saved_data.items():
                steps.callback(setattr, tensor, "data", data)
            for module, attributes in self._modules:
                steps.callback(attributes.restore, module)


class Transaction:
    """Holds the snapshot of a running call, which calls :meth:`rollback` if it fails."""

    def __init__(self) -> None:
        self._snapshot: ModuleSnapshot | None = None

    def set_snapshot(self, snapshot: ModuleSnapshot) -> None:
        """Sets the snapshot that :meth:`rollback` restores."""
        self._snapshot = snapshot

    def rollback(self) -> None:
        """Restores the snapshot, if one was taken."""
        if self._snapshot is not None:
            self._snapshot.restore()


_EMPTY_DICT: dict[Any, Any] = {}


class _Attributes:
    """A copy of one module's attributes and of the contents of its dicts (parameters, hooks)."""

    def __init__(self, module: nn.Module) -> None:
        self.cls = module.__class__
        self.values: dict[str, Any] = dict(module.__dict__)
        self.contents = {
            name: dict(value) if value else _EMPTY_DICT  # a new dict for each could trigger the gc
            for name, value in self.values.items()
            if isinstance(value, dict)
        }
        self.state = _module_state_mapping.get(module)

    def restore(self, module: nn.Module) -> None:
        module.__class__ = self.cls
        for name, content in self.contents.items():
            # Keep the dict object: hook handles and C code refer to it.
            self.values[name].clear()
            self.values[name].update(content)
        module.__dict__.clear()
        module.__dict__.update(self.values)
        if self.state is None:
            _module_state_mapping.pop(module, None)
        else:
            _module_state_mapping[module] = self.state


def restore_attribute_at_end(owner: Any, name: str, undo: contextlib.ExitStack) -> None:
    """Restores an attribute of the object ``owner`` when ``undo`` ends. Call it before a change.

    An attribute that the object itself does not have now is deleted, which reveals that of its
    class.
    """
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
