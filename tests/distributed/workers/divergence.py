"""Ranks that diverge: each case makes one rank's program differ from those of the other ranks.

Every case has its own process group, because a process group is not used after a mismatch. A case
of DYNAMIC runs equal steps, then ``diverge`` on one rank, then further steps. In a case of STATIC,
one rank makes another model or gives it other settings.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from error_messages import error_message
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

LIMIT_SECONDS = 3600.0
"""Time limit of the collectives. It is longer than that of each launch: if a rank raises only at
this limit, the launch fails."""
SIZE = 12


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
    """Blocks that run in the order of ``order``.

    ``detached``: the index of a block whose input carries no gradient. ``failing``: the index of a
    block before which the next forward raises ``ValueError``.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.order = list(range(len(blocks)))
        self.detached: int | None = None
        self.failing: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            if index == self.failing:
                self.failing = None
                raise ValueError("a sample of this rank is damaged")
            x = self.blocks[index](x.detach() if index == self.detached else x)
        return x


class Api:
    """The functions of one implementation."""

    def __init__(self, implementation: str) -> None:
        if implementation == "torch":
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        else:
            from fsdp_c import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        self.fully_shard: Callable[..., Any] = fully_shard
        self.policy: Callable[..., Any] = MixedPrecisionPolicy
        self.offload_policy: Callable[..., Any] = CPUOffloadPolicy


@dataclass
class Variation:
    """How one trial of a case differs from others.

    ``factors``: multiples of SIZE of the blocks' hidden layers. ``differing_rank``: the rank that
    differs; -1: the last one. ``at``: the block that differs; never the first one or one of the
    last two. ``steps``: the number of equal steps of a case of DYNAMIC. ``hsdp``: the 4 ranks are a
    mesh of 2 replicas.
    """

    factors: tuple[int, ...] = (1, 1, 1, 1)
    differing_rank: int = -1
    at: int = 1
    steps: int = 0
    hsdp: bool = False

    @classmethod
    def choose(cls, seed: int, world: int, first_step: bool) -> Variation:
        """Draws a variation from ``seed``. ``first_step``: it has no equal steps."""
        rng = random.Random(f"{seed} {world} {first_step}")
        others = (rng.choice((1, 1, 2, 3, 5)) for _ in range(rng.randint(3, 6)))
        factors = (1, *others)  # the conditional parameter needs a factor of 1
        steps = 0 if first_step else rng.randint(5, 9)
        return cls(factors, rng.randrange(world), rng.randrange(1, len(factors) - 2), steps)


class Case:
    """The program of one rank. ``is_different``: whether this rank differs from the others."""

    def __init__(
        self, api: Api, mesh: DeviceMesh, is_different: bool, name: str, variation: Variation
    ) -> None:
        self.api, self.mesh, self.name = api, mesh, name
        self.is_different, self.variation = is_different, variation
        self.backwards = 1
        self.evaluations = 0
        self.evaluates_block = False

    def differs_by(self, name: str) -> bool:
        return self.is_different and self.name == name

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        at = self.variation.at
        model = Model(self.make_blocks())
        if self.differs_by("another frozen parameter"):
            model.blocks[at].first.weight.requires_grad_(False)
        arguments = self.choose_arguments()
        blocks: list[Any] = list(model.blocks)
        if self.differs_by("another list of modules"):
            blocks[at : at + 2] = [blocks[at : at + 2]]
        for i, block in enumerate(blocks):
            if self.differs_by("another unit") and i == at:
                continue  # its parameters belong to the root
            reshard = not (self.differs_by("another reshard_after_forward") and i == at)
            self.api.fully_shard(block, reshard_after_forward=reshard, **arguments)
        self.api.fully_shard(model, **arguments)
        if self.is_different and self.name in SETTINGS:
            SETTINGS[self.name](model, at)
        return model

    def make_blocks(self) -> list[nn.Module]:
        at = self.variation.at
        rows = SIZE * self.variation.factors[at]
        blocks: list[nn.Module] = [Block(SIZE * factor) for factor in self.variation.factors]
        if self.differs_by("another shape"):
            blocks[at] = Block(rows + SIZE)
        if self.differs_by("another order of parameters"):
            blocks[at] = Block(rows, swapped=True)
        if self.differs_by("another name"):
            blocks[at] = Block(rows, name="other")
        if self.differs_by("another number of units"):
            blocks.append(Block())
        if self.differs_by("another dtype"):
            blocks[at].to(torch.bfloat16)
        if self.name == "another shape of equal size":
            blocks[at] = Block()
            shape = (SIZE // 2, 2 * SIZE) if self.is_different else (SIZE, SIZE)
            blocks[at].first = nn.Linear(*shape, bias=False)
        return blocks

    def choose_arguments(self) -> dict[str, Any]:
        policy: dict[str, Any] = {"reduce_dtype": torch.float32}
        if self.is_different:
            policy = POLICIES.get(self.name, policy)
        arguments = {"mesh": self.mesh, "mp_policy": self.api.policy(**policy)}
        if self.differs_by("another placement"):
            arguments["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
        if self.differs_by("another offload policy"):
            arguments["offload_policy"] = self.api.offload_policy(pin_memory=False)
        return arguments

    def diverge(self, model: Any) -> None:
        """Changes the program of this rank after the first steps."""
        at = self.variation.at
        if self.name == "another order of blocks":
            model.order[at : at + 2] = [at + 1, at]
        elif self.name == "a block skipped":
            model.order.remove(at + 1)
        elif self.name == "a block twice":
            model.order.insert(at, at)
        elif self.name == "a conditional parameter":
            self.find_square(model).uses_second = False
        elif self.name == "no backward":
            self.backwards = 0
        elif self.name == "a backward twice":
            self.backwards = 2
        elif self.name == "an evaluation":
            self.evaluations = 1
        elif self.name == "an evaluation of a block":
            self.evaluates_block = True
        elif self.name == "a detached block":
            model.detached = at
        elif self.name == "a forward that raised":
            model.failing = at
        elif self.name == "another model":
            other = self.make()
            self.step(other, torch.optim.SGD(other.parameters(), lr=0.1))
        else:
            LATER[self.name](model, at)

    def find_square(self, model: Any) -> Any:
        """Returns a block whose output has the same shape without its second layer."""
        return next(block for block in model.blocks if block.first.weight.shape == (SIZE, SIZE))

    def step(self, model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for _ in range(self.evaluations):
                model(torch.ones(2, SIZE))
            if self.evaluates_block:
                model.blocks[self.variation.at](torch.ones(2, SIZE))
        loss = self.forward(model).sum()
        for i in range(self.backwards):
            loss.backward(retain_graph=i + 1 < self.backwards)
        if self.backwards:
            optimizer.step()
        optimizer.zero_grad()

    def forward(self, model: Any) -> torch.Tensor:
        """Runs a forward. If it raises ``ValueError``, resets the model and runs another one."""
        x = torch.full((2, SIZE), 0.5)
        try:
            return model(x)
        except ValueError:
            model.reset_iter_state()
            return model(x)


POLICIES: dict[str, dict[str, Any]] = {
    "another reduce dtype": {"reduce_dtype": torch.bfloat16},
    "another param dtype": {"param_dtype": torch.bfloat16},
    "another output dtype": {"reduce_dtype": torch.float32, "output_dtype": torch.bfloat16},
    "another cast of inputs": {"reduce_dtype": torch.float32, "cast_forward_inputs": False},
}
"""The mixed precision of the rank that differs."""


def set_bucket_cap(model: Any, at: int) -> None:
    from fsdp_c import set_bucket_cap

    set_bucket_cap(model, 1)


def set_version(model: Any, at: int) -> None:
    from fsdp_c._runtime import plan_hash

    plan_hash.__version__ = "0.0.0"


SETTINGS: dict[str, Callable[[Any, int], Any]] = {
    "another divide factor": lambda model, at: model.blocks[at].set_gradient_divide_factor(7.0),
    "another prefetch": lambda model, at: model.blocks[at - 1].set_modules_to_forward_prefetch(
        [model.blocks[at + 1]]
    ),
    "another backward prefetch": lambda model, at: model.blocks[
        at + 1
    ].set_modules_to_backward_prefetch([model.blocks[at - 1]]),
    "another reduction": lambda model, at: model.blocks[at].set_force_sum_reduction_for_comms(True),
    "another unshard_in_backward": lambda model, at: model.blocks[at].set_unshard_in_backward(
        False
    ),
    "another reduction of unused parameters": lambda model, at: model.blocks[
        at
    ].set_reduce_scatter_unused_params(True),
    "another bucket size": set_bucket_cap,
    "another version": set_version,
}
"""Settings that a rank changes before the first forward; ``at``: the block that differs."""

LATER: dict[str, Callable[[Any, int], Any]] = {
    "frozen later": lambda model, at: model.blocks[at].first.weight.requires_grad_(False),
    "block frozen later": lambda model, at: model.blocks[at].requires_grad_(False),
    "divide factor later": SETTINGS["another divide factor"],
    "prefetch later": SETTINGS["another prefetch"],
    "backward prefetch later": SETTINGS["another backward prefetch"],
    "reshard later": lambda model, at: model.blocks[at].set_reshard_after_forward(False),
    "reduction later": SETTINGS["another reduction"],
    "unshard_in_backward later": SETTINGS["another unshard_in_backward"],
    "dtype later": lambda model, at: model.blocks[at].first.to(torch.bfloat16),
    "no gradient sync": lambda model, at: model.set_requires_gradient_sync(False),
    "no gradient sync of a block": lambda model, at: model.blocks[at].set_requires_gradient_sync(
        False
    ),
    "explicit unshard": lambda model, at: model.blocks[at + 2].unshard(),
}
"""Settings that a rank changes after the first steps."""

OWN_ERROR_KIND = "unshard_in_backward later"
OWN_ERROR = "setStorage: "
"""A part of the exception of a rank that reads the parameters that it has not gathered again. The
rank that differs may raise it in cases of OWN_ERROR_KIND."""

STATIC = (
    "another shape",
    "another shape of equal size",
    "another dtype",
    "another order of parameters",
    "another name",
    "another number of units",
    "another unit",
    "another list of modules",
    "another frozen parameter",
    "another placement",
    "another offload policy",
    "another reshard_after_forward",
    *POLICIES,
    *SETTINGS,
)
"""Kinds of divergence that the comparison of plans finds before the first gather."""

DYNAMIC = (
    "another order of blocks",
    "a block skipped",
    "a block twice",
    "a conditional parameter",
    "a detached block",
    "a forward that raised",
    "no backward",
    "a backward twice",
    "an evaluation",
    "an evaluation of a block",
    "another model",
    *LATER,
)
"""Kinds of divergence that the labels of collectives find."""


def make_mesh(hsdp: bool) -> DeviceMesh:
    """Returns a mesh with process groups of its own: they are not used after a mismatch."""
    limit = timedelta(seconds=LIMIT_SECONDS)
    if not hsdp:
        return DeviceMesh.from_group(dist.new_group(timeout=limit), "cpu")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dim in ("replicate", "shard"):
        dist.distributed_c10d._set_pg_timeout(limit, mesh.get_group(dim))
    return mesh


def run_case(api: Api, name: str, rank: int, variation: Variation) -> tuple[str, float]:
    """Returns the exception's text, or "silent", and the seconds since the divergence."""
    from fsdp_c._runtime import plan_hash

    mesh = make_mesh(variation.hsdp)
    is_different = rank == variation.differing_rank % mesh.size()
    case = Case(api, mesh, is_different, name, variation)
    version = plan_hash.__version__
    begin = time.monotonic()
    try:
        model = case.make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(variation.steps if name in DYNAMIC else 0):
            case.step(model, optimizer)
        begin = time.monotonic()
        if is_different and name in DYNAMIC:
            case.diverge(model)
        # Ranks that do not share a process group with this rank may raise one step later.
        for _ in range(3 if variation.hsdp else 2):
            case.step(model, optimizer)
        outcome = "silent"
    except RuntimeError as error:
        outcome = f"{type(error).__name__}: {error}"
    plan_hash.__version__ = version
    return outcome, time.monotonic() - begin


def run(
    rank: int, world_size: int, implementation: str, names: tuple[str, ...], variation: Variation
) -> dict[str, tuple[str, float]]:
    """Runs the cases one after the other."""
    api = Api(implementation)
    results = {}
    for name in names:
        results[name] = run_case(api, name, rank, variation)
        dist.barrier()
    return results


# ---- departures ----------------------------------------------------------------------------------


def make_model(group: Any, count: int = 3) -> Any:
    import fsdp_c

    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Model([Block(SIZE * (1 + i)) for i in range(count)])
    for block in model.blocks:
        fsdp_c.fully_shard(block, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh)


def train(model: Any, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, SIZE)).sum().backward()


def depart_alone(rank: int, world_size: int) -> str:
    """After three equal steps, rank 0 issues a gather of block 2 that the training steps do not
    issue at this point. The other ranks issue nothing."""
    group = dist.new_group()
    model = make_model(group)
    train(model)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2.0), group)
    message = ""
    if rank == 0:
        with torch.no_grad():
            message = error_message(lambda: model.blocks[2](torch.ones(2, SIZE)))
    dist.barrier()
    return message


def depart_after_an_interruption(rank: int, world_size: int) -> tuple[bool, str]:
    """Rank 0 runs block 2 alone and is interrupted. Then rank 0 runs block 2 again while the other
    ranks train.

    Returns whether the interruption was raised, and the message of the exception.
    """
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
    model = make_model(group)
    train(model)
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
    if rank == 0:
        return interrupted, error_message(lambda: model.blocks[2](torch.ones(2, SIZE)))
    return interrupted, error_message(lambda: train(model))


def _raise_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
