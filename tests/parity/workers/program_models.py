"""Models of random programs: ``Net`` is a sequence of small blocks of many kinds.

All blocks map (rows, DIM) to (rows, DIM). Some blocks raise while the name of their failure is in
``ARMED``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

DIM = 4
"""Divisible by the number of ranks. Some blocks have uneven shapes."""
ARMED: set[str] = set()
"""Failures that are active: "early" at the begin of forward, "forward" at its end, "backward"."""


class RaiseInBackward(torch.autograd.Function):
    """Identity that raises in backward while ``backward`` is armed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if "backward" in ARMED:
            raise RuntimeError("armed failure in backward")
        return grad


class Plain(nn.Module):
    """A linear layer; the first block of each model, and the base of other kinds."""

    def __init__(self, rows: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, rows)
        self.rows = rows

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        output = torch.tanh(self.linear(x.to(self.linear.weight.dtype)) * scale)
        return output if self.rows == DIM else nn.functional.pad(output, (0, DIM - self.rows))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).sigmoid()


class Norm(Plain):
    """A residual block with a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + super().forward(self.norm(x.to(self.norm.weight.dtype)), scale)


class RaiseLate(Plain):
    """Raises at the end of forward, or in backward, while armed."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = super().forward(x, scale)
        if "forward" in ARMED:
            raise RuntimeError("armed failure at the end of forward")
        return RaiseInBackward.apply(x)


class RaiseEarly(Plain):
    """Raises at the beginning of forward, or in backward, while armed."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if "early" in ARMED:
            raise RuntimeError("armed failure at the beginning of forward")
        return super().forward(RaiseInBackward.apply(x), scale)


class Nested(nn.Module):
    """Two blocks, which may be nested units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Norm(), Plain())
        self.bias = nn.Parameter(torch.randn(DIM) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.bias


class Reversed(Nested):
    """Calls its blocks in the opposite order of their registration."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](self.inner[1](x)) * (1 + self.bias)


class Containers(nn.Module):
    """Parameters in containers, with shapes that are uneven on several ranks."""

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
    """An embedding of indices computed from the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.table((x.detach().float().abs() * 9).long().sum(-1) % 7)
        return x + output


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
    """Buffers of a batch norm, a counter of forwards, and a non-persistent buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.norm(x.to(self.norm.weight.dtype))


class Unused(Plain):
    """A module with an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(5))


class Skipped(nn.Module):
    """Skips its block if the number of rows is even."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] % 2 == 0 else self.block(x)


class Drop(Plain):
    """Applies dropout."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x, scale), 0.3, self.training)


class Paired(nn.Module):
    """Calls a method whose input and output are containers of tensors and other values."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Plain()
        self.other = Plain(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.both({"x": x, "n": [x * 2, None]})
        return output["y"] + output["z"][0]

    def both(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"y": self.block(given["x"]), "z": (self.other(given["n"][0]), "text")}


class Writing(Plain):
    """Modifies the output of a linear layer in place."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).mul_(scale).relu_()


class Viewing(Plain):
    """Returns a view of a sum of its input."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (x + super().forward(x, scale))[:, :]


class Inactive(Plain):
    """Runs its layer under ``no_grad``."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            output = super().forward(x, scale)
        return x + output


class Scalar(Plain):
    """A module with a 0-dim parameter, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) * self.scale


def with_dtype(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: Norm().to(dtype)


def frozen(whole_block: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        block = Norm()
        (block if whole_block else block.linear.weight).requires_grad_(False)
        return block

    return make


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain, "norm": Norm, "raise late": RaiseLate, "raise early": RaiseEarly,
    "nested": Nested, "reversed": Reversed, "containers": Containers, "embed": Embed,
    "checkpointed": Checkpointed, "reentrant": Reentrant, "counting": Counting, "unused": Unused,
    "skipped": Skipped, "drop": Drop, "paired": Paired, "writing": Writing, "viewing": Viewing,
    "inactive": Inactive, "uneven": lambda: Plain(3), "scalar": Scalar,
    "frozen": frozen(True), "half frozen": frozen(False),
    "bfloat16": with_dtype(torch.bfloat16), "float16": with_dtype(torch.float16),
    "double": with_dtype(torch.float64),
}  # fmt: skip
"""Constructors of the kinds of blocks."""
WITHOUT_CONSTRUCTOR = ("", "again", "tied", "borrowed")
"""Kinds without a constructor.

No block, the previous block again, a block with the weight of the first block, and a block of the
previous model.
"""


class Net(nn.Module):
    """Blocks and a head. ``structure`` is the structure of the output: "tensor", "pair", ..."""

    def __init__(self, kinds: list[str], structure: str, before: Net | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KINDS["plain"]()])
        self.head = nn.Linear(DIM, 3)
        self.structure = structure
        for kind in kinds:
            if kind:
                self.blocks.append(self._make_block(kind, before))

    def _make_block(self, kind: str, before: Net | None) -> nn.Module:
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
        if self.structure == "pair":
            return y, [x, None]
        if self.structure == "dict":
            return {"y": y, "x": {"deep": x}, "name": "x"}
        if self.structure == "view":
            return y.view(-1)[1:]
        return y

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x.to(self.head.weight.dtype))).sigmoid()
