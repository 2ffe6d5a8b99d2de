"""Scenarios of models that mix ``replicate`` and ``fully_shard``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behavior import Api, batch, blocks_and_head, grads, scenario, weights
from recorded_operators import RecordedOperators
from releases import groups_of


def mixed_model(api: Api, root: Callable[..., Any]) -> nn.Sequential:
    """Returns a model whose blocks are alternately replicated and sharded, below ``root``."""
    model = blocks_and_head()
    for index, block in enumerate(list(model)[:-1]):
        (api.replicate if index % 2 == 0 else api.fully_shard)(block)
    return root(model)


def train_mixed(api: Api, model: nn.Sequential) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: dict[str, Any] = {}
    for step in range(2):
        with RecordedOperators() as forward:
            loss = model(batch(api.rank, step)).square().mean()
        param_types = [type(param).__name__ for param in model.parameters()]
        with RecordedOperators() as backward:
            loss.backward()
        results[f"step {step}"] = [
            loss.detach(),
            Counter(forward.collectives()),
            param_types,
            Counter(backward.collectives()),
        ]
        results[f"gradients {step}"] = grads(model)
        optimizer.step()
        optimizer.zero_grad()
    results["weights"] = weights(model)
    states = [module._get_fsdp_state() for module in (model, *list(model)[:-1])]
    results["roots"] = [state._is_root for state in states]
    results["names"] = [groups_of(state)[0]._module_fqn for state in states]
    results["states in context"] = [len(state._state_ctx.all_states) for state in states]
    return results


@scenario()
def replicated_below_fully_sharded(api: Api) -> dict[str, Any]:
    return train_mixed(api, mixed_model(api, api.fully_shard))


@scenario()
def fully_sharded_below_replicated(api: Api) -> dict[str, Any]:
    return train_mixed(api, mixed_model(api, api.replicate))


@scenario()
def sharded_child_of_replicated_model_run_first(api: Api) -> dict[str, Any]:
    """The sharded child runs before the first forward of the root."""
    model = mixed_model(api, api.replicate)
    with torch.no_grad():
        output = model[1](batch(api.rank))
    return {"output of child": output, **train_mixed(api, model)}
