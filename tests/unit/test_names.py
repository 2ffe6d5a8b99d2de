"""Names of parameters without wrappers, and what a unit is doing."""

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
    plain = st.text("abcdefgh01_", min_size=1, max_size=4)
    return st.one_of(plain, st.sampled_from(extra)) if extra else plain


class TestCleanTensorName:
    @given(st.lists(components(WRAPPERS), max_size=6), components([]))
    def test_does_to_the_components_what_torch_does(self, path: list[str], last: str) -> None:
        name = ".".join([*path, last])
        assert names.clean_tensor_name(name) == _common_utils.clean_tensor_name(name)

    @given(st.lists(components([*WRAPPERS, "_orig_mod", "module"]), max_size=6), components([]))
    def test_leaves_the_other_components_in_order_and_nothing_to_clean(
        self, path: list[str], last: str
    ) -> None:
        cleaned = names.clean_tensor_name(".".join([*path, last]))
        assert cleaned.split(".") == [c for c in path if c not in (*WRAPPERS, "_orig_mod")] + [last]
        assert names.clean_tensor_name(cleaned) == cleaned

    def test_removes_compiled_modules(self) -> None:
        assert names.clean_tensor_name("_orig_mod.layers.0._orig_mod.weight") == "layers.0.weight"

    def test_a_name_that_only_ends_like_a_wrapper_stays(self) -> None:
        name = "my_fsdp_wrapped_module.weight"
        assert names.clean_tensor_name(name) == name
        assert _common_utils.clean_tensor_name(name) == "myweight"  # torch takes it apart

    def test_a_tensor_named_like_a_wrapper_stays(self) -> None:
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
    def test_ddp_takes_the_first_module_component(self, name: str, expected: str) -> None:
        assert names.clean_tensor_name(name, ddp=True) == expected
        assert names.clean_tensor_name(name).count("module") == name.count("module")


def test_the_flattened_mark_is_torchs() -> None:
    ours, theirs = torch.zeros(1), torch.zeros(1)
    assert not names.is_flattened(ours)
    names.set_flattened(ours)
    _common_utils._set_fsdp_flattened(theirs)
    assert names.is_flattened(theirs)
    assert _common_utils._is_fsdp_flattened(ours)


class Tied(nn.Module):
    """Tied across modules, tied within one module, a shared module, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.first = self.second = nn.Linear(3, 3)
        self.scale = self.same = nn.Parameter(torch.ones(2))
        self.missing = None
        self.register_buffer("steps", torch.zeros(1))


def wrapped(kind: str) -> nn.Module:
    model = Tied()
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
    def test_is_torchs_map_in_torchs_order(self, kind: str, dedup: bool) -> None:
        model = wrapped(kind)
        ours = names.param_to_fqns(model, dedup)
        theirs = _common_utils._get_param_to_fqns(model, dedup)
        assert [(id(p), fqns) for p, fqns in ours.items()] == [
            (id(p), fqns) for p, fqns in theirs.items()
        ]

    def test_shared_parameters_have_all_their_names_or_the_first(self) -> None:
        model = Tied()
        every = names.param_to_fqns(model, dedup_shared_params=False)
        assert every[model.embed.weight] == ["embed.weight", "head.weight"]
        assert every[model.scale] == ["scale", "same"]
        # named_children() gives a module that is registered twice in one parent once.
        assert every[model.first.bias] == ["first.bias"]
        first = names.param_to_fqns(model)
        assert first[model.embed.weight] == ["embed.weight"]
        assert first[model.scale] == ["scale"]

    def test_covers_the_state_dict_of_the_bare_model(self) -> None:
        model = Tied()
        keys = {name for name, _ in model.named_parameters()}
        found = {fqns[0] for fqns in names.param_to_fqns(wrapped("checkpoint")).values()}
        assert found == keys

    def test_sees_through_ddp_only_where_it_is_ddp(self, gloo_group: None) -> None:
        inner = nn.Module()
        inner.module = nn.Linear(2, 2)
        ddp = nn.parallel.DistributedDataParallel(inner)
        outer = nn.Module()
        outer.module = ddp
        assert [f for fqns in names.param_to_fqns(outer).values() for f in fqns] == [
            "module.module.weight",
            "module.module.bias",
        ]

    def test_sees_through_compiled_modules(self) -> None:
        model = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
        fqns = [fqn for fqns in names.param_to_fqns(model).values() for fqn in fqns]
        assert fqns == ["0.weight", "0.bias", "1.weight", "1.bias"]

    def test_fsdp1_flat_parameters_have_all_their_names(self, gloo_group: None) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
        root = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        ours = names.param_to_fqns(root)
        assert all(isinstance(param, FlatParameter) for param in ours)
        assert sorted(ours.values()) == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
        assert ours == _common_utils._get_param_to_fqns(root)

    @pytest.mark.parametrize("dedup", [True, False])
    def test_sharding_changes_no_name(self, fake_group: int, dedup: bool) -> None:
        model = Tied()
        before = list(names.param_to_fqns(model, dedup).values())
        fully_shard(model)
        assert list(names.param_to_fqns(model, dedup).values()) == before

    def test_modules_that_do_not_know_remove_duplicate(self) -> None:
        class Old(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1))

            def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
                yield prefix + "weight", self.weight

        model = Old()
        assert names.param_to_fqns(model) == {model.weight: ["weight"]}


class TestApplyToModules:
    def test_visits_in_torchs_order_with_torchs_prefixes(self) -> None:
        model = Tied()
        seen: list[tuple[str, nn.Module]] = []

        def note(module: nn.Module, prefix: str, found: list[Any], *, extra: int) -> None:
            assert extra == 3
            found.append((prefix, module))

        def note_torch(module: nn.Module, prefix: str, level: int, found: list[Any]) -> None:
            found.append((prefix, module))

        def count(found: list[Any], *, extra: int) -> int:
            return len(found) + extra

        expected: list[tuple[str, nn.Module]] = []
        _common_utils._apply_to_modules(model, note_torch, lambda found: None, None, expected)
        result = names.apply_to_modules(model, note, count, seen, extra=3)
        assert seen == expected
        assert result == len(expected) + 3

    def test_an_error_ends_the_walk(self) -> None:
        def fail(module: nn.Module, prefix: str) -> None:
            if prefix:
                raise RuntimeError(prefix)

        with pytest.raises(RuntimeError, match="embed"):
            names.apply_to_modules(Tied(), fail, lambda: None)


class TestStates:
    def test_the_enums_are_torchs(self) -> None:
        assert names.TrainingState is _common_utils.TrainingState
        assert names.HandleTrainingState is _common_utils.HandleTrainingState

    def test_follow_a_training_step(self, fake_group: int) -> None:
        seen: list[tuple[names.TrainingState, names.HandleTrainingState]] = []

        class Probe(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                note()
                y = super().forward(x)
                y.register_hook(lambda grad: note())
                return y * 1  # the unit's own hook is on this one, and fires before

        def note() -> None:
            seen.append((names.training_state(model), names.handle_training_state(model)))

        model = fully_shard(Probe(4, 4))
        note()
        model(torch.ones(2, 4)).sum().backward()
        note()
        busy = names.TrainingState.FORWARD_BACKWARD
        assert seen == [
            (names.TrainingState.IDLE, names.HandleTrainingState.IDLE),
            (busy, names.HandleTrainingState.FORWARD),
            (busy, names.HandleTrainingState.BACKWARD_PRE),
            (names.TrainingState.IDLE, names.HandleTrainingState.IDLE),
        ]

    def test_a_unit_without_parameters_has_a_state(self, fake_group: int) -> None:
        assert names.training_state(fully_shard(nn.ReLU())) is names.TrainingState.IDLE

    def test_refuse_modules_that_are_no_unit(self) -> None:
        with pytest.raises(ValueError, match="not applied to this Linear"):
            names.training_state(nn.Linear(1, 1))
