"""Parity: the same seeded model and script under torch's FSDP2 and under fsdp_c, compared in bits.

scenario.py trains every setting for three steps under each implementation, in separate processes.
All recorded results must be equal: losses, gradients, parameters and their registration, state
dicts, hooks, exceptions, and the number, order, size and ranks of the collectives. Each setting of
the basic grid (grid.py) runs on one rank, and in turns on two or four ranks. Each setting of the
wide grid (wide.py) runs on one launch: two or four processes, or eight threads.

Environment:
- FSDP_C_PARITY_COUNT: total number of settings (140; `make parity`: 600).
- FSDP_C_PARITY_SEED: the seed of the grids.
- FSDP_C_PARITY_WHOLE=1: runs the whole basic grid on two and on four ranks.
- FSDP_C_PARITY_FEATURES: see feature_support.py.
- FSDP_C_PARITY_LAUNCHES: the launches to run ("gloo1,gloo2,gloo4,threads8").
- FSDP_C_PARITY_IMPLEMENTATION: the implementation to compare with torch. The default is
  "fsdp_c"; "torch" compares torch with itself, and "module:function" selects any other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from feature_support import SUPPORTED, enabled_features, features_of
from grid import at_world_size, generate
from record import differences, tensor_entries
from setting import Launch, Setting
from wide import generate_wide
from worker import RankRecords, run_grid

# The first test of a launch runs all its settings. The workers detect hangs earlier: this limit
# exceeds all of theirs.
pytestmark = pytest.mark.timeout(7200)

UNDER_TEST = os.environ.get("FSDP_C_PARITY_IMPLEMENTATION", "fsdp_c")
SEED = int(os.environ.get("FSDP_C_PARITY_SEED", "0"))
COUNT = int(os.environ.get("FSDP_C_PARITY_COUNT", "140"))
LAUNCHES = [Launch(1), Launch(2), Launch(4), Launch(8, threads=True)]
WHOLE = os.environ.get("FSDP_C_PARITY_WHOLE", "") not in ("", "0")
REQUESTED = os.environ.get("FSDP_C_PARITY_LAUNCHES", ",".join(map(str, LAUNCHES))).split(",")


BASIC = generate(SEED, COUNT * 2 // 5)
UNSUPPORTED = [setting for setting in BASIC if not features_of(setting) <= SUPPORTED]
"""Settings of the basic grid that the installed torch does not support."""


def _plan() -> dict[Launch, list[Setting]]:
    """Returns the settings of each launch."""
    basic = [setting for setting in BASIC if setting not in UNSUPPORTED]
    parts = {
        Launch(1): basic,
        Launch(2): basic if WHOLE else basic[::2],
        Launch(4): basic if WHOLE else basic[1::2],
    }
    plan = {
        launch: [at_world_size(s, launch.world_size) for s in parts.get(launch, [])]
        for launch in LAUNCHES
        if str(launch) in REQUESTED
    }
    for launch, setting in generate_wide(SEED, COUNT - len(BASIC), enabled_features()):
        if launch in plan:
            plan[launch].append(setting)
    return plan


PLAN = _plan()
Results = Callable[[bool, Launch], list[RankRecords]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns ``results(under_test, launch)``: the records of the launch's settings.

    The first call for an implementation and a launch runs the settings.
    """
    folder = tmp_path_factory.mktemp("parity")

    @functools.cache
    def get_records(under_test: bool, launch: Launch) -> list[RankRecords]:
        # The iteration order of sets differs between fresh interpreters, but not between forks.
        # fsdp_c must not depend on it.
        fresh = under_test and launch == Launch(2)
        implementation = UNDER_TEST if under_test else "torch"
        return run_grid(implementation, PLAN[launch], launch, folder, under_test, fresh=fresh)

    return get_records


def in_group_of(launch: Launch) -> pytest.MarkDecorator:
    """Returns the mark that makes one pytest-xdist worker run all tests of the launch."""
    return pytest.mark.xdist_group(f"parity_{launch}")


@pytest.mark.parametrize(
    "launch", [pytest.param(launch, id=str(launch), marks=in_group_of(launch)) for launch in PLAN]
)
def test_torch_trains_at_least_97_percent_of_settings(results: Results, launch: Launch) -> None:
    """A setting that raises compares few results, so such settings must be rare."""
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
        pytest.param(launch, index, id=f"{launch}-{index:03d}-{setting}", marks=in_group_of(launch))
        for launch, settings in PLAN.items()
        for index, setting in enumerate(settings)
    ]
    + [
        # The mark skips these settings, which PLAN does not contain. The report lists them.
        pytest.param(launch, None, id=f"{launch}-{setting}", marks=pytest.mark.torch("2.13"))
        for launch in PLAN
        for setting in UNSUPPORTED
    ],
)
def test_setting_results_match_torch(results: Results, launch: Launch, index: int) -> None:
    expected, actual = results(False, launch)[index], results(True, launch)[index]
    lines = [
        f"rank {rank}: {line}"
        for rank in range(launch.world_size)
        for line in differences(expected[rank], actual[rank])
    ]
    assert not lines, f"{PLAN[launch][index]!r}\n" + "\n".join(lines)


def test_uneven_shards_on_smaller_mesh_match_torch(tmp_path: Path) -> None:
    """The grid excludes these settings, because torch splits the shards in rows of another size
    (tests/TORCH_BUGS.md, B5). The collectives therefore differ, but the results must be equal."""
    plain = Setting(family="odd", reshard="2")
    settings = [plain, replace(plain, param="bf16"), replace(plain, comm="custom", inference=True)]
    torch_records = run_grid("torch", settings, Launch(4), tmp_path, is_under_test=False)
    fsdp_c_records = run_grid(UNDER_TEST, settings, Launch(4), tmp_path, is_under_test=True)
    for index, setting in enumerate(settings):
        for rank in range(4):
            expected = tensor_entries(torch_records[index][rank])
            actual = tensor_entries(fsdp_c_records[index][rank])
            assert expected[-1][0].startswith("final state")
            assert differences(expected, actual) == [], setting
