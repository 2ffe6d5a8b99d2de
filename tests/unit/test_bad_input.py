"""Invalid input raises in ``fully_shard`` or in the first forward, and the corrected call works."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from mistakes import Renaming
from releases import DataParallelMeshDims
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_c import (
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    fully_shard,
    release_memory,
    replicate,
)
from fsdp_c._runtime import module_methods


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Returns the properties of a module that a failed call could have changed."""
    return {
        "class": [type(m) for m in module.modules()],
        "parameters": {name: id(p) for name, p in module.named_parameters()},
        "data": {name: p.detach().clone() for name, p in module.named_parameters()},
        "hooks": [
            (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._load_state_dict_post_hooks))
            for m in module.modules()
        ],
        "dynamo": [hasattr(m, "_is_fsdp_managed_module") for m in module.modules()],
        "states": [fully_shard.state(m) for m in module.modules()],
    }


def assert_unchanged(module: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(module)
    data, expected = after.pop("data"), dict(before)
    for name, value in expected.pop("data").items():
        assert torch.equal(data[name], value)
    assert after == expected


def assert_raises_unchanged(
    module: nn.Module, error: type[Exception], match: str, **kwargs: Any
) -> None:
    """Asserts that ``fully_shard`` raises and leaves the module as it was."""
    before = snapshot(module)
    with pytest.raises(error, match=match):
        fully_shard(module, **kwargs)
    assert_unchanged(module, before)


def train(module: nn.Module, width: int = 4) -> None:
    module(torch.randn(2, width)).sum().backward()
    assert all(isinstance(p.grad, DTensor) for p in module.parameters())


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature


def test_scalar_parameter_raises_and_corrected_call_succeeds(fake_group: int) -> None:
    module = WithScalar()
    assert_raises_unchanged(module, ValueError, "doesn't support scalar parameters.*temperature")
    module.temperature = nn.Parameter(torch.ones(1))
    fully_shard(module)
    train(module)


def test_noncontiguous_parameter_raises_and_corrected_call_succeeds(fake_group: int) -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(module.weight.detach().t())
    assert_raises_unchanged(
        module, NotImplementedError, "does not support non-contiguous parameters yet"
    )
    module.weight = nn.Parameter(module.weight.detach().contiguous())
    fully_shard(module)
    train(module)


def test_parameters_listed_under_other_names_raise(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Renaming(4, 4))
    assert_raises_unchanged(module, RuntimeError, "cannot modify FQNs(.|\n)*of Renaming")
    fully_shard(module, ignored_params=set(module[1].parameters()))
    module(torch.ones(2, 4)).sum().backward()
    assert isinstance(module[0].weight.grad, DTensor)
    assert type(module[1].weight.grad) is torch.Tensor


def test_parameter_without_elements_trains(fake_group: int) -> None:
    module = nn.Linear(4, 4)
    module.extra = nn.Parameter(torch.empty(0, 3))
    fully_shard(module)
    out = module(torch.randn(2, 4))
    (out.sum() + module.extra.sum()).backward()
    assert all(isinstance(param.grad, DTensor) for param in module.parameters())
    assert module.extra.grad.shape == (0, 3)


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_container_without_forward_raises(fake_group: int, container: type) -> None:
    module = container() if container is nn.ModuleDict else container([nn.Linear(4, 4)])
    assert_raises_unchanged(
        module, ValueError, "does not support containers that do not implement forward"
    )


@pytest.mark.torch("2.12")  # older releases raise
def test_container_with_forward_trains(fake_group: int) -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    module = Chain([nn.Linear(4, 4)])
    fully_shard(module)
    train(module)


def test_three_dimensional_mesh_raises(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    assert_raises_unchanged(nn.Linear(4, 4), ValueError, "expects a 1D or 2D DeviceMesh", mesh=mesh)


def test_two_dimensional_mesh_without_names_raises(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4))
    assert_raises_unchanged(nn.Linear(4, 4), AssertionError, "mesh_dim_names", mesh=mesh)


@pytest.mark.parametrize("size", [3, 0, -2, 16])
def test_reshard_after_forward_that_does_not_divide_world_size_raises(
    fake_group: int, size: int
) -> None:
    assert_raises_unchanged(
        nn.Linear(4, 4), ValueError, "should be a factor of 8", reshard_after_forward=size
    )


def test_uneven_shard_on_dim_1_raises(fake_group: int) -> None:
    def shard_on_dim_1(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim > 1 else None

    match = "uneven sharding on dim 1"
    assert_raises_unchanged(
        nn.Linear(9, 8), NotImplementedError, match, shard_placement_fn=shard_on_dim_1
    )


@pytest.mark.parametrize("dim", [2, -3])
def test_shard_dim_out_of_range_raises(fake_group: int, dim: int) -> None:
    match = f"Shard dim {dim if dim > 0 else dim + 2} is invalid for 2D tensor"
    module = nn.Linear(8, 8, bias=False)
    assert_raises_unchanged(module, AssertionError, match, shard_placement_fn=lambda p: Shard(dim))


def test_int_returned_by_shard_placement_fn_raises(fake_group: int) -> None:
    match = "Invalid shard_placement_fn result"
    assert_raises_unchanged(nn.Linear(8, 8), ValueError, match, shard_placement_fn=lambda p: 0)


def test_exception_in_shard_placement_fn_leaves_module_unchanged(fake_group: int) -> None:
    def fails_at_bias(param: nn.Parameter) -> Shard:
        if param.ndim == 1:
            raise LookupError("no rule for the bias")
        return Shard(0)

    assert_raises_unchanged(
        nn.Linear(8, 8), LookupError, "no rule", shard_placement_fn=fails_at_bias
    )


@pytest.mark.torch("2.12")
def test_dp_mesh_dims_on_mesh_without_names_raise(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (8,))
    dims = DataParallelMeshDims(shard="dp")
    assert_raises_unchanged(
        nn.Linear(8, 8), ValueError, "mesh_dim_names", mesh=mesh, dp_mesh_dims=dims
    )


@pytest.mark.torch("2.12")
def test_dp_mesh_dims_with_plain_parameters_raise(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    dims = DataParallelMeshDims(shard="dp")
    match = "all parameters must be DTensors"
    assert_raises_unchanged(nn.Linear(8, 8), ValueError, match, mesh=mesh, dp_mesh_dims=dims)


@pytest.mark.torch("2.12")
def test_errors_of_calls_with_dp_mesh_dims_are_those_of_torch_without_notes(
    fake_group: int,
) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    dims = DataParallelMeshDims(shard="shard", replicate="replicate")
    for kwargs in ({}, {"reshard_after_forward": 2}):
        messages = []
        for shard in (torch_fully_shard, fully_shard):
            with pytest.raises(
                (ValueError, NotImplementedError), match=r"DTensors|as int"
            ) as error:
                shard(nn.Linear(8, 8), mesh=mesh, dp_mesh_dims=dims, **kwargs)
            messages.append(traceback.format_exception_only(error.value))  # with notes
        assert messages[0] == messages[1]


@pytest.mark.parametrize("function", [torch_replicate, replicate])
def test_replicate_of_container_in_list_replicates_its_elements(
    fake_group: int, function: Any
) -> None:
    container = nn.ModuleList([nn.Linear(4, 4)])
    function([container])
    assert all(isinstance(param, DTensor) for param in container.parameters())


@pytest.mark.parametrize("function", [torch_replicate, replicate])
def test_replicate_of_sharded_module_in_list_raises(fake_group: int, function: Any) -> None:
    module = fully_shard(nn.Linear(4, 4))
    with pytest.raises(AssertionError, match="Inserting FSDPLinear"):
        function([module])


def test_replicate_accepts_device_id_of_numpy_integer_and_refuses_other_types(
    fake_group: int,
) -> None:
    numpy = pytest.importorskip("numpy")
    replicate(nn.Linear(4, 4), device_id=numpy.int64(0))
    for invalid in ("cpu", numpy.bool_(True)):
        with pytest.raises(RuntimeError, match="Expected device_id to be int"):
            replicate(nn.Linear(4, 4), device_id=invalid)


def test_string_for_reshard_after_forward_raises(fake_group: int) -> None:
    assert_raises_unchanged(
        nn.Linear(4, 4), ValueError, "should be a bool or an int", reshard_after_forward="yes"
    )


def test_fully_shard_twice_raises_and_module_trains(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    fully_shard(module)
    assert_raises_unchanged(module, AssertionError, "can only be applied to a module once")
    train(module)


def test_fully_shard_of_module_sharded_by_torch_raises(fake_group: int) -> None:
    module = nn.Linear(4, 4)
    torch_fully_shard(module)
    with pytest.raises(AssertionError, match="can only be applied to a module once"):
        fully_shard(module)


def test_child_sharded_by_torch_raises_at_first_forward(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch_fully_shard(module[0])
    fully_shard(module)
    with pytest.raises(RuntimeError, match=r"sharded by torch\.distributed\.fsdp\.fully_shard"):
        module(torch.randn(2, 4))


def test_memory_error_in_fully_shard_leaves_module_unchanged(
    fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = importlib.import_module("fsdp_c._runtime.init")
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with monkeypatch.context() as patch:

        def fail(*args: Any) -> None:
            raise MemoryError("no memory for the classes")

        patch.setattr(init, "_apply_to_module", fail)
        assert_raises_unchanged(module, MemoryError, "no memory")
    fully_shard(module)
    train(module)


@pytest.mark.skipif(
    os.environ.get("FSDP_C_SANITIZE", "") not in ("", "0"), reason="sanitizers end the process"
)
def test_failed_allocation_in_forward_raises_torch_error_and_model_trains_again(
    fake_group: int,
) -> None:
    """accelerate searches for torch's message before it retries with a smaller batch."""
    gc.collect()
    release_memory()  # a cached buffer of an earlier test would need no allocation
    module = fully_shard(nn.Linear(4096, 4096, bias=False))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**24, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
            module(torch.ones(1, 4096))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    module.reset_iter_state()
    module(torch.ones(1, 4096)).sum().backward()


def test_parameter_shared_with_numpy_array_raises_torch_error_and_array_stays_valid(
    fake_group: int,
) -> None:
    """A forward hook calls ``numpy()`` on an unsharded parameter. A reset repairs the model."""
    arrays: list[Any] = []
    for shard in (torch_fully_shard, fully_shard):
        module = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        hook = module[1].register_forward_hook(
            lambda m, args, output: arrays.append(m.weight.detach().numpy())
        )
        shard(module)
        full = torch.arange(256.0).view(4, 64)
        with torch.no_grad():
            module.unshard()
            module[1].weight.copy_(full)
        with pytest.raises(RuntimeError, match=r"^Trying to resize storage that is not resizable"):
            module(torch.ones(1, 4)).sum().backward()
        hook.remove()
        torch.full((256,), -1.0)  # would reuse the array's memory if it had been freed
        assert (arrays[-1] == full.numpy()).all()
    module.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in module.parameters())
    train(module)
    assert (arrays[-1] == full.numpy()).all()


def test_reshard_of_parameter_shared_with_numpy_array_raises_with_name(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module, reshard_after_forward=False)
    loss = module(torch.ones(1, 4)).sum()
    array = module[1].weight.detach().numpy()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'1\.weight' cannot be freed on rank 0"):
            module.reshard()
    with pytest.raises(
        RuntimeError, match=r"(?s)param\.detach\(\)\.clone\(\)\.numpy\(\), and call"
    ):
        loss.backward()
    module.reset_iter_state()
    train(module)
    del array


def test_fully_shard_without_process_group_raises_torch_error() -> None:
    assert not dist.is_initialized()
    module = nn.Linear(4, 4)
    before = snapshot(module)
    with pytest.raises(ValueError, match=r"environment variable|rendezvous"):
        fully_shard(module)
    assert_unchanged(module, before)


def test_meta_parameter_raises_at_first_forward_and_trains_once_materialized(
    fake_group: int,
) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module[0])
    fully_shard(module)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"materialized from meta device.*1\.weight"):
            module(torch.randn(2, 4))
    module.to_empty(device="cpu")
    for linear in module:
        linear.reset_parameters()
    train(module)


def test_forward_of_root_after_child_raises(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module[0])
    fully_shard(module)
    module[0](torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="already been lazily initialized for 0"):
        module(torch.randn(2, 4))


def test_forward_of_unit_of_several_modules_without_root_raises(fake_group: int) -> None:
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    fully_shard(modules)
    with pytest.raises(RuntimeError, match="requires a single root module"):
        modules[0](torch.randn(2, 4))


@pytest.mark.torch("2.13")
@pytest.mark.parametrize("case", ["child before root", "several modules as root"])
def test_lazy_init_errors_of_replicate_equal_those_of_torch(fake_group: int, case: str) -> None:
    """Before Python 3.11, exceptions have no notes, and hints are further lines of the message."""
    messages = []
    for apply in (torch_replicate, replicate):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        apply(module[0] if case == "child before root" else list(module))
        with pytest.raises(RuntimeError, match=r"^Replicate ") as refusal:
            if case == "child before root":
                apply(module)
                module[0](torch.randn(2, 4))
            module(torch.randn(2, 4))
        messages.append(str(refusal.value).splitlines())
    hints = messages[1][len(messages[0]) :]
    assert messages[1] == messages[0] + hints
    assert bool(hints) == (sys.version_info < (3, 11))


def test_parameter_tied_across_units_raises_at_first_forward(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    fully_shard(module[0])
    fully_shard(module)
    with pytest.raises(ValueError, match="shared with a parameter already managed"):
        module(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda m: m.set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
            ValueError,
            "Expects FSDP",
        ),
        (
            lambda m: m.set_modules_to_backward_prefetch([nn.Linear(2, 2)]),
            ValueError,
            "Expects FSDP",
        ),
        (lambda m: m.set_reshard_after_forward(2), ValueError, "should be a bool"),
        (lambda m: m.set_gradient_divide_factor(0), ValueError, "positive and finite"),
        (lambda m: m.set_symm_mem_for_comm(), RuntimeError, "symmetric memory.*'cpu'; do not call"),
        (
            lambda m: m.set_reduce_scatter_max_input_buffers(True),
            TypeError,
            "must be an int, got bool",
        ),
        (lambda m: m.set_reduce_scatter_max_input_buffers(0), ValueError, "positive int"),
    ],
)
def test_module_method_with_invalid_argument_raises(
    fake_group: int, call: Any, error: type[Exception], match: str
) -> None:
    module = nn.Linear(4, 4)
    fully_shard(module)
    with pytest.raises(error, match=match):
        call(module)
    train(module)


def test_stream_for_all_reduce_hook_on_hsdp_mesh_raises(fake_group: int) -> None:
    module = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    fully_shard(module, mesh=mesh)
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        module.set_all_reduce_hook(lambda t: None, stream=object())  # type: ignore[operator]
    train(module)


def test_memory_from_process_group_with_custom_all_gather_raises(fake_group: int) -> None:
    module = nn.Linear(4, 4)
    fully_shard(module)
    module.set_custom_all_gather(object())  # type: ignore[operator]
    with pytest.raises(AssertionError, match="all gather comm is custom: object"):
        module.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]


def test_reset_iter_state_of_child_unit_raises(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    fully_shard(module[0])
    fully_shard(module)
    train(module)
    assert isinstance(module[0], FSDPModule)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        module[0].reset_iter_state()


def test_reset_iter_state_before_first_forward_does_nothing(fake_group: int) -> None:
    """torch raises, because the communication context has no streams and states yet."""
    if torch.__version__.startswith("2.13"):
        with pytest.raises(AttributeError, match="all_gather_state"):
            torch_fully_shard(nn.Linear(4, 4)).reset_iter_state()
    module: Any = fully_shard(nn.Linear(4, 4))
    module.reset_iter_state()
    train(module)


def test_post_backward_with_gradients_of_mixed_dtypes_raises(fake_group: int) -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(module, mp_policy=MixedPrecisionPolicy())
    module(torch.randn(2, 4))
    group = module._get_fsdp_state()._fsdp_param_groups[0]
    group.unshard()
    group.wait_for_unshard()
    first, second = group.fsdp_params
    first._unsharded_param.grad = torch.zeros(4, 4)
    second.unsharded_accumulated_grad = torch.zeros(4, 4, dtype=torch.int64)
    with pytest.raises(AssertionError, match="expects uniform gradient dtype"):
        group.post_backward()
    module.reset_iter_state()
    train(module)


def test_deepcopy_of_sharded_module_raises(fake_group: int) -> None:
    import copy

    module = nn.Linear(4, 4)
    fully_shard(module)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(module)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("reset_iter_state", ()),
        ("set_reduce_scatter_unused_params", (True,)),
        ("set_reduce_scatter_max_input_buffers", (2,)),
        ("set_symm_mem_for_comm", ()),
    ],
)
def test_backported_method_on_module_sharded_by_torch_raises(
    fake_group: int, method: str, arguments: tuple[Any, ...]
) -> None:
    backported = module_methods._NEWER_METHODS[method]
    module = torch_fully_shard(nn.Linear(4, 4))
    match = f"{method} needs a module that fsdp_c's fully_shard was applied to; torch has it from"
    with pytest.raises(RuntimeError, match=match):
        backported(module, *arguments)
    if method.startswith("set_reduce"):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), module))
        with pytest.raises(RuntimeError, match=match):
            backported(model, *arguments)


def test_finalization_after_an_interrupted_one_names_reset_iter_state(
    fake_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(handle: Any) -> None:
        raise KeyboardInterrupt

    model: Any = fully_shard(nn.Linear(4, 4))
    model.set_manual_backward_finalization(True)
    model(torch.ones(2, 4)).sum().backward()
    with monkeypatch.context() as context:
        context.setattr(GradientReductionHandle, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.finalize_backward()
    for call in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
        with pytest.raises(RuntimeError, match=r"reset_iter_state\(\)"):
            call()
    model.reset_iter_state()
    model.set_manual_backward_finalization(False)
    train(model)
