"""Checks of a sharded model and its optimizer that only :func:`fsdp_c.explain` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from .._runtime.fsdp_units import (
    get_param_names,
    iterate_params,
    iterate_registrations,
    list_registered_params,
)
from .._runtime.hints import format_names
from .._runtime.lint_params import format_replaced
from ..names import COMPILED_MODULE


def check_optimizer_params(
    model: nn.Module, groups: list[tuple[str, Any]], optimizer: torch.optim.Optimizer | None
) -> list[str]:
    """Reports optimizer parameters that ``model`` does not have, and missing trainable parameters.

    Parameters that belong to no unit may be missing.
    """
    if optimizer is None:
        return []
    optimizer_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sharded_ids = {id(param.sharded_param) for _, param in iterate_params(groups)}
    temporary_ids = {
        id(p) for _, param in iterate_params(groups) for p in list_registered_params(param)
    } - sharded_ids
    model_ids = sharded_ids | ({id(parameter) for parameter in model.parameters()} - temporary_ids)
    reports = []
    foreign_count = len(optimizer_ids - model_ids)
    if foreign_count:
        reports.append(
            f"the model does not have {foreign_count} of the optimizer's {len(optimizer_ids)} "
            "parameters. If the optimizer was built before fully_shard, which replaces parameters, "
            "it does not train the model: build it after the last fully_shard"
        )
    names = get_param_names(model, groups)
    missing = [
        names[id(param)]
        for _, param in iterate_params(groups)
        if param.sharded_param.requires_grad and id(param.sharded_param) not in optimizer_ids
    ]
    if missing and (not foreign_count or optimizer_ids & sharded_ids):
        reports.append(
            f"the optimizer does not hold {format_names(missing)}, which require gradients"
        )
    return reports


def check_replaced_params(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports parameters that modules hold and that their unit did not register."""
    names = get_param_names(model, groups)
    replaced = [
        names[id(param)]
        for _, param in iterate_params(groups)
        if any(
            id(getattr(module, name, None)) not in map(id, list_registered_params(param))
            for module, name in iterate_registrations(param)
        )
    ]
    if not replaced:
        return []
    return [format_replaced(replaced)]


def check_unmanaged_params(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports parameters that require gradients and belong to no unit."""
    registrations = {
        (id(module), name)
        for _, param in iterate_params(groups)
        for module, name in iterate_registrations(param)
    }
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
        and parameter.requires_grad
        and (id(module), name) not in registrations
    ]
    if not names:
        return []
    return [
        f"no unit contains {format_names(names)} (ignored, added after fully_shard, or outside of "
        "every sharded module): these gradients are not reduced over ranks"
    ]


def check_tied_weights(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports parameters that were tied before sharding and are in different units."""
    names = get_param_names(model, groups)
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, param in iterate_params(groups):
        owners.setdefault(param._orig_param_uid, []).append((name, names[id(param)]))
    return [
        f"{format_names([param for _, param in tied])} were one parameter before sharding and are "
        f"in different units ({', '.join(unit for unit, _ in tied)}): put their modules into one "
        "unit, fully_shard([a, b]), or into the root"
        for tied in owners.values()
        if len(tied) > 1
    ]


def check_compiled_root(model: nn.Module) -> list[str]:
    """Reports ``torch.compile`` around a module that contains sharded modules."""
    outer = [
        (name or type(model).__name__, getattr(module, COMPILED_MODULE, module))
        for name, module in model.named_modules()
        if hasattr(module, COMPILED_MODULE) or module._compiled_call_impl is not None
    ]
    for name, module in outer:
        inner = [m for m in module.modules() if isinstance(m, FSDPModule) and m is not module]
        if inner:
            return [
                f"torch.compile is applied to '{name}', and the hooks of {len(inner)} sharded "
                "modules in it break its graph into parts. Compile the blocks, then shard them: "
                "block.compile(); fully_shard(block)"
            ]
    return []


def check_replicas(groups: list[tuple[str, Any]]) -> list[str]:
    """Reports replicas (HSDP) whose gradients are not synchronized."""
    replicated = {name: group for name, group in groups if _count_replicas(group) > 1}
    if not replicated:
        return []
    replicas = max(map(_count_replicas, replicated.values()))
    reports = []
    without_replicas = [
        name
        for name, group in groups
        if name not in replicated
        and group.mesh_info.mesh.size() * replicas == dist.get_world_size()
        and not any(param.is_dtensor for param in group.fsdp_params)
    ]
    if without_replicas:
        reports.append(
            f"the mesh of {format_names(without_replicas)} lacks the {replicas} replicas of "
            f"{format_names(replicated)}, so gradients there are not averaged over replicas: pass "
            "the same mesh=mesh, of two dimensions, to each fully_shard"
        )
    paused = [name for name, group in replicated.items() if not group.all_reduce_grads]
    if paused:
        reports.append(
            f"the replicas of {format_names(paused)} do not all-reduce their gradients now: before "
            "the last microbatch of each step, call model.set_requires_all_reduce(True)"
        )
    return reports


def _count_replicas(group: Any) -> int:
    info = group.mesh_info
    return int(info.replicate_mesh_size) if isinstance(info, DDPMeshInfo) else 1
