"""Fault injection into one call that orders streams, returns a stream or allocates memory.

The simulated device logs calls, with the extension's functions on the stack: records of events,
waits for events and collectives, synchronizations, queries of the current stream, and allocations.
The device can inject a fault into the n-th of these calls. Every ordering point of a step can
therefore become a seeded bug without recompiling fsdp_c. A wait is superfluous if the device
reports nothing without this wait.

``python call_faults.py [FAULT] SCENARIO...`` breaks every call of the scenarios in turn and prints
how many the device reports.
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
from fsdp_c._runtime import param_template

LOGGED_LIBRARY = "fsdp_c/_C."
FAULTS = {
    "drop": ("record", "wait", "work wait", "synchronize"),
    "wrong stream": ("record",),
    "other stream": ("current",),
    "early free": ("allocate",),
}
"""The kinds of calls on which each fault has an effect."""


@dataclass(frozen=True)
class CallSite:
    """The place in fsdp_c from which a logged call comes."""

    kind: str
    """"record", "wait", "work wait" or "synchronize"; for the faults "other stream" and "early
    free": "current" or "allocate"."""
    stack: tuple[str, ...]
    """The extension's functions on the stack, innermost first."""

    def __str__(self) -> str:
        return f"{self.kind}: {' < '.join(self.stack)}"


@functools.cache
def _symbols() -> tuple[list[int], list[str]]:
    """Returns the sorted addresses of the extension's functions, and their names."""
    lines = subprocess.run(
        ["nm", "-n", "-C", str(_C.__file__)], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    fields = [line.split(maxsplit=2) for line in lines]
    functions = [(int(f[0], 16), f[2]) for f in fields if len(f) == 3 and f[1] in "tT"]
    return [address for address, _ in functions], [name.split(".")[0] for _, name in functions]


def _function_names(frames: list[int]) -> tuple[str, ...]:
    """Returns the names of the C functions at these return addresses.

    C++ functions, ``fct_`` functions and direct repetitions are left out.
    """
    addresses, symbols = _symbols()
    names = [symbols[bisect.bisect_right(addresses, frame - 1) - 1] for frame in frames]
    names = [name for name in names if "(" not in name and not name.startswith("fct_")]
    return tuple(name for i, name in enumerate(names) if i == 0 or names[i - 1] != name)


@dataclass
class Run:
    """One run of a scenario: its record, the device's findings, and the logged calls."""

    record: Record
    findings: list[str]
    calls: list[CallSite]


def run(
    name: str,
    implementation: str = "fsdp_c",
    fault: str = "",
    at: int = -1,
    on_start: Callable[[], object] = lambda: None,
) -> Run:
    """Runs a scenario in which ``fault`` is injected into the logged call of index ``at``.

    ``on_start`` is called after the device's state is reset and before the scenario begins.
    """
    device = simulated.start()
    # Calls are identified by index, so a run must not depend on caches that earlier runs filled.
    param_template._templates.clear()
    device.reset()
    tools: Any = sim_tools.SimTools(implementation)
    device.log_calls(LOGGED_LIBRARY, fault, at)
    on_start()
    try:
        record = scenarios.SCENARIOS[name](tools)
    except Exception as error:
        record = [f"raised {type(error).__name__}: {error}"]
    calls = [CallSite(kind, _function_names(frames)) for kind, _, frames in device.calls()]
    device.log_calls("", "", -1)
    return Run(record, device.findings(), calls)


def replay_early_writes(name: str, fault: str = "", at: int = -1) -> tuple[int, Run]:
    """Runs a scenario twice. The first run records writes that do not wait for earlier readers. In
    the second run those readers read the written bytes.

    Returns the number of such writes, and the second run.
    """
    device = simulated.start()
    gc.collect()
    try:
        run(name, fault=fault, at=at, on_start=device.record_early_writes)
        gc.collect()
        counts: list[int] = []
        replay = run(
            name,
            fault=fault,
            at=at,
            on_start=lambda: counts.append(device.replay_recorded_writes()),
        )
    finally:
        device.stop_early_writes()
    return counts[0], replay


def break_each_call(name: str, fault: str = "drop") -> Iterator[tuple[CallSite, Run]]:
    """Injects ``fault`` into each call on which it has an effect. Yields the call and the run.

    ``drop`` skips a call that orders streams. ``wrong stream`` makes an event record the default
    stream instead of the given one. ``other stream`` returns a new stream as the current one.
    ``early free`` frees an allocation at its first use on another stream.
    """
    for index, call in enumerate(run(name, fault=fault).calls):
        if call.kind in FAULTS[fault]:
            yield call, run(name, fault=fault, at=index)


def main() -> None:
    """Prints how many broken calls are reported, for each call site of the given scenarios."""
    sim_tools.init_loopback_group()
    simulated.use_kernels(True)
    fault = "drop"
    for name in sys.argv[1:]:
        if name in FAULTS:
            fault = name
            continue
        reported_by_site: dict[CallSite, list[bool]] = {}
        for call, broken_run in break_each_call(name, fault):
            reported_by_site.setdefault(call, []).append(bool(broken_run.findings))
        print(f"{name}, {fault}: broken calls that are reported, of all")
        for call, reported in reported_by_site.items():
            print(f"{sum(reported):5d} of {len(reported):3d}  {call}")


if __name__ == "__main__":
    main()
