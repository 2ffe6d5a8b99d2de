"""Negative controls of the races: trainings of which one wait is left out have to show it.

    dropped.py FILE [--seconds 30]

Two ways to leave out a wait: the event that the gathers wait for comes from before the optimizer
(both implementations); and each wait of fsdp_c's own in turn, on CUDA by drop_waits.c in front of
the runtime (LD_PRELOAD), on the simulated device by itself. On CUDA a wait that is not there shows
in the bits, or (where streams happen to be in order all the same) not; on the simulated device it
is a finding. FILE gets, for each control, how many were left out and how many of them showed.
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
from outcome import BUILT, ON_CUDA, start_device
from variants import Stage

VARIANT = "mixed"
MOST = 60
"""Waits that are left out in turn; of more, some are taken from all over the training."""

Outcome = tuple[str, bool]
"""A digest, and whether the simulated device has found something."""


def shim() -> Path:
    """drop_waits.c, compiled."""
    made = BUILT / "drop_waits.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("drop_waits.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", str(source), "-o", str(made)]
    subprocess.run([*command, "-ldl"], check=True)
    return made


def environment() -> dict[str, str]:
    """That of a process of this file."""
    return os.environ | ({"LD_PRELOAD": str(shim())} if ON_CUDA else {})


class Waits:
    """The waits of the extension: counted, and one left out."""

    def __init__(self) -> None:
        self.simulated = race.simulated()
        self.preloaded = ctypes.CDLL(None) if ON_CUDA else None

    def leave_out(self, at: int) -> None:
        if self.preloaded is not None:
            self.preloaded.visit_drop(ctypes.c_long(at))
        else:
            self.simulated.watch("fsdp_c/_C.", "drop", at)

    def count(self) -> int:
        if self.preloaded is not None:
            return int(self.preloaded.visit_waits())
        return len(self.simulated.calls())

    def stop(self) -> None:
        if self.preloaded is not None:
            self.preloaded.visit_drop(ctypes.c_long(-1))
        else:
            self.simulated.watch("", "", -1)


def outcome(train: Callable[[], list[Any]]) -> Outcome:
    """Of a training in which all pauses are long."""
    device = race.simulated()
    if device is not None:
        device.forget()
    loop_group.DELAYS.seed(1)
    loop_group.DELAYS.means = dict.fromkeys(loop_group.Delays.KINDS, loop_group.SLOW)
    try:
        found = variants.digest(train())
    except Exception as error:
        found = type(error).__name__
    return found, bool(device is not None and device.findings())


def stale_events(stage: Stage) -> dict[str, Any]:
    right, _ = outcome(lambda: variants.optimizer_event(stage, stale=False))
    found, noted = outcome(lambda: variants.optimizer_event(stage, stale=True))
    return {"left_out": 1, "shown": int(noted or found != right)}


def dropped_waits(stage: Stage, deadline: float) -> dict[str, Any]:
    waits = Waits()
    train = variants.VARIANTS[VARIANT]

    def without(at: int) -> Outcome:
        waits.leave_out(at)
        try:
            return outcome(lambda: train(stage))
        finally:
            counts.append(waits.count())
            waits.stop()

    counts: list[int] = []
    right, _ = without(-1)
    most = MOST if ON_CUDA else 12
    left_out, shown = [], []
    for at in range(0, counts[0], max(1, counts[0] // most)):
        if time.monotonic() > deadline:
            break
        found, noted = without(at)
        left_out.append(at)
        if noted or found != right:
            shown.append(at)
    figures = {"waits": counts[0], "left_out": len(left_out), "shown": len(shown)}
    return figures | {"places": shown}


def controls(device: Any, deadline: float) -> dict[str, Any]:
    """All of them, in a process that has joined the group."""
    found = {
        f"stale event, {name}": stale_events(race.make_stage(name, device))
        for name in ("torch", "fsdp_c")
    }
    found["waits of ours"] = dropped_waits(race.make_stage("fsdp_c", device), deadline)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    warnings.simplefilter("ignore")
    device = start_device()
    loop_group.join(variants.WORLD, device)
    options.file.write_text(json.dumps(controls(device, deadline)))


if __name__ == "__main__":
    main()
