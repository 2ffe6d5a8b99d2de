"""``state_dict`` gives what torch's ``detach`` of each parameter gives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c._C as _C
from fsdp_c import fully_shard


@pytest.fixture
def model(fake_group: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 16), nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(8, 8))
    layers[3].weight.requires_grad_(False)
    return fully_shard(layers)


def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What can be told of a tensor from outside."""
    inner = (facts(tensor._local_tensor), tensor._spec) if isinstance(tensor, DTensor) else ()
    values = () if inner else (tensor.tolist(), tensor.data_ptr())
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    flags = (tensor.requires_grad, tensor.is_leaf, type(tensor), tensor._is_view(), tensor._version)
    return (*layout, *flags, tensor.untyped_storage()._cdata, vars(tensor), *inner, *values)


def test_it_is_what_detach_gives(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.add_(1)  # type: ignore[union-attr,operator,arg-type]
    state = model.state_dict()
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(state) == list(saved_by_hand(model))
    for name, value in state.items():
        assert facts(value) == facts(whole[name].detach()), name


def saved_by_hand(model: nn.Module) -> dict[str, torch.Tensor]:
    """In torch's order."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        named = [*module.named_parameters(name, False), *module.named_buffers(name, False)]
        found.update(named)
    return found


def test_versions_are_counted_as_by_detach(model: nn.Module) -> None:
    parameter = model[0].weight  # type: ignore[union-attr]
    by_state, by_detach = model.state_dict()["0.weight"], parameter.detach()  # type: ignore[operator]
    with torch.no_grad():
        for value in (by_state, by_detach):
            value.add_(1)
            value._local_tensor.add_(1)
        parameter.add_(1)  # type: ignore[operator]
    assert by_state._version == by_detach._version == parameter._version == 3
    assert by_state._local_tensor._version == by_detach._local_tensor._version
    assert facts(by_state)[:5] == facts(by_detach)[:5]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_who_looks_at_operators_sees_them(model: nn.Module) -> None:
    with Seen() as seen:
        model.state_dict()
    assert seen.names.count("detach.default") >= 6
    with CommDebugMode():
        model.state_dict()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The prefixes of modules whose parameters are saved quickly."""
    prefixes: list[str] = []
    save = _C.save_parameters

    def noted(parameters: Any, destination: Any, prefix: str) -> None:
        prefixes.append(prefix)
        save(parameters, destination, prefix)

    monkeypatch.setattr(_C, "save_parameters", noted)
    yield prefixes


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def test_what_is_special_is_saved_by_torch(fake_group: int, quick: list[str]) -> None:
    sharded = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), WithExtra(8, 8)))
    state = sharded.state_dict()
    assert quick == ["", "0."]
    assert state["2._extra_state"] == 1 and "1.running_mean" in state
    quick.clear()
    kept = sharded.state_dict(keep_vars=True)
    assert kept["0.weight"] is sharded[0].weight and not quick  # type: ignore[index]
    with torch.device("cpu"):
        sharded.state_dict()
    assert not quick


def test_other_tensors_are_detached_by_themselves(fake_group: int) -> None:
    class Loud(torch.Tensor):
        pass

    plain, loud = nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Loud)
    destination: dict[str, Any] = OrderedDict()
    _C.save_parameters({"a": plain, "b": None, "c": loud}, destination, "x.")  # type: ignore[dict-item]
    assert list(destination) == ["x.a", "x.c"]
    assert type(destination["x.a"]) is torch.Tensor and type(destination["x.c"]) is Loud
    assert destination["x.a"].data_ptr() == plain.data_ptr()
    with pytest.raises(AttributeError):
        _C.save_parameters({"a": 1}, destination, "")  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        _C.save_parameters([], destination, "")  # type: ignore[arg-type]


def test_transforms_and_inference_are_torchs(model: nn.Module, quick: list[str]) -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        model.state_dict()
        return x

    torch.func.vmap(inside)(torch.ones(2))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version_counter"):
        model.state_dict()  # as torch has it for normal DTensors
    assert not quick
    model.state_dict()
    assert quick == ["", "0.", "1.", "3."]
