"""DTensors that the extension constructs equal those that torch constructs from the same parts."""

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
from fsdp_c._compat.torch_releases import dtensor_new
from fsdp_c._runtime.bindings import BOUND_OBJECTS, _make_sample

# The last shape has more dimensions than the extension supports.
SHAPES = [(16,), (3, 5), (5, 1, 2), (8, 0), (1, 16), (2, 1, 1, 1, 1, 1, 1, 2), (9,) + (1,) * 8]


class SumOfParameters(nn.Module):
    """A module with a parameter of each shape. Its backward gives all of them gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            value = nn.Parameter(torch.ones(shape, dtype=dtype))
            self.register_parameter(f"p{index}", value)

    def forward(self) -> torch.Tensor:
        total = sum(p.abs().sum() for p in self.parameters())
        assert isinstance(total, torch.Tensor)
        return total


@pytest.fixture(params=["by fsdp_c", "by torch"], autouse=True)
def constructor(request: pytest.FixtureRequest) -> Iterator[None]:
    """Selects the code that constructs DTensors.

    ``bind`` resets the extension to torch's constructor until a probe succeeds.
    """
    if request.param == "by torch":
        _C.bind(**BOUND_OBJECTS)
    yield
    _C.make_dtensors(*_make_sample())


def properties_of(tensor: DTensor) -> tuple[Any, ...]:
    """Returns all properties of the wrapper that Python can read."""
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
def test_gradient_equals_dtensor_constructed_by_torch(
    fake_group: int, dtype: torch.dtype, dim: int
) -> None:
    def placement(param: nn.Parameter) -> Shard:
        return Shard(dim if param.ndim > dim and param.size(dim) % fake_group == 0 else 0)

    model = fully_shard(SumOfParameters(dtype), shard_placement_fn=placement)
    model().backward()
    for param in model.parameters():
        grad = param.grad
        assert isinstance(grad, DTensor)
        reference = dtensor_new(DTensor, grad._local_tensor, grad._spec, requires_grad=False)
        assert properties_of(grad) == properties_of(reference), param.shape


def test_gradient_in_mixed_precision_equals_dtensor_constructed_by_torch(fake_group: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(SumOfParameters(torch.float32), mp_policy=policy)
    model().backward()
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        reference = dtensor_new(
            DTensor, param.grad._local_tensor, param.grad._spec, requires_grad=False
        )
        assert properties_of(param.grad) == properties_of(reference)


def test_gradient_supports_operators_copies_and_deallocation(fake_group: int) -> None:
    model = fully_shard(SumOfParameters(torch.float32))
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
    references = weakref.ref(grad), weakref.ref(local)
    del local
    param.grad = grad = None
    assert [ref() for ref in references] == [None, None]


@pytest.mark.torch("2.13")  # older torch may lack the exported symbols
def test_make_dtensors_of_supported_spec_returns_true() -> None:
    assert _C.make_dtensors(*_make_sample())


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
def test_make_dtensors_of_unsupported_spec_returns_false(spec: Any) -> None:
    assert not _C.make_dtensors(torch.empty(2), spec)


def test_make_dtensors_of_local_tensor_that_is_not_plain_returns_false() -> None:
    subclass = nn.Parameter(torch.empty(2), requires_grad=False)
    for local in (subclass, torch.empty(2, requires_grad=True), torch.empty(2, 2).to_sparse()):
        assert not _C.make_dtensors(local, _make_sample()[1])


def test_make_dtensors_with_wrong_arguments_raises() -> None:
    for args in ((), (1, None), (torch.empty(2),)):
        with pytest.raises(TypeError, match="make_dtensors takes a tensor and a spec"):
            _C.make_dtensors(*args)  # type: ignore[arg-type]
