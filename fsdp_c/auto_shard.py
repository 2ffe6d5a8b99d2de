"""``auto_shard``: shards a model in one call. A policy selects the units.

The call plans the units (``wrap.py``), then calls ``fully_shard`` on each unit and on the root. If
one of these calls fails, the changes of all calls are rolled back, unless ``keep_originals`` is
false.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from ._auto_shard.checks import find_mixed_requires_grad
from ._auto_shard.unit import Unit
from ._auto_shard.unit_order import list_owned_params
from ._runtime.hints import add_hint
from ._runtime.transaction import ModuleSnapshot
from .fully_shard import fully_shard
from .policies import Policy
from .replicate import replicate
from .wrap import ShardKwargs, plan_units

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

Model = TypeVar("Model", bound=nn.Module)


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

            - ``"blocks"``: the repeated layers of the model, found by their structure. With
              ``separate_ends``, an embedding or a head (``nn.Embedding``, ``nn.Linear``) also
              becomes a unit. It must have at least the size of the largest block, and its weight
              must not be tied. Backward does not gather an embedding's weight again. A head stays
              gathered from forward to backward.
            - an ``int``: the maximum of bytes that a unit gathers, in the compute dtype.
            - a module class, or several: their instances.
            - torch's ``ModuleWrapPolicy`` and ``CustomPolicy``. The function of a ``CustomPolicy``
              may return arguments of ``fully_shard`` for the module, and for the root.
            - a callable with torch's signature, ``policy(module=, recurse=, nonwrapped_numel=)``.
              Examples: ``functools.partial(size_based_auto_wrap_policy, min_num_params=10**6)``,
              ``transformer_auto_wrap_policy``, ``lambda_auto_wrap_policy``.
        ignored_modules: Modules that are not sharded, including their submodules.
        ignored_params: Parameters that are not sharded.
        full_precision_classes: With ``mp_policy.param_dtype``, modules of these classes become
            separate units that compute in the dtype of their parameters. Their outputs have the
            dtype that the unit around them computes in. Their gradients are reduced in
            ``mp_policy.reduce_dtype``. A warning names the classes that were found.
        frozen: The reaction to a unit with trainable and frozen parameters: ``"warn"``,
            ``"error"`` or ``"ignore"``.
        separate_ends: See ``"blocks"``. Pass ``False`` if forward uses the weight of an embedding
            or a head without calling the module.
        max_transient: The bytes that one unit may use temporarily beyond its shard, while it is
            gathered or while its gradients are reduced. Larger units are split. The parts do not
            cast their outputs to ``mp_policy.output_dtype``.
        min_unit: The bytes that a unit should at least gather. Smaller neighbors in one container
            are combined, as with ``fully_shard([a, b])``, to issue fewer collectives. Forward
            should call all combined modules. ``max_transient`` has priority.
        keep_originals: Keeps the full parameters until the last unit is sharded, so that a failure
            can be rolled back. ``False`` frees the parameters of each unit immediately, as separate
            ``fully_shard`` calls do. Errors that planning finds still leave the model unchanged.
        shard_fn: A function with the arguments of ``fully_shard``.
        **fully_shard_kwargs: Arguments for every unit: ``mesh``, ``mp_policy`` and so on.

    Returns:
        ``model``, whose class and whose units' classes are now ``FSDP<Class>``.

    Units with tied weights become one unit. If one of them contains the other, only the outer one
    is made. Otherwise they must have equal arguments, and are sharded as one list.

    Raises:
        ValueError: FSDP was already applied to a part of the model; the policy selects a container
            without forward; ``"blocks"`` finds no layers, or no module is an instance of a class
            (other policies may select nothing, and the model is one unit); tied weights are in
            units with different arguments (the message names both); ``frozen="error"`` and a unit
            has trainable and frozen parameters; a unit exceeds ``max_transient`` and cannot be
            split; a bound is not positive; ``policy`` or ``frozen`` is another text.
        TypeError: ``model`` is not a module, ``policy`` not a policy, or a bound not a number; or
            ``shard_fn`` does not have an argument.

    An exception, of the policy or of ``fully_shard``, leaves the model unchanged if
    ``keep_originals`` is true. Each rank logs the units in one INFO line of torch's FSDP2 logger.
    """
    if frozen not in ("warn", "error", "ignore"):
        raise ValueError(f"frozen should be 'warn', 'error' or 'ignore', not {frozen!r}")
    units, ignored = plan_units(
        model,
        policy,
        set(ignored_modules),
        set(ignored_params),
        tuple(full_precision_classes),
        dict(fully_shard_kwargs),
        separate_ends,
        max_transient,
        ranks=1 if shard_fn is replicate else None,
        min_unit=min_unit,
    )
    signature = inspect.signature(shard_fn)
    if isinstance(policy, str) and "reshard_after_forward" not in fully_shard_kwargs:
        units = [_drop_missing_argument(unit, signature) for unit in units]
    for unit in units:
        signature.bind(model, **unit.kwargs)  # raises TypeError for unknown arguments
    if frozen != "ignore":
        for message in find_mixed_requires_grad(model, units, ignored):
            if frozen == "error":
                raise ValueError(message)
            warnings.warn(message, stacklevel=2)
    tensors = (*model.parameters(), *model.buffers())
    snapshot = ModuleSnapshot(model.modules(), tensors) if keep_originals else None
    owned_params = list_owned_params(model, units)
    summary = f"{type(model).__name__}: {_format_summary(units, owned_params)}"
    try:
        for unit in units:
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            _shard_unit(shard_fn, modules, unit)
            if snapshot is not None:
                snapshot.release(owned_params[unit])
        logger.info("fsdp_c: auto_shard units of %s", summary)
        return model  # inside the try: a signal handler may raise before the return
    except BaseException:
        if snapshot is not None:
            snapshot.restore()
        raise


def _drop_missing_argument(unit: Unit, signature: inspect.Signature) -> Unit:
    """Returns the unit without ``reshard_after_forward`` if ``shard_fn`` does not accept it."""
    name = "reshard_after_forward"
    parameters = signature.parameters.values()
    if any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters):
        return unit
    return replace(unit, kwargs={key: unit.kwargs[key] for key in unit.kwargs if key != name})


def _shard_unit(shard_fn: Callable[..., Any], modules: Any, unit: Unit) -> None:
    try:
        shard_fn(modules, **unit.kwargs)
        if not unit.unshard_in_backward and isinstance(modules, FSDPModule):
            modules.set_unshard_in_backward(False)
    except Exception as error:
        add_hint(error, f"This was the unit {unit}.")
        raise


def _format_summary(units: list[Unit], owned_params: dict[Unit, list[nn.Parameter]]) -> str:
    """Describes the units by module class: the count, and the elements of the largest unit."""
    kinds: dict[str, list[int]] = {}
    for unit in units:
        size = sum(param.numel() for param in owned_params[unit])
        kind = ", ".join(dict.fromkeys(type(module).__name__ for module in unit.modules))
        kinds.setdefault("the root" if unit is units[-1] else kind, []).append(size)
    parts = [
        f"{len(sizes)} x {kind} ({max(sizes):,} elements{' at most' * (len(sizes) > 1)})"
        if kind != "the root"
        else f"the root ({sizes[0]:,} elements)"
        for kind, sizes in kinds.items()
    ]
    return ", ".join(parts)
