"""Parity: the same seeded model and script, in bits, under torch's FSDP2 and under fsdp_c.

Every setting is trained for three steps by scenario.py in processes of its own under each
implementation, and everything noted on the way must be equal: losses, gradients, parameters and how
they are registered, state dicts, hooks, exceptions, and the number, order, size and ranks of the
collectives. The basic grid (grid.py) runs on one rank, and in turns on two and on four; each of the
settings of the wide grid (wide.py) on one launch: two or four processes, or eight threads.

Environment: FSDP_C_PARITY_COUNT (settings in all, 260), FSDP_C_PARITY_SEED, FSDP_C_PARITY_WHOLE=1
(the basic grid on two and on four ranks; `make parity`: 600 settings), FSDP_C_PARITY_FEATURES
(surface.py), FSDP_C_PARITY_LAUNCHES ("gloo1,gloo2,gloo4,threads8"), FSDP_C_PARITY_OURS (the
implementation held against torch, "fsdp_c"; "torch" compares torch with itself, "module:function"
anything else).
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from grid import at_world_size, generate
from record import differences, trained
from setting import Launch, Setting
from surface import LANDED, landed, needed
from wide import generate_wide
from worker import RankRecords, run_grid

# The first test of a launch runs all its settings. What hangs is found by the workers: this limit
# is above all of theirs.
pytestmark = pytest.mark.timeout(7200)

OURS = os.environ.get("FSDP_C_PARITY_OURS", "fsdp_c")
SEED = int(os.environ.get("FSDP_C_PARITY_SEED", "0"))
COUNT = int(os.environ.get("FSDP_C_PARITY_COUNT", "260"))
LAUNCHES = [Launch(1), Launch(2), Launch(4), Launch(8, threads=True)]
WHOLE = os.environ.get("FSDP_C_PARITY_WHOLE", "0") != "0"
ASKED = os.environ.get("FSDP_C_PARITY_LAUNCHES", ",".join(map(str, LAUNCHES))).split(",")


BASIC = generate(SEED, COUNT * 2 // 5)
LACKING = [setting for setting in BASIC if not needed(setting) <= LANDED]
"""Settings of the basic grid that the installed torch cannot train; none with a recent one."""


def _plan() -> dict[Launch, list[Setting]]:
    """The settings of each launch."""
    basic = [setting for setting in BASIC if setting not in LACKING]
    parts = {
        Launch(1): basic,
        Launch(2): basic if WHOLE else basic[::2],
        Launch(4): basic if WHOLE else basic[1::2],
    }
    plan = {
        launch: [at_world_size(s, launch.world_size) for s in parts.get(launch, [])]
        for launch in LAUNCHES
        if str(launch) in ASKED
    }
    for launch, setting in generate_wide(SEED, COUNT - len(BASIC), landed()):
        if launch in plan:
            plan[launch].append(setting)
    return plan


PLAN = _plan()
Results = Callable[[bool, Launch], list[RankRecords]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """``results(ours, launch)``: the records of its settings, run when first asked for.

    Workers of pytest-xdist share them through files. One that finds the settings of an
    implementation being run by another worker takes the other implementation's, then waits.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "parity"
    folder.mkdir(exist_ok=True)
    known: dict[tuple[bool, Launch], list[RankRecords]] = {}

    def find(ours: bool, launch: Launch) -> list[RankRecords]:
        if (ours, launch) not in known:
            if not _shared(folder, ours, launch, wait=False):
                _shared(folder, not ours, launch, wait=False)
                _shared(folder, ours, launch, wait=True)
            known[ours, launch] = pickle.loads(_saved(folder, ours, launch).read_bytes())
        return known[ours, launch]

    return find


def _saved(folder: Path, ours: bool, launch: Launch) -> Path:
    return folder / f"{'ours' if ours else 'stock'}_{launch}.pkl"


def _shared(folder: Path, ours: bool, launch: Launch, wait: bool) -> bool:
    """Run the settings unless that was done. False, without ``wait``: another worker is at it."""
    saved = _saved(folder, ours, launch)
    with saved.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        if not saved.exists():
            # Interpreters order sets each in its own way, forks all in one: ours must not care.
            fresh = ours and launch == Launch(2)
            implementation = OURS if ours else "torch"
            records = run_grid(implementation, PLAN[launch], launch, folder, ours, fresh=fresh)
            saved.write_bytes(pickle.dumps(records))
        return True


@pytest.mark.parametrize("launch", PLAN, ids=str)
def test_stock_trains_nearly_every_setting(results: Results, launch: Launch) -> None:
    """A setting that raises compares little else: such must stay rare."""
    settings = PLAN[launch]
    endings = [records[0][-1] for records in results(False, launch)]
    failed = [
        f"{setting}: {ending[1]}"
        for setting, ending in zip(settings, endings, strict=True)
        if ending[0] in ("error", "crash", "not run")
    ]
    assert len(failed) <= 0.03 * len(settings), "\n".join(failed)


@pytest.mark.parametrize(
    ("launch", "index"),
    [
        pytest.param(launch, index, id=f"{launch}-{index:03d}-{setting}")
        for launch, settings in PLAN.items()
        for index, setting in enumerate(settings)
    ]
    + [
        pytest.param(launch, -1, id=f"{launch}-{setting}", marks=pytest.mark.torch("2.13"))
        for launch in PLAN
        for setting in LACKING
    ],
)
def test_same_bits(results: Results, launch: Launch, index: int) -> None:
    stock, ours = results(False, launch)[index], results(True, launch)[index]
    found = [
        f"rank {rank}: {line}"
        for rank in range(launch.world_size)
        for line in differences(stock[rank], ours[rank])
    ]
    assert not found, f"{PLAN[launch][index]!r}\n" + "\n".join(found)


def test_uneven_shards_on_a_smaller_mesh_train_to_the_same_bits(tmp_path: Path) -> None:
    """Left out of the grid: stock cuts them in rows of another size (tests/TORCH_BUGS.md, B5), so
    that its collectives there are not ours. What is trained must be the same all the same."""
    plain = Setting(family="odd", reshard="2")
    settings = [plain, replace(plain, param="bf16"), replace(plain, comm="custom", inference=True)]
    stock = run_grid("torch", settings, Launch(4), tmp_path, ours=False)
    ours = run_grid(OURS, settings, Launch(4), tmp_path, ours=True)
    for index, setting in enumerate(settings):
        for rank in range(4):
            left, right = trained(stock[index][rank]), trained(ours[index][rank])
            assert left[-1][0].startswith("final state")
            assert differences(left, right) == [], setting
