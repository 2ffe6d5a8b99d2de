"""The FSDP units and parameter groups of a model, of torch and of fsdp_c."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from releases import groups_of
from torch.distributed.fsdp import FSDPModule


def units_of(model: nn.Module) -> list[Any]:
    """Returns the modules to which ``fully_shard`` or ``replicate`` was applied, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def param_groups_of(model: nn.Module) -> list[Any]:
    """Returns the parameter groups of all units, those of the root first."""
    return [group for unit in units_of(model) for group in groups_of(unit._get_fsdp_state())]


def set_last_microbatch(model: Any, last: bool) -> None:
    """Sets whether later backwards finalize, reshard and reduce gradients, as the last backward of
    a step does."""
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)
    model.set_requires_gradient_sync(last)
