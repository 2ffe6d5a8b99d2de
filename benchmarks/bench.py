"""All benchmarks, and a report of them: what ``make bench`` runs.

Each benchmark runs by itself, one after the other. The report has tables and plots, with machine,
load, date and commands on top; plots lie in a folder beside it that has its name. ``--quick`` tries
the machinery on tiny models in a minute: its figures mean nothing.

    python benchmarks/bench.py [--quick] [--only steps host ...] [--out benchmarks/report.md]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pictures
import steps
import torch
from bandwidth import size_name
from report import cell

HERE = Path(__file__).resolve().parent
HOST = ("--jobs", "fp32", "mixed", "fp32 no_grad", "--params", "1", "5", "9", "14", "20")
FULL: dict[str, tuple[str, ...]] = {
    "steps": ("--seconds", "60"),
    "host": (*HOST, "--rounds", "12"),
    "memory": (),
    "units": (),
    "bandwidth": (),
    "replicate": (),
    "clip": (),
    "optim": (),
    "load": (),
    "plan": (),
}
QUICK: dict[str, tuple[str, ...]] = {
    "steps": ("--models", "tiny", "--seconds", "1"),
    "host": ("--jobs", "fp32", "--params", "1", "2", "--rounds", "2", "--groups", "2"),
    "bandwidth": ("--most", "1", "--rounds", "2"),
}
"""The benchmarks and their options."""


class Result:
    """What a benchmark printed, and what it wrote as JSON."""

    def __init__(self, name: str, options: Sequence[str], folder: Path) -> None:
        target = folder / f"{name}.json"
        self.name = name
        self.command = " ".join(["python", f"benchmarks/{name}.py", *map(_quoted, options)])
        print(f"== {self.command}", flush=True)
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(HERE / f"{name}.py"), *options, "--json", str(target)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.printed = done.stdout.strip()
        print(self.printed, flush=True)
        if done.returncode != 0:
            raise SystemExit(f"{self.command}: exit status {done.returncode}")
        self.seconds = time.perf_counter() - begin
        self.found: dict[str, Any] = json.loads(target.read_text())


def _quoted(option: str) -> str:
    return f'"{option}"' if " " in option else option


# ---- on top --------------------------------------------------------------------------------------


def machine() -> str:
    """Processor, cores and memory."""
    cpuinfo, meminfo = (Path("/proc", name) for name in ("cpuinfo", "meminfo"))
    if not cpuinfo.exists():
        return f"{platform.machine()}, {os.cpu_count()} cores"
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", meminfo.read_text())
    name = model[1] if model else platform.machine()
    return f"{name}, {os.cpu_count()} cores, {int(memory[1]) / 2**20 if memory else 0:.0f} GiB"


def commit() -> str:
    """Of the tree that was measured; empty where there is no git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def head(results: dict[str, Result], load: tuple[str, str], quick: bool) -> Iterator[str]:
    yield "# Benchmarks: a run"
    yield ""
    if quick:
        yield "**A quick run on tiny models, to try the machinery: no figure here means anything.**"
        yield ""
    yield f"- machine: {machine()}"
    yield f"- load (1, 5, 15 minutes): {load[0]} before, {load[1]} after"
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    yield f"- date: {date} UTC, commit {commit() or 'unknown'}"
    yield f"- torch {torch.__version__}, Python {platform.python_version()}"
    yield f"- commands, {sum(r.seconds for r in results.values()):.0f} s together:"
    yield ""
    yield "```"
    yield from (result.command for result in results.values())
    yield "```"


# ---- sections ------------------------------------------------------------------------------------


def markdown(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|" + " --- |" * len(titles)
    yield from (f"| {' | '.join(map(cell, row))} |" for row in rows)


def picture(name: str, title: str, result: Result, folder: Path) -> Iterator[str]:
    getattr(pictures, name)(result.found, folder / f"{name}.png")
    yield f"![{title}]({folder.name}/{name}.png)"


def of_steps(result: Result, folder: Path) -> Iterator[str]:
    yield "## Steps"
    yield ""
    yield "Medians of one run in which all take turns; wall/ours is how many times as long as ours."
    yield "Peaks: resident memory above that at the step's begin."
    yield ""
    yield from picture("steps", "wall, CPU, page faults and peak of a step", result, folder)
    for model in result.found["models"].values():
        for kind in ("without", "with"):
            yield ""
            yield f"**{model['title']}, {kind} {model['optimizer']}**, {model['rounds']} rounds"
            yield ""
            yield from markdown(steps.COLUMNS, steps.rows_of(model, kind))
    yield ""
    yield "## Memory over one step"
    yield ""
    yield from picture("memory", "resident memory over one step", result, folder)


def of_host(result: Result, folder: Path) -> Iterator[str]:
    yield "## Host time"
    yield ""
    yield "us of CPU per group and step above the bare model, on a fake group of 8 ranks."
    yield ""
    yield from picture("host", "host time against parameters per group", result, folder)
    jobs = {name: job for name, job in result.found.items() if isinstance(job, dict)}
    for name, job in jobs.items():
        rows = [
            [count, *(row.get(who) for who in ("bare", "stock", "ours")), job["ratio"][count]]
            for count, row in job["us_per_group_step"].items()
        ]
        yield ""
        yield f"**{name}**"
        yield ""
        yield from markdown(["parameters", "bare", "stock", "ours", "stock/ours"], rows)


def of_bandwidth(result: Result, folder: Path) -> Iterator[str]:
    yield "## Bandwidth"
    yield ""
    yield "GB/s of unsharded data, best of the rounds; stock and ours with packing and unpacking."
    yield ""
    yield from picture("bandwidth", "bandwidth against size", result, folder)
    for what in ("gather", "reduction", "kernel"):
        sizes = result.found[what]
        names = list(next(iter(sizes.values())))
        rows = [[size_name(int(size)), *row.values()] for size, row in sizes.items()]
        yield ""
        yield from markdown([what, *names], rows)


def printed(result: Result, _: Path) -> Iterator[str]:
    """A benchmark without a section of its own."""
    yield f"## {result.name}"
    yield ""
    yield f"```\n{result.printed}\n```"


SECTIONS = {"steps": of_steps, "host": of_host, "bandwidth": of_bandwidth}


def main() -> None:
    parser = argparse.ArgumentParser(description="All benchmarks, and a report of them.")
    parser.add_argument("--quick", action="store_true", help="tiny models, a minute")
    parser.add_argument("--only", nargs="+", choices=FULL, metavar="NAME", help="these benchmarks")
    parser.add_argument("--out", type=Path, default=HERE / "report.md")
    options = parser.parse_args()
    folder = options.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = QUICK if options.quick else FULL
    before = _load()
    results = {
        name: Result(name, arguments, folder)
        for name, arguments in chosen.items()
        if options.only is None or name in options.only
    }
    lines = [*head(results, (before, _load()), options.quick)]
    for name, result in results.items():
        lines += ["", *SECTIONS.get(name, printed)(result, folder)]
    options.out.write_text("\n".join(lines) + "\n")
    print(f"written: {options.out}")


def _load() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


if __name__ == "__main__":
    main()
