"""Seeded bugs: one call by which fsdp_c orders streams does not happen, or happens wrongly.

The simulated device notes each event recorded and waited for, each wait for a collective and each
block given back, with the functions of the extension that led to it, and can drop the n-th. So
every ordering point of a step is a seeded bug, without a compiler: a wait is superfluous where
nothing is found without it.
"""

from __future__ import annotations

import bisect
import functools
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import scenarios
import sim_tools
import simulated
from features import Record

import fsdp_c._C as _C
from fsdp_c import alike

WATCHED = "fsdp_c/_C."
OURS = ("fc_", "fct_", "fcpy_")


@dataclass(frozen=True)
class Point:
    """Where in fsdp_c a call comes from."""

    kind: str
    """record, wait, work wait, synchronize; or current, allocate"""
    chain: tuple[str, ...]
    """The functions of the extension on the stack, innermost first."""

    def __str__(self) -> str:
        return f"{self.kind}: {' < '.join(self.chain)}"


@functools.cache
def _symbols() -> tuple[list[int], list[str]]:
    """Addresses of the extension's functions in order, and their names."""
    lines = subprocess.run(
        ["nm", "-n", "-C", str(_C.__file__)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    words = [line.split(maxsplit=2) for line in lines]
    found = [(int(w[0], 16), w[2]) for w in words if len(w) == 3 and w[1] in "tT"]
    return [address for address, _ in found], [name.split(".")[0] for _, name in found]


def _chain(frames: list[int]) -> tuple[str, ...]:
    addresses, names = _symbols()
    chain = [names[bisect.bisect_right(addresses, frame - 1) - 1] for frame in frames]
    chain = [name for name in chain if "(" not in name and not name.startswith("fct_")]
    return tuple(name for i, name in enumerate(chain) if i == 0 or chain[i - 1] != name)


@dataclass
class Run:
    """What a run of a scenario gave."""

    record: Record
    findings: list[str]
    points: list[Point]


def run(
    name: str,
    implementation: str = "fsdp_c",
    fault: str = "",
    at: int = -1,
    at_start: Callable[[], object] = lambda: None,
) -> Run:
    """Runs a scenario; the ``at``-th call of the extension goes wrong as ``fault`` says.

    ``at_start`` is called when the device has forgotten what was before.
    """
    device = simulated.start()
    alike._kinds.clear()  # operations are told by number: they must not depend on runs before
    device.forget()
    tools: Any = sim_tools.SimTools(0, sim_tools.WORLD, implementation)
    device.watch(WATCHED, fault, at)
    at_start()
    try:
        record = scenarios.SCENARIOS[name](tools)
    except Exception as error:
        record = [f"{type(error).__name__}: {error}"]
    points = [Point(kind, _chain(frames)) for kind, _, frames in device.calls()]
    device.watch("", "", -1)
    return Run(record, device.findings(), points)


def early(name: str, fault: str = "", at: int = -1) -> tuple[int, Run]:
    """Runs a scenario twice: (how many writes may come before somebody has read what they
    overwrite, the run in which all of them do)."""
    device = simulated.start()
    gc.collect()
    try:
        run(name, fault=fault, at=at, at_start=device.note_early_writes)
        gc.collect()
        counts: list[int] = []
        shown = run(
            name, fault=fault, at=at, at_start=lambda: counts.append(device.show_early_writes())
        )
    finally:
        device.forget_early_writes()
    return counts[0], shown


def broken(name: str, fault: str = "drop") -> Iterator[tuple[int, Point, Run]]:
    """Breaks each call of the scenario in turn: (its number, its point, the run without it).

    ``drop`` and ``wrong stream`` break calls that order streams, ``other stream`` what the
    extension is told to be the current stream, ``early free`` gives its memory back too early.
    """
    for index, point in enumerate(run(name, fault=fault).points):
        yield index, point, run(name, fault=fault, at=index)


def main() -> None:
    """Breaks every call of the scenarios that are named, and says which are found."""
    sim_tools.join_loop_group()
    simulated.use_kernels(True)
    fault = "drop"
    for name in sys.argv[1:]:
        if name in ("drop", "wrong stream", "other stream", "early free"):
            fault = name
            continue
        table: dict[Point, list[bool]] = {}
        for _, point, result in broken(name, fault):
            table.setdefault(point, []).append(bool(result.findings))
        print(f"{name}, {fault}: calls that are found, of all")
        for point, found in table.items():
            print(f"{sum(found):5d} of {len(found):3d}  {point}")


if __name__ == "__main__":
    main()
