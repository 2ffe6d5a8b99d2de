"""Scenarios of tensor subclasses and of extensions patched onto plain tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from behavior import Api, grads, scenario, weights
from releases import groups_of
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.two_tensor import TwoTensor
from wrapping import Traceable, Wrapping

WIDTH = 6
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Pair(TwoTensor):
    """A TwoTensor with all-gather extensions. Results of operations are TwoTensors, too."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Any, tuple[torch.Tensor, ...]] | None:
        a, b = outputs
        if out is None:
            return Pair(a, b).to(param_dtype), (a, b)
        if a.dtype != param_dtype:
            with torch.no_grad():
                out.a.copy_(a)
                out.b.copy_(b)
        return None


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns copies of both tensors of a pair, or of the plain tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    parts = [local.a, local.b] if isinstance(local, TwoTensor) else [local]
    return [part.detach().clone() for part in parts]


def pairs() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    for layer in model:
        layer.weight = nn.Parameter(Pair(layer.weight.detach(), 2 * layer.weight.detach()))
    return model


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))


def train_pairs(model: nn.Module, rank: int, microbatches: int) -> dict[str, Any]:
    """Trains with ``microbatches`` backwards per step; returns losses, gradients and weights."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=True)
    losses, gradients = [], []
    for step in range(2):
        for microbatch in range(microbatches):
            model.set_requires_gradient_sync(microbatch + 1 == microbatches)
            loss = model(rows(rank, 5 * step + microbatch)).square().sum()
            loss.backward()
            losses.append(parts_of(loss))
        gradients.append([parts_of(param.grad) for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    weights = [parts_of(param) for param in model.parameters()]
    return {"losses": losses, "gradients": gradients, "weights": weights}


@scenario()
def two_tensor_gradients(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, backwards, kwargs in (
        ("plain", 1, {}),
        ("kept after forward", 1, {"reshard_after_forward": False}),
        ("accumulated", 2, {}),
        ("mixed precision", 1, {"mp_policy": MIXED}),
        ("mixed precision, accumulated", 2, {"mp_policy": MIXED}),
    ):
        model = pairs()
        for module in (model[0], model[1], model):
            api.fully_shard(module, **kwargs)
        results[name] = train_pairs(model, api.rank, backwards)
    return results


# ---- wrappers without extensions -----------------------------------------------------------------


def wrapped_tensor(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.held.detach().clone() if isinstance(local, Wrapping) else local.detach().clone()


def train_wrapped(api: Api, kind: type, biases: bool, **kwargs: Any) -> dict[str, Any]:
    """Trains layers whose weights, and optionally biases, are wrappers with uneven shards."""
    torch.manual_seed(6)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    for layer in model:
        layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))
        if biases:
            layer.bias = nn.Parameter(kind(layer.bias.detach().clone()))
    for module in (*model, model):
        api.fully_shard(module, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    torch.manual_seed(api.rank)
    losses, gradients, types = [], [], []
    for _ in range(2):
        loss = model(torch.randn(3, 5)).square().sum()
        loss.backward()
        losses.append(loss.detach())
        gradients.append([wrapped_tensor(param.grad) for param in model.parameters()])
        types.append([type(param.to_local()).__name__ for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    weights = [wrapped_tensor(param) for param in model.parameters()]
    return {"losses": losses, "gradients": gradients, "shard types": types, "weights": weights}


@scenario()
def wrappers_without_extensions(api: Api) -> dict[str, Any]:
    return {
        f"{kind.__name__} {name}": train_wrapped(api, kind, name != "beside tensors", **kwargs)
        for kind in (Wrapping, Traceable)
        for name, kwargs in (
            ("all parameters", {}),
            ("beside tensors", {}),
            ("kept after forward", {"reshard_after_forward": False}),
            ("mixed precision", {"mp_policy": MIXED}),
        )
    }


@scenario(1)
def wrappers_without_extensions_on_one_rank(api: Api) -> dict[str, Any]:
    return train_wrapped(api, Wrapping, True)


# ---- extensions of single tensors ----------------------------------------------------------------


def send_in_bf16(
    local: torch.Tensor, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
) -> tuple[tuple[torch.Tensor, ...], None]:
    return (local.to(torch.bfloat16),), None


def widen(
    outputs: tuple[torch.Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Any = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    if out is None:
        wide = outputs[0].to(dtype)
        return wide, (wide,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(outputs[0])
    return None


class SizeRecorder(nn.Linear):
    """Records in forward the bytes of its all-gather outputs and inner tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (group,) = groups_of(self._get_fsdp_state())
        self.sizes = [
            [tensor.untyped_storage().nbytes() for tensor in tensors]
            for param in group.fsdp_params
            for tensors in (param.all_gather_outputs, param._unsharded_inner_tensors)
        ]
        return super().forward(x)


def patched_tensors(api: Api, release: bool | None) -> dict[str, Any]:
    """Trains a model whose plain shards have patched extensions.

    ``release``: result of the hook that releases all-gather outputs, None: no hook.
    """
    torch.manual_seed(4)
    model = nn.Sequential(*(SizeRecorder(WIDTH, WIDTH, bias=False) for _ in range(2)))
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=True)
    api.fully_shard(model)
    for layer in model:
        local = layer.weight._local_tensor  # to_local() would return another object
        local.fsdp_pre_all_gather = functools.partial(send_in_bf16, local)
        local.fsdp_post_all_gather = widen
        if release is not None:
            local.fsdp_should_release_all_gather_outputs_after_post_all_gather = lambda: release
    for step in range(2):
        model(rows(api.rank, step)).square().sum().backward()
    return {
        "trained": [grads(model), weights(model)],
        "sizes": [layer.sizes for layer in model],
    }


@scenario()
def extensions_patched_onto_tensors(api: Api) -> dict[str, Any]:
    return {
        "no release hook": patched_tensors(api, None),
        "kept by release hook": patched_tensors(api, False),
        "released by release hook": patched_tensors(api, True),
    }
