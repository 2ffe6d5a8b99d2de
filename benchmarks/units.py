"""Resident memory of a step on real ranks, transport included, in units of one group's parameters.

Method. ``--ranks`` gloo processes train a model with ``--groups`` equal groups of one square weight
below a root without parameters, resharded after forward. The input has ``--rows`` rows, so that
activations are small compared with parameters. The result is the peak of resident memory above the
value at the beginning of the step. The peak is ``VmHWM``, which the script resets at the beginning
of each group's forward and backward, and between a group's backward and its reduction. Gradient
shards that existed at the reset are subtracted, since they are persistent. A unit is a group's full
parameters in the compute dtype.

After two warm-up steps, the script reports the minimum of three steps. The garbage collector is off
during steps, because memory that it frees in a step would hide a peak. Before each step, the C
library and fsdp_c return their free memory to the kernel. fsdp_c is measured twice, the second time
with reductions that overlap with backward (``set_reduction_overlap``). ``memory.py`` instead counts
allocations, on a fake group that needs no memory itself.

    python benchmarks/units.py [--groups N] [--side N] [--rows N] [--ranks N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from meter import read_peak_bytes, read_resident_bytes, release_free_memory, reset_peak
from ranks import start_ranks
from report import (
    POLICIES,
    FullyShard,
    format_table,
    get_implementations,
    parse_positive,
    write_json,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_c

STEPS = 3
OVERLAP = "with overlap"


class MeasuredModel:
    """A sharded model whose hooks update the peak before each group's forward and backward."""

    def __init__(
        self, shard: FullyShard, precision: str, groups: int, side: int, rows: int
    ) -> None:
        policy = POLICIES[precision]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(groups)))
        for group in self.model:
            group.register_forward_pre_hook(self._update_peak)
            group.register_full_backward_pre_hook(self._update_peak)
            group.register_full_backward_hook(self._update_peak)
            shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        shard(self.model, mesh=mesh, mp_policy=policy)
        self.x = torch.randn(rows, side, requires_grad=True)
        self.unit_bytes = side * side * (policy.param_dtype or torch.float32).itemsize
        self.bytes_before_step = self.gradient_bytes = 0
        self.max_bytes = -math.inf

    def _update_peak(self, *_: object) -> None:
        transient = read_peak_bytes() - self.bytes_before_step - self.gradient_bytes
        self.max_bytes = max(self.max_bytes, transient)
        self._start_interval()

    def _start_interval(self) -> None:
        self.gradient_bytes = sum(
            p.grad.to_local().untyped_storage().nbytes()
            for p in self.model.parameters()
            if isinstance(p.grad, DTensor)  # not an unsharded gradient
        )
        reset_peak()

    def _measure_peak(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Returns the peak during a call in units, and the call's result.

        Raises SystemExit if the peak is not positive.
        """
        self.max_bytes = -math.inf
        self._start_interval()
        result = call()
        self._update_peak()
        if self.max_bytes <= 0:
            raise SystemExit(
                f"units.py: the peak is {self.max_bytes} bytes above the start, expected more than "
                "0: memory from before the step was freed in it; measure again"
            )
        return self.max_bytes / self.unit_bytes, result

    def step(self) -> tuple[float, float]:
        """Runs one step. Returns the peaks of forward and backward in units."""
        self.model.zero_grad(set_to_none=True)
        release_free_memory()
        dist.barrier()
        self.bytes_before_step = read_resident_bytes()
        forward, loss = self._measure_peak(lambda: self.model(self.x).sum())
        backward, _ = self._measure_peak(loss.backward)
        return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of a step on real ranks, in units.")
    parser.add_argument("--groups", type=parse_positive, default=5)
    parser.add_argument(
        "--side", type=parse_positive, default=4096, help="rows and columns of a weight"
    )
    parser.add_argument("--rows", type=parse_positive, default=16, help="rows of the input")
    parser.add_argument("--ranks", type=parse_positive, default=2)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(options.ranks):
        return
    if not reset_peak():
        raise SystemExit("units.py: the kernel does not allow a reset of VmHWM (man 5 proc)")
    results: dict[str, Any] = {"groups": options.groups, "side": options.side}
    table = []
    for precision in POLICIES:
        peaks = {}
        implementations = get_implementations()
        for name in [*implementations, OVERLAP]:
            shard = implementations.get(name, fsdp_c.fully_shard)
            measured_model = MeasuredModel(
                shard, precision, options.groups, options.side, options.rows
            )
            if name == OVERLAP:
                fsdp_c.set_reduction_overlap(measured_model.model, overlap=True)
            gc.disable()
            steps = [measured_model.step() for _ in range(2 + STEPS)][2:]
            gc.enable()
            peaks[name] = dict(zip(("forward", "backward"), map(min, zip(*steps))))
            del measured_model
            gc.collect()  # the hooks make a reference cycle
        results[precision] = peaks
        for phase in ("forward", "backward"):
            torch_value, fsdp_c_value = peaks["torch"][phase], peaks["fsdp_c"][phase]
            table.append(
                [
                    precision,
                    phase,
                    torch_value,
                    fsdp_c_value,
                    torch_value / fsdp_c_value,
                    peaks[OVERLAP][phase],
                ]
            )
    if dist.get_rank() == 0:
        print("peak resident memory of a step, in units of one group's full parameters")
        titles = ["precision", "phase", "torch", "fsdp_c", "torch/fsdp_c", OVERLAP]
        print(format_table(titles, table))
        write_json(options.json, "units", results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
