"""Scenarios of ``zero_grad`` after microbatches whose gradients are not reduced yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behavior import Api, batch, blocks_and_head, grads, scenario, shard
from torch.distributed.device_mesh import init_device_mesh

ZERO_GRAD_CALLS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model.zero_grad(),
    "parent": lambda model, optimizer: nn.ModuleList([model]).zero_grad(),
}


def gradients_after_zero_grad(
    api: Api,
    prepare: Callable[[nn.Module], None],
    zero: Callable[[nn.Module, torch.optim.Optimizer], None],
    **options: Any,
) -> dict[str, torch.Tensor | None]:
    """Runs a microbatch with the settings of ``prepare``, calls ``zero``, and runs a reduced batch.

    Returns the gradients of the batch: ``zero`` must have dropped those of the microbatch.
    """
    model = shard(api, blocks_and_head(2), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model)
    model(batch(api.rank, 5)).square().mean().backward()
    zero(model, optimizer)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    model.set_reshard_after_backward(True)
    model(batch(api.rank)).square().mean().backward()
    return grads(model)


def disable_sync(model: Any) -> None:
    model.set_requires_gradient_sync(False)


def disable_all_reduce(model: Any) -> None:
    model.set_requires_all_reduce(False)


def disable_sync_and_reshard(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)


@scenario()
def microbatches_dropped_by_zero_grad(api: Api) -> Any:
    """Calls ``zero_grad`` of an optimizer, of the module, and of its parent."""
    hsdp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    results: dict[str, Any] = {
        "without microbatch": gradients_after_zero_grad(
            api, lambda model: None, ZERO_GRAD_CALLS["module"]
        )
    }
    for name, zero in ZERO_GRAD_CALLS.items():
        results[name] = gradients_after_zero_grad(api, disable_sync, zero)
        results[f"{name}, without reshard"] = gradients_after_zero_grad(
            api, disable_sync_and_reshard, zero
        )
        results[f"{name}, replicas"] = gradients_after_zero_grad(
            api, disable_all_reduce, zero, mesh=hsdp
        )
    return results


@scenario()
def zero_grad_of_some_parameters(api: Api) -> Any:
    """Calls ``zero_grad`` of a block's optimizer, of a module in a block, and of the model."""
    return {
        "nothing": gradients_after_zero_grad(api, disable_sync, lambda model, optimizer: None),
        "block": gradients_after_zero_grad(
            api, disable_sync, lambda model, _: torch.optim.SGD(model[0].parameters()).zero_grad()
        ),
        "linear": gradients_after_zero_grad(
            api, disable_sync, lambda model, _: model[0].linear.zero_grad()
        ),
        "all": gradients_after_zero_grad(api, disable_sync, lambda model, _: model.zero_grad()),
    }
