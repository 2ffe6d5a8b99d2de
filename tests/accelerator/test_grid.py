"""The parity grid on the simulated accelerator: bits equal to torch's, and no races.

Both implementations train every setting, each on its own ranks. Collectives run on streams, and
backward runs in device threads. The settings are those of tests/parity for two and four processes.
``FSDP_C_ACCELERATOR_WHOLE=1`` (`make accelerator`) selects all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from feature_support import SUPPORTED, enabled_features, features_of
from grid import at_world_size, generate
from record import Entry, differences
from setting import Launch, Setting
from wide import generate_wide
from worker import RankRecords, run_grid

pytestmark = pytest.mark.timeout(3600)

WHOLE = os.environ.get("FSDP_C_ACCELERATOR_WHOLE", "") not in ("", "0")
BASIC = 140
"""Number of generated settings of the basic grid. Unsupported ones are then removed."""
WIDE = 190
"""Number of generated settings of the wide grid."""
TWO, FOUR = Launch(2), Launch(4)

TORCH_RACES = (("prefetch=forward", "interleaved"), ("reshard,", "schedule=reversed"))
"""Parts of the names of settings in which torch never waits for a prefetched all-gather: B16 in
tests/TORCH_BUGS.md."""


def _settings_by_launch() -> dict[Launch, list[Setting]]:
    basic = [at_world_size(s, 2) for s in generate(0, BASIC) if features_of(s) <= SUPPORTED]
    settings: dict[Launch, list[Setting]] = {TWO: basic, FOUR: []}
    for launch, setting in generate_wide(0, WIDE, enabled_features()):
        if launch in settings and not setting.compiled:
            settings[launch].append(setting)
    if not WHOLE:
        settings[TWO] = settings[TWO][::3]
        settings[FOUR] = settings[FOUR][::8]
    return settings


SETTINGS = _settings_by_launch()
GetRecords = Callable[[bool, Launch], list[RankRecords]]


@pytest.fixture(scope="module")
def get_records(tmp_path_factory: pytest.TempPathFactory) -> GetRecords:
    """``get_records(use_fsdp_c, launch)`` runs the launch's settings at its first call and caches
    their records."""
    import device_ranks

    cache: dict[tuple[bool, Launch], list[RankRecords]] = {}

    def get(use_fsdp_c: bool, launch: Launch) -> list[RankRecords]:
        if (use_fsdp_c, launch) not in cache:
            cache[use_fsdp_c, launch] = run_grid(
                "fsdp_c" if use_fsdp_c else "torch",
                SETTINGS[launch],
                launch,
                tmp_path_factory.mktemp("grid"),
                use_fsdp_c,
                target=device_ranks.run,
                backend=device_ranks.BACKEND,
                env={"FSDP_C_PARITY_DEVICE": "sim"},
            )
        return cache[use_fsdp_c, launch]

    return get


CASES = [
    pytest.param(
        launch,
        index,
        id=f"{launch}-{index:03d}-{setting}",
        marks=pytest.mark.xdist_group(f"accelerator_{launch}"),
    )
    for launch, settings in SETTINGS.items()
    for index, setting in enumerate(settings)
]


def _split_findings(entries: list[Entry]) -> tuple[list[str], list[Entry]]:
    """Returns the device's findings and the training's entries."""
    label, findings = entries[0]
    return (findings, entries[1:]) if label == "findings" else ([], entries)


@pytest.mark.parametrize(("launch", "index"), CASES)
def test_setting_matches_torch_bitwise_without_races(
    get_records: GetRecords, launch: Launch, index: int
) -> None:
    expected, actual = get_records(False, launch)[index], get_records(True, launch)[index]
    setting = str(SETTINGS[launch][index])
    for rank in range(launch.world_size):
        torch_findings, torch_entries = _split_findings(expected[rank])
        findings, entries = _split_findings(actual[rank])
        assert findings == [], f"rank {rank}: fsdp_c races"
        is_known = any(all(word in setting for word in words) for words in TORCH_RACES)
        assert torch_findings == [] or is_known, f"rank {rank}: {torch_findings}"
        assert differences(torch_entries, entries) == [], f"rank {rank}"


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(launch, marks=pytest.mark.xdist_group(f"accelerator_{launch}"))
        for launch in SETTINGS
    ],
)
def test_torch_trains_at_least_97_percent_of_settings_on_device(
    get_records: GetRecords, launch: Launch
) -> None:
    last_entries = [records[0][-1] for records in get_records(False, launch)]
    failures = [
        f"{setting}: {entry[1]}"
        for setting, entry in zip(SETTINGS[launch], last_entries, strict=True)
        if entry[0] in ("error", "crash", "not run")
    ]
    assert len(failures) <= 0.03 * len(last_entries), "\n".join(failures)
