"""Names and states: what a parameter is called before any wrapper, and what a unit is doing.

Error messages, wrapping policies, checkpoints and optimizer state all speak of parameters by the
name they have in the user's model. Wrappers (FSDP1, DDP, activation checkpointing, torch.compile)
put a module of their own in between; this module takes those components out again.
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
    """``name`` of a parameter or buffer without the components that wrappers added.

    Removed are the wrapped modules of FSDP1, activation checkpointing and ``torch.compile``, each
    only as a whole component and never as the last one (the tensor's own name).

    Args:
        name: A fully qualified name, components separated by dots.
        ddp: Whether the name comes from a model under ``DistributedDataParallel``: removes the
            first ``module`` component too. Not the default, because a model may well have a child
            of that name; :func:`param_to_fqns` knows by itself.
    """
    *path, last = name.split(".")
    path = [component for component in path if component not in _WRAPPERS]
    if ddp and path and path[0] == DDP_MODULE:
        del path[0]
    return ".".join((*path, last))


def set_flattened(tensor: torch.Tensor) -> None:
    """Marks ``tensor`` as made by FSDP out of user parameters: nested calls leave it alone.

    The mark is FSDP1's own attribute, so that either side sees what the other marked.
    """
    setattr(tensor, FSDP_FLATTENED, True)


def is_flattened(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` carries the mark of :func:`set_flattened`."""
    return bool(getattr(tensor, FSDP_FLATTENED, False))


def apply_to_modules(
    root: nn.Module,
    module_fn: Callable[..., Any],
    return_fn: Callable[..., Result],
    *args: Any,
    **kwargs: Any,
) -> Result:
    """Calls ``module_fn(module, prefix, *args, **kwargs)`` on every module below ``root``.

    The order is pre-order (a module before its children, children as registered); a module that is
    registered at several places is visited at each of them. ``prefix`` is the module's name as in a
    state dict, with a dot at its end; the root's is empty.

    Returns:
        ``return_fn(*args, **kwargs)``, called after the last module.
    """
    for prefix, _, module in _walk(root, "", ""):
        module_fn(module, prefix, *args, **kwargs)
    return return_fn(*args, **kwargs)


def _walk(module: nn.Module, prefix: str, clean: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Pre-order: prefix as in the state dict, prefix without wrappers, module."""
    yield prefix, clean, module
    unnamed = DDP_MODULE if isinstance(module, _MODULE_WRAPPERS) else None
    for name, child in module.named_children():
        if child is not None:  # modules that override named_children() may give None
            inner = clean if name == unnamed or name in _WRAPPERS else f"{clean}{name}."
            yield from _walk(child, f"{prefix}{name}.", inner)


def param_to_fqns(
    model: nn.Module, dedup_shared_params: bool = True
) -> dict[nn.Parameter, list[str]]:
    """The clean names of every parameter of ``model``, in the order in which they are found.

    The names are those of the model's own state dict before any wrapper.

    Args:
        model: A module, wrapped or not.
        dedup_shared_params: ``True``: a parameter that is registered at several places has its
            first name only; ``False``: all of them. (FSDP1's flat parameters have the names of all
            their parameters either way.)
    """
    names: dict[nn.Parameter, list[str]] = {}
    for _, prefix, module in _walk(model, "", ""):
        for local, param in _parameters_with_duplicates(module):
            flat: Any = param if isinstance(param, FlatParameter) else None
            if param not in names:
                names[param] = []
            elif dedup_shared_params or flat is not None:
                continue
            own = (local,) if flat is None else flat._fqns
            names[param] += [prefix + name for name in own]
    return names


def _parameters_with_duplicates(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The module's own parameters, each under all its names."""
    try:
        return list(module.named_parameters(recurse=False, remove_duplicate=False))
    except (AssertionError, TypeError):  # an override that does not know remove_duplicate
        return list(module.named_parameters(recurse=False))


_HANDLE_STATES = {
    GroupTrainingState.IDLE: HandleTrainingState.IDLE,
    GroupTrainingState.FORWARD: HandleTrainingState.FORWARD,
    GroupTrainingState.PRE_BACKWARD: HandleTrainingState.BACKWARD_PRE,
    GroupTrainingState.POST_BACKWARD: HandleTrainingState.BACKWARD_POST,
}


def handle_training_state(module: nn.Module) -> HandleTrainingState:
    """What the unit of ``module`` is doing, in FSDP1's finer terms.

    Raises:
        ValueError: ``fully_shard`` was not applied to ``module`` itself.
    """
    state = _get_module_fsdp_state(module)
    if state is None:
        raise ValueError(f"fully_shard was not applied to this {type(module).__name__}")
    if getattr(state, "_full_params", None) is not None:
        return HandleTrainingState.SUMMON_FULL_PARAMS
    # Between pre-backward and post-backward only the groups know; a unit without parameters has
    # none, and its state says enough.
    states = [group._training_state for group in state._fsdp_param_groups]
    return _HANDLE_STATES[states[0] if states else state._training_state]


def training_state(module: nn.Module) -> TrainingState:
    """What the unit of ``module`` is doing, in FSDP1's coarser terms.

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
