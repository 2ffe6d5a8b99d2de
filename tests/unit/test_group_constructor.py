"""A replaced ``FSDPParamGroup.__init__`` that does not call torch's function.

Replacements that call it are the scenario ``group_constructor_replaced`` of
tests/distributed/workers/private_groups.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fsdp_c import fully_shard

group_constructor = importlib.import_module("fsdp_c._compat.group_constructor")

pytestmark = pytest.mark.usefixtures("fake_group")


def opaque(self: Any, *args: Any) -> None:
    """A replacement that constructs nothing."""


def test_group_constructor_replacement_that_omits_torchs_raises_and_leaves_model_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FSDPParamGroup, "__init__", opaque)
    model = nn.Linear(3, 3)
    weight = model.weight
    with pytest.raises(RuntimeError, match="does not call torch's constructor"):
        fully_shard(model)
    assert type(model) is nn.Linear and model.weight is weight
    monkeypatch.undo()
    fully_shard(model)
    assert isinstance(model.weight, DTensor)


def test_group_constructor_replaced_before_the_import_is_not_called_if_the_original_is_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FSDPParamGroup, "__init__", opaque)
    monkeypatch.setattr(group_constructor, "_original", None)
    group_constructor._warn_of_earlier_replacement.cache_clear()  # it logs once per process
    model = fully_shard(nn.Linear(3, 3))
    assert isinstance(model.weight, DTensor)
    assert "FSDPParamGroup.__init__ was replaced before fsdp_c was imported" in caplog.text
