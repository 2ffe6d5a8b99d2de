"""``fully_shard``: validates, shards and attaches; all or nothing."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fully_shard as stock
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _apply_to_module,
    _get_device_from_mesh,
    _get_managed_modules,
    _get_managed_states,
    _init_default_mesh,
    _move_states_to_device,
    _validate_mesh,
    _validate_module,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import _get_param_module_infos
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _get_root_modules

from .param import Param
from .param_group import ParamGroup, check_offload_policy
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
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
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
        mesh: 1-D device mesh; ``None``: all ranks of the default process group.
        reshard_after_forward: ``True`` frees parameters after forward and gathers them again in
            backward, ``False`` keeps them, ``None`` is ``True`` but for the root.
        mp_policy: dtypes of computation, reduction, inputs and outputs.
        ignored_params: parameters that stay as they are.

    Returns:
        ``module``, whose class is now ``FSDP<Class>`` with torch's ``FSDPModule`` methods.

    Raises:
        ValueError: containers without forward, meshes that are not 1-D or 2-D, scalar parameters.
        AssertionError: ``fully_shard`` was applied to a module before.
        NotImplementedError: non-contiguous parameters, and arguments of FSDP2 that are not
            supported yet (2-D meshes, ``reshard_after_forward=int``, ``shard_placement_fn``,
            CPU offload, ``dp_mesh_dims``, DTensor parameters); the message names it.

    A call that raises leaves the module as it was.
    """
    torch._C._log_api_usage_once("fsdp_c.fully_shard")
    _validate_module(module, "fully_shard")  # type: ignore[arg-type]  # lists are fine
    _refuse_unsupported(reshard_after_forward, shard_placement_fn, offload_policy, dp_mesh_dims)
    mesh = mesh or _init_default_mesh()
    _validate_mesh(mesh)
    if mesh.ndim != 1:
        raise NotImplementedError("fsdp_c does not support mesh with 2 dimensions (HSDP) yet")
    modules = (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))
    _refuse_applied(modules)
    mesh_info = FSDPMeshInfo(mesh, shard_mesh_dim=0)
    device = _get_device_from_mesh(mesh)
    managed = _get_managed_modules(modules, ignored_params)
    params, buffers = _get_managed_states(managed, ignored_params)
    _validate_params(params, modules)
    with contextlib.ExitStack() as undo:
        for tensor in (*params, *buffers):
            undo.callback(setattr, tensor, "data", tensor.data)
        _move_states_to_device(params, buffers, device)
        state = State()
        _attach(state, modules, device, mp_policy, reshard_after_forward is None, undo)
        if params:
            fsdp_params = [
                Param(param, info, mesh_info, device, mp_policy)
                for param, info in zip(params, _get_param_module_infos(params, modules))
            ]
            group = ParamGroup(
                fsdp_params,
                modules,
                mesh_info,
                None if reshard_after_forward is False else mesh_info,
                device,
                mp_policy,
                state._comm_ctx,
            )
            for fsdp_param, param in zip(fsdp_params, params):
                undo.callback(fsdp_param.restore, param)
                fsdp_param.register()
            state._fsdp_param_groups = [group]
        _swap_classes(modules, undo)
        for managed_module in managed:  # dynamo reads these
            managed_module._is_fsdp_managed_module = True  # type: ignore[assignment]
            managed_module._fsdp_use_orig_params = True  # type: ignore[assignment]
        undo.pop_all()
    return module


fully_shard.state = stock.fully_shard.state  # type: ignore[attr-defined]


def _refuse_unsupported(
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Any,
    offload_policy: OffloadPolicy,
    dp_mesh_dims: Any,
) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        if not isinstance(reshard_after_forward, int):
            raise ValueError(
                "reshard_after_forward should be a bool or an int representing the "
                f"group size to reshard to, not {reshard_after_forward}"
            )
        raise NotImplementedError("fsdp_c does not support reshard_after_forward=int yet")
    if shard_placement_fn is not None:
        raise NotImplementedError("fsdp_c does not support shard_placement_fn yet")
    if dp_mesh_dims is not None:
        raise NotImplementedError("fsdp_c does not support dp_mesh_dims yet")
    check_offload_policy(offload_policy)


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
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"fsdp_c does not support DTensor parameters yet: '{names.get(param)}'"
            )
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
