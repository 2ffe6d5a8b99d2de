"""Measures launches, events and memory of torch and fsdp_c on the simulated device.

Launches are operations and kernels by which fsdp_c or torch's FSDP2 moves data; those of the model
are subtracted. The numbers of recorded and waited events include autograd's. Peak memory is the
device's peak above its memory before the model was created. Run as a script, this file prints a
table.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from typing import NamedTuple

import sim_tools
import simulated
import torch
import torch.nn as nn
from extensions import OneArgument
from features import MIXED
from sim_tools import SimTools
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import fsdp_c

BLOCKS = 6
WIDTH = 64
STEPS = 2
OFFLOAD = CPUOffloadPolicy()
OTHER_COUNTERS = ("record", "wait", "work wait", "free", "current", "allocate", "jobs")
OTHER_COUNTERS += ("synchronize", "group memory")
"""The device's counters that do not count launches."""


class Measurements(NamedTuple):
    """Averages per block and step, and the peak of the steps, without the first step. Except in
    BUCKETS, each block is a unit."""

    launches: float
    recorded_events: float
    waited_events: float
    peak_kib: float
    group_buffers: float
    """Buffers allocated by process groups."""


class Block(nn.Module):
    """A module with the parameter shapes of a transformer layer: four matrices, three vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        q, k, v = self.qkv(normed).chunk(3, -1)
        x = x + self.out(q * k * v)
        return x + self.down(self.up(x).relu())


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def _place_matrices_on_dim_1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def _two_dtypes() -> nn.Sequential:
    """Returns a model with frozen norms in bf16 and other parameters in fp32, gathered together as
    bytes."""
    model = _model()
    for block in model:
        block.norm.bfloat16().requires_grad_(False)
    return model


def _with_extensions() -> nn.Sequential:
    """Returns a model whose matrices are tensor subclasses with all-gather extensions
    (extensions.py): each gathers a second input and scales the gathered tensor."""
    model = _model()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(OneArgument(module.weight.detach().to("sim")))
    return model.to("sim")


def _use_group_memory(model: nn.Sequential) -> nn.Sequential:
    for unit in (*model, model):
        unit.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    return model


VARIANTS = {
    "Shard(0)": lambda t: t.shard(_model()),
    "Shard(0), bf16": lambda t: t.shard(_model(), mp_policy=MIXED),
    "two dtypes": lambda t: t.shard(_two_dtypes()),
    "Shard(1)": lambda t: t.shard(_model(), shard_placement_fn=_place_matrices_on_dim_1),
    "HSDP": lambda t: t.shard(_model(), mesh=t.mesh("replicate", "shard")),
    "HSDP, bf16": lambda t: t.shard(_model(), mesh=t.mesh("replicate", "shard"), mp_policy=MIXED),
    "offload": lambda t: t.shard(_model(), offload_policy=OFFLOAD),
    "offload, bf16": lambda t: t.shard(_model(), offload_policy=OFFLOAD, mp_policy=MIXED),
    "offload, HSDP, bf16": lambda t: t.shard(
        _model(), mesh=t.mesh("replicate", "shard"), offload_policy=OFFLOAD, mp_policy=MIXED
    ),
    "offload, Shard(1)": lambda t: t.shard(
        _model(), shard_placement_fn=_place_matrices_on_dim_1, offload_policy=OFFLOAD
    ),
    "offload, replicate, bf16": lambda t: t.replicate(
        _model(), mesh=t.flat(), offload_policy=OFFLOAD, mp_policy=MIXED
    ),
    "memory from group": lambda t: _use_group_memory(t.shard(_model())),
    "memory from group, bf16": lambda t: _use_group_memory(t.shard(_model(), mp_policy=MIXED)),
    "memory from group, HSDP": lambda t: _use_group_memory(
        t.shard(_model(), mesh=t.mesh("replicate", "shard"), mp_policy=MIXED)
    ),
    "extensions": lambda t: t.shard(_with_extensions()),
    "extensions, HSDP": lambda t: t.shard(_with_extensions(), mesh=t.mesh("replicate", "shard")),
    "extensions, offload": lambda t: t.shard(_with_extensions(), offload_policy=OFFLOAD),
    "kept after forward": lambda t: t.shard(_model(), reshard_after_forward=False),
    "replicate": lambda t: t.replicate(_model(), mesh=t.flat()),
}


def _one_unit(tools: SimTools, bucket_cap_mb: float) -> nn.Sequential:
    """Returns a model that is one unit, which computes in bfloat16 and reduces in float32."""
    model = tools.fully_shard(_model(), mesh=tools.flat(), mp_policy=MIXED)
    fsdp_c.set_bucket_cap(model, bucket_cap_mb)
    return model


BUCKETS = {
    "one unit": lambda t: _one_unit(t, math.inf),
    "one unit in buckets": lambda t: _one_unit(t, 4 * 12 * WIDTH**2 / 2**20),  # about a block each
}
"""Variants for fsdp_c only: torch reduces a unit in one reduce-scatter."""


def _plain_launches(variant: str, x: torch.Tensor) -> int:
    """Returns the launches of one step of the model without sharding."""
    device = simulated.start()
    model = (_two_dtypes() if variant == "two dtypes" else _model()).to("sim")
    if "bf16" in variant:
        model, x = model.bfloat16(), x.bfloat16()
    device.clear_counts()
    model(x).sum().backward()
    return _launches(device.counts())


def _launches(counts: dict[str, int]) -> int:
    return sum(n for name, n in counts.items() if name not in OTHER_COUNTERS)


def measure(variant: str, implementation: str, kernels: bool) -> Measurements:
    """Returns the measurements of one variant, averaged over the steps after the first."""
    device = simulated.start()
    device.reset()
    simulated.use_kernels(kernels)
    x = torch.randn(4, WIDTH, device="sim")
    plain = _plain_launches(variant, x)
    gc.collect()
    before = device.memory_allocated(0)
    make = VARIANTS.get(variant) or BUCKETS[variant]
    model = make(SimTools(implementation))
    for step in range(STEPS + 1):
        if step == 1:
            gc.collect()  # frees the parameters from before the sharding
            device.clear_counts()
            device.reset_peak(0)
        model(x).sum().backward()
        model.zero_grad()
    counts = device.counts()
    if device.findings():
        raise AssertionError(f"{variant}, {implementation}: {device.findings()[0]}")
    return Measurements(
        _launches(counts) / STEPS / BLOCKS - plain / BLOCKS,
        counts.get("record", 0) / STEPS / BLOCKS,
        counts.get("wait", 0) / STEPS / BLOCKS,
        (device.max_memory_allocated(0) - before) / 1024,
        counts.get("group memory", 0) / STEPS / BLOCKS,
    )


RUNS = {
    "torch": ("torch", False),
    "fsdp_c": ("fsdp_c", True),
    "fsdp_c without kernels": ("fsdp_c", False),
}
"""Name of a run -> its implementation, and whether fsdp_c has kernels for the device."""


def measure_all() -> dict[str, dict[str, Measurements]]:
    """Returns the measurements by variant and run."""
    sim_tools.init_loopback_group()
    measurements = {
        variant: {name: measure(variant, *options) for name, options in RUNS.items()}
        for variant in VARIANTS
    }
    fsdp_c_runs = [name for name, options in RUNS.items() if options[0] == "fsdp_c"]
    for variant in BUCKETS:
        measurements[variant] = {name: measure(variant, *RUNS[name]) for name in fsdp_c_runs}
    return measurements


def run(rank: int, world_size: int) -> dict[str, dict[str, Measurements]]:
    """Measures all variants in a rank."""
    warnings.simplefilter("ignore")
    return measure_all()


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{BLOCKS} blocks, {sim_tools.WORLD} ranks; per block and step, peak in KiB")
    print(f"{'':24s} {'':22s} launches  recorded  waited      peak  from group")
    for variant, runs in measure_all().items():
        for name, f in runs.items():
            print(
                f"{variant:24s} {name:22s} {f.launches:8.2f}  {f.recorded_events:8.2f}"
                f"  {f.waited_events:6.2f}  {f.peak_kib:8.1f}  {f.group_buffers:10.2f}"
            )


if __name__ == "__main__":
    sys.exit(main())
