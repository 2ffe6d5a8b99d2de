"""Shards parameters and registers states on modules, for ``fully_shard`` and ``replicate``.

:func:`shard_modules` takes a snapshot before its first change. The caller restores the snapshot if
``shard_modules`` raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _adjust_managed_modules,
    _apply_to_module,
    _get_managed_modules,
    _get_managed_states,
    _get_post_forward_mesh_info,
    _move_states_to_device,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos
from torch.distributed.tensor import Shard
from torch.distributed.utils import _get_root_modules

from .._compat import zero_grad
from .._compat.group_constructor import construct_group
from .._compat.originals import is_torch_function
from .._compat.torch_releases import ShardPlacementFnResult, resolve_placement
from .fsdp_units import iterate_registrations_of_info
from .hints import get_class_name, with_hint
from .lint_params import record_sharded_params
from .module_methods import add_missing_methods
from .param_group import ParamGroup, TypedParamGroup
from .param_template import ParamFactory
from .serialization import add_methods, refuse_deepcopy
from .state import State
from .transaction import ModuleSnapshot, Transaction
from .weak_modules import WeakModuleInfo

_TORCH_INIT = "torch.distributed.fsdp._fully_shard._fsdp_init"


class WrapperApi(NamedTuple):
    """The differences between ``fully_shard`` and ``replicate``.

    Attributes:
        name: The function's name in the registry of composable functions and in messages.
        contract_key: torch's undecorated function, the key under which ``.state()`` reads states.
        state_class: The class of the states.
        mixin: Returns torch's mixin for the modules' new classes.
        class_prefix: The prefix of the new classes' names.
        classes: torch's cache of the new classes, by original class.
        is_composable: Whether the search for parameters may enter a module.
        state_of: Returns the state of a module that the function was applied to, or None.
        marks_modules: Whether managed modules get the attributes that dynamo reads.
    """

    name: str
    contract_key: Any
    state_class: type[State]
    mixin: Callable[[], type]
    class_prefix: str
    classes: dict[type, type]
    is_composable: Callable[[nn.Module], bool]
    state_of: Callable[[nn.Module], Any]
    marks_modules: bool


def shard_modules(
    api: WrapperApi,
    module: nn.Module | list[nn.Module],
    meshes: MeshArguments,
    device: torch.device,
    policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
    ignored_params: set[nn.Parameter] | None,
    auto_reshard_after_forward: bool,
    transaction: Transaction,
) -> State:
    """Shards the parameters of ``module`` and registers their state; returns the state.

    ``transaction`` gets a snapshot before the first change. The caller rolls the transaction back
    on every exception.
    """
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
    _check_not_applied(api, modules)
    managed_modules = _list_managed_modules(api, modules, ignored_params)
    params, buffers = _get_managed_states(managed_modules, ignored_params)
    _validate_params(params, modules)
    parts = meshes.split(params)
    infos = _get_param_module_infos(params, modules) if params else ()
    module_infos: dict[Any, ParamModuleInfo] = {
        param: WeakModuleInfo(i.module, i.param_name, i.shared_modules, i.shared_param_names)
        for param, i in zip(params, infos)
    }
    registrations = [
        registration
        for info in module_infos.values()
        for registration in iterate_registrations_of_info(info)
    ]
    renaming_module = next((m for m, name in registrations if name not in m._parameters), None)
    names = [] if renaming_module is None else _list_names(modules)
    holders = [holder for holder, _ in registrations]
    transaction.set_snapshot(
        ModuleSnapshot([*modules, *managed_modules, *holders], [*params, *buffers])
    )
    _move_states_to_device(params, buffers, device)
    state = api.state_class()
    _store_state(api, state, modules)
    state.init(modules, device, policies[0], auto_reshard_after_forward)
    state._fsdp_param_groups = [
        _make_group(state, modules, module_infos, part, device, policies, meshes.shard_placement_fn)
        for part in parts
    ]
    for index, group in enumerate(state._fsdp_param_groups):
        group._set_unit(state, index, len(parts))
    if renaming_module is not None:
        _check_names(modules, names, renaming_module)
    _swap_classes(api, modules)
    for managed_module in managed_modules if api.marks_modules else ():
        managed_module._is_fsdp_managed_module = True  # type: ignore[assignment]
        managed_module._fsdp_use_orig_params = True  # type: ignore[assignment]
    return state


def _list_managed_modules(
    api: WrapperApi, roots: tuple[nn.Module, ...], ignored_params: set[nn.Parameter] | None
) -> list[nn.Module]:
    """Returns the modules below ``roots`` that no other call has sharded, children first.

    torch's ``_get_managed_modules`` returns the same list. Its recursive inner function is a
    reference cycle that would keep the modules until a garbage collection. So it is only called if
    a library has replaced it.
    """
    if not is_torch_function(_get_managed_modules, _TORCH_INIT, "_get_managed_modules"):
        return _get_managed_modules(roots, ignored_params, api.is_composable, api.state_of)
    managed: list[nn.Module] = []
    entered = set()
    to_visit = [(root, False) for root in reversed(roots)]
    while to_visit:
        module, has_visited_children = to_visit.pop()
        if has_visited_children:
            managed.append(module)
        elif (
            module not in entered
            and api.is_composable(module)
            and (module in roots or api.state_of(module) is None)
        ):
            entered.add(module)
            to_visit.append((module, True))
            to_visit += [(child, False) for child in reversed(list(module.children()))]
    if ignored_params is not None:
        return _adjust_managed_modules(managed, ignored_params)
    return managed


class _GroupParams(NamedTuple):
    """The parameters of one call that use the same shard and replicate process groups."""

    mesh_info: DataParallelMeshInfo
    post_forward: FSDPMeshInfo | None
    params: list[nn.Parameter]
    placements: list[Shard | None]


class MeshArguments(NamedTuple):
    """The mesh arguments of one call, and its ``shard_placement_fn``."""

    mesh_info: DataParallelMeshInfo
    post_forward: FSDPMeshInfo | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None

    def split(self, params: list[nn.Parameter]) -> list[_GroupParams]:
        """Returns one part for each pair of shard and replicate process groups.

        Parts are in the order of their first parameter in ``params``.

        Raises:
            ValueError: ``shard_placement_fn`` is given and the mesh is not an ``FSDPMeshInfo``, or
                it returned two mesh infos for one pair of process groups.
        """
        if not params:
            return []
        if self.shard_placement_fn is None:
            placements: list[Shard | None] = [None] * len(params)
            return [_GroupParams(self.mesh_info, self.post_forward, params, placements)]
        if not isinstance(self.mesh_info, FSDPMeshInfo):
            raise ValueError(
                "Per-param mesh via shard_placement_fn is not supported with "
                f"{type(self.mesh_info).__name__}; it requires FSDPMeshInfo (or subclass)"
            )
        parts: dict[tuple[Any, Any], _GroupParams] = {}
        for param in params:
            placement, info = resolve_placement(self.shard_placement_fn(param), self.mesh_info)
            replicas = info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None
            part = parts.setdefault(
                (info.shard_process_group, replicas),
                _GroupParams(info, self._make_post_forward_mesh_info(info), [], []),
            )
            if part.mesh_info is not info:
                raise ValueError(
                    "Params sharing the same process group must use the same FSDPMeshInfo object, "
                    f"but got different objects: {part.mesh_info} vs {info}"
                )
            part.params.append(param)
            part.placements.append(placement)
        return list(parts.values())

    def _make_post_forward_mesh_info(self, info: FSDPMeshInfo) -> FSDPMeshInfo | None:
        if info is self.mesh_info:
            return self.post_forward
        reshard = self.reshard_after_forward
        return _get_post_forward_mesh_info(True if reshard is None else reshard, info)


def _make_group(
    state: State,
    modules: tuple[nn.Module, ...],
    module_infos: dict[nn.Parameter, ParamModuleInfo],
    part: _GroupParams,
    device: torch.device,
    policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None,
) -> ParamGroup:
    factory = ParamFactory(part.mesh_info, part.post_forward, device, *policies)
    fsdp_params = [
        factory(param, module_infos[param], placement)
        for param, placement in zip(part.params, part.placements)
    ]
    group_class = TypedParamGroup if any(p.is_spmd_types for p in fsdp_params) else ParamGroup
    group = group_class.__new__(group_class)
    mesh_args = (part.mesh_info, part.post_forward, device)

    def construct() -> None:
        group.__init__(  # type: ignore[misc]  # a library's replacement runs before and after
            fsdp_params, modules, *mesh_args, *policies, state._comm_ctx
        )
        for fsdp_param in fsdp_params:
            fsdp_param.register()

    torch_args = (part.params, modules, *mesh_args, shard_placement_fn, *policies)
    construct_group(group, construct, torch_args)
    record_sharded_params(fsdp_params)
    return group


def _check_not_applied(api: WrapperApi, modules: tuple[nn.Module, ...]) -> None:
    for index, module in enumerate(modules):
        registry = module.__dict__.get(REGISTRY_KEY) or {}
        if api.name in registry or any(module is previous for previous in modules[:index]):
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"{api.name} has already been applied to the following module:\n{module}"
            )
        if api.state_of(module) is not None:
            raise AssertionError(f"Inserting {module} more than once.")


def _validate_params(params: list[nn.Parameter], modules: tuple[nn.Module, ...]) -> None:
    for param in params:
        if not param.is_contiguous():
            named_params = (pair for module in modules for pair in module.named_parameters())
            name = next((name for name, parameter in named_params if parameter is param), None)
            error = NotImplementedError(
                "FSDP does not support non-contiguous parameters yet: "
                f"param.shape={param.shape} param.stride()={param.stride()}"
            )
            raise with_hint(
                error,
                f"'{name}': make it contiguous before, param.data = param.data.contiguous().",
            )


def _list_names(modules: tuple[nn.Module, ...]) -> list[set[str]]:
    return [{name for name, _ in module.named_parameters()} for module in modules]


def _check_names(
    modules: tuple[nn.Module, ...], previous: list[set[str]], renaming_module: nn.Module
) -> None:
    """Raises the exception of torch's ``contract`` if sharding has changed names.

    ``named_parameters()`` of ``renaming_module`` returns a name that is no attribute of the module.
    """
    for names, new_names in zip(previous, _list_names(modules)):
        if names != new_names:
            error = RuntimeError(
                "Checking parameters: Composable distributed API implementations cannot modify "
                f"FQNs.\nFQNs only in original: {names - new_names}\n"
                f"FQNs only in new: {new_names - names}"
            )
            raise with_hint(
                error,
                f"named_parameters() of {get_class_name(renaming_module)} returns names that are "
                "not the attributes of the parameters: remove the override, or pass the "
                "parameters as ignored_params.",
            )


def _store_state(api: WrapperApi, state: State, modules: tuple[nn.Module, ...]) -> None:
    """Stores the state where torch's ``fully_shard.state`` and ``contract`` read it."""
    registry_item = RegistryItem()
    for module in modules:
        module.__dict__.setdefault(STATE_KEY, OrderedDict())[api.contract_key] = state
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[api.name] = registry_item


def _swap_classes(api: WrapperApi, modules: tuple[nn.Module, ...]) -> None:
    _apply_to_module(
        modules,
        api.classes,
        api.mixin(),
        api.class_prefix,
        refuse_deepcopy,
    )
    for module in modules:
        add_missing_methods(type(module))
        add_methods(type(module))
        zero_grad.add_zero_grad(type(module))
