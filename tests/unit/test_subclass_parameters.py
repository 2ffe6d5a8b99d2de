"""fully_shard of parameters of tensor subclasses: operators it uses, and references it keeps."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as public
import torch.nn as nn
from extensions import OneArgument
from torch.distributed.tensor import DTensor, Shard
from wrapping import Wrapping

import fsdp_c


class MarkedParameter(nn.Parameter):
    """A plain subclass of nn.Parameter."""

    mark = "default"


class OnlyChunks(OneArgument):
    """Supports chunk, pad and copy, but no slices of part of a dimension, as NF4Tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            _, dim, start, end = (*args, *(0, 0, None)[len(args) - 1 :])
            if start != 0 or end not in (None, args[0].shape[dim]):
                raise NotImplementedError("slices of this subclass")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("shard", [public.fully_shard, fsdp_c.fully_shard])
def test_subclass_that_refuses_slices_is_sharded(
    fake_group: int, shard: Callable[..., Any]
) -> None:
    values = torch.arange(64.0).view(16, 4)
    module = nn.Linear(4, 16, bias=False)
    module.weight = nn.Parameter(OnlyChunks(values.clone()))
    shard(module)
    local = module.weight.to_local()
    assert type(local) is OnlyChunks
    assert torch.equal(local.held, values[:2])
    assert module(torch.ones(3, 4)).shape == (3, 16)


def test_tensor_inside_wrapper_subclass_is_freed_after_first_step_and_attributes_are_kept(
    fake_group: int,
) -> None:
    inner = torch.ones(16, 4)
    module = nn.Linear(4, 16, bias=False)
    module.weight = nn.Parameter(Wrapping(inner))
    module.weight.note = "kept"
    reference = weakref.ref(inner)
    fsdp_c.fully_shard(module)
    module(torch.ones(3, 4)).sum().backward()
    assert module.weight.note == "kept"
    del inner
    gc.collect()
    assert reference() is None


def test_parameter_with_attribute_that_contains_itself_trains(fake_group: int) -> None:
    module = nn.Linear(4, 16)
    cycle: dict[str, Any] = {}
    cycle["cycle"] = cycle
    module.weight.cycle = cycle
    fsdp_c.fully_shard(module)(torch.ones(3, 4)).sum().backward()
    assert not hasattr(module.weight, "cycle")


class SlottedParameter(nn.Parameter):
    """A subclass whose objects have another memory layout than those of nn.Parameter."""

    __slots__ = ("slot",)


def test_class_of_parameter_with_slots_is_dropped_as_in_torch(fake_group: int) -> None:
    module = nn.Linear(4, 16)
    module.weight = SlottedParameter(module.weight.detach())
    module.weight.decays = False
    fsdp_c.fully_shard(module)
    classes: list[Any] = []
    module.register_forward_pre_hook(lambda *args: classes.append(type(module.weight)))
    module(torch.ones(3, 4)).sum().backward()
    assert classes == [nn.Parameter]
    assert module.weight.decays is False


@pytest.mark.parametrize("shard", [public.fully_shard, fsdp_c.fully_shard])
def test_attributes_and_class_of_parameter_are_kept_unlike_in_torch(
    fake_group: int, shard: Callable[..., Any]
) -> None:
    keeps = shard is fsdp_c.fully_shard
    found: list[tuple[bool, bool]] = []

    def record(module: Any, args: Any) -> None:
        found.append((hasattr(module.weight, "decays"), type(module.weight) is MarkedParameter))

    module = nn.Linear(4, 16)
    module.weight = MarkedParameter(module.weight.detach())
    module.weight.decays = False
    shard(module)
    module.register_forward_pre_hook(record)
    module(torch.ones(3, 4)).sum().backward()
    assert found == [(keeps, keeps)]  # unsharded
    assert hasattr(module.weight, "decays") == keeps  # sharded, with the class DTensor
    assert not hasattr(module.bias, "decays")


@pytest.mark.parametrize("shard", [public.fully_shard, fsdp_c.fully_shard])
def test_attributes_with_names_of_dtensor_do_not_hide_those_of_sharded_parameter(
    fake_group: int, shard: Callable[..., Any]
) -> None:
    module = nn.Linear(4, 16)
    module.weight.placements, module.weight.full_tensor = ("tp",), False
    shard(module)
    assert module.weight.placements == (Shard(0),)
    assert module.weight.full_tensor().shape == (16, 4)
    memory = io.BytesIO()
    torch.save(list(module.parameters()), memory)
    memory.seek(0)
    assert [type(p) for p in torch.load(memory, weights_only=False)] == [DTensor, DTensor]


def test_attribute_with_default_of_parameter_class_is_kept(fake_group: int) -> None:
    module = nn.Linear(4, 16)
    module.weight = MarkedParameter(module.weight.detach())
    module.weight.mark = "set"
    fsdp_c.fully_shard(module)
    assert module.weight.mark == "set"
    module.unshard()
    assert module.weight.mark == "set"
