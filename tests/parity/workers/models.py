"""The small models of the parity grid, one builder per family.

Most dimensions are 5, 7 or 13, so that shards on two and four ranks are uneven and some are empty.
A builder returns a ``Case``: the model, the modules to wrap in forward order, and a function that
creates the inputs of one microbatch. Builders use torch's global generator only, so that a seed
gives the same weights in every process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The args and kwargs of a forward."""


@dataclass
class Case:
    """One model of the grid, with everything that the script needs to train it."""

    model: nn.Module
    blocks: list[list[nn.Module]]
    """Modules to wrap below the root in forward order. Modules of one entry share a group."""
    inputs: Callable[[torch.Generator, torch.dtype], Inputs]
    """Returns the arguments of one forward, drawn from the generator. Floating tensors have the
    given dtype."""
    leaves: list[nn.Module] = field(default_factory=list)
    """Modules inside the blocks that are wrapped too if ``wrap`` is "deep"."""
    toggled: list[str] = field(default_factory=list)
    """Names of parameters whose requires_grad is flipped between steps."""
    ignored: list[str] = field(default_factory=list)
    """Names of parameters that may be passed as ignored_params."""
    checkpointable: bool = True
    """Whether the blocks take and return plain tensors, so that checkpoint() accepts them."""
    parallel: dict[str, str] = field(default_factory=dict)
    """Parallel style of each module: column, row, or gathered (column with gathered outputs).
    Empty if the model cannot be parallelized."""
    experts: list[str] = field(default_factory=list)
    """Names of parameters that may have their own mesh."""
    unneeded: list[nn.Module] = field(default_factory=list)
    """Modules whose backward does not read their parameters."""
    methods: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Methods to register with register_fsdp_forward_method."""
    roots: list[nn.Module] = field(default_factory=list)
    """The roots, if the model itself is not a root."""


class Block(nn.Module):
    """A residual pair of linear layers after a norm: (batch, dim) -> (batch, dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def rows_of(dim: int) -> Callable[[torch.Generator, torch.dtype], Inputs]:
    """Returns a function that draws three rows of ``dim`` columns."""
    return lambda generator, dtype: ((torch.randn(3, dim, generator=generator).to(dtype),), {})


def mlp() -> Case:
    """Returns linear layers of changing width."""
    blocks = [
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 13)),
        nn.Sequential(nn.Linear(13, 13), nn.Tanh()),
        nn.Sequential(nn.Linear(13, 7, bias=False), nn.GELU(), nn.Linear(7, 5)),
    ]
    leaves = [blocks[0][0], blocks[2][0]]
    return Case(
        nn.Sequential(*blocks),
        [[b] for b in blocks],
        rows_of(5),
        leaves,
        toggled=["1.0.weight", "1.0.bias"],
        ignored=["0.2.bias", "2.2.weight"],
    )


def residual() -> Case:
    """Returns equal residual blocks below a root that has its own parameters."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(7))
            self.layers = nn.ModuleList(Block(7, 13) for _ in range(3))
            self.head = nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = Residual()
    return Case(
        model,
        [[layer] for layer in model.layers],
        rows_of(7),
        [layer.up for layer in model.layers],
        toggled=["layers.1.norm.weight", "layers.1.up.weight", "scale"],
        ignored=["layers.0.norm.bias", "head.bias"],
    )


class Attention(nn.Module):
    """Causal single-head attention: (batch, time, dim) -> (batch, time, dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * x.shape[-1] ** -0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.out(scores.masked_fill(mask, float("-inf")).softmax(-1) @ v)


class Layer(nn.Module):
    """A transformer layer: attention, then a two-layer MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 13), nn.SiLU(), nn.Dropout(0.1), nn.Linear(13, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model over 11 tokens. ``tied`` shares the embedding with the output layer."""

    def __init__(self, tied: bool, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(Layer(7) for _ in range(layers))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _tokens(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    return (torch.randint(0, 11, (2, 4), generator=generator),), {}


def transformer() -> Case:
    """Returns a transformer, whose token inputs cannot require gradients."""
    model = Transformer(tied=False)
    return Case(
        model,
        [[layer] for layer in model.layers],
        _tokens,
        [layer.attention for layer in model.layers],
        toggled=["layers.2.norm1.weight", "layers.2.mlp.0.weight"],
        ignored=["layers.1.norm2.bias", "norm.weight"],
    )


def tied() -> Case:
    """Returns a model whose embedding and head share a parameter. Both are in the root's group."""
    model = Transformer(tied=True, layers=2)
    return Case(
        model,
        [[layer] for layer in model.layers],
        _tokens,
        [layer.mlp for layer in model.layers],
        toggled=["embedding.weight"],
        ignored=["norm.bias"],
    )


def grouped() -> Case:
    """Returns a transformer with two groups of several modules: two layers, and norm with head."""
    model = Transformer(tied=False, layers=4)
    first, second, third, fourth = model.layers
    return Case(
        model,
        [[first, second], [third], [fourth], [model.norm, model.head]],
        _tokens,
        [third.attention],
        toggled=["norm.weight", "layers.0.norm1.bias"],
        ignored=["layers.1.norm1.bias"],
        checkpointable=False,
    )


def shared_module() -> Case:
    """Returns one block that is called twice per forward and registered under two names."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block(5, 7)
            self.between = nn.Linear(5, 5)
            self.again = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(torch.tanh(self.between(self.first(x))))

    model = Twice()
    return Case(
        model,
        [[model.first], [model.between]],
        rows_of(5),
        toggled=["between.weight"],
        ignored=["first.norm.bias"],
        checkpointable=False,
    )


def shared_parameters() -> Case:
    """Returns two linear layers of one block that share weight and bias."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(7, 7)
            self.b = nn.Linear(7, 7)
            self.b.weight = self.a.weight
            self.b.bias = self.a.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.sigmoid(self.a(x)))

    blocks = [Shared(), Shared()]
    model = nn.Sequential(blocks[0], nn.Linear(7, 7), blocks[1])
    return Case(
        model,
        [[blocks[0]], [blocks[1]]],
        rows_of(7),
        toggled=["2.a.weight"],
        ignored=["1.bias"],
    )


def unused() -> Case:
    """Returns a model with unused parameters: some within a block, and a whole block."""

    class PartlyUsed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(5, 5)
            self.unused = nn.Linear(5, 13)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.used(x))

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = PartlyUsed()
            self.unused_block = Block(5, 7)
            self.two = PartlyUsed()
            self.unused = nn.Parameter(torch.randn(3, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    model = Unused()
    return Case(
        model,
        [[model.one], [model.unused_block], [model.two]],
        rows_of(5),
        [model.one.used],
        toggled=["one.used.weight"],
        ignored=["two.used.bias"],
    )


def frozen() -> Case:
    """Returns a frozen block, a partly frozen block and a trainable block."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Block(7, 5)
            self.partly = Block(7, 13)
            self.top = Block(7, 5)
            self.body.requires_grad_(False)
            self.partly.up.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(self.partly(self.body(x)))

    model = Frozen()
    return Case(
        model,
        [[model.body], [model.partly], [model.top]],
        rows_of(7),
        [model.partly.down],
        toggled=["body.up.weight", "partly.up.bias", "top.down.weight"],
        ignored=["top.norm.weight"],
    )


def tiny() -> Case:
    """Returns parameters of one, two and three rows; ranks beyond these hold empty shards."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(1))
            self.mix = nn.Parameter(torch.randn(2, 3))
            self.offset = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.mix.t() @ self.mix * self.gain + self.offset)

    blocks = [Tiny(), Tiny()]
    model = nn.Sequential(blocks[0], nn.Linear(3, 3), blocks[1], nn.Linear(3, 1))
    return Case(
        model,
        [[blocks[0]], [blocks[1]]],
        rows_of(3),
        toggled=["0.gain", "2.mix"],
        ignored=["1.bias"],
    )


def single() -> Case:
    """Returns groups with exactly one parameter."""
    blocks = [nn.Linear(7, 13, bias=False), nn.Linear(13, 8, bias=False), nn.Linear(8, 5, False)]
    model = nn.Sequential(blocks[0], nn.ReLU(), blocks[1], nn.Tanh(), blocks[2])
    return Case(model, [[b] for b in blocks], rows_of(7), toggled=["2.weight"])


def batchnorm() -> Case:
    """Returns batch norms with buffers, which need equal compute and parameter dtypes."""
    blocks = [
        nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.ReLU()),
        nn.Sequential(nn.Linear(13, 5, bias=False), nn.BatchNorm1d(5)),
    ]
    return Case(
        nn.Sequential(*blocks, nn.Linear(5, 5)),
        [[b] for b in blocks],
        rows_of(7),
        [blocks[0][1]],
        toggled=["0.1.weight", "1.0.weight"],
        ignored=["0.1.bias"],
    )


def conv() -> Case:
    """Returns convolutions with group norms and a linear head."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.GroupNorm(5, 5), nn.ReLU())
            self.body = nn.Sequential(nn.Conv2d(5, 6, 3, bias=False), nn.GroupNorm(2, 6))
            self.head = nn.Linear(6, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))

    model = Conv()

    def inputs(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return (torch.randn(2, 3, 5, 5, generator=generator).to(dtype),), {}

    return Case(
        model,
        [[model.stem], [model.body]],
        inputs,
        [model.stem[0]],
        toggled=["stem.1.weight", "body.0.weight"],
        ignored=["stem.0.bias", "body.1.weight"],
    )


@dataclass
class Bundle:
    """A dataclass that one block returns and the next one takes."""

    hidden: torch.Tensor
    extra: dict[str, torch.Tensor]
    count: int


def structures() -> Case:
    """Returns blocks that take and return tuples, dicts, dataclasses and nested containers."""

    class ToTuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 7)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            y = torch.tanh(self.linear(x))
            return y, [y * 2, x]

    class ToBundle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)

        def forward(self, pair: tuple[torch.Tensor, list[torch.Tensor]]) -> Bundle:
            y = self.linear(pair[0])
            return Bundle(y, {"double": pair[1][0], "input": pair[1][1]}, 3)

    class ToDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 5)

        def forward(self, bundle: Bundle) -> dict[str, Any]:
            y = self.linear(bundle.hidden + bundle.extra["double"])
            return {"out": y, "parts": (bundle.hidden, {"in": bundle.extra["input"]}), "n": None}

    blocks = [ToTuple(), ToBundle(), ToDict()]
    return Case(
        nn.Sequential(*blocks),
        [[b] for b in blocks],
        rows_of(5),
        toggled=["1.linear.bias"],
        ignored=["0.linear.bias"],
        checkpointable=False,
    )


def keywords() -> Case:
    """Returns a model with keyword arguments: tensors, None, numbers and a dict of tensors."""

    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(
            self,
            x: torch.Tensor,
            *,
            scale: torch.Tensor | None = None,
            extra: dict[str, torch.Tensor],
            power: int = 1,
        ) -> torch.Tensor:
            y = self.linear(x) if scale is None else self.linear(x) * scale
            return torch.tanh(y + extra["shift"]) ** power

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Keyed()
            self.two = Keyed()

        def forward(self, x: torch.Tensor, scale: torch.Tensor, **extra: Any) -> torch.Tensor:
            y = self.one(x, scale=scale, extra=extra)
            return self.two(y, scale=None, extra=extra, power=2)

    model = Keywords()

    def inputs(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        x, scale, shift = (torch.randn(3, 5, generator=generator).to(dtype) for _ in range(3))
        return (x,), {"scale": scale, "shift": shift}

    return Case(
        model,
        [[model.one], [model.two]],
        inputs,
        toggled=["two.linear.weight"],
        ignored=["one.linear.bias"],
        checkpointable=False,
    )


def branches() -> Case:
    """Returns a block whose output is used twice, and a block whose output is unused."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = Block(5, 7)
            self.left = Block(5, 13)
            self.right = Block(5, 7)
            self.dropped = Block(5, 7)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.trunk(x)
            self.dropped(x)
            return self.left(x), self.right(x)

    model = Branches()
    return Case(
        model,
        [[model.trunk], [model.left], [model.right], [model.dropped]],
        rows_of(5),
        [model.left.up],
        toggled=["left.up.weight", "right.norm.bias"],
        ignored=["trunk.norm.bias"],
    )


FAMILIES: dict[str, Callable[[], Case]] = {
    builder.__name__: builder
    for builder in (
        mlp,
        residual,
        transformer,
        tied,
        grouped,
        shared_module,
        shared_parameters,
        unused,
        frozen,
        tiny,
        single,
        batchnorm,
        conv,
        structures,
        keywords,
        branches,
    )
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a nested output in a fixed order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, entry.name) for entry in dataclasses.fields(value)]
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    return []
