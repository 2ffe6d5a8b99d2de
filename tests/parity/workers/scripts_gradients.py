"""Scripts about what users do with gradients: hooks, scaling, changes between backward and step,
and functions whose gradients are shared, kept or changed by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from scripts import Script, copy_of, gradients, script, weights

# ---- hooks on parameters ----


def hooked(seen: list[Any], model: nn.Module) -> None:
    """Doubles each gradient, and notes it where it has been accumulated."""
    for param in model.parameters():
        param.register_hook(lambda gradient: gradient * 2)
        param.register_post_accumulate_grad_hook(lambda param: seen.append(tuple(param.shape)))


@script()
def hooks_on_parameters_before_sharding(run: Script) -> Any:
    seen: list[Any] = []
    model = run.blocks()
    hooked(seen, model)
    return [run.train(run.shard(model)), seen]


@script()
def hooks_on_parameters_after_sharding(run: Script) -> Any:
    seen: list[Any] = []
    model = run.sharded()
    hooked(seen, model)
    return [run.train(model), seen]


@script()
def hooks_that_note_gradients(run: Script) -> Any:
    """Their order too."""
    seen: list[Any] = []
    model = run.sharded()
    for name, param in model.named_parameters():
        param.register_hook(lambda gradient, name=name: seen.append([name, copy_of(gradient)]))
    return [run.train(model), seen]


@script()
def hooks_that_note_accumulated_gradients(run: Script) -> Any:
    seen: list[Any] = []
    model = run.sharded()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: seen.append([name, copy_of(param.grad)])
        )
    return [run.train(model), seen]


# ---- scaled losses ----


@script()
def scaled_losses_under_autocast(run: Script) -> Any:
    model = run.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    seen: list[Any] = []
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(run.rows(step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen += [copy_of(loss), gradients(model)]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*seen, weights(model), scaler.get_scale()]


@script()
def a_scaled_loss_that_overflows_on_one_rank(run: Script) -> Any:
    model = run.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2):
        factor = float("inf") if step == run.rank == 0 else 1.0
        loss = model(run.rows(step) * factor).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [weights(model), scaler.get_scale()]


# ---- between backward and step ----


@script()
def gradients_are_replaced(run: Script) -> Any:
    model = run.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Any] = []
    for step in range(3):
        run.loss(model, step).backward()
        for param in model.parameters():
            param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seen.append(weights(model))
    return [*seen, gradients(model)]


@script()
def gradients_are_changed_in_place(run: Script) -> Any:
    """Between the backwards that one step adds up, too."""
    model = run.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(4):
        run.loss(model, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.grad.mul_(0.5)
        seen.append(gradients(model))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, weights(model)]


@script(costly=True)
def total_norm_of_gradients(run: Script) -> Any:
    model = run.sharded()
    run.loss(model).backward()
    total = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)
    return [total.full_tensor(), gradients(model)]


@script(costly=True)
def norms_of_parameters_in_the_loss(run: Script) -> Any:
    """Sharded parameters get gradients of both kinds: from their units and by themselves."""
    model = run.sharded()

    def loss(step: int) -> torch.Tensor:
        squares = sum(param.square().sum() for param in model.parameters())
        return run.loss(model, step) + 0.01 * squares.full_tensor()

    return run.train(model, loss)


# ---- functions whose gradients are shared, kept or changed ----


class Added(torch.autograd.Function):
    """A sum both of whose inputs get the same gradient, as one object."""

    @staticmethod
    def forward(context: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left + right

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient


class Copied(torch.autograd.Function):
    """A copy whose input gets the copy's gradient itself."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Kept(torch.autograd.Function):
    """A copy whose gradient somebody keeps."""

    gradients: list[torch.Tensor] = []

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        Kept.gradients.append(gradient)
        return gradient


Compute = Callable[["Pair", torch.Tensor], torch.Tensor]


class Pair(nn.Module):
    """Two square parameters, and a function that uses them."""

    def __init__(self, width: int, compute: Compute) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.right = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.compute = compute

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.compute(self, rows)


def with_pairs(run: Script, compute: Compute) -> list[Any]:
    torch.manual_seed(1)
    pairs = nn.Sequential(Pair(run.width, compute), Pair(run.width, compute))
    return run.train(run.shard(pairs))


@script(wide=True)
def two_parameters_get_one_gradient(run: Script) -> Any:
    return with_pairs(run, lambda pair, rows: rows @ Added.apply(pair.left, pair.right))


@script()
def gradients_that_are_expanded(run: Script) -> Any:
    return with_pairs(run, lambda pair, rows: rows + pair.left.sum() + pair.right.mean())


@script()
def gradients_of_a_slice(run: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        return rows + (pair.left + pair.right)[: len(rows)]

    return with_pairs(run, compute)


@script(wide=True)
def gradients_that_are_transposed(run: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        twice = pair.left.expand(2, *pair.left.shape).sum(0)
        return rows @ (twice + pair.right.t())

    return with_pairs(run, compute)


@script(wide=True)
def gradients_that_somebody_keeps(run: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        return rows @ Kept.apply(pair.left) + rows @ pair.right

    Kept.gradients.clear()
    return [with_pairs(run, compute), list(Kept.gradients)]


@script(wide=True)
def gradients_changed_by_a_hook(run: Script) -> Any:
    """In place, on their way to the parameter."""

    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        copied = Copied.apply(pair.left)
        if copied.requires_grad:
            copied.register_hook(lambda gradient: gradient.mul_(1.5))
        return rows @ copied + rows @ pair.right

    return with_pairs(run, compute)


@script()
def values_of_a_parameter_without_its_gradient(run: Script) -> Any:
    def compute(pair: Pair, rows: torch.Tensor) -> torch.Tensor:
        return rows * pair.left.detach().sum() + rows @ pair.right

    return with_pairs(run, compute)


# ---- accumulation ----


@script(costly=True)
def an_evaluation_between_microbatches(run: Script) -> Any:
    found: dict[str, Any] = {}
    for reshard in (True, False):
        model = run.sharded()
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(reshard)
        run.loss(model, 0).backward()
        with torch.no_grad():
            output = copy_of(model(run.rows(5)))
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        run.loss(model, 1).backward()
        found[str(reshard)] = [output, gradients(model)]
    return found
