"""The simulated device itself: torch's operators, stream order, memory, access by the host."""

from __future__ import annotations

import device_checks
import pytest
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("accelerator_device")


@pytest.fixture(scope="module")
def error_by_check() -> dict[str, str]:
    (errors,) = run_ranks(device_checks.run, 1, timeout=280)
    return errors


@pytest.mark.parametrize("name", device_checks.CHECKS)
def test_simulated_device_passes_check(error_by_check: dict[str, str], name: str) -> None:
    assert error_by_check[name] == ""
