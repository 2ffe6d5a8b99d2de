"""Writes the figures of docs/benchmarks.md and README.md from the recorded JSON files.

    python benchmarks/result_tables.py            # updates both documents
    python benchmarks/result_tables.py --check    # fails if a document is out of date

``record_results.py`` records the files in benchmarks/results, one folder per torch release. Each
table of a benchmark is made from one file. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import result_goals
import result_gpu
import result_releases

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MAIN = RESULTS / "torch-2.13"
"""The results of README.md and of all tables but the comparison of releases."""
GPU = RESULTS / "torch-2.11"
"""The results of the GPU check in README.md."""
CUDA = RESULTS / "torch-2.15"
"""The results of cuda_steps.py in README.md."""
DOCUMENTS = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
BEGIN, END = (
    "<!-- begin: benchmarks/result_tables.py -->",
    "<!-- end: benchmarks/result_tables.py -->",
)

Results = dict[str, dict[str, Any]]
"""The data of each benchmark by its name."""


pending: dict[Path, dict[str, Any]] = {}
"""The files that ``record_results.py`` is about to write. They replace the recorded ones."""


def read_results(folder: Path) -> Results:
    recorded = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return recorded | {path.stem: data for path, data in pending.items() if path.parent == folder}


def list_folders() -> list[Path]:
    """Returns the folders with results, in the order of torch's releases."""
    return sorted({*RESULTS.iterdir(), *(path.parent for path in pending)})


def select_results() -> Results:
    """Returns the results of the page: those of ``MAIN``, and others of ``ANY_RELEASE``.

    If ``MAIN`` lacks one of ``ANY_RELEASE``, its result is that of the last release that has it.
    """
    selected: Results = {}
    for folder in list_folders():
        selected |= {k: v for k, v in read_results(folder).items() if k in ANY_RELEASE}
    return selected | read_results(MAIN)


# ---- parts of a page -----------------------------------------------------------------------------


def format_number(value: float | None) -> str:
    """Formats a float with two decimals, one from 10 on and none from 100 on; None as "-"."""
    if value is None or isinstance(value, int):
        return "-" if value is None else str(value)
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{decimals}f}"


def format_table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|" + " --- |" * len(titles)
    for row in rows:
        cells = [cell if isinstance(cell, str) else format_number(cell) for cell in row]
        yield f"| {' | '.join(cells)} |"


def format_text(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def format_origin(data: dict[str, Any]) -> str:
    """Returns command, date and machine of a benchmark's data."""
    return format_text(
        f"Command: `{data['command']}`. {data['date']}, commit {data['commit']}, "
        f"torch {data['torch']}, Python {data['python']}. "
        f"Machine: {data['machine']}; load: {data['load']}."
    )


def format_size(size: str) -> str:
    kib = int(size) // 1024
    return f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"


# ---- tables of one benchmark ---------------------------------------------------------------------


def format_steps(data: dict[str, Any]) -> Iterator[str]:
    titles = (
        "model",
        "implementation",
        "wall, ms",
        "torch / this",
        "CPU, ms",
        "page faults",
        "peak, MiB",
    )
    for kind, sentence in (
        ("without", "Forward and backward:"),
        ("with", "Forward, backward and optimizer:"),
    ):
        rows = []
        for model in data["models"].values():
            torch_wall = model["costs"]["torch"][kind]["wall"]
            title = model["title"] + (f", {model['optimizer']}" if kind == "with" else "")
            for name, costs in model["costs"].items():
                cost = costs[kind]
                faults = None if cost["faults"] is None else int(cost["faults"])
                ratio = torch_wall / cost["wall"]
                rows.append([title, name, cost["wall"], ratio, cost["cpu"], faults, cost["peak"]])
                title = ""
        yield from ("", sentence, "")
        yield from format_table(titles, rows)


def format_host(data: dict[str, Any]) -> Iterator[str]:
    jobs = {name: job for name, job in data.items() if isinstance(job, dict) and name != "guard"}
    rows: list[list[Any]] = [
        [name, int(count), row["torch"], row["fsdp_c"], row["torch"] / row["fsdp_c"]]
        for name, job in jobs.items()
        for count, row in job["us_per_group_step"].items()
    ]
    yield from ("", "us per unit and step:", "")
    yield from format_table(("job", "parameters", "torch", "fsdp_c", "torch / fsdp_c"), rows)
    rows = []
    for name, job in jobs.items():
        fits = (job["fit"][key] for key in ("torch", "fsdp_c"))
        rows.append([name, *(fit[key] for fit in fits for key in ("fixed_us", "us_per_param"))])
    yield from ("", "The least-squares lines through these values, in us:", "")
    titles = ("job", "torch: per unit", "per parameter", "fsdp_c: per unit", "per parameter")
    yield from format_table(titles, rows)
    if "guard" in data:
        yield from format_guard(data["guard"])


def format_guard(data: dict[str, dict[str, float]]) -> Iterator[str]:
    rows = [[name, *row.values()] for name, row in data.items()]
    yield from (
        "",
        "us per unit and operation on two ranks: without the guard, and added by the guard.",
        "`control` is the difference between two models without the guard:",
        "",
    )
    yield from format_table(("transport", *next(iter(data.values()))), rows)


def format_memory(data: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name, job in data.items():
        if not isinstance(job, dict):
            continue
        precision, _, count = name.partition("_")
        for phase in ("forward", "backward"):
            torch_value, fsdp_c_value = job["torch"][phase], job["fsdp_c"][phase]
            ratio = torch_value / fsdp_c_value
            rows.append([precision, int(count), phase, torch_value, fsdp_c_value, ratio])
    titles = ("precision", "parameters", "phase", "torch", "fsdp_c", "torch / fsdp_c")
    yield ""
    yield from format_table(titles, rows)


def format_units(data: dict[str, Any]) -> Iterator[str]:
    rows = [
        [precision, phase, *(data[precision][name][phase] for name in names)]
        for precision in ("fp32", "mixed")
        for names in [list(data[precision])]
        for phase in ("forward", "backward")
    ]
    yield ""
    yield from format_table(("precision", "phase", *data["fp32"]), rows)


def format_bandwidth(data: dict[str, Any]) -> Iterator[str]:
    for operation in ("gather", "reduction", "kernel"):
        sizes = data[operation]
        rows = [[format_size(size), *row.values()] for size, row in sizes.items()]
        yield ""
        yield from format_table((operation, *next(iter(sizes.values()))), rows)


def format_replicate(data: dict[str, Any]) -> Iterator[str]:
    names = ("bare", "ddp", "torch", "fsdp_c")
    rows: list[list[Any]] = []
    for model, title in (("gpt", "GPT, 25.4 M parameters"), ("small", "500 small parameters")):
        base = data[f"{model} fsdp_c"]["median"]
        for name in names:
            times = data[f"{model} {name}"]
            rows.append([title, name, times["median"], times["min"], times["median"] / base])
            title = ""
    yield ""
    yield from format_table(
        ("model", "implementation", "median, ms", "minimum, ms", "this / fsdp_c"), rows
    )
    yield from ("", "Transient memory of the GPT, in units of its parameters' bytes:", "")
    memory = data["memory"]
    rows = [[name, memory[name]["forward"], memory[name]["backward"]] for name in names]
    yield from format_table(("implementation", "forward", "backward"), rows)
    host = data["host_ms"]
    yield from (
        "",
        "Host time of the 500 small parameters, in ms of CPU, minus that of the bare model:",
        "",
    )
    yield from format_table(("torch", "fsdp_c"), [[host["torch"], host["fsdp_c"]]])


def format_optim(data: dict[str, Any]) -> Iterator[str]:
    rows = [[name, *times, times[2] / times[0]] for name, times in data["ms"].items()]
    titles = ("optimizer", "plain parameters", "DTensors", "accelerated", "accelerated / plain")
    yield ""
    yield from format_table(titles, rows)


def format_calls(data: dict[str, Any]) -> Iterator[str]:
    rows = [
        [int(width), *(value for clock in (0, 1) for value in _compare(times, clock))]
        for width, times in data["ms"].items()
    ]
    titles = ("width", "wall: torch", "fsdp_c", "ratio", "CPU: torch", "fsdp_c", "ratio")
    yield ""
    yield from format_table(titles, rows)


def _compare(times: dict[str, list[float]], clock: int) -> tuple[float, float, float]:
    torch_value, fsdp_c_value = times["torch"][clock], times["fsdp_c"][clock]
    return torch_value, fsdp_c_value, torch_value / fsdp_c_value


def format_cold(data: dict[str, Any]) -> Iterator[str]:
    rows: list[list[Any]] = [
        [f"`fully_shard` of {count} parameters", torch_ms, fsdp_c_ms]
        for _, count, torch_ms, fsdp_c_ms, _ in data["rows"]
    ]
    first = data["first_use_ms"]
    for index, title in enumerate(("imports", "first call of a process")):
        rows.append([title, first["torch"][index], first["fsdp_c"][index]])
    yield ""
    yield from format_table(("step", "torch", "fsdp_c"), rows)


def format_plan(data: dict[str, Any]) -> Iterator[str]:
    rows = data["rows"]
    errors = [abs(estimate / measured - 1) for _, estimate, measured, *_ in rows]
    error_with_scratch = max(abs(1 - estimate / peak) for _, estimate, _, _, peak, *_ in rows)
    yield ""
    yield from format_table(
        ("settings", "within 0.1 %", "within 1 %", "largest error", "with kernels' scratch memory"),
        [
            [
                len(rows),
                sum(error <= 0.001 for error in errors),
                sum(error <= 0.01 for error in errors),
                f"{max(errors):.2%}",
                f"{error_with_scratch:.2%}",
            ]
        ],
    )


def format_peers(data: dict[str, Any]) -> Iterator[str]:
    costs = data["costs"]
    counts = list(next(iter(costs.values()))["us_per_unit_step"])
    rows = [
        [name, cost["package"], *cost["us_per_unit_step"].values()]
        + [cost["fixed_us"], cost["us_per_param"]]
        for name, cost in costs.items()
    ]
    parameters = [f"{count} parameter{'s' if count != '1' else ''}" for count in counts]
    titles = ("library", "package", *parameters, "line: per unit", "per parameter")
    yield from ("", "us per unit and step, and the least-squares line:", "")
    yield from format_table(titles, rows)
    for name, reason in data["missing"].items():
        yield from ("", format_text(f"{name} did not run: `{reason}`."))


def format_cuda_steps(data: dict[str, Any]) -> Iterator[str]:
    for model, jobs in data["models"].items():
        keys = list(next(iter(jobs.values()))["torch"])
        rows = [
            [name, *(" / ".join(_format_figure(f[key]) for f in job.values()) for key in keys)]
            for name, job in jobs.items()
        ]
        yield from ("", f"{model}, torch / fsdp_c:", "")
        yield from format_table(("job", *(CUDA_TITLES.get(key, key) for key in keys)), rows)


CUDA_TITLES = {
    "launch": "launches",
    "record": "event records",
    "wait": "event waits",
    "collective": "NCCL calls",
    "memcpy": "copies",
    "malloc": "cudaMalloc",
    "launch with GIL": "launches with GIL",
}


def _format_figure(value: float) -> str:
    return (
        str(int(value))
        if value == int(value)
        else f"{value:.1f}"
        if value < 1000
        else f"{value:.0f}"
    )


def format_gpu(data: dict[str, Any]) -> Iterator[str]:
    for text, titles, rows in result_gpu.make_tables(data):
        yield from ("", format_text(text))
        if rows:
            yield ""
            yield from format_table(titles, rows)


SECTIONS: dict[str, tuple[str, str, Callable[[dict[str, Any]], Iterator[str]]]] = {
    "gpu": ("On a GPU", result_gpu.EXPLANATION, format_gpu),
    "steps": (
        "Whole steps",
        "Two gloo ranks with one thread each; medians. Page faults are those of one step. The peak "
        "is resident memory above the beginning of the step, without memory that an implementation "
        "keeps between steps (DDP's buckets). The optimizer of `fsdp_c` and `shared` is changed by "
        "`fsdp_c.optim.accelerate`, as under `FSDP_C=1`, and that of `torch` is not. `shared` is "
        "fsdp_c with the 200 units joined to four (`min_unit=2**14`).",
        format_steps,
    ),
    "host": (
        "Host time",
        "CPU time of the calling thread minus that of the bare model, which is not sharded; "
        "minima. A fake group of 8 ranks.",
        format_host,
    ),
    "peers": (
        "Host time beside other libraries",
        "CPU time of the process minus that of the bare model, which is not sharded; minima. "
        "float32, torch's CUDA build on a simulated device that runs no kernel, rank 0 of 8 "
        "emulated NCCL ranks. Each library has "
        "its default settings, with two exceptions: ZeRO-3 also shards small parameters, and DDP "
        "has `gradient_as_bucket_view=True`. DDP shards no parameters. "
        "SimpleFSDP is made for compiled models, which are not measured.",
        format_peers,
    ),
    "cuda_steps": (
        "Host path of a CUDA step, on a simulated device",
        "torch's CUDA build on a simulated device that runs no kernel, rank 0 of 8 emulated NCCL "
        "ranks. All numbers are per step. Times are CPU times of the process minus those of "
        "the bare model, which is not sharded; minima. `CPU ms` is forward and backward. "
        "`optimizer ms` is a step of fused AdamW on DTensors, without `fsdp_c.optim.accelerate`. "
        "Launches with GIL "
        "are those of a thread that holds the GIL.",
        format_cuda_steps,
    ),
    "units": (
        "Memory of a step on real ranks",
        "Peak resident memory, transport included, as a multiple of one unit's parameters in the "
        "compute dtype. Two gloo ranks. `with overlap`: `set_reduction_overlap(model, True)`.",
        format_units,
    ),
    "memory": (
        "Memory of a step, allocations only",
        "Peak of allocated bytes, as a multiple of one unit's parameters in the compute dtype. The "
        "fake group of 8 ranks needs no memory. fsdp_c allocates all-gather buffers as on a GPU.",
        format_memory,
    ),
    "bandwidth": (
        "Bandwidth",
        "GB/s of unsharded data between two gloo ranks, best round. `torch` and `fsdp_c` include "
        "packing and unpacking.",
        format_bandwidth,
    ),
    "replicate": (
        "replicate",
        "Forward and backward on two gloo ranks. `torch` is torch's `replicate`.",
        format_replicate,
    ),
    "optim": (
        "Optimizers",
        "CPU time of a step over 500 parameters in ms, on a fake group; minima. `accelerated` is "
        "after `fsdp_c.optim.accelerate`.",
        format_optim,
    ),
    "clip": (
        "Clipping",
        "`clip_grad_norm_` of 250 weights of (width, width) and 250 biases of (width,) on two gloo "
        "ranks: ms, minima. CPU time excludes the wait for the other rank.",
        format_calls,
    ),
    "load": (
        "Loading",
        "`load_full_state_dict` of 250 weights of (width, width) and 250 biases of (width,) on two "
        "gloo ranks: ms, minima.",
        format_calls,
    ),
    "cold": (
        "Cold start",
        "CPU time in ms, minima. The first call of a process shards one layer, after the imports.",
        format_cold,
    ),
    "plan": (
        "Estimates",
        "Peaks that `fsdp_c.explain` estimates, compared with measured peaks. Scratch memory of "
        "kernels depends on the processor. The last column includes it.",
        format_plan,
    ),
}
"""Title, explanation and tables of each benchmark, in the order of the page."""

ANY_RELEASE = ("gpu", "peers", "cuda_steps")
"""Benchmarks that need a CUDA build of torch or a GPU. Their release may differ from MAIN's."""


# ---- documents -----------------------------------------------------------------------------------


def format_page() -> str:
    """Returns the generated part of docs/benchmarks.md."""
    results = select_results()
    lines = []
    for name, (title, explanation, format_tables) in SECTIONS.items():
        if name in results:
            lines += [f"## {title}", "", format_text(explanation), *format_tables(results[name])]
            lines += ["", format_origin(results[name]), ""]
    lines += [
        "## Goals",
        "",
        *format_table(result_goals.TITLES, [*result_goals.make_rows(results)]),
        "",
    ]
    for folder in list_folders():
        titles, rows, origin = result_releases.make_table(read_results(MAIN), read_results(folder))
        if folder != MAIN and rows:
            lines += [
                f"## {_format_release(MAIN)} beside {_format_release(folder)}",
                "",
                format_text(result_releases.EXPLANATION),
                "",
            ]
            lines += [*format_table(titles, rows), "", origin, ""]
    return "\n".join(lines)


def _format_release(folder: Path) -> str:
    return folder.name.replace("-", " ")


def format_readme() -> str:
    """Returns the generated part of README.md: measurements, their commands and machines."""
    results = read_results(MAIN)
    steps, host = results["steps"], results["host"]
    model = steps["models"]["medium"]
    walls = [model["costs"][name]["without"]["wall"] for name in ("torch", "fsdp_c")]
    title = f"forward and backward (1): {model['title']}"
    rows = [[title, *(f"{format_number(wall)} ms" for wall in walls)]]
    times = host["fp32"]["us_per_group_step"]["9"]
    title = "host time (2): a step of a unit of 9 float32 parameters"
    rows.append([title, *(f"{format_number(times[name])} us" for name in ("torch", "fsdp_c"))])
    if any(steps[key] != host[key] for key in ("machine", "date", "torch")):
        raise SystemExit("steps.json and host.json must be of one machine, day and torch release")
    gpu = read_results(GPU)["gpu"]
    ms = gpu["gpt"]["sizes"]["1.3 B"]["ms"]
    title = "training step on a GPU (3): GPT, 1.3 B parameters in 26 blocks"
    rows.append([title, *(f"{format_number(ms[key])} ms" for key in ("torch", "fsdp_c"))])
    cuda = read_results(CUDA)["cuda_steps"]
    job = cuda["models"]["8 blocks of Llama 8B"]["fsdp"]
    title = "host path of a CUDA step (4): 8 blocks of Llama 8B"
    rows.append(
        [title, *(f"{format_number(job[name]['CPU ms'])} ms" for name in ("torch", "fsdp_c"))]
    )
    origin = format_text(
        f"Commands: (1) `{steps['command']}`, on two ranks; (2) `{host['command']}`; "
        f"(3) `{gpu['command']}`, rank 0 of a simulated group of 8; (4) `{cuda['command']}`, "
        "CPU time on a simulated device, without that of the bare model. "
        f"Machines: (1, 2) {steps['machine']}, no GPU; {steps['date']}, torch {steps['torch']}; "
        f"(3) {gpu['machine']}; {gpu['date']}, torch {gpu['torch']}; "
        f"(4) {cuda['machine']}; {cuda['date']}, torch {cuda['torch']}."
    )
    return "\n".join(
        [*format_table(("measurement", "torch's FSDP2", "fsdp_c"), rows), "", origin, ""]
    )


def insert_tables(path: Path) -> str:
    """Returns the document's text with current figures."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path.name} lacks {BEGIN} or {END}")
    part = format_readme() if path.name == "README.md" else format_page()
    return f"{before}{BEGIN}\n\n{part}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Updates the tables of recorded results.")
    parser.add_argument("--check", action="store_true", help="only check the documents")
    check = parser.parse_args().check
    stale = [path for path in DOCUMENTS if insert_tables(path) != path.read_text()]
    if check:
        for path in stale:
            print(f"{path.name} is out of date: run python benchmarks/result_tables.py")
        return int(bool(stale))
    for path in stale:
        path.write_text(insert_tables(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
