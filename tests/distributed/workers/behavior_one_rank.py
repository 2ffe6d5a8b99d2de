"""Scenarios on one rank. Some also return the results of an unsharded model."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import torch
import torch.nn as nn
from behavior import (
    DIM,
    Api,
    batch,
    blocks_and_head,
    collectives,
    grads,
    scenario,
    shard,
    train,
    weights,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

one_rank_scenario = functools.partial(scenario, 1)


def step(model: nn.Module) -> None:
    model(batch(0)).square().mean().backward()


@one_rank_scenario()
def collectives_on_one_rank(api: Api) -> dict[str, Any]:
    """Counts collectives of steps, evaluations, accumulation, a divide factor and unshard calls."""
    results: Counter[str] = Counter()
    for reshard in (None, True, False):
        model = shard(api, blocks_and_head(), reshard_after_forward=reshard)
        one_step = functools.partial(step, model)
        results += collectives(one_step)
        with torch.no_grad():
            results += collectives(functools.partial(model, batch(0)))
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            results += collectives(one_step)
        model[0].set_gradient_divide_factor(3.0)
        results += collectives(one_step)
        results += collectives(lambda model=model: model.unshard(async_op=True).wait())
    return dict(results)


@one_rank_scenario()
def training_on_one_rank(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {"not sharded": train(blocks_and_head(), 0, 3)}
    for reshard in (None, True, False):
        results[f"reshard {reshard}"] = train(
            shard(api, blocks_and_head(), reshard_after_forward=reshard), 0, 3
        )
    return results


class LayerWithEmptyParameter(nn.Module):
    """A layer and an empty parameter, which cannot alias its shard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.nothing = nn.Parameter(torch.empty(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + self.nothing.sum()


def model_with_empty_parameters() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(LayerWithEmptyParameter(), LayerWithEmptyParameter(), nn.Linear(DIM, 3))


@one_rank_scenario()
def training_with_empty_parameters_on_one_rank(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {"not sharded": train(model_with_empty_parameters(), 0, 3)}
    for reshard in (None, True, False):
        model = shard(api, model_with_empty_parameters(), reshard_after_forward=reshard)
        results[f"reshard {reshard}"] = train(model, 0, 3)
    return results


@one_rank_scenario()
def mixed_precision_on_one_rank(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for param, reduce in (
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
        (None, torch.bfloat16),
    ):
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        model = shard(api, blocks_and_head(), mp_policy=policy)
        results[f"param {param}, reduce {reduce}"] = train(model, 0, 3)
    return results


@one_rank_scenario()
def accumulation_on_one_rank(api: Api) -> dict[str, Any]:
    """Returns gradients of two microbatches, and of one with divide factor 3."""
    results: dict[str, Any] = {}
    for name, model in (
        ("sharded", shard(api, blocks_and_head())),
        ("not sharded", blocks_and_head()),
    ):
        for last in (False, True):
            if name == "sharded":
                model.set_requires_gradient_sync(last)
            model(batch(0, int(last))).square().mean().backward()
        results[name] = grads(model)
    model = shard(api, blocks_and_head())
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(3.0)
    model(batch(0)).square().mean().backward()
    results["divided"] = grads(model)
    return results


@one_rank_scenario()
def shards_replaced_between_backwards_on_one_rank(api: Api) -> dict[str, Any]:
    """Returns the gradients of two microbatches. The shards are replaced in between."""
    results: dict[str, Any] = {}
    for name in ("not replaced", "by load_state_dict", "by conversions"):
        for reshard in (True, False):
            model = shard(api, blocks_and_head(), reshard_after_forward=reshard)
            model.set_requires_gradient_sync(False)
            step(model)
            if name == "by load_state_dict":
                model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
            if name == "by conversions":
                model.double()
                model.float()
            model.set_requires_gradient_sync(True)
            step(model)
            results[f"{name}, reshard_after_forward={reshard}"] = grads(model)
    return results


@one_rank_scenario()
def evaluation_on_one_rank(api: Api) -> dict[str, list[float]]:
    """Returns losses of steps with and without an evaluation between backward and step."""

    def losses(evaluate: bool) -> list[float]:
        model = shard(api, blocks_and_head(), reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        results = []
        for index in range(3):
            loss = model(batch(0, index)).square().mean()
            loss.backward()
            if evaluate:
                with torch.no_grad():
                    model(batch(0, 9))
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.item())
        return results

    return {"evaluated": losses(True), "not evaluated": losses(False)}


@one_rank_scenario()
def inference_mode_on_one_rank(api: Api) -> dict[str, Any]:
    """Evaluates and trains, twice. Also trains an unsharded model without evaluations."""
    model = shard(api, blocks_and_head(), reshard_after_forward=True)
    results: dict[str, Any] = {}
    for when in ("at first", "after training"):
        with torch.inference_mode():
            results[f"{when}, inference_mode"] = model(batch(0, 9)).square().mean().item()
        with torch.no_grad():
            results[f"{when}, no_grad"] = model(batch(0, 9)).square().mean().item()
        results[when] = train(model, 0, 1)
    return results | {"not sharded": train(blocks_and_head(), 0, 1)}


@one_rank_scenario()
def state_dict_on_one_rank(api: Api) -> dict[str, Any]:
    model = shard(api, blocks_and_head())
    train(model, 0, 1)
    options = StateDictOptions(full_state_dict=True)
    other = shard(api, blocks_and_head(seed=11))
    other.load_state_dict(model.state_dict())
    results = {
        "kinds": [type(value).__name__ for value in model.state_dict().values()],
        "full": copy.deepcopy(dict(get_model_state_dict(model, options=options))),
        "weights": weights(model),
        "loaded": train(other, 0, 1),
        "continued": train(model, 0, 1),
    }
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            nn.init.ones_(param)
    return results | {"emptied": train(model, 0, 1)}


@one_rank_scenario()
def writes_in_forward_on_one_rank(api: Api) -> dict[str, Any]:
    """Returns a weight that a hook clamps before forward: plain, sharded, and in bfloat16.

    "by hand" is the weight that was clamped between ``unshard()`` and ``reshard()``.
    """

    def clamp(block: Any, args: Any) -> None:
        with torch.no_grad():
            block.linear.weight.clamp_(-0.01, 0.01)

    def forward(model: nn.Sequential) -> torch.Tensor:
        model[0].register_forward_pre_hook(clamp)
        with torch.no_grad():
            model(batch(0))
        return weights(model)["0.linear.weight"]

    def write_by_hand(model: Any) -> torch.Tensor:
        model[0].unshard()
        clamp(model[0], ())
        model[0].reshard()
        return weights(model)["0.linear.weight"]

    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return {
        "before": weights(blocks_and_head())["0.linear.weight"],
        "not sharded": forward(blocks_and_head()),
        "sharded": forward(shard(api, blocks_and_head())),
        "cast": forward(shard(api, blocks_and_head(), mp_policy=cast)),
        "by hand": write_by_hand(shard(api, blocks_and_head())),
        "by hand, cast": write_by_hand(shard(api, blocks_and_head(), mp_policy=cast)),
    }
