"""Parameters of tensor subclasses: what of a subclass fully_shard may rely on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as public
import torch.nn as nn
from extensions import One
from wrapping import Wrapping

import fsdp_c


class OnlyChunks(One):
    """Can be chunked, padded and copied, but not cut elsewhere; NF4Tensor is like that."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            _, dim, start, end = (*args, *(0, 0, None)[len(args) - 1 :])
            if start != 0 or end not in (None, args[0].shape[dim]):
                raise NotImplementedError("slices of this subclass")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("shard", [public.fully_shard, fsdp_c.fully_shard])
def test_a_subclass_need_not_know_slices(fake_group: int, shard: Callable[..., Any]) -> None:
    values = torch.arange(64.0).view(16, 4)
    module = nn.Linear(4, 16, bias=False)
    module.weight = nn.Parameter(OnlyChunks(values.clone()))
    shard(module)
    local = module.weight.to_local()
    assert type(local) is OnlyChunks
    assert torch.equal(local.held, values[:2])
    assert module(torch.ones(3, 4)).shape == (3, 16)


def test_the_whole_tensor_inside_of_a_wrapper_is_not_kept(fake_group: int) -> None:
    whole = torch.ones(16, 4)
    module = nn.Linear(4, 16, bias=False)
    module.weight = nn.Parameter(Wrapping(whole))
    module.weight.note = "kept"
    alive = weakref.ref(whole)
    fsdp_c.fully_shard(module)
    module(torch.ones(3, 4)).sum().backward()
    assert module.weight.note == "kept"
    del whole
    gc.collect()
    assert alive() is None
