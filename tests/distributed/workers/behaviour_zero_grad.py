"""What ``zero_grad`` drops: gradients of microbatches that were not reduced yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behaviour import Api, batch, grads, plain, scenario, shard
from torch.distributed.device_mesh import init_device_mesh

ZERO: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model.zero_grad(),
    "parent": lambda model, optimizer: nn.ModuleList([model]).zero_grad(),
}


def dropped(
    api: Api,
    prepare: Callable[[nn.Module], None],
    zero: Callable[[nn.Module, torch.optim.Optimizer], None],
    **options: Any,
) -> dict[str, torch.Tensor | None]:
    """Gradients of a batch after a microbatch that was given up."""
    model = shard(api, plain(2), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model)
    model(batch(api.rank, 5)).square().mean().backward()
    zero(model, optimizer)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    model.set_reshard_after_backward(True)
    model(batch(api.rank)).square().mean().backward()
    return grads(model)


def unsynced(model: Any) -> None:
    model.set_requires_gradient_sync(False)


def scattered(model: Any) -> None:
    model.set_requires_all_reduce(False)


def staying(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)


@scenario()
def microbatches_dropped_by_zero_grad(api: Api) -> Any:
    """By zero_grad of an optimizer, the module, and a module around it."""
    hsdp = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"alone": dropped(api, lambda model: None, ZERO["module"])}
    for name, zero in ZERO.items():
        found[name] = dropped(api, unsynced, zero)
        found[f"{name}, staying"] = dropped(api, staying, zero)
        found[f"{name}, replicas"] = dropped(api, scattered, zero, mesh=hsdp)
    return found


@scenario()
def zero_grad_of_some_parameters(api: Api) -> Any:
    """Gradients after ``zero_grad`` of an optimizer of one block, of a module in it, and of all."""
    return {
        "nothing": dropped(api, unsynced, lambda model, optimizer: None),
        "block": dropped(
            api, unsynced, lambda model, _: torch.optim.SGD(model[0].parameters()).zero_grad()
        ),
        "linear": dropped(api, unsynced, lambda model, _: model[0].linear.zero_grad()),
        "all": dropped(api, unsynced, lambda model, _: model.zero_grad()),
    }
