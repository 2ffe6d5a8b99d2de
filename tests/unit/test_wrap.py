"""``auto_shard``: tied and frozen parameters, full precision, small units, and failed calls."""

from __future__ import annotations

import gc
import io
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_input import assert_unchanged, snapshot
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import _wrap_utils
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
)
from torch.distributed.tensor.debug import CommDebugMode
from toy_models import MLPModel
from wrap_models import Block, Layer, Transformer, bytes_of, classes, train, trees, units_of

from fsdp_c import (
    FSDPModule,
    MixedPrecisionPolicy,
    auto_shard,
    explain,
    fully_shard,
    replicate,
    wrap,
)
from fsdp_c._auto_shard import checks, unit_order
from fsdp_c._auto_shard.module_tree import iterate_children_first


class TestHelpers:
    @given(trees)
    def test_children_first_yields_modules_in_post_order_of_torch(self, tree: nn.Module) -> None:
        expected = [module for _, module in _wrap_utils._get_post_order_named_modules(tree)]
        assert list(iterate_children_first(tree)) == expected

    def test_post_order_of_nested_module_dict_yields_children_first(self) -> None:
        model = nn.ModuleDict(
            {
                "s1": nn.ReLU(),
                "s2": nn.ModuleDict({"ss1": nn.ReLU(), "ss2": nn.ReLU()}),
                "s3": nn.ReLU(),
            }
        )
        names = {module: name for name, module in model.named_modules()}
        post_order = [names[module] for module in iterate_children_first(model)]
        assert post_order == ["s1", "s2.ss1", "s2.ss2", "s2", "s3", ""]

    @given(trees, classes, st.integers(0, 20))
    def test_managed_parameters_and_their_names_equal_torch(
        self, tree: nn.Module, kinds: set[Any], first_ignored: int
    ) -> None:
        ignored = set(list(tree.parameters())[first_ignored : first_ignored + 2])
        visited: set[nn.Module] = set()
        visited_by_torch: set[nn.Module] = set()
        for name, module in _wrap_utils._get_post_order_named_modules(tree):
            if isinstance(module, (*kinds, nn.Conv1d)):
                assert checks.managed_param_to_fqn(
                    module, ignored, visited, name
                ) == _wrap_utils._get_managed_param_to_fqn(module, ignored, visited_by_torch, name)
                assert visited == visited_by_torch

    @given(trees)
    def test_children_first_yields_every_module_once(self, tree: nn.Module) -> None:
        assert set(iterate_children_first(tree)) == set(tree.modules())
        assert len(list(iterate_children_first(tree))) == len(list(tree.modules()))


class TestFrozenParameters:
    @given(trees, classes, st.integers(0, 2**16))
    def test_names_in_messages_about_mixed_requires_grad_equal_torchs(
        self, tree: nn.Module, kinds: set[Any], bits: int
    ) -> None:
        for i, param in enumerate(tree.parameters()):
            param.requires_grad_(bool(bits >> i & 1))
        units = wrap.plan(tree, ModuleWrapPolicy(kinds))[:-1]
        messages = checks.find_mixed_requires_grad(tree, units, ())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _wrap_utils._validate_frozen_params(
                tree, {unit.modules[0] for unit in units}, set(), use_orig_params=True
            )
        names = [message.split("\n", 1)[1] for message in messages]
        torch_names = [str(warning.message).split("\n", 1)[1] for warning in caught]
        assert sorted(names) == sorted(torch_names)

    def model_with_frozen_mlp(self) -> Transformer:
        model = Transformer()
        model.layers[1].mlp.requires_grad_(False)
        return model

    def test_unit_with_frozen_parameters_warns_by_default(self, fake_group: int) -> None:
        with pytest.warns(
            UserWarning, match="layers.1 has both parameters with requires_grad=True"
        ):
            auto_shard(self.model_with_frozen_mlp())

    def test_frozen_error_raises_if_a_unit_mixes_frozen_and_trainable_parameters(
        self, fake_group: int
    ) -> None:
        model = self.model_with_frozen_mlp()
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"layers.1 has both.*\n.*\n\['layers.1.norm.weight'"):
            auto_shard(model, frozen="error")
        assert_unchanged(model, before)

    def test_auto_shard_with_frozen_ignore_or_separate_frozen_units_does_not_warn(
        self, fake_group: int
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            auto_shard(self.model_with_frozen_mlp(), frozen="ignore")
            auto_shard(self.model_with_frozen_mlp(), {nn.Sequential, Layer, nn.LayerNorm})

    def test_auto_shard_with_unknown_value_of_frozen_raises(self) -> None:
        with pytest.raises(ValueError, match="'warn', 'error' or 'ignore', not 'maybe'"):
            auto_shard(nn.Linear(1, 1), frozen="maybe")  # type: ignore[arg-type]


class TestSharding:
    def test_auto_shard_shards_units_and_root(self, fake_group: int) -> None:
        model = auto_shard(Transformer(), reshard_after_forward=True)
        sharded = {name for name, m in model.named_modules() if isinstance(m, FSDPModule)}
        assert sharded == {"", "layers.0", "layers.1", "layers.2"}
        assert isinstance(model, Transformer)
        train(model)
        assert all(p.grad is not None for p in model.parameters())

    def test_unit_of_several_modules_has_one_state(self, fake_group: int) -> None:
        model = Transformer(layers=4)
        auto_shard(model, 2 * bytes_of(model.layers[0].parameters()))
        assert fully_shard.state(model.layers[0]) is fully_shard.state(model.layers[1])
        assert fully_shard.state(model.layers[1]) is not fully_shard.state(model.layers[2])
        train(model)

    def test_ignored_modules_and_parameters_are_not_sharded(self, fake_group: int) -> None:
        model = Transformer()
        auto_shard(
            model,
            always_wrap_policy,
            ignored_modules=[model.layers[0]],
            ignored_params=[model.head.weight],
        )
        unsharded = {n for n, p in model.named_parameters() if type(p) is nn.Parameter}
        assert unsharded == {
            "head.weight",
            *(f"layers.0.{name}" for name, _ in model.layers[0].named_parameters()),
        }
        assert not any(isinstance(m, FSDPModule) for m in model.layers[0].modules())

    def test_shard_fn_is_called_for_each_unit_and_root(self, fake_group: int) -> None:
        calls: list[Any] = []
        auto_shard(Transformer(), shard_fn=lambda module, **kwargs: calls.append(kwargs), mesh=None)
        assert calls == [{"mesh": None}] * 4

    def test_auto_shard_with_replicate_replicates_model_with_large_head(
        self, fake_group: int
    ) -> None:
        model = auto_shard(Transformer(width=4), shard_fn=replicate)
        assert isinstance(model.head, ReplicateModule)
        train(model)
        with pytest.raises(TypeError, match="'reshard_after_forward'"):
            auto_shard(Transformer(width=4), shard_fn=replicate, reshard_after_forward=False)

    @pytest.mark.parametrize(
        ("dtype", "trains", "needed"),
        [(None, False, 0), (torch.bfloat16, False, 512), (None, True, 2048)],
    )
    def test_max_transient_counts_no_gather_of_replicated_parameters(
        self, dtype: torch.dtype | None, trains: bool, needed: int, fake_group: int
    ) -> None:
        def shard(max_transient: int) -> nn.Module:
            model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
            return auto_shard(
                model.requires_grad_(trains),
                max_transient=max_transient,
                mp_policy=MixedPrecisionPolicy(dtype),
                shard_fn=replicate,
            )

        explanation = explain(shard(max(needed, 1)), file=io.StringIO())
        assert max(unit.transient for unit in explanation.units) == needed
        if needed:
            with pytest.raises(ValueError, match=f"temporarily needs {needed} bytes"):
                shard(needed - 1)

    @pytest.mark.parametrize("sharded", ["root", "submodule"])
    def test_auto_shard_of_model_with_sharded_module_raises(
        self, fake_group: int, sharded: str
    ) -> None:
        model = Transformer()
        fully_shard(model if sharded == "root" else model.layers[1].mlp)
        before = snapshot(model)
        with pytest.raises(ValueError, match="modules to not already have FSDP applied but found"):
            auto_shard(model)
        assert_unchanged(model, before)


class TestFullPrecision:
    POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def test_batch_norm_is_unit_in_full_precision(self, fake_group: int) -> None:
        model = Transformer(norm=nn.BatchNorm1d)
        with pytest.warns(
            UserWarning,
            match=r"Both mixed precision and an auto_wrap_policy.*\n.*BatchNorm1d.*\nauto_shard",
        ):
            auto_shard(model, mp_policy=self.POLICY)
        dtypes: dict[str, tuple[torch.dtype, ...]] = {}

        def make_recording_hook(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                dtypes[name] = (args[0].dtype, module._parameters["weight"].dtype)

            return hook

        norm = model.layers[0].norm
        assert isinstance(norm, FSDPModule)
        # A forward hook would run after fully_shard's, which reshards the weight.
        norm.register_forward_pre_hook(
            lambda m, args: make_recording_hook("norm")(m, args, args[0])
        )
        model.layers[0].mlp[0].register_forward_hook(make_recording_hook("linear"))
        model(torch.arange(8))
        assert dtypes == {
            "norm": (torch.float32, torch.float32),
            "linear": (torch.bfloat16, torch.bfloat16),
        }

    def test_full_precision_classes_become_units_in_float32(self, fake_group: int) -> None:
        with pytest.warns(UserWarning, match="LayerNorm"):
            units = wrap.plan(
                Transformer(), full_precision_classes=[nn.LayerNorm], mp_policy=self.POLICY
            )
        assert units_of(units) == [
            *((f"layers.{i}{part}",) for i in range(3) for part in (".norm", "")),
            ("norm",),
            ("",),
        ]
        assert units[0].kwargs["mp_policy"] == MixedPrecisionPolicy(
            param_dtype=torch.float32, output_dtype=torch.bfloat16
        )
        assert units[1].kwargs["mp_policy"] is self.POLICY

    def test_full_precision_units_keep_reduce_dtype_of_more_precision(self) -> None:
        policy = MixedPrecisionPolicy(torch.float16, reduce_dtype=torch.float32)
        model = Transformer(norm=nn.BatchNorm1d).bfloat16()
        with pytest.warns(UserWarning, match="BatchNorm1d"):
            units = wrap.plan(model, mp_policy=policy)
        assert units[0].names == ("layers.0.norm",)
        assert units[0].kwargs["mp_policy"] == MixedPrecisionPolicy(
            torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float16
        )

    def test_full_precision_units_drop_reduce_dtype_of_less_precision(self) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
        with pytest.warns(UserWarning, match="BatchNorm1d"):
            units = wrap.plan(Transformer(norm=nn.BatchNorm1d), mp_policy=policy)
        assert units[0].kwargs["mp_policy"].param_dtype == torch.float32
        assert units[0].kwargs["mp_policy"].reduce_dtype is None

    @pytest.mark.parametrize("policy", ["blocks", 2000, {Layer}])
    def test_full_precision_units_train_under_every_kind_of_policy(
        self, fake_group: int, policy: Any
    ) -> None:
        model = Transformer(norm=nn.BatchNorm1d)
        with pytest.warns(UserWarning, match="Both mixed precision"):
            auto_shard(model, policy, mp_policy=self.POLICY)
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
        assert all(isinstance(norm, FSDPModule) for norm in norms)
        train(model)

    def test_full_precision_unit_inside_another_has_its_output_dtype(self, fake_group: int) -> None:
        class Full(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert x.dtype is self.norm(x).dtype is torch.float32
                return self.linear(self.norm(x))

        model = nn.Sequential(nn.Linear(8, 8), Full())
        with pytest.warns(UserWarning, match="Full"):
            auto_shard(
                model,
                {Full},
                mp_policy=self.POLICY,
                full_precision_classes=(Full, nn.LayerNorm),
            )
        assert model(torch.ones(2, 8)).dtype is torch.bfloat16

    def test_parts_of_split_full_precision_unit_have_full_precision(self, fake_group: int) -> None:
        dtypes: list[torch.dtype] = []

        class Full(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for child in self.children():
                    dtypes.append(x.dtype)
                    x = child(x)
                return x

        model = nn.Sequential(nn.Linear(8, 64), Full([nn.Linear(64, 64) for _ in range(4)]))
        with pytest.warns(UserWarning, match="Full"):
            auto_shard(
                model,
                {Full},
                mp_policy=self.POLICY,
                full_precision_classes=(Full,),
                max_transient=40_000,
            )
        assert all(isinstance(part, FSDPModule) for part in list(model[1].children())[:3])
        assert model(torch.ones(2, 8)).dtype is torch.bfloat16
        assert dtypes == [torch.float32] * 4

    def test_parts_of_split_units_do_not_cast_their_outputs(self) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        units = wrap.plan(MLPModel(blocks=2), max_transient=1000, ranks=8, mp_policy=policy)
        parts = [unit for unit in units if unit.names[0].count(".") > 1]
        assert parts and all(
            unit.kwargs["mp_policy"] == replace(policy, output_dtype=None) for unit in parts
        )
        assert all(unit.kwargs["mp_policy"] is policy for unit in units if unit not in parts)

    def test_batch_norm_without_mixed_precision_is_not_a_unit(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            units = wrap.plan(Transformer(norm=nn.BatchNorm1d))
        assert len(units) == 4


class TestSmallUnits:
    """``min_unit``: small adjacent units are merged, so that they share collectives."""

    def make_layers(self, *widths: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(width, 8, bias=False) for width in widths))

    def unit_names(
        self, model: nn.Module, min_unit: int | None, **kwargs: Any
    ) -> list[tuple[str, ...]]:
        return units_of(wrap.plan(model, {nn.Linear}, min_unit=min_unit, **kwargs))

    def test_adjacent_units_are_merged_until_min_unit_is_reached(self) -> None:
        model = self.make_layers(8, 8, 8, 8, 8)  # 256 bytes per layer
        assert self.unit_names(model, None)[:-1] == [("0",), ("1",), ("2",), ("3",), ("4",)]
        assert self.unit_names(model, 256)[:-1] == [("0",), ("1",), ("2",), ("3",), ("4",)]
        assert self.unit_names(model, 257)[:-1] == [("0", "1"), ("2", "3"), ("4",)]
        assert self.unit_names(model, 10**6) == [("0", "1", "2", "3", "4"), ("",)]

    def test_min_unit_counts_bytes_in_compute_dtype(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        assert self.unit_names(self.make_layers(8, 8, 8, 8), 300, mp_policy=policy)[:-1] == [
            ("0", "1", "2"),
            ("3",),
        ]

    def test_units_separated_by_large_unit_are_not_merged(self) -> None:
        names = self.unit_names(self.make_layers(8, 80, 8, 8), 1000)
        assert names[:-1] == [("0",), ("1",), ("2", "3")]

    def test_units_of_different_parents_are_not_merged(self) -> None:
        model = nn.Sequential(self.make_layers(8, 8), self.make_layers(8, 8))
        assert self.unit_names(model, 10**6) == [("0.0", "0.1"), ("1.0", "1.1"), ("",)]

    def test_units_that_contain_units_are_merged(self) -> None:
        model = nn.Sequential(*(Block([nn.Linear(4, 4)]) for _ in range(3)))
        units = wrap.plan(model, {Block, nn.Linear}, min_unit=10**6)
        assert [len(unit.modules) for unit in units if Block in map(type, unit.modules)] == [3]

    @pytest.mark.torch("2.13")  # the fake group of older releases does not write reduced tensors
    def test_step_with_merged_units_has_fewer_collectives_and_same_gradients(
        self, fake_group: int
    ) -> None:
        def step(min_unit: int | None) -> tuple[int, list[torch.Tensor]]:
            torch.manual_seed(0)
            model = auto_shard(self.make_layers(8, 8, 8, 8), {nn.Linear}, min_unit=min_unit)
            with CommDebugMode() as mode:
                model(torch.ones(2, 8)).sum().backward()
            grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
            return mode.get_total_counts(), grads

        (count, grads), (merged_count, merged_grads) = step(None), step(10**6)
        assert (count, merged_count) == (12, 3)
        assert len(grads) == 4 and all(map(torch.equal, grads, merged_grads))


class TestTiedWeights:
    def test_units_that_share_a_parameter_become_one(self, fake_group: int) -> None:
        model = Transformer(tied=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            units = wrap.plan(model, {nn.Embedding, nn.Linear, Layer})
        assert ("embed", "head") in units_of(units)
        auto_shard(model, {nn.Embedding, nn.Linear, Layer})
        assert model.embed.weight is model.head.weight
        train(model)
        assert model.embed.weight is model.head.weight

    def test_module_tied_to_enclosing_unit_is_not_a_unit(self, fake_group: int) -> None:
        model = Transformer(tied=True)
        units = wrap.plan(model, {nn.Embedding, Layer})
        assert units_of(units) == [("layers.0",), ("layers.1",), ("layers.2",), ("",)]
        auto_shard(model, {nn.Embedding, Layer})
        train(model)
        assert model.embed.weight is model.head.weight

    def test_unit_with_one_of_two_tied_parameters_is_dropped(self) -> None:
        inner = nn.Linear(2, 2)
        model = Block([Block([nn.Sequential(inner)]), nn.Linear(2, 2)])
        model.part1.weight = inner.weight
        with pytest.warns(UserWarning, match="'part0' does not become a unit"):
            units = wrap.plan(model, {nn.Sequential, Block})
        assert units_of(units) == [("",)]

    def test_merging_tied_units_with_other_parameters_warns(self) -> None:
        model = Transformer()
        model.layers[2].mlp[0].weight = model.layers[0].mlp[0].weight
        with pytest.warns(UserWarning) as caught:
            units = wrap.plan(model)
        assert units_of(units) == [("layers.0", "layers.2"), ("layers.1",), ("",)]
        (warning,) = caught
        assert str(warning.message) == (
            "'layers.0.mlp.0.weight' of the unit 'layers.0' and 'layers.2.mlp.0.weight' of the "
            "unit 'layers.2' are one parameter: the two become one unit"
        )

    def test_units_that_share_a_module_become_one(self, fake_group: int) -> None:
        model = Transformer()
        model.layers[2].mlp = model.layers[0].mlp
        auto_shard(model)
        assert fully_shard.state(model.layers[0]) is fully_shard.state(model.layers[2])
        train(model)

    def test_tied_units_with_different_arguments_raise_with_names(self, fake_group: int) -> None:
        model = Transformer(tied=True)
        policy = CustomPolicy(
            lambda m: (
                {"reshard_after_forward": m is model.embed}
                if m in (model.embed, model.head)
                else False
            )
        )
        before = snapshot(model)
        with pytest.raises(
            ValueError,
            match=r"'embed.weight' of the unit 'embed' and 'head.weight' of the unit 'head' are",
        ):
            auto_shard(model, policy)
        assert_unchanged(model, before)

    def test_tied_weights_that_nest_units_in_each_other_raise(self) -> None:
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        x, y = Block([a, nn.Linear(3, 3)]), Block([b, nn.Linear(3, 3)])
        model = nn.Sequential(x, y)
        y.part1.weight = a.weight
        x.part1.bias = b.bias
        policy = CustomPolicy(lambda m: m in (a, b, x, y))
        with (
            pytest.raises(ValueError, match="put these units inside one another"),
            pytest.warns(UserWarning, match="become one unit"),
        ):
            wrap.plan(model, policy)

    @settings(max_examples=200)
    @given(st.data())
    def test_auto_shard_with_random_ties_puts_each_parameter_in_exactly_one_unit(
        self, data: st.DataObject
    ) -> None:
        leaves = [nn.Linear(2, 2) for _ in range(6)]
        model = nn.Sequential(
            Block(leaves[:2]), nn.Sequential(Block(leaves[2:4]), leaves[4]), leaves[5]
        )
        for _ in range(data.draw(st.integers(0, 3))):
            target, source = data.draw(st.lists(st.sampled_from(leaves), min_size=2, max_size=2))
            target.weight = source.weight
        chosen = data.draw(st.sets(st.sampled_from(list(model.modules())[1:])))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                units = wrap.plan(model, CustomPolicy(lambda m: m in chosen))
            except ValueError as error:
                assert "inside one another" in str(error)
                return
        assert all(len(owners) == 1 for owners in unit_order.find_owners(model, units).values())
        for i, unit in enumerate(units):
            below = {m for module in unit.modules for m in module.modules() if m is not module}
            assert not below & {module for later in units[i:] for module in later.modules}


class TestFailedCalls:
    def assert_raises_unchanged(
        self, model: nn.Module, error: type[Exception], match: str, *args: Any, **kw: Any
    ) -> None:
        """Asserts that ``auto_shard`` raises and leaves the model as it was."""
        before = snapshot(model)
        attributes = [dict(m.__dict__) for m in model.modules()]
        with pytest.raises(error, match=match):
            auto_shard(model, *args, **kw)
        assert_unchanged(model, before)
        after = [dict(m.__dict__) for m in model.modules()]
        assert [list(d) for d in after] == [list(d) for d in attributes]

    def test_exception_in_policy_leaves_model_unchanged(self, fake_group: int) -> None:
        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            if isinstance(module, nn.LayerNorm):
                raise RuntimeError("policy failed")
            return True

        self.assert_raises_unchanged(Transformer(), RuntimeError, "policy failed", policy)
        self.assert_raises_unchanged(
            Transformer(),
            RuntimeError,
            "policy failed",
            CustomPolicy(lambda m: policy(m, False, 0)),
        )

    def test_policy_that_returns_string_raises(self, fake_group: int) -> None:
        policy = CustomPolicy(lambda m: "yes")  # type: ignore[arg-type, return-value]
        self.assert_raises_unchanged(Transformer(), ValueError, "should return", policy)

    @pytest.mark.parametrize("policy", [None, True, 1.5, "layers", [int], object()])
    def test_auto_shard_with_object_that_is_not_a_policy_raises(
        self, fake_group: int, policy: Any
    ) -> None:
        error = ValueError if policy == "layers" else TypeError
        self.assert_raises_unchanged(Transformer(), error, "auto_shard", policy)

    def test_auto_shard_with_unknown_argument_raises(self, fake_group: int) -> None:
        self.assert_raises_unchanged(Transformer(), TypeError, "wrap_root", wrap_root=True)

    def test_auto_shard_failing_at_last_unit_leaves_model_unchanged(self, fake_group: int) -> None:
        model = Transformer()
        model.layers[2].norm.weight = nn.Parameter(torch.tensor(1.0))
        self.assert_raises_unchanged(model, ValueError, "doesn't support scalar parameters")
        model.layers[2].norm.weight = nn.Parameter(torch.ones(8))
        auto_shard(model)
        train(model)

    def test_invalid_mesh_of_root_only_leaves_model_unchanged(self, fake_group: int) -> None:
        model = Transformer()
        mesh = init_device_mesh("cpu", (2, 2, 2))
        policy = CustomPolicy(lambda m: {"mesh": mesh} if m is model else isinstance(m, Layer))
        self.assert_raises_unchanged(model, ValueError, "1D or 2D", policy)

    def test_failed_auto_shard_keeps_existing_hooks(self, fake_group: int) -> None:
        model = Transformer()
        calls: list[str] = []
        model.layers[0].register_forward_pre_hook(lambda m, args: calls.append("hook"))
        model.layers[2].norm.weight = nn.Parameter(torch.tensor(1.0))
        self.assert_raises_unchanged(model, ValueError, "scalar")
        model.layers[2].norm.weight = nn.Parameter(torch.ones(8))
        model(torch.arange(8))
        assert calls == ["hook"]

    def test_auto_shard_failing_with_keep_originals_false_leaves_earlier_units_sharded(
        self, fake_group: int
    ) -> None:
        model = Transformer()
        model.layers[2].norm.weight = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ValueError, match="scalar"):
            auto_shard(model, keep_originals=False)
        assert isinstance(model.layers[0], FSDPModule)

    def test_original_parameters_are_freed_after_auto_shard(self, fake_group: int) -> None:
        model = Transformer()
        original = weakref.ref(model.layers[0].mlp[0].weight.untyped_storage())
        assert original() is not None
        auto_shard(model)
        gc.collect()
        assert original() is None
