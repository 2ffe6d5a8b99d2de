"""Members of ``FSDPParam``, ``FSDPParamGroup`` and ``FSDPState`` that some torch releases lack.

The classes are the last bases of fsdp_c's classes. torch's classes precede them in the method
resolution order, so a member that the installed torch has is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_state as _state
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .torch_releases import SymmMemReduceScatter, raise_unsupported


class MissingParamMembers:
    """Members of ``FSDPParam`` that older releases lack, or that torch 2.15 removed.

    torch's constructor sets some of them. ``Param`` calls it only if a patch or a subclass replaces
    one of its methods (``has_custom_constructor``).
    """

    is_spmd_types = False
    keep_unsharded_storage = False  # the group owns this setting
    _release_all_gather_outputs_after_post_all_gather = False  # see extensions.release_outputs()

    mesh_info: Any
    reduce_dtype: torch.dtype | None
    _accumulated: torch.Tensor | None
    _unsharded_param: nn.Parameter
    _unsharded_dtensor_spec: DTensorSpec | None

    @property
    def _sharding_spec_by_dtype(self) -> dict[torch.dtype, DTensorSpec]:
        """torch's cache of specs; always empty, because the core makes the gradients."""
        return {}

    @_sharding_spec_by_dtype.setter
    def _sharding_spec_by_dtype(self, value: dict[torch.dtype, DTensorSpec]) -> None:
        """Does nothing. torch's constructor assigns this attribute."""

    @property
    def unsharded_accumulated_grad_data(self) -> torch.Tensor:
        """The local tensor of the accumulated gradient, in the reduce dtype."""
        grad = self._accumulated
        if grad is None:
            raise AssertionError("Expects unsharded_accumulated_grad to not be None")
        return self._get_grad_inner_tensor(grad)  # type: ignore[attr-defined]

    def to_accumulated_grad_if_needed(self) -> None:
        """Casts the gradient to the reduce dtype and makes it the accumulated gradient.

        Does nothing if the gradient has that dtype. The core calls it if a gradient method is
        patched.
        """
        param, dtype = self._unsharded_param, self.reduce_dtype
        grad = param.grad
        if grad is not None and dtype is not None and grad.dtype != dtype:
            param.grad = None
            self._accumulated = grad.to(dtype)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Adds the gradient to the accumulated gradient, if both exist, and clears ``grad``."""
        param, accumulated = self._unsharded_param, self._accumulated
        if accumulated is not None and param.grad is not None:
            accumulated += param.grad
            param.grad = None

    def _init_shard_mesh(self) -> DeviceMesh:
        return self.shard_mesh  # type: ignore[attr-defined]

    def _init_sharding_spec(self, param: nn.Parameter, placement: Shard, dim: int) -> torch.Tensor:
        """Sets the sharding spec; returns the local tensor to shard."""
        mesh = self.mesh_info.mesh
        placements: list[Placement] = []
        if isinstance(self.mesh_info, DDPMeshInfo):
            placements.append(Replicate())
        if isinstance(self.mesh_info, FSDPMeshInfo):
            placements.append(placement)
        local: torch.Tensor = param
        meta: TensorMeta | None = TensorMeta(param.size(), param.stride(), param.dtype)
        self._unsharded_dtensor_spec = None
        if isinstance(param, DTensor):
            spec = param._spec
            if len(spec.placements) > 2:
                raise NotImplementedError(
                    f"FSDP only supports 1D TP/EP or 2D EP+TP, not {spec.placements}"
                )
            split = spec.num_shards_map[dim]
            if isinstance(self.mesh_info, FSDPMeshInfo) and split > 1:
                placements[-1] = _StridedShard(dim, split_factor=split)
            mesh = DeviceMesh._concatenate([mesh, spec.mesh])
            placements += spec.placements
            local, meta = param._local_tensor, spec.tensor_meta
            self._unsharded_dtensor_spec = self._tp_spec = spec
        self._spmd_mesh, self._spmd_placements = mesh, tuple(placements)
        self._sharding_spec = DTensorSpec(mesh, self._spmd_placements, tensor_meta=meta)
        return local

    def _set_unsharded_dtensor_spec(self) -> None:
        """Sets ``_unsharded_dtensor_spec``, which the constructor of torch 2.11 does not set."""
        if not hasattr(self, "_unsharded_dtensor_spec"):
            self._unsharded_dtensor_spec = getattr(self, "_tp_spec", None)

    def _get_unsharded_dtensor_spec(self, unsharded: torch.Tensor) -> DTensorSpec:
        """Returns the spec of the original parameter, with the dtype of ``unsharded``."""
        spec = self._unsharded_dtensor_spec
        assert spec is not None and spec.tensor_meta is not None
        shape, stride, dtype = spec.tensor_meta
        if dtype == unsharded.dtype:
            return spec
        meta = TensorMeta(shape, stride, unsharded.dtype)
        return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


class MissingGroupMembers:
    """Methods of ``FSDPParamGroup`` that older releases lack."""

    _module_fqn: str | None
    _reduce_scatter_comm: Any
    reduce_scatter_max_input_buffers: int

    def _validate_reduce_scatter_max_input_buffers(self) -> None:
        """Raises torch 2.13's ``ValueError`` for several buffers in symmetric memory.

        torch 2.12 has symmetric memory, but not the setting.
        """
        comm = self._reduce_scatter_comm
        if (
            self.reduce_scatter_max_input_buffers > 1
            and SymmMemReduceScatter is not None
            and isinstance(comm, SymmMemReduceScatter)
        ):
            raise ValueError(
                "set_reduce_scatter_max_input_buffers(>1) is not supported with the "
                "symmetric-memory reduce-scatter comm, but got "
                f"{self.reduce_scatter_max_input_buffers} for module '{self._module_fqn}' using "
                f"{type(comm).__name__}. Keep max_input_buffers=1 with symmetric memory, or use "
                "the default reduce-scatter comm."
            )

    def _set_separate_reduce_scatter_group(self, enable: bool, new_groups: Any) -> None:
        raise_unsupported("set_separate_reduce_scatter_group", "2.13")

    def set_symm_mem(self, backend: Any = "NCCL") -> None:
        """Raises ``NotImplementedError``: this torch lacks functions for symmetric memory."""
        raise_unsupported("set_symm_mem_for_comm", "2.12")


class MissingStateMembers:
    """Members of ``FSDPState`` that older releases lack."""

    _state_name = "FSDP"
    _fsdp_param_groups: Any
    _state_ctx: Any

    @property
    def _fsdp_param_group(self) -> Any:
        groups = self._fsdp_param_groups
        assert len(groups) <= 1, "this torch supports one group per state"
        return groups[0] if groups else None

    def _get_state_for_module(self, module: nn.Module) -> Any:
        return _state._get_module_fsdp_state(module)

    def _validate_no_duplicate_params(self) -> None:
        visited = set()
        for state in self._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                for param in group.fsdp_params:
                    if param._orig_param_uid in visited:
                        raise ValueError(
                            f"Parameter '{param._param_fqn}' is shared with a parameter already "
                            "managed by another FSDP group: put both modules into one, "
                            "fully_shard([module_a, module_b])"
                        )
                    visited.add(param._orig_param_uid)


def register_group_hooks(torch_state: Any, state: Any) -> Any:
    """Registers torch's forward hooks for the modules of ``state``; returns their handle."""
    arguments = [
        state._modules,
        state._pre_forward,
        state._post_forward,
        state._modules_to_run_forward,
    ]
    if hasattr(state, "_cast_output_dtype"):
        arguments.append(state._cast_output_dtype)
    return torch_state._register_group_forward_hooks(*arguments)
