"""torch's own functions are found where a library replaced them before fsdp_c was imported."""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
import torch.distributed.fsdp._fully_shard._fully_shard as torch_module
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPParamGroup,
    RegisterPostBackwardFunction,
)

import fsdp_c

guard = importlib.import_module("fsdp_c._compat.guard")
originals = importlib.import_module("fsdp_c._compat.originals")


def pass_through(function: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def wrapped(function: Any) -> Any:
    return functools.wraps(function)(pass_through(function))


def opaque(*args: Any, **kwargs: Any) -> None:
    """A replacement that has no reference to the function of torch."""


def test_has_parameter_of_replaced_function_reads_torchs_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "foreach_reduce", opaque)
    assert originals.has_parameter(collectives, "foreach_reduce", "reduce_dtype") is True
    assert originals.has_parameter(collectives, "foreach_reduce", "no_such_parameter") is False


def test_has_parameter_of_module_without_code_returns_none() -> None:
    assert originals.has_parameter(types.ModuleType("made"), "function", "parameter") is None


@pytest.mark.parametrize("wrap", [pass_through, wrapped, functools.partial])
def test_find_torch_object_of_wrapped_torch_function_returns_torch_function(
    monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    own = param_group.foreach_reduce
    monkeypatch.setattr(param_group, "foreach_reduce", wrap(own))
    assert originals.find_torch_object(param_group, "foreach_reduce") is own


def test_find_torch_object_of_opaque_replacement_returns_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(param_group, "foreach_reduce", opaque)
    assert originals.find_torch_object(param_group, "foreach_reduce") is None


_saved_constructor = FSDPParamGroup.__init__


def replacement_with_global_variable(*args: Any) -> None:
    _saved_constructor(*args)


def test_find_original_returns_function_in_global_variable_of_the_replacement() -> None:
    names = FSDPParamGroup.__module__, "FSDPParamGroup.__init__"
    own = originals.find_original(replacement_with_global_variable, *names)
    assert own is _saved_constructor


def test_find_torch_object_returns_none_for_class_replaced_by_subclass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "RegisterPostBackwardFunction"
    library = type(name, (RegisterPostBackwardFunction,), {"__module__": "library"})
    monkeypatch.setattr(param_group, name, library)
    assert originals.find_torch_object(param_group, name) is None


def test_find_original_of_method_wrapped_by_torch_compiler_disable_returns_the_method() -> None:
    own, names = FSDPParamGroup.unshard, (FSDPParamGroup.__module__, "FSDPParamGroup.unshard")
    disabled = torch.compiler.disable(own)
    assert not originals.is_torch_function(disabled, *names)
    assert originals.find_original(disabled, *names) is own


@pytest.mark.parametrize("wrap", [pass_through, wrapped])
def test_find_undecorated_of_wrapped_fully_shard_returns_undecorated_function(
    monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    undecorated: Any = torch_module.fully_shard.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(torch_module, "fully_shard", wrap(torch_module.fully_shard))
    assert originals.find_undecorated(torch_module, "fully_shard") is undecorated


def test_find_undecorated_of_opaque_replacement_raises_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_module, "fully_shard", opaque)
    with pytest.raises(AttributeError, match="import fsdp_c before the library"):
        originals.find_undecorated(torch_module, "fully_shard")


def test_wrapper_with_the_decorator_no_grad_is_not_torchs_function() -> None:
    """Its code is that of torch's decorator, and ``functools.wraps`` copies the name."""
    module, name = "torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam.to_sharded"
    own = FSDPParam.to_sharded
    assert originals.is_torch_function(own, module, name)
    assert originals.is_torch_function(torch.no_grad()(own), module, name)
    assert not originals.is_torch_function(torch.no_grad()(wrapped(own)), module, name)
    functor = functools.wraps(own)(functools.partial(own))  # an object without code
    assert not originals.is_torch_function(torch.no_grad()(functor), module, name)


def test_guard_entry_of_replaced_static_method_has_no_expected_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, own = RegisterPostBackwardFunction, RegisterPostBackwardFunction.backward
    [(*_, expected, also_accepted, _)] = guard._list_class_attributes(node, ("backward",), 1)
    assert (expected, also_accepted) == (vars(node)["backward"], own)
    monkeypatch.setattr(node, "backward", pass_through(own))
    [(*_, expected, also_accepted, _)] = guard._list_class_attributes(node, ("backward",), 1)
    assert (expected, also_accepted) == (None, None)


def test_guard_of_replaced_resize_expects_torchs_method(monkeypatch: pytest.MonkeyPatch) -> None:
    own = guard._find_resize()
    assert own is guard.getattr_static(torch.UntypedStorage, "resize_")
    monkeypatch.setattr(torch.UntypedStorage, "resize_", pass_through(own))
    assert guard._find_resize() is own


def test_install_after_fully_shard_was_wrapped_runs_wrapper_and_fsdp_c(
    fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = torch_module.fully_shard, []

    def wrapper(module: nn.Module, **kwargs: Any) -> Any:
        calls.append(module)
        return own(module, **kwargs)

    monkeypatch.setattr(torch_module, "fully_shard", functools.wraps(own)(wrapper))
    fsdp_c.install()
    try:
        layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
        torch_module.fully_shard(layer)  # the wrapper
        own(other)  # a reference from before install()
        assert calls == [layer]
        assert fsdp_c.is_active(layer) and fsdp_c.is_active(other)
    finally:
        fsdp_c.uninstall()
