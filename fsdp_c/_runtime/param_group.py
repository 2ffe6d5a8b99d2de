"""``ParamGroup``: the parts of a parameter group that do not run in each step.

The module has the constructor, lazy init, dtypes and state-dict hooks. ``process_groups.py`` and
``collectives.py`` have the base classes for communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group
import torch.nn as nn
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
)

import fsdp_c._C as _C

from .._compat import patches, zero_grad
from .._compat.guard import follow_patches, insert_node
from .meshes import (
    get_group_name,
    subscribe,
)
from .mixed_precision import (
    APPLIED_REDUCE_DTYPE,
    REDUCES_IN_PARAM_DTYPE,
    get_widest_stored_dtype,
)
from .param import Param, name_like_torch_hook
from .plan_hash import announce_guard, raise_difference
from .process_groups import GroupCommunication
from .replaced_shard import make_meta_error
from .typed_params import is_type_checking
from .weak_modules import WeakModules


@follow_patches(torch_group.FSDPParamGroup)
class ParamGroup(GroupCommunication):
    """Parameters that are gathered in one collective and reduced in one collective.

    The class is a subclass of torch's ``FSDPParamGroup``. ``_C.ParamGroup`` implements each step.

    Args:
        params: The group's parameters, in the order of the modules' traversal.
        modules: The modules that ``fully_shard`` was called on.
        mesh_info: The mesh: its shard dimension, its replicate dimension, or both.
        post_forward_mesh_info: ``mesh_info``: reshards after forward. A mesh with a smaller shard
            dimension: keeps a larger shard. ``None``: stays unsharded.
        device: Device of collectives and unsharded parameters.
        mp_policy: Mixed precision.
        offload_policy: Whether shards are in CPU memory.
        comm_ctx: Communication context of the state. Lazy init replaces it by the root's.
    """

    # Attributes of torch's groups. The core owns the events and buffers and waits for them.
    _post_reduce_event = None
    _all_reduce_state = None
    _reshard_after_forward_event = None
    modules = WeakModules()

    def __init__(
        self,
        params: list[Param],
        modules: tuple[nn.Module, ...],
        mesh_info: DataParallelMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        comm_ctx: _C.CommContext,
    ) -> None:
        name, world, rank = None, 1, 0
        if isinstance(mesh_info, FSDPMeshInfo):
            name = get_group_name(mesh_info.shard_process_group)
            world, rank = mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank
        _C.ParamGroup.__init__(self, params, comm_ctx, device, name, world, rank, len(modules))
        self.modules = modules
        self._mesh_info = mesh_info
        self._smaller_mesh_info = None
        self.device = device
        self.device_handle = _get_device_handle(device.type)
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.reduce_scatter_max_input_buffers = 1
        self._reset_sharded_params = False
        self._module_to_pre_save_state_dict_hook_handle: Any = weakref.WeakKeyDictionary()
        self._module_to_pre_load_state_dict_hook_handle: Any = weakref.WeakKeyDictionary()
        self._all_gather_output = torch.empty(0, device=device)
        self._comms: dict[str, Any] = {
            "gather": torch_group.DefaultAllGather(),
            "reduce": torch_group.DefaultReduceScatter(),
        }
        self._reduce_hook: Callable[[torch.Tensor], None] | None = None
        self._all_reduce_hook_stream: Any = None
        self._fallback_gathered: Any = None
        self._fallback_events: list[Any] = []
        self._offload_event: Any = None
        self._plans: dict[str, list[str]] = {}
        self._patch_lease = patches.lease()
        zero_grad.register_group(self)
        subscribe(mesh_info, self)
        self.post_forward_mesh_info = post_forward_mesh_info
        for param in params:
            param._group = weakref.ref(self)
        self._init_reduce_dtype()

    # ---- lazy init ----

    def lazy_init(self) -> None:
        """Adopts parameters that changed since ``fully_shard``, and validates them. Idempotent."""
        params = self.fsdp_params
        if self.is_sharded and not self._reset_sharded_params:
            for param in params:
                param.reset_sharded_param()
                param._init_extensions()
        self._validate_no_meta_params()
        self._validate_cpu_offload_params()
        self._validate_reduce_scatter_max_input_buffers()
        self._init_mp_dtypes()
        self._update_fallback()
        self._register_state_dict_hooks()
        if not self._reset_sharded_params:
            announce_guard(self)
        self._reset_sharded_params = True
        self._invalidate()

    def _init_mp_dtypes(self) -> None:
        for param in self.fsdp_params:
            param.init_dtype_attrs(self.mp_policy)
        self._init_reduce_dtype()
        self._update_orig_dtype()
        self._invalidate()

    def _init_reduce_dtype(self) -> None:
        # Frozen parameters count: they may be trained later.
        params = self.fsdp_params
        has_several_dtypes = len({param._policy_dtype for param in params}) > 1
        if has_several_dtypes or any(
            param.orig_dtype.is_complex or param._has_sharded_grad_dtype_override
            for param in params
        ):
            self._reduce_dtype = self.mp_policy.reduce_dtype or get_widest_stored_dtype(params)
        else:
            self._reduce_dtype = APPLIED_REDUCE_DTYPE.__get__(params[0]) if params else None

    def _update_orig_dtype(self) -> None:
        dtypes = {p.orig_dtype for p in self.fsdp_params if p.sharded_param.requires_grad}
        self._orig_dtype = dtypes.pop() if len(dtypes) == 1 else None

    def _handle_replaced_param(self) -> None:
        """Recomputes plans and the group's dtypes after a parameter's shard or dtype changed."""
        self._invalidate()
        self._update_fallback()
        if self._reset_sharded_params:
            self._update_orig_dtype()
            if REDUCES_IN_PARAM_DTYPE:
                self._init_reduce_dtype()

    def _validate_no_meta_params(self) -> None:
        meta_params = [
            param
            for param in self.fsdp_params
            if "meta" in (param.sharded_param.device.type, param._sharded_local_tensor.device.type)
        ]
        if meta_params:
            raise make_meta_error(meta_params)

    def _register_state_dict_hooks(self) -> None:
        if self._module_to_pre_save_state_dict_hook_handle:
            return
        group = weakref.ref(self)

        def to_sharded(*args: Any, **kwargs: Any) -> None:
            live_group = group()
            if live_group is not None:
                live_group._to_sharded()

        cls = torch_group.FSDPParamGroup
        name_like_torch_hook(to_sharded, cls, "_register_state_dict_hooks", "to_sharded_hook")
        for param in self.fsdp_params:
            module = param._module_info.module
            if module not in self._module_to_pre_save_state_dict_hook_handle:
                self._module_to_pre_save_state_dict_hook_handle[module] = (
                    module.register_state_dict_pre_hook(to_sharded)
                )
                self._module_to_pre_load_state_dict_hook_handle[module] = (
                    module._register_load_state_dict_pre_hook(to_sharded)
                )

    def _raise_plan_difference(
        self, name: str, rank: int, hash_of_rank_0: int, hash_of_rank: int
    ) -> NoReturn:
        """Called by the core if rank 0 and ``rank`` of process group ``name`` have other plans."""
        raise_difference(self._plans, name, rank, (hash_of_rank_0, hash_of_rank))

    def __repr__(self) -> str:
        return f"ParamGroup(fqn={self._module_fqn})"


class TypedParamGroup(ParamGroup):
    """A group with parameters that ``typed_params.py`` describes."""

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        """Runs at the end of pre-forward. Restores the types of the parameters.

        While types are checked, inserts torch's node, because its outputs get types.
        """
        for param in self.fsdp_params:
            param._restore_spmd_types(param.unsharded_param)
        if is_type_checking():
            return insert_node(self, args, kwargs)
        return super()._register_post_backward_hook(args, kwargs)
