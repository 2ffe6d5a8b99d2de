"""States of several modules of which not all run; units in units; other composable functions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from behaviour import assert_same

pytestmark = pytest.mark.torch("2.13")  # what completes partial groups, and recomputes in units


def test_a_head_that_runs_by_itself_in_chunks() -> None:
    for found in assert_same("losses_in_chunks"):
        assert found["output cast"][0][0] == torch.bfloat16
        transitions = found["resharded"][1]
        assert transitions.count("P norm, head POST_BACKWARD") == 3  # two chunks, and the rest
        for steps in found.values():
            assert steps[1] == steps[4] == steps[7]  # each step begins anew
            assert all(gradient is not None for gradient in steps[2].values())


def test_parameters_may_be_kept_between_chunks() -> None:
    for found in assert_same("parameters_kept_for_chunks"):
        for log in found.values():
            for step in range(3):
                chunks, after, gradients = log[3 * step : 3 * step + 3]
                assert chunks[3] is True and chunks[6] is True
                assert after is False
                assert all(gradient is not None for gradient in gradients.values())


@pytest.mark.parametrize("name", ["accumulated_chunks", "two_forwards_without_the_head"])
def test_partial_forwards(name: str) -> None:
    assert_same(name)


def test_a_module_that_ran_alone_does_not_count_in_the_next_forward() -> None:
    for found in assert_same("a_member_that_runs_alone_between_whole_forwards"):
        whole = Counter(found[4])
        assert whole["P middle, last POST_BACKWARD"] == 1
        assert sum(count for event, count in whole.items() if event.startswith("U middle")) == 2


def test_recomputed_modules_do_not_count_in_the_next_forward() -> None:
    for found in assert_same("members_that_are_recomputed"):
        for name, steps in found.items():
            assert steps[1] == steps[4] == steps[7], name


def test_units_inside_of_checkpoints_are_prefetched_in_stocks_order() -> None:
    for found in assert_same("prefetched_within_checkpoints"):
        assert found["by default"][1] != found["as told"][1]
        assert found["by default"][2].keys() == found["as told"][2].keys()


@pytest.mark.parametrize("name", ["composable_checkpoints", "within_composable_ddp"])
def test_beside_other_composable_functions(name: str) -> None:
    assert_same(name)
