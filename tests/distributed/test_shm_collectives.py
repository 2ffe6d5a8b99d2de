"""Collectives over shared memory have the bits of torch's gloo backend."""

from __future__ import annotations

import functools
import platform

import pytest
import shm_collectives
import torch
from launch import run_ranks

import fsdp_c


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_bits_of_shared_memory_collectives_match_gloo(world: int) -> None:
    for differing, comparisons in run_ranks(shm_collectives.differences, world, timeout=300):
        assert comparisons > (300 if world < 8 else 230)
        assert differing == []


def test_waits_in_reverse_order_return_the_right_data() -> None:
    assert run_ranks(shm_collectives.wait_in_reverse_order, 3) == [True] * 3


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flushes on x86")
def test_flush_denormal_after_init_changes_sums_over_shared_memory_only() -> None:
    assert run_ranks(shm_collectives.sum_subnormal_numbers, 2) == [(True, False)] * 2


def test_dispatch_mode_does_not_receive_the_division_of_an_average() -> None:
    """The division runs with the mutex of the transport, so it must not call Python code."""
    results = run_ranks(shm_collectives.wait_under_dispatch_mode, 2)
    for rank, (operators, average) in enumerate(results):
        assert operators == []
        assert average == [2.0 * rank + 0.5, 2.0 * rank + 1.5]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FSDP_C_TRANSPORT", "gloo"),
        ("TORCH_FR_BUFFER_SIZE", "100"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "100"),
    ],
)
def test_veto_of_one_rank_declines_shared_memory(variable: str, value: str) -> None:
    assert run_ranks(shm_collectives.is_declined, 2, (variable, value)) == [True] * 2


def test_collectives_patched_on_one_of_two_ranks_are_called_and_keep_the_bits() -> None:
    (patched_equal, patched_calls), (peer_equal, peer_calls) = run_ranks(
        shm_collectives.train_with_patched_rank, 2
    )
    assert patched_equal and peer_equal
    # 2 steps, 3 units: 2 gathers and 1 reduction of each unit.
    assert (patched_calls, peer_calls) == (2 * (2 + 1) * 3, 0)


def test_observers_on_one_rank_count_the_collectives_of_torch() -> None:
    (observed_equal, counts), (peer_equal, _) = run_ranks(
        shm_collectives.train_with_observed_rank, 2
    )
    assert observed_equal and peer_equal
    assert counts == {
        "c10d._allgather_base_": 6,
        "c10d._reduce_scatter_base_": 3,
        "gloo:all_gather": 6,
        "gloo:reduce_scatter": 3,
        "messages": 0,
    }


def test_first_gathers_do_not_wait_for_peers() -> None:
    assert run_ranks(shm_collectives.send_before_peers_gather, 3, timeout=120) == [True] * 3


def test_ranks_with_different_numbers_of_sharded_models_train() -> None:
    assert run_ranks(shm_collectives.train_with_unequal_group_counts, 3) == [True] * 3


def test_timeout_set_after_the_negotiation_is_applied() -> None:
    timeout_error, peer_error = run_ranks(shm_collectives.wait_with_shorter_timeout, 2)
    assert "Timed out waiting 500ms" in timeout_error
    assert "failed on rank 1 of 2" in peer_error


def test_extra_forward_on_one_rank_raises() -> None:
    for text in run_ranks(shm_collectives.evaluate_on_one_rank, 2):
        assert "failed on rank" in text


def test_set_transport_changes_the_transport_and_keeps_the_bits() -> None:
    for transports, are_equal in run_ranks(shm_collectives.train_with_both_transports, 2):
        assert transports == ["direct", "gloo", "direct"]
        assert are_equal


@functools.cache
def switch_transports() -> list[dict[str, tuple[list[bool], ...]]]:
    return run_ranks(shm_collectives.switch_transports, 4)


@pytest.mark.xdist_group("switched transports")  # the tests share a launch
@pytest.mark.parametrize("layout", shm_collectives.LAYOUTS)
def test_set_transport_changes_the_transport_of_all_groups(layout: str) -> None:
    count = len(shm_collectives.LAYOUTS[layout][1])
    for results in switch_transports():
        assert results[layout] == ([True] * count, [False] * count, [True] * count)


def test_set_transport_with_invalid_arguments_raises() -> None:
    with pytest.raises(ValueError, match="transport should be"):
        fsdp_c.set_transport(torch.nn.Linear(2, 2), "nccl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set_transport"):
        fsdp_c.set_transport(torch.nn.Linear(2, 2), "gloo")
