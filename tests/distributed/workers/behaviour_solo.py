"""Scenarios for one rank, beside a model that is not sharded: nothing is sent or different."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import torch
import torch.nn as nn
from behaviour import DIM, Api, batch, collectives, grads, plain, scenario, shard, train, weights
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

solo = functools.partial(scenario, 1)


def step(model: nn.Module) -> None:
    model(batch(0)).square().mean().backward()


@solo()
def collectives_alone(api: Api) -> dict[str, Any]:
    """What is issued by steps, evaluations, accumulation, a divide factor and unshard by hand."""
    found: Counter[str] = Counter()
    for reshard in (None, True, False):
        model = shard(api, plain(), reshard_after_forward=reshard)
        one_step = functools.partial(step, model)
        found += collectives(one_step)
        with torch.no_grad():
            found += collectives(functools.partial(model, batch(0)))
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            found += collectives(one_step)
        model[0].set_gradient_divide_factor(3.0)
        found += collectives(one_step)
        found += collectives(lambda model=model: model.unshard(async_op=True).wait())
    return dict(found)


@solo()
def training_alone(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = {"not sharded": train(plain(), 0, 3)}
    for reshard in (None, True, False):
        found[f"reshard {reshard}"] = train(
            shard(api, plain(), reshard_after_forward=reshard), 0, 3
        )
    return found


class Tapering(nn.Module):
    """A layer, and behind it a parameter without elements: it cannot be an alias of its shard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.nothing = nn.Parameter(torch.empty(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + self.nothing.sum()


def tapering() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(Tapering(), Tapering(), nn.Linear(DIM, 3))


@solo()
def training_with_empty_parameters_alone(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = {"not sharded": train(tapering(), 0, 3)}
    for reshard in (None, True, False):
        model = shard(api, tapering(), reshard_after_forward=reshard)
        found[f"reshard {reshard}"] = train(model, 0, 3)
    return found


@solo()
def mixed_precision_alone(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for param, reduce in (
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
        (None, torch.bfloat16),
    ):
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        model = shard(api, plain(), mp_policy=policy)
        found[f"{param} {reduce}"] = train(model, 0, 3)
    return found


@solo()
def accumulation_alone(api: Api) -> dict[str, Any]:
    """Gradients of two micro-batches, and of one divided by 3."""
    found: dict[str, Any] = {}
    for name, model in (("sharded", shard(api, plain())), ("not sharded", plain())):
        for last in (False, True):
            if name == "sharded":
                model.set_requires_gradient_sync(last)
            model(batch(0, int(last))).square().mean().backward()
        found[name] = grads(model)
    model = shard(api, plain())
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(3.0)
    model(batch(0)).square().mean().backward()
    found["divided"] = grads(model)
    return found


@solo()
def evaluation_alone(api: Api) -> dict[str, list[float]]:
    """Losses of steps with and without a forward without gradients between backward and step."""

    def losses(evaluate: bool) -> list[float]:
        model = shard(api, plain(), reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        found = []
        for index in range(3):
            loss = model(batch(0, index)).square().mean()
            loss.backward()
            if evaluate:
                with torch.no_grad():
                    model(batch(0, 9))
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    return {"with": losses(True), "without": losses(False)}


@solo()
def inference_mode_alone(api: Api) -> dict[str, Any]:
    """An evaluation before everything else, then training with evaluations."""
    model = shard(api, plain(), reshard_after_forward=True)
    found: dict[str, Any] = {}
    for when in ("at first", "after training"):
        with torch.inference_mode():
            found[f"{when}, inference_mode"] = model(batch(0, 9)).square().mean().item()
        with torch.no_grad():
            found[f"{when}, no_grad"] = model(batch(0, 9)).square().mean().item()
        found[when] = train(model, 0, 1)
    return found | {"without": [*train(plain(), 0, 1)]}


@solo()
def state_dict_alone(api: Api) -> dict[str, Any]:
    model = shard(api, plain())
    train(model, 0, 1)
    options = StateDictOptions(full_state_dict=True)
    other = shard(api, plain(seed=11))
    other.load_state_dict(model.state_dict())
    found = {
        "kinds": [type(value).__name__ for value in model.state_dict().values()],
        "full": copy.deepcopy(dict(get_model_state_dict(model, options=options))),
        "weights": weights(model),
        "loaded": train(other, 0, 1),
        "went on": train(model, 0, 1),
    }
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            nn.init.ones_(param)
    return found | {"emptied": train(model, 0, 1)}


@solo()
def writes_in_forward_alone(api: Api) -> dict[str, Any]:
    """A hook clamps a block's weight before each forward: what it is after one, by whether it is
    cast; and in a model that is not sharded."""

    def clamp(block: Any, args: Any) -> None:
        with torch.no_grad():
            block.linear.weight.clamp_(-0.01, 0.01)

    def forward(model: nn.Sequential) -> torch.Tensor:
        model[0].register_forward_pre_hook(clamp)
        with torch.no_grad():
            model(batch(0))
        return weights(model)["0.linear.weight"]

    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "before": weights(plain())["0.linear.weight"],
        "not sharded": forward(plain()),
        "sharded": forward(shard(api, plain())),
        "cast": forward(shard(api, plain(), mp_policy=cast)),
    }
