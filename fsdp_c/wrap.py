"""``auto_shard``: a whole model sharded by one call, following a policy; all or nothing.

The work is done in two phases. Planning asks the policy, orders the units, settles tied weights and
validates; it changes nothing. Then ``fully_shard`` is called on each unit and on the root; where
one of these calls fails, everything that the earlier ones did is taken back.
"""

from __future__ import annotations

import collections
import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, _common_utils
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from .compat import ShardPlacementFnResult
from .fully_shard import fully_shard
from .mixed_precision import no_dtype
from .notes import add, noted
from .undo import Snapshot
from .unit_sizes import Unit, joined, refuse_larger, within
from .units import require_module
from .wrap_policy import Kwargs, Policy, children_first, run_policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

Model = TypeVar("Model", bound=nn.Module)


class UnitKwargs(TypedDict, total=False):
    """What ``fully_shard`` takes for a unit by keyword."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    dp_mesh_dims: DataParallelMeshDims | None


class ShardKwargs(UnitKwargs, total=False):
    """The same and the mesh, and what ``replicate`` takes besides (with ``shard_fn``)."""

    mesh: DeviceMesh | None
    bucket_cap_mb: float


def auto_shard(
    model: Model,
    policy: Policy = "blocks",
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    full_precision_classes: Iterable[type[nn.Module]] = (_BatchNorm,),
    frozen: Literal["warn", "error", "ignore"] = "warn",
    separate_ends: bool = True,
    max_transient: int | None = None,
    min_unit: int | None = None,
    keep_originals: bool = True,
    shard_fn: Callable[..., Any] = fully_shard,
    **fully_shard_kwargs: Unpack[ShardKwargs],
) -> Model:
    """Applies ``fully_shard`` bottom-up to the modules that ``policy`` selects, then to ``model``.

    Args:
        model: A model to no part of which FSDP was applied.
        policy: What becomes a unit of its own:

            - ``"blocks"``: the repeated layers of the model, found by their structure; embeddings
              and heads (``nn.Embedding``, ``nn.Linear``) of at least a block's size, too, unless
              they are tied or ``separate_ends=False``: of the one, backward does not gather the
              weight again, the other stays gathered from forward to backward;
            - an ``int``: units that gather at most so many bytes (in the dtype of computation);
            - a class of modules, or several: their instances;
            - torch's ``ModuleWrapPolicy`` and ``CustomPolicy`` (whose function may return arguments
              of ``fully_shard`` for the module, for the root too);
            - a callable of torch's kind, ``policy(module=, recurse=, nonwrapped_numel=)``: for
              example ``functools.partial(size_based_auto_wrap_policy, min_num_params=10**6)``,
              ``transformer_auto_wrap_policy``, ``lambda_auto_wrap_policy``.
        ignored_modules: Modules that stay as they are, with everything below them.
        ignored_params: Parameters that stay as they are.
        full_precision_classes: With ``mp_policy.param_dtype``: modules of these classes become
            units of their own that compute in full precision; they return the dtype that the rest
            computes in. A warning names the classes that were found.
        frozen: What to do about a unit with trainable and frozen parameters: warn, raise, nothing.
        separate_ends: See ``"blocks"``. ``False`` where forward uses an embedding's or a head's
            weight without calling the module.
        max_transient: Bytes that one unit may need for a while at most, beyond its shard: while it
            is gathered, or while its gradients are reduced. Larger units are divided.
        min_unit: Bytes that a unit should gather at least. Smaller ones that are neighbours in one
            container share a gather and a reduction, as with ``fully_shard([a, b])``: fewer
            collectives, which is what many small layers wait for. They should all be called.
            ``max_transient`` comes first.
        keep_originals: Keep the full parameters until the last unit is sharded, so that a failure
            can be undone. ``False`` frees those of each unit at once, as separate ``fully_shard``
            calls do; what can be checked beforehand is still all or nothing.
        shard_fn: Called as ``fully_shard`` is.
        **fully_shard_kwargs: Passed on for every unit: ``mesh``, ``mp_policy`` and so on.

    Returns:
        ``model``, whose class and whose units' classes are now ``FSDP<Class>``.

    Weights that are tied across units come into one unit: separate units with the same arguments
    are sharded as one list; a unit inside the other one is not made.

    Raises:
        ValueError: FSDP was applied to a part of the model already; the policy finds nothing or
            selects a container without forward; tied weights whose units have different arguments
            (the message names both); ``frozen="error"`` and a unit has parameters of both kinds;
            a unit that ``max_transient`` is too small for and that cannot be divided; a bound
            that is not positive.
        TypeError: ``model`` is no module, ``policy`` no policy, a bound no number.

    Whatever is raised, by the policy or by ``fully_shard``: the model is as it was. What was made
    is one INFO line of torch's logger of FSDP2, on rank 0.
    """
    if frozen not in ("warn", "error", "ignore"):
        raise ValueError(f"frozen should be 'warn', 'error' or 'ignore', not {frozen!r}")
    units, ignored = _plan(
        model,
        policy,
        set(ignored_modules),
        set(ignored_params),
        tuple(full_precision_classes),
        dict(fully_shard_kwargs),
        separate_ends,
        max_transient,
        min_unit=min_unit,
    )
    signature = inspect.signature(shard_fn)
    for unit in units:
        signature.bind(model, **unit.kwargs)  # TypeError for an argument that it does not have
    if frozen != "ignore":
        for message in mixed_requires_grad(model, units, ignored):
            if frozen == "error":
                raise ValueError(message)
            warnings.warn(message, stacklevel=2)
    tensors = (*model.parameters(), *model.buffers())
    snapshot = Snapshot(model.modules(), tensors) if keep_originals else None
    owned = _owned_params(model, units)
    text = f"{type(model).__name__}: {_summary(units, owned)}"
    try:
        for unit in units:
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            _shard(shard_fn, modules, unit)
            if snapshot is not None:
                snapshot.release(owned[unit])
        logger.info("fsdp_c: auto_shard made of %s", text)
        return model  # in here: a signal may come after the last call
    except BaseException:
        if snapshot is not None:
            snapshot.restore()
        raise


def _shard(shard_fn: Callable[..., Any], modules: Any, unit: Unit) -> None:
    try:
        shard_fn(modules, **unit.kwargs)
        if not unit.regathers and isinstance(modules, FSDPModule):
            modules.set_unshard_in_backward(False)
    except Exception as error:
        add(error, f"This was the unit {unit}.")
        raise


def plan(
    model: nn.Module,
    policy: Policy = "blocks",
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    full_precision_classes: Iterable[type[nn.Module]] = (_BatchNorm,),
    separate_ends: bool = True,
    max_transient: int | None = None,
    min_unit: int | None = None,
    ranks: int | None = None,
    **fully_shard_kwargs: Unpack[ShardKwargs],
) -> list[Unit]:
    """What :func:`auto_shard` would do with these arguments: its units in order, the root last.

    Changes nothing, and needs no process group: ``ranks`` are those to shard over.
    """
    classes, kwargs = tuple(full_precision_classes), dict(fully_shard_kwargs)
    modules, params = set(ignored_modules), set(ignored_params)
    found = _plan(
        model,
        policy,
        modules,
        params,
        classes,
        kwargs,
        separate_ends,
        max_transient,
        ranks,
        min_unit,
    )
    return found[0]


def _plan(
    model: nn.Module,
    policy: Policy,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    full_precision_classes: tuple[type[nn.Module], ...],
    kwargs: Kwargs,
    separate_ends: bool = True,
    max_transient: int | None = None,
    ranks: int | None = None,
    min_unit: int | None = None,
) -> tuple[list[Unit], set[nn.Parameter]]:
    """The units, and all parameters that are ignored."""
    _check_arguments(model, kwargs.get("mp_policy"), max_transient, min_unit)
    check_nested_wrapping(model)
    ignored_modules = {inner for module in ignored_modules for inner in module.modules()}
    ignored_params = ignored_params | {
        param for module in ignored_modules for param in module.parameters()
    }
    if ignored_params:
        kwargs = kwargs | {"ignored_params": ignored_params}
    mixed = getattr(kwargs.get("mp_policy"), "param_dtype", None) is not None
    overridden = _instances(model, full_precision_classes, ignored_modules) if mixed else {}
    always = full_precision_classes if overridden else ()
    wanted = run_policy(policy, model, ignored_modules, ignored_params, kwargs, always)
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    units = [Unit(modules, tuple(names[m] for m in modules), kw) for modules, kw in wanted]
    if policy == "blocks":
        units = [_end(unit) for unit in units if separate_ends or not _is_end(unit)]
    root = Unit((model,), ("",), dict(kwargs))
    for unit in units:
        if unit.modules == (model,):  # a CustomPolicy may have arguments for the root
            root = unit
    units = [unit for unit in units if unit is not root] + [root]
    if ranks is None:
        ranks = _ranks(kwargs.get("mesh"))
    if max_transient is not None:
        units = within(units, max_transient, ranks, ignored_modules, ignored_params, names)
    if overridden:
        warn_on_overridden_mixed_precision(set(map(type, overridden)))
        units = _with_full_precision(model, units, overridden)
    units = _ordered(model, _untie(model, units, ignored_params))
    if min_unit is not None:
        owned = _owned_params(model, units, ignored_params)
        units = _ordered(model, joined(units, owned, min_unit, max_transient, ranks))
    if max_transient is not None:
        refuse_larger(_owned_params(model, units, ignored_params), max_transient, ranks)
    return units, ignored_params


def _check_arguments(
    model: Any, mp_policy: Any, max_transient: int | None, min_unit: int | None
) -> None:
    require_module(model, "auto_shard")
    dtype = getattr(mp_policy, "param_dtype", None)
    if isinstance(dtype, str):
        note = f"mp_policy.param_dtype: a torch.dtype, not {dtype!r}: torch.bfloat16, for example."
        raise noted(no_dtype(dtype), note)
    for name, size in (("max_transient", max_transient), ("min_unit", min_unit)):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, float)):
            raise TypeError(f"{name} is a number of bytes, such as 2 * 2**30, not {size!r}")
        if not size > 0:
            raise ValueError(f"{name} is a positive number of bytes, not {size}")


def _ranks(mesh: DeviceMesh | None) -> int:
    """Those that a parameter is sharded over."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim <= 2:
        return mesh.size(mesh.ndim - 1)
    return dist.get_world_size() if dist.is_initialized() else 1


# ---- embeddings and heads


def _is_end(unit: Unit) -> bool:
    """Of the policy "blocks": no list of layers has it."""
    parent = unit.names[0].rpartition(".")[2]
    return isinstance(unit.modules[0], (nn.Embedding, nn.Linear)) and not parent.isdigit()


def _end(unit: Unit) -> Unit:
    """The unit of an embedding or a head with what is best for it."""
    if not _is_end(unit):
        return unit
    module, kwargs = unit.modules[0], unit.kwargs
    if isinstance(module, nn.Embedding):
        return replace(unit, regathers=module.max_norm is not None or module.sparse)
    if kwargs.get("reshard_after_forward") is None:  # backward begins with it
        kwargs = kwargs | {"reshard_after_forward": False}
    return replace(unit, kwargs=kwargs)


def _summary(units: list[Unit], owned: dict[Unit, list[nn.Parameter]]) -> str:
    """The units by kind: how many, and the elements of the largest."""
    kinds: dict[str, list[int]] = {}
    for unit in units:
        size = sum(param.numel() for param in owned[unit])
        kind = ", ".join(dict.fromkeys(type(module).__name__ for module in unit.modules))
        kinds.setdefault("the root" if unit is units[-1] else kind, []).append(size)
    parts = [
        f"{len(found)} x {kind} ({max(found):,} elements{' at most' * (len(found) > 1)})"
        if kind != "the root"
        else f"the root ({found[0]:,} elements)"
        for kind, found in kinds.items()
    ]
    return ", ".join(parts)


def _instances(
    model: nn.Module, classes: tuple[type[nn.Module], ...], ignored: set[nn.Module]
) -> dict[nn.Module, None]:
    found = (m for m in model.modules() if isinstance(m, classes))
    return dict.fromkeys(m for m in found if m is not model and m not in ignored)


# ---- checks


def check_nested_wrapping(root: nn.Module) -> None:
    """Refuses a model to a part of which FSDP (1 or 2) was applied.

    Raises:
        ValueError: names the part.
    """
    for name, module in root.named_modules():
        applied = _get_module_fsdp_state(module) is not None
        if applied or _common_utils._get_module_fsdp_state(module) is not None:
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}"
            )


def warn_on_overridden_mixed_precision(classes: Collection[type[nn.Module]]) -> None:
    """Says which classes are sharded separately and compute in full precision; nothing if none."""
    if classes:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the model "
            f"has submodules of type:\n{set(classes)}\nThese become units of their own, with "
            "mixed precision disabled.",
            stacklevel=4,
        )


def mixed_requires_grad(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter]
) -> Iterator[str]:
    """One message for each unit with trainable and frozen parameters, in the order of the units."""
    visited: set[nn.Module] = set()
    for unit in units:
        params: dict[nn.Parameter, str] = {}
        for module, name in zip(unit.modules, unit.names):
            params |= managed_param_to_fqn(module, ignored_params, visited, name)
        trainable = {p: fqn for p, fqn in params.items() if p.requires_grad}
        frozen = {p: fqn for p, fqn in params.items() if not p.requires_grad}
        if trainable and frozen:
            name = ", ".join(name or type(model).__name__ for name in unit.names)
            yield (
                f"{name} has both parameters with requires_grad=True and False. The frozen ones "
                f"({sum(p.numel() for p in frozen)} numel) are gathered for backward together with "
                f"the others ({sum(p.numel() for p in trainable)} numel). If possible, wrap the "
                "frozen parameters with FSDP separately.\n"
                f"The following parameters have requires_grad=True:\n{list(trainable.values())}\n"
                f"The following parameters have requires_grad=False:\n{list(frozen.values())}"
            )


def post_order_named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once with its name, each after all modules below it, the root last.

    Modules side by side come in the order in which they are registered.
    """
    names: dict[nn.Module, str] = {root: ""}
    for name, module in root.named_modules():
        names.setdefault(module, name)
    return [(names[module], module) for module in children_first(root)]


def managed_param_to_fqn(
    module: nn.Module,
    ignored_params: Collection[nn.Parameter],
    visited: set[nn.Module],
    prefix: str,
) -> dict[nn.Parameter, str]:
    """The parameters that a unit made of ``module`` would manage, with their names from the root.

    Args:
        module: The module of the unit. To be called for inner units before outer ones.
        ignored_params: Left out.
        visited: Modules that earlier units have; the ones found now are added.
        prefix: The name of ``module`` below the root.
    """
    found: dict[nn.Parameter, str] = {}
    visited.add(module)
    queue = collections.deque([(module, prefix)])
    while queue:
        current, name = queue.popleft()
        dotted = f"{name}." if name else ""
        for local, param in current.named_parameters(recurse=False):
            if param not in ignored_params:
                found[param] = dotted + local
        for local, child in current.named_children():
            if child is not None and child not in visited:
                visited.add(child)
                queue.append((child, dotted + local))
    return found


# ---- full precision


def _with_full_precision(
    model: nn.Module, units: list[Unit], overridden: Collection[nn.Module]
) -> list[Unit]:
    """``units`` with the policies of units made of ``overridden`` modules replaced.

    They compute in the dtype of their own parameters and return what the unit around them computes
    in.
    """
    around = {unit.modules[0]: unit for unit in units if unit.modules[0] not in overridden}
    dtypes: dict[nn.Module, torch.dtype | None] = {}
    for module, parents in _enclosing(model, around):
        if module in overridden:
            outer = around[parents[-1]].kwargs.get("mp_policy") if parents else None
            dtypes[module] = getattr(outer, "param_dtype", None)
    found = []
    for unit in units:
        if unit.modules[0] in overridden:
            own = next((p.dtype for p in unit.modules[0].parameters()), torch.float32)
            policy = MixedPrecisionPolicy(param_dtype=own, output_dtype=dtypes[unit.modules[0]])
            unit = replace(unit, kwargs=unit.kwargs | {"mp_policy": policy})
        found.append(unit)
    return found


def _enclosing(
    root: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Every module once for each place, with those of ``units`` around it, outermost first."""

    def visit(
        module: nn.Module, around: tuple[nn.Module, ...]
    ) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
        yield module, around
        inner = (*around, module) if module in units else around
        for _, child in module.named_children():
            if child is not None:
                yield from visit(child, inner)

    return visit(root, ())


# ---- tied weights and order


def _owners(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter] = ()
) -> dict[nn.Parameter, dict[Unit, str]]:
    """For each parameter the units that have it, each with the first name that it has there."""
    unit_of = {module: unit for unit in units for module in unit.modules}
    owners: dict[nn.Parameter, dict[Unit, str]] = {}

    def visit(module: nn.Module, prefix: str, unit: Unit) -> None:
        unit = unit_of.get(module, unit)
        for name, param in module._parameters.items():
            if param is not None and param not in ignored_params:
                owners.setdefault(param, {}).setdefault(unit, prefix + name)
        for name, child in module.named_children():
            if child is not None:
                visit(child, f"{prefix}{name}.", unit)

    visit(model, "", units[-1])
    return owners


def _untie(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter]
) -> list[Unit]:
    """``units`` changed until every parameter is in one of them only."""
    while True:
        owners = _owners(model, units, ignored_params)
        shared = next((param for param, found in owners.items() if len(found) > 1), None)
        if shared is None:
            return units
        (first, name), (second, other) = list(owners[shared].items())[:2]
        what = f"'{name}' of the unit {first} and '{other}' of the unit {second} are one parameter"
        if not _equal(first.kwargs, second.kwargs):
            raise ValueError(
                f"{what}, and the two units have different arguments: let the policy select "
                "neither of them, or give them the same arguments"
            )
        inner = first if _is_below(first, second) else second
        if _is_below(first, second) or _is_below(second, first):
            units = [unit for unit in units if unit is not inner]
            done = f"{inner} does not become a unit"
            changed = {inner}
        else:
            both = Unit(first.modules + second.modules, first.names + second.names, first.kwargs)
            units = [both if unit is first else unit for unit in units if unit is not second]
            done = "the two become one unit"
            changed = {first, second}
        rest = sum(p.numel() for p, found in owners.items() if len(changed & found.keys()) == 1)
        if rest > shared.numel():
            warnings.warn(f"{what}: {done}", stacklevel=4)


def _equal(a: Kwargs, b: Kwargs) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] or a[key] == b[key] for key in a)


def _is_below(inner: Unit, outer: Unit) -> bool:
    below = {m for module in outer.modules for m in module.modules() if m is not module}
    return any(module in below for module in inner.modules)


def _ordered(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """The units, inner ones first, otherwise in the order in which they are."""
    unit_of = {module: unit for unit in units for module in unit.modules}
    inside: dict[Unit, set[Unit]] = {unit: set() for unit in units}
    for module, around in _enclosing(model, unit_of):
        if module in unit_of and around:
            for outer in around:
                if unit_of[outer] is not unit_of[module]:
                    inside[unit_of[outer]].add(unit_of[module])
    ordered: dict[Unit, None] = {}
    waiting = list(units)
    while waiting:
        ready = next((unit for unit in waiting if inside[unit] <= ordered.keys()), None)
        if ready is None:
            names = "; ".join(str(unit) for unit in waiting)
            raise ValueError(f"tied weights put these units inside one another: {names}")
        waiting.remove(ready)
        ordered[ready] = None
    return list(ordered)


def _owned_params(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter] = ()
) -> dict[Unit, list[nn.Parameter]]:
    owned: dict[Unit, list[nn.Parameter]] = {unit: [] for unit in units}
    for param, found in _owners(model, units, ignored_params).items():
        owned[next(iter(found))].append(param)
    return owned
