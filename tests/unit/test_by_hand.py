"""Transitions, attributes and contexts of FSDP2 used by hand, on our objects as on torch's."""

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
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

import fsdp_c

IMPLEMENTATIONS: list[Callable[..., Any]] = [stock_fully_shard, fsdp_c.fully_shard]


def group_of(module: Any) -> Any:
    return releases.groups_of(module._get_fsdp_state())[0]


@pytest.fixture(autouse=True)
def world(fake_group: int) -> int:
    return fake_group


# ---- attributes ----------------------------------------------------------------------------------


# How torch 2.15 goes about reductions and manual finalization; ours keep that in the core.
OF_TORCHS_REDUCTIONS = {
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


@pytest.mark.torch("2.13")  # the attributes of that release
@pytest.mark.parametrize("kind", ["state", "group", "param", "communication", "iteration"])
def test_whatever_torchs_objects_have_ours_have_too(kind: str) -> None:
    found = []
    for shard in IMPLEMENTATIONS:
        model = model_of(shard)
        step(model)
        state, group = model[0]._get_fsdp_state(), group_of(model[0])
        kinds = {"state": state, "group": group, "param": group.fsdp_params[0]}
        kinds |= {"communication": group.comm_ctx, "iteration": state._state_ctx}
        found.append(kinds[kind])
    stock, ours = found
    assert vars(stock)
    missing = [name for name in vars(stock) if not hasattr(ours, name)]
    assert [name for name in missing if name not in OF_TORCHS_REDUCTIONS] == []


def test_partial_gradients_can_be_dropped() -> None:
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


# ---- transitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, 2])
def test_transitions(reshard: bool | int) -> None:
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


def test_the_start_of_the_communication_context_can_be_replaced() -> None:
    def start(context: Any, device: torch.device) -> None:
        """As a vendor's does it, with streams of its own."""
        for name in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
            setattr(context, f"{name}_stream", torch.cpu.Stream())
        context.device_handle = torch.cpu
        context.all_gather_state = None
        context.reduce_scatter_states = []  # torch 2.13
        context.reduce_scatter_state = None  # before
        context.post_forward_order = []
        context._last_post_reduce_events = {}
        context.reduce_scatter_max_input_buffers = 2

    found = []
    for shard in IMPLEMENTATIONS:
        with mock.patch.object(FSDPCommContext, "lazy_init", start):
            model = model_of(shard)
            step(model)
        step(model)
        context = model._get_fsdp_state()._comm_ctx
        assert context.all_gather_stream is context.all_gather_stream
        found.append([parameter.grad is not None for parameter in model.parameters()])
        assert context.post_forward_order == []
    assert found[0] == found[1] == [True] * 6


def test_the_order_of_forwards_can_only_be_emptied() -> None:
    model = model_of(fsdp_c.fully_shard)
    model(torch.ones(2, DIM))
    context = model._get_fsdp_state()._comm_ctx
    assert len(context.post_forward_order) == 3
    with pytest.raises(TypeError, match="empty list"):
        context.post_forward_order = context.post_forward_order
    context.post_forward_order = []
    assert context.post_forward_order == []


def test_gathers_wait_for_the_optimizers_event_once() -> None:
    model = model_of(fsdp_c.fully_shard)
    context = type(model._get_fsdp_state()._comm_ctx)
    event = object()
    with mock.patch.object(context, "_gather_after") as gather_after:
        model.set_post_optim_event(event)
        step(model)
        step(model)
    gather_after.assert_called_once_with(event)
    assert model._get_fsdp_state()._state_ctx.post_optim_event is None


# ---- what the root does with its arguments -------------------------------------------------------


class Telling(nn.Module):
    """Notes where its arguments are."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self.seen += [x.device.type, *(y.device.type for y in (*rest, *named.values()))]
        return x


def as_on_an_accelerator(module: Any) -> Any:
    """Its state takes "meta" for its device."""
    state = fsdp_c.fully_shard(module)._get_fsdp_state()  # type: ignore[attr-defined]
    assert not state._moves_inputs  # what is for the CPU is there
    state._device, state._moves_inputs = torch.device("meta"), True
    return module


def test_the_roots_arguments_are_put_on_the_device() -> None:
    seen: list[str] = []
    module = as_on_an_accelerator(Telling(seen))
    module(torch.ones(1), torch.ones(2), named=torch.ones(3))
    module(torch.ones(1))
    assert seen == ["meta"] * 4


def test_those_of_the_units_below_are_left_where_they_are() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = as_on_an_accelerator(Telling([]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.ones_like(x, device="cpu"))

    module = as_on_an_accelerator(Outer())
    assert module(torch.ones(1)).device.type == "cpu"
    assert module.inner.seen == ["cpu"]
