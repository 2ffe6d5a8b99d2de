"""``full_params``: lookups, writes of all kinds, and restored shards after failures."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from test_contexts_and_ema import TOKENS, count_collectives, make_model, make_sharded_model
from torch.distributed.tensor import DTensor

from fsdp_c import full_params, fully_shard, register_fsdp_forward_method


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


def replace_data(param: nn.Parameter) -> None:
    param.data = torch.full_like(param, 7)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "data.fill_": lambda param: param.data.fill_(7),
    "data=": replace_data,
    "numpy": lambda param: param.detach().numpy().fill(7),
}
"""Writes that do not increment the version counter of the parameter."""


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("all_units", [True, False])
def test_full_params_writes_back_changes_that_leave_version_counter_unchanged(
    fake_group: int, write: Callable[[nn.Parameter], object], all_units: bool
) -> None:
    model = make_sharded_model()
    with full_params(model, all_units=all_units) as full:
        for param in full.values():
            write(param)
    for shard in model.parameters():
        assert torch.equal(shard._local_tensor, torch.full_like(shard._local_tensor, 7))


def test_full_params_writes_back_sign_of_zero_and_keeps_version_of_equal_nan(
    single_group: int,
) -> None:
    model = make_sharded_model()
    with torch.no_grad():
        model.layers[0].bias._local_tensor.zero_()
        model.layers[1].bias._local_tensor.fill_(torch.nan)
    version = model.layers[1].bias._local_tensor._version
    with full_params(model, all_units=True):
        model.layers[0].bias.data.neg_()
    assert model.layers[0].bias._local_tensor.signbit().all()
    assert model.layers[1].bias._local_tensor._version == version


@pytest.mark.parametrize("all_units", [True, False])
@pytest.mark.parametrize("writeback", [True, False])
def test_full_params_in_inference_mode_restores_shards_and_writes_back(
    single_group: int, all_units: bool, writeback: bool
) -> None:
    model, reference = make_sharded_model(), make_model()
    with torch.inference_mode():
        with full_params(model, writeback=writeback, all_units=all_units) as full:
            for param in full.values():
                param.mul_(2)
    for param, original in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param._local_tensor, original * (2 if writeback else 1))
    model(TOKENS).sum().backward()


def test_interrupted_write_back_of_full_params_registers_all_shards(
    single_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    model = make_sharded_model()
    with pytest.raises(KeyboardInterrupt), full_params(model, all_units=True):
        monkeypatch.setattr(sys.modules["fsdp_c.full_params"], "write_back", interrupt)
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize("call", ["forward method", "unshard", "backward", "async unshard"])
def test_calls_that_would_gather_shards_inside_full_params_raise(
    fake_group: int, call: str, has_run: bool
) -> None:
    model = make_sharded_model()
    model.embed.weight._local_tensor.detach().zero_()
    register_fsdp_forward_method(model, "generate")
    loss = model(TOKENS).sum() if has_run or call == "backward" else None
    calls: dict[str, Callable[[], object]] = {
        "forward method": lambda: model.generate(TOKENS, 1),
        "unshard": model.unshard,
        "async unshard": lambda: model.unshard(async_op=True),
        "backward": lambda: loss.backward(),
    }
    with full_params(model, all_units=True), torch.no_grad():
        model.embed.weight.fill_(5)
        with pytest.raises(RuntimeError, match=r"inside full_params.*generate_with"):
            calls[call]()
        assert not isinstance(model.embed.weight, DTensor)
    assert (model.embed.weight._local_tensor == 5).all()
    model(TOKENS).sum().backward()
    model.unshard()
    assert not isinstance(model.embed.weight, DTensor)
    assert "unshard" not in vars(model._get_fsdp_state()._fsdp_param_groups[0])


def test_unshard_replaced_by_program_is_called_after_full_params(fake_group: int) -> None:
    model = make_sharded_model()
    group = model._get_fsdp_state()._fsdp_param_groups[0]
    unshard = group.unshard
    calls = []
    group.unshard = lambda *args, **kwargs: calls.append(1) or unshard(*args, **kwargs)
    with full_params(model):
        pass
    model(TOKENS)
    assert calls == [1]


@pytest.mark.parametrize("all_units", [True, False])
def test_parameter_assigned_before_first_forward_is_gathered_and_kept(
    single_group: int, all_units: bool
) -> None:
    model = make_sharded_model()
    model.layers[0].weight = nn.Parameter(torch.zeros_like(model.layers[0].weight))
    with full_params(model, all_units=all_units) as full, torch.no_grad():
        assert not isinstance(full["layers.0.weight"], DTensor)
        assert torch.equal(full["layers.0.weight"], torch.zeros(8, 8))
        full["layers.0.weight"][0] = 1
    assert model.layers[0].weight._local_tensor.sum() == 8
    model(TOKENS).sum().backward()


def test_lookup_in_full_params_accepts_each_name_of_tied_parameter(fake_group: int) -> None:
    model = make_sharded_model()
    with full_params(model) as full:
        assert "head.weight" in full and full["head.weight"] is full["embed.weight"]
        assert "head.weight" not in list(full) and len(full) == len(list(full))


@pytest.mark.parametrize("name", ["embed", "head"])
def test_replacing_one_registration_of_tied_parameter_is_written_back(
    single_group: int, name: str
) -> None:
    model = make_sharded_model()
    with full_params(model, all_units=True) as full:
        getattr(model, name).weight = replacement = nn.Parameter(torch.full((11, 8), 9.0))
        assert full["embed.weight"] is full["head.weight"] is replacement
    assert torch.equal(model.embed.weight._local_tensor, replacement)
    assert model.embed.weight is model.head.weight


def test_full_params_have_attributes_of_original_parameters(fake_group: int) -> None:
    model = make_model()
    model.embed.weight.no_decay = True
    fully_shard(model)
    with full_params(model) as full:
        assert full["embed.weight"].no_decay
