"""Adds a step to the summary of a visit: summary.py STEP STATUS LIMIT BEGIN, or --end SECONDS."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

SKIPPED, TIMED_OUT = "77", ("124", "137")
SHOWN = 20_000
"""The end of a step's log that is kept."""

STACK = re.compile(r"(Current thread|Thread) 0x|  File |Extension modules: ")
"""Lines of the stacks that a step prints when it is stopped."""

OUT, WORK = Path(os.environ["OUT"]), Path(os.environ["VISIT_WORK"])


def read(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return otherwise


def verdict(status: str) -> str:
    return {"0": "PASS", SKIPPED: "SKIP"}.get(status, "FAIL")


def reason(status: str, limit: str, log: str) -> str:
    """Why a step failed that has not said so itself."""
    lines = [one for one in log.splitlines() if one.strip() and not STACK.match(one)]
    last = (lines or ["it printed nothing"])[-1][:200]
    if status == "late":
        return "no time was left for it"
    if status in TIMED_OUT:
        return f"stopped after {limit} s; last line: {last}"
    return f"exit status {status}: {last}"


def add(step: str, status: str, limit: str, begin: str) -> None:
    said = read(WORK / f"{step}.json", {"figures": {}})
    path = WORK / f"{step}.log"
    log = path.read_text(errors="replace") if path.exists() else ""
    done = status in ("0", "1", SKIPPED) and "line" in said
    line = said["line"] if done else reason(status, limit, log)
    # A step that ends well without a word has not run to its end.
    word = verdict(status) if done or status not in ("0", SKIPPED) else "FAIL"
    seconds = time.time() - float(begin)
    results = read(OUT / "results.json", {})
    results[step] = {"verdict": word, "seconds": round(seconds, 2), "line": line} | said["figures"]
    partial = OUT / "results.partial"
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.rename(OUT / "results.json")
    with (OUT / "log.txt").open("a") as all_logs:
        all_logs.write(f"==== {step}: {word}\n{log[-SHOWN:]}\n")
    tell(f"{word} {step:<9} {seconds:6.1f} s  {line}")


def tell(line: str) -> None:
    print(line, flush=True)
    with (OUT / "summary.txt").open("a") as summary:
        summary.write(line + "\n")


def end(seconds: str) -> int:
    results = read(OUT / "results.json", {})
    words = [one["verdict"] for one in results.values()]
    counts = {word: words.count(word) for word in ("PASS", "FAIL", "SKIP")}
    failed = [step for step, one in results.items() if one["verdict"] == "FAIL"]
    text = ", ".join(f"{count} {word}" for word, count in counts.items())
    tell(f"{text} in {seconds} s" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed or not results else 0


if __name__ == "__main__":
    if sys.argv[1] == "--end":
        sys.exit(end(sys.argv[2]))
    add(*sys.argv[1:])
