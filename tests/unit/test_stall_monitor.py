"""The thread that reports waits: failures, a store that has ended, forked children, settings."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from simulated_ranks import Clock, Server, Store

from fsdp_c._runtime import records, stall_monitor, stall_report
from fsdp_c._runtime.departures import read_count
from fsdp_c._runtime.stall_report import Position

SECOND = 10**9
LIMIT = 10.0
PR_SET_NAME = 15


def make_record(number: int, state: str) -> records.Record:
    return records.Record(
        number=number, begin=SECOND, waiting=SECOND, end=0, step=3, pass_name="forward",
        kind="all-gather", state=state, rank=0, world=1, group="0", modules="a",
    )  # fmt: skip


def make_monitor(**attributes: Any) -> Any:
    """Returns a monitor of a job of one rank, without a thread."""
    monitor = object.__new__(stall_monitor.StallMonitor)
    values: dict[str, Any] = {
        "_rank": 0, "_world": 1, "_limit": LIMIT, "_interval": 0.5, "_pid": os.getpid(),
        "_stopped": False, "_woken": threading.Event(), "_last_failed": 0,
        "_has_logged_store_error": False, "_store_error": "", "_file": "file",
        "_answered": -1, "_has_extended_api": True,
        "_store": Store(Server(Clock())), "_is_current": lambda: True,
        "_write_records": lambda: "file",
    }  # fmt: skip
    vars(monitor).update({**values, **attributes})
    return monitor


def set_records(monkeypatch: pytest.MonkeyPatch, now: int, own: list[records.Record]) -> None:
    monkeypatch.setattr(stall_monitor, "read_own_records", lambda count: (now, own))


def test_stall_monitor_reports_later_failure_with_equal_text_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stall_monitor, "find_interrupted_pass", lambda: "")
    monitor = make_monitor()
    monitor.publish_start()
    for number in (3, 9):
        line = f"train.py:{number}"
        monkeypatch.setattr(stall_monitor, "format_report", lambda *_, line=line: line)
        monitor._report_new_failure(SECOND, [make_record(number, records.FAILED)])
        assert line in caplog.messages[-1]
    assert len(caplog.messages) == 2


def test_rank_that_writes_a_report_answers_departing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str] = []
    departures = SimpleNamespace(answer_requests=lambda: answers.append("answer"))
    monkeypatch.setattr(stall_monitor, "get_departures", lambda: departures)
    monkeypatch.setattr(stall_monitor, "find_interrupted_pass", lambda: "")
    own = [make_record(3, records.FAILED), make_record(2, records.WAITING)]
    set_records(monkeypatch, 2 * SECOND, own)
    monitor = make_monitor(_world=2, _compared=0.0, _read_at=0.0)  # rank 1 publishes no position
    monitor.publish_start()
    monitor._report_new_failure(2 * SECOND, own)
    assert answers


# ---- a store that has ended ----------------------------------------------------------------------


def fail() -> bool:
    raise RuntimeError("failed to recv, got 0 bytes\nC++ stack")


@pytest.mark.parametrize("state", [records.COMPLETE, records.WAITING, records.FAILED])
def test_stall_monitor_logs_lost_store_only_on_a_rank_that_waits_or_failed(
    state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_records(monkeypatch, 2 * SECOND, [make_record(3, state)])
    make_monitor()._run_check(fail)
    if state == records.COMPLETE:
        assert caplog.messages == []
        return
    (text,) = caplog.messages
    assert text.startswith("fsdp_c: rank 0 waits, or failed, in all-gather of 'a' (step 3, ")
    assert text.endswith("has ended (failed to recv, got 0 bytes)\n  records: file")


@pytest.mark.parametrize("state", [records.WAITING, records.FAILED])
def test_stall_monitor_logs_first_stalled_or_failed_wait_after_the_loss_of_the_store_once(
    state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = make_monitor()
    set_records(monkeypatch, SECOND, [])
    monitor._run_check(fail)
    set_records(monkeypatch, 2 * SECOND, [make_record(3, records.WAITING)])
    monitor._run_check(fail)
    assert caplog.messages == []
    set_records(monkeypatch, 12 * SECOND, [make_record(3, state)])
    for _ in range(2):
        monitor._run_check(fail)
    assert len(caplog.messages) == 1


def test_stall_monitor_logs_failure_that_the_store_cannot_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = [make_record(3, records.FAILED)]
    set_records(monkeypatch, SECOND, failed)
    monitor = make_monitor(_store=SimpleNamespace(add=lambda *unused: fail()))
    monitor._run_check(lambda: monitor._report_new_failure(SECOND, failed))
    assert len(caplog.messages) == 1


def test_stall_monitor_starts_without_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_monitor, "get_departures", fail)
    monkeypatch.setattr(stall_monitor, "_get_default_group", threading.Event)
    monkeypatch.setattr(stall_monitor, "_get_default_store", lambda: Store(Server(Clock())))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert stall_monitor.StallMonitor(LIMIT)._store_error == "failed to recv, got 0 bytes"


def test_stall_monitor_takes_no_other_exception_for_a_lost_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def check() -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monitor = make_monitor()
    with pytest.raises(UnicodeDecodeError):
        monitor._run_check(check)
    monitor._is_current = lambda: False  # functions of c10d raise ValueError after the destruction
    assert monitor._run_check(check) is False
    assert monitor._store_error == "" and caplog.messages == []


def test_stall_monitor_reads_a_counter_without_a_write_to_a_file_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = dist.FileStore(str(path), 1)
    assert read_count(store, "a") == 0
    assert store.add("a", 2) == 2
    size = path.stat().st_size
    assert [read_count(store, "a") for _ in range(3)] == [2, 2, 2]
    assert path.stat().st_size == size


# ---- processes -----------------------------------------------------------------------------------


def test_stall_monitor_in_a_forked_child_does_not_take_the_lock_of_the_event() -> None:
    """Another thread of the parent may hold the lock during the fork."""
    monitor = make_monitor(_pid=os.getpid() + 1)
    monitor.finish()
    monitor.wake()
    assert not monitor._woken.is_set()


def test_stall_monitor_reads_state_of_a_process_with_any_name() -> None:
    libc = ctypes.CDLL(None)
    name = Path("/proc/self/comm").read_bytes().strip()
    libc.prctl(PR_SET_NAME, b"\xe8\xae) T", 0, 0, 0)
    try:
        assert stall_report.read_process_state(os.getpid()) in ("R", "S", "D")
    finally:
        libc.prctl(PR_SET_NAME, name, 0, 0, 0)


def test_stall_monitor_counts_process_of_another_boot_or_container_as_running() -> None:
    ended = Position(0, pid=2**22 + 1)
    assert not stall_report.can_answer(ended)
    assert "has ended" in stall_report.format_report({0: ended}, 1, 1)
    ended.system = "other"
    assert stall_report.can_answer(ended)
    assert "or cannot be reached" in stall_report.format_report({0: ended}, 1, 1)


def test_stall_report_has_the_median_and_the_longest_wait_of_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stall_report.time, "time", lambda: 100.0)
    begins = {0: 90.0, 1: 89.9, 2: 40.0, 3: 88.0, 4: 87.96, 5: 80.0, 6: 101.0, 7: 70.0}
    positions = {
        rank: Position(rank, request=1, waits_for="abbccdef"[rank], waits_since=begin)
        for rank, begin in begins.items()
    }
    positions[7].request = 0  # rank 7 does not answer
    lines = stall_report.format_report(positions, 8, 1).splitlines()
    assert lines[:5] == [
        "  rank 0: waits for a, for 10.0 s",
        "  ranks 1-2: wait for b, for 35.0 s (median), 60.0 s (longest)",
        "  ranks 3-4: wait for c, for 12.0 s",
        "  rank 5: waits for d, for 20.0 s",
        "  rank 6: waits for e, for 0.0 s",  # its clock is ahead
    ]
    assert " for f" not in lines[5]


def test_stall_report_names_last_common_collective_of_ranks_in_different_process_groups() -> None:
    text = "reduce-scatter of 'a' (step 2, backward)"
    positions = {
        rank: Position(rank, request=1, completed=[f"{text} of process group '{rank % 2}'"])
        for rank in range(4)
    }
    last = stall_report.format_report(positions, 4, 1).splitlines()[-1]
    assert last == f"  last collective that all answering ranks completed: {text}"


def test_folder_of_recorder_files_does_not_depend_on_later_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FSDP_C_STALL_DIR", "stalls")
    path = records.make_path(0)
    monkeypatch.chdir("/")
    records.write_own_records(path, 0, 1)
    assert os.listdir(tmp_path) == ["stalls"]
    assert records.read_file(path)[0]["world"] == 1
