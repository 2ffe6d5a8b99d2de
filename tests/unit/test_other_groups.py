"""Which process groups stop after an exception, and with which text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_c._runtime import other_groups
from fsdp_c._runtime.comparison_requests import ComparisonRequest

RANKS = {"rows": [0, 1], "columns": [0, 2], "part": [0], "all": [0, 1, 2, 3]}
"""The ranks of the process groups of this rank, 0."""

MISMATCH = "collective mismatch: rank 0 gathers 'a' (step 6, forward), rank 1 gathers 'b'"
MODELS = "ranks 0 and 1 of process group 'rows' have different models: unit 0: 'a' and 'b'"
DATA = "different data after the all-gather of 'a' (step 6, forward): rank 0 has checksum 1"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[ComparisonRequest]:
    """The stop requests of this rank."""
    published: list[ComparisonRequest] = []

    def make_request(name: str, difference: str) -> ComparisonRequest:
        return ComparisonRequest(name, RANKS[name], 0, 0, 0, 0, "", difference=difference)

    monkeypatch.setattr(other_groups, "_resolve_process_group", lambda name: name)
    monkeypatch.setattr(other_groups.dist, "get_process_group_ranks", RANKS.__getitem__)
    monkeypatch.setattr(other_groups, "make_stop_request", make_request)
    departures = SimpleNamespace(stop=published.append)
    monkeypatch.setattr(other_groups, "get_departures", lambda: departures)
    return published


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        (
            f"all-gather of 'a' failed on rank 0 of 2 of process group 'rows': {MISMATCH}. The "
            "process group cannot be used any more",
            f"{MISMATCH} (process group 'rows')",
        ),
        (
            f"{MISMATCH} (process group 'rows'). The gradients are wrong",
            f"{MISMATCH} (process group 'rows')",
        ),
        (f"{MODELS}\nMake the model equal", MODELS),
    ],
)
def test_difference_stops_the_process_groups_that_have_further_ranks(
    text: str, difference: str, requests: list[ComparisonRequest]
) -> None:
    added = other_groups.stop_other_groups(text, RANKS)
    assert [request.group for request in requests] == ["all", "columns"]
    for request in requests:
        assert request.difference == (
            f"ranks of another process group differ: {difference}. "
            "Restart all ranks from a checkpoint"
        )
    assert added.startswith("\nThe other process groups of the model are stopped, too. ")
    # The exception of a rank that was stopped, or of a repeated call, stops nothing.
    for later in (f"process group 'all': {requests[0].difference}", text + added):
        assert other_groups.stop_other_groups(later, RANKS) == ""
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all-gather of 'a' failed on rank 0 of process group 'rows': Connection closed", RANKS),
        ("expected a floating-point tensor", RANKS),
        (f"{DATA} (process group 'rows'). The gradients are wrong", RANKS),
        (MODELS, ["rows", "part"]),
    ],
)
def test_other_exceptions_and_groups_without_further_ranks_stop_nothing(
    text: str, names: Any, requests: list[ComparisonRequest]
) -> None:
    assert other_groups.stop_other_groups(text, names) == ""
    assert requests == []


def test_long_difference_fits_into_the_text_that_the_core_keeps(
    requests: list[ComparisonRequest],
) -> None:
    text = f"collective mismatch: {1000 * 'x'} (process group 'rows')"
    assert other_groups.stop_other_groups(text, ["columns"]) != ""
    assert len(requests[0].difference) < 416  # FCT_DIFFERENCE_BYTES
    assert requests[0].difference.endswith("Restart all ranks from a checkpoint")
