"""The targets of launches on the simulated device, in a process of their own."""

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


class Seen(NamedTuple):
    """What the device saw of one scenario."""

    record: Record
    findings: list[str]
    counts: dict[str, int]
    peak: int
    """Bytes."""


def see(scenario: Callable[[Any], Record], implementation: str, kernels: bool) -> Seen:
    """Runs a scenario. An exception is its record."""
    device = simulated.start()
    device.forget()
    device.reset_peak(0)
    start = device.max_memory_allocated(0)
    simulated.use_kernels(kernels)
    tools: Any = sim_tools.SimTools(0, sim_tools.WORLD, implementation)
    try:
        record = scenario(tools)
    except Exception as error:
        record = [f"{type(error).__name__}: {error}"]
    peak = device.max_memory_allocated(0) - start
    return Seen(record, device.findings(), device.counts(), peak)


def run(rank: int, world_size: int) -> dict[str, dict[str, Seen]]:
    """Every scenario under torch, and under fsdp_c with kernels of its own and without."""
    warnings.simplefilter("ignore")
    sim_tools.join_loop_group()
    return {
        name: {
            "torch": see(scenario, "torch", False),
            "fsdp_c": see(scenario, "fsdp_c", True),
            "fsdp_c without kernels": see(scenario, "fsdp_c", False),
        }
        for name, scenario in scenarios.SCENARIOS.items()
    }


def run_double_backward(rank: int, world_size: int) -> dict[str, Record]:
    """The first step of a double backward, under both implementations and without any."""
    sim_tools.join_loop_group()
    simulated.start()
    tools: Any = [sim_tools.SimTools(0, sim_tools.WORLD, name) for name in ("torch", "fsdp_c")]
    whole = [scenarios.double_backward_of_whole_units(one) for one in tools]
    plain = scenarios.double_backward(tools[0])[:2]
    return {"torch": whole[0], "fsdp_c": whole[1], "plain": plain}


def run_batch_left_out(rank: int, world_size: int) -> dict[str, Seen]:
    """A training that goes on after a backward that raised, in a thread of the device's."""
    sim_tools.join_loop_group()
    by_hand, alone = (partial(scenarios.batch_left_out, by_hand=given) for given in (True, False))
    return {
        "with a reset": see(by_hand, "fsdp_c", True),
        "fsdp_c": see(alone, "fsdp_c", True),
        "torch": see(alone, "torch", True),
    }


def run_on_threads(rank: int, world_size: int) -> dict[str, list[Record]]:
    """Four models on four devices, each trained by a thread of its own, at the same time.

    What the device found comes last in each record.
    """
    warnings.simplefilter("ignore")
    sim_tools.join_loop_group()
    device = simulated.start()
    simulated.use_kernels(True)
    sim_tools._mesh((sim_tools.WORLD,), None)
    found: dict[str, list[Record]] = {}
    for implementation in ("torch", "fsdp_c"):
        device.forget()
        records: list[Record] = [[] for _ in range(4)]

        def work(index: int, name: str = implementation, into: Any = records) -> None:
            device.set_device(index)
            model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.1)
            tools: Any = sim_tools.SimTools(0, sim_tools.WORLD, name)
            for child in (model[0], model[2], model):
                tools.fully_shard(child, mesh=tools.flat())
            for step in range(4):
                loss = model(torch.full((2, 8), 0.5 + step, device="sim")).sum()
                loss.backward()
                gradients = [p.grad for p in model.parameters()]
                into[index] += [str(loss.device), loss.item(), digest(gradients)]
                model.zero_grad()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found[implementation] = [*records, device.findings()]
    return found
