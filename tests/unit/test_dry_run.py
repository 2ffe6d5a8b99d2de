"""The dry run has the order of events and the memory of the core's training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import core_trace
import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fsdp_c import fully_shard

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BATCH = torch.ones(2, 8)

# ---- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two linear layers, 8 -> 24 -> 8, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    """An input layer, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(Chain):
    """Runs its first block twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        return self.head(self.blocks[0](self.blocks[1](x)))


class Checkpointed(Chain):
    """Recomputes each block in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Unused(Chain):
    """Does not run its last block, and one parameter of the root gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.embed(x))))


def shard(model: Any, **kwargs: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def nested() -> Any:
    model = Chain()
    for block in model.blocks:
        fully_shard(block.down)  # type: ignore[union-attr]
    return shard(model)


def frozen() -> Any:
    model = Chain()
    model.blocks[1].requires_grad_(False)
    model.head.weight.requires_grad_(False)
    return shard(model)


def hybrid() -> Any:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    return shard(Chain(), mesh=mesh)


def replicated() -> Any:
    return fsdp_c.replicate(Chain(), bucket_cap_mb=600 / 2**20)


def replicated_blocks() -> Any:
    model = Chain()
    for block in model.blocks:
        fsdp_c.replicate(block)
    return fsdp_c.replicate(model)


def prefetching() -> Any:
    model = shard(Chain())
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    return model


def list_of_modules() -> Any:
    model = Chain()
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model.blocks[2])
    return fully_shard(model)


def separate_roots() -> Any:
    model = Chain()
    for block in model.blocks:
        fully_shard(block)
    return model


def without_backward_unshard() -> Any:
    model = shard(Chain())
    model.blocks[0].set_unshard_in_backward(False)
    model.blocks[2].set_reshard_after_backward(False, recurse=False)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "chain": lambda: shard(Chain()),
    "nested units": nested,
    "unit that runs twice": lambda: shard(Shared()),
    "reshard_after_forward=False": lambda: shard(Chain(), reshard_after_forward=False),
    "reshard_after_forward=True": lambda: shard(Chain(), reshard_after_forward=True),
    "reshard_after_forward=4": lambda: shard(Chain(), reshard_after_forward=4),
    "replicas": hybrid,
    "frozen parameters": frozen,
    "mixed precision": lambda: shard(Chain(), mp_policy=MIXED),
    "offload": lambda: shard(Chain(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "replicate with buckets": replicated,
    "replicate of several units": replicated_blocks,
    "unused parameters": lambda: shard(Unused()),
    "activation checkpointing": lambda: shard(Checkpointed()),
    "explicit prefetch": prefetching,
    "list of modules": list_of_modules,
    "several roots": separate_roots,
}


@pytest.mark.parametrize("name", MODELS)
def test_dry_run_events_equal_trace_of_the_core(name: str, fake_group: int) -> None:
    model = MODELS[name]()
    events = core_trace.run_dry(model, BATCH)
    step = core_trace.step_of(model, BATCH)
    step()  # lazy initialization is not part of a step
    model.zero_grad()
    core = core_trace.trace_core(step)
    dry = core_trace.trace_events(events, model)
    assert len(core) > 40, "found too few events: the test would check nothing"
    assert core_trace.first_difference(core, dry) == ""
