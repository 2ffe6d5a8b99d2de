"""Scripts that write to parameters, or look at them, where FSDP2 does not expect it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from scripts import Script, copy_of, script
from torch.distributed.fsdp import FSDPModule

# ---- writes in forward ----


class Written(nn.Module):
    """Writes to its parameter, then uses it."""

    def __init__(self, width: int, write: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.write = write

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.write(self.weight)
        return rows @ self.weight


def with_writes(run: Script, write: Callable[[nn.Parameter], Any]) -> list[Any]:
    torch.manual_seed(0)
    modules = (Written(run.width, write) for _ in range(2))
    return run.train(run.shard(nn.Sequential(*modules)))


@script(wide=True)
def forward_scales_its_parameter(run: Script) -> Any:
    @torch.no_grad()
    def write(weight: nn.Parameter) -> None:
        weight.mul_(0.5)

    return with_writes(run, write)


@script(wide=True)
def forward_scales_the_data_of_its_parameter(run: Script) -> Any:
    return with_writes(run, lambda weight: weight.data.mul_(0.5))


@script(wide=True)
def forward_gives_its_parameter_other_data(run: Script) -> Any:
    def write(weight: nn.Parameter) -> None:
        weight.data = weight.data * 0.5

    return with_writes(run, write)


@torch.no_grad()
def clamp(module: Any, args: Any) -> None:
    bound = 0.5 / module[0].in_features ** 0.5  # half of what weights are drawn from
    module[0].weight.clamp_(-bound, bound)


def clamped(run: Script, first: bool) -> list[Any]:
    """A hook before forward clamps the weight; it is registered before sharding, or after."""
    model = run.blocks()
    if not first:
        run.shard(model)
    for block in model:
        block.register_forward_pre_hook(clamp)
    if first:
        run.shard(model)
    return run.train(model)


@script(wide=True)
def an_early_hook_clamps_weights(run: Script) -> Any:
    return clamped(run, first=True)


@script()
def a_late_hook_clamps_weights(run: Script) -> Any:
    return clamped(run, first=False)


# ---- writes to what was gathered by hand ----


@script()
def written_while_unsharded_by_hand(run: Script) -> Any:
    """What was written to the whole parameters does not reach the shards."""
    model = run.sharded()
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    seen = [copy_of(param) for param in model.parameters()]
    for unit in units:
        unit.reshard()
    return [seen, run.train(model)]


@script()
def all_units_unsharded_at_once(run: Script) -> Any:
    model = run.sharded()
    handles = [block.unshard(async_op=True) for block in model]
    for handle in handles:
        handle.wait()
    seen = [copy_of(block[0].weight) for block in model]
    for block in model:
        block.reshard()
    return [seen, run.train(model)]


# ---- looks ----


@script()
def backward_hooks_read_weights(run: Script) -> Any:
    """Whole or sharded, whatever a module has after its backward."""
    model = run.sharded()
    seen: list[Any] = []
    for block in model:
        block.register_full_backward_hook(
            lambda module, given, returned: seen.append(
                [type(module[0].weight).__name__, copy_of(module[0].weight)]
            )
        )
    return [run.train(model), seen]


@script()
def hooks_on_outputs_see_weights(run: Script) -> Any:
    model = run.sharded()
    seen: list[str] = []

    def loss(step: int) -> torch.Tensor:
        output = model(run.rows(step))
        output.register_hook(lambda gradient: seen.append(type(model[2][0].weight).__name__))
        return output.square().mean()

    return [run.train(model, loss), seen]


@script()
def order_of_all_hooks(run: Script) -> Any:
    """Of modules, in both directions, registered before and after sharding, and which parameters
    they see."""
    model = run.blocks()
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, *args: seen.append(f"{name} {type(module[0].weight).__name__}")

    for index, block in enumerate(model):
        block.register_forward_pre_hook(note(f"pre {index}"))
        block.register_forward_hook(note(f"post {index}"))
        block.register_full_backward_pre_hook(note(f"backward pre {index}"))
        block.register_full_backward_hook(note(f"backward {index}"))
    run.shard(model)
    for index, block in enumerate(model):
        block.register_forward_pre_hook(note(f"late pre {index}"), prepend=True)
        block.register_forward_hook(note(f"late post {index}"), prepend=True)
    for index, param in enumerate(model.parameters()):
        param.register_post_accumulate_grad_hook(
            lambda param, index=index: seen.append(f"gradient {index}")
        )
    return [run.train(model), seen]
