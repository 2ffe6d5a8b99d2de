"""Mistakes keep torch's exceptions, and get a note that names what it is about and the remedy."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import releases
import torch
import torch.distributed as dist
import torch.nn as nn
from mistakes import MISTAKES, Api, Mistake
from torch.distributed._composable.replicate_with_fsdp import replicate as stock_replicate
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_c
from fsdp_c import notes


@pytest.fixture
def processes() -> Iterator[None]:
    """A fake group of 8 ranks, which a mistake may destroy."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def raised(mistake: Mistake, api: Api) -> Exception:
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with pytest.raises(Exception) as caught:
        mistake.make(api)
    return caught.value


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def whole(error: Exception) -> str:
    """What a user reads below the traceback."""
    return "".join(traceback.format_exception_only(error))


def test_there_are_as_many_as_we_know_of() -> None:
    assert len(MISTAKES) >= 48


OF_2_13 = {"a_number_for_a_placement", "weights_tied_across_units"}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name: str, processes: None) -> None:
    if name in OF_2_13 and not releases.has("2.13"):
        pytest.skip("the installed torch raises something else, or nothing")
    mistake = MISTAKES[name]
    stock = raised(mistake, Api(stock_fully_shard, stock_replicate))
    ours = raised(mistake, Api(fsdp_c.fully_shard, fsdp_c.replicate))
    assert type(ours) is type(stock)
    assert first_line(ours) == first_line(stock)
    if torch.__version__.startswith("2.13"):
        assert first_line(stock).startswith(mistake.words)
    assert mistake.note not in whole(stock)
    assert mistake.note in whole(ours)


def test_auto_shard_names_the_unit(fake_group: int) -> None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    model[1].scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="Change scale to a 1D") as caught:
        fsdp_c.auto_shard(model, nn.Sequential)
    assert "'scale' of Sequential: make it" in whole(caught.value)
    assert "This was the unit '1'." in whole(caught.value)


def test_what_works_is_not_touched(fake_group: int) -> None:
    module = fsdp_c.fully_shard(nn.Linear(8, 8))
    chain: Any = fsdp_c.fully_shard(nn.Sequential(nn.Linear(8, 8)))
    shallow = copy.copy(chain)
    assert type(shallow) is nn.Sequential and shallow[0] is chain[0]  # as in torch
    assert str(module.load_state_dict(module.state_dict())) == "<All keys matched successfully>"  # type: ignore[attr-defined]
    reduced = module.__reduce_ex__(2)
    assert reduced[1] == (type(module),)
    torch.save(module.state_dict(), io.BytesIO())  # type: ignore[attr-defined]


def test_a_modules_own_methods_come_after_ours(fake_group: int) -> None:
    class Loads(nn.Linear):
        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            return "mine", super().load_state_dict(state, *args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return int, (7,)

    module: Any = fsdp_c.fully_shard(Loads(8, 8))
    assert module.load_state_dict(state=module.state_dict())[0] == "mine"
    assert pickle.loads(pickle.dumps(module)) == 7


def test_notes_before_python_3_11() -> None:
    class Old(ValueError):
        @property
        def add_note(self) -> Any:
            raise AttributeError("add_note")

    error = Old("first line", 2)
    notes.add(error, "second line")
    assert error.args == ("first line\nsecond line", 2)
    notes.add(Old(), "nothing to add it to")


def test_advice_never_raises(fake_group: int) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise OSError("odd")

    with pytest.raises(AttributeError, match="'Odd' object has no attribute 'ndim'"):
        fsdp_c.fully_shard(nn.Linear(8, 8), mesh=Odd())  # type: ignore[call-overload]
