"""Records results in the repository, for docs/benchmarks.md and README.md.

    make bench                                          # on an idle machine
    python benchmarks/record_results.py benchmarks/report/*.json

The second command copies the JSON files of a run to benchmarks/results/torch-X.Y, where X.Y is the
release of torch that the run used. Then it draws the picture of README.md and updates the tables of
both documents (result_tables.py). Samples of memory over time are not recorded. The script writes
nothing if a file is incomplete, or was written by ``bench.py --quick``.

``results.json`` of the GPU check (tests/gpu/gpu_check.sh) is recorded as the benchmark ``gpu``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
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


def read_source(source: Path) -> dict[str, Any]:
    """Returns the part of a JSON file that is recorded.

    Raises:
        SystemExit: The file does not exist, is incomplete, or was written by ``bench.py --quick``.
    """
    if not source.is_file():
        raise SystemExit(f"{source} does not exist: run make bench first")
    data = json.loads(source.read_text())
    if "facts" in data:
        data = convert_gpu_check(data)
    missing = [key for key in REQUIRED if key not in data]
    if missing:
        raise SystemExit(f"{source} has no {', '.join(missing)}: measure again with this tree")
    if data.get("quick"):
        raise SystemExit(f"{source} is of bench.py --quick: run make bench without --quick")
    return shorten(data)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description="Records results of benchmarks.")
    parser.add_argument("sources", nargs="+", type=Path, metavar="FILE", help="JSON of a benchmark")
    for data in map(read_source, parser.parse_args().sources):
        result_tables.pending[find_folder(data) / f"{data['benchmark']}.json"] = data
    texts = {path: result_tables.insert_tables(path) for path in result_tables.DOCUMENTS}
    for path, data in result_tables.pending.items():
        texts[path] = json.dumps(data, separators=(",", ": "), indent=1) + "\n"
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, PICTURE.name)
        pictures.draw_overview(result_tables.read_results(result_tables.MAIN)["steps"], picture)
        texts[PICTURE] = picture.read_text()
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
