"""Records results in the repository, for docs/benchmarks.md and README.md.

    make bench                                          # on an idle machine
    python benchmarks/record_results.py benchmarks/report/*.json

The second command copies the JSON files of a run to benchmarks/results/torch-X.Y, where X.Y is the
release of torch that the run used. Then it draws the picture of README.md and updates the tables of
both documents (result_tables.py). Samples of memory over time are not recorded.

``results.json`` of the GPU check (tests/gpu/gpu_check.sh) is recorded as the benchmark ``gpu``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pictures
import result_tables

PICTURE = result_tables.ROOT / "docs" / "images" / "steps.svg"
REQUIRED = ("benchmark", "command", "date", "commit", "machine", "load", "torch", "python")
DIGITS = 5
"""Significant digits of a recorded number."""


def shorten(value: Any) -> Any:
    """Returns the value with rounded floats, without memory samples and paths of JSON files."""
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items() if not _is_dropped(key, item)}
    if isinstance(value, list):
        return [shorten(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _is_dropped(key: str, value: Any) -> bool:
    is_samples = isinstance(value, dict) and any(isinstance(item, list) for item in value.values())
    return key == "json" or (key == "memory" and is_samples)


GPU_FIGURES = {
    "bandwidth": ("memcpy_tb_per_s", "kernels"),
    "host": ("us_per_group_step",),
    "gpt": ("sizes",),
    "compiled": ("results",),
    "scripts": ("comparisons",),
    "traces": ("events",),
}
"""The figures of each step of the GPU check that are recorded."""


def convert_gpu_check(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the recorded part of the results of a GPU check, in the format of a benchmark."""
    facts = data["facts"]
    gpu = facts["gpu"]
    steps = {
        name: {key: step[key] for key in ("verdict", "seconds", "line")}
        for name, step in data.items()
    }
    figures = {
        name: {key: data[name][key] for key in keys if key in data[name]}
        for name, keys in GPU_FIGURES.items()
        if name in data
    }
    machine = f"{gpu['name']}, driver {gpu['driver_version']}, {facts['cpus']} processor cores"
    return {
        "benchmark": "gpu",
        "command": "tests/gpu/gpu_check.sh",
        "machine": machine,
        "load": "other steps ran during the steps compiled and scripts, none during the other "
        "measurements",
        **{key: facts[key] for key in ("date", "commit", "torch", "python")},
        "steps": steps,
        "notes": facts.get("notes", []),
        **figures,
    }


def find_folder(data: dict[str, Any]) -> Path:
    """Returns the folder for results with the torch release that the data names."""
    return result_tables.RESULTS / f"torch-{'.'.join(data['torch'].split('.')[:2])}"


def main() -> None:
    for source in map(Path, sys.argv[1:]):
        data = json.loads(source.read_text())
        if "facts" in data:
            data = convert_gpu_check(data)
        missing = [key for key in REQUIRED if key not in data]
        if missing:
            raise SystemExit(f"{source} has no {', '.join(missing)}: measure again with this tree")
        folder = find_folder(data)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(shorten(data), separators=(",", ": "), indent=1) + "\n"
        (folder / f"{data['benchmark']}.json").write_text(text)
        print(f"recorded: {folder.relative_to(result_tables.ROOT)}/{data['benchmark']}.json")
    PICTURE.parent.mkdir(exist_ok=True)
    pictures.draw_overview(json.loads((result_tables.MAIN / "steps.json").read_text()), PICTURE)
    for path in result_tables.DOCUMENTS:
        path.write_text(result_tables.update(path))


if __name__ == "__main__":
    main()
