"""Scenarios that use FSDP2 internals as torch's tests do, and functorch transforms."""

from __future__ import annotations

import contextlib
from typing import Any

import releases
import torch
import torch.nn as nn
from behavior import (
    DIM,
    Api,
    batch,
    blocks_and_head,
    full_value,
    grads,
    scenario,
    shard,
    train,
)
from behavior_events import group_of, param_types
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from toy_models import ResidualBlock

import fsdp_c

CPU = torch.device("cpu")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# ---- direct calls of collectives ----


class ManyShapes(nn.Module):
    """Parameters of several shapes, whose sum is the output."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((7, 3), (7,), (1, 4), (6, 2, 2), (0, 3))
        self.loose = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.loose]).sum()


def gather_directly(group: Any) -> None:
    """Gathers the parameters of a group with torch's functions, without registering them."""
    stream = torch.cpu.current_stream()
    ranks = group.mesh_info.shard_process_group
    result = foreach_all_gather(
        group.fsdp_params,
        ranks,
        async_op=False,
        all_gather_copy_in_stream=stream,
        all_gather_stream=stream,
        device=CPU,
        all_gather_comm=DefaultAllGather(),
    )
    assert result is not None
    foreach_all_gather_copy_out(result, group.fsdp_params, ranks)
    for param in group.fsdp_params:
        param.init_unsharded_param()


def reduce_directly(group: Any, gradients: list[torch.Tensor]) -> int:
    """Reduces with torch's function. Returns the length of its result."""
    stream = torch.cpu.current_stream()
    return len(
        foreach_reduce(
            group.fsdp_params,
            gradients,
            group.mesh_info.shard_process_group,
            stream,
            DefaultReduceScatter(),
            **({} if releases.has("2.15") else {"orig_dtype": torch.float32}),
            reduce_dtype=torch.float32,
            device=CPU,
            gradient_divide_factor=None,
            all_reduce_group=None,
            all_reduce_stream=stream,
            all_reduce_grads=True,
            partial_reduce_output=None,
            all_reduce_hook=None,
        )
    )


@scenario()
def collectives_called_directly(api: Api) -> dict[str, Any]:
    """Gathers by group and by parameter, then reduces gradients, all with torch's functions."""
    model = ManyShapes()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    api.fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    group = group_of(model)
    group.lazy_init()
    group.comm_ctx.lazy_init(CPU)
    results: dict[str, Any] = {}

    def record_state(case: str) -> None:
        results[f"types, {case}"] = param_types(model)
        results[f"states, {case}"] = [
            group._sharded_state.name,
            *(param.sharded_state.name for param in group.fsdp_params),
        ]

    def compare_values() -> list[bool]:
        return [torch.equal(*pair) for pair in zip(model.parameters(), expected)]

    gather_directly(group)
    group._to_unsharded()
    record_state("unsharded by group")
    results["values by group"] = compare_values()
    group._to_sharded()
    record_state("sharded by group")
    gather_directly(group)
    for param in group.fsdp_params:
        param.to_unsharded()
    results["values by parameter"] = compare_values()
    for param in group.fsdp_params:
        param.to_sharded()
    record_state("sharded by parameter")
    results["bytes of outputs"] = [
        t.untyped_storage().nbytes() for p in group.fsdp_params for t in p.all_gather_outputs
    ]
    gradients = [(api.rank + 1) * torch.ones_like(t) for t in expected[:4]]
    results["length of reduction's result"] = reduce_directly(group, gradients)
    reduced = [full_value(param.sharded_param.grad) for param in group.fsdp_params[:4]]
    return results | {"gradients": reduced}


@scenario()
def group_constructed_directly(api: Api) -> dict[str, Any]:
    """Constructs torch's FSDPParamGroup, also while fsdp_c is installed."""
    with contextlib.ExitStack() as undo:
        if api.is_fsdp_c:
            fsdp_c.install()
            undo.callback(fsdp_c.uninstall)
        module = nn.ParameterList(torch.arange(float(n)).view(-1, 1) for n in (5, 3, 8))
        expected = [parameter.detach().clone() for parameter in module]
        info = FSDPMeshInfo(init_device_mesh("cpu", (api.world,)), shard_mesh_dim=0)
        policies = (MixedPrecisionPolicy(), OffloadPolicy())
        group = FSDPParamGroup(list(module), (module,), info, info, CPU, None, *policies)
        group.lazy_init()
        group.comm_ctx.lazy_init(CPU)
        results: dict[str, Any] = {"constructed": param_types(module)}
        group.unshard()
        group.wait_for_unshard()
        results["unsharded"] = param_types(module)
        results["values"] = [torch.equal(*pair) for pair in zip(module, expected)]
        group.reshard()
        return results | {"resharded": param_types(module)}


# ---- uninstall() ----


@scenario()
def training_after_uninstall(api: Api) -> dict[str, Any]:
    """Runs a step and fsdp_c.uninstall(), then steps with and without gradient synchronization."""
    with contextlib.ExitStack() as undo:
        if api.is_fsdp_c:
            fsdp_c.install()
            undo.callback(fsdp_c.uninstall)
        model = shard(api, blocks_and_head(), mp_policy=MIXED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        trained = train(model, api.rank, 1, optimizer)
    calls: list[Any] = []
    unshard = FSDPParamGroup.unshard

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return unshard(self, *args, **kwargs)

    trained += train(model, api.rank, 2, optimizer)
    FSDPParamGroup.unshard = counting  # type: ignore[method-assign]
    try:
        model.set_requires_gradient_sync(False)
        model(batch(api.rank, 7)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        trained += train(model, api.rank, 1, optimizer)
    finally:
        FSDPParamGroup.unshard = unshard  # type: ignore[method-assign]
    FSDPParamGroup.unshard(group_of(model[0]))
    results = {"calls of the patch": len(calls), "types": param_types(model[0])}
    FSDPParamGroup.wait_for_unshard(group_of(model[0]))
    FSDPParamGroup.reshard(group_of(model[0]))
    return results | {"trained": trained + train(model, api.rank, 2, optimizer)}


# ---- attributes used by callers ----


@scenario()
def roots_that_share_a_context(api: Api) -> list[dict[str, Any]]:
    """Roots share a context after lazy init; it has no pending work between steps."""
    torch.manual_seed(5)
    model = nn.Sequential(ResidualBlock(), ResidualBlock(), ResidualBlock())
    for block in model:
        api.fully_shard(block)
        block._get_fsdp_state()._lazy_init()
    share_comm_ctx(list(model))
    context = model[0]._get_fsdp_state()._comm_ctx
    steps: list[dict[str, Any]] = []
    for step in range(2):
        model(batch(api.rank, step)).square().mean().backward()
        pending = {
            "events": len(context._last_post_reduce_events),
            "reductions": len(context.reduce_scatter_states),
            "all-gather": context.all_gather_state,
        }
        steps.append({"gradients": grads(model), "pending": pending})
    return steps


@scenario()
def event_of_the_optimizer(api: Api) -> list[Any]:
    """Calls ``set_post_optim_event`` after each step; the next forward consumes the event."""
    model: Any = shard(api, blocks_and_head())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(lambda *unused: model.set_post_optim_event(torch.cpu.Event()))
    record: list[Any] = []
    for step in range(2):
        loss = model(batch(api.rank, step)).square().mean()
        record += [loss.item(), model._get_fsdp_state()._state_ctx.post_optim_event]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.append(type(model._get_fsdp_state()._state_ctx.post_optim_event).__name__)
    return record


@scenario()
def hooks_on_unsharded_gradients(api: Api) -> list[Any]:
    """Hooks get the unsharded gradient of this rank in the compute dtype."""
    model = shard(api, blocks_and_head(1), mp_policy=MIXED)
    record: list[Any] = []
    for step in range(2):
        loss = model(batch(api.rank, step)).float().square().mean()
        params = [param for module in (model[0], model) for param in group_of(module).fsdp_params]
        handles = [
            param.unsharded_param.register_hook(lambda grad: record.append(grad.detach().clone()))
            for param in params
        ]
        loss.backward()
        for handle in handles:
            handle.remove()
        record.append(grads(model))
    return record


# ---- functorch transforms ----


@scenario()
def transformed_functions(api: Api) -> dict[str, Any]:
    """Records results of transforms, and gradients of a backward through the transforms."""
    results: dict[str, Any] = {}
    x, tangent = batch(api.rank), torch.ones(4, DIM)
    for reshard in (True, False):
        model: Any = shard(api, blocks_and_head(), reshard_after_forward=reshard)
        cases = {
            "jvp": lambda m=model: torch.func.jvp(m, (x,), (tangent,)),
            "grad": lambda m=model: (torch.func.grad(lambda v: m(v).square().sum())(x),),
            "vmap": lambda m=model: (torch.func.vmap(m)(x),),
            "jacrev": lambda m=model: (torch.func.jacrev(m)(x[:1]),),
        }
        for name, run in cases.items():
            outputs = run()
            results[f"reshard {reshard}, {name}"] = [output.detach().clone() for output in outputs]
            if name in ("jvp", "vmap"):  # the other transforms include a backward
                sum(output.square().mean() for output in outputs).backward()
                results[f"reshard {reshard}, {name}, backward"] = grads(model)
            model.zero_grad()
        results[f"reshard {reshard}, after"] = train(model, api.rank, 1)
    return results


@scenario()
def jvp_as_the_first_forward(api: Api) -> list[Any]:
    """A unit created on meta consumes another unit's output, in mixed precision."""
    with torch.device("meta"):
        encode, decode = nn.Linear(8, 12, bias=False), nn.Linear(12, 20, bias=False)
    for index, module in enumerate((encode, decode)):
        api.fully_shard(module, mp_policy=MIXED, reshard_after_forward=False)
        module.to_empty(device="cpu")
        with torch.no_grad():
            module.weight.normal_(generator=torch.Generator().manual_seed(index))
    x = torch.linspace(-1, 1, 8, dtype=torch.bfloat16)
    primal = torch.zeros(20, dtype=torch.bfloat16, requires_grad=True)
    hidden = encode(x)
    value, tangent = torch.func.jvp(
        lambda unused: decode(hidden), (primal,), (torch.ones_like(primal),)
    )
    results = [value.detach().clone(), tangent.detach().clone()]
    value.float().square().sum().backward()
    return [*results, full_value(encode.weight.grad), full_value(decode.weight.grad)]


# ---- bugs of torch ----


def have_gradients(model: nn.Module) -> list[bool]:
    return [parameter.grad is not None for parameter in model.parameters()]


@scenario()
def unfrozen_while_unsharded(api: Api) -> dict[str, Any]:
    """Freezes parameters during an evaluation that leaves them unsharded, then unfreezes them.

    Returns, for each of two steps, whether its loss requires grad, and which parameters got a
    gradient. Also returns which parameters require grad afterwards.
    """
    model = blocks_and_head(1)
    for block in model:
        api.fully_shard(block, reshard_after_forward=False)
    api.fully_shard(model)
    model.requires_grad_(False)
    with torch.no_grad():
        model(batch(api.rank))
    model.requires_grad_(True)
    losses: list[bool] = []
    gradients: list[list[bool]] = []
    for step in range(2):
        loss = model(batch(api.rank, step)).square().mean()
        losses.append(loss.requires_grad)
        if loss.requires_grad:
            loss.backward()
        gradients.append(have_gradients(model))
        model.zero_grad()
    required = [parameter.requires_grad for parameter in model.parameters()]
    return {"loss requires grad": losses, "has gradient": gradients, "requires grad": required}


@scenario()
def frozen_while_unsharded_and_stepped(api: Api) -> list[Any]:
    """The step makes the gathered parameters stale, so the next forward gathers again.

    Returns which parameters got a gradient, and which require grad.
    """
    model = shard(api, blocks_and_head(1), reshard_after_forward=False)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model(batch(api.rank)).square().mean().backward()
    with torch.no_grad():
        model(batch(api.rank))
    model[0].requires_grad_(False)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    model(batch(api.rank)).square().mean().backward()
    return [have_gradients(model), [parameter.requires_grad for parameter in parameters]]


@scenario()
def half_precision_with_a_divide_factor(api: Api) -> dict[str, Any]:
    """Divides the sum of gradients of one-rank replicas by a factor, in fp16 and fp32."""
    mesh = init_device_mesh("cpu", (api.world, 1), mesh_dim_names=("replicate", "shard"))
    results = {}
    for dtype in (torch.float32, torch.float16):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        model = shard(api, blocks_and_head(1), mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(4.0)
        model(batch(api.rank)).square().mean().backward()
        results[str(dtype)] = grads(model)
    return results
