"""A rank that an exception interrupts while it waits for the departures of other ranks, and stops.

A rank departs: it announces a collective that was not predicted, and waits. A rank leaves: it
withdraws the announcement (``fsdp_c/_runtime/departures.py``).
"""

from __future__ import annotations

import datetime
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_c._runtime import departures
from fsdp_c._runtime.comparison_requests import ComparisonRequest

WORLD = 2


class SharedStore:
    """A store in which the other rank departs, and decides, during one of this rank's calls."""

    def __init__(self, arrives_at_call: int) -> None:
        self.values: dict[str, str] = {}
        self.other_issues = False
        self._calls_until_arrival = arrives_at_call

    def add(self, key: str, amount: int) -> int:
        count = self._add(key, amount)
        self._count_call(key)
        return count

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value = self._compare_set(key, expected, desired)
        self._count_call(key.removesuffix("/decision"))
        return value

    def delete_key(self, key: str) -> None:
        self.values.pop(key, None)

    def _add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def _compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values.get(key, expected).encode()

    def _count_call(self, key: str) -> None:
        self._calls_until_arrival -= 1
        if self._calls_until_arrival == 0 and self._add(key, 1) == WORLD:
            decision = self._compare_set(f"{key}/decision", "", "issue")
            self.other_issues = decision == b"issue"


@pytest.mark.parametrize("call", [1, 2, 3, 9])  # 9: the other rank does not depart
def test_interrupted_rank_ends_its_departure_unless_the_other_rank_issues_the_collective(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*unused: Any) -> None:
        raise KeyboardInterrupt

    store = SharedStore(call)
    monkeypatch.setattr(departures, "_get_process_group_store", lambda group: store)
    own: Any = SimpleNamespace(_own_departures={}, _differences={}, _wait=interrupt, _rank=0)
    own._leave = lambda *args: departures.Departures._leave(own, *args)
    own._delete_when_all_have_read = departures.Departures._delete_when_all_have_read
    group: Any = SimpleNamespace(size=lambda: WORLD)
    departure = ComparisonRequest("group", [0, 1], 0, 7, 1, 0, "")
    try:
        result = departures.Departures.depart(own, departure, group)
        leaves = False
        assert isinstance(result, KeyboardInterrupt)
    except KeyboardInterrupt:
        leaves = True
    assert leaves != store.other_issues
    count = next(int(v) for k, v in store.values.items() if not k.endswith("/decision"))
    other_departs = call != 9
    assert count == other_departs + (not leaves)


def test_departing_rank_stores_its_decision_before_it_issues_the_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(departures, "get_timeout", lambda *args: datetime.timedelta(minutes=1))
    store: Any = SharedStore(arrives_at_call=9)
    own: Any = SimpleNamespace(_decide=lambda *args: departures.Departures._decide(own, *args))
    group: Any = SimpleNamespace(size=lambda: WORLD)
    departure = ComparisonRequest("group", [0, 1], 0, 7, 1, 0, "")
    store.add("key", WORLD)
    departures.Departures._wait(own, departure, store, "key", group, False)
    assert store.values["key/decision"] == "issue"


def make_departures(
    rank: int, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> departures.Departures:
    monkeypatch.setattr(departures, "_get_default_group", lambda: SharedStore)
    monkeypatch.setattr(departures, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    return departures.Departures()


def test_stop_request_reaches_a_rank_that_begins_to_read_requests_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = []
    monkeypatch.setattr(departures._C, "stop_collectives", lambda *args: stopped.append(args))
    store = dist.HashStore()
    first = make_departures(0, store, monkeypatch)
    request = ComparisonRequest("group", [0, 1], 0, 0, 0, 0, "", difference="the text")
    first.stop(request)
    assert stopped == [("group", "the text")]
    second, other = (make_departures(rank, store, monkeypatch) for rank in (1, 2))
    second.answer_requests()
    first.repeat_stops()  # too early
    second.answer_requests()
    assert len(stopped) == 1
    now = time.monotonic() + 0.3
    monkeypatch.setattr(departures.time, "monotonic", lambda: now)
    first.repeat_stops()
    second.answer_requests()
    other.answer_requests()  # its rank is not in the process group
    assert stopped == [("group", "the text")] * 2
    assert not second.has_open_requests()
