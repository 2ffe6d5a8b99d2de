"""Scripts about gradients: hooks, loss scaling, changes between backward and step, and autograd
functions that share, keep or change gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from scripts import Script, copy_of, gradients, script, weights

# ---- hooks on parameters ----


def register_gradient_hooks(results: list[Any], model: nn.Module) -> None:
    """Registers hooks that double each gradient and record its accumulation."""
    for param in model.parameters():
        param.register_hook(lambda gradient: gradient * 2)
        param.register_post_accumulate_grad_hook(lambda param: results.append(tuple(param.shape)))


@script()
def parameter_hooks_before_sharding(api: Script) -> Any:
    results: list[Any] = []
    model = api.blocks()
    register_gradient_hooks(results, model)
    return [api.train(api.shard(model)), results]


@script()
def parameter_hooks_after_sharding(api: Script) -> Any:
    results: list[Any] = []
    model = api.sharded()
    register_gradient_hooks(results, model)
    return [api.train(model), results]


@script()
def tensor_hooks_record_gradients(api: Script) -> Any:
    """Records the order of the gradients too."""
    results: list[Any] = []
    model = api.sharded()
    for name, param in model.named_parameters():
        param.register_hook(lambda gradient, name=name: results.append([name, copy_of(gradient)]))
    return [api.train(model), results]


@script()
def post_accumulate_hooks_record_gradients(api: Script) -> Any:
    results: list[Any] = []
    model = api.sharded()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: results.append([name, copy_of(param.grad)])
        )
    return [api.train(model), results]


# ---- scaled losses ----


@script()
def grad_scaler_under_autocast(api: Script) -> Any:
    model = api.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    results: list[Any] = []
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(api.rows(step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        results += [copy_of(loss), gradients(model)]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*results, weights(model), scaler.get_scale()]


@script()
def grad_scaler_with_overflow_on_one_rank(api: Script) -> Any:
    model = api.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2):
        factor = float("inf") if step == api.rank == 0 else 1.0
        loss = model(api.rows(step) * factor).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [weights(model), scaler.get_scale()]


# ---- between backward and step ----


@script()
def gradients_replaced_before_step(api: Script) -> Any:
    model = api.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results: list[Any] = []
    for step in range(3):
        api.loss(model, step).backward()
        for param in model.parameters():
            param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        results.append(weights(model))
    return [*results, gradients(model)]


@script()
def gradients_changed_in_place(api: Script) -> Any:
    """Scales gradients in place after every backward, also between accumulated backwards."""
    model = api.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Any] = []
    for step in range(4):
        api.loss(model, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.grad.mul_(0.5)
        results.append(gradients(model))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*results, weights(model)]


@script(costly=True)
def total_norm_and_value_clipping(api: Script) -> Any:
    model = api.sharded()
    api.loss(model).backward()
    total = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)
    return [total.full_tensor(), gradients(model)]


@script(costly=True)
def parameter_norms_in_loss(api: Script) -> Any:
    """Sharded parameters get gradients from FSDP2's reduction and from the loss directly."""
    model = api.sharded()

    def loss(step: int) -> torch.Tensor:
        squares = sum(param.square().sum() for param in model.parameters())
        return api.loss(model, step) + 0.01 * squares.full_tensor()

    return api.train(model, loss)


# ---- functions that share, keep or change gradients ----


class SharedGradientSum(torch.autograd.Function):
    """A sum that returns the same gradient object for both inputs."""

    @staticmethod
    def forward(context: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient


class GradientAliasingCopy(torch.autograd.Function):
    """A copy whose backward returns its argument."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class GradientKeepingCopy(torch.autograd.Function):
    """A copy whose backward keeps the gradient that it returns."""

    gradients: list[torch.Tensor] = []

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        GradientKeepingCopy.gradients.append(gradient)
        return gradient


Compute = Callable[["Pair", torch.Tensor], torch.Tensor]


class Pair(nn.Module):
    """Two square parameters and a function that uses them."""

    def __init__(self, width: int, compute: Compute) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.right = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.compute = compute

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.compute(self, rows)


def train_pairs(api: Script, compute: Compute) -> list[Any]:
    torch.manual_seed(1)
    pairs = nn.Sequential(Pair(api.width, compute), Pair(api.width, compute))
    return api.train(api.shard(pairs))


@script(wide=True)
def gradient_shared_by_two_parameters(api: Script) -> Any:
    return train_pairs(
        api, lambda pair, rows: rows @ SharedGradientSum.apply(pair.left, pair.right)
    )


@script()
def expanded_gradients(api: Script) -> Any:
    return train_pairs(api, lambda pair, rows: rows + pair.left.sum() + pair.right.mean())


@script()
def gradients_of_slice(api: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        return rows + (pair.left + pair.right)[: len(rows)]

    return train_pairs(api, compute)


@script(wide=True)
def transposed_gradients(api: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        twice = pair.left.expand(2, *pair.left.shape).sum(0)
        return rows @ (twice + pair.right.t())

    return train_pairs(api, compute)


@script(wide=True)
def gradients_kept_by_function(api: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        return rows @ GradientKeepingCopy.apply(pair.left) + rows @ pair.right

    GradientKeepingCopy.gradients.clear()
    return [train_pairs(api, compute), list(GradientKeepingCopy.gradients)]


@script(wide=True)
def gradients_changed_by_tensor_hook(api: Script) -> Any:
    """A hook changes the gradient in place before it is accumulated."""

    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        copied = GradientAliasingCopy.apply(pair.left)
        if copied.requires_grad:
            copied.register_hook(lambda gradient: gradient.mul_(1.5))
        return rows @ copied + rows @ pair.right

    return train_pairs(api, compute)


@script()
def detached_parameter_in_forward(api: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        return rows * pair.left.detach().sum() + rows @ pair.right

    return train_pairs(api, compute)


# ---- accumulation ----


@script(costly=True)
def evaluation_between_microbatches(api: Script) -> Any:
    results: dict[str, Any] = {}
    for reshard in (True, False):
        model = api.sharded()
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(reshard)
        api.loss(model, 0).backward()
        with torch.no_grad():
            output = copy_of(model(api.rows(5)))
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        api.loss(model, 1).backward()
        results[f"reshard {reshard}"] = [output, gradients(model)]
    return results
