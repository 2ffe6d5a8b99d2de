"""Programs over gloo whose last rank issues other collectives, and programs that must not raise.

The other collectives have the same kind and size. gloo matches such collectives, so without a
comparison the ranks train with wrong numbers. Without labels, the ranks compare their collectives
at the end of each backward (an agreement).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from consistent_programs import run_programs
from divergence import LIMIT_SECONDS, SIZE, Block, Model
from error_messages import error_message
from recorded_operators import RecordedOperators
from releases import has
from torch.distributed.device_mesh import DeviceMesh

import fsdp_c


class HalfBlock(Block):
    """Uses one of its two layers, which have equal sizes."""

    used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first, self.second)[self.used](x)


class Program:
    """Two models over one process group, and their optimizer."""

    def __init__(self, mesh: DeviceMesh, names: tuple[str, str] = ("second", "other")) -> None:
        torch.manual_seed(0)
        self.models = [self.make_model(mesh, name) for name in names]
        parameters = [p for model in self.models for p in model.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.order = [0, 1]
        self.evaluated = 0

    @staticmethod
    def make_model(mesh: DeviceMesh, name: str = "second") -> Any:
        model = Model([Block(name=name), Block(), Block(), HalfBlock()])
        for block in model.blocks:
            fsdp_c.fully_shard(block, mesh=mesh)
        return fsdp_c.fully_shard(model, mesh=mesh)

    def diverge(self, name: str) -> None:
        blocks: Any = self.models[0].blocks
        if name == "another order of blocks":
            self.models[0].order = [0, 2, 1, 3]
        elif name == "another divide factor":
            blocks[1].set_gradient_divide_factor(7.0)
        elif name == "another forward prefetch":
            blocks[0].set_modules_to_forward_prefetch([blocks[2]])
        elif name == "another backward prefetch":
            blocks[3].set_modules_to_backward_prefetch([blocks[1]])
        elif name == "another parameter":
            blocks[3].used = 1
        elif name == "another root":
            self.order = [1, 0]
        elif name == "another evaluated block":
            self.evaluated = 1
        elif name == "explicit unshard":
            blocks[3].unshard()
        else:
            raise AssertionError(name)

    def step(self) -> None:
        x = torch.full((2, SIZE), 0.5)
        first, second = (self.models[index] for index in self.order)
        first(x).sum().backward()
        with torch.no_grad():
            first.blocks[self.evaluated](x)
        second(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def reset(self) -> None:
        for model in self.models:
            model.reset_iter_state()
        self.optimizer.zero_grad()

    def shards(self) -> list[torch.Tensor]:
        return [p.to_local().detach().clone() for model in self.models for p in model.parameters()]


KINDS = (
    "another order of blocks",
    "another divide factor",
    "another forward prefetch",
    "another backward prefetch",
    "another parameter",
    "another root",
    "another evaluated block",
    "explicit unshard",
)


def run_kinds(
    rank: int, world_size: int, steps: int, names: tuple[str, ...] = KINDS
) -> dict[str, tuple[str, int]]:
    """Runs ``steps`` equal steps of two models on each rank. Then the last rank diverges.

    Returns the exception's text, and the number of completed steps since the divergence.
    """
    results = {}
    for name in names:
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
        program = Program(DeviceMesh.from_group(group, "cpu"))
        for _ in range(steps):
            program.step()
        if rank == world_size - 1:
            program.diverge(name)
        text, completed = "", 0
        try:
            for _ in range(2):
                program.step()
                completed += 1
        except RuntimeError as error:
            text = str(error)
        results[name] = text, completed
        dist.barrier()
    return results


def train_after_mismatch(rank: int, world_size: int) -> tuple[bool, list[bool]]:
    """Returns whether the mismatch raised, and for each shard whether it has the expected values.

    The expected values are those of a run whose ranks never diverged.
    """
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    mesh = DeviceMesh.from_group(group, "cpu")
    expected, program = Program(mesh), Program(mesh)
    for _ in range(3):
        expected.step()
    program.step()
    if rank == world_size - 1:
        program.models[0].order = [0, 2, 1, 3]
    raised = "collective mismatch" in error_message(program.step)
    program.reset()
    program.models[0].order = [0, 1, 2, 3]
    for _ in range(2):
        program.step()
    equal = [torch.equal(a, b) for a, b in zip(program.shards(), expected.shards())]
    return raised, equal


def swap_equal_roots(rank: int, world_size: int) -> str:
    """The last rank runs two roots in another order. Their names and settings are equal."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    program = Program(DeviceMesh.from_group(group, "cpu"), ("second", "second"))
    for _ in range(2):
        program.step()
    if rank == world_size - 1:
        program.diverge("another root")
    return error_message(program.step)


def diverge_after_early_unshard(rank: int, world_size: int) -> tuple[str, str]:
    """Returns the errors of two equal steps after an ``unshard()``, and of a step that differs."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    program = Program(DeviceMesh.from_group(group, "cpu"))
    program.models[0].blocks[0].unshard()
    equal = error_message(program.step) + error_message(program.step)
    if rank == world_size - 1:
        program.diverge("another order of blocks")
    return equal, error_message(program.step)


# ---- programs that must not raise ----------------------------------------------------------------


def _make_model(group: Any) -> Any:
    return Program.make_model(DeviceMesh.from_group(group, "cpu"))


def _train(model: Any, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.ones(2, SIZE)).sum().backward()


def other_numbers_of_local_backwards(rank: int, group: Any) -> None:
    """Replicated parameters need no collective in a backward without synchronization."""
    model = Model([Block() for _ in range(2)])
    fsdp_c.replicate(model, mesh=DeviceMesh.from_group(group, "cpu"))
    for _ in range(2):
        with fsdp_c.no_sync(model):
            _train(model, 1 + rank)
        _train(model, 1)


def not_the_last_backward(rank: int, group: Any) -> None:
    model = _make_model(group)
    for last in (False, True):
        model.set_is_last_backward(last)
        _train(model)


def reset_on_all(rank: int, group: Any) -> None:
    model = _make_model(group)
    for _ in range(2):
        model(torch.ones(2, SIZE))
        model.reset_iter_state()
        _train(model, 1)


def one_backward_of_two_roots(rank: int, group: Any) -> None:
    first, second = _make_model(group), _make_model(group)
    for _ in range(2):
        x = torch.ones(2, SIZE)
        (first(x).sum() + second(x).sum()).backward()


def torch_functions_on_one_rank(rank: int, group: Any) -> None:
    """Rank 0 patches torch's ``foreach_reduce``, so torch's code moves the data on that rank."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group

    original = torch_group.foreach_reduce
    if rank == 0:
        torch_group.foreach_reduce = lambda *args, **kwargs: original(*args, **kwargs)
    try:
        _train(_make_model(group))
    finally:
        torch_group.foreach_reduce = original


def evaluation_on_all(rank: int, group: Any) -> None:
    model = _make_model(group)
    for _ in range(2):
        with torch.no_grad():
            for _ in range(150):  # 600 gathers, more than OP_ENTRIES of agreement.h
                model(torch.ones(2, SIZE))
        _train(model, 1)


def replicated_forward_on_one_rank(rank: int, group: Any) -> None:
    """A forward of replicated parameters has no collective."""
    mesh = DeviceMesh.from_group(group, "cpu")
    models = [Model([Block() for _ in range(2)]) for _ in range(3)]
    for model in models:
        fsdp_c.replicate(model, mesh=mesh)
    if rank == 0:
        with torch.no_grad():
            models[0](torch.ones(2, SIZE))
    for model in models[1:]:
        _train(model, 1)


def transform_of_functorch(rank: int, group: Any) -> None:
    if not has("2.13"):
        return  # FSDP2 does not support such transforms
    model = _make_model(group)
    torch.func.grad(lambda x: model(x).sum())(torch.ones(2, SIZE))
    _train(model, 1)


LEGITIMATE: tuple[Callable[[int, Any], None], ...] = (
    other_numbers_of_local_backwards,
    not_the_last_backward,
    reset_on_all,
    one_backward_of_two_roots,
    torch_functions_on_one_rank,
    evaluation_on_all,
    replicated_forward_on_one_rank,
    transform_of_functorch,
)


def run_legitimate(rank: int, world_size: int) -> dict[str, str]:
    """Returns the exception of each program, or ""."""
    return run_programs(rank, LEGITIMATE)


def run_hsdp(rank: int, world_size: int, diverges: bool) -> str:
    """Trains on 2 x 2 ranks. Rank 3 may run its blocks in another order."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Program.make_model(mesh)
    _train(model)
    if diverges and rank == 3:
        model.order = [0, 2, 1, 3]
    message = error_message(lambda: _train(model, 2))
    dist.barrier()  # the others must not find that the process of a rank has ended
    return message


def count_observed(rank: int, world_size: int) -> tuple[dict[str, int], list[str], list[str]]:
    """Returns what CommDebugMode, the profiler and a dispatch mode report of a step."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import profile

    model = _make_model(dist.group.WORLD)
    _train(model, 1)
    with CommDebugMode() as mode:
        _train(model, 1)
    with profile() as profiler:
        _train(model, 1)
    with RecordedOperators() as log:
        _train(model, 1)
    names = sorted(
        event.name for event in profiler.events() if "c10d" in event.name or "gloo" in event.name
    )
    return (
        {str(op): count for op, count in mode.get_comm_counts().items()},
        names,
        sorted(log.names),
    )


def list_recorder_entries(rank: int, world_size: int) -> list[str]:
    """Returns the collectives of torch's flight recorder in a step."""
    import pickle

    model = _make_model(dist.group.WORLD)
    _train(model, 1)
    dump = torch._C._distributed_c10d._dump_fr_trace
    before = len(pickle.loads(dump())["entries"])
    _train(model, 1)
    return [entry["profiling_name"] for entry in pickle.loads(dump())["entries"][before:]]
