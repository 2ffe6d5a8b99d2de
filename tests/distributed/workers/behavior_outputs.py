"""Scenarios of module inputs and outputs: containers, views, registered forward methods."""

from __future__ import annotations

import itertools
import warnings
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn as nn
from behavior import (
    DIM,
    Api,
    batch,
    grads,
    scenario,
)
from behavior_training import input_with_grad
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method

# ---- containers ----

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Packet:
    value: torch.Tensor
    extra: Any


def pack(kind: str, a: torch.Tensor, b: torch.Tensor) -> Any:
    return {
        "tuple": (a, b),
        "list": [a, b],
        "dict": {"a": a, "b": b, "n": 3},
        "namedtuple": Pair(a, b),
        "dataclass": Packet(a, {"deep": [b, None]}),
        "nested": {"x": [(a, {"y": Pair(b, "text")})], "none": None},
        "repeated": (a, a, b),
    }[kind]


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Packet):
        return tensors_of(value.value) + tensors_of(value.extra)
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return []


class Container(nn.Module):
    """Takes a container as positional argument and a tensor by keyword; returns a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, packed: Any, flag: bool = False, *, bias: torch.Tensor) -> Any:
        assert flag
        tensors = tensors_of(packed)
        return pack(self.kind, self.left(tensors[0]) + bias, self.right(tensors[-1]))


class Containers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = Container(kind), Container(kind)

    def forward(self, packed: Any, bias: torch.Tensor) -> Any:
        middle = self.first(packed, flag=True, bias=bias)
        return self.second(middle, True, bias=bias)


@scenario()
def containers(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    mixed = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for policy in (MixedPrecisionPolicy(), mixed):
        for kind in ("tuple", "list", "dict", "namedtuple", "dataclass", "nested", "repeated"):
            torch.manual_seed(1)
            model = Containers(kind)
            for child in (model.first, model.second):
                api.fully_shard(child, mp_policy=policy)
            api.fully_shard(model, mp_policy=policy)
            x, bias = input_with_grad(api), batch(api.rank, 1)[0]
            output = model(pack(kind, x, batch(api.rank, 2)), bias=bias)
            outputs = tensors_of(output)
            sum(t.square().mean() for t in outputs).backward()
            results[f"{kind} {policy.param_dtype}"] = {
                "type": type(output).__name__,
                "outputs": [t.detach().clone() for t in outputs],
                "input gradient": x.grad,
                "grads": grads(model),
            }
    return results


class Marked(torch.Tensor):
    """A plain subclass."""


class Recorded(torch.Tensor):
    """Records the calls of ``Tensor.to``."""

    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            cls.calls.append((args[1:], kwargs))
        return super().__torch_function__(func, types, args, kwargs)


class Types(nn.Module):
    """Records the types of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
        self.seen += [(type(t).__name__, t.dtype) for t in (x, bias)]
        return self.linear(x) + bias


@scenario()
def tensor_subclasses_as_inputs_and_outputs(api: Api) -> dict[str, Any]:
    """Casts inputs and outputs of tensor subclasses, as positional and as keyword arguments."""
    results: dict[str, Any] = {}
    bf16, fp32 = torch.bfloat16, torch.float32
    for kind, dtypes, subclass_first in itertools.product(
        (Marked, Recorded), ((None, None), (bf16, None), (bf16, fp32), (None, bf16)), (True, False)
    ):
        model = Types()
        policy = MixedPrecisionPolicy(param_dtype=dtypes[0], output_dtype=dtypes[1])
        api.fully_shard(model, mp_policy=policy)
        plain, subclass = input_with_grad(api), input_with_grad(api, 1).detach().as_subclass(kind)
        Recorded.calls.clear()
        x, bias = (subclass, plain) if subclass_first else (plain, subclass)
        output = model(x, bias=bias)
        record = [model.seen, type(output).__name__, output.dtype, list(Recorded.calls)]
        output.square().mean().backward()
        results[f"{kind.__name__} {dtypes} {subclass_first}"] = [*record, plain.grad, grads(model)]
    return results


class View(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: torch.Tensor) -> Any:
        left, right = self.linear(x).chunk(2, dim=-1)
        return left, right.clone(), right


@scenario()
def views_as_outputs(api: Api) -> list[Any]:
    """Records the warnings about views in outputs, trains, and counts warnings without grad and
    under a filter of torch's module."""
    record: list[Any] = []
    model = api.fully_shard(View())
    for step in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs = model(batch(api.rank, step))
        record.append([(Path(w.filename).name, str(w.message)) for w in caught])
        sum(t.square().mean() for t in outputs).backward()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(api.rank))
    with warnings.catch_warnings(record=True) as filtered:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp")
        model(batch(api.rank))
    return [*record, len(caught) + len(filtered), grads(model)]


class TwoMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return scale * self.linear(x).relu()


@scenario()
def registered_forward_method(api: Api) -> list[Any]:
    """Returns the type of the weight after the method, loss and gradients of each step."""
    torch.manual_seed(1)
    model = api.fully_shard(TwoMethods(), reshard_after_forward=True)
    register_fsdp_forward_method(model, "encode")
    record: list[Any] = []
    for step in range(2):
        loss = model.encode(batch(api.rank, step), scale=2.0).square().mean()
        weight_type = type(model.linear.weight).__name__
        loss.backward()
        record.append((weight_type, loss.item(), grads(model)))
    return record
