"""Checks of the simulated device: each function asserts one property of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import simulated
import torch
import torch.nn as nn

CHECKS: dict[str, Callable[[Any], None]] = {}


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Registers a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


def new_stream() -> torch.Stream:
    return torch.Stream(device="sim")


def use_stream(stream: torch.Stream) -> Any:
    """Makes ``stream`` current within the context."""
    return torch.sim.stream(stream)  # type: ignore[attr-defined]


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


# ---- operators ----


@check
def operators_have_the_bits_of_cpu_operators(device: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 5)
    for function in (
        lambda t: t @ t.T,
        lambda t: t[1:, ::2].softmax(-1),
        lambda t: nn.functional.layer_norm(t, (5,)),
        lambda t: torch.stack(torch._foreach_mul([t, t + 1], 3.0)),
        lambda t: nn.functional.conv1d(t[None], torch.ones(2, 7, 2, device=t.device)),
    ):
        assert torch.equal(function(x.to("sim")).cpu(), function(x))


@check
def backward_runs_in_a_device_thread(device: Any) -> None:
    x = torch.randn(3, device="sim", requires_grad=True)
    thread_ids = []
    y = (x * x).sum()
    x.register_hook(lambda grad: thread_ids.append(threading.get_ident()))
    y.backward()
    (thread_id,) = thread_ids
    assert thread_id != threading.get_ident()


@check
def operator_on_tensors_of_two_devices_raises(device: Any) -> None:
    try:
        torch.ones(3, device="sim") + torch.ones(3)
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("no error")


@check
def current_device_is_per_thread(device: Any) -> None:
    indices = []

    def allocate_on_device_3() -> None:
        torch.sim.set_device(3)  # type: ignore[attr-defined]
        indices.append(torch.ones(2, device="sim").device.index)

    thread = threading.Thread(target=allocate_on_device_3)
    thread.start()
    thread.join()
    assert indices == [3]
    assert torch.ones(2, device="sim").device.index == 0


@check
def resize_of_storage_on_another_device_keeps_the_current_device(device: Any) -> None:
    storage = torch.ones(2, device="sim:3").untyped_storage()
    storage.resize_(64)
    assert storage.nbytes() == 64
    assert torch.ones(2, device="sim").device.index == 0


# ---- order of streams ----


@check
def read_not_ordered_after_write_is_reported(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        x.add_(1)
    x.sum()
    (finding,) = device.findings()
    assert "read by aten::sum" in finding and "write by aten::add" in finding
    assert f"stream {side.stream_id}" in finding


@check
def write_not_ordered_after_read_is_reported(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        x.sum()
    x.add_(1)
    (finding,) = device.findings()
    assert "write by aten::add" in finding and "read by aten::sum" in finding


@check
def wait_for_event_orders_streams(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        x.add_(1)
        event = side.record_event()
    current_stream().wait_event(event)
    x.sum()
    assert device.findings() == []


@check
def event_does_not_cover_operations_issued_after_it(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        event = side.record_event()
        x.add_(1)
    current_stream().wait_event(event)
    x.sum()
    assert len(device.findings()) == 1


@check
def stream_synchronize_orders_later_operations(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        x.add_(1)
    side.synchronize()
    x.sum()
    assert device.findings() == []


@check
def accesses_to_disjoint_parts_of_a_tensor_do_not_race(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(8, 8, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        x[:, :4].add_(1)
    x[:, 4:].add_(1)
    assert device.findings() == []
    x[:, 3:5].sum()
    assert len(device.findings()) == 1


@check
def finding_contains_label_of_storage(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(4, device="sim")
    device.name_storage(x.untyped_storage()._cdata, "parameter head.weight")
    with use_stream(side):
        x.add_(1)
    assert "parameter head.weight" in device.findings()[0]


# ---- memory ----


@check
def allocation_reuses_freed_memory_filled_with_nan(device: Any) -> None:
    x = torch.ones(100, device="sim")
    address = x.data_ptr()
    del x
    y = torch.empty(100, device="sim")
    assert y.data_ptr() == address
    assert y.isnan().all()


@check
def allocation_does_not_reuse_memory_of_another_stream(device: Any) -> None:
    x = torch.ones(100, device="sim")
    address = x.data_ptr()
    del x
    with use_stream(new_stream()):
        assert torch.empty(100, device="sim").data_ptr() != address


@check
def memory_freed_while_in_use_is_reported_at_next_allocation(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(100, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        x.add_(1)
    del x
    assert device.findings() == []
    torch.empty(7, device="sim")  # an allocation checks all freed blocks
    (finding,) = device.findings()
    assert "write by allocation" in finding and "aten::add" in finding


@check
def wait_after_free_and_before_next_allocation_is_in_time(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(100, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        x.add_(1)
    del x
    current_stream().wait_stream(side)
    torch.empty(7, device="sim")
    assert device.findings() == []


@check
def record_stream_delays_reuse_of_freed_memory(device: Any) -> None:
    side = new_stream()
    x = torch.zeros(100, device="sim")
    address = x.data_ptr()
    side.wait_stream(current_stream())
    with use_stream(side):
        x.add_(1)
    x.record_stream(side)
    del x
    assert torch.empty(100, device="sim").data_ptr() != address
    current_stream().wait_stream(side)
    assert torch.empty(100, device="sim").data_ptr() == address
    assert device.findings() == []


@check
def memory_statistics_count_rounded_blocks(device: Any) -> None:
    before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
    device.reset_peak(0)
    x = torch.zeros(1000, device="sim")
    y = torch.zeros(1000, device="sim")
    del y
    assert torch.sim.memory_allocated() - before == 4096  # type: ignore[attr-defined]
    assert torch.sim.max_memory_allocated() - before == 8192  # type: ignore[attr-defined]
    blocks = [block for block in device.snapshot() if block["address"] == x.data_ptr()]
    assert [block["bytes"] for block in blocks] == [4000]


# ---- writes that happen before an earlier reader ----


def _read_then_overwrite(ordered: bool, freed: bool) -> float:
    """Reads ones on another stream, multiplies them by two, and overwrites them with threes.

    ``ordered``: the overwrite waits for the reader. ``freed``: the overwrite is a write to a new
    allocation of the same memory. Returns the mean of the reader's result: 2.0, or 6.0 if the
    overwrite happens before the read.
    """
    side = new_stream()
    x = torch.ones(100, device="sim")
    side.wait_stream(current_stream())
    with use_stream(side):
        y = x * 2
    if ordered:
        current_stream().wait_stream(side)
    if freed:
        del x
        x = torch.zeros(100, device="sim")
    x.fill_(3)
    side.synchronize()
    return y.sum().item() / 100


@check
def unordered_overwrite_can_come_before_its_reader(device: Any) -> None:
    for ordered, freed, replayed in ((False, False, 6.0), (True, False, 2.0), (True, True, 2.0)):
        device.record_early_writes()
        assert _read_then_overwrite(ordered, freed) == 2.0
        assert device.replay_recorded_writes() == (0 if ordered else 1)
        assert _read_then_overwrite(ordered, freed) == replayed
        device.stop_early_writes()


@check
def unordered_allocation_can_overwrite_freed_memory_before_its_reader(device: Any) -> None:
    device.record_early_writes()
    assert _read_then_overwrite(False, True) == 2.0
    assert device.replay_recorded_writes() > 0
    assert _read_then_overwrite(False, True) != 2.0  # NaN
    device.stop_early_writes()


# ---- writes that happen after a later reader ----


def _sum_unordered_threes(seed: int, stride: int, device: Any) -> torch.Tensor:
    """Writes 2000 threes. Another stream adds both halves into every ``stride``-th element.

    The reader does not wait for the threes, which the device delays with some seeds.
    """
    device.delay_writes(seed)
    side = new_stream()
    x = torch.ones(2000, device="sim")
    side.wait_stream(current_stream())
    x.fill_(3)
    with use_stream(side):
        torch.sum(x.view(2, 1000), 0, out=x[: 1000 * stride : stride])
    torch.accelerator.synchronize()
    device.delay_writes(0)
    return x.cpu()


@check
def delayed_write_reaches_the_elements_that_its_reader_does_not_overwrite(device: Any) -> None:
    delayed = set()
    for seed in range(1, 33):
        half, strided = (_sum_unordered_threes(seed, stride, device) for stride in (1, 2))
        delayed.add(bool(half[:1000].max() < 3))
        assert bool((half[1000:] == 3).all())
        assert bool((strided[1::2] == 3).all())
    assert delayed == {False, True}


# ---- pinned memory and the host ----


@check
def host_read_of_pinned_target_without_wait_is_reported(device: Any) -> None:
    x = torch.ones(4, device="sim")
    host = x.to("cpu", non_blocking=True)
    assert host.is_pinned()
    host.sum()
    assert "of the host does not wait for aten::copy_" in device.findings()[0]


@check
def non_blocking_copy_to_pageable_memory_is_synchronous(device: Any) -> None:
    x = torch.ones(4, device="sim")
    host = torch.zeros(4)
    host.copy_(x, non_blocking=True)
    assert host.sum() == 4
    assert device.findings() == []


@check
def host_write_to_pinned_source_without_wait_is_reported(device: Any) -> None:
    host = torch.ones(4).pin_memory()
    host.to("sim", non_blocking=True)
    host.add_(1)
    assert "write by aten::add" in device.findings()[0]


def run(rank: int, world_size: int) -> dict[str, str]:
    """Runs all checks in one rank. Maps each check to its error, or to "" if the check passed."""
    device = simulated.start()
    errors = {}
    for name, function in CHECKS.items():
        device.reset()
        try:
            function(device)
            errors[name] = ""
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}; findings: {device.findings()}"
    return errors
