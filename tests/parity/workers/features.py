"""Features that the generated grid does not cover: one seeded training per case on four gloo ranks.

``run(rank, world_size, implementation)`` runs every case under one implementation and returns
``{case: record}``. A record holds losses as numbers, and gradients and parameters as digests of
their bytes, so that equal records mean equal bits. An exception is recorded as its text.
"""

from __future__ import annotations

import hashlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from building import load_implementation
from extensions import Negated
from releases import (
    ALL_GATHER_FUNCTION,
    REDUCE_SCATTER_FUNCTION,
    DataParallelMeshDims,
    ShardPlacementResult,
    has,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 16

Record = list[Any]
Sync = Callable[[Any, bool], None]


class Tools:
    """One implementation's functions, and this process's rank.

    ``implementation``: as for ``load_implementation``.
    """

    def __init__(self, rank: int, world_size: int, implementation: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.fully_shard = load_implementation(implementation)
        replicate_module = (
            "torch.distributed._composable.replicate_with_fsdp"
            if implementation == "torch"
            else "fsdp_c"
        )
        self.replicate = importlib.import_module(replicate_module).replicate

    def mesh(self, *names: str) -> DeviceMesh:
        """Returns a mesh of shape (2, world_size / 2)."""
        return init_device_mesh("cpu", (2, self.world_size // 2), mesh_dim_names=names)

    def shard(self, model: nn.Sequential, **kwargs: Any) -> Any:
        for block in model:
            self.fully_shard(block, **kwargs)
        return self.fully_shard(model, **kwargs)

    def input(self, step: int, width: int = WIDTH) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(4, width, generator=generator)

    def train(
        self, model: Any, *, micro: int = 1, sync: Sync | None = None, width: int = WIDTH
    ) -> Record:
        """Trains three steps of ``micro`` backwards. Calls ``sync(model, is_last)`` before each
        backward."""
        record: Record = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            for index in range(micro):
                if sync is not None:
                    sync(model, index == micro - 1)
                loss = model(self.input(10 * step + index, width)).float().pow(2).sum()
                loss.backward()
                record.append(loss.item())
            record.append(digest(p.grad for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        return [*record, digest(model.parameters())]

    def accumulate(self, model: Any) -> Record:
        """Runs three backwards without optimizer steps and without clearing gradients."""
        record: Record = []
        for step in range(3):
            loss = model(self.input(step)).pow(2).sum()
            loss.backward()
            record += [loss.item(), digest(p.grad for p in model.parameters())]
        return record


def blocks(seed: int = 0, width: int = WIDTH, bias: bool = True) -> nn.Sequential:
    """Creates three blocks of two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(width, 2 * width, bias=bias),
                nn.ReLU(),
                nn.Linear(2 * width, width, bias=bias),
            )
            for _ in range(3)
        )
    )


COLLECTIVES = (ALL_GATHER_FUNCTION, REDUCE_SCATTER_FUNCTION, "all_reduce")


@contextmanager
def _calls_recorded(calls: list[str], *names: str) -> Iterator[None]:
    """Replaces functions of ``torch.distributed`` by ones that append their names to ``calls``."""
    originals = {name: getattr(dist, name) for name in names}

    def recording(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, recording(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def digest(tensors: Any) -> str:
    """Hashes the bytes of all local tensors. None counts as a value of its own."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local is None:
            hasher.update(b"none")
        elif local.numel() > 0:
            data = local.detach().cpu().contiguous().clone()
            hasher.update(data.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


class Gather(AllGather):
    """A custom all-gather that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(ReduceScatter):
    """A custom reduce-scatter that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


CASES: dict[str, Callable[[Tools], Record]] = {}
SINCE: dict[str, str] = {}
"""The first torch release that supports a case. Cases that are not listed need none."""


def case(function: Callable[[Tools], Record]) -> Callable[[Tools], Record]:
    CASES[function.__name__] = function
    return function


def since(release: str) -> Callable[[Callable[[Tools], Record]], Callable[[Tools], Record]]:
    def mark(function: Callable[[Tools], Record]) -> Callable[[Tools], Record]:
        SINCE[function.__name__] = release
        return function

    return mark


# ---- HSDP and replicate ----


def all_reduce_last(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def sync_last(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def _hsdp(tools: Tools, sync: Sync | None = None, micro: int = 1, **kwargs: Any) -> Record:
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"), **kwargs)
    return tools.train(model, micro=micro, sync=sync)


@case
def hsdp(tools: Tools) -> Record:
    return _hsdp(tools)


@case
def hsdp_mixed(tools: Tools) -> Record:
    return _hsdp(tools, mp_policy=MIXED)


@case
def hsdp_fp16(tools: Tools) -> Record:
    return _hsdp(tools, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


@case
def hsdp_all_reduce_in_last_microbatch(tools: Tools) -> Record:
    return _hsdp(tools, all_reduce_last, 3)


@case
def hsdp_mixed_all_reduce_in_last_microbatch(tools: Tools) -> Record:
    return _hsdp(tools, all_reduce_last, 3, mp_policy=MIXED)


@case
def hsdp_reduction_in_last_microbatch(tools: Tools) -> Record:
    return _hsdp(tools, sync_last, 2)


@case
def hsdp_force_sum_reduction(tools: Tools) -> Record:
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"))
    for unit in (*model, model):
        unit.set_force_sum_reduction_for_comms(True)
    return tools.train(model)


@case
def hsdp_all_reduce_hook(tools: Tools) -> Record:
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"))
    for unit in (*model, model):
        unit.set_all_reduce_hook(lambda row: row.mul_(0.5))
    return tools.train(model)


@case
def replicate(tools: Tools) -> Record:
    model = blocks()
    for block in model:
        tools.replicate(block)
    return tools.train(tools.replicate(model), micro=2, sync=sync_last)


@case
def replicate_mixed(tools: Tools) -> Record:
    return tools.train(tools.replicate(blocks(), mp_policy=MIXED), micro=2, sync=all_reduce_last)


@case
def replicate_below_fully_shard(tools: Tools) -> Record:
    model = blocks()
    tools.replicate(model[0])
    tools.fully_shard(model[1])
    return tools.train(tools.fully_shard(model))


# ---- shard placement and reshard_after_forward ----


def place_on_dim_1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


@case
def shard_dim_1(tools: Tools) -> Record:
    return tools.train(tools.shard(blocks(), shard_placement_fn=place_on_dim_1, mp_policy=MIXED))


@case
def shard_dim_1_hsdp(tools: Tools) -> Record:
    return _hsdp(tools, shard_placement_fn=place_on_dim_1)


@case
def reshard_to_two_ranks(tools: Tools) -> Record:
    return tools.train(tools.shard(blocks(), reshard_after_forward=2, mp_policy=MIXED))


@case
def reshard_to_two_ranks_uneven(tools: Tools) -> Record:
    return tools.train(tools.shard(blocks(width=9), reshard_after_forward=2), width=9)


@case
def reshard_to_two_ranks_patched_collectives(tools: Tools) -> Record:
    """Replaces torch's all-gather and reduce-scatter by counting functions during training."""
    calls: list[str] = []
    with _calls_recorded(calls, ALL_GATHER_FUNCTION, REDUCE_SCATTER_FUNCTION):
        record = tools.train(tools.shard(blocks(), reshard_after_forward=2, mp_policy=MIXED))
    return [*record, calls]


@case
def hsdp_patched_collectives_while_accumulating(tools: Tools) -> Record:
    """Only the last of four microbatches has an all-reduce. The collectives are replaced in every
    other microbatch."""
    calls: list[str] = []
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"))
    record: Record = []
    for step in range(2):
        for index in range(4):
            model.set_requires_all_reduce(index == 3)
            with _calls_recorded(calls, *(COLLECTIVES if (step + index) % 2 else ())):
                model(tools.input(10 * step + index)).pow(2).sum().backward()
        record.append(digest(p.grad for p in model.parameters()))
        model.zero_grad()
    return [*record, calls]


@since("2.13")
@case
def mesh_per_parameter(tools: Tools) -> Record:
    info = FSDPMeshInfo(tools.mesh("replicate", "shard")["shard"], shard_mesh_dim=0)

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), info) if param.shape[0] == 2 * WIDTH else None

    return tools.train(tools.shard(blocks(), shard_placement_fn=place))


@case
def offload(tools: Tools) -> Record:
    policy = CPUOffloadPolicy(pin_memory=False)
    return tools.train(tools.shard(blocks(), offload_policy=policy))


# ---- tensor and pipeline parallelism ----


def _tensor_parallel(mesh: DeviceMesh) -> nn.Sequential:
    model = blocks()
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


@case
def tensor_parallel(tools: Tools) -> Record:
    mesh = tools.mesh("dp", "tp")
    return tools.train(tools.shard(_tensor_parallel(mesh), mesh=mesh["dp"]))


@case
def tensor_parallel_mixed_accumulated(tools: Tools) -> Record:
    mesh = tools.mesh("dp", "tp")
    model = tools.shard(_tensor_parallel(mesh), mesh=mesh["dp"], mp_policy=MIXED)
    return tools.train(model, micro=2, sync=sync_last)


@since("2.13")
@case
def spmd_mesh_with_dp_mesh_dims(tools: Tools) -> Record:
    mesh = tools.mesh("dp", "tp")
    model = blocks(bias=False)
    for block in model:
        for index, dim in ((0, 0), (2, 1)):
            full_weight = block[index].weight.detach()
            weight = distribute_tensor(full_weight, mesh, [Replicate(), Shard(dim)])
            block[index].weight = nn.Parameter(weight)
    tools.shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    record: Record = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + mesh["dp"].get_local_rank())
        local = torch.randn(4, WIDTH, generator=generator)
        x = DTensor.from_local(local, mesh, [Shard(0), Replicate()])
        loss = model(x).pow(2).sum()
        loss.backward()
        record += [loss.full_tensor().item(), digest(p.grad for p in model.parameters())]
    return record


@case
def pipeline_of_two_stages(tools: Tools) -> Record:
    mesh = tools.mesh("pp", "dp")
    index = mesh["pp"].get_local_rank()
    block = blocks()[index]
    tools.fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(block, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(
        stage, n_microbatches=4, loss_fn=lambda output, target: (output - target).pow(2).mean()
    )
    generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    x = torch.randn(8, WIDTH, generator=generator)
    record: Record = []
    for _ in range(2):
        losses: list[torch.Tensor] = []
        if index == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        record += [[loss.item() for loss in losses], digest(p.grad for p in block.parameters())]
    return record


# ---- custom communication and extensions ----


@case
def custom_collectives(tools: Tools) -> Record:
    model = tools.shard(blocks(), mp_policy=MIXED)
    gather, scatter = Gather(), Scatter()
    for unit in (*model, model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
    return [*tools.train(model), gather.calls, scatter.calls]


@case
def hsdp_custom_reduce_scatter(tools: Tools) -> Record:
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"))
    for unit in (*model, model):
        unit.set_custom_reduce_scatter(Scatter())
    return tools.train(model, micro=2, sync=all_reduce_last)


@case
def reduce_hook(tools: Tools) -> Record:
    model = tools.shard(blocks())
    for unit in (*model, model):
        unit.set_all_reduce_hook(lambda row: row.mul_(0.5))
    return tools.train(model)


@since("2.13")
@case
def separate_reduce_scatter_group(tools: Tools) -> Record:
    model = tools.shard(blocks())
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_max_input_buffers(3)
    return tools.train(model)


@case
def all_gather_extension(tools: Tools) -> Record:
    model = blocks(bias=False)
    for block in model:
        block[0].weight = nn.Parameter(Negated(block[0].weight.detach()))
    tools.shard(model)
    return tools.accumulate(model)


@case
def registered_forward_method(tools: Tools) -> Record:
    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x).relu()

    torch.manual_seed(0)
    model: Any = tools.fully_shard(Coder())
    fsdp.register_fsdp_forward_method(model, "encode")
    record: Record = []
    for step, method in enumerate((model.encode, model, model.encode)):
        loss = method(tools.input(step)).sum()
        loss.backward()
        record += [loss.item(), digest(p.grad for p in model.parameters())]
    return record


# ---- torch.compile, torch.func, autograd modes ----


@case
def compiled_blocks(tools: Tools) -> Record:
    model = blocks()
    for block in model:
        block.compile(backend="eager")
    return tools.train(tools.shard(model))


@case
def compiled_root(tools: Tools) -> Record:
    return tools.train(torch.compile(tools.shard(blocks()), backend="eager"))


@since("2.13")
@case
def func_jvp(tools: Tools) -> Record:
    model = tools.shard(blocks())
    x = tools.input(0)
    return [digest(torch.func.jvp(model, (x,), (torch.ones_like(x),)))]


@since("2.13")
@case
def func_grad(tools: Tools) -> Record:
    model = tools.shard(blocks())
    return [digest([torch.func.grad(lambda x: model(x).sum())(tools.input(0))])]


@case
def autograd_grad_of_input(tools: Tools) -> Record:
    model = tools.shard(blocks())
    x = tools.input(0).requires_grad_()
    return [digest(torch.autograd.grad(model(x).sum(), x)), *tools.train(model)]


@case
def inference_mode_between_steps(tools: Tools) -> Record:
    model = tools.shard(blocks())
    record = tools.train(model)
    with torch.inference_mode():
        record.append(digest([model(tools.input(0))]))
    return record + tools.train(model)


def assert_same_bits(
    torch_records: list[dict[str, Record]], fsdp_c_records: list[dict[str, Record]], name: str
) -> None:
    """Checks on every rank that the case ran under torch and gave the same record under fsdp_c."""
    for expected, actual in zip(torch_records, fsdp_c_records, strict=True):
        assert not str(expected[name][0]).startswith("raised "), f"torch {expected[name][0]}"
        assert actual[name] == expected[name]


def run(rank: int, world_size: int, implementation: str) -> dict[str, Record]:
    """Runs all cases in order and returns their records."""
    warnings.simplefilter("ignore")
    tools = Tools(rank, world_size, implementation)
    records: dict[str, Record] = {}
    for name, function in CASES.items():
        if not has(SINCE.get(name, "2.11")):
            continue
        try:
            records[name] = function(tools)
        except Exception as error:
            records[name] = [f"raised {type(error).__name__}: {error}"]
        dist.barrier()
    return records
