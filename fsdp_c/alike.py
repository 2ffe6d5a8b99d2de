"""Parameters of one kind are made after the first of them.

A model has few kinds of parameters: of one size, dtype and cut, for one mesh and policy. All that
``Param`` finds out about the first holds for the others, but for what they hold themselves. So the
first one is made by the constructor, and the others take over what it noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo
from torch.distributed.tensor import Shard

import fsdp_c._C as _C

from .compat import is_spmd_mesh, orig_param_uid
from .guard import is_constructed_as_usual
from .mixed_precision import stored_dtype
from .param import Param, param_class

_OF_THE_CALL = ("mesh_info", "post_forward_mesh_info", "device", "mp_policy")
_ITS_OWN = (
    "_module_info",
    "_orig_param_uid",
    "_orig_attributes",
    "_adopted",
    "_kind",
)


class _Kind:
    """What parameters of one kind have in common. It keeps their mesh, so that its address is not
    another one's meanwhile."""

    def __init__(self, first: Param, world: int, rank: int) -> None:
        self.facts = {
            name: value
            for name, value in vars(first).items()
            if name not in _OF_THE_CALL and name not in _ITS_OWN
        }
        self.layout = (tuple(first._orig_size), first.fsdp_placement.dim, world, rank)
        self.dim = first.fsdp_placement.dim
        self.spec = first._sharding_spec
        self.dtypes = (first.orig_dtype, first.param_dtype, first.reduce_dtype)


_kinds: weakref.WeakValueDictionary[Any, _Kind] = weakref.WeakValueDictionary()
"""Those in use."""


def _always(placement: Shard | None) -> Callable[[nn.Parameter], Shard] | None:
    """A ``shard_placement_fn`` that has decided already."""
    return None if placement is None else lambda param: placement


def _cut_of(info: DataParallelMeshInfo) -> tuple[int, int]:
    """Number of shards and this rank's."""
    if isinstance(info, FSDPMeshInfo):
        return info.shard_mesh_size, info.shard_mesh_rank
    return 1, 0


class Maker:
    """Makes the parameters of one call; the arguments are those of ``Param``."""

    def __init__(
        self,
        mesh_info: DataParallelMeshInfo,
        post_forward: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self._cls = param_class()
        self._arguments = (mesh_info, post_forward, device)
        self._policies = (mp_policy, offload_policy)
        self._of_the_call = dict(
            zip(_OF_THE_CALL, (mesh_info, post_forward, device, mp_policy), strict=True)
        )
        self._world, self._rank = _cut_of(mesh_info)
        self._key = (
            id(mesh_info.mesh),
            isinstance(mesh_info, FSDPMeshInfo),
            isinstance(mesh_info, DDPMeshInfo),
            (self._world, self._rank, post_forward is None, device),
            (mp_policy.param_dtype, mp_policy.reduce_dtype),
        )
        self._takes_alike = (
            self._cls is Param
            and (post_forward is None or post_forward is mesh_info)
            and type(offload_policy) is OffloadPolicy
            and getattr(mp_policy, "param_dtype_override_fn", None) is None
            and not is_spmd_mesh(mesh_info)
            and is_constructed_as_usual()
        )

    def __call__(
        self, param: nn.Parameter, info: ParamModuleInfo, placement: Shard | None
    ) -> Param:
        """``param`` as a member of a group; registered by its ``register()``."""
        if not self._takes_alike or type(param) is not nn.Parameter:
            return self._construct(param, info, placement)
        key = (self._key, placement, param.size(), param.stride(), stored_dtype(param))
        kind = _kinds.get(key)
        if kind is not None:
            return self._make_alike(kind, param, info)
        made = self._construct(param, info, placement)
        vars(made)["_kind"] = _kinds[key] = _Kind(made, self._world, self._rank)
        return made

    def _construct(
        self, param: nn.Parameter, info: ParamModuleInfo, placement: Shard | None
    ) -> Param:
        return self._cls(param, info, *self._arguments, _always(placement), *self._policies)

    def _make_alike(self, kind: _Kind, param: nn.Parameter, info: ParamModuleInfo) -> Param:
        made = Param.__new__(Param)
        _C.Param.__init__(made, *kind.layout)
        notes = vars(made)
        notes.update(kind.facts)
        notes.update(self._of_the_call)
        attributes = dict(vars(param))
        notes.update(
            _kind=kind,
            _module_info=info,
            _orig_attributes=attributes,
            _orig_param_uid=orig_param_uid(param),
        )
        made._sharding_spec = kind.spec
        made.orig_dtype, made.param_dtype, made.reduce_dtype = kind.dtypes
        notes["_adopted"] = made._cut(param, kind.dim)
        if attributes:
            made._copy_attributes(made.sharded_param)
        return made
