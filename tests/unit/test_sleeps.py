"""Tests do not sleep for a fixed time to wait for an event: such tests fail on a busy machine."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".c", ".h", ".cpp", ".hpp", ".cuh", ".sh"}
SLEEP = re.compile(r"\b(?:sleep|usleep|nanosleep|clock_nanosleep|sleep_for|sleep_until)\b")

POLL = "pause between two readings of a condition, in a loop with a limit"
DELAY = "a late rank is the subject of the test"
HANG = "a process or thread that does not end is the subject of the test"
POINT = "a fault comes at a random time"
VIRTUAL = "the clock is simulated"
WORK = "a stand-in takes as long as the work that it replaces"
STACKS = "a process that hangs gets this time to write its stacks, and is killed then"

SLEEPS = {
    "harness/fork_server.py": [POLL],
    "harness/forked_python.py": [POLL],
    "harness/launch.py": [POLL, STACKS],
    "faults/workers/failure_trials.py": [POLL, POINT, STACKS],
    "faults/workers/ending_ranks.py": [POLL],
    "faults/workers/interrupt.py": [POLL],
    "faults/workers/interrupted_comparisons.py": [DELAY],
    "faults/workers/lifetime.py": [POLL],
    "faults/workers/stalled_ranks.py": [POLL],
    "faults/workers/trial_rank.py": [DELAY, HANG],
    "parity/workers/program_ranks.py": [STACKS],
    "unit/cache_job.py": [WORK],
    "unit/compare_job.py": [HANG, HANG],
    "unit/test_check.py": [HANG],
    "unit/test_compare.py": [POLL, POLL],
    "unit/test_interpreter_exit.py": [VIRTUAL],
    "unit/test_model_comparison.py": [DELAY],
    "unit/test_stall.py": [POLL, HANG],
    "unit/test_stall_many_ranks.py": [VIRTUAL],
    "gpu/gpu_check.sh": [HANG],
    "gpu/test_gpu_check.py": [WORK],
    "c/test_progress.c": [POLL],
    "distributed/workers/behavior_backwards.py": [DELAY, DELAY],
    "distributed/workers/consistent_programs.py": [DELAY],
    "distributed/workers/traced.py": [DELAY],
    "distributed/workers/shared_memory.py": [DELAY, DELAY, DELAY],
    "cuda/runtime/communicator.cpp": [POLL],
    "cuda/runtime/stream.cpp": [HANG],
    "cuda/workers/unit_captures.py": [POLL],
    "cuda/workers/watchdog.py": [POLL],
}
"""The reason for each sleep of a file, in the order of the lines."""


def count_sleeps(text: str) -> int:
    """Counts the lines of code that sleep. Comments and imports do not count."""
    code = (re.sub(r"//.*|#.*|/\*.*?\*/", "", line) for line in text.splitlines())
    return sum(bool(SLEEP.search(line)) and " import " not in line for line in code)


def test_each_sleep_of_the_tests_is_listed_with_a_reason() -> None:
    paths = [path for path in TESTS.rglob("*") if path.suffix in SUFFIXES]
    assert len(paths) > 250, "found too few files: the test would check nothing"
    found = {
        path.relative_to(TESTS).as_posix(): count_sleeps(path.read_text())
        for path in paths
        if path != Path(__file__)
    }
    allowed = {path: len(reasons) for path, reasons in SLEEPS.items()}
    assert {path: count for path, count in found.items() if count} == allowed


def test_count_sleeps_finds_calls_and_references_in_code_only() -> None:
    assert count_sleeps("time.sleep(1)\nThread(target=time.sleep)\n(void)usleep(1000);") == 3
    assert count_sleeps("from time import sleep\n# sleep(1)\nx()  # sleep\nfall_asleep();") == 0
    assert count_sleeps("std::this_thread::sleep_for(1ms);\nsleep 1000 ;;\ncuda._sleep(9)") == 2
