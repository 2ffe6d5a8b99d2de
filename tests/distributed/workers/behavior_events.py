"""Scenarios of profiler ranges, collectives, unshard, reshard and states within a step."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from behavior import (
    DIM,
    Api,
    batch,
    blocks_and_head,
    collectives,
    full_value,
    grads,
    scenario,
    shard,
    train,
    weights,
)
from launch import wait_for_gloo_threads
from releases import groups_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from toy_models import ResidualBlock


def ranges(profiler: Any) -> list[str]:
    """Returns the names of the FSDP ranges in the order of their starts.

    ``profiler.events()`` is slow, so this function reads the results from which torch builds these
    events.
    """
    events = profiler.profiler.kineto_results.events()
    results = [event for event in events if event.name().startswith("FSDP::")]
    return [event.name() for event in sorted(results, key=lambda event: event.start_ns())]


def step(model: nn.Module, rank: int, input_grad: bool = False) -> None:
    model(batch(rank).requires_grad_(input_grad)).square().mean().backward()


def profiled(run: Callable[[], Any]) -> list[str]:
    """Returns the ranges of ``run()``, after one run without the profiler for lazy init."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return ranges(profiler)


@scenario()
def profiler_ranges(api: Api) -> dict[str, list[str]]:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    mixed = blocks_and_head(2)
    for block in list(mixed)[:-1]:
        api.fully_shard(block, mp_policy=MixedPrecisionPolicy(**dtypes))
    api.fully_shard(mixed, mp_policy=MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32))
    results = {
        case: profiled(functools.partial(step, model, api.rank))
        for case, model in {
            "fp32": shard(api, blocks_and_head(2)),
            "mixed": mixed,
            "reshard True": shard(api, blocks_and_head(2), reshard_after_forward=True),
            "reshard False": shard(api, blocks_and_head(2), reshard_after_forward=False),
        }.items()
    }
    return results


def with_prefetch(model: nn.Sequential, depth: int, forward: bool) -> nn.Sequential:
    """Sets the next (forward) or previous ``depth`` blocks as each block's prefetch list."""
    blocks = list(model)[:-1]
    for index, block in enumerate(blocks):
        if forward:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        else:
            block.set_modules_to_backward_prefetch(blocks[max(0, index - depth) : index][::-1])
    return model


class Fork(nn.Module):
    """Two layers on the same input, for two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class Partial(nn.Module):
    """Two groups of two layers; the first layer of each group never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[3](self.layers[1](x))


@scenario()
def order_of_events(api: Api) -> dict[str, list[str]]:
    """Returns the profiler ranges in order. U: an all-gather starts. P: a reduction starts."""
    results: dict[str, list[str]] = {}

    def record(case: str, run: Callable[[], Any]) -> None:
        short = {"FSDP::all_gather": "U", "FSDP::post_backward_reduce": "P"}
        split = (name.partition(" (") for name in profiled(run))
        results[case] = [
            f"{short[label]}{fqn.rstrip(')')}" for label, _, fqn in split if label in short
        ]

    def record_step(case: str, model: nn.Module, input_grad: bool = True) -> None:
        record(case, lambda: step(model, api.rank, input_grad))

    for reshard in (None, True, False):
        record_step(
            f"reshard {reshard}", shard(api, blocks_and_head(), reshard_after_forward=reshard)
        )
    for depth in (1, 2):
        record_step(
            f"forward prefetch {depth}", with_prefetch(shard(api, blocks_and_head(4)), depth, True)
        )
        record_step(
            f"backward prefetch {depth}",
            with_prefetch(shard(api, blocks_and_head(4)), depth, False),
        )
    # The input requires no grad, so the first block's post-backward runs at the end of backward.
    record_step("input without gradient", shard(api, blocks_and_head()), input_grad=False)

    blocks = [checkpoint_wrapper(block) for block in list(blocks_and_head())[:-1]]
    record_step("checkpointed", shard(api, nn.Sequential(*blocks, nn.Linear(DIM, 3))))

    twice = shard(api, blocks_and_head())

    def two_forwards() -> None:
        losses = [twice(batch(api.rank, i).requires_grad_()).square().mean() for i in range(2)]
        (losses[0] + losses[1]).backward()

    record("two forwards", two_forwards)

    grouped = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 3))
    api.fully_shard(grouped[0])
    api.fully_shard([grouped[1], grouped[2]])
    record_step("grouped", api.fully_shard(grouped))

    partial = Partial()
    for i in (0, 2):
        api.fully_shard([partial.layers[i], partial.layers[i + 1]])
    record_step("first of each group unused", api.fully_shard(partial))

    fork = nn.Sequential(nn.Linear(DIM, DIM), Fork())
    for module in (fork[0], fork[1].left, fork[1].right):
        api.fully_shard(module)
    api.fully_shard(fork)

    def two_backwards() -> None:
        left, right = fork(batch(api.rank).requires_grad_())
        fork.set_is_last_backward(False)
        right.square().mean().backward(retain_graph=True)
        fork.set_is_last_backward(True)
        left.square().mean().backward()

    record("two losses", two_backwards)
    return results


@scenario()
def counts_of_collectives(api: Api) -> dict[str, Any]:
    """Counts of collectives in forward, backward and accumulation."""
    results: dict[str, Any] = {}
    for reshard in (None, True, False):
        model = shard(api, blocks_and_head(), reshard_after_forward=reshard)
        one_step = functools.partial(step, model, api.rank)
        one_step()
        losses: list[torch.Tensor] = []
        results[f"reshard {reshard}: forward"] = collectives(
            lambda model=model, losses=losses: losses.append(model(batch(api.rank)).sum())
        )
        results[f"reshard {reshard}: backward"] = collectives(losses[0].backward)
        model.set_requires_gradient_sync(False)
        results[f"reshard {reshard}: no sync"] = collectives(one_step)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(False)
        results[f"reshard {reshard}: keep after backward"] = collectives(one_step)
        results[f"reshard {reshard}: kept"] = collectives(one_step)
        with torch.no_grad():
            results[f"reshard {reshard}: no_grad"] = collectives(
                functools.partial(model, batch(api.rank))
            )
    return results


class Chunked(nn.Module):
    """A norm and a head in one group. Without ``with_head``, the caller runs the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, with_head: bool) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x)
        return self.head(normed) if with_head else normed

    def step(self, x: torch.Tensor, with_head: bool) -> None:
        outputs = [self(x, with_head)]
        if not with_head:
            outputs = [self.head(part) for part in outputs[0].chunk(2)]
        torch.stack([output.square().sum() for output in outputs]).sum().backward()


@scenario()
def gathers_of_chunked_steps(api: Api) -> dict[str, Any]:
    """Returns the gathers of steps whose head runs within forward, or after it for each chunk."""
    torch.manual_seed(7)
    model = Chunked()
    api.fully_shard([model.norm, model.head])
    api.fully_shard(model)
    counts: list[tuple[str, int]] = []
    for at_once in (True, False, True, False, False, True):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model.step(batch(api.rank), at_once)
        count = ranges(profiler).count("FSDP::all_gather (norm, head)")
        counts.append(("within forward" if at_once else "after forward", count))
    return {"counts": counts, "grads": grads(model)}


@scenario()
def counts_of_accumulation(api: Api) -> dict[str, Any]:
    """Records collectives of three microbatches.

    Before the last one all modules, the root only, or one block skip their reductions.
    """
    results: dict[str, Any] = {}
    for forward, backward, mode in itertools.product(
        (None, True, False), (True, False), ("all", "root", "one block")
    ):
        model = shard(api, blocks_and_head(), reshard_after_forward=forward)
        step(model, api.rank)
        model.zero_grad()
        target = model[1] if mode == "one block" else model
        counts: Counter[str] = Counter()
        for part in range(3):
            last = part == 2
            target.set_requires_gradient_sync(last, recurse=mode == "all")
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or backward)
            counts += collectives(functools.partial(step, model, api.rank))
        case = f"{mode}, reshard after forward {forward}, after backward {backward}"
        results[case] = [counts, grads(model)]
    return results


def param_types(model: nn.Module) -> list[str]:
    return [type(p).__name__ for p in model.parameters()]


def group_of(module: Any) -> Any:
    return groups_of(module._get_fsdp_state())[0]


@scenario()
def unshard_and_reshard(api: Api) -> dict[str, Any]:
    """Calls ``unshard`` and ``reshard`` before the first forward and after it."""
    results: dict[str, Any] = {}
    model = shard(api, blocks_and_head(2))
    blocks = list(model)[:-1]

    def record_state(case: str, module: nn.Module) -> None:
        group = group_of(module)
        results[case] = [param_types(module), group._sharded_state.name, group._training_state.name]

    expected = blocks_and_head(2).state_dict()
    for block in blocks:
        block.unshard()
        record_state(f"unsharded {len(results)}", block)
    results["values"] = all(
        torch.equal(p, expected[f"0.{name}"]) for name, p in blocks[0].named_parameters()
    )
    blocks[0].unshard()  # no effect on an unsharded module
    blocks[0].reshard()
    record_state("resharded", blocks[0])
    blocks[0].reshard()
    record_state("resharded twice", blocks[0])

    handle = blocks[0].unshard(async_op=True)
    record_state("in flight", blocks[0])
    results["handle"] = type(handle).__mro__[-2].__name__  # the base class below object
    handle.wait()
    record_state("waited", blocks[0])
    handle.wait()
    record_state("waited twice", blocks[0])
    blocks[0].reshard()

    handles: list[Any] = []

    def unshard_and_train() -> None:
        handles.extend(module.unshard(async_op=True) for module in (*blocks, model))
        step(model, api.rank)  # waits for the pending handles

    results["gathers"] = collectives(unshard_and_train)
    record_state("after backward", blocks[0])
    for handle in handles:
        handle.wait()
    record_state("late wait", blocks[0])
    results["no handle"] = model.unshard()
    model.reshard()
    return results | {"trained": train(model, api.rank, 1)}


class ReportingBlock(ResidualBlock):
    """Calls ``report`` when its forward and its backward run."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.report = report

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.report("forward")
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.report("backward"))
        return y


@scenario()
def states_within_a_step(api: Api) -> dict[str, list[Any]]:
    """Records the states of all modules in forward and backward, without and with prefetch."""

    def record_states(depth: int, forward: bool) -> list[Any]:
        record: list[Any] = []

        def record_state(when: str) -> None:
            states = [module._get_fsdp_state() for module in (*blocks, model)]
            groups = [groups_of(state)[0] for state in states]
            record.append(
                [when]
                + [state._training_state.name for state in states]
                + [group._training_state.name for group in groups]
                + [group._sharded_state.name for group in groups]
            )

        torch.manual_seed(1)
        blocks = [ReportingBlock(record_state) for _ in range(4)]
        model = shard(api, nn.Sequential(*blocks, nn.Linear(DIM, 3)))
        if depth > 0:
            with_prefetch(model, depth, forward)
        record_state("before")
        for _ in range(2):
            step(model, api.rank)
            record_state("after")
        return record

    return {
        "default": record_states(0, True),
        "forward prefetch": record_states(2, True),
        "backward prefetch": record_states(2, False),
    }


@scenario()
def identity_of_parameters(api: Api) -> dict[str, list[bool]]:
    """Registered parameter objects keep their identity, sharded and unsharded."""
    model = shard(api, blocks_and_head(2), reshard_after_forward=True)
    inside: list[list[nn.Parameter]] = []
    model[0].linear.register_forward_pre_hook(
        lambda module, args: inside.append(list(module.parameters()))
    )
    sharded = list(model.parameters())
    local = [p.to_local().data_ptr() for p in sharded]
    train(model, api.rank, 2)
    groups = [group_of(module) for module in (model[0], model[1], model)]
    in_groups = [p for group in groups for p in group.fsdp_params]
    return {
        "sharded": [a is b for a, b in zip(sharded, model.parameters())],
        "of the group": [any(p.sharded_param is q for q in sharded) for p in in_groups],
        "memory": [a == p.to_local().data_ptr() for a, p in zip(local, sharded)],
        "unsharded": [a is b for a, b in zip(inside[0], inside[1])],
        "freed": [p.untyped_storage().nbytes() == 0 for p in inside[0]],
        "by unshard": [any(p is q for q in inside[0]) for p in unsharded_of(model[0])],
    }


def unsharded_of(module: Any) -> list[nn.Parameter]:
    module.unshard()
    results = list(module.linear.parameters())
    module.reshard()
    return results


@scenario()
def removed_hooks(api: Api) -> dict[str, Any]:
    """Removes the hooks by their handles. Direct calls of ``unshard`` still work."""
    torch.manual_seed(1)
    model = api.fully_shard(nn.Linear(DIM, 3))
    state = model._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    results: dict[str, Any] = {"hooks": [len(model._forward_pre_hooks), len(model._forward_hooks)]}
    model.unshard()
    output = model(batch(api.rank))
    results["output"] = output.detach()
    results["grad_fn"] = output.grad_fn.name()
    model.reshard()
    results["param_types"] = param_types(model)
    pair = [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
    api.fully_shard(pair)
    pair[0]._get_fsdp_state()._pre_forward_hook_handle.remove()
    results["pair"] = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pair]
    return results


@scenario()
def slices_of_a_sequential(api: Api) -> dict[str, Any]:
    model = shard(api, blocks_and_head())
    part = model[1:3]
    first = part(batch(api.rank))
    return {
        "class": type(part).__name__,
        "classes": [type(module).__name__ for module in part],
        "first": first.detach().clone(),
        "weights": weights(part),
    }


@scenario()
def user_hooks_beside_fsdp_hooks(api: Api) -> list[Any]:
    """Registers hooks before and after fully_shard, and on gradients of sharded parameters."""
    record: list[Any] = []
    model = blocks_and_head(1)
    block = model[0]
    block.register_forward_pre_hook(lambda m, args: record.append(["early pre", param_types(m)]))
    block.register_forward_hook(lambda m, args, out: record.append(["early post", param_types(m)]))
    shard(api, model)
    block.register_forward_pre_hook(lambda m, args: record.append(["late pre", param_types(m)]))
    block.register_forward_pre_hook(
        lambda m, args: record.append(["prepended pre", param_types(m)]), prepend=True
    )
    block.register_forward_hook(lambda m, args, out: record.append(["late post", param_types(m)]))
    block.register_full_backward_hook(lambda m, gi, go: record.append(["backward", param_types(m)]))
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: record.append(["tensor hook", name]))
    for _ in range(2):
        step(model, api.rank)
    return [*record, [full_value(p.grad) for p in model.parameters()]]


def count_thread_states() -> int:
    """Returns the number of thread states created so far, including those of library threads."""
    results: list[int] = []

    def store_id() -> None:
        state = ctypes.pythonapi.PyThreadState_Get
        state.restype = ctypes.c_void_p
        number = ctypes.pythonapi.PyThreadState_GetID
        number.argtypes, number.restype = [ctypes.c_void_p], ctypes.c_uint64
        results.append(number(state()))

    thread = threading.Thread(target=store_id)
    thread.start()
    thread.join()
    return results[0]


@scenario()
def threads_that_took_the_gil(api: Api) -> int:
    """Returns the number of library threads that took the GIL during 50 steps.

    Under torch the number depends on timing, so more steps follow while all ranks counted none.
    """
    model = shard(api, blocks_and_head(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = dist.distributed_c10d._get_default_store()
    step(model, api.rank)
    wait_for_gloo_threads()  # earlier work has finished
    before = count_thread_states()
    for attempt in range(1 if api.is_fsdp_c else 20):
        for _ in range(50):
            step(model, api.rank)
            optimizer.step()
            optimizer.zero_grad()
        wait_for_gloo_threads()
        taken = count_thread_states() - before - 1  # without the thread of this count
        store.set(f"threads_that_took_the_gil/{attempt}/{api.rank}", str(taken))
        keys = [f"threads_that_took_the_gil/{attempt}/{rank}" for rank in range(api.world)]
        if any(int(store.get(key)) > 0 for key in keys):
            break
    return taken
