"""``plan``: estimates the memory of a model before it is sharded, also on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TextIO

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from typing_extensions import Unpack

from . import wrap
from ._runtime.fsdp_units import require_module
from ._tools import unit_bytes
from ._tools.byte_format import parse_bytes
from ._tools.optimizer_memory import OptimizerArgument, measure_optimizer
from ._tools.report import Explanation, make_explanation
from .explain import (
    DEFAULT_RANKS_PER_NODE,
    check_positive,
    compute_optimizer_cost,
    make_sharding,
    record_step,
)
from .fully_shard import fully_shard
from .policies import Policy
from .wrap import UnitKwargs


def plan(
    model: nn.Module,
    policy: Policy = "blocks",
    *,
    world_size: int | None = None,
    mesh: DeviceMesh | tuple[int, ...] | None = None,
    optimizer: OptimizerArgument = None,
    batch: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    memory: int | str | None = None,
    microbatches: int = 1,
    ranks_per_node: int = DEFAULT_RANKS_PER_NODE,
    max_transient: int | None = None,
    min_unit: int | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    device: str | torch.device = "cuda",
    file: TextIO | None = None,
    **fully_shard_kwargs: Unpack[UnitKwargs],
) -> Explanation:
    """Prints the units that ``auto_shard`` would make, and the memory of a step.

    No process group, device or memory for the model is needed. The model is not changed.

    Args:
        model: A model without sharded modules, preferably on the meta device.
        policy: As for ``auto_shard``.
        world_size: The number of ranks to shard over. ``None``: the size of the mesh or of the
            default process group.
        mesh: A mesh or its shape: ``(8,)``, or ``(2, 4)`` for 2 replicas of 4 shards.
        optimizer: A class, a name of ``torch.optim`` in upper or lower case, or a function that
            makes an optimizer from parameters, such as
            ``functools.partial(torch.optim.SGD, momentum=0.9)``. ``None``: AdamW.
        batch, loss, memory, microbatches, file: As for :func:`fsdp_c.explain`.
        ranks_per_node: The number of ranks of one node, for advice.
        max_transient, min_unit, ignored_modules, ignored_params: As for ``auto_shard``.
        device: The device type of training. Gathers and reductions overlap with computation on all
            devices but ``"cpu"``.
        **fully_shard_kwargs: As for ``auto_shard``.

    Returns:
        The report as data. ``.plot("memory.png")`` draws it.

    Raises:
        ValueError: ``world_size`` and mesh are missing, or the mesh has more than two dimensions.
            Or planning of ``auto_shard`` fails, or forward raises on fake tensors of the batch. Or
            ``batch`` is passed with tensor parallelism. Or ``reshard_after_forward`` does not
            divide the number of ranks. Or ``memory`` is not a size, a number is not positive, or
            ``optimizer`` or ``device`` has an unknown name.
        TypeError: An argument has another type, or ``fully_shard`` does not have it.
    """
    require_module(model, "plan")
    replicas, ranks = _resolve_mesh_shape(world_size, mesh)
    kwargs: dict[str, Any] = dict(fully_shard_kwargs)
    inspect.signature(fully_shard).bind(model, **kwargs)
    memory_bytes = None if memory is None else parse_bytes(memory)
    units = wrap.plan(
        model,
        policy,
        ignored_modules=ignored_modules,
        ignored_params=ignored_params,
        max_transient=max_transient,
        min_unit=min_unit,
        ranks=ranks,
        **kwargs,
    )
    for unit in units:
        _check_reshard(unit.kwargs.get("reshard_after_forward"), ranks)
    on_cpu = _parse_device_type(device) == "cpu"
    layout = unit_bytes.make_planned_layout(model, units, (replicas, ranks), on_cpu)
    optimizer_cost = compute_optimizer_cost(optimizer, layout, on_cpu)
    explanation = make_explanation(
        title=f"{type(model).__name__} on {ranks if replicas == 1 else (replicas, ranks)} ranks",
        warnings=[],
        layout=layout,
        sharding=make_sharding(layout, model, optimizer_cost, on_cpu),
        trace=record_step(model, layout, batch, loss),
        knows_optimizer=True,
        optimizer=measure_optimizer(optimizer, torch.float32, on_cpu).name,
        memory=memory_bytes,
        model=model,
        microbatches=check_positive("microbatches", microbatches),
        ranks_per_node=check_positive("ranks_per_node", ranks_per_node),
    )
    print(explanation, file=file)
    return explanation


def _check_reshard(reshard: Any, ranks: int) -> None:
    """Raises the exception of ``fully_shard`` if ``reshard_after_forward`` is invalid."""
    if reshard is not None and (
        not isinstance(reshard, int) or (reshard is not False and (reshard < 1 or ranks % reshard))
    ):
        info: Any = SimpleNamespace(shard_mesh_size=ranks)
        _get_post_forward_mesh_info(reshard, info)


def _parse_device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device is a torch.device or its name, not {device!r}") from None


def _resolve_mesh_shape(
    world_size: int | None, mesh: DeviceMesh | tuple[int, ...] | None
) -> tuple[int, int]:
    """Returns the number of replicas and the number of ranks to shard over."""
    if mesh is None and world_size is None:
        if not torch.distributed.is_initialized():
            raise ValueError(
                "plan needs world_size= or mesh=, because no process group is initialized"
            )
        world_size = torch.distributed.get_world_size()
    shape: tuple[int | None, ...] = (world_size,)
    if mesh is not None:
        if not isinstance(mesh, (DeviceMesh, tuple, list)):
            raise TypeError(f"mesh is a DeviceMesh or a shape such as (2, 4), not {mesh!r}")
        shape = tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)
    for size in (*shape, world_size):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise TypeError(f"a number of ranks is an integer, not {size!r}")
        if size is not None and size < 1:
            raise ValueError(f"a number of ranks is positive, not {size}")
    if not 1 <= len(shape) <= 2:
        raise ValueError(f"plan expects a mesh of one or two dimensions, not {shape}")
    replicas, ranks = [1, *(size or 0 for size in shape)][-2:]
    if world_size is not None and replicas * ranks != world_size:
        raise ValueError(f"a mesh of {shape} has {replicas * ranks} ranks, not {world_size}")
    return replicas, ranks
