"""Small models that several test files use.

A model that only one test uses is defined beside that test.
Parameters are created in the order of the attributes, so equal seeds give equal parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class ResidualBlock(nn.Module):
    """A residual block with a norm and a linear layer: four parameters of two shapes.

    The default width is not divisible by 2, 3 or 4, so that shards are uneven.
    """

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).relu()


class MLPBlock(nn.Module):
    """A residual block with two linear layers. ``bias`` is that of the second one."""

    def __init__(self, width: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class MLPModel(nn.Module):
    """A linear layer, MLP blocks in a ModuleList, and a head without bias, all of width 8."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(MLPBlock(8, 16) for _ in range(blocks))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(nn.Module):
    """Runs ``block`` with activation checkpointing: backward recomputes its forward."""

    def __init__(self, block: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)
