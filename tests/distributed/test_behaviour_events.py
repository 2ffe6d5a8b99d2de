"""What happens when: profiler ranges, collectives, order of events, unshard and reshard by hand."""

from __future__ import annotations

import pytest
from behaviour import assert_same


def test_profiler_ranges_have_stocks_names_and_order() -> None:
    for found in assert_same("profiler_ranges"):
        labels = {name.split(" ")[0].removeprefix("FSDP::") for name in found["mixed"]}
        assert labels == {
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
            "post_backward_rs_wait",
            "post_backward_reduce",
            "root_post_backward_callback",
        }
        assert "FSDP::backward_prefetch for 0" in found["fp32"]
        assert "FSDP::pre_forward (1)" in found["fp32"]


FORWARD = "U U0 U1 U2"
ORDERS = {
    "reshard None": f"{FORWARD} U2 U1 P2 U0 P1 P0 P",
    "reshard True": f"{FORWARD} U U2 U1 P2 U0 P1 P0 P",
    "reshard False": f"{FORWARD} P2 P1 P0 P",
    "forward prefetch 1": "U U0 U1 U2 U3 U3 U2 P3 U1 P2 U0 P1 P0 P",
    "forward prefetch 2": "U U0 U1 U2 U3 U3 U2 P3 U1 P2 U0 P1 P0 P",
    "backward prefetch 1": "U U0 U1 U2 U3 U3 U2 P3 U1 P2 U0 P1 P0 P",
    "backward prefetch 2": "U U0 U1 U2 U3 U3 U2 U1 P3 U0 P2 P1 P0 P",
    "input without gradient": f"{FORWARD} U2 U1 P2 U0 P1 P P0",
}


@pytest.mark.parametrize("case", ORDERS)
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


def test_unshard_and_reshard_by_hand() -> None:
    for found in assert_same("unshard_and_reshard"):
        assert found["values"]
        assert found["unsharded 0"][1] == "UNSHARDED"
        assert found["in flight"][1] == found["resharded"][1] == "SHARDED"
        assert found["waited"][1] == found["waited twice"][1] == "UNSHARDED"
        assert found["late wait"] == found["after backward"]
        assert found["handle"] == "UnshardHandle"
        assert found["no handle"] is None


def test_states_that_user_code_sees_within_a_step() -> None:
    for seen in assert_same("states_within_a_step"):
        assert [row[0] for row in seen[:6]] == [
            "before",
            "forward",
            "forward",
            "backward",
            "backward",
            "after",
        ]
        assert set(seen[-1][1:]) == {"IDLE", "SHARDED"}


@pytest.mark.parametrize(
    "name", ["removed_hooks", "slices_of_a_sequential", "user_hooks_beside_ours"]
)
def test_as_stock(name: str) -> None:
    assert_same(name)


def test_handles_remove_the_hooks() -> None:
    for found in assert_same("removed_hooks"):
        assert found["hooks"] == [0, 0]
        assert found["pair"] == [0, 0]
