"""Behavior scenarios: functions that run under torch's FSDP2 and fsdp_c, in separate processes.

A worker module (``behavior_*.py``) defines functions marked ``@scenario(world)``. Each function
takes an ``Api`` and returns a picklable value. ``outcomes(...)`` runs all scenarios of one world
size in one launch per implementation, because a launch costs seconds and a scenario milliseconds.
Each process caches its launches. A scenario that raises does not stop the others: its outcome is a
``Raised``.
"""

from __future__ import annotations

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
from launch import RanksFailed, run_ranks
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from toy_models import ResidualBlock

MODULES = (
    "behavior_backwards",
    "behavior_events",
    "behavior_outputs",
    "behavior_training",
    "behavior_state",
    "behavior_one_rank",
    "behavior_dtypes",
    "behavior_subclasses",
    "behavior_extensions",
    "behavior_replicate",
    "behavior_groups",
    "behavior_internals",
    "behavior_zero_grad",
    "behavior_clipping",
    "behavior_direct_calls",
    "behavior_spmd_types",
)
DIM = 5
"""Width of the models in this file. Not divisible by 2, so that shards are uneven."""


@dataclass
class Api:
    """One implementation of FSDP2, in one rank of a launch."""

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
    def is_fsdp_c(self) -> bool:
        return self.name == "fsdp_c"

    def other(self) -> Api:
        """Returns the other implementation in this process."""
        return Api("torch" if self.is_fsdp_c else "fsdp_c", self.rank, self.world, self.folder)


@dataclass
class Raised:
    """Outcome of a scenario that raised: the type's name and the traceback."""

    kind: str
    text: str


Scenario = Callable[[Api], Any]
_scenarios: dict[int, dict[str, Scenario]] = {}


def scenario(world: int = 2) -> Callable[[Scenario], Scenario]:
    """Registers a function to run on ``world`` ranks."""

    def register(function: Scenario) -> Scenario:
        name = function.__name__
        registered = _scenarios.setdefault(world, {})
        if name in registered:
            raise ValueError(f"scenario {name!r} is already registered")
        registered[name] = function
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
    """Runs the scenarios of ``modules`` that are registered for ``world`` ranks.

    If ``only`` is not empty, runs only the scenarios that it names. Returns outcomes by name.
    """
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
        _wait_for_all_ranks(rank, world, title)
    return results


def _wait_for_all_ranks(rank: int, world: int, title: str) -> None:
    """Blocks until every rank has run the scenario.

    The store replaces ``dist.barrier()``: after an error, torch's FSDP2 leaves collectives pending,
    and gloo's barrier raises their errors.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{title}/{rank}", "")
    store.wait([f"{title}/{peer}" for peer in range(world)])


def blocks_and_head(blocks: int = 3, seed: int = 7) -> nn.Sequential:
    """Returns residual blocks and a linear head, which stays in the root's parameter group."""
    torch.manual_seed(seed)
    return nn.Sequential(*(ResidualBlock(DIM) for _ in range(blocks)), nn.Linear(DIM, 3))


def shard(api: Api, model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    for block in list(model)[:-1]:
        api.fully_shard(block, **kwargs)
    return api.fully_shard(model, **kwargs)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(100 * rank + step))


def full_value(tensor: Any) -> torch.Tensor:
    """Returns a copy of a tensor, gathered from all ranks if it is a DTensor."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def full_values(tensors: dict[str, Any]) -> dict[str, Any]:
    """Applies ``full_value`` to every tensor; None stays None.

    DTensors sharded on dim 0 of a 1-D mesh share one all-gather per process group. One all-gather
    for each DTensor took a sixth of the run time of all scenarios.
    """
    together: dict[dist.ProcessGroup, list[str]] = {}
    for name, tensor in tensors.items():
        if _is_sharded_on_dim_0(tensor):
            together.setdefault(tensor.device_mesh.get_group(), []).append(name)
    gathered: dict[str, Any] = {}
    for group, names in together.items():
        gathered |= _gather_together({name: tensors[name] for name in names}, group)
    for name in tensors.keys() - gathered.keys():
        gathered[name] = None if tensors[name] is None else full_value(tensors[name])
    return {name: gathered[name] for name in tensors}


def _is_sharded_on_dim_0(tensor: Any) -> bool:
    return (
        isinstance(tensor, DTensor)
        and tensor.device_mesh.ndim == 1
        and type(tensor.placements[0]) is Shard
        and tensor.placements[0].dim == 0
        and type(tensor._local_tensor) is torch.Tensor
    )


def _gather_together(
    tensors: dict[str, DTensor], group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """All-gathers shards of dim 0 in one collective. Returns the full tensors by name."""
    world, rank = group.size(), group.rank()
    flat_shards = []
    for name, tensor in tensors.items():
        rows = -(-len(tensor) // world)
        own_rows = min(rows, max(len(tensor) - rank * rows, 0))
        local = tensor._local_tensor.detach()
        assert local.shape == (own_rows, *tensor.shape[1:]), (name, local.shape)
        padded = local.new_zeros((rows, *tensor.shape[1:]))
        padded[:own_rows] = local
        flat_shards.append(padded.view(-1).view(torch.uint8))
    flat = torch.cat(flat_shards)
    gathered = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(gathered, flat, group=group)
    sizes = [len(shard) for shard in flat_shards]
    shards_by_tensor = zip(*(rank_bytes.split(sizes) for rank_bytes in gathered))
    return {
        name: torch.cat(shards).view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
        for (name, tensor), shards in zip(tensors.items(), shards_by_tensor)
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return full_values(dict(model.named_parameters()))


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return full_values({name: p.grad for name, p in model.named_parameters()})


def train(
    model: nn.Module,
    rank: int,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[Any]:
    """Trains ``steps`` steps. Returns each step's loss and gradients, then the final weights."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    forward = forward or model
    results: list[Any] = []
    for step in range(steps):
        loss = forward(batch(rank, step)).square().mean()
        loss.backward()
        results += [loss.item(), grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, weights(model)]


def collectives(run: Callable[[], Any]) -> Counter[str]:
    """Returns the count of each dispatched collective that ``run()`` issues, by operator name.

    ``run`` contains at most one forward: CommDebugMode loses track of modules after a backward.
    """
    with CommDebugMode() as mode:
        run()
    return Counter({str(op): count for op, count in mode.get_comm_counts().items()})


# ---- in the tests ----


def outcomes(
    implementation: str,
    world: int,
    modules: tuple[str, ...] = MODULES,
    only: tuple[str, ...] = (),
    timeout: float = 240,
) -> list[dict[str, Any]]:
    """Returns, for each rank, a dict from scenario name to returned value or ``Raised``.

    If ``only`` is not empty, only the scenarios that it names run. If FSDP_C_TORCH_OUTCOMES names a
    folder, torch's outcomes are stored there and reused by later runs: `make test` runs the
    scenarios on two builds of fsdp_c.
    """
    stored = os.environ.get("FSDP_C_TORCH_OUTCOMES") if implementation == "torch" else None
    if stored is None:
        return _launch(implementation, world, modules, only, timeout)
    # The name contains a hash, because file systems limit names to 255 bytes.
    digest = hashlib.sha256(" ".join(modules + only).encode()).hexdigest()[:16]
    file = Path(stored) / f"{digest}_{world}.pkl"
    if not file.exists():
        results = _launch(implementation, world, modules, only, timeout)
        file.parent.mkdir(exist_ok=True, parents=True)
        partial = file.with_suffix(f".{os.getpid()}")  # another worker may read or write the file
        partial.write_bytes(pickle.dumps(results))
        partial.rename(file)
    return _load(file)


@functools.cache
def _load(file: Path) -> list[dict[str, Any]]:
    return pickle.loads(file.read_bytes())


def _launch(*arguments: Any) -> list[dict[str, Any]]:
    results = _launch_once(*arguments)
    if isinstance(results, RanksFailed):
        raise results
    return results


@functools.cache
def _launch_once(
    implementation: str, world: int, modules: tuple[str, ...], only: tuple[str, ...], timeout: float
) -> list[dict[str, Any]] | RanksFailed:
    """Returns the outcomes, or the failure of the launch, so that other tests do not repeat it."""
    with tempfile.TemporaryDirectory(prefix="fsdp_c_scenarios_") as files:
        arguments = (implementation, files, modules, only)
        try:
            return run_ranks(run_scenarios, world, arguments, timeout=timeout)
        except RanksFailed as failure:
            return failure


def get_results(
    name: str, implementation: str, world: int = 2, modules: tuple[str, ...] = MODULES
) -> list[Any]:
    """Returns the scenario's result on each rank. Fails if it raised on any rank."""
    results = [ranks[name] for ranks in outcomes(implementation, world, modules)]
    for rank, result in enumerate(results):
        if isinstance(result, Raised):
            raise AssertionError(f"{implementation}, rank {rank}: {result.text}")
    return results


def get_exceptions(
    name: str, implementation: str, world: int = 2, modules: tuple[str, ...] = MODULES
) -> list[Raised]:
    """Returns the exception of the scenario on each rank. Fails if any rank did not raise."""
    results = [ranks[name] for ranks in outcomes(implementation, world, modules)]
    for rank, result in enumerate(results):
        if not isinstance(result, Raised):
            raise AssertionError(
                f"{implementation}, rank {rank}: expected an exception, got {result!r}"
            )
    return results


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Lists the differences between two nested structures, with their paths.

    Tensors are compared by dtype, shape and exact values.
    """
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return [f"{where}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"]
        if torch.equal(a, b):
            return []
        distance = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max()
        return [f"{where}: values differ by {distance}"]
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
    """Fails unless the scenario gave equal results under torch and fsdp_c. Returns fsdp_c's."""
    results = {kind: get_results(name, kind, world) for kind in ("fsdp_c", "torch")}
    mismatches = differences(results["torch"], results["fsdp_c"], name)
    assert not mismatches, "torch and fsdp_c differ:\n" + "\n".join(mismatches[:20])
    return results["fsdp_c"]
