"""Checkpoints that one number of ranks saves and another number loads.

``save_all`` trains a model under one implementation and saves it in every layout. ``load_all``
loads checkpoints into a new model, continues to train, and returns all bits. The test compares the
bits of torch and of fsdp_c for the same checkpoint and the same number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from behavior import Api, full_values
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

WIDTH = 12
"""Columns are sharded evenly: 2, 3 and 4 ranks divide it."""
SAVED_STEPS, CONTINUED_STEPS = 2, 2
PRECISIONS = ("fp32", "mixed", "bf16")
FORMATS = ("sharded", "async", "full", "raw")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One saved file or folder: what trained the model, on which mesh, and how it was saved."""

    implementation: str
    mesh: tuple[int, ...]
    precision: str
    format: str

    @property
    def name(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return f"{self.implementation}-{mesh}-{self.precision}-{self.format}"


class Net(nn.Module):
    """A model that 2, 3 and 4 ranks divide unevenly, so that some ranks have no rows of a weight.

    One weight is sharded by columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.columns = nn.Linear(WIDTH, 5, bias=False)
        self.head = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x + self.inner(x) * self.scale
        return self.head(self.columns(x).relu())


def build(
    api: Api, precision: str, mesh: tuple[int, ...], seed: int
) -> tuple[nn.Module, torch.optim.AdamW]:
    """Returns a sharded model and an optimizer. ``mixed``: fp32 parameters that compute in bf16."""
    torch.manual_seed(seed)
    model = Net()
    if precision == "bf16":
        model.bfloat16()
    columns = model.columns.weight
    settings: dict[str, Any] = {
        "mesh": device_mesh(mesh),
        "shard_placement_fn": lambda parameter: Shard(1) if parameter is columns else None,
    }
    if precision == "mixed":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    api.fully_shard(model.inner, **settings)
    api.fully_shard(model, **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


@functools.cache
def device_mesh(shape: tuple[int, ...]) -> Any:
    names = ("replicas", "shards")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def saving_group() -> dist.ProcessGroup:
    """An asynchronous save has its own group: its collectives run beside those of the steps."""
    return dist.new_group()


def train(
    rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> list[Any]:
    """Returns this rank's losses, gradients and clip norms. Each step and rank has its own rows."""
    dtype = next(model.parameters()).dtype
    results: list[Any] = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(6, WIDTH, generator=generator).to(dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        results += [loss.detach(), [local(p.grad) for p in model.parameters()]]
        results.append(local(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return results


def local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gathers parameters, buffers, moments and step counts."""
    results = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            results[f"{name}.{key}"] = value
    return full_values(results)


# ---- formats ----


def save(checkpoint: Checkpoint, path: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> Any:
    """Returns the future of an asynchronous save, else None."""
    if checkpoint.format == "full":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = get_state_dict(model, optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": moments}, path)
        return None
    if checkpoint.format == "raw":
        weights = model.state_dict()
        moments = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
    else:
        weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if checkpoint.format == "async":
        return dcp.async_save(state, checkpoint_id=path, process_group=saving_group())
    dcp.save(state, checkpoint_id=path)
    return None


def load(
    checkpoint: Checkpoint, path: Path, model: nn.Module, optimizer: torch.optim.AdamW
) -> None:
    if checkpoint.format == "full":
        load_full(path, model, optimizer)
    elif checkpoint.format == "raw":
        weights = model.state_dict()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        moments = get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
        model.load_state_dict(weights)
        set_optimizer_state_dict(model, optimizer, moments, options=options)
    else:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def load_full(path: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Weights are broadcast from rank 0; every rank reads the moments itself."""
    state = torch.load(path, weights_only=True)
    broadcast_options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    weights = state["model"] if dist.get_rank() == 0 else {}
    set_model_state_dict(model, weights, options=broadcast_options)
    full_options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=full_options)


# ---- ranks ----


def prepare_rank(rank: int, world: int, implementation: str, folder: str) -> Api:
    importlib.import_module(implementation)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return Api(implementation, rank, world, Path(folder))


def save_all(
    rank: int, world: int, implementation: str, folder: str, checkpoints: list[Checkpoint]
) -> dict[str, Any]:
    """Returns, for each checkpoint, the saved state and this rank's bits of the steps around it."""
    api = prepare_rank(rank, world, implementation, folder)
    results = {}
    for checkpoint in checkpoints:
        model, optimizer = build(api, checkpoint.precision, checkpoint.mesh, seed=1)
        trained = train(rank, model, optimizer, range(SAVED_STEPS))
        saved = whole_state(model, optimizer)
        future = save(checkpoint, Path(folder, checkpoint.name), model, optimizer)
        continued = train(rank, model, optimizer, range(100, 100 + CONTINUED_STEPS))
        if future is not None:
            future.result()
        results[checkpoint.name] = {"saved": saved, "trained": trained, "continued": continued}
        results[checkpoint.name]["end"] = [local(p) for p in model.parameters()]
    return results


def load_all(
    rank: int,
    world: int,
    implementation: str,
    folder: str,
    loads: list[tuple[Checkpoint, tuple[int, ...]]],
) -> dict[Any, Any]:
    """Returns, for each checkpoint and mesh, the loaded state and this rank's later bits."""
    api = prepare_rank(rank, world, implementation, folder)
    results = {}
    for checkpoint, mesh in loads:
        model, optimizer = build(api, checkpoint.precision, mesh, seed=2)
        load(checkpoint, Path(folder, checkpoint.name), model, optimizer)
        loaded = whole_state(model, optimizer)
        continued = train(rank, model, optimizer, range(100, 100 + CONTINUED_STEPS))
        results[checkpoint.name, mesh] = {"loaded": loaded, "continued": continued}
        results[checkpoint.name, mesh]["end"] = [local(p) for p in model.parameters()]
    return results
