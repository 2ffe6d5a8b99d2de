"""Fully sharded data parallelism with a C core: FSDP2's API and numbers, with less host time.

``fsdp_c.fully_shard`` replaces ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

# Checks the torch release before the extension is loaded.
from ._compat import build_info as build_info

# isort: split
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)

from . import names, optim
from ._runtime import bindings as bindings  # passes Python functions to the extension
from ._runtime.mixed_precision import MixedPrecisionPolicy
from ._runtime.param_group import ParamGroup as ParamGroup
from ._runtime.state import State as State
from ._runtime.torch215_methods import GradientReductionHandle
from .clip import clip_grad_norm_
from .full_params import full_params
from .fully_shard import fully_shard
from .generate import generate_with
from .guard import set_guard
from .install import install, is_active, uninstall
from .no_sync import no_sync
from .replicate import replicate
from .transport import release_memory, set_bucket_cap, set_reduction_overlap, set_transport
from .version import __version__ as __version__

if TYPE_CHECKING:
    from ._tools.report import Explanation, UnitReport
    from ._tools.timeline import StepTrace
    from .auto_shard import auto_shard
    from .checkpoint import load_full_state_dict
    from .ema import ShardedEMA
    from .explain import explain
    from .plan import plan
    from .trace import trace

__all__ = [
    "CPUOffloadPolicy",
    "Explanation",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedEMA",
    "StepTrace",
    "UnitReport",
    "UnshardHandle",
    "auto_shard",
    "clip_grad_norm_",
    "explain",
    "full_params",
    "fully_shard",
    "generate_with",
    "install",
    "is_active",
    "load_full_state_dict",
    "names",
    "no_sync",
    "optim",
    "plan",
    "register_fsdp_forward_method",
    "release_memory",
    "replicate",
    "set_bucket_cap",
    "set_guard",
    "set_reduction_overlap",
    "set_transport",
    "trace",
    "uninstall",
]

_LAZY_NAMES = {
    "Explanation": "_tools.report",
    "ShardedEMA": "ema",
    "StepTrace": "_tools.timeline",
    "UnitReport": "_tools.report",
    "auto_shard": "auto_shard",
    "explain": "explain",
    "load_full_state_dict": "checkpoint",
    "plan": "plan",
    "trace": "trace",
}
"""Maps names that are imported at their first use to their modules.

These modules would double the time of ``import fsdp_c``, and most ranks do not use them.
"""

_LAZY_MODULES = ("checkpoint", "ema", "policies", "wrap")
"""Public modules that are imported at their first use as an attribute of the package."""


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # `fsdp_c.plan` is a function. The import of the submodule `plan` sets the attribute, which
        # must not replace the function.
        if not (name in _LAZY_NAMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _LAZY_NAMES:
        value = getattr(importlib.import_module(f".{_LAZY_NAMES[name]}", __name__), name)
    elif name in _LAZY_MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
