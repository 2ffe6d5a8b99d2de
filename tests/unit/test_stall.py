"""Reports about waiting ranks: records, positions, and the command ``stall``."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
import torch.nn as nn
from garbage_collection import no_garbage_collection
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

import fsdp_c
from fsdp_c import _C
from fsdp_c._runtime import records, roots, stall_monitor, stall_report
from fsdp_c._runtime.stall_report import Position
from fsdp_c._tools import stall, timeline_plot

HEADER = Path(__file__).resolve().parents[2] / "csrc/core/recorder.h"
SECOND = 10**9
WAITING, COMPLETE = 1, 2  # values of fc_record_state


def make_record(number: int, modules: str, **fields: Any) -> records.Record:
    facts = {
        "number": number, "begin": number * SECOND, "waiting": number * SECOND,
        "end": (number + 1) * SECOND, "step": 3, "pass_name": "forward", "kind": "all-gather",
        "state": records.COMPLETE, "rank": 0, "world": 2, "group": "0", "modules": modules,
    }  # fmt: skip
    return records.Record(**{**facts, **fields})


# ---- records -------------------------------------------------------------------------------------


def test_python_layout_of_a_recorder_entry_equals_the_struct() -> None:
    struct = re.search(r"typedef struct fc_record \{(.*?)\} fc_record;", HEADER.read_text(), re.S)
    assert struct is not None
    sizes = dict(re.findall(r"(FC_RECORD_\w+_BYTES) = (\d+)", HEADER.read_text()))
    fields = re.findall(r"^    (\w+) (\w+)(?:\[(\w+)\])?;", struct[1], re.M)
    codes = {"uint64_t": "Q", "uint32_t": "I", "uint16_t": "H", "uint8_t": "B", "int32_t": "i"}
    layout = [f"{sizes[array]}s" if array else codes[kind] for kind, _, array in fields]
    assert records._RECORD.format == "<" + "".join(layout)
    assert records._RECORD.size == 128
    parsed = inspect.signature(records._parse_fields).parameters
    names = {"work": "_work", "pass": "pass_number"}
    assert [names.get(name, name) for _, name, _ in fields] == list(parsed)


def test_parse_of_recorder_entries_skips_empty_ones_and_sorts_newest_first() -> None:
    def pack(number: int) -> bytes:
        return records._RECORD.pack(
            number, 1, 2, 0, 0, 7, 1, 1, 1, 0, 2, b"0" + bytes(23), b"a.b" + bytes(45)
        )

    newest, oldest = records.parse_records(pack(4) + bytes(128) + pack(9))
    assert (newest.number, oldest.number) == (9, 4)
    assert newest.describe() == "reduce-scatter of 'a.b' (step 7, backward)"
    assert newest.state == records.WAITING
    with pytest.raises(ValueError, match="multiple of a record's 128 bytes"):
        records.parse_records(bytes(127))


@pytest.mark.parametrize(("kind", "state", "text"), [(5, 2, "kind 5"), (0, 9, "state 9")])
def test_unknown_kind_or_state_of_a_recorder_entry_raises(kind: int, state: int, text: str) -> None:
    data = records._RECORD.pack(1, 1, 1, 1, 0, 1, 0, kind, state, 0, 2, b"", b"")
    with pytest.raises(ValueError, match=f"a record has the unknown {text}"):
        records.parse_records(data)


def test_recorder_read_of_invalid_count_raises() -> None:
    for count in (0, records.CAPACITY + 1):
        with pytest.raises(ValueError, match=f"count must be 1 to 4096, got {count}"):
            _C.recorder_read(count)


def test_record_file_is_written_but_not_through_a_link(tmp_path: Path) -> None:
    path = tmp_path / "rank1.records"
    _C.recorder_write(str(path), records.make_header(1, 2))
    facts, _ = records.read_file(str(path))
    assert (facts["rank"], facts["world"], facts["pid"]) == (1, 2, os.getpid())
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        _C.recorder_write(str(tmp_path / "link"), b"")
    assert records.read_file(str(path))[0] == facts


def test_record_file_replaces_regular_files_of_this_user_only(tmp_path: Path) -> None:
    fifo, other = tmp_path / "fifo", tmp_path / "other"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="No such device or address"):  # not a wait for a reader
        _C.recorder_write(str(fifo), b"")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PermissionError):
        _C.recorder_write(str(fifo), b"")
    os.close(reader)
    other.write_bytes(bytes(2**20))
    _C.recorder_write(str(other), b"new")
    assert other.read_bytes()[:3] == b"new"
    assert other.stat().st_size == 3 + records.CAPACITY * records._RECORD.size
    other.write_text("data")
    if os.geteuid() == 0:
        os.chown(other, 1, 1)
        with pytest.raises(PermissionError):
            _C.recorder_write(str(other), b"")
        assert other.read_text() == "data"


@pytest.mark.parametrize("text", [b"", b"{}\n", b"[1]\n", b'{"fsdp_c": "records"}\nx'])
def test_read_of_file_without_records_of_fsdp_c_raises(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(text)
    with pytest.raises(ValueError, match="has no records of fsdp_c"):
        records.read_file(str(tmp_path / "other"))


SIGNALS = """
import os, signal, sys, time
from fsdp_c import _C
calls = []
signal.signal(signal.SIGUSR2, lambda *unused: calls.append(1))
_C.recorder_write_on_signal(signal.SIGUSR2, sys.argv[1] + "/a", b"header")
_C.recorder_write_on_signal(signal.SIGUSR2, sys.argv[1] + "/b", b"header")
os.kill(os.getpid(), signal.SIGUSR2)
while not calls:
    time.sleep(0.01)
assert not os.path.exists(sys.argv[1] + "/a")
assert os.path.getsize(sys.argv[1] + "/b") == 6 + 4096 * 128
_C.recorder_write_on_signal(signal.SIGUSR1, sys.argv[1] + "/a", b"header")
signal.signal(signal.SIGUSR1, lambda *unused: calls.append(2))  # replaces the handler
_C.recorder_write_on_signal(signal.SIGUSR1, sys.argv[1] + "/b", b"header")
signal.raise_signal(signal.SIGUSR1)
assert calls == [1, 2]
_C.recorder_write_on_signal(signal.SIGABRT, sys.argv[1] + "/c", b"header")
os.abort()
"""


def test_signal_writes_the_file_and_keeps_the_previous_action(tmp_path: Path) -> None:
    ended = subprocess.run([forked_python.make_program(), "-c", SIGNALS, str(tmp_path)], timeout=60)
    assert ended.returncode == -signal.SIGABRT
    assert (tmp_path / "c").stat().st_size == 6 + 4096 * 128


DEFAULT_ACTION = """
import os, signal, sys
from fsdp_c import _C
number = getattr(signal, sys.argv[2])
signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGQUIT
_C.recorder_write_on_signal(number, sys.argv[1], b"header")
os.kill(os.getpid(), number)
"""


@pytest.mark.parametrize(
    ("name", "ends"), [("SIGTERM", True), ("SIGQUIT", True), ("SIGUSR1", False)]
)
def test_signal_writes_the_file_and_then_has_its_default_action(
    name: str, ends: bool, tmp_path: Path
) -> None:
    """The default action of SIGUSR1 is left out: it would end a process that only writes a file."""
    command = [forked_python.make_program(), "-c", DEFAULT_ACTION, str(tmp_path / "file"), name]
    ended = subprocess.run(command, timeout=60)
    assert ended.returncode == (-getattr(signal, name) if ends else 0)
    assert (tmp_path / "file").stat().st_size == 6 + 4096 * 128


STOPS = """
import os, signal, sys
from fsdp_c import _C
_C.recorder_write_on_signal(signal.SIGTSTP, sys.argv[1], b"header")
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTSTP)
    os.remove(sys.argv[1])
"""


def test_signal_that_stops_the_process_writes_the_file_each_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPS, str(tmp_path / "file")]
    # The kernel ignores the stop of an orphaned process group. This one has a parent outside of it.
    process = subprocess.Popen(command, preexec_fn=os.setpgrp)
    for _ in range(2):
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0


FORKED_CHILD = """
import os, signal, sys
from fsdp_c import _C
calls = []
signal.signal(signal.SIGUSR2, lambda *unused: calls.append(1))
_C.recorder_write_on_signal(signal.SIGUSR2, sys.argv[1], b"header")
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGUSR2)
    os._exit(0 if calls and not os.path.exists(sys.argv[1]) else 1)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_signal_in_a_forked_child_leaves_the_file_and_runs_the_previous_action(
    tmp_path: Path,
) -> None:
    command = [forked_python.make_program(), "-c", FORKED_CHILD, str(tmp_path / "file")]
    assert subprocess.run(command, timeout=60).returncode == 0


ACTION_WITH_SIGINFO = """
import ctypes, os, signal, sys
from fsdp_c import _C
class Action(ctypes.Structure):
    _fields_ = [("handler", ctypes.c_void_p), ("mask", ctypes.c_byte * 128),
                ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p)]
SA_SIGINFO = 4
action = Action(handler=int(sys.argv[2]), flags=SA_SIGINFO)
assert ctypes.CDLL(None).sigaction(signal.SIGTERM, ctypes.byref(action), None) == 0
_C.recorder_write_on_signal(signal.SIGTERM, sys.argv[1], b"header")
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_previous_signal_action_without_handler_may_have_sa_siginfo(
    action: signal.Handlers, tmp_path: Path
) -> None:
    arguments = [str(tmp_path / "file"), str(int(action))]
    ended = subprocess.run(
        [forked_python.make_program(), "-c", ACTION_WITH_SIGINFO, *arguments], timeout=60
    )
    assert ended.returncode == (-signal.SIGTERM if action == signal.SIG_DFL else 0)
    assert (tmp_path / "file").stat().st_size == 6 + 4096 * 128


# ---- report --------------------------------------------------------------------------------------


def test_stall_report_groups_ranks_by_place() -> None:
    waits = "all-gather of 'b.3' (step 2, forward) of process group '0'"
    done = ["all-gather of 'b.2' (step 2, forward) of process group '0'"]
    positions = {
        rank: Position(rank, request=1, waits_for=waits, completed=done) for rank in (0, 1, 2, 5)
    }
    positions[3] = Position(3, request=1, completed=done, line="train.py:57 in load_batch")
    positions[4] = Position(4, request=0, host="elsewhere", pid=7)
    positions[6] = Position(6, request=1, completed=done, interrupted_pass="forward")
    positions[8] = Position(8, request=1, completed=done, failed=waits, line="train.py:57")
    positions[9] = Position(9, request=0, failed=waits, host="elsewhere", pid=8)
    assert stall_report.format_report(positions, 10, 1).splitlines() == [
        f"  ranks 0-2, 5: wait for {waits}",
        f"  rank 3: waits for no collective of fsdp_c; last completed: {done[0]}; main thread: "
        "train.py:57 in load_batch",
        "  rank 4: process 7 on elsewhere does not answer: it has ended, is stopped, answers late, "
        "or cannot be reached",
        f"  rank 6: left the forward by an exception; last completed: {done[0]}",
        "  rank 7: has no model of fsdp_c that ran, or did not start",
        f"  rank 8: left the wait for {waits} by an exception",
        f"  rank 9: left the wait for {waits} by an exception; process 8 on elsewhere does not "
        "answer: it has ended, is stopped, answers late, or cannot be reached",
        "  last collective that all answering ranks completed: "
        "all-gather of 'b.2' (step 2, forward)",
    ]


def test_stall_report_of_several_ranks_without_position_has_plural_verb() -> None:
    lines = stall_report.format_report({}, 3, 1).splitlines()
    assert lines[0] == "  ranks 0-2: have no model of fsdp_c that ran, or did not start"


def test_stall_report_distinguishes_ended_stopped_and_running_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        positions = {0: Position(0, pid=child.pid)}
        assert "runs, but does not answer" in stall_report.format_report(positions, 1, 1)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert "is stopped by a signal" in stall_report.format_report(positions, 1, 1)
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert "has ended" in stall_report.format_report(positions, 1, 1)
    child.wait()
    assert "has ended" in stall_report.format_report(positions, 1, 1)


def test_position_in_stall_report_has_the_longest_wait_and_the_last_completed_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = [
        make_record(9, "b", state=records.WAITING, end=0),
        make_record(8, "a", state=records.WAITING, end=0, waiting=5 * SECOND),
    ]
    done = [make_record(number, str(number)) for number in range(stall_report.RECENT + 3, 0, -1)]
    monkeypatch.setattr(stall_report.time, "time", lambda: 1000.0)
    position = stall_report.make_position(1, 4, 20 * SECOND, waits + done)
    assert position.waits_for == "all-gather of 'a' (step 3, forward) of process group '0'"
    assert position.waits_since == 1000 - 15
    assert position.completed == [
        f"all-gather of '{record.number}' (step 3, forward) of process group '0'"
        for record in done[: stall_report.RECENT]
    ]
    assert "test_position_in_stall_report" in position.line
    assert Position.from_json(position.to_json()) == position


def test_stall_report_failure_is_the_latest_wait_that_an_exception_ended() -> None:
    failed = make_record(8, "a", state=records.FAILED)
    later = [
        make_record(11, "d", end=failed.end - 1),
        make_record(10, "c", state=records.ISSUED),
        make_record(9, "b", state=records.ABANDONED),
    ]
    assert stall_report.find_failure([*later, failed]) == failed
    position = stall_report.make_position(1, 4, 20 * SECOND, [*later, failed])
    assert position.failed == "all-gather of 'a' (step 3, forward) of process group '0'"
    waiting = make_record(9, "b", state=records.WAITING, waiting=failed.end - 1, end=0)
    assert stall_report.find_failure([waiting, failed]) == failed
    for number in (7, 9):
        complete = make_record(number, "b", end=failed.end + 1)
        assert stall_report.find_failure([complete, failed]) is None
        waiting = make_record(number, "b", state=records.WAITING, waiting=failed.end + 1, end=0)
        assert stall_report.find_failure([waiting, failed]) is None
    assert stall_report.find_failure(later) is None


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "limit"), [("", 10.0), ("0", 0.0), ("2.5", 2.5)])
def test_stall_seconds_variable_sets_the_limit(
    text: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_C_STALL_SECONDS", text)
    assert stall_monitor.get_limit() == limit


@pytest.mark.parametrize("name", ["SIGKILL", "SIG_IGN", "SIG_BLOCK", "signal", "USR1"])
def test_stall_signal_that_cannot_have_a_handler_raises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_C_STALL_SIGNAL", name)
    monkeypatch.setattr(_C, "recorder_write_on_signal", lambda *_: None)
    with pytest.raises(ValueError, match=f"name a signal that can have a handler, got {name}"):
        records.write_on_signals(records.make_path(0), 0, 2)


def test_stall_signal_registers_one_file_for_each_rank_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []
    monkeypatch.setenv("FSDP_C_STALL_DIR", str(tmp_path))
    monkeypatch.setattr(_C, "recorder_write_on_signal", lambda _, path, header: paths.append(path))
    for rank in (0, 0, 1, 0):
        records.write_on_signals(records.make_path(rank), rank, 2)
    assert [Path(path).name[-len("rank0.records") :] for path in paths] == [
        "rank0.records",
        "rank1.records",
    ]


@pytest.mark.parametrize("text", ["-1", "nan", "ten"])
def test_invalid_stall_seconds_variable_raises(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_C_STALL_SECONDS", text)
    with pytest.raises(ValueError, match=f"FSDP_C_STALL_SECONDS must be .* at least 0, got {text}"):
        stall_monitor.get_limit()


@pytest.fixture
def no_roots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hides live and freed models of earlier tests, which may have interrupted passes.

    The garbage collector is off: it would free further ones.
    """
    monkeypatch.setattr(roots, "_roots", weakref.WeakSet())
    monkeypatch.setattr(roots, "_pass_of_freed_root", [])
    with no_garbage_collection():
        yield


def test_interrupted_pass_of_a_freed_model_is_kept_until_the_next_model(
    single_group: int, no_roots: None
) -> None:
    model: Any = fsdp_c.fully_shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, 3))
    del raised  # its traceback refers to the model
    assert roots.find_interrupted_pass() == "forward"
    del model
    assert roots.find_interrupted_pass() == "forward"
    other: Any = fsdp_c.fully_shard(nn.Linear(4, 4))
    other(torch.ones(2, 4))
    assert roots.find_interrupted_pass() == ""


def test_interrupted_pass_is_read_while_other_threads_add_roots(no_roots: None) -> None:
    class Root:
        _training_state = TrainingState.IDLE

    stop = threading.Event()
    alive: list[Root] = []

    def add() -> None:
        while not stop.is_set():
            alive.append(Root())
            roots.add(alive[-1])
            del alive[: 500 if len(alive) == 500 else 0]

    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(10_000):
            assert roots.find_interrupted_pass() == ""
    finally:
        stop.set()
        thread.join()


# ---- command -------------------------------------------------------------------------------------


def write_rank(
    folder: Path, rank: int, modules: list[str], last_state: int = COMPLETE, **facts: Any
) -> str:
    """Writes the file of a rank, with a record for each unit, and returns its path."""
    header = json.loads(records.make_header(rank, 2)) | {"clock_offset": 0, "written": 0} | facts
    data = json.dumps(header).encode() + b"\n"
    for number, name in enumerate(modules, 1):
        state = last_state if number == len(modules) else COMPLETE
        begin, end = number * SECOND, 0 if state == WAITING else (number + 1) * SECOND
        data += records._RECORD.pack(
            number, begin, begin, end, 0, 1, 0, 0, state, rank, 2,
            b"0".ljust(24, b"\0"), name.encode().ljust(48, b"\0"),
        )  # fmt: skip
    path = folder / f"rank{rank}.records"
    path.write_bytes(data + bytes(128 * (records.CAPACITY - len(modules))))
    return str(path)


def test_stall_command_names_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        write_rank(tmp_path, 0, ["a", "b", "c"], last_state=WAITING),
        write_rank(tmp_path, 1, ["b", "d"]),
    ]
    plot, trace = tmp_path / "plot.png", tmp_path / "trace.json"
    assert stall.main([*files, "--plot", str(plot), "--trace", str(trace)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"^rank 0 \(process \d+ on .*\) waits for all-gather of 'c'", output, re.M)
    assert re.search(r"^rank 1 \(process \d+ on .*\) has completed all-gather of 'd'", output, re.M)
    assert (
        "process group '0', after all-gather of 'b' (step 1, forward):\n"
        "  rank 0: all-gather of 'c' (step 1, forward)\n"
        "  rank 1: all-gather of 'd' (step 1, forward)\n"
    ) in output
    assert plot.stat().st_size > 1000
    spans = {e["name"]: e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"}
    assert {"gather c", "wait for a gather c", "gather d"} <= spans.keys()
    ends = [span["ts"] + span["dur"] for span in spans.values()]
    assert 2e6 <= max(ends) < 3e6  # microseconds


def test_stall_command_finds_no_difference_of_equal_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_rank(tmp_path, rank, ["a", "b"]) for rank in range(2)]
    assert stall.main(files) == 0
    text = "found no difference between collectives that at least two files contain\n"
    assert capsys.readouterr().out.endswith(text)
    assert stall.main(files[:1]) == 0
    assert capsys.readouterr().out.endswith(f"no file of rank 1\n{text}")


def test_stall_command_aligns_files_that_begin_between_equal_collectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks hold four records each, and rank 0 is ahead by one. Two models have a unit 'a'."""
    files = [
        write_rank(tmp_path, 0, ["a", "b", "c", "d"], last_state=WAITING),
        write_rank(tmp_path, 1, ["a", "a", "b", "c"]),
    ]
    assert stall.main(files) == 1
    assert (
        "process group '0', after all-gather of 'c' (step 1, forward):\n"
        "  rank 0: all-gather of 'd' (step 1, forward)\n"
        "  rank 1: no further collective\n"
    ) in capsys.readouterr().out


def test_stall_command_refuses_missing_file_and_two_files_of_a_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rank(tmp_path, 0, ["a"])
    assert stall.main([file, file]) == 2
    assert "another file is of rank 0" in capsys.readouterr().err
    assert stall.main([str(tmp_path / "missing")]) == 2


def test_stall_command_refuses_files_of_different_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = write_rank(tmp_path, 0, ["a"]), write_rank(tmp_path, 1, ["a"], world=4)
    assert stall.main([file, other]) == 2
    error = capsys.readouterr().err
    assert f"{other} is of another job: it is of rank 1 of 4 ranks, and {file} is of" in error
    other = write_rank(tmp_path, 2, ["a"])
    assert stall.main([file, other]) == 2
    assert f"{other} is of another job: it is of rank 2 of 2 ranks" in capsys.readouterr().err


def test_stall_timeline_and_trace_have_the_numbers_of_the_ranks(tmp_path: Path) -> None:
    files = [write_rank(tmp_path, rank, ["a"], world=8) for rank in (3, 5)]
    trace = tmp_path / "trace.json"
    assert stall.main([*files, "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {3, 5}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 3",
        "rank 5",
    ]
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    timeline_plot.draw_timeline(axes, "", stall.make_spans(stall.read_ranks(files), 1))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [text for text in labels if "rank" in text] == ["rank 3  host", "rank 5  host"]


@pytest.mark.parametrize(
    ("option", "path"), [("--trace", "no/trace.json"), ("--plot", "no/a.png"), ("--plot", "a.foo")]
)
def test_stall_command_that_cannot_write_a_timeline_exits_with_status_2(
    option: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rank(tmp_path, 0, ["a"])
    assert stall.main([file, option, str(tmp_path / path)]) == 2
    assert capsys.readouterr().err.startswith("python -m fsdp_c stall: ")


def test_stall_command_without_matplotlib_exits_with_status_2_before_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert stall.main([write_rank(tmp_path, 0, ["a"]), "--plot", str(tmp_path / "a.png")]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "pip install matplotlib" in output.err


def test_stall_timeline_of_files_without_collectives_exits_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stall.main([write_rank(tmp_path, 0, []), "--trace", str(tmp_path / "trace.json")]) == 2
    assert "cannot write a timeline: no file contains a collective" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rank", "world", "pid", "clock_offset", "written", "host"])
def test_record_file_with_incomplete_header_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = json.loads(records.make_header(0, 2)) | {name: None}
    (tmp_path / "file").write_text(json.dumps(header) + "\n")
    assert stall.main([str(tmp_path / "file")]) == 2
    assert f"its header has no '{name}'" in capsys.readouterr().err


def test_record_file_with_missing_records_or_of_another_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(write_rank(tmp_path, 0, ["a", "b"]))
    file.write_bytes(file.read_bytes()[:-128])
    assert stall.main([str(file)]) == 2
    assert "it has 524160 bytes of records, expected 524288" in capsys.readouterr().err
    assert stall.main([write_rank(tmp_path, 0, ["a"], format=2)]) == 2
    assert "its format is 2, expected 1; use the fsdp_c that wrote the" in capsys.readouterr().err


def test_recorded_wait_that_did_not_end_lasts_until_the_file_was_written(tmp_path: Path) -> None:
    """The header of a file that a signal handler writes is older than its records."""
    plot = tmp_path / "plot.png"
    for written, length in ((11 * SECOND, 10 * SECOND), (0, 1)):
        file = write_rank(tmp_path, 0, ["a"], last_state=WAITING, written=written)
        (spans,) = stall.make_spans(stall.read_ranks([file]), 1).values()
        assert [span.length for span in spans] == [length, length]
        pytest.importorskip("matplotlib")
        assert stall.main([file, "--plot", str(plot)]) == 0 and plot.stat().st_size > 1000
    begin = time.time_ns()
    assert begin <= json.loads(records.make_header(0, 1))["written"] <= time.time_ns()
