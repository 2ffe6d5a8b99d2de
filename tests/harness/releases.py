"""FSDP2 features of the installed torch, for tests that also run on older releases.

A test that needs a newer torch is marked ``@pytest.mark.torch("2.12")`` and skipped below it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.distributed.fsdp._fully_shard._fsdp_common as common

DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", None)
ShardPlacementResult: Any = getattr(common, "ShardPlacementResult", None)

ALL_GATHER_FUNCTION = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)
"""Name of the torch.distributed function that FSDP2 calls for all-gathers."""

REDUCE_SCATTER_FUNCTION = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""Name of the torch.distributed function that FSDP2 calls for reduce-scatters."""


def groups_of(state: Any) -> list[Any]:
    """Returns the parameter groups of a torch or fsdp_c state. In torch 2.11 a state has at most
    one group, in the attribute ``_fsdp_param_group``."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def has(release: str) -> bool:
    """Returns whether the installed torch is ``release`` (such as "2.12") or newer."""
    installed = torch.__version__.split(".")
    return tuple(map(int, installed[:2])) >= tuple(map(int, release.split(".")))
