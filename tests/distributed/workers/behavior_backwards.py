"""Scenarios of backwards that start or end elsewhere than at the outputs of the root.

In one more scenario, backward reuses the memory of a gradient.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from behavior import DIM, Api, batch, grads, scenario, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from toy_models import ResidualBlock

HEAD = 3
WIDE = 256
"""Width of weights whose gradients are reduced without a copy, because of their size."""


class OpaqueOutput:
    """An output whose tensors FSDP2 cannot find."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Trunk(nn.Module):
    """Blocks and a norm. The head runs in forward only if ``with_head``."""

    def __init__(self, boxed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, HEAD)
        self.boxed = boxed

    def forward(self, x: torch.Tensor, with_head: bool = False) -> Any:
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        x = self.head(x) if with_head else x
        return OpaqueOutput(x) if self.boxed else x


def delay_rank_1(api: Api) -> None:
    """Delays rank 1, so that a missing wait for its data shows."""
    if api.rank == 1:
        time.sleep(0.03)


def shard_with_grouped_head(api: Api, **options: Any) -> Trunk:
    """Returns a sharded model; norm and head are one unit."""
    model = Trunk()
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard([model.norm, model.head], **options)
    return api.fully_shard(model, **options)


def chunks_of(hidden: torch.Tensor) -> list[torch.Tensor]:
    return [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]


def chunked_loss(api: Api, model: Trunk, step: int, deep: bool = True) -> list[Any]:
    """Runs backward through the head for each chunk, then, if ``deep``, through the other layers.

    Returns loss and gradients after each chunk, and the gradients at the end.
    """
    hidden = model(batch(api.rank, step))
    chunks = chunks_of(hidden)
    record: list[Any] = []
    for chunk in chunks:
        delay_rank_1(api)
        loss = model.head(chunk).square().mean()
        loss.backward()
        record.append((loss.item(), grads(model)))
    if deep:
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))
        record.append(grads(model))
    return record


def steps_of(
    model: nn.Module, params: list[nn.Parameter], run: Callable[[int], list[Any]]
) -> list[Any]:
    """Returns ``run(step)`` of three steps, and then the weights."""
    optimizer = torch.optim.SGD(params, lr=0.1)
    record: list[Any] = []
    for step in range(3):
        record.append(run(step))
        optimizer.step()
        optimizer.zero_grad()
    return [*record, weights(model)]


@scenario()
def chunked_losses(api: Api) -> Any:
    results = {}
    for reshard in (True, False):
        model = shard_with_grouped_head(api, reshard_after_forward=reshard)
        results[reshard] = steps_of(
            model, list(model.parameters()), functools.partial(chunked_loss, api, model)
        )
    return results


@scenario()
def chunked_losses_training_only_the_head(api: Api) -> Any:
    model = shard_with_grouped_head(api)
    params = list(model.head.parameters())
    return steps_of(model, params, lambda step: chunked_loss(api, model, step, deep=False))


@scenario()
def chunked_losses_with_other_settings(api: Api) -> Any:
    """Uses delayed synchronization, hooks on gradients, and other units for norm and head."""
    results: dict[str, Any] = {}

    model = shard_with_grouped_head(api)
    model.set_requires_gradient_sync(False)
    delayed = [chunked_loss(api, model, 0)]
    model.set_requires_gradient_sync(True)
    delayed.append(chunked_loss(api, model, 1))
    results["delayed"] = delayed

    model = shard_with_grouped_head(api)
    model.set_is_last_backward(False)
    results["not last"] = chunked_loss(api, model, 0)

    model = shard_with_grouped_head(api)
    order: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    results["hooks"] = [chunked_loss(api, model, 0), sorted(order)]

    model = Trunk()
    for part in (*model.blocks, model.head):
        api.fully_shard(part)
    results["separate head"] = chunked_loss(api, api.fully_shard(model), 0)
    return results


@scenario()
def group_members_called_directly(api: Api) -> Any:
    """Calls members of a group directly, after a full step and after an evaluation."""
    model = shard_with_grouped_head(api)
    record: list[Any] = []
    for step in range(2):
        model(batch(api.rank, step), with_head=True).square().mean().backward()
        record.append(grads(model))
        model.zero_grad()
        for part in (model.head, model.norm, model.head):
            delay_rank_1(api)
            x = batch(api.rank, step).requires_grad_()
            part(x).square().mean().backward()
            record += [grads(model), x.grad]
        with torch.no_grad():
            record.append(model(batch(api.rank, step)))
    return record


@scenario()
def opaque_root_outputs(api: Api) -> Any:
    """The root's output is an opaque object, so FSDP2 can set no pre-backward hook on it.

    Of the root's two backward steps only the post-backward step runs.
    """
    results: dict[str, Any] = {}
    for blocks in (False, True):
        model = Trunk(boxed=True)
        for block in model.blocks if blocks else ():
            api.fully_shard(block)
        api.fully_shard(model, reshard_after_forward=False)

        def run(step: int, model: Trunk = model) -> list[Any]:
            delay_rank_1(api)
            x = batch(api.rank, step).requires_grad_()
            model(x, with_head=True).tensor.square().mean().backward()
            return [grads(model), x.grad]

        results[f"blocks {blocks}"] = steps_of(model, list(model.parameters()), run)
    return results


@scenario()
def backwards_within_a_backward(api: Api) -> Any:
    """A custom autograd function runs the backward of each chunk, as chunked losses do."""
    model = shard_with_grouped_head(api)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(hidden)
            with torch.no_grad():
                return model.head(hidden).square().mean()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (hidden,) = ctx.saved_tensors
            chunks = chunks_of(hidden)
            delay_rank_1(api)
            for chunk in chunks:
                with torch.enable_grad():
                    (model.head(chunk).square().mean() * grad).backward()
            return torch.cat([chunk.grad for chunk in chunks])

    def run(step: int) -> list[Any]:
        Loss.apply(model(batch(api.rank, step))).backward()
        return [grads(model)]

    return steps_of(model, list(model.parameters()), run)


@scenario()
def reentrant_checkpoint_of_the_head(api: Api) -> Any:
    model = shard_with_grouped_head(api)

    def run(step: int) -> list[Any]:
        hidden = model(batch(api.rank, step))
        delay_rank_1(api)
        checkpoint(model.head, hidden, use_reentrant=True).square().mean().backward()
        return [grads(model)]

    return steps_of(model, list(model.parameters()), run)


@scenario()
def gradients_with_respect_to_the_hidden_state(api: Api) -> Any:
    """``autograd.grad`` runs through the head; backward of the other layers uses its result."""
    model = shard_with_grouped_head(api)
    record: list[Any] = []
    for step in range(2):
        hidden = model(batch(api.rank, step))
        inner = hidden.detach().requires_grad_()
        delay_rank_1(api)
        (grad,) = torch.autograd.grad(model.head(inner).square().mean(), [inner])
        hidden.backward(grad)
        record += [grad, grads(model)]
        model.zero_grad()
    return record


@scenario()
def chunked_losses_on_other_meshes(api: Api) -> Any:
    """Uses chunked losses on 2-D meshes, in mixed precision and with a replicated model."""
    results: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {
        "replicas": {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))},
        "shards of replicas": {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))},
        "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    }
    for name, option in options.items():
        model = shard_with_grouped_head(api, **option)
        results[name] = steps_of(
            model, list(model.parameters()), functools.partial(chunked_loss, api, model)
        )
    model = Trunk()
    api.replicate(model.head)
    results["replicate"] = chunked_loss(api, api.replicate(model), 0)
    return results


# ---- gradients in memory of NumPy ----


class _SharedGradientArray(torch.autograd.Function):
    """``x @ weight.T``; backward writes all gradients of weights into one array."""

    array = np.zeros((WIDE, WIDE), np.float32)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rank = rank
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.rank == 1:
            time.sleep(0.3)  # rank 0 is in the backward of the next layer when rank 1 sends
        _SharedGradientArray.array[...] = (grad.t() @ x).numpy()
        return grad @ weight, torch.from_numpy(_SharedGradientArray.array), None


class _Wide(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE**0.5)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SharedGradientArray.apply(x, self.weight, self.rank)


@scenario()
def gradients_in_a_reused_array(api: Api) -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(*(_Wide(api.rank) for _ in range(3)))
    for unit in model:
        api.fully_shard(unit)
    api.fully_shard(model)
    torch.manual_seed(api.rank)
    model(torch.randn(2, WIDE)).square().mean().backward()
    return grads(model)
