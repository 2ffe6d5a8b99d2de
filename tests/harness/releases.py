"""What the installed torch has of FSDP2, for tests that also run on older releases.

A test that needs more is marked ``@pytest.mark.torch("2.12")``, and skipped, visibly, below that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.distributed.fsdp._fully_shard._fsdp_common as common

DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", None)
ShardPlacementResult: Any = getattr(common, "ShardPlacementResult", None)

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""The name of the function of torch.distributed that FSDP2 gathers with."""

SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The name of the one that it reduces with."""


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of a state of torch's or ours; torch 2.11 knew one at most."""
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:
        found = [state._fsdp_param_group]
    return [group for group in found if group is not None]


def has(release: str) -> bool:
    """Whether the installed torch is of this release ("2.12") or a newer one."""
    installed = torch.__version__.split(".")
    return tuple(map(int, installed[:2])) >= tuple(map(int, release.split(".")))
