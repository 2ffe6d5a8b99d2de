"""Loads the simulated CUDA device into this process, and controls it.

``start()`` must run before the first import of torch: the loader then finds the substitutes by
their names and does not load NVIDIA's libraries.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import stub_build


@dataclass(frozen=True)
class CallSite:
    """A call by which a library orders streams."""

    kind: str
    """"record", "wait" or "synchronize"."""
    stack: tuple[str, ...]
    """The library's C functions on the stack, innermost first."""
    frames: tuple[int, ...]
    """Offsets of the return addresses in the library, innermost first."""


class Device:
    """The simulated device of this process."""

    def __init__(self, folder: Path) -> None:
        load = functools.partial(ctypes.CDLL, mode=ctypes.RTLD_GLOBAL)
        self.lib = load(str(folder / "libcuda_sim.so"))
        self._folder = folder
        self._observer: ctypes.CDLL | None = None
        self._kept = [load(str(path)) for path in sorted(folder.glob("lib*.so.*"))]
        self.lib.sim_counts.restype = ctypes.c_char_p
        self.lib.sim_finding.restype = ctypes.c_char_p
        self.lib.sim_finding.argtypes = [ctypes.c_size_t]
        self.lib.sim_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self.lib.sim_log_calls.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long]

    def set(self, **settings: int) -> None:
        """Sets fields of ``Settings`` (sim.h)."""
        for name, value in settings.items():
            if not self.lib.sim_set(name.encode(), int(value)):
                raise ValueError(f"the device has no setting {name!r}")

    def get_calls_until_failure(self, name: str) -> int:
        """Returns the number of calls until the failure that the setting ``name`` arms.

        0: the call has failed, or no failure is armed.
        """
        self.lib.sim_get.restype = ctypes.c_long
        return int(self.lib.sim_get(name.encode()))

    def announce_split(self, size: int) -> None:
        """Sets the number of ranks of the next communicator that ``ncclCommSplit`` makes."""
        self.lib.sim_announce_split(size)

    def counts(self) -> dict[str, int]:
        """Returns the number of calls by kind."""
        lines = self.lib.sim_counts().decode().splitlines()
        return {name: int(value) for name, value in (line.split("\t") for line in lines)}

    def findings(self) -> list[str]:
        """Returns the reports of the device, oldest first."""
        return list(self._findings())

    def _findings(self) -> Iterator[str]:
        index = 0
        while (text := self.lib.sim_finding(index)) is not None:
            yield text.decode()
            index += 1

    def access_on_host(self, address: int, size: int, write: bool = False) -> None:
        """Checks an access of the host to ``size`` bytes, if the memory is pinned."""
        self.lib.sim_access_on_host(ctypes.c_void_p(address), ctypes.c_size_t(size), int(write))

    def reset(self) -> None:
        """Drops findings, counts and recorded accesses."""
        self.lib.sim_reset()

    def observe(self, on: bool = True) -> None:
        """Checks the accesses of torch's operators, fsdp_c's kernels, copies and collectives."""
        self.set(checks=int(on), incomplete=int(on))
        self._load_observer().sim_observe_operators(int(on))

    def execute(self, order_seed: int = 0) -> None:
        """Executes operations, and connects NCCL's ranks.

        Must be called after the import of torch and before the first use of the device.

        ``order_seed`` selects the order of the operations. 0: each as early as possible.
        """
        self.set(execute=1, order_seed=order_seed)
        self._load_observer().sim_observe_operators(1)

    def _load_observer(self) -> ctypes.CDLL:
        if self._observer is None:
            self._observer = ctypes.CDLL(str(self._folder / "libcuda_sim_operators.so"))
        return self._observer

    def log_calls(self, library: str = "", kind: str = "", at: int = -1) -> None:
        """Logs the calls that order streams from the library whose path contains ``library``.

        If the call with the index ``at`` has the kind ``kind``, it does not order streams.
        """
        self.lib.sim_log_calls(library.encode(), kind.encode(), at)

    def break_call(self, library: str, site: CallSite, occurrence: int) -> None:
        """Starts the log. Call ``occurrence`` (from 1) of ``site`` does not order streams."""
        frames = (ctypes.c_size_t * len(site.frames))(*site.frames)
        kind = site.kind.encode()
        self.lib.sim_break_call(
            library.encode(), kind, frames, len(site.frames), ctypes.c_long(occurrence)
        )

    def calls(self, library: str) -> list[CallSite]:
        """Returns the logged calls.

        ``library`` is the path of the logged library. Its symbols give the names of the functions.
        """
        kind, frames = ctypes.c_char_p(), (ctypes.c_size_t * 48)()
        calls = []
        while (count := self.lib.sim_call(len(calls), ctypes.byref(kind), frames, 48)) >= 0:
            addresses = tuple(frames[:count])
            names = _function_names(library, addresses)
            calls.append(CallSite((kind.value or b"").decode(), names, addresses))
        return calls


@functools.cache
def _symbols(library: str) -> tuple[list[int], list[str]]:
    """Returns the sorted addresses of the library's functions, and their names."""
    output = subprocess.run(["nm", "-n", "-C", library], check=True, capture_output=True, text=True)
    fields = [line.split(maxsplit=2) for line in output.stdout.splitlines()]
    functions = [(int(f[0], 16), f[2]) for f in fields if len(f) == 3 and f[1] in "tT"]
    return [address for address, _ in functions], [name.split(".")[0] for _, name in functions]


def _function_names(library: str, frames: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the C functions at these return addresses, without C++ and ``fct_`` functions."""
    addresses, symbols = _symbols(library)
    names = [symbols[bisect.bisect_right(addresses, frame - 1) - 1] for frame in frames]
    return tuple(name for name in names if "(" not in name and not name.startswith("fct_"))


@functools.cache
def folder() -> Path:
    """Returns the folder with the built libraries."""
    return stub_build.build()


@functools.cache
def start() -> Device:
    """Builds the device if necessary and loads it. Must be called before torch is imported."""
    if "torch" in sys.modules:
        raise RuntimeError("stub_runtime.start() must be called before torch is imported")
    return Device(folder())


def get_device() -> Device:
    """Returns the device of :func:`start`, which was called before."""
    return start()
