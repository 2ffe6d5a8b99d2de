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

import fsdp_c._C as _C

_HAS_OVERRIDE = any(
    field.name == "param_dtype_override_fn"
    for field in dataclasses.fields(torch_fsdp.MixedPrecisionPolicy)
)

REDUCES_IN_PARAM_DTYPE = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether gradients without ``reduce_dtype`` are reduced in the parameters' dtype (torch 2.15).

Older releases reduce them in the compute dtype.
"""


if _HAS_OVERRIDE and not TYPE_CHECKING:
    MixedPrecisionPolicy = torch_fsdp.MixedPrecisionPolicy
else:

    @dataclasses.dataclass(frozen=True, eq=False)
    class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
        """torch's FSDP2 policy, extended by compute dtypes for single parameters.

        Attributes:
            param_dtype_override_fn: A function that ``fully_shard`` calls once for each parameter.
                If the function returns ``None`` or ``param_dtype``, the parameter computes in
                ``param_dtype``. If it returns the parameter's own dtype, there is no cast. Example:
                ``lambda param: torch.float32 if param.ndim == 1 else None``. ``auto_shard`` and
                ``plan`` also call it, to compute sizes. The results must be equal on all ranks. The
                function does not affect forward inputs, which ``cast_forward_inputs`` casts to
                ``param_dtype``. A unit still uses one gather, and one reduction in ``reduce_dtype``
                or in the widest dtype of the gradients.
        """

        param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = (
            dataclasses.field(default=None, kw_only=True)
        )

        def __eq__(self, other: object) -> bool:
            """Compares all fields. A policy without the function equals torch's policy."""
            if not isinstance(other, torch_fsdp.MixedPrecisionPolicy):
                return NotImplemented
            return _get_fields(self) == _get_fields(other)

        def __hash__(self) -> int:
            return super().__hash__()


def _get_fields(policy: torch_fsdp.MixedPrecisionPolicy) -> dict[str, object]:
    return {"param_dtype_override_fn": None} | vars(policy)


def get_param_dtype(
    policy: torch_fsdp.MixedPrecisionPolicy, param: torch.Tensor
) -> torch.dtype | None:
    """Returns the dtype in which ``param`` computes; ``None`` means its own dtype.

    Raises:
        ValueError: The policy's function returned an object that is not a dtype or ``None``, or a
            dtype that is neither ``param_dtype`` nor the parameter's dtype.
    """
    override = getattr(policy, "param_dtype_override_fn", None)
    dtype = override(param) if override is not None else None
    if dtype is None:
        return policy.param_dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"param_dtype_override_fn must return a torch.dtype or None, not {type(dtype)}"
        )
    if dtype not in (policy.param_dtype, param.dtype):
        raise ValueError(
            f"param_dtype_override_fn returned {dtype} for a parameter of {param.dtype}; it can "
            f"be None, that dtype, or the policy's param_dtype ({policy.param_dtype})"
        )
    return dtype


def has_grad_dtype(param: torch.Tensor) -> bool:
    """Whether the user has set ``param.grad_dtype``, which FSDP2 follows since torch 2.15."""
    return REDUCES_IN_PARAM_DTYPE and param._has_grad_dtype_override  # type: ignore[attr-defined]


def check_policy(policy: torch_fsdp.MixedPrecisionPolicy) -> None:
    """Raises for an object that is not a policy, as the installed torch does.

    Raises:
        TypeError: ``policy`` is not a policy, and torch is 2.15 or newer.
    """
    if _HAS_OVERRIDE:
        dataclasses.replace(policy, param_dtype_override_fn=None)  # type: ignore[call-arg]


def make_dtype_error(value: str, field: str = "param_dtype") -> Exception:
    """Returns the exception of the installed torch for a policy with a string as ``field``."""
    if REDUCES_IN_PARAM_DTYPE and field != "output_dtype":
        return AttributeError("'str' object has no attribute 'is_floating_point'")
    if field == "reduce_dtype":
        return TypeError("empty(): argument 'dtype' must be torch.dtype, not str")
    return RuntimeError(f"Invalid device string: '{value}'")


def get_reduce_dtype(
    policy: torch_fsdp.MixedPrecisionPolicy,
    stored_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
) -> torch.dtype | None:
    """Returns the dtype in which gradients are reduced, as in the installed torch.

    Args:
        policy: The policy. Its ``reduce_dtype`` has priority.
        stored_dtype: The parameter's own dtype.
        compute_dtype: The compute dtype; ``None`` means ``stored_dtype``.

    Returns:
        The dtype, or ``None`` for the dtype of the gradients.
    """
    if policy.reduce_dtype is not None or not REDUCES_IN_PARAM_DTYPE:
        return policy.reduce_dtype
    return (
        stored_dtype
        if stored_dtype.is_floating_point and compute_dtype not in (None, stored_dtype)
        else None
    )


def can_reduce_in(dtype: torch.dtype | None) -> bool:
    """Whether gradients can be cast to ``dtype``. Integers would truncate them."""
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def widen_to_complex(dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the complex dtype for gradients whose ``reduce_dtype`` is ``dtype``.

    ``None`` and integers, in which no gradient can be reduced, are returned unchanged.
    """
    if dtype is None or not can_reduce_in(dtype):
        return dtype
    return torch.promote_types(dtype, torch.complex32)


APPLIED_REDUCE_DTYPE: Any = vars(_C.Param)["reduce_dtype"]
"""The descriptor ``reduce_dtype`` of the C class: the dtype in which gradients accumulate.

A group with one policy also reduces them in this dtype. None: the gradient's own dtype. Since torch
2.15 ``Param`` hides the descriptor behind a property that returns the policy's ``reduce_dtype``.
"""


def get_widest_stored_dtype(params: Iterable[Any]) -> torch.dtype | None:
    """Returns the reduce dtype of a unit with several dtypes, or None.

    Applies if torch reduces in the parameters' dtypes and all of them are floating-point.
    """
    dtypes = [param._grad_dtype or param.orig_dtype for param in params]
    if not REDUCES_IN_PARAM_DTYPE or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    return functools.reduce(torch.promote_types, dtypes)


class CastingParam:
    """Proxy of a parameter that casts its reduced gradient to ``sharded_grad_dtype``, unless None.

    torch's ``foreach_reduce`` gets proxies for a group with several dtypes. All other attributes
    are those of the parameter.
    """

    pin_memory = False  # the copy to the CPU must be complete before the cast
    sharded_grad_dtype = None  # torch 2.15 then leaves the cast to to_sharded_dtensor()

    def __init__(self, param: Any) -> None:
        vars(self)["_param"] = param

    def __getattr__(self, name: str) -> Any:
        return getattr(self._param, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._param, name, value)

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        dtype = self._param.sharded_grad_dtype or tensor.dtype
        converted = tensor if dtype.is_complex else torch.real(tensor)
        return self._param.to_sharded_dtensor(converted.to(dtype).contiguous())
