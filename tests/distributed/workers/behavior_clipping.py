"""Scenarios of torch's clipping functions, plain and after ``fsdp_c.install()``.

Under fsdp_c the results include the number of calls of helpers that took the C path.
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
from behavior import Api, full_value, scenario
from recorded_operators import RecordedOperators
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
)

SHAPES = ((8, 3), (5,), (7, 2), (1,), (300, 256))
"""Shapes with uneven and empty shards, and one that is large enough for several threads."""


@contextmanager
def installed(api: Api) -> Iterator[list[int]]:
    """Installs fsdp_c if ``api`` is fsdp_c's. Yields the number of helper calls of the C path."""
    c_calls = [0]
    if not api.is_fsdp_c:
        yield c_calls
        return
    import fsdp_c
    from fsdp_c._runtime import torch_clipping

    total = torch_clipping._wrap_total
    scale = torch_clipping.scale_on_cpu

    def counting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            result = function(*args)
            c_calls[0] += result is not False
            return result

        return call

    torch_clipping._wrap_total = counting(total)
    torch_clipping.scale_on_cpu = counting(scale)
    fsdp_c.install()
    try:
        yield c_calls
    finally:
        fsdp_c.uninstall()
        torch_clipping._wrap_total, torch_clipping.scale_on_cpu = total, scale


def make_params(
    api: Api,
    mesh: Any,
    placements: Any,
    shapes: Any = SHAPES,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    seed: int = 0,
) -> list[Any]:
    """Returns parameters whose gradients have the given mesh and placements."""
    made = []
    for i, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(100 * api.rank + i + 1000 * seed)
        full = torch.zeros(shape, dtype=dtype)
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
    """Returns a copy in which nan compares equal."""
    return torch.nan_to_num(tensor.detach(), nan=12345.0, posinf=math.inf, neginf=-math.inf)


def facts(value: Any) -> Any:
    """Returns all attributes and values of a result that must match."""
    if not isinstance(value, torch.Tensor):
        return value
    results: list[Any] = [type(value).__name__, str(value.dtype), str(value.device), value.shape]
    results += [value.requires_grad, value.is_leaf, value.is_inference(), value.stride()]
    if isinstance(value, DTensor):
        results += [str(value.placements), str(value.device_mesh), str(value._spec)]
        results += [type(value._local_tensor).__name__, comparable(value._local_tensor)]
    return [*results, comparable(full_value(value))]


def outcome(call: Callable[[], Any], params: list[Any]) -> list[Any]:
    """Returns the result or exception of a call, its warnings, and the gradients after it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Any = facts(call())
        except Exception as error:
            result = [type(error).__name__, str(error).splitlines()[0]]
    messages = [(str(w.message).splitlines()[0], Path(w.filename).name) for w in caught]
    grads = [getattr(g, "_local_tensor", g) for g in (p.grad for p in params)]
    local = [None if g is None else comparable(g) for g in grads]
    return [result, messages, local]


def clip_three_ways(params: list[Any], max_norm: float, *args: Any, **kwargs: Any) -> list[Any]:
    """Clips by one call, then by its two parts, then with a gathered total between the parts."""
    results = [outcome(lambda: clip_grad_norm_(params, max_norm, *args, **kwargs), params)]

    def clip_in_two_parts(gather: bool) -> Any:
        grads = [p.grad for p in params if p.grad is not None]
        total = get_total_norm(grads, *args, **kwargs)
        if gather and isinstance(total, DTensor):
            total = total.full_tensor()
        foreach = kwargs.get("foreach")
        clip_grads_with_norm_(params, max_norm * 0.5, total, foreach)
        return total

    return [
        *results,
        outcome(lambda: clip_in_two_parts(False), params),
        outcome(lambda: clip_in_two_parts(True), params),
    ]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def c_path_cases(api: Api, mesh: Any, hybrid_mesh: Any) -> dict[str, Any]:
    """Returns the results of calls that take the C path."""
    results: dict[str, Any] = {}
    for max_norm in (1e-2, 1.0, 1e9, -1.0, 0.0):
        for foreach in (None, True, False):
            params = make_params(api, mesh, [Shard(0)])
            results[f"max_norm {max_norm}, foreach {foreach}"] = clip_three_ways(
                params, max_norm, foreach=foreach
            )
    results["many"] = clip_three_ways(
        make_params(api, mesh, [Shard(0)], [(9, i + 1) for i in range(60)]), 1
    )
    for seed in range(10):
        params = make_params(api, mesh, [Shard(0)], [(17, 5)] * 20, seed=seed)
        results[f"seed {seed}"] = clip_three_ways(params, 1, 2)
    results["columns"] = clip_three_ways(make_params(api, mesh, [Shard(1)], [(4, 8), (3, 5)]), 0.5)
    mixed = make_params(api, mesh, [Shard(0)]) + make_params(api, mesh, [Shard(1)], [(4, 8)])
    results["rows and columns"] = clip_three_ways(mixed, 0.5)
    results["hybrid"] = clip_three_ways(make_params(api, hybrid_mesh, [Replicate(), Shard(0)]), 0.5)
    equal = init_device_mesh("cpu", (api.world,))
    both = make_params(api, mesh, [Shard(0)]) + make_params(api, equal, [Shard(0)])
    results["equal meshes"] = clip_three_ways(both, 0.5)
    results["replicated"] = clip_three_ways(make_params(api, mesh, [Replicate()]), 0.5)
    missing = make_params(api, mesh, [Shard(0)])
    missing[1].grad = None
    results["missing"] = clip_three_ways(missing, 0.5)
    twice = make_params(api, mesh, [Shard(0)])
    results["twice"] = clip_three_ways(twice + twice, 0.5)
    with default_dtype(torch.bfloat16):
        results["default dtype"] = clip_three_ways(make_params(api, mesh, [Shard(0)]), 0.5)
    with torch.inference_mode():
        results["inference"] = clip_three_ways(make_params(api, mesh, [Shard(0)]), 0.5)
    for value in (math.nan, math.inf):
        for strict in (False, True):
            params = make_params(api, mesh, [Shard(0)], scale=value)
            results[f"gradients {value}, strict {strict}"] = clip_three_ways(
                params, 0.5, error_if_nonfinite=strict
            )
    params = make_params(api, mesh, [Shard(0)])
    results["generator"] = outcome(lambda: clip_grad_norm_((p for p in params), 0.5), params)
    results["named"] = outcome(
        lambda: clip_grad_norm_(parameters=tuple(params), max_norm=0.25), params
    )
    return results


def torch_path_cases(api: Api, mesh: Any, hybrid_mesh: Any) -> dict[str, Any]:
    """Returns the results of calls that run torch's functions."""
    results: dict[str, Any] = {}
    for order in (1.0, 3.0, 0.0, "inf", math.inf, -1.0, 4.0):
        results[f"order {order}"] = clip_three_ways(
            make_params(api, mesh, [Shard(0)], [(8, 3)] * 3), 0.1, order
        )
    for dtype in (torch.bfloat16, torch.float64):
        results[str(dtype)] = clip_three_ways(make_params(api, mesh, [Shard(0)], dtype=dtype), 0.1)
    results["partial"] = clip_three_ways(make_params(api, mesh, [Partial()]), 0.1)
    results["two dims"] = clip_three_ways(
        make_params(api, hybrid_mesh, [Shard(0), Shard(1)], [(8, 8)] * 3), 0.1
    )
    results["several meshes"] = clip_three_ways(
        make_params(api, mesh, [Shard(0)]) + make_params(api, hybrid_mesh, [Replicate(), Shard(0)]),
        0.1,
    )
    results["replicated and sharded"] = clip_three_ways(
        make_params(api, mesh, [Replicate()]) + make_params(api, mesh, [Shard(0)]), 0.1
    )
    results["mixed"] = clip_three_ways(make_params(api, mesh, [Shard(0)]) + plain(), 0.1)
    results["mixed, plain first"] = clip_three_ways(
        plain() + make_params(api, mesh, [Shard(0)]), 0.1
    )
    results["plain"] = clip_three_ways(plain(), 0.1)
    nothing: list[Any] = []
    results["empty"] = clip_three_ways(nothing, 0.1)
    with default_dtype(torch.bfloat16):
        results["empty, default dtype"] = clip_three_ways(nothing, 0.1)
    none = make_params(api, mesh, [Shard(0)])
    for param in none:
        param.grad = None
    results["no gradients"] = clip_three_ways(none, 0.1)
    results["empty generator"] = outcome(
        lambda: clip_grad_norm_((p for p in nothing), 0.1), nothing
    )
    single = make_params(api, mesh, [Shard(0)])
    results["one tensor"] = outcome(lambda: clip_grad_norm_(single[0], 0.1), single)
    results["no max_norm"] = outcome(lambda: clip_grad_norm_(single), single)  # type: ignore[call-arg]
    call: Callable[[], Any]
    for wrong in ("one", None, torch.tensor(0.1)):
        params = make_params(api, mesh, [Shard(0)])
        call = functools.partial(clip_grad_norm_, params, wrong)
        results[f"max_norm {wrong!r}"] = outcome(call, params)
    results["not tensors"] = outcome(lambda: clip_grad_norm_([1, 2], 0.1), nothing)  # type: ignore[list-item]
    results["no list"] = outcome(lambda: clip_grad_norm_(None, 0.1), nothing)  # type: ignore[arg-type]
    for total in (torch.tensor([1.0, 2.0]), torch.tensor(3.0).double(), 3.0):
        params = make_params(api, mesh, [Shard(0)], [(8, 3)])
        call = functools.partial(clip_grads_with_norm_, params, 0.1, total)
        results[f"total {total}"] = outcome(call, params)
    params = make_params(api, mesh, [Shard(0)])
    with RecordedOperators() as mode:
        clip_grad_norm_(params, 0.1)
    results["operators"] = mode.names
    return results


def meshes(api: Api) -> tuple[Any, Any]:
    return init_device_mesh("cpu", (api.world,)), init_device_mesh("cpu", (api.world // 2, 2))


def run(api: Api, cases: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    mesh, hybrid_mesh = meshes(api)
    with installed(api) as c_calls:
        return {
            "results": cases(api, mesh, hybrid_mesh),
            "c_calls": c_calls[0] if api.is_fsdp_c else 0,
        }


@scenario()
def clipping_on_c_path(api: Api) -> dict[str, Any]:
    return run(api, c_path_cases)


@scenario()
def clipping_on_torch_path(api: Api) -> dict[str, Any]:
    return run(api, torch_path_cases)


@scenario(4)
def clipping_on_c_path_of_four_ranks(api: Api) -> dict[str, Any]:
    return run(api, c_path_cases)


@scenario(4)
def clipping_on_torch_path_of_four_ranks(api: Api) -> dict[str, Any]:
    return run(api, torch_path_cases)
