"""Rank entry points that run scenarios on the simulated device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import scenarios
import sim_tools
import simulated
import torch
import torch.nn as nn
from features import Record, digest


class ScenarioRun(NamedTuple):
    """The record of one scenario, and the device's findings."""

    record: Record
    findings: list[str]


def run_scenario(
    scenario: Callable[[Any], Record], implementation: str, kernels: bool
) -> ScenarioRun:
    """Runs a scenario. If it raises, the exception's text is its record."""
    device = simulated.start()
    device.reset()
    simulated.use_kernels(kernels)
    tools: Any = sim_tools.SimTools(implementation)
    try:
        record = scenario(tools)
    except Exception as error:
        record = [f"raised {type(error).__name__}: {error}"]
    return ScenarioRun(record, device.findings())


def run(rank: int, world_size: int) -> dict[str, dict[str, ScenarioRun]]:
    """Runs every scenario under torch, and under fsdp_c with and without kernels."""
    warnings.simplefilter("ignore")
    sim_tools.init_loopback_group()
    return {
        name: {
            "torch": run_scenario(scenario, "torch", False),
            "fsdp_c": run_scenario(scenario, "fsdp_c", True),
            "fsdp_c without kernels": run_scenario(scenario, "fsdp_c", False),
        }
        for name, scenario in scenarios.SCENARIOS.items()
        if sim_tools.is_supported(name)
    }


def run_double_backward(rank: int, world_size: int) -> dict[str, Record]:
    """Records one step with a double backward.

    The step runs under both implementations, without resharding. The key "unsharded" is that of a
    model that is not sharded: under torch, ``scenarios.double_backward`` trains such a model.
    """
    sim_tools.init_loopback_group()
    simulated.start()
    torch_tools: Any = sim_tools.SimTools("torch")
    fsdp_c_tools: Any = sim_tools.SimTools("fsdp_c")
    return {
        "torch": scenarios.double_backward_without_reshard(torch_tools),
        "fsdp_c": scenarios.double_backward_without_reshard(fsdp_c_tools),
        "unsharded": scenarios.double_backward(torch_tools)[:2],
    }


def run_failed_backward(rank: int, world_size: int) -> dict[str, ScenarioRun]:
    """Runs a training that continues after a backward raised in autograd's thread of the device."""
    sim_tools.init_loopback_group()
    with_reset, without_reset = (
        partial(scenarios.failed_backward, reset=reset) for reset in (True, False)
    )
    return {
        "fsdp_c with a reset": run_scenario(with_reset, "fsdp_c", True),
        "fsdp_c": run_scenario(without_reset, "fsdp_c", True),
        "torch": run_scenario(without_reset, "torch", True),
    }


def run_on_threads(rank: int, world_size: int) -> dict[str, list[Record]]:
    """Trains four models on four devices at the same time, each in its own thread.

    Returns by implementation: the record of each thread, then the device's findings.
    """
    warnings.simplefilter("ignore")
    sim_tools.init_loopback_group()
    device = simulated.start()
    simulated.use_kernels(True)
    sim_tools.make_mesh((sim_tools.WORLD,), None)  # the threads use the cached mesh
    records_by_implementation: dict[str, list[Record]] = {}
    for implementation in ("torch", "fsdp_c"):
        device.reset()
        records: list[Record] = [[] for _ in range(4)]

        def train(index: int, name: str = implementation, records: Any = records) -> None:
            device.set_device(index)
            model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.1)
            tools: Any = sim_tools.SimTools(name)
            for child in (model[0], model[2], model):
                tools.fully_shard(child, mesh=tools.flat())
            for step in range(4):
                loss = model(torch.full((2, 8), 0.5 + step, device="sim")).sum()
                loss.backward()
                gradients = [p.grad for p in model.parameters()]
                records[index] += [str(loss.device), loss.item(), digest(gradients)]
                model.zero_grad()

        threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        records_by_implementation[implementation] = [*records, device.findings()]
    return records_by_implementation
