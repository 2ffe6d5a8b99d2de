"""Parameters copied from a cached template equal those of the constructor."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from fake_world import fake_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard

from fsdp_c import fully_shard, replicate
from fsdp_c._runtime import param_template
from fsdp_c._runtime.param import Param

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CORE = ("orig_dtype", "param_dtype", "reduce_dtype", "_sharding_spec", "padded_numel", "chunk_rows")
CORE += ("local_rows", "rows", "is_dtensor", "_accumulated", "_partial")


def hsdp() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))}


def shard_columns() -> dict[str, Any]:
    return {
        "shard_placement_fn": lambda param: (
            Shard(1) if param.ndim == 2 and len(param) == 16 else None
        )
    }


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "hsdp": hsdp,
    "columns": shard_columns,
    "bf16": lambda: {"mp_policy": BF16},
    "offload": lambda: {"offload_policy": CPUOffloadPolicy()},
    "stays": lambda: {"reshard_after_forward": False},
    "smaller": lambda: {"reshard_after_forward": 2},
}


def model(device: str = "cpu") -> nn.Module:
    """Returns equal layers: one is frozen, one has an attribute; the last two have few rows."""
    torch.manual_seed(0)
    layers = [nn.Linear(24, 16, device=device) for _ in range(4)]
    layers[1].weight.requires_grad_(False)
    layers[2].weight.note = "mine"  # type: ignore[attr-defined]
    few = [nn.Linear(2, 3, bias=False, device=device) for _ in range(2)]
    return nn.Sequential(*layers, *few)


def params_of(module: Any) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups[0].fsdp_params)


def make_without_cache(monkeypatch: pytest.MonkeyPatch, make: Callable[[], list[Any]]) -> list[Any]:
    """Returns the result of ``make`` with the template cache disabled."""
    with monkeypatch.context() as patch:
        patch.setattr(param_template, "has_torch_constructor", lambda: False)
        return make()


def tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    inner = (tensor_facts(tensor._local_tensor), tensor._spec) if type(tensor) is DTensor else ()
    values = () if inner or tensor.is_meta else (tensor.detach().clone().tolist(),)
    layout = (tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    flags = (tensor.requires_grad, tensor.is_leaf, type(tensor), tensor._is_view())
    return (*layout, *flags, *inner, *values)


def facts(param: Any) -> dict[str, Any]:
    """Returns the attributes of a parameter, with types in place of objects of its own."""
    own = {
        name: value for name, value in vars(param).items() if name not in ("_template", "_group")
    }
    for name in ("_module_info", "_orig_param_uid", "_adopted_tensor", "_post_load_hook_handle"):
        own[name] = type(own[name])
    for name in ("mesh_info", "post_forward_mesh_info"):  # each call creates a new object
        own[name] = type(own[name]).__name__
    own |= {name: getattr(param, name) for name in CORE}
    local, shard_data = param.sharded_param._local_tensor, param._sharded_param_data
    shares = (local.untyped_storage()._cdata == shard_data.untyped_storage()._cdata, local._version)
    attributes = dict(vars(param.sharded_param))
    tensors = (tensor_facts(param.sharded_param), tensor_facts(shard_data))
    return own | {"shares": shares, "tensors": tensors, "attributes": attributes}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_params_from_a_template_equal_constructed_ones(
    setting: str, device: str, fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = SETTINGS[setting]()

    def make() -> list[Any]:
        return params_of(fully_shard(model(device), **arguments))

    for param, expected in zip(make(), make_without_cache(monkeypatch, make), strict=True):
        assert facts(param) == facts(expected)
        assert param._adopted_tensor is param.sharded_param._local_tensor
        assert list(vars(param.sharded_param)) == list(vars(expected.sharded_param))


def test_replicated_params_from_a_template_equal_constructed_ones(
    fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> list[Any]:
        return params_of(replicate(model()))

    for param, expected in zip(make(), make_without_cache(monkeypatch, make), strict=True):
        assert facts(param) == facts(expected)


def test_equal_params_are_constructed_once_per_template(
    fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = count_constructed(monkeypatch)
    sharded = fully_shard(model())  # its parameters keep the templates
    assert len(made) == 3  # one each for the weights, the biases and the layers of few rows
    fully_shard(model(), mp_policy=BF16)
    assert len(made) == 6
    fully_shard(model())
    assert len(made) == 6 and sharded is not None


def count_constructed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    init = Param.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(None)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Param, "__init__", counted)
    return made


@pytest.mark.parametrize("name", ["init_dtype_attrs", "to_sharded_dtensor", "_init_extensions"])
def test_patched_param_method_is_called_for_each_parameter(
    name: str, fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    original = getattr(FSDPParam, name)

    def patched(self: Any, *args: Any) -> Any:
        called.append(self)
        return original(self, *args)

    monkeypatch.setattr(FSDPParam, name, patched)
    sharded = fully_shard(model())
    sharded._get_fsdp_state()._lazy_init()  # calls init_dtype_attrs
    assert {id(param) for param in params_of(sharded)} == {id(param) for param in called}


@pytest.mark.parametrize("kind", ["subclass", "function"])
def test_subclass_or_dtype_override_disables_the_param_template(
    kind: str, fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Special(nn.Parameter):
        pass

    def build() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        for layer in layers if kind == "subclass" else ():
            layer.weight = Special(layer.weight.detach())
        return layers

    policy = MixedPrecisionPolicy()
    if kind == "function":
        object.__setattr__(policy, "param_dtype_override_fn", lambda param: None)
    made = count_constructed(monkeypatch)
    fully_shard(build(), mp_policy=policy)
    assert len(made) == 3


def test_param_templates_are_freed_with_their_parameters(fake_group: int) -> None:
    gc.collect()
    before = set(param_template._templates)
    sharded = fully_shard(nn.Linear(40, 24))
    created = set(param_template._templates) - before
    assert len(created) == 2
    del sharded
    gc.collect()
    assert not created & set(param_template._templates)


def test_second_sharding_of_a_param_raises(fake_group: int) -> None:
    (param,) = params_of(fully_shard(nn.Linear(8, 8, bias=False)))
    with pytest.raises(RuntimeError, match="requires a new Param"):
        param._cut(torch.zeros(8, 8), 0)
    with pytest.raises(RuntimeError, match="requires a new Param"):
        Param.__new__(Param)._cut(torch.zeros(8, 8), 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_shards_of_uneven_rows_are_the_chunks_of_torch(rank: int) -> None:
    with fake_world(3, rank):
        layer = nn.Linear(2, 7)
        expected = {name: p.detach().chunk(3)[rank].clone() for name, p in layer.named_parameters()}
        fully_shard(layer)
        for name, param in layer.named_parameters():
            assert isinstance(param, DTensor)
            assert torch.equal(param.to_local(), expected[name])
