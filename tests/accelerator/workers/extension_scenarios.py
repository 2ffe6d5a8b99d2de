"""Scenarios of all-gather extensions on the simulated device: their hooks read and write on the
streams that are current, so that a hook that is called on another one than stock's is a race, or
notes it."""

from __future__ import annotations

import functools
from typing import Any

import features
import torch
import torch.nn as nn
from extensions import One
from features import MIXED, Record, blocks
from releases import groups_of
from sim_tools import SimTools, prefetch_neighbours, scenario
from torch.distributed.fsdp import CPUOffloadPolicy

_COMPUTES: list[torch.Stream] = []
"""The stream that the latest scenario began on."""


def _stream(group: Any) -> str:
    current = torch.accelerator.current_stream()
    context = group.comm_ctx
    if current == _COMPUTES[-1]:
        return "computes"
    for name in ("all_gather_copy_in_stream", "all_gather_stream"):
        if current == getattr(context, name, None):
            return name
    return "another"


def _send(notes: Record, group: Any, local: torch.Tensor, mesh: Any) -> Any:
    """Half of the shard twice, in two types, and one row more of a third."""
    notes.append(("send", _stream(group), mesh.size()))
    half = local.detach() / 2
    return (half, half.double(), half.new_ones(5, dtype=torch.int32)), len(local)


def _make(
    notes: Record,
    group: Any,
    outputs: tuple[torch.Tensor, ...],
    metadata: int,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> Any:
    notes.append(("make", _stream(group), [tuple(o.shape) for o in outputs], metadata, dtype))
    made = (outputs[0] + outputs[1].to(outputs[0].dtype)).to(dtype)
    if out is None:
        return made, (made,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(made[: len(out)])
    return None


def extended(model: nn.Sequential) -> Record:
    """Gives the matrices' shards hooks; what those note."""
    notes: Record = []
    _COMPUTES[:] = [torch.accelerator.current_stream()]
    for unit in (*model, model):
        for group in groups_of(unit._get_fsdp_state()):
            for param in group.fsdp_params:
                local = param.sharded_param._local_tensor
                if local.ndim == 2:
                    local.fsdp_pre_all_gather = functools.partial(_send, notes, group, local)
                    local.fsdp_post_all_gather = functools.partial(_make, notes, group)
    return notes


def _train(tools: SimTools, model: nn.Sequential, **kwargs: Any) -> Record:
    notes = extended(model)
    record = tools.train(model, **kwargs)
    return [*record, *notes]


@scenario
def extension_hooks(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks()))


@scenario
def extension_hooks_mixed(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks(), mp_policy=MIXED))


@scenario
def extension_hooks_of_replicas(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks(), mesh=tools.mesh("replicate", "shard")))


@scenario
def extension_hooks_kept(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks(), reshard_after_forward=False))


@scenario
def extension_hooks_accumulated(tools: SimTools) -> Record:
    model = tools.shard(blocks(), mp_policy=MIXED)
    return _train(tools, model, micro=3, sync=features._all_sync)


@scenario
def extension_hooks_prefetched(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    prefetch_neighbours(model)
    return _train(tools, model)


@scenario
def extension_hooks_asynchronous(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    model._set_unshard_async_op(True)
    return _train(tools, model)


@scenario
def extension_hooks_unsharded_by_hand(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    notes = extended(model)
    record: Record = []
    for _ in range(2):
        handles = [unit.unshard(async_op=True) for unit in (*model, model)]
        handles[0].wait()
        record += tools.train(model)
    return [*record, *notes]


@scenario
def extension_offloaded(tools: SimTools) -> Record:
    """Whose shards are copied to the device before their hooks are asked: subclasses, then."""
    model = blocks()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(One(module.weight.detach()))
    tools.shard(model, offload_policy=CPUOffloadPolicy())
    return tools.accumulate(model)
