"""The simulated accelerator is believed because it bites: every bug of seeded.py is reported."""

from __future__ import annotations

import pytest
import seeded
from launch import run_ranks
from seeded import Told

pytestmark = pytest.mark.xdist_group("accelerator_bugs")


@pytest.fixture(scope="module")
def told() -> Told:
    (found,) = run_ranks(seeded.run, 1, timeout=280)
    return found


@pytest.mark.parametrize("name", seeded.BUGS)
def test_a_seeded_bug_is_found(told: Told, name: str) -> None:
    bug = seeded.BUGS[name]
    assert told.findings[name], "no finding"
    assert bug.shows in told.findings[name][0]


@pytest.mark.parametrize("name", seeded.LATE)
def test_what_is_read_too_early_has_wrong_bits_where_writes_are_late(told: Told, name: str) -> None:
    assert told.wrong[name] > 0


@pytest.mark.parametrize("name", seeded.EARLY)
def test_what_is_overwritten_too_early_has_wrong_bits_where_writes_are_early(
    told: Told, name: str
) -> None:
    early, unseen = told.early[name]
    assert early > 0
    assert unseen == 0


def test_no_write_may_come_early_without_a_bug(told: Told) -> None:
    assert set(told.clean_early.values()) == {0}


def test_late_writes_are_not_seen_without_a_bug(told: Told) -> None:
    assert set(told.clean.values()) == {0}
