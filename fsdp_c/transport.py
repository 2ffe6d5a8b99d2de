"""Settings of data movement: transport, bucket size, overlap, and cached CPU memory."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
import torch.nn as nn

import fsdp_c._C as _C

from ._runtime.fsdp_units import list_groups
from ._runtime.meshes import list_process_groups
from ._runtime.param_group import ParamGroup
from .replicate import convert_bucket_cap

Transport = Literal["direct", "gloo"]


def set_transport(model: nn.Module, transport: Transport) -> None:
    """Chooses the transport of ``model``'s collectives on the CPU.

    These collectives are all-gathers, reduce-scatters and all-reduces of gradients.

    All ranks must call the function at the same point of their programs. The setting belongs to the
    process groups of ``model``, so it also applies to other models over the same groups. Both
    transports give the same bits. Shared memory takes 4 MiB per rank and group.

    A group uses gloo if one of its ranks has ``FSDP_C_TRANSPORT=gloo``, a flight recorder
    (``TORCH_FR_BUFFER_SIZE``) or ``TORCH_DISTRIBUTED_DEBUG`` in its environment.

    Args:
        model: The module that ``fully_shard`` or ``replicate`` was applied to, or a module that
            contains it.
        transport: ``"direct"``, the default, uses shared memory if all ranks of a process group
            are on one host, else gloo. ``"gloo"`` uses gloo's collectives.

    Raises:
        ValueError: ``transport`` is another value, or ``model`` has no sharded module.
    """
    if transport not in ("direct", "gloo"):
        raise ValueError(f'transport should be "direct" or "gloo", not {transport!r}')
    for group in list_groups(model, "set_transport"):
        meshes = group.mesh_info, group.post_forward_mesh_info
        for process_group in list_process_groups(*meshes):
            if isinstance(process_group, dist.ProcessGroup):
                _C.pause_shm(process_group, transport == "gloo")


def set_bucket_cap(model: nn.Module, bucket_cap_mb: float) -> None:
    """Sets the size of the buckets in which a unit's gradients are reduced.

    A unit with more than ``bucket_cap_mb`` MiB of gradients, in the reduce dtype, is reduced in
    buckets. Each bucket has its own collective, and the last parameters come first. A reduction
    then needs memory for one or two buckets instead of the entire unit. Buckets lower the peak
    of units with more than 1 GiB of gradients, such as large embeddings and mixtures of experts.
    A parameter is never split.

    By default, a unit has one collective, as in torch. An exception is a ``replicate`` unit that is
    the only unit of its root: its default is 25 MiB, and it reduces each bucket as soon as it is
    full. With several buckets, results equal torch's bits on two ranks. On more ranks a backend
    may add in another order. Units with a reduce hook, and units with a fallback to torch's
    functions, are not split.

    All ranks must call the function between steps, with the same arguments.

    Args:
        model: The module that ``fully_shard`` or ``replicate`` was applied to, or a module that
            contains it.
        bucket_cap_mb: MiB of gradients at which a bucket is full. ``inf``: one bucket per unit.

    Raises:
        ValueError: ``bucket_cap_mb`` is not positive, or ``model`` has no sharded module.
        TypeError: A module in ``model`` was sharded by torch's ``fully_shard``.
    """
    bucket_bytes = convert_bucket_cap(bucket_cap_mb)
    for group in _list_fsdp_c_groups(model, "set_bucket_cap"):
        group._bucket_bytes = bucket_bytes


def set_reduction_overlap(model: nn.Module, overlap: bool | None) -> None:
    """Chooses whether backward continues while a unit's gradients are reduced.

    With overlap, as in torch, a unit's gradients are reduced while the next unit's are computed.
    The gradients of two units are then allocated at the same time. Without overlap, backward waits
    for each reduction. The peak is then lower by one unit's gradients, and backward takes longer by
    the duration of the reductions. Both settings give the same bits. Ranks may have different
    settings.

    Args:
        model: The module that ``fully_shard`` or ``replicate`` was applied to, or a module that
            contains it.
        overlap: ``True`` or ``False``. ``None``, the default, overlaps with one exception:
            reductions over shared memory of more than 4 MiB, on all ranks together, if the host has
            fewer than two processors per rank. Then processors that compute also copy the data.

    Raises:
        ValueError: ``model`` has no sharded module.
        TypeError: ``overlap`` is not True, False or None, or a module in ``model`` was sharded by
            torch's ``fully_shard``.
    """
    if overlap is not None and not isinstance(overlap, bool):
        raise TypeError(f"set_reduction_overlap expects True, False or None, not {overlap!r}")
    for group in _list_fsdp_c_groups(model, "set_reduction_overlap"):
        group._reduction_overlap = overlap


def _list_fsdp_c_groups(model: nn.Module, function: str) -> list[ParamGroup]:
    """Returns the groups of ``model``; raises ``TypeError`` if one is a group of torch's."""
    groups = list_groups(model, function)
    for group in groups:
        if not isinstance(group, ParamGroup):
            raise TypeError(
                f"{function} expects units of fsdp_c's fully_shard; "
                f"'{group._module_fqn}' is a unit of torch's"
            )
    return groups


def release_memory() -> None:
    """Returns cached CPU buffers to the system.

    fsdp_c reuses the memory of gathers, reductions and unsharded parameters for later units and
    steps. The limit of buffers in use and cached buffers is the peak use of the last eight
    iterations, plus an eighth of it. The addition is at least 16 MiB. Resetting or deleting a model
    also releases the cache.
    """
    _C.trim_memory()
