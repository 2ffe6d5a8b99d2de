"""Private FSDP2 methods and attributes, called directly, behave as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import releases
import torch
import torch.nn as nn
from linear_stack import DIM, model_of, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

import fsdp_c

IMPLEMENTATIONS: list[Callable[..., Any]] = [torch_fully_shard, fsdp_c.fully_shard]


def group_of(module: Any) -> Any:
    return releases.groups_of(module._get_fsdp_state())[0]


@pytest.fixture(autouse=True)
def world(fake_group: int) -> int:
    return fake_group


# ---- attributes ----------------------------------------------------------------------------------


# Attributes of torch 2.15's reduction bookkeeping. fsdp_c keeps this state in C.
ONLY_IN_TORCH = {
    "_all_gather_output_fn",
    "_fsdp_params_with_wider_grad_dtype",
    "_partial_reduce_output_layout",
    "_post_backward_pending",
    "_prepare_reduce_scatter_inputs",
    "_reduce_scatter_param_indices",
    "gradient_reduction_pending",
    "manual_backward_finalization",
    "manual_backward_finalization_active",
}


@pytest.mark.torch("2.13")  # fsdp_c has the attributes of this release
@pytest.mark.parametrize("kind", ["state", "group", "param", "comm context", "state context"])
def test_fsdp_c_objects_have_all_attributes_of_torch_objects(kind: str) -> None:
    objects = []
    for shard in IMPLEMENTATIONS:
        model = model_of(shard)
        step(model)
        state, group = model[0]._get_fsdp_state(), group_of(model[0])
        kinds = {"state": state, "group": group, "param": group.fsdp_params[0]}
        kinds |= {"comm context": group.comm_ctx, "state context": state._state_ctx}
        objects.append(kinds[kind])
    torch_object, fsdp_c_object = objects
    assert vars(torch_object)
    missing = [name for name in vars(torch_object) if not hasattr(fsdp_c_object, name)]
    assert [name for name in missing if name not in ONLY_IN_TORCH] == []


def test_partial_reduce_output_can_only_be_set_to_none() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = model_of(fsdp_c.fully_shard, mesh=mesh)
    model.set_requires_all_reduce(False)
    step(model)
    for group in map(group_of, model):
        assert group._partial_reduce_output is not None
        with pytest.raises(TypeError, match="only be set to None"):
            group._partial_reduce_output = torch.ones(1)
        group._partial_reduce_output = None
        assert all(param._partial is None for param in group.fsdp_params)


@pytest.mark.parametrize("name", ["_unsharded_param", "unsharded_param"])
def test_unsharded_parameter_before_first_unshard_raises_torchs_error(name: str) -> None:
    texts = []
    for shard in IMPLEMENTATIONS:
        (param,) = group_of(shard(nn.Linear(4, 4, bias=False))).fsdp_params
        with pytest.raises(AttributeError) as caught:
            getattr(param, name)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


# ---- transitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, 2])
def test_direct_transitions_of_group_and_param_change_sharded_state(reshard: bool | int) -> None:
    model = model_of(fsdp_c.fully_shard, reshard_after_forward=reshard)
    group = group_of(model[0])
    param = group.fsdp_params[0]
    with pytest.raises(RuntimeError, match="was not gathered"):
        group._to_unsharded()
    assert group.is_sharded
    group.unshard()
    group.wait_for_unshard()
    if reshard is True:
        with pytest.raises(RuntimeError, match="no smaller group"):
            param.to_sharded_post_forward()
        assert group.is_unsharded
        assert param.sharded_post_forward_size == param.sharded_size
    else:
        param.to_sharded_post_forward()
        assert group.is_sharded_post_forward
        assert param.sharded_post_forward_size == (DIM // 2, DIM)
    param.to_sharded()
    assert group.is_sharded
    group._check()
    step(model)


# ---- the communication context -------------------------------------------------------------------


def test_replaced_lazy_init_of_comm_context_provides_streams() -> None:
    def lazy_init(context: Any, device: torch.device) -> None:
        """Sets the attributes as a backend with its own streams does."""
        for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            setattr(context, f"{name}_stream", torch.cpu.Stream())
        context.device_handle = torch.cpu
        context.all_gather_state = None
        context.reduce_scatter_states = []  # torch 2.13
        context.reduce_scatter_state = None  # before torch 2.13
        context.post_forward_order = []
        context._last_post_reduce_events = {}
        context.reduce_scatter_max_input_buffers = 2

    has_grads = []
    for shard in IMPLEMENTATIONS:
        with mock.patch.object(FSDPCommContext, "lazy_init", lazy_init):
            model = model_of(shard)
            step(model)
        step(model)
        context = model._get_fsdp_state()._comm_ctx
        # Each read of the attribute returns the same object.
        assert context.all_gather_stream is context.all_gather_stream
        has_grads.append([parameter.grad is not None for parameter in model.parameters()])
        assert context.post_forward_order == []
    assert has_grads[0] == has_grads[1] == [True] * 6


def test_post_forward_order_can_only_be_set_to_empty_list() -> None:
    model = model_of(fsdp_c.fully_shard)
    model(torch.ones(2, DIM))
    context = model._get_fsdp_state()._comm_ctx
    assert len(context.post_forward_order) == 3
    with pytest.raises(TypeError, match="empty list"):
        context.post_forward_order = context.post_forward_order
    context.post_forward_order = []
    assert context.post_forward_order == []


def test_post_optim_event_is_waited_for_once() -> None:
    model = model_of(fsdp_c.fully_shard)
    context = type(model._get_fsdp_state()._comm_ctx)
    event = object()
    with mock.patch.object(context, "_gather_after") as gather_after:
        model.set_post_optim_event(event)
        step(model)
        step(model)
    gather_after.assert_called_once_with(event)
    assert model._get_fsdp_state()._state_ctx.post_optim_event is None


# ---- device of forward arguments -----------------------------------------------------------------


class DeviceRecorder(nn.Module):
    """Appends the device type of each of its forward arguments to ``device_types``."""

    def __init__(self, device_types: list[str]) -> None:
        super().__init__()
        self.device_types = device_types

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.device_types += [x.device.type, *(y.device.type for y in (*args, *kwargs.values()))]
        return x


def shard_on_meta(module: Any) -> Any:
    """Shards a module whose state moves inputs to the meta device, as to an accelerator."""
    state = fsdp_c.fully_shard(module)._get_fsdp_state()  # type: ignore[attr-defined]
    assert not state._moves_inputs  # on CPU the inputs need no move
    state._device, state._moves_inputs = torch.device("meta"), True
    return module


def test_forward_arguments_of_root_are_moved_to_device() -> None:
    device_types: list[str] = []
    module = shard_on_meta(DeviceRecorder(device_types))
    module(torch.ones(1), torch.ones(2), extra=torch.ones(3))
    module(torch.ones(1))
    assert device_types == ["meta"] * 4


def test_forward_arguments_of_child_unit_are_not_moved_to_device() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = shard_on_meta(DeviceRecorder([]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.ones_like(x, device="cpu"))

    module = shard_on_meta(Outer())
    assert module(torch.ones(1)).device.type == "cpu"
    assert module.inner.device_types == ["cpu"]
