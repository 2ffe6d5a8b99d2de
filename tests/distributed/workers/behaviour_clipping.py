"""Scenarios about torch's own clipping functions: beside stock, the same results in all respects.

Gradients are made by hand, so that each case has its own kinds of them. With ours, ``install`` is
called first; the count of calls that took the C path comes along, for the tests.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from behaviour import Api, scenario, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
)
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = ((8, 3), (5,), (7, 2), (1,), (300, 256))
"""Uneven and empty shards, and one that several threads would scale."""


@contextmanager
def switched(api: Api) -> Iterator[list[int]]:
    """Torch's functions lead to ours, where ours is tested; counts what the C path did."""
    taken = [0]
    if not api.ours:
        yield taken
        return
    import fsdp_c
    from fsdp_c import clip_for_torch

    total = clip_for_torch._as_dtensor
    scale = clip_for_torch.scale_fast

    def counting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            found = function(*args)
            taken[0] += found is not False
            return found

        return call

    clip_for_torch._as_dtensor = counting(total)
    clip_for_torch.scale_fast = counting(scale)
    fsdp_c.install()
    try:
        yield taken
    finally:
        fsdp_c.uninstall()
        clip_for_torch._as_dtensor, clip_for_torch.scale_fast = total, scale


def given(
    api: Api,
    mesh: Any,
    placements: Any,
    shapes: Any = SHAPES,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    seed: int = 0,
) -> list[Any]:
    """Parameters with gradients, laid out so."""
    made = []
    for i, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(100 * api.rank + i + 1000 * seed)
        full = torch.zeros(shape, dtype=dtype)
        param = nn.Parameter(DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim))
        layout = [Replicate() if p.is_partial() else p for p in placements]
        like = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim).redistribute(
            placements=layout
        )
        local = torch.randn(like._local_tensor.shape, generator=generator).to(dtype) * scale
        param = nn.Parameter(like)
        param.grad = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        made.append(param)
    return made


def plain(count: int = 2) -> list[Any]:
    made = [nn.Parameter(torch.zeros(3, 2)) for _ in range(count)]
    for i, param in enumerate(made):
        param.grad = torch.full((3, 2), float(i + 1))
    return made


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which nan equals nan."""
    return torch.nan_to_num(tensor.detach(), nan=12345.0, posinf=math.inf, neginf=-math.inf)


def facts(value: Any) -> Any:
    """All that a caller can see of a result."""
    if not isinstance(value, torch.Tensor):
        return value
    seen: list[Any] = [type(value).__name__, str(value.dtype), str(value.device), value.shape]
    seen += [value.requires_grad, value.is_leaf, value.is_inference(), value.stride()]
    if isinstance(value, DTensor):
        seen += [str(value.placements), str(value.device_mesh), str(value._spec)]
        seen += [type(value._local_tensor).__name__, comparable(value._local_tensor)]
    return [*seen, comparable(whole(value))]


def outcome(call: Callable[[], Any], params: list[Any]) -> list[Any]:
    """What a call returned, raised or warned of, and the gradients after it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found: Any = facts(call())
        except Exception as error:
            found = [type(error).__name__, str(error).splitlines()[0]]
    told = [(str(w.message).splitlines()[0], Path(w.filename).name) for w in said]
    grads = [getattr(g, "_local_tensor", g) for g in (p.grad for p in params)]
    local = [None if g is None else comparable(g) for g in grads]
    return [found, told, local]


def three_ways(params: list[Any], max_norm: float, *args: Any, **kwargs: Any) -> list[Any]:
    """The whole call, and then its halves; the total is gathered in between, as libraries do."""
    seen = [outcome(lambda: clip_grad_norm_(params, max_norm, *args, **kwargs), params)]

    def halves(gather: bool) -> Any:
        grads = [p.grad for p in params if p.grad is not None]
        total = get_total_norm(grads, *args, **kwargs)
        if gather and isinstance(total, DTensor):
            total = total.full_tensor()
        foreach = kwargs.get("foreach")
        clip_grads_with_norm_(params, max_norm * 0.5, total, foreach)
        return total

    return [*seen, outcome(lambda: halves(False), params), outcome(lambda: halves(True), params)]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Watching(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def usual(api: Api, one: Any, rows: Any) -> dict[str, Any]:
    """What the C path is for."""
    seen: dict[str, Any] = {}
    for max_norm in (1e-2, 1.0, 1e9, -1.0, 0.0):
        for foreach in (None, True, False):
            params = given(api, one, [Shard(0)])
            seen[f"{max_norm} {foreach}"] = three_ways(params, max_norm, foreach=foreach)
    seen["many"] = three_ways(given(api, one, [Shard(0)], [(9, i + 1) for i in range(60)]), 1)
    for seed in range(10):
        params = given(api, one, [Shard(0)], [(17, 5)] * 20, seed=seed)
        seen[f"seed {seed}"] = three_ways(params, 1, 2)
    seen["columns"] = three_ways(given(api, one, [Shard(1)], [(4, 8), (3, 5)]), 0.5)
    mixed = given(api, one, [Shard(0)]) + given(api, one, [Shard(1)], [(4, 8)])
    seen["rows and columns"] = three_ways(mixed, 0.5)
    seen["hybrid"] = three_ways(given(api, rows, [Replicate(), Shard(0)]), 0.5)
    equal = init_device_mesh("cpu", (api.world,))
    both = given(api, one, [Shard(0)]) + given(api, equal, [Shard(0)])
    seen["equal meshes"] = three_ways(both, 0.5)
    seen["replicated"] = three_ways(given(api, one, [Replicate()]), 0.5)
    missing = given(api, one, [Shard(0)])
    missing[1].grad = None
    seen["missing"] = three_ways(missing, 0.5)
    twice = given(api, one, [Shard(0)])
    seen["twice"] = three_ways(twice + twice, 0.5)
    with default_dtype(torch.bfloat16):
        seen["default dtype"] = three_ways(given(api, one, [Shard(0)]), 0.5)
    with torch.inference_mode():
        seen["inference"] = three_ways(given(api, one, [Shard(0)]), 0.5)
    for value in (math.nan, math.inf):
        for strict in (False, True):
            params = given(api, one, [Shard(0)], scale=value)
            seen[f"{value} {strict}"] = three_ways(params, 0.5, error_if_nonfinite=strict)
    params = given(api, one, [Shard(0)])
    seen["generator"] = outcome(lambda: clip_grad_norm_((p for p in params), 0.5), params)
    seen["named"] = outcome(
        lambda: clip_grad_norm_(parameters=tuple(params), max_norm=0.25), params
    )
    return seen


def unusual(api: Api, one: Any, rows: Any) -> dict[str, Any]:
    """What is torch's."""
    seen: dict[str, Any] = {}
    for order in (1.0, 3.0, 0.0, "inf", math.inf, -1.0, 4.0):
        seen[f"order {order}"] = three_ways(given(api, one, [Shard(0)], [(8, 3)] * 3), 0.1, order)
    for dtype in (torch.bfloat16, torch.float64):
        seen[str(dtype)] = three_ways(given(api, one, [Shard(0)], dtype=dtype), 0.1)
    seen["partial"] = three_ways(given(api, one, [Partial()]), 0.1)
    seen["two dims"] = three_ways(given(api, rows, [Shard(0), Shard(1)], [(8, 8)] * 3), 0.1)
    seen["several meshes"] = three_ways(
        given(api, one, [Shard(0)]) + given(api, rows, [Replicate(), Shard(0)]), 0.1
    )
    seen["replicated and sharded"] = three_ways(
        given(api, one, [Replicate()]) + given(api, one, [Shard(0)]), 0.1
    )
    seen["mixed"] = three_ways(given(api, one, [Shard(0)]) + plain(), 0.1)
    seen["mixed, plain first"] = three_ways(plain() + given(api, one, [Shard(0)]), 0.1)
    seen["plain"] = three_ways(plain(), 0.1)
    nothing: list[Any] = []
    seen["empty"] = three_ways(nothing, 0.1)
    with default_dtype(torch.bfloat16):
        seen["empty, default dtype"] = three_ways(nothing, 0.1)
    none = given(api, one, [Shard(0)])
    for param in none:
        param.grad = None
    seen["no gradients"] = three_ways(none, 0.1)
    seen["empty generator"] = outcome(lambda: clip_grad_norm_((p for p in nothing), 0.1), nothing)
    single = given(api, one, [Shard(0)])
    seen["one tensor"] = outcome(lambda: clip_grad_norm_(single[0], 0.1), single)
    seen["no max_norm"] = outcome(lambda: clip_grad_norm_(single), single)  # type: ignore[call-arg]
    call: Callable[[], Any]
    for wrong in ("one", None, torch.tensor(0.1)):
        params = given(api, one, [Shard(0)])
        call = functools.partial(clip_grad_norm_, params, wrong)
        seen[f"max_norm {wrong!r}"] = outcome(call, params)
    seen["not tensors"] = outcome(lambda: clip_grad_norm_([1, 2], 0.1), nothing)  # type: ignore[list-item]
    seen["no list"] = outcome(lambda: clip_grad_norm_(None, 0.1), nothing)  # type: ignore[arg-type]
    for total in (torch.tensor([1.0, 2.0]), torch.tensor(3.0).double(), 3.0):
        params = given(api, one, [Shard(0)], [(8, 3)])
        call = functools.partial(clip_grads_with_norm_, params, 0.1, total)
        seen[f"total {total}"] = outcome(call, params)
    params = given(api, one, [Shard(0)])
    with Watching() as mode:
        clip_grad_norm_(params, 0.1)
    seen["watched"] = mode.seen
    return seen


def meshes(api: Api) -> tuple[Any, Any]:
    return init_device_mesh("cpu", (api.world,)), init_device_mesh("cpu", (api.world // 2, 2))


def run(api: Api, cases: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    one, rows = meshes(api)
    with switched(api) as taken:
        return {"seen": cases(api, one, rows), "taken": taken[0] if api.ours else 0}


@scenario()
def usual_clipping(api: Api) -> dict[str, Any]:
    return run(api, usual)


@scenario()
def unusual_clipping(api: Api) -> dict[str, Any]:
    return run(api, unusual)


@scenario(4)
def usual_clipping_on_four(api: Api) -> dict[str, Any]:
    return run(api, usual)


@scenario(4)
def unusual_clipping_on_four(api: Api) -> dict[str, Any]:
    return run(api, unusual)
