"""Parity: the same seeded model and script, in bits, under torch's FSDP2 and under fsdp_c.

Every setting of the grid (grid.py) is trained for three steps by scenario.py in processes of its
own under each implementation, and everything noted on the way must be equal: losses, gradients,
parameters and how they are registered, state dicts, hooks, exceptions, and the number, order and
size of the collectives.

Environment: FSDP_C_PARITY_SEED and FSDP_C_PARITY_COUNT (the grid), FSDP_C_PARITY_WORLDS (world
sizes, "1,2,4"), FSDP_C_PARITY_OURS (the implementation held against torch, "fsdp_c"; "torch"
compares torch with itself, "module:function" anything else).
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from grid import Setting, at_world_size, default_grid
from record import differences
from worker import RankRecords, run_grid

# The first test of a world size runs the whole grid. What hangs is found by the workers: this limit
# is above all of theirs.
pytestmark = pytest.mark.timeout(7200)

OURS = os.environ.get("FSDP_C_PARITY_OURS", "fsdp_c")
WORLDS = [int(size) for size in os.environ.get("FSDP_C_PARITY_WORLDS", "1,2,4").split(",")]
GRID = default_grid()

Results = Callable[[bool, int], list[RankRecords]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """``results(ours, world_size)``: the records of the whole grid, run when first asked for.

    Workers of pytest-xdist share them through a file: one runs the grid, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "parity"
    folder.mkdir(exist_ok=True)
    known: dict[tuple[bool, int], list[RankRecords]] = {}

    def find(ours: bool, world_size: int) -> list[RankRecords]:
        if (ours, world_size) not in known:
            known[ours, world_size] = _shared(folder, ours, world_size)
        return known[ours, world_size]

    return find


def _shared(folder: Path, ours: bool, world_size: int) -> list[RankRecords]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        saved = folder / f"{'ours' if ours else 'stock'}_{world_size}.pkl"
        if not saved.exists():
            implementation = OURS if ours else "torch"
            settings = [at_world_size(setting, world_size) for setting in GRID]
            records = run_grid(implementation, settings, world_size, folder, ours)
            saved.write_bytes(pickle.dumps(records))
        return pickle.loads(saved.read_bytes())


@pytest.mark.parametrize("world_size", WORLDS)
def test_stock_trains_nearly_every_setting(results: Results, world_size: int) -> None:
    """A setting that raises compares little else: such must stay rare."""
    endings = [records[0][-1] for records in results(False, world_size)]
    failed = [
        f"{setting}: {ending[1]}"
        for setting, ending in zip(GRID, endings, strict=True)
        if ending[0] in ("error", "crash", "not run")
    ]
    assert len(failed) <= 0.03 * len(GRID), "\n".join(failed)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    ("index", "setting"),
    list(enumerate(GRID)),
    ids=[f"{index:03d}-{setting}" for index, setting in enumerate(GRID)],
)
def test_same_bits(results: Results, index: int, setting: Setting, world_size: int) -> None:
    stock, ours = results(False, world_size)[index], results(True, world_size)[index]
    found = [
        f"rank {rank}: {line}"
        for rank in range(world_size)
        for line in differences(stock[rank], ours[rank])
    ]
    assert not found, f"{setting!r}\n" + "\n".join(found)
