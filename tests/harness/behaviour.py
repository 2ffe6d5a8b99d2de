"""Behaviour scenarios: functions that run under torch's FSDP2 and under fsdp_c, in own processes.

A worker module (``behaviour_*.py``) defines functions marked ``@scenario(world)``; each takes an
``Api`` and returns something that pickles. ``outcomes(...)`` runs all scenarios of one world size
in one launch for an implementation (a launch costs seconds, a scenario milliseconds) and remembers
what came back, across the workers of pytest-xdist too. A scenario that raises does not stop the
others: its outcome is a ``Raised``.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import os
import pickle
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from launch import run_ranks
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

MODULES = (
    "behaviour_backwards",
    "behaviour_events",
    "behaviour_outputs",
    "behaviour_training",
    "behaviour_state",
    "behaviour_solo",
    "behaviour_dtypes",
    "behaviour_subclasses",
    "behaviour_extensions",
    "behaviour_replicate",
    "behaviour_groups",
    "behaviour_internals",
    "behaviour_zero_grad",
    "behaviour_clipping",
    "behaviour_direct_calls",
)
DIM = 5
"""Width of the models here: not divisible by 2, so that shards are uneven."""


@dataclass
class Api:
    """One implementation, seen from one rank."""

    name: str
    rank: int
    world: int
    folder: Path

    @property
    def fully_shard(self) -> Callable[..., Any]:
        if self.name == "torch":
            from torch.distributed.fsdp import fully_shard
        else:
            from fsdp_c import fully_shard
        return fully_shard

    @property
    def replicate(self) -> Callable[..., Any]:
        if self.name == "torch":
            from torch.distributed._composable.replicate_with_fsdp import replicate
        else:
            from fsdp_c import replicate
        return replicate

    @property
    def ours(self) -> bool:
        return self.name == "fsdp_c"

    def other(self) -> Api:
        """The other implementation in this process."""
        return Api("torch" if self.ours else "fsdp_c", self.rank, self.world, self.folder)


@dataclass
class Raised:
    """The outcome of a scenario that raised."""

    kind: str
    text: str


Scenario = Callable[[Api], Any]
_scenarios: dict[int, dict[str, Scenario]] = {}


def scenario(world: int = 2) -> Callable[[Scenario], Scenario]:
    """Registers a function to be run on ``world`` ranks."""

    def register(function: Scenario) -> Scenario:
        name = function.__name__
        known = _scenarios.setdefault(world, {})
        if name in known:
            raise ValueError(f"two scenarios are called {name}")
        known[name] = function
        return function

    return register


# ---- in the ranks ----


def run_scenarios(
    rank: int,
    world: int,
    name: str,
    folder: str,
    modules: tuple[str, ...] = MODULES,
    only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Runs the scenarios of ``modules`` for ``world`` ranks under one implementation: all, or the
    named ones."""
    results: dict[str, Any] = {}
    for module in modules:
        importlib.import_module(module)
    for title, function in _scenarios[world].items():
        if function.__module__ not in modules or (only and title not in only):
            continue
        print("scenario", title, flush=True)
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results[title] = function(Api(name, rank, world, Path(folder)))
        except Exception as error:
            results[title] = Raised(type(error).__name__, traceback.format_exc())
        _meet(rank, world, title)
    return results


def _meet(rank: int, world: int, title: str) -> None:
    """All ranks have run the scenario. gloo's barrier would raise what a collective of it that is
    still in flight raises, which torch's own FSDP2 does not wait for after an error."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{title}/{rank}", "")
    store.wait([f"{title}/{peer}" for peer in range(world)])


class Block(nn.Module):
    """A residual block with two parameters of different shapes and a norm."""

    def __init__(self, width: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).relu()


def plain(blocks: int = 3, seed: int = 7) -> nn.Sequential:
    """Blocks, then a head that belongs to the root's own group."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(DIM, 3))


def shard(api: Api, model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    for block in list(model)[:-1]:
        api.fully_shard(block, **kwargs)
    return api.fully_shard(model, **kwargs)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * rank + step))


def whole(tensor: Any) -> torch.Tensor:
    """A DTensor gathered, a tensor copied."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def all_whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """``whole`` of each, or None. Rows that one group shards plainly travel in one collective: with
    DTensor's own, one for each, they took a sixth of all scenarios' time."""
    together: dict[dist.ProcessGroup, list[str]] = {}
    for name, tensor in tensors.items():
        if _has_plain_rows(tensor):
            together.setdefault(tensor.device_mesh.get_group(), []).append(name)
    found: dict[str, Any] = {}
    for group, names in together.items():
        found |= _gathered({name: tensors[name] for name in names}, group)
    for name in tensors.keys() - found.keys():
        found[name] = None if tensors[name] is None else whole(tensors[name])
    return {name: found[name] for name in tensors}


def _has_plain_rows(tensor: Any) -> bool:
    return (
        isinstance(tensor, DTensor)
        and tensor.device_mesh.ndim == 1
        and type(tensor.placements[0]) is Shard
        and tensor.placements[0].dim == 0
        and type(tensor._local_tensor) is torch.Tensor
    )


def _gathered(tensors: dict[str, DTensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The rows of all ranks, by name."""
    world, rank = group.size(), group.rank()
    parts = []
    for name, tensor in tensors.items():
        rows = -(-len(tensor) // world)
        own = min(rows, max(len(tensor) - rank * rows, 0))
        local = tensor._local_tensor.detach()
        assert local.shape == (own, *tensor.shape[1:]), (name, local.shape)
        part = local.new_zeros((rows, *tensor.shape[1:]))
        part[:own] = local
        parts.append(part.view(-1).view(torch.uint8))
    row = torch.cat(parts)
    everything = [torch.empty_like(row) for _ in range(world)]
    dist.all_gather(everything, row, group=group)
    columns = zip(*(one.split([len(part) for part in parts]) for one in everything))
    return {
        name: torch.cat(column).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        for (name, tensor), column in zip(tensors.items(), columns)
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return all_whole(dict(model.named_parameters()))


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return all_whole({name: p.grad for name, p in model.named_parameters()})


def train(
    model: nn.Module,
    rank: int,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[Any]:
    """Losses and gradients of ``steps`` steps, then the weights."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    forward = forward or model
    seen: list[Any] = []
    for step in range(steps):
        loss = forward(batch(rank, step)).square().mean()
        loss.backward()
        seen += [loss.item(), grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, weights(model)]


def collectives(run: Callable[[], Any]) -> Counter[str]:
    """Dispatcher ops that ``run()`` issues, by name. One forward at most: torch's CommDebugMode
    loses count of modules after a backward."""
    with CommDebugMode() as mode:
        run()
    return Counter({str(op): count for op, count in mode.get_comm_counts().items()})


# ---- in the tests ----


def folder_of(
    implementation: str, world: int, modules: tuple[str, ...], only: tuple[str, ...] = ()
) -> Path:
    """Where the test workers of this run share outcomes. Its name is short whatever the number of
    modules: file systems allow 255 bytes. Torch's own stay for the runs that come after where
    FSDP_C_STOCK_OUTCOMES names a folder: `make test` runs scenarios on two builds of ours."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    which = hashlib.sha256(" ".join(modules + only).encode()).hexdigest()[:16]
    kept = os.environ.get("FSDP_C_STOCK_OUTCOMES")
    if kept and implementation == "torch":
        return Path(kept) / f"{which}_{world}"
    return Path(tempfile.gettempdir()) / f"fsdp_c_{which}_{run}_{world}_{implementation}"


@functools.cache
def outcomes(
    implementation: str,
    world: int,
    modules: tuple[str, ...] = MODULES,
    only: tuple[str, ...] = (),
    timeout: float = 240,
) -> list[dict[str, Any]]:
    """For each rank: name of the scenario -> what it returned, or Raised. Run by one test worker,
    read by all; ``only`` the named ones, if any are named."""
    folder = folder_of(implementation, world, modules, only)
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        saved = folder / "outcomes.pkl"
        if not saved.exists():
            files = folder / "files"
            files.mkdir(exist_ok=True)
            found = run_ranks(
                run_scenarios,
                world,
                (implementation, str(files), modules, only),
                timeout=timeout,
            )
            saved.write_bytes(pickle.dumps(found))
        return pickle.loads(saved.read_bytes())


def returned(
    name: str, implementation: str, world: int = 2, modules: tuple[str, ...] = MODULES
) -> list[Any]:
    """What a scenario returned, rank by rank; fails where it raised."""
    results = [ranks[name] for ranks in outcomes(implementation, world, modules)]
    for rank, result in enumerate(results):
        if isinstance(result, Raised):
            raise AssertionError(f"{implementation}, rank {rank}: {result.text}")
    return results


def raised(
    name: str, implementation: str, world: int = 2, modules: tuple[str, ...] = MODULES
) -> list[Raised]:
    """What a scenario raised, rank by rank; fails where it did not."""
    results = [ranks[name] for ranks in outcomes(implementation, world, modules)]
    for rank, result in enumerate(results):
        if not isinstance(result, Raised):
            raise AssertionError(f"{implementation}, rank {rank}: no exception but {result!r}")
    return results


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """What differs between two structures; tensors are compared in bits, dtype included."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return [f"{where}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"]
        return [] if torch.equal(a, b) else [f"{where}: values differ by {(a - b).abs().max()}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} and {list(b)}"]
        return [line for key in a for line in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} items: {a} and {b}"]
        return [
            line
            for index, (x, y) in enumerate(zip(a, b))
            for line in differences(x, y, f"{where}[{index}]")
        ]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]


def assert_same(name: str, world: int = 2) -> list[Any]:
    """The scenario gave the same under both implementations; returns ours."""
    # Two test workers do not wait for one launch, but begin with one each.
    first = ["fsdp_c", "torch"]
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        first.reverse()
    results = {implementation: returned(name, implementation, world) for implementation in first}
    found = differences(results["torch"], results["fsdp_c"], name)
    assert not found, "torch's and ours differ:\n" + "\n".join(found[:20])
    return results["fsdp_c"]
