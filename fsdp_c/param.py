"""``Param``: the parts of a sharded parameter that do not run in each step.

The module shards parameters, makes DTensor specs and applies replaced or converted parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group
import torch.nn as nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    _from_local_no_grad,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    FSDPParam,
    ParamModuleInfo,
    ShardedState,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import fsdp_c._C as _C

from . import extensions
from . import optimizer_steps as optimizer_steps  # registers a hook of optimizers
from .compat import ParamOfOlderTorch, dtensor_new, orig_param_uid
from .guard import is_constructed_by_others, is_patched, overridden_by, shows
from .mixed_precision import compute_dtype, reduce_dtype, stored_dtype
from .notes import class_name, noted
from .specs import as_parameter, placements_on, shared_spec, strides_of


class _Group(Protocol):
    """The methods and attributes of its group that a parameter uses."""

    _sharded_state: Any

    def _to_sharded(self) -> None: ...
    def _to_sharded_post_forward(self) -> None: ...
    def _to_unsharded(self) -> None: ...
    def _param_replaced(self) -> None: ...


def _shard_dim(placement: Shard | None, param: torch.Tensor, local: torch.Tensor) -> int:
    if placement is None:
        return 0
    dim = placement.dim + (param.ndim if placement.dim < 0 else 0)
    if not 0 <= dim < local.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {local.ndim}D tensor: {param.shape}")
    return dim


def _smaller_mesh(
    mesh_info: DataParallelMeshInfo, post_forward: FSDPMeshInfo | None
) -> tuple[int, int] | None:
    """Returns world size and rank of the smaller mesh to reshard to after forward, or None."""
    if post_forward is None or post_forward == mesh_info:
        return None
    return post_forward.shard_mesh_size, post_forward.shard_mesh_rank


def _check_size(tensor: torch.Tensor, expected: torch.Size) -> None:
    if tensor.shape != expected:
        raise AssertionError(f"Expects size {expected} but got {tensor.shape}")


def _wraps(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a wrapper subclass without memory of its own."""
    return type(tensor) is not torch.Tensor and (
        is_traceable_wrapper_subclass(tensor) or not _C.has_memory(tensor)
    )


def still_on_meta(params: list[Param]) -> RuntimeError:
    """Returns the exception for ``params`` that are on the meta device."""
    names = [param._param_fqn or param._module_info.param_name for param in params]
    return RuntimeError(
        "FSDP parameters should be materialized from meta device before training, "
        f"but the following were still on meta device: {names}\n"
        "Call module.to_empty(device=...), then initialize the parameters."
    )


def _user_attributes(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter object, without the inner tensors of a subclass."""
    is_made_of_tensors = not isinstance(param, DTensor) and _wraps(param)
    return {
        name: value
        for name, value in vars(param).items()
        if not (is_made_of_tensors and isinstance(value, torch.Tensor))
    }


def shown_as_of_torch(
    hook: Callable[..., Any], owner: type, method: str, name: str
) -> Callable[..., Any]:
    """Returns ``hook`` with the names of torch's hook, by which libraries filter hooks."""
    hook.__module__ = owner.__module__
    hook.__name__ = name
    hook.__qualname__ = f"{owner.__qualname__}.{method}.<locals>.{name}"
    return hook


def _resized(size: torch.Size, dim: int, rows: int) -> torch.Size:
    return torch.Size((*size[:dim], rows, *size[dim + 1 :]))


@shows(FSDPParam)
class Param(_C.Param, FSDPParam, ParamOfOlderTorch):
    """One parameter of a group; a subclass of torch's ``FSDPParam``.

    Args:
        param: The original parameter: contiguous, at least 1-D, on ``device`` or meta. A DTensor of
            a tensor-, expert- or SPMD-parallel mesh has a local tensor with these properties.
        module_info: The modules and names under which ``param`` is registered.
        mesh_info: The mesh to shard and replicate over.
        post_forward_mesh_info: The mesh between forward and backward: ``mesh_info``, a mesh with a
            smaller shard dimension, or ``None`` (unsharded).
        device: The device of unsharded parameters, and of shards that are not offloaded.
        shard_placement_fn: Returns the dimension to shard. ``None``: dimension 0.
        mp_policy: Dtypes for computation and reduction.
        offload_policy: Whether shards live on the CPU.

    The constructor copies this rank's shard. :meth:`register` puts it on the modules. torch's own
    code makes the sharding specs of parallel DTensors and runs the all-gather extensions.
    """

    mesh_info: Any  # one of torch's classes of mesh infos
    _unsharded_dtensor_spec: DTensorSpec | None

    def __init__(
        self,
        param: nn.Parameter,
        module_info: ParamModuleInfo,
        mesh_info: DataParallelMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        placement = shard_placement_fn(param) if shard_placement_fn is not None else None
        local = param._local_tensor if isinstance(param, DTensor) else param
        dim = _shard_dim(placement, param, local)
        if isinstance(mesh_info, FSDPMeshInfo):
            world, rank = mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank
        else:
            world, rank = 1, 0
        if dim > 0 and local.size(dim) % world != 0:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: "
                f"{local.size()} (world size: {world})"
            )
        forward = _smaller_mesh(mesh_info, post_forward_mesh_info)
        if forward is not None and isinstance(param, DTensor):
            raise NotImplementedError(
                "Resharding to smaller mesh is not supported for DTensor parameters yet"
            )
        _C.Param.__init__(self, tuple(local.size()), dim, world, rank, forward)
        self._policy_dtype = compute_dtype(mp_policy, param)
        self._group: weakref.ref[_Group] | None = None
        self._orig_class: type = type(param)
        self._orig_attributes = _user_attributes(param)
        if is_constructed_by_others(type(self), Param):
            FSDPParam.__init__(
                self,
                param,
                module_info,
                mesh_info,
                post_forward_mesh_info,
                device,
                shard_placement_fn,
                mp_policy,
                offload_policy,
            )
            self._read_torch_construction()
            return
        self._module_info = module_info
        self.mesh_info = mesh_info
        self.post_forward_mesh_info = post_forward_mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.offload_to_cpu = isinstance(offload_policy, CPUOffloadPolicy)
        self.pin_memory = (
            isinstance(offload_policy, CPUOffloadPolicy)
            and offload_policy.pin_memory
            and torch.accelerator.is_available()
        )
        self.grad_offload_event: torch.Event | None = None
        self.is_dtensor = isinstance(param, DTensor)
        self._shard_mesh = self._init_shard_mesh()
        self._orig_param_uid = orig_param_uid(param)
        self.fsdp_placement = Shard(dim)
        self._shard(param)
        if forward is not None:
            rows = -(-self._orig_size[0] // forward[0])
            start = min(forward[1] * rows, self._orig_size[0])
            kept = min(rows, self._orig_size[0] - start)
            self.sharded_post_forward_size = torch.Size((kept, *self._orig_size[1:]))
            self.contiguous_sharded_post_forward_stride = make_contiguous_strides_for(
                self.sharded_post_forward_size
            )
        elif post_forward_mesh_info is not None:
            self.sharded_post_forward_size = self.sharded_size
            self.contiguous_sharded_post_forward_stride = self.contiguous_sharded_stride
        self._init_extensions()
        self.init_dtype_attrs(mp_policy)
        self._post_load_hook_handle: Any = None

    def _read_torch_construction(self) -> None:
        """Reads the attributes that torch's constructor, with patched parts, has set.

        The parameter objects do not get the attributes of the original parameter.
        """
        self._orig_class = nn.Parameter
        self._orig_attributes = {}
        self._adopted = self.sharded_param._local_tensor
        self.init_dtype_attrs(self.mp_policy)
        self._note_shard()

    @torch.no_grad()
    def _shard(self, param: nn.Parameter) -> None:
        dim = self.fsdp_placement.dim
        data = self._init_sharding_spec(param, self.fsdp_placement, dim).detach()
        self._orig_size = data.size()
        self._contiguous_orig_stride = strides_of(data.size())
        self.padded_sharded_param_size = _resized(data.size(), dim, self.chunk_rows)
        self.sharded_size = _resized(data.size(), dim, self.local_rows)
        self.contiguous_sharded_stride = strides_of(self.sharded_size)
        padded = self._pad(self._local_shard(data, dim))
        if self.offload_to_cpu and not padded.is_meta:
            padded = padded.cpu()
            padded = padded.pin_memory() if self.pin_memory else padded
        local = padded.narrow(dim, 0, self.local_rows)
        self.sharded_param = as_parameter(
            self.to_sharded_dtensor(local), local, param.requires_grad
        )
        self._copy_attributes(self.sharded_param)
        self._adopted = self.sharded_param._local_tensor
        self._sharded_param_data = self._with_padding(padded, self._adopted)
        self._note_shard()

    def _init_sharding_spec_plain(self, param: nn.Parameter, fsdp_placement: Shard) -> torch.Tensor:
        """Sets the sharding spec of a plain tensor (equal ones share it); returns ``param``."""
        if is_patched("_init_sharding_spec_plain"):
            return super()._init_sharding_spec_plain(param, fsdp_placement)
        self._spmd_mesh = self.mesh_info.mesh
        self._spmd_placements = placements_on(self.mesh_info, fsdp_placement)
        self._sharding_spec = shared_spec(self._spmd_mesh, self._spmd_placements, param)
        return param

    def _copy_attributes(self, to: nn.Parameter, modules: bool = True) -> None:
        """Copies the attributes of the original parameter object to ``to``.

        ``modules=False`` skips modules. The garbage collector does not traverse the core's
        reference to the unsharded parameter, so that parameter must not refer to the model.
        """
        for name, value in self._orig_attributes.items():
            if modules or not isinstance(value, nn.Module):
                to.__dict__.setdefault(name, value)

    @property
    def _shard_rank(self) -> int:
        info = self.mesh_info
        return info.shard_mesh_rank if isinstance(info, FSDPMeshInfo) else 0

    def _local_shard(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's shard of ``data`` without padding; a view of a plain tensor."""
        start = self._shard_rank * self.chunk_rows
        if type(data) is torch.Tensor or start >= self.rows:
            return data.narrow(dim, min(start, self.rows), self.local_rows)
        # Some subclasses (NF4Tensor) implement torch.chunk, which FSDP2 calls, but not narrow.
        info = self.mesh_info
        world = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        return torch.chunk(data, world, dim)[self._shard_rank]

    def _pad(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor of ``padded_sharded_param_size``: the shard, then zeros."""
        padded = shard.new_zeros(self.padded_sharded_param_size)
        if shard.numel() > 0:
            dim = self.fsdp_placement.dim
            padded.narrow(dim, 0, shard.size(dim)).copy_(shard)
        return padded

    def _with_padding(self, padded: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Returns ``local`` and the padding behind it as a 1-D view with its version counter."""
        if _wraps(local):
            return padded.view(-1)
        return local.as_strided((self.padded_numel,), (1,), local.storage_offset())

    def register(self) -> None:
        """Registers the sharded parameter on every module that holds the original."""
        info = self._module_info
        slots = [(info.module, info.param_name)]
        slots += zip(info.shared_modules, info.shared_param_names)
        direct = [
            getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
            for module, _ in slots
        ]
        self._set_slots(slots, direct)
        self._register_sharded()
        if overridden_by(self, Param) & _C.CALL_SWAP:
            self._setattr_on_modules(self.sharded_param)
        if self._post_load_hook_handle is None:
            hook = shown_as_of_torch(
                lambda *args, **kwargs: self.reset_sharded_param(),
                FSDPParam,
                "__init__",
                "<lambda>",
            )
            self._post_load_hook_handle = info.module.register_load_state_dict_post_hook(hook)

    @property
    def sharded_state(self) -> ShardedState:
        """The group's sharded state. All parameters of a group change together."""
        group = self._live_group()
        return group._sharded_state if group is not None else ShardedState.SHARDED

    @sharded_state.setter
    def sharded_state(self, value: ShardedState) -> None:
        """Does nothing: torch's functions assign it per parameter, but the group owns the state."""

    def _live_group(self) -> _Group | None:
        return self._group() if self._group is not None else None

    # The core calls the next three methods inside its own transition, if one of them is overridden.
    # They then register this parameter only. The core frees memory after all are registered.

    def to_sharded(self) -> None:
        """Calls ``_to_sharded()`` of the group: its parameters change together."""
        group = self._live_group()
        if self._swapping:
            self._setattr_on_modules(self.sharded_param)
        elif group is not None:
            group._to_sharded()

    def to_sharded_post_forward(self) -> None:
        """Calls ``_to_sharded_post_forward()`` of the group."""
        group = self._live_group()
        if self._swapping:
            assert self._sharded_post_forward_param is not None
            self._setattr_on_modules(self._sharded_post_forward_param)
        elif group is not None:
            group._to_sharded_post_forward()

    def to_unsharded(self) -> None:
        """Calls ``_to_unsharded()`` of the group; raises ``RuntimeError`` if it is not gathered."""
        group = self._live_group()
        if self._swapping:
            self._setattr_on_modules(self._unsharded_param)
        elif group is not None:
            group._to_unsharded()

    def _collect_grad(self) -> torch.Tensor | None:
        """Removes the gradient to reduce from the parameter and returns it, or None.

        The core calls this method if a gradient method of torch's ``FSDPParam`` is overridden.
        """
        if self.unsharded_accumulated_grad is not None:
            grad = self.unsharded_accumulated_grad_data
            self.unsharded_accumulated_grad = None
            return grad
        unsharded = getattr(self, "_unsharded_param", None)
        if unsharded is None or unsharded.grad is None:
            return None
        grad = self.unsharded_grad_data
        unsharded.grad = None
        return grad

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        return self.sharded_param._local_tensor

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Sets ``param_dtype`` and ``reduce_dtype``. ``None`` means that no cast is needed."""
        if mp_policy is not self.mp_policy:
            self._policy_dtype = compute_dtype(mp_policy, self.sharded_param)
        param_dtype = self._policy_dtype
        before = self.param_dtype or self.orig_dtype
        self.orig_dtype = self.sharded_grad_dtype = stored_dtype(self.sharded_param)
        reduced = reduce_dtype(mp_policy, self.orig_dtype, param_dtype)
        if self.orig_dtype.is_complex:  # no cast for computation; reductions may be wider
            reduced = reduced and torch.promote_types(reduced, torch.complex32)
        elif reduced == param_dtype:
            reduced = None
        if param_dtype == self.orig_dtype or not self.orig_dtype.is_floating_point:
            param_dtype = None
        self.param_dtype, self.reduce_dtype = param_dtype, reduced
        if before is not None and before != (param_dtype or self.orig_dtype):
            self._forget_unsharded()

    def _make_unsharded(self, flat: torch.Tensor) -> nn.Parameter:
        """Returns the unsharded parameter, a view of ``flat``. The core calls it once.

        Inference mode is off, because later training forwards reuse the parameter.
        """
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.as_strided(flat, self._orig_size, self._contiguous_orig_stride, 0)
            if self._unsharded_dtensor_spec is not None:
                whole = _from_local_no_grad(whole, self._get_unsharded_dtensor_spec(whole))
            return self._as_original(
                nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
            )

    def _as_original(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns ``parameter`` with the original's class (if a plain subclass) and attributes."""
        original = self._orig_class
        if type(parameter) is nn.Parameter and issubclass(original, nn.Parameter):
            parameter.__class__ = original
        self._copy_attributes(parameter, modules=False)
        return parameter

    def _make_post_forward(self, data: torch.Tensor) -> nn.Parameter:
        """Returns the parameter between forward and backward on the smaller mesh, over ``data``."""
        with torch.inference_mode(False), torch.no_grad():
            rows = torch.as_strided(
                data,
                self.sharded_post_forward_size,
                self.contiguous_sharded_post_forward_stride,
                0,
            )
            return nn.Parameter(
                self.to_sharded_post_forward_dtensor(rows),
                requires_grad=self.sharded_param.requires_grad,
            )

    # The core calls these at each gather of a parameter whose shard has all-gather extensions.

    def _extend_inputs(self) -> list[torch.Tensor]:
        return extensions.inputs_of(self)

    def _extend_unsharded(self) -> None:
        extensions.make_unsharded(self)

    # These raise on errors. torch's versions also print the error with a stack on every rank.

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """Wraps ``tensor`` (``sharded_size``). ``DTensor.__init__`` would import dynamo."""
        _check_size(tensor, self.sharded_size)
        return dtensor_new(DTensor, tensor, self._sharding_spec, requires_grad=tensor.requires_grad)

    def to_sharded_post_forward_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """Returns ``tensor``, the shard on the smaller mesh after forward, as a DTensor."""
        _check_size(tensor, self.sharded_post_forward_size)
        return super().to_sharded_post_forward_dtensor(tensor)

    def _assert_in_states(self, *states: ShardedState) -> None:
        if self.sharded_state not in states:
            raise AssertionError(f"Expects to be in one of {states}, not {self.sharded_state}")

    def init_unsharded_param(self) -> None:
        """Makes the unsharded parameter; with extensions by torch's method, else as the core."""
        extended = hasattr(self._sharded_local_tensor, "fsdp_post_all_gather")
        if not extended and not hasattr(self, "_unsharded_param"):
            self._unsharded_param = self._make_unsharded(self.all_gather_outputs[0])
            return
        super().init_unsharded_param()
        if extended:
            smaller = _smaller_mesh(self.mesh_info, self.post_forward_mesh_info)
            extensions.release_outputs(self, smaller is not None)

    def reset_sharded_param(self) -> None:
        """Uses the parameter that the module holds now as the sharded parameter.

        ``Module._apply`` and ``load_state_dict(assign=True)`` replace the parameter or its local
        tensor. The local tensor is padded again if necessary.

        Raises:
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
                error = AttributeError(
                    f"'{type(new_param).__name__}' object has no attribute '_local_tensor'"
                )
                name = self._param_fqn or info.param_name
                raise noted(
                    error,
                    f"'{name}' of {class_name(info.module)} was replaced by a parameter that is "
                    "not sharded: change its values in place, under torch.no_grad(), or load whole "
                    "weights with fsdp_c.load_full_state_dict(model, state).",
                )
            try:
                self._check_local_tensor(new_param)
            except BaseException:
                self._register_sharded()  # restore the previous parameter on the module
                raise
            self.sharded_param = new_param
        self._adopt_shard()

    def _refresh_shard(self) -> None:
        """Uses a local tensor that was assigned to the sharded parameter; called before a gather.

        Raises:
            AssertionError, RuntimeError: As :meth:`reset_sharded_param`.
            RuntimeError: The local tensor is on the meta device.
        """
        if self.sharded_param._local_tensor.is_meta and not self._sharded_param_data.is_meta:
            raise still_on_meta([self])
        self._adopt_shard()

    def _adopt_shard(self) -> None:
        self._check_local_tensor(self.sharded_param)
        if not self.sharded_param._local_tensor.is_meta:
            self._adopt_local(self.sharded_param._local_tensor)
            self._note_shard()
        self._sharding_spec = self.sharded_param._spec
        self.init_dtype_attrs(self.mp_policy)
        group = self._live_group()
        if group is not None:
            group._param_replaced()

    def _check_local_tensor(self, param: DTensor) -> None:
        """Raises if the local tensor of ``param`` cannot be this rank's shard."""
        local, info = param._local_tensor, self._module_info
        if local.is_meta:
            return  # the user materializes it before the first gather
        where = (
            f"parameter '{self._param_fqn or info.param_name}' of {tuple(self._orig_size)}, rank "
            f"{self._shard_rank}: it is to be sharded as {self._sharding_spec.placements}, as "
            "distribute_tensor() does it"
        )
        sizes = (self.sharded_size, self.padded_sharded_param_size)
        if local.size() not in sizes and (local.numel() > 0 or self.sharded_size.numel() > 0):
            raise AssertionError(f"Expects size {self.sharded_size} but got {local.shape}\n{where}")
        if param.shape != param._spec.shape:  # an assignment to param.data causes this
            raise AssertionError(f"Expects size {param._spec.shape} but got {param.shape}\n{where}")
        if local.dtype != param.dtype:
            raise RuntimeError(
                f"expected the local tensor to have dtype {param.dtype} but got {local.dtype}\n"
                f"{where}; to change the dtype, convert the module (module.to(dtype))"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _adopt_local(self, local: torch.Tensor) -> None:
        if local is self._adopted and _wraps(local):
            return
        if self._is_current(local):
            self._sharded_param_data = self._with_padding(self._sharded_param_data, local)
            return
        dim = self.fsdp_placement.dim
        padded, unpinned = local, self.pin_memory and not local.is_pinned()
        fits = local.size() == self.padded_sharded_param_size and local.is_contiguous()
        if not fits or unpinned or local.is_conj() or local.is_neg():
            padded = self._pad(local)
            padded = padded.cpu().pin_memory() if unpinned else padded
        if padded is not local or local.size() != self.sharded_size:
            self.sharded_param._local_tensor = padded.narrow(dim, 0, self.local_rows)
        self._adopted = self.sharded_param._local_tensor
        self._sharded_param_data = padded.view(-1)

    def _is_current(self, local: torch.Tensor) -> bool:
        """Whether ``local`` starts the memory that the core reads, with the padding behind it."""
        data = self._sharded_param_data
        if data.is_meta or data.dtype != local.dtype or _wraps(data) or _wraps(local):
            return False
        lies_there = (
            local.untyped_storage()._cdata == data.untyped_storage()._cdata
            and local.storage_offset() == data.storage_offset()
            and local.is_contiguous()
        )
        return lies_there and not (local.is_conj() or local.is_neg())

    def __repr__(self) -> str:
        return f"Param(fqn={self._param_fqn}, orig_size={self._orig_size})"


def param_class() -> type[Param]:
    """Returns ``Param``, or a class derived from it and a subclass that replaced ``FSDPParam``."""
    found = getattr(torch_group, "FSDPParam", FSDPParam)
    is_subclass = isinstance(found, type) and issubclass(found, FSDPParam)
    return _below(found) if is_subclass and found is not FSDPParam else Param


@functools.cache
def _below(subclass: type[FSDPParam]) -> type[Param]:
    return type(subclass.__name__, (subclass, Param), {"__module__": subclass.__module__})
