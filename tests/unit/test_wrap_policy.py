"""Policies: which modules become units. torch's own policies give what they give in torch."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given
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
from fsdp_c.wrap_policy import budget_units


def wrapped_by_torch(
    root: nn.Module, policy: Any, ignored: set[nn.Module], kwargs: dict[str, Any]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """What torch's own auto-wrapping calls its wrapper on, in order."""
    calls: list[tuple[nn.Module, dict[str, Any]]] = []

    def record(module: nn.Module, **given: Any) -> nn.Module:
        calls.append((module, {k: v for k, v in given.items() if k in kwargs}))
        return module

    params = {p for module in ignored for p in module.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _wrap_utils._auto_wrap(
            root, policy, ignored, params, {"mixed_precision": None, **kwargs}, record
        )
    return calls


def wrapped_by_us(
    root: nn.Module, policy: Any, ignored: set[nn.Module], kwargs: dict[str, Any]
) -> list[tuple[nn.Module, dict[str, Any]]]:
    *units, last = wrap.plan(root, policy, ignored_modules=ignored, **kwargs)
    assert last.modules == (root,)
    assert all(len(unit.modules) == 1 for unit in units)
    return [
        (unit.modules[0], {k: v for k, v in unit.kwargs.items() if k in kwargs}) for unit in units
    ]


class TestTorchsPolicies:
    """For each of them the same modules in the same order with the same arguments as torch."""

    KWARGS = {"mesh": None, "reshard_after_forward": True}

    def same(self, tree: nn.Module, policy: Any, skip: int) -> None:
        modules = list(tree.modules())[1:]
        ignored = set(modules[skip].modules()) if skip < len(modules) else set()
        expected = wrapped_by_torch(tree, policy, ignored, self.KWARGS)
        assert wrapped_by_us(tree, policy, ignored, self.KWARGS) == expected

    @given(trees, classes, st.integers(0, 10))
    def test_module_wrap_policy(self, tree: nn.Module, kinds: set[Any], skip: int) -> None:
        self.same(tree, ModuleWrapPolicy(kinds), skip)

    @given(trees, classes, st.integers(0, 10))
    def test_classes_stand_for_their_policy(
        self, tree: nn.Module, kinds: set[Any], skip: int
    ) -> None:
        modules = list(tree.modules())[1:]
        ignored = set(modules[skip].modules()) if skip < len(modules) else set()
        expected = wrapped_by_torch(tree, ModuleWrapPolicy(kinds), ignored, self.KWARGS)
        assert wrapped_by_us(tree, kinds, ignored, self.KWARGS) == expected

    @given(trees, st.integers(0, 10))
    def test_custom_policy(self, tree: nn.Module, skip: int) -> None:
        def choose(module: nn.Module) -> bool | dict[str, Any]:
            if isinstance(module, nn.Linear):
                return {"reshard_after_forward": False}
            return isinstance(module, Block)

        self.same(tree, CustomPolicy(choose), skip)

    @given(trees, st.integers(1, 2000), st.integers(0, 10))
    def test_size_based_policy(self, tree: nn.Module, numel: int, skip: int) -> None:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=numel)
        self.same(tree, policy, skip)

    @given(trees, classes, st.integers(0, 10))
    def test_transformer_policy(self, tree: nn.Module, kinds: set[Any], skip: int) -> None:
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
        self.same(tree, policy, skip)

    @given(trees, st.integers(0, 10))
    def test_lambda_policy(self, tree: nn.Module, skip: int) -> None:
        policy = functools.partial(
            lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, (Block, nn.Conv1d))
        )
        self.same(tree, policy, skip)

    @given(trees, st.integers(0, 10))
    def test_always_policy(self, tree: nn.Module, skip: int) -> None:
        self.same(tree, always_wrap_policy, skip)

    @given(trees, st.sampled_from([1, 10, 900]))
    def test_overridden_classes_are_wrapped_as_torch_wraps_them(
        self, tree: nn.Module, numel: int
    ) -> None:
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=numel)
        old = torch.distributed.fsdp.MixedPrecision(param_dtype=torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            units = wrap.plan(tree, policy, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            calls: list[nn.Module] = []
            _wrap_utils._auto_wrap(
                tree,
                policy,
                set(),
                set(),
                {"mixed_precision": old},
                lambda m, **_: calls.append(m) or m,
            )
        assert [unit.modules[0] for unit in units] == [*calls, tree]

    def test_bare_containers_are_passed_over_by_callables(self) -> None:
        units = wrap.plan(Transformer(), always_wrap_policy)
        assert ("layers",) not in units_of(units)
        assert ("layers.0",) in units_of(units)

    def test_bare_containers_are_refused_where_they_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"selects 'layers', a ModuleList without forward"):
            wrap.plan(Transformer(), {nn.ModuleList})

    def test_a_custom_policy_may_have_arguments_for_the_root(self) -> None:
        model = Transformer()
        policy = CustomPolicy(lambda m: {"reshard_after_forward": False} if m is model else False)
        (root,) = wrap.plan(model, policy, reshard_after_forward=True)
        assert root.kwargs["reshard_after_forward"] is False

    def test_arguments_of_units_are_not_shared(self) -> None:
        units = wrap.plan(Transformer(), {Layer}, mesh=None)
        assert len({id(unit.kwargs) for unit in units}) == len(units) == 4


class TestBlocks:
    def test_are_the_layers_of_a_transformer(self) -> None:
        units = wrap.plan(Transformer())
        assert units_of(units) == [("layers.0",), ("layers.1",), ("layers.2",), ("",)]

    def test_are_the_outermost_repeated_layers(self) -> None:
        experts = [Block([nn.ModuleList([Layer(4), Layer(4)]), nn.Linear(4, 4)]) for _ in range(2)]
        units = wrap.plan(nn.Sequential(nn.Linear(4, 4), *experts))
        assert units_of(units) == [("1",), ("2",), ("",)]

    def test_are_looked_for_inside_stages_of_different_widths(self) -> None:
        stages = [nn.Sequential(*(Layer(width) for _ in range(2))) for width in (4, 8)]
        units = wrap.plan(Block([nn.ModuleList(stages)]))
        assert units_of(units) == [
            ("part0.0.0",),
            ("part0.0.1",),
            ("part0.1.0",),
            ("part0.1.1",),
            ("",),
        ]

    def test_may_differ_where_none_are_alike(self) -> None:
        units = wrap.plan(nn.Sequential(Layer(4), Layer(8)))
        assert units_of(units) == [("0",), ("1",), ("",)]

    def test_are_single_layers_where_there_is_nothing_else(self) -> None:
        units = wrap.plan(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
        assert units_of(units) == [("0",), ("2",), ("",)]

    def test_ignored_layers_stay_out(self) -> None:
        model = Transformer()
        units = wrap.plan(model, ignored_modules=[model.layers[1]])
        assert units_of(units) == [("layers.0",), ("layers.2",), ("",)]

    def test_attention_is_not_taken_apart(self) -> None:
        class Odd(nn.MultiheadAttention):
            def __init__(self) -> None:
                super().__init__(4, 2)
                self.more = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        with pytest.raises(ValueError, match="finds no repeated layers in Block"):
            wrap.plan(Block([Odd()]))

    def test_a_model_without_any_is_refused(self) -> None:
        with pytest.raises(ValueError, match="finds no repeated layers in Linear"):
            wrap.plan(nn.Linear(2, 2))


class TestByteBudget:
    @given(trees, st.integers(1, 12000))
    def test_only_own_parameters_of_one_module_exceed_it(
        self, tree: nn.Module, budget: int
    ) -> None:
        units = wrap.plan(tree, budget)
        left = set(tree.parameters())
        for unit in units:
            managed = {p for m in unit.modules for p in m.parameters()} & left
            left -= managed
            most = max(bytes_of(m.parameters(recurse=False)) for m in tree.modules())
            assert bytes_of(managed) <= max(budget, most)
        assert not left

    @given(trees, st.integers(1, 12000))
    def test_no_two_units_that_are_neighbours_in_a_list_would_fit_into_one(
        self, tree: nn.Module, budget: int
    ) -> None:
        flat = nn.Sequential(*[m for m in tree.modules() if not list(m.children())])
        units = wrap.plan(flat, budget)[:-1]
        first_of = {unit.modules[0]: unit for unit in units}
        for unit in units:
            after = int(unit.names[-1]) + 1
            following = [m for m in flat[after:] if list(m.parameters())][:1]
            if following and following[0] in first_of:
                other = first_of[following[0]]
                both = [p for m in unit.modules + other.modules for p in m.parameters()]
                assert bytes_of(both) > budget

    def test_a_model_that_fits_is_one_unit(self) -> None:
        assert units_of(wrap.plan(Transformer(), 10**9)) == [("",)]

    def test_layers_are_put_together_and_small_modules_stay_with_the_root(self) -> None:
        model = Transformer(layers=4)
        layer = bytes_of(model.layers[0].parameters())
        units = wrap.plan(model, 2 * layer)
        assert units_of(units) == [
            ("layers.0", "layers.1"),
            ("layers.2", "layers.3"),
            ("",),
        ]

    def test_counts_bytes_in_the_dtype_of_computation(self) -> None:
        model = Transformer(layers=4)
        layer = bytes_of(model.layers[0].parameters())
        half = wrap.plan(model, layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        assert units_of(half) == units_of(wrap.plan(model, 2 * layer))

    def test_elements_of_a_list_inside_a_module_without_forward(self) -> None:
        nested = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])})
        units = budget_units(Block([nested]), 1, set(), bytes_of)
        assert [len(unit) for unit in units] == [1, 1, 1]

    @pytest.mark.parametrize("budget", [0, -1])
    def test_has_to_be_positive(self, budget: int) -> None:
        with pytest.raises(ValueError, match="positive number of bytes"):
            wrap.plan(Transformer(), budget)
