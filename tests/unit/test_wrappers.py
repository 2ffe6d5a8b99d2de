"""DTensors that the extension makes are what torch's own function makes of the same parts."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

import fsdp_c._C as _C
from fsdp_c import MixedPrecisionPolicy, fully_shard
from fsdp_c.bind import BOUND, _probe
from fsdp_c.compat import dtensor_new

SHAPES = [(16,), (3, 5), (5, 1, 2), (8, 0), (1, 16), (2, 1, 1, 1, 1, 1, 1, 2), (9,) + (1,) * 8]
"""The last has more dimensions than the extension takes upon itself."""


class Whole(nn.Module):
    """Sums its parameters; all have gradients then."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            value = nn.Parameter(torch.ones(shape, dtype=dtype))
            self.register_parameter(f"p{index}", value)

    def forward(self) -> torch.Tensor:
        total = sum(p.abs().sum() for p in self.parameters())
        assert isinstance(total, torch.Tensor)
        return total


@pytest.fixture(params=["by us", "by torch"], autouse=True)
def maker(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who makes them: torch does after ``bind`` until the extension has shown that it can."""
    if request.param == "by torch":
        _C.bind(**BOUND)
    yield request.param
    _C.make_dtensors(*_probe())


def facts(tensor: DTensor) -> tuple[Any, ...]:
    """What can be told of a wrapper from outside."""
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.layout)
    kind = (type(tensor), tensor.dtype, tensor.device, str(torch._C._dispatch_keys(tensor)))
    flags = (tensor.requires_grad, tensor.is_leaf, tensor._is_view(), tensor.is_inference())
    storage = tensor.untyped_storage()
    memory = (storage.nbytes(), storage.device, storage.resizable())
    return (
        *layout,
        *kind,
        *flags,
        *memory,
        tensor._version,
        vars(tensor),
        gc.is_tracked(tensor),
        id(tensor._spec),
        id(tensor._local_tensor),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients(fake_group: int, dtype: torch.dtype, dim: int) -> None:
    def placement(param: nn.Parameter) -> Shard:
        return Shard(dim if param.ndim > dim and param.size(dim) % fake_group == 0 else 0)

    model = fully_shard(Whole(dtype), shard_placement_fn=placement)
    model().backward()
    for param in model.parameters():
        grad = param.grad
        assert isinstance(grad, DTensor)
        torchs = dtensor_new(DTensor, grad._local_tensor, grad._spec, requires_grad=False)
        assert facts(grad) == facts(torchs), param.shape


def test_gradients_of_another_dtype(fake_group: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(Whole(torch.float32), mp_policy=policy)
    model().backward()
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        torchs = dtensor_new(
            DTensor, param.grad._local_tensor, param.grad._spec, requires_grad=False
        )
        assert facts(param.grad) == facts(torchs)


def test_what_it_can_do(fake_group: int) -> None:
    """Operations come to DTensor, objects die, and copies are whole."""
    model = fully_shard(Whole(torch.float32))
    model().backward()
    param = next(model.parameters())
    grad = param.grad
    assert isinstance(grad, DTensor)
    local = grad.to_local()
    assert torch.equal((grad + 1).to_local(), local + 1)  # type: ignore[attr-defined]
    assert torch.equal(copy.deepcopy(grad).to_local(), local)
    assert torch.equal(torch.empty_like(grad).fill_(3).to_local(), torch.full_like(local, 3))
    assert repr(grad).startswith("DTensor(")
    assert grad.grad_fn is None and grad.data_ptr() == 0
    assert torch.equal(pickle.loads(pickle.dumps(local)), local)
    kept = weakref.ref(grad), weakref.ref(local)
    del local
    param.grad = grad = None
    assert [ref() for ref in kept] == [None, None]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="it need not export what this takes")
def test_it_makes_them_itself() -> None:
    assert _C.make_dtensors(*_probe())


@pytest.mark.parametrize(
    "spec",
    [
        None,
        SimpleNamespace(tensor_meta=None),
        SimpleNamespace(tensor_meta=SimpleNamespace(shape=[2], stride=(1,))),
        SimpleNamespace(tensor_meta=SimpleNamespace(shape=(2,), stride=(1, 1))),
        SimpleNamespace(tensor_meta=SimpleNamespace(shape=(-2,), stride=(1,))),
        SimpleNamespace(tensor_meta=SimpleNamespace(shape=("2",), stride=(1,))),
        SimpleNamespace(tensor_meta=SimpleNamespace(shape=(1,) * 9, stride=(1,) * 9)),
    ],
    ids=repr,
)
def test_what_it_leaves_to_torch(spec: Any) -> None:
    assert not _C.make_dtensors(torch.empty(2), spec)


def test_a_local_tensor_that_is_not_plain() -> None:
    subclass = nn.Parameter(torch.empty(2), requires_grad=False)
    for local in (subclass, torch.empty(2, requires_grad=True), torch.empty(2, 2).to_sparse()):
        assert not _C.make_dtensors(local, _probe()[1])


def test_wrong_arguments() -> None:
    for args in ((), (1, None), (torch.empty(2),)):
        with pytest.raises(TypeError, match="make_dtensors takes a tensor and a spec"):
            _C.make_dtensors(*args)  # type: ignore[arg-type]
