"""Ranks of ``test_shm_collectives.py``: collectives over gloo and shared memory."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_param_group
import torch.nn as nn
from error_messages import error_message
from recorded_operators import RecordedOperators
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import fsdp_c
import fsdp_c._C as _C

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)

SEGMENT = 1 << 20
"""Bytes of gloo's largest segment. The order of additions changes at its end."""


def shard_sizes(seed: int) -> Iterator[int]:
    """Yields sizes of a rank shard: odd numbers, sizes around a segment, and random sizes."""
    yield from (1, 2, 3, 5, 7, 63, 64, 65, 1000, 4099)
    yield from (SEGMENT // 4 - 1, SEGMENT // 4, SEGMENT // 4 + 1, SEGMENT // 2 + 3)
    rng = random.Random(seed)
    for _ in range(6):
        yield int(2 ** rng.uniform(0, 19))


def dtypes_for(numel: int, world: int) -> tuple[torch.dtype, ...]:
    """Returns the dtypes to test with ``numel`` elements.

    Large shards on eight ranks take seconds. They use only dtypes in which the shard has about the
    size of a segment, or one dtype if there is none.
    """
    if world < 8 or numel < SEGMENT // 8:
        return DTYPES
    near = tuple(dtype for dtype in DTYPES if abs(numel * dtype.itemsize - SEGMENT) < 8)
    return near or DTYPES[:1]


def _reduce_ops(dtype: torch.dtype) -> list[dist.ReduceOp.RedOpType]:
    average = [dist.ReduceOp.AVG] if dtype.is_floating_point else []
    return [dist.ReduceOp.SUM, *average]


def _random(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (numel,), generator=generator).to(dtype)
    scale = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    values = (torch.randn(numel, generator=generator) * scale).to(dtype)
    return _with_specials(values, generator)


def _with_specials(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Replaces a quarter of the values by infinities, zeros, extreme numbers and NaNs."""
    info = torch.finfo(values.dtype)
    special = torch.tensor(
        [torch.inf, -torch.inf, 0.0, -0.0, info.max, info.min, info.tiny, info.tiny / 8]
        + 8 * [torch.nan],
        dtype=values.dtype,
    )
    bits = special.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    bits[9:] += torch.arange(1, 8, dtype=bits.dtype)  # NaN payloads
    bits[12:] |= torch.iinfo(bits.dtype).min  # the sign
    chosen = torch.randint(0, 4, values.shape, generator=generator) == 0
    which = torch.randint(0, len(special), values.shape, generator=generator)
    return torch.where(chosen, special[which], values)


def _sample(
    values: torch.Tensor, count: int, numel: int, generator: torch.Generator
) -> torch.Tensor:
    """Concatenates ``count`` random slices of ``values``. The values are made once for each dtype,
    because random numbers took most of the time."""
    starts = torch.randint(len(values) - numel + 1, (count,), generator=generator).tolist()
    return torch.cat([values[start : start + numel] for start in starts])


def _bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits, including those of NaNs."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _gather(group: dist.ProcessGroup, own: torch.Tensor) -> torch.Tensor:
    rank_shards = torch.full((own.numel() * dist.get_world_size(),), 77).to(own.dtype)
    getattr(group, "all_gather_single", group._allgather_base)(
        rank_shards, own, AllgatherOptions()
    ).wait()
    return rank_shards


def _reduce(
    group: dist.ProcessGroup, rank_shards: torch.Tensor, op: dist.ReduceOp.RedOpType
) -> torch.Tensor:
    own = torch.full((rank_shards.numel() // dist.get_world_size(),), 77).to(rank_shards.dtype)
    options = ReduceScatterOptions()
    options.reduceOp = op
    scatter = getattr(group, "reduce_scatter_single", group._reduce_scatter_base)
    scatter(own, rank_shards, options).wait()
    return own


def _all_reduce(
    group: dist.ProcessGroup, values: torch.Tensor, op: dist.ReduceOp.RedOpType
) -> torch.Tensor:
    values = values.clone()
    options = AllreduceOptions()
    options.reduceOp = op
    group.allreduce([values], options).wait()
    return values


def differences(rank: int, world: int) -> tuple[list[Any], int]:
    """Returns the settings whose bits differ, and the number of comparisons."""
    default = dist.group.WORLD
    assert default is not None
    direct = _C.shm_group(default)
    assert direct is not None and direct is not default
    assert _C.set_gradient_all_reduce(True) is False  # other all-reduces use gloo
    found: list[Any] = []
    comparisons = 0
    generator = torch.Generator().manual_seed(100 + rank)
    values_by_dtype = {dtype: _random(SEGMENT, dtype, generator) for dtype in DTYPES}
    for numel in shard_sizes(world):
        for dtype in dtypes_for(numel, world):
            own = _sample(values_by_dtype[dtype], 1, numel, generator)
            rank_shards = _sample(values_by_dtype[dtype], world, numel, generator)
            before = rank_shards.clone()
            comparisons += 1
            if not _bits_equal(_gather(default, own), _gather(direct, own)):
                found.append(("all-gather", numel, dtype))
            for op in _reduce_ops(dtype):
                for name, reduce, values in (
                    ("reduce-scatter", _reduce, rank_shards),
                    ("all-reduce", _all_reduce, own),
                ):
                    comparisons += 1
                    sums = [reduce(group, values, op) for group in (default, direct)]
                    if dtype == torch.bfloat16 and op == dist.ReduceOp.AVG:
                        # The NaN that a division writes depends on vector boundaries.
                        sums = [x.masked_fill(x.isnan(), torch.nan) for x in sums]
                    if not _bits_equal(*sums):
                        found.append((name, numel, dtype, op))
            if not _bits_equal(rank_shards, before):
                found.append(("input written", numel, dtype))
    return found, comparisons


def wait_in_reverse_order(rank: int, world: int) -> bool:
    """Issues twelve all-gathers and waits for them in reverse order, twice each."""
    group = _C.shm_group(dist.group.WORLD)
    gathered, works = [], []
    for i in range(12):
        rank_shards = torch.zeros(world * 1000)
        own = rank_shards.narrow(0, rank * 1000, 1000)
        own.fill_(100.0 * i + rank)
        works.append(group._allgather_base(rank_shards, own, AllgatherOptions()))
        gathered.append(rank_shards)
    for work in reversed(works):
        work.wait()
        work.wait()  # a second wait returns
    expected = torch.arange(world).repeat_interleave(1000)
    return all(
        torch.equal(rank_shards, expected + 100.0 * i) for i, rank_shards in enumerate(gathered)
    )


def sum_subnormal_numbers(rank: int, world: int) -> tuple[bool, bool]:
    """Returns whether sums over gloo and over shared memory keep subnormal numbers, if the rank
    calls ``set_flush_denormal`` after the creation of the groups."""
    groups = (dist.group.WORLD, _C.shm_group(dist.group.WORLD))
    rank_shards = torch.full((world * 64,), 1e-40)
    torch.set_flush_denormal(True)
    sums = [_reduce(group, rank_shards, dist.ReduceOp.SUM) for group in groups]
    torch.set_flush_denormal(False)
    over_gloo, over_shared_memory = (bool((values != 0).all()) for values in sums)
    return over_gloo, over_shared_memory


def wait_under_dispatch_mode(rank: int, world: int) -> tuple[list[str], list[float]]:
    """Returns the operators that a mode receives while this rank waits for an average, and the
    average."""
    group = _C.shm_group(dist.group.WORLD)
    own, rank_shards = torch.zeros(2), torch.arange(2.0 * world) + rank
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG
    scatter = getattr(group, "reduce_scatter_single", group._reduce_scatter_base)
    work = scatter(own, rank_shards, options)
    with RecordedOperators() as log:
        work.wait()
    return log.names, own.tolist()


def is_declined(rank: int, world: int, variable: str, value: str) -> bool:
    """Returns whether this rank has no direct group if the last rank sets ``variable``."""
    if rank == world - 1:
        os.environ[variable] = value
    return _C.shm_group(dist.group.WORLD) is None


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)))
    for block in model:
        fsdp_c.fully_shard(block)
    return fsdp_c.fully_shard(model)


def send_before_peers_gather(rank: int, world: int) -> bool:
    """Returns whether bits stay equal if rank 0 gathers all units and then sends a message, which
    its peers receive before their first gather."""
    model = _model()
    units = [model, *model]
    message = torch.zeros(1)
    if rank == 0:
        works = [unit.unshard(async_op=True) for unit in units]
        for peer in range(1, world):
            dist.send(message + peer, peer)
    else:
        dist.recv(message, 0)
        assert message.item() == rank
        works = [unit.unshard(async_op=True) for unit in units]
    for work, unit in zip(works, units, strict=True):
        work.wait()
        unit.reshard()
    ahead = _train(model, rank)
    assert _C.shm_group(dist.group.WORLD) is not None
    return all(map(torch.equal, ahead, _train(_model(), rank)))


def train_with_unequal_group_counts(rank: int, world: int) -> bool:
    """Returns whether bits stay equal if rank r has sharded r models that it never runs.

    The first gathers are issued without a wait, so gloo moves as many gathers as the rank with the
    most parameter groups has groups.
    """
    idle = [_model() for _ in range(rank)]
    model = _model()
    for unit in model:
        work = unit.unshard(async_op=True)
        work.wait()
        unit.reshard()
    first = _train(model, rank, 1 + world)  # the last steps are over shared memory
    assert _C.shm_group(dist.group.WORLD) is not None
    del idle
    return all(map(torch.equal, first, _train(_model(), rank, 1 + world)))


def _train(model: nn.Module, rank: int, steps: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(5, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def train_with_patched_rank(rank: int, world: int) -> tuple[bool, int]:
    """Returns whether bits stay equal if rank 0 patches torch's collectives, and their number of
    calls."""
    plain = _train(_model(), rank)
    calls = []
    gather, reduce = torch_param_group.foreach_all_gather, torch_param_group.foreach_reduce

    def record_group(group: Any) -> None:
        calls.append((dist.get_process_group_ranks(group), dist.get_backend(group)))

    def counting_gather(params: Any, group: Any, *rest: Any) -> Any:
        record_group(group)
        return gather(params, group, *rest)

    def counting_reduce(params: Any, gradients: Any, group: Any, *rest: Any) -> Any:
        record_group(group)
        return reduce(params, gradients, group, *rest)

    if rank == 0:
        torch_param_group.foreach_all_gather, torch_param_group.foreach_reduce = (
            counting_gather,
            counting_reduce,
        )
    try:
        patched = _train(_model(), rank)
    finally:
        torch_param_group.foreach_all_gather, torch_param_group.foreach_reduce = gather, reduce
    assert all(entry == (list(range(world)), "gloo") for entry in calls), calls
    return all(map(torch.equal, plain, patched)), len(calls)


def train_with_observed_rank(rank: int, world: int) -> tuple[bool, dict[str, int]]:
    """Returns whether bits stay equal if rank 0 counts ops and profiles, and its counts."""
    plain = _train(_model(), rank, 1)
    assert _C.shm_group(dist.group.WORLD) is not None  # the negotiation has ended
    counts: dict[str, int] = {}
    model = _model()
    if rank == 0:
        with CommDebugMode() as mode, profile(activities=[ProfilerActivity.CPU]) as profiler:
            observed = _train(model, rank, 1)
        counts = {str(op): n for op, n in mode.get_comm_counts().items()}
        names = [event.name for event in profiler.events()]
        counts |= {name: names.count(name) for name in ("gloo:all_gather", "gloo:reduce_scatter")}
        counts["messages"] = sum("send" in name or "recv" in name for name in names)
    else:
        observed = _train(model, rank, 1)
    return all(map(torch.equal, plain, observed)), counts


def train_with_both_transports(rank: int, world: int) -> tuple[list[str], bool]:
    """Returns the transports before and after calls of ``set_transport``, and whether training with
    both has the bits of training over shared memory."""

    def transport() -> str:
        return "gloo" if _C.shm_group(group) is None else "direct"

    model = _model()
    group = dist.group.WORLD
    assert group is not None
    direct = _train(model, rank, 3)
    transports = [transport()]
    model = _model()
    _train(model, rank, 1)
    fsdp_c.set_transport(model, "gloo")
    transports.append(transport())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        fsdp_c.set_transport(model, "direct" if step == 2 else "gloo")
        torch.manual_seed(10 * step + rank)
        model(torch.randn(5, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mixed = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    transports.append(transport())
    return transports, all(map(torch.equal, direct, mixed))


def _shard_over(model: nn.Module, **dims: int) -> nn.Module:
    """Shards the model over a mesh of ``dims``, whose last dimension may be ``tp``."""
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    if "tp" in dims:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fsdp_c.fully_shard(model, mesh=mesh[tuple(dim for dim in dims if dim != "tp")])


def _replicate_over(model: nn.Module, *sizes: int) -> nn.Module:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "one")[: len(sizes)])
    return fsdp_c.replicate(model, mesh=mesh)


LAYOUTS: dict[str, tuple[Callable[[nn.Module], nn.Module], list[str]]] = {
    "replicate": (fsdp_c.replicate, ["replicate"]),
    "replicate over a mesh": (lambda m: _replicate_over(m, 4), ["replicate"]),
    "replicate over a 2-D mesh": (lambda m: _replicate_over(m, 4, 1), ["replicate"]),
    "HSDP": (lambda m: _shard_over(m, replicate=2, shard=2), ["shard", "replicate"]),
    "HSDP and TP": (lambda m: _shard_over(m, replicate=2, shard=1, tp=2), ["replicate"]),
    "smaller post-forward mesh": (
        lambda m: fsdp_c.fully_shard(m, reshard_after_forward=2),
        ["shard", "post-forward"],
    ),
}
"""Functions that shard a model over four ranks, and the process groups of its collectives."""


def _use_shared_memory(model: Any, names: list[str]) -> list[bool]:
    [unit] = model._get_fsdp_state()._fsdp_param_groups
    info, smaller = unit.mesh_info, unit.post_forward_mesh_info
    groups = {
        "shard": getattr(info, "shard_process_group", None),
        "replicate": getattr(info, "replicate_process_group", None),
        "post-forward": getattr(smaller, "shard_process_group", None),
    }
    return [_C.shm_group(groups[name]) is not None for name in names]


def switch_transports(rank: int, world: int) -> dict[str, tuple[list[bool], ...]]:
    """Returns which groups of a layout use shared memory: at first, after ``set_transport(model,
    "gloo")``, and after ``set_transport(model, "direct")``."""
    results = {}
    for layout, (shard, names) in LAYOUTS.items():
        model = shard(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
        uses = [_use_shared_memory(model, names)]
        for transport in ("gloo", "direct"):
            fsdp_c.set_transport(model, transport)
            model(torch.ones(2, 32)).sum().backward()
            uses.append(_use_shared_memory(model, names))
        results[layout] = tuple(uses)
    return results


def _step(model: nn.Module) -> None:
    model(torch.ones(5, 33)).square().mean().backward()


def wait_with_shorter_timeout(rank: int, world: int) -> str:
    """Sets a timeout of 0.5 s after the negotiation. Returns the error of a late step."""
    model = _model()
    _train(model, rank)
    assert _C.shm_group(dist.group.WORLD) is not None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
    failure = error_message(lambda: _step(model))
    store.set("given up", "")
    return failure


def evaluate_on_one_rank(rank: int, world: int) -> str:
    """Returns the error of a step in which rank 0 runs an extra forward."""
    model = _model()
    _train(model, rank)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)

    def step() -> None:
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(5, 33))
        _step(model)

    return error_message(step)
