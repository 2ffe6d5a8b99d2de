"""Fully sharded data parallelism with a C core: FSDP2's API and numbers, less host time.

``from fsdp_c import fully_shard`` is used as ``torch.distributed.fsdp.fully_shard`` is.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _cast_fp_tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors

from . import _C, guard
from .compat import collect_grad_tensors, replace_grad_tensors


def _cast_tree(dtype: torch.dtype, tree: Any) -> Any:
    """``tree`` with every floating-point tensor cast to ``dtype``; containers are rebuilt."""
    return _apply_to_tensors(functools.partial(_cast_fp_tensor, dtype), tree)


def _warn_view_output(state: Any) -> None:
    """Warns that a wrapped module returned a view (an in-place op on it would lose the hook)."""
    names = ", ".join(type(module).__name__ for module in state._modules) or "?"
    warnings.warn(
        f"FSDP2-wrapped module ({names}) returned a view tensor. An in-place op on this view "
        "drops the pre-backward hook, so that the parameters are not gathered for backward. "
        "Use out-of-place operations or return output.clone().",
        UserWarning,
        stacklevel=3,
    )


_C.bind(
    dtensor_class=DTensor,
    dtensor_new=getattr(torch.Tensor, "_dtensor__new__", None) or DTensor,
    collect_grad_tensors=collect_grad_tensors,
    replace_grad_tensors=replace_grad_tensors,
    cast_tree=_cast_tree,
    warn_view_output=_warn_view_output,
    set_eval_frame=torch._C._dynamo.eval_frame.set_eval_frame,
    log_debug=guard.log_debug,
    insert_node=guard.insert_node,
    node_backward=guard.node_backward,
    # In the order of the C enums fc_training_state and fc_sharded_state.
    training_states=(
        TrainingState.FORWARD,
        TrainingState.PRE_BACKWARD,
        TrainingState.POST_BACKWARD,
        TrainingState.IDLE,
    ),
    sharded_states=(
        ShardedState.SHARDED,
        ShardedState.SHARDED_POST_FORWARD,
        ShardedState.UNSHARDED,
    ),
)

from . import names  # noqa: E402  (these need the bound extension)
from .additions import GradientReductionHandle  # noqa: E402
from .clip import clip_grad_norm_  # noqa: E402
from .ema import ShardedEMA  # noqa: E402
from .explain import Explanation, UnitReport, explain  # noqa: E402
from .full_params import full_params  # noqa: E402
from .fully_shard import fully_shard  # noqa: E402
from .generate import generate_with  # noqa: E402
from .install import install, uninstall  # noqa: E402
from .load import load_full_state_dict  # noqa: E402
from .mixed_precision import MixedPrecisionPolicy  # noqa: E402
from .no_sync import no_sync  # noqa: E402
from .param_group import ParamGroup  # noqa: E402
from .replicate import replicate  # noqa: E402
from .state import State  # noqa: E402
from .wrap import auto_shard  # noqa: E402

guard.bind(ParamGroup, State)

__version__ = "0.1.0"

__all__ = [
    "CPUOffloadPolicy",
    "Explanation",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedEMA",
    "UnitReport",
    "UnshardHandle",
    "auto_shard",
    "clip_grad_norm_",
    "explain",
    "full_params",
    "fully_shard",
    "generate_with",
    "install",
    "load_full_state_dict",
    "names",
    "no_sync",
    "register_fsdp_forward_method",
    "replicate",
    "uninstall",
]
