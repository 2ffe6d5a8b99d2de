"""``explain``: what a sharded model consists of, what a step will cost, and what looks wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from . import suspicions


@dataclass(frozen=True)
class UnitReport:
    """One group of parameters that is gathered and reduced together.

    Sizes are bytes on this rank. ``gathers``, ``reduce_scatters`` and ``all_reduces`` count the
    collectives of one forward and one backward that reaches the unit; ``transient`` is what the
    unit needs beyond its shards while it is gathered (unsharded parameters and gather buffer) or
    while its gradients are reduced (gradients, input and output of the reduction), whichever is
    more.
    """

    name: str
    modules: str
    parameters: int
    elements: int
    dtypes: str
    mesh: str
    shard_bytes: int
    gathers: int
    reduce_scatters: int
    all_reduces: int
    transient: int


@dataclass
class Explanation:
    """What :func:`explain` found; ``str()`` of it is the table."""

    units: list[UnitReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = "unit modules params elements dtypes mesh shard AG RS AR transient"
        rows = [tuple(head.split())]
        for unit in self.units:
            rows.append(
                (
                    unit.name,
                    unit.modules,
                    str(unit.parameters),
                    f"{unit.elements:,}",
                    unit.dtypes,
                    unit.mesh,
                    _bytes(unit.shard_bytes),
                    str(unit.gathers),
                    str(unit.reduce_scatters),
                    str(unit.all_reduces),
                    _bytes(unit.transient),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        shards = sum(unit.shard_bytes for unit in self.units)
        largest = max((unit.transient for unit in self.units), default=0)
        lines.append(f"{_bytes(shards)} of shards on this rank; {_bytes(largest)} for one unit")
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines)


def explain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    file: TextIO | None = None,
) -> Explanation:
    """Prints a table of the model's units and warnings about what is often got wrong.

    Nothing is changed, communicated or initialised; it may be called at any time after sharding.

    Args:
        model: The root: a module that ``fully_shard`` or ``replicate`` was applied to, or one that
            contains such modules.
        optimizer: The optimizer of the model, to be checked against its parameters.
        file: Where to print; ``None``: standard output.

    Returns:
        What was printed, as data.

    Raises:
        ValueError: nothing in ``model`` is sharded.
    """
    found = list(suspicions.groups_of(model))
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"nothing in {type(model).__name__} is sharded: call fully_shard first")
    explanation = Explanation([_unit(name, state, group, model) for name, state, group in found])
    groups = [(name, group) for name, _, group in found]
    explanation.warnings += suspicions.foreign_optimizer(model, groups, optimizer)
    explanation.warnings += suspicions.replaced_parameters(model, groups)
    explanation.warnings += suspicions.unmanaged_parameters(model, groups)
    explanation.warnings += suspicions.tied_weights(model, groups)
    explanation.warnings += suspicions.blocks_in_root(model, groups)
    print(explanation, file=file)
    return explanation


# ---- the table -----------------------------------------------------------------------------------


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _reduce_dtype(param: Any) -> torch.dtype:
    return param.reduce_dtype or suspicions.compute_dtype(param)


def _unit(name: str, state: FSDPState, group: Any, model: nn.Module) -> UnitReport:
    info, params = group.mesh_info, group.fsdp_params
    world = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
    replicas = info.replicate_mesh_size if isinstance(info, DDPMeshInfo) else 1
    trainable = [param for param in params if param.sharded_param.requires_grad]
    kinds = {(p.orig_dtype, suspicions.compute_dtype(p), _reduce_dtype(p)) for p in params}
    return UnitReport(
        name=name,
        modules=", ".join(suspicions.original_class(module).__name__ for module in group.modules),
        parameters=len(params),
        elements=sum(param._orig_size.numel() for param in params),
        dtypes="; ".join(sorted("/".join(map(_dtype, kind)) for kind in kinds)),
        mesh=f"{replicas}x{world}" if isinstance(info, DDPMeshInfo) else str(world),
        shard_bytes=sum(_padded(param) * param.orig_dtype.itemsize for param in params),
        gathers=(1 + _gathers_again(state, group, model)) if world > 1 else 0,
        reduce_scatters=1 if trainable and world > 1 else 0,
        all_reduces=_buckets(group) if replicas > 1 else 0,
        transient=_transient(params, trainable, world),
    )


def _buckets(group: Any) -> int:
    """How many reductions the unit's gradients are dealt to."""
    params = group.fsdp_params
    spans = getattr(group, "_buckets", [(0, len(params))])
    return sum(any(p.sharded_param.requires_grad for p in params[slice(*span)]) for span in spans)


def _padded(param: Any) -> int:
    return int(param.padded_sharded_param_size.numel())


def _gathers_again(state: FSDPState, group: Any, model: nn.Module) -> bool:
    """Whether backward gathers once more; of the root it is decided in the first forward."""
    undecided_root = (
        state._is_root is None and state._auto_reshard_after_forward and model in state._modules
    )
    return group._reshard_after_forward and not undecided_root and group.unshard_in_backward


def _transient(params: list[Any], trainable: list[Any], world: int) -> int:
    unsharded = sum(_padded(p) * world * suspicions.compute_dtype(p).itemsize for p in params)
    gathering = unsharded * (2 if world > 1 else 1)
    grads = sum(p._orig_size.numel() * suspicions.compute_dtype(p).itemsize for p in trainable)
    rows = sum(_padded(p) * _reduce_dtype(p).itemsize for p in trainable)
    reducing = grads + rows * world + (rows if world > 1 else 0)
    return max(gathering, reducing)
