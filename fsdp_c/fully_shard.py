"""``fully_shard``: validates, shards and attaches; all or nothing."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp._fully_shard._fully_shard as stock
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementFnResult,
    resolve_shard_placement,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _apply_to_module,
    _get_device_from_mesh,
    _get_managed_modules,
    _get_managed_states,
    _get_mesh_info,
    _get_post_forward_mesh_info,
    _init_default_mesh,
    _move_states_to_device,
    _validate_mesh,
    _validate_module,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import Shard
from torch.distributed.utils import _get_root_modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .param import Param
from .param_group import ParamGroup
from .state import State

_DEFAULT_MP_POLICY = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD_POLICY = OffloadPolicy()

# States are stored under stock's undecorated function: torch's fully_shard.state() finds them.
_CONTRACT_KEY: Any = stock.fully_shard.__wrapped__  # type: ignore[attr-defined]


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_MP_POLICY,
    offload_policy: OffloadPolicy = _DEFAULT_OFFLOAD_POLICY,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shards the parameters of ``module`` over ``mesh`` in place, as FSDP2's ``fully_shard`` does.

    Every parameter below ``module`` that no earlier call took becomes a ``DTensor`` parameter
    sharded on dim 0; forward gathers the group's parameters in one all-gather, backward reduces
    their gradients in one reduce-scatter. Call it bottom-up: blocks first, then the root.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D device mesh to shard over; 2-D with names: replicate over dim 0, shard over dim 1
            (HSDP); ``None``: all ranks of the default process group.
        reshard_after_forward: ``True`` frees parameters after forward and gathers them again in
            backward, ``False`` keeps them, an ``int`` keeps a shard of a group of that many ranks,
            ``None`` is ``True`` but for the root.
        shard_placement_fn: says for each parameter which dim to cut (``Shard(d)``), on which mesh
            (``ShardPlacementResult``), or ``None`` for dim 0 of ``mesh``.
        mp_policy: dtypes of computation, reduction, inputs and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards and gradients in CPU memory.
        ignored_params: parameters that stay as they are.
        dp_mesh_dims: names the data-parallel dims of ``mesh``, a full SPMD mesh on which every
            parameter is a DTensor already.

    Returns:
        ``module``, whose class is now ``FSDP<Class>`` with torch's ``FSDPModule`` methods.

    Raises:
        ValueError: containers without forward, meshes that are not 1-D or 2-D, scalar parameters.
        AssertionError: ``fully_shard`` was applied to a module before.
        NotImplementedError: non-contiguous parameters, uneven cuts of other dims than 0, and
            combinations that the message names.

    A call that raises leaves the module as it was.
    """
    torch._C._log_api_usage_once("fsdp_c.fully_shard")
    _validate_module(module, "fully_shard")  # type: ignore[arg-type]  # lists are fine
    mesh = mesh or _init_default_mesh()
    _validate_mesh(mesh, dp_mesh_dims)
    mesh_info = _get_mesh_info(mesh, dp_mesh_dims)
    post_forward = _post_forward_mesh_info(reshard_after_forward, mesh_info)
    units = _Units(mesh_info, post_forward, reshard_after_forward, shard_placement_fn)
    policies = (mp_policy, offload_policy)
    _apply(
        module,
        units,
        _get_device_from_mesh(mesh),
        policies,
        ignored_params,
        reshard_after_forward is None,
    )
    return module


def _apply(
    module: nn.Module | list[nn.Module],
    units: _Units,
    device: torch.device,
    policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
    ignored_params: set[nn.Parameter] | None,
    auto_reshard_after_forward: bool,
) -> None:
    """Shards and attaches, or raises and leaves everything as it was."""
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
    _refuse_applied(modules)
    managed = _get_managed_modules(modules, ignored_params)
    params, buffers = _get_managed_states(managed, ignored_params)
    _validate_params(params, modules)
    split = units.split(params)
    with contextlib.ExitStack() as undo:
        for tensor in (*params, *buffers):
            if not is_traceable_wrapper_subclass(tensor):
                undo.callback(setattr, tensor, "data", tensor.data)
        _move_states_to_device(params, buffers, device)
        state = State()
        _attach(state, modules, device, policies[0], auto_reshard_after_forward, undo)
        infos = dict(zip(params, _get_param_module_infos(params, modules)))
        state._fsdp_param_groups = [
            _make_group(state, modules, infos, part, device, policies, undo) for part in split
        ]
        for index, group in enumerate(state._fsdp_param_groups):
            group._set_unit(state, index, len(split))
        _swap_classes(modules, undo)
        for managed_module in managed:  # dynamo reads these
            managed_module._is_fsdp_managed_module = True  # type: ignore[assignment]
            managed_module._fsdp_use_orig_params = True  # type: ignore[assignment]
        undo.pop_all()


class _Part(NamedTuple):
    """The parameters of one call that talk to the same process groups."""

    mesh_info: DataParallelMeshInfo
    post_forward: FSDPMeshInfo | None
    params: list[nn.Parameter]
    placements: list[Shard | None]


class _Units(NamedTuple):
    """Where a call's parameters go: its mesh, and what ``shard_placement_fn`` says about each."""

    mesh_info: DataParallelMeshInfo
    post_forward: FSDPMeshInfo | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None

    def split(self, params: list[nn.Parameter]) -> list[_Part]:
        """One part for each pair of shard and replicate process groups, in order of appearance."""
        if not params:
            return []
        if self.shard_placement_fn is None:
            placements: list[Shard | None] = [None] * len(params)
            return [_Part(self.mesh_info, self.post_forward, params, placements)]
        if not isinstance(self.mesh_info, FSDPMeshInfo):
            raise ValueError(
                "Per-param mesh via shard_placement_fn is not supported with "
                f"{type(self.mesh_info).__name__}; it requires FSDPMeshInfo (or subclass)"
            )
        parts: dict[tuple[Any, Any], _Part] = {}
        for param in params:
            result = resolve_shard_placement(self.shard_placement_fn(param), self.mesh_info)
            info = result.mesh_info
            replicas = info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None
            part = parts.setdefault(
                (info.shard_process_group, replicas), _Part(info, self._post_forward(info), [], [])
            )
            if part.mesh_info is not info:
                raise ValueError(
                    "Params sharing the same process group must use the same FSDPMeshInfo object, "
                    f"but got different objects: {part.mesh_info} vs {info}"
                )
            part.params.append(param)
            part.placements.append(result.placement)
        return list(parts.values())

    def _post_forward(self, info: FSDPMeshInfo) -> FSDPMeshInfo | None:
        if info is self.mesh_info:
            return self.post_forward
        wanted = self.reshard_after_forward
        return _get_post_forward_mesh_info(True if wanted is None else wanted, info)


def _post_forward_mesh_info(
    reshard_after_forward: bool | int | None, mesh_info: DataParallelMeshInfo
) -> FSDPMeshInfo | None:
    if not isinstance(mesh_info, FSDPMeshInfo):
        return None
    wanted = True if reshard_after_forward is None else reshard_after_forward
    if mesh_info.is_spmd_mesh and isinstance(wanted, int) and not isinstance(wanted, bool):
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    return _get_post_forward_mesh_info(wanted, mesh_info)


def _make_group(
    state: State,
    modules: tuple[nn.Module, ...],
    infos: dict[nn.Parameter, ParamModuleInfo],
    part: _Part,
    device: torch.device,
    policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
    undo: contextlib.ExitStack,
) -> ParamGroup:
    fsdp_params = [
        Param(
            param,
            infos[param],
            part.mesh_info,
            part.post_forward,
            device,
            placement,
            *policies,
        )
        for param, placement in zip(part.params, part.placements)
    ]
    group = ParamGroup(
        fsdp_params,
        modules,
        part.mesh_info,
        part.post_forward,
        device,
        *policies,
        state._comm_ctx,
    )
    for fsdp_param, param in zip(fsdp_params, part.params):
        undo.callback(fsdp_param.restore, param)
        fsdp_param.register()
    return group


fully_shard.state = stock.fully_shard.state  # type: ignore[attr-defined]


def _refuse_applied(modules: tuple[nn.Module, ...]) -> None:
    for module in modules:
        registry = module.__dict__.get(REGISTRY_KEY) or {}
        if "fully_shard" in registry:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has already been applied to the following module:\n{module}"
            )
        if _get_module_fsdp_state(module) is not None:
            raise AssertionError(f"Inserting {module} more than once.")


def _validate_params(params: list[nn.Parameter], modules: tuple[nn.Module, ...]) -> None:
    names = {parameter: name for module in modules for name, parameter in module.named_parameters()}
    for param in params:
        if not param.is_contiguous():
            raise NotImplementedError(
                "FSDP does not support non-contiguous parameters yet: "
                f"param.shape={param.shape} param.stride()={param.stride()} "
                f"(parameter '{names.get(param)}')"
            )


def _attach(
    state: State,
    modules: tuple[nn.Module, ...],
    device: torch.device,
    mp_policy: MixedPrecisionPolicy,
    auto_reshard_after_forward: bool,
    undo: contextlib.ExitStack,
) -> None:
    """Registers the state on its modules (contract registry, state mapping, hooks)."""
    item = RegistryItem()
    for module in modules:
        states = module.__dict__.setdefault(STATE_KEY, OrderedDict())
        registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
        undo.callback(states.pop, _CONTRACT_KEY, None)
        undo.callback(registry.pop, "fully_shard", None)
        undo.callback(_module_state_mapping.pop, module, None)
        states[_CONTRACT_KEY] = state
        registry["fully_shard"] = item
    undo.callback(_remove_hooks, state)
    state.init(modules, device, mp_policy, auto_reshard_after_forward)


def _remove_hooks(state: State) -> None:
    for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle"):
        handle = state.__dict__.get(name)
        if handle is not None:
            handle.remove()


def _swap_classes(modules: tuple[nn.Module, ...], undo: contextlib.ExitStack) -> None:
    for module in modules:
        undo.callback(setattr, module, "__class__", module.__class__)
    _apply_to_module(
        modules,
        stock.cls_to_fsdp_cls,
        stock.FSDPModule,
        "FSDP",
        stock._unimplemented_deepcopy,
    )
