"""Maps settings to the features of FSDP2 that they need, and lists the supported features.

The wide grid contains only settings whose features are all supported. To test others, set
``FSDP_C_PARITY_FEATURES`` to ``all`` or to names separated by commas.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from meshes import has_tensor_dim, is_hsdp, is_spmd
from releases import has
from setting import Setting

FEATURES: dict[str, Callable[[Setting], bool]] = {
    "hsdp": lambda s: is_hsdp(s.mesh),
    "all_reduce_sync": lambda s: (
        s.schedule.startswith("no_all_reduce") or s.schedule == "mixed_sync"
    ),
    "tensor_parallel": lambda s: has_tensor_dim(s.mesh),
    "dp_mesh_dims": lambda s: is_spmd(s.mesh),
    "reshard_int": lambda s: isinstance(s.reshard, str),  # such as "2", which stands for an integer
    "shard_placement": lambda s: s.placement in ("last", "mixed"),
    "param_meshes": lambda s: s.placement == "experts",
    "cpu_offload": lambda s: s.offload,
    "custom_comm": lambda s: s.comm == "custom",
    "group_memory": lambda s: s.comm == "memory",
    "separate_group": lambda s: s.comm == "separate",
    "input_buffers": lambda s: s.comm == "buffers",
    "reduce_hook": lambda s: s.reduce_hook,
    "unused_params": lambda s: s.zeros,
    "unshard_async_op": lambda s: s.async_op,
    "unshard_in_backward": lambda s: s.keep_sharded,
    "optim_event": lambda s: s.optim_event,
    "extensions": lambda s: s.extension is not None,
    "forward_methods": lambda s: s.family == "methods",
    "partial_groups": lambda s: s.family in ("chunked", "partial"),
    "shared_context": lambda s: s.family == "pair",
    "pipeline": lambda s: s.schedule == "pipeline",
    "inference": lambda s: s.inference,
    "compile": lambda s: s.compiled is not None,
    "dataclasses": lambda s: s.family == "structures",
    "reset": lambda s: s.reset,
}

LATER = {
    "dp_mesh_dims": "2.12",
    "param_meshes": "2.12",
    "separate_group": "2.13",
    "input_buffers": "2.13",
    "unused_params": "2.13",
    "partial_groups": "2.13",
    "dataclasses": "2.12",  # as outputs
    "reset": "2.13",
}
"""The torch releases that added features which 2.11 lacks."""

SUPPORTED = frozenset(name for name in FEATURES if has(LATER.get(name, "2.11")))


def enabled_features() -> frozenset[str]:
    """Returns the features that the wide grid may use: supported ones and those requested in the
    environment."""
    requested = os.environ.get("FSDP_C_PARITY_FEATURES", "")
    if requested == "all":
        return frozenset(FEATURES)
    names = {name for name in requested.split(",") if name}
    unknown = names - set(FEATURES)
    if unknown:
        raise ValueError(f"FSDP_C_PARITY_FEATURES: {sorted(unknown)} not in {sorted(FEATURES)}")
    return SUPPORTED | names


def features_of(setting: Setting) -> frozenset[str]:
    """Returns the features that a setting uses."""
    return frozenset(name for name, uses in FEATURES.items() if uses(setting))
