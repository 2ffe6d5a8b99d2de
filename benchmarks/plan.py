"""The peak memory that ``fsdp_c.explain`` forecasts, beside what is measured.

Method. A fake process group of 8 ranks on the CPU, models of some MiB in many settings. The
forecast is made before the first step, from a forward and backward on fake tensors. Then, after a
step of warm-up, one whole step (forward, backward, ``optimizer.step()``) runs under torch's
profiler, which sees every allocation and free of the CPU allocator. Measured is what was there
before (shards, buffers, optimizer states) and the highest sum of what came on top, without the
scratch memory of kernels: what one operator takes by itself and gives back before it is done. That
depends on the processor (oneDNN's bf16 kernels took 1.3 MiB beside 25.5 on one of them) and is no
tensor of the model's or of ours, so that no forecast can know it. A column has the peak with it.
Steps do not differ: nothing of a fake group depends on time.

    python benchmarks/plan.py [--only WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from memory import _events
from report import fake_mesh, table, write_json
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fsdp_c

BOUND = 0.01
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Layer(nn.Module):
    """A transformer's layer: (batch, length, width) -> the same."""

    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.checkpointed = checkpointed

    def body(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, words: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, checkpointed) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Mlp(nn.Sequential):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
        )


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """As of a language model, of all but the last dimension."""
    rows = output.flatten(0, -2).float()
    return nn.functional.cross_entropy(rows, torch.zeros(rows.size(0), dtype=torch.long))


def gpt_batch(size: int) -> torch.Tensor:
    return torch.zeros(size, 64, dtype=torch.long)


@dataclass(frozen=True)
class Job:
    """A model, how it is sharded, what it is given and what trains it."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    shard: dict[str, Any] = field(default_factory=dict)
    policy: Any = "blocks"
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    hsdp: bool = False


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def foreach(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def jobs() -> Iterator[Job]:
    """The settings; every line is one."""
    gpts = {
        "gpt": lambda: Gpt(256, 6, 1000),
        "gpt, words": lambda: Gpt(128, 4, 20000),
        "gpt, checkpoints": lambda: Gpt(256, 6, 1000, checkpointed=True),
    }
    policies = {"fp32": {}, "mixed": {"mp_policy": MIXED}, "bf16": {"mp_policy": HALF}}
    for name, model in gpts.items():
        for precision, shard in policies.items():
            for size in (1, 16):
                yield Job(
                    f"{name}, {precision}, batch {size}", model, lambda n=size: gpt_batch(n), shard
                )
    gpt, few, mixed = gpts["gpt"], lambda: gpt_batch(2), policies["mixed"]
    for reshard in (True, False, 4):
        kept = {"reshard_after_forward": reshard}
        yield Job(f"gpt, reshard {reshard}", gpt, few, kept)
        yield Job(f"gpt, mixed, reshard {reshard}", gpt, few, kept | mixed)
    for hsdp in ({}, mixed):
        yield Job(f"gpt, hsdp, {'mixed' if hsdp else 'fp32'}", gpt, few, hsdp, hsdp=True)
    yield Job("gpt, one unit", gpt, few, policy=10**9)
    yield Job("gpt, units of 1 MiB", gpt, few, policy=2**20)
    for made in (sgd, momentum, adam, foreach):
        yield Job(f"gpt, {made.__name__}", gpt, few, optimizer=made)
    wide = lambda: Mlp(512, 8)  # noqa: E731
    for precision, shard in policies.items():
        for rows in (8, 4096):
            yield Job(
                f"mlp, {precision}, batch {rows}", wide, lambda n=rows: torch.randn(n, 512), shard
            )


def measured(step: Callable[[], object]) -> tuple[int, int]:
    """Bytes at the peak of a call above what was there: without kernels' scratch, and with it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in _events(profiler) if event.tag == _EventType.Allocation]
    events.sort(key=lambda event: event.start_time_ns)
    freed: dict[int, int] = {}
    scratch: set[int] = set()  # places in the list
    for place, event in reversed([*enumerate(events)]):
        address = event.extra_fields.ptr
        if event.extra_fields.alloc_size < 0:
            freed[address] = place
        elif address in freed and _is_scratch(event, events[freed[address]]):
            scratch |= {place, freed.pop(address)}
    without = [event for place, event in enumerate(events) if place not in scratch]
    return _peak(without), _peak(events)


def _is_scratch(alloc: Any, free: Any) -> bool:
    """Whether one operator has taken memory by itself and given it back.

    What operators call to make tensors is an operator of its own (``aten::empty``).
    """
    by, back_by = alloc.parent, free.parent
    return (
        by is not None
        and back_by is not None
        and by.name.startswith("aten::")
        and (by.name, by.start_time_ns) == (back_by.name, back_by.start_time_ns)
    )


def _peak(events: list[Any]) -> int:
    total = peak = 0
    alive: set[int] = set()
    for event in events:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            alive.add(address)
        elif address not in alive:
            continue  # from before
        else:
            alive.discard(address)
        total += size
        peak = max(peak, total)
    return peak


class Found(NamedTuple):
    """Bytes at the peak, the moment that is forecast for it, and seconds that the forecast took."""

    forecast: int
    measured: int
    with_scratch: int
    moment: str
    seconds: float


def run(job: Job, flat: Any, hybrid: Any) -> Found:
    """One setting: the forecast, and then a step."""
    torch.manual_seed(0)
    model = job.model()
    mesh = hybrid if job.hsdp else flat
    fsdp_c.auto_shard(model, job.policy, mesh=mesh, **job.shard)
    optimizer, batch = job.optimizer(model.parameters()), job.batch()
    begin = time.perf_counter()
    found = fsdp_c.explain(model, optimizer, batch=batch, loss=loss_of, file=io.StringIO())
    seconds = time.perf_counter() - begin

    def step() -> None:
        loss_of(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    own = [*model.buffers(), *(param.to_local() for param in model.parameters())]
    states = [value for state in optimizer.state.values() for value in state.values()]
    own += [v.to_local() if hasattr(v, "to_local") else v for v in states if torch.is_tensor(v)]
    kept = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in own}.values())
    without, peak = measured(step)
    return Found(found.peak.total, kept + without, kept + peak, str(found.peak), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast peak memory beside what is measured.")
    parser.add_argument("--only", default="", help="jobs whose names have this in them")
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    flat = fake_mesh(8)
    hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    rows, errors = [], []
    for job in jobs():
        if options.only not in job.name:
            continue
        found = run(job, flat, hybrid)
        error = found.forecast / found.measured - 1
        errors.append(error)
        mib = [size / 2**20 for size in found[:3]]
        rows.append([job.name, *mib[:2], f"{error:+.1%}", mib[2], found.moment, found.seconds])
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    titles = ["job", "forecast, MiB", "measured", "error", "with scratch", "peak in", "seconds"]
    print(table(titles, rows))
    worst = max(errors, key=abs)
    within = sum(abs(error) <= BOUND for error in errors)
    print(f"{within} of {len(errors)} within {BOUND:.0%}; the worst is off by {worst:+.1%}")
    write_json(options.json, "plan", {"rows": rows, "worst": worst})


if __name__ == "__main__":
    main()
