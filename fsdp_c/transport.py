"""How rows get from rank to rank on the CPU, and the memory that waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist
import torch.nn as nn

import fsdp_c._C as _C

from .units import units_of

Transport = Literal["direct", "gloo"]


def set_transport(model: nn.Module, transport: Transport) -> None:
    """Chooses how the all-gathers and reduce-scatters of ``model`` move rows on the CPU.

    ``"direct"``, the default: from memory to memory, with sends and receives of the process group's
    gloo backend. ``"gloo"``: by gloo's own collectives. The bits are the same; direct exchanges
    move half the bytes and need no memory of their own. All ranks have to call it at the same point
    of their programs. It holds for the process groups of ``model``, and so for other models over
    the same ones. Where a rank was started with ``FSDP_C_TRANSPORT=gloo``, with a flight recorder
    (``TORCH_FR_BUFFER_SIZE``) or ``TORCH_DISTRIBUTED_DEBUG``, the group stays with gloo.

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


def release_memory() -> None:
    """Gives buffers on the CPU that wait to be used again back to the system.

    fsdp_c keeps the memory of gathers, reductions and unsharded parameters from one unit for the
    next, and from one step for the next: at most an eighth more than was in use at once in the
    last four iterations. Resetting a model, and deleting one, release it, too.
    """
    _C.trim_memory()
