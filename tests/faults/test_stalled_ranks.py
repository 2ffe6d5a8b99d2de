"""A rank that waits for another rank logs where all ranks are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ending_ranks
import pytest
import stalled_ranks
from launch import run_ranks

from fsdp_c._runtime.records import COMPLETE, FAILED, read_file
from fsdp_c._tools.stall import main as compare_records

PLACES = {
    "sleeps": "rank 1: waits for no collective of fsdp_c; last completed: ",
    "left forward": "rank 1: left the forward by an exception; last completed: ",
    "stopped": "is stopped by a signal or a debugger",
}


@pytest.mark.parametrize("transport", ["direct", "gloo"])
@pytest.mark.parametrize("case", stalled_ranks.CASES)
def test_waiting_ranks_report_the_place_of_every_rank(
    case: str, transport: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records"
    env = {
        "FSDP_C_STALL_SECONDS": "1",
        "FSDP_C_STALL_DIR": str(records),
        "FSDP_C_TRANSPORT": transport,
    }
    sums = run_ranks(stalled_ranks.run_case, 3, (str(tmp_path), case), env=env)
    assert len(set(sums)) == 1  # training continues
    for rank in stalled_ranks.WAITING:
        report = (tmp_path / f"report{rank}-1").read_text()
        first, *lines = report.splitlines()
        assert re.match(rf"fsdp_c: rank {rank} has waited [1-9]\.\d s for all-gather of ", first)
        assert ", forward) of process group '0'. The ranks of the job:" in first
        waits = next(line for line in lines if line.startswith("  ranks 0, 2: wait for all-gather"))
        assert re.search(r"group '0', for [0-9.]+ s( \(median\), [0-9.]+ s \(longest\))?$", waits)
        place = next(line for line in lines if PLACES[case] in line)
        assert ("main thread: stalled_ranks.py:" in place) == (case != "stopped")
        assert any("answering ranks completed: " in line for line in lines)
        if case == "sleeps":  # the second report comes after twice the time
            second = (tmp_path / f"report{rank}-2").read_text()
            assert re.match(
                rf"fsdp_c: rank {rank} has waited [2-9]\.\d s for all-gather of ", second
            )
    files = sorted(map(str, records.iterdir()))
    assert len(files) == 3 or case == "stopped"
    result = compare_records(files)
    output = capsys.readouterr().out
    assert "rank 0 (process " in output
    if case != "stopped":  # a stopped rank writes no file
        assert result == 1
        assert "  rank 1: no further collective\n  rank 2: all-gather of '2' (" in output


def run_ending_ranks(case: str, folder: Path) -> tuple[list[int], list[str]]:
    """Returns exit status and standard error of both ranks, which write their files to "records".

    They are new interpreters: an exception that no code catches ends them.
    """
    env = os.environ | {"FSDP_C_STALL_DIR": str(folder / "records"), "FSDP_C_STALL_SECONDS": "60"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ranks = [
        subprocess.Popen(
            [sys.executable, ending_ranks.__file__, str(rank), str(folder), case],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], errors


@pytest.mark.parametrize("case", ending_ranks.CASES)
def test_rank_that_ends_by_an_exception_writes_its_records(case: str, tmp_path: Path) -> None:
    ending_rank = ending_ranks.CASES[case]
    statuses, errors = run_ending_ranks(case, tmp_path)
    assert statuses == [int(rank == ending_rank or case == "raises") for rank in range(2)], errors
    header, own = read_file(str(next((tmp_path / "records").glob(f"*rank{ending_rank}.records"))))
    assert header["rank"] == ending_rank
    gathers = [record for record in own if record.kind == "all-gather"]
    assert len(gathers) > 3
    newest = max(own, key=lambda record: record.number)
    if case == "raises":
        assert "ValueError: raised in forward" in errors[1]
        assert (newest.step, newest.pass_name) == (2, "forward")
    elif case == "raises between steps":
        assert "ValueError: raised between steps" in errors[1]
        assert (newest.step, newest.state) == (1, COMPLETE)
        assert not list((tmp_path / "records").glob("*rank0.records"))
    else:
        assert "Timed out waiting" in errors[0]
        assert any(record.state == FAILED for record in own)


def test_ranks_that_end_without_an_exception_write_no_records(tmp_path: Path) -> None:
    statuses, errors = run_ending_ranks("no exception", tmp_path)
    assert statuses == [0, 0], errors
    assert list((tmp_path / "records").iterdir()) == []
