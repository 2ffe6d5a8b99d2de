"""Settings of the parity grid (a model, a way to wrap it, and a training script), and launches.

Every field of ``Setting`` but ``perturb`` is one dimension of the grid; its default is the plain
case. The basic grid (grid.py) varies the fields up to ``zero``, FSDP2's core. The wide grid
(wide.py) also varies the fields from ``mesh`` on. feature_support.py maps values to the features
that they need.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch

DEVICE = os.environ.get("FSDP_C_PARITY_DEVICE", "cpu")
"""Device type of the models: "cpu", or "sim" for the simulated accelerator."""

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Setting:
    """One point of the grid. The defaults are the plain case."""

    family: str = "residual"
    wrap: str = "blocks"
    """root: only the root; blocks: blocks and root; deep: leaves of blocks, blocks and root."""
    reshard: bool | str | None = None
    """reshard_after_forward of every wrapped module. A string, such as "2", stands
    for an integer, a number of ranks."""
    param: str | None = None
    """MixedPrecisionPolicy.param_dtype"""
    reduce: str | None = None
    """MixedPrecisionPolicy.reduce_dtype"""
    output: str | None = None
    """MixedPrecisionPolicy.output_dtype"""
    cast_inputs: bool = True
    """MixedPrecisionPolicy.cast_forward_inputs"""
    original: str = "fp32"
    """dtype of the parameters before wrapping."""
    inputs: str | None = None
    """dtype of floating inputs; None: the parameters' dtype."""
    schedule: str = "plain"
    """Order of forwards and backwards in a step; see SCHEDULES."""
    optimizer: str = "sgd"
    local_step: bool = False
    """The optimizer receives local shards. With DTensors, torch's sharding propagation takes a
    third of a setting's time for AdamW."""
    clip: bool = False
    """clip_grad_norm_ before each optimizer step"""
    checkpoint: str | None = None
    """reentrant, nonreentrant: torch's checkpoint() around wrapped blocks; inside: checkpoint
    wrappers within the wrapped blocks."""
    prefetch: str | None = None
    """forward, backward, both: explicit prefetch of the next two units"""
    divide: str | None = None
    """Gradient divide factor, or sums instead of averages; see Builder._set_divide."""
    unshard: str | None = None
    """Explicit unshard and reshard calls around the forward."""
    toggle_reshard: bool = False
    """set_reshard_after_forward between steps"""
    toggle_frozen: bool = False
    """requires_grad of some parameters changes between steps."""
    evaluate: bool = False
    """An evaluation under no_grad after each step."""
    hooks: bool = False
    """Hooks that halve and record gradients, and hooks that record the forwards of modules."""
    ignored: bool = False
    """ignored_params"""
    state: str | None = None
    """assign, copy: continue in a new model from the state dict; meta: start on the meta device."""
    reset: bool = False
    """reset_iter_state between steps"""
    zero: str = "none"
    """none: zero_grad drops gradients; keep: zero_grad sets them to zero in place."""
    mesh: str = "flat"
    """Kind of device mesh; see meshes.py."""
    placement: str | None = None
    """shard_placement_fn. last: the last dim if it is even; mixed: dim 1 of wide matrices; experts:
    a separate mesh for some parameters."""
    offload: bool = False
    comm: str | None = None
    """custom: custom all-gather and reduce-scatter; memory: buffers from the process group;
    separate: set_separate_reduce_scatter_group;
    buffers: set_reduce_scatter_max_input_buffers(3)."""
    reduce_hook: bool = False
    """set_all_reduce_hook"""
    zeros: bool = False
    """set_reduce_scatter_unused_params: zeros are reduced for parameters without a gradient."""
    async_op: bool = False
    """_set_unshard_async_op"""
    keep_sharded: bool = False
    """set_unshard_in_backward(False) on modules whose backward needs no parameter"""
    optim_event: bool = False
    """set_post_optim_event after each optimizer step"""
    extension: str | None = None
    """Parameters are tensor subclasses with all-gather extensions. "one argument" and "five
    arguments" are those of fsdp_pre_all_gather."""
    inference: bool = False
    """An evaluation under inference_mode after each step."""
    compiled: str | None = None
    """torch.compile (backend eager) of the blocks before wrapping, or of the root after it."""
    perturb: float = 0.0
    """For tests of the harness: the run under test adds it to a parameter before the last step."""

    def __str__(self) -> str:
        """Returns the family and the fields that differ from the plain case, for test names."""
        parts = [self.family]
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.name == "family" or value == entry.default:
                continue
            parts.append(entry.name if value is True else f"{entry.name}={value}")
        return ",".join(parts)


SCHEDULES = (
    "plain",  # one microbatch per step
    "accumulate",  # two microbatches, both reduced
    "no_sync",  # two microbatches without reduction, a third with
    "no_sync_some",  # as no_sync, but only the blocks skip the reduction (recurse=False)
    "keep_params",  # two microbatches, parameters kept unsharded after the first's backward
    "no_sync_keep_params",  # no_sync and keep_params together, as a pipeline schedule does
    "last_backward",  # set_is_last_backward(False) for all but the last microbatch
    "interleaved",  # forward a, forward b, backward a, backward b
    "reversed",  # forward a, forward b, backward b, backward a
    "summed",  # forward a, forward b, backward of the sum
    "retained",  # one forward, two backwards (retain_graph)
    "input_grad",  # gradients of the inputs only (torch.autograd.grad), then a backward
    "abandoned",  # a forward without backward before the step's own
)

WIDE_SCHEDULES = (
    "no_all_reduce",  # two microbatches reduce-scattered only, the third all-reduced too
    "no_all_reduce_some",  # as no_all_reduce, but only the blocks skip the all-reduce
    "mixed_sync",  # a microbatch without reduction, one without all-reduce, one with both
    "pipeline",  # manual reductions after all backwards, as in a pipeline schedule
)
"""Schedules that only the wide grid uses."""


@dataclass(frozen=True)
class Launch:
    """How ranks run: one gloo process per rank, or all ranks as threads of one process."""

    world_size: int
    threads: bool = False

    def __str__(self) -> str:
        return f"{'threads' if self.threads else 'gloo'}{self.world_size}"
