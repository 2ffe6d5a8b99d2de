"""Runs the benchmarks of ``FULL_OPTIONS`` and writes a report; ``make bench`` calls this script.

These are all benchmarks but ``checksums.py`` and ``peers.py``. ``cuda_steps.py`` runs with the
Python FSDP_C_CUDA_PYTHON, or with an environment of ``make env-releases`` for which
``make cuda-sim`` has built fsdp_c. The benchmarks run one after the other, each in its own process.
The report begins with machine, load, date and commands, followed by tables and plots. The plots are
in a folder with the report's name without its suffix. If a benchmark fails, the others still run,
and the exit status is 1. ``--quick`` runs only ``steps``, ``host`` and ``bandwidth``, on tiny
models. Its figures are not meaningful.

The label ``torch`` in tables and JSON is torch's FSDP2.

    python benchmarks/bench.py [--quick] [--only steps host ...] [--out benchmarks/report.md]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pictures
import steps
import torch
from bandwidth import format_size
from report import describe_machine, find_commit, format_cell, format_command

FOLDER = Path(__file__).resolve().parent
HOST_JOBS = ("fp32", "mixed", "fp32 no_grad", "guard")
HOST_OPTIONS = ("--jobs", *HOST_JOBS, "--params", "1", "5", "9", "14", "20")
FULL_OPTIONS: dict[str, tuple[str, ...]] = {
    "steps": ("--seconds", "60"),
    "host": (*HOST_OPTIONS, "--rounds", "12"),
    "memory": (),
    "units": (),
    "bandwidth": (),
    "replicate": (),
    "clip": (),
    "optim": (),
    "load": (),
    "cold": (),
    "plan": (),
    "cuda_steps": (),
}
QUICK_OPTIONS: dict[str, tuple[str, ...]] = {
    "steps": ("--models", "tiny", "--seconds", "1"),
    "host": ("--jobs", "fp32", "guard", "--params", "1", "2", "--rounds", "2", "--groups", "2"),
    "bandwidth": ("--most", "1", "--rounds", "2"),
}
"""``FULL_OPTIONS`` and ``QUICK_OPTIONS`` map each benchmark to its options."""


def find_python(name: str) -> str:
    """Returns the Python of a benchmark; empty if there is none."""
    if name != "cuda_steps":
        return sys.executable
    default = FOLDER.parents[1] / "fsdp_c-envs"
    stamps = Path(os.environ.get("RELEASES_DIR") or default).glob("torch-*/.fsdp_c-env")
    pythons = [str(stamp.parent / "bin/python") for stamp in sorted(stamps, reverse=True)]
    given = os.environ.get("FSDP_C_CUDA_PYTHON")
    return given if given is not None else next(filter(has_package, pythons), "")


@functools.cache
def has_package(python: str) -> bool:
    """Whether ``make cuda-sim`` has built fsdp_c for the torch of this Python."""
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent / "build/cuda-sim/package")}
    command = [python, "-c", "import torch, fsdp_c._C"]
    # The folder of the call must not contain fsdp_c, because `python -c` imports from it first.
    completed = subprocess.run(command, env=environment, cwd=FOLDER, capture_output=True)
    return completed.returncode == 0


class BenchmarkRun:
    """Runs one benchmark. Holds its command, duration, printed output, failure and JSON data."""

    def __init__(self, name: str, options: Sequence[str], folder: Path) -> None:
        target = folder / f"{name}.json"
        self.name = name
        self.command = format_command(f"{name}.py", options)
        print(f"== {self.command}", flush=True)
        begin = time.perf_counter()
        process = subprocess.run(
            [find_python(name), str(FOLDER / f"{name}.py"), *options, "--json", str(target)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.output = process.stdout.strip()
        print(self.output, flush=True)
        self.seconds = time.perf_counter() - begin
        self.failure = f"exit status {process.returncode}" if process.returncode else ""
        self.data: dict[str, Any] = {} if self.failure else json.loads(target.read_text())


# ---- header --------------------------------------------------------------------------------------


def format_header(
    results: dict[str, BenchmarkRun], load: tuple[str, str], quick: bool
) -> Iterator[str]:
    yield "# Benchmarks: a run"
    yield ""
    if quick:
        yield "**A quick run on tiny models, to test the scripts. Its figures are not meaningful.**"
        yield ""
    yield f"- machine: {describe_machine()}"
    yield f"- load (1, 5, 15 minutes): {load[0]} before, {load[1]} after"
    date = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    yield f"- date: {date} UTC, commit {find_commit() or 'unknown'}"
    yield f"- torch {torch.__version__}, Python {platform.python_version()}"
    yield f"- commands, {sum(r.seconds for r in results.values()):.0f} s together:"
    yield ""
    yield "```"
    yield from (result.command for result in results.values())
    yield "```"


# ---- sections ------------------------------------------------------------------------------------


def format_rows(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|" + " --- |" * len(titles)
    yield from (f"| {' | '.join(map(format_cell, row))} |" for row in rows)


def draw_plot(name: str, title: str, result: BenchmarkRun, folder: Path) -> Iterator[str]:
    getattr(pictures, f"draw_{name}")(result.data, folder / f"{name}.png")
    yield f"![{title}]({folder.name}/{name}.png)"


def format_steps(result: BenchmarkRun, folder: Path) -> Iterator[str]:
    yield "## Steps"
    yield ""
    yield "Medians of one run in which all implementations take turns."
    yield "wall/fsdp_c: wall time relative to fsdp_c."
    yield "Peaks: resident memory above the value at the beginning of the step."
    yield ""
    yield from draw_plot("steps", "wall, CPU, page faults and peak of a step", result, folder)
    for model in result.data["models"].values():
        for kind in ("without", "with"):
            yield ""
            yield f"**{model['title']}, {kind} {model['optimizer']}**, {model['rounds']} rounds"
            yield ""
            yield from format_rows(steps.COLUMNS, steps.make_rows(model, kind))
    yield ""
    yield "## Memory over one step"
    yield ""
    yield from draw_plot("memory", "resident memory over one step", result, folder)


def format_host(result: BenchmarkRun, folder: Path) -> Iterator[str]:
    yield "## Host time"
    yield ""
    yield "us of CPU per group and step, minus those of the bare model, on a fake group of 8 ranks."
    yield "The column bare is absolute."
    yield ""
    yield from draw_plot("host", "host time against parameters per group", result, folder)
    jobs = {name: job for name, job in result.data.items() if isinstance(job, dict)}
    guard = jobs.pop("guard", None)
    for name, job in jobs.items():
        rows = [
            [
                count,
                *(row[column] for column in ("bare", "torch", "fsdp_c")),
                job["ratio"][count],
            ]
            for count, row in job["us_per_group_step"].items()
        ]
        yield ""
        yield f"**{name}**"
        yield ""
        yield from format_rows(["parameters", "bare", "torch", "fsdp_c", "torch/fsdp_c"], rows)
    if guard is not None:
        yield from ("", "**guard**: per unit and operation on two ranks", "")
        titles = ["transport", *next(iter(guard.values()))]
        yield from format_rows(titles, [[name, *row.values()] for name, row in guard.items()])


def format_bandwidth(result: BenchmarkRun, folder: Path) -> Iterator[str]:
    yield "## Bandwidth"
    yield ""
    yield "GB/s of unsharded data, best round; torch and fsdp_c include packing and unpacking."
    yield ""
    yield from draw_plot("bandwidth", "bandwidth against size", result, folder)
    for operation in ("gather", "reduction", "kernel"):
        sizes = result.data[operation]
        names = list(next(iter(sizes.values())))
        rows = [[format_size(int(size)), *row.values()] for size, row in sizes.items()]
        yield ""
        yield from format_rows([operation, *names], rows)


def format_output(result: BenchmarkRun, _: Path) -> Iterator[str]:
    """Yields the benchmark's output as printed, for benchmarks without separate tables or plots."""
    yield f"## {result.name}"
    yield ""
    yield f"```\n{result.output}\n```"


def format_failure(result: BenchmarkRun, _: Path) -> Iterator[str]:
    yield from (f"## {result.name}", "", f"The benchmark failed: {result.failure}.")


SECTIONS = {"steps": format_steps, "host": format_host, "bandwidth": format_bandwidth}


def main() -> None:
    names = ", ".join(FULL_OPTIONS)
    parser = argparse.ArgumentParser(description=f"Runs benchmarks and writes a report: {names}.")
    parser.add_argument(
        "--quick", action="store_true", help=f"only {', '.join(QUICK_OPTIONS)}, on tiny models"
    )
    parser.add_argument(
        "--only", nargs="+", choices=FULL_OPTIONS, metavar="NAME", help="run only these benchmarks"
    )
    parser.add_argument("--out", type=Path, help="default: report.md, report-quick.md with --quick")
    options = parser.parse_args()
    out = options.out or FOLDER / ("report-quick.md" if options.quick else "report.md")
    benchmarks = QUICK_OPTIONS if options.quick else FULL_OPTIONS
    selected = options.only or list(benchmarks)
    excluded = [name for name in selected if name not in benchmarks]
    if excluded:
        parser.error(f"--quick does not run {', '.join(excluded)}, only {', '.join(benchmarks)}")
    folder = out.with_suffix("")
    if folder == out:
        parser.error(f"--out {out} needs a suffix: {out}.md")
    for name in selected:
        if find_python(name) and shutil.which(find_python(name)) is None:
            parser.error(f"FSDP_C_CUDA_PYTHON={find_python(name)} is not a program")
    folder.mkdir(parents=True, exist_ok=True)
    for name in selected:
        (folder / f"{name}.json").unlink(missing_ok=True)
    load_before = _format_load()
    results = {
        name: BenchmarkRun(name, arguments, folder)
        for name, arguments in benchmarks.items()
        if name in selected and find_python(name)
    }
    for name in selected:
        if not find_python(name):
            print(f"{name}: skipped, make cuda-sim has not built fsdp_c for a CUDA build of torch")
    lines = [*format_header(results, (load_before, _format_load()), options.quick)]
    for name, result in results.items():
        format_section = SECTIONS.get(name, format_output)
        lines += ["", *(format_failure if result.failure else format_section)(result, folder)]
        if options.quick and not result.failure:
            (folder / f"{name}.json").write_text(json.dumps(result.data | {"quick": True}))
    out.write_text("\n".join(lines) + "\n")
    print(f"written: {out}")
    failures = [f"{name}: {result.failure}" for name, result in results.items() if result.failure]
    if failures:
        raise SystemExit("\n".join(failures))


def _format_load() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


if __name__ == "__main__":
    main()
