"""Fails calls of a training step one by one on the simulated device, and checks the recovery.

As in sweep.py, a model first runs one clean step. Each attempt then begins with the same
parameters. It runs a step with the failure, ``reset_iter_state()``, the failed step again, and
another step. The bits must equal those of a clean run, and neither training nor recovery may race.

A fault is armed for one thread. Backward runs in the device's thread, so a hook arms its fault
there.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import sim_tools
import simulated
import torch
import torch.nn as nn
from sim_tools import BFLOAT16
from sweep import DIM, Block, Trainer, UserFault, batch, local, same
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_c import _C, fully_shard, replicate

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLACES = ("forward", "backward", "user")
STRIDE = 1 if os.environ.get("FSDP_C_ACCELERATOR_WHOLE", "") not in ("", "0") else 3
"""Distance between the calls that fail. At the place "user" it is 1."""
MAX_CALLS = 4000
"""Upper bound of the number of calls in a step."""


def _shard(model: nn.Sequential, **options: Any) -> Any:
    for block in list(model)[:3]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _shard_with_all_reduce_hook(model: nn.Sequential) -> Any:
    _shard(model, mp_policy=BFLOAT16)
    for unit in (*list(model)[:3], model):
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))
    return model


def _shard_with_memory_from_group(model: nn.Sequential) -> Any:
    _shard(model, mp_policy=MIXED)
    for unit in (*list(model)[:3], model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return model


def _shard_with_prefetch(model: nn.Sequential) -> Any:
    _shard(model, mp_policy=MIXED)
    for previous, following in itertools.pairwise(list(model)[:3]):
        previous.set_modules_to_forward_prefetch([following])
    return model


def _mesh_2d(*names: str) -> Any:
    return sim_tools.make_mesh((2, sim_tools.WORLD // 2), names)


VARIANTS: dict[str, tuple[int, Callable[[nn.Sequential], Any]]] = {
    # number of microbatches, function that shards the model
    "plain": (1, lambda m: _shard(m, reshard_after_forward=True)),
    "mixed": (1, lambda m: _shard(m, mp_policy=MIXED)),
    "accumulated": (2, lambda m: _shard(m, mp_policy=MIXED)),
    "smaller group": (1, lambda m: _shard(m, mp_policy=MIXED, reshard_after_forward=2)),
    "kept after forward": (1, lambda m: _shard(m, mp_policy=BFLOAT16, reshard_after_forward=False)),
    "prefetched": (1, _shard_with_prefetch),
    "hsdp": (2, lambda m: _shard(m, mesh=_mesh_2d("replicate", "shard"), mp_policy=BFLOAT16)),
    "offload": (1, lambda m: _shard(m, offload_policy=CPUOffloadPolicy())),
    "memory from the group": (1, _shard_with_memory_from_group),
    "reduce hook": (1, _shard_with_all_reduce_hook),
    "replicate": (2, lambda m: replicate(m, mp_policy=MIXED, bucket_cap_mb=100 / 2**20)),
}


class DeviceTrainer(Trainer):
    """``Trainer`` that arms a fault in autograd's thread when backward begins."""

    backward_fault = 0
    """Number of the call of backward that fails, from 1. 0: none."""

    def __init__(self, parts: int, shard: Callable[[nn.Sequential], Any]) -> None:
        torch.manual_seed(0)
        self.rank = 0
        self.parts = parts
        self.user_fault = UserFault()
        self.model = shard(
            nn.Sequential(*(Block(self.user_fault) for _ in range(3)), nn.Linear(DIM, 3))
        )
        self.train_step(0)  # lazy init and first-use allocations
        self.model.zero_grad()
        self.start = [local(p) for p in self.model.parameters()]

    def train_step(self, step: int) -> list[float]:
        losses = []
        for part in range(self.parts):
            last = part == self.parts - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            loss = self.model(batch(self.rank, step, part)).float().square().mean()
            loss.register_hook(self._arm_fault)
            loss.backward()
            losses.append(loss.item())
        return losses

    def _arm_fault(self, gradient: torch.Tensor) -> None:
        _C._testing.fault_arm(self.backward_fault)

    def recover(self) -> None:
        self.backward_fault = 0
        super().recover()


class SweepResult(NamedTuple):
    failed_calls: int
    """Number of attempts in which a call failed."""
    errors: list[str]
    """Attempts with wrong bits or findings."""


def _make_arm(trainer: DeviceTrainer, place: str, n: int) -> Callable[[], None]:
    """Returns a function that makes the ``n``-th call at ``place`` of the next step fail."""

    def arm() -> None:
        if place == "forward":
            _C._testing.fault_arm(n)
        elif place == "backward":
            trainer.backward_fault = n
        else:
            trainer.user_fault.calls_left = n

    return arm


def sweep(variant: str, place: str) -> SweepResult:
    """Fails one call per attempt, in order, until a step ends before the call that should fail."""
    device = simulated.start()
    device.reset()
    trainer = DeviceTrainer(*VARIANTS[variant])
    expected, failure = trainer.run(lambda: None)
    errors = [] if failure is None else [f"a clean run fails: {failure}"]
    for failed_calls, n in enumerate(range(1, MAX_CALLS, 1 if place == "user" else STRIDE)):
        device.clear_findings()
        results, failure = trainer.run(_make_arm(trainer, place, n))
        trainer.backward_fault = 0
        if failure is None:
            return SweepResult(failed_calls, errors)
        if not same(results, expected):
            errors.append(f"call {n}: other bits than a clean run after {failure}")
        if device.findings():
            errors.append(f"call {n}: {device.findings()[0]} after {failure}")
    raise AssertionError(f"{variant}: a step has more than {MAX_CALLS} calls")


def run(rank: int, world_size: int) -> dict[str, SweepResult]:
    """Runs all sweeps in a rank."""
    warnings.simplefilter("ignore")
    sim_tools.init_loopback_group()
    simulated.use_kernels(True)
    return {
        f"{variant}, {place}": sweep(variant, place) for variant in VARIANTS for place in PLACES
    }
