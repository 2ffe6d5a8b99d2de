"""``fsdp_c.trace`` computes spans from profiler events, and leaves no state on the model."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_explain import sharded

import fsdp_c
from fsdp_c import _C
from fsdp_c._tools import timeline, timeline_plot, trace_spans
from fsdp_c._tools.timeline import StepTrace
from fsdp_c._tools.trace_spans import (
    COMPUTE,
    GATHER,
    HOST,
    REDUCE,
    TRACE_RANGE,
    Event,
    Span,
    make_spans,
)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(2, 8)).sum().backward()
    if optimizer is not None:
        optimizer.step()


def spans_in_track(all_spans: list[Span], track: str) -> list[tuple[str, str, int, int]]:
    """Returns (kind, unit, begin, end) of the spans in one track."""
    return [tuple(span[1:]) for span in all_spans if span.track == track]  # type: ignore[misc]


# ---- spans of profiler events --------------------------------------------------------------------

STEP_ON_CPU = [
    Event(TRACE_RANGE, 0, 1000),
    Event("FSDP::pre_forward (a)", 100, 200),
    Event("FSDP::all_gather (a)", 101, 120),
    Event("c10d::_allgather_base_", 105, 115, id=7),
    Event("gloo:all_gather", 110, 170, is_async=True),
    Event("FSDP::all_gather_copy_out (a)", 130, 190),
    Event("FSDP::post_forward (a)", 300, 310),
    Event("FSDP::pre_backward (a)", 400, 410),
    Event("FSDP::post_backward_accumulate (a)", 500, 501),
    Event("FSDP::post_backward_reduce (a)", 505, 550),
    Event("c10d::_reduce_scatter_base_", 520, 540, id=8),
    Event("gloo:all_reduce", 530, 700, is_async=True),
    Event("FSDP::root_post_backward_callback", 600, 720),
    Event("Optimizer.step#SGD.step", 800, 900),
]


def test_trace_spans_of_cpu_step_cover_it_without_gaps() -> None:
    all_spans = make_spans(STEP_ON_CPU[::-1])  # the order of the events does not matter
    assert spans_in_track(all_spans, GATHER) == [(GATHER, "a", 115, 170)]
    assert spans_in_track(all_spans, REDUCE) == [(REDUCE, "a", 540, 700)]
    assert spans_in_track(all_spans, COMPUTE) == [
        (trace_spans.OUTSIDE, "", 0, 100),
        (trace_spans.SHARDING, "a", 100, 130),
        (trace_spans.GATHER_WAIT, "a", 130, 170),
        (trace_spans.SHARDING, "a", 170, 200),
        (trace_spans.FORWARD, "a", 200, 300),
        (trace_spans.SHARDING, "a", 300, 310),
        (trace_spans.OUTSIDE, "", 310, 400),
        (trace_spans.SHARDING, "a", 400, 410),
        (trace_spans.BACKWARD, "a", 410, 500),
        (trace_spans.SHARDING, "a", 500, 501),
        (trace_spans.OUTSIDE, "", 501, 505),
        (trace_spans.SHARDING, "a", 505, 550),
        (trace_spans.OUTSIDE, "", 550, 600),
        (trace_spans.REDUCE_WAIT, "a", 600, 700),
        (trace_spans.SHARDING, trace_spans.ROOT, 700, 720),
        (trace_spans.OUTSIDE, "", 720, 800),
        (trace_spans.OPTIMIZER, "", 800, 900),
        (trace_spans.OUTSIDE, "", 900, 1000),
    ]


def test_trace_spans_of_collective_awaited_at_issue_contain_gather_wait() -> None:
    """On CPU torch's FSDP2 waits for a collective in the hook that issues it."""
    events = [
        Event(TRACE_RANGE, 0, 1000),
        Event("FSDP::all_gather (a)", 100, 200),
        Event("c10d::_allgather_base_", 110, 120),
        Event("gloo:all_gather", 125, 190, is_async=True),
    ]
    assert (trace_spans.GATHER_WAIT, "a", 120, 190) in spans_in_track(make_spans(events), COMPUTE)


def test_trace_spans_omit_collectives_issued_outside_of_fsdp() -> None:
    other_collectives = [
        Event("c10d::_allgather_base_", 10, 12),
        Event("gloo:all_gather", 15, 105, is_async=True),
        Event("gloo:all_gather", -50, -5, is_async=True),  # issued before the trace
    ]
    all_spans = make_spans(STEP_ON_CPU + other_collectives)
    assert spans_in_track(all_spans, GATHER) == [(GATHER, "a", 115, 170)]


def test_trace_spans_of_cuda_step_have_times_of_kernels() -> None:
    host_events = [event for event in STEP_ON_CPU if not event.is_async]
    launches = [Event("aten::mm", 250, 252, id=1), Event("aten::mm", 420, 425, id=2)]
    kernels = [
        Event("ncclDevKernel_AllGather_RING_LL", 2000, 2100, on_device=True, id=7),
        Event("void at::native::reduce_kernel<512>", 2050, 2060, on_device=True, id=1),
        Event("FSDP::all_gather (a)", 2000, 2100, on_device=True),
        Event("nccl:_all_gather_base", 2000, 2100, on_device=True),
        Event("sgemm", 200_000, 200_100, on_device=True, id=2),
        Event("ncclDevKernel_ReduceScatter_Sum", 199_950, 200_050, on_device=True, id=8),
    ]
    all_spans = make_spans([*host_events, *launches, *kernels])
    assert spans_in_track(all_spans, GATHER) == [(GATHER, "a", 2000, 2100)]
    assert spans_in_track(all_spans, REDUCE) == [(REDUCE, "a", 199_950, 200_050)]
    assert spans_in_track(all_spans, COMPUTE) == [
        (trace_spans.FORWARD, "a", 2050, 2060),
        (trace_spans.GATHER_WAIT, "a", 2060, 2100),
        (trace_spans.REDUCE_WAIT, "a", 199_950, 200_000),
        (trace_spans.BACKWARD, "a", 200_000, 200_100),
    ]
    assert (trace_spans.FORWARD, "a", 200, 300) in spans_in_track(all_spans, HOST)


def test_trace_spans_of_many_layers_need_time_in_proportion_to_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts the collectives that waits and pauses between kernels are compared with."""
    split_span, compared = trace_spans._split_span, 0

    def count(span: Span, collectives: list[Span], kind: str) -> Any:
        nonlocal compared
        compared += len(collectives)
        return split_span(span, collectives, kind)

    monkeypatch.setattr(trace_spans, "_split_span", count)
    events = [Event(TRACE_RANGE, 0, 10**9)]
    for i in range(300):
        begin = 50_000 * i
        events += [
            Event(f"FSDP::all_gather (l.{i})", begin, begin + 100),
            Event("c10d::_allgather_base_", begin + 10, begin + 50, id=i),
            Event("ncclDevKernel_AllGather", begin + 60, begin + 20_000, on_device=True, id=i),
            Event("gemm", begin + 30_000, begin + 30_010, on_device=True),
            Event("FSDP::root_post_backward_callback", begin + 40_000, begin + 40_100),
        ]
    spans = make_spans(events)
    assert len(spans_in_track(spans, GATHER)) == 300
    assert (trace_spans.GATHER_WAIT, "l.299") in [span[1:3] for span in spans]
    assert compared < 2000


@pytest.mark.parametrize("part", ["²", "x", "-1"])
def test_trace_sort_key_accepts_any_name(part: str) -> None:
    units = [f"blocks.{part}", "blocks.10", "blocks.2"]
    assert sorted(units, key=timeline._make_sort_key)[1:] == ["blocks.2", "blocks.10"]


def test_trace_plot_draws_names_with_dollar_signs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    name = "a$\\unknown$"
    spans = [Span(COMPUTE, trace_spans.FORWARD, name, 0, 10**6)]
    timeline_plot.plot_timeline(name, {0: spans}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_trace_summary_states_shares_of_time_and_longest_wait() -> None:
    trace = StepTrace()
    with pytest.raises(RuntimeError, match="still open"):
        trace.summary()
    ms = 1_000_000
    rank_without_wait = [
        Span(COMPUTE, trace_spans.FORWARD, "blocks.3", 0, 88 * ms),
        Span(GATHER, GATHER, "blocks.3", 40 * ms, 50 * ms),
    ]
    rank_with_wait = [
        Span(COMPUTE, trace_spans.FORWARD, "blocks.3", 0, 88 * ms),
        Span(COMPUTE, trace_spans.GATHER_WAIT, "blocks.3", 88 * ms, 100 * ms),
        Span(GATHER, GATHER, "blocks.3", 80 * ms, 100 * ms),
        Span(REDUCE, REDUCE, "blocks.4", 90 * ms, 101 * ms),
    ]
    trace.ranks, trace._closed = [rank_without_wait, rank_with_wait], True
    assert trace.summary() == (
        "101 ms on 2 ranks: 87 % forward, 6 % wait for a gather. 61 % of communication is hidden; "
        "'blocks.3' waits 12 ms for its gather on rank 1."
    )
    assert trace.seconds()[trace_spans.GATHER_WAIT] == {"blocks.3": pytest.approx(0.006)}


# ---- traces of a model ---------------------------------------------------------------------------


def test_trace_of_step_has_no_gaps_and_leaves_model_unchanged(
    fake_group: int, tmp_path: Path
) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    before = _snapshot(model)
    with fsdp_c.trace(model) as trace:
        assert str(trace) == "a trace that is still open" and _overrides(model) == 0
        step(model, optimizer)
    assert _overrides(model) == 0 and _snapshot(model) == before
    assert not torch.autograd.profiler._is_profiler_enabled
    (rank,) = trace.ranks
    compute = [span for span in rank if span.track == COMPUTE]
    assert compute[0].begin == 0
    assert all(a.end == b.begin for a, b in itertools.pairwise(compute))
    for kind in (trace_spans.FORWARD, trace_spans.BACKWARD):
        units = list(dict.fromkeys(span.unit for span in compute if span.kind == kind))
        blocks = ["blocks.0", "blocks.1", "blocks.2"]
        expected = blocks if kind == trace_spans.FORWARD else blocks[::-1]
        assert [
            unit for unit in units if unit != trace_spans.ROOT
        ] == expected and trace_spans.ROOT in units
    assert any(span.kind == trace_spans.OPTIMIZER for span in compute)
    assert len([span for span in rank if span.track == GATHER]) == 7
    assert len([span for span in rank if span.track == REDUCE]) == 4
    _check_files(trace, tmp_path)


def _check_files(trace: StepTrace, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    trace.plot(folder / "step.png")
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    trace.save(folder / "step.json")
    saved = json.loads((folder / "step.json").read_text())
    complete_events = [event for event in saved["traceEvents"] if event["ph"] == "X"]
    assert len(complete_events) == len(trace.ranks[0])
    assert saved["otherData"]["summary"] == trace.summary()


@pytest.mark.parametrize("writes", [True, False])
def test_trace_plot_without_matplotlib_raises_on_every_rank(
    fake_group: int, writes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If only the rank that draws raised, the other ranks would wait for it."""
    model = sharded()
    with fsdp_c.trace(model) as trace:
        step(model)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(timeline, "_is_writer", lambda: writes)
    for plottable in (trace, fsdp_c.explain(model)):
        with pytest.raises(ImportError, match="a picture needs matplotlib: pip install matplotl"):
            plottable.plot(tmp_path / "step.png")
    assert not list(tmp_path.iterdir())


def test_exception_in_trace_leaves_model_unchanged(fake_group: int) -> None:
    model = sharded()
    step(model)
    before = _snapshot(model)
    with pytest.raises(KeyError, match="stop"), fsdp_c.trace(model) as trace:
        step(model)
        raise KeyError("stop")
    assert not torch.autograd.profiler._is_profiler_enabled
    assert _overrides(model) == 0 and _snapshot(model) == before
    assert str(trace) == "a trace that an exception has ended"
    with pytest.raises(RuntimeError, match="nothing was traced: an exception ended"):
        trace.summary()
    with fsdp_c.trace(model) as next_trace:
        step(model)
    assert next_trace.ranks[0]


def test_trace_of_invalid_model_or_without_steps_raises(fake_group: int) -> None:
    with pytest.raises(ValueError, match="trace expects a model that fully_shard was applied to"):
        with fsdp_c.trace(nn.Linear(2, 2)):
            pass
    with pytest.raises(TypeError, match="trace expects a module, not int"):
        with fsdp_c.trace(3):  # type: ignore[arg-type]
            pass
    model = sharded()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="another profiler is active: end it first"):
            with fsdp_c.trace(model):
                pass
    with fsdp_c.trace(model) as empty:
        pass
    assert str(empty) == "a trace without steps"
    for call in (empty.summary, lambda: empty.plot("x.png"), lambda: empty.save("x.json")):
        with pytest.raises(RuntimeError, match="nothing was traced"):
            call()


def _overrides(model: Any) -> int:
    """Returns the union of the override flags of all states and parameter groups."""
    flags = 0
    for module in fsdp_c._runtime.fsdp_units.list_sharded_modules(model):
        state = module._get_fsdp_state()
        for owner in (state, *state._fsdp_param_groups):
            flags |= _C._testing.overrides(owner)
    return flags


def _snapshot(model: nn.Module) -> list[Any]:
    """Returns the hooks, attributes and parameters of all modules."""
    return [
        (dict(m._forward_pre_hooks), dict(m._forward_hooks), sorted(vars(m)), dict(m._parameters))
        for m in model.modules()
    ]
