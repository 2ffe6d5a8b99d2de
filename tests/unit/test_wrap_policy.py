"""Policies choose the modules that become units. torch's policies choose as in torch."""

from __future__ import annotations

import functools
import math
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.fsdp import _wrap_utils
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from wrap_models import Block, Layer, Transformer, bytes_of, classes, trees, units_of

from fsdp_c import MixedPrecisionPolicy, wrap
from fsdp_c._auto_shard.budget import split_by_budget


def units_by_torch(
    root: nn.Module, policy: Any, ignored: set[nn.Module], kwargs: dict[str, Any]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns the modules that torch's ``_auto_wrap`` wraps, in order, with their arguments."""
    calls: list[tuple[nn.Module, dict[str, Any]]] = []

    def record(module: nn.Module, **call_kwargs: Any) -> nn.Module:
        calls.append((module, {k: v for k, v in call_kwargs.items() if k in kwargs}))
        return module

    params = {p for module in ignored for p in module.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _wrap_utils._auto_wrap(
            root, policy, ignored, params, {"mixed_precision": None, **kwargs}, record
        )
    return calls


def units_by_fsdp_c(
    root: nn.Module, policy: Any, ignored: set[nn.Module], kwargs: dict[str, Any]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Returns the modules that ``wrap.plan`` makes units, except the root, with their arguments."""
    *units, last = wrap.plan(root, policy, ignored_modules=ignored, **kwargs)
    assert last.modules == (root,)
    assert all(len(unit.modules) == 1 for unit in units)
    return [
        (unit.modules[0], {k: v for k, v in unit.kwargs.items() if k in kwargs}) for unit in units
    ]


class TestPolicies:
    """A policy gives the modules of torch, in torch's order and with torch's arguments.

    Tests with ``ignored_index`` ignore one module; an index beyond the last module ignores none.
    """

    KWARGS = {"mesh": None, "reshard_after_forward": True}

    def assert_same_units(self, tree: nn.Module, policy: Any, ignored_index: int) -> None:
        modules = list(tree.modules())[1:]
        ignored = set(modules[ignored_index].modules()) if ignored_index < len(modules) else set()
        expected = units_by_torch(tree, policy, ignored, self.KWARGS)
        assert units_by_fsdp_c(tree, policy, ignored, self.KWARGS) == expected

    @given(trees, classes, st.integers(0, 10))
    def test_module_wrap_policy_gives_units_of_torch(
        self, tree: nn.Module, kinds: set[Any], ignored_index: int
    ) -> None:
        self.assert_same_units(tree, ModuleWrapPolicy(kinds), ignored_index)

    @given(trees, classes, st.integers(0, 10))
    def test_set_of_classes_gives_units_of_module_wrap_policy(
        self, tree: nn.Module, kinds: set[Any], ignored_index: int
    ) -> None:
        assume(any(isinstance(module, tuple(kinds)) for module in tree.modules()))
        modules = list(tree.modules())[1:]
        ignored = set(modules[ignored_index].modules()) if ignored_index < len(modules) else set()
        expected = units_by_torch(tree, ModuleWrapPolicy(kinds), ignored, self.KWARGS)
        assert units_by_fsdp_c(tree, kinds, ignored, self.KWARGS) == expected

    @pytest.mark.parametrize("kinds", [nn.Conv2d, {nn.Conv1d, nn.Conv2d}])
    def test_classes_without_instance_in_model_raise(self, kinds: Any) -> None:
        with pytest.raises(ValueError, match="no module of Transformer is an instance of"):
            wrap.plan(Transformer(), kinds)

    def test_policy_without_classes_raises(self) -> None:
        with pytest.raises(ValueError, match="the policy has no classes: pass"):
            wrap.plan(Transformer(), [])

    @pytest.mark.parametrize("wrap_classes", [iter, dict.fromkeys, lambda kinds: {*kinds}])
    def test_iterable_of_classes_gives_units_of_list(self, wrap_classes: Any) -> None:
        model = Transformer()
        expected = units_of(wrap.plan(model, [Layer]))
        assert units_of(wrap.plan(model, wrap_classes([Layer]))) == expected

    @given(trees, st.integers(0, 10))
    def test_custom_policy_gives_units_of_torch(self, tree: nn.Module, ignored_index: int) -> None:
        def choose(module: nn.Module) -> bool | dict[str, Any]:
            if isinstance(module, nn.Linear):
                return {"reshard_after_forward": False}
            return isinstance(module, Block)

        self.assert_same_units(tree, CustomPolicy(choose), ignored_index)

    @given(trees, st.integers(1, 2000), st.integers(0, 10))
    def test_size_based_policy_gives_units_of_torch(
        self, tree: nn.Module, numel: int, ignored_index: int
    ) -> None:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=numel)
        self.assert_same_units(tree, policy, ignored_index)

    @given(trees, classes, st.integers(0, 10))
    def test_transformer_policy_gives_units_of_torch(
        self, tree: nn.Module, kinds: set[Any], ignored_index: int
    ) -> None:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
        self.assert_same_units(tree, policy, ignored_index)

    @given(trees, st.integers(0, 10))
    def test_lambda_policy_gives_units_of_torch(self, tree: nn.Module, ignored_index: int) -> None:
        policy = functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, (Block, nn.Conv1d))
        )
        self.assert_same_units(tree, policy, ignored_index)

    @given(trees, st.integers(0, 10))
    def test_always_wrap_policy_gives_units_of_torch(
        self, tree: nn.Module, ignored_index: int
    ) -> None:
        self.assert_same_units(tree, always_wrap_policy, ignored_index)

    @given(trees, st.sampled_from([1, 10, 900]))
    def test_policy_with_full_precision_classes_gives_units_of_torch(
        self, tree: nn.Module, numel: int
    ) -> None:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=numel)
        fsdp1_policy = torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            units = wrap.plan(tree, policy, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            calls: list[nn.Module] = []
            _wrap_utils._auto_wrap(
                tree,
                policy,
                set(),
                set(),
                {"mixed_precision": fsdp1_policy},
                lambda m, **_: calls.append(m) or m,
            )
        assert [unit.modules[0] for unit in units] == [*calls, tree]

    def test_containers_without_forward_are_skipped_by_callable_policies(self) -> None:
        units = wrap.plan(Transformer(), always_wrap_policy)
        assert ("layers",) not in units_of(units)
        assert ("layers.0",) in units_of(units)

    def test_class_of_container_without_forward_raises(self) -> None:
        with pytest.raises(ValueError, match=r"selects 'layers', a ModuleList without forward"):
            wrap.plan(Transformer(), {nn.ModuleList})

    def test_custom_policy_sets_arguments_of_root(self) -> None:
        model = Transformer()
        policy = CustomPolicy(lambda m: {"reshard_after_forward": False} if m is model else False)
        (root,) = wrap.plan(model, policy, reshard_after_forward=True)
        assert root.kwargs["reshard_after_forward"] is False

    def test_planned_units_have_separate_argument_dicts(self) -> None:
        units = wrap.plan(Transformer(), {Layer}, mesh=None)
        assert len({id(unit.kwargs) for unit in units}) == len(units) == 4


class TestBlocks:
    def test_blocks_are_layers_of_transformer(self) -> None:
        units = wrap.plan(Transformer())
        assert units_of(units) == [("layers.0",), ("layers.1",), ("layers.2",), ("",)]

    def test_blocks_are_outermost_repeated_layers(self) -> None:
        experts = [Block([nn.ModuleList([Layer(4), Layer(4)]), nn.Linear(4, 4)]) for _ in range(2)]
        units = wrap.plan(nn.Sequential(nn.Linear(4, 4), *experts))
        assert units_of(units) == [("1",), ("2",), ("",)]

    def test_blocks_are_found_inside_stages_of_different_widths(self) -> None:
        stages = [nn.Sequential(*(Layer(width) for _ in range(2))) for width in (4, 8)]
        units = wrap.plan(Block([nn.ModuleList(stages)]))
        assert units_of(units) == [
            ("part0.0.0",),
            ("part0.0.1",),
            ("part0.1.0",),
            ("part0.1.1",),
            ("",),
        ]

    def test_blocks_of_one_class_may_differ_in_size(self) -> None:
        units = wrap.plan(nn.Sequential(Layer(4), Layer(8)))
        assert units_of(units) == [("0",), ("1",), ("",)]

    def test_blocks_of_a_sequential_of_linear_layers_are_these_layers(self) -> None:
        units = wrap.plan(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
        assert units_of(units) == [("0",), ("2",), ("",)]

    def test_ignored_layer_is_not_a_block(self) -> None:
        model = Transformer()
        units = wrap.plan(model, ignored_modules=[model.layers[1]])
        assert units_of(units) == [("layers.0",), ("layers.2",), ("",)]

    def test_layers_inside_multihead_attention_are_not_blocks(self) -> None:
        class AttentionWithLayers(nn.MultiheadAttention):
            def __init__(self) -> None:
                super().__init__(4, 2)
                self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        with pytest.raises(ValueError, match="finds no repeated layers in Block"):
            wrap.plan(Block([AttentionWithLayers()]))

    def test_model_without_blocks_raises(self) -> None:
        with pytest.raises(ValueError, match="finds no repeated layers in Linear"):
            wrap.plan(nn.Linear(2, 2))

    @pytest.mark.parametrize("separate", [True, False])
    def test_linear_blocks_with_names_are_not_heads(self, separate: bool) -> None:
        layers = {"fc1": nn.Linear(8, 8), "act": nn.ReLU(), "fc2": nn.Linear(8, 8)}
        units = wrap.plan(nn.Sequential(OrderedDict(layers)), separate_ends=separate)
        assert units_of(units) == [("fc1",), ("fc2",), ("",)]
        assert [unit.kwargs for unit in units] == [{}, {}, {}]

    @pytest.mark.parametrize("separate", [True, False])
    def test_linear_modules_of_full_precision_classes_are_not_heads(self, separate: bool) -> None:
        class Router(nn.Linear):
            pass

        model = nn.Sequential(*(Block([Router(8, 8), nn.Linear(8, 8)]) for _ in range(2)))
        with pytest.warns(UserWarning, match="Router"):
            units = wrap.plan(
                model,
                separate_ends=separate,
                mp_policy=MixedPrecisionPolicy(torch.bfloat16),
                full_precision_classes=(Router,),
            )
        assert units_of(units) == [("0.part0",), ("0",), ("1.part0",), ("1",), ("",)]
        assert all(unit.kwargs.keys() == {"mp_policy"} for unit in units)

    def test_embedding_and_head_in_a_sequential_are_ends(self) -> None:
        model = nn.Sequential(nn.Embedding(4000, 16), Layer(16), Layer(16), nn.Linear(16, 4000))
        embed, *layers, head, root = wrap.plan(model)
        assert units_of([embed, *layers, head]) == [("0",), ("1",), ("2",), ("3",)]
        assert not embed.unshard_in_backward and head.kwargs == {"reshard_after_forward": False}
        assert all(unit.unshard_in_backward and unit.kwargs == {} for unit in (*layers, root))
        assert units_of(wrap.plan(model, separate_ends=False)) == [("1",), ("2",), ("",)]


class TestByteBudget:
    @given(trees, st.integers(1, 12000))
    def test_units_stay_within_budget_except_for_single_large_modules(
        self, tree: nn.Module, budget: int
    ) -> None:
        units = wrap.plan(tree, budget)
        unmanaged = set(tree.parameters())
        for unit in units:
            managed = {p for m in unit.modules for p in m.parameters()} & unmanaged
            unmanaged -= managed
            largest = max(bytes_of(m.parameters(recurse=False)) for m in tree.modules())
            assert bytes_of(managed) <= max(budget, largest)
        assert not unmanaged

    @given(trees, st.integers(1, 12000))
    def test_adjacent_units_together_exceed_budget(self, tree: nn.Module, budget: int) -> None:
        flat = nn.Sequential(*[m for m in tree.modules() if not list(m.children())])
        units = wrap.plan(flat, budget)[:-1]
        unit_by_first_module = {unit.modules[0]: unit for unit in units}
        for unit in units:
            end = int(unit.names[-1]) + 1
            following = [m for m in flat[end:] if list(m.parameters())][:1]
            if following and following[0] in unit_by_first_module:
                next_unit = unit_by_first_module[following[0]]
                both = [p for m in unit.modules + next_unit.modules for p in m.parameters()]
                assert bytes_of(both) > budget

    def test_model_within_budget_is_one_unit(self) -> None:
        assert units_of(wrap.plan(Transformer(), 10**9)) == [("",)]

    def test_budget_of_two_layers_merges_layers_and_leaves_small_modules_in_root(self) -> None:
        model = Transformer(layers=4)
        layer = bytes_of(model.layers[0].parameters())
        units = wrap.plan(model, 2 * layer)
        assert units_of(units) == [
            ("layers.0", "layers.1"),
            ("layers.2", "layers.3"),
            ("",),
        ]

    def test_budget_counts_bytes_in_compute_dtype(self) -> None:
        model = Transformer(layers=4)
        layer = bytes_of(model.layers[0].parameters())
        half = wrap.plan(model, layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        assert units_of(half) == units_of(wrap.plan(model, 2 * layer))

    @pytest.mark.parametrize(
        ("policy", "bounds"),
        [
            (1024, {}),
            ({nn.Linear}, {"min_unit": 1024}),
            ({nn.Sequential}, {"max_transient": 2560, "ranks": 2}),
        ],
        ids=str,
    )
    def test_size_limits_count_bytes_in_dtype_of_override_fn(
        self, policy: Any, bounds: dict[str, Any]
    ) -> None:
        layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
        model = Block([layers])
        override = MixedPrecisionPolicy(
            torch.bfloat16, param_dtype_override_fn=lambda param: torch.float32
        )
        units = units_of(wrap.plan(model, policy, mp_policy=override, **bounds))
        assert units == units_of(wrap.plan(model, policy, **bounds))

    def test_budget_makes_each_item_of_a_nested_list_a_unit(self) -> None:
        nested = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])})
        units = split_by_budget(Block([nested]), 1, set(), bytes_of)
        assert [len(unit) for unit in units] == [1, 1, 1]

    def test_budget_makes_a_module_with_two_parents_one_unit(self) -> None:
        shared = nn.Linear(4, 4)
        root = nn.ModuleList(Block([shared, nn.Linear(4, 4)]) for _ in range(2))
        modules = [m for unit in split_by_budget(root, 1, set(), bytes_of) for m in unit]
        assert modules.count(shared) == 1 and len(modules) == len(set(modules)) == 3

    def test_budget_of_numpy_gives_units_of_int(self) -> None:
        numpy = pytest.importorskip("numpy")
        model = Transformer()
        assert units_of(wrap.plan(model, numpy.int64(2000))) == units_of(wrap.plan(model, 2000))

    @pytest.mark.parametrize("budget", [0, -1])
    def test_budget_that_is_not_positive_raises(self, budget: int) -> None:
        with pytest.raises(ValueError, match="positive number of bytes"):
            wrap.plan(Transformer(), budget)

    @pytest.mark.parametrize("name", ["max_transient", "min_unit"])
    def test_unit_size_limit_of_numpy_type_gives_units_of_int(self, name: str) -> None:
        bound: Any = pytest.importorskip("numpy").int64(4000)
        numpy_bound: dict[str, Any] = {name: bound}
        int_bound: dict[str, Any] = {name: 4000}
        expected = units_of(wrap.plan(Transformer(), **int_bound))
        assert units_of(wrap.plan(Transformer(), **numpy_bound)) == expected

    def test_infinite_unit_size_limits_split_no_unit_and_combine_all_neighbors(self) -> None:
        bounds: dict[str, Any] = {"max_transient": math.inf}
        assert units_of(wrap.plan(Transformer(), **bounds)) == units_of(wrap.plan(Transformer()))
        bounds["min_unit"] = math.inf
        layers = ("layers.0", "layers.1", "layers.2")
        assert units_of(wrap.plan(Transformer(), **bounds)) == [layers, ("",)]

    def test_number_of_ranks_that_is_not_positive_raises(self) -> None:
        with pytest.raises(ValueError, match="a number of ranks is positive, not 0"):
            wrap.plan(Transformer(), max_transient=4000, ranks=0)
