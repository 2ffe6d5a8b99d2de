"""Methods of ``FSDPParam`` that somebody has replaced are called, as often as by torch's FSDP2.

On the class before or after sharding, on single parameters, by a subclass in torch's place; and a
library of the kind that keeps packed weights in classes of its own.
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
import torch.distributed.fsdp._fully_shard._fsdp_param_group as stock_group
import torch.nn as nn
from linear_stack import batch, model_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import fsdp_c

pytestmark = pytest.mark.torch("2.13")  # the fake group left gathered memory unset before
guard = importlib.import_module("fsdp_c.guard")
IMPLEMENTATIONS = (fully_shard, fsdp_c.fully_shard)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(autouse=True)
def world(fake_group: int) -> int:
    return fake_group


@contextlib.contextmanager
def replaced(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """``FSDPParam.name`` as ``make`` makes it of torch's function, for a while."""
    found = vars(FSDPParam)[name]
    is_property = isinstance(found, property)
    made = make(found.fget if is_property else found)
    setattr(FSDPParam, name, property(made) if is_property else made)
    try:
        yield
    finally:
        setattr(FSDPParam, name, found)


def noting(calls: Counter[str], name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(found)
    def call(param: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return found(param, *args, **kwargs)

    return call


def train(model: Any, calls: Counter[str] | None = None) -> list[torch.Tensor]:
    """Two backwards, the second of which reduces, and an evaluation; the gradients. ``calls``:
    cleared before the second of two such steps."""
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
def test_a_method_patched_on_the_class(name: str, when: str) -> None:
    def scenario(shard: Callable[..., Any]) -> tuple[Counter[str], list[torch.Tensor]]:
        calls: Counter[str] = Counter()
        model = None if when == "before sharding" else model_of(shard, mp_policy=MIXED)
        if model is not None:
            train(model)
        with replaced(name, functools.partial(noting, calls, name)):
            model = model or model_of(shard, mp_policy=MIXED)
            grads = train(model, calls)
        noted = calls.copy()
        train(model)
        assert calls == noted, "the patch outlives its context"
        return noted, grads

    (theirs, expected), (ours, grads) = map(scenario, IMPLEMENTATIONS)
    if name in ("all_gather_inputs", "unsharded_grad_data"):
        # torch casts such shards without asking, and takes what was accumulated (before 2.15).
        assert ours == {} and (theirs == {} or releases.has("2.15"))
    else:
        assert ours == theirs and ours[name] > 0
    assert all(map(torch.equal, grads, expected))
    assert all(map(torch.equal, grads, train(model_of(fsdp_c.fully_shard, mp_policy=MIXED))))


@pytest.mark.parametrize("name", ["all_gather_inputs", "unsharded_grad_data"])
def test_a_property_patched_on_the_class_without_mixed_precision(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> Counter[str]:
        calls: Counter[str] = Counter()
        model = model_of(shard)
        with replaced(name, functools.partial(noting, calls, name)):
            model(batch()).sum().backward()
        return calls

    theirs, ours = map(scenario, IMPLEMENTATIONS)
    assert ours == theirs and ours[name] > 0


def test_a_patched_gradient_is_the_one_that_is_reduced() -> None:
    def scenario(shard: Callable[..., Any]) -> list[torch.Tensor]:
        with replaced("unsharded_grad_data", lambda found: lambda param: 2 * found(param)):
            model = model_of(shard)
            model(batch()).sum().backward()
        return [param.grad._local_tensor for param in model.parameters()]

    theirs, ours = map(scenario, IMPLEMENTATIONS)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("name", ["to_sharded_post_forward", "to_sharded_post_forward_dtensor"])
def test_a_method_of_resharding_to_a_smaller_mesh(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> tuple[Counter[str], list[torch.Tensor]]:
        calls: Counter[str] = Counter()
        model = model_of(shard, reshard_after_forward=2)
        with replaced(name, functools.partial(noting, calls, name)):
            return calls, train(model, calls)

    (theirs, expected), (ours, grads) = map(scenario, IMPLEMENTATIONS)
    assert ours == theirs and ours[name] > 0
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
def test_a_method_set_on_one_parameter(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> Counter[str]:
        calls: Counter[str] = Counter()
        model = model_of(shard, mp_policy=MIXED)
        param = releases.groups_of(model[1]._get_fsdp_state())[0].fsdp_params[0]
        own = getattr(param, name)
        setattr(param, name, lambda *args, **kw: (calls.update([name]), own(*args, **kw))[1])
        train(model, calls)
        return calls

    theirs, ours = map(scenario, IMPLEMENTATIONS)
    assert ours == theirs and ours[name] > 0


def test_a_registration_that_fails_is_rolled_back() -> None:
    def failing(found: Callable[..., Any]) -> Callable[..., Any]:
        def to_unsharded(param: Any) -> None:
            found(param)
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


def test_a_patched_constructor_runs() -> None:
    def constructor(found: Callable[..., Any]) -> Callable[..., Any]:
        def construct(param: Any, *args: Any, **kwargs: Any) -> None:
            found(param, *args, **kwargs)
            param.of_a_library = param._module_info.param_name

        return construct

    for shard in IMPLEMENTATIONS:
        with replaced("__init__", constructor):
            model = model_of(shard)
        (group,) = releases.groups_of(model[0]._get_fsdp_state())
        assert [param.of_a_library for param in group.fsdp_params] == ["weight", "bias"]
        assert all(map(torch.equal, train(model), train(model_of(fully_shard))))


def test_a_constructor_that_fails_leaves_the_module() -> None:
    def constructor(found: Callable[..., Any]) -> Callable[..., Any]:
        def construct(param: Any, *args: Any, **kwargs: Any) -> None:
            found(param, *args, **kwargs)
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


class OfALibrary(FSDPParam):
    """A subclass in the place of torch's class."""

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


def test_a_subclass_in_the_place_of_torchs_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_group, "FSDPParam", OfALibrary)

    def scenario(shard: Callable[..., Any]) -> tuple[list[Counter[str]], list[torch.Tensor]]:
        model = model_of(shard)
        params = [
            param
            for module in model
            for group in releases.groups_of(module._get_fsdp_state())
            for param in group.fsdp_params
        ]
        assert all(isinstance(param, OfALibrary) for param in params)
        grads = train(model)
        return [param.calls for param in params], grads

    (theirs, expected), (ours, grads) = map(scenario, IMPLEMENTATIONS)
    assert ours == theirs and len(ours[0]) == 4
    assert all(map(torch.equal, grads, expected))


# ---- packed weights ------------------------------------------------------------------------------


class Packed(nn.Parameter):
    """Bytes, and what they are to be multiplied with."""

    scale: float

    def __new__(cls, data: torch.Tensor, scale: float) -> Any:
        packed = torch.Tensor._make_subclass(cls, data, False)
        packed.scale = scale
        return packed


class PackedLinear(nn.Module):
    """Computes with packed weights only, and saves the scale of a parameter that has one."""

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


def keep_packed_shards(found: Callable[..., Any]) -> Callable[..., Any]:
    def init_sharded(self: Any, param: Any, *args: Any) -> None:
        found(self, param, *args)
        if isinstance(param, Packed):
            local = Packed(self.sharded_param._local_tensor, param.scale)
            self.sharded_param = self.to_sharded_dtensor(local)  # a Parameter would unpack it
            self._setattr_on_modules(self.sharded_param)

    return init_sharded


def make_packed_parameters(found: Callable[..., Any]) -> Callable[..., Any]:
    def init_unsharded(self: Any) -> None:
        local = self._sharded_local_tensor
        if not isinstance(local, Packed):
            found(self)
        elif not hasattr(self, "_unsharded_param"):
            whole = self.all_gather_outputs[0].as_strided(
                self._orig_size, self._contiguous_orig_stride
            )
            self._unsharded_param = Packed(whole, local.scale)

    return init_unsharded


def test_a_library_keeps_its_packed_weights() -> None:
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
            "whole": [whole.detach().clone() for whole in map(unsharded, layers)],
        }

    theirs, ours = map(scenario, IMPLEMENTATIONS)
    for name in ("grads", "whole"):
        assert all(map(torch.equal, ours.pop(name), theirs.pop(name)))
    assert ours == theirs
    assert ours["classes"] == [["Packed"] * 3] * 2 and ours["shards"] == ["Packed"] * 2
    assert not any("scale" in key for key in ours["keys"])


def unsharded(layer: Any) -> torch.Tensor:
    layer.unshard()
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def test_a_patch_that_takes_no_effect_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_unheard", set())
    with replaced("unsharded_param", lambda found: lambda param: found(param)):
        for _ in range(2):
            train(model_of(fsdp_c.fully_shard))
    train(model_of(fsdp_c.fully_shard))
    (told,) = [r.getMessage() for r in caplog.records if "It is not called" in r.getMessage()]
    assert told.startswith("fsdp_c: FSDPParam.unsharded_param has been replaced.")


@pytest.mark.parametrize("name", [*METHODS, "to_sharded_post_forward", "reset_sharded_param"])
def test_nothing_is_told_of_patches_that_are_called(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with replaced(name, lambda found: lambda param, *args: found(param, *args)):
        train(model_of(fsdp_c.fully_shard))
    assert [r.getMessage() for r in caplog.records if "FSDPParam" in r.getMessage()] == []
