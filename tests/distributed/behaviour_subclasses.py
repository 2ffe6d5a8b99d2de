"""Scenarios about tensor subclasses as parameters whose gradients are subclasses, too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from behaviour import Api, scenario
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.two_tensor import TwoTensor

WIDTH = 6
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Pair(TwoTensor):
    """Two tensors under one shape, gathered together: what is computed from a pair is a pair."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Any, tuple[torch.Tensor, ...]] | None:
        a, b = outputs
        if out is None:
            return Pair(a, b).to(param_dtype), (a, b)
        if a.dtype != param_dtype:
            with torch.no_grad():
                out.a.copy_(a)
                out.b.copy_(b)
        return None


def halves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a pair consists of, or the plain tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    parts = [local.a, local.b] if isinstance(local, TwoTensor) else [local]
    return [part.detach().clone() for part in parts]


def pairs() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    for layer in model:
        layer.weight = nn.Parameter(Pair(layer.weight.detach(), 2 * layer.weight.detach()))
    return model


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))


def train_pairs(model: nn.Module, rank: int, backwards: int) -> list[Any]:
    """Losses, gradients and weights of steps with so many backwards, the last of which reduces."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=True)
    seen: list[Any] = []
    for step in range(2):
        for part in range(backwards):
            model.set_requires_gradient_sync(part + 1 == backwards)
            loss = model(rows(rank, 5 * step + part)).square().sum()
            loss.backward()
            seen.append(halves(loss))
        seen += [halves(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, [halves(param) for param in model.parameters()]]


@scenario()
def gradients_that_are_pairs(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, backwards, kwargs in (
        ("plain", 1, {}),
        ("kept after forward", 1, {"reshard_after_forward": False}),
        ("accumulated", 2, {}),
        ("mixed precision", 1, {"mp_policy": MIXED}),
        ("mixed precision, accumulated", 2, {"mp_policy": MIXED}),
    ):
        model = pairs()
        for module in (model[0], model[1], model):
            api.fully_shard(module, **kwargs)
        found[name] = train_pairs(model, api.rank, backwards)
    return found
