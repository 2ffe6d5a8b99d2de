"""``explain``: reports a sharded model's units, the memory of a step, and likely mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

import fsdp_c._C as _C

from ._runtime import fsdp_units, kernels, lint
from ._runtime.fsdp_units import require_module
from ._tools import model_checks, unit_bytes
from ._tools.fake_step import Trace, record_events
from ._tools.optimizer_memory import count_state_bytes, measure_optimizer
from ._tools.report import Explanation, make_explanation

DEFAULT_RANKS_PER_NODE = 8


def explain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    batch: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    memory: int | str | None = None,
    microbatches: int = 1,
    file: TextIO | None = None,
) -> Explanation:
    """Prints a model's units, the memory of a step, and warnings about likely mistakes.

    The function does not change or initialize the model, computes no values, and issues no
    collectives. Call it at any time after sharding.

    Args:
        model: The root: a module that ``fully_shard`` or ``replicate`` was applied to, or a module
            that contains such modules.
        optimizer: The optimizer of the model. The function checks its parameters and counts its
            states.
        batch: The arguments of forward: a tensor, a tuple of arguments or a dict of keyword
            arguments. Only sizes and dtypes are used, because forward and backward run on fake
            tensors. Tensors that forward stores outside of the model's modules, for example in
            ``functools.lru_cache``, stay fake. ``None``: the report has no activations.
        loss: Function that returns the loss of the output, for backward. ``None``: the output's
            ``loss``, or else the sum of its tensors. Pass the real loss if it needs much memory, as
            a cross entropy in float32 does.
        memory: The memory of one rank in bytes, or as ``"80GiB"``: the report compares it with the
            peak.
        microbatches: The number of backwards of an optimizer step, for advice.
        file: The output file. ``None``: standard output.

    Returns:
        The report as data. ``.plot("memory.png")`` draws it.

    Raises:
        ValueError: ``model`` has no sharded module, or torch sharded it without fsdp_c.
        ValueError: ``batch`` is passed, and forward raises on fake tensors, or the model had
            DTensors before ``fully_shard`` (tensor parallelism).
        ValueError: ``microbatches`` is not positive, or ``memory`` is not a size.
        TypeError: ``model`` is not a module, ``optimizer`` not an optimizer, or ``microbatches``
            not an integer.
    """
    require_module(model, "explain")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"explain expects the model's optimizer, not {optimizer!r}")
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"nothing in {type(model).__name__} is sharded: call fully_shard first")
    groups = [(name, group) for name, _, group in fsdp_units.iterate_groups(model)]
    for name, group in groups:
        if not isinstance(group, _C.ParamGroup):
            raise ValueError(
                f"'{name}' is sharded by torch, not by fsdp_c: call fsdp_c.fully_shard, or "
                "fsdp_c.install() before torch's fully_shard"
            )
    warnings = [
        *model_checks.check_optimizer_params(model, groups, optimizer),
        *model_checks.check_replaced_params(model, groups),
        *model_checks.check_unmanaged_params(model, groups),
        *model_checks.check_tied_weights(model, groups),
        *model_checks.check_compiled_root(model),
        *model_checks.check_replicas(groups),
        *lint.check_blocks_in_root(model, groups),
        *lint.check_policies(model, groups),
        *lint.check_large_units(model, groups),
        *lint.check_data_parallel(model, groups),
    ]
    layout = unit_bytes.make_sharded_layout(model)
    on_cpu = all(group.device.type == "cpu" for _, group in groups)
    optimizer_cost = (
        None if optimizer is None else _estimate_optimizer_cost(optimizer, layout, on_cpu)
    )
    explanation = make_explanation(
        title=fsdp_units.get_original_class(model).__name__,
        warnings=warnings,
        layout=layout,
        sharding=make_sharding(layout, model, optimizer_cost, on_cpu),
        trace=record_step(model, layout, batch, loss),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        knows_optimizer=optimizer_cost is not None,
        memory=memory,
        model=model,
        microbatches=check_positive("microbatches", microbatches),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE") or DEFAULT_RANKS_PER_NODE),
    )
    for _, group in groups:
        explanation.kernels[group.device.type] = kernels.describe_kernels(group.device)
    if on_cpu:
        pool = _C.memory()
        explanation.buffers = pool["used"], pool["cached"]
    print(explanation, file=file)
    return explanation


def check_positive(name: str, value: Any) -> int:
    """Returns an argument that is a positive integer.

    Raises:
        TypeError: ``value`` is not an integer. The message has ``name``.
        ValueError: ``value`` is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an integer, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} is positive, not {value}")
    return value


def record_step(
    model: nn.Module,
    layout: unit_bytes.Layout,
    batch: Any,
    loss: Callable[[Any], torch.Tensor] | None,
) -> Trace | None:
    """Records one step of the model on fake tensors; returns ``None`` without a batch."""
    if batch is None:
        return None
    dtensors = [p.name for unit in layout.units for p in unit.params if p.is_dtensor]
    if dtensors:
        raise ValueError(
            f"cannot record the memory of {type(model).__name__}: '{dtensors[0]}' is a DTensor "
            "before fully_shard, as with tensor parallelism. Call this function without batch="
        )
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = batch
    else:
        args = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    dtypes = layout.dtypes
    return record_events(
        model,
        layout.state_modules,
        lambda param: dtypes.get(id(param), param.dtype),
        layout.param_indices,
        args,
        kwargs,
        loss,
    )


def make_sharding(
    layout: unit_bytes.Layout,
    model: nn.Module,
    optimizer_cost: tuple[int, int] | None,
    on_cpu: bool,
) -> unit_bytes.Sharding:
    """Returns the sharding. ``optimizer_cost``: bytes of states, and of a step; ``None``: none."""
    state_bytes, step_bytes = optimizer_cost or (0, 0)
    return unit_bytes.Sharding(
        units=tuple(layout.units),
        states=tuple(layout.states),
        buffer_bytes=unit_bytes.count_bytes_outside_units(model, layout.dtypes),
        optimizer_bytes=state_bytes,
        step_bytes=step_bytes,
        streams=not on_cpu,
    )


def _estimate_optimizer_cost(
    optimizer: torch.optim.Optimizer, layout: unit_bytes.Layout, on_cpu: bool
) -> tuple[int, int] | None:
    """Returns the bytes of an optimizer's states, and the bytes that a step uses temporarily.

    Returns ``None`` if the optimizer has no states yet and its step cannot be measured.
    """
    states = count_state_bytes(optimizer)
    try:
        estimated_states, step_bytes = compute_optimizer_cost(optimizer, layout, on_cpu)
    except ValueError:
        return (states, 0) if states else None
    return states or estimated_states, step_bytes


def compute_optimizer_cost(
    optimizer: Any, layout: unit_bytes.Layout, on_cpu: bool
) -> tuple[int, int]:
    """Returns the bytes of an optimizer's states, and the bytes that a step uses temporarily.

    An ``Optimizer`` counts for the parameters that it holds, a class for all trained parameters.
    """
    positions = {(i, j) for i, unit in enumerate(layout.units) for j in range(len(unit.params))}
    if isinstance(optimizer, torch.optim.Optimizer):
        held = (id(param) for group in optimizer.param_groups for param in group["params"])
        positions = {layout.param_indices[key] for key in held if key in layout.param_indices}
    trained_params = [
        (unit.world, param)
        for i, unit in enumerate(layout.units)
        for j, param in enumerate(unit.params)
        if param.requires_grad and (i, j) in positions
    ]
    if not trained_params:
        return 0, 0
    shards = [
        param.padded_numel(world) * param.orig_dtype.itemsize for world, param in trained_params
    ]
    cost = measure_optimizer(optimizer, trained_params[0][1].orig_dtype, on_cpu)
    step_bytes = cost.step_ratio * (sum(shards) if cost.counts_all_parameters else max(shards))
    return int(cost.state_ratio * sum(shards)), int(step_bytes)
