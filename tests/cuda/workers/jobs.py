"""Training jobs on the simulated CUDA device, under torch's FSDP2 and under fsdp_c.

This process is rank 0 of an NCCL group of 8 ranks. The other ranks are emulated: collectives move
no data between ranks, and report their reads and writes to the race detector of the simulated
device. The module must be imported after ``stub_runtime.start()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import stub_runtime
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

WORLD = 8
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Size:
    """Sizes of a transformer."""

    width: int
    hidden: int
    heads_width: int
    """Width of the keys and values."""
    vocabulary: int
    tokens: int
    experts: int = 0
    """Experts of a mixture in each block, of which a token uses eight. 0: one network."""
    vision: bool = False
    """Blocks have layer norms, biases, and an ungated network, as in a vision transformer."""


SMALL = Size(64, 128, 32, 96, 16)
SMALL_MOE = Size(64, 32, 32, 96, 16, experts=16)
SMALL_VIT = Size(64, 128, 64, 96, 16, vision=True)
MIDDLE = Size(1024, 2816, 256, 8192, 256)
LLAMA_8B = Size(4096, 14336, 1024, 32000, 1024)
QWEN3_MOE = Size(2048, 768, 512, 151936, 1024, experts=128)
VIT_L = Size(1024, 4096, 1024, 1000, 197, vision=True)


class Network(nn.Module):
    """The gated network of a decoder block, or an expert."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A router and experts. Each expert has the mean number of tokens, so the host need not know
    the router's choices. The device runs no kernel, so the values do not matter."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = nn.ModuleList(Network(size) for _ in range(size.experts))
        self.share = max(8 * size.tokens // size.experts, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            part = x[:, : self.share] * weights[:, : self.share, index : index + 1]
            result[:, : self.share] += expert(part)
        return result


class Block(nn.Module):
    """A transformer block with the linear layers, norms and sizes of a model, without attention."""

    def __init__(self, size: Size, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        norm, bias = nn.LayerNorm if size.vision else nn.RMSNorm, size.vision
        self.norm1, self.norm2 = norm(size.width), norm(size.width)
        self.q = nn.Linear(size.width, size.width, bias=bias)
        self.k = nn.Linear(size.width, size.heads_width, bias=bias)
        self.v = nn.Linear(size.width, size.heads_width, bias=bias)
        self.o = nn.Linear(size.width, size.width, bias=bias)
        self.network: nn.Module
        if size.vision:
            up, down = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)
            self.network = nn.Sequential(up, nn.GELU(), down)
        else:
            self.network = Experts(size) if size.experts else Network(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpoints and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        repeats = y.shape[-1] // self.k.out_features
        mixed = self.k(y).repeat(1, 1, repeats) + self.v(y).repeat(1, 1, repeats)
        x = x + self.o(self.q(y) * mixed)
        return x + self.network(self.norm2(x))


class Unit(nn.Module):
    """Contains and calls a block.

    ``fully_shard`` is applied to this module, so the block itself has no FSDP hooks.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Decoder(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, size: Size, blocks: int, checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, checkpoints) for _ in range(blocks))
        self.norm = (nn.LayerNorm if size.vision else nn.RMSNorm)(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Job:
    """Settings of one job. Except for ``mixed``, the defaults are those of ``fully_shard``."""

    hsdp: bool = False
    replicate: bool = False
    reshard: bool | int | None = None
    mixed: bool = True
    checkpoints: bool = False
    microbatches: int = 1
    sync_last: bool = False
    """Only the last microbatch reduces (``set_requires_gradient_sync``)."""
    all_reduce_last: bool = False
    """Only the last microbatch all-reduces (``set_requires_all_reduce``)."""
    hook_first: bool = False
    """``set_all_reduce_hook`` installs a hook on the blocks, for the first microbatch only.

    The hook changes no value.
    """
    shared_stream: bool = False
    """After each backward, other code allocates memory on the stream of the reduce-scatters.

    torch reuses the 32 streams of its pool, so code of users can have this stream, too.
    """
    offload: bool = False
    grouped_head: bool = False
    """``fully_shard([norm, head])``."""
    kept_storage: bool = False
    """Unsharded parameters keep their memory (``set_keep_unsharded_storage``)."""
    finalize: bool = False
    """``finalize_backward`` reduces the gradients of all microbatches."""
    roots: bool = False
    """Each block is a root; the other parameters are not sharded."""
    capturable: bool = False
    """Steps of the optimizer can be captured."""
    inner: bool = False
    """``fully_shard`` is applied to a ``Unit`` around each block."""


JOBS: dict[str, Job] = {
    "fsdp": Job(),
    "fsdp, float32": Job(mixed=False),
    "fsdp, kept after forward": Job(reshard=False),
    "fsdp, checkpointing": Job(checkpoints=True),
    "fsdp, 4 microbatches without sync": Job(microbatches=4, sync_last=True),
    "fsdp, grouped head": Job(grouped_head=True),
    "fsdp, smaller group after forward": Job(reshard=2),
    "hsdp": Job(hsdp=True),
    "hsdp, 4 microbatches without all-reduce": Job(hsdp=True, microbatches=4, all_reduce_last=True),
    "replicate": Job(replicate=True),
    "offload": Job(offload=True),
    "hsdp, checkpointing": Job(hsdp=True, checkpoints=True),
    "replicate, 4 microbatches without all-reduce": Job(
        replicate=True, microbatches=4, all_reduce_last=True
    ),
    "fsdp, capturable optimizer": Job(capturable=True),
    "fsdp, resharded after forward": Job(reshard=True),
    "hsdp, resharded after forward": Job(hsdp=True, reshard=True),
}
# Jobs with methods that torch has since 2.15.
if hasattr(FSDPModule, "finalize_backward"):
    JOBS["fsdp, kept storage"] = Job(kept_storage=True)
    JOBS["fsdp, 4 microbatches, finalize_backward"] = Job(microbatches=4, finalize=True)
    JOBS["hsdp, 4 microbatches, finalize_backward, checkpointing"] = Job(
        hsdp=True, microbatches=4, finalize=True, checkpoints=True
    )

FURTHER_JOBS: dict[str, Job] = {
    "hsdp, 4 microbatches": Job(hsdp=True, microbatches=4),
    "fsdp, 2 microbatches, a hook for the first": Job(microbatches=2, hook_first=True),
    "hsdp, stream shared with other code": Job(hsdp=True, microbatches=2, shared_stream=True),
}
"""Jobs that only ``ordering.py`` and ``cuda_bugs.py`` run, which check accesses."""


def _announce_splits() -> None:
    """Announces to the device the size of each group that a mesh splits from the default group."""
    split_group: Any = device_mesh.split_group

    def announce(*args: Any, split_ranks: list[list[int]], **kwargs: Any) -> Any:
        size = next(len(part) for part in split_ranks if 0 in part)
        stub_runtime.get_device().announce_split(size)
        return split_group(*args, split_ranks=split_ranks, **kwargs)

    device_mesh.split_group = announce


def join_group(**options: Any) -> None:
    """Makes this process rank 0 of an NCCL group.

    Turns the guard off, because the emulated ranks cannot take part in its comparisons.
    """
    os.environ["FSDP_C_GUARD"] = "off"
    torch.cuda.set_device(0)
    _announce_splits()
    dist.init_process_group("nccl", rank=0, world_size=WORLD, store=dist.HashStore(), **options)


def make_mesh(job: Job) -> DeviceMesh:
    if job.hsdp:
        return init_device_mesh("cuda", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cuda", (WORLD,), mesh_dim_names=("shard",))


def functions_of(implementation: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns ``fully_shard`` and ``replicate`` of "torch" or "fsdp_c"."""
    if implementation == "torch":
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.fsdp import fully_shard

        return fully_shard, replicate
    import fsdp_c

    return fsdp_c.fully_shard, fsdp_c.replicate


class Training:
    """A model and optimizer. ``implementation``: "bare" (one device), "torch" or "fsdp_c"."""

    def __init__(self, implementation: str, job: Job, size: Size = SMALL, blocks: int = 2) -> None:
        self.implementation, self.job = implementation, job
        with torch.device("cpu" if job.offload else "cuda"):
            self.model: Any = Decoder(size, blocks, job.checkpoints)
            if job.inner:
                self.model.blocks = nn.ModuleList(Unit(block) for block in self.model.blocks)
            if job.inner and job.grouped_head:
                self.model.norm, self.model.head = Unit(self.model.norm), Unit(self.model.head)
        if implementation == "bare":
            self.model.to(torch.bfloat16 if job.mixed else torch.float32)
        else:
            self._shard()
        if job.offload and implementation == "bare":
            self.model.cuda()
        modules = [module for unit in self.units for module in unit]
        trained = nn.ModuleList(modules) if job.roots else self.model
        self.optimizer = torch.optim.AdamW(
            trained.parameters(), fused=not job.offload, capturable=job.capturable
        )
        self.tokens = torch.zeros(1, size.tokens, dtype=torch.long, device="cuda")

    def _shard(self) -> None:
        job, (fully_shard, replicate) = self.job, functions_of(self.implementation)
        options: dict[str, Any] = {}
        if job.mixed:
            options["mp_policy"] = MIXED
        if job.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        options["mesh"] = make_mesh(job)
        function = replicate if job.replicate else fully_shard
        if not job.replicate and job.reshard is not None:
            options["reshard_after_forward"] = job.reshard
        for block in self.model.blocks:
            function(block, **options)
        if job.grouped_head:
            function([self.model.norm, self.model.head], **options)
        if not job.roots:
            function(self.model, **options)
        for root in self.roots:
            if job.kept_storage:
                root.set_keep_unsharded_storage(True)
            if job.finalize:
                root.set_manual_backward_finalization(True)

    @property
    def units(self) -> list[list[Any]]:
        """The modules of each unit below the model."""
        grouped = [[self.model.norm, self.model.head]] if self.job.grouped_head else []
        return [*([block] for block in self.model.blocks), *grouped]

    @property
    def roots(self) -> list[Any]:
        """A module of each root."""
        return [unit[0] for unit in self.units] if self.job.roots else [self.model]

    def start_microbatch(self, index: int) -> None:
        """Sets what the units do after the next backward, according to the job."""
        job, last = self.job, index == self.job.microbatches - 1
        for root in self.roots:
            if job.sync_last or job.finalize:
                root.set_requires_gradient_sync(last and not job.finalize)
            if job.all_reduce_last:
                root.set_requires_all_reduce(last)
            if job.all_reduce_last or job.hook_first:
                root.set_is_last_backward(last)

    def accumulate(self) -> None:
        """Runs the microbatches of one step."""
        job, sharded = self.job, self.implementation != "bare"
        for index in range(job.microbatches):
            if sharded:
                self.start_microbatch(index)
            if sharded and job.hook_first:
                self._set_hook(index == 0)
            self.model(self.tokens).float().sum().backward()
            if sharded and job.shared_stream:
                self._use_stream_of_reductions()
        if sharded and job.finalize:
            self.model.set_requires_gradient_sync(True)
            self.model.finalize_backward()

    def _set_hook(self, is_set: bool) -> None:
        for block in self.model.blocks:
            block.set_all_reduce_hook((lambda gradient: gradient.mul_(1)) if is_set else None)

    def _use_stream_of_reductions(self) -> None:
        """Allocates and writes memory of the sizes of the reduced gradients."""
        stream = self.model._get_fsdp_state()._comm_ctx.reduce_scatter_stream
        with torch.cuda.stream(stream):
            units = [*self.model.blocks, self.model]
            parts = [[p.to_local().numel() for p in unit.parameters()] for unit in units]
            kept = [torch.zeros(sum(numbers), device="cuda") for numbers in parts]
            del kept

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def declare_accesses_of_host(self) -> None:
        """Declares the accesses of an optimizer on the CPU."""
        device = stub_runtime.get_device()
        for p in self.model.parameters():
            local, grad = p.to_local(), p.grad.to_local()
            device.access_on_host(grad.data_ptr(), grad.nbytes)
            device.access_on_host(local.data_ptr(), local.nbytes, write=True)

    def step(self) -> None:
        self.accumulate()
        if self.job.offload:
            self.declare_accesses_of_host()
        self.optimize()


def start_training(implementation: str, name: str, size: str, blocks: int) -> Training:
    """Joins the group and trains the job ``name`` for three steps, which fill caches."""
    join_group()
    training = Training(implementation, JOBS[name], globals()[size], blocks)
    for _ in range(3):
        training.step()
    return training
