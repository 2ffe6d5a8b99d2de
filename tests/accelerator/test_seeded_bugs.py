"""The simulated accelerator is believed because it bites: every bug of seeded.py is reported."""

from __future__ import annotations

import pytest
import seeded
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("accelerator_bugs")


@pytest.fixture(scope="module")
def findings() -> dict[str, list[str]]:
    (found,) = run_ranks(seeded.run, 1, timeout=280, fresh=True)
    return found


@pytest.mark.parametrize("name", seeded.BUGS)
def test_a_seeded_bug_is_found(findings: dict[str, list[str]], name: str) -> None:
    bug = seeded.BUGS[name]
    assert findings[name], "no finding"
    assert bug.shows in findings[name][0]
