"""``fsdp_c.trace``: what is read from a profiler's ranges, and that nothing is left behind."""

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
from fsdp_c import _C, spans, timeline
from fsdp_c.spans import BLOCK, COMPUTE, GATHER, HOST, REDUCE, Event, Span, spans_of
from fsdp_c.timeline import StepTrace


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(2, 8)).sum().backward()
    if optimizer is not None:
        optimizer.step()


def lane(found: list[Span], name: str) -> list[tuple[str, str, int, int]]:
    return [tuple(span[1:]) for span in found if span.lane == name]  # type: ignore[misc]


# ---- what is read --------------------------------------------------------------------------------

A_STEP = [
    Event(BLOCK, 0, 1000),
    Event("FSDP::pre_forward (a)", 100, 200),
    Event("FSDP::all_gather (a)", 101, 120),
    Event("c10d::_allgather_base_", 105, 115, id=7),
    Event("gloo:all_gather", 110, 170, flying=True),
    Event("FSDP::all_gather_copy_out (a)", 130, 190),
    Event("FSDP::post_forward (a)", 300, 310),
    Event("FSDP::pre_backward (a)", 400, 410),
    Event("FSDP::post_backward_accumulate (a)", 500, 501),
    Event("FSDP::post_backward_reduce (a)", 505, 550),
    Event("c10d::_reduce_scatter_base_", 520, 540, id=8),
    Event("gloo:all_reduce", 530, 700, flying=True),
    Event("FSDP::root_post_backward_callback", 600, 720),
    Event("Optimizer.step#SGD.step", 800, 900),
]


def test_a_step_on_the_cpu() -> None:
    found = spans_of(A_STEP[::-1])
    assert lane(found, GATHER) == [(GATHER, "a", 115, 170)]
    assert lane(found, REDUCE) == [(REDUCE, "a", 540, 700)]
    assert lane(found, COMPUTE) == [
        (spans.OUTSIDE, "", 0, 100),
        (spans.SHARDING, "a", 100, 130),
        (spans.GATHER_WAIT, "a", 130, 170),
        (spans.SHARDING, "a", 170, 200),
        (spans.FORWARD, "a", 200, 300),
        (spans.SHARDING, "a", 300, 310),
        (spans.OUTSIDE, "", 310, 400),
        (spans.SHARDING, "a", 400, 410),
        (spans.BACKWARD, "a", 410, 500),
        (spans.SHARDING, "a", 500, 501),
        (spans.OUTSIDE, "", 501, 505),
        (spans.SHARDING, "a", 505, 550),
        (spans.OUTSIDE, "", 550, 600),
        (spans.REDUCE_WAIT, "a", 600, 700),
        (spans.SHARDING, spans.ROOT, 700, 720),
        (spans.OUTSIDE, "", 720, 800),
        (spans.OPTIMIZER, "", 800, 900),
        (spans.OUTSIDE, "", 900, 1000),
    ]


def test_collectives_that_are_waited_for_where_they_are_issued() -> None:
    """As torch's FSDP2 does on the CPU."""
    at_once = [
        Event(BLOCK, 0, 1000),
        Event("FSDP::all_gather (a)", 100, 200),
        Event("c10d::_allgather_base_", 110, 120),
        Event("gloo:all_gather", 125, 190, flying=True),
    ]
    assert (spans.GATHER_WAIT, "a", 120, 190) in lane(spans_of(at_once), COMPUTE)


def test_collectives_of_others_take_their_turn_and_are_left_out() -> None:
    others = [
        Event("c10d::_allgather_base_", 10, 12),
        Event("gloo:all_gather", 15, 105, flying=True),
        Event("gloo:all_gather", -50, -5, flying=True),  # issued before the trace
    ]
    assert lane(spans_of(A_STEP + others), GATHER) == [(GATHER, "a", 115, 170)]


def test_a_step_on_a_device_has_the_times_of_kernels() -> None:
    on_host = [event for event in A_STEP if not event.flying]
    launches = [Event("aten::mm", 250, 252, id=1), Event("aten::mm", 420, 425, id=2)]
    kernels = [
        Event("ncclDevKernel_AllGather_RING_LL", 2000, 2100, on_device=True, id=7),
        Event("void at::native::reduce_kernel<512>", 2050, 2060, on_device=True, id=1),
        Event("FSDP::all_gather (a)", 2000, 2100, on_device=True),
        Event("nccl:_all_gather_base", 2000, 2100, on_device=True),
        Event("sgemm", 200_000, 200_100, on_device=True, id=2),
        Event("ncclDevKernel_ReduceScatter_Sum", 199_950, 200_050, on_device=True, id=8),
    ]
    found = spans_of([*on_host, *launches, *kernels])
    assert lane(found, GATHER) == [(GATHER, "a", 2000, 2100)]
    assert lane(found, REDUCE) == [(REDUCE, "a", 199_950, 200_050)]
    assert lane(found, COMPUTE) == [
        (spans.FORWARD, "a", 2050, 2060),
        (spans.GATHER_WAIT, "a", 2060, 2100),
        (spans.REDUCE_WAIT, "a", 199_950, 200_000),
        (spans.BACKWARD, "a", 200_000, 200_100),
    ]
    assert (spans.FORWARD, "a", 200, 300) in lane(found, HOST)


def test_the_sentence() -> None:
    trace = StepTrace()
    with pytest.raises(RuntimeError, match="still open"):
        trace.summary()
    ms = 1_000_000
    quiet = [
        Span(COMPUTE, spans.FORWARD, "blocks.3", 0, 88 * ms),
        Span(GATHER, GATHER, "blocks.3", 40 * ms, 50 * ms),
    ]
    waiting = [
        Span(COMPUTE, spans.FORWARD, "blocks.3", 0, 88 * ms),
        Span(COMPUTE, spans.GATHER_WAIT, "blocks.3", 88 * ms, 100 * ms),
        Span(GATHER, GATHER, "blocks.3", 80 * ms, 100 * ms),
        Span(REDUCE, REDUCE, "blocks.4", 90 * ms, 101 * ms),
    ]
    trace.ranks, trace._closed = [quiet, waiting], True
    assert trace.summary() == (
        "101 ms on 2 ranks: 87 % forward, 6 % wait for a gather. 61 % of communication is hidden; "
        "'blocks.3' waits 12 ms for its gather on rank 1."
    )
    assert trace.seconds()[spans.GATHER_WAIT] == {"blocks.3": pytest.approx(0.006)}


# ---- a live model --------------------------------------------------------------------------------


def test_every_moment_is_somebodys_and_the_model_is_as_it_was(
    fake_group: int, tmp_path: Path
) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    before = _state(model)
    with fsdp_c.trace(model) as found:
        assert str(found) == "a trace that is still open" and _overrides(model) == 0
        step(model, optimizer)
    assert _overrides(model) == 0 and _state(model) == before
    assert not torch.autograd.profiler._is_profiler_enabled
    (rank,) = found.ranks
    computing = [span for span in rank if span.lane == COMPUTE]
    assert computing[0].begin == 0
    assert all(a.end == b.begin for a, b in itertools.pairwise(computing))
    for kind in (spans.FORWARD, spans.BACKWARD):
        units = list(dict.fromkeys(span.unit for span in computing if span.kind == kind))
        blocks = ["blocks.0", "blocks.1", "blocks.2"]
        own = blocks if kind == spans.FORWARD else blocks[::-1]
        assert [unit for unit in units if unit != spans.ROOT] == own and spans.ROOT in units
    assert any(span.kind == spans.OPTIMIZER for span in computing)
    assert len([span for span in rank if span.lane == GATHER]) == 7
    assert len([span for span in rank if span.lane == REDUCE]) == 4
    _check_files(found, tmp_path)


def _check_files(found: StepTrace, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    found.plot(folder / "step.png")
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    found.save(folder / "step.json")
    saved = json.loads((folder / "step.json").read_text())
    shown = [event for event in saved["traceEvents"] if event["ph"] == "X"]
    assert len(shown) == len(found.ranks[0])
    assert saved["otherData"]["summary"] == found.summary()


@pytest.mark.parametrize("writes", [True, False])
def test_a_missing_matplotlib_is_missed_on_every_rank(
    fake_group: int, writes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the rank that draws would stop, and the others wait for it."""
    model = sharded()
    with fsdp_c.trace(model) as found:
        step(model)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(timeline, "_writes", lambda: writes)
    for picture in (found, fsdp_c.explain(model)):
        with pytest.raises(ImportError, match="a picture needs matplotlib: pip install matplotl"):
            picture.plot(tmp_path / "step.png")
    assert not list(tmp_path.iterdir())


def test_an_exception_leaves_nothing_behind(fake_group: int) -> None:
    model = sharded()
    step(model)
    before = _state(model)
    with pytest.raises(KeyError, match="mine"), fsdp_c.trace(model) as found:
        step(model)
        raise KeyError("mine")
    assert not torch.autograd.profiler._is_profiler_enabled
    assert _overrides(model) == 0 and _state(model) == before
    assert str(found) == "a trace that an exception has ended"
    with pytest.raises(RuntimeError, match="nothing was traced: an exception has left"):
        found.summary()
    with fsdp_c.trace(model) as again:
        step(model)
    assert again.ranks[0]


def test_what_cannot_be_traced(fake_group: int) -> None:
    with pytest.raises(ValueError, match="trace expects a model that fully_shard was applied to"):
        with fsdp_c.trace(nn.Linear(2, 2)):
            pass
    with pytest.raises(TypeError, match="trace expects a module, not int"):
        with fsdp_c.trace(3):  # type: ignore[arg-type]
            pass
    model = sharded()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="while another profiler is active"):
            with fsdp_c.trace(model):
                pass
    with fsdp_c.trace(model) as empty:
        pass
    assert str(empty) == "a trace without steps"
    for ask in (empty.summary, lambda: empty.plot("x.png"), lambda: empty.save("x.json")):
        with pytest.raises(RuntimeError, match="nothing was traced"):
            ask()


def _overrides(model: Any) -> int:
    found = 0
    for module in fsdp_c.units.sharded_modules(model):
        state = module._get_fsdp_state()
        for one in (state, *state._fsdp_param_groups):
            found |= _C._testing.overrides(one)
    return found


def _state(model: nn.Module) -> list[Any]:
    """What a trace might have left on modules and their parameters."""
    return [
        (dict(m._forward_pre_hooks), dict(m._forward_hooks), sorted(vars(m)), dict(m._parameters))
        for m in model.modules()
    ]
