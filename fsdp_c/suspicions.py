"""What trains nothing, or too much at once, and raises no exception: found, and said once by name.

Most of it is looked for when a root is initialized, in its first forward. Optimizers are looked at
in their first step, and parameters that are put into a sharded module when they are registered. It
is said on rank 0 with torch's logger of FSDP2, never as a Python warning: a job that runs with
``-W error`` runs as it does on torch.
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

from . import units
from ._compat import patches
from .notes import some

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

_TIMES_THE_MEDIAN = 4
_LARGE = 16 * 2**20  # bytes below which a unit is nobody's concern


# ---- saying it -----------------------------------------------------------------------------------

_said: set[str] = set()


def say(text: str) -> None:
    """Logs a warning on rank 0, each text once in a process."""
    if text in _said or (dist.is_initialized() and dist.get_rank() != 0):
        return
    _said.add(text)
    logger.warning("fsdp_c: %s", text)


def look_over(root: nn.Module) -> None:
    """Says what is suspicious about a model that is about to run for the first time.

    Models may be of any kind: whatever goes wrong in here is none of their concern.
    """
    try:
        for text in (*unknown_switches(), *_suspicions(root)):
            say(text)
    except Exception:
        logger.debug("fsdp_c: not looked over", exc_info=True)


def unknown_switches() -> list[str]:
    """What ``FSDP_C_TRANSPORT`` says where ``negotiation.cpp``, which reads it, does not know it."""
    choice = os.environ.get("FSDP_C_TRANSPORT", "")
    if choice in ("", "direct", "gloo"):
        return []
    return [f'FSDP_C_TRANSPORT={choice} changes nothing: it knows "direct" and "gloo"']


def _suspicions(root: nn.Module) -> list[str]:
    groups = [(name, group) for name, _, group in groups_of(root)]
    if not all(isinstance(group.mesh_info, FSDPMeshInfo) for _, group in groups):
        return []  # replicas have one unit
    return [
        *blocks_in_root(root, groups),
        *policies_apart(root, groups),
        *large_units(root, groups),
        *data_parallel_inside(root),
    ]


def look_at_arguments(mp_policy: Any, offload_policy: Any, ignored_params: Any) -> None:
    """Says which arguments of ``fully_shard`` are of a kind that it takes and does nothing with."""
    if isinstance(mp_policy, type):
        say(f"mp_policy is the class {mp_policy.__name__}: pass an object, with the dtypes")
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        say(f"offload_policy={offload_policy!r} offloads nothing: pass CPUOffloadPolicy()")
    if isinstance(ignored_params, (set, frozenset)):
        others = {type(one).__name__ for one in ignored_params if not torch.is_tensor(one)}
        if others:
            say(
                f"ignored_params has a {', a '.join(sorted(others))} in it, which ignores nothing: "
                "it is a set of parameters, set(module.parameters())"
            )


# ---- what was replaced: watched while it happens -------------------------------------------------

# No weak references to parameters anywhere: torch.utils.swap_tensors refuses tensors that have one.
_originals: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""What torch numbers a parameter by that is sharded -> the unit's record of it."""
_slots: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
_registered: dict[tuple[int, str], tuple[Any, int]] = {}
"""Place -> the unit's record, and the ``id`` of the parameter that was put there since."""
_looked_at: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch(stand_ins: Iterable[Any]) -> None:
    """Remembers what was sharded: the records of units in the place of parameters."""
    for stand_in in stand_ins:
        reference = weakref.ref(stand_in)
        _originals[stand_in._orig_param_uid] = stand_in
        for module, name in slots_of(stand_in):
            _slots.setdefault(module, {})[name] = reference


def _on_registration(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    slots = _slots.get(module)
    stand_in = slots[name]() if slots is not None and name in slots else None
    if stand_in is not None and all(face is not parameter for face in faces_of(stand_in)):
        _registered[id(module), name] = (weakref.ref(stand_in), id(parameter))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return  # a compiled step inlines its hooks: anything else here would break its graph
    if _registered:
        _look_at_registered()
    if optimizer not in _looked_at:
        _looked_at.add(optimizer)
        _look_at_optimizer(optimizer)


# Compiled code calls it as it is.
_on_registration._torchdynamo_disable = True  # type: ignore[attr-defined]

patches.apply_with_first_model(
    "parameter registration hook: lint",
    lambda: patches.add_hook(register_module_parameter_registration_hook, _on_registration),
)
patches.apply_with_first_model(
    "optimizer step pre hook: lint",
    lambda: patches.add_hook(register_optimizer_step_pre_hook, _before_step),
)


def _look_at_registered() -> None:
    lost = []
    for reference, number in _registered.values():
        stand_in = reference()
        # load_state_dict(assign=True) and the like: the unit has taken it over.
        if stand_in is not None and id(stand_in.sharded_param) != number:
            lost.append(stand_in._param_fqn or stand_in._module_info.param_name)
    _registered.clear()
    if lost:
        say(_replaced(lost))


def _replaced(names: list[str]) -> str:
    return (
        f"{some(names)} were replaced after sharding: the module holds another object than its "
        "unit, so that training and gathering part ways. Change values in place, or load them with "
        "load_state_dict"
    )


def _look_at_optimizer(optimizer: torch.optim.Optimizer) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    stale = []
    for parameter in held:
        stand_in = _originals.get(getattr(parameter, "_fsdp_orig_uid", -1))
        if stand_in is not None and stand_in.sharded_param is not parameter:
            stale.append(stand_in._param_fqn or stand_in._module_info.param_name)
    if stale:
        say(
            f"{type(optimizer).__name__} holds {len(stale)} of {len(held)} parameters as they were "
            f"before sharding ({some(stale)}): it was built before fully_shard, which replaces "
            "parameters, and does not train them. Build it after the last fully_shard"
        )


# ---- the units of a model ------------------------------------------------------------------------


def groups_of(model: nn.Module) -> Iterator[tuple[str, FSDPState, Any]]:
    """(name, state, group) of every group below ``model``, in the order of the modules."""
    names: dict[FSDPState, list[str]] = {}
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        if state is not None:
            names.setdefault(state, []).append(name or "(root)")
    for state, of_state in names.items():
        groups = units.groups_of(state)
        for index, group in enumerate(groups):
            suffix = f" [{index}]" if len(groups) > 1 else ""
            yield ", ".join(of_state) + suffix, state, group


def names_of(model: nn.Module, groups: list[tuple[str, Any]]) -> dict[int, str]:
    """Name from the root of every parameter of a unit, by ``id`` of the unit's record of it."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    found = {}
    for _, param in managed(groups):
        info = param._module_info
        prefix = prefixes.get(id(info.module))
        found[id(param)] = f"{prefix}.{info.param_name}" if prefix else info.param_name
    return found


def managed(groups: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, group in groups:
        for param in group.fsdp_params:
            yield name, param


def faces_of(param: Any) -> list[Any]:
    """Every object that the unit registers for a parameter."""
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    return [face for face in (getattr(param, name, None) for name in names) if face is not None]


def foreign_optimizer(
    model: nn.Module, groups: list[tuple[str, Any]], optimizer: torch.optim.Optimizer | None
) -> list[str]:
    if optimizer is None:
        return []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sharded = {id(param.sharded_param) for _, param in managed(groups)}
    temporary = {id(f) for _, param in managed(groups) for f in faces_of(param)} - sharded
    own = sharded | ({id(parameter) for parameter in model.parameters()} - temporary)
    found = []
    foreign = len(held - own)
    if foreign:
        found.append(
            f"the optimizer holds {foreign} of {len(held)} parameters that are not the model's: "
            "it was built before sharding, which replaces parameters, and will not train them. "
            "Build it after the last fully_shard"
        )
    names = names_of(model, groups)
    missing = [
        names[id(param)]
        for _, param in managed(groups)
        if param.sharded_param.requires_grad and id(param.sharded_param) not in held
    ]
    if missing and not foreign:
        found.append(f"the optimizer does not hold {some(missing)}, which require gradients")
    return found


def slots_of(param: Any) -> Iterator[tuple[nn.Module, str]]:
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names)


def replaced_parameters(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    names = names_of(model, groups)
    replaced = [
        names[id(param)]
        for _, param in managed(groups)
        if any(
            all(getattr(module, slot, None) is not face for face in faces_of(param))
            for module, slot in slots_of(param)
        )
    ]
    if not replaced:
        return []
    return [_replaced(replaced)]


def unmanaged_parameters(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    slots = {(id(m), slot) for _, param in managed(groups) for m, slot in slots_of(param)}
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and (id(module), name) not in slots
    ]
    if not names:
        return []
    return [
        f"{some(names)} are in no unit (ignored, or added after fully_shard): their gradients are "
        "not reduced over ranks"
    ]


def tied_weights(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    names = names_of(model, groups)
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, param in managed(groups):
        owners.setdefault(param._orig_param_uid, []).append((name, names[id(param)]))
    return [
        f"{some([param for _, param in tied])} were one parameter before sharding and are in "
        f"different units ({', '.join(unit for unit, _ in tied)}): put their modules into one "
        "unit, fully_shard([a, b]), or into the root"
        for tied in owners.values()
        if len(tied) > 1
    ]


def original_class(module: nn.Module) -> type:
    """The class that the module had before it was sharded."""
    kind = type(module)
    if isinstance(module, FSDPModule):
        return kind.__mro__[kind._orig_cls_mro_index]  # type: ignore[attr-defined]
    return kind


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with layers of their own that stand in a list with others of their class."""
    for prefix, container in model.named_modules():
        if not issubclass(original_class(container), (nn.ModuleList, nn.Sequential)):
            continue
        layers = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in container.named_children()
            if any(True for _ in child.children())
        ]
        counts = Counter(original_class(layer) for _, layer in layers)
        yield from ((name, layer) for name, layer in layers if counts[original_class(layer)] > 1)


def blocks_in_root(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    state = _get_module_fsdp_state(model)
    if state is None:
        return []
    of_root = {
        id(module)
        for _, group in groups
        if group in state._fsdp_param_groups
        for param in group.fsdp_params
        for module, _ in slots_of(param)
    }
    left = [
        name
        for name, layer in _repeated(model)
        if any(id(module) in of_root for module in layer.modules())
    ]
    if not left:
        return []
    return [
        f"{some(left)} are repeated layers but no units: their parameters are gathered with the "
        "root's and stay unsharded through forward and backward. Call fully_shard on each before "
        "the root"
    ]


def compute_dtype(param: Any) -> torch.dtype:
    """What a parameter is gathered in."""
    dtype: torch.dtype = param.param_dtype or param.orig_dtype
    return dtype


def gathered_bytes(group: Any) -> int:
    """Bytes of a unit's whole parameters, padding included, as they are gathered."""
    world = group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1
    sizes = (p.padded_numel * compute_dtype(p).itemsize for p in group.fsdp_params)
    return int(sum(sizes)) * int(world)


def policies_apart(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Blocks that compute in another dtype than what the root has itself."""
    state = _get_module_fsdp_state(model)
    if state is None:
        return []
    of_root = {id(group) for group in state._fsdp_param_groups}
    wanted = {group.mp_policy.param_dtype for _, group in groups if id(group) not in of_root}
    own = [param for group in state._fsdp_param_groups for param in group.fsdp_params]
    if state._mp_policy.param_dtype is not None or not own or wanted - {None} != wanted:
        return []
    names = names_of(model, groups)
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wanted))
    return [
        f"the blocks compute in {dtypes}, but {some([names[id(param)] for param in own])} in the "
        "root in full precision: pass mp_policy to the root's fully_shard, too"
    ] * bool(wanted)


def large_units(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    """Units that gather several times what the others do."""
    sizes = {name: gathered_bytes(group) for name, group in groups}
    if len(sizes) < 3:
        return []
    import statistics  # here: `import fsdp_c` need not have it

    median = statistics.median(sizes.values())
    found = []
    for name, group in groups:
        size = sizes[name]
        if size < _LARGE or size <= _TIMES_THE_MEDIAN * median or len(group.fsdp_params) < 2:
            continue
        names = names_of(model, groups)
        largest = sorted(group.fsdp_params, key=lambda param: -param.padded_numel)[:2]
        found.append(
            f"the unit '{name}' gathers {size / 2**20:.0f} MiB, {size / median:.1f} times what the "
            f"median unit does, mostly {some([names[id(param)] for param in largest])}: units of "
            "their own for these modules (as fsdp_c.auto_shard makes them) lower the peak"
        )
    return found


def data_parallel_inside(model: nn.Module) -> list[str]:
    """DDP around parameters that were sharded since."""
    found = [name for name, m in model.named_modules() if isinstance(m, DistributedDataParallel)]
    return [
        f"{some([name or type(model).__name__ for name in found])} are DistributedDataParallel, "
        "whose gradients are reduced twice or not at all: shard model.module instead"
    ] * bool(found)
