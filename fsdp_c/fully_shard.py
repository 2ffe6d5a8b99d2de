"""``fully_shard``: validates its arguments, shards parameters and registers the state.

A call that raises restores the modules (``transaction.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed.fsdp._fully_shard._fully_shard as torch_fully_shard
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

from ._compat.originals import find_undecorated
from ._compat.torch_releases import (
    ShardPlacementFnResult,
    is_spmd_mesh,
    make_mesh_info,
    validate_mesh,
)
from ._runtime import hints
from ._runtime.init import MeshArguments, WrapperApi, shard_modules
from ._runtime.lint import check_arguments
from ._runtime.meshes import get_default_mesh
from ._runtime.state import State
from ._runtime.transaction import Transaction

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

_DEFAULT_MP_POLICY = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD_POLICY = OffloadPolicy()

_API = WrapperApi(
    name="fully_shard",
    contract_key=find_undecorated(torch_fully_shard, "fully_shard"),
    state_class=State,
    mixin=lambda: torch_fully_shard.FSDPModule,  # read per call: libraries replace it by a subclass
    class_prefix="FSDP",
    classes=torch_fully_shard.cls_to_fsdp_cls,
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


@hints.hint_on_errors
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

    Every parameter below ``module`` that no earlier call sharded becomes a ``DTensor`` parameter,
    sharded on dim 0 unless ``shard_placement_fn`` selects another dim. The parameter keeps its
    dtype. Parameters and buffers that are not on the meta device move to the device of the mesh.
    Forward gathers the group's parameters in one all-gather. Backward reduces their gradients in
    one reduce-scatter. Call ``fully_shard`` bottom-up: blocks first, then the root. Arguments,
    numbers and exceptions are those of ``torch.distributed.fsdp.fully_shard``.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: A 1-D device mesh to shard over. A 2-D mesh with named dims replicates over dim 0 and
            shards over dim 1 (HSDP). ``None``: all ranks of the default process group.
        reshard_after_forward: ``True`` frees parameters after forward and gathers them again in
            backward. ``False`` keeps them unsharded. An ``int`` reshards to groups of that many
            ranks. ``None`` means ``False`` for the root and ``True`` for other modules.
        shard_placement_fn: Returns for each parameter the dim to shard (``Shard(d)``), the dim and
            the mesh (``ShardPlacementResult``), or ``None`` for dim 0 of ``mesh``.
        mp_policy: Dtypes of computation, reduction, inputs and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards and gradients in CPU memory.
        ignored_params: Parameters that are neither sharded nor moved.
        dp_mesh_dims: The names of the data-parallel dims of ``mesh``, a full SPMD mesh on which
            every parameter already is a DTensor. Requires torch 2.12.

    Returns:
        ``module``, whose class is now ``FSDP<Class>`` with torch's ``FSDPModule`` methods.

    Raises:
        ValueError: A container has no forward, the mesh is not 1-D or 2-D, or a parameter is a
            scalar. Or ``reshard_after_forward`` does not divide the number of ranks, or a function
            of the caller returns an invalid placement or dtype.
        AssertionError: ``fully_shard`` was already applied to a module, or a parameter does not
            have the dim to shard.
        NotImplementedError: A parameter is not contiguous, a dim other than 0 cannot be sharded
            evenly, or this torch does not have ``dp_mesh_dims``. Or ``reshard_after_forward`` is an
            ``int``, and a parameter is a DTensor.

    A call that raises restores the module.
    """
    torch._C._log_api_usage_once("fsdp_c.fully_shard")
    _validate_module(module, "fully_shard")  # type: ignore[arg-type]  # lists are fine
    mesh = mesh or get_default_mesh()
    validate_mesh(mesh, dp_mesh_dims, "fully_shard")
    mesh_info = make_mesh_info(mesh, dp_mesh_dims)
    post_forward = _make_post_forward_mesh_info(reshard_after_forward, mesh_info)
    meshes = MeshArguments(mesh_info, post_forward, reshard_after_forward, shard_placement_fn)
    policies = (mp_policy, offload_policy)
    auto_reshard, device = reshard_after_forward is None, _get_device_from_mesh(mesh)
    transaction = Transaction()
    try:
        shard_modules(
            _API, module, meshes, device, policies, ignored_params, auto_reshard, transaction
        )
        check_arguments(mp_policy, offload_policy, ignored_params)
        return module  # inside the try: a signal handler may raise before the return
    except BaseException:
        transaction.rollback()
        raise


def _make_post_forward_mesh_info(
    reshard_after_forward: bool | int | None, mesh_info: DataParallelMeshInfo
) -> FSDPMeshInfo | None:
    if not isinstance(mesh_info, FSDPMeshInfo):
        return None
    reshard = True if reshard_after_forward is None else reshard_after_forward
    if is_spmd_mesh(mesh_info) and isinstance(reshard, int) and not isinstance(reshard, bool):
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    return _get_post_forward_mesh_info(reshard, mesh_info)


fully_shard.state = torch_fully_shard.fully_shard.state  # type: ignore[attr-defined]
