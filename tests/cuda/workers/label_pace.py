"""Lets the steps of a worker wait for comparisons of collectives between the ranks."""

from __future__ import annotations

import faulthandler
import threading

INTERVAL = 0.05
"""Seconds between two comparisons, instead of two seconds."""
LONGEST_WAIT = 60
STEPS = 10
"""Number of steps between two waits. A comparison reads the collectives of several steps."""


class LabelPace:
    """Create it before the first step of the process, which starts the monitor."""

    def __init__(self) -> None:
        from fsdp_c._runtime import label_comparison, stall_monitor

        stall_monitor.INTERVAL = INTERVAL
        self.set_interval(INTERVAL)
        self._compared = threading.Event()
        compare = label_comparison.compare

        def compare_and_set() -> None:
            compare()
            self._compared.set()

        label_comparison.compare = compare_and_set

    @staticmethod
    def set_interval(seconds: float) -> None:
        from fsdp_c._runtime import label_comparison

        label_comparison.INTERVAL = label_comparison.INTERVAL_WITH_REQUEST = seconds

    def end_step(self, step: int) -> None:
        """After each tenth step, waits for the end of this rank's next comparison.

        Raises:
            TimeoutError: the monitor compares nothing.
        """
        if step % STEPS != STEPS - 1:
            return
        self._compared.clear()
        if not self._compared.wait(LONGEST_WAIT):
            faulthandler.dump_traceback()  # shows where the monitor is
            raise TimeoutError(f"no comparison of collectives within {LONGEST_WAIT} s")
