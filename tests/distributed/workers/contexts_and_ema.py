"""Rank functions of test_contexts_and_ema_on_ranks.py. Each function contains its assertions."""

from __future__ import annotations

import math
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from fsdp_c import (
    ShardedEMA,
    auto_shard,
    clip_grad_norm_,
    full_params,
    fully_shard,
    generate_with,
    load_full_state_dict,
    names,
    no_sync,
    trace,
)
from fsdp_c._checkpoint import buckets, destinations


def separate_ends(rank: int, world: int) -> None:
    """``separate_ends=True`` makes units of embedding and head and does not change the bits."""

    class Untied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(999, 5)
            self.head = nn.Linear(5, 999, bias=False)

        def generate(self, *args: Any) -> torch.Tensor:
            raise NotImplementedError

    results = []
    for separate in (True, False):
        torch.manual_seed(3)
        model = auto_shard(Untied(), separate_ends=separate)
        assert isinstance(model.embed, FSDPModule) == separate == isinstance(model.head, FSDPModule)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            tokens = torch.arange(7) + step * 11 + rank
            model(tokens).square().sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: p.full_tensor() for name, p in model.named_parameters()})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


class Net(nn.Module):
    """Three residual layers of uneven widths and a tied head: int (batch,) -> (batch, 11)."""

    def __init__(self) -> None:
        super().__init__()
        width = 5
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width)) for _ in range(3)]
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        """Appends ``steps`` tokens, greedily."""
        for _ in range(steps):
            tokens = torch.cat([tokens, self(tokens)[-1:].argmax(-1)])
        return tokens


def sharded_net() -> Net:
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def backward(model: nn.Module, rank: int, scale: float = 1.0) -> None:
    tokens = torch.arange(6) * (rank + 3) % 11
    (model(tokens).square().mean() * scale).backward()


def clip(rank: int, world: int) -> None:
    exact = world == 2  # a sum of two numbers does not depend on their order
    for norm_type in (2.0, 1.0, 3.0, math.inf, 4.0):
        for max_norm in (0.01, 1e9):
            compare_clipping(rank, norm_type, max_norm, exact)
    clip_hybrid(rank, world)


def compare_clipping(rank: int, norm_type: float, max_norm: float, exact: bool) -> None:
    by_fsdp_c, by_torch = sharded_net(), sharded_net()
    for model in (by_fsdp_c, by_torch):
        backward(model, rank, 100)
    if norm_type == math.inf:  # torch raises on the empty shards of some ranks
        full_grads = [p.grad.full_tensor() for p in by_torch.parameters()]
        expected = torch.nn.utils.get_total_norm(full_grads, norm_type)
        scale = min(max_norm / (expected.item() + 1e-6), 1.0)
        for param in by_torch.parameters():
            param.grad._local_tensor.mul_(scale)
        exact = False
    else:
        expected = torch.nn.utils.clip_grad_norm_(by_torch.parameters(), max_norm, norm_type)
        expected = expected.full_tensor()
    with CommDebugMode() as comm:
        total = clip_grad_norm_(by_fsdp_c.parameters(), max_norm, norm_type)
    assert comm.get_total_counts() == 1
    rtol = 0 if exact else 1e-6
    torch.testing.assert_close(total, expected, rtol=rtol, atol=0)
    for a, b in zip(by_fsdp_c.parameters(), by_torch.parameters(), strict=True):
        assert isinstance(a.grad, DTensor)
        torch.testing.assert_close(a.grad._local_tensor, b.grad._local_tensor, rtol=rtol, atol=0)
    totals = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    assert all(torch.equal(other, total) for other in totals)


def clip_hybrid(rank: int, world: int) -> None:
    """Clips on a 2-D mesh of replicas and shards, with one ignored parameter."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plain = model[1].bias
    fully_shard(model, mesh=mesh, ignored_params={plain})
    model(torch.ones(2, 5) * (rank + 1)).sum().backward()
    dist.all_reduce(plain.grad)
    full_grads = [
        p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()
    ]
    expected = torch.nn.utils.get_total_norm(full_grads)
    torch.testing.assert_close(clip_grad_norm_(model, 1.0), expected, rtol=1e-6, atol=0)
    again = clip_grad_norm_(model, 1.0)
    torch.testing.assert_close(again, torch.tensor(1.0), rtol=1e-5, atol=0)
    clip_on_several_meshes(rank, world)


def clip_on_several_meshes(rank: int, world: int) -> None:
    """Clips units on a 1-D mesh, on a 2-D mesh, and on an equal mesh of another name."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(7, 7) for _ in range(3)])
    fully_shard(model[0], mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("one",)))
    hybrid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[1], mesh=hybrid)
    fully_shard(model[2], mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("other",)))
    model(torch.ones(2, 7) * (rank + 1)).square().sum().backward()
    full_grads = [p.grad.full_tensor().clone() for p in model.parameters()]
    expected = torch.nn.utils.get_total_norm(full_grads)
    with CommDebugMode() as comm:
        total = clip_grad_norm_(model, 1.0)
    assert comm.get_total_counts() == len({world, world // 2} - {1})  # one for each size of shards
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
    for param, grad in zip(model.parameters(), full_grads, strict=True):
        clipped = grad / (expected + 1e-6)
        torch.testing.assert_close(param.grad.full_tensor(), clipped, rtol=1e-6, atol=1e-7)


def full_values(seed: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in Net().state_dict().items()}


def assert_weights(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    """Asserts that the shards hold the values of ``full`` and that forward uses them."""
    for name, value in model.state_dict().items():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(found, full[name]), name
    plain = Net()
    plain.load_state_dict(full)
    tokens = torch.arange(7)
    assert torch.equal(model(tokens), plain(tokens))


def load(rank: int, world: int, folder: str) -> None:
    full = full_values()
    path = Path(folder) / "model.safetensors"
    for src in (0, world - 1):
        source = full if rank == src else None
        for bucket_bytes in (None, 100):
            model = sharded_net()
            load_full_state_dict(model, source, src=src, bucket_bytes=bucket_bytes)
            assert_weights(model, full)
    for shared in (False, True):
        model = sharded_net()
        # Without shared_file only the source rank reads the path.
        load_full_state_dict(model, path if shared or rank == 0 else None, shared_file=shared)
        assert_weights(model, full)
    with torch.device("meta"):
        model = sharded_net()
    load_full_state_dict(model, full if rank == 0 else {})
    assert_weights(model, full)
    backward(model, rank)
    load_like_torch(rank, full)
    load_and_fail(rank, full)


def without_numpy(rank: int, world: int) -> None:
    """``torch.Tensor.numpy`` raises as in an installation without NumPy."""
    full, model = full_values(), sharded_net()
    missing = RuntimeError("Numpy is not available")
    with unittest.mock.patch.object(torch.Tensor, "numpy", side_effect=missing):
        load_full_state_dict(model, full if rank == world - 1 else None, src=world - 1)
        assert_weights(model, full)
        with trace(model) as results:
            backward(model, rank)
    assert len(results.ranks) == world and f"on {world} ranks" in results.summary()


def load_like_torch(rank: int, full: dict[str, torch.Tensor]) -> None:
    by_fsdp_c, by_torch = sharded_net(), sharded_net()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(by_torch, dict(full) if rank == 0 else {}, options=options)
    load_full_state_dict(by_fsdp_c, full if rank == 0 else {})
    for a, b in zip(by_fsdp_c.parameters(), by_torch.parameters(), strict=True):
        assert torch.equal(a._local_tensor, b._local_tensor)


class Failing(dict[str, Any]):
    """A state dict that raises after ``reads_left`` reads."""

    reads_left = 0

    def __getitem__(self, name: str) -> Any:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise OSError("the disk is gone")
        return super().__getitem__(name)


def load_and_fail(rank: int, full: dict[str, torch.Tensor]) -> None:
    """A failed load raises on all ranks without a hang, and the next load succeeds."""
    model = sharded_net()
    before = [param._local_tensor.clone() for param in model.parameters()]

    def assert_load_fails(source: Any, match: str, model: nn.Module = model, **kwargs: Any) -> None:
        try:
            load_full_state_dict(model, source, **kwargs)
        except Exception as error:
            assert match in str(error), str(error)
        else:
            raise AssertionError("did not raise")

    lacking = {name: value for name, value in full.items() if name != "norm.bias"}
    assert_load_fails(lacking if rank == 0 else None, "Missing key(s)")
    assert_load_fails(None, "expects a state dict or a path")
    assert_load_fails("/nowhere" if rank == 0 else None, "nowhere")
    # The ranks get different paths.
    assert_load_fails("/nowhere" if rank == 0 else "/neither", "No such file", shared_file=True)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param._local_tensor, value)
    for reads in range(len(full), 3 * len(full), 5):
        source = Failing(full)
        source.reads_left = reads
        assert_load_fails(source if rank == 0 else None, "partly loaded", bucket_bytes=60)
    load_full_state_dict(model, full if rank == 0 else None)
    assert_weights(model, full)
    load_and_fail_on_one_rank(rank, full, assert_load_fails)


class LayerWithExtraState(nn.Linear):
    """A layer with extra state, which ``set_extra_state`` accepts if ``accepts_state``."""

    accepts_state = True

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        if not self.accepts_state:
            raise KeyError("not here")


class UnpickledOnRank0Only:
    """An object that can be pickled, but unpickled on rank 0 only."""

    def __reduce__(self) -> Any:
        return _raise_unless_rank_0, ()


def _raise_unless_rank_0() -> None:
    if dist.get_rank() != 0:
        raise ImportError("no such class here")


def load_stages(rank: int, world: int) -> None:
    """Each rank's model has another layer and the same norm, as in pipeline parallelism."""
    mesh = init_device_mesh("cpu", (world,))
    for growth, bucket_bytes in ((0, None), (0, 40), (1, None), (1, 40)):
        full = {"norm": torch.arange(30.0)}
        for i in range(world):
            full[f"layers.{i}.weight"] = torch.randn(4 + growth * i, 4, generator=seeded(i))
            full[f"layers.{i}.bias"] = torch.randn(4 + growth * i, generator=seeded(i))
        for src in range(world):
            model = make_stage(rank, 4 + growth * rank)
            if rank == 1:  # only on this rank the parameter cannot be split into rows
                value = distribute_tensor(
                    torch.zeros(30), mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None
                )
                model.norm = nn.Parameter(value)
            source = full if rank == src else None
            keys = load_full_state_dict(
                model, source, src=src, bucket_bytes=bucket_bytes, strict=False
            )
            assert keys.missing_keys == [] and len(keys.unexpected_keys) == 2 * (world - 1)
            for name, value in model.state_dict().items():
                expected = full[name]
                if isinstance(value, DTensor):  # full_tensor() would wait for the other ranks
                    expected = distribute_tensor(
                        expected, mesh, value.placements, src_data_rank=None
                    )._local_tensor
                    value = value._local_tensor
                assert torch.equal(value, expected), name


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_stage(rank: int, width: int) -> nn.Module:
    model = nn.Module()
    model.norm = nn.Parameter(torch.zeros(30))
    model.layers = nn.ModuleDict({str(rank): nn.Linear(4, width)})
    return model


def assert_load_is_refused(
    rank: int, model: Any, match: str, extra: dict[str, Any], **options: Any
) -> None:
    """Loads ones and ``extra``. This raises before any parameter changes."""
    full = {name: torch.ones_like(value) for name, value in make_stage(0, 4).state_dict().items()}
    model.layers["0"].weight.detach().zero_()
    with pytest.raises(RuntimeError, match=match):
        load_full_state_dict(model, full | extra if rank == 0 else None, **options)
    assert not model.layers["0"].weight.any() and not model.norm.any()


def load_with_other_buckets(rank: int, world: int) -> None:
    match = f"buckets of {60 + rank} bytes"
    assert_load_is_refused(rank, make_stage(0, 4), match, {}, bucket_bytes=60 + rank)


def load_without_extra_state(rank: int, world: int) -> None:
    """Rank 1 has a module with extra state, which rank 0 does not have."""
    model = make_stage(0, 4)
    if rank == 1:
        model.state = LayerWithExtraState(1, 1)
    match = "state._extra_state: rank 0 does not send" if rank == 1 else "another rank refused"
    extra = {"state._extra_state": {"step": 3}}
    assert_load_is_refused(rank, model, match, extra, strict=False)


def load_and_fail_on_one_rank(
    rank: int, full: dict[str, torch.Tensor], assert_load_fails: Any
) -> None:
    """A failure of any part on any rank makes all ranks raise."""
    last = dist.get_world_size() - 1
    with unittest.mock.patch.dict(sys.modules, {"tqdm": None}):
        assert_load_fails(full if rank == 0 else None, "tqdm", progress=True)
    copy, make_destinations = buckets.copy_tensors, destinations.make_destinations
    collect_targets = destinations.collect_targets

    def copy_or_fail(copies: Any) -> None:
        copy_or_fail.copies_left -= 1
        if copy_or_fail.copies_left < 0:
            raise MemoryError("too small")
        copy(copies)

    def raise_memory_error(*args: Any) -> Any:
        raise MemoryError("no place")

    for failing_rank in (0, last):
        for copies_left in (0, 3):
            copy_or_fail.copies_left = copies_left
            function = copy_or_fail if rank == failing_rank else copy
            with unittest.mock.patch.object(buckets, "copy_tensors", function):
                assert_load_fails(full if rank == 0 else None, "partly loaded", bucket_bytes=60)
        function = raise_memory_error if rank == failing_rank else make_destinations
        with unittest.mock.patch.object(destinations, "make_destinations", function):
            message = "no place" if rank == failing_rank else "another rank cannot allocate memory"
            assert_load_fails(full if rank == 0 else None, message)
        function = raise_memory_error if rank == failing_rank else collect_targets
        with unittest.mock.patch.object(destinations, "collect_targets", function):
            message = "no place" if rank == failing_rank else "another rank failed in state_dict()"
            assert_load_fails(full if rank == 0 else None, message)
    layer = fully_shard(LayerWithExtraState(4, 4))
    state = {"weight": torch.ones(4, 4), "bias": torch.ones(4), "_extra_state": 1}

    def assert_extra_state_fails(extra: Any, match: str) -> None:
        source = state | {"_extra_state": extra} if rank == 0 else None
        assert_load_fails(source, match, model=layer)

    assert_extra_state_fails(lambda: 0, "cannot be sent to the other ranks")
    assert_extra_state_fails(
        UnpickledOnRank0Only(),
        "cannot unpickle the values of the source rank" if rank == 0 else "no such class here",
    )
    layer.accepts_state = rank != last
    assert_extra_state_fails(2, "not here" if rank == last else "failed while loading")
    layer.accepts_state = True
    load_full_state_dict(layer, state if rank == 0 else None)


def contexts_ema_and_checkpoints(rank: int, world: int) -> None:
    full_params_of_uneven_shards(rank)
    full_params_of_dtypes_without_collective(rank)
    sharded_ema(rank)
    load_old_checkpoints(rank)


def full_params_of_uneven_shards(rank: int) -> None:
    full = full_values()
    model = sharded_net()
    load_full_state_dict(model, full if rank == 0 else None)
    with full_params(model, rank0_only=True, offload_to_cpu=True) as params:
        results = {name: param.detach().clone() for name, param in params.items()}
    assert bool(results) == (rank == 0)
    for name, value in results.items():
        assert torch.equal(value, full[name])
    with full_params(model) as params, torch.no_grad():
        for param in params.values():
            param.mul_(2)
    doubled = {n: v if n == "steps" else v * 2 for n, v in full.items()}
    assert_weights(model, doubled)
    plain = Net()
    plain.load_state_dict(doubled)
    # generate_with communicates only at its start: ranks generate different numbers of tokens.
    with generate_with(model):
        tokens = model.generate(torch.arange(3), 2 + 3 * rank)
    assert torch.equal(tokens, plain.generate(torch.arange(3), 2 + 3 * rank))


def full_params_of_dtypes_without_collective(rank: int) -> None:
    """gloo has no collective of float8 and uint16, so ``full_params`` gathers bytes."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex64):
        values = torch.arange(15.0).view(5, 3).to(dtype)
        module: Any = nn.Module()
        module.weight = nn.Parameter(values, requires_grad=False)
        module.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        module.forward = lambda: None
        fully_shard(module)
        with full_params(module) as params, torch.no_grad():
            assert torch.equal(params["weight"].to(torch.complex64), values.to(torch.complex64))
            assert params["empty"].shape == (0, 3)
            params["weight"].zero_()
        with full_params(module, rank0_only=True) as params:
            found = {name: param.detach() for name, param in params.items()}
        assert found.keys() == ({"weight", "empty"} if rank == 0 else set())
        assert rank != 0 or not found["weight"].to(torch.complex64).any()


def sharded_ema(rank: int) -> None:
    """ShardedEMA equals the average of the full weights; ``no_sync`` defers reductions."""
    torch.manual_seed(0)
    model = auto_shard(Net(), "blocks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = ShardedEMA(model, 0.9)
    expected: list[torch.Tensor] = []
    for step in range(3):
        with no_sync(model):
            backward(model, rank)
        backward(model, rank)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        weights = [param.full_tensor() for param in model.parameters()]
        if step == 0:
            expected = weights
        else:
            expected = [a.lerp(b, 1 - 0.9) for a, b in zip(expected, weights, strict=True)]
    with ema.applied(model):
        for param, value in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.full_tensor(), value)


def load_old_checkpoints(rank: int) -> None:
    """The recipes of docs/migrate.md load full checkpoints of DDP and FSDP1."""
    full = full_values()
    plain = Net()
    plain.load_state_dict(full)
    saved = DistributedDataParallel(plain).state_dict()
    assert all(name.startswith("module.") for name in saved)
    model = auto_shard(Net())
    load_full_state_dict(
        model,
        saved if rank == 0 else None,
        rename=lambda name: names.clean_tensor_name(name, ddp=True),
    )
    assert_weights(model, full)
    old = Net()
    old.load_state_dict(full)
    old = FullyShardedDataParallel(old, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(old, StateDictType.FULL_STATE_DICT):
        saved = old.state_dict()
    model = auto_shard(Net())
    load_full_state_dict(model, saved if rank == 0 else None)
    assert_weights(model, full)
