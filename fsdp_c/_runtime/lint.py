"""Warnings about configurations that train silently wrong or waste memory.

Most checks run at the first forward of a root. An optimizer is checked at its first step, and the
parameters of a sharded module when they are registered. Rank 0 logs each warning once, with names
and a remedy, with torch's FSDP2 logger. No Python warning is issued, so that ``-W error`` has the
same effect as with torch. A failing check is logged at debug level and never stops training.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._compat import patches
from . import fsdp_units
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
    much larger than the median, ``DistributedDataParallel`` inside. Never raises.
    """
    try:
        for text in (*check_environment(), *_check_units(root)):
            warn_once(text)
    except Exception:
        logger.debug("fsdp_c: a check of the model failed", exc_info=True)


def check_environment() -> list[str]:
    """Returns a warning if ``FSDP_C_TRANSPORT`` has a value that ``negotiation.cpp`` ignores."""
    choice = os.environ.get("FSDP_C_TRANSPORT", "")
    if choice in ("", "direct", "gloo"):
        return []
    return [f'FSDP_C_TRANSPORT={choice} has no effect: the values are "direct" and "gloo"']


def _check_units(root: nn.Module) -> list[str]:
    groups = [(name, group) for name, _, group in iterate_groups(root)]
    if not all(isinstance(group.mesh_info, FSDPMeshInfo) for _, group in groups):
        return []  # replicate() makes one unit
    return [
        *check_blocks_in_root(root, groups),
        *check_policies(root, groups),
        *check_large_units(root, groups),
        *check_data_parallel(root),
    ]


def check_arguments(mp_policy: Any, offload_policy: Any, ignored_params: Any) -> None:
    """Warns about arguments of ``fully_shard`` that torch accepts but that have no effect."""
    if isinstance(mp_policy, type):
        warn_once(f"mp_policy is the class {mp_policy.__name__}: pass an object, with the dtypes")
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        warn_once(f"offload_policy={offload_policy!r} offloads nothing: pass CPUOffloadPolicy()")
    if isinstance(ignored_params, (set, frozenset)):
        others = {type(item).__name__ for item in ignored_params if not torch.is_tensor(item)}
        if others:
            warn_once(
                f"ignored_params has a {', a '.join(sorted(others))} in it, which ignores nothing: "
                "it is a set of parameters, set(module.parameters())"
            )


# ---- replaced parameters: recorded at registration -----------------------------------------------

# No weak references to parameters: torch.utils.swap_tensors refuses tensors that have one.
_params_by_uid: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Maps torch's uid of an original parameter to the ``FSDPParam`` that replaced it."""
_params_by_slot: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Maps a module to its sharded parameters: name to weak reference to the ``FSDPParam``."""
_replaced_slots: dict[tuple[int, str], tuple[Any, int]] = {}
"""Maps (id of module, name) to the ``FSDPParam`` and the ``id`` of a parameter registered since."""
_checked_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def record_sharded_params(fsdp_params: Iterable[Any]) -> None:
    """Records the ``FSDPParam`` objects that replaced parameters, for the later checks."""
    for fsdp_param in fsdp_params:
        reference = weakref.ref(fsdp_param)
        _params_by_uid[fsdp_param._orig_param_uid] = fsdp_param
        for module, name in iterate_slots(fsdp_param):
            _params_by_slot.setdefault(module, {})[name] = reference


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    slots = _params_by_slot.get(module)
    fsdp_param = slots[name]() if slots is not None and name in slots else None
    if fsdp_param is not None and all(
        own is not parameter for own in list_registered_params(fsdp_param)
    ):
        _replaced_slots[id(module), name] = (weakref.ref(fsdp_param), id(parameter))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step inlines its hooks, and this code would break the graph
    if _replaced_slots:
        _check_replaced_slots()
    if optimizer not in _checked_optimizers:
        _checked_optimizers.add(optimizer)
        _check_optimizer(optimizer)


# Compiled code calls the hook without tracing it.
_on_registration._torchdynamo_disable = True  # type: ignore[attr-defined]

patches.apply_with_first_model(
    "parameter registration hook: lint",
    lambda: patches.add_hook(register_module_parameter_registration_hook, _on_registration),
)
patches.apply_with_first_model(
    "optimizer step pre hook: lint",
    lambda: patches.add_hook(register_optimizer_step_pre_hook, _before_step),
)


def _check_replaced_slots() -> None:
    lost = []
    for reference, number in _replaced_slots.values():
        fsdp_param = reference()
        # load_state_dict(assign=True) registers parameters that the unit then uses.
        if fsdp_param is not None and id(fsdp_param.sharded_param) != number:
            lost.append(fsdp_param._param_fqn or fsdp_param._module_info.param_name)
    _replaced_slots.clear()
    if lost:
        warn_once(_format_replaced(lost))


def _format_replaced(names: list[str]) -> str:
    return (
        f"{format_names(names)} were replaced after sharding: the module holds another object than its "
        "unit, and the optimizer may update one while forward gathers the other. Change values in "
        "place, or load them with load_state_dict"
    )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stale = []
    for parameter in held:
        fsdp_param = _params_by_uid.get(getattr(parameter, "_fsdp_orig_uid", -1))
        if fsdp_param is not None and fsdp_param.sharded_param is not parameter:
            stale.append(fsdp_param._param_fqn or fsdp_param._module_info.param_name)
    if stale:
        warn_once(
            f"{type(optimizer).__name__} holds {len(stale)} of {len(held)} parameters as they were "
            f"before sharding ({format_names(stale)}): it was built before fully_shard, which replaces "
            "parameters, and does not train them. Build it after the last fully_shard"
        )


# ---- the units of a model ------------------------------------------------------------------------


def iterate_groups(model: nn.Module) -> Iterator[tuple[str, FSDPState, Any]]:
    """Yields (name, state, group) for every group below ``model``, in module order."""
    names: dict[FSDPState, list[str]] = {}
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        if state is not None:
            names.setdefault(state, []).append(name or "(root)")
    for state, of_state in names.items():
        groups = fsdp_units.get_groups(state)
        for index, group in enumerate(groups):
            suffix = f" [{index}]" if len(groups) > 1 else ""
            yield ", ".join(of_state) + suffix, state, group


def get_param_names(model: nn.Module, groups: list[tuple[str, Any]]) -> dict[int, str]:
    """Maps the ``id`` of each ``FSDPParam`` to the parameter's name, from the root."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    names = {}
    for _, param in iterate_params(groups):
        info = param._module_info
        prefix = prefixes.get(id(info.module))
        names[id(param)] = f"{prefix}.{info.param_name}" if prefix else info.param_name
    return names


def iterate_params(groups: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields (name of the unit, ``FSDPParam``) for all parameters of ``groups``."""
    for name, group in groups:
        for param in group.fsdp_params:
            yield name, param


def list_registered_params(param: Any) -> list[Any]:
    """Returns the parameter objects that a unit registers for one ``FSDPParam``."""
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    values = (getattr(param, name, None) for name in names)
    return [value for value in values if value is not None]


def check_optimizer_params(
    model: nn.Module, groups: list[tuple[str, Any]], optimizer: torch.optim.Optimizer | None
) -> list[str]:
    """Reports parameters of ``optimizer`` that ``model`` does not have, or that it lacks."""
    if optimizer is None:
        return []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sharded = {id(param.sharded_param) for _, param in iterate_params(groups)}
    temporary = {
        id(p) for _, param in iterate_params(groups) for p in list_registered_params(param)
    } - sharded
    own = sharded | ({id(parameter) for parameter in model.parameters()} - temporary)
    reports = []
    foreign = len(held - own)
    if foreign:
        reports.append(
            f"the optimizer holds {foreign} of {len(held)} parameters that are not the model's: "
            "it was built before sharding, which replaces parameters, and will not train them. "
            "Build it after the last fully_shard"
        )
    names = get_param_names(model, groups)
    missing = [
        names[id(param)]
        for _, param in iterate_params(groups)
        if param.sharded_param.requires_grad and id(param.sharded_param) not in held
    ]
    if missing and not foreign:
        reports.append(
            f"the optimizer does not hold {format_names(missing)}, which require gradients"
        )
    return reports


def iterate_slots(param: Any) -> Iterator[tuple[nn.Module, str]]:
    """Yields the (module, name) pairs under which a parameter is registered."""
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names)


def check_replaced_params(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports modules that hold another object than their unit registered."""
    names = get_param_names(model, groups)
    replaced = [
        names[id(param)]
        for _, param in iterate_params(groups)
        if any(
            all(getattr(module, slot, None) is not face for face in list_registered_params(param))
            for module, slot in iterate_slots(param)
        )
    ]
    if not replaced:
        return []
    return [_format_replaced(replaced)]


def check_unmanaged_params(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports parameters that require gradients and belong to no unit."""
    slots = {
        (id(m), slot) for _, param in iterate_params(groups) for m, slot in iterate_slots(param)
    }
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and (id(module), name) not in slots
    ]
    if not names:
        return []
    return [
        f"{format_names(names)} are in no unit (ignored, or added after fully_shard): their gradients are "
        "not reduced over ranks"
    ]


def check_tied_weights(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports parameters that were tied before sharding and are in different units."""
    names = get_param_names(model, groups)
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, param in iterate_params(groups):
        owners.setdefault(param._orig_param_uid, []).append((name, names[id(param)]))
    return [
        f"{format_names([param for _, param in tied])} were one parameter before sharding and are in "
        f"different units ({', '.join(unit for unit, _ in tied)}): put their modules into one "
        "unit, fully_shard([a, b]), or into the root"
        for tied in owners.values()
        if len(tied) > 1
    ]


def get_original_class(module: nn.Module) -> type:
    """Returns the class that the module had before it was sharded."""
    kind = type(module)
    if isinstance(module, FSDPModule):
        return kind.__mro__[kind._orig_cls_mro_index]  # type: ignore[attr-defined]
    return kind


def _iterate_repeated_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields layers with submodules that share a container with others of their class."""
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
    of_root = {
        id(module)
        for _, group in groups
        if group in state._fsdp_param_groups
        for param in group.fsdp_params
        for module, _ in iterate_slots(param)
    }
    left = [
        name
        for name, layer in _iterate_repeated_layers(model)
        if any(id(module) in of_root for module in layer.modules())
    ]
    if not left:
        return []
    return [
        f"{format_names(left)} are repeated layers but no units: their parameters are gathered with the "
        "root's and stay unsharded through forward and backward. Call fully_shard on each before "
        "the root"
    ]


def get_compute_dtype(param: Any) -> torch.dtype:
    """Returns the dtype in which a parameter is gathered."""
    dtype: torch.dtype = param.param_dtype or param.orig_dtype
    return dtype


def count_gathered_bytes(group: Any) -> int:
    """Returns the bytes of a unit's all-gather output, including padding."""
    world = group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1
    sizes = (p.padded_numel * get_compute_dtype(p).itemsize for p in group.fsdp_params)
    return int(sum(sizes)) * int(world)


def check_policies(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports blocks that compute in another dtype than the root's own parameters."""
    state = _get_module_fsdp_state(model)
    if state is None:
        return []
    of_root = {id(group) for group in state._fsdp_param_groups}
    wanted = {group.mp_policy.param_dtype for _, group in groups if id(group) not in of_root}
    own = [param for group in state._fsdp_param_groups for param in group.fsdp_params]
    if state._mp_policy.param_dtype is not None or not own or wanted - {None} != wanted:
        return []
    names = get_param_names(model, groups)
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wanted))
    return [
        f"the blocks compute in {dtypes}, but {format_names([names[id(param)] for param in own])} in the "
        "root in full precision: pass mp_policy to the root's fully_shard, too"
    ] * bool(wanted)


def check_large_units(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Reports units that gather over four times as many bytes as the median unit."""
    sizes = {name: count_gathered_bytes(group) for name, group in groups}
    if len(sizes) < 3:
        return []
    import statistics  # imported here to keep `import fsdp_c` fast

    median = statistics.median(sizes.values())
    reports = []
    for name, group in groups:
        size = sizes[name]
        if size < _LARGE_BYTES or size <= _LARGE_FACTOR * median or len(group.fsdp_params) < 2:
            continue
        names = get_param_names(model, groups)
        largest = sorted(group.fsdp_params, key=lambda param: -param.padded_numel)[:2]
        reports.append(
            f"the unit '{name}' gathers {size / 2**20:.0f} MiB, {size / median:.1f} times what the "
            f"median unit does, mostly {format_names([names[id(param)] for param in largest])}: units of "
            "their own for these modules (as fsdp_c.auto_shard makes them) lower the peak"
        )
    return reports


def check_data_parallel(model: nn.Module) -> list[str]:
    """Reports ``DistributedDataParallel`` modules around sharded parameters."""
    wrapped = [name for name, m in model.named_modules() if isinstance(m, DistributedDataParallel)]
    return [
        f"{format_names([name or type(model).__name__ for name in wrapped])} are DistributedDataParallel, "
        "whose gradients are reduced twice or not at all: shard model.module instead"
    ] * bool(wrapped)
