"""Checks that ``auto_shard`` runs before it changes the model."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Collection, Iterator

import torch.nn as nn
from torch.distributed.fsdp import _common_utils
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from .module_tree import iterate_children
from .unit import Unit


def check_nested_wrapping(root: nn.Module) -> None:
    """Checks that FSDP1 or FSDP2 was not applied to any module of the model.

    Raises:
        ValueError: FSDP was applied to a module. The message has the module's name.
    """
    for name, module in root.named_modules():
        is_fsdp2 = _get_module_fsdp_state(module) is not None
        if is_fsdp2 or _common_utils._get_module_fsdp_state(module) is not None:
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}"
            )


def warn_on_overridden_mixed_precision(classes: set[type[nn.Module]]) -> None:
    """Warns that modules of ``classes`` become separate units without a cast of parameters."""
    warnings.warn(
        "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the model "
        f"has submodules of type:\n{classes}\nauto_shard makes these modules units of their own, "
        "which compute in the dtype of their parameters. Pass full_precision_classes=() to compute "
        "in mp_policy.param_dtype.",
        stacklevel=4,
    )


def find_mixed_requires_grad(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter]
) -> Iterator[str]:
    """Yields a message for each unit with trainable and frozen parameters, in unit order."""
    visited: set[nn.Module] = set()
    for unit in units:
        params: dict[nn.Parameter, str] = {}
        for module, name in zip(unit.modules, unit.names):
            params |= managed_param_to_fqn(module, ignored_params, visited, name)
        trainable = {p: fqn for p, fqn in params.items() if p.requires_grad}
        frozen = {p: fqn for p, fqn in params.items() if not p.requires_grad}
        if trainable and frozen:
            subject = ", ".join(name or type(model).__name__ for name in unit.names)
            yield (
                f"{subject} has both parameters with requires_grad=True and False. The frozen ones "
                f"({sum(p.numel() for p in frozen)} numel) are gathered for backward together with "
                f"the others ({sum(p.numel() for p in trainable)} numel). If possible, wrap the "
                "frozen parameters with FSDP separately.\n"
                f"The following parameters have requires_grad=True:\n{list(trainable.values())}\n"
                f"The following parameters have requires_grad=False:\n{list(frozen.values())}"
            )


def managed_param_to_fqn(
    module: nn.Module,
    ignored_params: Collection[nn.Parameter],
    visited: set[nn.Module],
    prefix: str,
) -> dict[nn.Parameter, str]:
    """Returns the parameters that a unit of ``module`` would manage, with their names.

    The caller must process inner units before outer units.

    Args:
        module: The module of the unit.
        ignored_params: Parameters to leave out.
        visited: The modules of earlier units. The unit's modules are added.
        prefix: The name of ``module`` from the root.
    """
    fqns: dict[nn.Parameter, str] = {}
    visited.add(module)
    queue = collections.deque([(module, prefix)])
    while queue:
        submodule, name = queue.popleft()
        prefix_of_children = f"{name}." if name else ""
        for own_name, param in submodule.named_parameters(recurse=False):
            if param not in ignored_params:
                fqns[param] = prefix_of_children + own_name
        for own_name, child in iterate_children(submodule):
            if child not in visited:
                visited.add(child)
                queue.append((child, prefix_of_children + own_name))
    return fqns
