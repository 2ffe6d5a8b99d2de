"""Attributes of parameters and autograd hooks on them do not keep a deleted model alive."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp_c


class ReturnsParameter(nn.Module):
    """Returns one of its parameters besides the output, as a loss with learned weights does.

    With ``has_attributes``, parameters have attributes, two of which reference the model.
    """

    def __init__(self, has_attributes: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        if has_attributes:
            for param in self.parameters():
                param.owner = self  # type: ignore[attr-defined]
                param.loader = self.load  # type: ignore[attr-defined]
                param.history = torch.zeros_like(param)  # type: ignore[attr-defined]
                param.lock = threading.Lock()  # type: ignore[attr-defined]
                param.note = ("kept", {"rank": 0, "dtype": torch.float32})  # type: ignore[attr-defined]

    def load(self, values: torch.Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * self.scale, self.scale


def step(model: nn.Module) -> None:
    output, scale = model(torch.ones(2, 4))
    (output.square().sum() + scale.exp().sum()).backward()


def unsharded_params_of(model: Any) -> list[Any]:
    [group] = model._get_fsdp_state()._fsdp_param_groups
    return [param._unsharded_param for param in group.fsdp_params]


@pytest.mark.parametrize("has_attributes", [True, False])
@pytest.mark.parametrize("shard", [fsdp_c.fully_shard, fsdp_c.replicate])
def test_deleted_model_with_references_in_parameters_is_freed(
    fake_group: int, shard: Any, has_attributes: bool
) -> None:
    model = shard(ReturnsParameter(has_attributes))
    for _ in range(3):
        step(model)
    references = [weakref.ref(model), weakref.ref(model._get_fsdp_state())]
    references += [weakref.ref(param) for param in unsharded_params_of(model)]
    del model
    gc.collect()
    assert [reference() is None for reference in references] == [True] * 5


REFERENCES: dict[str, Any] = {
    "hook": lambda param, model: param.register_hook(lambda grad: None if model else grad),
    "attribute": lambda param, model: setattr(param, "owner", model),
}
"""References from a parameter to its model. Not register_post_accumulate_grad_hook: torch keeps the
model of such a hook also without FSDP."""


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("shard", [fsdp_c.fully_shard, fsdp_c.replicate])
def test_reference_of_unsharded_parameter_does_not_keep_a_deleted_model(
    fake_group: int, shard: Any, kind: str
) -> None:
    class Model(ReturnsParameter):
        pass

    model = shard(Model(has_attributes=False))
    step(model)
    for param in unsharded_params_of(model):
        REFERENCES[kind](param, model)
    step(model)
    del model, param
    gc.collect()
    # The collector clears weak references also to objects that it does not free.
    # type(): other objects may have a __class__ that raises, as a weakref.proxy of a freed object.
    assert not [obj for obj in gc.get_objects() if issubclass(type(obj), Model)]


def test_attributes_with_plain_data_are_copied_to_sharded_and_unsharded_parameters(
    fake_group: int,
) -> None:
    model: Any = fsdp_c.fully_shard(ReturnsParameter(True))
    step(model)
    params = [*model.parameters(), *unsharded_params_of(model)]
    assert [param.note[1]["rank"] for param in params] == [0] * 6
    others = ("owner", "loader", "history", "lock")  # torch drops all attributes
    assert not any(hasattr(param, name) for param in params for name in others)


@pytest.mark.parametrize("shard", [torch.distributed.fsdp.fully_shard, fsdp_c.fully_shard])
def test_optimizer_and_parameters_with_attributes_are_copied_and_pickled(
    fake_group: int, shard: Any
) -> None:
    model: Any = shard(ReturnsParameter(True))
    optimizer = torch.optim.AdamW(model.parameters())
    assert len(copy.deepcopy(optimizer).param_groups[0]["params"]) == 3
    assert copy.deepcopy(model.state_dict(keep_vars=True)).keys() == model.state_dict().keys()
    assert pickle.dumps(list(model.parameters()))


class Parameter(nn.Parameter):
    """A subclass whose method needs an attribute that is not plain data."""

    def read(self) -> Any:
        return self.value()  # type: ignore[attr-defined]


def test_unsharded_parameter_of_subclass_has_attributes_for_its_methods(fake_group: int) -> None:
    model: Any = ReturnsParameter(False)
    model.scale = Parameter(torch.ones(4))
    model.scale.value = lambda: 3
    model.scale.loader = model.load
    fsdp_c.fully_shard(model)
    step(model)
    [unsharded] = [param for param in unsharded_params_of(model) if isinstance(param, Parameter)]
    names = vars(unsharded).keys()
    assert unsharded.read() == 3
    assert "loader" not in names and not hasattr(model.scale, "value")
    reference = weakref.ref(model)
    del model, unsharded
    gc.collect()
    assert reference() is None


def test_returned_parameter_is_unsharded_for_backward_and_has_one_hook(single_group: int) -> None:
    model: Any = fsdp_c.fully_shard(ReturnsParameter(False), reshard_after_forward=True)
    reference = ReturnsParameter(False)
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        step(model)
        step(reference)
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param.grad.to_local(), expected.grad)
    assert [len(p._backward_hooks or ()) for p in unsharded_params_of(model)] == [0, 0, 1]
