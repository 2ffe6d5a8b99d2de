"""Scenarios of all-gather extensions on the simulated device.

The hooks read and write on the current stream and record which stream that is. A hook that is
called on another stream than under torch changes the record, or the device reports a race.
"""

from __future__ import annotations

import functools
from typing import Any

import features
import torch
import torch.nn as nn
from extensions import OneArgument
from features import MIXED, Record, blocks
from releases import groups_of
from sim_tools import SimTools, prefetch_neighbors, scenario
from torch.distributed.fsdp import CPUOffloadPolicy

_COMPUTE_STREAM: list[torch.Stream] = []
"""The stream that was current when the latest scenario installed its hooks."""


def _current_stream_name(group: Any) -> str:
    current = torch.accelerator.current_stream()
    context = group.comm_ctx
    if current == _COMPUTE_STREAM[-1]:
        return "compute stream"
    for name in ("all_gather_copy_in_stream", "all_gather_stream"):
        if current == getattr(context, name, None):
            return name
    return "another stream"


def _pre_all_gather(calls: Record, group: Any, local: torch.Tensor, mesh: Any) -> Any:
    """Returns three all-gather inputs: the shard divided by 2, in its dtype and in float64, and an
    int32 tensor of five elements."""
    calls.append(("pre_all_gather", _current_stream_name(group), mesh.size()))
    half = local.detach() / 2
    return (half, half.double(), half.new_ones(5, dtype=torch.int32)), len(local)


def _post_all_gather(
    calls: Record,
    group: Any,
    outputs: tuple[torch.Tensor, ...],
    metadata: int,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> Any:
    shapes = [tuple(output.shape) for output in outputs]
    calls.append(("post_all_gather", _current_stream_name(group), shapes, metadata, dtype))
    unsharded = (outputs[0] + outputs[1].to(outputs[0].dtype)).to(dtype)
    if out is None:
        return unsharded, (unsharded,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(unsharded[: len(out)])
    return None


def install_hooks(model: nn.Sequential) -> Record:
    """Sets all-gather hooks on the shards of all matrices.

    Returns the list to which the hooks append their calls.
    """
    calls: Record = []
    _COMPUTE_STREAM[:] = [torch.accelerator.current_stream()]
    for unit in (*model, model):
        for group in groups_of(unit._get_fsdp_state()):
            for param in group.fsdp_params:
                local = param.sharded_param._local_tensor
                if local.ndim == 2:
                    local.fsdp_pre_all_gather = functools.partial(
                        _pre_all_gather, calls, group, local
                    )
                    local.fsdp_post_all_gather = functools.partial(_post_all_gather, calls, group)
    return calls


def _train(tools: SimTools, model: nn.Sequential, **kwargs: Any) -> Record:
    calls = install_hooks(model)
    record = tools.train(model, **kwargs)
    return [*record, *calls]


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
def extension_hooks_without_reshard(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks(), reshard_after_forward=False))


@scenario
def extension_hooks_accumulated(tools: SimTools) -> Record:
    model = tools.shard(blocks(), mp_policy=MIXED)
    return _train(tools, model, micro=3, sync=features.sync_last)


@scenario
def extension_hooks_prefetched(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    prefetch_neighbors(model)
    return _train(tools, model)


@scenario
def extension_hooks_asynchronous(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    model._set_unshard_async_op(True)
    return _train(tools, model)


@scenario
def extension_hooks_manual_unshard(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    calls = install_hooks(model)
    record: Record = []
    for _ in range(2):
        handles = [unit.unshard(async_op=True) for unit in (*model, model)]
        handles[0].wait()
        record += tools.train(model)
    return [*record, *calls]


@scenario
def extension_offloaded(tools: SimTools) -> Record:
    """Offloaded shards are copied to the device before their hooks are called.

    The copy keeps a subclass's methods and loses hooks set on the tensor. This scenario therefore
    uses a subclass.
    """
    model = blocks()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(OneArgument(module.weight.detach()))
    tools.shard(model, offload_policy=CPUOffloadPolicy())
    return tools.accumulate(model)
