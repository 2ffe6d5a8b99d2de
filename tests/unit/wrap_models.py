"""Models and random module trees for the tests of ``auto_shard``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from hypothesis import strategies as st

from fsdp_c._auto_shard.unit import Unit


class Block(nn.Module):
    """Calls its children one after the other."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        for i, child in enumerate(children):
            self.add_module(f"part{i}", child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            if isinstance(child, nn.ModuleList):
                for element in child:
                    x = element(x)
            else:
                x = child(x)
        return x


class Layer(nn.Module):
    """A transformer layer without attention: (batch, width) -> (batch, width)."""

    def __init__(self, width: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Transformer(nn.Module):
    """An embedding, layers in a ``ModuleList``, and a head, tied to the embedding if ``tied``."""

    def __init__(
        self,
        layers: int = 3,
        width: int = 8,
        tied: bool = False,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList([Layer(width, norm) for _ in range(layers)])
        self.norm = norm(width)
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def units_of(units: list[Unit]) -> list[tuple[str, ...]]:
    return [unit.names for unit in units]


def train(model: nn.Module) -> None:
    model(torch.arange(8)).sum().backward()


LEAVES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(2, 2),
    lambda: nn.Linear(2, 2, bias=False),
    lambda: nn.Linear(30, 30),
    lambda: nn.BatchNorm1d(2),
    lambda: nn.ReLU(),
    lambda: nn.Conv1d(1, 1, 3),
]

# Strategies for random modules without children, module trees, and sets of module classes.
leaves: st.SearchStrategy[nn.Module] = st.sampled_from(LEAVES).map(lambda make: make())
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, min_size=1, max_size=4).flatmap(
        lambda children: st.sampled_from(
            [lambda: Block(children), lambda: nn.Sequential(*children)]
        ).map(lambda make: make())
    ),
    max_leaves=12,
).map(lambda tree: nn.Sequential(tree, nn.Linear(2, 2)))

classes = st.sets(st.sampled_from([nn.Linear, nn.Sequential, Block, nn.BatchNorm1d, nn.ReLU]))


def bytes_of(params: Any) -> int:
    return sum(p.numel() * p.itemsize for p in params)
