"""Scenarios in which fsdp_c reduces each unit in several buckets, on the simulated device.

torch has no buckets: its run of the same scenario reduces each unit in one reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import features
from features import MIXED, Record, blocks
from sim_tools import SimTools, name_memory, scenario
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_c


def _set_smallest_buckets(tools: SimTools, model: Any) -> Any:
    """Makes fsdp_c reduce every parameter in its own bucket. Returns ``model``."""
    if not tools.is_torch:
        fsdp_c.set_bucket_cap(model, 1 / 2**20)
    return model


@scenario
def buckets(tools: SimTools) -> Record:
    return tools.train(_set_smallest_buckets(tools, tools.shard(blocks(), mp_policy=MIXED)))


@scenario
def buckets_of_one_unit(tools: SimTools) -> Record:
    """The model is one unit. The first of two microbatches accumulates gradients."""
    model = tools.fully_shard(blocks(), mesh=tools.flat())
    name_memory(model)
    return tools.train(_set_smallest_buckets(tools, model), micro=2, sync=features.sync_last)


@scenario
def buckets_with_replicas(tools: SimTools) -> Record:
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"), mp_policy=MIXED)
    return tools.train(_set_smallest_buckets(tools, model), micro=2, sync=features.all_reduce_last)


@scenario
def buckets_without_reshard_after_backward(tools: SimTools) -> Record:
    return tools.train(
        _set_smallest_buckets(tools, tools.shard(blocks())),
        micro=2,
        sync=lambda m, last: m.set_reshard_after_backward(last) or None,
    )


@scenario
def buckets_with_offload(tools: SimTools) -> Record:
    model = tools.shard(blocks(), offload_policy=CPUOffloadPolicy(), mp_policy=MIXED)
    return tools.train(_set_smallest_buckets(tools, model), micro=2, sync=features.sync_last)
