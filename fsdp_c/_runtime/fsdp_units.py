"""Access to a model's units, of fsdp_c's or torch's ``fully_shard``."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def require_module(model: Any, caller: str) -> None:
    """Refuses an argument that is not a module.

    Raises:
        TypeError: ``model`` is not a module. The message names ``caller``.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise TypeError(f"{caller} expects a module, not the class {name}: {name}(...) is one")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller} expects a module, not {type(model).__name__}")


def list_sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the modules of ``model``, including itself, that ``fully_shard`` was applied to."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def get_units(model: nn.Module, caller: str) -> list[Any]:
    """Returns the parameter groups of ``model``, outer ones first, each once.

    Raises:
        ValueError: ``model`` has no sharded module. The message names ``caller``.
    """
    modules = list_sharded_modules(model)
    if not modules:
        raise ValueError(
            f"{caller} expects a model that fully_shard was applied to; no part of this "
            f"{type(model).__name__} is an FSDPModule"
        )
    groups: dict[Any, None] = {}
    for module in modules:
        groups.update(dict.fromkeys(get_groups(module._get_fsdp_state())))
    return list(groups)


def get_groups(state: Any) -> list[Any]:
    """Returns the parameter groups of a state of torch or fsdp_c. torch 2.11 has at most one."""
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        found = [state._fsdp_param_group]
    return [group for group in found if group is not None]


def reshard_all(model: nn.Module) -> None:
    """Frees all gathered parameters: sharded ones are registered everywhere afterwards."""
    for module in list_sharded_modules(model):
        module.reshard()
