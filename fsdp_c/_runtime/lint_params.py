"""Warnings about parameters that were replaced after sharding, and optimizers of stale parameters.

A parameter registration hook records parameters that are registered on sharded modules. An
optimizer step pre-hook checks the recorded parameters. At the first step of each optimizer, the
pre-hook also checks the parameters of the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._compat import patches
from .fsdp_units import iterate_registrations, list_registered_params
from .hints import format_names
from .lint import log_failure, warn_once

# No weak references to parameters: torch.utils.swap_tensors refuses tensors that have one.
_params_by_uid: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Maps torch's uid of an original parameter to the ``FSDPParam`` that replaced it."""
_params_by_registration: weakref.WeakValueDictionary[tuple[int, str], Any] = (
    weakref.WeakValueDictionary()
)
"""Maps (id of module, name) to the ``FSDPParam``. Modules may have ``__eq__`` and no hash."""
_replaced_registrations: dict[tuple[int, str], tuple[Any, int]] = {}
"""Maps (id of module, name) to a weak reference to the ``FSDPParam``, and the new object's id."""
_checked_optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = (
    weakref.WeakValueDictionary()
)
"""Maps the id of an optimizer to the optimizer. Optimizers may have ``__eq__`` and no hash."""


def record_sharded_params(fsdp_params: Iterable[Any]) -> None:
    """Records the ``FSDPParam`` objects that replaced parameters, for the later checks."""
    for fsdp_param in fsdp_params:
        _params_by_uid[fsdp_param._orig_param_uid] = fsdp_param
        for module, name in iterate_registrations(fsdp_param):
            _params_by_registration[id(module), name] = fsdp_param


def _record_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    fsdp_param = _params_by_registration.get((id(module), name))
    if fsdp_param is None:
        return
    with log_failure():
        # The entry may be that of a freed module with the same id.
        if any(owner is module for owner, _ in iterate_registrations(fsdp_param)) and all(
            registered is not parameter for registered in list_registered_params(fsdp_param)
        ):
            _replaced_registrations[id(module), name] = (weakref.ref(fsdp_param), id(parameter))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step inlines its hooks, and this code would break the graph
    is_checked = _checked_optimizers.get(id(optimizer)) is optimizer
    if is_checked and not _replaced_registrations:
        return
    with log_failure():
        if _replaced_registrations:
            _check_replaced_registrations()
        if not is_checked:
            _checked_optimizers[id(optimizer)] = optimizer
            _check_optimizer(optimizer)


# Compiled code calls the hook without tracing it.
_record_registration._torchdynamo_disable = True  # type: ignore[attr-defined]

patches.apply_with_first_model(
    "parameter registration hook: lint",
    lambda: patches.add_hook(register_module_parameter_registration_hook, _record_registration),
)
patches.apply_with_first_model(
    "optimizer step pre hook: lint",
    lambda: patches.add_hook(register_optimizer_step_pre_hook, _before_step),
)


def _check_replaced_registrations() -> None:
    replaced_names = []
    for reference, param_id in _replaced_registrations.values():
        fsdp_param = reference()
        # load_state_dict(assign=True) registers parameters that the unit then uses.
        if fsdp_param is not None and id(fsdp_param.sharded_param) != param_id:
            replaced_names.append(fsdp_param._param_fqn or fsdp_param._module_info.param_name)
    _replaced_registrations.clear()
    if replaced_names:
        warn_once(format_replaced(replaced_names))


def format_replaced(names: list[str]) -> str:
    """Returns the warning about parameters ``names`` that were replaced after sharding."""
    verb = "was" if len(names) == 1 else "were"
    return (
        f"{format_names(names)} {verb} replaced after sharding: the module holds another object "
        "than its unit, and the optimizer may update one while forward gathers the other. Change "
        "values in place, or load them with load_state_dict"
    )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    stale_names = []
    for parameter in params:
        fsdp_param = _params_by_uid.get(getattr(parameter, "_fsdp_orig_uid", -1))
        if fsdp_param is not None and fsdp_param.sharded_param is not parameter:
            stale_names.append(fsdp_param._param_fqn or fsdp_param._module_info.param_name)
    if stale_names:
        warn_once(
            f"{type(optimizer).__name__} holds {len(stale_names)} of {len(params)} parameters as "
            f"they were before sharding ({format_names(stale_names)}): it was built before "
            "fully_shard, which replaces parameters, and does not train them. Build it after the "
            "last fully_shard"
        )
