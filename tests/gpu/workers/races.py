"""Trains with torch and fsdp_c on a loop group with random pauses. All digests must be equal.

One process trains as rank 0 of eight (loop_group.py). On CUDA several processes share the device,
each with some of the seeds. The simulated device checks the order of all accesses itself, so one
seed is enough. Some processes have the C++ group of one_rank_group.cpp, which on CUDA moves data by
NCCL. Their bits must equal those of the other processes. dropped_waits.py runs the negative
controls.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import dropped_waits
import loop_group
import race
import variants
from outcome import DEVICE, ON_CUDA, SMALL, conclude, start_device

SEEDS = 2 if SMALL else 20
SECONDS = 200 if ON_CUDA and SMALL else 60
PARTS = 2
"""Number of processes per implementation. The last one has the C++ group."""
FEW_VARIANTS = ("mixed", "hsdp_partial", "asynchronous_gathers", "bfloat16_reduction")
"""Variants over the C++ group on the simulated device, and those of a small check on CUDA. Each has
other collectives."""

WORKERS = Path(__file__).parent
IMPLEMENTATIONS = ("torch", "fsdp_c")


class Part:
    """A process that writes its result to a file."""

    def __init__(self, file: Path, script: str, *arguments: str) -> None:
        self.file = file
        env = dropped_waits.environment() if script == "dropped_waits.py" else None
        command = [sys.executable, str(WORKERS / script), *arguments]
        self.process = subprocess.Popen(command, env=env)

    def result(self) -> Any:
        """Waits for the process. Returns its result, or None if it failed."""
        return json.loads(self.file.read_text()) if self.process.wait() == 0 else None


def start_race(
    folder: Path, implementation: str, seeds: list[int], seconds: float, *options: str
) -> Part:
    file = folder / f"{implementation}-{seeds[0]}{''.join(options[:1])}.json"
    limits = ["--seconds", str(seconds), "--seeds", *map(str, seeds)]
    return Part(file, "race.py", implementation, str(file), *limits, *options)


def start_controls(folder: Path, seconds: float) -> Part:
    file = folder / "controls.json"
    return Part(file, "dropped_waits.py", str(file), "--seconds", str(seconds))


Digests = dict[str, dict[str, dict[str, str]]]
"""Digests by variant, implementation and seed."""


def merge_results(results: list[tuple[str, Any]]) -> tuple[Digests, list[str]]:
    """Merges the digests. Also lists failures: processes that failed, processes that did not call
    NCCL, and findings of the simulated device."""
    digests: Digests = {}
    failures = []
    for implementation, result in results:
        if result is None:
            failures.append(f"a process of {implementation} failed")
            continue
        group = ", C++ group" if "inner" in result else ""
        if group and ON_CUDA and not result["inner"]:
            failures.append(f"{implementation}: NCCL was not called")
        # The group of the simulated device has other results (tests/accelerator/device/group.cpp).
        variant_group = group if DEVICE == "sim" else ""
        for name, by_seed in result["digests"].items():
            digests.setdefault(name + variant_group, {}).setdefault(implementation, {}).update(
                {f"{seed}{group}": digest for seed, digest in by_seed.items()}
            )
        for name, findings in result["findings"].items():
            failures.append(f"{implementation}, {name}: {findings[0]}")
    return digests, failures


def check_digests(digests: Digests) -> list[str]:
    """Lists the variants whose digests are incomplete, invalid or not all equal."""
    failures = []
    for name, by_implementation in digests.items():
        seeds = by_implementation.values()
        values = {value for by_seed in seeds for value in by_seed.values()}
        complete = set(by_implementation) == set(IMPLEMENTATIONS) and all(seeds)
        valid = all(re.fullmatch(r"[0-9a-f]{16}", value) for value in values)
        if not (complete and valid and len(values) == 1):
            different = {
                implementation: sorted(set(by_seed.values()))
                for implementation, by_seed in by_implementation.items()
            }
            failures.append(f"{name}: {different}")
    return failures


def fewest_seeds(digests: Digests) -> int:
    return min(
        (
            len(seeds)
            for by_implementation in digests.values()
            for seeds in by_implementation.values()
        ),
        default=0,
    )


def check_controls(controls: Any) -> list[str]:
    """Lists the controls of which no dropped wait was detected."""
    if controls is None:
        return ["the negative controls failed"]
    return [
        f"not detected: {name} {counters}"
        for name, counters in controls.items()
        if not counters["detected"]
    ]


def format_controls(controls: Any) -> str:
    if not controls:
        return "no controls (device without streams)"
    return "; ".join(
        f"{name}: {counters['detected']} of {counters['dropped']} detected"
        for name, counters in controls.items()
    )


def run_in_processes(seeds: int, seconds: float) -> tuple[Digests, list[str], Any]:
    """Runs each part in its own process; used on CUDA, where processes share the device."""
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(start_race, Path(folder))
        few = ("--variants", *FEW_VARIANTS) if SMALL else ()
        parts = [
            (
                implementation,
                start(implementation, [*range(part, seeds, PARTS)], seconds, *group, *few),
            )
            for implementation in IMPLEMENTATIONS
            for part, group in enumerate([()] * (PARTS - 1) + [("--native",)])
            if part < seeds
        ]
        digests, failures = merge_results(
            [(implementation, part.result()) for implementation, part in parts]
        )
        return digests, failures, start_controls(Path(folder), 28).result()


def run_native(seconds: float) -> list[tuple[str, Any]]:
    """Trains some variants over the C++ group, which needs processes of its own."""
    options = ("--native", "--variants", *FEW_VARIANTS)
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(start_race, Path(folder))
        parts = [(name, start(name, [0], seconds, *options)) for name in IMPLEMENTATIONS]
        return [(implementation, part.result()) for implementation, part in parts]


def run_in_this_process(seeds: int, seconds: float) -> tuple[Digests, list[str], Any]:
    deadline = time.monotonic() + seconds
    warnings.simplefilter("ignore")
    device = start_device()
    loop_group.join(variants.WORLD, device)
    results = [
        (implementation, race.run_all(implementation, device, list(range(seeds)), deadline))
        for implementation in IMPLEMENTATIONS
    ]
    if DEVICE == "sim":
        results += run_native(seconds)
    digests, failures = merge_results(results)
    return (
        digests,
        failures,
        dropped_waits.run_controls(device, deadline) if DEVICE != "cpu" else {},
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=SEEDS if ON_CUDA else 1)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    run = run_in_processes if ON_CUDA else run_in_this_process
    digests, failures, controls = run(options.seeds, options.seconds)
    failures += check_controls(controls) + check_digests(digests)
    line = f"{len(digests)} variants, {fewest_seeds(digests)} seeds: "
    line += (
        failures[0] if failures else f"digests equal; dropped waits: {format_controls(controls)}"
    )
    conclude(not failures, line, digests=digests, failures=failures, controls=controls)


if __name__ == "__main__":
    main()
