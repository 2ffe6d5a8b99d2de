"""Ranks that are threads, on devices of one process, train together as stock's do."""

from __future__ import annotations

import pytest
import talking_ranks
import torch
from launch import run_ranks
from talking_ranks import Told

pytestmark = pytest.mark.xdist_group("accelerator_scenarios")


@pytest.fixture(scope="module")
def told() -> Told:
    (found,) = run_ranks(talking_ranks.run, 1, timeout=280)
    return found


@pytest.mark.parametrize("name", talking_ranks.SCENARIOS)
def test_every_rank_has_the_bits_of_stock_and_nobody_races(told: Told, name: str) -> None:
    stock, ours = told.talks[name]["torch"], told.talks[name]["fsdp_c"]
    assert "Error: " not in str([record[0] for record in stock.records])
    assert ours.records == stock.records
    assert ours.findings == stock.findings == []
    losses = {record[0] for record in ours.records}
    assert len(losses) == talking_ranks.RANKS, "all ranks have the same data"


def test_together_they_train_one_model(told: Told) -> None:
    for together, alone in told.weights["cpu:gloo,sim:sccl"]:
        torch.testing.assert_close(together, alone)


def test_without_moving_data_they_do_not(told: Told) -> None:
    assert not all(
        torch.allclose(together, alone) for together, alone in told.weights["cpu:gloo,sim:loop"]
    )
