"""Scripts that write or read parameters in unusual places: forward, hooks, while unsharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from fsdp_units import units_of
from scripts import Script, copy_of, script

# ---- writes in forward ----


class WritesParameter(nn.Module):
    """Writes to its parameter in forward, then uses it."""

    def __init__(self, width: int, write: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.write = write

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.write(self.weight)
        return rows @ self.weight


def train_with_writes(api: Script, write: Callable[[nn.Parameter], Any]) -> list[Any]:
    torch.manual_seed(0)
    modules = (WritesParameter(api.width, write) for _ in range(2))
    return api.train(api.shard(nn.Sequential(*modules)))


@script(wide=True)
def forward_writes_parameter_in_place(api: Script) -> Any:
    @torch.no_grad()
    def write(weight: nn.Parameter) -> None:
        weight.mul_(0.5)

    return train_with_writes(api, write)


@script(wide=True)
def forward_writes_parameter_data_in_place(api: Script) -> Any:
    return train_with_writes(api, lambda weight: weight.data.mul_(0.5))


@script(wide=True)
def forward_replaces_parameter_data(api: Script) -> Any:
    def write(weight: nn.Parameter) -> None:
        weight.data = weight.data * 0.5

    return train_with_writes(api, write)


@torch.no_grad()
def clamp(module: Any, args: Any) -> None:
    bound = 0.5 / module[0].in_features ** 0.5  # half of the initialization bound
    module[0].weight.clamp_(-bound, bound)


def train_clamped(api: Script, hook_first: bool) -> list[Any]:
    """A pre-forward hook, registered before or after sharding, clamps the weight."""
    model = api.blocks()
    if not hook_first:
        api.shard(model)
    for block in model:
        block.register_forward_pre_hook(clamp)
    if hook_first:
        api.shard(model)
    return api.train(model)


@script(wide=True)
def pre_forward_hook_before_sharding_clamps_weights(api: Script) -> Any:
    return train_clamped(api, hook_first=True)


@script()
def pre_forward_hook_after_sharding_clamps_weights(api: Script) -> Any:
    return train_clamped(api, hook_first=False)


# ---- manually unsharded parameters ----


@script()
def write_to_manually_unsharded_parameters(api: Script) -> Any:
    """Writes to manually unsharded parameters must not change the shards."""
    model = api.sharded()
    units = units_of(model)
    for unit in units:
        unit.unshard()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    results = [copy_of(param) for param in model.parameters()]
    for unit in units:
        unit.reshard()
    return [results, api.train(model)]


@script()
def manual_async_unshard_of_all_units(api: Script) -> Any:
    model = api.sharded()
    handles = [block.unshard(async_op=True) for block in model]
    for handle in handles:
        handle.wait()
    results = [copy_of(block[0].weight) for block in model]
    for block in model:
        block.reshard()
    return [results, api.train(model)]


# ---- reads in hooks ----


@script()
def backward_hooks_read_weights(api: Script) -> Any:
    """Records whether weights are sharded when a module's backward hooks run."""
    model = api.sharded()
    results: list[Any] = []
    for block in model:
        block.register_full_backward_hook(
            lambda module, given, returned: results.append(
                [type(module[0].weight).__name__, copy_of(module[0].weight)]
            )
        )
    return [api.train(model), results]


@script()
def output_hooks_read_weights(api: Script) -> Any:
    model = api.sharded()
    results: list[str] = []

    def loss(step: int) -> torch.Tensor:
        output = model(api.rows(step))
        output.register_hook(lambda gradient: results.append(type(model[2][0].weight).__name__))
        return output.square().mean()

    return [api.train(model, loss), results]


@script()
def module_hook_order(api: Script) -> Any:
    """Records the order of module hooks in both directions, registered before and after sharding,
    and whether they receive sharded parameters."""
    model = api.blocks()
    results: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda module, *args: results.append(f"{name} {type(module[0].weight).__name__}")

    for index, block in enumerate(model):
        block.register_forward_pre_hook(record(f"pre {index}"))
        block.register_forward_hook(record(f"post {index}"))
        block.register_full_backward_pre_hook(record(f"backward pre {index}"))
        block.register_full_backward_hook(record(f"backward {index}"))
    api.shard(model)
    for index, block in enumerate(model):
        block.register_forward_pre_hook(record(f"late pre {index}"), prepend=True)
        block.register_forward_hook(record(f"late post {index}"), prepend=True)
    for index, param in enumerate(model.parameters()):
        param.register_post_accumulate_grad_hook(
            lambda param, index=index: results.append(f"gradient {index}")
        )
    return [api.train(model), results]
