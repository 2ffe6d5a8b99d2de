"""The simulated device reports every bug of seeded_bugs.py.

Delayed and early writes change bits with these bugs only.
"""

from __future__ import annotations

import pytest
import seeded_bugs
from launch import run_ranks
from seeded_bugs import Results

pytestmark = pytest.mark.xdist_group("accelerator_bugs")


@pytest.fixture(scope="module")
def results() -> Results:
    (returned,) = run_ranks(seeded_bugs.run, 1, timeout=280)
    return returned


@pytest.mark.parametrize("name", seeded_bugs.BUGS)
def test_seeded_bug_is_reported(results: Results, name: str) -> None:
    bug = seeded_bugs.BUGS[name]
    assert results.findings[name], "no finding"
    assert bug.expected in results.findings[name][0]


@pytest.mark.parametrize("name", seeded_bugs.EARLY_READS)
def test_read_without_wait_changes_bits_if_writes_are_delayed(results: Results, name: str) -> None:
    assert results.wrong_under_delay[name] > 0


@pytest.mark.parametrize("name", seeded_bugs.EARLY_OVERWRITES)
def test_overwrite_without_wait_changes_bits_if_writes_come_early(
    results: Results, name: str
) -> None:
    writes, unchanged_runs = results.early_writes[name]
    assert writes > 0
    assert unchanged_runs == 0


def test_no_write_can_come_early_without_seeded_bug(results: Results) -> None:
    assert set(results.early_writes_without_bug.values()) == {0}


def test_delayed_writes_change_no_bits_without_seeded_bug(results: Results) -> None:
    assert set(results.wrong_without_bug.values()) == {0}
