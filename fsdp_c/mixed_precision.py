"""``MixedPrecisionPolicy`` with torch 2.15's per-parameter compute dtypes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

_HAS_OVERRIDE = any(
    field.name == "param_dtype_override_fn"
    for field in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)
)

REDUCES_AS_STORED = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether gradients are reduced in the dtype of their parameters (torch 2.15) and not in the one
that is computed in, where the policy has no ``reduce_dtype``."""


if _HAS_OVERRIDE and not TYPE_CHECKING:
    MixedPrecisionPolicy = torch_fsdp.MixedPrecisionPolicy
else:

    @dataclasses.dataclass(frozen=True, eq=False)
    class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
        """FSDP2's policy (``param_dtype``, ``reduce_dtype``, ``output_dtype``,
        ``cast_forward_inputs``), and compute dtypes for single parameters.

        Attributes:
            param_dtype_override_fn: Called once for each parameter, when ``fully_shard`` is
                applied; must say the same on all ranks. Returns ``None`` (or ``param_dtype``)
                where the parameter computes in ``param_dtype``, or the parameter's own dtype,
                where it stays as it is: ``lambda param: torch.float32 if param.ndim == 1 else
                None``. Forward inputs are cast to ``param_dtype`` in any case. One gather brings
                all of a unit's parameters, and one reduction their gradients: in
                ``reduce_dtype``, or without one in the widest dtype of the gradients.
        """

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = (
            dataclasses.field(default=None, kw_only=True)
        )

        def __eq__(self, other: object) -> bool:
            """As torch's policy; one without the function equals torch's of the same fields."""
            if not isinstance(other, torch_fsdp.MixedPrecisionPolicy):
                return NotImplemented
            return _values(self) == _values(other)

        def __hash__(self) -> int:
            return super().__hash__()


def _values(policy: torch_fsdp.MixedPrecisionPolicy) -> dict[str, object]:
    return {"param_dtype_override_fn": None} | vars(policy)


def compute_dtype(
    policy: torch_fsdp.MixedPrecisionPolicy, param: torch.Tensor
) -> torch.dtype | None:
    """What ``policy`` wants ``param`` to compute in; ``None``: its own dtype.

    Raises:
        ValueError: its function returned something else than a dtype or ``None``, or a dtype that
            is neither ``param_dtype`` nor the parameter's own.
        NotImplementedError: as :func:`stored_dtype`.
    """
    stored_dtype(param)
    override = getattr(policy, "param_dtype_override_fn", None)
    wanted = override(param) if override is not None else None
    if wanted is None:
        return policy.param_dtype
    if not isinstance(wanted, torch.dtype):
        raise ValueError(
            f"param_dtype_override_fn must return a torch.dtype or None, not {type(wanted)}"
        )
    if wanted not in (policy.param_dtype, param.dtype):
        raise ValueError(
            f"param_dtype_override_fn returned {wanted} for a parameter of {param.dtype}; it can "
            f"be None, that dtype, or the policy's param_dtype ({policy.param_dtype})"
        )
    return wanted


def stored_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of ``param``, and of its gradient once that is reduced.

    Raises:
        NotImplementedError: ``grad_dtype`` was set to another one, which torch's FSDP2 follows
            from 2.15 on.
    """
    if getattr(param, "_has_grad_dtype_override", False) and param.grad_dtype != param.dtype:
        raise NotImplementedError(
            f"fsdp_c keeps gradients in the dtype of their parameter, {param.dtype}, and does not "
            f"follow grad_dtype={param.grad_dtype}: leave it unset, and let "
            "MixedPrecisionPolicy(reduce_dtype=...) say what gradients are reduced in"
        )
    return param.dtype


def refuse_others(policy: torch_fsdp.MixedPrecisionPolicy) -> None:
    """Raises what the installed torch does at once for what is no policy.

    Raises:
        TypeError: from torch 2.15 on; before, nothing is raised here.
    """
    if _HAS_OVERRIDE:
        dataclasses.replace(policy, param_dtype_override_fn=None)  # type: ignore[call-arg]


def no_dtype(value: str) -> Exception:
    """What the installed torch raises for the name of a dtype, in the first step."""
    if REDUCES_AS_STORED:
        return AttributeError("'str' object has no attribute 'is_floating_point'")
    return RuntimeError(f"Invalid device string: '{value}'")


def reduce_dtype(
    policy: torch_fsdp.MixedPrecisionPolicy, stored: torch.dtype, computed: torch.dtype | None
) -> torch.dtype | None:
    """What gradients are reduced in, as the installed torch has it.

    Args:
        policy: The policy; its ``reduce_dtype`` comes first.
        stored: The parameter's own dtype.
        computed: What it computes in; ``None``: its own.

    Returns:
        ``None`` for the dtype that gradients have.
    """
    if policy.reduce_dtype is not None or not REDUCES_AS_STORED:
        return policy.reduce_dtype
    return stored if stored.is_floating_point and computed not in (None, stored) else None


def widest_stored(params: Iterable[Any]) -> torch.dtype | None:
    """What units of several dtypes are reduced in where torch reduces in the parameters' own."""
    dtypes = [param.orig_dtype for param in params]
    if not REDUCES_AS_STORED or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    return functools.reduce(torch.promote_types, dtypes)


class CastingParam:
    """A parameter as torch's reduction is handed it where the row has no dtype of its own: its part
    of the row is cast to its dtype when it becomes a gradient; all else is the parameter."""

    pin_memory = False  # what is copied to the CPU is to be there when it is cast
    sharded_grad_dtype = None  # torch 2.15: leaves it to to_sharded_dtensor()

    def __init__(self, param: Any) -> None:
        vars(self)["_param"] = param

    def __getattr__(self, name: str) -> Any:
        return getattr(self._param, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._param, name, value)

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        dtype = self._param.orig_dtype
        real = tensor if dtype.is_complex else torch.real(tensor)
        return self._param.to_sharded_dtensor(real.to(dtype).contiguous())
