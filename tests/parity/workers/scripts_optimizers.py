"""Scripts about optimizers: all of torch's, in other arrangements, and averages of weights.
torch.distributed.optim is imported late: it compiles its optimizers by TorchScript, and warns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from scripts import Script, attempted, copy_of, gradients, script, weights
from torch.optim.swa_utils import AveragedModel


@script(costly=True)
def every_optimizer_of_torch(run: Script) -> Any:
    """Some cannot step DTensors: then both fail alike."""
    kinds = (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.Adafactor,
    )
    found: dict[str, Any] = {}
    for kind in kinds:
        for foreach in (True, False):
            model = run.shard(run.blocks(1))
            found[f"{kind.__name__} {foreach}"] = attempted(
                lambda kind=kind, foreach=foreach, model=model: run.train(
                    model, optimizer=lambda params: kind(params, lr=0.01, foreach=foreach)
                )
            )
    return found


def trained_by(run: Script, optimizer: Callable[..., torch.optim.Optimizer]) -> list[Any]:
    return run.train(run.sharded(), optimizer=optimizer)


@script(costly=True)
def muon(run: Script) -> Any:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.1)

    return trained_by(run, optimizer)


@script(costly=True)
def zero_redundancy(run: Script) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)

    return trained_by(run, optimizer)


@script()
def a_learning_rate_that_is_a_tensor(run: Script) -> Any:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=True)

    return trained_by(run, optimizer)


@script(costly=True)
def lbfgs(run: Script) -> Any:
    """Which takes several forwards and backwards for a step, and shards that are even."""
    run = replace(run, width=8)
    model = run.sharded()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run.loss(model)
        loss.backward()
        return loss

    losses = [copy_of(optimizer.step(closure)) for _ in range(2)]
    return [*losses, weights(model)]


@script(costly=True)
def steps_that_torch_takes_in_backward(run: Script) -> Any:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = run.sharded()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    seen: list[Any] = []
    for step in range(2):
        loss = run.loss(model, step)
        loss.backward()
        seen += [copy_of(loss), gradients(model), weights(model)]
    return seen


@script()
def groups_of_parameters_and_a_schedule(run: Script) -> Any:
    model = run.sharded()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params[:2], lr=0.01, momentum=0.9)
    optimizer.add_param_group({"params": params[2:], "lr": 0.1})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    seen: list[Any] = []
    for step in range(3):
        loss = run.loss(model, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += [copy_of(loss), schedule.get_last_lr()]
    return [*seen, weights(model)]


@script()
def an_average_of_weights_by_hand(run: Script) -> Any:
    model = run.sharded()
    averages = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(averages, [param.detach() for param in model.parameters()], 0.5)
    return averages


@script()
def an_averaged_model(run: Script) -> Any:
    """Torch's copies the model, which FSDP2 refuses."""
    return AveragedModel(run.sharded()).n_averaged


@script(costly=True)
def arithmetic_on_sharded_parameters(run: Script) -> Any:
    model = run.sharded()
    run.train(model)
    params = list(model.parameters())
    return [
        [torch.linalg.vector_norm(param).full_tensor() for param in params],
        [param.full_tensor() for param in params],
        sum(param.square().sum() for param in params).full_tensor(),
    ]
