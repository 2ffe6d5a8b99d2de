"""``no_sync``, ``full_params``, ``generate_with`` and ``ShardedEMA`` in one process.

Tests with a group of one rank compare values, as gathers return this rank's data. Tests with a
fake group of 8 ranks count collectives. tests/distributed tests several ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from recorded_operators import RecordedOperators
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp_c
from fsdp_c import (
    FSDPModule,
    MixedPrecisionPolicy,
    ShardedEMA,
    full_params,
    fully_shard,
    generate_with,
    names,
    no_sync,
    replicate,
)


class Net(nn.Module):
    """An embedding, two layers and a tied head. Maps (batch,) of ints to (batch, 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)

    def generate(self, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert not isinstance(self.embed.weight, DTensor)  # also outside of forward
        for _ in range(steps):
            tokens = torch.cat([tokens, self(tokens)[-1:].argmax(-1)])
        return tokens


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def make_sharded_model(shard: Any = fully_shard, **kwargs: Any) -> Net:
    """Returns the model with both layers and the root as units."""
    model = make_model()
    for layer in model.layers:
        shard(layer, **kwargs)
    return shard(model, **kwargs)


TOKENS = torch.arange(6)


def count_collectives(call: Any) -> int:
    with RecordedOperators() as issued:
        call()
    return len(issued.collectives())


def test_context_manager_with_unsharded_model_raises_and_names_itself() -> None:
    for context, caller in (
        (no_sync(make_model()), "no_sync"),
        (full_params(make_model()), "full_params"),
        (generate_with(make_model()), "generate_with"),
    ):
        with pytest.raises(ValueError, match=f"{caller} expects a model that fully_shard .* Net"):
            with context:  # type: ignore[attr-defined]
                pass


class TestNoSync:
    def test_backward_after_no_sync_reduces_accumulated_gradients(self, single_group: int) -> None:
        model, reference = make_sharded_model(), make_model()
        with no_sync(model):
            model(TOKENS).sum().backward()
            assert all(param.grad is None for param in model.parameters())
        model(TOKENS).square().sum().backward()
        reference(TOKENS).sum().backward()
        reference(TOKENS).square().sum().backward()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param.grad._local_tensor, expected.grad)

    def test_backward_in_no_sync_issues_no_reduction(self, fake_group: int) -> None:
        model = make_sharded_model()
        with no_sync(model), RecordedOperators() as issued:
            model(TOKENS).sum().backward()
        assert issued.collectives() and not any("reduce" in name for name in issued.collectives())

    def test_nested_no_sync_restores_settings_after_exception(self, fake_group: int) -> None:
        model = make_sharded_model()
        model.layers[0].set_requires_gradient_sync(False)
        groups = [m._get_fsdp_state()._fsdp_param_groups[0] for m in (model, *model.layers)]

        def settings() -> list[tuple[bool, bool]]:
            return [(group.reduce_grads, group.all_reduce_grads) for group in groups]

        before = settings()
        assert before == [(True, True), (False, False), (True, True)]
        with pytest.raises(RuntimeError, match="stop"):
            with no_sync(model):
                assert settings() == [(False, False)] * 3
                with no_sync(model.layers[1]):
                    pass
                assert settings() == [(False, False)] * 3
                raise RuntimeError("stop")
        assert settings() == before

    def test_no_sync_of_replicated_model_issues_no_collective(self, fake_group: int) -> None:
        model = make_sharded_model(replicate)
        with no_sync(model):
            assert count_collectives(lambda: model(TOKENS).sum().backward()) == 0


class TestFullParams:
    def test_full_params_equal_parameters_of_plain_model(self, single_group: int) -> None:
        expected = dict(make_model().named_parameters())
        with full_params(make_sharded_model()) as full:
            assert set(full) == set(expected) and len(full) == len(expected)
            for name, param in full.items():
                assert isinstance(param, nn.Parameter) and not isinstance(param, DTensor)
                assert torch.equal(param, expected[name])

    def test_full_params_unshards_only_the_unit_of_the_last_lookup(self, fake_group: int) -> None:
        model = make_sharded_model()
        with full_params(model) as full, RecordedOperators() as issued:
            weight = full["layers.0.weight"]
            assert model.layers[0].weight is weight and full["layers.0.weight"] is weight
            assert isinstance(model.layers[1].weight, DTensor)
            bias = full["layers.0.bias"]
            assert len(issued.collectives()) == 1
            next_weight = full["layers.1.weight"]
            assert model.layers[1].weight is next_weight
            assert isinstance(model.layers[0].weight, DTensor)
            assert bias.shape == (8,) and len(issued.collectives()) == 2
        assert all(isinstance(param, DTensor) for param in model.parameters())

    def test_full_params_issues_one_collective_per_unit(self, fake_group: int) -> None:
        model = make_sharded_model()
        with full_params(model) as full:
            assert count_collectives(lambda: list(full.values())) == 3

        def gather_all_units() -> None:
            with full_params(model, all_units=True):
                pass

        assert count_collectives(gather_all_units) == 3

    def test_full_params_with_all_units_registers_all_and_writes_back(
        self, single_group: int
    ) -> None:
        model = make_sharded_model()
        with full_params(model, all_units=True):
            assert not any(isinstance(param, DTensor) for param in model.parameters())
            assert model.head.weight is model.embed.weight
            for layer in model.layers:
                layer.reset_parameters()
            changed = [layer.weight.detach().clone() for layer in model.layers]
        for layer, value in zip(model.layers, changed, strict=True):
            assert isinstance(layer.weight, DTensor)
            assert torch.equal(layer.weight._local_tensor, value)

    @pytest.mark.parametrize("all_units", [True, False])
    @pytest.mark.parametrize("writeback", [True, False, None])
    def test_full_params_writes_back_changes_unless_writeback_is_false(
        self, single_group: int, all_units: bool, writeback: bool | None
    ) -> None:
        model, reference = make_sharded_model(), make_model()
        with full_params(model, all_units=all_units, writeback=writeback) as full:
            for param in full.values():
                with torch.no_grad():
                    param.mul_(2)
        factor = 1 if writeback is False else 2
        for param, original in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param._local_tensor, original * factor)

    def test_forward_after_full_params_write_back_uses_new_values(self, single_group: int) -> None:
        model, reference = make_sharded_model(), make_model()
        with torch.no_grad():
            model(TOKENS)  # leaves the root unsharded
            with full_params(model) as full:
                full["embed.weight"].add_(1)
            reference.embed.weight.add_(1)
            assert torch.equal(model(TOKENS), reference(TOKENS))

    def test_reading_full_params_leaves_version_counters_unchanged(self, single_group: int) -> None:
        model = make_sharded_model()
        before = [param._local_tensor._version for param in model.parameters()]
        with full_params(model) as full:
            list(full.items())
        assert [param._local_tensor._version for param in model.parameters()] == before

    def test_parameter_replaced_in_full_params_is_written_back(self, single_group: int) -> None:
        model = make_sharded_model()
        with full_params(model, all_units=True):
            model.layers[0].weight = nn.Parameter(torch.ones(8, 8))
        assert torch.equal(model.layers[0].weight._local_tensor, torch.ones(8, 8))

    def test_full_params_with_parameter_of_other_shape_raises_and_writes_back_others(
        self, single_group: int
    ) -> None:
        model = make_sharded_model()
        with pytest.raises(ValueError, match=r"cannot write back .*\(4, 8\) where \(8, 8\)"):
            with full_params(model, all_units=True):
                model.layers[0].weight = nn.Parameter(torch.ones(4, 8))
                with torch.no_grad():
                    model.layers[1].bias.fill_(3)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert torch.equal(model.layers[1].bias._local_tensor, torch.full((8,), 3.0))
        model(TOKENS).sum().backward()

    def test_exception_in_full_params_discards_changes_and_restores_shards(
        self, single_group: int
    ) -> None:
        model, reference = make_sharded_model(), make_model()
        with pytest.raises(RuntimeError, match="stop"):
            with full_params(model, all_units=True):
                with torch.no_grad():
                    model.embed.weight.fill_(0)
                raise RuntimeError("stop")
        for param, original in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(param._local_tensor, original)
        assert names.training_state(model) is names.TrainingState.IDLE
        model(TOKENS).sum().backward()

    def test_full_params_have_dtype_of_shards(self, single_group: int) -> None:
        model = make_sharded_model(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with full_params(model) as full:
            assert {param.dtype for param in full.values()} == {torch.float32}

    def test_full_params_have_requires_grad_of_shards(self, single_group: int) -> None:
        model = make_sharded_model()
        model.layers[0].requires_grad_(False)
        with full_params(model) as full:
            assert {name for name, param in full.items() if not param.requires_grad} == {
                "layers.0.weight",
                "layers.0.bias",
            }

    def test_full_params_returns_ignored_parameters_themselves(self, fake_group: int) -> None:
        model = make_model()
        ignored = model.layers[0].bias
        fully_shard(model, ignored_params={ignored})
        with full_params(model) as full:
            assert full["layers.0.bias"] is ignored
            assert dict(full.items())["layers.0.bias"] is ignored

    def test_full_params_with_rank0_only_gathers_to_rank_0(self, fake_group: int) -> None:
        model = make_sharded_model()
        with full_params(model, rank0_only=True) as full:
            with RecordedOperators() as issued:
                params = dict(full.items())
        assert {name: param.shape for name, param in params.items()} == {
            name: param.shape for name, param in make_model().named_parameters()
        }
        assert issued.collectives() == ["gather_"] * 3

    def test_full_params_of_replicated_model_writes_back(self, single_group: int) -> None:
        model = make_sharded_model(replicate)
        with full_params(model) as full, torch.no_grad():
            full["embed.weight"].fill_(2)
        assert torch.equal(model.embed.weight._local_tensor, torch.full((11, 8), 2.0))

    def test_forward_or_second_full_params_inside_full_params_raises(
        self, single_group: int
    ) -> None:
        model = make_sharded_model()
        with full_params(model):
            for unit in (model, model.layers[0]):
                assert names.training_state(unit) is names.TrainingState.SUMMON_FULL_PARAMS
            with pytest.raises(RuntimeError, match=r"inside full_params.*generate_with"):
                model.layers[0](torch.ones(1, 8))
            with pytest.raises(RuntimeError, match=r"already active .*: leave that block"):
                with full_params(model):
                    pass
        model(TOKENS)

    def test_full_params_with_invalid_arguments_raises(self, single_group: int) -> None:
        with pytest.raises(ValueError, match="cannot write back with rank0_only=True"):
            with full_params(make_sharded_model(), writeback=True, rank0_only=True):
                pass
        with torch.device("meta"):
            model = make_sharded_model()
        with pytest.raises(RuntimeError, match="on the meta device"):
            with full_params(model):
                pass
        with full_params(make_sharded_model()) as full, pytest.raises(KeyError):
            full["nothing"]

    def test_full_params_during_forward_raises(self, single_group: int) -> None:
        class CallsFullParams(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with full_params(self):
                    pass
                return super().forward(x)

        with pytest.raises(RuntimeError, match=r"during forward or backward: .* FORWARD; use it"):
            fully_shard(CallsFullParams(2, 2))(torch.ones(1, 2))


class TestGenerateWith:
    def test_generation_in_generate_with_gathers_each_unit_once(self, fake_group: int) -> None:
        model = make_sharded_model()
        with RecordedOperators() as issued:
            with generate_with(model) as yielded:
                assert yielded is model
                assert len(issued.collectives()) == 3
                model.generate(TOKENS, 5)
        assert len(issued.collectives()) == 3
        assert all(isinstance(param, DTensor) for param in model.parameters())

    def test_generate_with_gives_output_of_plain_model(self, single_group: int) -> None:
        with torch.no_grad():
            expected = make_model().generate(TOKENS, 5)
        for keep_full in (True, False):
            model = make_sharded_model()
            with generate_with(model, keep_full=keep_full):
                assert torch.equal(model.generate(TOKENS, 5), expected)

    @pytest.mark.parametrize("first_forward_in_generate", [True, False])
    def test_training_after_generate_with_issues_usual_collectives(
        self, fake_group: int, first_forward_in_generate: bool
    ) -> None:
        model, reference = make_sharded_model(), make_sharded_model()
        if not first_forward_in_generate:
            model(TOKENS)
        with generate_with(model):
            model.generate(TOKENS, 2)

        for _ in range(2):
            with RecordedOperators() as expected:
                reference(TOKENS).sum().backward()
            with RecordedOperators() as issued:
                model(TOKENS).sum().backward()
            assert issued.collectives() == expected.collectives()

    def test_exception_in_generate_with_restores_settings(self, fake_group: int) -> None:
        model = make_sharded_model()
        model(TOKENS)
        groups = [m._get_fsdp_state()._fsdp_param_groups[0] for m in (model, *model.layers)]
        before = [group.post_forward_mesh_info for group in groups]
        with pytest.raises(RuntimeError, match="stop"):
            with generate_with(model):
                assert [group.post_forward_mesh_info for group in groups] == [None] * 3
                raise RuntimeError("stop")
        assert [group.post_forward_mesh_info for group in groups] == before
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert torch.is_grad_enabled()

    def test_method_is_registered_only_within_generate_with(self, fake_group: int) -> None:
        model = make_sharded_model()
        with generate_with(model, "generate", keep_full=False):
            assert "generate" in model.__dict__
        assert "generate" not in model.__dict__
        with pytest.raises(AssertionError), torch.no_grad():
            model.generate(TOKENS, 1)  # without the hooks the weight is a DTensor
        fsdp_c.register_fsdp_forward_method(model, "generate")
        with torch.no_grad():
            model.generate(TOKENS, 1)

    def test_generate_with_unknown_method_raises(self, fake_group: int) -> None:
        with pytest.raises(ValueError, match="Net does not have a method sample"):
            with generate_with(make_sharded_model(), "sample"):
                pass

    def test_generate_with_of_replicated_model_runs(self, fake_group: int) -> None:
        model = make_sharded_model(replicate)
        with generate_with(model):
            model.generate(TOKENS, 2)
        model(TOKENS).sum().backward()


class TestShardedEMA:
    def train(self, model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()

    @pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
    def test_ema_is_bit_equal_to_averaged_model_of_torch(
        self, single_group: int, decay: float
    ) -> None:
        model, reference = make_sharded_model(), make_model()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
        averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(decay))
        ema = ShardedEMA(model, decay)
        for _ in range(4):
            self.train(model, optimizers[0])
            self.train(reference, optimizers[1])
            ema.update(model)
            averaged.update_parameters(reference)
        assert ema.updates == int(averaged.n_averaged) == 4
        for name, param in averaged.module.named_parameters():
            assert isinstance(ema[name], DTensor)
            assert torch.equal(ema[name]._local_tensor, param)

    DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ema_of_other_dtypes_is_bit_equal_to_averaged_model_of_torch(
        self, single_group: int, dtype: torch.dtype
    ) -> None:
        values = [torch.randn(5, 3, dtype=torch.complex128) for _ in range(4)]
        if not dtype.is_complex:
            values = [value.real.clone() for value in values]
        model, reference = nn.Module(), nn.Module()
        for module in (model, reference):
            module.weight = nn.Parameter(values[0].to(dtype))
            module.real = nn.Parameter(torch.ones(3))
        fully_shard(model)
        ema = ShardedEMA(model, 0.9)
        averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for value in values:
            with torch.no_grad():
                reference.weight.copy_(value)
                model.weight._local_tensor.copy_(value)
            ema.update(model)
            averaged.update_parameters(reference)
        assert torch.equal(ema["weight"]._local_tensor, averaged.module.weight)
        assert ema["weight"].dtype == dtype

    @pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
    def test_ema_of_integers_and_booleans_copies_them(self, dtype: torch.dtype) -> None:
        """torch's AveragedModel changes integers even if the weights stay constant."""
        model = nn.Module()
        model.weight = nn.Parameter(torch.arange(100).to(dtype), requires_grad=False)
        ema = ShardedEMA(model, 0.9)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(5):
            ema.update(model)
            averaged.update_parameters(model)
        assert torch.equal(ema["weight"], model.weight)
        assert dtype == torch.bool or not torch.equal(averaged.module.weight, model.weight)

    def test_ema_of_float8_raises_unless_given_a_dtype(self) -> None:
        model = nn.Linear(2, 2)
        model.scale = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        with pytest.raises(NotImplementedError, match=r"cannot average 'scale' in torch\.float8"):
            ShardedEMA(model)
        ema = ShardedEMA(model, 0.5, dtype=torch.float32)
        ema.update(model)
        with torch.no_grad():
            model.scale.copy_(torch.full((4,), 2.0))
        ema.update(model)
        assert torch.equal(ema["scale"], torch.full((4,), 1.5))

    def test_ema_with_float64_widens_complex_and_keeps_integers(self) -> None:
        model = nn.Module()
        model.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        model.count = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
        ema = ShardedEMA(model, dtype=torch.float64)
        assert ema["complex"].dtype == torch.complex128 and ema["count"].dtype == torch.int32

    def test_ema_of_sharded_model_can_be_deep_copied(self, fake_group: int) -> None:
        model = make_sharded_model()
        with pytest.raises(AssertionError, match="deepcopy"):
            AveragedModel(model)
        ema = ShardedEMA(model)
        copied = copy.deepcopy(ema)
        model.embed.weight._local_tensor.data.fill_(3)
        copied.update(model)
        assert (ema.updates, copied.updates) == (0, 1)
        assert torch.equal(copied["embed.weight"]._local_tensor, model.embed.weight._local_tensor)
        assert not torch.equal(ema["embed.weight"]._local_tensor, model.embed.weight._local_tensor)

    def test_ema_update_and_applied_issue_no_collectives(self, fake_group: int) -> None:
        model = make_sharded_model()
        model(TOKENS)
        ema = ShardedEMA(model)

        def update_and_apply() -> None:
            ema.update(model)
            ema.update(model)
            with ema.applied(model):
                pass

        assert count_collectives(update_and_apply) == 0

    def test_ema_applied_swaps_weights_within_context_and_copy_to_keeps_them(
        self, single_group: int
    ) -> None:
        model, reference = make_sharded_model(), make_model()
        ema = ShardedEMA(model)
        before = [param._local_tensor.clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param._local_tensor.add_(1)
            trained = model(TOKENS)
            with pytest.raises(RuntimeError, match="stop"):
                with ema.applied(model):
                    assert torch.equal(model(TOKENS), reference(TOKENS))
                    raise RuntimeError("stop")
            assert torch.equal(model(TOKENS), trained)
        ema.copy_to(model)
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(param._local_tensor, value)

    def test_ema_state_dict_restores_averages_and_mismatch_raises(self, fake_group: int) -> None:
        model = make_sharded_model()
        ema, other = ShardedEMA(model, 0.5), ShardedEMA(make_sharded_model(), 0.5)
        for param in model.parameters():
            param._local_tensor.data.add_(1)
        ema.update(model)
        state = ema.state_dict()
        assert state["updates"] == 1
        assert all(isinstance(value, DTensor) for value in state["averages"].values())
        other.load_state_dict(state)
        for name in state["averages"]:
            assert torch.equal(other[name]._local_tensor, ema[name]._local_tensor)
        assert other.updates == 1
        del state["averages"]["embed.weight"]
        with pytest.raises(ValueError, match=r"another model: \['embed.weight'\]"):
            other.load_state_dict(state)
        state["averages"]["embed.weight"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"'embed.weight' has another shape or sharding"):
            other.load_state_dict(state)

    def test_ema_with_dtype_stores_averages_in_it(self, fake_group: int) -> None:
        model = make_sharded_model().to(torch.bfloat16)
        ema = ShardedEMA(model, 0.9, dtype=torch.float32)
        ema.update(model)
        ema.update(model)
        assert ema["embed.weight"].dtype == torch.float32
        assert torch.equal(
            ema["embed.weight"]._local_tensor, model.embed.weight._local_tensor.float()
        )

    def test_ema_with_decay_function_calls_it_with_number_of_updates(
        self, single_group: int
    ) -> None:
        model = make_sharded_model()
        arguments: list[int] = []

        def decay(updates: int) -> float:
            arguments.append(updates)
            return 0.5

        ema = ShardedEMA(model, decay)
        ema.update(model)
        ema.update(model)
        assert arguments == [0, 0, 1]  # the first call is a check of the constructor

    def test_ema_of_plain_model_averages_floats_and_copies_integers(self) -> None:
        model = nn.Linear(2, 2)
        model.steps = nn.Parameter(torch.tensor([1]), requires_grad=False)
        ema = ShardedEMA(model, 0.5)
        for _ in range(2):
            with torch.no_grad():
                model.steps += 1
                model.weight += 1
            ema.update(model)
        assert torch.equal(ema["steps"], torch.tensor([3]))
        assert torch.allclose(ema["weight"], model.weight - 0.5)

    def test_ema_with_invalid_arguments_raises(self, fake_group: int) -> None:
        model = make_sharded_model()
        for decay in (-0.1, 1.1):
            with pytest.raises(ValueError, match=f"decay from 0 to 1, not {decay}"):
                ShardedEMA(model, decay)
        with pytest.raises(ValueError, match=r"expects a floating-point dtype, not torch\.int8"):
            ShardedEMA(model, dtype=torch.int8)
        ema = ShardedEMA(model)
        with pytest.raises(ValueError, match=r"made for another model: .*'bias'"):
            ema.update(nn.Linear(1, 1))
        with pytest.raises(ValueError, match="another shape or sharding than its average"):
            ema.update(make_model())
        with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
            ShardedEMA(nn.Linear(1, 1))
        assert ema.updates == 0 and isinstance(model, FSDPModule)
