"""The records that the observer of ``compare`` writes, and its digests and names."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_c import names
from fsdp_c._tools import compare_collectives, compare_digests, compare_observer
from fsdp_c._tools.compare_digests import compute_digest, compute_squared_norm
from fsdp_c._tools.compare_observer import Clock, Observer, ScriptFinished

# ---- digests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_compare_digest_depends_on_every_element_dtype_and_shape(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).to(dtype)
    digests = {
        compute_digest(tensor),
        compute_digest(tensor.view(3, 4)),
        compute_digest(tensor.to(torch.float16)),
    }
    for i in range(12):
        other = tensor.clone()
        other[i] += 1
        digests.add(compute_digest(other))
    assert len(digests) == 15
    assert (
        compute_digest(tensor)
        == compute_digest(tensor.clone())
        == compute_digest(tensor.repeat_interleave(2)[::2])
    )


def test_compare_digest_distinguishes_zeros_none_and_empty_tensors() -> None:
    zero = torch.zeros(1)
    assert compute_digest(zero) != compute_digest(-zero)
    nan = torch.tensor([float("nan")])
    assert compute_digest(nan) == compute_digest(nan.clone())
    assert compute_digest(None) == "None" != compute_digest(torch.empty(0))
    assert compute_digest(torch.empty(0)) != compute_digest(torch.empty(0, 2))


def test_compare_digest_of_sparse_conjugated_and_scalar_tensors_contains_values() -> None:
    sparse = torch.eye(3).to_sparse()
    assert compute_digest(sparse) != compute_digest(2 * sparse)
    z = torch.tensor([1 + 2j])
    assert compute_digest(z.conj()) == compute_digest(z.conj().resolve_conj()) != compute_digest(z)
    assert compute_digest(torch.tensor(1.0)) != compute_digest(torch.tensor(2.0))


def test_compare_digest_leaves_storage_resizable() -> None:
    tensor = torch.ones(4)
    compute_digest(tensor)
    tensor.untyped_storage().resize_(0)


def test_compare_digest_and_norm_of_dtensor_are_those_of_its_shard(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    local = torch.full((2, 3), 2.0)
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    assert compute_digest(sharded) == compute_digest(local)
    assert compute_squared_norm(sharded) == 24.0


def test_compare_sums_squared_norm_in_float64() -> None:
    assert compute_squared_norm(torch.tensor([3e30, 4e30])) ** 0.5 == pytest.approx(5e30)
    assert compute_squared_norm(torch.tensor([3 + 4j])) == 25.0
    assert compute_squared_norm(None) == 0.0 == compute_squared_norm(torch.tensor([5]))


def test_compare_counts_replicas_along_replicated_dimensions(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    local = torch.ones(2, 2)
    for placements, count in (
        ((Replicate(), Shard(0)), 2),
        ((Shard(0), Replicate()), 4),
        ((Shard(0), Shard(1)), 1),
    ):
        tensor = DTensor.from_local(local, mesh, placements, run_check=False)
        assert compare_digests.count_replicas(tensor, 8) == count
    assert compare_digests.count_replicas(local, 8) == 8


def test_compare_takes_parameter_names_from_the_outermost_module() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = checkpoint_wrapper(nn.Linear(2, 2))
    outer = nn.Sequential(OrderedDict(first=nn.Sequential(inner), second=nn.Linear(2, 2)))
    found = compare_digests.find_parameter_names()
    assert found[id(inner.weight)] == "first.0.weight"
    assert found[id(outer.second.bias)] == "second.bias"


def test_compare_removes_the_wrapper_names_of_fsdp_c_names() -> None:
    assert compare_digests.WRAPPERS == names._WRAPPERS


# ---- the observer --------------------------------------------------------------------------------


class Recording:
    """An installed observer, and the records that it has written."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        self.observer = Observer(
            {"record": str(path), "steps": steps, "count_collectives": False, "world_size": 1}
        )
        self.observer.install()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def observe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Recording]]:
    """Installs observers for one test. A stopped observer does not end this process."""
    from torch.optim import optimizer

    monkeypatch.setattr(optimizer, "_global_optimizer_pre_hooks", OrderedDict())
    monkeypatch.setattr(optimizer, "_global_optimizer_post_hooks", OrderedDict())
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(compare_observer, "_exit_after_grace", lambda: None)
    recordings: list[Recording] = []

    def start(steps: int = 3) -> Recording:
        recordings.append(Recording(tmp_path / "records.jsonl", steps))
        return recordings[-1]

    yield start
    for recording in recordings:
        recording.observer.file.close()


def train_one_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_compare_records_contain_loss_gradients_and_parameters(
    observe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A run under torch alone does not import fsdp_c. Models of earlier tests may be alive here.
    monkeypatch.delitem(sys.modules, "fsdp_c._compat.patches", raising=False)
    recording = observe()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_one_step(model, optimizer)
    (record,) = recording.lines
    assert (record["step"], record["optimizer"]) == (1, 0)
    assert [entry[0] for entry in record["gradients"]] == ["weight", "bias"]
    assert record["gradients"][0][1:] == [compute_digest(model.weight.grad), 2.0, 1]
    assert record["parameters"] == [[n, compute_digest(p)] for n, p in model.named_parameters()]
    assert len(record["losses"]) == 1 and record["seconds"] > 0 and record["peak_memory"] > 2**20
    assert not record["uses_fsdp_c"]


def test_compare_raises_script_finished_at_the_last_step(observe: Any) -> None:
    recording = observe(2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_one_step(model, optimizer)
    with pytest.raises(ScriptFinished) as end:
        train_one_step(model, optimizer)
    assert end.value.code == 0 and isinstance(end.value, SystemExit)
    with pytest.raises(ScriptFinished):  # a script that catches the first exception
        train_one_step(model, optimizer)
    assert [line.get("step") for line in recording.lines] == [1, 2, None]
    assert recording.lines[-1] == {"stopped": True}


def test_compare_records_losses_of_all_microbatches_in_order(observe: Any) -> None:
    recording = observe()
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, 2.0):
        (weight * factor).sum().backward()
    torch.autograd.backward([(weight * 3.0).sum(), weight * torch.ones(2)], [None, torch.ones(2)])
    optimizer.step()
    assert [loss[0] for loss in recording.lines[0]["losses"]] == [1.0, 2.0, 3.0]


def test_compare_records_losses_of_a_generator_and_passes_them_to_backward(observe: Any) -> None:
    recording = observe()
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    torch.autograd.backward((weight * factor).sum() for factor in (1.0, 2.0))
    assert weight.grad is not None and weight.grad.item() == 3.0
    optimizer.step()
    assert [loss[0] for loss in recording.lines[0]["losses"]] == [1.0, 2.0]


def test_compare_records_step_after_a_step_that_raised(observe: Any) -> None:
    recording = observe()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def fail() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    assert recording.lines == []
    train_one_step(model, optimizer)
    assert [line["step"] for line in recording.lines] == [1]


def test_compare_gives_an_optimizer_the_number_of_a_freed_one(observe: Any) -> None:
    recording = observe(9)
    models = [nn.Linear(2, 1) for _ in range(3)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.5) for model in models[:2])
    train_one_step(models[0], first)
    train_one_step(models[1], second)
    del first
    gc.collect()
    third = torch.optim.SGD(models[2].parameters(), lr=0.5)
    train_one_step(models[2], third)
    assert [line["optimizer"] for line in recording.lines] == [0, 1, 0]


@pytest.mark.parametrize("by_keyword", [True, False])
def test_compare_records_gradients_that_a_closure_makes(observe: Any, by_keyword: bool) -> None:
    recording = observe()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    (record,) = recording.lines
    assert record["gradients"][0][1] == compute_digest(model.weight.grad) != "None"
    assert record["losses"][0][0] == float(loss.detach())


def test_compare_forwards_positional_argument_of_step_that_is_no_closure(observe: Any) -> None:
    class Scaled(torch.optim.SGD):
        def step(self, scale: Any = None) -> Any:  # type: ignore[override]
            return scale

    recording = observe()
    model = nn.Linear(2, 1)
    optimizer = Scaled(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer.step(0.5) == 0.5
    (record,) = recording.lines
    assert record["gradients"][0][1] == compute_digest(model.weight.grad)


def test_compare_counts_step_that_calls_the_step_of_its_base_class_once(observe: Any) -> None:
    class Derived(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    recording = observe()
    model = nn.Linear(2, 1)
    optimizer = Derived(model.parameters(), lr=0.5)
    torch.optim.SGD(nn.Linear(1, 1).parameters())  # its class is hooked, too
    for _ in range(2):
        train_one_step(model, optimizer)
    assert [record["step"] for record in recording.lines] == [1, 2]


def test_compared_script_ends_after_all_optimizers_have_made_the_last_step(observe: Any) -> None:
    recording = observe(2)
    models = [nn.Linear(2, 1) for _ in range(2)]
    unused, second, first = (
        torch.optim.SGD(model.parameters(), lr=0.5) for model in [*models, models[0]]
    )
    with pytest.raises(ScriptFinished):
        for _ in range(5):
            train_one_step(models[0], first)
            train_one_step(models[1], second)
    assert unused not in recording.observer.numbers
    steps = [(r["step"], r["optimizer"]) for r in recording.lines[:-1]]
    assert steps == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_optimizer_that_stops_stepping_does_not_delay_the_end_of_a_compared_script(
    observe: Any,
) -> None:
    recording = observe(2)
    models = [nn.Linear(2, 1) for _ in range(2)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.5) for model in models)
    train_one_step(models[0], first)
    train_one_step(models[1], second)
    with pytest.raises(ScriptFinished):
        for _ in range(2):
            train_one_step(models[0], first)
    assert [r["step"] for r in recording.lines[:-1]] == [1, 1, 2]


def test_compare_does_not_count_step_that_the_gradient_scaler_skips(observe: Any) -> None:
    recording = observe()
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    (record,) = recording.lines
    assert [loss[0] for loss in record["losses"]] == [float("inf"), 2.0]
    assert record["gradients"][0][2] == 1.0  # unscaled


@pytest.mark.parametrize("compile_step", [False, True])
def test_compare_records_fused_and_compiled_steps(observe: Any, compile_step: bool) -> None:
    recording = observe(10)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=not compile_step)

    def step() -> None:
        optimizer.step()

    run = torch.compile(step, backend="eager") if compile_step else step
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        run()
        optimizer.zero_grad()
    assert [record["step"] for record in recording.lines] == [1, 2, 3]
    assert recording.lines[-1]["parameters"][0][1] == compute_digest(model.weight)


def test_compare_does_not_record_steps_of_a_forked_process(observe: Any) -> None:
    recording = observe()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    recording.observer.pid = os.getpid() + 1
    train_one_step(model, optimizer)
    assert recording.lines == []


def test_compare_observer_does_not_consume_random_numbers(observe: Any) -> None:
    observe()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = torch.get_rng_state(), random.getstate()
    train_one_step(model, optimizer)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]


def test_compare_observer_does_not_keep_optimizers_and_models_alive(observe: Any) -> None:
    observe()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_one_step(model, optimizer)
    references = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_compare_clock_excludes_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(compare_observer.time, "perf_counter", lambda: now[0])
    clock = Clock(lambda: None)
    now[0] = 2.0
    with clock.pause():
        now[0] = 10.0
    now[0] = 11.0
    with clock.pause():
        assert clock.read_seconds() == 3.0
        now[0] = 20.0
    now[0] = 24.0
    with clock.pause():
        assert clock.read_seconds() == 4.0


def test_compare_seeds_python_numpy_and_torch() -> None:
    import numpy as np

    def draw() -> tuple[Any, ...]:
        compare_observer.seed_everything(7)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw() == draw()


def make_event(name: str, shapes: list[Any], dtypes: list[str]) -> Any:
    return types.SimpleNamespace(
        name=lambda: name,
        structured_input_shapes=lambda: shapes,
        dtypes=lambda: dtypes,
        shapes=lambda: shapes,
    )


@pytest.mark.parametrize(
    ("event", "size"),
    [
        (make_event("c10d::_allgather_base_", [[20], [10], []], ["float", "float", ""]), 80),
        (make_event("c10d::_reduce_scatter_base_", [[1], [2, 3]], ["c10::BFloat16"] * 2), 12),
        (make_event("c10d::allreduce_", [[[10]], []], ["TensorList", ""]), 20),
        (make_event("c10d::allreduce_", [[[7]], []], ["TensorList", ""]), 28),
        (make_event("c10d::broadcast_", [[[]], []], ["TensorList", ""]), 4),
        (make_event("c10d::barrier", [[1]], ["unsigned char"]), 0),
    ],
)
def test_compare_counts_bytes_of_the_largest_tensor_of_a_collective(event: Any, size: int) -> None:
    assert compare_collectives.count_bytes(event, {(10,): "c10::Half"}) == size


def test_compare_observer_does_not_import_fsdp_c() -> None:
    """The files that a run under torch alone loads import only torch and the standard library."""
    from test_package_layers import imported_files

    for module in (compare_observer, compare_collectives, compare_digests):
        path = Path(module.__file__ or "")
        tree_imports = imported_files(path.read_text(), path.parent)
        assert tree_imports <= {"install.py"}, path.name  # imported under fsdp_c only
