"""Mistakes raise torch's exceptions, to which fsdp_c adds a note with the object and the remedy."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import traceback
from typing import Any
from unittest.mock import Mock

import pytest
import releases
import torch
import torch.nn as nn
from fake_world import fake_world
from mistakes import MISTAKES, Api, Mistake
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_c
from fsdp_c._runtime import hints


def exception_of(mistake: Mistake, api: Api) -> Exception:
    with fake_world(8), pytest.raises(Exception) as caught:
        mistake.make(api)
    return caught.value


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def message_with_notes(error: Exception) -> str:
    """Returns the text that Python prints below a traceback."""
    return "".join(traceback.format_exception_only(error))


def test_table_of_mistakes_has_at_least_48_entries() -> None:
    assert len(MISTAKES) >= 48


# Before 2.13 torch raises another exception for these, or none.
SINCE_2_13 = {
    "int_returned_by_shard_placement_fn",
    "reduce_dtype_name_in_policy",
    "weights_tied_across_units",
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_raises_torch_exception_with_note(name: str) -> None:
    if name in SINCE_2_13 and not releases.has("2.13"):
        pytest.skip("torch before 2.13 raises another exception or text, or none")
    mistake = MISTAKES[name]
    expected = exception_of(mistake, Api(torch_fully_shard, torch_replicate))
    error = exception_of(mistake, Api(fsdp_c.fully_shard, fsdp_c.replicate))
    assert type(error) is type(expected)
    assert first_line(error) == first_line(expected)
    if torch.__version__.startswith("2.13"):
        assert first_line(expected).startswith(mistake.first_line)
    assert mistake.note not in message_with_notes(expected)
    assert mistake.note in message_with_notes(error)


def test_auto_shard_of_scalar_parameter_raises_with_name_of_unit(fake_group: int) -> None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    model[1].scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="Change scale to a 1D") as caught:
        fsdp_c.auto_shard(model, nn.Sequential)
    assert "'scale' of Sequential: use nn.Parameter" in message_with_notes(caught.value)
    assert "This was the unit '1'." in message_with_notes(caught.value)


@pytest.mark.parametrize("shard", [torch_fully_shard, fsdp_c.fully_shard], ids=["torch", "fsdp_c"])
def test_valid_copy_load_and_save_behave_as_in_torch(fake_group: int, shard: Any) -> None:
    module, chain = shard(nn.Linear(8, 8)), shard(nn.Sequential(nn.Linear(8, 8)))
    shallow = copy.copy(chain)
    assert type(shallow) is nn.Sequential and shallow[0] is chain[0]
    assert str(module.load_state_dict(module.state_dict())) == "<All keys matched successfully>"
    reduced = module.__reduce_ex__(2)
    assert reduced[1] == (type(module),)
    torch.save(module.state_dict(), io.BytesIO())


def test_overridden_load_state_dict_and_reduce_ex_of_module_are_called(fake_group: int) -> None:
    class OverridingLinear(nn.Linear):
        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            return "overridden", super().load_state_dict(state, *args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return int, (7,)

    module: Any = fsdp_c.fully_shard(OverridingLinear(8, 8))
    assert module.load_state_dict(state=module.state_dict())[0] == "overridden"
    assert pickle.loads(pickle.dumps(module)) == 7


@pytest.mark.parametrize("name", ["__reduce_ex__", "load_state_dict"])
@pytest.mark.parametrize("wrap", [classmethod, staticmethod, functools.partialmethod])
def test_descriptor_overriding_load_state_dict_or_reduce_ex_is_bound(
    fake_group: int, wrap: Any, name: str
) -> None:
    cls = type("DescribedLinear", (nn.Linear,), {name: wrap(lambda *args: args)})
    module: Any = fsdp_c.fully_shard(cls(8, 8))
    bound: Any = {
        classmethod: (type(module),),
        staticmethod: (),
        functools.partialmethod: (module,),
    }
    assert getattr(module, name)(2) == (*bound[wrap], 2)


STATE_NOT_READY = ValueError("the extra state is not ready")


@pytest.mark.parametrize(
    "overrides",
    [
        {"state_dict": lambda self: {}},
        {"state_dict": lambda self, **kwargs: []},
        {"get_extra_state": Mock(side_effect=STATE_NOT_READY), "set_extra_state": None},
    ],
    ids=["without_keep_vars", "list", "raising_extra_state"],
)
def test_load_into_module_with_failing_state_dict_keeps_torch_exception(
    fake_group: int, overrides: dict[str, Any]
) -> None:
    def load(shard: Any) -> Exception:
        module = shard(type("OverridingLinear", (nn.Linear,), overrides)(8, 8))
        with pytest.raises(RuntimeError) as caught:
            module.load_state_dict({"unknown": torch.ones(1)})
        return caught.value

    assert str(load(fsdp_c.fully_shard)) == str(load(torch_fully_shard))


def test_load_of_invalid_keys_keeps_exception_of_module(fake_group: int) -> None:
    class RefusingLinear(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the state is of version 1")

    module: Any = fsdp_c.fully_shard(RefusingLinear(8, 8))
    with pytest.raises(RuntimeError, match="the state is of version 1"):
        module.load_state_dict({1: torch.ones(1)})


def test_note_before_python_3_11_is_appended_to_message() -> None:
    class ErrorWithoutNotes(ValueError):
        @property
        def add_note(self) -> Any:
            raise AttributeError("add_note")

    error = ErrorWithoutNotes("first line", 2)
    hints.add_hint(error, "second line")
    assert error.args == ("first line\nsecond line", 2)
    hints.add_hint(ErrorWithoutNotes(), "no message to append to")


def test_failure_while_writing_note_keeps_torch_exception(fake_group: int) -> None:
    class RaisesInRepr:
        def __repr__(self) -> str:
            raise OSError("__repr__ fails")

    with pytest.raises(AttributeError, match="'RaisesInRepr' object has no attribute 'ndim'"):
        fsdp_c.fully_shard(nn.Linear(8, 8), mesh=RaisesInRepr())  # type: ignore[call-overload]
