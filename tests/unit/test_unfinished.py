"""Objects of the extension's types that were not initialised, or whose owners have died.

What random programs have found (``tests/faults/fuzz.py``), one by one.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_c import _C, fully_shard
from fsdp_c.param_group import ParamGroup

CPU = torch.device("cpu")
ATTRIBUTES = [name for name in vars(_C.ParamGroup) if not name.startswith("__")]


def group_of(params: list[Any], **kwargs: Any) -> Any:
    group = _C.ParamGroup.__new__(_C.ParamGroup)
    values = {"pg_name": None, "world": 1, "rank": 0, "module_count": 1} | kwargs
    _C.ParamGroup.__init__(group, params, _C.CommContext(CPU), CPU, **values)
    return group


@pytest.mark.parametrize("cls", [_C.ParamGroup, ParamGroup])
@pytest.mark.parametrize("name", [n for n in ATTRIBUTES if callable(getattr(_C.ParamGroup, n))])
def test_methods_of_a_group_without_init(cls: Any, name: str) -> None:
    group = cls.__new__(cls)
    method = getattr(_C.ParamGroup, name)
    arguments = {
        "pre_forward": (None, (), {}),
        "post_forward": (None, (), None),
        "_register_post_backward_hook": ((), {}),
        "_set_link": ("shard", None, 1, 0),
        "_set_unit": (_C.State(), 0, 1),
    }.get(name, ())
    if name == "_invalidate":
        method(group)
        return
    with pytest.raises(RuntimeError, match="the parameter group is not initialised"):
        method(group, *arguments)


def test_what_needs_a_finished_group_refuses_others() -> None:
    unfinished = _C.ParamGroup.__new__(_C.ParamGroup)
    for name, value in (("comm_ctx", _C.CommContext(CPU)), ("_keep_unsharded_storage", True)):
        with pytest.raises(RuntimeError, match="not initialised"):
            setattr(unfinished, name, value)
    state = _C.State()
    with pytest.raises(RuntimeError, match="not initialised"):
        state._fsdp_param_groups = [unfinished]
    assert state._fsdp_param_groups == []


def test_a_group_is_made_of_parameters_of_its_own() -> None:
    param: Any = _C.Param((4, 4), 0, 1, 0)
    with pytest.raises(ValueError, match="parameter 1 of the group is not initialised"):
        group_of([param, _C.Param.__new__(_C.Param)])
    with pytest.raises(ValueError, match="parameter 1 of the group is in a group already"):
        group_of([param, param])
    group = group_of([param])
    with pytest.raises(ValueError, match="parameter 0 of the group is in a group already"):
        group_of([param])
    del group
    group_of([param])


def test_links_fit_the_parameters() -> None:
    """Else buffers would be laid out for other ranks than there is memory for."""
    param: Any = _C.Param((4, 4), 0, 2, 0)
    for wrong in ({"world": 4}, {"world": 2, "rank": 1}, {"world": 2, "rank": 2}, {"world": 0}):
        with pytest.raises(ValueError, match="the parameters are not sharded for rank"):
            group_of([param], pg_name="any", **wrong)
    with pytest.raises(ValueError, match="in process group None"):
        group_of([param], world=2)
    group = group_of([param], pg_name="any", world=2)
    with pytest.raises(ValueError, match="rank 0 of 3 in process group 'smaller'"):
        group._set_link("post_forward", "smaller", 3, 0)


def test_nothing_is_initialised_twice() -> None:
    param: Any = _C.Param((4, 4), 0, 1, 0)
    with pytest.raises(RuntimeError, match="a parameter is initialised once"):
        param.__init__((8,), 0, 1, 0)
    group = group_of([param])
    with pytest.raises(RuntimeError, match="a parameter group is initialised once"):
        group.__init__([], _C.CommContext(CPU), CPU, None, 1, 0, 1)


def test_a_context_for_another_device_is_refused() -> None:
    group = group_of([])
    with pytest.raises(ValueError, match="another kind of device"):
        group.comm_ctx = _C.CommContext(torch.device("meta"))


def test_the_forward_root_does_not_outlive_its_state(single_group: int) -> None:
    iteration = _C.IterationContext()
    state = _C.State()
    with pytest.raises(ValueError, match="whose _state_ctx this is"):
        iteration.iter_forward_root = state
    state._state_ctx = iteration
    iteration.iter_forward_root = state
    assert iteration.iter_forward_root is state
    state._state_ctx = _C.IterationContext()
    assert iteration.iter_forward_root is None
    state._state_ctx = iteration
    iteration.iter_forward_root = state
    del state
    gc.collect()
    assert iteration.iter_forward_root is None


def test_groups_may_be_replaced_from_within_a_forward(single_group: int) -> None:
    """By a module's own __setattr__, while the core is at them."""

    class Meddling(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "bias" and meddling:
                state = self._get_fsdp_state()  # type: ignore[operator]
                state._fsdp_param_groups = state._fsdp_param_groups[:0]
                gc.collect()

    meddling = False
    module: Any = fully_shard(Meddling(4, 4))
    module(torch.ones(2, 4))
    module.reshard()
    meddling = True
    module(torch.ones(2, 4))
    assert module._get_fsdp_state()._fsdp_param_groups == []
