"""Negative controls of the step ``races``, which must detect a training without one of its waits.

    dropped_waits.py FILE [--seconds 30]

There are two kinds of controls. In the first, the all-gathers of torch and fsdp_c wait for a stale
event, which was recorded before the optimizer step. In the second, each wait of fsdp_c is dropped
in turn: on CUDA by drop_waits.c (LD_PRELOAD), on the simulated device by the device.

On CUDA, a dropped wait is detected if it changes the bits. The bits stay equal if the streams run
in the right order by chance. The simulated device reports a dropped wait as a finding. The script
writes to FILE, for each control, the number of dropped waits and the number of detected ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loop_group
import race
import variants
from outcome import BUILT, ON_CUDA, SMALL, start_device
from variants import Tools

VARIANT = "mixed"
MAX_DROPPED = 60
"""Maximum number of waits to drop on CUDA. If there are more, they are sampled evenly."""

Outcome = tuple[str, bool]
"""A digest of the results, and whether the simulated device reported a finding."""


def build_shim() -> Path:
    """Compiles drop_waits.c and returns the library's path."""
    library = BUILT / "drop_waits.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("drop_waits.c")
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run([*command, "-ldl"], check=True)
    return library


def environment() -> dict[str, str]:
    """Returns the environment in which this file must run."""
    return os.environ | ({"LD_PRELOAD": str(build_shim())} if ON_CUDA else {})


class Waits:
    """Counts the extension's waits and drops one of them.

    On the simulated device, records of events and synchronizations count as waits, too.
    """

    def __init__(self) -> None:
        self.simulated = race.simulated()
        self.preloaded = ctypes.CDLL(None) if ON_CUDA else None

    def drop(self, index: int) -> None:
        if self.preloaded is not None:
            self.preloaded.drop_wait(ctypes.c_long(index))
        else:
            self.simulated.log_calls("fsdp_c/_C.", "drop", index)

    def count(self) -> int:
        if self.preloaded is not None:
            return int(self.preloaded.count_waits())
        return len(self.simulated.calls())

    def stop(self) -> None:
        if self.preloaded is not None:
            self.preloaded.drop_wait(ctypes.c_long(-1))
        else:
            self.simulated.log_calls("", "", -1)


def run_with_long_pauses(train: Callable[[], list[Any]], factor: int = 1) -> Outcome:
    """Runs a training in which each kind of work has the longest mean pause, times ``factor``."""
    device = race.simulated()
    if device is not None:
        device.reset()
    loop_group.DELAYS.seed(1)
    means = dict.fromkeys(loop_group.Delays.KINDS, factor * loop_group.LONGEST_MEAN_PAUSE)
    loop_group.DELAYS.set_means(means)
    try:
        digest = variants.digest(train())
    except Exception as error:
        digest = type(error).__name__
    return digest, bool(device is not None and device.findings())


def detect_stale_event(tools: Tools) -> dict[str, Any]:
    """Trains with all-gathers that wait for a stale event. Returns the counters of this control.

    On a slow host the optimizer's work may end before the host issues the all-gathers. The results
    are then equal in spite of the stale event. So the pauses become longer until results differ.
    """
    expected, _ = run_with_long_pauses(lambda: variants.optimizer_event(tools, stale=False))
    for factor in (1, 3, 9):
        digest, has_findings = run_with_long_pauses(
            lambda: variants.optimizer_event(tools, stale=True), factor
        )
        if has_findings or digest != expected:
            return {"dropped": 1, "detected": 1}
    return {"dropped": 1, "detected": 0}


def detect_dropped_waits(tools: Tools, deadline: float) -> dict[str, Any]:
    waits = Waits()
    counts: list[int] = []
    train = variants.VARIANTS[VARIANT]

    def run_without_wait(index: int) -> Outcome:
        waits.drop(index)
        try:
            return run_with_long_pauses(lambda: train(tools))
        finally:
            counts.append(waits.count())
            waits.stop()

    expected, _ = run_without_wait(-1)
    limit = 12 if SMALL else MAX_DROPPED
    dropped, detected = [], []
    for index in range(0, counts[0], max(1, counts[0] // limit)):
        if time.monotonic() > deadline:
            break
        digest, has_findings = run_without_wait(index)
        dropped.append(index)
        if has_findings or digest != expected:
            detected.append(index)
    counters = {"waits": counts[0], "dropped": len(dropped), "detected": len(detected)}
    return counters | {"detected_waits": detected}


def run_controls(device: Any, deadline: float) -> dict[str, Any]:
    """Runs all negative controls in this process, which has joined the group."""
    results = {
        f"stale event, {name}": detect_stale_event(race.make_tools(name, device))
        for name in ("torch", "fsdp_c")
    }
    results["waits of fsdp_c"] = detect_dropped_waits(race.make_tools("fsdp_c", device), deadline)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    warnings.simplefilter("ignore")
    device = start_device()
    loop_group.join(variants.WORLD, device)
    options.file.write_text(json.dumps(run_controls(device, deadline)))


if __name__ == "__main__":
    main()
