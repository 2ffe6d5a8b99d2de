"""Warnings about configurations that train silently wrong or waste memory.

:func:`check_model` runs at the first forward of a root. ``lint_params.py`` has the checks that run
later. Rank 0 logs each warning once, with names and a remedy, with torch's FSDP2 logger. No Python
warning is issued, so that ``-W error`` has the same effect as with torch. A failing check is logged
at debug level and never stops training.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.nn.parallel import DistributedDataParallel

from .env import OFF
from .fsdp_units import (
    count_gathered_bytes,
    get_compute_dtype,
    get_original_class,
    get_param_names,
    iterate_groups,
    iterate_params,
    iterate_registrations,
)
from .hints import format_names

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

_LARGE_FACTOR = 4
_LARGE_BYTES = 16 * 2**20  # bytes; smaller units are never reported


# ---- logging -------------------------------------------------------------------------------------

_logged: set[str] = set()  # texts that were logged


def warn_once(text: str) -> None:
    """Logs ``text`` as a warning on rank 0, once per process."""
    if text in _logged or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _logged.add(text)
    logger.warning("fsdp_c: %s", text)


def check_model(root: nn.Module) -> None:
    """Logs one warning per likely mistake in a sharded model, before its first forward.

    The mistakes: repeated layers in the root unit, mixed-precision policies on blocks only, units
    much larger than the median, ``DistributedDataParallel`` inside. Environment variables with
    unknown values are reported, too. Never raises.
    """
    with log_failure():
        for text in check_environment():
            warn_once(text)
        groups = [(name, group) for name, _, group in iterate_groups(root)]
        if not all(isinstance(group.mesh_info, FSDPMeshInfo) for _, group in groups):
            return  # the checks are about sharding
        for check in (check_blocks_in_root, check_policies, check_large_units, check_data_parallel):
            with log_failure():
                for text in check(root, groups):
                    warn_once(text)


@contextlib.contextmanager
def log_failure() -> Iterator[None]:
    """Logs an exception of a check at level DEBUG instead of raising it."""
    try:
        yield
    except Exception:
        logger.debug("fsdp_c: a check of the model failed", exc_info=True)


def check_environment() -> list[str]:
    """Returns warnings about values of ``FSDP_C_TRANSPORT`` and ``FSDP_C_GUARD`` without effect."""
    warnings = []
    transport = os.environ.get("FSDP_C_TRANSPORT", "")
    if transport not in ("", "direct", "gloo"):
        warnings.append(
            f'FSDP_C_TRANSPORT={transport} has no effect: the values are "direct" and "gloo"'
        )
    guard = os.environ.get("FSDP_C_GUARD", "")
    if guard.strip().lower() not in (*OFF, "hash", "on", "1", "yes", "true"):
        warnings.append(
            f'FSDP_C_GUARD={guard} has no effect: the values are "on", "off" and "hash"'
        )
    return warnings


def check_arguments(mp_policy: Any, offload_policy: Any, ignored_params: Any) -> None:
    """Warns about arguments of ``fully_shard`` that torch accepts but that have no effect."""
    if isinstance(mp_policy, type):
        warn_once(f"mp_policy is the class {mp_policy.__name__}: pass an instance with the dtypes")
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        warn_once(f"offload_policy={offload_policy!r} offloads nothing: pass CPUOffloadPolicy()")
    if isinstance(ignored_params, (set, frozenset)):
        other_types = {type(item).__name__ for item in ignored_params if not torch.is_tensor(item)}
        if other_types:
            warn_once(
                f"ignored_params contains a {', a '.join(sorted(other_types))}, which ignores "
                "nothing: pass a set of parameters, set(module.parameters())"
            )


# ---- the units of a model ------------------------------------------------------------------------


def _iterate_repeated_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields layers with submodules whose container has another layer of the same class."""
    for prefix, container in model.named_modules():
        if not issubclass(get_original_class(container), (nn.ModuleList, nn.Sequential)):
            continue
        layers = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in container.named_children()
            if any(True for _ in child.children())
        ]
        counts = Counter(get_original_class(layer) for _, layer in layers)
        yield from (
            (name, layer) for name, layer in layers if counts[get_original_class(layer)] > 1
        )


def check_blocks_in_root(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports repeated layers whose parameters are in the root's unit."""
    state = _get_module_fsdp_state(model)
    if state is None:
        return []
    root_ids = {
        id(module)
        for _, group in groups
        if group in state._fsdp_param_groups
        for param in group.fsdp_params
        for module, _ in iterate_registrations(param)
    }
    layers_in_root = [
        name
        for name, layer in _iterate_repeated_layers(model)
        if any(id(module) in root_ids for module in layer.modules())
    ]
    if not layers_in_root:
        return []
    if len(layers_in_root) == 1:
        phrase = "is a repeated layer but no unit: its"
    else:
        phrase = "are repeated layers but no units: their"
    return [
        f"{format_names(layers_in_root)} {phrase} parameters are gathered with the root's and stay "
        "unsharded through forward and backward. Call fully_shard on each before the root"
    ]


def check_policies(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports blocks that compute in another dtype than the root's own parameters."""
    state = _get_module_fsdp_state(model)
    if state is None:
        return []
    root_ids = {id(group) for group in state._fsdp_param_groups}
    unit_dtypes = {group.mp_policy.param_dtype for _, group in groups if id(group) not in root_ids}
    root_params = [
        param
        for group in state._fsdp_param_groups
        for param in group.fsdp_params
        if get_compute_dtype(param) not in unit_dtypes
    ]
    if (
        state._mp_policy.param_dtype is not None
        or not root_params
        or not unit_dtypes
        or None in unit_dtypes
    ):
        return []
    names = get_param_names(model, groups)
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in unit_dtypes))
    return [
        f"the blocks compute in {dtypes}, but {format_names([names[id(p)] for p in root_params])} "
        "in the root in another dtype: pass mp_policy to the root's fully_shard, too"
    ]


def check_large_units(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports units that gather over four times as many bytes as the median unit.

    Units without elements do not count.
    """
    sizes = {name: size for name, group in groups if (size := count_gathered_bytes(group)) > 0}
    if len(sizes) < 3:
        return []
    import statistics  # imported here to keep `import fsdp_c` fast

    median = statistics.median(sizes.values())
    reports = []
    for name, group in groups:
        size = sizes.get(name, 0)
        if size < _LARGE_BYTES or size <= _LARGE_FACTOR * median or len(group.fsdp_params) < 2:
            continue
        names = get_param_names(model, groups)
        largest = sorted(group.fsdp_params, key=lambda param: -param.padded_numel)[:2]
        reports.append(
            f"the unit '{name}' gathers {size / 2**20:.0f} MiB, {size / median:.1f} times what the "
            f"median unit does, mostly {format_names(names[id(p)] for p in largest)}: units of "
            "their own for these modules (as fsdp_c.auto_shard makes them) lower the peak"
        )
    return reports


def check_data_parallel(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports ``DistributedDataParallel`` modules around sharded parameters."""
    owners = {id(m) for _, param in iterate_params(groups) for m, _ in iterate_registrations(param)}
    ddp_names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
        and any(id(inner) in owners for inner in module.modules())
    ]
    if not ddp_names:
        return []
    verb = "is" if len(ddp_names) == 1 else "are"
    return [
        f"{format_names([name or type(model).__name__ for name in ddp_names])} {verb} "
        "DistributedDataParallel around sharded parameters: their gradients are reduced twice or "
        "not at all. Shard model.module instead"
    ]
