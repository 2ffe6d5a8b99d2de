"""The dry run has the order of events and the memory of the core's training step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import core_trace
import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fsdp_c import _dry_run, fully_shard

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BATCH = torch.ones(2, 8)

# ---- models --------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two linear layers, 8 -> 24 -> 8, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    """An input layer, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shared(Chain):
    """Runs its first block twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(x))
        return self.head(self.blocks[0](self.blocks[1](x)))


class Checkpointed(Chain):
    """Recomputes each block in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Reentrant(Chain):
    """Recomputes each block in backward, in an autograd graph of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class RecomputesAllBlocks(Chain):
    """Recomputes all blocks together in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        x = checkpoint(lambda y: third(second(first(y))), self.embed(x), use_reentrant=False)
        return self.head(x)


class Unused(Chain):
    """Does not run its last block, and one parameter of the root gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.embed(x))))


def shard(model: Any, **kwargs: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def prefetch_in_forward(model: Any) -> Any:
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
    return model


def nested() -> Any:
    model = Chain()
    for block in model.blocks:
        fully_shard(block.down)  # type: ignore[arg-type]
    return shard(model)


def frozen() -> Any:
    model = Chain()
    model.blocks[1].requires_grad_(False)
    model.head.weight.requires_grad_(False)
    return shard(model)


def hybrid() -> Any:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    return shard(Chain(), mesh=mesh)


def replicated() -> Any:
    return fsdp_c.replicate(Chain(), bucket_cap_mb=600 / 2**20)


def replicated_blocks() -> Any:
    model = Chain()
    for block in model.blocks:
        fsdp_c.replicate(block)
    return fsdp_c.replicate(model)


def prefetching() -> Any:
    model = shard(Chain())
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    return model


def list_of_modules() -> Any:
    model = Chain()
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model.blocks[2])
    return fully_shard(model)


def separate_roots() -> Any:
    model = Chain()
    for block in model.blocks:
        fully_shard(block)
    return model


def several_reductions() -> Any:
    model = shard(Chain())
    model.set_reduce_scatter_max_input_buffers(3)
    return model


def without_backward_unshard() -> Any:
    """Backward needs no values of ``embed``, because the input requires no gradient."""
    model = Chain()
    fully_shard(model.embed).set_unshard_in_backward(False)
    return shard(model)


MODELS: dict[str, Callable[[], Any]] = {
    "chain": lambda: shard(Chain()),
    "nested units": nested,
    "unit that runs twice": lambda: shard(Shared()),
    "reshard_after_forward=False": lambda: shard(Chain(), reshard_after_forward=False),
    "reshard_after_forward=True": lambda: shard(Chain(), reshard_after_forward=True),
    "reshard_after_forward=4": lambda: shard(Chain(), reshard_after_forward=4),
    "replicas": hybrid,
    "frozen parameters": frozen,
    "mixed precision": lambda: shard(Chain(), mp_policy=MIXED),
    "offload": lambda: shard(Chain(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "replicate with buckets": replicated,
    "replicate of several units": replicated_blocks,
    "unused parameters": lambda: shard(Unused()),
    "activation checkpointing": lambda: shard(Checkpointed()),
    "checkpointing of several units": lambda: shard(RecomputesAllBlocks()),
    "reentrant checkpointing": lambda: shard(Reentrant()),
    "reentrant checkpointing and prefetch": lambda: prefetch_in_forward(shard(Reentrant())),
    "explicit prefetch": prefetching,
    "several reductions in flight": several_reductions,
    "no unshard in backward": without_backward_unshard,
    "list of modules": list_of_modules,
    "several roots": separate_roots,
}


@pytest.mark.parametrize("name", MODELS)
def test_dry_run_events_equal_trace_of_the_core(name: str, fake_group: int) -> None:
    model = MODELS[name]()
    events = core_trace.run_dry(model, BATCH)
    step = core_trace.make_step(model, BATCH)
    step()  # lazy initialization is not part of a step
    model.zero_grad()
    core = core_trace.trace_core(step)
    dry = core_trace.trace_events(events, model)
    assert len(core) > 40, "found too few events: the test would check nothing"
    assert core_trace.first_difference(core, dry) == ""


def test_trace_of_gather_buffer_that_is_freed_late_differs(fake_group: int) -> None:
    model = shard(Chain())
    events = core_trace.run_dry(model, BATCH)
    core_trace.make_step(model, BATCH)()
    core = core_trace.trace_events(events, model)
    end = next(i for i, event in enumerate(events) if event.label == "all_gather_copy_out") + 1
    free = next(i for i in range(end, len(events)) if events[i].kind == "free")
    leave = next(i for i in range(free, len(events)) if events[i].kind == "leave")
    events.insert(leave, events.pop(free))
    late = core_trace.trace_events(events, model)
    assert "the core has [('free', " in core_trace.first_difference(core, late)


# ---- accounting ----------------------------------------------------------------------------------

PARAM = {"name": "weight", "sizes": [4, 2], "dtype": "torch.float32"}
UNIT = {"state": 0, "world": 2, "params": [PARAM]}
# fsdp_c/_dry_run.pyi describes the arguments of each call.
STEP = [
    ("pre_forward", 0), ("alloc", 0, 100), ("post_forward", 0), ("backward",),
    ("pre_backward", 0), ("gradient", 0, 0, -1, 32), ("post_backward", 0), ("end",), ("free", 0),
]  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
def test_peak_of_dry_run_is_highest_sum_of_live_bytes(streams: bool) -> None:
    events, peak = _dry_run.run([UNIT], [{"root": 0}], STEP, streams=streams)
    live: dict[str, int] = {}
    sums = []
    for event in events:
        if event.kind in ("alloc", "free"):
            assert event.label is not None
            before = live.get(event.label, 0)
            change = event.bytes if event.kind == "alloc" else -event.bytes
            live[event.label] = event.live
            assert event.live == before + change
            sums.append(sum(live.values()))
    assert peak == max(sums)
    assert live == {"shards": 16, "gathered": 0, "activations": 0, "gradients": 16}


@pytest.mark.parametrize("storage", [-1, 1])
def test_second_gradient_of_a_parameter_is_added(storage: int) -> None:
    calls = [*STEP[:6], ("alloc", 1, 32), ("gradient", 0, 0, storage, 32)]
    events, _ = _dry_run.run([UNIT], [{"root": 0}], calls)
    added = [(event.call, event.bytes, event.label) for event in events if event.kind == "add"]
    assert added == [(len(calls) - 1, 32, "weight")]


@pytest.mark.parametrize(("limit", "kept"), [(1, 2), (2, 2), (3, 3), (6, 6)])
def test_max_input_buffers_limits_the_outputs_that_wait_for_all_reduces(
    limit: int, kept: int
) -> None:
    mixed = PARAM | {"sizes": [16, 4], "compute": "torch.bfloat16", "reduce": "torch.bfloat16"}
    indices = range(8)
    units = [UNIT | {"state": i, "replicas": 2, "params": [mixed]} for i in indices]
    units[3]["max_input_buffers"] = limit
    calls: list[tuple[Any, ...]] = [("pre_forward", i) for i in indices]
    calls += [("post_forward", i) for i in reversed(indices)] + [("backward",)]
    for i in reversed(indices):
        calls += [("pre_backward", i), ("gradient", i, 0, -1, 128), ("post_backward", i)]
    events, _ = _dry_run.run(units, [{"root": 0}] * 8, [*calls, ("end",)], streams=True)
    output_bytes, live, most = 64, 0, 0
    for event in events:
        if (event.label, event.bytes) == ("gradients", output_bytes):
            live += {"alloc": 1, "free": -1}.get(event.kind, 0)
            most = max(most, live)
    assert (most, live) == (kept + 1, 0)  # the kept outputs, and that of the latest reduction


def test_events_of_dry_run_name_call_unit_stream_and_purpose() -> None:
    events, _ = _dry_run.run([UNIT], [{"root": 0}], STEP, streams=True)
    gather = next(event for event in events if event.kind == "all_gather")
    assert (gather.call, gather.unit, gather.bytes, gather.label) == (0, 0, 32, "shard")
    copy_out = next(event for event in events if event.kind == "unpack")
    assert gather.stream != copy_out.stream == 0
    recorded = next(i for i, event in enumerate(events) if event.kind == "record_event" and i > 5)
    waited = next(event for event in events[recorded:] if event.kind == "wait_event")
    assert waited.object == events[recorded].object
    assert waited.stream != events[recorded].stream > 0


def test_dry_run_does_not_import_torch() -> None:
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fsdp_c._dry_run", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(len(module.run([], [{"root": 0}], [("pre_forward", 0)])[0]), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(_dry_run.__file__)]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert (completed.stdout, completed.stderr) == ("2 False\n", "")


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "param", "match"),
    [
        ({"state": 3}, {}, r"units\[0\]\.state: 3 is not a state; expected 0 to 0"),
        ({"world": 0}, {}, r"units\[0\]\.world: 0; expected at least 1"),
        ({"world": "2"}, {}, r"units\[0\]\.world: '2'; expected an int"),
        ({"world": 2**70}, {}, r"units\[0\]\.world: \d+; expected an int"),
        ({"world": True}, {}, r"units\[0\]\.world: True; expected an int"),
        ({"offload": 1}, {}, r"units\[0\]\.offload: 1; expected True or False"),
        ({"wrold": 2}, {}, r"units\[0\]: unknown key 'wrold'"),
        ({"params": None}, {}, r"units\[0\]\.params: None; expected a list of dicts"),
        ({"reduce": "float"}, {}, r"units\[0\]\.reduce: 'float'; expected the name of a dtype"),
        (
            {},
            {"sizes": [2, -1]},
            r"units\[0\]\.params\[0\]\.sizes: \[2, -1\]; expected a list of s",
        ),
        ({}, {"sizes": []}, r"units\[0\]\.params\[0\]\.sizes: cannot shard dim 0 of a tensor of 0"),
        ({}, {"sizes": [2**62]}, r"units\[0\]\.params\[0\]\.sizes: "),
        ({}, {"dim": 1, "sizes": [4, 3]}, r"units\[0\]\.params\[0\]\.sizes: .* equal parts"),
        ({}, {"dtype": None}, r"units\[0\]\.params\[0\]\.dtype: None; expected the name"),
        ({}, {"name": 3}, r"units\[0\]\.params\[0\]\.name: 3; expected a str"),
    ],
)
def test_dry_run_of_invalid_unit_raises_with_the_name_of_the_item(
    unit: dict[str, Any], param: dict[str, Any], match: str
) -> None:
    described = {**UNIT, "params": [{**PARAM, **param}], **unit}
    with pytest.raises(ValueError, match=match):
        _dry_run.run([described], [{"root": 0}], STEP)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"root": 1}, r"states\[0\]\.root: 1 is not a root"),
        ({}, r"states\[0\]\.root: missing"),
        ({"root": 0, "modules": 0}, r"states\[0\]\.modules: 0; expected at least 1"),
        ({"root": 0, "forward_prefetch": [1]}, r"states\[0\]\.forward_prefetch\[0\]: 1 is not a s"),
        (
            {"root": 0, "backward_prefetch": 1},
            r"states\[0\]\.backward_prefetch: 1; expected a list",
        ),
    ],
)
def test_dry_run_of_invalid_state_raises_with_the_name_of_the_item(state: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _dry_run.run([UNIT], [state], STEP)


@pytest.mark.parametrize(
    ("calls", "match"),
    [
        ([("forward", 0)], r"calls\[0\]: \('forward', 0\); expected a tuple that begins with"),
        ([["pre_forward", 0]], r"calls\[0\]: \['pre_forward', 0\]; expected a tuple"),
        ([("pre_forward",)], r"calls\[0\]: 0 arguments of 'pre_forward'; expected 1"),
        ([("alloc", 0, 1.5)], r"calls\[0\]: argument 2 of 'alloc' is 1.5; expected an int"),
        (
            [("backward",), ("pre_forward", 1)],
            r"calls\[1\] \(pre_forward\): state 1; expected 0 to",
        ),
        ([("gradient", 0, 0, -1, 32)], r"calls\[0\] \(gradient\): .*'weight' is not unsharded"),
    ],
)
def test_dry_run_of_invalid_call_raises_with_its_index(calls: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _dry_run.run([UNIT], [{"root": 0}], calls)
