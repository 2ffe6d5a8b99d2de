"""A replaced local tensor of a sharded parameter is used if it fits, and raises otherwise.

torch's FSDP2 uses a replaced local tensor only before the first forward and after
``load_state_dict(assign=True)``, and pads missing rows with zeros. Later it uses the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fake_world import fake_world
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, distribute_tensor
from wrapping import Wrapping

import fsdp_c

Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=[0, 1], autouse=True)
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs each test as rank 0 and rank 1 of 2. Rank 1 has two of five rows and one of padding."""
    with fake_world(2, request.param):
        yield request.param


def model_of(shard: Callable[..., Any] = fsdp_c.fully_shard, wrap: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 4, bias=False))
    for layer in model:
        if wrap:
            layer.weight = nn.Parameter(Wrapping(layer.weight.detach().clone()))
        shard(layer)
    return shard(model)


def train_step(model: Any) -> float:
    """Runs forward and backward. Returns the loss."""
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    model.zero_grad()
    return loss.item()


def eval_loss(model: Any) -> float:
    with torch.no_grad():
        return model(torch.ones(2, 4)).square().sum().item()


def loss_of_torch() -> float:
    """Returns the loss under torch's FSDP2 after its first weight's shard is multiplied by 3."""
    model = model_of(fully_shard)
    with torch.no_grad():
        model[0].weight._local_tensor.mul_(3)
    return train_step(model)


def tripled_local(param: Any) -> torch.Tensor:
    return param._local_tensor.detach().clone().mul_(3)


def replace_local_tensor(model: Any, change: Change) -> None:
    model[0].weight._local_tensor = change(tripled_local(model[0].weight))


def replace_data(model: Any, change: Change) -> None:
    model[0].weight._local_tensor.data = change(tripled_local(model[0].weight))


def load_with_assign(model: Any, change: Change) -> None:
    state = model.state_dict()
    param = state["0.weight"]
    state["0.weight"] = DTensor(change(tripled_local(param)), param._spec, requires_grad=False)
    model.load_state_dict(state, assign=True)


REPLACEMENTS = [replace_local_tensor, replace_data, load_with_assign]


def with_other_strides(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def with_negative_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Returns equal values as a view with torch's negative bit set."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def with_padding(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(3 - tensor.size(0), 4)])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize(
    "change",
    [torch.clone, with_other_strides, with_negative_bit, with_padding],
    ids=lambda c: c.__name__,
)
def test_replaced_shard_of_original_or_padded_size_is_used(
    replace: Callable[..., None], change: Change, trained: bool
) -> None:
    model = model_of()
    if trained:
        train_step(model)
    replace(model, change)
    assert train_step(model) == loss_of_torch()
    weight = model[0].weight
    assert weight._local_tensor.shape == (3 if dist.get_rank() == 0 else 2, 4)
    with torch.no_grad():  # the next forward gathers the new values
        weight._local_tensor.zero_()
    assert train_step(model) == 0.0


@pytest.mark.parametrize("replace", [replace_local_tensor, replace_data])
def test_shard_replaced_while_unit_is_unsharded_is_used(replace: Callable[..., None]) -> None:
    model = model_of()
    eval_loss(model)
    model[0].set_reshard_after_forward(False)
    eval_loss(model)
    (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
    assert group.is_unsharded
    sharded = group.fsdp_params[0].sharded_param
    if replace is replace_local_tensor:
        sharded._local_tensor = tripled_local(sharded)
    else:
        sharded._local_tensor.data = tripled_local(sharded)
    assert eval_loss(model) == loss_of_torch()


def test_shard_replaced_by_tensor_subclass_and_back_is_used() -> None:
    model = model_of()
    original_loss = train_step(model)
    weight = model[0].weight
    plain = weight._local_tensor.detach().clone()
    weight._local_tensor = Wrapping(3 * plain)
    assert train_step(model) == loss_of_torch()
    weight._local_tensor = Wrapping(plain.clone())
    assert train_step(model) == original_loss
    weight._local_tensor = 3 * plain
    assert train_step(model) == loss_of_torch()


def test_shard_replaced_by_swap_tensors_is_used() -> None:
    model = model_of()
    train_step(model)
    weight = model[0].weight
    other = nn.Parameter(DTensor(tripled_local(weight), weight._spec, requires_grad=False))
    torch.utils.swap_tensors(weight, other)
    assert train_step(model) == loss_of_torch()


WRONG_SHAPES: dict[str, Change] = {
    "one row": lambda tensor: tensor[:1].clone(),
    "more rows": lambda tensor: torch.cat([tensor, tensor]),
    "fewer columns": lambda tensor: tensor[:, :2].clone(),
    "one dim": lambda tensor: tensor.flatten(),
}


@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize("change", WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_replaced_shard_of_other_shape_raises(replace: Callable[..., None], change: Change) -> None:
    model = model_of()
    original_loss = eval_loss(model)
    rows = 3 if dist.get_rank() == 0 else 2
    match = rf"Expects size torch.Size\(\[{rows}, 4\]\) but got torch.Size\(.*\nparameter '.*weight"
    with pytest.raises(AssertionError, match=match):
        replace(model, change)
        train_step(model)
    if replace is load_with_assign:  # the failed load leaves the model unchanged
        assert eval_loss(model) == original_loss


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("replace", [replace_local_tensor, replace_data])
def test_replaced_shard_of_other_dtype_raises(replace: Callable[..., None], trained: bool) -> None:
    model = model_of()
    if trained:
        train_step(model)
    replace(model, torch.Tensor.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"expected .* dtype torch\.float32 but got torch.bfloat16"
    ):
        train_step(model)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("replace", [replace_local_tensor, load_with_assign])
def test_replaced_shard_on_meta_raises_until_materialized(
    replace: Callable[..., None], trained: bool
) -> None:
    model = model_of()
    if trained:
        train_step(model)
    replace(model, lambda tensor: tensor.to("meta"))
    with pytest.raises(RuntimeError, match=r"materialized .*: \['0.weight'\]"):
        train_step(model)
    with torch.no_grad():
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.zero_()
    assert train_step(model) == 0.0


@pytest.mark.parametrize(
    ("rows", "dtype", "error"), [(5, torch.bfloat16, RuntimeError), (6, None, AssertionError)]
)
def test_dtensor_data_of_other_dtype_or_shape_raises(
    rows: int, dtype: torch.dtype | None, error: type[Exception]
) -> None:
    """Assigning ``.data`` of a DTensor does not change its local tensor."""
    model = model_of()
    train_step(model)
    weight = model[0].weight
    weight.data = distribute_tensor(
        torch.zeros(rows, 4, dtype=dtype), weight.device_mesh, weight.placements
    )
    with pytest.raises(error, match=r"parameter '0\.weight'"):
        train_step(model)


def test_shards_replaced_by_module_methods_are_not_refreshed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    wrapped = model_of(wrap=True)
    calls: list[object] = []
    train_step(model)
    train_step(wrapped)
    param_class = type(model[0]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0])
    monkeypatch.setattr(param_class, "_refresh_shard", lambda param: calls.append(param))
    for tested in (model, wrapped):
        train_step(tested)
        tested.to(torch.float64).to(torch.float32)
        train_step(tested)
        tested.load_state_dict(tested.state_dict(), assign=True)
        train_step(tested)
    assert calls == []


def equal_layers(shard: Callable[..., Any], **kwargs: Any) -> Any:
    """Returns sharded layers of equal size. The shards of the second one are made in C."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(2)))
    for layer in model:
        shard(layer, **kwargs)
    return shard(model, **kwargs)


def run_layers(model: Any) -> list[float]:
    with torch.no_grad():
        return [layer(torch.ones(2, 5)).sum().item() for layer in model]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def test_local_tensors_are_no_views_as_in_torch(policy: OffloadPolicy, trained: bool) -> None:
    def use_local_tensors(shard: Callable[..., Any]) -> list[Any]:
        model = equal_layers(shard, offload_policy=policy)
        x = torch.ones(2, 5)
        if trained:
            model(x).sum().backward()
        results: list[Any] = []
        for layer in model:
            local = layer.weight._local_tensor
            results += [local._is_view(), local.is_leaf, local._base is None]
            local.detach_().t_().t_()
            local.mul_(torch.ones((), requires_grad=True)).detach_()
        results += model(x).flatten().tolist()
        for layer in model:
            local = layer.weight._local_tensor
            torch.utils.swap_tensors(local, local.detach().clone())
        return results

    assert use_local_tensors(fsdp_c.fully_shard) == use_local_tensors(fully_shard)


@pytest.mark.parametrize("constructor", ["of fsdp_c", "of torch"])
@pytest.mark.parametrize("change", ["in place", "by an optimizer", "of a new tensor in place"])
def test_changed_values_of_shards_are_gathered_while_units_are_unsharded(
    monkeypatch: pytest.MonkeyPatch, constructor: str, change: str
) -> None:
    init = FSDPParam._init_sharded_param
    if constructor == "of torch":
        monkeypatch.setattr(FSDPParam, "_init_sharded_param", lambda self, *args: init(self, *args))
    model = equal_layers(fsdp_c.fully_shard, reshard_after_forward=False)
    params = [layer._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0] for layer in model]
    for factor in (1, 3, 3):
        before = run_layers(model)
        assert not any(param._group().is_sharded for param in params)
        for param in params:
            sharded = param.sharded_param
            if change == "by an optimizer":
                sharded.grad = DTensor(
                    sharded._local_tensor * (1 - factor), sharded._spec, requires_grad=False
                )
                torch.optim.SGD([sharded], lr=1.0).step()
                continue
            with torch.no_grad():
                if change == "of a new tensor in place":
                    sharded._local_tensor = sharded._local_tensor.data
                sharded._local_tensor.mul_(factor)
        assert run_layers(model) == pytest.approx([factor * value for value in before])
