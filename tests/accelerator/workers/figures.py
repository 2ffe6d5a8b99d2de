"""Prints what a unit and a step cost on the simulated accelerator, stock beside ours.

Launches are operations and kernels by which fsdp_c or torch's FSDP2 moves data: those of the model
and of the optimizer are taken off. Events are those recorded and waited for, autograd's included.
Peak memory is that of the device, over what was there before.
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
from extensions import One
from features import MIXED
from sim_tools import SimTools
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

import fsdp_c

UNITS = 6
WIDTH = 64
STEPS = 2
OFFLOAD = CPUOffloadPolicy()
NO_LAUNCH = ("record", "wait", "work wait", "free", "current", "allocate", "jobs", "synchronize")
NO_LAUNCH += ("group memory",)


class Figures(NamedTuple):
    """Per unit and step, but for the peak."""

    launches: float
    recorded: float
    waited: float
    peak: float
    """KiB"""
    given: float
    """Buffers that process groups have given."""


class Block(nn.Module):
    """The shapes of a transformer's layer: four matrices, three vectors."""

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
    return nn.Sequential(*(Block() for _ in range(UNITS)))


def _second(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


def _two_dtypes() -> nn.Sequential:
    """Frozen norms in bf16, the rest in fp32: they are gathered together, as bytes."""
    model = _model()
    for block in model:
        block.norm.bfloat16().requires_grad_(False)
    return model


def _extended() -> nn.Sequential:
    """Matrices that send a second input, and are multiplied when they have come."""
    model = _model()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(One(module.weight.detach().to("sim")))
    return model.to("sim")


def _from_the_group(model: nn.Sequential) -> nn.Sequential:
    for unit in (*model, model):
        unit.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    return model


VARIANTS = {
    "Shard(0)": lambda t: t.shard(_model()),
    "Shard(0), bf16": lambda t: t.shard(_model(), mp_policy=MIXED),
    "two dtypes": lambda t: t.shard(_two_dtypes()),
    "Shard(1)": lambda t: t.shard(_model(), shard_placement_fn=_second),
    "HSDP": lambda t: t.shard(_model(), mesh=t.mesh("replicate", "shard")),
    "HSDP, bf16": lambda t: t.shard(_model(), mesh=t.mesh("replicate", "shard"), mp_policy=MIXED),
    "offload": lambda t: t.shard(_model(), offload_policy=OFFLOAD),
    "offload, bf16": lambda t: t.shard(_model(), offload_policy=OFFLOAD, mp_policy=MIXED),
    "offload, HSDP, bf16": lambda t: t.shard(
        _model(), mesh=t.mesh("replicate", "shard"), offload_policy=OFFLOAD, mp_policy=MIXED
    ),
    "offload, Shard(1)": lambda t: t.shard(
        _model(), shard_placement_fn=_second, offload_policy=OFFLOAD
    ),
    "offload, replicate, bf16": lambda t: t.replicate(
        _model(), mesh=t.flat(), offload_policy=OFFLOAD, mp_policy=MIXED
    ),
    "memory from group": lambda t: _from_the_group(t.shard(_model())),
    "memory from group, bf16": lambda t: _from_the_group(t.shard(_model(), mp_policy=MIXED)),
    "memory from group, HSDP": lambda t: _from_the_group(
        t.shard(_model(), mesh=t.mesh("replicate", "shard"), mp_policy=MIXED)
    ),
    "extensions": lambda t: t.shard(_extended()),
    "extensions, HSDP": lambda t: t.shard(_extended(), mesh=t.mesh("replicate", "shard")),
    "extensions, offload": lambda t: t.shard(_extended(), offload_policy=OFFLOAD),
    "kept after forward": lambda t: t.shard(_model(), reshard_after_forward=False),
    "replicate": lambda t: t.replicate(_model(), mesh=t.flat()),
}


def _one_unit(tools: SimTools, bucket_cap_mb: float) -> nn.Sequential:
    """All blocks are one unit, reduced in float32 after a backward in bfloat16."""
    model = tools.fully_shard(_model(), mesh=tools.flat(), mp_policy=MIXED)
    fsdp_c.set_bucket_cap(model, bucket_cap_mb)
    return model


BUCKETS = {
    "one unit": lambda t: _one_unit(t, math.inf),
    "one unit in buckets": lambda t: _one_unit(t, 4 * 12 * WIDTH**2 / 2**20),  # a block each
}
"""Ours alone: torch's FSDP2 reduces a unit at once."""


def _plain_launches(variant: str, x: torch.Tensor) -> int:
    """Launches of a step of the model alone."""
    device = simulated.start()
    model = (_two_dtypes() if variant == "two dtypes" else _model()).to("sim")
    if "bf16" in variant:
        model, x = model.bfloat16(), x.bfloat16()
    device.clear_counts()
    model(x).sum().backward()
    return _launches(device.counts())


def _launches(counts: dict[str, int]) -> int:
    return sum(n for name, n in counts.items() if name not in NO_LAUNCH)


def measure(variant: str, implementation: str, kernels: bool) -> Figures:
    """The figures of one variant, in the steps after the first."""
    device = simulated.start()
    device.forget()
    simulated.use_kernels(kernels)
    x = torch.randn(4, WIDTH, device="sim")
    plain = _plain_launches(variant, x)
    gc.collect()
    before = device.memory_allocated(0)
    make = VARIANTS.get(variant) or BUCKETS[variant]
    model = make(SimTools(0, sim_tools.WORLD, implementation))
    for step in range(STEPS + 1):
        if step == 1:
            gc.collect()  # what is left of the model before it was sharded
            device.clear_counts()
            device.reset_peak(0)
        model(x).sum().backward()
        model.zero_grad()
    counts = device.counts()
    if device.findings():
        raise AssertionError(f"{variant}, {implementation}: {device.findings()[0]}")
    return Figures(
        _launches(counts) / STEPS / UNITS - plain / UNITS,
        counts.get("record", 0) / STEPS / UNITS,
        counts.get("wait", 0) / STEPS / UNITS,
        (device.max_memory_allocated(0) - before) / 1024,
        counts.get("group memory", 0) / STEPS / UNITS,
    )


RUNS = {
    "stock": ("torch", False),
    "ours": ("fsdp_c", True),
    "ours, no kernels": ("fsdp_c", False),
}


def all_figures() -> dict[str, dict[str, Figures]]:
    """By variant and run."""
    sim_tools.join_loop_group()
    found = {
        variant: {name: measure(variant, *how) for name, how in RUNS.items()}
        for variant in VARIANTS
    }
    ours = [name for name, how in RUNS.items() if how[0] == "fsdp_c"]
    for variant in BUCKETS:
        found[variant] = {name: measure(variant, *RUNS[name]) for name in ours}
    return found


def run(rank: int, world_size: int) -> dict[str, dict[str, Figures]]:
    """The target of a launch."""
    warnings.simplefilter("ignore")
    return all_figures()


def main() -> None:
    warnings.simplefilter("ignore")
    print(f"{UNITS} units, {sim_tools.WORLD} ranks; per unit and step, peak in KiB")
    print(f"{'':24s} {'':18s} launches  recorded  waited      peak  from group")
    for variant, runs in all_figures().items():
        for name, f in runs.items():
            print(
                f"{variant:24s} {name:18s} {f.launches:8.2f}  {f.recorded:8.2f}  {f.waited:6.2f}"
                f"  {f.peak:8.1f}  {f.given:10.2f}"
            )


if __name__ == "__main__":
    sys.exit(main())
