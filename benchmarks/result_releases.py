"""The table that compares the recorded results of two torch releases."""

from __future__ import annotations

from typing import Any

Results = dict[str, dict[str, Any]]
"""The data of each benchmark by its name."""
Pairs = dict[str, tuple[float, float]]
"""The values of torch's FSDP2 and of fsdp_c by what was measured."""

EXPLANATION = (
    "Both releases ran on one machine and day. Rows 'memory in units' are multiples of the "
    "parameter bytes of one unit; peaks of steps are MiB. Host time, optimizers and cold start are "
    "CPU time; steps are wall time."
)
COMPARED = ("host", "steps", "units", "optim", "cold")


def read_pairs(name: str, data: dict[str, Any]) -> Pairs:
    """Returns the compared values of one benchmark."""
    if name == "host":
        jobs = {job: v for job, v in data.items() if isinstance(v, dict) and job != "guard"}
        rows = {job: value["us_per_group_step"]["9"] for job, value in jobs.items()}
        pairs = {f"host time, {job}, 9 parameters, us": row for job, row in rows.items()}
    elif name == "steps":
        pairs = {
            f"{model} with optimizer, {label}": {key: costs[key]["with"][metric] for key in costs}
            for model, value in data["models"].items()
            for costs in [value["costs"]]
            for metric, label in (("wall", "ms"), ("peak", "peak, MiB"))
        }
    elif name == "units":
        pairs = {
            f"memory in units, {precision}, {phase}": {
                key: phases[phase] for key, phases in data[precision].items()
            }
            for precision in ("fp32", "mixed")
            for phase in ("forward", "backward")
        }
    elif name == "optim":
        pairs = {
            f"{kind}, ms": {"torch": times[1], "fsdp_c": times[2]}
            for kind, times in data["ms"].items()
        }
    else:
        pairs = {
            f"`fully_shard` of {count} parameters, ms": {"torch": torch_ms, "fsdp_c": fsdp_c_ms}
            for _, count, torch_ms, fsdp_c_ms, _ in data["rows"]
        }
        first = {key: times[1] for key, times in data["first_use_ms"].items()}
        pairs["first call of a process, ms"] = first
    return {title: (row["torch"], row["fsdp_c"]) for title, row in pairs.items()}


def find_comparable(first: Results, second: Results) -> list[str]:
    """Returns the benchmarks that ran with both releases on one machine and day.

    If there are several days or machines, these are the benchmarks of the last day, and of the
    alphabetically last machine of that day.
    """
    origins = {
        name: (second[name]["date"], second[name]["machine"])
        for name in COMPARED
        if name in first
        and name in second
        and all(first[name][key] == second[name][key] for key in ("date", "machine"))
    }
    last = max(origins.values(), default=None)
    return [name for name, origin in origins.items() if origin == last]


def make_table(first: Results, second: Results) -> tuple[list[str], list[list[Any]], str]:
    """Returns titles, rows and origin of the table; without rows if nothing is comparable."""
    names = find_comparable(first, second)
    if not names:
        return [], [], ""
    titles = ["measurement"]
    for results in (first, second):
        release = results[names[0]]["torch"]
        titles += [f"torch {release}", "fsdp_c", "ratio"]
    rows: list[list[Any]] = []
    for name in names:
        pairs = [read_pairs(name, results[name]) for results in (first, second)]
        for title in pairs[0]:
            if title in pairs[1]:
                values = [pair[title] for pair in pairs]
                rows.append([title, *(cell for a, b in values for cell in (a, b, a / b))])
    data = second[names[0]]
    return titles, rows, f"{data['date']}. Machine: {data['machine']}."
