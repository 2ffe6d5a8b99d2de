"""Prints the time of a training step beside a second thread that runs Python code all the time.

``python busy_thread.py [JOB ...]`` runs each job under the bare model, torch's FSDP2 and fsdp_c, on
the simulated CUDA device. A thread that takes the GIL again waits up to ``sys.getswitchinterval()``
(5 ms) for the busy thread. The time of a step therefore grows with each release of the GIL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

IMPLEMENTATIONS = ("bare", "torch", "fsdp_c")


class BusyThread(threading.Thread):
    """Counts until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count, self.stopped = 0, False

    def run(self) -> None:
        while not self.stopped:
            self.count += 1


def measure(implementation: str, name: str, size: str, blocks: int, steps: int) -> dict[str, float]:
    """Runs a job in this process. Returns milliseconds per step, alone and beside the thread."""
    import stub_runtime

    device = stub_runtime.start()
    device.set(copies=0)
    import jobs

    training = jobs.start_training(implementation, name, size, blocks)
    alone = _times(training, steps)
    before = device.counts()
    busy = BusyThread()
    busy.start()
    beside = _times(training, steps)
    busy.stopped = True
    busy.join()
    after = device.counts()
    return {
        "alone ms": alone,
        "beside ms": beside,
        "with GIL": (after.get("launch with GIL", 0) - before.get("launch with GIL", 0)) / steps,
    }


def _times(training: Any, steps: int) -> float:
    """Returns the mean time of a step in milliseconds."""
    begin = time.perf_counter()
    for _ in range(steps):
        training.step()
    return 1000 * (time.perf_counter() - begin) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="SMALL")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--implementations", nargs="+", default=IMPLEMENTATIONS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", default=["fsdp"])
    arguments = parser.parse_args()
    sizes = arguments.size, arguments.blocks, arguments.steps
    if arguments.measure:
        implementation, name = arguments.names
        print(json.dumps(measure(implementation, name, *sizes)), flush=True)
        os._exit(0)  # without the destructors of the process group, which wait for the device
    options = ["--size", arguments.size, "--blocks", str(arguments.blocks)]
    options += ["--steps", str(arguments.steps)]
    print("| job | implementation | alone ms | beside ms | launches with GIL |")
    print("|---|---|---|---|---|")
    for name in arguments.names:
        for implementation in arguments.implementations:
            command = [sys.executable, __file__, "--measure", implementation, name, *options]
            environment = os.environ | {"FSDP_C_JIT": "1"}
            result = subprocess.run(command, capture_output=True, text=True, env=environment)
            if result.returncode:
                raise RuntimeError(f"{implementation}, {name}: {result.stderr[-3000:]}")
            row = json.loads(result.stdout.splitlines()[-1])
            cells = f"{row['alone ms']:.1f} | {row['beside ms']:.0f} | {row['with GIL']:.0f}"
            print(f"| {name} | {implementation} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
