"""Parity of the features that the generated grid does not cover; see workers/features.py."""

from __future__ import annotations

import os

import features
import pytest
from launch import run_ranks

WORLD_SIZE = 4
UNDER_TEST = os.environ.get("FSDP_C_PARITY_IMPLEMENTATION", "fsdp_c")

Records = list[dict[str, features.Record]]

# The first test runs all cases and the others read its results, so one worker runs all of them.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("parity features")]


@pytest.fixture(scope="module")
def records() -> tuple[Records, Records]:
    """Returns the records of every rank under torch and under fsdp_c."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    torch_records, fsdp_c_records = (
        run_ranks(
            features.run, WORLD_SIZE, (name,), timeout=400, env=one_thread, collective_timeout=300
        )
        for name in ("torch", UNDER_TEST)
    )
    return torch_records, fsdp_c_records


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.torch(features.SINCE.get(name, "2.11")))
        for name in features.CASES
    ],
)
def test_feature_results_match_torch(records: tuple[Records, Records], name: str) -> None:
    features.assert_same_bits(*records, name)
