"""Log messages about configurations that silently train nothing or waste memory.

Each message is logged once, with the name of the module, and is never raised as a Python warning.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import releases
import torch
import torch.distributed as dist
import torch.nn as nn
from fake_world import fake_world
from test_explain import sharded, step
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from toy_models import MLPBlock, MLPModel

import fsdp_c
from fsdp_c import fully_shard
from fsdp_c._runtime import lint, lint_params, plan_hash

LOGGER = "torch.distributed.fsdp.fully_shard"
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
TORCH_FUNCTIONS = {"fully_shard": torch.distributed.fsdp.fully_shard, "replicate": torch_replicate}


@pytest.fixture
def logged(
    fake_group: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """Yields a function that returns the warnings logged so far. Python warnings raise."""
    monkeypatch.setattr(lint, "_logged", set())
    # Models of other tests may be alive.
    monkeypatch.setattr(lint_params, "_replaced_registrations", {})

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    with caplog.at_level(logging.WARNING, LOGGER), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield lines


Logged = Callable[[], list[str]]


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    step(model)
    optimizer.step()
    optimizer.zero_grad()


def test_model_without_mistakes_logs_nothing(logged: Logged) -> None:
    model = sharded(mp_policy=MIXED)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        train(model, optimizer)
    model.load_state_dict(model.state_dict(), assign=True)
    train(model, torch.optim.SGD(model.parameters()))
    assert logged() == []


def test_unknown_transport_logs_valid_names(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_C_TRANSPORT", "gloo")
    step(sharded())
    assert logged() == []
    monkeypatch.setenv("FSDP_C_TRANSPORT", "sockets")
    step(sharded())
    (line,) = logged()
    assert "FSDP_C_TRANSPORT=sockets" in line and '"direct"' in line and '"gloo"' in line


@pytest.mark.parametrize(
    ("value", "mode"),
    [("off ", "off"), (" Hash", "hash"), ("", "off"), ("1", "on"), ("disabled", "on")],
)
def test_guard_mode_of_the_environment_is_read(
    value: str, mode: str, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_hash, "_mode", [])
    monkeypatch.setenv("FSDP_C_GUARD", value)
    assert plan_hash.get_mode() == mode
    step(sharded())
    assert logged() == (
        ['fsdp_c: FSDP_C_GUARD=disabled has no effect: the values are "on", "off" and "hash"']
        if value == "disabled"
        else []
    )


# ---- backwards that raise ------------------------------------------------------------------------


def test_forward_after_failed_backward_logs_warning(logged: Logged) -> None:
    model = sharded()
    model.embed.register_full_backward_pre_hook(lambda *unused: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 8)).sum().backward()
    (line,) = logged()
    assert "the backward before this forward of FSDPMLPModel did not finish" in line
    assert "zero_grad()" in line


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forward_during_backward_logs_nothing(logged: Logged, reentrant: bool) -> None:
    model = sharded()
    step(model)
    x = torch.ones(2, 8, requires_grad=True)
    for _ in range(2):
        y = x
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=reentrant)
        checkpoint(model, y, use_reentrant=reentrant).sum().backward()
        assert model.head.weight.grad is not None
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    model(x)
    loss.backward()
    model(x)
    assert logged() == []


def test_nested_backward_in_hook_logs_nothing(logged: Logged) -> None:
    model, other_model = sharded(), sharded()

    def run_backwards(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            model(torch.ones(2, 8)).sum().backward()
            other_model(torch.ones(2, 8)).sum().backward()

    for _ in range(2):
        output = model(torch.ones(2, 8))
        output.register_hook(run_backwards)
        output.sum().backward()
        step(model)
    assert logged() == []


def test_forward_after_failed_final_callback_logs_warning_and_resets_state(
    logged: Logged,
) -> None:
    model = sharded()
    with pytest.MonkeyPatch.context() as patch:
        group = releases.groups_of(model._get_fsdp_state())[0]
        patch.setattr(type(group), "finalize_backward", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
    step(model)
    (line,) = logged()
    assert "did not finish" in line
    assert model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued is False


# ---- optimizers ----------------------------------------------------------------------------------


def test_optimizer_created_before_sharding_logs_warning(logged: Logged) -> None:
    model = MLPModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model)
    for _ in range(2):
        train(model, optimizer)
    (line,) = logged()
    assert "SGD holds 15 of 15 parameters as they were before sharding ('embed.weight', " in line
    assert line.endswith("Build it after the last fully_shard")


def test_optimizer_with_some_unsharded_parameters_logs_their_names(logged: Logged) -> None:
    model = MLPModel()
    before = model.head.weight
    sharded(model)
    train(model, torch.optim.SGD([before, model.embed.weight], lr=0.1))
    assert "SGD holds 1 of 2 parameters as they were before sharding ('head.weight')" in logged()[0]


def test_optimizer_with_parameters_replaced_by_sharded_ones_logs_nothing(logged: Logged) -> None:
    """Hugging Face's accelerate replaces the parameters of an optimizer's groups."""
    model = MLPModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = list(sharded(model).parameters())
    train(model, optimizer)
    assert logged() == []


def test_optimizer_after_failed_fully_shard_logs_nothing(logged: Logged) -> None:
    model = MLPModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar"):
        fully_shard(model)
    train(model, optimizer)
    assert logged() == []


def test_optimizer_of_parameter_that_three_sharded_models_share_logs_nothing(
    logged: Logged,
) -> None:
    models: list[Any] = [nn.Sequential(nn.Linear(8, 8)) for _ in range(3)]
    for model in models:
        model[0].weight = models[0][0].weight
    for model in models:
        fully_shard(model)
    train(models[1], torch.optim.SGD(models[1].parameters(), lr=0.1))
    assert logged() == []


def test_optimizer_of_copied_parameter_after_failed_fully_shard_logs_nothing(
    logged: Logged,
) -> None:
    model: Any = nn.Linear(8, 8)
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid"):
        fully_shard(model, shard_placement_fn=lambda param: Shard(1))
    fully_shard(model)
    step(model)
    copied = copy.deepcopy(model.weight)
    copied.grad = model.weight.grad
    torch.optim.SGD([copied], lr=0.1).step()
    assert logged() == []


def test_optimizer_created_before_replicate_logs_warning(logged: Logged) -> None:
    model = MLPModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp_c.replicate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about views
        train(model, optimizer)
    assert "SGD holds 15 of 15 parameters" in logged()[0]


# ---- parameters ----------------------------------------------------------------------------------


def test_parameter_replaced_after_first_step_logs_warning(logged: Logged) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    for _ in range(2):
        train(model, optimizer)
    (line,) = logged()
    assert line.startswith("fsdp_c: 'head.weight' was replaced after sharding")


def test_parameter_replaced_outside_model_logs_nothing(logged: Logged) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(8, 8)
    other.weight = nn.Parameter(torch.zeros(8, 8))
    model.head.extra = nn.Parameter(torch.zeros(8))
    train(model, optimizer)
    assert logged() == []


class LinearComparedBySize(nn.Linear):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, nn.Linear) and self.in_features == other.in_features

    def __hash__(self) -> int:
        return self.in_features


def test_parameter_replaced_in_module_that_compares_equal_logs_nothing(logged: Logged) -> None:
    layer: Any = fully_shard(LinearComparedBySize(8, 8))
    other = LinearComparedBySize(8, 8)
    other.weight = nn.Parameter(torch.zeros(8, 8))
    train(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert logged() == []


def test_classes_without_hash_log_nothing(logged: Logged) -> None:
    class UnhashableModule(nn.Module):
        __hash__ = None  # type: ignore[assignment]

    class UnhashableSGD(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

    UnhashableModule().weight = nn.Parameter(torch.zeros(8))
    model = sharded()
    train(model, UnhashableSGD(model.parameters(), lr=0.1))
    assert logged() == []


def test_failing_checks_of_parameters_do_not_raise(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, called = sharded(), set()

    def make_failing(name: str) -> Callable[..., None]:
        def fail(*unused: Any) -> None:
            called.add(name)
            raise ZeroDivisionError

        return fail

    checks = ("_check_optimizer", "iterate_registrations")
    for name in checks:
        monkeypatch.setattr(lint_params, name, make_failing(name))
    model.head.weight = nn.Parameter(model.head.weight.detach())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert called == set(checks)


# ---- units ---------------------------------------------------------------------------------------


def test_blocks_left_in_root_unit_log_warning(logged: Logged) -> None:
    model = fully_shard(MLPModel())
    step(model)  # type: ignore[arg-type]
    (line,) = logged()
    assert line.startswith("fsdp_c: 'blocks.0', 'blocks.1', 'blocks.2' are repeated layers but no")


def test_mixed_precision_policy_on_blocks_only_logs_warning(logged: Logged) -> None:
    class FloatOutputBlock(MLPBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float()

    model = MLPModel()
    model.blocks = nn.ModuleList(FloatOutputBlock(8, 16) for _ in range(3))
    for block in model.blocks:
        fully_shard(block, mp_policy=MIXED)
    step(fully_shard(model))  # type: ignore[arg-type]
    (line,) = logged()
    assert "the blocks compute in bfloat16, but 'embed.weight', 'embed.bias', 'head.weight'" in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_policy_on_blocks_with_the_dtype_of_the_root_logs_nothing(
    dtype: torch.dtype, logged: Logged
) -> None:
    model = MLPModel().to(dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    fully_shard(model)
    model(torch.ones(2, 8, dtype=dtype))
    assert logged() == []


def test_unit_much_larger_than_median_logs_warning(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_with_large_head() -> Any:
        model = MLPModel()
        model.head = nn.Linear(8, 4096)
        return sharded(model)

    step(model_with_large_head())
    assert logged() == []  # the unit is smaller than lint._LARGE_BYTES
    monkeypatch.setattr(lint, "_LARGE_BYTES", 64 * 2**10)
    step(model_with_large_head())
    (line,) = logged()
    size = 4 * (72 + 8 * 4096 + 4096)
    assert line.startswith(
        f"fsdp_c: the unit '(root)' gathers 0 MiB, {size / 1120:.1f} times what the median unit "
        "does, mostly 'head.weight', 'head.bias'"
    )


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_median_of_unit_sizes_ignores_units_without_elements(
    fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lint, "_LARGE_BYTES", 0)
    model = nn.Sequential(*(nn.Linear(8, size) for size in (0, 0, 0, 0, 8, 8, 8, 80)))
    for layer in model:
        fully_shard(layer)
    (warning,) = fsdp_c.explain(fully_shard(model)).warnings  # type: ignore[arg-type]
    assert "the unit '7' gathers 0 MiB, 10.0 times what the median unit does" in warning


def test_ddp_inside_sharded_model_logs_warning(logged: Logged) -> None:
    model = MLPModel()
    model.head = DistributedDataParallel(model.head)  # type: ignore[assignment]
    step(sharded(model))
    assert logged()[0].startswith("fsdp_c: 'head' is DistributedDataParallel around ")


@pytest.mark.parametrize("name", ["fully_shard", "replicate"])
def test_ddp_around_sharded_model_raises_as_in_torch_and_logs_nothing(
    logged: Logged, name: str
) -> None:
    messages = []
    for shard in (TORCH_FUNCTIONS[name], getattr(fsdp_c, name)):
        model = MLPModel()
        model._ddp_params_and_buffers_to_ignore = ["a"]  # type: ignore[assignment]
        shard(model)
        assert model._ddp_params_and_buffers_to_ignore == ["a"]
        with pytest.raises((RuntimeError, NotImplementedError)) as caught:
            DistributedDataParallel(model)
        messages.append(str(caught.value))
    assert messages[1] == messages[0]
    assert logged() == []


def test_ddp_of_ignored_parameters_logs_nothing(logged: Logged) -> None:
    model = MLPModel()
    model.head = DistributedDataParallel(model.head)  # type: ignore[assignment]
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params=set(model.head.parameters()))
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert logged() == []


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"offload_policy": True}, "offload_policy=True offloads nothing"),
        ({"mp_policy": MixedPrecisionPolicy}, "the class MixedPrecisionPolicy: pass an instance"),
        ({"ignored_params": {"head.weight"}}, "ignored_params contains a str, which"),
        ({"ignored_params": {nn.Linear(1, 1)}}, "ignored_params contains a Linear, which"),
    ],
)
def test_argument_of_fully_shard_without_effect_logs_warning(
    logged: Logged, arguments: dict[str, Any], match: str
) -> None:
    if "mp_policy" in arguments and releases.has("2.15"):
        with pytest.raises(TypeError):  # as in torch
            fully_shard(nn.Linear(8, 8), **arguments)
        return
    fully_shard(nn.Linear(8, 8), **arguments)
    (line,) = logged()
    assert match in line
    fully_shard(nn.Linear(8, 8), offload_policy=None, ignored_params=set())  # type: ignore[call-overload]
    assert len(logged()) == 1


# ---- logging -------------------------------------------------------------------------------------


def test_warning_about_two_models_of_one_class_is_logged_once(logged: Logged) -> None:
    for _ in range(2):
        step(fully_shard(MLPModel()))  # type: ignore[arg-type]
    assert len(logged()) == 1


def test_warning_is_not_logged_on_rank_3(logged: Logged) -> None:
    dist.destroy_process_group()
    with fake_world(8, rank=3):
        step(fully_shard(MLPModel()))  # type: ignore[arg-type]
    assert logged() == []


def test_failing_configuration_check_does_not_stop_training(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_os_error(*args: Any) -> None:
        raise OSError("the check fails")

    monkeypatch.setattr(lint, "check_blocks_in_root", raise_os_error)
    monkeypatch.setattr(lint, "check_data_parallel", lambda root, groups: ["a later warning"])
    step(fully_shard(MLPModel()))  # type: ignore[arg-type]
    assert logged() == ["fsdp_c: a later warning"]


def test_checked_models_and_optimizers_are_freed(logged: Logged) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    references = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.head)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_parameters_after_sharding_have_no_weak_references(fake_group: int) -> None:
    """torch.utils.swap_tensors rejects tensors with weak references; module.to() calls it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    originals = list(model.parameters())
    fully_shard(model)
    model[0].weight = nn.Parameter(torch.ones(8, 8))
    params = [*originals, *model.parameters()]
    assert [weakref.getweakrefcount(param) for param in params] == [0] * len(params)
