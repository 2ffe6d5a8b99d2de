"""Scenarios of complex, integer and float8 parameters, and of the dtypes of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behavior import Api, full_value, scenario
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

WIDTH = 4


class ComplexLayer(nn.Module):
    """A complex weight with uneven rows on two ranks, and optionally a real weight.

    ``lazy``: forward uses the conjugate of the weight, which torch computes lazily.
    ``real``: number of rows of the real weight, 0: none.
    """

    def __init__(self, rows: int, dtype: torch.dtype, lazy: bool = False, real: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH, dtype=torch.complex128).to(dtype))
        self.real = nn.Parameter(torch.randn(real, WIDTH)) if real else None
        self.lazy = lazy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.conj() if self.lazy else self.weight
        weight = weight if weight.dtype != torch.complex32 else weight.to(torch.complex64)
        x = x + (x.to(weight.dtype) @ weight.T @ weight).real.to(x.dtype)
        if self.real is None:
            return x
        # The gradient of the parameter has the negative bit set: torch negates it lazily.
        negative = torch.complex(torch.zeros_like(self.real), self.real).conj().imag
        return x + x @ self.real.T @ self.real + (negative * negative.detach()).sum()


def complex_model(dtype: torch.dtype = torch.complex64, **kwargs: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(ComplexLayer(5, dtype, **kwargs), ComplexLayer(7, dtype, **kwargs))


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """Converts complex32, which cannot be pickled, to complex64."""
    return tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor


def train_model(
    rank: int, model: nn.Module, shard_fn: Callable[..., Any] | None, lr: float = 0.1, **kwargs: Any
) -> list[torch.Tensor]:
    """Returns gradients of two backwards, and the weights after one step.

    ``rank`` seeds the data. If ``lr`` is 0, no step follows, and no weights are returned.
    """
    if shard_fn is not None:
        for layer in model:
            shard_fn(layer, **kwargs)
        shard_fn(model, **kwargs)
    torch.manual_seed(10 + rank)
    for microbatch in range(2):
        if shard_fn is not None:
            model.set_requires_gradient_sync(microbatch == 1)
        model(torch.randn(3, WIDTH)).square().sum().mul(1e-3).backward()
    results = [storable(full_value(param.grad)) for param in model.parameters()]
    if lr:
        torch.optim.SGD(model.parameters(), lr=lr).step()
        results += [full_value(param) for param in model.parameters()]
    return results


@scenario()
def complex_parameters(api: Api) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.complex128)
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    shard = api.fully_shard
    return {
        "complex64": train_model(api.rank, complex_model(), shard),
        "complex128": train_model(api.rank, complex_model(torch.complex128), shard),
        "lazily conjugated": train_model(api.rank, complex_model(lazy=True), shard),
        "reduced in complex128": train_model(api.rank, complex_model(), shard, mp_policy=policy),
        "replicas of one rank": train_model(api.rank, complex_model(), shard, mesh=replicas),
        "replicate": train_model(api.rank, complex_model(), api.replicate),
    }


@scenario(4)
def complex_parameters_of_replicas(api: Api) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train_model(api.rank, complex_model(), api.fully_shard, mesh=mesh)


@scenario(1)
def complex_parameters_on_one_rank(api: Api) -> dict[str, Any]:
    """Runs a plain and a sharded model on one rank."""
    return {
        name: [
            train_model(0, complex_model(**kwargs), shard_fn)
            for shard_fn in (None, api.fully_shard)
        ]
        for name, kwargs in (("plain", {}), ("lazily conjugated", {"lazy": True}))
    }


@scenario()
def complex_parameters_reduced_in_real_dtypes(api: Api) -> dict[str, Any]:
    """Before 2.15, torch raises in the last backward, before its reduction."""

    def reduced_in(dtype: torch.dtype, compute: torch.dtype | None = None) -> list[torch.Tensor]:
        policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=dtype, cast_forward_inputs=False
        )
        return train_model(api.rank, complex_model(), api.fully_shard, mp_policy=policy)

    return {
        str(dtype): reduced_in(dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex128)
    } | {"computed in bfloat16": reduced_in(torch.float32, torch.bfloat16)}


@scenario()
def complex_beside_real_parameters(api: Api) -> dict[str, Any]:
    """torch raises: it requires one dtype per unit. The expected model has all ranks' data."""
    results: dict[str, Any] = {}
    for lazy in (False, True):
        results[f"lazy {lazy}"] = train_model(
            api.rank, complex_model(lazy=lazy, real=3), api.fully_shard, lr=0
        )
        model = complex_model(lazy=lazy, real=3)
        for rank in range(api.world):
            train_model(rank, model, None, lr=0)
        results[f"lazy {lazy}, expected"] = [param.grad / api.world for param in model.parameters()]
    return results


@scenario()
def complex32_parameters(api: Api) -> list[list[torch.Tensor]]:
    """Runs complex32, which torch's FSDP2 cannot divide on the CPU, and complex64."""
    return [
        train_model(api.rank, complex_model(dtype), api.fully_shard, lr=0)
        for dtype in (torch.complex32, torch.complex64)
    ]


class Frozen(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(10).view(5, 2).to(dtype), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.weight.detach().clone().view(torch.uint8)


FROZEN = (
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.bool,
    torch.int64,
)


@scenario()
def frozen_parameters_of_one_dtype(api: Api) -> dict[str, bool]:
    """torch runs only two dtypes: gloo closes its connections on an unsupported dtype."""
    results = {}
    for dtype in FROZEN if api.is_fsdp_c else (torch.bool, torch.int64):
        expected = Frozen(dtype)()
        model = api.fully_shard(Frozen(dtype))
        results[str(dtype)] = torch.equal(model(), expected)
    return results


class Twice(nn.Module):
    """A block that uses its norm twice per forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.norm(x)).tanh())


@scenario()
def parameters_used_twice(api: Api) -> dict[int, list[torch.Tensor]]:
    """Returns gradients by the number of microbatches without sync before the reduction."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = {}
    for waiting in range(3):
        torch.manual_seed(3)
        model = nn.Sequential(Twice(), Twice())
        for layer in (*model, model):
            api.fully_shard(layer, mp_policy=policy)
        torch.manual_seed(10 + api.rank)
        for step in range(waiting + 1):
            model.set_requires_gradient_sync(step == waiting)
            model(torch.randn(3, WIDTH)).square().mean().backward()
        results[waiting] = [full_value(param.grad) for param in model.parameters()]
    return results


@scenario()
def parameters_with_grad_dtype(api: Api) -> dict[str, list[torch.Tensor]]:
    """Returns gradients that two reductions accumulate, with ``grad_dtype`` on one parameter.

    Each reduction has two microbatches.
    """

    def train(
        dtype: torch.dtype,
        grad_dtype: torch.dtype | None,
        assigned: str = "before fully_shard",
        mesh: Any = None,
        **dtypes: torch.dtype,
    ) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(Twice(), Twice()).to(dtype)
        if assigned == "before fully_shard":
            model[0].norm.weight.grad_dtype = grad_dtype
        for layer in (*model, model):
            api.fully_shard(layer, mp_policy=MixedPrecisionPolicy(**dtypes), mesh=mesh)
        if assigned == "after fully_shard":
            model[0].norm.weight.grad_dtype = grad_dtype
        torch.manual_seed(10 + api.rank)
        for step in range(4):
            model.set_requires_gradient_sync(step % 2 == 1)
            model(torch.randn(3, WIDTH, dtype=dtype)).float().square().mean().backward()
        return [full_value(param.grad) for param in model.parameters()]

    bf16, fp32 = torch.bfloat16, torch.float32
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return {
        "wider": train(bf16, fp32),
        "wider, set after fully_shard": train(bf16, fp32, "after fully_shard"),
        "wider, replicas": train(bf16, fp32, mesh=replicas),
        "narrower": train(fp32, bf16),
        "narrower, computed in bfloat16": train(fp32, bf16, param_dtype=bf16),
        "own": train(fp32, fp32, param_dtype=bf16),
        "any": train(bf16, None),
        "any, reduced in float32": train(bf16, None, reduce_dtype=fp32),
        "wider, reduced in bfloat16": train(bf16, fp32, reduce_dtype=bf16),
    }


@scenario()
def grad_dtype_during_a_step(api: Api) -> list[str]:
    """Returns ``grad_dtype`` of unsharded parameters and the dtypes of their gradients."""
    seen: list[str] = []
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtypes in ((None, None), (bf16, None), (bf16, fp32), (None, bf16), (bf16, bf16)):
        torch.manual_seed(3)
        model = nn.Sequential(Twice(), Twice())
        policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
        for layer in (*model, model):
            api.fully_shard(layer, mp_policy=policy, reshard_after_forward=False)
        model.set_reshard_after_backward(False)

        def note(place: str, dtypes: Any = dtypes, model: nn.Module = model) -> None:
            for name, param in model.named_parameters():
                grad = param.grad.dtype if param.grad is not None else None
                seen.append(f"{dtypes} {place} {name} {param.grad_dtype} {grad}")

        for step in range(4):
            model.set_requires_gradient_sync(step == 2)
            loss = model(torch.ones(3, WIDTH)).float().sum()
            note(f"after forward {step}")
            loss.register_hook(lambda grad, step=step: note(f"in backward {step}"))
            loss.backward()
            note(f"after backward {step}")
        model.reset_iter_state()
        note("after the reset")
    return seen


class Either(nn.Module):
    """Two layers, of which each forward runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses_first: bool) -> torch.Tensor:
        return (self.first if uses_first else self.second)(x)


@scenario()
def unused_parameters_with_any_grad_dtype(api: Api) -> dict[str, Any]:
    """Reduces zeros for unused parameters, one of which has ``grad_dtype=None``."""
    results: dict[str, Any] = {}
    for dtype in (None, torch.float32):
        torch.manual_seed(3)
        model = Either()
        model.second.weight.grad_dtype = None
        api.fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        model.set_reduce_scatter_unused_params(True)
        try:
            model(torch.ones(3, WIDTH), api.rank == 0).sum().backward()
        except ValueError as error:
            results[f"reduce {dtype}, raised"] = str(error)
            model.reset_iter_state()
        else:
            results[f"reduce {dtype}"] = [full_value(param.grad) for param in model.parameters()]
    return results


@scenario(world=1)
def unreduced_gradients_read_before_reduction(api: Api) -> dict[str, Any]:
    """Reads ``.grad`` of unsharded parameters before the reduction, and the reduced gradients."""
    results = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = Twice().to(dtype)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        api.fully_shard(model, mp_policy=policy, reshard_after_forward=False)
        x = torch.ones(3, WIDTH, dtype=dtype)
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        loss = model(x).sum()
        waiting = [param.grad for param in model.parameters() if param.grad is not None]
        results[f"{dtype} waits"] = [grad.clone() for grad in waiting]
        model.set_requires_gradient_sync(True)
        loss.backward()
        results[f"{dtype} reduced"] = [full_value(p.grad) for p in model.parameters()]
    return results
