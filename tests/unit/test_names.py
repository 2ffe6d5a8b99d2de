"""Parameter names without wrappers, module traversal, and training states of units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, _common_utils
from torch.distributed.fsdp._flat_param import FlatParameter

from fsdp_c import fully_shard, names

WRAPPERS = ["_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


def components(extra: list[str]) -> st.SearchStrategy[str]:
    """Generates components of dotted names: random ones and those of ``extra``."""
    plain = st.text("abcdefgh01_", min_size=1, max_size=4)
    return st.one_of(plain, st.sampled_from(extra)) if extra else plain


class TestCleanTensorName:
    @given(st.lists(components(WRAPPERS), max_size=6), components([]))
    def test_clean_tensor_name_equals_torch(self, path: list[str], last: str) -> None:
        name = ".".join([*path, last])
        assert names.clean_tensor_name(name) == _common_utils.clean_tensor_name(name)

    @given(st.lists(components([*WRAPPERS, "_orig_mod", "module"]), max_size=6), components([]))
    def test_clean_tensor_name_removes_only_wrappers_and_is_idempotent(
        self, path: list[str], last: str
    ) -> None:
        cleaned = names.clean_tensor_name(".".join([*path, last]))
        assert cleaned.split(".") == [c for c in path if c not in (*WRAPPERS, "_orig_mod")] + [last]
        assert names.clean_tensor_name(cleaned) == cleaned

    def test_clean_tensor_name_removes_orig_mod(self) -> None:
        assert names.clean_tensor_name("_orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"

    def test_clean_tensor_name_keeps_component_ending_like_wrapper(self) -> None:
        name = "my_fsdp_wrapped_module.weight"
        assert names.clean_tensor_name(name) == name
        assert _common_utils.clean_tensor_name(name) == "myweight"  # torch removes substrings

    def test_clean_tensor_name_keeps_tensor_named_like_wrapper(self) -> None:
        assert names.clean_tensor_name("a._orig_mod") == "a._orig_mod"

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("module.layers.module.weight", "layers.module.weight"),
            ("_orig_mod.module.weight", "weight"),
            ("module", "module"),
            ("layers.weight", "layers.weight"),
        ],
    )
    def test_clean_tensor_name_with_ddp_removes_first_module_component(
        self, name: str, expected: str
    ) -> None:
        assert names.clean_tensor_name(name, ddp=True) == expected
        assert names.clean_tensor_name(name).count("module") == name.count("module")


def test_set_flattened_marks_tensors_as_torch_does() -> None:
    marked, marked_by_torch = torch.zeros(1), torch.zeros(1)
    assert not names.is_flattened(marked)
    names.set_flattened(marked)
    _common_utils._set_fsdp_flattened(marked_by_torch)
    assert names.is_flattened(marked_by_torch)
    assert _common_utils._is_fsdp_flattened(marked)


class TiedModel(nn.Module):
    """A model with parameters tied across modules and within one, a shared module, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.first = self.second = nn.Linear(3, 3)
        self.scale = self.same = nn.Parameter(torch.ones(2))
        self.missing = None
        self.register_buffer("steps", torch.zeros(1))


def make_model(kind: str) -> nn.Module:
    model = TiedModel()
    if kind == "checkpoint":
        model.head = checkpoint_wrapper(model.head)
        return checkpoint_wrapper(model)
    return model


@pytest.fixture
def gloo_group(tmp_path: Any) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class TestParamToFqns:
    @pytest.mark.parametrize("kind", ["plain", "checkpoint"])
    @pytest.mark.parametrize("dedup", [True, False])
    def test_param_to_fqns_equals_torch_in_content_and_order(self, kind: str, dedup: bool) -> None:
        model = make_model(kind)
        fqns_of = names.param_to_fqns(model, dedup)
        expected = _common_utils._get_param_to_fqns(model, dedup)
        assert [(id(p), fqns) for p, fqns in fqns_of.items()] == [
            (id(p), fqns) for p, fqns in expected.items()
        ]

    def test_param_to_fqns_of_shared_parameter_has_all_names_or_first_with_dedup(self) -> None:
        model = TiedModel()
        all_names = names.param_to_fqns(model, dedup_shared_params=False)
        assert all_names[model.embed.weight] == ["embed.weight", "head.weight"]
        assert all_names[model.scale] == ["scale", "same"]
        # named_children() yields a module once, even if its parent registers it twice.
        assert all_names[model.first.bias] == ["first.bias"]
        first_names = names.param_to_fqns(model)
        assert first_names[model.embed.weight] == ["embed.weight"]
        assert first_names[model.scale] == ["scale"]

    def test_param_to_fqns_of_wrapped_model_has_names_of_unwrapped_model(self) -> None:
        model = TiedModel()
        expected = {name for name, _ in model.named_parameters()}
        first_names = {fqns[0] for fqns in names.param_to_fqns(make_model("checkpoint")).values()}
        assert first_names == expected

    def test_param_to_fqns_removes_component_module_of_ddp_only(self, gloo_group: None) -> None:
        inner = nn.Module()
        inner.module = nn.Linear(2, 2)
        ddp = nn.parallel.DistributedDataParallel(inner)
        outer = nn.Module()
        outer.module = ddp
        assert [f for fqns in names.param_to_fqns(outer).values() for f in fqns] == [
            "module.module.weight",
            "module.module.bias",
        ]

    def test_param_to_fqns_removes_orig_mod_of_compiled_module(self) -> None:
        model = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
        fqns = [fqn for fqns in names.param_to_fqns(model).values() for fqn in fqns]
        assert fqns == ["0.weight", "0.bias", "1.weight", "1.bias"]

    def test_flat_parameter_of_fsdp1_has_names_of_all_its_parameters(
        self, gloo_group: None
    ) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
        root = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        fqns_of = names.param_to_fqns(root)
        assert all(isinstance(param, FlatParameter) for param in fqns_of)
        assert sorted(fqns_of.values()) == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
        assert fqns_of == _common_utils._get_param_to_fqns(root)

    @pytest.mark.parametrize("dedup", [True, False])
    def test_param_to_fqns_is_unchanged_by_fully_shard(self, fake_group: int, dedup: bool) -> None:
        model = TiedModel()
        before = list(names.param_to_fqns(model, dedup).values())
        fully_shard(model)
        assert list(names.param_to_fqns(model, dedup).values()) == before

    def test_param_to_fqns_accepts_named_parameters_without_remove_duplicate(self) -> None:
        class ModuleWithOldSignature(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1))

            def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
                yield prefix + "weight", self.weight

        model = ModuleWithOldSignature()
        assert names.param_to_fqns(model) == {model.weight: ["weight"]}


class TestApplyToModules:
    def test_apply_to_modules_visits_modules_as_torch(self) -> None:
        model = TiedModel()
        visits: list[tuple[str, nn.Module]] = []

        def visit(module: nn.Module, prefix: str, visits: list[Any], *, extra: int) -> None:
            assert extra == 3
            visits.append((prefix, module))

        def visit_in_torch(module: nn.Module, prefix: str, level: int, visits: list[Any]) -> None:
            visits.append((prefix, module))

        def count(visits: list[Any], *, extra: int) -> int:
            return len(visits) + extra

        expected: list[tuple[str, nn.Module]] = []
        _common_utils._apply_to_modules(model, visit_in_torch, lambda visits: None, None, expected)
        result = names.apply_to_modules(model, visit, count, visits, extra=3)
        assert visits == expected
        assert result == len(expected) + 3

    def test_apply_to_modules_raises_exception_of_callback(self) -> None:
        def fail(module: nn.Module, prefix: str) -> None:
            if prefix:
                raise RuntimeError(prefix)

        with pytest.raises(RuntimeError, match="embed"):
            names.apply_to_modules(TiedModel(), fail, lambda: None)


class TestStates:
    def test_training_state_enums_are_those_of_torch(self) -> None:
        assert names.TrainingState is _common_utils.TrainingState
        assert names.HandleTrainingState is _common_utils.HandleTrainingState

    def test_training_states_change_during_step(self, fake_group: int) -> None:
        states: list[tuple[names.TrainingState, names.HandleTrainingState]] = []

        class StateRecorder(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                record()
                y = super().forward(x)
                y.register_hook(lambda grad: record())
                return y * 1  # the unit's own hook is on this output, and runs before

        def record() -> None:
            states.append((names.training_state(model), names.handle_training_state(model)))

        model = fully_shard(StateRecorder(4, 4))
        record()
        model(torch.ones(2, 4)).sum().backward()
        record()
        running = names.TrainingState.FORWARD_BACKWARD
        assert states == [
            (names.TrainingState.IDLE, names.HandleTrainingState.IDLE),
            (running, names.HandleTrainingState.FORWARD),
            (running, names.HandleTrainingState.BACKWARD_PRE),
            (names.TrainingState.IDLE, names.HandleTrainingState.IDLE),
        ]

    def test_training_state_of_unit_without_parameters_is_idle(self, fake_group: int) -> None:
        assert names.training_state(fully_shard(nn.ReLU())) is names.TrainingState.IDLE

    def test_training_state_of_module_that_was_not_sharded_raises(self) -> None:
        with pytest.raises(ValueError, match="not applied to this Linear"):
            names.training_state(nn.Linear(1, 1))
