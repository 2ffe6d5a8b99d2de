"""The simulated device itself: torch's operators, the order of streams, memory, the host."""

from __future__ import annotations

import device_checks
import pytest
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("accelerator_device")


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    (found,) = run_ranks(device_checks.run, 1, timeout=280)
    return found


@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_it_keeps_its_promises(results: dict[str, str], name: str) -> None:
    assert results[name] == ""
