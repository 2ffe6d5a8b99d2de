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
        self,
        mode: int,
        body: Callable[[Cudart, ctypes.c_void_p], int | None],
        stream: ctypes.c_void_p | None = None,
    ) -> int | None:
        """Runs ``body`` while the stream, or a new one, is captured.

        Returns the error of ``body``, or that of cudaStreamEndCapture if ``body`` returns 0 or
        None.
        """
        stream = stream or self.stream()
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


def unsafe_calls(cuda: Cudart) -> dict[str, Callable[[], int]]:
    """Returns calls that may wait for the device, or that use the legacy default stream."""
    lib, pointers = cuda.lib, [ctypes.c_void_p() for _ in range(3)]
    device, pinned, other = map(ctypes.byref, pointers)
    size = ctypes.c_size_t(64)
    assert lib.cudaMalloc(device, size) == lib.cudaHostAlloc(pinned, size, 0) == 0
    return {
        "cudaMalloc": lambda: lib.cudaMalloc(other, size),
        "cudaHostAlloc": lambda: lib.cudaHostAlloc(other, size, 0),
        "cudaMallocHost": lambda: lib.cudaMallocHost(other, size),
        "cudaMemset": lambda: lib.cudaMemset(pointers[0], 0, size),
        "cudaMemcpy": lambda: lib.cudaMemcpy(pointers[1], pointers[0], size, 2),
        "cudaFree": lambda: lib.cudaFree(None),
        "cudaFreeHost": lambda: lib.cudaFreeHost(None),
    }


def main() -> dict[str, int | None]:
    cuda = Cudart()
    lib = cuda.lib
    outside = cuda.event(cuda.stream())
    inside: list[ctypes.c_void_p] = []
    mode = ctypes.c_int(RELAXED)
    unsafe = unsafe_calls(cuda)
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
    for name, call in unsafe.items():
        results[name] = cuda.run_captured(GLOBAL, lambda c, s, call=call: call())
    cuda.run_captured(GLOBAL, lambda c, s: inside.append(c.event(s)))
    results["event of a finished capture"] = lib.cudaStreamWaitEvent(cuda.stream(), inside[0], 0)
    lib.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    results["query of another event by a thread in relaxed mode"] = cuda.run_captured(
        GLOBAL, lambda c, s: lib.cudaEventQuery(outside)
    )
    for name, call in unsafe.items():
        results[f"{name} by a thread in relaxed mode"] = cuda.run_captured(
            GLOBAL, lambda c, s, call=call: call()
        )
    results["legacy default stream while a blocking stream is captured"] = cuda.run_captured(
        GLOBAL, lambda c, s: unsafe["cudaMemset"](), cuda.make("cudaStreamCreate")
    )
    return results


if __name__ == "__main__":
    print(json.dumps(main()))
