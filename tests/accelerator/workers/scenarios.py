"""Short trainings on the simulated device, by one rank of a group whose ranks have equal data.

``SCENARIOS`` has at least one scenario for each part of FSDP2 that orders streams in its own way.
Each scenario takes the ``SimTools`` of one implementation and returns a record of losses and
digests, as the functions of features.py do.
"""

from __future__ import annotations

import itertools
from typing import Any

import bucket_scenarios as bucket_scenarios  # registers its scenarios
import direct_call_scenarios  # registers its scenarios
import extension_scenarios as extension_scenarios  # registers its scenarios
import features
import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn
import torch215_scenarios  # registers its scenarios
from extensions import Negated
from features import MIXED, Gather, Record, Scatter, blocks, digest
from releases import has
from sim_tools import (
    BFLOAT16,
    WORLD,
    SimTools,
    prefetch_neighbors,
    scenario,
    set_reduce_hook,
    since,
)
from sim_tools import SCENARIOS as SCENARIOS
from sim_tools import SINCE as SINCE
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from toy_models import Checkpointed

FIXED_IN_2_13 = {"offload_smaller_group": "of the host does not wait for aten::copy_"}
FIXED_IN_2_15 = {
    "reduce_hook_on_a_stream_with_a_cast": "write by allocation",
    "offload_with_a_reduce_hook": "write by allocation",
}

TORCH_RACES = {
    "interleaved": "write by allocation",
    "context_shared_by_roots_only": "read by aten::_foreach_copy_",
    **({} if has("2.13") else FIXED_IN_2_13),
    **(torch215_scenarios.TORCH_RACES if has("2.15") else FIXED_IN_2_15),
    **direct_call_scenarios.TORCH_RACES,
}
"""Scenarios in which torch races -> text that the finding contains (tests/TORCH_BUGS.md)."""


@scenario
def plain(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks()))


@scenario
def on_a_side_stream(tools: SimTools) -> Record:
    """Trains on another stream than the default one. Autograd makes this stream current in
    the thread of backward."""
    model = tools.shard(blocks())
    stream = torch.Stream(device="sim")
    stream.wait_stream(torch.accelerator.current_stream())
    with torch.sim.stream(stream):  # type: ignore[attr-defined]
        record = tools.train(model)
    torch.accelerator.current_stream().wait_stream(stream)
    return record


@scenario
def mixed(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks(), mp_policy=MIXED))


@scenario
def in_float16(tools: SimTools) -> Record:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    return tools.train(tools.shard(blocks(), mp_policy=policy))


@scenario
def uneven_rows(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks(width=9), mp_policy=MIXED), width=9)


@scenario
def second_dim(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks(), shard_placement_fn=features.place_on_dim_1))


@scenario
def without_reshard_after_forward(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks(), reshard_after_forward=False))


@scenario
def smaller_group_after_forward(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks(), reshard_after_forward=2))


@scenario
def prefetched(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    prefetch_neighbors(model)
    return tools.train(model)


@scenario
def manual_unshard(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    record: Record = []
    for _ in range(2):
        handles = [unit.unshard(async_op=True) for unit in (*model, model)]
        handles[0].wait()
        record += tools.train(model)
    return record


@scenario
def asynchronous_gathers(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    model._set_unshard_async_op(True)
    return tools.train(model)


@scenario
def accumulated(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks(), mp_policy=MIXED), micro=3, sync=features.sync_last)


@scenario
def without_reshard_after_backward(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    return tools.train(
        model, micro=2, sync=lambda m, last: m.set_reshard_after_backward(last) or None
    )


@scenario
def hsdp(tools: SimTools) -> Record:
    return tools.train(tools.shard(blocks(), mesh=tools.mesh("replicate", "shard")))


@scenario
def hsdp_mixed(tools: SimTools) -> Record:
    mesh = tools.mesh("replicate", "shard")
    return tools.train(tools.shard(blocks(), mesh=mesh, mp_policy=MIXED))


@scenario
def hsdp_of_six_units(tools: SimTools) -> Record:
    """Reductions are in bfloat16 and sharded gradients in float32, so reduced buffers are freed
    after a cast."""
    model = nn.Sequential(*blocks(), *blocks(seed=1))
    return tools.train(
        tools.shard(model, mesh=tools.mesh("replicate", "shard"), mp_policy=BFLOAT16)
    )


@scenario
def hsdp_partial(tools: SimTools) -> Record:
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"), mp_policy=MIXED)
    return tools.train(model, micro=3, sync=features.all_reduce_last)


@scenario
def hsdp_with_a_reduce_hook(tools: SimTools) -> Record:
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"))
    set_reduce_hook(model)
    return tools.train(model)


@scenario
def reduce_hook(tools: SimTools) -> Record:
    model = tools.shard(blocks(), mp_policy=MIXED)
    set_reduce_hook(model)
    return tools.train(model)


@scenario
def reduce_hook_on_a_stream(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    set_reduce_hook(model, torch.Stream(device="sim"))
    return tools.train(model)


@scenario
def replicated(tools: SimTools) -> Record:
    model = tools.replicate(blocks(), mesh=tools.flat())
    return tools.train(model, micro=2, sync=features.sync_last)


@scenario
def replicated_units(tools: SimTools) -> Record:
    model = blocks()
    for block in model:
        tools.replicate(block, mesh=tools.flat(), mp_policy=MIXED)
    return tools.train(tools.replicate(model, mesh=tools.flat(), mp_policy=MIXED))


def _shard_offloaded(tools: SimTools, pin_memory: bool = True, **kwargs: Any) -> Any:
    return tools.shard(blocks(), offload_policy=CPUOffloadPolicy(pin_memory), **kwargs)


SCENARIOS |= {
    "offload": lambda t: t.train(_shard_offloaded(t)),
    "offload_unpinned": lambda t: t.train(_shard_offloaded(t, False, mp_policy=MIXED)),
    "offload_replicated": lambda t: t.train(
        t.replicate(blocks(), mesh=t.flat(), offload_policy=CPUOffloadPolicy(), mp_policy=MIXED),
        micro=2,
        sync=features.sync_last,
    ),
}


@scenario
def offload_read_at_once(tools: SimTools) -> Record:
    """The host reads gradients after backward without further synchronization."""
    model = _shard_offloaded(tools)
    record: Record = []
    for step in range(3):
        model(tools.input(step)).pow(2).sum().backward()
        record.append(digest(p.grad for p in model.parameters()))
        model.zero_grad()
    return record


@scenario
def offload_accumulated(tools: SimTools) -> Record:
    """Runs one backward without reduction, then two with reduction.

    The last backward accumulates into offloaded gradients.
    """
    model = _shard_offloaded(tools, mp_policy=MIXED, shard_placement_fn=features.place_on_dim_1)
    model._set_unshard_async_op(True)
    count = itertools.count()
    sync = lambda m, _: m.set_requires_gradient_sync(next(count) % 3 > 0)  # noqa: E731
    return tools.train(model, micro=3, sync=sync)


@scenario
def offload_hsdp_of_six_units(tools: SimTools) -> Record:
    """Reduced buffers are freed on the all-reduce stream, because gradients are copied to the
    host."""
    model, mesh = nn.Sequential(*blocks(), *blocks(seed=1)), tools.mesh("replicate", "shard")
    return tools.train(tools.shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy()))


@scenario
def offload_smaller_group(tools: SimTools) -> Record:
    """Prefetches neighbors of units. Post-accumulate-grad hooks read gradients on the host."""
    model = _shard_offloaded(tools, reshard_after_forward=2)
    record: Record = []
    prefetch_neighbors(model)
    for param in list(model.parameters())[::2]:
        param.register_post_accumulate_grad_hook(lambda p: record.append(digest([p.grad])))
    return tools.train(model) + record


@scenario
def offload_with_a_reduce_hook(tools: SimTools) -> Record:
    """torch before 2.15 frees the reduced buffer while the hook's stream still uses it."""
    model = _shard_offloaded(tools)
    set_reduce_hook(model)
    return tools.train(model)


def _train_with_custom_collectives(tools: SimTools, **kwargs: Any) -> Record:
    model = tools.shard(blocks(), mp_policy=MIXED, **kwargs)
    for unit in (*model, model):
        unit.set_custom_all_gather(Gather())
        unit.set_custom_reduce_scatter(Scatter())
    return tools.train(model)


@scenario
def custom_collectives(tools: SimTools) -> Record:
    return _train_with_custom_collectives(tools)


@scenario
def custom_collectives_smaller_group(tools: SimTools) -> Record:
    return _train_with_custom_collectives(tools, reshard_after_forward=2)


@scenario
def memory_from_the_group(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    for unit in (*model, model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return tools.train(model)


@scenario
def memory_from_groups_with_replicas(tools: SimTools) -> Record:
    """Partial gradients in buffers of the process group wait for an all-reduce."""
    mesh = tools.mesh("replicate", "shard")
    model = tools.shard(blocks(), mesh=mesh, mp_policy=MIXED)
    for unit in (*model, model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return tools.train(model, micro=3, sync=features.all_reduce_last)


@scenario
def memory_from_the_group_smaller_group(tools: SimTools) -> Record:
    """All-gathers of the smaller group use memory that the shard group allocates. The second
    training runs without ``set_allocate_memory_from_process_group_for_comm``."""
    model = tools.shard(blocks(), reshard_after_forward=2, offload_policy=CPUOffloadPolicy())
    record: Record = []
    for enabled in (True, False):
        for unit in (*model, model):
            unit.set_allocate_memory_from_process_group_for_comm(enabled)
        record += tools.train(model)
    return record


@since("2.13")
@scenario
def own_group_for_reduce_scatters(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_max_input_buffers(3)
    return tools.train(model)


@scenario
def all_gather_extension(tools: SimTools) -> Record:
    model = blocks(bias=False)
    for block in model:
        block[0].weight = nn.Parameter(Negated(block[0].weight.detach().to("sim")))
    tools.shard(model)
    return tools.accumulate(model)


@scenario
def checkpointed(tools: SimTools) -> Record:
    model = nn.Sequential(*(Checkpointed(block) for block in blocks()))
    return tools.train(tools.shard(model))


def _two_roots(tools: SimTools, share_children: bool) -> Record:
    """Trains two models whose roots share a comm context. If ``share_children``, all units of both
    models share this context."""
    first, second = tools.shard(blocks()), tools.shard(blocks(seed=1))
    for model in (first, second):
        model._get_fsdp_state()._lazy_init()
    children = [*first, *second] if share_children else []
    fsdp.share_comm_ctx([first, second, *children])
    record: Record = []
    for step in range(3):
        loss = second(first(tools.input(step))).pow(2).sum()
        loss.backward()
        both = [*first.parameters(), *second.parameters()]
        record += [loss.item(), digest(p.grad for p in both)]
    return record


@scenario
def shared_context(tools: SimTools) -> Record:
    return _two_roots(tools, share_children=True)


@scenario
def context_shared_by_roots_only(tools: SimTools) -> Record:
    return _two_roots(tools, share_children=False)


@scenario
def interleaved(tools: SimTools) -> Record:
    """Runs two forwards, then two backwards. In torch, no stream waits for one of the prefetched
    all-gathers (B16 in tests/TORCH_BUGS.md)."""
    model = tools.shard(blocks())
    record: Record = []
    for step in range(3):
        losses = [model(tools.input(2 * step + i)).pow(2).sum() for i in range(2)]
        for loss in losses:
            loss.backward()
        record += [loss.item() for loss in losses]
        record.append(digest(p.grad for p in model.parameters()))
        model.zero_grad()
    return record


@scenario
def reduce_hook_on_a_stream_with_a_cast(tools: SimTools) -> Record:
    model = tools.shard(nn.Sequential(*blocks(), *blocks(seed=1)), mp_policy=BFLOAT16)
    set_reduce_hook(model, torch.Stream(device="sim"))
    return tools.train(model)


@scenario
def optimizer_event(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    optimizer = torch.optim.AdamW(model.parameters())
    stream = torch.Stream(device="sim")
    record: Record = []
    for step in range(3):
        loss = model(tools.input(step)).pow(2).sum()
        loss.backward()
        record.append(loss.item())
        stream.wait_stream(torch.accelerator.current_stream())
        with torch.sim.stream(stream):  # type: ignore[attr-defined]
            optimizer.step()
        optimizer.zero_grad()
        model.set_post_optim_event(stream.record_event())
    torch.accelerator.current_stream().wait_stream(stream)
    return [*record, digest(model.parameters())]


@scenario
def evaluated(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    record = tools.train(model)
    with torch.no_grad():
        record.append(digest([model(tools.input(0))]))
    return record + tools.train(model)


@scenario
def clipped(tools: SimTools) -> Record:
    model = tools.shard(blocks())
    model(tools.input(0)).pow(2).sum().backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm.full_tensor().item(), digest(p.grad for p in model.parameters())]


def _curved() -> nn.Sequential:
    """Returns blocks with nonzero second derivatives."""
    model = blocks()
    for block in model:
        block[1] = nn.Tanh()
    return model


def _penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Returns a loss with a gradient penalty, whose backward is a double backward."""
    x.requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + (grad.norm(dim=1) - 1).square().mean()


def _repeat_first_shard(model: nn.Module, ranks: int) -> None:
    """Sets each parameter to its value after an all-gather over ranks with equal shards."""
    with torch.no_grad():
        for param in model.parameters():
            first = param.chunk(ranks)[0].clone()
            param.copy_(torch.cat([first] * ranks))


def _double_backward(tools: SimTools, shards: int, **kwargs: Any) -> Record:
    """Trains with a gradient penalty. torch fails here (B8 in tests/TORCH_BUGS.md), so its record
    comes from an unsharded model that computes the values of ranks with equal shards."""
    model: Any = _curved()
    if tools.is_torch:
        _repeat_first_shard(model.to("sim"), shards)
    else:
        tools.shard(model, **kwargs)
    record: Record = []
    for step in range(3):
        loss = _penalized(model, tools.input(step))
        loss.backward()
        grads = [p.grad.chunk(shards)[0] if tools.is_torch else p.grad for p in model.parameters()]
        record += [loss.item(), digest(grads)]
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1)
                param.grad = None
        if tools.is_torch:
            _repeat_first_shard(model, shards)
    return record


def double_backward_without_reshard(tools: SimTools) -> Record:
    """Runs a double backward in which no unit reshards, so torch reads no freed parameters."""
    model = tools.shard(_curved())
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    loss = _penalized(model, tools.input(0))
    loss.backward()
    for unit in (*model, model):
        unit.reshard()
    return [loss.item(), digest(p.grad for p in model.parameters())]


@scenario
def double_backward(tools: SimTools) -> Record:
    return _double_backward(tools, WORLD)


@scenario
def double_backward_with_replicas(tools: SimTools) -> Record:
    return _double_backward(tools, WORLD // 2, mesh=tools.mesh("replicate", "shard"))


@since("2.13")
@scenario
def reset_after_a_failure(tools: SimTools) -> Record:
    return failed_backward(tools, reset=True)


def failed_backward(tools: SimTools, reset: bool) -> Record:
    """Trains again after a failed backward, without and with CPU offload."""
    record = _train_after_failure(tools, reset)
    return record + _train_after_failure(tools, reset, offload_policy=CPUOffloadPolicy())


def _train_after_failure(tools: SimTools, reset: bool, **kwargs: Any) -> Record:
    """Trains, runs a backward that raises, and trains again. If ``reset``, calls
    ``reset_iter_state()`` after the exception."""
    model = tools.shard(blocks(), **kwargs)
    record = tools.train(model)

    def raise_error(gradient: torch.Tensor) -> None:
        raise RuntimeError("injected failure")

    hidden = model[0](tools.input(0))
    hidden.register_hook(raise_error)
    try:
        model[2](model[1](hidden)).sum().backward()
    except RuntimeError as error:
        record.append(str(error))
    if reset:
        model.reset_iter_state()
    model.zero_grad()
    record += tools.accumulate(model)  # reshards units that the failed backward left unsharded
    model.zero_grad()
    return record + tools.train(model)
