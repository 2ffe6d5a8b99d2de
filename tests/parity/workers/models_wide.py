"""Models of the wide grid, each for one part of FSDP2's surface.

They have the form of those in models.py. Some have only dimensions that the world size divides:
FSDP2 requires equal shards on dims other than 0, and for all-gather extensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from models import Block, Case, Inputs, rows_of


def even() -> Case:
    """Returns residual blocks whose dimensions are divisible by eight."""

    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(8, 16) for _ in range(3))
            self.head = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Even()
    layers: list[Any] = list(model.layers)
    return Case(
        model,
        [[layer] for layer in layers],
        rows_of(8),
        [layer.up for layer in layers],
        toggled=["layers.1.norm.weight", "layers.1.up.weight"],
        ignored=["layers.0.norm.bias", "head.bias"],
        parallel={"layers.*.up": "column", "layers.*.down": "row", "head": "gathered"},
        experts=["layers.1.up.weight", "layers.1.up.bias", "layers.2.down.weight", "head.weight"],
    )


def odd() -> Case:
    """As ``even``, but half of each parallelized dimension is odd, so that shards are uneven."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Block(7, 10)
            self.two = Block(7, 6)
            self.head = nn.Linear(7, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.two(self.one(x)))

    model = Odd()
    return Case(
        model,
        [[model.one], [model.two]],
        rows_of(7),
        [model.one.down],
        toggled=["one.norm.weight", "two.up.weight"],
        ignored=["one.norm.bias"],
        parallel={"*.up": "column", "*.down": "row", "head": "gathered"},
        experts=["one.up.weight", "two.norm.weight"],
    )


def embedding() -> Case:
    """Returns an embedding with its own group, whose backward needs no parameter."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(13, 7)
            self.one = Block(7, 5)
            self.two = Block(7, 13)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(self.embedding(tokens)))

    model = Embedded()

    def inputs(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return (torch.randint(0, 13, (3, 4), generator=generator),), {}

    return Case(
        model,
        [[model.embedding], [model.one], [model.two]],
        inputs,
        [model.one.up],
        toggled=["one.up.weight"],
        ignored=["two.norm.bias"],
        checkpointable=False,
        unneeded=[model.embedding],
    )


def methods() -> Case:
    """Returns blocks that are called through methods other than forward."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(7, 5)
            self.leave = nn.Linear(5, 7, bias=False)

        def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return torch.tanh(self.enter(x)) * scale

        def decode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": self.leave(x)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.decode(self.encode(x))["out"]

    class Methods(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Coder()
            self.two = Coder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one.encode(x, scale=2.0)
            z = self.two.encode(self.one.decode(y)["out"])
            return self.two.decode(z)["out"]

    model = Methods()
    return Case(
        model,
        [[model.one], [model.two]],
        rows_of(7),
        toggled=["one.enter.bias"],
        ignored=["two.enter.bias"],
        checkpointable=False,
        methods=[(unit, name) for unit in (model.one, model.two) for name in ("encode", "decode")],
    )


def chunked() -> Case:
    """Returns a model with norm and head in one group. The head runs for each chunk."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Block(7, 5)
            self.norm = nn.LayerNorm(7)
            self.head = nn.Linear(7, 11, bias=False)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.head(part) for part in self.norm(self.body(x)).split(2)]

    model = Chunked()
    return Case(
        model,
        [[model.body], [model.norm, model.head]],
        lambda generator, dtype: ((torch.randn(5, 7, generator=generator).to(dtype),), {}),
        toggled=["norm.weight"],
        ignored=["norm.bias"],
        checkpointable=False,
    )


def partial() -> Case:
    """Returns groups of several modules. Forward calls only the first, or only the last module."""

    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.unused = nn.Linear(5, 7)
            self.unused_too = nn.Linear(7, 5)
            self.second = nn.Linear(5, 5)
            self.last = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            return self.last(torch.tanh(self.second(x)))

    model = Partial()
    return Case(
        model,
        [[model.first, model.unused], [model.unused_too, model.second]],
        rows_of(5),
        toggled=["first.weight", "unused.weight"],
        ignored=["second.bias"],
        checkpointable=False,
    )


def conditional() -> Case:
    """Returns blocks with two branches. The inputs select the branch, differently on each rank."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(5, 5)
            self.right = nn.Linear(5, 5, bias=False)

        def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
            return torch.tanh(self.left(x) if left else self.right(x))

    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Either()
            self.two = Either()
            self.last = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
            return self.last(self.two(self.one(x, choice % 2 == 0), choice < 2))

    model = Conditional()

    def inputs(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        x = torch.randn(3, 5, generator=generator).to(dtype)
        return (x, int(torch.randint(0, 4, (), generator=generator))), {}

    return Case(model, [[model.one], [model.two]], inputs, checkpointable=False)


def views() -> Case:
    """Returns blocks whose outputs are views of inputs, of each other and of local tensors."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = F.gelu(self.linear(x))
            return y.view(-1, 2, 3).transpose(1, 2), x[:, 1:]

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Viewing()
            self.two = Viewing()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, rest = self.one(x)
            z, again = self.two(y.reshape(-1, 6))
            return z + rest.sum(), again

    model = Views()
    return Case(
        model,
        [[model.one], [model.two]],
        rows_of(6),
        toggled=["one.linear.bias"],
        ignored=["two.linear.bias"],
        checkpointable=False,
    )


def pair() -> Case:
    """Returns two roots below an unwrapped module, with a shared communication context."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Block(5, 7)
            self.two = Block(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = Half()
            self.back = Half()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.back(self.front(x))

    model = Pair()
    return Case(
        model,
        [[block] for half in (model.front, model.back) for block in (half.one, half.two)],
        rows_of(5),
        roots=[model.front, model.back],
    )


WIDE_FAMILIES: dict[str, Callable[[], Case]] = {
    builder.__name__: builder
    for builder in (even, odd, embedding, methods, chunked, partial, conditional, views, pair)
}
