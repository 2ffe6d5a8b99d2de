"""Registers the simulated accelerator with torch: device type ``sim`` and module ``torch.sim``.

``start()`` registers the device once per process. ``torch.sim`` has the functions of torch's own
device modules. The C++ module that ``start()`` returns has the functions of the simulation:
findings, counters, injected faults.
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
from simulated_build import NAME, build_library


@functools.cache
def start() -> Any:
    """Registers the device with torch at the first call. Returns the C++ module."""
    torch.utils.rename_privateuse1_backend("sim")
    path = str(build_library())
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    device = importlib.util.module_from_spec(spec)
    loader.exec_module(device)
    torch._register_device_module("sim", _build_device_module(device))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("sccl", _make_gloo_group, extended_api=True, devices=["sim"])
    dist.Backend.register_backend("loop", _make_loop_group, extended_api=True, devices=["sim"])
    return device


GROUP_NAME = "xccl"
"""Backend name of the C++ group. fsdp_c and torch use NCCL's reduce ops with ``xccl``."""


def _make_gloo_group(options: Any, _: Any) -> Any:
    """Creates a group of the backend ``sccl``, which exchanges its data through gloo."""
    rank, size = options.group_rank, options.group_size
    store = dist.PrefixStore("under sccl", options.store)
    inner = dist.ProcessGroupGloo(store, rank, size, options.timeout)
    return start().make_group(rank, size, GROUP_NAME, inner)


def _make_loop_group(options: Any, _: Any) -> Any:
    """Creates a group of the backend ``loop``: it does not communicate, and its collectives return
    the results of ranks with equal data."""
    return start().make_loop_group(options.group_rank, options.group_size, GROUP_NAME)


def use_kernels(enabled: bool) -> None:
    """Enables fsdp_c's kernels for the device, or makes fsdp_c use torch's operators."""
    from fsdp_c import _C

    kernels = start().kernels_over(_C._testing.kernels()) if enabled else None
    _C._testing.simulate_kernels(kernels)


def _device_index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index if device is not None else None
    return current_device() if index is None else index


def current_device() -> int:
    return int(start().current_device())


@contextmanager
def _use_stream(stream: torch.Stream | None) -> Iterator[None]:
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
def _use_device(device: Any) -> Iterator[None]:
    before = current_device()
    start().set_device(_device_index(device))
    try:
        yield
    finally:
        start().set_device(before)


def _make_stream(device: Any = None, priority: int = 0, **ids: int) -> torch.Stream:
    """Returns a new stream or, like ``torch.cuda.Stream``, the existing stream with the given
    ``stream_id``, ``device_index`` and ``device_type``."""
    if ids:
        return torch.Stream(**ids)
    return torch.Stream(torch.device("sim", _device_index(device)), priority=priority)


def _build_device_module(device: Any) -> types.ModuleType:
    """Builds the module ``torch.sim``."""
    module: Any = types.ModuleType("torch.sim")
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        function = getattr(device, name)
        setattr(
            module, name, lambda target=None, function=function: function(_device_index(target))
        )
    module.reset_peak_memory_stats = lambda target=None: device.reset_peak(_device_index(target))
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: device.device_count
    module.current_device = device.current_device
    module.set_device = lambda target: device.set_device(_device_index(target))
    module.device = _use_device
    module.Stream = _make_stream
    module.Event = lambda **_: torch.Event(device="sim")
    module.stream = _use_stream
    module.current_stream = lambda target=None: torch.accelerator.current_stream(
        _device_index(target)
    )
    module.synchronize = lambda target=None: torch.accelerator.synchronize(_device_index(target))
    module.empty_cache = lambda: None
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda target=None: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, target=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
