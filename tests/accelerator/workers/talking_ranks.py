"""Ranks that are threads of one process, each on a device of its own, in one group that really
moves their data: gloo between threads, behind the simulated device's streams.

Scenarios run as they are; each rank has other data, and meshes of its own. What the device finds
is about all devices: their streams share one time.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import features
import scenarios
import sim_tools
import simulated
import torch
import torch.distributed as dist
import torch.nn as nn
from features import Record
from sim_tools import SimTools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

RANKS = sim_tools.WORLD
PATIENCE = timedelta(seconds=60)
"""How long a rank waits for one that has failed."""

SCENARIOS = (
    "plain",
    "mixed",
    "uneven_rows",
    "second_dim",
    "smaller_group_after_forward",
    "prefetched",
    "hsdp_mixed",
    "hsdp_partial",
    "reduce_hook",
    "replicated",
    "offload",
    "custom_collectives",
    "finalized_by_hand_with_replicas",
)


class TalkingTools(SimTools):
    """Meshes are those of the thread."""

    def mesh(self, *names: str) -> DeviceMesh:
        return init_device_mesh("sim", (2, self.world_size // 2), mesh_dim_names=names)

    def flat(self) -> DeviceMesh:
        return init_device_mesh("sim", (self.world_size,))


_one_at_a_time = threading.Lock()
_blocks = scenarios.blocks


def _seeded_blocks(*args: Any, **kwargs: Any) -> nn.Sequential:
    """The same on all threads, which share the generator that is seeded."""
    with _one_at_a_time:
        return _blocks(*args, **kwargs)


def on_ranks(backend: str, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(rank)`` returns on each thread; an exception is told by its text."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            simulated.start().set_device(rank)
            options = {"rank": rank, "world_size": RANKS, "store": store, "timeout": PATIENCE}
            dist.init_process_group(backend, **options)
            results[rank] = work(rank)
            dist.destroy_process_group()
        except Exception as error:
            results[rank] = [f"{type(error).__name__}: {error}"]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threaded._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return results


class Talk(NamedTuple):
    records: list[Record]
    """By rank."""
    findings: list[str]


def talk(name: str, implementation: str) -> Talk:
    """A scenario on all ranks."""
    device = simulated.start()
    device.forget()
    records = on_ranks(
        "cpu:gloo,sim:sccl",
        lambda rank: scenarios.SCENARIOS[name](TalkingTools(rank, RANKS, implementation)),
    )
    return Talk(records, device.findings())


def _weights_of_a_rank(rank: int) -> list[torch.Tensor]:
    tools: Any = TalkingTools(rank, RANKS, "fsdp_c")
    model = tools.shard(scenarios.blocks())
    tools.train(model)
    return [param.to_local().cpu() for param in model.parameters()]


def weights_beside_one_model(backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(what all ranks together have trained, one model that was trained with their mean)."""
    shards = on_ranks(backend, _weights_of_a_rank)
    model = scenarios.blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tools = [features.Tools(rank, RANKS, "fsdp_c") for rank in range(RANKS)]
    for step in range(3):
        for one in tools:
            (model(one.input(10 * step)).pow(2).sum() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    together = [torch.cat(parts) for parts in zip(*shards, strict=True)]
    return list(zip(together, [p.detach() for p in model.parameters()], strict=True))


class Told(NamedTuple):
    talks: dict[str, dict[str, Talk]]
    """By scenario and implementation."""
    weights: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]
    """By backend of the group, and parameter."""


def run(rank: int, world_size: int) -> Told:
    """The target of a launch."""
    warnings.simplefilter("ignore")
    simulated.start()
    simulated.use_kernels(True)
    scenarios.blocks = _seeded_blocks
    dist.destroy_process_group()
    talks = {
        name: {implementation: talk(name, implementation) for implementation in ("torch", "fsdp_c")}
        for name in SCENARIOS
    }
    backends = ("cpu:gloo,sim:sccl", "cpu:gloo,sim:loop")
    return Told(talks, {backend: weights_beside_one_model(backend) for backend in backends})
