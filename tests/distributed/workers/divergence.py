"""Ranks that diverge: each case makes one rank's program differ from those of the other ranks.

Every case has its own process group, because a process group is not used after a mismatch. A case
of DYNAMIC runs ``steps`` equal steps, then ``diverge`` on the last rank, then two steps. In a case
of STATIC, the last rank makes another model.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

LIMIT_SECONDS = 6.0
SIZE = 8


class Block(nn.Module):
    """Two linear layers. ``uses_second`` selects whether the second layer takes part."""

    def __init__(self, rows: int = SIZE, swapped: bool = False, name: str = "second") -> None:
        super().__init__()
        layers = {"first": nn.Linear(SIZE, rows), name: nn.Linear(rows, SIZE)}
        for key in reversed(layers) if swapped else layers:
            self.add_module(key, layers[key])
        self.names = ("first", name)
        self.uses_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (getattr(self, name) for name in self.names)
        hidden = first(x).relu()
        return second(hidden) if self.uses_second else hidden


class Model(nn.Module):
    """Blocks that run in the order of ``order``."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.order = list(range(len(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


class Case:
    """The program of one rank.

    ``other``: whether this rank differs. ``distinct``: whether no two blocks have equal sizes.
    """

    def __init__(
        self, api: Any, mesh: DeviceMesh, other: bool, name: str, distinct: bool = False
    ) -> None:
        self.api, self.mesh, self.name = api, mesh, name
        self.other, self.distinct = other, distinct
        self.backward = True
        self.evaluations = 0

    def is_case(self, name: str) -> bool:
        return self.other and self.name == name

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        wider = 16 if self.is_case("another shape") else SIZE
        factors = (2, 1, 3, 4) if self.distinct else (1, 1, 1, 1)
        blocks: list[nn.Module] = [Block(SIZE * factor) for factor in factors]
        if self.is_case("another shape"):
            blocks[1] = Block(wider)
        if self.is_case("another order of parameters"):
            blocks[1] = Block(swapped=True)
        if self.is_case("another name"):
            blocks[1] = Block(name="other")
        if self.is_case("another number of units"):
            blocks.append(Block())
        if self.is_case("another dtype"):
            blocks[1] = blocks[1].to(torch.bfloat16)
        if self.is_case("another shape of equal size"):
            blocks[1].first = nn.Linear(4, 16, bias=False)
        elif self.name == "another shape of equal size":
            blocks[1].first = nn.Linear(8, 8, bias=False)
        model = Model(blocks)
        if self.is_case("another frozen parameter"):
            model.blocks[1].first.weight.requires_grad_(False)
        policy = {"mp_policy": self.api.policy(reduce_dtype=torch.float32)}
        if self.is_case("another reduce dtype"):
            policy = {"mp_policy": self.api.policy(reduce_dtype=torch.bfloat16)}
        if self.is_case("another param dtype"):
            policy = {"mp_policy": self.api.policy(param_dtype=torch.bfloat16)}
        for i, block in enumerate(model.blocks):
            if self.is_case("another unit") and i == 1:
                continue  # its parameters belong to the root
            reshard = not (self.is_case("another reshard_after_forward") and i == 1)
            self.api.fully_shard(block, mesh=self.mesh, reshard_after_forward=reshard, **policy)
        self.api.fully_shard(model, mesh=self.mesh, **policy)
        if self.is_case("another divide factor"):
            model.blocks[1].set_gradient_divide_factor(7.0)
        if self.is_case("another prefetch"):
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
        return model

    def diverge(self, model: Any) -> None:
        """Changes the program of this rank after the first steps."""
        if self.name == "another order of blocks":
            model.order = [0, 2, 1, 3]
        elif self.name == "a block skipped":
            model.order = [0, 1, 3]
        elif self.name == "a block twice":
            model.order = [0, 1, 1, 2, 3]
        elif self.name == "a conditional parameter":
            model.blocks[1].uses_second = False
        elif self.name == "frozen later":
            model.blocks[1].first.weight.requires_grad_(False)
        elif self.name == "divide factor later":
            model.blocks[1].set_gradient_divide_factor(7.0)
        elif self.name == "prefetch later":
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
        elif self.name == "reshard later":
            model.blocks[1].set_reshard_after_forward(False)
        elif self.name == "no gradient sync":
            model.set_requires_gradient_sync(False)
        elif self.name == "no backward":
            self.backward = False
        elif self.name == "an evaluation":
            self.evaluations = 1
        elif self.name == "explicit unshard":
            model.blocks[3].unshard()
        else:
            raise AssertionError(self.name)

    def step(self, model: nn.Module, optimizer: Any) -> None:
        for _ in range(self.evaluations):
            with torch.no_grad():
                model(torch.ones(2, SIZE))
        loss = model(torch.full((2, SIZE), 0.5)).sum()
        if self.backward:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


STATIC = (
    "another shape",
    "another shape of equal size",
    "another dtype",
    "another order of parameters",
    "another name",
    "another number of units",
    "another unit",
    "another frozen parameter",
    "another reduce dtype",
    "another param dtype",
    "another reshard_after_forward",
    "another divide factor",
    "another prefetch",
)
"""Kinds of divergence that the comparison of plans finds before the first gather."""

DYNAMIC = (
    "another order of blocks",
    "a block skipped",
    "a block twice",
    "a conditional parameter",
    "frozen later",
    "divide factor later",
    "prefetch later",
    "reshard later",
    "no gradient sync",
    "no backward",
    "an evaluation",
    "explicit unshard",
)
"""Kinds of divergence that the labels of collectives find."""


class Api:
    """The functions of one implementation."""

    def __init__(self, implementation: str) -> None:
        if implementation == "torch":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        else:
            from fsdp_c import MixedPrecisionPolicy, fully_shard
        self.fully_shard: Callable[..., Any] = fully_shard
        self.policy: Callable[..., Any] = MixedPrecisionPolicy


def run_case(
    api: Api, name: str, other: bool, steps: int, distinct: bool = False
) -> tuple[str, float]:
    """Returns the exception's text, or "silent", and the seconds since the divergence."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    mesh = DeviceMesh.from_group(group, "cpu")
    case = Case(api, mesh, other, name, distinct)
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin = time.monotonic()
    try:
        for _ in range(steps if name in DYNAMIC else 0):
            case.step(model, optimizer)
        begin = time.monotonic()
        if other and name in DYNAMIC:
            case.diverge(model)
        for _ in range(2):
            case.step(model, optimizer)
        outcome = "silent"
    except RuntimeError as error:
        outcome = f"{type(error).__name__}: {error}"
    return outcome, time.monotonic() - begin


def run(
    rank: int,
    world_size: int,
    implementation: str,
    names: tuple[str, ...],
    steps: int,
    distinct: bool = False,
) -> dict[str, tuple[str, float]]:
    """Runs the cases one after the other. The last rank differs."""
    api = Api(implementation)
    results = {}
    for name in names:
        results[name] = run_case(api, name, rank == world_size - 1, steps, distinct)
        dist.barrier()
    return results


# ---- legitimate programs -------------------------------------------------------------------------


def _make_model(group: Any, count: int = 3) -> Any:
    import fsdp_c

    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Model([Block(SIZE * (1 + i)) for i in range(count)])
    for block in model.blocks:
        fsdp_c.fully_shard(block, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh)


def _train(model: Any, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, SIZE)).sum().backward()


def unused_units(rank: int, group: Any) -> None:
    """A unit and a parameter that no rank uses."""
    model = _make_model(group)
    model.order = [0, 2]
    model.blocks[0].uses_second = False
    _train(model)


def no_sync_on_all(rank: int, group: Any) -> None:
    import fsdp_c

    model = _make_model(group)
    for _ in range(2):
        with fsdp_c.no_sync(model):
            _train(model, 1)
        _train(model, 1)


def several_roots(rank: int, group: Any) -> None:
    """Roots over one process group. The second root runs first after three steps of the first."""
    first, second = _make_model(group), _make_model(group, 2)
    _train(first)
    for _ in range(2):
        _train(second, 1)
        _train(first, 1)


def explicit_unshard_on_one_rank(rank: int, group: Any) -> None:
    """The collectives are equal: one rank issues them before its forward."""
    model = _make_model(group)
    _train(model, 1)
    for _ in range(2):
        if rank == 0:
            model.unshard()
            handle = model.blocks[0].unshard(async_op=True)
            handle.wait()
        _train(model, 1)


def unshard_before_the_first_forward(rank: int, group: Any) -> None:
    """A unit that is unsharded before its root has run has no plan."""
    model = _make_model(group)
    model.blocks[1].unshard()
    model.blocks[1].reshard()
    with torch.no_grad():
        handle = model.blocks[2].unshard(async_op=True)
    if handle is not None:
        handle.wait()
    model.blocks[2].reshard()


def async_first_gather_on_one_rank(rank: int, group: Any) -> None:
    model = _make_model(group)
    if rank == 0:
        handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
    else:
        model.blocks[0].unshard()
    for block in model.blocks:
        block.reshard()


def recomputation(rank: int, group: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model = _make_model(group)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    _train(model)


def reset_after_an_exception(rank: int, group: Any) -> None:
    """A backward raises on all ranks. The next forward resets the units."""
    model = _make_model(group)
    _train(model, 1)
    for _ in range(2):
        try:
            loss = model(torch.ones(2, SIZE))
            loss.register_hook(_raise)
            loss.sum().backward()
        except ZeroDivisionError:
            pass
        _train(model, 1)


def _raise(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def evaluation_between_steps(rank: int, group: Any) -> None:
    model = _make_model(group)
    for _ in range(3):
        _train(model, 2)
        with torch.no_grad():
            model(torch.ones(2, SIZE))
            model.blocks[1](torch.ones(2, SIZE))


def gradient_accumulation(rank: int, group: Any) -> None:
    model = _make_model(group)
    for microbatches in (3, 3, 2, 4, 4):
        for i in range(microbatches):
            model.set_requires_gradient_sync(i == microbatches - 1)
            _train(model, 1)


def other_units_in_each_step(rank: int, group: Any) -> None:
    """The same units on all ranks, selected at random."""
    model = _make_model(group, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        count = int(torch.randint(1, 5, (), generator=generator))
        model.order = torch.randperm(4, generator=generator)[:count].tolist()
        _train(model, 1)


def one_rank_is_late(rank: int, group: Any) -> None:
    """Rank 0 starts an evaluation 0.7 s after the other ranks."""
    model = _make_model(group)
    _train(model, 3)
    if rank == 0:
        time.sleep(0.7)
    with torch.no_grad():
        model(torch.ones(2, SIZE))
    _train(model, 1)


def settings_changed_on_all(rank: int, group: Any) -> None:
    model = _make_model(group)
    _train(model, 2)
    model.blocks[1].set_gradient_divide_factor(7.0)
    model.blocks[1].first.weight.requires_grad_(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    model.set_reshard_after_forward(False)
    _train(model, 2)


def one_rank_per_model(rank: int, group: Any) -> None:
    """Each rank has its own model on a process group of one rank. Ranks run different numbers of
    evaluations and steps."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    model = _make_model(groups[rank], 2 + rank)
    for _ in range(1 + rank):
        with torch.no_grad():
            model(torch.ones(2, SIZE))
    _train(model, 1 + rank)


def one_sided_evaluation_of_replicas(rank: int, group: Any) -> None:
    """Replicated parameters need no gather, so one rank may evaluate first and alone."""
    import fsdp_c

    torch.manual_seed(0)
    model = Model([Block() for _ in range(2)])
    fsdp_c.replicate(model, mesh=DeviceMesh.from_group(group, "cpu"))
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(2, SIZE))
    _train(model)


LEGITIMATE = (
    unused_units,
    no_sync_on_all,
    several_roots,
    explicit_unshard_on_one_rank,
    unshard_before_the_first_forward,
    async_first_gather_on_one_rank,
    recomputation,
    evaluation_between_steps,
    gradient_accumulation,
    other_units_in_each_step,
    one_rank_is_late,
    reset_after_an_exception,
    settings_changed_on_all,
    one_rank_per_model,
    one_sided_evaluation_of_replicas,
)
"""Programs that must not raise."""


def run_legitimate(rank: int, world_size: int) -> dict[str, str]:
    """Runs all programs that must not raise; see ``run_programs``."""
    return run_programs(rank, LEGITIMATE)


def run_programs(rank: int, programs: tuple[Callable[[int, Any], None], ...]) -> dict[str, str]:
    """Returns the exception of each program, or "". Each program has its own process group."""
    results = {}
    for program in programs:
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
        try:
            program(rank, group)
            results[program.__name__] = ""
        except RuntimeError as error:
            results[program.__name__] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return results


def depart_alone(rank: int, world_size: int) -> str:
    """After three equal steps, rank 0 issues a gather of block 2 that the training steps do not
    issue at this point. The other ranks issue nothing."""
    group = dist.new_group(timeout=timedelta(seconds=2.0))
    model = _make_model(group)
    _train(model)
    message = ""
    if rank == 0:
        try:
            with torch.no_grad():
                model.blocks[2](torch.ones(2, SIZE))
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


def depart_after_an_interruption(rank: int, world_size: int) -> tuple[bool, str]:
    """Rank 0 runs block 2 alone and is interrupted. Then rank 0 runs block 2 again while the other
    ranks train.

    Returns whether the interruption was raised, and the message of the exception.
    """
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    model = _make_model(group)
    _train(model)
    interrupted = False
    if rank == 0:
        signal.signal(signal.SIGALRM, _raise_interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            model.blocks[2](torch.ones(2, SIZE))
        except KeyboardInterrupt:
            interrupted = True
        model.reset_iter_state()
    dist.barrier()
    try:
        if rank == 0:
            model.blocks[2](torch.ones(2, SIZE))
        else:
            _train(model)
    except RuntimeError as error:
        return interrupted, str(error)
    return interrupted, ""


def _raise_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def run_stages(rank: int, world_size: int) -> str:
    """Two pipeline stages with two ranks each. The stages have different models and issue different
    collectives."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    stage = rank // 2
    model = _make_model(groups[stage], 2 + stage)
    for _ in range(2):
        for _ in range(2):
            x = torch.ones(2, SIZE)
            if stage == 1:
                dist.recv(x, rank - 2)
            output = model(x)
            if stage == 0:
                dist.send(output.detach(), rank + 2)
            output.sum().backward()
    return ""
