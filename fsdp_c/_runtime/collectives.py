"""``GroupCollectives``: the fallback, which moves a group's data by torch's own functions.

The core calls these methods (csrc/core/callbacks.h) instead of its kernels and collectives, for
example if the group has custom collectives. docs/data-movement.md lists the cases. The state
machine in C is the same as without fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
)

import fsdp_c._C as _C

from .._compat.missing_members import MissingGroupMembers
from .._compat.torch_releases import make_orig_dtype_argument
from .extensions import has_extensions, leave_inference_mode
from .fallback_transport import exclude_user_collectives, use_all_reduce_transport, use_transport
from .fsdp_units import get_compute_dtype
from .mixed_precision import CastingParam, can_reduce_in
from .param import Param


class GroupCollectives(_C.ParamGroup, torch_group.FSDPParamGroup, MissingGroupMembers):
    """The part of ``ParamGroup`` that gathers and reduces by torch's functions."""

    mesh_info: Any
    _smaller_mesh_info: Any
    _reduce_hook: Callable[[torch.Tensor], None] | None
    _all_reduce_hook_stream: Any
    _fallback_gathered: Any
    _fallback_events: list[Any]
    _offload_event: Any

    @leave_inference_mode
    def _fallback_gather(self, async_op: bool, overlaps: bool) -> None:
        """Starts the gather. ``overlaps``: on the gather streams, as in forward."""
        info = self._gather_mesh_info
        if not isinstance(info, FSDPMeshInfo) or info.shard_mesh_size == 1:
            self._fallback_gathered = "local"
            return
        state = TrainingState.FORWARD if overlaps else TrainingState.IDLE
        copy_in, gather = self.comm_ctx.get_all_gather_streams(async_op, state)
        comm = self._all_gather_comm
        process_group = info.shard_process_group
        with use_transport(process_group, self.device, comm, self._get_gather_bytes()):
            self._fallback_gathered = torch_group.foreach_all_gather(
                self.fsdp_params, process_group, async_op, copy_in, gather, self.device, comm
            )

    def _get_gather_bytes(self) -> int:
        """Returns the size of this rank's all-gather input.

        Returns 0 over the smaller mesh, and if all-gather extensions choose the inputs.
        """
        params = self.fsdp_params
        if self.is_sharded_post_forward or any(map(has_extensions, params)):
            return 0
        return sum(param.padded_numel * get_compute_dtype(param).itemsize for param in params)

    @leave_inference_mode
    def _fallback_copy_out(self) -> torch.Tensor | None:
        """Copies gathered data into the unsharded parameters; returns the all-gather output.

        The core keeps the output until the gather streams may reuse its memory. Returns None on
        the CPU, and if nothing was gathered.
        """
        if self._fallback_gathered == "local":
            for param in self.fsdp_params:
                self._copy_local(param)
        elif self.is_sharded_post_forward:
            self._copy_out_smaller_mesh(self._fallback_gathered)
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
    def _copy_out_smaller_mesh(self, gathered: Any) -> None:
        """Copies out an all-gather over the smaller mesh.

        Shards of the smaller mesh may differ in size from shards of the full mesh, but their
        all-gather fits into the same outputs.
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
        rank_shards = gathered.all_gather_output.view(world, -1)
        if rank_shards.dtype == torch.uint8:
            outputs = [output.view(torch.uint8) for output in outputs]
        versioned_outputs = tuple(output for output in outputs if not output.is_inference())
        with torch.autograd._unsafe_preserve_version_counter(versioned_outputs):
            torch.ops.fsdp.split_with_sizes_copy(
                rank_shards, gathered.all_gather_input_split_sizes, dim=1, out=outputs
            )

    @torch.no_grad()
    def _copy_local(self, param: Param) -> None:
        """Copies the shard of ``param`` into its unsharded memory, if one rank holds all of it."""
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
        self._offload_event = None
        self._fallback_events.clear()
        self.comm_ctx.release_inputs()

    def _fallback_reduce(
        self, params: list[Param], grads: list[torch.Tensor], order_compute: bool
    ) -> None:
        """Reduces ``grads``. ``order_compute``: the current stream waits for the results."""
        info, comm_ctx = self.mesh_info, self.comm_ctx
        replicate_group = info.replicate_process_group if isinstance(info, DDPMeshInfo) else None
        all_reduce_stream = comm_ctx.all_reduce_stream
        if replicate_group is None and self._all_reduce_hook_stream is not None:
            all_reduce_stream = self._all_reduce_hook_stream
        reduce_dtype = self._prepare_fallback_reduce(params, grads)
        comm_ctx.release_inputs(keep=comm_ctx.reduce_scatter_max_input_buffers - 1)
        hook_inputs: list[torch.Tensor] = []
        has_several_dtypes = len({param.sharded_grad_dtype for param in params}) > 1
        torch_params: list[Any] = (
            [CastingParam(p) for p in params] if has_several_dtypes else [*params]
        )
        reduce_scatter_comm = self._reduce_scatter_comm
        reduce_scatter_group = None
        if isinstance(info, FSDPMeshInfo):
            reduce_scatter_group = self._reduce_scatter_process_group
        all_reduce_group = replicate_group if self.all_reduce_grads else None
        shard_bytes = sum(param.padded_numel for param in params) * reduce_dtype.itemsize
        world_size = reduce_scatter_group.size() if reduce_scatter_group is not None else 1
        input_bytes = shard_bytes * world_size
        with (
            use_transport(reduce_scatter_group, self.device, reduce_scatter_comm, input_bytes),
            use_all_reduce_transport(
                all_reduce_group, self.device, reduce_scatter_comm, shard_bytes
            ),
        ):
            results = torch_group.foreach_reduce(  # type: ignore[call-arg]
                torch_params,
                grads,
                reduce_scatter_group,  # type: ignore[arg-type]
                comm_ctx.reduce_scatter_stream,
                reduce_scatter_comm,
                *make_orig_dtype_argument(None if has_several_dtypes else params[0].orig_dtype),
                reduce_dtype,
                self.device,
                self.gradient_divide_factor,
                replicate_group,
                all_reduce_stream,
                self.all_reduce_grads,
                self._take_partials(params, reduce_dtype) if self.all_reduce_grads else None,
                self._make_recording_hook(hook_inputs),
                self.force_sum_reduction_for_comms,
            )
        # foreach_reduce returns: input, its event, a stream (some releases), event of the whole
        # reduction, all-reduced tensor, its event, partial reduce output.
        reduced, _, partial = results[-3:]
        if partial is not None:
            self._keep_partials(params, partial)
        offload_events = [p.grad_offload_event for p in params if p.grad_offload_event is not None]
        if offload_events:
            self._offload_event = offload_events[-1]
        if self.device.type == "cpu":
            return
        comm_ctx.keep_input(results[0], results[1])
        # The reduced tensor must live until its cast has run on its stream.
        self._fallback_events.append((results[-4], reduced, hook_inputs))
        if order_compute or len(self._fallback_events) > 1:
            self._fallback_finalize()

    def _prepare_fallback_reduce(
        self, params: list[Param], grads: list[torch.Tensor]
    ) -> torch.dtype:
        """Prepares both lists in place for torch's ``foreach_reduce``. Returns the reduce dtype.

        Before an all-reduce, parameters that have partial results but no gradient get zeros.
        """
        if isinstance(self.mesh_info, DDPMeshInfo) and self.all_reduce_grads:
            with_partials = [
                p for p in self.fsdp_params if p._partial is not None and p not in params
            ]
            params += with_partials
            grads += [self._make_zeros(param) for param in with_partials]
        dtypes = {grad.dtype for grad in grads}
        reduce_dtype = self._reduce_dtype or functools.reduce(torch.promote_types, dtypes)
        if not can_reduce_in(reduce_dtype):
            return reduce_dtype  # foreach_reduce raises
        if any(dtype.is_complex for dtype in dtypes):
            reduce_dtype = torch.promote_types(reduce_dtype, torch.complex32)
        for index, (param, grad) in enumerate(zip(params, grads)):
            if len(dtypes) > 1:
                grad = grad.to(reduce_dtype)
            # The core passes 1-D zeros for a parameter that was never unsharded.
            is_flat = grad.ndim != len(param._orig_size)
            grads[index] = grad.view(param._orig_size) if is_flat else grad
        return reduce_dtype

    def _make_recording_hook(
        self, recorded: list[torch.Tensor]
    ) -> Callable[[torch.Tensor], None] | None:
        """Returns the user's all-reduce hook, wrapped to append its argument to ``recorded``."""
        hook = self._reduce_hook
        if hook is None:
            return None

        def record_and_run_hook(reduced: torch.Tensor) -> None:
            recorded.append(reduced)
            with exclude_user_collectives():
                hook(reduced)

        return record_and_run_hook

    def _make_zeros(self, param: Param) -> torch.Tensor:
        return torch.zeros(param._orig_size, dtype=get_compute_dtype(param), device=self.device)

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

    def _keep_partials(self, params: list[Param], reduced: torch.Tensor) -> None:
        """Adds reduce-scattered gradients to the gradients that wait for an all-reduce."""
        with torch.no_grad(), self.device_handle.stream(self.comm_ctx.reduce_scatter_stream):
            for param, part in zip(params, reduced.split([p.padded_numel for p in params])):
                param._partial = part if param._partial is None else param._partial + part

    def _fallback_finalize(self) -> None:
        current_stream = self.device_handle.current_stream()
        for event, *_ in self._fallback_events:
            current_stream.wait_event(event)
        self._fallback_events.clear()
        self.comm_ctx.release_inputs()
        if self._offload_event is not None:
            # All copies run on one stream, so the event of the last copy covers all of them.
            self._offload_event.synchronize()
            self._offload_event = None
            for param in self.fsdp_params:
                param.grad_offload_event = None
