"""Scenarios of torch's bugs after a backward that raised, without ``reset_iter_state()``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from behavior import Api, batch, blocks_and_head, grads, scenario, shard
from torch_bugs import MIXED, average, in_bf16, loss_of, take_gradients
from toy_models import Checkpointed


class Trap:
    """Raises in backward of the second block while ``is_set``."""

    def __init__(self, model: nn.Sequential) -> None:
        self.is_set = False
        model[1].register_forward_hook(self.add_hook)

    def add_hook(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.raise_if_set)

    def raise_if_set(self, grad: torch.Tensor) -> None:
        if self.is_set:
            raise MemoryError("no memory for a gradient")


def recomputing(model: nn.Sequential) -> nn.Sequential:
    for index in range(len(model) - 1):
        model[index] = Checkpointed(model[index])
    return model


def skip_batch(model: nn.Sequential, trap: Trap, x: torch.Tensor) -> None:
    """Skips a batch whose backward raises MemoryError, as training loops do."""
    trap.is_set = True
    try:
        loss_of(model(x)).backward()
    except MemoryError:
        model.zero_grad()
    trap.is_set = False


def compare_after_skipped_batch(
    api: Api, model: nn.Sequential, reference: nn.Sequential
) -> dict[str, Any]:
    """Returns the gradients of one step, and of two steps after a skipped batch."""
    results: dict[str, Any] = {"found": [], "expected": []}
    trap = Trap(model)
    for step in range(3):
        if step == 1:
            skip_batch(model, trap, batch(api.rank, 10))
        x = batch(api.rank, step)
        loss_of(reference(x.to(reference[-1].weight.dtype))).backward()
        loss_of(model(x)).backward()
        results["found"].append(grads(model))
        results["expected"].append(average(take_gradients(reference)))
        model.zero_grad()
    return results


@scenario()
def batch_skipped(api: Api) -> dict[str, Any]:
    return compare_after_skipped_batch(api, shard(api, blocks_and_head()), blocks_and_head())


@scenario()
def batch_skipped_in_mixed_precision(api: Api) -> dict[str, Any]:
    return compare_after_skipped_batch(
        api, shard(api, blocks_and_head(), mp_policy=MIXED), in_bf16(blocks_and_head())
    )


@scenario()
def batch_skipped_without_reshard(api: Api) -> dict[str, Any]:
    return compare_after_skipped_batch(
        api, shard(api, blocks_and_head(), reshard_after_forward=False), blocks_and_head()
    )


@scenario()
def batch_skipped_with_recomputation(api: Api) -> dict[str, Any]:
    model = shard(api, recomputing(blocks_and_head()))
    return compare_after_skipped_batch(api, model, recomputing(blocks_and_head()))


@scenario()
def batch_skipped_before_an_evaluation(api: Api) -> dict[str, Any]:
    """The first forward after the failure is an evaluation."""
    model, reference = shard(api, blocks_and_head()), blocks_and_head()
    loss_of(model(batch(api.rank, 0))).backward()
    model.zero_grad()
    skip_batch(model, Trap(model), batch(api.rank, 10))
    with torch.no_grad():
        outputs = model(batch(api.rank, 1)), reference(batch(api.rank, 1))
    later_steps = compare_after_skipped_batch(api, model, reference)
    later_steps["found"].append(outputs[0])
    later_steps["expected"].append(outputs[1])
    return later_steps
