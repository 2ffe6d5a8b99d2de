"""Scenarios of state dicts, checkpoints, dtype conversions and the meta device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from behavior import (
    DIM,
    Api,
    batch,
    blocks_and_head,
    full_value,
    grads,
    scenario,
    shard,
    train,
    weights,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


def gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: full_value(value) for name, value in state.items()}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@scenario()
def state_dict_of_a_model(api: Api) -> dict[str, Any]:
    """Records state dicts before the first forward, after training, and while unsharded."""
    results: dict[str, Any] = {}
    for reshard in (True, False):
        model = shard(api, blocks_and_head(), reshard_after_forward=reshard)

        def record_case(case: str, model: nn.Module = model, reshard: bool = reshard) -> None:
            state = model.state_dict()
            results[f"reshard {reshard}, {case}"] = [
                [name, type(v).__name__, str(v.placements), list(v.shape), v.requires_grad]
                for name, v in state.items()
            ] + [gathered(state)]

        record_case("at first")
        model(batch(api.rank))
        record_case("after a forward without backward")
        results[f"reshard {reshard}, kinds"] = [type(p).__name__ for p in model.parameters()]
        train(model, api.rank, 1)
        record_case("after training")
    return results


@scenario()
def state_dict_aliases_trained_weights(api: Api) -> list[Any]:
    """A state dict taken before training aliases the trained weights."""
    model = shard(api, blocks_and_head())
    state = model.state_dict()
    local = {name: value.to_local() for name, value in state.items()}
    train(model, api.rank, 2)
    now = weights(model)
    return [
        now,
        gathered(state),
        [torch.equal(local[n], p.to_local()) for n, p in model.named_parameters()],
        [local[n].data_ptr() == p.to_local().data_ptr() for n, p in model.named_parameters()],
        [state[n].untyped_storage().nbytes() for n in state],
    ]


@scenario()
def loaded_state_dict(api: Api) -> dict[str, Any]:
    """Loads by copy and by assignment: initially, between steps, and while unsharded."""
    results: dict[str, Any] = {}
    for assign in (False, True):
        for when in ("at first", "after a step", "after a forward"):
            source = shard(api, blocks_and_head(seed=11))
            model = shard(api, blocks_and_head(), reshard_after_forward=False)
            if when == "after a step":
                train(model, api.rank, 1)
            if when == "after a forward":
                model(batch(api.rank))
            model.load_state_dict(
                {name: value.clone() for name, value in source.state_dict().items()}, assign=assign
            )
            results[f"assign {assign}, {when}"] = train(model, api.rank, 2)
    return results


@scenario()
def state_assigned_by_load_state_dict(api: Api) -> list[bool]:
    """Returns whether training changes the loaded tensors, and whether they are the parameters.

    The sizes are even: FSDP2 copies a loaded shard that needs padding.
    """
    source, model = (api.fully_shard(nn.Linear(DIM, 4)) for _ in range(2))
    state = {name: value.clone() for name, value in source.state_dict().items()}
    model.load_state_dict(state, assign=True)
    before = {name: full_value(value) for name, value in state.items()}
    train(model, api.rank, 1)
    return [not torch.equal(before[name], full_value(state[name])) for name in state] + [
        state[name].to_local().data_ptr() == p.to_local().data_ptr()
        for name, p in model.named_parameters()
    ]


def initialize(model: nn.Module) -> None:
    torch.manual_seed(5)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def on_meta(api: Api) -> nn.Sequential:
    with torch.device("meta"):
        model = blocks_and_head()
    return shard(api, model)


@scenario()
def meta_device(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model = on_meta(api)
    model.to_empty(device="cpu")
    initialize(model)
    results["trained"] = train(model, api.rank, 2)

    model = on_meta(api)
    model.load_state_dict(shard(api, blocks_and_head(seed=11)).state_dict(), assign=True)
    results["assigned"] = train(model, api.rank, 2)

    model = on_meta(api)
    full = blocks_and_head(seed=11).state_dict() if api.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model.to_empty(device="cpu")
    set_model_state_dict(model, full, options=options)
    results["broadcast"] = train(model, api.rank, 2)
    return results


@scenario()
def forward_on_the_meta_device(api: Api) -> dict[str, Any]:
    """A forward on meta raises; then the model is materialized and trained."""
    model = on_meta(api)
    results: dict[str, Any] = {}
    try:
        model(batch(api.rank))
    except RuntimeError as error:
        results["message"] = str(error).partition("\n")[0]
    model.to_empty(device="cpu")
    initialize(model)
    try:
        results["trained"] = train(model, api.rank, 2)
    except AttributeError as error:
        results["broken"] = str(error)
    return results


@scenario()
def converted_model(api: Api) -> dict[str, Any]:
    """Calls ``model.double().float()`` before lazy init, after a step, and while unsharded."""
    results: dict[str, Any] = {}
    for when in ("at first", "after a step", "after a forward"):
        model = shard(api, blocks_and_head(), reshard_after_forward=False)
        if when == "after a step":
            train(model, api.rank, 1)
        if when == "after a forward":
            model(batch(api.rank))
        model.double()
        model.float()
        results[when] = train(model, api.rank, 2)
    model = shard(api, blocks_and_head())
    model.double()
    results["double from the first forward on"] = model(batch(api.rank).double()).detach()
    return results


@scenario()
def converted_after_training(api: Api) -> list[Any]:
    """Returns the output, the output of an unsharded model of the same weights, and gradients."""
    model = shard(api, blocks_and_head())
    train(model, api.rank, 1)
    alone = blocks_and_head().double()
    alone.load_state_dict(weights(model))
    model.double()
    output = model(batch(api.rank).double())
    output.square().mean().backward()
    return [output.detach(), alone(batch(api.rank).double()).detach(), grads(model)]


@scenario()
def converted_between_backwards(api: Api) -> dict[str, Any]:
    """Returns the gradients of two microbatches. ``model.double().float()`` runs in between."""
    results: dict[str, Any] = {}
    replicated = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for reduce_dtype in (None, torch.float64):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for setter, mesh in (
            ("set_requires_gradient_sync", None),
            ("set_requires_gradient_sync", replicated),
            ("set_requires_all_reduce", replicated),
        ):
            model = shard(api, blocks_and_head(), mesh=mesh, mp_policy=policy)
            for last in (False, True):
                getattr(model, setter)(last)
                model(batch(api.rank, last)).square().mean().backward()
                if not last:
                    model.double()
                    model.float()
            results[f"{setter}, {mesh}, {reduce_dtype}"] = grads(model)
    return results


@scenario()
def converted_for_good_between_backwards(api: Api) -> list[Any]:
    """Returns the gradients of one microbatch and of two equal ones, in bfloat16."""
    results = []
    for backwards in (1, 2):
        model = shard(api, blocks_and_head())
        if backwards == 2:
            model.set_requires_gradient_sync(False)
            model(batch(0)).square().mean().backward()
            model.set_requires_gradient_sync(True)
        model.bfloat16()
        model(batch(0).bfloat16()).square().mean().backward()
        results.append(grads(model))
    return results


@scenario()
def converted_before_the_all_reduce(api: Api) -> None:
    """Converts for good while replicas have gradients that are not all-reduced."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard(api, blocks_and_head(), mesh=mesh)
    model.set_requires_all_reduce(False)
    model(batch(api.rank)).square().mean().backward()
    model.double()
    model(batch(api.rank).double()).square().mean().backward()


@contextlib.contextmanager
def swapped_tensors() -> Iterator[None]:
    """Makes modules convert parameters by ``swap_tensors`` in the context."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@scenario()
def swapped_parameters(api: Api) -> dict[str, Any]:
    """Converts, materializes and loads by ``swap_tensors``, which keeps the parameter objects."""
    results: dict[str, Any] = {}
    with swapped_tensors():
        model = shard(api, blocks_and_head())
        before = list(model.parameters())
        model.double()
        output = model(batch(api.rank).double())
        output.square().mean().backward()
        results["converted"] = [output.detach(), grads(model), weights(model)]
        results["same objects"] = [a is b for a, b in zip(before, model.parameters())]

        model = on_meta(api)
        model.to_empty(device="cpu")
        initialize(model)
        results["materialized"] = train(model, api.rank, 2)

        state = copy.deepcopy(shard(api, blocks_and_head(seed=11)).state_dict())
        model.load_state_dict(state)
        results["loaded"] = train(model, api.rank, 2)
        model.load_state_dict(state, assign=True)
        results["assigned"] = train(model, api.rank, 2)
    return results


@scenario()
def swapped_after_training(api: Api) -> list[Any]:
    """Returns double-precision gradients of models converted with and without ``swap_tensors``."""
    results = []
    for context in (swapped_tensors(), contextlib.nullcontext()):
        with context:
            model = shard(api, blocks_and_head())
            train(model, api.rank, 1)
            model.double()
            model(batch(api.rank).double()).square().mean().backward()
            results.append(grads(model))
    return results


@scenario()
def full_state_dicts(api: Api) -> dict[str, Any]:
    """Saves full state dicts of model and optimizer on the CPU, loads them and trains again."""
    model = shard(api, blocks_and_head())
    optimizer = adamw(model)
    train(model, api.rank, 2, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    results: dict[str, Any] = {"model": dict(full), "optimizer": copy.deepcopy(state)}

    other = shard(api, blocks_and_head(seed=11))
    other_optimizer = adamw(other)
    load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if api.rank == 0 else {}, options=load)
    # A copy, because loading would share the step counters of both optimizers.
    optimizer_state_of_rank_0 = copy.deepcopy(state) if api.rank == 0 else {}
    set_optimizer_state_dict(other, other_optimizer, optimizer_state_of_rank_0, options=load)
    results["broadcast"] = train(other, api.rank, 2, other_optimizer)
    results["continued"] = train(model, api.rank, 2, optimizer)
    return results


@scenario()
def sharded_state_dicts(api: Api) -> dict[str, Any]:
    model = shard(api, blocks_and_head())
    optimizer = adamw(model)
    train(model, api.rank, 2, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    state = copy.deepcopy(state)
    optimizer_state = copy.deepcopy(optimizer_state)
    other = shard(api, blocks_and_head(seed=11))
    other_optimizer = adamw(other)
    set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    return {
        "loaded": train(other, api.rank, 2, other_optimizer),
        "continued": train(model, api.rank, 2, optimizer),
    }


def checkpoint(api: Api, model: nn.Module, optimizer: Any, name: str) -> None:
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=str(api.folder / name))


def resume(api: Api, name: str) -> list[Any]:
    """Loads the checkpoint into a model of other weights and continues to train."""
    model = shard(api, blocks_and_head(seed=11))
    optimizer = adamw(model)
    state, optimizer_state = get_state_dict(model, optimizer)
    state_dicts = {"model": state, "optim": optimizer_state}
    dcp.load(state_dicts, checkpoint_id=str(api.folder / name))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state_dicts["model"],
        optim_state_dict=state_dicts["optim"],
    )
    return train(model, api.rank, 2, optimizer)


@scenario()
def checkpoints(api: Api) -> dict[str, Any]:
    """Each implementation writes a checkpoint, and both resume it; the writer continues too."""
    results: dict[str, Any] = {}
    for writer in (api, api.other()):
        model = shard(writer, blocks_and_head())
        optimizer = adamw(model)
        train(model, api.rank, 2, optimizer)
        checkpoint(writer, model, optimizer, writer.name)
        dist.barrier()
        for reader in (api, api.other()):
            results[f"written by {writer.name}, resumed by {reader.name}"] = resume(
                reader, writer.name
            )
        results[f"{writer.name} continued"] = train(model, api.rank, 2, optimizer)
    return results


@scenario()
def shared_and_uneven_parameters(api: Api) -> dict[str, Any]:
    """Records state dicts with empty shards and with a parameter of two names."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(DIM, DIM, bias=False)
            self.small = nn.Parameter(torch.ones(1, DIM))
            self.head = nn.Linear(DIM, DIM, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x) * self.small)

    torch.manual_seed(1)
    model = api.fully_shard(Tied())
    results: dict[str, Any] = {"at first": gathered(model.state_dict())}
    results["trained"] = train(model, api.rank, 2)
    results["same object"] = model.head.weight is model.embed.weight
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(2)
    other = api.fully_shard(Tied())
    other.load_state_dict(state)
    results["loaded"] = train(other, api.rank, 1)
    full = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
    results["full"] = {name: value for name, value in full.items() if value.numel()}
    return results
