"""Profiler ranges, collectives, order of events, and direct calls of unshard and reshard."""

from __future__ import annotations

import pytest
import releases
from behavior import assert_same, get_results

RS_WAIT = "FSDP::post_backward_rs_wait ("
ACCUMULATE = "FSDP::post_backward_accumulate"
"""torch 2.15 has no such range, because autograd accumulates."""


@pytest.mark.torch("2.13")
def test_profiler_ranges_match_names_and_order_of_torch() -> None:
    """Waits for earlier reductions may be missing: fsdp_c skips the wait for a finished one."""
    for by_fsdp_c, by_torch in zip(
        get_results("profiler_ranges", "fsdp_c"), get_results("profiler_ranges", "torch")
    ):
        for case, names in by_torch.items():
            ranges = by_fsdp_c[case]
            if releases.has("2.15"):
                ranges = [name for name in ranges if not name.startswith(ACCUMULATE)]
            waits = [name for name in ranges if name.startswith(RS_WAIT)]
            assert set(waits) <= set(names)
            assert [name for name in ranges if name not in waits] == [
                name for name in names if not name.startswith(RS_WAIT)
            ]


def test_profiler_ranges_cover_the_whole_step() -> None:
    for result in get_results("profiler_ranges", "fsdp_c"):
        labels = {name.split(" ")[0].removeprefix("FSDP::") for name in result["mixed"]}
        assert labels - {"post_backward_rs_wait"} == {
            "root_pre_forward",
            "cast_forward_inputs",
            "cast_forward_outputs",
            "pre_forward",
            "all_gather",
            "all_gather_copy_out",
            "post_forward",
            "pre_backward",
            "backward_prefetch",
            "post_backward_accumulate",
            "post_backward_reshard",
            "post_backward_reduce",
            "root_post_backward_callback",
        }
        assert "FSDP::backward_prefetch for 0" in result["fp32"]
        assert "FSDP::pre_forward (1)" in result["fp32"]


# U: an all-gather starts. P: a reduction starts. The name of the unit follows; the root has none.
FORWARD = "U U0 U1 U2"
FORWARD_OF_FOUR = f"{FORWARD} U3"
BACKWARD_OF_FOUR = "U3 U2 P3 U1 P2 U0 P1 P0 P"
ORDERS = {
    "reshard None": f"{FORWARD} U2 U1 P2 U0 P1 P0 P",
    "reshard True": f"{FORWARD} U U2 U1 P2 U0 P1 P0 P",
    "reshard False": f"{FORWARD} P2 P1 P0 P",
    "forward prefetch 1": f"{FORWARD_OF_FOUR} {BACKWARD_OF_FOUR}",
    "forward prefetch 2": f"{FORWARD_OF_FOUR} {BACKWARD_OF_FOUR}",
    "backward prefetch 1": f"{FORWARD_OF_FOUR} {BACKWARD_OF_FOUR}",
    "backward prefetch 2": f"{FORWARD_OF_FOUR} U3 U2 U1 P3 U0 P2 P1 P0 P",
    "input without gradient": f"{FORWARD} U2 U1 P2 U0 P1 P P0",
    "checkpointed": f"{FORWARD} U2 U1 P2 U0 P1 P0 P",
    # Backward of the second forward runs first; its gradients accumulate with those of the first.
    "two forwards": f"{FORWARD} U0 U1 U2 U2 U1 U0 U U2 U1 P2 U0 P1 P0 P",
    "grouped": "U0 U1, 2 U1, 2 U0 P1, 2 P0",
    "first of each group unused": " ".join(
        f"{event}layers.{first}, layers.{first + 1}"
        for event, first in (("U", 0), ("U", 2), ("U", 2), ("U", 0), ("P", 2), ("P", 0))
    ),
    # The first backward prefetches 1.left without using it.
    "two losses": "U0 U1.left U1.right U1.right U1.left P1.right U0 P0 U0 P1.left P0",
}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.torch("2.13")
def test_gathers_and_reductions_start_in_torchs_order(case: str) -> None:
    for result in assert_same("order_of_events"):
        assert " ".join(result[case]) == ORDERS[case]


def test_collective_counts_match_torch() -> None:
    for result in assert_same("counts_of_collectives"):
        gather, scatter = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
        assert result["reshard None: forward"] == {gather: 4}
        assert result["reshard None: backward"] == {gather: 3, scatter: 4}
        assert result["reshard False: backward"] == {scatter: 4}
        assert result["reshard True: no sync"] == {gather: 8}
        assert result["reshard True: kept"] == {gather: 4, scatter: 4}


def test_submodule_calls_after_forward_do_not_change_later_gathers() -> None:
    for result in assert_same("gathers_of_chunked_steps"):
        assert len(result["counts"]) == 6
        assert set(result["counts"]) == {("within forward", 2), ("after forward", 3)}


def test_direct_unshard_and_reshard_match_torch() -> None:
    for result in assert_same("unshard_and_reshard"):
        assert result["values"]
        assert result["unsharded 0"][1] == "UNSHARDED"
        assert result["in flight"][1] == result["resharded"][1] == "SHARDED"
        assert result["waited"][1] == result["waited twice"][1] == "UNSHARDED"
        assert result["late wait"] == result["after backward"]
        assert result["handle"] == "UnshardHandle"
        assert result["no handle"] is None


def test_accumulation_collective_counts_match_torch() -> None:
    for result in assert_same("counts_of_accumulation"):
        gather, scatter = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
        default, kept = "reshard after forward None", "reshard after forward False"
        always, at_end = "after backward True", "after backward False"
        assert result[f"all, {default}, {always}"][0] == {gather: 3 * (4 + 3), scatter: 4}
        assert result[f"all, {kept}, {always}"][0] == {gather: 3 * 4, scatter: 4}
        assert result[f"all, {kept}, {at_end}"][0] == {gather: 4, scatter: 4}
        for skipping in ("root", "one block"):
            counts, gradients = result[f"{skipping}, {default}, {always}"]
            assert counts[scatter] == 3 * 3 + 1
            assert all(gradient is not None for gradient in gradients.values())


def test_states_read_by_user_code_within_a_step_match_torch() -> None:
    for result in assert_same("states_within_a_step"):
        for states in result.values():
            assert [row[0] for row in states[:10]] == [
                "before",
                *["forward"] * 4,
                *["backward"] * 4,
                "after",
            ]
            assert set(states[-1][1:]) == {"IDLE", "SHARDED"}
        assert result["backward prefetch"] == result["default"]


def test_parameter_objects_and_memory_are_kept_across_steps() -> None:
    for result in assert_same("identity_of_parameters"):
        assert all(all(answers) and answers for answers in result.values())


@pytest.mark.parametrize("name", ["slices_of_a_sequential", "user_hooks_beside_fsdp_hooks"])
def test_event_scenario_matches_torch(name: str) -> None:
    assert_same(name)


def test_hook_handles_remove_the_hooks() -> None:
    for result in assert_same("removed_hooks"):
        assert result["hooks"] == [0, 0]
        assert result["pair"] == [0, 0]


def test_gloo_threads_never_take_the_gil() -> None:
    """A thread that requests the GIL during interpreter exit aborts the process.

    Under torch the number of such threads depends on timing, so one rank that counts some suffices
    to show that the count works.
    """
    assert max(get_results("threads_that_took_the_gil", "torch")) > 0
    assert get_results("threads_that_took_the_gil", "fsdp_c") == [0, 0]
