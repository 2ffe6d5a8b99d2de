"""``explain``: what a sharded model consists of, what a step will cost, and what looks wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state

_SHOWN = 3  # names in one warning


@dataclass(frozen=True)
class UnitReport:
    """One group of parameters that is gathered and reduced together.

    Sizes are bytes on this rank. ``gathers``, ``reduce_scatters`` and ``all_reduces`` count the
    collectives of one forward and one backward that reaches the unit; ``transient`` is what the
    unit needs beyond its shards while it is gathered (unsharded parameters and gather buffer) or
    while its gradients are reduced (gradients, input and output of the reduction), whichever is
    more.
    """

    name: str
    modules: str
    parameters: int
    elements: int
    dtypes: str
    mesh: str
    shard_bytes: int
    gathers: int
    reduce_scatters: int
    all_reduces: int
    transient: int


@dataclass
class Explanation:
    """What :func:`explain` found; ``str()`` of it is the table."""

    units: list[UnitReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = "unit modules params elements dtypes mesh shard AG RS AR transient"
        rows = [tuple(head.split())]
        for unit in self.units:
            rows.append(
                (
                    unit.name,
                    unit.modules,
                    str(unit.parameters),
                    f"{unit.elements:,}",
                    unit.dtypes,
                    unit.mesh,
                    _bytes(unit.shard_bytes),
                    str(unit.gathers),
                    str(unit.reduce_scatters),
                    str(unit.all_reduces),
                    _bytes(unit.transient),
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        shards = sum(unit.shard_bytes for unit in self.units)
        largest = max((unit.transient for unit in self.units), default=0)
        lines.append(f"{_bytes(shards)} of shards on this rank; {_bytes(largest)} for one unit")
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines)


def explain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    file: TextIO | None = None,
) -> Explanation:
    """Prints a table of the model's units and warnings about what is often got wrong.

    Nothing is changed, communicated or initialised; it may be called at any time after sharding.

    Args:
        model: The root: a module that ``fully_shard`` or ``replicate`` was applied to, or one that
            contains such modules.
        optimizer: The optimizer of the model, to be checked against its parameters.
        file: Where to print; ``None``: standard output.

    Returns:
        What was printed, as data.

    Raises:
        ValueError: nothing in ``model`` is sharded.
    """
    found = list(_groups(model))
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(f"nothing in {type(model).__name__} is sharded: call fully_shard first")
    explanation = Explanation([_unit(name, state, group, model) for name, state, group in found])
    groups = [(name, group) for name, _, group in found]
    explanation.warnings += _foreign_optimizer(model, groups, optimizer)
    explanation.warnings += _replaced_parameters(model, groups)
    explanation.warnings += _unmanaged_parameters(model, groups)
    explanation.warnings += _tied_weights(model, groups)
    explanation.warnings += _blocks_in_root(model, groups)
    print(explanation, file=file)
    return explanation


# ---- the table -----------------------------------------------------------------------------------


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _groups(model: nn.Module) -> Iterator[tuple[str, FSDPState, Any]]:
    """(name, state, group) of every group below ``model``, in the order of the modules."""
    names: dict[FSDPState, list[str]] = {}
    for name, module in model.named_modules():
        state = _get_module_fsdp_state(module)
        if state is not None:
            names.setdefault(state, []).append(name or "(root)")
    for state, of_state in names.items():
        groups = state._fsdp_param_groups
        for index, group in enumerate(groups):
            suffix = f" [{index}]" if len(groups) > 1 else ""
            yield ", ".join(of_state) + suffix, state, group


def _dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _compute_dtype(param: Any) -> torch.dtype:
    return param.param_dtype or param.orig_dtype


def _reduce_dtype(param: Any) -> torch.dtype:
    return param.reduce_dtype or _compute_dtype(param)


def _unit(name: str, state: FSDPState, group: Any, model: nn.Module) -> UnitReport:
    info, params = group.mesh_info, group.fsdp_params
    world = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
    replicas = info.replicate_mesh_size if isinstance(info, DDPMeshInfo) else 1
    trainable = [param for param in params if param.sharded_param.requires_grad]
    kinds = {(p.orig_dtype, _compute_dtype(p), _reduce_dtype(p)) for p in params}
    return UnitReport(
        name=name,
        modules=", ".join(_original_class(module).__name__ for module in group.modules),
        parameters=len(params),
        elements=sum(param._orig_size.numel() for param in params),
        dtypes="; ".join(sorted("/".join(map(_dtype, kind)) for kind in kinds)),
        mesh=f"{replicas}x{world}" if isinstance(info, DDPMeshInfo) else str(world),
        shard_bytes=sum(_padded(param) * param.orig_dtype.itemsize for param in params),
        gathers=(1 + _gathers_again(state, group, model)) if world > 1 else 0,
        reduce_scatters=1 if trainable and world > 1 else 0,
        all_reduces=_buckets(group) if replicas > 1 else 0,
        transient=_transient(params, trainable, world),
    )


def _buckets(group: Any) -> int:
    """How many reductions the unit's gradients are dealt to."""
    params = group.fsdp_params
    spans = getattr(group, "_buckets", [(0, len(params))])
    return sum(any(p.sharded_param.requires_grad for p in params[slice(*span)]) for span in spans)


def _padded(param: Any) -> int:
    return int(param.padded_sharded_param_size.numel())


def _gathers_again(state: FSDPState, group: Any, model: nn.Module) -> bool:
    """Whether backward gathers once more; of the root it is decided in the first forward."""
    undecided_root = (
        state._is_root is None and state._auto_reshard_after_forward and model in state._modules
    )
    return group._reshard_after_forward and not undecided_root and group.unshard_in_backward


def _transient(params: list[Any], trainable: list[Any], world: int) -> int:
    unsharded = sum(_padded(p) * world * _compute_dtype(p).itemsize for p in params)
    gathering = unsharded * (2 if world > 1 else 1)
    grads = sum(p._orig_size.numel() * _compute_dtype(p).itemsize for p in trainable)
    rows = sum(_padded(p) * _reduce_dtype(p).itemsize for p in trainable)
    reducing = grads + rows * world + (rows if world > 1 else 0)
    return max(gathering, reducing)


# ---- the warnings --------------------------------------------------------------------------------


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _names(model: nn.Module, groups: list[tuple[str, Any]]) -> dict[int, str]:
    """Name from the root of every parameter of a unit, by ``id`` of the unit's record of it."""
    prefixes = {id(module): name for name, module in model.named_modules()}
    found = {}
    for _, param in _managed(groups):
        info = param._module_info
        prefix = prefixes.get(id(info.module))
        found[id(param)] = f"{prefix}.{info.param_name}" if prefix else info.param_name
    return found


def _managed(groups: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, group in groups:
        for param in group.fsdp_params:
            yield name, param


def _faces(param: Any) -> list[Any]:
    """Every object that the unit registers for a parameter."""
    names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
    return [face for face in (getattr(param, name, None) for name in names) if face is not None]


def _foreign_optimizer(
    model: nn.Module, groups: list[tuple[str, Any]], optimizer: torch.optim.Optimizer | None
) -> list[str]:
    if optimizer is None:
        return []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    sharded = {id(param.sharded_param) for _, param in _managed(groups)}
    temporary = {id(f) for _, param in _managed(groups) for f in _faces(param)} - sharded
    own = sharded | ({id(parameter) for parameter in model.parameters()} - temporary)
    found = []
    foreign = len(held - own)
    if foreign:
        found.append(
            f"the optimizer holds {foreign} of {len(held)} parameters that are not the model's: "
            "it was built before sharding, which replaces parameters, and will not train them. "
            "Build it after the last fully_shard"
        )
    names = _names(model, groups)
    missing = [
        names[id(param)]
        for _, param in _managed(groups)
        if param.sharded_param.requires_grad and id(param.sharded_param) not in held
    ]
    if missing and not foreign:
        found.append(f"the optimizer does not hold {_some(missing)}, which require gradients")
    return found


def _slots(param: Any) -> Iterator[tuple[nn.Module, str]]:
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names)


def _replaced_parameters(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    names = _names(model, groups)
    replaced = [
        names[id(param)]
        for _, param in _managed(groups)
        if any(
            all(getattr(module, slot, None) is not face for face in _faces(param))
            for module, slot in _slots(param)
        )
    ]
    if not replaced:
        return []
    return [
        f"{_some(replaced)} were replaced after sharding: the module holds another object than its "
        "unit, so that training and gathering part ways. Change values in place, or load them with "
        "load_state_dict"
    ]


def _unmanaged_parameters(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    slots = {(id(m), slot) for _, param in _managed(groups) for m, slot in _slots(param)}
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad and (id(module), name) not in slots
    ]
    if not names:
        return []
    return [
        f"{_some(names)} are in no unit (ignored, or added after fully_shard): their gradients are "
        "not reduced over ranks"
    ]


def _tied_weights(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    names = _names(model, groups)
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, param in _managed(groups):
        owners.setdefault(param._orig_param_uid, []).append((name, names[id(param)]))
    return [
        f"{_some([param for _, param in tied])} were one parameter before sharding and are in "
        f"different units ({', '.join(unit for unit, _ in tied)}): put their modules into one "
        "unit, fully_shard([a, b]), or into the root"
        for tied in owners.values()
        if len(tied) > 1
    ]


def _original_class(module: nn.Module) -> type:
    """The class that the module had before it was sharded."""
    kind = type(module)
    if isinstance(module, FSDPModule):
        return kind.__mro__[kind._orig_cls_mro_index]  # type: ignore[attr-defined]
    return kind


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with layers of their own that stand in a list with others of their class."""
    for prefix, container in model.named_modules():
        if not issubclass(_original_class(container), (nn.ModuleList, nn.Sequential)):
            continue
        layers = [
            (f"{prefix}.{name}" if prefix else name, child)
            for name, child in container.named_children()
            if any(True for _ in child.children())
        ]
        counts = Counter(_original_class(layer) for _, layer in layers)
        yield from ((name, layer) for name, layer in layers if counts[_original_class(layer)] > 1)


def _blocks_in_root(model: nn.Module, groups: list[tuple[str, Any]]) -> list[str]:
    state = _get_module_fsdp_state(model)
    if state is None:
        return []
    of_root = {
        id(module)
        for _, group in groups
        if group in state._fsdp_param_groups
        for param in group.fsdp_params
        for module, _ in _slots(param)
    }
    left = [
        name
        for name, layer in _repeated(model)
        if any(id(module) in of_root for module in layer.modules())
    ]
    if not left:
        return []
    return [
        f"{_some(left)} are repeated layers but no units: their parameters are gathered with the "
        "root's and stay unsharded through forward and backward. Call fully_shard on each before "
        "the root"
    ]
