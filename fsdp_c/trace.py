"""``trace``: measures the time of a training step by unit and rank."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ._runtime import object_collectives
from ._runtime.fsdp_units import list_groups, require_module
from ._tools import trace_spans
from ._tools.timeline import StepTrace
from ._tools.trace_spans import Event, Span


@contextlib.contextmanager
def trace(model: nn.Module) -> Iterator[StepTrace]:
    """Records the activity of every rank inside the block, which runs one or more steps.

    ::

        with fsdp_c.trace(model) as t:
            loss(model(batch)).backward()
            optimizer.step()
        print(t)
        t.plot("step.png")
        t.save("step.json")

    torch's profiler runs inside the block. The model is not changed. On the CPU, times are host
    times, and a collective lasts from its issue to its end in the backend's threads. On devices
    whose kernels the profiler records, times are those of kernels. Trace a later step of a job,
    because the first steps include initialization.

    All ranks of the default process group must enter and leave the block together. Afterwards each
    rank has the traces of all ranks.

    Args:
        model: A module that ``fully_shard`` or ``replicate`` of fsdp_c or torch was applied to, or
            a module that contains such modules.

    Raises:
        ValueError: ``model`` has no sharded module.
        TypeError: ``model`` is not a module.
        RuntimeError: Another profiler is active.
    """
    require_module(model, "trace")
    devices = {group.device.type for group in list_groups(model, "trace")}
    if torch.autograd.profiler._is_profiler_enabled:
        raise RuntimeError("trace cannot run while another profiler is active: end it first")
    result = StepTrace()
    is_distributed = dist.is_initialized() and dist.get_backend() != "fake"
    with profile(activities=_choose_activities(devices)) as profiler:
        if is_distributed:
            dist.barrier()
        with record_function(trace_spans.TRACE_RANGE):
            try:
                yield result
            except BaseException:
                result._raised = True
                raise
            if devices - {"cpu", "meta"}:
                torch.accelerator.synchronize()
    spans = trace_spans.make_spans(_read_events(profiler))
    result.ranks = (
        _gather_spans(spans) if is_distributed else [_shift_spans(spans, _find_start(spans))]
    )
    result._closed = True


def _choose_activities(devices: set[str]) -> list[ProfilerActivity]:
    labels = {"cuda": "CUDA", "xpu": "XPU"}
    names = ["CPU", *(labels[device] for device in sorted(devices) if device in labels)]
    supported = torch.profiler.supported_activities()
    return [a for a in (getattr(ProfilerActivity, name) for name in names) if a in supported]


def _read_events(profiler: profile) -> list[Event]:
    """Returns the ranges of a profile, in nanoseconds since 1970."""
    kineto_profiler: Any = profiler.profiler
    events = []
    for event in kineto_profiler.kineto_results.events():
        on_device = event.device_type() != DeviceType.CPU
        begin = event.start_ns()
        correlation_id = event.linked_correlation_id() if on_device else event.correlation_id()
        events.append(
            Event(
                event.name(),
                begin,
                begin + event.duration_ns(),
                is_async=event.is_async(),
                on_device=on_device,
                id=correlation_id,
            )
        )
    return events


def _find_start(spans: list[Span]) -> int:
    return min((span.begin for span in spans), default=0)


def _shift_spans(spans: list[Span], origin: int) -> list[Span]:
    return [span._replace(begin=span.begin - origin, end=span.end - origin) for span in spans]


def _gather_spans(spans: list[Span]) -> list[list[Span]]:
    """Returns all ranks' spans, in nanoseconds since the start of the first rank.

    Clocks of hosts differ. Each host's times are shifted, so that the first rank of each host
    leaves the barrier at time 0.
    """
    own_host = socket.gethostname()
    parts = object_collectives.gather_objects((own_host, _find_start(spans), spans))
    start_of_host: dict[str, int] = {}
    for host, start, _ in parts:
        start_of_host[host] = min(start, start_of_host.get(host, start))
    return [_shift_spans(rank_spans, start_of_host[host]) for host, _, rank_spans in parts]
