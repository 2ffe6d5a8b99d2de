"""Scripts about optimizers: the dense optimizers of torch, unusual uses, and averages of weights.

Scripts import torch.distributed.optim when they run: its import compiles TorchScript and warns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from scripts import Script, attempted, copy_of, gradients, script, weights
from torch.optim.swa_utils import AveragedModel


@script(costly=True)
def every_foreach_optimizer(api: Script) -> Any:
    """Optimizers that cannot step DTensors must raise the same error under both implementations."""
    kinds = (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
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
    results: dict[str, Any] = {}
    for kind in kinds:
        for foreach in (True, False):
            model = api.shard(api.blocks(1))
            results[f"{kind.__name__}, foreach {foreach}"] = attempted(
                lambda kind=kind, foreach=foreach, model=model: api.train(
                    model, optimizer=lambda params: kind(params, lr=0.01, foreach=foreach)
                )
            )
    return results


def train_with(api: Script, optimizer: Callable[..., torch.optim.Optimizer]) -> list[Any]:
    return api.train(api.sharded(), optimizer=optimizer)


@script(costly=True)
def muon(api: Script) -> Any:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.1)

    return train_with(api, optimizer)


@script(costly=True)
def zero_redundancy_optimizer(api: Script) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)

    return train_with(api, optimizer)


@script()
def tensor_learning_rate(api: Script) -> Any:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=True)

    return train_with(api, optimizer)


@script(costly=True)
def lbfgs(api: Script) -> Any:
    """LBFGS runs several forwards and backwards per step, and needs even shards."""
    api = replace(api, width=8)
    model = api.sharded()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = api.loss(model)
        loss.backward()
        return loss

    losses = [copy_of(optimizer.step(closure)) for _ in range(2)]
    return [*losses, weights(model)]


@script(costly=True)
def apply_optimizer_in_backward(api: Script) -> Any:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = api.sharded()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    results: list[Any] = []
    for step in range(2):
        loss = api.loss(model, step)
        loss.backward()
        results += [copy_of(loss), gradients(model), weights(model)]
    return results


@script()
def param_groups_and_lr_scheduler(api: Script) -> Any:
    model = api.sharded()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params[:2], lr=0.01, momentum=0.9)
    optimizer.add_param_group({"params": params[2:], "lr": 0.1})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    results: list[Any] = []
    for step in range(3):
        loss = api.loss(model, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        results += [copy_of(loss), schedule.get_last_lr()]
    return [*results, weights(model)]


@script()
def manual_weight_average(api: Script) -> Any:
    model = api.sharded()
    averages = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        api.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(averages, [param.detach() for param in model.parameters()], 0.5)
    return averages


@script()
def swa_averaged_model(api: Script) -> Any:
    """torch's AveragedModel copies the model, which FSDP2 rejects."""
    return AveragedModel(api.sharded()).n_averaged


@script(costly=True)
def arithmetic_on_sharded_parameters(api: Script) -> Any:
    model = api.sharded()
    api.train(model)
    params = list(model.parameters())
    return [
        [torch.linalg.vector_norm(param).full_tensor() for param in params],
        [param.full_tensor() for param in params],
        sum(param.square().sum() for param in params).full_tensor(),
    ]
