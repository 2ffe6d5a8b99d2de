"""Groups whose ``post_backward`` a program calls directly, on the simulated device.

No end-of-backward callback follows. fsdp_c orders the current stream after the reductions before
the method returns; torch orders nothing, so that a program that then reads gradients races.
"""

from __future__ import annotations

from typing import Any

import torch
from features import MIXED, Record, blocks, digest
from fsdp_units import param_groups_of, set_last_microbatch
from sim_tools import SimTools, scenario
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

TORCH_RACES = {
    "direct_calls": "is not ordered after the write by reduce_scatter",
    "direct_calls_mixed": "is not ordered after the write by reduce_scatter",
    "direct_calls_with_replicas": "is not ordered after the write by all_reduce",
    "direct_calls_offloaded": "of the host does not wait for aten::copy_",
    "direct_calls_with_a_reduce_hook": "is not ordered after the write by aten::div",
}
"""Scenarios in which torch's program races, and words of the finding."""


def _train(tools: SimTools, model: Any) -> Record:
    """Runs three optimizer steps of two microbatches each; the groups reduce after the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record: Record = []
    for step in range(3):
        set_last_microbatch(model, False)
        for microbatch in range(2):
            model(tools.input(2 * step + microbatch)).pow(2).sum().backward()
        set_last_microbatch(model, True)
        for group in param_groups_of(model):
            group.post_backward()
        record.append(digest(parameter.grad for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return record


@scenario
def direct_calls(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks()))


@scenario
def direct_calls_mixed(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks(), mp_policy=MIXED))


@scenario
def direct_calls_with_replicas(tools: SimTools) -> Record:
    mesh = tools.mesh("replicate", "shard")
    return _train(tools, tools.shard(blocks(), mesh=mesh, mp_policy=MIXED))


@scenario
def direct_calls_offloaded(tools: SimTools) -> Record:
    return _train(tools, tools.shard(blocks(), offload_policy=CPUOffloadPolicy()))


@scenario
def direct_calls_with_a_reduce_hook(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(lambda row: row.div_(2))
    return _train(tools, model)
