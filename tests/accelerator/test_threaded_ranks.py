"""Ranks that are threads of one process, each on its own simulated device, train as with torch."""

from __future__ import annotations

import pytest
import threaded_ranks
import torch
from launch import run_ranks
from threaded_ranks import Results

# In 2.11, the backward of torch's FSDP2 in threads on several devices ends in a SIGSEGV.
pytestmark = [pytest.mark.xdist_group("accelerator_scenarios"), pytest.mark.torch("2.12")]


@pytest.fixture(scope="module")
def results() -> Results:
    (returned,) = run_ranks(threaded_ranks.run, 1, timeout=280)
    return returned


@pytest.mark.parametrize("name", threaded_ranks.SCENARIOS)
def test_every_rank_matches_torch_bitwise_without_races(results: Results, name: str) -> None:
    expected, actual = results.runs[name]["torch"], results.runs[name]["fsdp_c"]
    assert [r[0] for r in expected.records if str(r[0]).startswith("raised ")] == []
    assert actual.records == expected.records
    assert actual.findings == expected.findings == []
    losses = {record[0] for record in actual.records}
    assert len(losses) == threaded_ranks.RANKS, "ranks must train on different data"


def test_ranks_train_to_weights_of_single_model_on_all_data(results: Results) -> None:
    for sharded, single in results.weights["cpu:gloo,sim:sccl"]:
        torch.testing.assert_close(sharded, single)


def test_ranks_diverge_from_single_model_without_data_exchange(results: Results) -> None:
    assert not all(
        torch.allclose(sharded, single) for sharded, single in results.weights["cpu:gloo,sim:loop"]
    )
