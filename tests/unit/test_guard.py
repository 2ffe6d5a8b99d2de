"""Patches and overrides of FSDP2's internals take effect under fsdp_c as under torch.

Most tests apply one patch to a model under torch's FSDP2 and under fsdp_c, record the calls of the
patch, and compare the records. The patches are those of torch's own tests.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import releases
import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
import torch.testing._internal.common_fsdp as common
from implementations import (
    IMPLEMENTATIONS,
    groups_of,
    list_python_calls,
    record_calls,
    run_both,
)
from linear_stack import batch, model_of, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
    FSDPCommContext,
    FSDPParamGroup,
    RegisterPostBackwardFunction,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import fsdp_c
from fsdp_c import _C

MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)
guard = importlib.import_module("fsdp_c._compat.guard")


def overrides_of(model: Any) -> int:
    """Returns the bits of all overrides that the C core has detected for the model."""
    found = 0
    for module in model.modules():
        state = module._get_fsdp_state()
        for item in (state, *state._fsdp_param_groups):
            found |= _C._testing.overrides(item)
    return found


@pytest.fixture(autouse=True)
def world(fake_group: int) -> int:
    return fake_group


# ---- the patch_* helpers of torch.testing._internal.common_fsdp ----------------------------------


HELPERS: dict[str, Callable[[], Any]] = {
    "patch_all_gather": lambda: getattr(dist, releases.ALL_GATHER_FUNCTION),
    "patch_foreach_all_gather": lambda: param_group.foreach_all_gather,
    "patch_foreach_reduce": lambda: param_group.foreach_reduce,
    "patch_reduce_scatter": lambda: getattr(dist, releases.REDUCE_SCATTER_FUNCTION),
    "patch_all_reduce": lambda: dist.all_reduce,
    "patch_unshard": lambda: FSDPParamGroup.unshard,
    "patch_reshard": lambda: FSDPParamGroup.reshard,
    "patch_post_backward": lambda: FSDPParamGroup.post_backward,
    "patch_register_post_backward_hook_backward": lambda: RegisterPostBackwardFunction.backward,
}


def test_helpers_table_lists_all_torch_patch_functions() -> None:
    assert {name for name in vars(common) if name.startswith("patch_")} == set(HELPERS)


@pytest.mark.parametrize("name", HELPERS)
@pytest.mark.parametrize("when", ["before forward", "between forward and backward"])
def test_patch_helper_of_torch_records_the_same_calls_as_under_torch(name: str, when: str) -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = model_of(shard, mesh=mesh, mp_policy=MIXED)
        step(model)
        events: list[Any] = []
        patch = getattr(common, name)(record_calls(events, name, HELPERS[name]()))
        if when == "before forward":
            with patch:
                step(model)
        else:
            loss = model(batch()).sum()
            with patch:
                loss.backward()
        noted = len(events)
        step(model)
        assert len(events) == noted, "the patch outlives its context"
        return events

    torch_result, result = run_both(scenario)
    assert result == torch_result
    assert len(result) >= 3


def test_all_patch_helpers_together_record_calls_in_torchs_order() -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard, reshard_after_forward=True)
        step(model)
        events: list[Any] = []
        with contextlib.ExitStack() as patches:
            for name, original in HELPERS.items():
                helper = getattr(common, name)
                patches.enter_context(helper(record_calls(events, name, original())))
            step(model)
        return events

    torch_result, result = run_both(scenario)
    assert result == torch_result
    assert {name for name, *_ in result} == set(HELPERS) - {"patch_all_reduce"}


@pytest.mark.torch("2.13")  # older fake groups leave gathered memory unset
def test_gradients_through_patched_functions_match_unpatched_ones() -> None:
    def gradients(shard: Callable[..., Any], patched: bool) -> list[torch.Tensor]:
        model = model_of(shard, mp_policy=MIXED)
        with contextlib.ExitStack() as patches:
            for name, original in HELPERS.items() if patched else ():
                helper = getattr(common, name)
                patches.enter_context(helper(record_calls([], name, original())))
            for _ in range(2):
                step(model)
        return [parameter.grad._local_tensor for parameter in model.parameters()]

    plain = gradients(fsdp_c.fully_shard, False)
    assert all(map(torch.equal, gradients(fsdp_c.fully_shard, True), plain))
    assert all(map(torch.equal, gradients(IMPLEMENTATIONS["torch"], True), plain))


# ---- methods, on the class and on single objects -------------------------------------------------

GROUP_METHODS = [*_C.GROUP_METHODS, "lazy_init", "_init_mp_dtypes", "_with_fqn"]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets ``owner.name = value`` in the context, and restores it as torch's tests do."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@pytest.mark.parametrize("name", GROUP_METHODS)
def test_group_method_patched_on_the_class_is_called_as_in_torch(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard)
        events: list[Any] = []
        original = getattr(FSDPParamGroup, name)
        with replaced(FSDPParamGroup, name, record_calls(events, name, original)):
            step(model)
            step(model)
        assert getattr(FSDPParamGroup, name) is original
        return events

    torch_result, result = run_both(scenario)
    if name == "_with_fqn":  # torch calls it for its profiler ranges; fsdp_c names them in C
        assert result == [] and torch_result
        return
    assert result == torch_result
    assert result


@pytest.mark.parametrize("name", _C.GROUP_METHODS)
def test_group_method_set_on_one_group_is_called_as_in_torch(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard)
        step(model)
        events: list[Any] = []
        group = groups_of(model)[1]
        setattr(group, name, record_calls(events, name, getattr(group, name)))
        step(model)
        noted = len(events)
        delattr(group, name)
        step(model)
        assert len(events) == noted > 0
        return [event for event, *_ in events]

    torch_result, result = run_both(scenario)
    assert result == torch_result


STATE_METHODS: list[Any] = [
    name if hasattr(FSDPState, name) else pytest.param(name, marks=pytest.mark.torch("2.13"))
    for name in (*_C.STATE_METHODS, "_pre_forward", "_post_forward", "_lazy_init", "_init_fqns")
]


@pytest.mark.parametrize("name", STATE_METHODS)
def test_state_method_patched_on_the_class_is_called_as_in_torch(name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        events: list[Any] = []
        original = getattr(FSDPState, name)
        with replaced(FSDPState, name, record_calls(events, name, original)):
            model = model_of(shard, mp_policy=MIXED)
            step(model)
            step(model)
        return events

    torch_result, result = run_both(scenario)
    if name == "_lazy_init":  # torch calls it in every forward, fsdp_c once
        torch_result = torch_result[: len(result)]
    assert result == torch_result
    assert result


def test_patched_reshard_without_effect_keeps_parameters_unsharded() -> None:
    def scenario(shard: Callable[..., Any]) -> list[bool]:
        model = model_of(shard, reshard_after_forward=True)
        step(model)
        with replaced(FSDPParamGroup, "reshard", lambda group: None):
            loss = model(batch()).sum()
        states = [group.is_unsharded for group in groups_of(model)]
        loss.backward()
        return states

    torch_result, result = run_both(scenario)
    assert result == torch_result == [True, True, True]


def test_patched_backward_of_the_autograd_node_changes_gradients() -> None:
    def scenario(shard: Callable[..., Any]) -> torch.Tensor:
        model = model_of(shard)
        x = batch()
        loss = model(x).sum()
        original = RegisterPostBackwardFunction.backward

        def doubled(ctx: Any, *grads: torch.Tensor) -> Any:
            return tuple(g if g is None else 2 * g for g in original(ctx, *grads))

        with common.patch_register_post_backward_hook_backward(doubled):
            loss.backward()
        assert x.grad is not None
        return x.grad

    torch_result, result = run_both(scenario)
    assert torch.equal(result, torch_result)


@pytest.mark.parametrize(("extra", "raises"), [((), False), ((None,), False), ((1.0,), True)])
def test_further_results_of_patched_node_backward_may_only_be_none(
    extra: tuple[Any, ...], raises: bool
) -> None:
    def scenario(shard: Callable[..., Any]) -> bool:
        model = model_of(shard)
        loss = model(batch()).sum()
        original = RegisterPostBackwardFunction.backward

        def longer(ctx: Any, *grads: torch.Tensor) -> Any:
            return (*original(ctx, *grads), *extra)

        with common.patch_register_post_backward_hook_backward(longer):
            try:
                loss.backward()
            except RuntimeError as error:
                assert "number of gradients" in str(error) or "one gradient for each" in str(error)
                return True
        return False

    assert run_both(scenario) == (raises, raises)


@pytest.mark.torch("2.13")  # older fake groups leave gathered memory unset
def test_exception_in_a_patch_propagates_and_training_recovers_after_reset() -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("from the patch")

    model = model_of(fsdp_c.fully_shard)
    step(model)
    reference = [parameter.grad._local_tensor.clone() for parameter in model.parameters()]
    for helper in (
        common.patch_unshard,
        common.patch_foreach_all_gather,
        common.patch_foreach_reduce,
    ):
        with helper(failing), pytest.raises(ArithmeticError, match="from the patch"):
            step(model)
        model.reset_iter_state()
        model.zero_grad()
        step(model)
        found = [parameter.grad._local_tensor for parameter in model.parameters()]
        assert all(map(torch.equal, found, reference))


def test_torchs_group_methods_called_on_fsdp_c_groups_take_effect() -> None:
    model = model_of(fsdp_c.fully_shard)
    step(model)
    group = groups_of(model)[0]
    FSDPParamGroup.unshard(group)
    assert group._all_gather_result is not None and group.is_sharded
    FSDPParamGroup.wait_for_unshard(group)
    assert group.is_unsharded
    FSDPParamGroup._to_sharded(group)
    assert group.is_sharded
    assert FSDPParamGroup._with_fqn(group, "x") == "x (0)"


# ---- functions of torch's modules ----------------------------------------------------------------

FUNCTIONS = [
    (param_group, "foreach_all_gather_copy_out"),
    (collectives, "foreach_reduce_scatter_copy_in"),
    (collectives, "_get_param_all_gather_inputs"),
    (collectives, "_get_gradient_divide_factors"),
    (collectives, "_div_if_needed"),
]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS, ids=lambda value: str(value))
def test_patched_collective_function_is_called_as_in_torch(module: Any, name: str) -> None:
    def scenario(shard: Callable[..., Any]) -> int:
        model = model_of(shard, mp_policy=MIXED)
        events: list[Any] = []
        with replaced(module, name, record_calls(events, name, getattr(module, name))):
            step(model)
        return len(events)

    torch_result, result = run_both(scenario)
    assert result == torch_result > 0


class CountingNode(RegisterPostBackwardFunction):
    """A subclass that replaces torch's class."""

    calls: list[str] = []

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        CountingNode.calls.append("backward")
        return RegisterPostBackwardFunction.backward(ctx, *grads)


def test_replaced_autograd_node_class_is_used() -> None:
    def scenario(shard: Callable[..., Any]) -> list[str]:
        model = model_of(shard)
        CountingNode.calls.clear()
        with replaced(param_group, "RegisterPostBackwardFunction", CountingNode):
            step(model)
        return list(CountingNode.calls)

    torch_result, result = run_both(scenario)
    assert result == torch_result == ["backward"] * 3


# ---- communication context and log ---------------------------------------------------------------


def test_patched_comm_context_lazy_init_is_called_as_in_torch() -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        events: list[Any] = []
        original = FSDPCommContext.lazy_init
        with replaced(FSDPCommContext, "lazy_init", record_calls(events, "lazy_init", original)):
            step(model_of(shard))
        return events

    torch_result, result = run_both(scenario)
    assert len(torch_result) == 1
    assert result == torch_result


def test_debug_log_lines_match_torch(caplog: pytest.LogCaptureFixture) -> None:
    def scenario(shard: Callable[..., Any]) -> list[str]:
        model = model_of(shard)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "torch.distributed.fsdp.fully_shard"):
            step(model)
        lines = [record.getMessage() for record in caplog.records]
        step(model)
        assert len(caplog.records) == len(lines)
        return lines

    torch_result, result = run_both(scenario)
    assert result == torch_result
    assert "FSDP::post_backward (2)" in result


# ---- detection of patches ------------------------------------------------------------------------


def test_unpatched_step_calls_no_python_function() -> None:
    model = model_of(fsdp_c.fully_shard)
    x = batch()
    for _ in range(3):
        model(x).sum().backward()
    assert overrides_of(model) == 0

    def run_step() -> None:
        model(x).sum().backward()

    assert list_python_calls(run_step) == []
    with common.patch_unshard(record_calls([], "", FSDPParamGroup.unshard)):
        called = list_python_calls(run_step)
    assert called, "the profiler recorded no call, so the empty list before proves nothing"


def test_override_bits_follow_patches_of_each_group_method() -> None:
    model = model_of(fsdp_c.fully_shard)
    step(model)
    group = groups_of(model)[0]
    assert _C._testing.overrides(group) == 0
    found = set()
    for name in _C.GROUP_METHODS:
        with replaced(FSDPParamGroup, name, lambda *a: None):
            bits = _C._testing.overrides(group)
        found.add(bits)
        assert _C._testing.overrides(group) == 0
        setattr(group, name, lambda *a: None)
        assert _C._testing.overrides(group) == bits
        delattr(group, name)
        assert _C._testing.overrides(group) == 0
    assert len(found) == len(_C.GROUP_METHODS)


def test_each_patch_in_a_loop_of_specialized_bytecode_is_an_override() -> None:
    """CPython specializes the instructions of a loop. These write to dicts directly."""
    group = groups_of(model_of(fsdp_c.fully_shard))[0]
    attributes, method, function = vars(group), group.unshard, param_group.foreach_reduce

    def patch() -> None: ...

    found: list[tuple[bool, ...]] = []
    group.unshard = method  # the loop replaces the value of an existing key
    for _ in range(100):
        bits = [_C._testing.overrides(group)]
        group.unshard = patch
        bits.append(_C._testing.overrides(group))
        group.unshard = method
        bits.append(_C._testing.overrides(group))
        attributes["unshard"] = patch
        bits.append(_C._testing.overrides(group))
        attributes["unshard"] = method
        bits.append(_C._testing.overrides(group))
        param_group.foreach_reduce = patch
        bits.append(_C._testing.overrides(group))
        param_group.foreach_reduce = function
        bits.append(_C._testing.overrides(group))
        found.append(tuple(bit != 0 for bit in bits))
    del group.unshard
    assert set(found) == {(False, True, False, True, False, True, False)}


def test_method_restored_on_the_object_is_not_an_override() -> None:
    model = model_of(fsdp_c.fully_shard)
    group = groups_of(model)[0]
    saved = group.pre_backward
    group.pre_backward = record_calls([], "pre_backward", saved)
    assert _C._testing.overrides(group) != 0
    group.pre_backward = saved  # torch's memory tracker leaves the attribute set
    assert "pre_backward" in vars(group)
    assert _C._testing.overrides(group) == 0


def test_patch_made_by_an_override_is_called_in_the_same_transition_as_in_torch() -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard)
        step(model)
        events: list[Any] = []
        unshard, wait = FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard

        def patching(group: Any, async_op: bool = False) -> None:
            unshard(group, async_op)
            FSDPParamGroup.wait_for_unshard = record_calls(events, "wait", wait)  # type: ignore[method-assign]

        with replaced(FSDPParamGroup, "wait_for_unshard", wait):
            with replaced(FSDPParamGroup, "unshard", patching):
                step(model)
        return events

    torch_result, result = run_both(scenario)
    assert result == torch_result
    assert result


def test_patch_made_inside_a_collective_takes_effect_at_the_next_hook() -> None:
    """The patched collective is user code that runs in the middle of the first pre-forward.

    torch reads ``wait_for_unshard`` after the collective, in the same hook. fsdp_c has read it at
    the entry of the hook, so the first of torch's calls is missing.
    """

    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard)
        step(model)
        events: list[Any] = []
        gather, wait = param_group.foreach_all_gather, FSDPParamGroup.wait_for_unshard

        def patching(*args: Any) -> Any:
            FSDPParamGroup.wait_for_unshard = record_calls(events, "wait", wait)  # type: ignore[method-assign]
            return gather(*args)

        with replaced(FSDPParamGroup, "wait_for_unshard", wait):
            with replaced(param_group, "foreach_all_gather", patching):
                step(model)
        return events

    torch_result, result = run_both(scenario)
    assert result == torch_result[1:]
    assert result


@pytest.mark.parametrize("explicit", [False, True], ids=["by order", "explicit"])
def test_method_set_on_a_prefetched_group_between_forward_and_backward_is_called(
    explicit: bool,
) -> None:
    """The first hook that reaches the group after the patch is that of another group."""

    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard, reshard_after_forward=True)
        if explicit:
            units = list(model.children())
            units[1].set_modules_to_backward_prefetch([units[0]])
        step(model)
        loss = model(batch()).sum()
        events: list[Any] = []
        group = next(group for group in groups_of(model) if group._module_fqn == "0")
        group.unshard = record_calls(events, "unshard", group.unshard)
        loss.backward()
        return events

    torch_result, result = run_both(scenario)
    assert result == torch_result
    assert len(result) == 2, "the prefetch, and the group's own pre-backward"


def test_method_set_on_a_group_to_prefetch_in_forward_is_called_as_in_torch() -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard, reshard_after_forward=True)
        units = list(model.children())
        units[0].set_modules_to_forward_prefetch([units[1]])
        step(model)
        events: list[Any] = []
        group = next(group for group in groups_of(model) if group._module_fqn == "1")
        group.unshard = record_calls(events, "unshard", group.unshard)
        model(batch())
        return events

    torch_result, result = run_both(scenario)
    assert result == torch_result
    assert len(result) == 2, "the prefetch, and the group's own pre-forward"
