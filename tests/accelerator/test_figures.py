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


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("variant", figures.VARIANTS)
def test_as_many_buffers_are_the_groups_as_with_stock(
    found: dict[str, dict[str, Figures]], variant: str, ours: str
) -> None:
    stock, mine = found[variant]["stock"], found[variant][ours]
    assert mine.given == stock.given
    assert (mine.given > 0) == ("memory from group" in variant)


@pytest.mark.parametrize("ours", OURS)
def test_buckets_bound_what_the_largest_unit_needs(
    found: dict[str, dict[str, Figures]], ours: str
) -> None:
    """Six blocks are one unit. Whole, its float32 row comes on top of its bfloat16 gradients; block
    by block the reduction needs less than the backward before it, which has the parameters."""
    assert found["one unit in buckets"][ours].peak < 0.9 * found["one unit"][ours].peak
