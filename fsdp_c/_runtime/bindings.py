"""Passes Python functions and classes to the C extension, which calls them. Runs at import.

``import fsdp_c`` imports this module.
"""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_state as torch_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.utils import _apply_to_tensors

import fsdp_c._C as _C

from .._compat import guard
from .._compat.torch_releases import collect_grad_tensors, dtensor_new, replace_grad_tensors
from .lint import warn_once
from .param_group import ParamGroup
from .state import State


def _cast_tree(dtype: torch.dtype, tree: Any) -> Any:
    """Casts every floating-point tensor in ``tree`` to ``dtype``; rebuilds containers."""
    return _apply_to_tensors(functools.partial(_cast_fp_tensor, dtype), tree)


def _format_class_names(state: Any) -> str:
    return ", ".join(type(module).__name__ for module in state._modules) or "?"


def _warn_view_output(state: Any) -> None:
    """Warns, in the words of torch 2.13, that a module returned a view.

    The warning has the module name and the file of torch's, so that filters of warnings match.
    """
    hook = torch_state.FSDPState._register_pre_backward_hook
    line = getattr(getattr(hook, "__code__", None), "co_firstlineno", 1)
    warnings.warn_explicit(
        f"FSDP2-wrapped module ({_format_class_names(state)}) returned a view tensor. "
        "An in-place op on this view (e.g., `x += y`) will silently drop the pre-backward hook and "
        "skip the all-gather, which can cause backward to fail or produce wrong gradients. "
        "Use out-of-place ops (`out = out + y`, not `out += y`) or `.clone()` the output before "
        "any in-place op.",
        UserWarning,
        filename=str(torch_state.__file__),
        lineno=line,
        module=torch_state.__name__,
        registry=vars(torch_state).setdefault("__warningregistry__", {}),
    )


def _warn_lost_backward(state: Any) -> None:
    """Warns that a backward raised, and that this forward resets the units."""
    warn_once(
        f"the backward before this forward of {_format_class_names(state)} did not finish: fsdp_c "
        "resets all units of the model and drops gradients that were not reduced. Reduced "
        "gradients are in .grad: call zero_grad() after a backward that raised."
    )


BOUND_OBJECTS: dict[str, Any] = {
    "dtensor_class": DTensor,
    "dtensor_new": dtensor_new,
    "collect_grad_tensors": collect_grad_tensors,
    "replace_grad_tensors": replace_grad_tensors,
    "cast_tree": _cast_tree,
    "warn_view_output": _warn_view_output,
    "warn_lost_backward": _warn_lost_backward,
    "set_eval_frame": torch._C._dynamo.eval_frame.set_eval_frame,
    "log_debug": guard.log_debug,
    "insert_node": guard.insert_node,
    "node_backward": guard.run_node_backward,
    # In the order of the C enums fc_training_state and fc_sharded_state.
    "training_states": (
        TrainingState.FORWARD,
        TrainingState.PRE_BACKWARD,
        TrainingState.POST_BACKWARD,
        TrainingState.IDLE,
    ),
    "sharded_states": (
        ShardedState.SHARDED,
        ShardedState.SHARDED_POST_FORWARD,
        ShardedState.UNSHARDED,
    ),
}
"""The arguments of ``_C.bind``."""


def _make_sample() -> tuple[torch.Tensor, Any]:
    """Returns a local tensor with an offset, and the part of a spec that torch's function reads."""
    local = torch.empty(6, device="cpu")[2:]
    meta = TensorMeta(torch.Size((16, 2)), (2, 1), local.dtype)
    return local, SimpleNamespace(tensor_meta=meta)


_C.bind(**BOUND_OBJECTS)
_C.make_dtensors(*_make_sample())  # if the result equals torch's, C makes later DTensors
guard.bind(ParamGroup, State)
