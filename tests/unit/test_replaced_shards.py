"""Another local tensor in the place of a shard: followed where it fits, refused by name where not.

torch's FSDP2 adopts one before its first forward, or from ``load_state_dict(assign=True)``, and
pads it with zeros where rows are missing; later it goes on with the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from wrapping import Wrapping

import fsdp_c

Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[0, 1], autouse=True)
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of two ranks: the second has two of five rows, and one of padding."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


def model_of(shard: Callable[..., Any] = fsdp_c.fully_shard, wrap: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 4, bias=False))
    for layer in model:
        if wrap:
            layer.weight = nn.Parameter(Wrapping(layer.weight.detach().clone()))
        shard(layer)
    return shard(model)


def loss_of(model: Any) -> float:
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    model.zero_grad()
    return loss.item()


def evaluated(model: Any) -> float:
    with torch.no_grad():
        return model(torch.ones(2, 4)).square().sum().item()


def expected() -> float:
    """The loss after the first weight's shard was tripled, by torch's FSDP2."""
    model = model_of(fully_shard)
    with torch.no_grad():
        model[0].weight._local_tensor.mul_(3)
    return loss_of(model)


def tripled(param: Any) -> torch.Tensor:
    return param._local_tensor.detach().clone().mul_(3)


def by_object(model: Any, change: Change) -> None:
    model[0].weight._local_tensor = change(tripled(model[0].weight))


def by_data(model: Any, change: Change) -> None:
    model[0].weight._local_tensor.data = change(tripled(model[0].weight))


def by_loading(model: Any, change: Change) -> None:
    state = model.state_dict()
    param = state["0.weight"]
    state["0.weight"] = DTensor(change(tripled(param)), param._spec, requires_grad=False)
    model.load_state_dict(state, assign=True)


WAYS = [by_object, by_data, by_loading]


def in_other_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def conjugated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, as negatives that are not computed yet."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def with_padding(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(3 - tensor.size(0), 4)])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "change",
    [torch.clone, in_other_memory_order, conjugated, with_padding],
    ids=lambda c: c.__name__,
)
def test_a_shard_of_the_same_size_is_followed(
    way: Callable[..., None], change: Change, trained: bool
) -> None:
    model = model_of()
    if trained:
        loss_of(model)
    way(model, change)
    assert loss_of(model) == expected()
    weight = model[0].weight
    assert weight._local_tensor.shape == (3 if dist.get_rank() == 0 else 2, 4)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():  # what is written now is what is gathered
        weight._local_tensor.zero_()
    assert loss_of(model) == 0.0


@pytest.mark.parametrize("way", [by_object, by_data])
def test_a_shard_replaced_while_the_unit_is_unsharded_is_followed(way: Callable[..., None]) -> None:
    model = model_of()
    evaluated(model)
    model[0].set_reshard_after_forward(False)
    evaluated(model)
    (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
    assert group.is_unsharded
    sharded = group.fsdp_params[0].sharded_param
    if way is by_object:
        sharded._local_tensor = tripled(sharded)
    else:
        sharded._local_tensor.data = tripled(sharded)
    assert evaluated(model) == expected()


def test_a_wrapper_in_the_place_of_a_tensor_and_back_is_followed() -> None:
    model = model_of()
    first = loss_of(model)
    weight = model[0].weight
    plain = weight._local_tensor.detach().clone()
    weight._local_tensor = Wrapping(3 * plain)
    assert loss_of(model) == expected()
    weight._local_tensor = Wrapping(plain.clone())
    assert loss_of(model) == first
    weight._local_tensor = 3 * plain
    assert loss_of(model) == expected()


def test_swapped_tensors_are_followed() -> None:
    model = model_of()
    loss_of(model)
    weight = model[0].weight
    other = nn.Parameter(DTensor(tripled(weight), weight._spec, requires_grad=False))
    torch.utils.swap_tensors(weight, other)
    assert loss_of(model) == expected()


UNFIT: dict[str, Change] = {
    "one row": lambda tensor: tensor[:1].clone(),
    "more rows": lambda tensor: torch.cat([tensor, tensor]),
    "fewer columns": lambda tensor: tensor[:, :2].clone(),
    "one dim": lambda tensor: tensor.flatten(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", UNFIT.values(), ids=UNFIT)
def test_a_shard_of_another_size_is_refused(way: Callable[..., None], change: Change) -> None:
    model = model_of()
    before = evaluated(model)
    rows = 3 if dist.get_rank() == 0 else 2
    first = rf"Expects size torch.Size\(\[{rows}, 4\]\) but got torch.Size\(.*\nparameter '.*weight"
    with pytest.raises(AssertionError, match=first):
        way(model, change)
        loss_of(model)
    if way is by_loading:  # the model is as it was
        assert evaluated(model) == before


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("way", [by_object, by_data])
def test_a_shard_of_another_dtype_is_refused(way: Callable[..., None], trained: bool) -> None:
    model = model_of()
    if trained:
        loss_of(model)
    way(model, torch.Tensor.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"expected .* dtype torch\.float32 but got torch.bfloat16"
    ):
        loss_of(model)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("way", [by_object, by_loading])
def test_a_shard_without_values_is_refused(way: Callable[..., None], trained: bool) -> None:
    model = model_of()
    if trained:
        loss_of(model)
    way(model, lambda tensor: tensor.to("meta"))
    with pytest.raises(RuntimeError, match=r"materialized .*: \['0.weight'\]"):
        loss_of(model)
    with torch.no_grad():  # and can be given some
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.zero_()
    assert loss_of(model) == 0.0


@pytest.mark.parametrize(
    ("rows", "dtype", "error"), [(5, torch.bfloat16, RuntimeError), (6, None, AssertionError)]
)
def test_data_of_another_dtype_or_size_is_refused(
    rows: int, dtype: torch.dtype | None, error: type[Exception]
) -> None:
    """``.data`` of a DTensor leaves its local tensor, and so its values, as they are."""
    model = model_of()
    loss_of(model)
    weight = model[0].weight
    weight.data = distribute_tensor(
        torch.zeros(rows, 4, dtype=dtype), weight.device_mesh, weight.placements
    )
    with pytest.raises(error, match=r"parameter '0\.weight'"):
        loss_of(model)


def test_nothing_is_looked_for_while_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    wrapped = model_of(wrap=True)
    called: list[object] = []
    loss_of(model)
    loss_of(wrapped)
    kind = type(model[0]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0])
    monkeypatch.setattr(kind, "_follow_shard", called.append)
    for each in (model, wrapped):
        loss_of(each)
        each.to(torch.float64).to(torch.float32)
        loss_of(each)
        each.load_state_dict(each.state_dict(), assign=True)
        loss_of(each)
    assert called == []
