"""Trains a step in which one call fails, on every rank at the same point, then checks recovery.

``test_sweep.py`` runs this module on gloo ranks. Each attempt restores the same weights and trains
one step with a failure. Then the trainer calls ``reset_iter_state()`` and ``zero_grad()``, repeats
the step and trains one more. Losses, gradients and weights must equal those of a run without
failure.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn as nn

from fsdp_c import _C, MixedPrecisionPolicy, fully_shard, replicate

DIM = 6
FAILING, NEXT = 1, 2
"""Step numbers of an attempt. Step 0 is trained once, when the trainer is created."""


class UserError(Exception):
    """Raised by the model's forward or by a hook in its backward."""


class Block(nn.Module):
    """Linear, norm, and a fault that can be raised in forward or in backward."""

    def __init__(self, user_fault: UserFault) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.user_fault = user_fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.user_fault.count_call()
        y = self.norm(self.linear(x)).relu()
        if y.requires_grad:
            y.register_hook(self.user_fault.count_call)
        return x + y


class UserFault:
    """Raises UserError at the last of ``calls_left`` calls of ``count_call``. 0: never raises."""

    def __init__(self) -> None:
        self.calls_left = 0

    def count_call(self, *unused: Any) -> None:
        if self.calls_left > 0:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise UserError("user code failed")


Reshard = bool | None | Literal["replicate"]
"""Values of reshard_after_forward, or "replicate": DDP mode with several small buckets."""


def build(mixed: bool, reshard: Reshard) -> tuple[nn.Module, UserFault]:
    torch.manual_seed(0)
    user_fault = UserFault()
    model = nn.Sequential(*(Block(user_fault) for _ in range(3)), nn.Linear(DIM, 3))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    if reshard == "replicate":
        return replicate(model, mp_policy=policy, bucket_cap_mb=100 / 2**20), user_fault
    for block in list(model)[:3]:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    return model, user_fault


def batch(rank: int, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return torch.randn(4, DIM, generator=generator)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local().detach().clone()


class Trainer:
    """Trains with fsdp_c: optionally one unsynchronized backward, then a synchronized one."""

    def __init__(self, rank: int, mixed: bool, accumulate: bool, reshard: Reshard) -> None:
        self.rank = rank
        self.parts = 2 if accumulate else 1
        self.model, self.user_fault = build(mixed, reshard)
        self.train_step(0)  # runs lazy initialization and the allocations of the first step
        self.model.zero_grad()
        self.start = [local(p) for p in self.model.parameters()]

    def train_step(self, step: int) -> list[float]:
        losses = []
        for part in range(self.parts):
            last = part == self.parts - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            loss = self.model(batch(self.rank, step, part)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        return losses

    def recover(self) -> None:
        _C._testing.fault_arm(0)
        self.user_fault.calls_left = 0
        self.model.reset_iter_state()
        self.model.set_requires_gradient_sync(True)
        self.model.set_is_last_backward(True)
        self.model.zero_grad()
        for state in self.model._get_fsdp_state()._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group._check()

    def run(self, arm: Callable[[], None]) -> tuple[list[Any], str | None]:
        """Trains the failing and the next step.

        Returns the results and the failure's type and text, or None if no call failed.
        """
        with torch.no_grad():
            for p, start in zip(self.model.parameters(), self.start):
                p.to_local().copy_(start)
        results: list[Any] = []
        failure = None
        for step in (FAILING, NEXT):
            if step == FAILING:
                arm()
                try:
                    losses = self.train_step(step)
                    _C._testing.fault_arm(0)
                    self.user_fault.calls_left = 0
                except Exception as error:
                    failure = f"{type(error).__name__}: {error}"
                    self.recover()
                    losses = self.train_step(step)
            else:
                losses = self.train_step(step)
            results.append(losses)
            results += [local(p.grad) for p in self.model.parameters()]
            with torch.no_grad():
                for p in self.model.parameters():
                    p.to_local().sub_(p.grad.to_local(), alpha=0.1)
            self.model.zero_grad()
            results += [local(p) for p in self.model.parameters()]
        return results, failure


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b)
    )


def failing_calls(
    trainer: Trainer, kind: str, first: int, stride: int
) -> Iterator[tuple[int, Callable[[], None]]]:
    """Yields n and a function that makes the n-th call fail, for every ``stride``-th n."""
    for n in itertools.count(first, stride):
        if kind == "boundary":
            yield n, lambda n=n: _C._testing.fault_arm(n)
        else:
            yield n, lambda n=n: setattr(trainer.user_fault, "calls_left", n)


def sweep(
    rank: int, world: int, kind: str, mixed: bool, accumulate: bool, reshard: Reshard
) -> dict[str, Any]:
    """Makes every call fail in turn.

    Returns the number of the last failing call, the failures after which results differ, and the
    types of all failures. Also returns whether a last run without failure has the same results.

    With accumulation, two microbatches repeat most boundary calls. The sweep then takes only the
    odd or only the even boundary calls, unless SWEEP_WHOLE is set.
    """
    torch.set_num_threads(1)
    trainer = Trainer(rank, mixed, accumulate, reshard)
    expected, failure = trainer.run(lambda: None)
    assert failure is None
    mismatches: list[tuple[int, str]] = []
    failure_types: set[str] = set()
    every_other = kind == "boundary" and accumulate and "SWEEP_WHOLE" not in os.environ
    first, stride = (1 + mixed, 2) if every_other else (1, 1)
    for n, arm in failing_calls(trainer, kind, first, stride):
        actual, failure = trainer.run(arm)
        if failure is None:
            return {
                "last failing call": n - stride,
                "mismatches": mismatches,
                "failures": failure_types,
                "same": same(actual, expected),
            }
        failure_types.add(failure.split(":")[0])
        if not same(actual, expected):
            mismatches.append((n, failure))
    raise AssertionError("unreachable")
