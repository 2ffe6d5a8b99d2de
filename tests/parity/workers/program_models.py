"""The models of random programs: small blocks of many kinds, in a net that says how it is called.

All take and give rows of ``DIM`` numbers. What is to raise in the middle of a forward or a backward
does so while its name is in ``ARMED``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

DIM = 4
"""Divisible by the ranks; blocks have odd shapes of their own."""
ARMED: set[str] = set()


class Fuse(torch.autograd.Function):
    """Hands its input on, and raises in backward while armed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if "backward" in ARMED:
            raise RuntimeError("a fuse has blown in backward")
        return grad


class Plain(nn.Module):
    """A linear layer; the first block of other kinds is one of these."""

    def __init__(self, rows: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, rows)
        self.rows = rows

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        found = torch.tanh(self.linear(x.to(self.linear.weight.dtype)) * scale)
        return found if self.rows == DIM else nn.functional.pad(found, (0, DIM - self.rows))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).sigmoid()


class Norm(Plain):
    """A residual block with two modules of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + super().forward(self.norm(x.to(self.norm.weight.dtype)), scale)


class Trap(Plain):
    """Raises on demand, in the middle of its forward or of its backward."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = super().forward(x, scale)
        if "forward" in ARMED:
            raise RuntimeError("a trap has gone off in forward")
        return Fuse.apply(x)


class Late(Plain):
    """Raises before it computes anything."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if "early" in ARMED:
            raise RuntimeError("a trap has gone off early")
        return super().forward(Fuse.apply(x), scale)


class Nested(nn.Module):
    """Two blocks, which may be units below this one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Norm(), Plain())
        self.bias = nn.Parameter(torch.randn(DIM) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.bias


class Backwards(Nested):
    """Uses its blocks in the other order than they stand there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](self.inner[1](x)) * (1 + self.bias)


class Bag(nn.Module):
    """Parameters in containers, of shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict(
            {"row": nn.Parameter(torch.randn(1, DIM)), "odd": nn.Parameter(torch.randn(3, DIM))}
        )
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(DIM, 3)), torch.randn(DIM)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.named["row"].dtype) * self.named["row"]
        return torch.tanh(y @ self.listed[0] @ self.named["odd"] + self.listed[1])


class Embed(nn.Module):
    """An embedding of numbers made from the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table((x.detach().float().abs() * 9).long().sum(-1) % 7)
        return x + found


class Checkpointed(nn.Module):
    """A block under activation checkpointing."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.block = Norm()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Counting(nn.Module):
    """Buffers: a batch norm's, a counter that forward moves on, and one that is not saved."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.norm(x.to(self.norm.weight.dtype))


class Dead(Plain):
    """Has a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(5))


class Idle(nn.Module):
    """Is not used at all where its input is even in number."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] % 2 == 0 else self.block(x)


class Drop(Plain):
    """Draws random numbers."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x, scale), 0.3, self.training)


class Paired(nn.Module):
    """Is given and gives a dict with more than tensors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Plain()
        self.other = Plain(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.both({"x": x, "n": [x * 2, None]})
        return found["y"] + found["z"][0]

    def both(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"y": self.block(given["x"]), "z": (self.other(given["n"][0]), "text")}


class Writing(Plain):
    """Works in place on what a linear layer has given."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).mul_(scale).relu_()


class Viewing(Plain):
    """Gives a view of what it was given, and a sum."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (x + super().forward(x, scale))[:, :]


class Inactive(Plain):
    """Runs without gradients, whoever calls it."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            found = super().forward(x, scale)
        return x + found


class Scalar(Plain):
    """A parameter without dimensions, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * self.scale


def with_dtype(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: Norm().to(dtype)


def frozen(whole: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        block = Norm()
        (block if whole else block.linear.weight).requires_grad_(False)
        return block

    return make


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain, "norm": Norm, "trap": Trap, "late": Late, "nested": Nested,
    "backwards": Backwards, "bag": Bag, "embed": Embed, "checkpointed": Checkpointed,
    "reentrant": Reentrant, "counting": Counting, "dead": Dead, "idle": Idle, "drop": Drop,
    "paired": Paired, "writing": Writing, "viewing": Viewing, "inactive": Inactive,
    "odd": lambda: Plain(3), "scalar": Scalar, "frozen": frozen(True), "half frozen": frozen(False),
    "bfloat16": with_dtype(torch.bfloat16), "float16": with_dtype(torch.float16),
    "double": with_dtype(torch.float64),
}  # fmt: skip
"""Blocks that are made anew."""
AGAIN = ("", "again", "tied", "borrowed")
"""No block; the one before once more; one with the weight of the first block; one of the model
before."""


class Net(nn.Module):
    """Blocks one after the other, then a head. ``way``: in which structure the output comes."""

    def __init__(self, kinds: list[str], way: str, before: Net | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KINDS["plain"]()])
        self.head = nn.Linear(DIM, 3)
        self.way = way
        for kind in kinds:
            if kind:
                self.blocks.append(self._made(kind, before))

    def _made(self, kind: str, before: Net | None) -> nn.Module:
        if kind == "again":
            return self.blocks[-1]
        if kind == "borrowed":
            return self.blocks[-1] if before is None else before.blocks[-1]
        if kind == "tied":
            block = Plain()
            first: Any = self.blocks[0]
            block.linear.weight = first.linear.weight
            return block
        return KINDS[kind]()

    def forward(self, x: torch.Tensor, skip: int = 0) -> Any:
        x = x.to(self.head.weight.dtype)
        for block in list(self.blocks)[skip:]:
            x = block(x)
        y = self.head(x.to(self.head.weight.dtype))
        if self.way == "pair":
            return y, [x, None]
        if self.way == "dict":
            return {"y": y, "x": {"deep": x}, "name": "x"}
        if self.way == "view":
            return y.view(-1)[1:]
        return y

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x.to(self.head.weight.dtype))).sigmoid()
