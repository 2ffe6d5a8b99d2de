"""What the simulated device promises, each promise as a function that asserts it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import simulated
import torch
import torch.nn as nn

CHECKS: dict[str, Callable[[Any], None]] = {}


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHECKS[function.__name__] = function
    return function


def stream() -> torch.Stream:
    return torch.Stream(device="sim")


def on(where: torch.Stream) -> Any:
    return torch.sim.stream(where)  # type: ignore[attr-defined]


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


# ---- operators ----


@check
def operators_have_the_bits_of_the_cpu(device: Any) -> None:
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
    threads = []
    y = (x * x).sum()
    x.register_hook(lambda grad: threads.append(threading.get_ident()))
    y.backward()
    assert threads != [threading.get_ident()]


@check
def devices_do_not_mix(device: Any) -> None:
    try:
        torch.ones(3, device="sim") + torch.ones(3)
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError("no error")


@check
def a_thread_has_a_device_of_its_own(device: Any) -> None:
    seen = []

    def work() -> None:
        torch.sim.set_device(3)  # type: ignore[attr-defined]
        seen.append(torch.ones(2, device="sim").device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [3]
    assert torch.ones(2, device="sim").device.index == 0


# ---- order ----


@check
def a_read_before_the_write_is_over_is_found(device: Any) -> None:
    side = stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current())
    with on(side):
        x.add_(1)
    x.sum()
    (found,) = device.findings()
    assert "read by aten::sum" in found and "write by aten::add" in found
    assert f"stream {side.stream_id}" in found


@check
def a_write_before_the_read_is_over_is_found(device: Any) -> None:
    side = stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current())
    with on(side):
        x.sum()
    x.add_(1)
    (found,) = device.findings()
    assert "write by aten::add" in found and "read by aten::sum" in found


@check
def an_event_orders(device: Any) -> None:
    side = stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current())
    with on(side):
        x.add_(1)
        event = side.record_event()
    current().wait_event(event)
    x.sum()
    assert device.findings() == []


@check
def an_event_orders_only_what_was_before_it(device: Any) -> None:
    side = stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current())
    with on(side):
        event = side.record_event()
        x.add_(1)
    current().wait_event(event)
    x.sum()
    assert len(device.findings()) == 1


@check
def what_the_host_has_waited_for_is_over(device: Any) -> None:
    side = stream()
    x = torch.zeros(4, device="sim")
    side.wait_stream(current())
    with on(side):
        x.add_(1)
    side.synchronize()
    x.sum()
    assert device.findings() == []


@check
def parts_of_a_tensor_are_told_apart(device: Any) -> None:
    side = stream()
    x = torch.zeros(8, 8, device="sim")
    side.wait_stream(current())
    with on(side):
        x[:, :4].add_(1)
    x[:, 4:].add_(1)
    assert device.findings() == []
    x[:, 3:5].sum()
    assert len(device.findings()) == 1


@check
def a_finding_names_the_parameter(device: Any) -> None:
    side = stream()
    x = torch.zeros(4, device="sim")
    device.name_storage(x.untyped_storage()._cdata, "parameter head.weight")
    with on(side):
        x.add_(1)
    assert "parameter head.weight" in device.findings()[0]


# ---- memory ----


@check
def freed_memory_is_handed_out_again_and_poisoned(device: Any) -> None:
    x = torch.ones(100, device="sim")
    address = x.data_ptr()
    del x
    y = torch.empty(100, device="sim")
    assert y.data_ptr() == address
    assert y.isnan().all()


@check
def each_stream_has_memory_of_its_own(device: Any) -> None:
    x = torch.ones(100, device="sim")
    address = x.data_ptr()
    del x
    with on(stream()):
        assert torch.empty(100, device="sim").data_ptr() != address


@check
def memory_freed_too_early_is_found(device: Any) -> None:
    side = stream()
    x = torch.zeros(100, device="sim")
    side.wait_stream(current())
    with on(side):
        x.add_(1)
    del x
    assert device.findings() == []
    torch.empty(7, device="sim")  # it might have been that memory
    (found,) = device.findings()
    assert "write by allocation" in found and "aten::add" in found


@check
def memory_freed_before_a_wait_is_fine_until_it_is_needed(device: Any) -> None:
    side = stream()
    x = torch.zeros(100, device="sim")
    side.wait_stream(current())
    with on(side):
        x.add_(1)
    del x
    current().wait_stream(side)
    torch.empty(7, device="sim")
    assert device.findings() == []


@check
def record_stream_keeps_memory(device: Any) -> None:
    side = stream()
    x = torch.zeros(100, device="sim")
    address = x.data_ptr()
    side.wait_stream(current())
    with on(side):
        x.add_(1)
    x.record_stream(side)
    del x
    assert torch.empty(100, device="sim").data_ptr() != address
    current().wait_stream(side)
    torch.empty(100, device="sim")
    assert device.findings() == []


@check
def memory_is_counted(device: Any) -> None:
    before = torch.sim.memory_allocated()  # type: ignore[attr-defined]
    device.reset_peak(0)
    x = torch.zeros(1000, device="sim")
    y = torch.zeros(1000, device="sim")
    del y
    assert torch.sim.memory_allocated() - before == 4096  # type: ignore[attr-defined]
    assert torch.sim.max_memory_allocated() - before == 8192  # type: ignore[attr-defined]
    held = [one for one in device.snapshot() if one["address"] == x.data_ptr()]
    assert [one["bytes"] for one in held] == [4000]


# ---- writes that come too early ----


def _overwritten(ordered: bool, freed: bool) -> float:
    """What a reader on another stream makes of memory that is written behind it."""
    side = stream()
    x = torch.ones(100, device="sim")
    side.wait_stream(current())
    with on(side):
        y = x * 2
    if ordered:
        current().wait_stream(side)
    if freed:
        del x
        x = torch.zeros(100, device="sim")
    x.fill_(3)
    side.synchronize()
    return y.sum().item() / 100


@check
def a_write_behind_a_reader_can_come_before_it(device: Any) -> None:
    for ordered, freed, seen in ((False, False, 6.0), (True, False, 2.0), (True, True, 2.0)):
        device.note_early_writes()
        assert _overwritten(ordered, freed) == 2.0
        assert device.show_early_writes() == (0 if ordered else 1)
        assert _overwritten(ordered, freed) == seen
        device.forget_early_writes()


@check
def freed_memory_can_be_overwritten_before_its_reader(device: Any) -> None:
    device.note_early_writes()
    assert _overwritten(False, True) == 2.0
    assert device.show_early_writes() > 0
    assert _overwritten(False, True) != 2.0  # it is not a number
    device.forget_early_writes()


# ---- the host ----


@check
def a_copy_to_pinned_memory_is_not_over_at_once(device: Any) -> None:
    x = torch.ones(4, device="sim")
    host = x.to("cpu", non_blocking=True)
    assert host.is_pinned()
    host.sum()
    assert "of the host does not wait for aten::copy_" in device.findings()[0]


@check
def a_copy_to_ordinary_memory_is_over(device: Any) -> None:
    x = torch.ones(4, device="sim")
    host = torch.zeros(4)
    host.copy_(x, non_blocking=True)
    assert host.sum() == 4
    assert device.findings() == []


@check
def pinned_memory_is_not_written_while_it_is_read(device: Any) -> None:
    host = torch.ones(4).pin_memory()
    host.to("sim", non_blocking=True)
    host.add_(1)
    assert "write by aten::add" in device.findings()[0]


def run(rank: int, world_size: int) -> dict[str, str]:
    """What is wrong, by check; empty where nothing is."""
    device = simulated.start()
    results = {}
    for name, function in CHECKS.items():
        device.forget()
        try:
            function(device)
            results[name] = ""
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}; found: {device.findings()}"
    return results
