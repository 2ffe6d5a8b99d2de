"""Fully sharded data parallelism with a C core: FSDP2's API and numbers, less host time.

``from fsdp_c import fully_shard`` is used as ``torch.distributed.fsdp.fully_shard`` is.
"""

from __future__ import annotations

from . import built_for as built_for  # before the extension: does it fit this torch?

# isort: split
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)

from . import bind as bind  # ties the extension to torch
from . import names, optim
from .additions import GradientReductionHandle
from .clip import clip_grad_norm_
from .ema import ShardedEMA
from .explain import explain
from .full_params import full_params
from .fully_shard import fully_shard
from .generate import generate_with
from .install import install, is_active, uninstall
from .load import load_full_state_dict
from .mixed_precision import MixedPrecisionPolicy
from .no_sync import no_sync
from .param_group import ParamGroup as ParamGroup
from .plan import plan
from .replicate import replicate
from .report import Explanation, UnitReport
from .state import State as State
from .timeline import StepTrace, trace
from .transport import release_memory, set_bucket_cap, set_transport
from .version import __version__ as __version__
from .wrap import auto_shard

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
    "set_transport",
    "trace",
    "uninstall",
]
