"""The stall monitors of 1,024 simulated ranks, of which one stalls, name this rank.

The monitors are those of the package. Clock, store and records are simulated.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from simulated_ranks import Clock, Server, Store

from fsdp_c._runtime import departures, records, stall_monitor, stall_report
from fsdp_c._runtime.stall_monitor import StallMonitor

pytestmark = pytest.mark.xdist_group("stall_many_ranks")  # the tests share simulations

WORLDS = (16, 128, 1024)
LIMIT = stall_monitor.DEFAULT_LIMIT
RANKS_OF_A_HOST = 8
START = 5.0
"""Time of the stall: the ranks have published their first positions."""
FAILURE = START + 1.0
END = START + LIMIT + 3.0
SILENT = (
    "process {pid} on host{host} does not answer: it has ended, is stopped, answers late, or "
    "cannot be reached"
)
PLACES = {
    "does not answer": SILENT,
    "computes": "waits for no collective of fsdp_c; last completed: all-gather of 'blocks.2' "
    "(step 17, forward) of process group '0', ",
    "never started": "has no model of fsdp_c that ran, or did not start",
    "ends": SILENT,
}
"""Behavior of the stalled rank -> its place in the report. "ends": the waits of the other ranks
fail a second later, and their processes end."""


@dataclass
class Result:
    """The result of one simulation. Messages are counted from the stall on."""

    reports: dict[int, tuple[float, str]] = field(default_factory=dict)
    """Rank -> time from the stall to its first report, and the report."""
    messages: dict[int, int] = field(default_factory=dict)
    bytes_read: dict[int, int] = field(default_factory=dict)


class Job:
    """The ranks of one simulation. All other ranks wait for rank ``culprit`` from START on."""

    def __init__(self, world: int, case: str) -> None:
        self.world, self.case, self.culprit = world, case, world // 3
        self.clock = Clock()
        self.server = Server(self.clock)
        self.result = Result()
        self.monitors: list[StallMonitor] = []
        self.departures: list[departures.Departures] = []
        self.stores = [Store(self.server) for _ in range(world)]
        self.thread_ranks: dict[int, int] = {}

    def get_rank(self) -> int:
        """Returns the rank of the calling thread, or of the monitor that is created."""
        return self.thread_ranks.get(threading.get_ident(), len(self.monitors))

    def read_records(self, count: int) -> tuple[int, list[records.Record]]:
        """Returns the records of the calling rank."""
        now, rank = self.clock.now, self.get_rank()
        fields: dict[str, Any] = {
            "step": 17, "pass_name": "forward", "kind": "all-gather", "rank": rank,
            "world": self.world, "group": "0",
        }  # fmt: skip
        done = records.Record(
            number=2, begin=1, waiting=1, end=1 + int(START * 1e9), state=records.COMPLETE,
            modules="blocks.2", **fields,
        )  # fmt: skip
        if rank == self.culprit or now < START:
            return int(now * 1e9), [done]
        has_failed = self.case == "ends" and now >= FAILURE
        state = records.FAILED if has_failed else records.WAITING
        wait = records.Record(
            number=3, begin=1, waiting=int(START * 1e9), end=int(FAILURE * 1e9) * has_failed,
            state=state, modules="blocks.3", **fields,
        )  # fmt: skip
        return int(now * 1e9), [wait, done]

    def make_position(self, rank: int, *arguments: Any) -> stall_report.Position:
        position = make_position(rank, *arguments)
        position.pid, position.host = 1000 + rank, f"host{rank // RANKS_OF_A_HOST}"
        position.line = "train.py:57 in load_batch"
        return position

    def find_exit(self, phase: float) -> float:
        """Returns the time at which the process of a waiting rank begins to end."""
        return FAILURE + phase / 10 if self.case == "ends" else math.inf

    def end_process(self, rank: int, phase: float) -> None:
        """Does what the main thread of a rank does at its end."""
        self.clock.wait(self.find_exit(phase))
        self.monitors[rank]._stopped = True

    def run_rank(self, rank: int, phase: float) -> None:
        """Runs the checks of one monitor, as its thread does.

        ``phase`` is the fraction of an interval before its first check.
        """
        self.thread_ranks[threading.get_ident()] = rank
        is_culprit = rank == self.culprit
        if is_culprit and self.case == "never started":
            return
        monitor = self.monitors[rank]
        monitor.publish_start()
        self.clock.wait(phase * monitor._interval)
        counted: int | None = None
        while self.clock.now < END:
            if is_culprit and self.case in ("does not answer", "ends") and self.clock.now > START:
                return
            if counted is None and self.clock.now >= START:
                counted = sum(self.stores[rank].messages.values())
                self.stores[rank].bytes_read = 0
            waits = monitor._check()
            if rank in self.result.reports:
                break
            seconds = stall_monitor.WAIT_INTERVAL if waits else monitor._interval
            exit_at = self.find_exit(phase)
            self.clock.wait(max(0.0, min(seconds, exit_at - self.clock.now)))
            if self.clock.now >= exit_at:
                monitor._check_end()
                break
        self.result.messages[rank] = sum(self.stores[rank].messages.values()) - (counted or 0)
        self.result.bytes_read[rank] = self.stores[rank].bytes_read

    def add_report(self, text: str, *arguments: Any) -> None:
        report = (text % arguments).partition("The ranks of the job:\n")[2]
        self.result.reports.setdefault(self.get_rank(), (self.clock.now - START, report))

    def run(self) -> Result:
        generator = random.Random(self.world)
        time_module = SimpleNamespace(monotonic=lambda: self.clock.now, sleep=self.clock.wait)
        wall_clock = SimpleNamespace(time=lambda: self.clock.now)
        socket_module = SimpleNamespace(
            gethostname=lambda: f"host{self.get_rank() // RANKS_OF_A_HOST}"
        )
        dist = SimpleNamespace(get_rank=self.get_rank, get_world_size=lambda: self.world)
        patches = [
            mock.patch.object(stall_monitor, "time", time_module),
            mock.patch.object(stall_monitor, "dist", dist),
            mock.patch.object(stall_monitor, "_get_default_group", lambda: self),
            mock.patch.object(
                stall_monitor, "_get_default_store", lambda: self.stores[self.get_rank()]
            ),
            mock.patch.object(departures, "dist", dist),
            mock.patch.object(departures, "time", time_module),
            mock.patch.object(departures, "_get_default_group", lambda: self),
            mock.patch.object(
                departures, "_get_default_store", lambda: self.stores[self.get_rank()]
            ),
            mock.patch.object(
                stall_monitor, "get_departures", lambda: self.departures[self.get_rank()]
            ),
            mock.patch.object(stall_monitor, "read_own_records", self.read_records),
            mock.patch.object(stall_monitor, "make_position", self.make_position),
            mock.patch.object(stall_monitor, "find_interrupted_pass", lambda: ""),
            mock.patch.object(stall_monitor.logger, "warning", self.add_report),
            mock.patch.object(StallMonitor, "_write_records", lambda monitor: "file"),
            mock.patch.object(stall_report, "time", wall_clock),
            mock.patch.object(stall_report, "socket", socket_module),
            mock.patch.object(stall_report, "read_process_state", lambda pid: "Z"),
        ]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            for _ in range(self.world):
                self.departures.append(departures.Departures())
                self.monitors.append(StallMonitor(LIMIT))
            phases = [generator.random() for _ in range(self.world)]
            threads = [functools.partial(self.run_rank, *part) for part in enumerate(phases)]
            if self.case == "ends":
                threads += [
                    functools.partial(self.end_process, *part) for part in enumerate(phases)
                ]
            self.clock.run(threads)
        return self.result


make_position = stall_report.make_position  # the function that Job.make_position replaces


@functools.cache
def simulate(world: int, case: str) -> Result:
    return Job(world, case).run()


@pytest.mark.parametrize("case", PLACES)
def test_stalled_rank_of_1024_is_named_by_all_waiting_ranks(case: str) -> None:
    world = max(WORLDS)
    result = simulate(world, case)
    culprit = world // 3
    assert sorted({*range(world)} - {culprit}) == sorted(result.reports)
    place = PLACES[case].format(pid=1000 + culprit, host=culprit // RANKS_OF_A_HOST)
    for _, report in result.reports.values():
        lines = report.splitlines()
        assert any(line.startswith(f"  rank {culprit}: {place}") for line in lines), report
        assert sum(line.startswith("  rank") for line in lines) == 2, report
    last = max(at for at, _ in result.reports.values())
    assert last < (FAILURE - START if case == "ends" else LIMIT) + 1.0
    print(f"{case}: all ranks have the report after {last:.2f} s")


@pytest.mark.parametrize("case", PLACES)
def test_message_count_of_a_rank_does_not_depend_on_the_number_of_ranks(
    case: str,
) -> None:
    most = {world: max(simulate(world, case).messages.values()) for world in WORLDS}
    print(f"{case}: most messages of a rank, by the number of ranks: {most}")
    assert max(most.values()) - min(most.values()) <= 10  # the phases of the ranks differ
    assert max(most.values()) < 90


if __name__ == "__main__":
    for case in PLACES:
        for world in WORLDS:
            result = simulate(world, case)
            messages = sorted(result.messages.values())
            at = [at for at, _ in result.reports.values()]
            print(
                f"{case}, {world} ranks: first report after {min(at):.2f} s, last after "
                f"{max(at):.2f} s; messages of a rank: median {messages[len(messages) // 2]}, "
                f"most {messages[-1]}, total {sum(messages)}; bytes read by a rank, most: "
                f"{max(result.bytes_read.values())}"
            )
