"""Steps in which one call fails, on the simulated device: streams and memory must recover.

Each attempt is that of sweep.py: a clean step, a step with the failure, ``reset_iter_state()``, the
step again and one more. Faults are armed for a thread: those of backward are armed by a hook, in
the device's thread. Bits must be those of a clean run, and nothing may race, not the recovery
either.
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
from sweep import DIM, Block, Bomb, Trainer, batch, local, same
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_c import _C, fully_shard, replicate

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
PLACES = ("forward", "backward", "user")
STRIDE = 1 if os.environ.get("FSDP_C_ACCELERATOR_WHOLE", "0") != "0" else 3
"""Of the calls of a step every so many fails; of the user's all do."""
MOST = 4000
"""Calls of a step: nothing fails behind them."""


def _shard(model: nn.Sequential, **options: Any) -> Any:
    for block in list(model)[:3]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _hooked(model: nn.Sequential) -> Any:
    _shard(model, mp_policy=HALF)
    for unit in (*list(model)[:3], model):
        unit.set_all_reduce_hook(lambda row: row.mul_(0.5))
    return model


def _from_the_group(model: nn.Sequential) -> Any:
    _shard(model, mp_policy=MIXED)
    for unit in (*list(model)[:3], model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return model


def _prefetched(model: nn.Sequential) -> Any:
    _shard(model, mp_policy=MIXED)
    for now, then in itertools.pairwise(list(model)[:3]):
        now.set_modules_to_forward_prefetch([then])
    return model


def _grid(*names: str) -> Any:
    return sim_tools._mesh((2, sim_tools.WORLD // 2), names)


VARIANTS: dict[str, tuple[int, Callable[[nn.Sequential], Any]]] = {
    # microbatches, and how the model is sharded
    "plain": (1, lambda m: _shard(m, reshard_after_forward=True)),
    "mixed": (1, lambda m: _shard(m, mp_policy=MIXED)),
    "accumulated": (2, lambda m: _shard(m, mp_policy=MIXED)),
    "smaller group": (1, lambda m: _shard(m, mp_policy=MIXED, reshard_after_forward=2)),
    "kept after forward": (1, lambda m: _shard(m, mp_policy=HALF, reshard_after_forward=False)),
    "prefetched": (1, _prefetched),
    "hsdp": (2, lambda m: _shard(m, mesh=_grid("replicate", "shard"), mp_policy=HALF)),
    "offload": (1, lambda m: _shard(m, offload_policy=CPUOffloadPolicy())),
    "memory from the group": (1, _from_the_group),
    "reduce hook": (1, _hooked),
    "replicate": (2, lambda m: replicate(m, mp_policy=MIXED, bucket_cap_mb=100 / 2**20)),
}


class DeviceTrainer(Trainer):
    """Arms faults in backward's thread, too."""

    armed = 0

    def __init__(self, parts: int, shard: Callable[[nn.Sequential], Any]) -> None:
        torch.manual_seed(0)
        self.rank = 0
        self.parts = parts
        self.bomb = Bomb()
        self.model = shard(nn.Sequential(*(Block(self.bomb) for _ in range(3)), nn.Linear(DIM, 3)))
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
            loss.register_hook(self._arm)
            loss.backward()
            losses.append(loss.item())
        return losses

    def _arm(self, gradient: torch.Tensor) -> None:
        _C._testing.fault_arm(self.armed)

    def recover(self) -> None:
        self.armed = 0
        super().recover()


class Sweep(NamedTuple):
    points: int
    wrong: list[str]


def _armer(trainer: DeviceTrainer, place: str, n: int) -> Callable[[], None]:
    def arm() -> None:
        if place == "forward":
            _C._testing.fault_arm(n)
        elif place == "backward":
            trainer.armed = n
        else:
            trainer.bomb.left = n

    return arm


def sweep(variant: str, place: str) -> Sweep:
    """Fails at point after point."""
    device = simulated.start()
    device.forget()
    trainer = DeviceTrainer(*VARIANTS[variant])
    expected, failure = trainer.run(lambda: None)
    wrong = [] if failure is None else [f"a clean run fails: {failure}"]
    for points, n in enumerate(range(1, MOST, 1 if place == "user" else STRIDE)):
        device.clear_findings()
        results, failure = trainer.run(_armer(trainer, place, n))
        trainer.armed = 0
        if failure is None:
            return Sweep(points, wrong)
        if not same(results, expected):
            wrong.append(f"{n}: other bits after {failure}")
        if device.findings():
            wrong.append(f"{n}: {device.findings()[0]} after {failure}")
    raise AssertionError("a step has no end")


def run(rank: int, world_size: int) -> dict[str, Sweep]:
    """All sweeps."""
    warnings.simplefilter("ignore")
    sim_tools.join_loop_group()
    simulated.use_kernels(True)
    return {
        f"{variant}, {place}": sweep(variant, place) for variant in VARIANTS for place in PLACES
    }
