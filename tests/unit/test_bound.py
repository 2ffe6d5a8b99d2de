"""What the extension is given by fsdp_c/bind.py: all of it, or nothing changes."""

from __future__ import annotations

import importlib

import pytest
import torch.nn as nn

import fsdp_c
from fsdp_c.bind import BOUND

_C = importlib.import_module("fsdp_c._C")


@pytest.mark.parametrize("wrong", [3, None, "DTensor"])
def test_a_dtensor_class_that_is_no_type_is_refused(fake_group: int, wrong: object) -> None:
    with pytest.raises(TypeError, match="dtensor_class should be a type, not"):
        _C.bind(**{**BOUND, "dtensor_class": wrong})
    fsdp_c.fully_shard(nn.Linear(8, 8))


@pytest.mark.parametrize("name", BOUND)
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"bind: missing {name}"):
        _C.bind(**{key: value for key, value in BOUND.items() if key != name})
