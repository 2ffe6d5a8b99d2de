"""``GroupCommunication``: meshes, process groups, custom collectives and hooks of a group.

The class passes process groups to the core, and chooses between the core and torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
)

import fsdp_c._C as _C

from .._compat.guard import find_overridden_methods
from .._compat.torch_releases import SymmMemAllGather, SymmMemReduceScatter
from .collectives import GroupCollectives
from .dtensor_specs import is_fake_param
from .extensions import has_extensions
from .meshes import (
    find_unregistered_group,
    get_group_name,
    get_size_and_rank,
    has_own_size,
    list_process_groups,
    subscribe,
    unsubscribe,
)
from .mixed_precision import can_reduce_in
from .param import Param


def _get_allocator(comm: Any, from_group: type, symmetric: type | None) -> Any:
    """Returns the core's allocator that acts like ``comm``: its name and its source.

    Args:
        comm: An object of torch or of the user that allocates buffers and issues collectives.
        from_group: torch's class that allocates from the backend of a process group.
        symmetric: torch's class that allocates symmetric memory. Older releases have none.

    Returns:
        The arguments of the allocator (csrc/bridge/allocator.cpp), or None if ``comm`` has another
        class, or an attribute that its class does not set.
    """
    group = getattr(comm, "_group", None)
    if not isinstance(group, dist.ProcessGroup) or vars(comm).keys() != {"_group"}:
        return None
    if type(comm) is from_group:
        return "process group", group
    return ("symmetric memory", comm) if type(comm) is symmetric else None


class GroupCommunication(GroupCollectives):
    """The part of ``ParamGroup`` that chooses process groups and collectives."""

    _comms: dict[str, Any]
    _mesh_info: Any  # one of torch's classes of mesh infos

    # ---- meshes and process groups ----

    @property
    def mesh_info(self) -> Any:
        """The mesh: its shard dimension, its replicate dimension, or both."""
        return self._mesh_info

    @mesh_info.setter
    def mesh_info(self, value: DataParallelMeshInfo) -> None:
        previous = self._mesh_info
        self._mesh_info = value
        try:
            self._refresh_process_groups()
        except BaseException:
            self._mesh_info = previous
            raise
        unsubscribe(previous, self)
        subscribe(value, self)

    def _refresh_process_groups(self) -> None:
        """Passes the present process groups of the mesh infos to the core.

        Raises:
            ValueError: The size or rank of a process group differs from the mesh that the
                parameters are sharded for.
        """
        info, smaller_info = self._mesh_info, self._smaller_mesh_info
        groups: list[tuple[str, Any, int, int]] = []
        if isinstance(info, FSDPMeshInfo):
            size, rank = info.shard_mesh_size, info.shard_mesh_rank
            groups.append(("shard", info.shard_process_group, size, rank))
            scatter_group = getattr(info, "reduce_scatter_process_group", None)  # not in torch 2.11
            groups.append(("scatter", scatter_group, size, rank))
        if smaller_info is not None:
            size, rank = smaller_info.shard_mesh_size, smaller_info.shard_mesh_rank
            groups.append(("post_forward", smaller_info.shard_process_group, size, rank))
        if isinstance(info, DDPMeshInfo):
            size, rank = info.replicate_mesh_size, info.replicate_mesh_rank
            groups.append(("replicate", info.replicate_process_group, size, rank))
        process_groups = {
            kind: self._make_process_group_arguments(kind, *arguments)
            for kind, *arguments in groups
        }
        for kind in ("shard", "scatter", "post_forward", "replicate"):
            if kind in process_groups or kind != "shard":
                self._set_process_group(kind, *process_groups.get(kind, (None, 1, 0, None)))
        self._update_fallback()

    def _make_process_group_arguments(
        self, kind: str, group: Any, size: int, rank: int
    ) -> tuple[str | None, int, int, dist.ProcessGroup | None]:
        """Returns the arguments of ``_set_process_group`` for ``group``, which may be ``None``.

        Unless ``kind`` is "replicate", raises ``ValueError`` if the size or rank of the group is
        not ``size`` or ``rank``.
        """
        if group is None:
            return None, 1, 0, None
        size_and_rank = get_size_and_rank(group, size, rank)
        if kind != "replicate" and size_and_rank != (size, rank):
            raise ValueError(
                f"the {kind} process group of parameter group '{self._module_fqn or ''}' has rank "
                f"{size_and_rank[1]} of {size_and_rank[0]}, but its parameters are sharded for "
                f"rank {rank} of {size}: call fully_shard with a mesh of that process group"
            )
        return get_group_name(group), *size_and_rank, find_unregistered_group(group)

    @property
    def post_forward_mesh_info(self) -> FSDPMeshInfo | None:
        """The mesh that parameters are sharded over between forward and backward, or None."""
        if not self._reshard_after_forward:
            return None
        return self._smaller_mesh_info or self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: FSDPMeshInfo | None) -> None:
        if value is not None:
            # Before the comparison: subscribe() changes the class, which == compares.
            subscribe(value, self)
        previous = self._smaller_mesh_info
        self._smaller_mesh_info = None if value == self._mesh_info else value
        try:
            self._refresh_process_groups()
        except BaseException:
            self._smaller_mesh_info = previous
            raise
        self._reshard_after_forward = value is not None

    @property
    def _use_post_forward_mesh(self) -> bool:
        return self._reshard_after_forward and self._smaller_mesh_info is not None

    def _set_separate_reduce_scatter_group(
        self, enable: bool, new_groups: dict[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        super()._set_separate_reduce_scatter_group(enable, new_groups)
        self._refresh_process_groups()

    # ---- custom collectives and hooks ----

    def set_symm_mem(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Calls torch's method. Raises ``RuntimeError`` if the group's device is not CUDA."""
        if self.device.type != "cuda":
            raise RuntimeError(
                "symmetric memory for collectives needs CUDA devices and NCCL; the parameters of "
                f"'{self._module_fqn or type(self.modules[0]).__name__}' are on "
                f"'{self.device.type}'; do not call set_symm_mem_for_comm there"
            )
        super().set_symm_mem(backend)

    @property
    def _all_gather_comm(self) -> Any:
        return self._comms["gather"]

    @_all_gather_comm.setter
    def _all_gather_comm(self, comm: Any) -> None:
        self._comms["gather"] = comm
        self._update_fallback()

    @property
    def _reduce_scatter_comm(self) -> Any:
        return self._comms["reduce"]

    @_reduce_scatter_comm.setter
    def _reduce_scatter_comm(self, comm: Any) -> None:
        self._comms["reduce"] = comm
        self._update_fallback()

    @property
    def _all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        return self._reduce_hook

    @_all_reduce_hook.setter
    def _all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        self._reduce_hook = hook
        self._has_reduce_hook = hook is not None

    def _run_reduce_hook(self, reduced: torch.Tensor) -> None:
        """Runs the user's all-reduce hook in place on ``reduced``: 1-D, this rank's shards."""
        assert self._reduce_hook is not None
        stream = self._all_reduce_hook_stream
        if stream is None:
            self._reduce_hook(reduced)  # the core's all-reduce stream is the current stream
            return
        current_stream = self.device_handle.current_stream()
        stream.wait_stream(current_stream)
        with self.device_handle.stream(stream):
            self._reduce_hook(reduced)
        current_stream.wait_stream(stream)

    def _update_fallback(self) -> None:
        """Chooses for gather and reduce between the core and torch's functions (fallback).

        Also sets the core's allocators, and the methods of parameters that the core calls.
        """
        for param in self.fsdp_params:
            param._extended = has_extensions(param)
        # Only torch's code reads tensor subclasses that have no storage.
        has_no_storage = any(
            not param._extended and not _C.has_memory(param._sharded_param_data)
            for param in self.fsdp_params
        )
        has_fake_params = any(is_fake_param(param.sharded_param) for param in self.fsdp_params)
        groups = list_process_groups(self._mesh_info, self._smaller_mesh_info)
        _, _, replicate_group, _ = groups
        has_foreign_groups = any(
            g is not None and not isinstance(g, dist.ProcessGroup) for g in groups
        )
        has_variable_size = replicate_group is not None and has_own_size(replicate_group)
        needs_fallback = has_fake_params or has_foreign_groups
        allocators = (
            _get_allocator(
                self._all_gather_comm, torch_group.ProcessGroupAllocAllGather, SymmMemAllGather
            ),
            _get_allocator(
                self._reduce_scatter_comm,
                torch_group.ProcessGroupAllocReduceScatter,
                SymmMemReduceScatter,
            ),
        )
        self._set_memory(*allocators)
        self._param_calls = 0
        for param in self.fsdp_params:
            self._param_calls |= find_overridden_methods(param, Param)
        self._uses_fallback_gather = (
            needs_fallback
            or has_no_storage
            or self._param_calls & _C.CALL_GATHER != 0
            or not (allocators[0] or type(self._all_gather_comm) is torch_group.DefaultAllGather)
        )
        self._uses_fallback_reduce = (
            needs_fallback
            or has_variable_size
            or not all(can_reduce_in(param.reduce_dtype) for param in self.fsdp_params)
            or self._param_calls & _C.CALL_REDUCE != 0
            or not (
                allocators[1] or type(self._reduce_scatter_comm) is torch_group.DefaultReduceScatter
            )
        )
