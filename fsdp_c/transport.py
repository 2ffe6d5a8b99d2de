"""How rows get from rank to rank, and the memory that waits for them on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist
import torch.nn as nn

import fsdp_c._C as _C

from .param_group import ParamGroup
from .replicate import bucket_bytes
from .units import units_of

Transport = Literal["direct", "gloo"]


def set_transport(model: nn.Module, transport: Transport) -> None:
    """Chooses how the all-gathers and reduce-scatters of ``model`` move rows on the CPU.

    ``"direct"``, the default: through shared memory where all ranks of a process group are
    processes of one host, else by gloo's collectives. ``"gloo"``: by gloo's collectives. The bits
    are the same. Shared memory takes 4 MiB for each rank and group. All ranks have to call the
    function at the same point of their programs. It holds for the process groups of ``model``, and
    so for other models over the same groups. A group stays with gloo if one of its ranks has
    ``FSDP_C_TRANSPORT=gloo``, a flight recorder (``TORCH_FR_BUFFER_SIZE``) or
    ``TORCH_DISTRIBUTED_DEBUG`` in its environment.

    Raises:
        ValueError: ``transport`` is neither, or ``fully_shard`` was applied to no part of
            ``model``.
    """
    if transport not in ("direct", "gloo"):
        raise ValueError(f'transport should be "direct" or "gloo", not {transport!r}')
    for unit in units_of(model, "set_transport"):
        for group in _groups(unit):
            _C.pause_direct(group, transport == "gloo")


def _groups(unit: Any) -> Iterator[dist.ProcessGroup]:
    """The process groups that a unit's rows are moved over."""
    for info in (unit.mesh_info, unit.post_forward_mesh_info):
        for name in ("shard_process_group", "reduce_scatter_process_group"):
            group = getattr(info, name, None)
            if isinstance(group, dist.ProcessGroup):
                yield group


def set_bucket_cap(model: nn.Module, bucket_cap_mb: float) -> None:
    """Chooses how much of a unit's gradients one reduction takes.

    A unit with more than ``bucket_cap_mb`` MiB of gradients (in the dtype that is reduced in) is
    reduced bucket by bucket, its last parameters first, each with collectives of its own: memory is
    taken for a bucket or two and not for the whole row, which decides the peak where embeddings and
    heads are one unit. A parameter is never divided. ``fully_shard``'s default is 1024, below which
    there is torch's single collective; ``replicate`` has its own and reduces early. The bits are
    torch's on two ranks; on more a backend may add up in another order. Units with a reduce hook,
    and those whose data torch's functions move, stay whole. All ranks have to call it alike,
    between steps.

    Args:
        model: what ``fully_shard`` or ``replicate`` was applied to, or a module around it.
        bucket_cap_mb: MiB of gradients at which a bucket is full; ``inf``: one for each unit.

    Raises:
        ValueError: ``bucket_cap_mb`` is not positive, or ``fully_shard`` was applied to no part of
            ``model``.
        TypeError: a part of ``model`` was sharded by torch's ``fully_shard``.
    """
    limit = bucket_bytes(bucket_cap_mb)
    for unit in _own_units(model, "set_bucket_cap"):
        unit._bucket_bytes = limit


def set_reduction_overlap(model: nn.Module, overlap: bool | None) -> None:
    """Chooses whether backward goes on while a unit's gradients are reduced.

    With overlap, as torch does it, a unit's gradients are reduced while the next unit's are
    computed, so that two units' gradients are there at once. Without it a reduction ends before
    backward goes on: one unit's gradients less at the peak of a backward, for the time that the
    reductions take. The bits are the same. Ranks may differ.

    Args:
        model: what ``fully_shard`` or ``replicate`` was applied to, or a module around it.
        overlap: ``None``, as it is at first: overlap, but not where the processors that compute
            would copy the rows meanwhile. These are rows over 4 MiB, for all ranks together, that
            go through the shared memory of one host with fewer than two processors for each rank.

    Raises:
        ValueError: ``fully_shard`` was applied to no part of ``model``.
        TypeError: a part of ``model`` was sharded by torch's ``fully_shard``.
    """
    for unit in _own_units(model, "set_reduction_overlap"):
        unit._reduction_overlap = overlap


def _own_units(model: nn.Module, function: str) -> list[ParamGroup]:
    """Units of ``model``, all of which are fsdp_c's."""
    units = list(units_of(model, function))
    for unit in units:
        if not isinstance(unit, ParamGroup):
            raise TypeError(
                f"{function} expects units of fsdp_c's fully_shard; "
                f"'{unit._module_fqn}' is a unit of torch's"
            )
    return units


def release_memory() -> None:
    """Gives buffers on the CPU that wait to be used again back to the system.

    fsdp_c keeps the memory of gathers, reductions and unsharded parameters from one unit for the
    next, and from one step for the next: at most an eighth, or 16 MiB, more than was in use at
    once in the last eight iterations. Resetting a model, and deleting one, release it, too.
    """
    _C.trim_memory()
