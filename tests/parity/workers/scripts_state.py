"""Scripts about state: state dict hooks, loading, checkpoints and copies."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scripts import Script, script


@script()
def state_dict_hooks(api: Script) -> Any:
    results: list[Any] = []
    model = api.blocks()
    model.register_state_dict_pre_hook(lambda *args: results.append("before"))
    model[0]._register_state_dict_hook(
        lambda module, state, prefix, metadata: results.append([prefix, list(state)])
    )
    api.shard(model)
    return [dict(model.state_dict()), results]


@script()
def partial_state_dict(api: Script) -> Any:
    model = api.sharded()
    state = {name: value.detach() * 2 for name, value in list(model.state_dict().items())[:2]}
    incompatible = model.load_state_dict(state, strict=False)
    return [api.train(model), list(incompatible.missing_keys)]


@script(costly=True)
def state_dict_through_torch_save(api: Script) -> Any:
    model = api.sharded()
    data = io.BytesIO()
    torch.save(model.state_dict(), data)
    api.train(model)
    data.seek(0)
    model.load_state_dict(torch.load(data, weights_only=False))
    return api.train(model)


@script(costly=True)
def async_checkpoint_during_training(api: Script) -> Any:
    model = api.sharded()
    folder = str(api.folder / "written meanwhile")
    state = model.state_dict()
    group = dist.new_group(backend="gloo")  # the writer thread needs its own group
    writing = dcp.async_save({"model": state}, checkpoint_id=folder, process_group=group)
    trained = api.train(model)
    writing.result()
    dcp.load({"model": state}, checkpoint_id=folder)
    return [trained, api.train(model)]


@script()
def deepcopy_before_first_step(api: Script) -> Any:
    return api.train(copy.deepcopy(api.sharded()))
