"""On the simulated accelerator ours never launches, records or holds more than stock."""

from __future__ import annotations

import figures
import pytest
from figures import Figures
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("accelerator_figures")

OURS = ("ours", "ours, no kernels")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Figures]]:
    (by_variant,) = run_ranks(figures.run, 1, timeout=280)
    return by_variant


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("variant", figures.VARIANTS)
def test_never_more_than_stock(
    found: dict[str, dict[str, Figures]], variant: str, ours: str
) -> None:
    stock, mine = found[variant]["stock"], found[variant][ours]
    assert mine.launches <= stock.launches
    assert mine.recorded <= stock.recorded
    assert mine.waited <= stock.waited
    assert mine.peak <= stock.peak
