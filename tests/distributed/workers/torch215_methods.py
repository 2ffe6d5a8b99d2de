"""What torch 2.15 adds to FSDP2, as scenarios for ours on earlier releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behaviour import DIM, Api, batch, grads, plain, scenario, shard
from double_backward import Collectives, held
from torch.distributed.device_mesh import init_device_mesh
from torch_bugs import average, loss_of

from fsdp_c import GradientReductionHandle, MixedPrecisionPolicy

Found = dict[str, Any]


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def addresses(model: nn.Module) -> list[int]:
    """Where the unsharded parameters of all units are."""
    return [
        param._unsharded_param.data_ptr()
        for module in model.modules()
        if hasattr(module, "_get_fsdp_state")
        for group in module._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    ]


def two_steps(model: nn.Module, rank: int) -> list[Any]:
    """Two ordinary steps: losses and gradients."""
    seen: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = loss_of(model(batch(rank, step)))
        loss.backward()
        seen += [loss.item(), grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


# ---- storage that is kept ----


@scenario()
def kept_storage(api: Api) -> Found:
    model = shard(api, plain())
    model.set_keep_unsharded_storage(True)
    found = []
    where: list[list[int]] = []
    for step in range(3):
        found += two_steps(model, api.rank)
        where.append(addresses(model))
        junk = [torch.empty(64 * (step + i)) for i in range(16)]  # whoever freed it would lose it
        del junk
    kept = held(model)
    model.set_keep_unsharded_storage(False)
    other = shard(api, plain())
    return {
        "found": found,
        "expected": [seen for _ in range(3) for seen in two_steps(other, api.rank)],
        "stays": where[0] == where[1] == where[2] and 0 not in where[0],
        "kept": kept,
        "freed": held(model),
        "others": held(other),
    }


@scenario()
def kept_storage_of_one_unit(api: Api) -> Found:
    model = shard(api, plain())
    model[0].set_keep_unsharded_storage(True, recurse=False)
    two_steps(model, api.rank)
    return {"first": held(model[0]) > 0, "rest": held(model) == held(model[0])}


# ---- manual finalization ----


def reference(rank: int, steps: int) -> dict[str, Any]:
    model = plain()
    for step in range(steps):
        loss_of(model(batch(rank, step))).backward()
    return average({name: param.grad for name, param in model.named_parameters()})


@scenario()
def deferred_reductions(api: Api) -> Found:
    """Microbatches without synchronisation, then one finalization; twice."""
    model = shard(api, plain())
    model.set_manual_backward_finalization(True)
    found, counts = [], []
    for async_op in (False, True):
        model.set_requires_gradient_sync(False)
        with Collectives() as before:
            for step in range(2):
                loss_of(model(batch(api.rank, step))).backward()
        with Collectives() as after:
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                assert isinstance(handle, GradientReductionHandle)
                handle.wait()
                handle.wait()
        counts.append([part.seen["_reduce_scatter_base_"] for part in (before, after)])
        found.append(grads(model))
        model.zero_grad()
    right = reference(api.rank, 2)
    return {
        "found": found,
        "expected": [right, right],
        "counts": counts,
        "handle": handle is None,
        "held": held(model),
    }


@scenario()
def synchronized_backwards_are_not_reduced_again(api: Api) -> Found:
    model = shard(api, plain())
    model.set_manual_backward_finalization(True)
    with Collectives() as mode:
        loss_of(model(batch(api.rank))).backward()
        before = mode.seen["_reduce_scatter_base_"]
        model.finalize_backward()
    return {
        "found": grads(model),
        "expected": reference(api.rank, 1),
        "counts": [before, mode.seen["_reduce_scatter_base_"]],
        "in flight": model._get_fsdp_state()._comm_ctx.reductions_in_flight,
    }


@scenario()
def microbatches_reduced_separately(api: Api) -> Found:
    model = shard(api, plain())
    model.set_manual_backward_finalization(True)
    for step in range(3):
        loss_of(model(batch(api.rank, step))).backward()
    model.finalize_backward()
    return {"found": grads(model), "expected": reference(api.rank, 3)}


@scenario()
def units_without_sync_keep_gradients(api: Api) -> Found:
    model = shard(api, plain())
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss_of(model(batch(api.rank))).backward()
    model.set_requires_gradient_sync(True)
    model[0].set_requires_gradient_sync(False)
    model.finalize_backward()
    early = [name for name, grad in grads(model).items() if grad is None]
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    return {"early": early, "found": grads(model), "expected": reference(api.rank, 1)}


@scenario()
def invalid_finalizations(api: Api) -> Found:
    model = shard(api, plain())
    loss_of(model(batch(api.rank))).backward()
    found = {
        "automatic": message(model.finalize_backward),
        "below": message(lambda: model[0].set_manual_backward_finalization(True)),
    }
    x = batch(api.rank).requires_grad_()
    output = model(x)

    def change(grad: torch.Tensor) -> None:
        found["running"] = message(lambda: model.set_manual_backward_finalization(True))

    x.register_hook(change)
    loss_of(output).backward()
    model.set_manual_backward_finalization(True)
    found["below, manual"] = message(model[0].finalize_backward)
    loss_of(model(batch(api.rank))).backward()
    handle = model.finalize_backward(async_op=True)
    found["pending"] = message(model.finalize_backward)
    found["pending mode"] = message(lambda: model.set_manual_backward_finalization(False))
    handle.wait()
    found["afterwards"] = message(lambda: model.set_manual_backward_finalization(False))
    return found


@scenario()
def finalization_after_a_reset(api: Api) -> Found:
    model = shard(api, plain())
    model.set_manual_backward_finalization(True)
    loss_of(model(batch(api.rank, 5))).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    handle.wait()
    model.zero_grad()
    loss_of(model(batch(api.rank))).backward()
    model.finalize_backward()
    return {"found": grads(model), "expected": reference(api.rank, 1)}


@scenario(4)
def finalization_with_replicas(api: Api) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(api, plain(), mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    loss_of(model(batch(api.rank))).backward()
    refused = message(model.finalize_backward)
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    return {"refused": refused, "found": grads(model), "expected": reference(api.rank, 1)}


# ---- compute dtypes of single parameters ----


class Seen(nn.Module):
    """Notes the dtypes that its parameters compute in, and multiplies in each one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [self.scale.dtype, self.linear.weight.dtype]
        return (self.linear(x) * self.scale).to(x.dtype)


def seen_model() -> Seen:
    torch.manual_seed(7)
    return Seen()


def one_dimensional(param: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if param.ndim == 1 else None


@scenario()
def dtype_overrides_of_single_parameters(api: Api) -> Found:
    calls: Counter[int] = Counter()

    def override(param: nn.Parameter) -> torch.dtype | None:
        calls[param.ndim] += 1
        return one_dimensional(param)

    found, expected = [], []
    for reduce_dtype, steps in ((None, 1), (None, 2), (torch.float32, 1), (torch.bfloat16, 1)):
        policy = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype, param_dtype_override_fn=override
        )
        model, plain_model = api.fully_shard(seen_model(), mp_policy=policy), seen_model()
        plain_model.linear.to(torch.bfloat16)
        for step in range(steps):
            model.set_requires_gradient_sync(step + 1 == steps)
            loss_of(model(batch(api.rank, step))).backward()
            loss_of(plain_model(batch(api.rank, step).bfloat16())).backward()
        wire = reduce_dtype or torch.float32  # the widest
        local = {name: param.grad.to(wire) for name, param in plain_model.named_parameters()}
        found.append(grads(model))
        expected.append({name: grad.float() for name, grad in average(local).items()})
    return {
        "found": found,
        "expected": expected,
        "dtypes": model.dtypes,
        "calls": dict(calls),
    }


@scenario()
def invalid_dtype_overrides(api: Api) -> Found:
    def shard_with(wanted: Any) -> str:
        policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: wanted)
        model = seen_model()
        text = message(lambda: api.fully_shard(model, mp_policy=policy))
        assert type(model) is Seen and type(model.scale) is nn.Parameter
        return text

    return {"other": shard_with(torch.float64), "none": shard_with("float32")}
