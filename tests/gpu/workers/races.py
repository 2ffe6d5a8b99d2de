"""Races: stock and ours on a loop group, under many seeds of delays, all with the same bits.

One process trains as rank 0 of eight (loop_group.py). On CUDA several processes share the device,
each with some of the seeds; on the simulated device, which checks the order of all accesses itself,
one seed says everything. dropped.py has the negative controls.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import dropped
import loop_group
import race
import variants
from outcome import DEVICE, ON_CUDA, conclude, start_device

SEEDS = 20
PARTS = 2
"""Processes for each implementation."""

WORKERS = Path(__file__).parent
IMPLEMENTATIONS = ("torch", "fsdp_c")


class Part:
    """A process that writes a file."""

    def __init__(self, file: Path, script: str, *arguments: str) -> None:
        self.file = file
        env = dropped.environment() if script == "dropped.py" else None
        command = [sys.executable, str(WORKERS / script), *arguments]
        self.process = subprocess.Popen(command, env=env)

    def result(self) -> Any:
        """Waits for it; None where it failed."""
        return json.loads(self.file.read_text()) if self.process.wait() == 0 else None


def start_race(folder: Path, implementation: str, seeds: list[int], seconds: float) -> Part:
    file = folder / f"{implementation}-{seeds[0]}.json"
    limits = ["--seconds", str(seconds), "--seeds", *map(str, seeds)]
    return Part(file, "race.py", implementation, str(file), *limits)


def start_controls(folder: Path, seconds: float) -> Part:
    file = folder / "controls.json"
    return Part(file, "dropped.py", str(file), "--seconds", str(seconds))


Digests = dict[str, dict[str, dict[str, str]]]
"""By variant, implementation and seed."""


def gather(results: list[tuple[str, Any]]) -> tuple[Digests, list[str]]:
    """All digests, and what is wrong with the processes or was found by the simulated device."""
    digests: Digests = {}
    wrong = []
    for implementation, result in results:
        if result is None:
            wrong.append(f"a process of {implementation} failed")
            continue
        for name, by_seed in result["digests"].items():
            digests.setdefault(name, {}).setdefault(implementation, {}).update(
                {str(seed): digest for seed, digest in by_seed.items()}
            )
        for name, findings in result["findings"].items():
            wrong.append(f"{implementation}, {name}: {findings[0]}")
    return digests, wrong


def judge(digests: Digests) -> list[str]:
    """The variants whose digests are not one, with all that there are."""
    wrong = []
    for name, found in digests.items():
        values = {value for by_seed in found.values() for value in by_seed.values()}
        complete = set(found) == set(IMPLEMENTATIONS) and all(found.values())
        good = all(re.fullmatch(r"[0-9a-f]{16}", value) for value in values)
        if not (complete and good and len(values) == 1):
            counts = {who: sorted(set(by_seed.values())) for who, by_seed in found.items()}
            wrong.append(f"{name}: {counts}")
    return wrong


def fewest_seeds(digests: Digests) -> int:
    return min((len(seeds) for one in digests.values() for seeds in one.values()), default=0)


def judge_controls(controls: Any) -> list[str]:
    """Those that did not show."""
    if controls is None:
        return ["the negative controls failed"]
    return [
        f"not noticed: {name} {found}" for name, found in controls.items() if not found["shown"]
    ]


def shown(controls: Any) -> str:
    if not controls:
        return "no controls (no streams)"
    return "; ".join(
        f"{name}: {found['shown']} of {found['left_out']} shown" for name, found in controls.items()
    )


def in_processes(seeds: int, seconds: float) -> tuple[Digests, list[str], Any]:
    """On CUDA, where several processes share the device."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = [
            (implementation, start_race(folder, implementation, some, seconds))
            for implementation in IMPLEMENTATIONS
            for some in (list(range(part, seeds, PARTS)) for part in range(PARTS))
            if some
        ]
        digests, wrong = gather([(who, part.result()) for who, part in parts])
        return digests, wrong, start_controls(folder, 28).result()


def in_this_process(seeds: int, seconds: float) -> tuple[Digests, list[str], Any]:
    deadline = time.monotonic() + seconds
    warnings.simplefilter("ignore")
    device = start_device()
    loop_group.join(variants.WORLD, device)
    results = [
        (who, race.run_all(who, device, list(range(seeds)), deadline)) for who in IMPLEMENTATIONS
    ]
    digests, wrong = gather(results)
    return digests, wrong, dropped.controls(device, deadline) if DEVICE != "cpu" else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=SEEDS if ON_CUDA else 1)
    parser.add_argument("--seconds", type=float, default=70)
    options = parser.parse_args()
    run = in_processes if ON_CUDA else in_this_process
    digests, wrong, controls = run(options.seeds, options.seconds)
    wrong += judge_controls(controls) + judge(digests)
    line = f"{len(digests)} variants, {fewest_seeds(digests)} seeds: "
    line += wrong[0] if wrong else f"stock and ours equal; left out on purpose: {shown(controls)}"
    conclude(not wrong, line, digests=digests, wrong=wrong, controls=controls)


if __name__ == "__main__":
    main()
