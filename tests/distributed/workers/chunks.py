"""Ranks of ``test_chunks.py``: training with one chunk per parameter and with packed buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from recorded_operators import RecordedOperators
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fsdp_c._C as _C
from fsdp_c import MixedPrecisionPolicy, fully_shard

NEVER = 1 << 60


class Uneven(nn.Module):
    """Parameters that divide evenly and unevenly, one smaller than the world, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(24, 24)
        self.odd = nn.Linear(24, 5)
        self.back = nn.Linear(5, 24, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.spare = nn.Parameter(torch.ones(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.odd(self.even(x).tanh()).tanh()) * self.scale


def _model(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Uneven() for _ in range(3)), nn.Linear(24, 3))
    for block in list(model)[:3]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _step(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 24)).float().square().mean().backward()


def _train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Returns the gradient shards of all steps, then the parameter shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensors = []
    for step in range(steps):
        _step(model, step)
        tensors += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*tensors, *(p.to_local().detach().clone() for p in model.parameters())]


def _bf16() -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def _half() -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}


def _hybrid() -> dict[str, Any]:
    world = dist.get_world_size()
    return {"mesh": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s"))}


def _train_with_accumulation(model: nn.Module) -> list[torch.Tensor]:
    model.set_requires_gradient_sync(False)
    _step(model, 7)
    model.set_requires_gradient_sync(True)
    return _train(model)


def _train_with_divide_factor(model: nn.Module) -> list[torch.Tensor]:
    model.set_gradient_divide_factor(3.0)
    return _train(model)


def _train_with_held_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Holds references to gradients while they are reduced (test_reduce.c writes to them)."""
    held: list[torch.Tensor] = []
    for unit in list(model)[:3]:
        unit.unshard()
        for parameter in unit.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: held.append(p.grad))
        unit.reshard()
    return _train(model) + held


SETTINGS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[nn.Module], list[Any]]]] = {
    "plain": (dict, _train),
    "bf16": (_bf16, _train),
    "half": (_half, _train),
    "kept in backward": (lambda: {"reshard_after_forward": False}, _train),
    "accumulated": (dict, _train_with_accumulation),
    "divided by another number": (dict, _train_with_divide_factor),
    "divided by another number, half": (_half, _train_with_divide_factor),
    "held": (dict, _train_with_held_gradients),
}
FOUR_RANK_SETTINGS: dict[
    str, tuple[Callable[[], dict[str, Any]], Callable[[nn.Module], list[Any]]]
] = {
    "hybrid": (_hybrid, _train),
    "hybrid, bf16": (lambda: {**_hybrid(), **_bf16()}, _train),
    "smaller mesh after forward": (lambda: {"reshard_after_forward": 2}, _train),
}


def differences(rank: int, world: int) -> list[str]:
    """Returns the settings whose bits differ between chunks and packed buffers."""
    found = []
    for name, (options, train) in (SETTINGS | (FOUR_RANK_SETTINGS if world == 4 else {})).items():
        results = []
        for min_bytes in (NEVER, 1):
            _C._testing.set_min_owned_chunk_bytes(min_bytes)
            results.append(train(_model(**options())))
        packed, split = results
        if len(packed) != len(split) or not all(map(torch.equal, packed, split)):
            found.append(name)
    return found


def count_buffers(rank: int, world: int) -> list[int]:
    """Returns the numbers of large buffers that a step with packed buffers and one with chunks
    take from the pool of CPU buffers."""
    counts = []
    for min_bytes in (NEVER, 1):
        _C._testing.set_min_owned_chunk_bytes(min_bytes)
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):  # the first step takes other buffers
            before = _C.memory()["taken"]
            model(torch.ones(2, 300)).sum().backward()
        counts.append(_C.memory()["taken"] - before)
    return counts


SPECIAL_SETTINGS = ("dispatch mode", "profiler", "without kernels", "patched")
"""Settings in which a rank uses packed buffers."""


def train_with_special_rank(rank: int, world: int) -> dict[str, bool]:
    """Returns, by the setting of rank 0, whether bits stay equal."""
    _C._testing.set_min_owned_chunk_bytes(1)
    plain = _train(_model())
    equal = {}
    for setting in SPECIAL_SETTINGS:
        model = _model()
        if rank != 0:
            special = _train(model)
        elif setting == "dispatch mode":
            with RecordedOperators() as recorder:
                special = _train(model)
            assert {"_allgather_base_", "_reduce_scatter_base_"} <= set(recorder.collectives())
        elif setting == "profiler":
            with profile(activities=[ProfilerActivity.CPU]):
                special = _train(model)
        elif setting == "without kernels":
            _C._testing.hide_kernels(True)
            try:
                special = _train(model)
            finally:
                _C._testing.hide_kernels(False)
        else:
            special = _train_with_patched_torch(model)
        equal[setting] = len(plain) == len(special) and all(map(torch.equal, plain, special))
    return equal


def unshard_inside_a_gather(rank: int, world: int) -> bool:
    """Returns whether a unit has the right bits if a patch on rank 0 unshards another unit during
    the unit's gather."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_param_group

    _C._testing.set_min_owned_chunk_bytes(1)
    unit, other = _model()[0], _model(seed=1)[0]
    expected = [p.full_tensor() for p in unit.parameters()]
    gather = torch_param_group.foreach_all_gather

    def patched(*args: Any) -> Any:
        torch_param_group.foreach_all_gather = gather
        other.unshard()
        return gather(*args)

    if rank == 0:
        torch_param_group.foreach_all_gather = patched
    else:
        other.unshard()
    try:
        unit.unshard()
    finally:
        torch_param_group.foreach_all_gather = gather
    return all(map(torch.equal, expected, unit.parameters()))


def _train_with_patched_torch(model: nn.Module) -> list[torch.Tensor]:
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_param_group

    gather, reduce = torch_param_group.foreach_all_gather, torch_param_group.foreach_reduce
    torch_param_group.foreach_all_gather = lambda *args: gather(*args)
    torch_param_group.foreach_reduce = lambda *args: reduce(*args)
    try:
        return _train(model)
    finally:
        torch_param_group.foreach_all_gather, torch_param_group.foreach_reduce = gather, reduce
