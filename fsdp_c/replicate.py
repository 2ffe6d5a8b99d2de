"""``replicate``: data parallelism with unsharded parameters and the classes of ``fully_shard``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import torch
import torch.distributed._composable.replicate_with_fsdp as torch_replicate
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_device_from_mesh,
    _init_default_mesh,
)

from ._compat.originals import find_undecorated
from ._compat.torch_releases import make_mesh_info, validate_mesh
from ._runtime import hints
from ._runtime.init import MeshArguments, WrapperApi, shard_modules
from ._runtime.state import IterationContext, State
from ._runtime.transaction import Transaction

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

_DEFAULT_MP_POLICY = MixedPrecisionPolicy()
_DEFAULT_OFFLOAD_POLICY = OffloadPolicy()


class ReplicateContext(IterationContext, torch_replicate._ReplicateStateContext):
    """Data that the states under one root share; subclass of ``_ReplicateStateContext``."""


class ReplicateState(State, torch_replicate._ReplicateState):  # type: ignore[misc]
    """The state of one ``replicate`` call; subclass of torch's ``_ReplicateState``.

    A root of ``replicate`` states covers only ``replicate`` states. ``fully_shard`` units below it
    have a separate root, as in torch.
    """

    _context_class = ReplicateContext

    def __init__(self) -> None:
        State.__init__(self)


_API = WrapperApi(
    name="replicate",
    contract_key=find_undecorated(torch_replicate, "replicate"),
    state_class=ReplicateState,
    mixin=lambda: torch_replicate.ReplicateModule,
    class_prefix="Replicate",
    classes=torch_replicate.cls_to_replicate_cls,
    is_composable=torch_replicate.is_composable_with_replicate,
    state_of=torch_replicate._get_module_replicate_state,
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
    bucket_cap_mb: float | None = ...,
) -> torch_replicate.ReplicateModule: ...


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
    bucket_cap_mb: float | None = ...,
) -> list[torch_replicate.ReplicateModule]: ...


@hints.hint_on_errors
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
    bucket_cap_mb: float | None = None,
) -> Any:
    """Replicates the parameters of ``module`` in place, and averages gradients in backward.

    Every parameter below ``module`` that no earlier call converted becomes a ``DTensor`` parameter
    with placement ``Replicate()``, whose local tensor is the full parameter. Without a dtype cast,
    computation uses this memory directly. If a root has several units, each unit has one all-reduce
    at the end of its backward, as in torch. If it has one unit only, the gradients are all-reduced
    in buckets during backward, in reverse parameter order. Numbers and exceptions are those of
    torch's ``replicate``.

    Args:
        module: A module, or a list of modules that form one group.
        mesh: A 1-D device mesh, or a 2-D mesh of shape (N, 1) with named dims. ``None``: all ranks.
        mp_policy: Dtypes of computation, reduction, inputs and outputs.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters and gradients in CPU memory.
        ignored_params: Parameters that are neither replicated nor moved.
        dp_mesh_dims: The names of the replicate dims of ``mesh``, a full SPMD mesh on which every
            parameter already is a DTensor. Requires torch 2.12.
        device_mesh: The older name of ``mesh``.
        device_id: The device of the mesh, or its index.
        ignored_modules: Modules whose parameters are ignored.
        bucket_cap_mb: MiB of gradients at which a bucket is full, as for DDP. ``inf``: one
            all-reduce for the entire module, as in torch. ``None``: 25 if the root of the module
            has no other unit, else ``inf``.

    Returns:
        ``module``, whose class is now ``Replicate<Class>`` with ``ReplicateModule``'s methods.

    Raises:
        RuntimeError: ``fully_shard`` manages the module, or ``device_id`` is not a device.
        ValueError: A container has no forward, the mesh has another shape, arguments contradict
            each other, or the bucket size is not positive.
        AssertionError: ``replicate`` was already applied to a module, or ``fully_shard`` to one
            module of a list.
        NotImplementedError: A parameter is not contiguous, or this torch does not have
            ``dp_mesh_dims``.

    A call that raises restores the module.
    """
    torch._C._log_api_usage_once("fsdp_c.replicate")
    torch_replicate._validate_module(module)  # type: ignore[arg-type]  # lists are fine
    if mesh is not None and device_mesh is not None and mesh is not device_mesh:
        raise ValueError("replicate got both mesh and device_mesh: give one of them")
    bucket_bytes = convert_bucket_cap(25 if bucket_cap_mb is None else bucket_cap_mb)
    attribute = "_sole_bucket_bytes" if bucket_cap_mb is None else "_bucket_bytes"
    mesh = mesh or device_mesh or _init_default_mesh(mesh_dim_names=("replicate",))
    mesh_info = _make_replicate_mesh_info(mesh, dp_mesh_dims)
    device = _get_device_from_mesh(mesh)
    _check_device_id(device_id, device)
    ignored = set(ignored_params or ())
    for ignored_module in ignored_modules or ():
        ignored.update(ignored_module.parameters())
    policies, transaction = (mp_policy, offload_policy), Transaction()
    meshes = MeshArguments(mesh_info, None, None, None)
    try:
        state = shard_modules(
            _API, module, meshes, device, policies, ignored or None, False, transaction
        )
        for group in state._fsdp_param_groups:
            setattr(group, attribute, bucket_bytes)
        return module  # inside the try: a signal handler may raise before the return
    except BaseException:
        transaction.rollback()
        raise


def convert_bucket_cap(bucket_cap_mb: float) -> int:
    """Returns the bytes of gradients at which a bucket is full; 0 for a single bucket.

    Raises:
        ValueError: ``bucket_cap_mb`` is not positive.
    """
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
    bucket_bytes = bucket_cap_mb * 2**20
    return math.ceil(bucket_bytes) if bucket_bytes < 2**63 else 0


def _make_replicate_mesh_info(mesh: DeviceMesh, dp_mesh_dims: Any) -> DataParallelMeshInfo:
    if dp_mesh_dims is not None:
        validate_mesh(mesh, dp_mesh_dims, "replicate")
        info = make_mesh_info(mesh, dp_mesh_dims)
        if type(info) is not DDPMeshInfo:
            raise ValueError(
                "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). "
                "Use fully_shard() for sharding."
            )
        return info
    if mesh.ndim == 2 and mesh.size(1) == 1 and mesh.mesh_dim_names is not None:
        mesh = mesh[mesh.mesh_dim_names[0]]
    torch_replicate._validate_mesh(mesh)
    return DDPMeshInfo(mesh, replicate_mesh_dim=0)


def _check_device_id(device_id: int | torch.device | None, device: torch.device) -> None:
    if device_id is None:
        return
    if isinstance(device_id, bool) or not isinstance(device_id, (SupportsIndex, torch.device)):
        raise RuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(device_id)}"
        )
    expected = device_id if isinstance(device_id, torch.device) else None
    index = device_id.index if isinstance(device_id, torch.device) else device_id
    if (expected is not None and expected.type != device.type) or (
        index is not None and device.index is not None and index != device.index
    ):
        raise ValueError(f"device_id {device_id} is not the mesh's device {device}")


replicate.state = torch_replicate.replicate.state  # type: ignore[attr-defined]
