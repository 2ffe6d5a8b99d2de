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


@pytest.mark.parametrize(("labels_read", "remains"), [(0, ["group"]), (1, [])])
def test_comparison_keeps_a_process_group_until_its_first_collective(
    labels_read: int, remains: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extension raises for a process group without collectives, and for one that has ended."""

    def raise_value_error(group: str, labels: label_comparison.Labels) -> None:
        raise ValueError

    labels = label_comparison.Labels()
    labels.end = labels_read
    departures = SimpleNamespace(answer_requests=lambda: None)
    monkeypatch.setattr(label_comparison, "get_departures", lambda: departures)
    monkeypatch.setattr(label_comparison, "_exchange", raise_value_error)
    monkeypatch.setattr(label_comparison, "_groups", {"group": labels})
    monkeypatch.setattr(label_comparison, "_different", set())
    label_comparison.compare()
    assert list(label_comparison._groups) == remains
