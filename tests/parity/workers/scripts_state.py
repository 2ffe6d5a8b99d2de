"""Scripts about state: checkpoints, hooks on state dicts, copies."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scripts import Script, script


@script()
def hooks_on_state_dicts(run: Script) -> Any:
    seen: list[Any] = []
    model = run.blocks()
    model.register_state_dict_pre_hook(lambda *args: seen.append("before"))
    model[0]._register_state_dict_hook(
        lambda module, state, prefix, metadata: seen.append([prefix, list(state)])
    )
    run.shard(model)
    return [dict(model.state_dict()), seen]


@script()
def a_part_of_a_state_dict(run: Script) -> Any:
    model = run.sharded()
    state = {name: value.detach() * 2 for name, value in list(model.state_dict().items())[:2]}
    found = model.load_state_dict(state, strict=False)
    return [run.train(model), list(found.missing_keys)]


@script(costly=True)
def a_state_dict_saved_by_torch(run: Script) -> Any:
    model = run.sharded()
    data = io.BytesIO()
    torch.save(model.state_dict(), data)
    run.train(model)
    data.seek(0)
    model.load_state_dict(torch.load(data, weights_only=False))
    return run.train(model)


@script(costly=True)
def a_checkpoint_written_while_training_goes_on(run: Script) -> Any:
    model = run.sharded()
    folder = str(run.folder / "written meanwhile")
    state = model.state_dict()
    group = dist.new_group(backend="gloo")  # the writer's thread communicates, too
    writing = dcp.async_save({"model": state}, checkpoint_id=folder, process_group=group)
    trained = run.train(model)
    writing.result()
    dcp.load({"model": state}, checkpoint_id=folder)
    return [trained, run.train(model)]


@script()
def a_copy_before_the_first_step(run: Script) -> Any:
    return run.train(copy.deepcopy(run.sharded()))
