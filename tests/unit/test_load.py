"""``load_full_state_dict`` gives each rank its shards, for all shapes, bucket sizes and meshes.

Each test runs one rank of a fake process group, which is its own source of the state dict.
tests/distributed tests several ranks.
"""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from fake_world import fake_world
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_writer import write
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp_c import fully_shard, load_full_state_dict
from fsdp_c._checkpoint.source import LoadingRanks


class Model(nn.Module):
    """A model with tied parameters, three persistent buffers (one 0-d), and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.norm = nn.BatchNorm1d(5)
        self.layer = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.norm(self.embed(tokens))))


def make_full_state(seed: int = 1) -> dict[str, torch.Tensor]:
    """Returns a full state dict of the model."""
    torch.manual_seed(seed)
    model = Model()
    model.norm.num_batches_tracked += seed
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def make_sharded_model() -> Model:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def expected_local(full: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return full
    return distribute_tensor(
        full, value.device_mesh, value.placements, src_data_rank=None
    )._local_tensor


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def assert_loaded(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    """Asserts that the model has this rank's shards of ``full``."""
    state = model.state_dict(keep_vars=True)
    assert state.keys() >= full.keys()
    for name, tensor in full.items():
        expected = expected_local(tensor, state[name]).to(state[name].dtype)
        assert torch.equal(local_of(state[name]), expected), name


def clone_locals(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: local_of(value).clone() for name, value in model.state_dict(keep_vars=True).items()
    }


def assert_raises_unchanged(
    model: nn.Module, source: Any, error: type[Exception], match: str, **kwargs: Any
) -> None:
    """Asserts that the load raises and leaves all tensors of the model as they were."""
    before = clone_locals(model)
    with pytest.raises(error, match=match):
        load_full_state_dict(model, source, **kwargs)
    for name, tensor in clone_locals(model).items():
        assert torch.equal(tensor, before[name])


shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


class TestLayouts:
    @settings(max_examples=60)
    @given(
        st.lists(st.one_of(shapes, st.just(())), min_size=1, max_size=6),
        st.integers(1, 200),
        st.integers(1, 5),
        st.data(),
    )
    def test_load_with_random_shapes_placements_and_bucket_sizes_fills_own_shards(
        self, sizes: list[tuple[int, ...]], bucket_bytes: int, world: int, data: st.DataObject
    ) -> None:
        rank = data.draw(st.integers(0, world - 1))
        dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8])
        with fake_world(world, rank):
            mesh = init_device_mesh("cpu", (world,))
            model, full = nn.Module(), {}
            for i, size in enumerate(sizes):
                dtype = data.draw(dtypes)
                full[f"p{i}"] = torch.arange(1, 1 + torch.Size(size).numel()).to(dtype).view(size)
                value: torch.Tensor = torch.zeros(size, dtype=torch.float64)
                placement = data.draw(
                    st.sampled_from([None, Replicate(), *(Shard(d) for d in range(len(size)))])
                )
                if placement is not None:
                    value = distribute_tensor(value, mesh, [placement], src_data_rank=None)
                model.register_parameter(f"p{i}", nn.Parameter(value))
            load_full_state_dict(model, full, src=rank, bucket_bytes=bucket_bytes)
            assert_loaded(model, full)

    @pytest.mark.parametrize("rank", range(4))
    @pytest.mark.parametrize(
        "placements",
        [
            (Shard(0), Shard(0)),
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Replicate(), Shard(0)),
            (Shard(1), Replicate()),
            (_StridedShard(0, split_factor=2), Shard(0)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("bucket_bytes", [1, 50, 10**6])
    @pytest.mark.parametrize("columns", [6, 0])
    def test_load_on_two_dimensional_mesh_fills_own_shards(
        self, rank: int, placements: Any, bucket_bytes: int, columns: int
    ) -> None:
        full = {"weight": torch.randn(10, columns), "bias": torch.randn(10)}
        with fake_world(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            model = nn.Linear(6, 10)
            zeros = torch.zeros_like(full["weight"])
            zeros = distribute_tensor(zeros, mesh, placements, src_data_rank=None)
            model.weight = nn.Parameter(zeros)
            load_full_state_dict(model, full, src=rank, bucket_bytes=bucket_bytes)
            assert_loaded(model, full)

    @pytest.mark.parametrize("rank", [0, 3, 7])
    def test_load_of_sharded_model_fills_own_shards_and_keeps_ties(self, rank: int) -> None:
        with fake_world(8, rank):
            model = make_sharded_model()
            result = load_full_state_dict(model, make_full_state(), src=rank)
            assert result.missing_keys == [] and result.unexpected_keys == []
            assert_loaded(model, make_full_state())
            assert model.head.weight is model.embed.weight

    def test_load_without_process_group_fills_full_tensors(self) -> None:
        model = Model()
        load_full_state_dict(model, make_full_state())
        assert_loaded(model, make_full_state())

    def test_load_casts_tensors_to_dtype_of_model(self, fake_group: int) -> None:
        model = make_sharded_model()
        load_full_state_dict(model, {n: t.to(torch.float64) for n, t in make_full_state().items()})
        assert_loaded(model, make_full_state())
        assert model.embed.weight.dtype == torch.float32

    def test_load_of_tensors_that_are_not_contiguous_fills_own_shards(
        self, fake_group: int
    ) -> None:
        full = make_full_state()
        full["layer.0.weight"] = full["layer.0.weight"].t().contiguous().t()
        full["head.bias"] = full["head.bias"].repeat_interleave(2)[::2]
        assert sum(not tensor.is_contiguous() for tensor in full.values()) == 2
        model = make_sharded_model()
        load_full_state_dict(model, full, bucket_bytes=30)
        assert_loaded(model, full)


class TestState:
    def test_forward_after_load_uses_loaded_weights_in_unsharded_root(
        self, single_group: int
    ) -> None:
        model = make_sharded_model().eval()
        reference = Model().eval()
        tokens = torch.arange(5)
        with torch.no_grad():
            model(tokens)  # leaves the root unsharded
        load_full_state_dict(model, make_full_state())
        reference.load_state_dict(make_full_state())
        assert torch.equal(model(tokens), reference(tokens))

    def test_load_after_unshard_fills_own_shards(self, single_group: int) -> None:
        model = make_sharded_model()
        model.unshard()
        load_full_state_dict(model, make_full_state())
        assert_loaded(model, make_full_state())

    @pytest.mark.parametrize("rank", [0, 2, 7])
    def test_load_of_model_on_meta_materializes_it(self, rank: int) -> None:
        with fake_world(8, rank):
            with torch.device("meta"):
                model = Model()
                model.table = torch.arange(3.0, device="cpu")
            mesh = init_device_mesh("cpu", (8,))
            fully_shard(model.layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            load_full_state_dict(model, make_full_state(), src=rank)
            assert_loaded(model, make_full_state())
            assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
            assert model.head.weight is model.embed.weight
            model(torch.arange(5)).sum().backward()
            assert model.head.weight.grad is not None

    def test_failed_load_leaves_meta_model_on_meta(self, fake_group: int) -> None:
        with torch.device("meta"):
            model = fully_shard(Model())
        with pytest.raises(RuntimeError, match="Missing key"):
            load_full_state_dict(model, {})
        assert all(p.is_meta for p in model.parameters())

    def test_load_keeps_parameter_objects_of_optimizer(self, single_group: int) -> None:
        model = make_sharded_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [id(p) for p in model.parameters()]
        load_full_state_dict(model, make_full_state())
        assert [id(p) for p in model.parameters()] == before
        model(torch.arange(5)).sum().backward()
        optimizer.step()
        assert not torch.equal(local_of(model.head.bias), make_full_state()["head.bias"])

    def test_load_passes_extra_state_and_custom_entries_to_modules(self, fake_group: int) -> None:
        class LinearWithExtraState(nn.Linear):
            loaded: Any = None

            def get_extra_state(self) -> Any:
                return {"version": 1}

            def set_extra_state(self, state: Any) -> None:
                self.loaded = state

        class LinearSavingTwiceBias(nn.Linear):
            """Its entry "bias" in state dicts is twice its bias."""

            def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
                super()._save_to_state_dict(destination, prefix, keep_vars)
                destination[prefix + "bias"] = self.bias.detach() * 2

            def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
                if prefix + "bias" in state:
                    state = state | {prefix + "bias": state[prefix + "bias"] / 2}
                super()._load_from_state_dict(state, prefix, *args)

        model = nn.Sequential(LinearWithExtraState(2, 2), LinearSavingTwiceBias(2, 2))
        fully_shard(model[0])
        full = {
            "0.weight": torch.ones(2, 2),
            "0.bias": torch.ones(2),
            "0._extra_state": {"version": 2},
            "1.weight": torch.ones(2, 2),
            "1.bias": torch.tensor([4.0, 6.0]),
        }
        load_full_state_dict(model, full)
        assert model[0].loaded == {"version": 2}
        assert torch.equal(model[1].bias, torch.tensor([2.0, 3.0]))


class TestNames:
    def test_load_with_wrong_keys_or_shapes_raises_error_of_load_state_dict(
        self, fake_group: int
    ) -> None:
        full = make_full_state()
        full["more"] = full.pop("head.bias")
        full["layer.0.bias"] = torch.zeros(8)
        with pytest.raises(RuntimeError) as torch_error:
            Model().load_state_dict(full)
        model = make_sharded_model()
        assert_raises_unchanged(model, full, RuntimeError, "Error")
        with pytest.raises(RuntimeError) as error:
            load_full_state_dict(model, full)
        expected = str(torch_error.value).replace(" Model", " FSDPModel")
        assert [line.strip() for line in str(error.value).splitlines()] == [
            line.strip() for line in expected.splitlines()
        ]

    def test_load_without_strict_returns_missing_and_unexpected_keys(self, fake_group: int) -> None:
        full = make_full_state()
        full["more"] = full.pop("head.bias")
        model = make_sharded_model()
        result = load_full_state_dict(model, full, strict=False)
        assert result.missing_keys == ["head.bias"] and result.unexpected_keys == ["more"]
        del full["more"]
        assert_loaded(model, full)

    def test_load_without_strict_raises_for_size_mismatch(self, fake_group: int) -> None:
        full = make_full_state() | {"head.bias": torch.zeros(3)}
        assert_raises_unchanged(
            make_sharded_model(), full, RuntimeError, "size mismatch for head.bias", strict=False
        )

    def test_load_of_tied_parameter_needs_only_one_of_its_names(self, fake_group: int) -> None:
        full = make_full_state()
        del full["head.weight"]
        model = make_sharded_model()
        assert load_full_state_dict(model, full).missing_keys == []
        assert_loaded(model, full)

    def test_load_ignores_wrapper_names_in_model_and_source(self, fake_group: int) -> None:
        model = Model()
        model.layer = checkpoint_wrapper(model.layer)
        fully_shard(model)
        full = make_full_state()
        load_full_state_dict(model, {f"_orig_mod.{name}": t for name, t in full.items()})
        assert_loaded(model, full)

    def test_load_with_rename_maps_and_drops_names(self, fake_group: int) -> None:
        full = make_full_state()
        source = {f"module.{name}": tensor for name, tensor in full.items()} | {"step": 3}
        model = make_sharded_model()
        load_full_state_dict(
            model, source, rename=lambda n: n[7:] if n.startswith("module.") else None
        )
        assert_loaded(model, full)

    def test_load_with_rename_to_duplicate_name_raises(self, fake_group: int) -> None:
        match = "both 'a' and 'b' map to 'x'"
        assert_raises_unchanged(
            make_sharded_model(), {"a": 1, "b": 2}, ValueError, match, rename=lambda name: "x"
        )

    def test_load_of_parameter_from_entry_that_is_not_a_tensor_raises(
        self, fake_group: int
    ) -> None:
        full: dict[str, Any] = make_full_state() | {"head.bias": 3}
        assert_raises_unchanged(
            make_sharded_model(),
            full,
            RuntimeError,
            "head.bias: a tensor in the model, none in the che",
        )


class TestSources:
    def test_load_from_safetensors_file_fills_own_shards(
        self, fake_group: int, tmp_path: Path
    ) -> None:
        for shared in (False, True):
            model = make_sharded_model()
            path = write(tmp_path / "model.safetensors", make_full_state())
            load_full_state_dict(model, path, shared_file=shared, bucket_bytes=64)
            assert_loaded(model, make_full_state())

    @pytest.mark.parametrize("rank", [1, 5])
    def test_load_from_shared_file_reads_it_on_every_rank(self, rank: int, tmp_path: Path) -> None:
        write(tmp_path / "model.safetensors", make_full_state())
        with fake_world(8, rank):
            model = make_sharded_model()
            load_full_state_dict(model, tmp_path, shared_file=True)
            assert_loaded(model, make_full_state())

    @pytest.mark.parametrize(
        ("source", "error", "match", "kwargs"),
        [
            (None, TypeError, "expects a state dict or a path on the source rank", {}),
            ([1], TypeError, "not list", {}),
            ("/nowhere/x.safetensors", FileNotFoundError, "nowhere", {}),
            ({}, ValueError, "bucket_bytes should be positive, not 0", {"bucket_bytes": 0}),
            ({}, TypeError, r"an integer, not 40.0 \(float\)", {"bucket_bytes": 40.0}),
            ({}, TypeError, "an integer, not inf", {"bucket_bytes": math.inf}),
            ({}, TypeError, "an integer, not '64'", {"bucket_bytes": "64"}),
            ({1: 2}, TypeError, "names should be strings, not 1", {}),
            ({"a": 2}, TypeError, "names should be strings, not 3", {"rename": lambda name: 3}),
            (
                {"head.bias": torch.ones(11, device="meta")},
                TypeError,
                "'head.bias' has no values",
                {},
            ),
            ({"head.bias": torch.ones(11).to_sparse()}, TypeError, "'head.bias' is sparse", {}),
            ({}, TypeError, "needs the path of a file", {"shared_file": True}),
        ],
    )
    def test_load_with_invalid_source_or_argument_raises(
        self, fake_group: int, source: Any, error: type[Exception], match: str, kwargs: Any
    ) -> None:
        assert_raises_unchanged(make_sharded_model(), source, error, match, **kwargs)

    def test_load_on_rank_outside_of_group_raises(self, fake_group: int) -> None:
        group = dist.new_group([1, 2])
        match = "load_full_state_dict: rank 0 is not in `group`; call"
        assert_raises_unchanged(make_sharded_model(), {}, ValueError, match, group=group)

    def test_load_with_buckets_of_numpy_size_fills_own_shards(self, fake_group: int) -> None:
        model, size = make_sharded_model(), pytest.importorskip("numpy").int64(64)
        load_full_state_dict(model, make_full_state(), bucket_bytes=size)
        assert_loaded(model, make_full_state())

    def test_load_of_extra_state_that_cannot_be_pickled_raises_and_changes_nothing(
        self, fake_group: int
    ) -> None:
        """Unexpected entries are not sent to other ranks, so they need not be picklable."""

        class LinearWithExtraState(nn.Linear):
            def get_extra_state(self) -> Any:
                return 1

            def set_extra_state(self, state: Any) -> None:
                self.loaded = state

        model = fully_shard(LinearWithExtraState(4, 4))
        full = {"weight": torch.ones(4, 4), "bias": torch.ones(4), "_extra_state": 3}
        match = "'_extra_state' cannot be sent to the other ranks, because its function cannot"
        before = [local_of(param).clone() for param in model.parameters()]
        with pytest.raises(TypeError, match=match):
            load_full_state_dict(model, full | {"_extra_state": lambda: 0})
        assert all(map(torch.equal, map(local_of, model.parameters()), before))
        assert not hasattr(model, "loaded")
        result = load_full_state_dict(model, full | {"args": lambda: 0}, strict=False)
        assert result.unexpected_keys == ["args"] and model.loaded == 3

    def test_load_without_process_group_accepts_entry_that_cannot_be_pickled(self) -> None:
        model = nn.Linear(1, 1)
        full = {"weight": torch.ones(1, 1), "bias": torch.ones(1), "args": lambda: 0}
        load_full_state_dict(model, full, strict=False)
        assert model.bias.item() == 1

    @pytest.mark.parametrize("default", ["dtype", "device"])
    def test_load_is_independent_of_default_dtype_and_device(
        self, single_group: int, tmp_path: Path, default: str
    ) -> None:
        from_dict, from_file = make_sharded_model(), make_sharded_model()
        full = make_full_state()
        path = write(tmp_path / "model.safetensors", full)
        torch.set_default_dtype(torch.float16 if default == "dtype" else torch.float32)
        try:
            with torch.device("meta" if default == "device" else "cpu"):
                load_full_state_dict(from_dict, full)
                load_full_state_dict(from_file, path, shared_file=True)
        finally:
            torch.set_default_dtype(torch.float32)
        for model in (from_dict, from_file):
            assert_loaded(model, make_full_state())

    def test_load_of_sharded_state_dict_raises(self, fake_group: int) -> None:
        model = make_sharded_model()
        assert_raises_unchanged(
            model,
            make_sharded_model().state_dict(),
            TypeError,
            "is a DTensor; .* takes full tensors",
        )

    def test_load_from_failing_source_raises_with_partly_loaded_in_message(
        self, fake_group: int
    ) -> None:
        class FailingSource(dict[str, Any]):
            reads = 0

            def __getitem__(self, name: str) -> Any:
                self.reads += 1
                if self.reads > len(self) + 3:  # the first len(self) reads only check the entries
                    raise OSError("disk error")
                return super().__getitem__(name)

        match = r"rank 0 failed while loading \(OSError: disk error\).*partly loaded"
        with pytest.raises(RuntimeError, match=match):
            load_full_state_dict(
                make_sharded_model(), FailingSource(make_full_state()), bucket_bytes=16
            )


class TestDevices:
    @pytest.mark.parametrize(
        ("supported", "destinations", "expected"),
        [
            ("cpu cuda", ["cuda cuda", "cuda"], "cuda"),
            ("cpu cuda", ["cuda", ""], "cuda"),  # a rank that loads nothing has no vote
            ("cpu cuda", ["cuda", "cpu cuda"], "cpu"),
            ("cpu cuda", ["", ""], "cpu"),
            ("cuda", ["cpu", "cuda"], "cuda"),
            ("cpu", ["cuda", "cuda"], "cpu"),
            ("cuda xpu", ["cuda", "xpu"], "cuda"),
        ],
    )
    def test_ranks_choose_one_type_of_device_that_the_group_supports(
        self, supported: str, destinations: list[str], expected: str
    ) -> None:
        ranks = LoadingRanks(0, None)
        ranks.device_types = set(supported.split())
        devices = [[torch.device(name) for name in names.split()] for names in destinations]
        votes: list[list[int]] = []

        def reduce_max(values: list[int]) -> list[int]:
            votes.append(values)
            return [max(column) for column in zip(*votes)]

        ranks.reduce_max = reduce_max  # type: ignore[method-assign]
        for own in devices:
            ranks.choose_device(own)  # collects the votes of all ranks
        assert {ranks.choose_device(own).type for own in devices} == {expected}

    def test_ranks_choose_the_device_of_their_own_destination(self) -> None:
        ranks = LoadingRanks(0, None)
        ranks.device_types = {"cpu", "cuda"}
        assert ranks.choose_device([torch.device("cuda:3")]) == torch.device("cuda:3")


class TestProgress:
    def test_load_with_progress_prints_bytes(self, fake_group: int, capsys: Any) -> None:
        pytest.importorskip("tqdm")
        load_full_state_dict(make_sharded_model(), make_full_state(), progress=True)
        assert re.search(r"loading: 100%.*\d+/\d+", capsys.readouterr().err)

    def test_load_without_terminal_prints_no_progress(self, fake_group: int, capsys: Any) -> None:
        load_full_state_dict(make_sharded_model(), make_full_state())
        assert capsys.readouterr().err == ""

    def test_load_without_tqdm_raises_only_with_progress(
        self, fake_group: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        load_full_state_dict(make_sharded_model(), make_full_state())
        with pytest.raises(ImportError):
            load_full_state_dict(make_sharded_model(), make_full_state(), progress=True)

    @pytest.mark.parametrize("progress", [None, True])
    @pytest.mark.parametrize("exists", [True, False])
    def test_load_without_usable_standard_error_prints_no_progress(
        self,
        fake_group: int,
        monkeypatch: pytest.MonkeyPatch,
        progress: bool | None,
        exists: bool,
    ) -> None:
        pytest.importorskip("tqdm")
        stream = io.StringIO()
        stream.close()
        monkeypatch.setattr(sys, "stderr", stream if exists else None)
        model = make_sharded_model()
        load_full_state_dict(model, make_full_state(), progress=progress)
        assert_loaded(model, make_full_state())

    @pytest.mark.parametrize("method", ["__init__", "update", "close"])
    def test_load_with_failing_progress_bar_loads(
        self, fake_group: int, monkeypatch: pytest.MonkeyPatch, method: str
    ) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("no space left on device")

        class Bar:
            def __init__(self, **kwargs: Any) -> None: ...
            def update(self, count: int) -> None: ...
            def close(self) -> None: ...

        monkeypatch.setattr(Bar, method, fail)
        monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=Bar))
        model = make_sharded_model()
        load_full_state_dict(model, make_full_state(), progress=True)
        assert_loaded(model, make_full_state())
