"""``fully_shard``: validates, shards and attaches; all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed.fsdp._fully_shard._fully_shard as stock
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    _is_composable_with_fsdp,
)
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_device_from_mesh,
    _get_post_forward_mesh_info,
    _validate_module,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from . import notes
from .attach import Api, Units, apply
from .compat import ShardPlacementFnResult, is_spmd_mesh, mesh_info_of, validate_mesh
from .meshes import default_mesh
from .originals import undecorated
from .state import State
from .suspicions import look_at_arguments
from .undo import Undo

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

_DEFAULT_MP_POLICY = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD_POLICY = OffloadPolicy()

_API = Api(
    name="fully_shard",
    contract_key=undecorated(stock, "fully_shard"),
    state_class=State,
    mixin=lambda: stock.FSDPModule,  # libraries put a subclass of it in its place
    class_prefix="FSDP",
    classes=stock.cls_to_fsdp_cls,
    is_composable=_is_composable_with_fsdp,
    state_of=_get_module_fsdp_state,
    marks_modules=True,
)


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


@notes.on_mistakes
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
            parameter is a DTensor already; from torch 2.12 on.

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
    mesh = mesh or default_mesh()
    validate_mesh(mesh, dp_mesh_dims, "fully_shard")
    mesh_info = mesh_info_of(mesh, dp_mesh_dims)
    post_forward = _post_forward_mesh_info(reshard_after_forward, mesh_info)
    units = Units(mesh_info, post_forward, reshard_after_forward, shard_placement_fn)
    policies = (mp_policy, offload_policy)
    auto, device, undo = reshard_after_forward is None, _get_device_from_mesh(mesh), Undo()
    try:
        apply(_API, module, units, device, policies, ignored_params, auto, undo)
        look_at_arguments(mp_policy, offload_policy, ignored_params)
        return module  # in here: a signal may come after the call
    except BaseException:
        undo.run()
        raise


def _post_forward_mesh_info(
    reshard_after_forward: bool | int | None, mesh_info: DataParallelMeshInfo
) -> FSDPMeshInfo | None:
    if not isinstance(mesh_info, FSDPMeshInfo):
        return None
    wanted = True if reshard_after_forward is None else reshard_after_forward
    if is_spmd_mesh(mesh_info) and isinstance(wanted, int) and not isinstance(wanted, bool):
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    return _get_post_forward_mesh_info(wanted, mesh_info)


fully_shard.state = stock.fully_shard.state  # type: ignore[attr-defined]
