"""Access to the units of a model that fsdp_c's or torch's ``fully_shard`` sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state


def require_module(model: Any, caller: str) -> None:
    """Checks that an argument is a module.

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


def list_groups(model: nn.Module, caller: str) -> list[Any]:
    """Returns the parameter groups of ``model``, outer groups first, each once.

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
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def list_states(model: nn.Module) -> list[Any]:
    """Returns the states of ``model``, in module order."""
    states = (_get_module_fsdp_state(module) for module in model.modules())
    return list(dict.fromkeys(state for state in states if state is not None))


def belongs_to_root(state: Any, root: Any) -> bool:
    """Whether ``state`` belongs to the root state ``root``, or will after lazy init.

    A root of ``replicate`` has no units of ``fully_shard``.
    """
    module = state._modules[0]
    find = getattr(root, "_get_state_for_module", _get_module_fsdp_state)
    modules = (inner for outer in root._modules for inner in outer.modules())
    return find(module) is state and module in modules


def get_bucket_bytes(state: Any, group: Any, is_sole: bool) -> int:
    """Returns the bytes of gradients at which a bucket is full; 0 for one bucket.

    ``is_sole``: no other group will have the same root. Lazy init determines this, so the
    argument has an effect only before it.
    """
    becomes_sibling = state._is_root is None and not is_sole
    if becomes_sibling and getattr(group, "_sole_bucket_bytes", 0) > 0:
        return 0
    return int(getattr(group, "_bucket_bytes", 0))


def reshard_all(model: nn.Module) -> None:
    """Frees all gathered parameters, and registers the sharded parameters of all units."""
    for module in list_sharded_modules(model):
        module.reshard()


def iterate_groups(model: nn.Module) -> Iterator[tuple[str, FSDPState, Any]]:
    """Yields (name, state, group) for every group of ``model``, in module order."""
    names: dict[FSDPState, list[str]] = {}
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        if state is not None:
            names.setdefault(state, []).append(name or "(root)")
    for state, module_names in names.items():
        groups = get_groups(state)
        for index, group in enumerate(groups):
            suffix = f" [{index}]" if len(groups) > 1 else ""
            yield ", ".join(module_names) + suffix, state, group


def get_param_names(model: nn.Module, groups: list[tuple[str, Any]]) -> dict[int, str]:
    """Maps the ``id`` of each ``FSDPParam`` to the parameter's qualified name in ``model``."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    names = {}
    for _, param in iterate_params(groups):
        info = param._module_info
        prefix = prefixes.get(id(info.module))
        names[id(param)] = f"{prefix}.{info.param_name}" if prefix else info.param_name
    return names


def iterate_params(groups: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields (name of the unit, ``FSDPParam``) for all parameters of ``groups``."""
    for name, group in groups:
        for param in group.fsdp_params:
            yield name, param


def list_registered_params(param: Any) -> list[Any]:
    """Returns the parameters of one ``FSDPParam`` that exist: sharded, unsharded, post-forward."""
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    values = (getattr(param, name, None) for name in names)
    return [value for value in values if value is not None]


def iterate_registrations(param: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yields (module, name) of each registration of a parameter. A shared one has several."""
    return iterate_registrations_of_info(param._module_info)


def iterate_registrations_of_info(info: ParamModuleInfo) -> Iterator[tuple[nn.Module, str]]:
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names)


def get_original_class(module: nn.Module) -> type:
    """Returns the class that the module had before it was sharded."""
    cls = type(module)
    if isinstance(module, FSDPModule):
        return cls.__mro__[cls._orig_cls_mro_index]  # type: ignore[attr-defined]
    return cls


def get_compute_dtype(param: Any) -> torch.dtype:
    """Returns the dtype in which a parameter is gathered."""
    dtype: torch.dtype = param.param_dtype or param.orig_dtype
    return dtype


def count_gathered_bytes(group: Any) -> int:
    """Returns the bytes of a unit's all-gather output, including padding."""
    world = group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1
    sizes = (p.padded_numel * get_compute_dtype(p).itemsize for p in group.fsdp_params)
    return int(sum(sizes)) * int(world)
