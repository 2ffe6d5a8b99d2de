"""Describes what must be equal on all ranks, and compares it before the first collective.

The description has one line for each fact: "subject<TAB>value". For gloo, its 64-bit hash is sent
in the negotiation of the process group (``csrc/transport/negotiation.h``), for NCCL through the
store of the process group (``plan_store.py``). If hashes differ, two ranks write their descriptions
to the store, and every rank raises an exception with the first line that differs.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group
from torch.distributed.fsdp import CPUOffloadPolicy

from ..version import __version__
from . import label_comparison, plan_store
from .env import OFF
from .meshes import get_group_name, list_process_groups
from .other_groups import stop_other_groups

ENVIRONMENT_SWITCH = "FSDP_C_GUARD"
STORE_TIMEOUT = timedelta(seconds=10)
"""Time for which a rank waits for the description of another rank."""
FAILURE_TIMEOUT = timedelta(seconds=2)
"""The same after an error of a collective, which the other rank may not raise."""

_OF_ANOTHER_MODEL = re.compile(
    r"of process group '([^']*)': collective mismatch: "
    r"rank (\d+) .* of another model .*, rank (\d+) "
)

_SETTINGS = (
    "_reshard_after_forward",
    "unshard_in_backward",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_unused_params",
    "_reduce_dtype",
    "_bucket_bytes",
)
_POLICY_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")

_OFF, _UNKNOWN = 0, 1
"""``FCT_PLAN_OFF`` and ``FCT_PLAN_UNKNOWN`` of ``csrc/transport/plans.h``."""

_roots = itertools.count(1)
"""Identifiers of roots. The core numbers the roots of a process group in order of first use."""

GuardMode = Literal["off", "on", "hash"]

_mode: list[GuardMode] = []
"""The value that ``set_mode`` has set; empty: that of the environment variable."""


def set_mode(mode: GuardMode) -> None:
    """Sets the mode for later roots. Replaces the environment variable."""
    _mode[:] = [mode]


def get_mode() -> GuardMode:
    """Returns ``"on"`` if ranks compare plans and collectives, ``"hash"`` if also data."""
    if _mode:
        return _mode[0]
    text = os.environ.get(ENVIRONMENT_SWITCH, "on").strip().lower()
    if text == "hash":
        return "hash"
    return "off" if text in OFF else "on"


def set_plans(states: list[Any]) -> None:
    """Passes the hashes of a root's plans to its groups. ``states``: the root's, then those below.

    Compares the plans of NCCL process groups. A difference raises RuntimeError on all their ranks.
    """
    names = {group: _list_group_names(group) for s in states for group in s._fsdp_param_groups}
    mode = get_mode()
    if mode == "off":
        for group in names:
            group._set_plans(_OFF, _OFF, _OFF, _OFF, 0, False)
        for process_group in _find_nccl(names).values():
            plan_store.compare(process_group, plan_store.OFF)
        return
    plans: dict[str, list[str]] = {}
    for name in sorted({name for group_names in names.values() for name in group_names if name}):
        plans[name] = list(_describe_plan(states, names, name))
    hashes = {name: _hash_lines(lines) for name, lines in plans.items()}
    root = next(_roots)
    for group, group_names in names.items():
        group._plans = plans
        values = (hashes[name] if name else _OFF for name in group_names)
        group._set_plans(*values, root, mode == "hash")
    differences = []
    for name, process_group in _find_nccl(names).items():
        label_comparison.prepare(process_group)
        difference = plan_store.compare(process_group, f"{hashes[name]:x}")
        if difference is None:
            label_comparison.add(process_group)
        else:
            differences.append((name, *difference))
    if differences:
        raise_difference(plans, *differences[0])


def _find_nccl(names: dict[Any, tuple[str | None, ...]]) -> dict[str, dist.ProcessGroup]:
    """Returns the NCCL process groups of groups on CUDA by name. The order is equal on all ranks,
    so that no two ranks wait for each other."""
    found = {
        name: _resolve_process_group(name)  # type: ignore[arg-type]
        for group, group_names in names.items()
        if group.device.type == "cuda"
        for name in group_names
        if name
    }
    return {name: found[name] for name in sorted(found) if plan_store.uses_nccl(found[name])}


def announce_guard(group: Any) -> None:
    """Marks that the guard is on. The root of ``group`` has not run, so there is no plan yet."""
    if get_mode() != "off":
        group_names = _list_group_names(group)
        group._set_plans(*(_UNKNOWN if name else _OFF for name in group_names), 0, False)


def raise_difference(
    plans: dict[str, list[str]], name: str, rank: int, hashes: tuple[int, int]
) -> NoReturn:
    """Raises ``RuntimeError`` with the first difference between rank 0 and ``rank``.

    ``hashes`` are those of the two ranks. All ranks of process group ``name`` call this function.
    Stops the other process groups of ``plans``.
    """
    try:
        found = _read_difference(plans, name, rank, hashes)
    except (RuntimeError, ValueError) as error:  # the store has ended, or a rank has not written
        found = f"their descriptions could not be read ({error})"
    text = (
        f"ranks 0 and {rank} of process group '{name}' have different models: {found}\n"
        "Make the model, its units and their settings equal on all ranks before the first forward "
        f"({ENVIRONMENT_SWITCH}=off on all ranks turns this check off)."
    )
    raise RuntimeError(text + stop_other_groups(text, plans))


def handle_error(error: RuntimeError, owner: Any) -> None:
    """Handles an error that the extension is about to raise: ranks may differ.

    If they do, stops the other process groups of the model (``other_groups.py``), and adds to the
    text of the error that they are stopped. If the models differ, also adds how. ``owner``: the
    group or state that raises the error.
    """
    states = owner._state_ctx.all_states if hasattr(owner, "_state_ctx") else ()
    groups = [group for state in states for group in state._fsdp_param_groups] or [owner]
    plans = getattr(groups[0], "_plans", {})
    names = {name for group in groups for name in _list_group_names(group) if name}
    stopped = stop_other_groups(str(error), names)
    added = _find_model_difference(str(error), plans) + stopped
    if added:
        error.args = (f"{error}{added}",)


def _find_model_difference(text: str, plans: dict[str, list[str]]) -> str:
    """Returns the first difference between two models for the text of an error of a collective.

    The labels of shared memory do not contain it. Every rank that raises such an error calls this
    function, so each of them writes its description.
    """
    match = _OF_ANOTHER_MODEL.search(text)
    if match is None or match[1] not in plans:
        return ""
    pair = int(match[2]), int(match[3])
    try:
        process_group = _resolve_process_group(match[1])  # type: ignore[arg-type]
        store = _get_process_group_store(process_group)
        store.set(_make_key(process_group.rank()), "\n".join(plans[match[1]]))
        first, second = _read_descriptions(store, list(map(_make_key, pair)), FAILURE_TIMEOUT)
    except (RuntimeError, ValueError):  # the store has ended, or a rank has not written
        return ""
    if first == second:  # equal models have different labels if ranks run different ones
        return ""
    return f"\nThe models differ: {find_difference(first, second, pair)}"


def _make_key(rank: int) -> str:
    """Returns the key of a rank's description after an error of a collective.

    One key per rank suffices, because the process group cannot be used after such an error.
    """
    return f"fsdp_c/plan/of/{rank}"


# ---- description ---------------------------------------------------------------------------------


def _list_group_names(group: Any) -> tuple[str | None, ...]:
    """Returns the names of the process groups of the unit's collectives.

    A process group of one rank has no collective and no plan.
    """
    return tuple(
        get_group_name(pg) if isinstance(pg, dist.ProcessGroup) and pg.size() > 1 else None
        for pg in list_process_groups(group.mesh_info, group._smaller_mesh_info)
    )


def _describe_plan(states: list[Any], names: dict[Any, Any], name: str) -> Iterator[str]:
    """Yields the facts of the groups that use process group ``name``, in the order of the units."""
    yield f"version\tfsdp_c {__version__}, torch {torch.__version__}"
    yield f"{ENVIRONMENT_SWITCH}\t{get_mode()}"
    units = [
        (state, group)
        for state in states
        for group in state._fsdp_param_groups
        if name in names[group]
    ]
    module_names = {id(module): fqn for fqn, module in states[0]._modules[0].named_modules()}
    for i, (state, group) in enumerate(units):
        unit = f"unit {group._module_fqn!r}"  # names may contain tabs and line breaks
        roles = [
            role
            for role, group_name in zip(("shard", "scatter", "replicate", "smaller"), names[group])
            if group_name == name
        ]
        params = group.fsdp_params
        yield f"unit {i}\t{group._module_fqn!r} with {len(params)} parameters ({', '.join(roles)})"
        for setting in _SETTINGS:
            yield f"{setting.lstrip('_')} of {unit}\t{getattr(group, setting)}"
        for field in _POLICY_FIELDS:
            yield f"{field} of {unit}\t{getattr(group.mp_policy, field, None)}"
        # pin_memory changes no collective and no number, and may differ between hosts.
        offloads = isinstance(group.offload_policy, CPUOffloadPolicy)
        yield f"CPU offload of {unit}\t{offloads}"
        for kind in ("forward", "backward"):
            targets = getattr(state, f"_states_to_{kind}_prefetch")
            prefetched = [
                g._module_fqn
                for s in targets
                for g in s._fsdp_param_groups
                if name in names.get(g, ())
            ]
            yield f"{kind} prefetch of {unit}\t{prefetched}"
        for k, param in enumerate(params):
            yield f"parameter {k} of {unit}\t{_describe_param(param, module_names)}"


def _describe_param(param: Any, module_names: dict[int, str]) -> str:
    """Describes one parameter. ``module_names`` has the name of each module by its ``id``.

    The names of modules replace ``_param_fqn``: a parameter that the user has replaced on one rank
    has no FQN there.
    """
    module = module_names.get(id(param._module_info.module), "")
    name = f"{module}.{param._module_info.param_name}".lstrip(".")
    meta = param._sharding_spec.tensor_meta
    frozen = "" if param.sharded_param.requires_grad else ", frozen"
    return (
        f"{name!r} {list(meta.shape)} {meta.dtype} strides {list(meta.stride)}, "
        f"{param._spmd_placements}, param_dtype {param.param_dtype}, "
        f"reduce_dtype {param.reduce_dtype}{frozen}"
    )


def _hash_lines(lines: list[str]) -> int:
    """Returns a 64-bit hash that is neither ``_OFF`` nor ``_UNKNOWN``."""
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    return max(int.from_bytes(digest, "little"), _UNKNOWN + 1)


# ---- difference ----------------------------------------------------------------------------------


def _read_difference(
    plans: dict[str, list[str]], name: str, rank: int, hashes: tuple[int, int]
) -> str:
    """Exchanges the two descriptions through the store. A key is the hash of its description."""
    process_group = _resolve_process_group(name)  # type: ignore[arg-type]
    store = _get_process_group_store(process_group)
    keys = [f"fsdp_c/plan/{value:x}" for value in hashes]
    if process_group.rank() in (0, rank):
        store.set(keys[0 if process_group.rank() == 0 else 1], "\n".join(plans[name]))
    first, second = _read_descriptions(store, keys, STORE_TIMEOUT)
    return find_difference(first, second, (0, rank))


def _read_descriptions(store: dist.Store, keys: list[str], limit: timedelta) -> list[list[str]]:
    store.wait(keys, limit)
    return [store.get(key).decode().split("\n") for key in keys]


def find_difference(first: list[str], second: list[str], ranks: tuple[int, int]) -> str:
    """Returns the first difference between the descriptions of two ranks, as text."""
    for line, other in zip(first, second):
        if line != other:
            (subject, value), (other_subject, other_value) = line.split("\t"), other.split("\t")
            has, other_has = (f"rank {rank} has" for rank in ranks)
            if subject != other_subject:
                return f"{has} {subject}: {value}; {other_has} {other_subject}: {other_value}"
            return f"{subject}: {has} {value}; {other_has} {other_value}"
    longer, rank = (first, ranks[0]) if len(first) > len(second) else (second, ranks[1])
    subject, value = longer[min(len(first), len(second))].split("\t")
    return f"only rank {rank} has {subject}: {value}"
