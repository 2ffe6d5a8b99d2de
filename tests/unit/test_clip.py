"""``clip_grad_norm_`` has torch's bits.

An all-reduce of the fake process group changes nothing, so the total norm is that of this rank.
These tests compare the arithmetic; tests/distributed compares results on several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_c import _C, clip_grad_norm_, fully_shard
from fsdp_c._runtime import grad_norm, torch_clipping
from fsdp_c._runtime.grad_norm import PerMeshCache

# On rank 0 only the last shape has an empty shard.
SHAPES = [(64, 8), (17,), (9, 3), (1,), (40, 33), (8, 1), (3,), (0, 4)]


def sharded_module(
    shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Returns a module with one parameter per shape, sharded on 8 ranks."""
    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))
    fully_shard(module)
    return module


def give_grads(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for param in module.parameters():
        local = param._local_tensor
        grad = torch.randn(local.shape, generator=generator).to(local.dtype)
        param.grad = DTensor.from_local(
            grad, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
        )


def compare(module: nn.Module, max_norm: float, norm_type: float = 2.0, **kwargs: Any) -> float:
    """Clips with torch and with fsdp_c, and asserts equal totals and gradients."""
    params = list(module.parameters())
    give_grads(module)
    by_torch = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, **kwargs).full_tensor()
    expected = [param.grad._local_tensor.clone() for param in params]
    give_grads(module)
    before = [param.grad._local_tensor._version for param in params]
    by_fsdp_c = clip_grad_norm_(params, max_norm, norm_type, **kwargs)
    assert (
        type(by_fsdp_c) is torch.Tensor
        and by_fsdp_c.shape == ()
        and by_fsdp_c.dtype == by_torch.dtype
    )
    assert torch.equal(by_fsdp_c, by_torch)
    for param, grad, version in zip(params, expected, before, strict=True):
        assert torch.equal(param.grad._local_tensor, grad)
        assert param.grad._local_tensor._version == version + (max_norm < by_torch)
    return by_fsdp_c.item()


class TestParityWithTorch:
    @pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
    def test_clip_by_two_norm_matches_torch(self, fake_group: int, max_norm: float) -> None:
        assert compare(sharded_module(), max_norm) > 5

    @pytest.mark.parametrize("norm_type", [1.0, 3.0, 2, "inf", float("inf"), 0.0])
    def test_clip_by_other_norm_types_matches_torch(self, fake_group: int, norm_type: Any) -> None:
        is_inf = float(norm_type) == math.inf  # torch raises on an empty shard
        compare(sharded_module(SHAPES[:-1] if is_inf else SHAPES), 0.5, float(norm_type))

    @pytest.mark.parametrize("norm_type", [4.0, 0.5, 1.5, -1.0, -math.inf])
    def test_clip_by_unusual_norm_types_is_close_to_torch(
        self, fake_group: int, norm_type: float
    ) -> None:
        module = sharded_module([(64, 8), (40, 33)])
        give_grads(module)
        by_torch = torch.nn.utils.get_total_norm(
            [p.grad for p in module.parameters()], norm_type
        ).full_tensor()
        by_fsdp_c = clip_grad_norm_(module, 1e9, norm_type)
        torch.testing.assert_close(by_fsdp_c, by_torch, rtol=1e-6, atol=0)

    def test_clip_by_norm_of_each_parameter_alone_matches_torch(self, fake_group: int) -> None:
        """Covers the square root, too: MKL's square root is not correctly rounded everywhere."""
        module = sharded_module([(8 * n, 3) for n in range(1, 60)])
        give_grads(module)
        for param in module.parameters():
            by_torch = torch.nn.utils.get_total_norm([param.grad]).full_tensor()
            assert torch.equal(clip_grad_norm_([param], 1e9), by_torch)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
    def test_clip_of_other_dtypes_matches_torch(self, fake_group: int, dtype: torch.dtype) -> None:
        compare(sharded_module(dtype=dtype), 0.5)

    @pytest.mark.parametrize("foreach", [True, False])
    def test_clip_with_foreach_on_or_off_matches_torch(
        self, fake_group: int, foreach: bool
    ) -> None:
        compare(sharded_module(), 0.5, foreach=foreach)

    def test_clip_of_mixed_dtypes_matches_torch(self, fake_group: int) -> None:
        module = nn.ModuleList(
            [sharded_module(), sharded_module(dtype=torch.bfloat16), sharded_module()]
        )
        compare(module, 0.5)

    def test_clip_of_gradients_scaled_by_torch_and_by_kernels_matches_torch(
        self, fake_group: int
    ) -> None:
        """torch scales a gradient of more than ``_PARALLEL_NUMEL`` elements."""
        module = sharded_module([(8 * 300, 200), (64, 8)])
        large, small = (param._local_tensor.numel() for param in module.parameters())
        assert large > grad_norm._PARALLEL_NUMEL > small
        compare(module, 0.5)

    @settings(max_examples=50)
    @given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.floats(1e-3, 1e3))
    def test_clip_of_plain_tensors_of_any_length_matches_torch(
        self, lengths: list[int], max_norm: float
    ) -> None:
        def grads() -> list[torch.Tensor]:
            generator = torch.Generator().manual_seed(len(lengths))
            params = [torch.zeros(n) for n in lengths]
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            return params

        by_torch, by_fsdp_c = grads(), grads()
        expected = torch.nn.utils.clip_grad_norm_(by_torch, max_norm)
        assert torch.equal(clip_grad_norm_(by_fsdp_c, max_norm), expected)
        for a, b in zip(by_fsdp_c, by_torch, strict=True):
            assert torch.equal(a.grad, b.grad)

    def test_clip_of_extreme_gradients_matches_torch(self) -> None:
        pairs = ([1e30, 1e30], [1e-30, 1e-40], [math.inf, 1.0], [math.nan, 1.0])
        for values in (*pairs, [0.0], [1e30], [-1e-22], [1e-40]):
            by_torch, by_fsdp_c = torch.zeros(len(values)), torch.zeros(len(values))
            by_torch.grad, by_fsdp_c.grad = torch.tensor(values), torch.tensor(values)
            expected = torch.nn.utils.clip_grad_norm_([by_torch], 1.0)
            torch.testing.assert_close(
                clip_grad_norm_([by_fsdp_c], 1.0), expected, rtol=0, atol=0, equal_nan=True
            )
            torch.testing.assert_close(
                by_fsdp_c.grad, by_torch.grad, rtol=0, atol=0, equal_nan=True
            )


class TestDefaults:
    """Totals have the dtype and device of the gradients, not torch's default dtype and device."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("norm_type", [2.0, 1.0])
    def test_default_dtype_does_not_change_total_norm(
        self, fake_group: int, dtype: torch.dtype, norm_type: float
    ) -> None:
        # For the 2-norm, torch scales the first gradient, and fsdp_c's kernels the second.
        module = sharded_module([(8 * 300, 200), (64, 8)])
        totals = self.clipped(module, norm_type)
        torch.set_default_dtype(dtype)
        try:
            found = self.clipped(module, norm_type)
        finally:
            torch.set_default_dtype(torch.float32)
        assert found[0].dtype == torch.float32 and torch.equal(found[0], totals[0])
        for a, b in zip(found[1], totals[1], strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("norm_type", [2.0, 1.0])
    def test_default_device_does_not_change_total_norm(
        self, fake_group: int, norm_type: float
    ) -> None:
        module = sharded_module([(8 * 300, 200), (64, 8)])
        expected = self.clipped(module, norm_type)
        with torch.device("meta"):
            found = self.clipped(module, norm_type)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))

    def test_total_norm_without_gradients_is_on_default_device(self) -> None:
        with torch.device("meta"):
            assert clip_grad_norm_([], 1.0).is_meta
            assert torch.nn.utils.clip_grad_norm_([], 1.0).is_meta

    @staticmethod
    def clipped(module: nn.Module, norm_type: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Clips gradients that are equal in each call. Returns the total norm and the gradients."""
        kept = list(module.parameters())
        with torch.device("cpu"):
            for i, param in enumerate(kept):
                grad = torch.full_like(param._local_tensor, 100.0 + i)
                param.grad = DTensor(grad, param._spec, requires_grad=False)
        return clip_grad_norm_(kept, 1.0, norm_type), [p.grad._local_tensor for p in kept]


@pytest.mark.torch("2.13")  # older fake groups leave reduced tensors unwritten
class TestSeveralMeshes:
    """Each unit has its own mesh, and one layer is plain. torch raises on different meshes."""

    def model(self, meshes: list[Any]) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(len(meshes) + 1)])
        for layer, mesh in zip(model, meshes, strict=False):
            fully_shard(layer, mesh=mesh)
        model(torch.randn(4, 16)).square().sum().backward()
        return model  # the last layer is plain

    @pytest.mark.parametrize(
        ("shapes", "names", "calls"),
        [
            ([(8,), (8,)], [("a",), ("a",)], 1),
            ([(2, 4), (2, 4)], [("r", "s"), ("r", "s")], 1),
            ([(2, 4), (2, 4)], [("r", "s"), ("t", "u")], 1),
            ([(8,), (8,), (8,)], [("a",), ("b",), ("c",)], 1),
            ([(8,), (1, 8)], [("a",), ("r", "s")], 1),
            ([(8,), (2, 4), (8,)], [("a",), ("r", "s"), ("a",)], 2),
        ],
        ids=[
            "equal",
            "replicas, equal names",
            "replicas, other names",
            "shards, other names",
            "one replica",
            "shards and replicas",
        ],
    )
    def test_clip_in_c_has_the_bits_of_clip_in_python(
        self, fake_group: int, shapes: Any, names: Any, calls: int
    ) -> None:
        meshes = [
            init_device_mesh("cpu", shape, mesh_dim_names=name)
            for shape, name in zip(shapes, names, strict=True)
        ]
        by_fsdp_c, reference = self.model(meshes), self.model(meshes)
        with torch.no_grad():
            params = list(reference.parameters())
            collected = _C.clip_collect(params, True)
            expected = grad_norm.clip_with_torch_operators(
                params, *collected, 0.5, 2.0, False, None
            )
        tensors, kinds, kind_of = _C.clip_collect(list(by_fsdp_c.parameters()), True)
        with CommDebugMode() as comm:
            total = grad_norm.compute_norm_on_cpu(
                tensors, kind_of, [grad_norm.get_group_names(*kind) for kind in kinds]
            )
        assert total == expected.item()
        assert comm.get_total_counts() == calls
        assert grad_norm.scale_on_cpu(tensors, 0.5, total)
        for a, b in zip(by_fsdp_c.parameters(), reference.parameters(), strict=True):
            assert torch.equal(local_grad(a), local_grad(b))


def local_grad(param: Any) -> torch.Tensor:
    return param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad


class TestWithoutValues:
    """Fake tensors and traces give the results of torch's function."""

    @pytest.mark.parametrize("norm_type", [2.0, 1.0])
    @pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
    def test_clip_of_fake_tensors_returns_fake_total_norm(
        self, device: str, norm_type: float
    ) -> None:
        with FakeTensorMode():
            for call in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
                param = torch.zeros(3, device=device)
                param.grad = torch.ones(3, device=device)
                total = call([param], 1.0, norm_type)
                assert isinstance(total, FakeTensor) and total.shape == ()
                assert total.device.type == device and total.dtype == torch.float32
                with pytest.raises(DataDependentOutputException):
                    call([param], 1.0, norm_type, error_if_nonfinite=True)

    def test_clip_of_fake_gradients_outside_their_mode_returns_fake_total_norm(self) -> None:
        with FakeTensorMode():
            param = torch.zeros(3)
            param.grad = torch.ones(3)
        assert isinstance(clip_grad_norm_([param], 1.0), FakeTensor)

    @pytest.mark.parametrize("norm_type", [2.0, 1.0])
    def test_clip_in_fake_mode_writes_no_real_gradients(self, norm_type: float) -> None:
        param = torch.zeros(3)
        param.grad = torch.ones(3)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(clip_grad_norm_([param], 1.0, norm_type), FakeTensor)
        assert torch.equal(param.grad, torch.ones(3))

    def test_clip_of_sharded_fake_gradients_returns_fake_total_norm(self, fake_group: int) -> None:
        mesh = init_device_mesh("cpu", (8,))
        with FakeTensorMode():
            module = fully_shard(nn.Linear(16, 16), mesh=mesh)
            for param in module.parameters():
                grad = torch.ones_like(param._local_tensor)
                param.grad = DTensor(grad, param._spec, requires_grad=False)
            total = clip_grad_norm_(module, 1.0)
            by_torch = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            assert isinstance(total, FakeTensor) and total.dtype == by_torch.dtype

    @pytest.mark.parametrize("norm_type", [2.0, 1.0])
    @pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
    def test_traced_clipping_computes_torchs_result(self, mode: str, norm_type: float) -> None:
        def traced(call: Any) -> torch.fx.GraphModule:
            def clipped(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                param = torch.zeros(3)
                param.grad = grad.clone()
                return call([param], 1.0, norm_type), param.grad

            return make_fx(clipped, tracing_mode=mode)(torch.ones(3))

        by_torch = traced(torch.nn.utils.clip_grad_norm_)(torch.arange(3.0))
        by_fsdp_c = traced(clip_grad_norm_)(torch.arange(3.0))
        assert all(torch.equal(a, b) for a, b in zip(by_fsdp_c, by_torch, strict=True))


class WrapNewTensors(TorchDispatchMode):
    """Wraps the results of torch.empty."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return TwoTensor(result, result) if func is torch.ops.aten.empty.memory_format else result


def test_clip_under_mode_that_wraps_new_tensors_clips() -> None:
    totals = []
    for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        param = torch.zeros(3)
        param.grad = torch.tensor([2.0, 0.0, 0.0])
        with WrapNewTensors():
            totals.append(clip([param], 1.0))
        assert param.grad.tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert torch.equal(*totals)


class TestCollectives:
    def count(self, module: nn.Module, *args: Any) -> int:
        with CommDebugMode() as comm:
            clip_grad_norm_(module, 1.0, *args)
        return comm.get_total_counts()

    @pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
    def test_clip_issues_one_collective_for_all_parameters(
        self, fake_group: int, norm_type: float
    ) -> None:
        module = sharded_module()
        give_grads(module)
        assert self.count(module, norm_type) == 1

    def test_clip_of_replicated_and_plain_gradients_issues_no_collective(
        self, fake_group: int
    ) -> None:
        module = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (8,))
        module.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
        module.weight.grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        module.bias.grad = torch.ones(4)
        with CommDebugMode() as comm:
            total = clip_grad_norm_(module, 100.0)
        assert comm.get_total_counts() == 0
        assert total == pytest.approx(math.sqrt(20))

    def test_clip_issues_one_collective_per_sharded_mesh_dimension(self, fake_group: int) -> None:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        module = nn.Module()
        placements = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate(), Shard(0)]]
        for i, places in enumerate(placements):
            param = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, places))
            param.grad = distribute_tensor(torch.ones(8, 8), mesh, places)
            module.register_parameter(f"p{i}", param)
        assert self.count(module) == 2 + 1 + 1

    @pytest.mark.parametrize("shape", [(1, 8), (8, 1)])
    def test_clip_issues_no_collective_over_mesh_dimension_of_one_rank(
        self, fake_group: int, shape: tuple[int, int]
    ) -> None:
        """torch issues none either."""
        mesh = init_device_mesh("cpu", shape)
        placements = [Shard(0) if size == 1 else Replicate() for size in shape]
        param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, placements))
        param.grad = distribute_tensor(torch.ones(4), mesh, placements)
        for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            with CommDebugMode() as comm:
                clip([param], 100.0)
            assert comm.get_total_counts() == 0
        assert grad_norm.get_group_names(mesh, tuple(placements)) == ((), ())

    def test_clip_computes_norm_of_reduced_partial_gradients(self, single_group: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        param = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        assert clip_grad_norm_([param], 1.0) == 2.0
        assert torch.equal(param.grad._local_tensor, torch.ones(4) * (1 / (2 + 1e-6)))
        assert param.grad.placements == (Partial(),)


class TestArguments:
    def test_clip_accepts_module_tensor_and_iterator(self) -> None:
        module = nn.Linear(2, 2)
        module(torch.ones(1, 2)).sum().backward()
        total = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        assert torch.equal(clip_grad_norm_(module, 100.0), total)
        assert torch.equal(clip_grad_norm_(iter(module.parameters()), 100.0), total)
        assert clip_grad_norm_(module.bias, 100.0) == pytest.approx(math.sqrt(2))

    def test_clip_skips_parameters_without_gradient(self, fake_group: int) -> None:
        module = sharded_module()
        assert torch.equal(clip_grad_norm_(module, 1.0), torch.tensor(0.0))
        assert torch.equal(clip_grad_norm_([], 1.0), torch.tensor(0.0))
        give_grads(module)
        params = list(module.parameters())
        params[0].grad = None
        total = clip_grad_norm_(params, 1e9)
        assert torch.equal(total, clip_grad_norm_(params[1:], 1e9))

    def test_clip_does_not_write_gradients_below_max_norm(self, fake_group: int) -> None:
        module = sharded_module()
        give_grads(module)
        before = [p.grad._local_tensor.clone() for p in module.parameters()]
        clip_grad_norm_(module, 1e9)
        for param, grad in zip(module.parameters(), before, strict=True):
            assert torch.equal(param.grad._local_tensor, grad)
            assert param.grad._local_tensor._version == 0

    @pytest.mark.parametrize("norm_type", [2.0, 1.0])
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_clip_with_nonfinite_total_norm_raises_before_any_write(
        self, fake_group: int, norm_type: float, value: float
    ) -> None:
        module = sharded_module()
        give_grads(module)
        module.p1.grad._local_tensor[0] = value
        before = [p.grad._local_tensor.clone() for p in module.parameters()]
        with pytest.raises(RuntimeError, match=r"total norm of order .* is non-finite"):
            clip_grad_norm_(module, 1.0, norm_type, error_if_nonfinite=True)
        for param, grad in zip(module.parameters(), before, strict=True):
            assert torch.equal(param.grad._local_tensor.nan_to_num(), grad.nan_to_num())

    def test_clip_of_empty_shards_by_infinity_norm_succeeds(self, fake_group: int) -> None:
        module = sharded_module([(64, 8), (3,)])
        give_grads(module)
        for param in module.parameters():
            param.grad._local_tensor = param.grad._local_tensor[:0]  # as on a rank without rows
        assert clip_grad_norm_(module, 1.0, math.inf) == 0.0
        assert clip_grad_norm_(module, 1.0, -math.inf) == math.inf
        with pytest.raises(RuntimeError, match="empty"):  # torch raises on an empty shard
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, math.inf)

    @pytest.mark.parametrize("strides", ["transposed", "step"])
    def test_clip_of_noncontiguous_gradients_matches_torch(self, strides: str) -> None:
        by_fsdp_c, by_torch = torch.zeros(4, 6), torch.zeros(4, 6)
        for param in (by_fsdp_c, by_torch):
            values = torch.arange(48.0)
            is_transposed = strides == "transposed"
            param.grad = values[:24].view(6, 4).t() if is_transposed else values.view(4, 12)[:, ::2]
            assert not param.grad.is_contiguous()
        expected = torch.nn.utils.clip_grad_norm_([by_torch], 1.0)
        assert torch.equal(clip_grad_norm_([by_fsdp_c], 1.0), expected)
        assert torch.equal(by_fsdp_c.grad, by_torch.grad)

    @pytest.mark.parametrize("max_norm", ["1", b"1", torch.tensor([1.0]), True])
    def test_max_norm_is_converted_to_float_as_in_torch(self, max_norm: Any) -> None:
        grads = []
        for call in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            param = torch.zeros(2)
            param.grad = torch.tensor([30.0, 40.0])
            assert call([param], max_norm) == 50.0
            grads.append(param.grad)
        assert torch.equal(*grads) and grads[0].norm() < 1.0001

    @pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
    def test_clip_of_empty_generator_warns(self, norm_type: float) -> None:
        own = torch_clipping.clip_grad_norm_
        for call in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_, own):
            with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
                call((p for p in ()), 1.0, norm_type)
            assert len(caught) == 1
            # torch's function calls `own`, and the warning names the caller of torch's function. A
            # direct call of `own` names the caller of this test.
            assert caught[0].filename == __file__ or call is own

    def test_clip_with_invalid_arguments_raises_torchs_errors(self) -> None:
        with pytest.raises(AttributeError, match="grad"):
            clip_grad_norm_([object()], 1.0)  # type: ignore[list-item]
        for call in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            with pytest.raises(ValueError, match="could not convert string to float: 'large'"):
                call([torch.zeros(1)], "large")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"float\(\) argument must be .*'NoneType'"):
                call([torch.zeros(1)], None)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            clip_grad_norm_(3, 1.0)  # type: ignore[arg-type]


class _MutatingKey:
    """A group key whose comparison changes a gradient."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def __eq__(self, other: object) -> bool:
        self.change()
        return True

    __hash__ = None  # type: ignore[assignment]


def test_clip_norm_of_gradient_that_moves_during_the_call_reads_its_new_memory() -> None:
    """Comparing two group keys runs Python code inside ``clip_norm``."""
    grad = torch.tensor([6.0, 8.0])

    def norm_with(change: Callable[[], object]) -> float | None:
        return _C.clip_norm([grad], [0], [((), _MutatingKey(change)), ((), _MutatingKey(change))])

    assert norm_with(lambda: None) == 10.0
    assert norm_with(lambda: grad.set_(torch.tensor([3.0, 4.0]))) == 5.0  # type: ignore[call-overload]
    assert norm_with(lambda: grad.untyped_storage().resize_(0)) is None


def test_clip_scale_that_requires_one_dtype_leaves_mixed_dtypes_unchanged() -> None:
    grads = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    assert _C.clip_scale(grads, 1.0, 4.0, 1 << 15, True) is None
    assert torch.equal(grads[0], torch.ones(2))
    found = _C.clip_scale(grads, 1.0, 4.0, 1 << 15, False)
    assert found is not None and found[1] == [grads[1]] and found[0] == pytest.approx(0.25)
    assert torch.equal(grads[0], torch.full((2,), found[0]))


@pytest.mark.parametrize("arguments", [([],), ([], [0], []), (1, [], []), ([], [], ())])
def test_clip_norm_with_wrong_arguments_raises_type_error(arguments: Any) -> None:
    with pytest.raises(TypeError, match="clip_norm expects"):
        _C.clip_norm(*arguments)


@pytest.mark.parametrize("index", [-1, 1])
def test_clip_norm_with_kind_index_out_of_range_raises_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="expected 0 to"):
        _C.clip_norm([torch.ones(1)], [index], [((), ())])


@pytest.mark.parametrize("malformed", [3, (), ("a", ()), (("a",), (), ())])
def test_clip_norm_with_malformed_groups_raises_type_error(malformed: Any) -> None:
    with pytest.raises(TypeError, match="clip_norm expects groups as"):
        _C.clip_norm([torch.ones(2)], [0], [malformed])


def test_group_names_are_cached_per_mesh_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An equal mesh may have other groups, after a new ``init_process_group`` in this process."""

    class Mesh:
        def __init__(self, name: str) -> None:
            self.name = name
            self.lookups = 0

        def size(self, dim: int) -> int:
            return 2

        def get_group(self, dim: int) -> Any:
            self.lookups += 1
            return SimpleNamespace(group_name=f"{self.name}{dim}")

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    monkeypatch.setattr(grad_norm, "_make_group_key", lambda groups: len(groups))
    names = PerMeshCache(grad_norm._find_group_names)
    old, new = Mesh("old"), Mesh("new")
    for _ in range(2):
        assert names(old, (Shard(0),)) == (("old0",), 1)  # type: ignore[arg-type]
    assert old.lookups == 1
    assert names(new, (Shard(0),)) == (("new0",), 1)  # type: ignore[arg-type]
    assert names(new, (Replicate(), Shard(0))) == (("new1",), 1)  # type: ignore[arg-type]
    assert names(new, (Partial(),)) is None  # type: ignore[arg-type]
    assert grad_norm.get_group_names(None, None) == ((), ())
    del new
    assert names(old, (Partial(),)) is None  # type: ignore[arg-type]
