"""Scenarios of FSDP2's private interface of parameters, as public libraries use it.

docs/private-surface.md has one row for each scenario, with the scenario's name. A scenario returns
only values that must be equal under torch and fsdp_c.
"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import torch
import torch.nn as nn
from behavior import DIM, Api, batch, blocks_and_head, grads, scenario, shard, train
from fsdp_units import param_groups_of
from private_groups import MIXED, accumulate, group_of
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from toy_models import ResidualBlock

# ---- parameters: read ----


@scenario()
def param_shards(api: Api) -> list[Any]:
    """Records sizes and data of shards."""
    model: Any = shard(api, blocks_and_head(1))
    return [
        [
            param.sharded_param
            is getattr(param._module_info.module, param._module_info.param_name),
            param.sharded_param.to_local().detach().clone(),
            param._sharded_param_data.detach().clone(),
            param._sharded_local_tensor is param.sharded_param._local_tensor,
            [tuple(param.sharded_size), tuple(param._orig_size)],
            [tuple(param.padded_sharded_param_size), tuple(param.contiguous_sharded_stride)],
            param.sharded_param.requires_grad,
        ]
        for group in param_groups_of(model)
        for param in group.fsdp_params
    ]


@scenario()
def param_modules(api: Api) -> list[Any]:
    """Records the modules that register a parameter, also if two modules share it."""
    model = blocks_and_head(1)
    model.append(nn.Linear(3, 3))
    model[2].weight = nn.Parameter(torch.ones(3, 3))
    model[1].bias = model[2].bias
    shard(api, model)
    names = {module: name for name, module in model.named_modules()}
    infos = [param._module_info for group in param_groups_of(model) for param in group.fsdp_params]
    return [
        [
            [names[info.module], info.param_name],
            [[names[module] for module in info.shared_modules], info.shared_param_names],
        ]
        for info in infos
    ]


@scenario()
def param_dtypes(api: Api) -> list[Any]:
    observed: list[Any] = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16), MIXED):
        model: Any = shard(api, blocks_and_head(1), mp_policy=policy)
        model(batch(api.rank))
        param = group_of(model[0]).fsdp_params[0]
        observed.append([param.orig_dtype, param.param_dtype, param.reduce_dtype])
        observed.append([param.mp_policy is policy, param.offload_to_cpu, param.pin_memory])
    return observed


@scenario()
def param_unsharded(api: Api) -> list[Any]:
    """Records unsharded parameters and their bytes of memory, in forward and after forward."""
    model: Any = shard(api, blocks_and_head(1))
    group = group_of(model[0])
    observed: list[Any] = [[hasattr(p, "_unsharded_param") for p in group.fsdp_params]]
    observed.append([p.all_gather_outputs for p in group.fsdp_params])

    def read_state(*unused: Any) -> None:
        for param in group.fsdp_params:
            observed.append(
                [param.unsharded_param is param._unsharded_param, param.sharded_state.name]
            )
            observed.append(param.unsharded_param.detach().clone())
            observed.append([tuple(output.shape) for output in param.all_gather_outputs])
            observed.append([o.untyped_storage().nbytes() for o in param.all_gather_outputs])

    handle = model[0].norm.register_forward_hook(read_state)
    model(batch(api.rank))
    handle.remove()
    for param in group.fsdp_params:
        observed.append([param.sharded_state.name, hasattr(param, "_unsharded_param")])
        observed.append([o.untyped_storage().nbytes() for o in param.all_gather_outputs])
    return observed


@scenario()
def param_placements(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head(1))
    return [
        [
            [param.fsdp_placement, param.is_dtensor, tuple(param._spmd_placements)],
            [param._spmd_mesh.size(), param.shard_mesh.size(), param.mesh_info.shard_mesh_size],
            [tuple(param._sharding_spec.placements), tuple(param._sharding_spec.shape)],
            param.post_forward_mesh_info is param.mesh_info,
        ]
        for param in group_of(model[0]).fsdp_params
    ]


@scenario()
def param_gradients_unsharded(api: Api) -> list[Any]:
    """Records accumulated gradients before their reduction, without and with a reduce dtype."""
    observed: list[Any] = []
    for policy in (MixedPrecisionPolicy(), MIXED):
        model: Any = shard(api, blocks_and_head(1), mp_policy=policy)
        accumulate(model, api.rank)
        for param in group_of(model[0]).fsdp_params:
            kept = [param._unsharded_param.grad, param.unsharded_accumulated_grad]
            observed.append([None if grad is None else grad.detach().clone() for grad in kept])
    return observed


@scenario()
def param_source(api: Api) -> list[Any]:
    """Returns hashes of the source of methods. A library edits and compiles this source."""
    names = ("_init_sharded_param", "init_unsharded_param", "init_dtype_attrs", "to_unsharded")
    sources = [inspect.getsource(getattr(FSDPParam, name)) for name in names]
    api.fully_shard(ResidualBlock())
    sources += [inspect.getsource(getattr(FSDPParam, name)) for name in names]
    return [hashlib.sha256(source.encode()).hexdigest() for source in sources]


# ---- parameters: written ----


@scenario()
def param_data_moved(api: Api) -> list[Any]:
    """Replaces the data of each shard, and the local tensor that views the data, by copies."""
    model: Any = shard(api, blocks_and_head())
    for group in param_groups_of(model):
        for param in group.fsdp_params:
            data = param._sharded_param_data.clone()
            param._sharded_param_data = data
            size = param.sharded_size
            local = data[: size.numel()].view(size)
            param.sharded_param._local_tensor = local
    return train(model, api.rank, 2)


@scenario()
def param_gradient_hooks(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head(1))
    observed: list[Any] = []
    loss = model(batch(api.rank)).square().mean()
    for param in group_of(model[0]).fsdp_params:
        param._unsharded_param.register_hook(lambda grad: observed.append(grad.detach().clone()))
    loss.backward()
    return [*observed, grads(model)]


@scenario()
def param_constructed_directly(api: Api) -> list[Any]:
    """Constructs an ``FSDPParam`` from the attributes of an existing one, whose load hook is
    removed."""
    model: Any = shard(api, blocks_and_head(1))
    linear = model[0].linear
    old = next(p for p in group_of(model[0]).fsdp_params if p._orig_size == (DIM, DIM))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    info = ParamModuleInfo(linear, "weight")
    whole = nn.Parameter(old.sharded_param.full_tensor().detach() * 2)
    linear._parameters["weight"] = whole
    new = FSDPParam(
        whole,
        info,
        old.mesh_info,
        old.post_forward_mesh_info,
        old.device,
        None,
        policy,
        None,  # type: ignore[arg-type]
    )
    new.init_dtype_attrs(policy)
    count = len(linear._load_state_dict_post_hooks)
    old._post_load_hook_handle.remove()
    return [
        [count, len(linear._load_state_dict_post_hooks)],
        [isinstance(new, FSDPParam), linear.weight is new.sharded_param, new.sharded_state.name],
        new.sharded_param.to_local().detach().clone(),
        [new.orig_dtype, new.param_dtype, new.reduce_dtype],
    ]


@scenario()
def param_set_on_modules(api: Api) -> list[Any]:
    """Registers another parameter on the modules, then the original parameter again."""
    model: Any = shard(api, blocks_and_head(1))
    model(batch(api.rank))
    params = group_of(model[0]).fsdp_params
    observed: list[Any] = []
    for param in params:
        own = getattr(param._module_info.module, param._module_info.param_name)
        other = nn.Parameter(torch.zeros_like(own))
        param._setattr_on_modules(other)
        info = param._module_info
        observed.append(getattr(info.module, info.param_name) is other)
        param._setattr_on_modules(own)
        observed.append(getattr(info.module, info.param_name) is own)
    return [*observed, train(model, api.rank, 1)]


@scenario()
def param_extensions_set(api: Api) -> list[Any]:
    """Sets all-gather extensions as attributes of a shard's local tensor."""
    model: Any = shard(api, blocks_and_head(1))
    param = next(p for p in group_of(model[0]).fsdp_params if p._orig_size == (DIM, DIM))
    padded = param._sharded_param_data.view(param.padded_sharded_param_size)
    observed: list[Any] = []

    def before(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        observed.append([tuple(size), tuple(stride), type(module).__name__])
        return (padded.to(torch.bfloat16),), None

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        whole = outputs[0].view(-1, DIM)[:DIM].float()
        observed.append([str(outputs[0].dtype), tuple(outputs[0].shape), out is None])
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (whole,)

    local = param._sharded_local_tensor
    local.fsdp_pre_all_gather = before
    local.fsdp_post_all_gather = after
    with torch.no_grad():
        return [model(batch(api.rank)), model(batch(api.rank, 1)), observed]
