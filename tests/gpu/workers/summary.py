"""Adds a step to the summary of the GPU check, or at its end the totals.

    summary.py STEP STATUS LIMIT BEGIN
    summary.py --end SECONDS

STATUS is the exit status of the step, or "late" if no time was left to start it. LIMIT is in
seconds, BEGIN in seconds since the epoch. SECONDS is the duration of the check.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

SKIPPED, TIMED_OUT = "77", ("124", "137")
LOG_CHARACTERS = 20_000
"""Number of characters at the end of a step's log that are kept."""

STACK = re.compile(r"(Current thread|Thread) 0x|  File |Extension modules: ")
"""Matches stack lines that a step prints when it is stopped."""

OUT, WORK = Path(os.environ["OUT"]), Path(os.environ["GPU_CHECK_WORK"])


def read_json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return default


def verdict(status: str) -> str:
    return {"0": "PASS", SKIPPED: "SKIP"}.get(status, "FAIL")


def reason(status: str, limit: str, log: str) -> str:
    """Returns the reason of a failure that the step did not report itself."""
    lines = [entry for entry in log.splitlines() if entry.strip() and not STACK.match(entry)]
    last = (lines or ["no output"])[-1][:200]
    if status == "late":
        return "no time left"
    if status in TIMED_OUT:
        return f"killed, or stopped after {limit} s; last line: {last}"
    return f"exit status {status}: {last}"


def add_step(step: str, status: str, limit: str, begin: str) -> None:
    result = read_json(WORK / f"{step}.json", {"figures": {}})
    path = WORK / f"{step}.log"
    log = path.read_text(errors="replace") if path.exists() else ""
    reported = status in ("0", "1", SKIPPED) and "line" in result
    line = result["line"] if reported else reason(status, limit, log)
    # Exit status 0 without a result file means that the step ended early.
    step_verdict = verdict(status) if reported or status not in ("0", SKIPPED) else "FAIL"
    seconds = time.time() - float(begin)
    results = read_json(OUT / "results.json", {})
    entry = {"verdict": step_verdict, "seconds": round(seconds, 2), "line": line}
    results[step] = entry | result["figures"]
    partial = OUT / "results.partial"
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.rename(OUT / "results.json")
    with (OUT / "log.txt").open("a") as all_logs:
        all_logs.write(f"==== {step}: {step_verdict}\n{log[-LOG_CHARACTERS:]}\n")
    print_line(f"{step_verdict} {step:<9} {seconds:6.1f} s  {line}")


def print_line(line: str) -> None:
    print(line, flush=True)
    with (OUT / "summary.txt").open("a") as summary:
        summary.write(line + "\n")


def print_totals(seconds: str) -> int:
    results = read_json(OUT / "results.json", {})
    verdicts = [entry["verdict"] for entry in results.values()]
    counts = {name: verdicts.count(name) for name in ("PASS", "FAIL", "SKIP")}
    failed = [step for step, entry in results.items() if entry["verdict"] == "FAIL"]
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    print_line(f"{text} in {seconds} s" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    if sys.argv[1] == "--end":
        sys.exit(print_totals(sys.argv[2]))
    add_step(*sys.argv[1:])
