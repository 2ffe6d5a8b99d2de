"""Training in which every parameter is a piece of its own, beside training with whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c._C as _C
from fsdp_c import MixedPrecisionPolicy, fully_shard

NEVER = 1 << 60


class Uneven(nn.Module):
    """Parameters that divide evenly, that do not, that are smaller than the world, and that are not
    used."""

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


def _step(model: nn.Module, step: int, batch: torch.dtype = torch.float32) -> None:
    torch.manual_seed(100 * step + dist.get_rank())
    model(torch.randn(4, 24, dtype=batch)).float().square().mean().backward()


def _train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Gradients of all steps, then the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        _step(model, step)
        seen += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.to_local().detach().clone() for p in model.parameters())]


def _bf16() -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


def _half() -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}


def _hybrid() -> dict[str, Any]:
    world = dist.get_world_size()
    return {"mesh": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s"))}


def _accumulate(model: nn.Module) -> list[torch.Tensor]:
    model.set_requires_gradient_sync(False)
    _step(model, 7)
    model.set_requires_gradient_sync(True)
    return _train(model)


def _scaled(model: nn.Module) -> list[torch.Tensor]:
    model.set_gradient_divide_factor(3.0)
    return _train(model)


def _kept(model: nn.Module) -> list[torch.Tensor]:
    """Gradients that somebody holds while they are reduced (test_reduce.c writes to them)."""
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
    "accumulated": (dict, _accumulate),
    "divided by another number": (dict, _scaled),
    "divided by another number, half": (_half, _scaled),
    "held": (dict, _kept),
}
ON_FOUR: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[nn.Module], list[Any]]]] = {
    "hybrid": (_hybrid, _train),
    "hybrid, bf16": (lambda: {**_hybrid(), **_bf16()}, _train),
    "smaller mesh after forward": (lambda: {"reshard_after_forward": 2}, _train),
}


def differences(rank: int, world: int) -> list[str]:
    """Settings whose bits change with the pieces."""
    found = []
    for name, (options, train) in (SETTINGS | (ON_FOUR if world == 4 else {})).items():
        results = []
        for pieces_from in (NEVER, 1):
            _C._testing.chunks_from(pieces_from)
            results.append(train(_model(**options())))
        whole, cut = results
        if len(whole) != len(cut) or not all(map(torch.equal, whole, cut)):
            found.append(name)
    return found


class Look(TorchDispatchMode):
    """What a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def watched_on_one_rank(rank: int, world: int) -> list[bool]:
    """Whether bits stay where one rank counts, profiles, has no kernels, or keeps addresses."""
    _C._testing.chunks_from(1)
    plain = _train(_model())
    same = []
    for how in ("counts", "profiles", "without kernels", "patched"):
        model = _model()
        if rank != 0:
            watched = _train(model)
        elif how == "counts":
            with Look() as look:
                watched = _train(model)
            assert {"c10d._allgather_base_", "c10d._reduce_scatter_base_"} <= look.seen
        elif how == "profiles":
            with profile(activities=[ProfilerActivity.CPU]):
                watched = _train(model)
        elif how == "without kernels":
            _C._testing.hide_kernels(True)
            watched = _train(model)
            _C._testing.hide_kernels(False)
        else:
            watched = _patched(model)
        same.append(all(map(torch.equal, plain, watched)))
    return same


def gathered_inside_of_a_gather(rank: int, world: int) -> bool:
    """Whether a unit has its bits where one rank's patch gathers another unit in the middle."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as stock

    _C._testing.chunks_from(1)
    unit, other = _model()[0], _model(seed=1)[0]
    expected = [p.full_tensor() for p in unit.parameters()]
    gather = stock.foreach_all_gather

    def patched(*given: Any) -> Any:
        stock.foreach_all_gather = gather
        other.unshard()
        return gather(*given)

    if rank == 0:
        stock.foreach_all_gather = patched
    else:
        other.unshard()
    try:
        unit.unshard()
    finally:
        stock.foreach_all_gather = gather
    return all(map(torch.equal, expected, unit.parameters()))


def _patched(model: nn.Module) -> list[torch.Tensor]:
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as stock

    gather, reduce = stock.foreach_all_gather, stock.foreach_reduce
    stock.foreach_all_gather = lambda *given: gather(*given)
    stock.foreach_reduce = lambda *given: reduce(*given)
    try:
        return _train(model)
    finally:
        stock.foreach_all_gather, stock.foreach_reduce = gather, reduce
