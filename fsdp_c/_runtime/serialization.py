"""Remedies for failing copies, pickles and loads of sharded modules.

``init.py`` adds these methods to the class ``FSDP<Name>`` of a module. ``load_state_dict`` adds a
note to torch's exceptions. ``__deepcopy__``, and ``__reduce_ex__`` below ``torch.save``, raise the
exception that torch or pickle would raise, with a note.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import re
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp._fully_shard._fully_shard as torch_fully_shard
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._compat import patches
from .hints import add_hint, format_names, get_class_name, with_hint


def _get_overridden_method(module: nn.Module, name: str, method: Any) -> Any:
    """Returns the bound method that ``method`` overrides in the module's class hierarchy."""
    cls = next(cls for cls in type(module).__mro__ if vars(cls).get(name) is method)
    return getattr(super(cls, module), name)


def refuse_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    """``__deepcopy__`` of sharded modules. Raises torch's AssertionError with a remedy."""
    name = get_class_name(args[0]) if args and isinstance(args[0], nn.Module) else "the module"
    error = AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization."
    )
    raise with_hint(
        error,
        f"Copy {name} before it is sharded, or create a second module and call "
        "second.load_state_dict(first.state_dict()); for averages there is fsdp_c.ShardedEMA.",
    )


def _reduce_ex(self: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of sharded modules. Adds a remedy to the failure of ``torch.save``.

    Other picklers may support the class, so the method raises only for ``torch.save``.
    """
    cls = type(self)
    caller = sys._getframe(1).f_globals.get("__name__")
    if caller == "torch.serialization" and not hasattr(sys.modules[cls.__module__], cls.__name__):
        error = pickle.PicklingError(
            f"Can't pickle {cls}: attribute lookup {cls.__name__} on {cls.__module__} failed"
        )
        raise with_hint(
            error,
            f"Save the state of {get_class_name(self)}, not the module: "
            "torch.distributed.checkpoint.save({'model': model.state_dict()}, "
            "checkpoint_id=folder) on all ranks.",
        )
    return _get_overridden_method(self, "__reduce_ex__", _reduce_ex)(protocol)


@functools.wraps(nn.Module.load_state_dict)
def _load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return _get_overridden_method(self, "load_state_dict", _load_state_dict)(*args, **kwargs)
    except RuntimeError as error:
        state = args[0] if args else kwargs.get("state_dict")
        with contextlib.suppress(Exception):  # named_parameters() may be overridden, and raise
            note = _find_loading_hint(self, state) if isinstance(state, Mapping) else None
            if note is not None:
                add_hint(error, note)
        raise


_WRAPPER_PREFIXES = re.compile(r"^((module|_orig_mod)\.)+")
"""Matches the names that DistributedDataParallel and torch.compile add before a key."""


def _find_loading_hint(module: nn.Module, state: Mapping[str, Any]) -> str | None:
    # Not state_dict(): its hooks may issue collectives, and this load may fail on one rank only.
    own_state: dict[str, torch.Tensor] = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    name = get_class_name(module)
    if not own_state.keys() & state.keys():
        stripped_names = {_WRAPPER_PREFIXES.sub("", key) for key in state}
        if own_state.keys() & stripped_names:
            return (
                f"The keys are those of {name} in a wrapper (DistributedDataParallel, "
                "torch.compile): fsdp_c.load_full_state_dict(model, state, rename=lambda name: "
                "fsdp_c.names.clean_tensor_name(name, ddp=True))."
            )
    full_names = [
        key
        for key, value in state.items()
        if isinstance(own_state.get(key), DTensor)
        and isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
    ]
    if full_names:
        return (
            f"{format_names(full_names)} are full tensors, and those of {name} are sharded: use "
            "fsdp_c.load_full_state_dict(model, state), where rank 0 alone needs the state."
        )
    mismatches = [
        f"{key}: {tuple(value.shape)} in the state dict, {tuple(own_state[key].shape)} in the model"
        for key, value in state.items()
        if isinstance(own_state.get(key), torch.Tensor)
        and isinstance(value, torch.Tensor)
        and value.shape != own_state[key].shape
    ]
    if mismatches:
        return f"Create {name} with the sizes of this state dict: " + ("; ".join(mismatches[:3]))
    return None


_classes_without_deepcopy: weakref.WeakSet[type] = weakref.WeakSet()
"""The classes ``FSDP<Name>`` that were made with :func:`refuse_deepcopy`."""

METHODS = {"__reduce_ex__": _reduce_ex, "load_state_dict": _load_state_dict}
"""The methods that :func:`add_methods` adds to the classes of sharded modules."""


def add_methods(cls: type) -> None:
    """Adds :data:`METHODS` to a class ``FSDP<Name>``."""
    for name, method in METHODS.items():
        if name not in vars(cls):
            patches.set_class_attribute(cls, name, method)
    if vars(cls).get("__deepcopy__") is refuse_deepcopy:
        _classes_without_deepcopy.add(cls)
    # torch's cache keeps the class, so torch may use the class after uninstall.
    if cls in _classes_without_deepcopy:
        patches.set_class_attribute(
            cls, "__deepcopy__", refuse_deepcopy, previous=torch_fully_shard._unimplemented_deepcopy
        )
