"""Scenarios of bugs of torch's FSDP2: a first forward that raised, and steps with stale weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from behavior import DIM, Api, batch, blocks_and_head, scenario, shard, weights
from torch.distributed.fsdp import FSDPModule
from torch_bugs import average, loss_of, step_by, take_gradients

Found = dict[str, Any]


def train_both(model: nn.Module, reference: nn.Module, rank: int) -> Found:
    """Trains both models for three steps. Returns the losses of this rank, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, expected = [], []
    for step in range(3):
        losses = [loss_of(module(batch(rank, step))) for module in (model, reference)]
        for loss in losses:
            loss.backward()
        found.append(losses[0].detach())
        expected.append(losses[1].detach())
        optimizer.step()
        optimizer.zero_grad()
        step_by(reference, average(take_gradients(reference)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {"found": [*found, weights(model)], "expected": [*expected, weights(reference)]}


@scenario()
def forward_on_the_meta_device_before_to_empty(api: Api) -> Found:
    """The program catches the exception, and materializes the parameters."""
    with torch.device("meta"):
        model: Any = shard(api, blocks_and_head())
    try:
        model(batch(api.rank))
    except RuntimeError:
        model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    reference = blocks_and_head()
    with torch.no_grad():
        for param in reference.parameters():
            param.fill_(0.5)
    return train_both(model, reference, api.rank)


@scenario()
def functional_call_before_the_first_forward(api: Api) -> Found:
    """``functional_call`` with full parameters, which lazy init refuses, then training."""
    model: Any = shard(api, blocks_and_head())
    full_params = {name: param.full_tensor() for name, param in model.named_parameters()}
    try:
        torch.func.functional_call(model, full_params, (batch(api.rank),))
        raise AssertionError("lazy init has accepted full parameters")
    except (AttributeError, RuntimeError):
        pass
    return train_both(model, blocks_and_head(), api.rank)


@scenario()
def steps_without_reshard_after_backward(api: Api) -> Found:
    """All units stay unsharded during the optimizer's step, and one unit has no reshard at all."""
    model: Any = shard(api, blocks_and_head())
    model.set_reshard_after_backward(False)
    model[1].set_reshard_after_forward(False)
    return train_both(model, blocks_and_head(), api.rank)


class TwoProjections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.second = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@scenario()
def parameters_tied_after_sharding(api: Api) -> Found:
    """Two uneven parameters of one unit become one parameter before the first forward."""
    torch.manual_seed(7)
    reference = TwoProjections()
    model = TwoProjections()
    model.load_state_dict(reference.state_dict())
    api.fully_shard(model)
    for module in (model, reference):
        module.second.weight = module.first.weight
    return train_both(model, reference, api.rank)
