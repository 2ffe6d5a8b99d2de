"""Checks of a sharded model and its optimizer that only :func:`fsdp_c.explain` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from .._runtime.fsdp_units import (
    get_param_names,
    iterate_params,
    iterate_registrations,
    list_registered_params,
)
from .._runtime.hints import format_names
from .._runtime.lint_params import format_replaced


def check_optimizer_params(
    model: nn.Module, groups: list[tuple[str, Any]], optimizer: torch.optim.Optimizer | None
) -> list[str]:
    """Reports parameters that only one of ``optimizer`` and ``model`` has."""
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
            f"the optimizer holds {foreign_count} of {len(optimizer_ids)} parameters that are not "
            "the model's: it was built before sharding, which replaces parameters, and will not "
            "train them. Build it after the last fully_shard"
        )
    names = get_param_names(model, groups)
    missing = [
        names[id(param)]
        for _, param in iterate_params(groups)
        if param.sharded_param.requires_grad and id(param.sharded_param) not in optimizer_ids
    ]
    if missing and not foreign_count:
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
        f"{format_names(names)} are in no unit (ignored, or added after fully_shard): their "
        "gradients are not reduced over ranks"
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
