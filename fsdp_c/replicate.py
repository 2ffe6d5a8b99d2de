"""``replicate``: data parallelism on the core of ``fully_shard``; every rank has all parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed._composable.replicate_with_fsdp as stock
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_device_from_mesh,
    _init_default_mesh,
)

from . import notes
from .attach import Api, Units, apply
from .compat import mesh_info_of, validate_mesh
from .originals import undecorated
from .state import IterationContext, State
from .undo import Undo

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

_DEFAULT_MP_POLICY = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD_POLICY = OffloadPolicy()


class ReplicateContext(IterationContext, stock._ReplicateStateContext):
    """What the states under one root share; torch's ``_ReplicateStateContext`` by type."""


class ReplicateState(State, stock._ReplicateState):  # type: ignore[misc]
    """The state of one ``replicate`` call; torch's ``_ReplicateState`` by type.

    Its root is the root of states like it: what ``fully_shard`` has taken below runs under a root
    of its own, as with torch's.
    """

    _context_class = ReplicateContext

    def __init__(self) -> None:
        State.__init__(self)


_API = Api(
    name="replicate",
    contract_key=undecorated(stock, "replicate"),
    state_class=ReplicateState,
    mixin=lambda: stock.ReplicateModule,
    class_prefix="Replicate",
    classes=stock.cls_to_replicate_cls,
    is_composable=stock.is_composable_with_replicate,
    state_of=stock._get_module_replicate_state,
    marks_modules=False,
)


@overload
def replicate(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    device_mesh: DeviceMesh | None = ...,
    device_id: int | torch.device | None = ...,
    ignored_modules: set[nn.Module] | None = ...,
    bucket_cap_mb: float = ...,
) -> stock.ReplicateModule: ...


@overload
def replicate(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    device_mesh: DeviceMesh | None = ...,
    device_id: int | torch.device | None = ...,
    ignored_modules: set[nn.Module] | None = ...,
    bucket_cap_mb: float = ...,
) -> list[stock.ReplicateModule]: ...


@notes.on_mistakes
def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = _DEFAULT_MP_POLICY,
    offload_policy: OffloadPolicy = _DEFAULT_OFFLOAD_POLICY,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    device_mesh: DeviceMesh | None = None,
    device_id: int | torch.device | None = None,
    ignored_modules: set[nn.Module] | None = None,
    bucket_cap_mb: float = 25,
) -> Any:
    """Data parallelism in place: whole parameters on every rank, mean gradients after backward.

    Every parameter below ``module`` that no earlier call took becomes a ``DTensor`` parameter
    with placement ``Replicate()``, whose local tensor has the whole parameter. Without a dtype
    cast the working parameters are the stored ones: no copy, no second buffer. Gradients of more
    than a bucket are all-reduced bucket by bucket, the last parameters first. Where this is the
    model's only ``replicate``, that happens while backward goes on; else at the end of each
    module's backward.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: 1-D device mesh, or 2-D of shape (N, 1); ``None``: all ranks.
        mp_policy: dtypes of computation, reduction, inputs and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters and gradients in CPU memory.
        ignored_params: parameters that stay as they are.
        dp_mesh_dims: names the replicate dims of ``mesh``, a full SPMD mesh on which every
            parameter is a DTensor already; from torch 2.12 on.
        device_mesh: the older name of ``mesh``.
        device_id: index of the device, or the device itself; must be the mesh's.
        ignored_modules: modules whose parameters are ignored.
        bucket_cap_mb: MiB of gradients at which a bucket is full, as for DDP; ``inf``: one
            all-reduce for the whole module, as torch's.

    Returns:
        ``module``, whose class is now ``Replicate<Class>`` with ``ReplicateModule``'s methods.

    Raises:
        RuntimeError: ``fully_shard`` manages the module; ``device_id`` is no device.
        ValueError: containers without forward, meshes of other shapes, contradicting arguments, a
            bucket size that is not positive.
        AssertionError: ``replicate`` was applied to a module before.

    A call that raises leaves the module as it was.
    """
    torch._C._log_api_usage_once("fsdp_c.replicate")
    for one in (module,) if isinstance(module, nn.Module) else module:
        stock._validate_module(one)
    if mesh is not None and device_mesh is not None and mesh is not device_mesh:
        raise ValueError("replicate got both mesh and device_mesh: give one of them")
    limit = bucket_bytes(bucket_cap_mb)
    mesh = mesh or device_mesh or _init_default_mesh(mesh_dim_names=("replicate",))
    mesh_info = _replicate_mesh_info(mesh, dp_mesh_dims)
    device = _get_device_from_mesh(mesh)
    _check_device_id(device_id, device)
    ignored = set(ignored_params or ())
    for ignored_module in ignored_modules or ():
        ignored.update(ignored_module.parameters())
    policies, undo = (mp_policy, offload_policy), Undo()
    units = Units(mesh_info, None, None, None)
    try:
        state = apply(_API, module, units, device, policies, ignored or None, False, undo)
        for group in state._fsdp_param_groups:
            group._bucket_bytes = limit
        return module  # in here: a signal may come after the last call
    except BaseException:
        undo.run()
        raise


def bucket_bytes(bucket_cap_mb: float) -> int:
    """Bytes of gradients at which a bucket is full; 0: there is one.

    Raises:
        ValueError: ``bucket_cap_mb`` is not positive.
    """
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
    return 0 if math.isinf(bucket_cap_mb) else math.ceil(bucket_cap_mb * 2**20)


def _replicate_mesh_info(mesh: DeviceMesh, dp_mesh_dims: Any) -> DataParallelMeshInfo:
    if dp_mesh_dims is not None:
        validate_mesh(mesh, dp_mesh_dims, "replicate")
        info = mesh_info_of(mesh, dp_mesh_dims)
        if type(info) is not DDPMeshInfo:
            raise ValueError(
                "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). "
                "Use fully_shard() for sharding."
            )
        return info
    if mesh.ndim == 2 and mesh.size(1) == 1 and mesh.mesh_dim_names is not None:
        mesh = mesh[mesh.mesh_dim_names[0]]
    stock._validate_mesh(mesh)
    return DDPMeshInfo(mesh, replicate_mesh_dim=0)


def _check_device_id(device_id: int | torch.device | None, device: torch.device) -> None:
    if device_id is None:
        return
    if isinstance(device_id, bool) or not isinstance(device_id, (int, torch.device)):
        raise RuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(device_id)}"
        )
    wanted = device_id if isinstance(device_id, torch.device) else None
    index = device_id.index if isinstance(device_id, torch.device) else device_id
    if (wanted is not None and wanted.type != device.type) or (
        index is not None and device.index is not None and index != device.index
    ):
        raise ValueError(f"device_id {device_id} is not the mesh's device {device}")


replicate.state = stock.replicate.state  # type: ignore[attr-defined]
