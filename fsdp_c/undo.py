"""All or nothing for calls that change many modules one after the other.

A Ctrl-C can come at any line, or right after any call. So a snapshot is taken before anything is
changed, ``restore`` knows nothing of how far the change got, and the outermost function returns
from within its ``try``: an exception that it lets out means that nothing has happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._composable_state import _module_state_mapping
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Snapshot:
    """Modules as they are now: class, attributes, parameters, buffers, hooks.

    The contents of tensors are kept by reference: what is sharded in place of a parameter leaves
    the parameter's own memory alone. So the snapshot keeps all full parameters alive.

    Args:
        modules: Themselves, without what is below them.
        tensors: Parameters and buffers that may be moved to another device.
    """

    def __init__(self, modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor]) -> None:
        self._modules = [(module, _Attributes(module)) for module in dict.fromkeys(modules)]
        self._data: dict[torch.Tensor, torch.Tensor] = {
            tensor: tensor.data for tensor in tensors if not is_traceable_wrapper_subclass(tensor)
        }

    def release(self, params: Iterable[nn.Parameter]) -> None:
        """Frees copies of ``params`` on other devices: they are sharded, nobody uses them now."""
        for param in params:
            if param in self._data and param.device != self._data[param].device:
                param.data = self._data[param]

    def restore(self) -> None:
        """Puts everything back, as far as possible even where one step fails."""
        with contextlib.ExitStack() as steps:
            for tensor, data in self._data.items():
                steps.callback(setattr, tensor, "data", data)
            for module, attributes in self._modules:
                steps.callback(attributes.restore, module)


class Undo:
    """The snapshot of a call that may be given up; restores it at most once."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None

    def to(self, snapshot: Snapshot) -> None:
        """From now on there is something to undo."""
        self._snapshot = snapshot

    def run(self) -> None:
        """Puts everything back as it was when the snapshot was taken; nothing before that."""
        if self._snapshot is not None:
            self._snapshot.restore()


_EMPTY: dict[Any, Any] = {}


class _Attributes:
    """The attributes of one module; its dicts (parameters, hooks, states) with their contents."""

    def __init__(self, module: nn.Module) -> None:
        self.cls = module.__class__
        self.values: dict[str, Any] = dict(module.__dict__)
        self.contents = {
            name: dict(value) if value else _EMPTY  # most are: the collector counts new dicts
            for name, value in self.values.items()
            if isinstance(value, dict)
        }
        self.state = _module_state_mapping.get(module)

    def restore(self, module: nn.Module) -> None:
        module.__class__ = self.cls
        for name, content in self.contents.items():
            # The dict itself stays: hook handles and C code refer to it.
            self.values[name].clear()
            self.values[name].update(content)
        module.__dict__.clear()
        module.__dict__.update(self.values)
        if self.state is None:
            _module_state_mapping.pop(module, None)
        else:
            _module_state_mapping[module] = self.state
