"""Replaced methods of ``FSDPParam`` are called as often as under torch's FSDP2.

The tests replace methods on the class before or after sharding and on single parameters, and
replace the class by a subclass. One test patches as libraries with packed weight classes do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import releases
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_param_group
import torch.nn as nn
from linear_stack import batch, model_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import fsdp_c

pytestmark = pytest.mark.torch("2.13")  # older fake groups leave gathered memory unset
guard = importlib.import_module("fsdp_c._compat.guard")
IMPLEMENTATIONS = (fully_shard, fsdp_c.fully_shard)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def world(fake_group: int) -> int:
    return fake_group


@contextlib.contextmanager
def replaced(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces ``FSDPParam.name`` by ``make(torch's function)`` in the context."""
    original = vars(FSDPParam)[name]
    is_property = isinstance(original, property)
    made = make(original.fget if is_property else original)
    setattr(FSDPParam, name, property(made) if is_property else made)
    try:
        yield
    finally:
        setattr(FSDPParam, name, original)


def count_calls(calls: Counter[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(param: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(param, *args, **kwargs)

    return call


def train(model: Any, calls: Counter[str] | None = None) -> list[torch.Tensor]:
    """Runs two steps and returns the gradients of the second.

    A step has two backwards, of which the second reduces, and an evaluation. ``calls`` is cleared
    before each step.
    """
    for _ in range(2):
        model.zero_grad()
        if calls is not None:
            calls.clear()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(batch()).sum().backward()
        with torch.no_grad():
            model(batch())
    for unit in (*model, model):  # an evaluation may leave other parameters registered
        unit.reshard()
    return [param.grad._local_tensor for param in model.parameters()]


METHODS = sorted(
    name
    for name in set(guard.PARAM_METHODS) - {"to_sharded_post_forward"}
    if hasattr(FSDPParam, name)  # 2.15 has fewer
)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("when", ["before sharding", "before the second step"])
def test_param_method_patched_on_the_class_is_called_as_in_torch(name: str, when: str) -> None:
    def scenario(shard: Callable[..., Any]) -> tuple[Counter[str], list[torch.Tensor]]:
        calls: Counter[str] = Counter()
        model = None if when == "before sharding" else model_of(shard, mp_policy=MIXED)
        if model is not None:
            train(model)
        with replaced(name, functools.partial(count_calls, calls, name)):
            model = model or model_of(shard, mp_policy=MIXED)
            grads = train(model, calls)
        recorded = calls.copy()
        train(model)
        assert calls == recorded, "the patch outlives its context"
        return recorded, grads

    (torch_result, expected), (result, grads) = map(scenario, IMPLEMENTATIONS)
    if name == "all_gather_inputs" or (name == "unsharded_grad_data" and not releases.has("2.15")):
        # torch does not read all_gather_inputs of cast shards, nor, before 2.15,
        # unsharded_grad_data of accumulated gradients.
        assert result == torch_result == {}
    else:
        assert result == torch_result and result[name] > 0
    assert all(map(torch.equal, grads, expected))
    assert all(map(torch.equal, grads, train(model_of(fsdp_c.fully_shard, mp_policy=MIXED))))


@pytest.mark.parametrize("name", ["all_gather_inputs", "unsharded_grad_data"])
def test_param_property_patched_without_mixed_precision_is_called_as_in_torch(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> Counter[str]:
        calls: Counter[str] = Counter()
        model = model_of(shard)
        with replaced(name, functools.partial(count_calls, calls, name)):
            model(batch()).sum().backward()
        return calls

    torch_result, result = map(scenario, IMPLEMENTATIONS)
    assert result == torch_result and result[name] > 0


def test_patched_unsharded_grad_data_is_reduced() -> None:
    def scenario(shard: Callable[..., Any]) -> list[torch.Tensor]:
        with replaced("unsharded_grad_data", lambda original: lambda param: 2 * original(param)):
            model = model_of(shard)
            model(batch()).sum().backward()
        return [param.grad._local_tensor for param in model.parameters()]

    torch_result, result = map(scenario, IMPLEMENTATIONS)
    assert all(map(torch.equal, result, torch_result))


@pytest.mark.parametrize("name", ["to_sharded_post_forward", "to_sharded_post_forward_dtensor"])
def test_patched_post_forward_reshard_method_is_called_as_in_torch(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> tuple[Counter[str], list[torch.Tensor]]:
        calls: Counter[str] = Counter()
        model = model_of(shard, reshard_after_forward=2)
        with replaced(name, functools.partial(count_calls, calls, name)):
            return calls, train(model, calls)

    (torch_result, expected), (result, grads) = map(scenario, IMPLEMENTATIONS)
    assert result == torch_result and result[name] > 0
    assert all(map(torch.equal, grads, expected))


OBJECT_METHODS = [
    "init_all_gather_outputs",
    "alloc_all_gather_outputs",
    "free_unsharded_param",
    "init_unsharded_param",
    "to_sharded",
    "to_unsharded",
    "_setattr_on_modules",
    "to_sharded_dtensor",
    *(["to_accumulated_grad_if_needed"] if not releases.has("2.15") else []),
]


@pytest.mark.parametrize("name", OBJECT_METHODS)
def test_param_method_set_on_one_parameter_is_called_as_in_torch(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> Counter[str]:
        calls: Counter[str] = Counter()
        model = model_of(shard, mp_policy=MIXED)
        param = releases.groups_of(model[1]._get_fsdp_state())[0].fsdp_params[0]
        own = getattr(param, name)
        setattr(param, name, lambda *args, **kw: (calls.update([name]), own(*args, **kw))[1])
        train(model, calls)
        return calls

    torch_result, result = map(scenario, IMPLEMENTATIONS)
    assert result == torch_result and result[name] > 0


def test_failed_parameter_registration_is_rolled_back() -> None:
    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def to_unsharded(param: Any) -> None:
            original(param)
            if param._module_info.param_name == "bias":
                raise ArithmeticError("from the patch")

        return to_unsharded

    model = model_of(fsdp_c.fully_shard)
    expected = train(model)
    sharded = list(model.parameters())
    with replaced("to_unsharded", failing), pytest.raises(ArithmeticError, match="the patch"):
        train(model)
    model.reset_iter_state()
    assert all(a is b for a, b in zip(model.parameters(), sharded, strict=True))
    assert all(map(torch.equal, train(model), expected))


def test_patched_param_constructor_is_called() -> None:
    def constructor(original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(param: Any, *args: Any, **kwargs: Any) -> None:
            original(param, *args, **kwargs)
            param.of_a_library = param._module_info.param_name

        return construct

    for shard in IMPLEMENTATIONS:
        with replaced("__init__", constructor):
            model = model_of(shard)
        (group,) = releases.groups_of(model[0]._get_fsdp_state())
        assert [param.of_a_library for param in group.fsdp_params] == ["weight", "bias"]
        assert all(map(torch.equal, train(model), train(model_of(fully_shard))))


def test_failed_param_constructor_leaves_the_module_unchanged() -> None:
    def constructor(original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(param: Any, *args: Any, **kwargs: Any) -> None:
            original(param, *args, **kwargs)
            if param._module_info.param_name == "bias":
                raise ArithmeticError("from the patch")

        return construct

    module = nn.Linear(8, 8)
    before = dict(module.named_parameters())
    with replaced("__init__", constructor), pytest.raises(ArithmeticError, match="the patch"):
        fsdp_c.fully_shard(module)
    assert dict(module.named_parameters()) == before
    assert not module._load_state_dict_post_hooks
    fsdp_c.fully_shard(module)
    module(torch.ones(2, 8)).sum().backward()


class CountingParam(FSDPParam):
    """A subclass that replaces torch's class and counts calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: Counter[str] = Counter()

    def init_unsharded_param(self) -> None:
        self.calls["init_unsharded_param"] += 1
        super().init_unsharded_param()

    def to_sharded(self) -> None:
        self.calls["to_sharded"] += 1
        super().to_sharded()

    def free_unsharded_param(self) -> None:
        self.calls["free_unsharded_param"] += 1
        super().free_unsharded_param()

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> Any:
        if hasattr(self, "calls"):
            self.calls["to_sharded_dtensor"] += 1
        return super().to_sharded_dtensor(tensor)


def test_subclass_that_replaces_fsdp_param_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_param_group, "FSDPParam", CountingParam)

    def scenario(shard: Callable[..., Any]) -> tuple[list[Counter[str]], list[torch.Tensor]]:
        model = model_of(shard)
        params = [
            param
            for module in model
            for group in releases.groups_of(module._get_fsdp_state())
            for param in group.fsdp_params
        ]
        assert all(isinstance(param, CountingParam) for param in params)
        grads = train(model)
        return [param.calls for param in params], grads

    (torch_result, expected), (result, grads) = map(scenario, IMPLEMENTATIONS)
    assert result == torch_result and len(result[0]) == 4
    assert all(map(torch.equal, grads, expected))


# ---- packed weights ------------------------------------------------------------------------------


class Packed(nn.Parameter):
    """Quantized bytes and their scale."""

    scale: float

    def __new__(cls, data: torch.Tensor, scale: float) -> Any:
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.scale = scale
        return packed


class PackedLinear(nn.Module):
    """Requires packed weights in forward, and saves the scale of a parameter that has one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        bytes_ = torch.randint(0, 9, (16, 8), generator=generator, dtype=torch.uint8)
        self.weight = Packed(bytes_, 0.5 + seed)
        self.bias = nn.Parameter(torch.zeros(16))
        self.classes: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classes.append(type(self.weight).__name__)
        return x @ (self.weight.float() * self.weight.scale).T + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(self.weight, "scale"):
            destination[prefix + "scale"] = torch.tensor(self.weight.scale)


def keep_packed_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_sharded(self: Any, param: Any, *args: Any) -> None:
        original(self, param, *args)
        if isinstance(param, Packed):
            local = Packed(self.sharded_param._local_tensor, param.scale)
            # Not nn.Parameter(...) as in torch: its detach() would lose the class of ``local``.
            self.sharded_param = self.to_sharded_dtensor(local)
            self._setattr_on_modules(self.sharded_param)

    return init_sharded


def make_packed_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_unsharded(self: Any) -> None:
        local = self._sharded_local_tensor
        if not isinstance(local, Packed):
            original(self)
        elif not hasattr(self, "_unsharded_param"):
            weight = self.all_gather_outputs[0].as_strided(
                self._orig_size, self._contiguous_orig_stride
            )
            self._unsharded_param = Packed(weight, local.scale)

    return init_unsharded


def test_packed_weight_classes_of_a_library_are_kept() -> None:
    def scenario(shard: Callable[..., Any]) -> dict[str, Any]:
        with (
            replaced("_init_sharded_param", keep_packed_shards),
            replaced("init_unsharded_param", make_packed_parameters),
        ):
            layers = [PackedLinear(0), PackedLinear(1)]
            model = nn.Sequential(layers[0], nn.Linear(16, 8), layers[1])
            torch.manual_seed(0)
            nn.init.normal_(model[1].weight)
            for layer in model:
                shard(layer)
            shard(model)
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
            state = model.state_dict()
            loaded = model.load_state_dict(state)
            model(torch.ones(2, 8)).sum().backward()
        return {
            "classes": [layer.classes for layer in layers],
            "shards": [type(layer.weight._local_tensor).__name__ for layer in layers],
            "keys": list(state),
            "loaded": str(loaded),
            "grads": [p.grad._local_tensor for p in model.parameters() if p.requires_grad],
            "unsharded": [weight.detach().clone() for weight in map(unsharded, layers)],
        }

    torch_result, result = map(scenario, IMPLEMENTATIONS)
    for name in ("grads", "unsharded"):
        assert all(map(torch.equal, result.pop(name), torch_result.pop(name)))
    assert result == torch_result
    assert result["classes"] == [["Packed"] * 3] * 2 and result["shards"] == ["Packed"] * 2
    assert not any("scale" in key for key in result["keys"])


def unsharded(layer: Any) -> torch.Tensor:
    layer.unshard()
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def test_patch_without_effect_logs_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_warned_names", set())
    with replaced("unsharded_param", lambda original: lambda param: original(param)):
        for _ in range(2):
            train(model_of(fsdp_c.fully_shard))
    train(model_of(fsdp_c.fully_shard))
    (message,) = [
        r.getMessage() for r in caplog.records if "does not call the replacement" in r.getMessage()
    ]
    assert message.startswith("fsdp_c: FSDPParam.unsharded_param has been replaced.")


@pytest.mark.parametrize("name", [*METHODS, "to_sharded_post_forward", "reset_sharded_param"])
def test_patches_that_take_effect_log_no_warning(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_warned_names", set())
    with replaced(name, lambda original: lambda param, *args: original(param, *args)):
        train(model_of(fsdp_c.fully_shard))
    assert [r.getMessage() for r in caplog.records if "FSDPParam" in r.getMessage()] == []
