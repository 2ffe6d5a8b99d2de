"""Scenarios of the parts that torch 2.15 added to FSDP2, on the simulated device.

Scenarios marked ``since("2.15")`` need this release. The others run on all releases: fsdp_c has
these methods there, too, and torch runs an equivalent step without them.
"""

from __future__ import annotations

from typing import Any

import features
import torch
import torch.nn as nn
from features import MIXED, Record, blocks, digest
from releases import has
from sim_tools import (
    BFLOAT16,
    SimTools,
    prefetch_neighbors,
    scenario,
    set_reduce_hook,
    since,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

TORCH_RACES = {"manual_finalization_offloaded": "of the host does not wait for aten::copy_"}
"""Scenarios in which torch races from 2.15 on -> text that the finding contains."""

# ---- manual finalization ----


def _has_methods(tools: SimTools) -> bool:
    """Whether the implementation has the methods that torch 2.15 added."""
    return not tools.is_torch or has("2.15")


def _manual_finalization(tools: SimTools, **kwargs: Any) -> Record:
    """Trains on two microbatches per step, which ``finalize_backward`` reduces. Below 2.15 torch
    reduces in the last backward.

    Another operation runs between ``finalize_backward`` and ``wait()``, during the reductions.
    """
    model = tools.shard(blocks(), **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    is_manual = _has_methods(tools)
    if is_manual:
        model.set_manual_backward_finalization(True)
    record: Record = []
    for step in range(3):
        for index in range(2):
            model.set_requires_gradient_sync(not is_manual and index == 1)
            loss = model(tools.input(10 * step + index)).float().pow(2).sum()
            loss.backward()
            record.append(loss.item())
        if is_manual:
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=True)
            loss.detach().clone().add_(1)
            handle.wait()
        record.append(digest(p.grad for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return [*record, digest(model.parameters())]


@scenario
def manual_finalization(tools: SimTools) -> Record:
    return _manual_finalization(tools)


@scenario
def manual_finalization_in_float16(tools: SimTools) -> Record:
    return _manual_finalization(tools, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


@scenario
def manual_finalization_with_replicas(tools: SimTools) -> Record:
    return _manual_finalization(tools, mesh=tools.mesh("replicate", "shard"), mp_policy=MIXED)


@scenario
def manual_finalization_offloaded(tools: SimTools) -> Record:
    return _manual_finalization(tools, offload_policy=CPUOffloadPolicy())


@scenario
def manual_finalization_after_each_backward(tools: SimTools) -> Record:
    """Every backward issues its reductions, and ``finalize_backward`` waits for them."""
    model = tools.shard(blocks(), mp_policy=MIXED)
    record: Record = []
    if _has_methods(tools):
        model.set_manual_backward_finalization(True)
    for step in range(3):
        loss = model(tools.input(step)).float().pow(2).sum()
        loss.backward()
        if _has_methods(tools):
            model.finalize_backward()
        record += [loss.item(), digest(p.grad for p in model.parameters())]
        model.zero_grad()
    return record


@scenario
def manual_finalization_on_another_stream(tools: SimTools) -> Record:
    """Packs gradients on a side stream, and waits for the reductions on the current stream.

    The side stream allocates next, so it may reuse the memory of the packed gradients.
    """
    model = tools.shard(blocks(), mp_policy=MIXED)
    if _has_methods(tools):
        model.set_manual_backward_finalization(True)
    stream = torch.Stream(device="sim")
    record: Record = []
    for step in range(3):
        model.set_requires_gradient_sync(not _has_methods(tools))
        loss = model(tools.input(step)).float().pow(2).sum()
        loss.backward()
        if _has_methods(tools):
            model.set_requires_gradient_sync(True)
            stream.wait_stream(torch.accelerator.current_stream())
            with torch.sim.stream(stream):  # type: ignore[attr-defined]
                handle = model.finalize_backward(async_op=True)
            handle.wait()
            with torch.sim.stream(stream):  # type: ignore[attr-defined]
                torch.empty(1, device="sim")
        record += [loss.item(), digest(p.grad for p in model.parameters())]
        model.zero_grad()
    return record


@scenario
def manual_finalization_dropped_by_a_reset(tools: SimTools) -> Record:
    """Drops the reductions of a finalization whose handle is not waited for."""
    model = tools.shard(blocks(), mp_policy=MIXED)
    record: Record = []
    for step in range(3):
        if _has_methods(tools):
            model.set_manual_backward_finalization(True)
            model(tools.input(step)).float().pow(2).sum().backward()
            model.finalize_backward(async_op=True)
            model.reset_iter_state()
            model.set_manual_backward_finalization(False)
        model.zero_grad()
        record += tools.accumulate(model)
    return record


# ---- kept storage ----


def _keep_storage(tools: SimTools, model: Any, keep: bool) -> None:
    if _has_methods(tools):
        model.set_keep_unsharded_storage(keep)


@scenario
def kept_storage(tools: SimTools) -> Record:
    """Keeps the unsharded memory in the first training, and frees it in the second."""
    model = tools.shard(blocks(), mp_policy=MIXED)
    prefetch_neighbors(model)
    record: Record = []
    for keep in (True, False):
        _keep_storage(tools, model, keep)
        record += tools.train(model)
    return record


@scenario
def kept_storage_of_a_smaller_group(tools: SimTools) -> Record:
    model = tools.shard(blocks(), reshard_after_forward=2)
    model._set_unshard_async_op(True)
    _keep_storage(tools, model, True)
    return tools.train(model, micro=2, sync=features.sync_last)


# ---- dtypes ----


def _six_blocks() -> Any:
    """Returns six units, so that later units use memory that an earlier one frees too early.

    Matrices have gradients in bfloat16, biases in float32.
    """
    model: Any = nn.Sequential(*blocks(), *blocks(seed=1))
    for parameter in model.parameters():
        parameter.grad_dtype = torch.bfloat16 if parameter.ndim > 1 else torch.float32
    return model


def _train_with_grad_dtypes(tools: SimTools, model: Any) -> Record:
    """Trains with gradients of two dtypes. The optimizer gets them in the parameter's dtype."""
    record: Record = []
    for step in range(3):
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            loss = model(tools.input(2 * step + microbatch)).float().pow(2).sum()
            loss.backward()
            record.append(loss.item())
        record.append(digest(parameter.grad for parameter in model.parameters()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad.to(parameter.dtype), alpha=0.1)
        model.zero_grad()
    return [*record, digest(model.parameters())]


def _grad_dtypes(tools: SimTools, **kwargs: Any) -> Record:
    return _train_with_grad_dtypes(tools, tools.shard(_six_blocks(), **kwargs))


@since("2.15")
@scenario
def grad_dtypes(tools: SimTools) -> Record:
    return _grad_dtypes(tools)


@since("2.15")
@scenario
def grad_dtypes_reduced_in_float32(tools: SimTools) -> Record:
    return _grad_dtypes(tools, mp_policy=MIXED)


@since("2.15")
@scenario
def grad_dtypes_reduced_in_bfloat16(tools: SimTools) -> Record:
    """The reduced buffer is cast for the biases only."""
    return _grad_dtypes(tools, mp_policy=BFLOAT16)


@since("2.15")
@scenario
def grad_dtypes_on_dim_1(tools: SimTools) -> Record:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim > 1 else None

    return _grad_dtypes(tools, shard_placement_fn=place)


@since("2.15")
@scenario
def grad_dtypes_with_replicas(tools: SimTools) -> Record:
    return _grad_dtypes(tools, mesh=tools.mesh("replicate", "shard"), mp_policy=MIXED)


@since("2.15")
@scenario
def grad_dtypes_offloaded(tools: SimTools) -> Record:
    return _grad_dtypes(tools, offload_policy=CPUOffloadPolicy())


@since("2.15")
@scenario
def grad_dtypes_with_a_reduce_hook(tools: SimTools) -> Record:
    model = tools.shard(_six_blocks())
    set_reduce_hook(model, torch.Stream(device="sim"))
    return _train_with_grad_dtypes(tools, model)


@since("2.15")
@scenario
def dtype_overrides(tools: SimTools) -> Record:
    """The biases are gathered in float32, the matrices in bfloat16."""
    options: Any = {"param_dtype_override_fn": lambda p: torch.float32 if p.ndim == 1 else None}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **options)
    torch.manual_seed(0)
    model = nn.Sequential(*(_WidenedBias() for _ in range(4)))
    return tools.train(tools.shard(model, mp_policy=policy), micro=2, sync=features.sync_last)


class _WidenedBias(nn.Module):
    """A layer whose bias may have a wider dtype than its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(features.WIDTH, features.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x.to(self.linear.weight.dtype) @ self.linear.weight.t()
        return product.to(self.linear.bias.dtype) + self.linear.bias


# ---- parameters used twice ----


@scenario
def used_twice_without_sync(tools: SimTools) -> Record:
    """torch 2.15 adds the gradients of both uses of a weight in the reduce dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Twice() for _ in range(3)))
    return tools.train(tools.shard(model, mp_policy=MIXED), micro=3, sync=features.sync_last)


class _Twice(nn.Module):
    """A layer that uses its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(features.WIDTH, features.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).tanh())
