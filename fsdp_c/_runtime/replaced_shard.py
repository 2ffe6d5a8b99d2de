"""``ReplaceableShard``: adopts a parameter or local tensor that replaced the shard.

``Module._apply``, ``load_state_dict(assign=True)`` and assignments to ``param._local_tensor`` or to
its ``data`` replace shards. An assignment to ``param.data`` does not, as in torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.tensor import DTensor

from .hints import get_class_name, with_hint
from .mixed_precision import REDUCES_IN_PARAM_DTYPE, has_grad_dtype
from .param_shard import ParamShard, is_wrapper


class GroupOfParam(Protocol):
    """The methods and attributes of a parameter group that its parameters use."""

    _sharded_state: Any

    def _to_sharded(self) -> None: ...
    def _to_sharded_post_forward(self) -> None: ...
    def _to_unsharded(self) -> None: ...
    def _handle_replaced_param(self) -> None: ...
    def _init_reduce_dtype(self) -> None: ...


def make_meta_error(params: Sequence[ParamShard]) -> RuntimeError:
    """Returns the exception for ``params`` that are on the meta device."""
    names = [param._param_fqn or param._module_info.param_name for param in params]
    return RuntimeError(
        "FSDP parameters should be materialized from meta device before training, "
        f"but the following were still on meta device: {names}\n"
        "Call module.to_empty(device=...), then initialize the parameters."
    )


def _refuse_proxy(param: Any) -> None:
    """Raises torch's ``TraceError`` if ``param`` is a proxy of ``torch.fx.symbolic_trace``."""
    try:
        bool(getattr(param, "_local_tensor", None))  # a proxy has every attribute, but no value
    except Exception as error:
        raise with_hint(error, "Trace the model before fully_shard.") from None


class ReplaceableShard(ParamShard):
    """The part of ``Param`` that adopts replaced parameters and local tensors."""

    _group: weakref.ref[GroupOfParam] | None
    _module_info: ParamModuleInfo
    _adopted_tensor: torch.Tensor
    _partial_dtype: torch.dtype | None = None
    """The reduction dtype of the gradient in ``_partial``, if a conversion has changed it."""

    def _get_group(self) -> GroupOfParam | None:
        return self._group() if self._group is not None else None

    def reset_sharded_param(self) -> None:
        """Adopts the parameter that is registered on the module as the sharded parameter.

        ``Module._apply`` and ``load_state_dict(assign=True)`` replace the parameter or its local
        tensor. The local tensor is padded again if necessary.

        Raises:
            TraceError: ``torch.fx.symbolic_trace`` has replaced the parameter by a proxy.
            AttributeError: The registered parameter is not a DTensor.
            AssertionError: The local tensor's size differs from this rank's shard.
            RuntimeError: The dtypes of the local tensor and its DTensor differ.
        """
        info = self._module_info
        new_param = getattr(info.module, info.param_name)
        if new_param is not self.sharded_param:
            if torch.__future__.get_swap_module_params_on_conversion():
                raise AssertionError(
                    f"Expects swap_tensors to preserve object but got {new_param} "
                    f"instead of {self.sharded_param}"
                )
            if not isinstance(new_param, DTensor):
                _refuse_proxy(new_param)
                # torch 2.15 reads the property of tensors first, which None does not have.
                is_none = new_param is None and REDUCES_IN_PARAM_DTYPE
                attribute = "_has_grad_dtype_override" if is_none else "_local_tensor"
                error = AttributeError(
                    f"'{type(new_param).__name__}' object has no attribute '{attribute}'"
                )
                name = f"'{self._param_fqn or info.param_name}' of {get_class_name(info.module)}"
                if new_param is None:
                    raise with_hint(error, f"{name} was set to None: do this before fully_shard.")
                raise with_hint(
                    error,
                    f"{name} was replaced by a parameter that is not sharded: change its values in "
                    "place, under torch.no_grad(), or load whole weights with "
                    "fsdp_c.load_full_state_dict(model, state).",
                )
            try:
                self._check_local_tensor(new_param)
            except BaseException:
                self._register_sharded()  # restore the previous parameter on the module
                raise
            self._read_grad_dtype(self.sharded_param)
            self.sharded_param = new_param
        self._adopt_shard()

    def _refresh_shard(self) -> None:
        """Adopts a local tensor that was assigned to the sharded parameter. Called before a gather.

        Raises:
            AssertionError, RuntimeError: As :meth:`reset_sharded_param`.
            RuntimeError: The local tensor is on the meta device.
        """
        if self.sharded_param._local_tensor.is_meta and not self._sharded_param_data.is_meta:
            raise make_meta_error([self])
        self._adopt_shard()

    def _adopt_shard(self) -> None:
        self._check_local_tensor(self.sharded_param)
        if not self.sharded_param._local_tensor.is_meta:
            self._adopt_local_tensor(self.sharded_param._local_tensor)
            self._note_shard()
        self._sharding_spec = self.sharded_param._spec
        self._read_grad_dtype(self.sharded_param)
        if self._has_sharded_grad_dtype_override and not has_grad_dtype(self.sharded_param):
            self.sharded_param.grad_dtype = self.sharded_grad_dtype
        dtype = self._get_reduction_dtype()
        self.init_dtype_attrs(self.mp_policy)
        if self._partial is None:
            self._partial_dtype = None
        elif self._partial_dtype is None:
            self._partial_dtype = dtype
        group = self._get_group()
        if group is not None:
            group._handle_replaced_param()

    def _get_reduction_dtype(self) -> torch.dtype:
        return self._grad_dtype or self.reduce_dtype or self.param_dtype or self.orig_dtype

    def _convert_unreduced_grads(self) -> None:
        """Casts an unreduced gradient to the dtype of later gradients, after a conversion.

        Raises:
            RuntimeError: The gradient waits for its all-reduce, and the dtype has changed.
        """
        dtype = self._get_reduction_dtype()
        if self._partial is not None and self._partial_dtype not in (None, dtype):
            raise RuntimeError(
                f"parameter '{self._param_fqn}' was converted, so that its gradients are reduced "
                f"in {dtype}, but a gradient in {self._partial_dtype} was not all-reduced\n"
                "Convert the model back, or all-reduce in the last backward before the conversion."
            )
        self._partial_dtype = None
        if self._accumulated is not None:
            self._accumulated = self._accumulated.to(dtype)

    def _check_local_tensor(self, param: DTensor) -> None:
        """Raises if the local tensor of ``param`` cannot be this rank's shard."""
        local, info = param._local_tensor, self._module_info
        if local.is_meta:
            return  # the user materializes it before the first gather
        context = (
            f"parameter '{self._param_fqn or info.param_name}' of {tuple(self._orig_size)}, rank "
            f"{self._shard_rank}: expected the local tensor of distribute_tensor() with the "
            f"placements {self._sharding_spec.placements}"
        )
        sizes = (self.sharded_size, self.padded_sharded_param_size)
        if local.size() not in sizes and (local.numel() > 0 or self.sharded_size.numel() > 0):
            raise AssertionError(
                f"Expects size {self.sharded_size} but got {local.shape}\n{context}"
            )
        if param.shape != param._spec.shape:  # an assignment to param.data causes this
            raise AssertionError(
                f"Expects size {param._spec.shape} but got {param.shape}\n{context}"
            )
        if local.dtype != param.dtype:
            raise RuntimeError(
                f"expected the local tensor to have dtype {param.dtype} but got {local.dtype}\n"
                f"{context}; to change the dtype, convert the module (module.to(dtype))"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _adopt_local_tensor(self, local: torch.Tensor) -> None:
        if local is self._adopted_tensor and is_wrapper(local):
            return
        if self._is_current(local):
            # A new tensor, because gathers compare its address and its version counter.
            self._sharded_param_data = self._sharded_param_data.view(-1)
            return
        dim = self.fsdp_placement.dim
        padded, needs_pinning = local, self.pin_memory and not local.is_pinned()
        is_padded = local.size() == self.padded_sharded_param_size and local.is_contiguous()
        if not is_padded or needs_pinning or local.is_conj() or local.is_neg():
            padded = self._pad(local)
            padded = padded.cpu().pin_memory() if needs_pinning else padded
        if padded is not local or local.size() != self.sharded_size:
            self.sharded_param._local_tensor = padded.narrow(dim, 0, self.local_rows)
        self._adopted_tensor = self.sharded_param._local_tensor
        self._sharded_param_data = padded.view(-1)

    def _is_current(self, local: torch.Tensor) -> bool:
        """Whether ``local``, followed by its padding, is the memory that the core reads."""
        data = self._sharded_param_data
        if data.is_meta or data.dtype != local.dtype or is_wrapper(data) or is_wrapper(local):
            return False
        shares_memory = (
            local.untyped_storage()._cdata == data.untyped_storage()._cdata
            and local.storage_offset() == data.storage_offset()
            and local.is_contiguous()
        )
        return shares_memory and not (local.is_conj() or local.is_neg())
