"""Calls the substitute of libcudart during captures, and prints the error number of each rule."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import stub_runtime

GLOBAL, RELAXED = 0, 2


class Cudart:
    """The substitute of libcudart."""

    def __init__(self) -> None:
        stub_runtime.start()
        self.lib = ctypes.CDLL(str(next(Path(stub_runtime.folder()).glob("libcudart.so.*"))))

    def make(self, function: str) -> ctypes.c_void_p:
        """Returns a new stream or event."""
        handle = ctypes.c_void_p()
        flags = (ctypes.c_uint(1),) if function == "cudaStreamCreateWithFlags" else ()
        assert getattr(self.lib, function)(ctypes.byref(handle), *flags) == 0
        return handle

    def stream(self) -> ctypes.c_void_p:
        return self.make("cudaStreamCreateWithFlags")

    def event(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        """Returns a new event that is recorded on the stream."""
        event = self.make("cudaEventCreate")
        assert self.lib.cudaEventRecord(event, stream) == 0
        return event

    def work(self, stream: ctypes.c_void_p) -> None:
        assert self.lib.cudaMemsetAsync(None, 0, ctypes.c_size_t(0), stream) == 0

    def end(self, stream: ctypes.c_void_p) -> int:
        graph = ctypes.c_void_p()
        return int(self.lib.cudaStreamEndCapture(stream, ctypes.byref(graph)))

    def run_captured(
        self, mode: int, body: Callable[[Cudart, ctypes.c_void_p], int | None]
    ) -> int | None:
        """Runs ``body`` while a new stream is captured.

        Returns the error of ``body``, or that of cudaStreamEndCapture if ``body`` returns 0 or
        None.
        """
        stream = self.stream()
        assert self.lib.cudaStreamBeginCapture(stream, mode) == 0
        error = body(self, stream)
        ended = self.end(stream)
        return error or ended


def fork(cuda: Cudart, stream: ctypes.c_void_p, join: bool) -> None:
    other = cuda.stream()
    assert cuda.lib.cudaStreamWaitEvent(other, cuda.event(stream), 0) == 0
    cuda.work(other)
    if join:
        assert cuda.lib.cudaStreamWaitEvent(stream, cuda.event(other), 0) == 0


def main() -> dict[str, int | None]:
    cuda = Cudart()
    lib = cuda.lib
    outside = cuda.event(cuda.stream())
    inside: list[ctypes.c_void_p] = []
    mode = ctypes.c_int(RELAXED)
    results = {
        "wait for an event from outside": cuda.run_captured(
            GLOBAL, lambda c, s: lib.cudaStreamWaitEvent(s, outside, 0)
        ),
        "query of the captured stream": cuda.run_captured(
            GLOBAL, lambda c, s: lib.cudaStreamQuery(s)
        ),
        "synchronize the device": cuda.run_captured(
            GLOBAL, lambda c, s: lib.cudaDeviceSynchronize()
        ),
        "a forked stream is not joined": cuda.run_captured(GLOBAL, lambda c, s: fork(c, s, False)),
        "query of another event by a thread in global mode": cuda.run_captured(
            GLOBAL, lambda c, s: lib.cudaEventQuery(outside)
        ),
        "fork and join": cuda.run_captured(GLOBAL, lambda c, s: fork(c, s, True)),
    }
    cuda.run_captured(GLOBAL, lambda c, s: inside.append(c.event(s)))
    results["event of a finished capture"] = lib.cudaStreamWaitEvent(cuda.stream(), inside[0], 0)
    lib.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    results["query of another event by a thread in relaxed mode"] = cuda.run_captured(
        GLOBAL, lambda c, s: lib.cudaEventQuery(outside)
    )
    return results


if __name__ == "__main__":
    print(json.dumps(main()))
