"""Runs scenarios on ranks that are threads of one process, each on its own simulated device.

The ranks exchange their data: the device's process group sends it through gloo between threads.
Each rank has its own data and meshes. The devices' streams share one vector clock, so a finding can
involve streams of several devices.
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
import torch215_scenarios
from features import Record
from sim_tools import SimTools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

RANKS = sim_tools.WORLD
TIMEOUT = timedelta(seconds=60)
"""Time after which a rank's collective fails if another rank has failed."""

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
    "manual_finalization_with_replicas",
)


class ThreadTools(SimTools):
    """``SimTools`` whose meshes belong to the calling thread: they are not cached."""

    def mesh(self, *names: str) -> DeviceMesh:
        return init_device_mesh("sim", (2, self.world_size // 2), mesh_dim_names=names)

    def flat(self) -> DeviceMesh:
        return init_device_mesh("sim", (self.world_size,))


_generator_lock = threading.Lock()
_original_blocks = scenarios.blocks


def _locked_blocks(*args: Any, **kwargs: Any) -> nn.Sequential:
    """``scenarios.blocks`` under a lock. It seeds torch's global generator, which all threads
    share."""
    with _generator_lock:
        return _original_blocks(*args, **kwargs)


def run_on_ranks(backend: str, function: Callable[[int], Any]) -> list[Any]:
    """Calls ``function(rank)`` in a thread per rank. Returns the results by rank; the result of a
    rank that raised is a list with the exception's text."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            simulated.start().set_device(rank)
            options = {"rank": rank, "world_size": RANKS, "store": store, "timeout": TIMEOUT}
            dist.init_process_group(backend, **options)
            results[rank] = function(rank)
            dist.destroy_process_group()
        except Exception as error:
            results[rank] = [f"raised {type(error).__name__}: {error}"]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threaded._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return results


class ScenarioRun(NamedTuple):
    records: list[Record]
    """Records by rank."""
    findings: list[str]


def run_scenario(name: str, implementation: str) -> ScenarioRun:
    """Runs a scenario on all ranks."""
    device = simulated.start()
    device.reset()
    records = run_on_ranks(
        "cpu:gloo,sim:sccl",
        lambda rank: scenarios.SCENARIOS[name](ThreadTools(implementation, rank, RANKS)),
    )
    return ScenarioRun(records, device.findings())


def _train_on_rank(rank: int) -> list[torch.Tensor]:
    """Trains a sharded model. Returns this rank's shards."""
    tools: Any = ThreadTools("fsdp_c", rank, RANKS)
    model = tools.shard(scenarios.blocks())
    tools.train(model)
    return [param.to_local().cpu() for param in model.parameters()]


def train_sharded_and_single(backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Trains a model sharded over all ranks, and a single model on the mean of the ranks' losses.

    Returns the weights of both, by parameter.
    """
    shards = run_on_ranks(backend, _train_on_rank)
    model = scenarios.blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tools = [features.Tools(rank, RANKS, "fsdp_c") for rank in range(RANKS)]
    for step in range(3):
        for rank_tools in tools:
            (model(rank_tools.input(10 * step)).pow(2).sum() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = [torch.cat(parts) for parts in zip(*shards, strict=True)]
    return list(zip(sharded, [p.detach() for p in model.parameters()], strict=True))


class Results(NamedTuple):
    runs: dict[str, dict[str, ScenarioRun]]
    """Runs by scenario and implementation."""
    weights: dict[str, list[tuple[torch.Tensor, torch.Tensor]]]
    """Sharded and single weights, by backend of the group."""


def run(rank: int, world_size: int) -> Results:
    """Starts the threads that are the ranks."""
    warnings.simplefilter("ignore")
    simulated.start()
    simulated.use_kernels(True)
    for module in (scenarios, torch215_scenarios):
        module.blocks = _locked_blocks  # type: ignore[assignment]
    dist.destroy_process_group()
    runs = {
        name: {
            implementation: run_scenario(name, implementation)
            for implementation in ("torch", "fsdp_c")
        }
        for name in SCENARIOS
    }
    backends = ("cpu:gloo,sim:sccl", "cpu:gloo,sim:loop")
    return Results(runs, {backend: train_sharded_and_single(backend) for backend in backends})
