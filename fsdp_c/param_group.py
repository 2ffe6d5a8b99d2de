"""The cold side of a parameter group: lazy init, dtypes, state-dict hooks, what is missing."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from . import _C
from .param import Param


def _unsupported(what: str) -> NoReturn:
    raise NotImplementedError(f"fsdp_c does not support {what} yet")


class _Unsupported:
    """An attribute that stock has and that may only be set to its default here."""

    def __init__(self, what: str, default: Any = None) -> None:
        self.what = what
        self.default = default

    def __get__(self, instance: object, owner: type) -> Any:
        return self.default

    def __set__(self, instance: object, value: Any) -> None:
        if value is not self.default:
            _unsupported(self.what)


class ParamGroup(_C.ParamGroup):
    """Parameters that are gathered in one collective and reduced in one collective.

    Args:
        params: The group's parameters, in the order of the modules' traversal.
        modules: The modules that ``fully_shard`` was called on.
        mesh_info: The 1-D mesh.
        post_forward_mesh_info: ``mesh_info`` to reshard after forward, ``None`` to stay unsharded.
        device: Device of shards and collectives.
        mp_policy: Mixed precision.
        comm_ctx: Communication context of the state until lazy init shares the root's.
    """

    _all_reduce_hook = _Unsupported("set_all_reduce_hook")
    _all_reduce_hook_stream = _Unsupported("set_all_reduce_hook(stream=...)")
    _all_gather_comm = _Unsupported("set_custom_all_gather")
    _reduce_scatter_comm = _Unsupported("set_custom_reduce_scatter")

    def __init__(
        self,
        params: list[Param],
        modules: tuple[nn.Module, ...],
        mesh_info: FSDPMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        comm_ctx: _C.CommContext,
    ) -> None:
        super().__init__(
            params,
            comm_ctx,
            device,
            mesh_info.shard_process_group.group_name,
            mesh_info.shard_mesh_size,
            mesh_info.shard_mesh_rank,
            len(modules),
        )
        self.modules = modules
        self.mesh_info = mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.offload_policy = OffloadPolicy()
        self.reduce_scatter_max_input_buffers = 1
        self._reset_sharded_params = False
        self._param_group_index = 0
        self._num_param_groups = 1
        self._module_to_pre_save_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self._module_to_pre_load_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self.post_forward_mesh_info = post_forward_mesh_info
        for param in params:
            param._group = weakref.ref(self)

    @property
    def post_forward_mesh_info(self) -> FSDPMeshInfo | None:
        """The mesh that parameters are sharded over between forward and backward, or None."""
        return self.mesh_info if self._reshard_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: FSDPMeshInfo | None) -> None:
        if value is not None and value != self.mesh_info:
            _unsupported("reshard_after_forward=int")
        self._reshard_after_forward = value is not None

    @property
    def _use_post_forward_mesh(self) -> bool:
        return False

    @property
    def _is_hsdp(self) -> bool:
        return False

    def lazy_init(self) -> None:
        """Adopts what changed since ``fully_shard`` and validates; idempotent."""
        params = self.fsdp_params
        if self.is_sharded and not self._reset_sharded_params:
            for param in params:
                param.reset_sharded_param()
        self._validate_no_meta_params()
        self._init_mp_dtypes()
        self._register_state_dict_hooks()
        self._reset_sharded_params = True
        self._invalidate()

    def _init_mp_dtypes(self) -> None:
        for param in self.fsdp_params:
            param.init_dtype_attrs(self.mp_policy)
        trainable = [param for param in self.fsdp_params if param.sharded_param.requires_grad]
        orig_dtypes = {param.orig_dtype for param in trainable}
        reduce_dtypes = {param.reduce_dtype for param in trainable}
        if len(orig_dtypes) > 1:
            raise AssertionError(
                f"FSDP expects uniform original parameter dtype but got {orig_dtypes}"
            )
        if len(reduce_dtypes) > 1:
            raise AssertionError(f"FSDP expects uniform reduce dtype but got {reduce_dtypes}")
        self._orig_dtype = next(iter(orig_dtypes), None)
        self._reduce_dtype = next(iter(reduce_dtypes), None)

    def _param_replaced(self) -> None:
        """A parameter's shard or dtype changed: plans and the group's dtypes follow."""
        self._invalidate()
        if self._reset_sharded_params:
            dtypes = {p.orig_dtype for p in self.fsdp_params if p.sharded_param.requires_grad}
            if len(dtypes) == 1:
                self._orig_dtype = dtypes.pop()

    def _validate_no_meta_params(self) -> None:
        names = [
            param._param_fqn or param._module_info.param_name
            for param in self.fsdp_params
            if param.sharded_param.device.type == "meta"
        ]
        if names:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {names}\n"
                "Call module.to_empty(device=...), then initialize the parameters."
            )

    def _register_state_dict_hooks(self) -> None:
        if self._module_to_pre_save_state_dict_hook_handle:
            return
        group = weakref.ref(self)

        def to_sharded(*args: Any, **kwargs: Any) -> None:
            alive = group()
            if alive is not None:
                alive._to_sharded()

        for param in self.fsdp_params:
            module = param._module_info.module
            if module not in self._module_to_pre_save_state_dict_hook_handle:
                self._module_to_pre_save_state_dict_hook_handle[module] = (
                    module.register_state_dict_pre_hook(to_sharded)
                )
                self._module_to_pre_load_state_dict_hook_handle[module] = (
                    module._register_load_state_dict_pre_hook(to_sharded)
                )

    def set_symm_mem(self, backend: str = "NCCL") -> None:
        _unsupported("set_symm_mem_for_comm")

    def set_allocate_memory_from_process_group(self, enable: bool) -> None:
        if enable:
            _unsupported("set_allocate_memory_from_process_group_for_comm")

    def _set_separate_reduce_scatter_group(self, enable: bool, new_groups: dict) -> None:
        if enable:
            _unsupported("set_separate_reduce_scatter_group")

    def __repr__(self) -> str:
        return f"ParamGroup(fqn={self._module_fqn})"


def check_offload_policy(policy: OffloadPolicy) -> None:
    """Refuses what is not supported yet."""
    if isinstance(policy, CPUOffloadPolicy):
        _unsupported("offload_policy=CPUOffloadPolicy(...)")
