"""The simulated accelerator as torch sees it: device type ``sim``, with ``torch.sim`` beside.

``start()`` once in a process makes it there. ``torch.sim`` has what torch's own device modules
have; what only a simulation can tell is in ``device``, the C++ module.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from simulated_build import NAME, library


@functools.cache
def start() -> Any:
    """Registers the device with torch; returns the C++ module."""
    torch.utils.rename_privateuse1_backend("sim")
    path = str(library())
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    device = importlib.util.module_from_spec(spec)
    loader.exec_module(device)
    torch._register_device_module("sim", _device_module(device))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("sccl", _over_gloo, extended_api=True, devices=["sim"])
    dist.Backend.register_backend("loop", _over_nothing, extended_api=True, devices=["sim"])
    return device


GROUP_NAME = "xccl"
"""What the C++ group says it is: a relative of NCCL, which knows its reductions."""


def _over_gloo(options: Any, _: Any) -> Any:
    """A group of real ranks."""
    rank, size = options.group_rank, options.group_size
    store = dist.PrefixStore("under sccl", options.store)
    inner = dist.ProcessGroupGloo(store, rank, size, options.timeout)
    return start().make_group(rank, size, GROUP_NAME, inner)


def _over_nothing(options: Any, _: Any) -> Any:
    """A group of which this process is one rank, and the others have the same data."""
    return start().make_loop_group(options.group_rank, options.group_size, GROUP_NAME)


def use_kernels(on: bool) -> None:
    """Whether fsdp_c has kernels for the device, or makes do with torch's operators."""
    from fsdp_c import _C

    kernels = start().kernels_over(_C._testing.kernels()) if on else None
    _C._testing.simulate_kernels(kernels)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


def current_device() -> int:
    return int(start().current_device())


@contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream(stream.device)
    device = current_device()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        start().set_device(device)


@contextmanager
def _on_device(device: Any) -> Iterator[None]:
    before = current_device()
    start().set_device(_index(device))
    try:
        yield
    finally:
        start().set_device(before)


def _stream(device: Any = None, priority: int = 0, **packed: int) -> torch.Stream:
    """A new stream; or, as with ``torch.cuda.Stream``, the one that the numbers mean."""
    if packed:
        return torch.Stream(**packed)
    return torch.Stream(torch.device("sim", _index(device)), priority=priority)


def _device_module(device: Any) -> types.ModuleType:
    """What ``torch.sim`` is."""
    module: Any = types.ModuleType("torch.sim")
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        function = getattr(device, name)
        setattr(module, name, lambda where=None, function=function: function(_index(where)))
    module.reset_peak_memory_stats = lambda where=None: device.reset_peak(_index(where))
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: device.device_count
    module.current_device = device.current_device
    module.set_device = lambda where: device.set_device(_index(where))
    module.device = _on_device
    module.Stream = _stream
    module.Event = lambda **_: torch.Event(device="sim")
    module.stream = _on_stream
    module.current_stream = lambda where=None: torch.accelerator.current_stream(_index(where))
    module.synchronize = lambda where=None: torch.accelerator.synchronize(_index(where))
    module.empty_cache = lambda: None
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda where=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, where=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
