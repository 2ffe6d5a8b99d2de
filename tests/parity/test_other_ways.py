"""Parity in other ways of moving the same data: a part of the basic grid, on two ranks. Torch's
multi-tensor operations take the place of our kernels, as on a device that has none; or every
parameter's part of a row is a message of its own, as large ones' are. (Collectives are recorded, so
that the rows themselves are whole: test_pieces.py has those that are not.) Or every parameter is
reduced by itself, which changes the collectives and nothing that is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from grid import at_world_size, generate
from record import differences, trained
from setting import Launch, Setting
from surface import LANDED, needed
from worker import RankRecords, run_grid

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("parity_other_ways")]

LAUNCH = Launch(2)
SETTINGS = [at_world_size(s, 2) for s in generate(1, 16) if needed(s) <= LANDED]
# What the grid's draw may lack: another dim than 0.
SETTINGS += [Setting(placement="last"), Setting(placement="mixed", param="bf16", reduce="fp32")]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> list[RankRecords]:
    return run_grid("torch", SETTINGS, LAUNCH, tmp_path_factory.mktemp("stock"), ours=False)


@pytest.mark.parametrize("way", ["without_kernels", "in_pieces"])
def test_same_bits(stock: list[RankRecords], tmp_path: Path, way: str) -> None:
    ours = run_grid(f"{way}:fully_shard", SETTINGS, LAUNCH, tmp_path, ours=True)
    for index, setting in enumerate(SETTINGS):
        for rank in range(2):
            assert differences(stock[index][rank], ours[index][rank]) == [], setting


def test_same_bits_in_buckets(stock: list[RankRecords], tmp_path: Path) -> None:
    ours = run_grid("in_buckets:fully_shard", SETTINGS, LAUNCH, tmp_path, ours=True)
    longer = 0
    for index, setting in enumerate(SETTINGS):
        for rank in range(2):
            left, right = stock[index][rank], ours[index][rank]
            assert differences(trained(left), trained(right)) == [], setting
            longer += len(right) > len(left)
    assert longer > len(SETTINGS)  # more collectives in most settings: there were buckets
