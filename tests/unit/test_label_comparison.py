"""When the stall monitor compares the collectives of NCCL process groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsdp_c._runtime import label_comparison


@pytest.mark.parametrize(
    ("seconds", "has_open_requests", "is_due"),
    [(0.4, True, False), (0.6, False, False), (0.6, True, True), (2.0, False, True)],
)
def test_comparison_is_due_earlier_while_a_request_is_open(
    seconds: float, has_open_requests: bool, is_due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    departures = SimpleNamespace(has_open_requests=lambda: has_open_requests)
    monkeypatch.setattr(label_comparison, "get_departures", lambda: departures)
    monkeypatch.setattr(label_comparison, "_groups", {"group": label_comparison.Labels()})
    assert label_comparison.is_due(seconds) == is_due


def test_no_comparison_is_due_without_a_process_group_of_nccl() -> None:
    assert not label_comparison.is_due(10.0)
