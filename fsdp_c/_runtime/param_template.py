"""Cache of the attributes of ``Param``, keyed by (mesh, policy, placement, shape, stride, dtype).

Most parameters of a model share a key with other parameters. The constructor of ``Param`` makes the
first parameter of each key. Later parameters copy its attributes, except for ``_PER_CALL`` and
``_PER_PARAM``.
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

from .._compat.guard import has_torch_constructor
from .._compat.torch_releases import is_spmd_mesh, orig_param_uid
from .mixed_precision import APPLIED_REDUCE_DTYPE, has_grad_dtype
from .param import Param, get_param_class
from .param_shard import copy_user_attributes
from .typed_params import is_typed

_PER_CALL = ("mesh_info", "post_forward_mesh_info", "device", "mp_policy")
_PER_PARAM = (
    "_module_info",
    "_orig_param_uid",
    "_orig_attributes",
    "_adopted_tensor",
    "_template",
)


class _Template:
    """The attributes that all parameters with one key share.

    The attributes keep the mesh alive, whose ``id`` is part of the key.
    """

    def __init__(self, first: Param, world: int, rank: int) -> None:
        self.shared_attributes = {
            name: value
            for name, value in vars(first).items()
            if name not in _PER_CALL and name not in _PER_PARAM
        }
        self.layout = (tuple(first._orig_size), first.fsdp_placement.dim, world, rank)
        self.dim = first.fsdp_placement.dim
        self.spec = first._sharding_spec
        reduce_dtype = APPLIED_REDUCE_DTYPE.__get__(first)
        self.dtypes = (first.orig_dtype, first.param_dtype, reduce_dtype)


_templates: weakref.WeakValueDictionary[Any, _Template] = weakref.WeakValueDictionary()
"""Maps keys to the templates of live parameters."""


def _make_placement_fn(placement: Shard | None) -> Callable[[nn.Parameter], Shard] | None:
    """Returns a ``shard_placement_fn`` that always returns ``placement``, or None for None."""
    return None if placement is None else lambda param: placement


def _get_shard_position(info: DataParallelMeshInfo) -> tuple[int, int]:
    """Returns the number of shards and the index of this rank's shard."""
    if isinstance(info, FSDPMeshInfo):
        return info.shard_mesh_size, info.shard_mesh_rank
    return 1, 0


class ParamFactory:
    """Makes the ``Param`` objects of one ``fully_shard`` call."""

    def __init__(
        self,
        mesh_info: DataParallelMeshInfo,
        post_forward: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self._cls = get_param_class()
        self._arguments = (mesh_info, post_forward, device)
        self._policies = (mp_policy, offload_policy)
        self._call_attributes = dict(
            zip(_PER_CALL, (mesh_info, post_forward, device, mp_policy), strict=True)
        )
        self._world, self._rank = _get_shard_position(mesh_info)
        self._key = (
            id(mesh_info.mesh),
            isinstance(mesh_info, FSDPMeshInfo),
            isinstance(mesh_info, DDPMeshInfo),
            (self._world, self._rank, post_forward is None, device),
            (mp_policy.param_dtype, mp_policy.reduce_dtype),
        )
        self._uses_templates = (
            self._cls is Param
            and (post_forward is None or post_forward is mesh_info)
            and type(offload_policy) is OffloadPolicy
            and getattr(mp_policy, "param_dtype_override_fn", None) is None
            and not is_spmd_mesh(mesh_info)
            and has_torch_constructor()
        )

    def __call__(
        self, param: nn.Parameter, info: ParamModuleInfo, placement: Shard | None
    ) -> Param:
        """Returns a ``Param`` for ``param``. The caller registers it on the modules."""
        is_plain = type(param) is nn.Parameter and not has_grad_dtype(param)
        if not self._uses_templates or not is_plain or is_typed(param):
            return self._construct(param, info, placement)
        key = (self._key, placement, param.size(), param.stride(), param.dtype)
        template = _templates.get(key)
        if template is not None:
            return self._make_from_template(template, param, info)
        result = self._construct(param, info, placement)
        vars(result)["_template"] = _templates[key] = _Template(result, self._world, self._rank)
        return result

    def _construct(
        self, param: nn.Parameter, info: ParamModuleInfo, placement: Shard | None
    ) -> Param:
        return self._cls(
            param, info, *self._arguments, _make_placement_fn(placement), *self._policies
        )

    def _make_from_template(
        self, template: _Template, param: nn.Parameter, info: ParamModuleInfo
    ) -> Param:
        result = Param.__new__(Param)
        _C.Param.__init__(result, *template.layout)
        own_attributes = vars(result)
        own_attributes.update(template.shared_attributes)
        own_attributes.update(self._call_attributes)
        attributes = copy_user_attributes(param)
        own_attributes.update(
            _template=template,
            _module_info=info,
            _orig_attributes=attributes,
            _orig_param_uid=orig_param_uid(param),
        )
        result._sharding_spec = template.spec
        result.orig_dtype, result.param_dtype, result.reduce_dtype = template.dtypes
        own_attributes["_adopted_tensor"] = result._cut(param, template.dim)
        if attributes:
            result._copy_attributes(result.sharded_param)
        return result
