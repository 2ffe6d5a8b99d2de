"""Rank that trains a model on the CPU and one on the simulated device, over one process group."""

from __future__ import annotations

import os
from typing import Any

import simulated
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_c import fully_shard

if os.environ.get("FSDP_C_PARITY_DEVICE") == "sim":  # in a rank, before init_process_group()
    simulated.start()


def _make_model(device: str, world: int) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (world,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert mesh.get_group() is dist.group.WORLD
    return model


def _step(model: Any, device: str, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.full((2, 8), 1.0 + rank, device=device)).square().mean().backward()
    return [param.grad.to_local().cpu() for param in model.parameters()]


def train_on_both(rank: int, world: int) -> list[bool]:
    """Returns for each of six steps whether the gradients on both devices are equal."""
    devices = ("cpu", "sim")
    models = {device: _make_model(device, world) for device in devices}
    equal = []
    for _ in range(6):
        on_cpu, on_device = (_step(models[device], device, rank) for device in devices)
        equal.append(all(map(torch.equal, on_cpu, on_device)))
    return equal
