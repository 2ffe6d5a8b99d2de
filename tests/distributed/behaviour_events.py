"""Scenarios about what happens when: profiler ranges, collectives, unshard and reshard, states."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from behaviour import DIM, Api, Block, batch, plain, scenario, shard, train, weights, whole
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile


def ranges(profiler: Any) -> list[str]:
    """Names of the FSDP ranges in the order in which they began."""
    found = [event for event in profiler.events() if event.name.startswith("FSDP::")]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


def step(model: nn.Module, rank: int, input_grad: bool = False) -> None:
    model(batch(rank).requires_grad_(input_grad)).square().mean().backward()


def profiled(model: nn.Module, rank: int, input_grad: bool = False) -> list[str]:
    """The ranges of one step; an unprofiled one runs before, for lazy init."""
    step(model, rank, input_grad)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model, rank, input_grad)
    return ranges(profiler)


@scenario()
def profiler_ranges(api: Api) -> dict[str, list[str]]:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    mixed = plain(2)
    for block in list(mixed)[:-1]:
        api.fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes))
    api.fully_shard(mixed, mp_policy=MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32))
    found = {
        "fp32": profiled(shard(api, plain(2)), api.rank),
        "mixed": profiled(mixed, api.rank),
    }
    for reshard in (True, False):
        found[f"reshard {reshard}"] = profiled(
            shard(api, plain(2), reshard_after_forward=reshard), api.rank
        )
    return found


@scenario()
def order_of_events(api: Api) -> dict[str, list[str]]:
    """U: an all-gather begins; P: gradients begin to be reduced. By the profiler's ranges."""
    found: dict[str, list[str]] = {}

    def record(case: str, model: nn.Module, input_grad: bool = True) -> None:
        short = {"FSDP::all_gather": "U", "FSDP::post_backward_reduce": "P"}
        events = []
        for name in profiled(model, api.rank, input_grad):
            label, _, fqn = name.partition(" (")
            if label in short:
                events.append(f"{short[label]}{fqn.rstrip(')')}")
        found[case] = events

    for reshard in (None, True, False):
        record(f"reshard {reshard}", shard(api, plain(), reshard_after_forward=reshard))
    for depth in (1, 2):
        model = shard(api, plain(4))
        blocks = list(model)[:-1]
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        record(f"forward prefetch {depth}", model)
        model = shard(api, plain(4))
        blocks = list(model)[:-1]
        for index, block in enumerate(blocks):
            before = blocks[max(0, index - depth) : index]
            block.set_modules_to_backward_prefetch(before[::-1])
        record(f"backward prefetch {depth}", model)
    # Nothing below the first block requires grad: its post-backward is left to the end of backward.
    record("input without gradient", shard(api, plain()), input_grad=False)
    return found


@scenario()
def counts_of_collectives(api: Api) -> dict[str, Any]:
    """Dispatcher ops of forward, backward and accumulation, by kind."""
    found: dict[str, Any] = {}

    def count(case: str, run: Any) -> Any:
        with CommDebugMode() as mode:
            result = run()
        found[case] = {str(op): n for op, n in mode.get_comm_counts().items()}
        return result

    for reshard in (None, True, False):
        model = shard(api, plain(), reshard_after_forward=reshard)
        step(model, api.rank)
        loss = count(f"{reshard}: forward", lambda: model(batch(api.rank)).square().mean())
        count(f"{reshard}: backward", loss.backward)
        model.set_requires_gradient_sync(False)
        count(f"{reshard}: no sync", lambda: step(model, api.rank))
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(False)
        count(f"{reshard}: keep after backward", lambda: step(model, api.rank))
        count(f"{reshard}: kept", lambda: step(model, api.rank))
        with torch.no_grad():
            count(f"{reshard}: no_grad", lambda: model(batch(api.rank)))
    return found


def kinds(model: nn.Module) -> list[str]:
    return [type(p).__name__ for p in model.parameters()]


def group_of(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_groups[0]


@scenario()
def unshard_and_reshard(api: Api) -> dict[str, Any]:
    """By hand, before the first forward and after."""
    found: dict[str, Any] = {}
    model = shard(api, plain(2))
    blocks = list(model)[:-1]

    def note(case: str, module: nn.Module) -> None:
        group = group_of(module)
        found[case] = [kinds(module), group._sharded_state.name, group._training_state.name]

    expected = plain(2).state_dict()
    for block in blocks:
        block.unshard()
        note(f"unsharded {len(found)}", block)
    found["values"] = all(
        torch.equal(p, expected[f"0.{name}"]) for name, p in blocks[0].named_parameters()
    )
    blocks[0].unshard()  # again: nothing happens
    blocks[0].reshard()
    note("resharded", blocks[0])
    blocks[0].reshard()
    note("resharded twice", blocks[0])

    handle = blocks[0].unshard(async_op=True)
    note("in flight", blocks[0])
    found["handle"] = type(handle).__mro__[-2].__name__
    handle.wait()
    note("waited", blocks[0])
    handle.wait()
    note("waited twice", blocks[0])
    blocks[0].reshard()

    with CommDebugMode() as mode:
        handles = [block.unshard(async_op=True) for block in blocks]
        handles.append(model.unshard(async_op=True))
        model(batch(api.rank)).square().mean().backward()  # waits for what nobody waited for
    found["gathers"] = {str(op): n for op, n in mode.get_comm_counts().items()}
    note("after backward", blocks[0])
    for late in handles:
        late.wait()
    note("late wait", blocks[0])
    found["no handle"] = model.unshard()
    model.reshard()
    return found | {"trained": train(model, api.rank, 1)}


@scenario()
def states_within_a_step(api: Api) -> list[Any]:
    """What user code sees inside forward and backward."""
    seen: list[Any] = []

    class Watching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            note("forward")
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: note("backward"))
            return y

    def note(when: str) -> None:
        seen.append(
            [when]
            + [m._get_fsdp_state()._training_state.name for m in (*blocks, model)]
            + [f"{group_of(m)._training_state.name}" for m in (*blocks, model)]
            + [f"{group_of(m)._sharded_state.name}" for m in (*blocks, model)]
        )

    torch.manual_seed(1)
    blocks = [Watching(), Watching()]
    model = nn.Sequential(*blocks, nn.Linear(DIM, 3))
    shard(api, model)
    note("before")
    for _ in range(2):
        step(model, api.rank)
        note("after")
    return seen


@scenario()
def removed_hooks(api: Api) -> dict[str, Any]:
    """Without its hooks a module is left alone; by hand it still works."""
    torch.manual_seed(1)
    model = api.fully_shard(nn.Linear(DIM, 3))
    state = model._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    found: dict[str, Any] = {"hooks": [len(model._forward_pre_hooks), len(model._forward_hooks)]}
    model.unshard()
    output = model(batch(api.rank))
    found["output"] = output.detach()
    found["grad_fn"] = output.grad_fn.name()
    model.reshard()
    found["kinds"] = kinds(model)
    pair = [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
    api.fully_shard(pair)
    pair[0]._get_fsdp_state()._pre_forward_hook_handle.remove()
    found["pair"] = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pair]
    return found


@scenario()
def slices_of_a_sequential(api: Api) -> dict[str, Any]:
    model = shard(api, plain())
    part = model[1:3]
    first = part(batch(api.rank))
    return {
        "class": type(part).__name__,
        "classes": [type(module).__name__ for module in part],
        "first": first.detach().clone(),
        "weights": weights(part),
    }


@scenario()
def user_hooks_beside_ours(api: Api) -> list[Any]:
    """Hooks registered before and after fully_shard, and on gradients of the sharded parameters."""
    seen: list[Any] = []
    model = plain(1)
    block = model[0]
    block.register_forward_pre_hook(lambda m, args: seen.append(["early pre", kinds(m)]))
    block.register_forward_hook(lambda m, args, out: seen.append(["early post", kinds(m)]))
    shard(api, model)
    block.register_forward_pre_hook(lambda m, args: seen.append(["late pre", kinds(m)]))
    block.register_forward_pre_hook(
        lambda m, args: seen.append(["prepended pre", kinds(m)]), prepend=True
    )
    block.register_forward_hook(lambda m, args, out: seen.append(["late post", kinds(m)]))
    block.register_full_backward_hook(lambda m, gi, go: seen.append(["backward", kinds(m)]))
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.append(["tensor hook", name]))
    for _ in range(2):
        step(model, api.rank)
    return [*seen, [whole(p.grad) for p in model.parameters()]]
