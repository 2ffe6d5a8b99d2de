"""The cold side of a parameter: sharding, DTensor specs, adopting what users load or convert."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    ParamModuleInfo,
    ShardedState,
    _get_orig_param_uid,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import _C

if TYPE_CHECKING:
    from .param_group import ParamGroup


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    shards = [
        param._local_tensor
        for group in optimizer.param_groups
        for param in group["params"]
        if isinstance(param, DTensor)
    ]
    torch.autograd.graph.increment_version(shards)


@functools.cache
def _watch_optimizers() -> None:
    """Makes every ``optimizer.step()`` count as a write to its shards.

    DTensor's operations write them below the layer that counts, so that a gather made before the
    step (by an evaluation) would not be seen to be stale.
    """
    register_optimizer_step_post_hook(_count_step)


class Param(_C.Param):
    """One parameter of a group.

    Args:
        param: The parameter as the user made it: contiguous, at least 1-D, on ``device`` or meta.
        module_info: Where it is registered (first module and name, then the shared ones).
        mesh_info: The 1-D mesh that it is sharded over.
        device: Where shards and unsharded parameters live.
        mp_policy: Dtypes for computation and reduction.

    The constructor copies this rank's rows but registers nothing: see :meth:`register`.
    """

    def __init__(
        self,
        param: nn.Parameter,
        module_info: ParamModuleInfo,
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(tuple(param.size()), mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank)
        self._module_info = module_info
        self.mesh_info = mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.fsdp_placement = Shard(0)
        self.is_dtensor = False
        self.offload_to_cpu = False
        self.pin_memory = False
        self._group: weakref.ref[ParamGroup] | None = None
        self._orig_param_uid = _get_orig_param_uid(param)
        self._orig_size = param.size()
        self._contiguous_orig_stride = param.stride()
        self._spmd_mesh = mesh_info.mesh
        self._spmd_placements = (self.fsdp_placement,)
        self._init_sharded_param(param)
        self.init_dtype_attrs(mp_policy)
        self._post_load_hook_handle: Any = None

    @torch.no_grad()
    def _init_sharded_param(self, param: nn.Parameter) -> None:
        data = param.detach()
        self._sharding_spec = DTensorSpec(
            self._spmd_mesh,
            self._spmd_placements,
            tensor_meta=TensorMeta(data.size(), data.stride(), data.dtype),
        )
        rest = self._orig_size[1:]
        mesh_rank = self.mesh_info.shard_mesh_rank
        self.padded_sharded_param_size = torch.Size((self.chunk_rows, *rest))
        self.sharded_size = torch.Size((self.local_rows, *rest))
        start = min(mesh_rank * self.chunk_rows, self.rows)
        padded = self._pad(data.narrow(0, start, self.local_rows))
        self.sharded_param = nn.Parameter(
            self.to_sharded_dtensor(padded.narrow(0, 0, self.local_rows)),
            requires_grad=param.requires_grad,
        )
        self._sharded_param_data = self._with_padding(self.sharded_param._local_tensor)

    def _pad(self, shard: torch.Tensor) -> torch.Tensor:
        """A new tensor of ``padded_sharded_param_size``: the shard, then rows of zeros."""
        padded = shard.new_zeros(self.padded_sharded_param_size)
        if shard.numel() > 0:
            padded.narrow(0, 0, shard.size(0)).copy_(shard)
        return padded

    def _with_padding(self, local: torch.Tensor) -> torch.Tensor:
        """``local`` and the padding behind it, 1-D: a view, sharing the version counter."""
        return local.as_strided((self.padded_numel,), (1,), local.storage_offset())

    def register(self) -> None:
        """Puts the sharded parameter in place of the original on every module that holds it."""
        info = self._module_info
        slots = [(info.module, info.param_name)]
        slots += zip(info.shared_modules, info.shared_param_names)
        direct = [
            getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
            for module, _ in slots
        ]
        self._set_slots(slots, direct)
        self._register_sharded()
        _watch_optimizers()
        self._post_load_hook_handle = info.module.register_load_state_dict_post_hook(
            lambda *args, **kwargs: self.reset_sharded_param()
        )

    def restore(self, original: nn.Parameter) -> None:
        """Undoes :meth:`register`, for a ``fully_shard`` call that fails."""
        if self._post_load_hook_handle is not None:
            self._post_load_hook_handle.remove()
            self._post_load_hook_handle = None
        info = self._module_info
        names = [(info.module, info.param_name)]
        names += zip(info.shared_modules, info.shared_param_names)
        for module, name in names:
            module._parameters[name] = original

    @property
    def sharded_state(self) -> ShardedState:
        """The group's sharded state: parameters are never swapped one by one."""
        group = self._group() if self._group is not None else None
        return group._sharded_state if group is not None else ShardedState.SHARDED

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        return self.sharded_param._local_tensor

    @property
    def contiguous_sharded_stride(self) -> tuple[int, ...]:
        return self._contiguous_orig_stride

    @property
    def shard_mesh(self) -> Any:
        return self.mesh_info.mesh

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Resolves compute and reduce dtypes; ``None`` stands for "no cast needed"."""
        param_dtype, reduce_dtype = mp_policy.param_dtype, mp_policy.reduce_dtype
        before = self.param_dtype or self.orig_dtype
        self.orig_dtype = self.sharded_param.dtype
        if reduce_dtype == param_dtype:
            reduce_dtype = None
        if param_dtype == self.orig_dtype or not self.orig_dtype.is_floating_point:
            param_dtype = None
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        if before is not None and before != (param_dtype or self.orig_dtype):
            self._forget_unsharded()

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """The DTensor of a local shard (parameter or gradient) of ``sharded_size``."""
        if tensor.shape != self.sharded_size:
            raise AssertionError(f"Expects size {self.sharded_size} but got {tensor.shape}")
        return DTensor(tensor, self._sharding_spec, requires_grad=tensor.requires_grad)

    def _make_unsharded(self, flat: torch.Tensor) -> nn.Parameter:
        """The parameter seen while unsharded, over ``flat`` (called once by the core)."""
        with torch.no_grad():
            whole = torch.as_strided(flat, self._orig_size, self._contiguous_orig_stride, 0)
            return nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)

    def reset_sharded_param(self) -> None:
        """Adopts what is registered now: ``_apply``, ``load_state_dict(assign=True)`` and the like
        replace the parameter or its local tensor, which may need its padding again."""
        info = self._module_info
        new_param = getattr(info.module, info.param_name)
        if new_param is not self.sharded_param:
            if torch.__future__.get_swap_module_params_on_conversion():
                raise AssertionError(
                    f"Expects swap_tensors to preserve object but got {new_param} "
                    f"instead of {self.sharded_param}"
                )
            if not isinstance(new_param, DTensor):
                raise AssertionError(
                    f"Expected DTensor for parameter '{self._param_fqn or info.param_name}', "
                    f"got {type(new_param)}"
                )
            self.sharded_param = new_param
        local = new_param._local_tensor
        if not local.is_meta:
            self._adopt_local(local)
        self._sharding_spec = self.sharded_param._spec
        self.init_dtype_attrs(self.mp_policy)
        group = self._group() if self._group is not None else None
        if group is not None:
            group._param_replaced()

    @torch.no_grad()
    def _adopt_local(self, local: torch.Tensor) -> None:
        address = local.untyped_storage().data_ptr()
        data = self._sharded_param_data
        same_kind = not data.is_meta and data.dtype == local.dtype
        if same_kind and address != 0 and data.untyped_storage().data_ptr() == address:
            self._sharded_param_data = self._with_padding(local)  # it is still behind it
            return
        if local.size() == self.padded_sharded_param_size and local.is_contiguous():
            self._sharded_param_data = local.view(-1)
            return
        padded = self._pad(local)
        self._sharded_param_data = padded.view(-1)
        self.sharded_param._local_tensor = padded.narrow(0, 0, local.size(0))

    def __repr__(self) -> str:
        return f"Param(fqn={self._param_fqn}, orig_size={self._orig_size})"
