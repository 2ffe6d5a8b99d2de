"""When the stall monitor compares the collectives of NCCL process groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    monkeypatch.setattr(label_comparison, "_groups", {"group": label_comparison.Progress()})
    assert label_comparison.is_due(seconds) == is_due


def test_no_comparison_is_due_without_a_process_group_of_nccl() -> None:
    assert not label_comparison.is_due(10.0)


@pytest.mark.parametrize(("end", "remains"), [(0, ["group"]), (1, [])])
def test_comparison_keeps_a_process_group_until_its_first_collective(
    end: int, remains: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extension raises for a process group without collectives, and for one that has ended."""

    def raise_value_error(group: str, progress: label_comparison.Progress) -> None:
        raise ValueError

    progress = label_comparison.Progress()
    progress.end = end
    departures = SimpleNamespace(answer_requests=lambda: None)
    monkeypatch.setattr(label_comparison, "get_departures", lambda: departures)
    monkeypatch.setattr(label_comparison, "_exchange", raise_value_error)
    monkeypatch.setattr(label_comparison, "_groups", {"group": progress})
    monkeypatch.setattr(label_comparison, "_requests", {})
    label_comparison.compare()
    assert list(label_comparison._groups) == remains


def list_blocks(count: int, different: int, value: int) -> list[label_comparison.Block]:
    """The blocks that a rank keeps after ``count`` collectives (``label_blocks.h``).

    ``value`` is the hash of blocks that contain the collective ``different``; others have 1.
    """
    blocks = []
    for size in (2**level for level in range(21)):
        ends = range(count // size * size, max(0, (count // size - 16) * size), -size)
        starts = [end - size for end in ends]
        blocks += [(s, size, value if s <= different < s + size else 1) for s in starts]
    return blocks


@given(
    rate=st.integers(1, 20000),
    phase=st.floats(0, 1),
    lag=st.floats(0, 1),
    at=st.floats(1, 30),
)
def test_one_different_collective_leads_to_a_request_that_the_neighbor_can_answer(
    rate: int, phase: float, lag: float, at: float
) -> None:
    """Two ranks issue ``rate`` collectives per second. The host of one is ``lag`` seconds behind.

    The neighbor publishes its key ``phase`` intervals before this rank reads it.
    """
    interval = label_comparison.INTERVAL
    different = int(rate * at)
    own, neighbor = label_comparison.Progress(), label_comparison.Progress()
    for step in range(1, 30):
        time_of_neighbor = (step - phase) * interval
        blocks = list_blocks(int(rate * max(0, time_of_neighbor - lag)), different, 2)
        published = neighbor.select_blocks(blocks)
        blocks = list_blocks(int(rate * step * interval), different, 3)
        own.select_blocks(blocks)
        block = own.find_difference(blocks, published)
        if block is not None:
            break
    assert block is not None
    assert step * interval <= at + lag + 4 * interval + 1 / rate
    first, size, _ = block
    assert first <= different < first + size
    answered = (step + 1) * interval
    blocks = list_blocks(int(rate * (answered - lag)), different, 2)
    assert (first, size, 2) in blocks, "the neighbor has dropped the block"


def test_equal_collectives_lead_to_no_request_whatever_the_ranks_have_published() -> None:
    own, neighbor = label_comparison.Progress(), label_comparison.Progress()
    for count in range(0, 20000, 777):
        published = neighbor.select_blocks(list_blocks(count // 2, 10**9, 2))
        blocks = list_blocks(count, 10**9, 3)
        own.select_blocks(blocks)
        assert own.find_difference(blocks, published) is None
