"""Scenarios of groups of several modules that run in part, and of nested units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from behavior import DIM, Api, batch, blocks_and_head, grads, scenario, shard
from behavior_events import group_of, profiled
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import replicate as composable_ddp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal import common_fsdp
from toy_models import ResidualBlock

SYMBOLS = 11


@contextlib.contextmanager
def record_transitions(record: list[str]) -> Iterator[None]:
    """Patches FSDPParamGroup to record started gathers (U), reshards (R) and post-backwards (P)."""
    unshard, reshard = FSDPParamGroup.unshard, FSDPParamGroup.reshard
    post_backward = FSDPParamGroup.post_backward

    def note(kind: str, group: Any) -> None:
        record.append(f"{kind} {group._module_fqn} {group._training_state.name}")

    def recording_unshard(group: Any, async_op: bool = False) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            note("U", group)
        unshard(group, async_op)

    def recording_reshard(group: Any) -> None:
        note("R", group)
        reshard(group)

    def recording_post_backward(group: Any, *unused: Any) -> None:
        post_backward(group, *unused)
        note("P", group)

    with (
        common_fsdp.patch_unshard(recording_unshard),
        common_fsdp.patch_reshard(recording_reshard),
        common_fsdp.patch_post_backward(recording_post_backward),
    ):
        yield


def record_steps(model: nn.Module, run: Callable[[int], Any], steps: int = 3) -> dict[str, Any]:
    """Returns result, transitions and gradients of each step, and those of unpatched steps: their
    all-gather ranges, and their accumulated gradients."""
    results: dict[str, Any] = {"results": [], "transitions": [], "gradients": []}
    for step in range(steps):
        record: list[str] = []
        with record_transitions(record):
            results["results"].append(run(step))
        results["transitions"].append(record)
        results["gradients"].append(grads(model))
        model.zero_grad()
    ranges = [name for name in profiled(lambda: run(0)) if "all_gather" in name]
    return results | {"unpatched ranges": ranges, "unpatched gradients": grads(model)}


# ---- modules that are called outside of the root's forward ----


class HeadedModel(nn.Module):
    """A body and a head. Without ``with_head``, the caller runs the head on parts of the output."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, DIM)
        self.body = ResidualBlock()
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, SYMBOLS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, with_head: bool = True) -> torch.Tensor:
        hidden = self.norm(self.body(self.embedding(tokens)))
        return self.head(hidden) if with_head else hidden


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(0, SYMBOLS, (2, 8), generator=generator)


def shard_headed_model(
    api: Api, tied: bool = False, recomputed: bool = False, **head_options: Any
) -> Any:
    """``head_options`` are the arguments of ``fully_shard`` for the group of the head."""
    torch.manual_seed(5)
    model = HeadedModel(tied)
    if recomputed:
        composable_checkpoint(model.body)
    api.fully_shard(model.body)
    if tied:
        api.fully_shard([model.embedding, model.norm, model.head], **head_options)
    else:
        api.fully_shard(model.embedding)
        api.fully_shard([model.norm, model.head], **head_options)
    return api.fully_shard(model)


def run_in_chunks(
    model: Any, rank: int, step: int, observe: Callable[[], Any] = lambda: None
) -> list[Any]:
    """Runs loss and backward of the head for each half of the hidden states, then the backward of
    the other modules.

    Returns the dtype of the hidden states, and a list for each half, which ends with ``observe()``.
    """
    hidden = model(tokens(rank, step), with_head=False)
    results: list[Any] = [hidden.dtype]
    gradients = []
    for part in hidden.detach().float().chunk(2, dim=1):
        part = part.contiguous().requires_grad_()
        output = model.head(part)
        loss = output.float().square().mean()
        loss.backward()
        gradients.append(part.grad)
        results.append([output.dtype, loss.item(), observe()])
    hidden.backward(torch.cat(gradients, dim=1).to(hidden.dtype))
    return results


@scenario()
def losses_of_chunks(api: Api) -> dict[str, Any]:
    half = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    cases: dict[str, dict[str, Any]] = {
        "resharded": {"reshard_after_forward": True},
        "not resharded": {"reshard_after_forward": False},
        "resharded to groups of one": {"reshard_after_forward": 1},
        "tied": {"tied": True},
        "tied and not resharded": {"tied": True, "reshard_after_forward": False},
        "recomputed": {"recomputed": True},
        "output cast": {"mp_policy": half},
    }
    results = {}
    for name, options in cases.items():
        model = shard_headed_model(api, **options)
        results[name] = record_steps(model, lambda step, m=model: run_in_chunks(m, api.rank, step))  # type: ignore[misc]
    return results


@scenario()
def parameters_kept_for_chunks(api: Api) -> dict[str, Any]:
    """The head stays unsharded between the chunks; ``reshard()`` is called after them.

    Returns for each step the results of its chunks, whether the head is unsharded after
    ``reshard()``, and gradients.
    """
    results: dict[str, Any] = {}
    for tied in (False, True):
        for reshard in (False, True):
            model = shard_headed_model(api, tied, reshard_after_forward=reshard)
            group = group_of(model.head)
            steps = results[f"tied {tied}, reshard {reshard}"] = []
            for step in range(3):
                model.head.set_reshard_after_backward(False)
                model.head.set_reshard_after_forward(False)
                chunks = run_in_chunks(model, api.rank, step, lambda g=group: g.is_unsharded)  # type: ignore[misc]
                model.head.set_reshard_after_backward(True)
                model.head.set_reshard_after_forward(True)
                model.head.reshard()
                steps.append([chunks, group.is_unsharded, grads(model)])
                model.zero_grad(set_to_none=step % 2 == 0)
    return results


@scenario()
def accumulated_chunks(api: Api) -> list[Any]:
    results: list[Any] = []
    for reshard in (True, False):
        model = shard_headed_model(api, reshard_after_forward=reshard)
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_is_last_backward(part == 2)
            results.append(run_in_chunks(model, api.rank, part))
        results.append(grads(model))
    return results


@scenario()
def two_forwards_without_the_head(api: Api) -> dict[str, Any]:
    model = shard_headed_model(api)

    def run(step: int) -> None:
        first = model(tokens(api.rank, step), with_head=False)
        second = model(tokens(api.rank, step + 9), with_head=False)
        (first.square().sum() + second.square().sum()).backward()

    return record_steps(model, run)


class SeparateLast(nn.Module):
    """The caller may run ``last``. ``last`` and ``middle`` share a group, which lists ``last``
    first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor, with_last: bool = True) -> torch.Tensor:
        x = self.middle(self.first(x)).relu()
        return self.last(x) if with_last else x


@scenario()
def group_member_run_alone_between_forwards(api: Api) -> dict[str, Any]:
    torch.manual_seed(5)
    model: Any = SeparateLast()
    api.fully_shard(model.first)
    api.fully_shard([model.last, model.middle])
    api.fully_shard(model)

    def run(step: int) -> None:
        if step % 2:
            model(batch(api.rank, step)).square().mean().backward()
            return
        hidden = model(batch(api.rank, step), with_last=False)
        part = hidden.detach().requires_grad_()
        model.last(part).square().mean().backward()
        hidden.backward(part.grad)

    return record_steps(model, run, steps=4)


@scenario()
def recomputed_group_members(api: Api) -> dict[str, Any]:
    """One or both of the two modules of a group are checkpointed."""
    results = {}
    for impl, which in (
        (CheckpointImpl.NO_REENTRANT, (1,)),
        (CheckpointImpl.NO_REENTRANT, (2,)),
        (CheckpointImpl.NO_REENTRANT, (1, 2)),
        (CheckpointImpl.REENTRANT, (1,)),
        (CheckpointImpl.REENTRANT, (1, 2)),
    ):
        model = blocks_and_head()
        api.fully_shard(model[0])
        api.fully_shard([model[1], model[2]])
        for index in which:
            model[index] = checkpoint_wrapper(model[index], checkpoint_impl=impl)
        api.fully_shard(model)

        def run(step: int, model: nn.Module = model) -> None:
            model(batch(api.rank, step).requires_grad_()).square().mean().backward()

        results[f"{impl.name} {which}"] = record_steps(model, run)
    return results


# ---- units within units, and beside other wrappers ----


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(DIM), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Tower(nn.Module):
    """Two embeddings in one unit, layers with a nested unit, and norm and head in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(SYMBOLS, DIM), nn.Embedding(8, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, SYMBOLS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.symbols(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@scenario()
def prefetched_within_checkpoints(api: Api) -> dict[str, Any]:
    """Uses checkpoints around layers and their inner modules, with and without prefetch lists."""
    torch.manual_seed(5)
    model: Any = Tower()
    for kind in (Layer, FeedForward):
        apply_activation_checkpointing(model, check_fn=lambda m, kind=kind: isinstance(m, kind))  # type: ignore[misc]
    api.fully_shard([model.symbols, model.positions])
    for layer in model.layers:
        api.fully_shard(layer.inner.up)
        api.fully_shard(layer)
    api.fully_shard([model.norm, model.head])
    api.fully_shard(model)

    def run(step: int) -> None:
        model(tokens(api.rank, step)).square().mean().backward()

    results = {"without lists": record_steps(model, run)}
    model.zero_grad()
    model.head.set_modules_to_backward_prefetch([model.layers[2]])
    for index in (2, 1):
        before = model.layers[index - 1]
        model.layers[index].set_modules_to_backward_prefetch([before, before.inner.up])
    model.layers[0].set_modules_to_backward_prefetch([model.symbols])
    return results | {"with lists": record_steps(model, run)}


@scenario()
def composable_checkpoints(api: Api) -> dict[str, Any]:
    results = {}
    for reshard in (None, True, False):
        model = blocks_and_head()
        for block in list(model)[:-1]:
            composable_checkpoint(block)
        shard(api, model, reshard_after_forward=reshard)

        def run(step: int, model: nn.Module = model) -> None:
            losses = [model(batch(api.rank, step + i)).square().mean() for i in range(2)]
            (losses[0] - losses[1]).square().backward()

        results[f"reshard {reshard}"] = record_steps(model, run)
    return results


class PrefetchingModel(nn.Module):
    """Starts to unshard its blocks before it runs another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.Sequential(ResidualBlock(), ResidualBlock())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if isinstance(block, FSDPModule):
                block.unshard(async_op=True)
        return self.blocks(self.first(x))


@scenario()
def within_composable_ddp(api: Api) -> dict[str, Any]:
    torch.manual_seed(5)
    model = PrefetchingModel()
    for block in model.blocks:
        api.fully_shard(block, reshard_after_forward=False)
    api.fully_shard(model.blocks)
    composable_ddp(model)

    def run(step: int) -> None:
        model(batch(api.rank, step)).square().mean().backward()

    return record_steps(model, run)
