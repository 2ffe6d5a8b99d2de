"""What happens when: profiler ranges, collectives, order of events, unshard and reshard by hand."""

from __future__ import annotations

import pytest
import releases
from behaviour import assert_same, returned

RS_WAIT = "FSDP::post_backward_rs_wait ("
ACCUMULATE = "FSDP::post_backward_accumulate"
"""torch 2.15 leaves it to autograd and has no such range."""


@pytest.mark.torch("2.13")
def test_profiler_ranges_have_stocks_names_and_order() -> None:
    """But for waits for the reduction before: without streams one that is done needs none."""
    for ours, theirs in zip(
        returned("profiler_ranges", "fsdp_c"), returned("profiler_ranges", "torch")
    ):
        for case, names in theirs.items():
            ranges = ours[case]
            if releases.has("2.15"):
                ranges = [name for name in ranges if not name.startswith(ACCUMULATE)]
            waits = [name for name in ranges if name.startswith(RS_WAIT)]
            assert set(waits) <= set(names)
            assert [name for name in ranges if name not in waits] == [
                name for name in names if not name.startswith(RS_WAIT)
            ]


def test_profiler_ranges_cover_all_of_a_step() -> None:
    for found in returned("profiler_ranges", "fsdp_c"):
        labels = {name.split(" ")[0].removeprefix("FSDP::") for name in found["mixed"]}
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
        assert "FSDP::backward_prefetch for 0" in found["fp32"]
        assert "FSDP::pre_forward (1)" in found["fp32"]


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
    # The second forward goes first, and its gradients wait for those of the first.
    "two forwards": f"{FORWARD} U0 U1 U2 U2 U1 U0 U U2 U1 P2 U0 P1 P0 P",
    "grouped": "U0 U1, 2 U1, 2 U0 P1, 2 P0",
    "first of each group unused": " ".join(
        f"{event}layers.{first}, layers.{first + 1}"
        for event, first in (("U", 0), ("U", 2), ("U", 2), ("U", 0), ("P", 2), ("P", 0))
    ),
    # The first backward gathers 1.left for nothing.
    "two losses": "U0 U1.left U1.right U1.right U1.left P1.right U0 P0 U0 P1.left P0",
}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.torch("2.13")
def test_gathers_and_reductions_begin_in_stocks_order(case: str) -> None:
    for found in assert_same("order_of_events"):
        assert " ".join(found[case]) == ORDERS[case]


def test_as_many_collectives_as_stock() -> None:
    for found in assert_same("counts_of_collectives"):
        gather, scatter = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
        assert found["None: forward"] == {gather: 4}
        assert found["None: backward"] == {gather: 3, scatter: 4}
        assert found["False: backward"] == {scatter: 4}
        assert found["True: no sync"] == {gather: 8}
        assert found["True: kept"] == {gather: 4, scatter: 4}


def test_modules_called_after_the_forward_leave_no_trace_in_the_next_one() -> None:
    for found in assert_same("gathers_of_chunked_steps"):
        assert found["counts"] == [2, 3, 2, 3, 3, 2]


def test_unshard_and_reshard_by_hand() -> None:
    for found in assert_same("unshard_and_reshard"):
        assert found["values"]
        assert found["unsharded 0"][1] == "UNSHARDED"
        assert found["in flight"][1] == found["resharded"][1] == "SHARDED"
        assert found["waited"][1] == found["waited twice"][1] == "UNSHARDED"
        assert found["late wait"] == found["after backward"]
        assert found["handle"] == "UnshardHandle"
        assert found["no handle"] is None


def test_accumulation_takes_as_many_collectives_as_stocks() -> None:
    for found in assert_same("counts_of_accumulation"):
        gather, scatter = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
        assert found["all, reshard None True"][0] == {gather: 3 * (4 + 3), scatter: 4}
        assert found["all, reshard False True"][0] == {gather: 3 * 4, scatter: 4}
        assert found["all, reshard False False"][0] == {gather: 4, scatter: 4}
        assert found["root, reshard None True"][0][scatter] == 3 * 3 + 1
        assert found["one block, reshard None True"][0][scatter] == 3 * 3 + 1
        gradients = found["root, reshard None True"][1]
        assert all(gradient is not None for gradient in gradients.values())


def test_states_that_user_code_sees_within_a_step() -> None:
    for found in assert_same("states_within_a_step"):
        for seen in found.values():
            assert [row[0] for row in seen[:10]] == [
                "before",
                *["forward"] * 4,
                *["backward"] * 4,
                "after",
            ]
            assert set(seen[-1][1:]) == {"IDLE", "SHARDED"}
        assert found["backward prefetch"] == found["default"]


def test_parameters_keep_their_identity() -> None:
    for found in assert_same("identity_of_parameters"):
        assert all(all(answers) and answers for answers in found.values())


@pytest.mark.parametrize(
    "name", ["removed_hooks", "slices_of_a_sequential", "user_hooks_beside_ours"]
)
def test_as_stock(name: str) -> None:
    assert_same(name)


def test_handles_remove_the_hooks() -> None:
    for found in assert_same("removed_hooks"):
        assert found["hooks"] == [0, 0]
        assert found["pair"] == [0, 0]


def test_no_thread_of_gloo_wants_the_gil() -> None:
    """One that waits for it while the interpreter ends aborts the process."""
    assert min(returned("threads_that_took_the_gil", "torch")) > 0
    assert returned("threads_that_took_the_gil", "fsdp_c") == [0, 0]
