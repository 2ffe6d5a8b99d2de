"""The peak memory that ``fsdp_c.explain`` estimates, compared with the measured peak.

Method. One process with a fake process group of 8 ranks on the CPU trains models of a few MiB in
many settings. ``explain`` estimates the peak before the first step, from a forward and backward on
fake tensors. After a warm-up step, one whole step (forward, backward, ``optimizer.step()``) runs
under torch's profiler, which records every allocation and free of the CPU allocator. The measured
peak is the memory before the step (shards, buffers, optimizer states) plus the highest sum of
allocations in the step.

Scratch memory of kernels is subtracted: memory that one operator allocates itself and frees before
it returns. Scratch memory depends on the processor and belongs to no tensor, so the estimate
excludes it. oneDNN's bf16 kernels took 1.3 MiB in addition to 25.5 MiB on one machine. One column
has the peak with scratch memory. One measured step is enough, because all steps on a fake group
allocate equally.

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
from memory import read_events
from report import format_table, make_fake_mesh, write_json
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fsdp_c

MAX_ERROR = 0.01
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Layer(nn.Module):
    """A transformer layer: (batch, length, width) -> (batch, length, width)."""

    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.checkpointed = checkpointed

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            checkpoint(self._forward, x, use_reentrant=False)
            if self.checkpointed
            else self._forward(x)
        )


class Gpt(nn.Module):
    def __init__(
        self, width: int, layers: int, vocabulary: int, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, checkpointed) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

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


def compute_loss(output: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy over the last dimension, as for a language model."""
    rows = output.flatten(0, -2).float()
    return nn.functional.cross_entropy(rows, torch.zeros(rows.size(0), dtype=torch.long))


def make_gpt_batch(size: int) -> torch.Tensor:
    return torch.zeros(size, 64, dtype=torch.long)


@dataclass(frozen=True)
class Job:
    """A model, its input, its optimizer, and the arguments of ``auto_shard``."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], torch.Tensor]
    shard_kwargs: dict[str, Any] = field(default_factory=dict)
    policy: Any = "blocks"
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    hsdp: bool = False


def make_fused_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def make_foreach_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=True)


def make_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def make_momentum_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


OPTIMIZERS = {
    "sgd": make_sgd,
    "momentum": make_momentum_sgd,
    "adam": make_fused_adamw,
    "foreach": make_foreach_adamw,
}


def list_jobs() -> Iterator[Job]:
    """Yields the settings. Each is one row of the printed table."""
    gpts = {
        "gpt": lambda: Gpt(256, 6, 1000),
        "gpt, words": lambda: Gpt(128, 4, 20000),
        "gpt, checkpoints": lambda: Gpt(256, 6, 1000, checkpointed=True),
    }
    policies = {"fp32": {}, "mixed": {"mp_policy": MIXED}, "bf16": {"mp_policy": BF16}}
    for name, make_gpt in gpts.items():
        for precision, shard_kwargs in policies.items():
            for size in (1, 16):
                yield Job(
                    f"{name}, {precision}, batch {size}",
                    make_gpt,
                    lambda n=size: make_gpt_batch(n),
                    shard_kwargs,
                )
    make_gpt, make_small_batch = gpts["gpt"], lambda: make_gpt_batch(2)
    mixed = policies["mixed"]
    for reshard in (True, False, 4):
        settings = {"reshard_after_forward": reshard}
        yield Job(f"gpt, reshard {reshard}", make_gpt, make_small_batch, settings)
        yield Job(f"gpt, mixed, reshard {reshard}", make_gpt, make_small_batch, settings | mixed)
    for hsdp_settings in ({}, mixed):
        precision = "mixed" if hsdp_settings else "fp32"
        yield Job(f"gpt, hsdp, {precision}", make_gpt, make_small_batch, hsdp_settings, hsdp=True)
    yield Job("gpt, one unit", make_gpt, make_small_batch, policy=10**9)
    yield Job("gpt, units of 1 MiB", make_gpt, make_small_batch, policy=2**20)
    for name, make_optimizer in OPTIMIZERS.items():
        yield Job(f"gpt, {name}", make_gpt, make_small_batch, make_optimizer=make_optimizer)
    make_wide_mlp = lambda: Mlp(512, 8)  # noqa: E731
    for precision, shard_kwargs in policies.items():
        for rows in (8, 4096):
            yield Job(
                f"mlp, {precision}, batch {rows}",
                make_wide_mlp,
                lambda n=rows: torch.randn(n, 512),
                shard_kwargs,
            )


def measure_step(step: Callable[[], object]) -> tuple[int, int]:
    """Returns the peak bytes of ``step`` above the memory before it.

    The first value excludes scratch memory of kernels, the second value includes it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in read_events(profiler) if event.tag == _EventType.Allocation]
    events.sort(key=lambda event: event.start_time_ns)
    freed: dict[int, int] = {}
    scratch: set[int] = set()  # indices of events
    for index, event in reversed([*enumerate(events)]):
        address = event.extra_fields.ptr
        if event.extra_fields.alloc_size < 0:
            freed[address] = index
        elif address in freed and _is_scratch(event, events[freed[address]]):
            scratch |= {index, freed.pop(address)}
    without_scratch = [event for index, event in enumerate(events) if index not in scratch]
    return _compute_peak(without_scratch), _compute_peak(events)


def _is_scratch(alloc: Any, free: Any) -> bool:
    """Whether the same operator allocated and freed the memory.

    A separate operator (``aten::empty``) allocates tensors, so tensors are not scratch memory.
    """
    allocator, freer = alloc.parent, free.parent
    return (
        allocator is not None
        and freer is not None
        and allocator.name.startswith("aten::")
        and (allocator.name, allocator.start_time_ns) == (freer.name, freer.start_time_ns)
    )


def _compute_peak(events: list[Any]) -> int:
    total = peak = 0
    live: set[int] = set()
    for event in events:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size > 0:
            live.add(address)
        elif address not in live:
            continue  # allocated before the profile began
        else:
            live.discard(address)
        total += size
        peak = max(peak, total)
    return peak


class Measurement(NamedTuple):
    """Peaks in bytes, the phase of the estimated peak, and the duration of the estimate."""

    estimated: int
    measured: int
    with_scratch: int
    peak_phase: str
    seconds: float


def measure_job(job: Job, flat_mesh: Any, hybrid_mesh: Any) -> Measurement:
    """Estimates and measures the peak of one setting."""
    torch.manual_seed(0)
    model = job.make_model()
    mesh = hybrid_mesh if job.hsdp else flat_mesh
    fsdp_c.auto_shard(model, job.policy, mesh=mesh, **job.shard_kwargs)
    optimizer, batch = job.make_optimizer(model.parameters()), job.make_batch()
    begin = time.perf_counter()
    estimate = fsdp_c.explain(model, optimizer, batch=batch, loss=compute_loss, file=io.StringIO())
    seconds = time.perf_counter() - begin

    def step() -> None:
        compute_loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tensors = [*model.buffers(), *(param.to_local() for param in model.parameters())]
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors += [v.to_local() if hasattr(v, "to_local") else v for v in states if torch.is_tensor(v)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    persistent = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    without_scratch, with_scratch = measure_step(step)
    return Measurement(
        estimate.peak.total,
        persistent + without_scratch,
        persistent + with_scratch,
        str(estimate.peak),
        seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares estimated and measured peak memory.")
    parser.add_argument("--only", default="", help="run only jobs whose name contains this")
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    jobs = [job for job in list_jobs() if options.only in job.name]
    if not jobs:
        parser.error(f"--only {options.only}: no job has a name that contains this")
    flat_mesh = make_fake_mesh(8)
    hybrid_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    rows, errors = [], []
    for job in jobs:
        measurement = measure_job(job, flat_mesh, hybrid_mesh)
        error = measurement.estimated / measurement.measured - 1
        errors.append(error)
        mib = [size / 2**20 for size in measurement[:3]]
        row = [job.name, *mib[:2], f"{error:+.1%}", mib[2]]
        rows.append([*row, measurement.peak_phase, measurement.seconds])
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    titles = ["job", "estimated, MiB", "measured", "error", "with scratch", "peak in", "seconds"]
    print(format_table(titles, rows))
    largest_error = max(errors, key=abs)
    count = sum(abs(error) <= MAX_ERROR for error in errors)
    print(f"{count} of {len(errors)} within {MAX_ERROR:.0%}; largest error {largest_error:+.1%}")
    write_json(options.json, "plan", {"rows": rows, "largest_error": largest_error})


if __name__ == "__main__":
    main()
