"""A model of three sharded linear layers, an input batch, and a step of forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

DIM = 8


def model_of(shard: Callable[..., Any], **kwargs: Any) -> Any:
    """Returns the model after calling ``shard`` on each layer and on the root."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    for block in model:
        shard(block, **kwargs)
    return shard(model, **kwargs)


def batch() -> torch.Tensor:
    return torch.arange(2.0 * DIM).view(2, DIM).requires_grad_()


def step(model: Any) -> None:
    model(batch()).sum().backward()
