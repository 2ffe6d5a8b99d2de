"""Trains under torch's CUDA sanitizer (CSAN), with torch's operators in place of fsdp_c's kernels.

CSAN observes operators, allocations, streams and events of torch, and reports unordered accesses of
a tensor. Kernels of fsdp_c are not operators, so CSAN cannot observe them, and they are turned off.
The collectives are those of one_rank_group.cpp. As a negative control, a wait of a stream for an
event is hidden from CSAN. CSAN must report an error for at least one of these waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import loop_group
import torch
import variants
from outcome import conclude, start_device
from torch.cuda import _sanitizer as sanitizer
from variants import Tools

VARIANTS = ("mixed", "hsdp_partial", "asynchronous_gathers", "prefetched", "replicated")
DROPPED = 12
"""Number of waits that the negative control drops, one at a time."""


class Waits:
    """Counts the waits that CSAN observes, and hides one of them."""

    def __init__(self, syncs: Any) -> None:
        self._syncs, self._wait = syncs, syncs.stream_wait_for_event
        self.count, self._dropped = 0, -1

    def _observe(self, stream: int, event: int) -> None:
        self.count += 1
        if self.count - 1 != self._dropped:
            self._wait(stream, event)

    @contextmanager
    def drop(self, index: int) -> Iterator[None]:
        """Hides wait number ``index`` from CSAN; -1: no wait."""
        self.count, self._dropped = 0, index
        self._syncs.stream_wait_for_event = self._observe
        try:
            yield
        finally:
            self._syncs.stream_wait_for_event = self._wait


class Errors:
    """Records the errors of CSAN. CSAN also raises them. But its callbacks for frees and events may
    run while the exception is pending, and clear the exception."""

    def __init__(self, handler: Any) -> None:
        self._found: list[Any] = []
        self._check = handler._handle_kernel_launch
        handler._handle_kernel_launch = self._record

    def _record(self, *arguments: Any) -> list[Any]:
        errors: list[Any] = self._check(*arguments)
        self._found += errors
        return errors

    def train(self, tools: Tools, name: str) -> str:
        """Trains a variant. Returns the first error of CSAN, or ""."""
        self._found.clear()
        try:
            variants.VARIANTS[name](tools)
        except Exception:
            if not self._found:
                raise
        torch.cuda.synchronize()
        return " ".join(str(self._found[0]).split())[:300] if self._found else ""


def run() -> dict[str, Any]:
    """Returns the errors of each implementation and variant, and the detected waits."""
    sanitizer.enable_cuda_sanitizer()
    handler = sanitizer.cuda_sanitizer.dispatch.event_handler
    device = start_device()
    loop_group.join(variants.WORLD, device, native=True)
    errors = Errors(handler)
    result: dict[str, Any] = {"errors": {}, "operations": {}}
    for implementation in ("torch", "fsdp_c"):
        tools = Tools(implementation, device, width=32, layers=2, rows=4, steps=2)
        if implementation == "fsdp_c":
            from fsdp_c import _C

            _C._testing.hide_kernels(True)
        before = handler.seq_num
        found = {name: errors.train(tools, name) for name in VARIANTS}
        result["errors"][implementation] = found
        result["operations"][implementation] = handler.seq_num - before
    waits = Waits(handler.syncs)
    with waits.drop(-1):
        errors.train(tools, "mixed")
    total, detected = waits.count, 0
    indices = range(0, total, max(1, total // DROPPED))
    for index in indices:
        with waits.drop(index):
            detected += bool(errors.train(tools, "mixed"))
    result["waits"] = {"observed": total, "dropped": len(indices), "detected": detected}
    return result


def main() -> None:
    result = run()
    failures = [
        f"{implementation}, {name}: {error}"
        for implementation, errors in result["errors"].items()
        for name, error in errors.items()
        if error
    ]
    waits = result["waits"]
    if not waits["detected"]:
        failures.append("no dropped wait was detected")
    line = f"{len(VARIANTS)} variants, {waits['detected']} of {waits['dropped']} dropped waits "
    line += "detected" + (f"; {failures[0]}" if failures else "")
    conclude(not failures, line, **result)


if __name__ == "__main__":
    main()
