"""The parity grid on the simulated accelerator: the same bits, and nobody races.

Every setting is trained by both implementations on ranks of their own, whose collectives run on
streams and whose backward runs in device threads. The settings are those of tests/parity that two
and four processes run. ``FSDP_C_ACCELERATOR_WHOLE=1`` (`make accelerator`) takes all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from grid import at_world_size, generate
from record import Entry, differences
from setting import Launch, Setting
from surface import LANDED, landed, needed
from wide import generate_wide
from worker import RankRecords, run_grid

pytestmark = pytest.mark.timeout(3600)

WHOLE = os.environ.get("FSDP_C_ACCELERATOR_WHOLE", "0") != "0"
BASIC = 140
WIDE = 190
TWO, FOUR = Launch(2), Launch(4)

STOCK_RACES = (("prefetch=forward", "interleaved"), ("reshard,", "schedule=reversed"))
"""Settings in which nobody waits for a prefetched gather: B16 in tests/STOCK_BUGS.md."""


def _plan() -> dict[Launch, list[Setting]]:
    """The settings of each launch."""
    basic = [at_world_size(s, 2) for s in generate(0, BASIC) if needed(s) <= LANDED]
    plan: dict[Launch, list[Setting]] = {TWO: basic, FOUR: []}
    for launch, setting in generate_wide(0, WIDE, landed()):
        if launch in plan and not setting.compiled:
            plan[launch].append(setting)
    if not WHOLE:
        plan[FOUR] = plan[FOUR][::5]
    return plan


PLAN = _plan()
Results = Callable[[bool, Launch], list[RankRecords]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """``results(ours, launch)``: the records of its settings, run when first asked for."""
    import device_ranks

    known: dict[tuple[bool, Launch], list[RankRecords]] = {}

    def find(ours: bool, launch: Launch) -> list[RankRecords]:
        if (ours, launch) not in known:
            known[ours, launch] = run_grid(
                "fsdp_c" if ours else "torch",
                PLAN[launch],
                launch,
                tmp_path_factory.mktemp("grid"),
                ours,
                target=device_ranks.run,
                backend=device_ranks.BACKEND,
                env={"FSDP_C_PARITY_DEVICE": "sim"},
            )
        return known[ours, launch]

    return find


CASES = [
    pytest.param(
        launch,
        index,
        id=f"{launch}-{index:03d}-{setting}",
        marks=pytest.mark.xdist_group(f"accelerator_{launch}"),
    )
    for launch, settings in PLAN.items()
    for index, setting in enumerate(settings)
]


def _parted(entries: list[Entry]) -> tuple[list[str], list[Entry]]:
    """What the device found, and what was trained."""
    label, found = entries[0]
    return (found, entries[1:]) if label == "findings" else ([], entries)


@pytest.mark.parametrize(("launch", "index"), CASES)
def test_same_bits_and_no_race(results: Results, launch: Launch, index: int) -> None:
    stock, ours = results(False, launch)[index], results(True, launch)[index]
    setting = str(PLAN[launch][index])
    for rank in range(launch.world_size):
        (races, theirs), (found, trained) = _parted(stock[rank]), _parted(ours[rank])
        assert found == [], f"rank {rank}: ours races"
        known = any(all(word in setting for word in words) for words in STOCK_RACES)
        assert races == [] or known, f"rank {rank}: {races}"
        assert differences(theirs, trained) == [], f"rank {rank}"


@pytest.mark.parametrize(
    "launch",
    [pytest.param(one, marks=pytest.mark.xdist_group(f"accelerator_{one}")) for one in PLAN],
)
def test_stock_trains_nearly_every_setting(results: Results, launch: Launch) -> None:
    endings = [records[0][-1] for records in results(False, launch)]
    failed = [
        f"{setting}: {ending[1]}"
        for setting, ending in zip(PLAN[launch], endings, strict=True)
        if ending[0] in ("error", "crash", "not run")
    ]
    assert len(failed) <= 0.03 * len(endings), "\n".join(failed)
