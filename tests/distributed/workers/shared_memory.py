"""Ranks of one host exchange rows in shared memory: what is moved, who falls back, what ends.

Run by ``test_shared_memory.py`` on gloo ranks. What several ranks do on a group of their own is
compared with the same by gloo's collectives.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as stock
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import fsdp_c

Tensors = list[torch.Tensor]


def boards() -> int:
    """Ranks whose board this process has mapped: with a group's last, all of them or none."""
    with open("/proc/self/maps") as maps:
        return sum("fsdp_c ring" in line for line in maps)


def descriptors() -> int:
    """Of boards, open here."""
    with os.scandir("/proc/self/fd") as entries:
        return sum("fsdp_c ring" in os.readlink(e.path) for e in entries if e.is_symlink())


def chain(widths: list[int]) -> nn.Sequential:
    torch.manual_seed(0)
    linears = (nn.Linear(*pair) for pair in itertools.pairwise(widths))
    return nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in linears))


def model_of(group: dist.ProcessGroup, widths: list[int]) -> nn.Sequential:
    model = chain(widths)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model:
        fsdp_c.fully_shard(block, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh)


def train(model: nn.Sequential, steps: int) -> Tensors:
    """Losses, gradients, and the weights in the end: this rank's shards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: Tensors = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        loss = model(torch.randn(3, model[0][0].in_features, generator=generator)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.to_local().detach().clone() for p in model.parameters())]


def same(a: Tensors, b: Tensors) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def new_group() -> dist.ProcessGroup:
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    return group


@contextlib.contextmanager
def by_gloo() -> Iterator[None]:
    """For groups whose ranks agree meanwhile."""
    os.environ["FSDP_C_TRANSPORT"] = "gloo"
    try:
        yield
    finally:
        del os.environ["FSDP_C_TRANSPORT"]


@contextlib.contextmanager
def by_torchs_functions() -> Iterator[None]:
    """Which move this rank's rows, as somebody has patched them."""
    gather, reduce = stock.foreach_all_gather, stock.foreach_reduce
    with (
        mock.patch.object(stock, "foreach_all_gather", lambda *args: gather(*args)),
        mock.patch.object(stock, "foreach_reduce", lambda *args: reduce(*args)),
    ):
        yield


# ---- what is moved ----


def small(group: dist.ProcessGroup) -> Tensors:
    return train(model_of(group, [33] * 5), 4)


def more_units_than_a_board_has_letters(group: dist.ProcessGroup) -> Tensors:
    return _in_flight(model_of(group, [40] * 72))


def larger_than_a_board(group: dist.ProcessGroup) -> Tensors:
    return train(model_of(group, [8, 2600, 2600, 8]), 3)


def large_in_flight(group: dist.ProcessGroup) -> Tensors:
    return _in_flight(model_of(group, [700] * 8))


def _in_flight(model: nn.Sequential) -> Tensors:
    """All units are gathered at once, and waited for in the other order."""
    seen = train(model, 2)
    handles = [unit.unshard(async_op=True) for unit in model]
    for handle in reversed(handles):
        handle.wait()
    seen += [p.detach().clone() for p in model.parameters()]
    for unit in model:
        unit.reshard()
    return seen + train(model, 1)


def observed_on_one_rank(group: dist.ProcessGroup) -> Tensors:
    """One rank has rows in one piece, where a mode or a profiler watches, and the others have not:
    large matrices are pieces of their own."""
    model = model_of(group, [300] * 4)
    seen = train(model, 2)
    watching = contextlib.ExitStack()
    if dist.get_rank() == 0:
        watching.enter_context(CommDebugMode())
        watching.enter_context(profile(activities=[ProfilerActivity.CPU]))
    with watching:
        seen += train(model, 1)
    return seen + train(model, 1)


def _replicas(
    group: dist.ProcessGroup,
    widths: list[int],
    cap: float,
    dtype: torch.dtype | None = None,
    late: float = 0,
) -> Tensors:
    """Of a model whose gradients are all-reduced, and of what is said of the user's own."""
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model = fsdp_c.replicate(chain(widths), mesh=mesh, mp_policy=policy, bucket_cap_mb=cap)
    model.register_forward_hook(lambda *_: time.sleep(late * dist.get_rank()))
    seen = train(model, 8)
    own = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(own, group=group)
    return [*seen, own]


def all_reduced_in_one_message(group: dist.ProcessGroup) -> Tensors:
    return _replicas(group, [3, 5], 25) + _replicas(group, [33] * 4, 25, torch.bfloat16)


def all_reduced_in_parts(group: dist.ProcessGroup) -> Tensors:
    return _replicas(group, [8, 1301, 1300, 3], 25) + _replicas(group, [500] * 4, 25, torch.float64)


def all_reduced_in_buckets(group: dist.ProcessGroup) -> Tensors:
    return _replicas(group, [701] * 5, 0.5) + _replicas(group, [400] * 5, 0.3, torch.float16)


def all_reduced_with_late_ranks(group: dist.ProcessGroup) -> Tensors:
    """Who comes late writes much at once, which the others could read that still wait for room."""
    return _replicas(group, [8, 2100, 2100, 3], 25, late=0.05)


def all_reduced_by_torch_on_one_rank(group: dist.ProcessGroup) -> Tensors:
    """Somebody has patched a function there, so that torch's own move the rows. The hook's
    all-reduces are the user's on all ranks."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = fsdp_c.replicate(chain([33] * 4), mesh=mesh)
    heard: Tensors = []

    def hook(row: torch.Tensor) -> None:
        heard.append(row.sum())
        dist.all_reduce(heard[-1], group=group)

    model.set_all_reduce_hook(hook)
    seen = train(model, 4)
    patched = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    with patched if dist.get_rank() == 0 else contextlib.nullcontext():
        seen += train(model, 3)
    return [*seen, *train(model, 2), *heard]


def clipped(group: dist.ProcessGroup) -> Tensors:
    model = model_of(group, [33] * 5)
    seen = train(model, 3)
    for step in range(3):
        model(torch.full((2, 33), step + 1.0)).square().mean().backward()
        seen.append(fsdp_c.clip_grad_norm_(model, 0.01))
        seen += [p.grad.to_local().clone() for p in model.parameters()]
    return seen


MOVED = (
    all_reduced_in_one_message,
    all_reduced_in_parts,
    all_reduced_in_buckets,
    all_reduced_with_late_ranks,
    all_reduced_by_torch_on_one_rank,
    clipped,
    small,
    more_units_than_a_board_has_letters,
    larger_than_a_board,
    large_in_flight,
    observed_on_one_rank,
)


def moved(rank: int, world: int) -> dict[str, tuple[int, bool]]:
    """By case: how many boards it had mapped, and whether its bits are gloo's."""
    found = {}
    for case in MOVED:
        group = new_group()
        seen = case(group)
        mapped = boards()
        dist.destroy_process_group(group)
        with by_gloo():
            expected = case(new_group())
        assert boards() == 0
        found[case.__name__] = mapped, same(seen, expected)
    return found


def hybrid(rank: int, world: int) -> tuple[int, bool]:
    """The same of shards in replicas, whose gradients are reduced over two groups."""

    def trained() -> Tensors:
        model = chain([8, 1100, 1100, 3])
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        for block in model:
            fsdp_c.fully_shard(block, mesh=mesh)
        model = fsdp_c.fully_shard(model, mesh=mesh)
        seen = train(model, 4)
        model.set_requires_all_reduce(False)
        model(torch.full((2, 8), dist.get_rank() + 1.0)).square().mean().backward()
        model.set_requires_all_reduce(True)
        return seen + train(model, 2)

    seen = trained()
    mapped = boards()
    with by_gloo():
        return mapped, same(seen, trained())


# ---- who falls back ----


@contextlib.contextmanager
def lowered(limit: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def no_files_so_large() -> contextlib.AbstractContextManager[None]:
    return lowered(resource.RLIMIT_FSIZE, 1 << 20)


@contextlib.contextmanager
def one_descriptor_left() -> Iterator[None]:
    """Enough for this rank's board, and not for those of the others."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = []
    with lowered(resource.RLIMIT_NOFILE, highest + 2):
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        os.close(held.pop())
        try:
            yield
        finally:
            for descriptor in held:
                os.close(descriptor)


OBSTACLES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "nothing": contextlib.nullcontext,
    "gloo is chosen": by_gloo,
    "no memory": no_files_so_large,
    "no way to the others": one_descriptor_left,
}


def hindered(rank: int, world: int) -> dict[str, tuple[int, bool]]:
    """The same, where something is in the way of the last rank alone."""
    with by_gloo():
        expected = small(new_group())
    found = {}
    for name, obstacle in OBSTACLES.items():
        group = new_group()
        with obstacle() if rank == world - 1 else contextlib.nullcontext():
            seen = small(group)
        found[name] = boards(), same(seen, expected)
        dist.destroy_process_group(group)
    return found


def forked(rank: int, world: int) -> tuple[list[str], bool]:
    """What a child of fork() is told that trains, in its parent's place; and whether its parent
    trains on as if there had been none."""
    model, other = model_of(dist.group.WORLD, [33] * 4), model_of(new_group(), [33] * 4)
    assert same(train(model, 3), train(other, 3)) and boards() == 2 * world
    told = []
    for act in (lambda: train(model, 1), dist.destroy_process_group):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, failure(act).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as text:
            told.append(text.read())
    return told, same(train(model, 2), train(other, 2))


# ---- reductions that are waited for ----


def _at_gradient(module: nn.Module, run: Callable[[], None]) -> None:
    """When backward has the gradient of the module's input, in every step."""

    def watch(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        inputs[0].register_hook(lambda gradient: run())

    module.register_forward_pre_hook(watch)


def overlapping(rank: int, world: int) -> dict[str, bool]:
    """By ``overlap`` and width: whether rank 0 computes gradients of the first unit while the last
    one's are reduced, for which rank 1 is late. There is one processor."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store = dist.distributed_c10d._get_default_store()
    found = {}
    for overlap, width in itertools.product((None, True, False), (500, 1100)):
        key = f"{overlap} {width}"
        overlaps = overlap or (overlap is None and width == 500)
        group = new_group()
        first, last = model = model_of(group, [width] * 3)
        train(model, 3)
        assert boards() == world
        fsdp_c.set_reduction_overlap(model, overlap)
        if rank == 0:

            def look(key: str = key, last: nn.Module = last) -> None:
                found[key] = last[0].weight.grad is None
                store.set(key, "seen")

            _at_gradient(first[1], look)
        else:
            late = partial(store.wait, [key]) if overlaps else partial(time.sleep, 0.2)
            _at_gradient(last[0], late)
        train(model, 1)
        dist.destroy_process_group(group)
    return found


def _in_turns(model: nn.Sequential, watchers: list[Any]) -> Tensors:
    """A step within each of them."""
    seen: Tensors = []
    for watcher in watchers:
        with watcher():
            seen += train(model, 1)
    return seen


def prefetching(rank: int, world: int) -> dict[int, tuple[list[bool], bool]]:
    """By width: whether the first unit's gather is in flight when the last unit's gradients have
    come, in each step; and whether bits are gloo's. The last rank has more processors,
    where there are more; torch's functions move its rows in some steps, and it counts ops in one.
    """
    if rank < world - 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    unseen, patched = contextlib.nullcontext, by_torchs_functions
    plain = [unseen] * 5
    watched = [patched, patched, patched, CommDebugMode, unseen]
    found = {}
    for width in (500, 1500):
        with by_gloo():
            expected = _in_turns(model_of(new_group(), [width] * 3), plain)
        first, last = model = model_of(new_group(), [width] * 3)
        group = first._get_fsdp_state()._fsdp_param_group
        ahead: list[bool] = []
        _at_gradient(last[0], lambda g=group, s=ahead: s.append(g._all_gather_result is not None))
        seen = _in_turns(model, watched if rank == world - 1 else plain)
        assert boards() == world
        found[width] = ahead[2:], same(seen, expected)
        dist.destroy_process_group(group.mesh_info.shard_process_group)
    return found


def ahead(rank: int, world: int) -> int:
    """Steps in which rank 0 computed the first layer's gradients before rank 1 began its backward:
    in buckets of 4 kB, two of which were issued then."""
    store = dist.distributed_c10d._get_default_store()
    mesh = DeviceMesh.from_group(new_group(), "cpu")
    model = fsdp_c.replicate(chain([32] * 4), mesh=mesh, bucket_cap_mb=1 / 256)
    steps = 0
    if rank == 0:
        _at_gradient(model[0][1], lambda: store.set(f"step {steps}", ""))
    else:
        model.register_forward_hook(lambda *_: store.wait([f"step {steps}"]))
    while steps < 8:
        train(model, 1)
        steps += 1
    return steps


# ---- what ends ----


def failure(run: Callable[[], object]) -> str:
    """What a call said that failed."""
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


def _sizes_differ(group: dist.ProcessGroup) -> Callable[[], object]:
    other = model_of(group, [40 + 4 * dist.get_rank()] * 4)
    return lambda: train(other, 1)


def _lengths_differ(group: dist.ProcessGroup) -> Callable[[], object]:
    """Two rows of one message, and one row of two: messages of a mebibyte on either rank."""
    width = 511 if dist.get_rank() == 0 else 1023
    model = model_of(group, [width, 1024])
    x = torch.ones(1, width)

    @torch.no_grad()
    def run() -> None:
        for _ in range(1024 // (width + 1)):
            model(x)

    return run


def _one_has_replicas(group: dist.ProcessGroup) -> Callable[[], object]:
    """One reduce-scatters the gradients that the other one all-reduces."""
    if dist.get_rank() == 0:
        model = model_of(group, [33] * 2)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        model = fsdp_c.replicate(chain([33] * 2), mesh=mesh)
    return lambda: train(model, 1)


def _one_evaluates(group: dist.ProcessGroup) -> Callable[[], object]:
    model = model_of(group, [33] * 4)

    def run() -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(1, 33))
        train(model, 2)

    return run


def _one_ends_the_group(group: dist.ProcessGroup) -> Callable[[], object]:
    model = model_of(group, [33] * 4)
    train(model, 1)

    def run() -> None:
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)
        else:
            train(model, 1)

    return run


FAILING = (_sizes_differ, _lengths_differ, _one_has_replicas, _one_evaluates, _one_ends_the_group)


def failing(rank: int, world: int) -> dict[str, str]:
    """What ranks are told that do not do the same: nobody waits for a time limit."""
    found = {}
    for case in FAILING:
        group = new_group()
        train(model_of(group, [33] * 4), 3)
        found[case.__name__] = failure(case(group))
        dist.barrier()
    return found


def killed(rank: int, world: int) -> None:
    """The last rank is killed in its step, which the others' waits end with."""
    model = model_of(dist.group.WORLD, [33] * 4)
    train(model, 3)
    assert boards() == world

    def die(*unused: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == world - 1:
        model[1].register_forward_pre_hook(die)
    train(model, 1)


def stopped(rank: int, world: int) -> bool:
    """Whether all goes on when a rank that was stopped does."""
    model = model_of(dist.group.WORLD, [33] * 4)
    with by_gloo():
        other = model_of(new_group(), [33] * 4)
        expected = [*train(other, 3), *train(other, 3)]
    seen = train(model, 3)
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, os.getpid())
    if rank != 0:
        return same([*seen, *train(model, 3)], expected)

    def let_go() -> None:
        time.sleep(0.3)
        os.kill(processes[1], signal.SIGCONT)

    os.kill(processes[1], signal.SIGSTOP)
    thread = threading.Thread(target=let_go)
    thread.start()
    seen += train(model, 3)
    thread.join()
    return same(seen, expected)


def groups_come_and_go(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Boards and their descriptors after a group's end, by what is kept of what used it."""
    found = {}
    for kept in ("nothing", "the model", "the group", "nothing, a gather under way"):
        group = new_group()
        model = model_of(group, [33] * 4)
        train(model, 3)
        assert boards() == descriptors() == world
        keeps: list[Any] = {"the model": [model], "the group": [group]}.get(kept, [])
        if kept == "nothing, a gather under way":
            model[0].unshard(async_op=True)
        del model
        gc.collect()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        found[kept] = boards(), descriptors()
        keeps.clear()
    return found


def main() -> None:
    """A script that ends without a word to its group, a gather under way."""
    dist.init_process_group("gloo")
    model = model_of(dist.group.WORLD, [700] * 4)
    train(model, 3)
    model.handles = [unit.unshard(async_op=True) for unit in model]  # type: ignore[assignment]
    print(boards())


if __name__ == "__main__":
    main()
