"""Parity of the features that the generated grid does not reach: see features.py."""

from __future__ import annotations

import os

import features
import pytest
from launch import run_ranks

WORLD_SIZE = 4
OURS = os.environ.get("FSDP_C_PARITY_OURS", "fsdp_c")

Records = list[dict[str, features.Record]]

# The first test runs all cases, the others read its results: keep them on one worker.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("parity features")]


@pytest.fixture(scope="module")
def stock_and_ours() -> tuple[Records, Records]:
    """The records of every rank, under torch and under fsdp_c."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    stock, ours = (
        run_ranks(
            features.run, WORLD_SIZE, (name,), timeout=400, env=one_thread, collective_timeout=300
        )
        for name in ("torch", OURS)
    )
    return stock, ours


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.torch(features.SINCE.get(name, "2.11")))
        for name in features.CASES
    ],
)
def test_same_bits(stock_and_ours: tuple[Records, Records], name: str) -> None:
    features.assert_same_bits(*stock_and_ours, name)
