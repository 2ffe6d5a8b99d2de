"""``auto_shard``: shards a whole model by one call, following a policy.

The call has two phases. Planning runs the policy, orders the units, merges units with tied weights
and validates the arguments. Planning does not change the model. Then ``fully_shard`` is called on
each unit and on the root. If one of these calls fails, the changes of all calls are rolled back.
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

from ._auto_shard.unit_sizes import Unit, check_unit_sizes, join_small_units, split_large_units
from ._compat.torch_releases import ShardPlacementFnResult
from ._runtime.fsdp_units import require_module
from ._runtime.hints import add_hint, with_hint
from ._runtime.mixed_precision import make_dtype_error
from ._runtime.transaction import Snapshot
from .fully_shard import fully_shard
from .policies import Kwargs, Policy, iterate_children_first, run_policy

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

Model = TypeVar("Model", bound=nn.Module)


class UnitKwargs(TypedDict, total=False):
    """Keyword arguments of ``fully_shard`` for one unit."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    dp_mesh_dims: DataParallelMeshDims | None


class ShardKwargs(UnitKwargs, total=False):
    """Keyword arguments for all units. ``bucket_cap_mb`` requires ``shard_fn=replicate``."""

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
        model: A model without modules that FSDP was applied to.
        policy: Selects the modules that become units:

            - ``"blocks"``: the repeated layers of the model, found by their structure. Embeddings
              and heads (``nn.Embedding``, ``nn.Linear``) of at least a block's size become units,
              too, unless they are tied or ``separate_ends=False``. Backward does not gather an
              embedding's weight again. A head stays gathered from forward to backward.
            - an ``int``: units that gather at most so many bytes, in the compute dtype.
            - a module class, or several: their instances.
            - torch's ``ModuleWrapPolicy`` and ``CustomPolicy``. The function of a ``CustomPolicy``
              may return arguments of ``fully_shard`` for the module, and for the root.
            - a callable with torch's signature, ``policy(module=, recurse=, nonwrapped_numel=)``.
              Examples: ``functools.partial(size_based_auto_wrap_policy, min_num_params=10**6)``,
              ``transformer_auto_wrap_policy``, ``lambda_auto_wrap_policy``.
        ignored_modules: Modules that are not sharded, including their submodules.
        ignored_params: Parameters that are not sharded.
        full_precision_classes: With ``mp_policy.param_dtype``, modules of these classes become
            separate units that compute in full precision. Their outputs have the dtype that the
            unit around them computes in. A warning names the classes that were found.
        frozen: The reaction to a unit with trainable and frozen parameters: ``"warn"``,
            ``"error"`` or ``"ignore"``.
        separate_ends: See ``"blocks"``. Pass ``False`` if forward uses the weight of an embedding
            or a head without calling the module.
        max_transient: The bytes that one unit may use temporarily beyond its shard, while it is
            gathered or while its gradients are reduced. Larger units are split.
        min_unit: The bytes that a unit should at least gather. Smaller neighbors in one container
            are combined, as with ``fully_shard([a, b])``, to issue fewer collectives. Forward
            should call all of them. ``max_transient`` has priority.
        keep_originals: Keeps the full parameters until the last unit is sharded, so that a failure
            can be rolled back. ``False`` frees the parameters of each unit at once, as separate
            ``fully_shard`` calls do. Errors that planning finds still leave the model unchanged.
        shard_fn: A function with the arguments of ``fully_shard``.
        **fully_shard_kwargs: Arguments for every unit: ``mesh``, ``mp_policy`` and so on.

    Returns:
        ``model``, whose class and whose units' classes are now ``FSDP<Class>``.

    Weights that are tied across units come into one unit. Separate units with equal arguments are
    sharded as one list. A unit inside the other one is not made.

    Raises:
        ValueError: FSDP was already applied to a part of the model; the policy selects nothing or
            a container without forward; tied weights are in units with different arguments (the
            message names both); ``frozen="error"`` and a unit has trainable and frozen parameters;
            a unit exceeds ``max_transient`` and cannot be split; a bound is not positive.
        TypeError: ``model`` is not a module, ``policy`` not a policy, or a bound not a number.

    An exception, of the policy or of ``fully_shard``, leaves the model unchanged. Rank 0 logs the
    units in one INFO line of torch's FSDP2 logger.
    """
    if frozen not in ("warn", "error", "ignore"):
        raise ValueError(f"frozen should be 'warn', 'error' or 'ignore', not {frozen!r}")
    units, ignored = _plan_units(
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
        signature.bind(model, **unit.kwargs)  # raises TypeError for unknown arguments
    if frozen != "ignore":
        for message in find_mixed_requires_grad(model, units, ignored):
            if frozen == "error":
                raise ValueError(message)
            warnings.warn(message, stacklevel=2)
    tensors = (*model.parameters(), *model.buffers())
    snapshot = Snapshot(model.modules(), tensors) if keep_originals else None
    owned = _list_owned_params(model, units)
    text = f"{type(model).__name__}: {_format_summary(units, owned)}"
    try:
        for unit in units:
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            _shard_unit(shard_fn, modules, unit)
            if snapshot is not None:
                snapshot.release(owned[unit])
        logger.info("fsdp_c: auto_shard made of %s", text)
        return model  # inside the try: a signal handler may raise before the return
    except BaseException:
        if snapshot is not None:
            snapshot.restore()
        raise


def _shard_unit(shard_fn: Callable[..., Any], modules: Any, unit: Unit) -> None:
    try:
        shard_fn(modules, **unit.kwargs)
        if not unit.regathers and isinstance(modules, FSDPModule):
            modules.set_unshard_in_backward(False)
    except Exception as error:
        add_hint(error, f"This was the unit {unit}.")
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
    """Returns the units that :func:`auto_shard` would make, in order, the root last.

    Does not change the model, and needs no process group. ``ranks`` is the number of ranks to shard
    over. Arguments and exceptions are those of :func:`auto_shard`.
    """
    classes, kwargs = tuple(full_precision_classes), dict(fully_shard_kwargs)
    modules, params = set(ignored_modules), set(ignored_params)
    planned = _plan_units(
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
    return planned[0]


def _plan_units(
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
    """Returns the units and all ignored parameters."""
    _check_arguments(model, kwargs.get("mp_policy"), max_transient, min_unit)
    check_nested_wrapping(model)
    ignored_modules = {inner for module in ignored_modules for inner in module.modules()}
    ignored_params = ignored_params | {
        param for module in ignored_modules for param in module.parameters()
    }
    if ignored_params:
        kwargs = kwargs | {"ignored_params": ignored_params}
    mixed = getattr(kwargs.get("mp_policy"), "param_dtype", None) is not None
    overridden = _find_instances(model, full_precision_classes, ignored_modules) if mixed else {}
    always = full_precision_classes if overridden else ()
    selected = run_policy(policy, model, ignored_modules, ignored_params, kwargs, always)
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    units = [Unit(modules, tuple(names[m] for m in modules), kw) for modules, kw in selected]
    if policy == "blocks":
        units = [
            _tune_embedding_or_head(unit)
            for unit in units
            if separate_ends or not _is_embedding_or_head(unit)
        ]
    root = Unit((model,), ("",), dict(kwargs))
    for unit in units:
        if unit.modules == (model,):  # a CustomPolicy may return arguments for the root
            root = unit
    units = [unit for unit in units if unit is not root] + [root]
    if ranks is None:
        ranks = _count_ranks(kwargs.get("mesh"))
    if max_transient is not None:
        units = split_large_units(
            units, max_transient, ranks, ignored_modules, ignored_params, names
        )
    if overridden:
        warn_on_overridden_mixed_precision(set(map(type, overridden)))
        units = _apply_full_precision(model, units, overridden)
    units = _sort_units(model, _merge_tied(model, units, ignored_params))
    if min_unit is not None:
        owned = _list_owned_params(model, units, ignored_params)
        units = _sort_units(model, join_small_units(units, owned, min_unit, max_transient, ranks))
    if max_transient is not None:
        check_unit_sizes(_list_owned_params(model, units, ignored_params), max_transient, ranks)
    return units, ignored_params


def _check_arguments(
    model: Any, mp_policy: Any, max_transient: int | None, min_unit: int | None
) -> None:
    require_module(model, "auto_shard")
    dtype = getattr(mp_policy, "param_dtype", None)
    if isinstance(dtype, str):
        note = f"mp_policy.param_dtype: a torch.dtype, not {dtype!r}: torch.bfloat16, for example."
        raise with_hint(make_dtype_error(dtype), note)
    for name, size in (("max_transient", max_transient), ("min_unit", min_unit)):
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, (int, float)):
            raise TypeError(f"{name} is a number of bytes, such as 2 * 2**30, not {size!r}")
        if not size > 0:
            raise ValueError(f"{name} is a positive number of bytes, not {size}")


def _count_ranks(mesh: DeviceMesh | None) -> int:
    """Returns the number of ranks that a parameter is sharded over."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim <= 2:
        return mesh.size(mesh.ndim - 1)
    return dist.get_world_size() if dist.is_initialized() else 1


# ---- embeddings and heads


def _is_embedding_or_head(unit: Unit) -> bool:
    """Whether a unit of the policy "blocks" is an embedding or a head outside lists of layers."""
    parent = unit.names[0].rpartition(".")[2]
    return isinstance(unit.modules[0], (nn.Embedding, nn.Linear)) and not parent.isdigit()


def _tune_embedding_or_head(unit: Unit) -> Unit:
    """Returns the unit; for an embedding or a head with its settings for backward and reshard."""
    if not _is_embedding_or_head(unit):
        return unit
    module, kwargs = unit.modules[0], unit.kwargs
    if isinstance(module, nn.Embedding):
        return replace(unit, regathers=module.max_norm is not None or module.sparse)
    if kwargs.get("reshard_after_forward") is None:  # backward starts with the head
        kwargs = kwargs | {"reshard_after_forward": False}
    return replace(unit, kwargs=kwargs)


def _format_summary(units: list[Unit], owned: dict[Unit, list[nn.Parameter]]) -> str:
    """Describes the units by module class: their number, and the elements of the largest."""
    kinds: dict[str, list[int]] = {}
    for unit in units:
        size = sum(param.numel() for param in owned[unit])
        kind = ", ".join(dict.fromkeys(type(module).__name__ for module in unit.modules))
        kinds.setdefault("the root" if unit is units[-1] else kind, []).append(size)
    parts = [
        f"{len(sizes)} x {kind} ({max(sizes):,} elements{' at most' * (len(sizes) > 1)})"
        if kind != "the root"
        else f"the root ({sizes[0]:,} elements)"
        for kind, sizes in kinds.items()
    ]
    return ", ".join(parts)


def _find_instances(
    model: nn.Module, classes: tuple[type[nn.Module], ...], ignored: set[nn.Module]
) -> dict[nn.Module, None]:
    instances = (m for m in model.modules() if isinstance(m, classes))
    return dict.fromkeys(m for m in instances if m is not model and m not in ignored)


# ---- checks


def check_nested_wrapping(root: nn.Module) -> None:
    """Refuses a model with a module that FSDP (1 or 2) was applied to.

    Raises:
        ValueError: FSDP was applied to a module; the message has its name.
    """
    for name, module in root.named_modules():
        applied = _get_module_fsdp_state(module) is not None
        if applied or _common_utils._get_module_fsdp_state(module) is not None:
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}"
            )


def warn_on_overridden_mixed_precision(classes: Collection[type[nn.Module]]) -> None:
    """Warns that modules of ``classes`` become separate units with full precision, if any."""
    if classes:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the model "
            f"has submodules of type:\n{set(classes)}\nThese become units of their own, with "
            "mixed precision disabled.",
            stacklevel=4,
        )


def find_mixed_requires_grad(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter]
) -> Iterator[str]:
    """Yields a message for each unit with trainable and frozen parameters, in unit order."""
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
    """Returns every module once with its name, in post-order, the root last.

    Siblings are in registration order.
    """
    names: dict[nn.Module, str] = {root: ""}
    for name, module in root.named_modules():
        names.setdefault(module, name)
    return [(names[module], module) for module in iterate_children_first(root)]


def managed_param_to_fqn(
    module: nn.Module,
    ignored_params: Collection[nn.Parameter],
    visited: set[nn.Module],
    prefix: str,
) -> dict[nn.Parameter, str]:
    """Returns the parameters that a unit of ``module`` would manage, with their names.

    Call it for inner units before outer ones.

    Args:
        module: The module of the unit.
        ignored_params: Parameters to leave out.
        visited: The modules of earlier units. The unit's modules are added.
        prefix: The name of ``module`` from the root.
    """
    fqns: dict[nn.Parameter, str] = {}
    visited.add(module)
    queue = collections.deque([(module, prefix)])
    while queue:
        current, name = queue.popleft()
        dotted = f"{name}." if name else ""
        for local, param in current.named_parameters(recurse=False):
            if param not in ignored_params:
                fqns[param] = dotted + local
        for local, child in current.named_children():
            if child is not None and child not in visited:
                visited.add(child)
                queue.append((child, dotted + local))
    return fqns


# ---- full precision


def _apply_full_precision(
    model: nn.Module, units: list[Unit], overridden: Collection[nn.Module]
) -> list[Unit]:
    """Returns ``units`` with full-precision policies for units of ``overridden`` modules.

    These units compute in the dtype of their parameters. Their outputs have the compute dtype of
    the unit around them.
    """
    around = {unit.modules[0]: unit for unit in units if unit.modules[0] not in overridden}
    dtypes: dict[nn.Module, torch.dtype | None] = {}
    for module, parents in _iterate_enclosing_units(model, around):
        if module in overridden:
            outer = around[parents[-1]].kwargs.get("mp_policy") if parents else None
            dtypes[module] = getattr(outer, "param_dtype", None)
    result = []
    for unit in units:
        if unit.modules[0] in overridden:
            own = next((p.dtype for p in unit.modules[0].parameters()), torch.float32)
            policy = MixedPrecisionPolicy(param_dtype=own, output_dtype=dtypes[unit.modules[0]])
            unit = replace(unit, kwargs=unit.kwargs | {"mp_policy": policy})
        result.append(unit)
    return result


def _iterate_enclosing_units(
    root: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Yields every module, per registration, with the modules of ``units`` that contain it.

    The containing modules are ordered from the outermost to the innermost.
    """

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


def _find_owners(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter] = ()
) -> dict[nn.Parameter, dict[Unit, str]]:
    """Maps each parameter to the units that have it, each with its first name there."""
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


def _merge_tied(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter]
) -> list[Unit]:
    """Merges or removes units until every parameter is in one unit only; returns the units.

    Raises:
        ValueError: Tied weights are in units with different arguments.
    """
    while True:
        owners = _find_owners(model, units, ignored_params)
        shared = next((param for param, holders in owners.items() if len(holders) > 1), None)
        if shared is None:
            return units
        (first, name), (second, other) = list(owners[shared].items())[:2]
        tied = f"'{name}' of the unit {first} and '{other}' of the unit {second} are one parameter"
        if not _are_equal(first.kwargs, second.kwargs):
            raise ValueError(
                f"{tied}, and the two units have different arguments: let the policy select "
                "neither of them, or give them the same arguments"
            )
        inner = first if _is_below(first, second) else second
        if _is_below(first, second) or _is_below(second, first):
            units = [unit for unit in units if unit is not inner]
            outcome = f"{inner} does not become a unit"
            changed = {inner}
        else:
            both = Unit(first.modules + second.modules, first.names + second.names, first.kwargs)
            units = [both if unit is first else unit for unit in units if unit is not second]
            outcome = "the two become one unit"
            changed = {first, second}
        rest = sum(p.numel() for p, holders in owners.items() if len(changed & holders.keys()) == 1)
        if rest > shared.numel():
            warnings.warn(f"{tied}: {outcome}", stacklevel=4)


def _are_equal(a: Kwargs, b: Kwargs) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] or a[key] == b[key] for key in a)


def _is_below(inner: Unit, outer: Unit) -> bool:
    below = {m for module in outer.modules for m in module.modules() if m is not module}
    return any(module in below for module in inner.modules)


def _sort_units(model: nn.Module, units: list[Unit]) -> list[Unit]:
    """Returns the units sorted stably, so that inner units precede the units around them.

    Raises:
        ValueError: Merged units contain one another.
    """
    unit_of = {module: unit for unit in units for module in unit.modules}
    inside: dict[Unit, set[Unit]] = {unit: set() for unit in units}
    for module, around in _iterate_enclosing_units(model, unit_of):
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


def _list_owned_params(
    model: nn.Module, units: list[Unit], ignored_params: Collection[nn.Parameter] = ()
) -> dict[Unit, list[nn.Parameter]]:
    owned: dict[Unit, list[nn.Parameter]] = {unit: [] for unit in units}
    for param, holders in _find_owners(model, units, ignored_params).items():
        owned[next(iter(holders))].append(param)
    return owned
