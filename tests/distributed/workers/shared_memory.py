"""Ranks of ``test_shared_memory.py``: collectives, fallback, errors, and the end of groups.

Each case runs on a new process group over shared memory, and again over gloo, and compares bits.
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
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_param_group
import torch.nn as nn
from error_messages import error_message
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import fsdp_c

Tensors = list[torch.Tensor]


def mapped_rings() -> int:
    """Returns the number of rings that this process has mapped: one per rank and group, or 0."""
    with open("/proc/self/maps") as maps:
        return sum("fsdp_c ring" in line for line in maps)


def open_ring_descriptors() -> int:
    """Returns the number of open descriptors of rings in this process."""
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
    """Returns the losses, gradient shards and final parameter shards of this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tensors: Tensors = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        loss = model(torch.randn(3, model[0][0].in_features, generator=generator)).square().mean()
        loss.backward()
        tensors += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*tensors, *(p.to_local().detach().clone() for p in model.parameters())]


def are_equal(a: Tensors, b: Tensors) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def new_group() -> dist.ProcessGroup:
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    return group


@contextlib.contextmanager
def gloo_only() -> Iterator[None]:
    """Vetoes shared memory for groups that negotiate inside of the context."""
    os.environ["FSDP_C_TRANSPORT"] = "gloo"
    try:
        yield
    finally:
        del os.environ["FSDP_C_TRANSPORT"]


@contextlib.contextmanager
def patched_torch_collectives() -> Iterator[None]:
    """Patches torch's collective functions with wrappers, so that fsdp_c calls them."""
    gather, reduce = torch_param_group.foreach_all_gather, torch_param_group.foreach_reduce
    with (
        mock.patch.object(torch_param_group, "foreach_all_gather", lambda *args: gather(*args)),
        mock.patch.object(torch_param_group, "foreach_reduce", lambda *args: reduce(*args)),
    ):
        yield


# ---- cases with bits equal to gloo's ----


def small_units(group: dist.ProcessGroup) -> Tensors:
    return train(model_of(group, [33] * 5), 4)


def more_units_than_header_slots(group: dist.ProcessGroup) -> Tensors:
    return _train_with_all_units_in_flight(model_of(group, [40] * 72))


def larger_than_the_ring(group: dist.ProcessGroup) -> Tensors:
    return train(model_of(group, [8, 2600, 2600, 8]), 3)


def large_units_in_flight(group: dist.ProcessGroup) -> Tensors:
    return _train_with_all_units_in_flight(model_of(group, [700] * 8))


def _train_with_all_units_in_flight(model: nn.Sequential) -> Tensors:
    """Issues the gathers of all units at once, and waits for them in reverse order."""
    tensors = train(model, 2)
    handles = [unit.unshard(async_op=True) for unit in model]
    for handle in reversed(handles):
        handle.wait()
    tensors += [p.detach().clone() for p in model.parameters()]
    for unit in model:
        unit.reshard()
    return tensors + train(model, 1)


def observed_on_one_rank(group: dist.ProcessGroup) -> Tensors:
    """Rank 0 uses a packed buffer under a dispatch mode and a profiler. Its peers use chunks."""
    model = model_of(group, [300] * 4)
    tensors = train(model, 2)
    observers = contextlib.ExitStack()
    if dist.get_rank() == 0:
        observers.enter_context(CommDebugMode())
        observers.enter_context(profile(activities=[ProfilerActivity.CPU]))
    with observers:
        tensors += train(model, 1)
    return tensors + train(model, 1)


def _train_replicated(
    group: dist.ProcessGroup,
    widths: list[int],
    cap: float,
    dtype: torch.dtype | None = None,
    delay: float = 0,
) -> Tensors:
    """Trains a replicated model. Returns its tensors and a result of ``dist.all_reduce``."""
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model = fsdp_c.replicate(chain(widths), mesh=mesh, mp_policy=policy, bucket_cap_mb=cap)
    model.register_forward_hook(lambda *_: time.sleep(delay * dist.get_rank()))
    tensors = train(model, 8)
    all_reduced = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(all_reduced, group=group)
    return [*tensors, all_reduced]


def all_reduced_in_one_message(group: dist.ProcessGroup) -> Tensors:
    return _train_replicated(group, [3, 5], 25) + _train_replicated(
        group, [33] * 4, 25, torch.bfloat16
    )


def all_reduced_in_parts(group: dist.ProcessGroup) -> Tensors:
    return _train_replicated(group, [8, 1301, 1300, 3], 25) + _train_replicated(
        group, [500] * 4, 25, torch.float64
    )


def all_reduced_in_buckets(group: dist.ProcessGroup) -> Tensors:
    return _train_replicated(group, [701] * 5, 0.5) + _train_replicated(
        group, [400] * 5, 0.3, torch.float16
    )


def all_reduced_with_delayed_ranks(group: dist.ProcessGroup) -> Tensors:
    """A delayed rank commits many messages at once, while its peers wait for free memory."""
    return _train_replicated(group, [8, 2100, 2100, 3], 25, delay=0.05)


def all_reduced_by_patched_torch_on_one_rank(group: dist.ProcessGroup) -> Tensors:
    """Rank 0 patches ``dist.all_reduce``, so that torch's functions reduce there.

    The hook's all-reduces use gloo on all ranks.
    """
    mesh = DeviceMesh.from_group(group, "cpu")
    model = fsdp_c.replicate(chain([33] * 4), mesh=mesh)
    hook_sums: Tensors = []

    def hook(row: torch.Tensor) -> None:
        hook_sums.append(row.sum())
        dist.all_reduce(hook_sums[-1], group=group)

    model.set_all_reduce_hook(hook)
    tensors = train(model, 4)
    patched = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    with patched if dist.get_rank() == 0 else contextlib.nullcontext():
        tensors += train(model, 3)
    return [*tensors, *train(model, 2), *hook_sums]


def clipped(group: dist.ProcessGroup) -> Tensors:
    model = model_of(group, [33] * 5)
    tensors = train(model, 3)
    for step in range(3):
        model(torch.full((2, 33), step + 1.0)).square().mean().backward()
        tensors.append(fsdp_c.clip_grad_norm_(model, 0.01))
        tensors += [p.grad.to_local().clone() for p in model.parameters()]
    return tensors


CASES = (
    all_reduced_in_one_message,
    all_reduced_in_parts,
    all_reduced_in_buckets,
    all_reduced_with_delayed_ranks,
    all_reduced_by_patched_torch_on_one_rank,
    clipped,
    small_units,
    more_units_than_header_slots,
    larger_than_the_ring,
    large_units_in_flight,
    observed_on_one_rank,
)


def compare_cases(rank: int, world: int) -> dict[str, tuple[int, bool]]:
    """Maps each case to its number of mapped rings and whether its bits equal gloo's."""
    results = {}
    for case in CASES:
        group = new_group()
        tensors = case(group)
        mapped = mapped_rings()
        dist.destroy_process_group(group)
        with gloo_only():
            expected = case(new_group())
        assert mapped_rings() == 0
        results[case.__name__] = mapped, are_equal(tensors, expected)
    return results


def compare_hybrid_sharding(rank: int, world: int) -> tuple[int, bool]:
    """Compares HSDP, which reduces gradients over two groups, with gloo."""

    def train_hybrid() -> Tensors:
        model = chain([8, 1100, 1100, 3])
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
        for block in model:
            fsdp_c.fully_shard(block, mesh=mesh)
        model = fsdp_c.fully_shard(model, mesh=mesh)
        tensors = train(model, 4)
        model.set_requires_all_reduce(False)
        model(torch.full((2, 8), dist.get_rank() + 1.0)).square().mean().backward()
        model.set_requires_all_reduce(True)
        return tensors + train(model, 2)

    tensors = train_hybrid()
    mapped = mapped_rings()
    with gloo_only():
        return mapped, are_equal(tensors, train_hybrid())


# ---- fallback ----


@contextlib.contextmanager
def lowered_limit(limit: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def small_file_size_limit() -> contextlib.AbstractContextManager[None]:
    return lowered_limit(resource.RLIMIT_FSIZE, 1 << 20)


@contextlib.contextmanager
def one_descriptor_left() -> Iterator[None]:
    """Leaves a descriptor for this rank's ring, and none for the rings of peers."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = []
    with lowered_limit(resource.RLIMIT_NOFILE, highest + 2):
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        os.close(held.pop())
        try:
            yield
        finally:
            for descriptor in held:
                os.close(descriptor)


FALLBACK_REASONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "nothing": contextlib.nullcontext,
    "gloo is chosen": gloo_only,
    "limited file size": small_file_size_limit,
    "no file descriptors": one_descriptor_left,
}


def compare_with_fallback_reasons(rank: int, world: int) -> dict[str, tuple[int, bool]]:
    """Maps each reason on the last rank to its number of mapped rings and equality of bits."""
    with gloo_only():
        expected = small_units(new_group())
    results = {}
    for name, fallback_reason in FALLBACK_REASONS.items():
        group = new_group()
        with fallback_reason() if rank == world - 1 else contextlib.nullcontext():
            tensors = small_units(group)
        results[name] = mapped_rings(), are_equal(tensors, expected)
        dist.destroy_process_group(group)
    return results


def train_in_forked_child(rank: int, world: int) -> tuple[list[str], bool]:
    """Returns the error messages of a forked child that trains and destroys the group, and whether
    its parent then trains with the same bits."""
    model, other = model_of(dist.group.WORLD, [33] * 4), model_of(new_group(), [33] * 4)
    assert are_equal(train(model, 3), train(other, 3)) and mapped_rings() == 2 * world
    messages = []
    for act in (lambda: train(model, 1), dist.destroy_process_group):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, error_message(act).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as text:
            messages.append(text.read())
    return messages, are_equal(train(model, 2), train(other, 2))


# ---- overlap and prefetch ----


def _run_at_input_gradient(module: nn.Module, run: Callable[[], None]) -> None:
    """Calls ``run`` when backward has computed the gradient of the module's input."""

    def register(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        inputs[0].register_hook(lambda gradient: run())

    module.register_forward_pre_hook(register)


def record_overlap(rank: int, world: int) -> dict[str, bool]:
    """Maps overlap and width to whether rank 0 computes gradients of the first unit while the last
    unit is reduced. Rank 1 delays that reduction. The ranks share one CPU."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store = dist.distributed_c10d._get_default_store()
    results = {}
    for overlap, width in itertools.product((None, True, False), (500, 1100)):
        key = f"overlap {overlap}, width {width}"
        overlaps = overlap or (overlap is None and width == 500)
        group = new_group()
        first, last = model = model_of(group, [width] * 3)
        train(model, 3)
        assert mapped_rings() == world
        fsdp_c.set_reduction_overlap(model, overlap)
        if rank == 0:

            def record(key: str = key, last: nn.Module = last) -> None:
                results[key] = last[0].weight.grad is None
                store.set(key, "recorded")

            _run_at_input_gradient(first[1], record)
        else:
            delay_backward = partial(store.wait, [key]) if overlaps else partial(time.sleep, 0.2)
            _run_at_input_gradient(last[0], delay_backward)
        train(model, 1)
        dist.destroy_process_group(group)
    return results


def _train_one_step_in_each(model: nn.Sequential, contexts: list[Any]) -> Tensors:
    """Trains one step inside of each context manager."""
    tensors: Tensors = []
    for context in contexts:
        with context():
            tensors += train(model, 1)
    return tensors


def record_prefetches(rank: int, world: int) -> dict[int, tuple[list[bool], bool]]:
    """Maps each width to two results. The first has one flag for each step from the third on: the
    gather of the first unit is in flight when the last unit has its gradients. The second is
    whether bits equal gloo's.

    The last rank may use all CPUs of the host, the others one. The last rank uses torch's functions
    in three steps, and a dispatch mode in one.
    """
    if rank < world - 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    unobserved, patched = contextlib.nullcontext, patched_torch_collectives
    plain = [unobserved] * 5
    observed = [patched, patched, patched, CommDebugMode, unobserved]
    results = {}
    for width in (500, 1500):
        with gloo_only():
            expected = _train_one_step_in_each(model_of(new_group(), [width] * 3), plain)
        first, last = model = model_of(new_group(), [width] * 3)
        group = first._get_fsdp_state()._fsdp_param_group
        in_flight: list[bool] = []
        _run_at_input_gradient(
            last[0], lambda g=group, s=in_flight: s.append(g._all_gather_result is not None)
        )
        tensors = _train_one_step_in_each(model, observed if rank == world - 1 else plain)
        assert mapped_rings() == world
        results[width] = in_flight[2:], are_equal(tensors, expected)
        dist.destroy_process_group(group.mesh_info.shard_process_group)
    return results


def train_steps_ahead(rank: int, world: int) -> None:
    """Trains 8 steps in which rank 1 begins backward after rank 0 has issued two buckets of 4 kB.
    If issuing waited for peers, ``store.wait`` would time out."""
    store = dist.distributed_c10d._get_default_store()
    mesh = DeviceMesh.from_group(new_group(), "cpu")
    model = fsdp_c.replicate(chain([32] * 4), mesh=mesh, bucket_cap_mb=1 / 256)
    train(model, 1)  # compares the models
    if rank == 0:
        _run_at_input_gradient(model[0][1], lambda: store.set(f"step {step}", ""))
    else:
        model.register_forward_hook(lambda *_: store.wait([f"step {step}"]))
    for step in range(8):  # noqa: B007 (the hooks read it)
        train(model, 1)


# ---- errors and ends ----


def _sizes_differ(group: dist.ProcessGroup) -> Callable[[], object]:
    other = model_of(group, [40 + 4 * dist.get_rank()] * 4)
    return lambda: train(other, 1)


def _lengths_differ(group: dist.ProcessGroup) -> Callable[[], object]:
    """Issues two collectives of one message on rank 0, and one of two messages on rank 1. All
    messages have 1 MiB."""
    width = 511 if dist.get_rank() == 0 else 1023
    model = model_of(group, [width, 1024])
    x = torch.ones(1, width)

    @torch.no_grad()
    def run() -> None:
        for _ in range(1024 // (width + 1)):
            model(x)

    return run


def _one_rank_replicates(group: dist.ProcessGroup) -> Callable[[], object]:
    """Rank 0 reduce-scatters its gradients, rank 1 all-reduces them."""
    if dist.get_rank() == 0:
        model = model_of(group, [33] * 2)
    else:
        mesh = DeviceMesh.from_group(group, "cpu")
        model = fsdp_c.replicate(chain([33] * 2), mesh=mesh)
    return lambda: train(model, 1)


def _one_rank_evaluates(group: dist.ProcessGroup) -> Callable[[], object]:
    model = model_of(group, [33] * 4)

    def run() -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(1, 33))
        train(model, 2)

    return run


def _one_rank_ends_the_group(group: dist.ProcessGroup) -> Callable[[], object]:
    model = model_of(group, [33] * 4)
    train(model, 1)

    def run() -> None:
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)
        else:
            train(model, 1)

    return run


MISMATCHES = (
    _sizes_differ,
    _lengths_differ,
    _one_rank_replicates,
    _one_rank_evaluates,
    _one_rank_ends_the_group,
)


def collect_errors(rank: int, world: int) -> dict[str, str]:
    """Maps each mismatch to the error message on this rank."""
    results = {}
    for case in MISMATCHES:
        group = new_group()
        train(model_of(group, [33] * 4), 3)
        results[case.__name__] = error_message(case(group))
        dist.barrier()
    return results


def train_until_last_rank_is_killed(rank: int, world: int) -> None:
    """The last rank kills itself in a step, which must fail the waits of its peers."""
    model = model_of(dist.group.WORLD, [33] * 4)
    train(model, 3)
    assert mapped_rings() == world

    def die(*unused: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == world - 1:
        model[1].register_forward_pre_hook(die)
    train(model, 1)


def train_with_stopped_rank(rank: int, world: int) -> bool:
    """Returns whether training with a rank that is stopped for 0.3 s has the bits of gloo."""
    model = model_of(dist.group.WORLD, [33] * 4)
    with gloo_only():
        other = model_of(new_group(), [33] * 4)
        expected = [*train(other, 3), *train(other, 3)]
    tensors = train(model, 3)
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, os.getpid())
    if rank != 0:
        return are_equal([*tensors, *train(model, 3)], expected)

    def resume_peer() -> None:
        time.sleep(0.3)
        os.kill(processes[1], signal.SIGCONT)

    os.kill(processes[1], signal.SIGSTOP)
    thread = threading.Thread(target=resume_peer)
    thread.start()
    tensors += train(model, 3)
    thread.join()
    return are_equal(tensors, expected)


def count_resources_after_group_end(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Maps the objects kept alive to the mapped rings and descriptors after the group's end."""
    results = {}
    for kept in ("nothing", "the model", "the group", "nothing, gather in flight"):
        group = new_group()
        model = model_of(group, [33] * 4)
        train(model, 3)
        assert mapped_rings() == open_ring_descriptors() == world
        kept_objects: list[Any] = {"the model": [model], "the group": [group]}.get(kept, [])
        if kept == "nothing, gather in flight":
            model[0].unshard(async_op=True)
        del model
        gc.collect()
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        results[kept] = mapped_rings(), open_ring_descriptors()
        kept_objects.clear()
    return results


def main() -> None:
    """Exits with gathers in flight and without destroying the process group."""
    dist.init_process_group("gloo")
    model = model_of(dist.group.WORLD, [700] * 4)
    train(model, 3)
    model.handles = [unit.unshard(async_op=True) for unit in model]  # type: ignore[assignment]
    print(mapped_rings())


if __name__ == "__main__":
    main()
