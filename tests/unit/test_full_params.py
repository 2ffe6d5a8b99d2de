"""``full_params``: lookups that gather nothing or raise, and parameters that a program deletes."""

from __future__ import annotations

import pytest
from test_contexts_and_ema import count_collectives, make_sharded_model
from torch.distributed.tensor import DTensor

from fsdp_c import full_params


def test_membership_test_in_full_params_issues_no_collective(fake_group: int) -> None:
    with full_params(make_sharded_model()) as full:
        assert count_collectives(lambda: "layers.0.weight" in full) == 0
        assert "layers.0.weight" in full and "nothing" not in full


def test_lookup_after_full_params_block_raises_and_registers_nothing(single_group: int) -> None:
    model = make_sharded_model()
    with full_params(model) as full:
        full["layers.0.weight"]
    for lookup in (lambda: full["layers.0.weight"], lambda: list(full.items())):
        with pytest.raises(RuntimeError, match="the block has ended"):
            lookup()
    assert all(isinstance(param, DTensor) for param in model.parameters())


def test_parameter_deleted_in_full_params_raises_and_is_restored(single_group: int) -> None:
    model = make_sharded_model()
    with pytest.raises(ValueError, match="a plain tensor to write back, not NoneType"):
        with full_params(model, all_units=True):
            del model.layers[0].weight
    assert isinstance(model.layers[0].weight, DTensor)
    assert all(isinstance(param, DTensor) for param in model.parameters())
