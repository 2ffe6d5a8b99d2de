"""The counter of the ranks that depart from the predicted collective, if a wait is interrupted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_c._runtime import departures

WORLD = 2


class CountingStore:
    """A store in which the other rank departs during a call of ``add``."""

    def __init__(self, arrives_at_call: int) -> None:
        self.counts: dict[str, int] = {}
        self.count_of_other_rank = 0
        self._calls_until_arrival = arrives_at_call

    def add(self, key: str, amount: int) -> int:
        count = self.counts[key] = self.counts.get(key, 0) + amount
        self._calls_until_arrival -= 1
        if self._calls_until_arrival == 0:
            self.count_of_other_rank = self.counts[key] = self.counts[key] + 1
        return count


@pytest.mark.parametrize("call", [1, 2, 3])
def test_interrupted_rank_keeps_a_count_at_which_the_other_rank_has_issued(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank issues the collective if its count is that of all ranks."""

    def interrupt(*unused: Any) -> None:
        raise KeyboardInterrupt

    store = CountingStore(call)
    monkeypatch.setattr(departures, "_get_process_group_store", lambda group: store)
    own: Any = SimpleNamespace(_own_departures={}, _differences={}, _wait=interrupt)
    group: Any = SimpleNamespace(size=lambda: WORLD)
    departure = departures.Departure("group", [0, 1], 0, 7, 1, 0, "")
    with pytest.raises(KeyboardInterrupt):
        departures.Departures.depart(own, departure, group)
    (count,) = store.counts.values()
    has_issued = store.count_of_other_rank == WORLD
    assert (count == WORLD) == has_issued
