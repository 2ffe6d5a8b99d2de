"""Uninitialized objects of the extension's types, and objects whose owners were freed.

Random programs (``tests/faults/workers/fuzz.py``) found these cases.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import releases
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_c import _C, fully_shard
from fsdp_c._runtime.param_group import ParamGroup

CPU = torch.device("cpu")
METHODS = [
    name
    for name in vars(_C.ParamGroup)
    if not name.startswith("__") and callable(getattr(_C.ParamGroup, name))
]


def make_group(params: list[Any], **kwargs: Any) -> Any:
    group = _C.ParamGroup.__new__(_C.ParamGroup)
    values = {"pg_name": None, "world": 1, "rank": 0, "module_count": 1} | kwargs
    _C.ParamGroup.__init__(group, params, _C.CommContext(CPU), CPU, **values)
    return group


@pytest.mark.parametrize("cls", [_C.ParamGroup, ParamGroup])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "_invalidate"])
def test_method_of_uninitialized_group_raises(cls: Any, name: str) -> None:
    group = cls.__new__(cls)
    method = getattr(_C.ParamGroup, name)
    arguments = {
        "pre_forward": (None, (), {}),
        "post_forward": (None, (), None),
        "_register_post_backward_hook": ((), {}),
        "_set_process_group": ("shard", None, 1, 0),
        "_set_unit": (_C.State(), 0, 1),
    }.get(name, ())
    with pytest.raises(RuntimeError, match="the parameter group is not initialized"):
        method(group, *arguments)


@pytest.mark.parametrize("cls", [_C.ParamGroup, ParamGroup])
def test_invalidate_of_uninitialized_group_has_no_effect(cls: Any) -> None:
    cls.__new__(cls)._invalidate()


def test_use_of_uninitialized_group_raises() -> None:
    uninitialized = _C.ParamGroup.__new__(_C.ParamGroup)
    values = {
        "comm_ctx": _C.CommContext(CPU),
        "_keep_unsharded_storage": True,
        "_bucket_bytes": 100,
    }
    for name, value in values.items():
        with pytest.raises(RuntimeError, match="not initialized"):
            setattr(uninitialized, name, value)
    state = _C.State()
    with pytest.raises(RuntimeError, match="not initialized"):
        state._fsdp_param_groups = [uninitialized]
    assert state._fsdp_param_groups == []


def test_function_of_extension_without_bind_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second import of the extension makes a module of its own."""
    monkeypatch.delitem(sys.modules, "fsdp_c._C")
    unbound = importlib.import_module("fsdp_c._C")
    monkeypatch.undo()
    assert unbound is not _C
    param: Any = unbound.Param((4,), 0, 1, 0)
    param._sharding_spec = 1
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1)
    for function, *args in (
        (unbound.clip_collect, [torch.zeros(2)], False),
        (unbound.bump_shard_versions, optimizer),
        (param._cut, torch.zeros(4), 0),
    ):
        with pytest.raises(SystemError, match=r"bind\(\) has not been called"):
            function(*args)


class Index:
    """Calls ``action`` where an index is expected."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def __index__(self) -> int:
        self.action()
        return 2


def raise_key_error() -> None:
    raise KeyError


def test_index_method_of_size_that_raises_or_clears_the_list_does_not_crash() -> None:
    calls: list[int] = []
    with pytest.raises(KeyError):
        _C.Param([Index(raise_key_error), Index(lambda: calls.append(1))], 0, 1, 0)
    assert calls == []
    sizes: list[Any] = [2] * 40
    sizes[0] = Index(sizes.clear)
    assert _C.Param(sizes, 0, 1, 0).rows == 2


def test_param_with_post_forward_world_and_rank_in_a_list_raises() -> None:
    with pytest.raises(TypeError, match="post_forward must be a tuple"):
        _C.Param([4], 0, 1, 0, [1, 0])


def test_clip_scale_stops_at_the_first_argument_that_raises() -> None:
    calls: list[int] = []

    class Number:
        def __float__(self) -> float:
            calls.append(1)
            return 1.0

    with pytest.raises(TypeError):
        _C.clip_scale([], "x", Number(), 1, False)
    assert calls == []


def test_hook_of_several_modules_sets_modules_to_run_forward() -> None:
    state = _C.State()
    hook = _C.Hook(state, False, print, ("first", "second"))
    with pytest.raises(RuntimeError, match="the FSDP state is not initialized"):
        hook(None, (), {})
    assert state._modules_to_run_forward == {"first", "second"}


def test_group_of_uninitialized_or_foreign_parameters_raises() -> None:
    param: Any = _C.Param((4, 4), 0, 1, 0)
    with pytest.raises(ValueError, match="parameter 1 of the group is not initialized"):
        make_group([param, _C.Param.__new__(_C.Param)])
    with pytest.raises(ValueError, match="parameter 1 of the group is in a group already"):
        make_group([param, param])
    group = make_group([param])
    with pytest.raises(ValueError, match="parameter 0 of the group is in a group already"):
        make_group([param])
    del group
    make_group([param])


def test_group_with_other_rank_or_size_than_its_parameters_raises() -> None:
    """Otherwise the buffers would be too small for the layout."""
    param: Any = _C.Param((4, 4), 0, 2, 0)
    for other in ({"world": 4}, {"world": 2, "rank": 1}, {"world": 2, "rank": 2}, {"world": 0}):
        with pytest.raises(ValueError, match="the parameters are not sharded for rank"):
            make_group([param], pg_name="any", **other)
    with pytest.raises(ValueError, match="in process group None"):
        make_group([param], world=2)
    group = make_group([param], pg_name="any", world=2)
    with pytest.raises(ValueError, match="rank 0 of 3 in process group 'smaller'"):
        group._set_process_group("post_forward", "smaller", 3, 0)


def test_second_init_of_param_or_group_raises() -> None:
    param: Any = _C.Param((4, 4), 0, 1, 0)
    with pytest.raises(RuntimeError, match="Param is already initialized"):
        param.__init__((8,), 0, 1, 0)
    group = make_group([param])
    with pytest.raises(RuntimeError, match="ParamGroup is already initialized"):
        group.__init__([], _C.CommContext(CPU), CPU, None, 1, 0, 1)


def test_comm_context_of_other_device_type_raises() -> None:
    group = make_group([])
    with pytest.raises(ValueError, match="another kind of device"):
        group.comm_ctx = _C.CommContext(torch.device("meta"))


def test_iter_forward_root_is_none_after_its_state_is_freed(single_group: int) -> None:
    state_ctx = _C.IterationContext()
    state = _C.State()
    with pytest.raises(ValueError, match="whose _state_ctx this is"):
        state_ctx.iter_forward_root = state
    state._state_ctx = state_ctx
    state_ctx.iter_forward_root = state
    assert state_ctx.iter_forward_root is state
    state._state_ctx = _C.IterationContext()
    assert state_ctx.iter_forward_root is None
    state._state_ctx = state_ctx
    state_ctx.iter_forward_root = state
    del state
    gc.collect()
    assert state_ctx.iter_forward_root is None


def test_groups_replaced_during_pre_forward_do_not_crash(single_group: int) -> None:
    """A module's ``__setattr__`` replaces them while the core registers parameters."""

    class ReplacesGroups(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "bias" and replacing:
                state = self._get_fsdp_state()  # type: ignore[operator]
                state._fsdp_param_groups = state._fsdp_param_groups[:0]
                gc.collect()

    replacing = False
    module: Any = fully_shard(ReplacesGroups(4, 4))
    module(torch.ones(2, 4))
    module.reshard()
    replacing = True
    module(torch.ones(2, 4))
    assert module._get_fsdp_state()._fsdp_param_groups == []


@pytest.mark.parametrize("function", [torch_fully_shard, fully_shard])
def test_pre_backward_of_group_on_one_rank_needs_an_unshard_but_no_forward(
    single_group: int, function: Callable[..., Any]
) -> None:
    group = releases.groups_of(function(nn.Linear(4, 4))._get_fsdp_state())[0]
    with pytest.raises(AttributeError, match="'FSDPParam' object has no attribute 'param_dtype'"):
        group.pre_backward(True)
    model = function(nn.Linear(4, 4))
    model.unshard()
    model.reshard()
    group = releases.groups_of(model._get_fsdp_state())[0]
    group.pre_backward(True)
    assert group.is_unsharded and group._training_state.name == "PRE_BACKWARD"


@pytest.mark.parametrize("function", [torch_fully_shard, fully_shard])
def test_post_backward_of_group_without_reduction_needs_an_unshard_but_no_forward(
    single_group: int, function: Callable[..., Any]
) -> None:
    def get_group(is_unsharded_once: bool) -> Any:
        model = function(nn.Linear(4, 4))
        model.set_requires_gradient_sync(False)
        if is_unsharded_once:
            model.unshard()
            model.reshard()
        return releases.groups_of(model._get_fsdp_state())[0]

    if function is fully_shard or not releases.has("2.15"):  # torch 2.15 reads no such attribute
        with pytest.raises(AttributeError, match="'FSDPParam' object has no attribute 'reduce_d"):
            get_group(False).post_backward()
    group = get_group(True)
    group.post_backward()
    assert group._training_state.name == "POST_BACKWARD"
