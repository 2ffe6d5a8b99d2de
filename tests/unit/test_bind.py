"""``_C.bind`` with an invalid or missing argument raises."""

from __future__ import annotations

import importlib

import pytest
import torch.nn as nn

import fsdp_c
from fsdp_c._runtime.bindings import BOUND_OBJECTS

_C = importlib.import_module("fsdp_c._C")


@pytest.mark.parametrize("not_a_type", [3, None, "DTensor"])
def test_bind_with_dtensor_class_that_is_not_a_type_raises(
    fake_group: int, not_a_type: object
) -> None:
    with pytest.raises(TypeError, match="dtensor_class should be a type, not"):
        _C.bind(**{**BOUND_OBJECTS, "dtensor_class": not_a_type})
    fsdp_c.fully_shard(nn.Linear(8, 8))


@pytest.mark.parametrize("name", BOUND_OBJECTS)
def test_bind_with_a_missing_argument_raises_with_its_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"bind: missing {name}"):
        _C.bind(**{key: value for key, value in BOUND_OBJECTS.items() if key != name})
