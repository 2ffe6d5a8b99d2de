"""Scenarios in which a program calls methods of groups and states directly, outside of a backward.

The pipeline stages of OLMo-core and torch reduce the gradients of several microbatches by such
calls. Under torch a method returns after it has reduced its gradients. The scenarios record
``.grad`` after each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from behavior import Api, batch, blocks_and_head, grads, scenario, shard, weights
from fsdp_units import param_groups_of, set_last_microbatch, units_of
from releases import groups_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MICROBATCHES = 3


def accumulate(model: Any, rank: int, step: int) -> None:
    """Runs backwards of some microbatches, none of which reduces."""
    set_last_microbatch(model, False)
    for index in range(MICROBATCHES):
        output = model(batch(rank, MICROBATCHES * step + index))
        output.float().square().mean().backward()
    set_last_microbatch(model, True)


def local_grads(model: nn.Module) -> list[torch.Tensor | None]:
    """Returns local shards of gradients. full_tensor() would wait for a collective."""
    found = [parameter.grad for parameter in model.parameters()]
    return [None if grad is None else grad.to_local().clone() for grad in found]


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the call's result, or its exception's type and the first line of the message."""
    try:
        return call(*arguments)
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0]


def states_of(model: nn.Module) -> list[tuple[str, str]]:
    return [(g._training_state.name, g._sharded_state.name) for g in param_groups_of(model)]


def reduce_by_groups(
    model: Any, rank: int, finish: Callable[[Any], None] | None = None
) -> list[Any]:
    """Runs three optimizer steps of a pipeline stage. ``finish`` runs after the groups' calls."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observed: list[Any] = []
    for step in range(3):
        accumulate(model, rank, step)
        for group in param_groups_of(model):
            group.post_backward()
        observed += [local_grads(model), states_of(model)]
        if finish is not None:
            finish(model)
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        observed += [total.full_tensor(), grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*observed, weights(model)]


def end_backward(model: Any) -> None:
    model._get_fsdp_state()._root_post_backward_final_callback()


def finalize_groups(model: Any) -> None:
    for group in param_groups_of(model):
        group.finalize_backward()


# ---- post_backward of every group ----


@scenario()
def group_post_backward_called_directly_fp32(api: Api) -> list[Any]:
    return reduce_by_groups(shard(api, blocks_and_head()), api.rank)


@scenario()
def group_post_backward_called_directly_bf16(api: Api) -> list[Any]:
    return reduce_by_groups(shard(api, blocks_and_head(), mp_policy=MIXED), api.rank)


@scenario()
def group_post_backward_called_directly_hsdp(api: Api) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return reduce_by_groups(shard(api, blocks_and_head(), mesh=mesh), api.rank)


@scenario(4)
def group_post_backward_called_directly_hsdp_on_four_ranks(api: Api) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return reduce_by_groups(shard(api, blocks_and_head(), mesh=mesh, mp_policy=MIXED), api.rank)


@scenario()
def group_post_backward_called_directly_offload(api: Api) -> list[Any]:
    policy = CPUOffloadPolicy(pin_memory=False)
    return reduce_by_groups(shard(api, blocks_and_head(), offload_policy=policy), api.rank)


@scenario()
def group_post_backward_called_directly_all_reduce_hook(api: Api) -> list[Any]:
    """The hook divides each reduced row; it has run when ``post_backward`` returns."""
    rows: list[int] = []

    def hook(row: torch.Tensor) -> None:
        rows.append(row.numel())
        row.div_(2)

    model = shard(api, blocks_and_head())
    for unit in units_of(model):
        unit.set_all_reduce_hook(hook)
    return [*reduce_by_groups(model, api.rank), rows]


@scenario()
def group_post_backward_called_directly_gradient_hooks(api: Api) -> list[Any]:
    """Post-accumulate-grad hooks of sharded parameters have run when ``post_backward`` returns."""
    model = shard(api, blocks_and_head())
    observed: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: observed.append(name))
    accumulate(model, api.rank, 0)
    counts = []
    for group in param_groups_of(model):
        group.post_backward()
        counts.append(len(observed))
    return [observed, counts, grads(model)]


@scenario()
def group_post_backward_called_directly_then_end_of_backward(api: Api) -> list[Any]:
    """torch's pipeline stage makes these calls."""
    return reduce_by_groups(shard(api, blocks_and_head()), api.rank, end_backward)


@scenario()
def group_post_backward_called_directly_then_finalize_backward(api: Api) -> list[Any]:
    return reduce_by_groups(shard(api, blocks_and_head()), api.rank, finalize_groups)


@scenario()
def group_post_backward_called_directly_twice(api: Api) -> list[Any]:
    """The second call finds no gradients and changes nothing."""

    def again(model: Any) -> None:
        for group in param_groups_of(model):
            group.post_backward()

    return reduce_by_groups(shard(api, blocks_and_head()), api.rank, again)


@scenario()
def group_post_backward_called_directly_before_other_collectives(api: Api) -> list[Any]:
    """Collectives of the user on the same process group come after the reductions."""
    model = shard(api, blocks_and_head())
    observed: list[Any] = []
    for step in range(2):
        accumulate(model, api.rank, step)
        for group in param_groups_of(model):
            group.post_backward()
            total = torch.full((3,), float(api.rank + step))
            dist.all_reduce(total)
            observed.append(total)
        observed.append(grads(model))
        model.zero_grad()
    return observed


@scenario()
def end_of_backward_callback_called_directly(api: Api) -> list[Any]:
    """Only the root's end-of-backward callback reduces the gradients of the microbatches."""
    model = shard(api, blocks_and_head())
    accumulate(model, api.rank, 0)
    end_backward(model)
    return [local_grads(model), states_of(model), grads(model)]


@scenario()
def post_backward_called_directly_between_forward_and_backward(api: Api) -> list[Any]:
    """post_backward without gradients reduces nothing. The next backward reduces as usual."""
    model = shard(api, blocks_and_head())
    output = model(batch(api.rank))
    for group in param_groups_of(model):
        group.post_backward()
    observed: list[Any] = [local_grads(model), states_of(model)]
    output.square().mean().backward()
    return [*observed, grads(model), states_of(model)]


@scenario()
def backward_of_one_group_called_directly(api: Api) -> list[Any]:
    """pre_backward unshards; gradients that the program sets are reduced by post_backward."""
    model = shard(api, blocks_and_head())
    model(batch(api.rank)).square().mean().backward()
    model.zero_grad()
    (group,) = groups_of(model[0]._get_fsdp_state())
    group.pre_backward(True)
    observed: list[Any] = [states_of(model)]
    for index, param in enumerate(group.fsdp_params):
        gradient = torch.full_like(param.unsharded_param, index + 0.5 + api.rank)
        param.unsharded_param.grad = gradient
    group.post_backward()
    return [*observed, local_grads(model), states_of(model)]


@scenario()
def post_backward_hook_registered_directly(api: Api) -> list[Any]:
    """The autograd node of the inputs reduces in the backward, although no module hook has run."""
    model = shard(api, blocks_and_head())
    model(batch(api.rank)).square().mean().backward()
    model.zero_grad()
    (group,) = groups_of(model[0]._get_fsdp_state())
    model[0].unshard()
    inputs = batch(api.rank).requires_grad_()
    (inside,), _ = group._register_post_backward_hook((inputs,), {})
    hidden = inside + model[0].linear(model[0].norm(inside))
    hidden.square().mean().backward()
    observed = [inputs.grad, local_grads(model), states_of(model)]
    end_backward(model)
    return [*observed, grads(model)]


# ---- before the first forward ----


@scenario()
def direct_calls_before_the_first_forward(api: Api) -> dict[str, Any]:
    """The communication context has not had its lazy init."""
    observed: dict[str, Any] = {}
    for name, *arguments in (("post_backward",), ("finalize_backward",), ("pre_backward", True)):
        group = param_groups_of(shard(api, blocks_and_head()))[0]
        observed[name] = outcome(getattr(group, name), *arguments)
    model = shard(api, blocks_and_head())
    observed["end of backward"] = outcome(end_backward, model)
    return observed | {"trained": reduce_by_groups(model, api.rank)}


@scenario(1)
def direct_calls_before_the_first_forward_on_one_rank(api: Api) -> dict[str, Any]:
    """torch's pre_backward fails on another attribute than with several ranks."""
    return direct_calls_before_the_first_forward(api)


@scenario()
def direct_calls_after_lazy_init(api: Api) -> list[Any]:
    """Each call does nothing, because no parameters were gathered."""
    observed: list[Any] = []
    for name in ("post_backward", "finalize_backward", "_wait_for_post_backward", "reshard"):
        model = shard(api, blocks_and_head())
        model._get_fsdp_state()._lazy_init()
        for group in param_groups_of(model):
            observed.append((name, outcome(getattr(group, name))))
        observed.append(states_of(model))
    return observed
