"""``ParamGroup``: the parts of a parameter group that do not run in each step.

The module holds process groups, lazy init, dtypes and state-dict hooks. It also holds the callbacks
of the core (``_host_*``). They run torch's own gather and reduce functions for groups with custom
collectives or tensors without memory. The state machine in C is the same for both.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group
import torch.nn as nn
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
)

import fsdp_c._C as _C

from . import zero_grad
from ._compat import patches
from .compat import GroupOfOlderTorch, row_dtype
from .direct import all_reduced_directly, by_the_user, direct
from .extensions import as_normal_tensors, is_extended
from .guard import overridden_by, shows
from .meshes import extent, has_own_size, name_of, unregistered, unwatch, watch
from .mixed_precision import CastingParam, widest_stored
from .param import Param, shown_as_of_torch, still_on_meta
from .specs import has_no_values


def _memory_of(comm: Any, cls: type) -> Any:
    """The process group from which an unmodified ``comm`` of torch's class allocates, else None."""
    group = getattr(comm, "_group", None)
    is_torchs = type(comm) is cls and vars(comm).keys() == {"_group"}
    return group if is_torchs and isinstance(group, dist.ProcessGroup) else None


@shows(torch_group.FSDPParamGroup)
class ParamGroup(_C.ParamGroup, torch_group.FSDPParamGroup, GroupOfOlderTorch):
    """Parameters that are gathered in one collective and reduced in one collective.

    The class is a subclass of torch's ``FSDPParamGroup``. ``_C.ParamGroup`` implements each step.

    Args:
        params: The group's parameters, in the order of the modules' traversal.
        modules: The modules that ``fully_shard`` was called on.
        mesh_info: The mesh: its shard dimension, its replicate dimension, or both.
        post_forward_mesh_info: ``mesh_info`` to reshard after forward, a mesh with a smaller shard
            dimension to keep a larger shard, ``None`` to stay unsharded.
        device: Device of collectives and unsharded parameters.
        mp_policy: Mixed precision.
        offload_policy: Whether shards live on the CPU.
        comm_ctx: Communication context of the state until lazy init shares the root's.
    """

    # Attributes of torch's groups. The core owns the events and buffers and waits for them.
    _post_reduce_event = None
    _all_reduce_state = None
    _reshard_after_forward_event = None

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
            name = name_of(mesh_info.shard_process_group)
            world, rank = mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank
        _C.ParamGroup.__init__(self, params, comm_ctx, device, name, world, rank, len(modules))
        self.modules = modules
        self._mesh_info: Any = mesh_info  # one of torch's classes of mesh infos
        self._smaller_mesh_info: Any = None
        self.device = device
        self.device_handle = _get_device_handle(device.type)
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.reduce_scatter_max_input_buffers = 1
        self._reset_sharded_params = False
        self._module_to_pre_save_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self._module_to_pre_load_state_dict_hook_handle: dict[nn.Module, Any] = {}
        self._all_gather_output = torch.empty(0, device=device)
        self._comms: dict[str, Any] = {
            "gather": torch_group.DefaultAllGather(),
            "reduce": torch_group.DefaultReduceScatter(),
        }
        self._reduce_hook: Callable[[torch.Tensor], None] | None = None
        self._all_reduce_hook_stream: Any = None
        self._fallback_gathered: Any = None
        self._fallback_events: list[Any] = []
        self._offloaded: Any = None
        self._patch_lease = patches.lease()
        zero_grad.watch(self)
        watch(mesh_info, self)
        self.post_forward_mesh_info = post_forward_mesh_info
        for param in params:
            param._group = weakref.ref(self)

    # ---- meshes and process groups ----

    @property
    def mesh_info(self) -> Any:
        """The mesh: its shard dimension, its replicate dimension, or both."""
        return self._mesh_info

    @mesh_info.setter
    def mesh_info(self, value: DataParallelMeshInfo) -> None:
        before = self._mesh_info
        self._mesh_info = value
        try:
            self._follow_mesh_infos()
        except BaseException:
            self._mesh_info = before
            raise
        unwatch(before, self)
        watch(value, self)

    def _follow_mesh_infos(self) -> None:
        """Passes the process groups that the mesh infos hold now to the core.

        Raises:
            ValueError: The size or rank of a process group differs from the mesh that the
                parameters are sharded for.
        """
        info, smaller = self._mesh_info, self._smaller_mesh_info
        found: list[tuple[str, Any, int, int]] = []
        if isinstance(info, FSDPMeshInfo):
            size, rank = info.shard_mesh_size, info.shard_mesh_rank
            found.append(("shard", info.shard_process_group, size, rank))
            scatter = getattr(info, "reduce_scatter_process_group", None)  # not in torch 2.11
            found.append(("scatter", scatter, size, rank))
        if smaller is not None:
            size, rank = smaller.shard_mesh_size, smaller.shard_mesh_rank
            found.append(("post_forward", smaller.shard_process_group, size, rank))
        if isinstance(info, DDPMeshInfo):
            size, rank = info.replicate_mesh_size, info.replicate_mesh_rank
            found.append(("replicate", info.replicate_process_group, size, rank))
        links = {kind: self._link_to(kind, *rest) for kind, *rest in found}
        for kind in ("shard", "scatter", "post_forward", "replicate"):
            if kind in links or kind != "shard":
                self._set_process_group(kind, *links.get(kind, (None, 1, 0, None)))
        self._update_hosted()

    def _link_to(
        self, kind: str, group: Any, size: int, rank: int
    ) -> tuple[str | None, int, int, dist.ProcessGroup | None]:
        """Returns the arguments of ``_set_process_group`` for ``group``, which may be ``None``.

        Raises ``ValueError`` if the size or rank of the group is not ``size`` or ``rank``.
        """
        if group is None:
            return None, 1, 0, None
        actual = extent(group, size, rank)
        if kind != "replicate" and actual != (size, rank):
            raise ValueError(
                f"the {kind} process group of parameter group '{self._module_fqn or ''}' has rank "
                f"{actual[1]} of {actual[0]}, but its parameters are sharded for "
                f"rank {rank} of {size}: call fully_shard with a mesh of that process group"
            )
        return name_of(group), *actual, unregistered(group)

    @property
    def post_forward_mesh_info(self) -> FSDPMeshInfo | None:
        """The mesh that parameters are sharded over between forward and backward, or None."""
        if not self._reshard_after_forward:
            return None
        return self._smaller_mesh_info or self.mesh_info

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, value: FSDPMeshInfo | None) -> None:
        if value is not None:
            watch(value, self)  # before the comparison: watch() changes the class that == compares
        before = self._smaller_mesh_info
        self._smaller_mesh_info = None if value == self._mesh_info else value
        try:
            self._follow_mesh_infos()
        except BaseException:
            self._smaller_mesh_info = before
            raise
        self._reshard_after_forward = value is not None

    @property
    def _use_post_forward_mesh(self) -> bool:
        return self._reshard_after_forward and self._smaller_mesh_info is not None

    def _set_separate_reduce_scatter_group(
        self, enable: bool, new_groups: dict[tuple[int, ...], dist.ProcessGroup]
    ) -> None:
        super()._set_separate_reduce_scatter_group(enable, new_groups)
        self._follow_mesh_infos()

    # ---- custom collectives and hooks ----

    def set_symm_mem(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """As in torch; raises ``RuntimeError`` if the group's device is not CUDA."""
        if self.device.type != "cuda":
            raise RuntimeError(
                "symmetric memory for collectives needs CUDA devices and NCCL; the parameters of "
                f"'{self._module_fqn or type(self.modules[0]).__name__}' are on "
                f"'{self.device.type}'"
            )
        super().set_symm_mem(backend)

    @property
    def _all_gather_comm(self) -> Any:
        return self._comms["gather"]

    @_all_gather_comm.setter
    def _all_gather_comm(self, comm: Any) -> None:
        self._comms["gather"] = comm
        self._update_hosted()

    @property
    def _reduce_scatter_comm(self) -> Any:
        return self._comms["reduce"]

    @_reduce_scatter_comm.setter
    def _reduce_scatter_comm(self, comm: Any) -> None:
        self._comms["reduce"] = comm
        self._update_hosted()

    @property
    def _all_reduce_hook(self) -> Callable[[torch.Tensor], None] | None:
        return self._reduce_hook

    @_all_reduce_hook.setter
    def _all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        self._reduce_hook = hook
        self._has_reduce_hook = hook is not None

    def _run_reduce_hook(self, row: torch.Tensor) -> None:
        """Runs the user's all-reduce hook on ``row`` in place (1-D, this rank's reduced shards)."""
        assert self._reduce_hook is not None
        stream = self._all_reduce_hook_stream
        if self.device.type == "cpu" or stream is None:
            self._reduce_hook(row)  # the core's all-reduce stream is the current stream
            return
        current = self.device_handle.current_stream()
        stream.wait_stream(current)
        with self.device_handle.stream(stream):
            self._reduce_hook(row)
        current.wait_stream(stream)

    def _update_hosted(self) -> None:
        """Chooses for gather and reduce between the core and torch's functions (fallback)."""
        for param in self.fsdp_params:
            param._extended = is_extended(param)
        # Only torch's code reads tensor subclasses that have no memory of their own.
        unreadable = any(
            not param._extended and not _C.has_memory(param._sharded_param_data)
            for param in self.fsdp_params
        )
        fake = any(has_no_values(param.sharded_param) for param in self.fsdp_params)
        info = self._mesh_info
        groups = [getattr(i, "shard_process_group", None) for i in (info, self._smaller_mesh_info)]
        replicas = getattr(info, "replicate_process_group", None)
        groups += [getattr(info, "reduce_scatter_process_group", None), replicas]
        foreign = any(g is not None and not isinstance(g, dist.ProcessGroup) for g in groups)
        elastic = replicas is not None and has_own_size(replicas)
        hosted = fake or foreign
        memory = [
            _memory_of(self._all_gather_comm, torch_group.ProcessGroupAllocAllGather),
            _memory_of(self._reduce_scatter_comm, torch_group.ProcessGroupAllocReduceScatter),
        ]
        self._set_memory(*memory)
        self._param_calls = 0
        for param in self.fsdp_params:
            self._param_calls |= overridden_by(param, Param)
        self._uses_fallback_gather = (
            hosted
            or unreadable
            or self._param_calls & _C.CALL_GATHER != 0
            or not (memory[0] or type(self._all_gather_comm) is torch_group.DefaultAllGather)
        )
        self._uses_fallback_reduce = (
            hosted
            or elastic
            or self._param_calls & _C.CALL_REDUCE != 0
            or not (
                memory[1] or type(self._reduce_scatter_comm) is torch_group.DefaultReduceScatter
            )
        )

    # ---- data movement by torch's functions; the core calls these (csrc/core/host.h) ----

    @as_normal_tensors
    def _fallback_gather(self, async_op: bool, overlaps: bool) -> None:
        info = self._gather_mesh_info
        if not isinstance(info, FSDPMeshInfo) or info.shard_mesh_size == 1:
            self._fallback_gathered = "local"
            return
        state = TrainingState.FORWARD if overlaps else TrainingState.IDLE
        copy_in, gather = self.comm_ctx.get_all_gather_streams(async_op, state)
        comm = self._all_gather_comm
        group = info.shard_process_group
        with direct(group, self.device, comm):
            self._fallback_gathered = torch_group.foreach_all_gather(
                self.fsdp_params, group, async_op, copy_in, gather, self.device, comm
            )

    @as_normal_tensors
    def _fallback_copy_out(self) -> torch.Tensor | None:
        """Copies gathered data into the unsharded parameters; returns the all-gather output.

        The core keeps the output until the gather streams may reuse its memory. None: no streams.
        """
        if self._fallback_gathered == "local":
            for param in self.fsdp_params:
                self._copy_local(param)
        elif self.is_sharded_post_forward:
            self._copy_out_forward(self._fallback_gathered)
        else:
            torch_group.foreach_all_gather_copy_out(
                self._fallback_gathered,
                self.fsdp_params,
                self.mesh_info.shard_process_group,
            )
        for param in self.fsdp_params:
            param.init_unsharded_param()
        gathered, self._fallback_gathered = self._fallback_gathered, None
        return None if self.device.type == "cpu" or gathered == "local" else gathered[0]

    @property
    def _gather_mesh_info(self) -> Any:
        """The mesh over which the parameters are currently sharded."""
        return self._smaller_mesh_info if self.is_sharded_post_forward else self.mesh_info

    @torch.no_grad()
    def _copy_out_forward(self, gathered: Any) -> None:
        """Copies out an all-gather over the smaller mesh.

        Its shards may differ in size from the whole mesh's, but they fit into the same outputs.
        """
        if gathered.all_gather_event is not None:
            self.device_handle.current_stream().wait_event(gathered.all_gather_event)
        if isinstance(gathered.all_gather_work, dist.Work):
            gathered.all_gather_work.wait()
        world = self._gather_mesh_info.shard_mesh_size
        outputs = []
        for param, numels in zip(
            self.fsdp_params, gathered.param_all_gather_input_numels, strict=True
        ):
            param.alloc_all_gather_outputs()
            (output,) = param.all_gather_outputs
            outputs.append(output[: world * numels[0]].view(world, -1))
        rows = gathered.all_gather_output.view(world, -1)
        if rows.dtype == torch.uint8:
            outputs = [output.view(torch.uint8) for output in outputs]
        counted = tuple(output for output in outputs if not output.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(counted):
            torch.ops.fsdp.split_with_sizes_copy(
                rows, gathered.all_gather_input_split_sizes, dim=1, out=outputs
            )

    @torch.no_grad()
    def _copy_local(self, param: Param) -> None:
        """Copies the shard of ``param`` into its unsharded memory. The mesh has one rank."""
        inputs = param.all_gather_inputs
        param.init_all_gather_outputs(
            [tensor.numel() for tensor in inputs],
            [tensor.dtype for tensor in inputs],
            1,
            self.device,
        )
        param.alloc_all_gather_outputs()
        for output, source in zip(param.all_gather_outputs, inputs, strict=True):
            if output.is_inference():
                output.copy_(source)
                continue
            with torch.autograd._unsafe_preserve_version_counter(output):
                output.copy_(source)

    def _fallback_drop_gather(self) -> None:
        self._fallback_gathered = None

    def _fallback_drop_reduce(self) -> None:
        self._offloaded = None
        self._fallback_events.clear()
        self.comm_ctx.release_inputs()

    def _fallback_reduce(
        self, params: list[Param], grads: list[torch.Tensor], order_compute: bool
    ) -> None:
        info, comm = self.mesh_info, self.comm_ctx
        replicas = info.replicate_process_group if isinstance(info, DDPMeshInfo) else None
        stream = comm.all_reduce_stream
        if replicas is None and self._all_reduce_hook_stream is not None:
            stream = self._all_reduce_hook_stream
        reduce_dtype = self._prepare_fallback_reduce(params, grads)
        comm.release_inputs(keep=comm.reduce_scatter_max_input_buffers - 1)
        hooked: list[torch.Tensor] = []
        several = len({param.orig_dtype for param in params}) > 1
        seen: list[Any] = [CastingParam(p) for p in params] if several else [*params]
        scatter = self._reduce_scatter_comm
        group = self._reduce_scatter_process_group if isinstance(info, FSDPMeshInfo) else None
        reduced = replicas if self.all_reduce_grads else None
        with (
            direct(group, self.device, scatter),
            all_reduced_directly(reduced, self.device, scatter),
        ):
            kept = torch_group.foreach_reduce(  # type: ignore[call-arg]
                seen,
                grads,
                group,  # type: ignore[arg-type]
                comm.reduce_scatter_stream,
                scatter,
                *row_dtype(None if several else params[0].orig_dtype),
                reduce_dtype,
                self.device,
                self.gradient_divide_factor,
                replicas,
                stream,
                self.all_reduce_grads,
                self._take_partials(params, reduce_dtype) if self.all_reduce_grads else None,
                self._recording_hook(hooked),
                self.force_sum_reduction_for_comms,
            )
        # foreach_reduce returns: input, its event, a stream (some releases), event of the whole
        # reduction, all-reduced tensor, its event, partial reduce output.
        row, _, partial = kept[-3:]
        if partial is not None:
            self._keep_partials(params, partial)
        offloaded = [p.grad_offload_event for p in params if p.grad_offload_event is not None]
        if offloaded:
            self._offloaded = offloaded[-1]
        if self.device.type == "cpu":
            return
        comm.keep_input(kept[0], kept[1])
        # The reduced tensor must live until its cast has run on its stream.
        self._fallback_events.append((kept[-4], row, hooked))
        if order_compute or len(self._fallback_events) > 1:
            self._fallback_finalize()

    def _prepare_fallback_reduce(self, params: list[Param], grads: list[torch.Tensor]) -> torch.dtype:
        """Converts both lists in place for torch's ``foreach_reduce``; returns the reduce dtype."""
        if isinstance(self.mesh_info, DDPMeshInfo) and self.all_reduce_grads:
            late = [p for p in self.fsdp_params if p._partial is not None and p not in params]
            params += late
            grads += [self._zeros(param) for param in late]
        dtypes = {grad.dtype for grad in grads}
        reduce_dtype = self._reduce_dtype or functools.reduce(torch.promote_types, dtypes)
        if any(dtype.is_complex for dtype in dtypes):
            reduce_dtype = torch.promote_types(reduce_dtype, torch.complex32)
        for index, (param, grad) in enumerate(zip(params, grads)):
            if len(dtypes) > 1:
                grad = grad.to(reduce_dtype)
            # The core passes 1-D zeros for a parameter that was never unsharded.
            flat = grad.ndim != len(param._orig_size)
            grads[index] = grad.view(param._orig_size) if flat else grad
        return reduce_dtype

    def _recording_hook(self, rows: list[torch.Tensor]) -> Callable[[torch.Tensor], None] | None:
        """Returns the user's all-reduce hook, wrapped to append its argument to ``rows``."""
        hook = self._reduce_hook
        if hook is None:
            return None

        def run(row: torch.Tensor) -> None:
            rows.append(row)
            with by_the_user():
                hook(row)

        return run

    def _zeros(self, param: Param) -> torch.Tensor:
        return torch.zeros(
            param._orig_size, dtype=param.param_dtype or param.orig_dtype, device=self.device
        )

    def _take_partials(self, params: list[Param], dtype: torch.dtype) -> torch.Tensor | None:
        """Removes the partial reduce outputs of earlier backwards; returns them 1-D, or None."""
        if all(param._partial is None for param in params):
            return None
        parts = [(param, param._partial) for param in params]
        for param in params:
            param._partial = None
        with torch.no_grad(), self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
            return torch.cat(
                [
                    torch.zeros(param.padded_numel, dtype=dtype, device=self.device)
                    if part is None
                    else part.to(dtype)
                    for param, part in parts
                ]
            )

    def _keep_partials(self, params: list[Param], row: torch.Tensor) -> None:
        """Adds reduce-scattered gradients to those that wait for a backward that all-reduces."""
        with torch.no_grad(), self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
            for param, part in zip(params, row.split([p.padded_numel for p in params])):
                param._partial = part if param._partial is None else param._partial + part

    def _fallback_finalize(self) -> None:
        current = self.device_handle.current_stream()
        for event, *_ in self._fallback_events:
            current.wait_event(event)
        self._fallback_events.clear()
        self.comm_ctx.release_inputs()
        if self._offloaded is not None:
            # All copies run on one stream, so the event of the last copy covers all of them.
            self._offloaded.synchronize()
            self._offloaded = None
            for param in self.fsdp_params:
                param.grad_offload_event = None

    # ---- lazy init ----

    def lazy_init(self) -> None:
        """Applies changes of parameters since ``fully_shard`` and validates them. Idempotent."""
        params = self.fsdp_params
        if self.is_sharded and not self._reset_sharded_params:
            for param in params:
                param.reset_sharded_param()
                param._init_extensions()
        self._validate_no_meta_params()
        self._validate_cpu_offload_params()
        self._validate_reduce_scatter_max_input_buffers()
        self._init_mp_dtypes()
        self._update_hosted()
        self._register_state_dict_hooks()
        self._reset_sharded_params = True
        self._invalidate()

    def _init_mp_dtypes(self) -> None:
        for param in self.fsdp_params:
            param.init_dtype_attrs(self.mp_policy)
        # Frozen parameters count: they may be trained later.
        del self._reduce_dtype  # that of the parameters
        several = len({param._policy_dtype for param in self.fsdp_params}) > 1
        if several or any(param.orig_dtype.is_complex for param in self.fsdp_params):
            self._reduce_dtype = self.mp_policy.reduce_dtype or widest_stored(self.fsdp_params)
        self._update_orig_dtype()

    def _update_orig_dtype(self) -> None:
        dtypes = {p.orig_dtype for p in self.fsdp_params if p.sharded_param.requires_grad}
        self._orig_dtype = dtypes.pop() if len(dtypes) == 1 else None

    def _param_replaced(self) -> None:
        """Recomputes plans and the group's dtypes after a parameter's shard or dtype changed."""
        self._invalidate()
        self._update_hosted()
        if self._reset_sharded_params:
            self._update_orig_dtype()

    def _validate_no_meta_params(self) -> None:
        on_meta = [
            param
            for param in self.fsdp_params
            if "meta" in (param.sharded_param.device.type, param._sharded_local_tensor.device.type)
        ]
        if on_meta:
            raise still_on_meta(on_meta)

    def _register_state_dict_hooks(self) -> None:
        if self._module_to_pre_save_state_dict_hook_handle:
            return
        group = weakref.ref(self)

        def to_sharded(*args: Any, **kwargs: Any) -> None:
            alive = group()
            if alive is not None:
                alive._to_sharded()

        cls = torch_group.FSDPParamGroup
        shown_as_of_torch(to_sharded, cls, "_register_state_dict_hooks", "to_sharded_hook")
        for param in self.fsdp_params:
            module = param._module_info.module
            if module not in self._module_to_pre_save_state_dict_hook_handle:
                self._module_to_pre_save_state_dict_hook_handle[module] = (
                    module.register_state_dict_pre_hook(to_sharded)
                )
                self._module_to_pre_load_state_dict_hook_handle[module] = (
                    module._register_load_state_dict_pre_hook(to_sharded)
                )

    def __repr__(self) -> str:
        return f"ParamGroup(fqn={self._module_fqn})"
