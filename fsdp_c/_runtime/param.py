"""``Param``: the parts of a sharded parameter that do not run in the usual step.

The core calls some of them in each step if there are all-gather extensions or overridden methods.
``param_shard.py`` has the base class that makes the shard. ``replaced_shard.py`` has the base class
that adopts replaced or converted parameters.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group
import torch.nn as nn
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

import fsdp_c._C as _C

from .._compat import optimizer_steps as optimizer_steps  # registers a hook of optimizers
from .._compat.guard import (
    find_overridden_methods,
    follow_patches,
    has_custom_constructor,
)
from .._compat.torch_releases import orig_param_uid
from . import extensions
from .fsdp_units import iterate_registrations
from .mixed_precision import (
    APPLIED_REDUCE_DTYPE,
    REDUCES_IN_PARAM_DTYPE,
    get_param_dtype,
    get_reduce_dtype,
    widen_to_complex,
)
from .param_shard import SmallerMesh, copy_user_attributes
from .replaced_shard import GroupOfParam, ReplaceableShard
from .typed_params import drop_types, is_typed, make_dtensor, pause_type_check


def _get_smaller_mesh(
    mesh_info: DataParallelMeshInfo, post_forward: FSDPMeshInfo | None
) -> SmallerMesh | None:
    if post_forward is None or post_forward == mesh_info:
        return None
    return SmallerMesh(post_forward.shard_mesh_size, post_forward.shard_mesh_rank)


def name_like_torch_hook(
    hook: Callable[..., Any], owner: type, method: str, name: str
) -> Callable[..., Any]:
    """Returns ``hook`` with the names of torch's hook, by which libraries filter hooks."""
    hook.__module__ = owner.__module__
    hook.__name__ = name
    hook.__qualname__ = f"{owner.__qualname__}.{method}.<locals>.{name}"
    return hook


@follow_patches(FSDPParam)
class Param(ReplaceableShard):
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
        offload_policy: Whether shards are in CPU memory.

    The constructor copies this rank's shard. :meth:`register` registers it on the modules. torch's
    own code makes the sharding specs of parallel DTensors and runs the all-gather extensions.
    """

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
        smaller_mesh = _get_smaller_mesh(mesh_info, post_forward_mesh_info)
        dim = self._init_layout(param, placement, mesh_info, smaller_mesh)
        self._policy_dtype = get_param_dtype(mp_policy, param)
        self._group: weakref.ref[GroupOfParam] | None = None
        self._orig_class = type(param)
        self._orig_attributes = copy_user_attributes(param)
        self._orig_param_uid = orig_param_uid(param)  # torch 2.11 does not set it
        if has_custom_constructor(type(self), Param):
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
        if is_typed(param):
            self.is_spmd_types = True
            self._orig_attributes = drop_types(self._orig_attributes)
            param = make_dtensor(self, param, mesh_info)
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
        self.fsdp_placement = Shard(dim)
        self._shard(param)
        if post_forward_mesh_info is not None:
            self._init_post_forward_size(smaller_mesh)
        self._init_extensions()
        self._set_dtypes(mp_policy)
        self._post_load_hook_handle: Any = None

    def _read_torch_construction(self) -> None:
        """Reads the attributes that torch's constructor, with patched parts, has set.

        The parameter objects do not get the attributes of the original parameter.
        """
        self._orig_class = nn.Parameter
        self._orig_attributes = {}
        self._adopted_tensor = self.sharded_param._local_tensor
        self._set_unsharded_dtensor_spec()
        self._set_dtypes(self.mp_policy)
        self._note_shard()

    def register(self) -> None:
        """Registers the sharded parameter on every module that has the original parameter."""
        registrations = list(iterate_registrations(self))
        uses_default_setattr = [
            getattr(module.__setattr__, "__func__", None) is nn.Module.__setattr__
            for module, _ in registrations
        ]
        self._set_slots(registrations, uses_default_setattr)
        self._register_sharded()
        if find_overridden_methods(self, Param) & _C.CALL_SWAP:
            self._setattr_on_modules(self.sharded_param)
        if self._post_load_hook_handle is None:
            hook = name_like_torch_hook(
                lambda *args, **kwargs: self.reset_sharded_param(),
                FSDPParam,
                "__init__",
                "<lambda>",
            )
            module = self._module_info.module
            self._post_load_hook_handle = module.register_load_state_dict_post_hook(hook)

    @property
    def sharded_state(self) -> ShardedState:
        """The group's sharded state. All parameters of a group change together."""
        group = self._get_group()
        return group._sharded_state if group is not None else ShardedState.SHARDED

    @sharded_state.setter
    def sharded_state(self, value: ShardedState) -> None:
        """Does nothing: torch's functions assign a state per parameter, but the group owns it."""

    # If one of the next three methods is overridden, the core calls them for each parameter during
    # its transition (``_swapping``). Such a call registers only this parameter. The core frees
    # memory after all are registered. Other calls start the transition of the group.

    def to_sharded(self) -> None:
        """Calls ``_to_sharded()`` of the group. All parameters of a group change together."""
        group = self._get_group()
        if self._swapping:
            self._setattr_on_modules(self.sharded_param)
        elif group is not None:
            group._to_sharded()

    def to_sharded_post_forward(self) -> None:
        """Calls ``_to_sharded_post_forward()`` of the group."""
        group = self._get_group()
        if self._swapping:
            assert self._sharded_post_forward_param is not None
            self._setattr_on_modules(self._sharded_post_forward_param)
        elif group is not None:
            group._to_sharded_post_forward()

    def to_unsharded(self) -> None:
        """Calls ``_to_unsharded()`` of the group; raises ``RuntimeError`` if it is not gathered."""
        group = self._get_group()
        if self._swapping:
            self._setattr_on_modules(self._unsharded_param)
        elif group is not None:
            group._to_unsharded()

    def _collect_grad(self) -> torch.Tensor | None:
        """Removes the gradient to reduce from the parameter and returns it, or None.

        The core calls this method if a gradient method of torch's ``FSDPParam`` is overridden.
        """
        if self._accumulated is not None:
            grad = self.unsharded_accumulated_grad_data
            self._accumulated = None
            return grad
        unsharded = getattr(self, "_unsharded_param", None)
        if unsharded is None or unsharded.grad is None:
            return None
        grad = self.unsharded_grad_data
        unsharded.grad = None
        return grad

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Calls ``_set_dtypes``. First called by lazy init, not by the constructor, as in torch."""
        self._set_dtypes(mp_policy)

    def _set_dtypes(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Sets ``param_dtype`` and ``reduce_dtype``. ``None`` means that no cast is needed."""
        if mp_policy is not self.mp_policy:
            self._policy_dtype = get_param_dtype(mp_policy, self.sharded_param)
        param_dtype = self._policy_dtype
        previous = self.param_dtype or self.orig_dtype
        self.orig_dtype = self.sharded_param.dtype
        reduce_dtype = mp_policy.reduce_dtype
        if not self._has_sharded_grad_dtype_override:
            reduce_dtype = get_reduce_dtype(mp_policy, self.orig_dtype, param_dtype)
        if self.orig_dtype.is_complex:  # no cast for computation; reductions may be wider
            reduce_dtype = widen_to_complex(reduce_dtype)
        elif reduce_dtype == param_dtype and not REDUCES_IN_PARAM_DTYPE:
            reduce_dtype = None
        if param_dtype == self.orig_dtype or not self.orig_dtype.is_floating_point:
            param_dtype = None
        self.param_dtype = param_dtype
        APPLIED_REDUCE_DTYPE.__set__(self, reduce_dtype)
        if REDUCES_IN_PARAM_DTYPE:
            self._implied_reduce_dtype = None if mp_policy.reduce_dtype else reduce_dtype
        if previous is not None and previous != (param_dtype or self.orig_dtype):
            self._release_unsharded()
        if REDUCES_IN_PARAM_DTYPE and self.orig_dtype.is_floating_point:
            self._init_grad_dtype()

    if REDUCES_IN_PARAM_DTYPE:
        _implied_reduce_dtype: torch.dtype | None = None

        @property
        def reduce_dtype(self) -> torch.dtype | None:
            """The ``reduce_dtype`` of the policy. The core may use the parameter's dtype."""
            dtype: torch.dtype | None = APPLIED_REDUCE_DTYPE.__get__(self)
            return None if dtype == self._implied_reduce_dtype else dtype

        @reduce_dtype.setter
        def reduce_dtype(self, dtype: torch.dtype | None) -> None:
            """Also sets what torch derives from it: the dtypes of gradients and of reductions."""
            APPLIED_REDUCE_DTYPE.__set__(self, dtype)
            group = self._get_group()
            if group is None:
                return
            if self.orig_dtype.is_floating_point:
                self._init_grad_dtype()
            if self.mp_policy.reduce_dtype is None:
                group._init_reduce_dtype()

    def _make_unsharded(self, flat: torch.Tensor) -> nn.Parameter:
        """Returns a new parameter over ``flat``. The core keeps the parameter until a conversion.

        Inference mode is off, because later training forwards reuse the parameter.
        """
        with torch.inference_mode(False), torch.no_grad(), pause_type_check():
            self._convert_unreduced_grads()
            unsharded = torch.as_strided(flat, self._orig_size, self._contiguous_orig_stride, 0)
            if self._unsharded_dtensor_spec is not None and not self.is_spmd_types:
                spec = self._get_unsharded_dtensor_spec(unsharded)
                unsharded = _from_local_no_grad(unsharded, spec)
            parameter = nn.Parameter(unsharded, requires_grad=self.sharded_param.requires_grad)
            if self._grad_dtype is not None:
                parameter.grad_dtype = self._grad_dtype
            return self._restore_class(parameter)

    def _restore_class(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns ``parameter`` with the original's class (if a plain subclass) and attributes."""
        if type(parameter) is nn.Parameter and issubclass(self._orig_class, nn.Parameter):
            with contextlib.suppress(TypeError):  # __slots__ change the layout of objects
                parameter.__class__ = self._orig_class
        self._copy_attributes(parameter)
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
            parameter = nn.Parameter(
                self.to_sharded_post_forward_dtensor(rows),
                requires_grad=self.sharded_param.requires_grad,
            )
            if self._grad_dtype is not None:
                parameter.grad_dtype = self.sharded_grad_dtype
            return parameter

    # The core calls the next two methods at each gather of a parameter with all-gather extensions.

    def _extend_inputs(self) -> list[torch.Tensor]:
        return extensions.prepare_inputs(self)

    def _extend_unsharded(self) -> None:
        extensions.make_unsharded(self)

    # torch's version also prints the error and the stack on every rank.

    def _assert_in_states(self, *states: ShardedState) -> None:
        if self.sharded_state not in states:
            raise AssertionError(f"Expects to be in one of {states}, not {self.sharded_state}")

    def init_unsharded_param(self) -> None:
        """Makes the unsharded parameter. All-gather extensions use torch's method instead."""
        has_extension = hasattr(self._sharded_local_tensor, "fsdp_post_all_gather")
        if not has_extension and not hasattr(self, "_unsharded_param"):
            self._unsharded_param = self._make_unsharded(self.all_gather_outputs[0])
            return
        super().init_unsharded_param()
        if has_extension:
            smaller_mesh = _get_smaller_mesh(self.mesh_info, self.post_forward_mesh_info)
            extensions.release_outputs(self, smaller_mesh is not None)

    def __repr__(self) -> str:
        return f"Param(fqn={self._param_fqn}, orig_size={self._orig_size})"


def get_param_class() -> type[Param]:
    """Returns ``Param``, or a class derived from it and from a replacement of ``FSDPParam``."""
    param_class = getattr(torch_group, "FSDPParam", FSDPParam)
    is_subclass = isinstance(param_class, type) and issubclass(param_class, FSDPParam)
    return _make_subclass(param_class) if is_subclass and param_class is not FSDPParam else Param


@functools.cache
def _make_subclass(subclass: type[FSDPParam]) -> type[Param]:
    return type(subclass.__name__, (subclass, Param), {"__module__": subclass.__module__})
