"""Clean parameter names without wrappers, and the training states of units in FSDP1's terms.

Error messages, wrapping policies, checkpoints and optimizer states use the names that parameters
have in the user's model. Wrappers (FSDP1, DDP, activation checkpointing, torch.compile) insert
modules, and this module removes their components from names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE
from torch.distributed.fsdp._common_utils import (
    FSDP_FLATTENED,
    FSDP_PREFIX,
    FSDP_WRAPPED_MODULE,
    HandleTrainingState,
    TrainingState,
)
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as GroupTrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

__all__ = [
    "FSDP_FLATTENED",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "HandleTrainingState",
    "TrainingState",
    "apply_to_modules",
    "clean_tensor_name",
    "handle_training_state",
    "is_flattened",
    "param_to_fqns",
    "set_flattened",
    "training_state",
]

Result = TypeVar("Result")

COMPILED_MODULE = "_orig_mod"
DDP_MODULE = "module"

_WRAPPERS = frozenset({FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE})
_MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def clean_tensor_name(name: str, *, ddp: bool = False) -> str:
    """Returns the name of a parameter or buffer without the components that wrappers added.

    Removes the components of FSDP1, activation checkpointing and ``torch.compile``. The last
    component, which is the tensor's own name, is never removed.

    Args:
        name: A fully qualified name, with components separated by dots.
        ddp: Whether to remove a first component ``module``, too, for a model under
            ``DistributedDataParallel``. The default is False, because a model may have a child
            with that name. :func:`param_to_fqns` detects the wrapper.
    """
    *path, last = name.split(".")
    path = [component for component in path if component not in _WRAPPERS]
    if ddp and path and path[0] == DDP_MODULE:
        del path[0]
    return ".".join((*path, last))


def set_flattened(tensor: torch.Tensor) -> None:
    """Marks ``tensor`` as made by FSDP from user parameters, so that nested calls skip it.

    The mark is FSDP1's attribute, so FSDP1 skips these tensors, too.
    """
    setattr(tensor, FSDP_FLATTENED, True)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was marked by :func:`set_flattened`."""
    return bool(getattr(tensor, FSDP_FLATTENED, False))


def apply_to_modules(
    root: nn.Module,
    module_fn: Callable[..., Any],
    return_fn: Callable[..., Result],
    *args: Any,
    **kwargs: Any,
) -> Result:
    """Calls ``module_fn(module, prefix, *args, **kwargs)`` on ``root`` and every module below it.

    Modules are visited in pre-order, children in registration order. A module that is registered
    under several parents is visited under each, but once per parent, as in torch. ``prefix`` is the
    module's name as in a state dict, with a dot at its end. The root's prefix is empty.

    Returns:
        ``return_fn(*args, **kwargs)``, called after the last module.
    """
    for prefix, _, module in _walk_modules(root, "", ""):
        module_fn(module, prefix, *args, **kwargs)
    return return_fn(*args, **kwargs)


def _walk_modules(
    module: nn.Module, prefix: str, clean_prefix: str
) -> Iterator[tuple[str, str, nn.Module]]:
    """Yields (prefix in the state dict, prefix without wrappers, module) in pre-order."""
    yield prefix, clean_prefix, module
    ddp_child = DDP_MODULE if isinstance(module, _MODULE_WRAPPERS) else None
    for name, child in module.named_children():
        if child is not None:  # an override of named_children() may yield None
            is_wrapped = name == ddp_child or name in _WRAPPERS
            child_prefix = clean_prefix if is_wrapped else f"{clean_prefix}{name}."
            yield from _walk_modules(child, f"{prefix}{name}.", child_prefix)


def param_to_fqns(
    model: nn.Module, dedup_shared_params: bool = True
) -> dict[nn.Parameter, list[str]]:
    """Returns the clean names of every parameter of ``model``, in traversal order.

    The names are those of the unwrapped model's state dict.

    Args:
        model: A module, wrapped or not.
        dedup_shared_params: Whether a parameter that is registered several times gets only its
            first name. A module that one parent has registered twice counts once, as in torch. A
            flat parameter of FSDP1 always gets the names of all its parameters.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for _, prefix, module in _walk_modules(model, "", ""):
        for own_name, param in _list_params(module):
            flat: Any = param if isinstance(param, FlatParameter) else None
            if param not in names:
                names[param] = []
            elif dedup_shared_params or flat is not None:
                continue
            param_names = (own_name,) if flat is None else flat._fqns
            names[param] += [prefix + name for name in param_names]
    return names


def _list_params(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the module's own parameters, each with all its names."""
    try:
        return list(module.named_parameters(recurse=False, remove_duplicate=False))
    except (AssertionError, TypeError):  # an override without remove_duplicate
        return list(module.named_parameters(recurse=False))


_HANDLE_STATES = {
    GroupTrainingState.IDLE: HandleTrainingState.IDLE,
    GroupTrainingState.FORWARD: HandleTrainingState.FORWARD,
    GroupTrainingState.PRE_BACKWARD: HandleTrainingState.BACKWARD_PRE,
    GroupTrainingState.POST_BACKWARD: HandleTrainingState.BACKWARD_POST,
}


def handle_training_state(module: nn.Module) -> HandleTrainingState:
    """Returns the training state of the unit of ``module`` as FSDP1's ``HandleTrainingState``.

    Raises:
        ValueError: ``fully_shard`` was not applied to ``module`` itself.
    """
    state = _get_module_fsdp_state(module)
    if state is None:
        raise ValueError(f"fully_shard was not applied to this {type(module).__name__}")
    if getattr(state, "_full_params", None) is not None:
        return HandleTrainingState.SUMMON_FULL_PARAMS
    # Between pre-backward and post-backward only groups have the exact state. A unit without
    # parameters has no group, so the state of the unit is used.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [state._fsdp_param_group]
    states = [group._training_state for group in groups if group is not None]
    return _HANDLE_STATES[states[0] if states else state._training_state]


def training_state(module: nn.Module) -> TrainingState:
    """Returns the training state of the unit of ``module`` as FSDP1's ``TrainingState``.

    ``SUMMON_FULL_PARAMS`` means inside :func:`fsdp_c.full_params`.

    Raises:
        ValueError: ``fully_shard`` was not applied to ``module`` itself.
    """
    state = handle_training_state(module)
    if state is HandleTrainingState.IDLE:
        return TrainingState.IDLE
    if state is HandleTrainingState.SUMMON_FULL_PARAMS:
        return TrainingState.SUMMON_FULL_PARAMS
    return TrainingState.FORWARD_BACKWARD
