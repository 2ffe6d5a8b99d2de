"""Scenarios of the methods that torch 2.15 adds to FSDP2; fsdp_c has them on earlier releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behavior import DIM, Api, batch, blocks_and_head, grads, scenario, shard
from double_backward import unsharded_bytes
from recorded_operators import RecordedOperators
from releases import has
from torch.distributed.device_mesh import init_device_mesh
from torch_bugs import average, loss_of

from fsdp_c import GradientReductionHandle, MixedPrecisionPolicy

Found = dict[str, Any]


def describe_error(call: Callable[[], Any]) -> str:
    """Returns the type and the message of a RuntimeError or ValueError, or an empty string."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def addresses(model: nn.Module) -> list[int]:
    """Returns the addresses of the unsharded parameters of all units."""
    return [
        param._unsharded_param.data_ptr()
        for module in model.modules()
        if hasattr(module, "_get_fsdp_state")
        for group in module._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    ]


def train_two_steps(model: nn.Module, rank: int) -> list[Any]:
    """Returns losses and gradients of two ordinary steps."""
    record: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = loss_of(model(batch(rank, step)))
        loss.backward()
        record += [loss.item(), grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return record


# ---- set_keep_unsharded_storage ----


@scenario()
def kept_storage(api: Api) -> Found:
    model = shard(api, blocks_and_head())
    model.set_keep_unsharded_storage(True)
    results = []
    addresses_by_step: list[list[int]] = []
    fillers: list[torch.Tensor] = []
    for _ in range(3):
        results += train_two_steps(model, api.rank)
        addresses_by_step.append(addresses(model))
        # If the parameters' memory had been freed, these tensors would take it.
        fillers += [torch.empty(64 * i) for i in range(1, 17)]
    kept = unsharded_bytes(model)
    model.set_keep_unsharded_storage(False)
    other = shard(api, blocks_and_head())
    return {
        "found": results,
        "expected": [record for _ in range(3) for record in train_two_steps(other, api.rank)],
        "are addresses equal": addresses_by_step[0] == addresses_by_step[1] == addresses_by_step[2]
        and 0 not in addresses_by_step[0],
        "bytes while kept": kept,
        "bytes after disabling": unsharded_bytes(model),
        "bytes of default model": unsharded_bytes(other),
    }


@scenario()
def kept_storage_of_one_unit(api: Api) -> Found:
    model = shard(api, blocks_and_head())
    model[0].set_keep_unsharded_storage(True, recurse=False)
    train_two_steps(model, api.rank)
    return {
        "first is kept": unsharded_bytes(model[0]) > 0,
        "others are freed": unsharded_bytes(model) == unsharded_bytes(model[0]),
    }


# ---- manual finalization ----


def count_reductions(operators: RecordedOperators) -> int:
    return operators.collectives().count("_reduce_scatter_base_")


def reference(rank: int, steps: int) -> dict[str, Any]:
    """Returns the averaged gradients of ``steps`` microbatches of an unsharded model."""
    model = blocks_and_head()
    for step in range(steps):
        loss_of(model(batch(rank, step))).backward()
    return average({name: param.grad for name, param in model.named_parameters()})


@scenario()
def deferred_reductions(api: Api) -> Found:
    """Runs microbatches without gradient synchronization, then one finalization; both twice."""
    model = shard(api, blocks_and_head())
    model.set_manual_backward_finalization(True)
    results, reductions = [], []
    for async_op in (False, True):
        model.set_requires_gradient_sync(False)
        with RecordedOperators() as in_backwards:
            for step in range(2):
                loss_of(model(batch(api.rank, step))).backward()
        with RecordedOperators() as in_finalization:
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                assert isinstance(handle, GradientReductionHandle)
                handle.wait()
                handle.wait()
        reductions.append(
            {
                "backwards": count_reductions(in_backwards),
                "finalization": count_reductions(in_finalization),
            }
        )
        results.append(grads(model))
        model.zero_grad()
    expected = reference(api.rank, 2)
    return {
        "found": results,
        "expected": [expected, expected],
        "reductions": reductions,
        "unsharded bytes": unsharded_bytes(model),
    }


@scenario()
def synchronized_backwards_are_not_reduced_again(api: Api) -> Found:
    model = shard(api, blocks_and_head())
    model.set_manual_backward_finalization(True)
    with RecordedOperators() as mode:
        loss_of(model(batch(api.rank))).backward()
        in_backward = count_reductions(mode)
        model.finalize_backward()
    return {
        "found": grads(model),
        "expected": reference(api.rank, 1),
        "reductions of backward": in_backward,
        "reductions of both": count_reductions(mode),
        "in flight": model._get_fsdp_state()._comm_ctx.reductions_in_flight,
    }


@scenario()
def microbatches_reduced_separately(api: Api) -> Found:
    model = shard(api, blocks_and_head())
    model.set_manual_backward_finalization(True)
    for step in range(3):
        loss_of(model(batch(api.rank, step))).backward()
    model.finalize_backward()
    return {"found": grads(model), "expected": reference(api.rank, 3)}


@scenario()
def units_without_sync_keep_gradients(api: Api) -> Found:
    model = shard(api, blocks_and_head())
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss_of(model(batch(api.rank))).backward()
    model.set_requires_gradient_sync(True)
    model[0].set_requires_gradient_sync(False)
    model.finalize_backward()
    without_gradient = [name for name, grad in grads(model).items() if grad is None]
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    return {
        "no gradient after first finalization": without_gradient,
        "found": grads(model),
        "expected": reference(api.rank, 1),
    }


@scenario()
def invalid_finalizations(api: Api) -> Found:
    model = shard(api, blocks_and_head())
    results = {"before the first forward": repr(model.finalize_backward())}
    model.finalize_backward(async_op=True).wait()
    loss_of(model(batch(api.rank))).backward()
    results |= {
        "automatic mode": describe_error(model.finalize_backward),
        "mode of child": describe_error(lambda: model[0].set_manual_backward_finalization(True)),
    }
    x = batch(api.rank).requires_grad_()
    output = model(x)

    def change(grad: torch.Tensor) -> None:
        results["during backward"] = describe_error(
            lambda: model.set_manual_backward_finalization(True)
        )

    x.register_hook(change)
    loss_of(output).backward()
    model.set_manual_backward_finalization(True)
    results["finalization of child"] = describe_error(model[0].finalize_backward)
    loss_of(model(batch(api.rank))).backward()
    handle = model.finalize_backward(async_op=True)
    results["pending"] = describe_error(model.finalize_backward)
    results["mode while pending"] = describe_error(
        lambda: model.set_manual_backward_finalization(False)
    )
    handle.wait()
    results["mode after wait"] = describe_error(
        lambda: model.set_manual_backward_finalization(False)
    )
    return results


@scenario()
def manual_mode_of_a_unit_before_the_first_forward(api: Api) -> str:
    model = shard(api, blocks_and_head())
    model[0].set_manual_backward_finalization(True)
    return describe_error(lambda: model(batch(api.rank)))


@scenario()
def finalization_after_a_reset(api: Api) -> Found:
    model = shard(api, blocks_and_head())
    model.set_manual_backward_finalization(True)
    loss_of(model(batch(api.rank, 5))).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    refused = describe_error(handle.wait)
    model.zero_grad()
    loss_of(model(batch(api.rank))).backward()
    model.finalize_backward()
    return {"refused": refused, "found": grads(model), "expected": reference(api.rank, 1)}


@scenario(4)
def finalization_with_replicas(api: Api) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(api, blocks_and_head(), mesh=mesh)
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    loss_of(model(batch(api.rank))).backward()
    refused = describe_error(model.finalize_backward)
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    return {"refused": refused, "found": grads(model), "expected": reference(api.rank, 1)}


# ---- compute dtypes of single parameters ----


class DtypeRecorder(nn.Module):
    """Records the compute dtypes of its parameters, and multiplies each in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [self.scale.dtype, self.linear.weight.dtype]
        return (self.linear(x) * self.scale).to(x.dtype)


def dtype_recorder() -> DtypeRecorder:
    torch.manual_seed(7)
    return DtypeRecorder()


@scenario()
def dtype_overrides_of_single_parameters(api: Api) -> Found:
    calls: Counter[int] = Counter()

    def override(param: nn.Parameter) -> torch.dtype | None:
        calls[param.ndim] += 1
        return torch.float32 if param.ndim == 1 else None

    results, expected = [], []
    for reduce_dtype, steps in ((None, 1), (None, 2), (torch.float32, 1), (torch.bfloat16, 1)):
        policy = MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype, param_dtype_override_fn=override
        )
        model, plain_model = api.fully_shard(dtype_recorder(), mp_policy=policy), dtype_recorder()
        plain_model.linear.to(torch.bfloat16)
        reduced_in = reduce_dtype or torch.float32  # default: the widest compute dtype
        if has("2.15"):  # microbatches are added in the reduce dtype
            for param in plain_model.parameters():
                param.grad_dtype = reduced_in
        for step in range(steps):
            model.set_requires_gradient_sync(step + 1 == steps)
            loss_of(model(batch(api.rank, step))).backward()
            loss_of(plain_model(batch(api.rank, step).bfloat16())).backward()
        local = {name: param.grad.to(reduced_in) for name, param in plain_model.named_parameters()}
        results.append(grads(model))
        expected.append({name: grad.float() for name, grad in average(local).items()})
    return {
        "found": results,
        "expected": expected,
        "dtypes": model.dtypes,
        "calls by ndim": dict(calls),
    }


@scenario()
def invalid_dtype_overrides(api: Api) -> Found:
    def shard_with(dtype: Any) -> str:
        policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: dtype)
        model = dtype_recorder()
        text = describe_error(lambda: api.fully_shard(model, mp_policy=policy))
        assert type(model) is DtypeRecorder and type(model.scale) is nn.Parameter
        return text

    return {"float64": shard_with(torch.float64), "string": shard_with("float32")}
