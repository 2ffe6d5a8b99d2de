"""Scenarios of bugs of torch's FSDP2; most return the results found and the results expected.

Names such as B2 are the entries of tests/TORCH_BUGS.md.

Unless a scenario states otherwise, the expected results are those of the unsharded model, with
gradients averaged over the ranks (``average``).
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from behavior import DIM, Api, batch, blocks_and_head, grads, scenario, shard, weights
from releases import REDUCE_SCATTER_FUNCTION, groups_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    share_comm_ctx,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint
from toy_models import ResidualBlock

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Gradients = dict[str, torch.Tensor | None]


# ---- the reference ----


def take_gradients(model: nn.Module, dtype: torch.dtype = torch.float32) -> Gradients:
    """Removes this rank's gradients from the model and returns them in ``dtype``."""
    results: Gradients = {}
    for name, param in model.named_parameters():
        results[name] = None if param.grad is None else param.grad.to(dtype)
        param.grad = None
    return results


def add_gradients(first: Gradients, second: Gradients) -> Gradients:
    """Returns the sum of the gradients of two microbatches."""
    results = dict(first)
    for name, grad in second.items():
        total = results[name]
        results[name] = grad if total is None else total if grad is None else total + grad
    return results


def average(gradients: Gradients) -> Gradients:
    """Returns the mean over all ranks. A rank without a gradient counts as zeros."""
    results: Gradients = {}
    for name, grad in gradients.items():
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, grad)
        parts = [item for item in by_rank if item is not None]
        while len(parts) > 1:  # sum in pairs, as on a 2 x 2 mesh
            parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
        results[name] = parts[0] / len(by_rank) if parts else None
    return results


def in_bf16(model: nn.Module) -> nn.Module:
    """Returns a copy in the compute dtype of ``MIXED``."""
    return copy.deepcopy(model).to(torch.bfloat16)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def step_by(model: nn.Module, gradients: Gradients, lr: float = 0.1) -> None:
    """Does a step of plain SGD."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            grad = gradients[name]
            if grad is not None:
                param.sub_(grad.to(param.dtype), alpha=lr)


# ---- groups that are skipped (B2, B7) ----


class SelectableBlocks(nn.Module):
    """Adds the outputs of the chosen blocks and applies a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, *chosen: int) -> torch.Tensor:
        first, *rest = (self.blocks[index](x) for index in chosen)
        return self.head(sum(rest, first))


def selectable_blocks() -> SelectableBlocks:
    torch.manual_seed(7)
    return SelectableBlocks()


def shard_selectable_blocks(api: Api, model: SelectableBlocks, **kwargs: Any) -> SelectableBlocks:
    for block in model.blocks:
        api.fully_shard(block, **kwargs)
    return api.fully_shard(model, **kwargs)


@scenario()
def group_skipped_in_accumulation(api: Api) -> dict[str, Any]:
    """B2: a block does not run in one of the microbatches without sync, with a reduce dtype."""
    reference = in_bf16(selectable_blocks())
    model = shard_selectable_blocks(api, selectable_blocks(), mp_policy=MIXED)
    expected: Gradients = dict.fromkeys(dict(reference.named_parameters()))
    for step, chosen in enumerate([(0,), (0, 1), (1,)]):
        x = batch(api.rank, step)
        loss_of(reference(x.to(torch.bfloat16), *chosen)).backward()
        expected = add_gradients(expected, take_gradients(reference))
        model.set_requires_gradient_sync(step == 2)
        loss_of(model(x, *chosen)).backward()
    return {"found": grads(model), "expected": average(expected)}


@scenario()
def unused_groups_are_reduced(api: Api) -> dict[str, Any]:
    """B7: the reduce-scatter count of a step must not depend on the blocks of earlier steps."""
    model = shard_selectable_blocks(api, selectable_blocks())
    model.set_reduce_scatter_unused_params(True)
    counts = []
    for chosen in [(0,), (0, 1), (0,)]:
        loss = loss_of(model(batch(api.rank), *chosen))
        with CommDebugMode() as mode:
            loss.backward()
        counts.append(mode.get_comm_counts()[torch.ops.c10d._reduce_scatter_base_])
        has_grad = {name: p.grad is not None for name, p in model.named_parameters()}
        model.zero_grad()
    return {"counts": counts, "all have gradients": all(has_grad.values())}


# ---- one rank (B3) ----


def mesh_of_one(api: Api) -> DeviceMesh:
    return init_device_mesh("cpu", (api.world, 1), mesh_dim_names=("other", "alone"))["alone"]


@scenario()
def one_rank_in_inference_mode(api: Api) -> dict[str, Any]:
    """B3: runs a forward in inference mode on a mesh of one rank, then a training step."""
    reference, model = blocks_and_head(), shard(api, blocks_and_head(), mesh=mesh_of_one(api))
    with torch.inference_mode():
        output = model(batch(api.rank)).clone()
    loss_of(reference(batch(api.rank))).backward()
    loss_of(model(batch(api.rank))).backward()
    return {
        "output": torch.equal(output, reference(batch(api.rank)).detach()),
        "found": grads(model),
        "expected": take_gradients(reference),
    }


class Halves(torch.Tensor):
    """A tensor whose all-gather inputs are two tensors that add up to it."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Halves:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *unused: Any) -> Halves:
        return Halves(inner["data_"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def strip(value: Any) -> Any:
            return value.data_ if isinstance(value, Halves) else value

        args, kwargs = torch.utils._pytree.tree_map(strip, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.sub_.Tensor):
            return result
        return torch.utils._pytree.tree_map_only(torch.Tensor, Halves, result)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], None]:
        return (self.data_ * 0.25, self.data_ * 0.75), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        small, large = outputs
        if out is None:
            return small + large, outputs
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            torch.add(small, large, out=out)
        return None


@scenario()
def one_rank_with_an_extension(api: Api) -> dict[str, Any]:
    """B3: uses an all-gather extension that sends two tensors, on a mesh of one rank."""
    reference, model = nn.Linear(DIM, 3, bias=False), nn.Linear(DIM, 3, bias=False)
    model.weight = nn.Parameter(Halves(reference.weight.detach().clone()))
    api.fully_shard(model, mesh=mesh_of_one(api))
    results = []
    for step in range(2):
        loss_of(reference(batch(api.rank, step))).backward()
        loss_of(model(batch(api.rank, step))).backward()
        assert reference.weight.grad is not None and model.weight.grad is not None
        grad = model.weight.grad.to_local()
        results.append(torch.equal(getattr(grad, "data_", grad), reference.weight.grad))
    return {"equal": results}


# ---- evaluation (B6) and a first forward in inference mode ----


@scenario()
def training_after_evaluations(api: Api) -> dict[str, Any]:
    """B6: forwards without backward must not add gathers to later steps."""
    torch.manual_seed(7)
    model = nn.Sequential(*(api.fully_shard(ResidualBlock()) for _ in range(3)))
    api.fully_shard(model)

    def gathers_of_a_step() -> int:
        with CommDebugMode() as mode:
            loss_of(model(batch(api.rank))).backward()
        return mode.get_comm_counts()[torch.ops.c10d._allgather_base_]

    before = gathers_of_a_step()
    with torch.no_grad():
        for _ in range(3):
            model(batch(api.rank))
    context = model._get_fsdp_state()._comm_ctx
    forwards = None if api.is_fsdp_c else len(context.post_forward_order)
    return {"before": before, "after": gathers_of_a_step(), "recorded forwards": forwards}


@scenario()
def first_forward_in_inference_mode(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {"found": [], "expected": []}
    for policy, reshard in ((None, True), (None, None), (MIXED, True)):
        options = {} if policy is None else {"mp_policy": policy}
        reference = blocks_and_head() if policy is None else in_bf16(blocks_and_head())
        model = shard(api, blocks_and_head(), reshard_after_forward=reshard, **options)
        with torch.inference_mode():
            model(batch(api.rank))
        for step in range(2):
            x = batch(api.rank, step)
            loss_of(reference(x.to(reference[-1].weight.dtype))).backward()
            results["expected"].append(average(take_gradients(reference)))
            loss_of(model(x)).backward()
            results["found"].append(grads(model))
            model.zero_grad()
    return results


# ---- two roots, one context (B15) ----


def two_roots(api: Api, share_first: bool) -> dict[str, Any]:
    references = [blocks_and_head(seed=1), blocks_and_head(seed=2)]
    models = [shard(api, blocks_and_head(seed=seed)) for seed in (1, 2)]
    if not share_first:
        for model in models:
            model._get_fsdp_state()._lazy_init()
    share_comm_ctx(models)
    results: dict[str, Any] = {"found": [], "expected": []}
    for order in ((0, 1), (1, 0), (1, 0)):
        losses = [loss_of(model(batch(api.rank, i))) for i, model in enumerate(models)]
        for i in order:
            losses[i].backward()
            results["found"].append(grads(models[i]))
            models[i].zero_grad()
            loss_of(references[i](batch(api.rank, i))).backward()
            results["expected"].append(average(take_gradients(references[i])))
    return results


@scenario()
def two_roots_sharing_before_lazy_init(api: Api) -> dict[str, Any]:
    """B15: runs forwards of two roots with one context, then a backward of each."""
    return two_roots(api, True)


@scenario()
def two_roots_sharing_after_lazy_init(api: Api) -> dict[str, Any]:
    """B15: shares the context after lazy init of both roots."""
    return two_roots(api, False)


# ---- messages and waits (B13, B14) ----


@contextlib.contextmanager
def captured_output() -> Iterator[io.StringIO]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


@scenario()
def assertion_of_to_sharded_dtensor(api: Api) -> dict[str, Any]:
    """B13: an error must only raise, and not also print on every rank."""
    model = api.fully_shard(nn.Linear(DIM, 3))
    param = groups_of(model._get_fsdp_state())[0].fsdp_params[0]
    with captured_output() as text:
        try:
            param.to_sharded_dtensor(torch.zeros(1, 1))
            error = ""
        except AssertionError as raised:
            error = str(raised)
    return {"error": error, "printed": text.getvalue()}


class CountedEvent:
    def __init__(self, waited: list[int], number: int) -> None:
        self.waited, self.number = waited, number

    def synchronize(self) -> None:
        self.waited.append(self.number)


class PlainScatter:
    """A custom reduce-scatter of user code."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        getattr(dist, REDUCE_SCATTER_FUNCTION)(output_tensor, input_tensor, group=group, op=op)


@scenario()
def waits_for_offloaded_gradients(api: Api) -> dict[str, Any]:
    """B14: one stream copies all gradients of a group, so one wait for the last copy suffices.

    Copies are asynchronous only on an accelerator, so here each recorded event is replaced by a
    ``CountedEvent``.
    """
    model = api.fully_shard(ResidualBlock())
    model.set_custom_reduce_scatter(PlainScatter())
    group = groups_of(model._get_fsdp_state())[0]
    waited: list[int] = []
    recorded: list[CountedEvent] = []

    def record_event(stream: Any) -> CountedEvent:
        recorded.append(CountedEvent(waited, len(recorded)))
        return recorded[-1]

    loss = loss_of(model(batch(api.rank)))
    for param in group.fsdp_params:
        param.offload_to_cpu = param.pin_memory = True
    with mock.patch.object(torch.cpu.Stream, "record_event", record_event):
        loss.backward()
    events = [param.grad_offload_event for param in group.fsdp_params]
    return {"params": len(events), "waited": len(waited), "cleared": events.count(None)}


# ---- dtypes ----


def train_parts(api: Api, trainable: list[Callable[[nn.Module], bool]]) -> Any:
    """Trains the parts that ``trainable[step]`` selects. The first step has no backward."""
    master, model = blocks_and_head(), shard(api, blocks_and_head(), mp_policy=MIXED)
    results: dict[str, Any] = {"found": [], "expected": []}
    for step, is_trainable in enumerate(trainable):
        for module in (master, model):
            for part in module:
                part.requires_grad_(is_trainable(part))
        half = in_bf16(master)
        x = batch(api.rank, step)
        if step > 0:
            loss_of(half(x.to(torch.bfloat16))).backward()
            loss_of(model(x)).backward()
        else:
            model(x)
        expected = average(take_gradients(half))
        results["expected"].append(expected)
        results["found"].append(grads(model))
        step_by(master, expected)
        step_by(model, {name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    return results


@scenario()
def frozen_in_first_forward(api: Api) -> Any:
    """Parameters are frozen in the first forward and trained later, under mixed precision."""

    def none(part: nn.Module) -> bool:
        return False

    def every(part: nn.Module) -> bool:
        return True

    def blocks(part: nn.Module) -> bool:
        return isinstance(part, ResidualBlock)

    return train_parts(api, [none, every, blocks, every])


@scenario()
def dtype_changed_between_steps(api: Api) -> dict[str, Any]:
    """Calls model.to(dtype) between steps, with and without mixed precision."""
    results: dict[str, Any] = {"found": [], "expected": []}
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32), MIXED):
        master, model = blocks_and_head(), shard(api, blocks_and_head(), mp_policy=policy)
        for step, dtype in enumerate((None, torch.bfloat16, None, torch.float32, torch.float64)):
            if dtype is not None:
                master.to(dtype)
                model.to(dtype)
            dtype = next(master.parameters()).dtype
            compute = policy.param_dtype or dtype
            plain_model = copy.deepcopy(master).to(compute)
            x = batch(api.rank, step).to(dtype)
            loss_of(plain_model(x.to(compute))).backward()
            loss_of(model(x)).backward()
            reduced = policy.reduce_dtype or compute
            expected = mean_in(plain_model, reduced, dtype)
            results["expected"].append(expected)
            results["found"].append(grads(model))
            step_by(master, expected)
            step_by(model, {name: p.grad for name, p in model.named_parameters()})
            model.zero_grad()
        results["expected"].append({name: p.detach() for name, p in master.named_parameters()})
        results["found"].append(weights(model))
    return results


def mean_in(model: nn.Module, reduced: torch.dtype, dtype: torch.dtype) -> Gradients:
    """Returns the gradients averaged over the ranks in ``reduced``, cast to ``dtype``."""
    results: Gradients = {}
    for name, param in model.named_parameters():
        if param.grad is None:
            results[name] = None
            continue
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, param.grad.to(reduced))
        results[name] = (sum(by_rank[1:], by_rank[0]) / len(by_rank)).to(dtype)
    return results


class Dtypes(nn.Module):
    """Parameters of two dtypes in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x.to(self.norm.weight.dtype)).to(self.linear.weight.dtype)
        return self.linear(hidden).float()


@scenario()
def several_original_dtypes(api: Api, custom_scatter: bool = False) -> dict[str, Any]:
    """Trains fp32 and bf16 parameters in one group, with one reduce dtype."""
    results: dict[str, Any] = {"found": [], "expected": []}
    policies = (MixedPrecisionPolicy(reduce_dtype=torch.float32), MIXED)
    for policy in policies:
        torch.manual_seed(5)
        reference = Dtypes()
        if policy.param_dtype is not None:
            reference.to(policy.param_dtype)
        torch.manual_seed(5)
        offload = CPUOffloadPolicy(pin_memory=False) if custom_scatter else OffloadPolicy()
        model = api.fully_shard(Dtypes(), mp_policy=policy, offload_policy=offload)
        if custom_scatter:
            model.set_custom_reduce_scatter(PlainScatter())
        target_dtypes = {name: p.dtype for name, p in model.named_parameters()}
        for step in range(2):
            x = batch(api.rank, step)
            loss_of(reference(x)).backward()
            means = mean_in(reference, torch.float32, torch.float32)
            reference.zero_grad()
            loss_of(model(x)).backward()
            results["expected"].append({n: g.to(target_dtypes[n]) for n, g in means.items()})  # type: ignore[union-attr]
            results["found"].append(grads(model))
            model.zero_grad()
    return results


@scenario()
def several_original_dtypes_with_a_custom_reduce_scatter(api: Api) -> dict[str, Any]:
    """Runs ``several_original_dtypes`` with a custom reduce-scatter and CPU offload."""
    return several_original_dtypes(api, custom_scatter=True)


@scenario()
def several_original_dtypes_in_accumulation(api: Api) -> dict[str, Any]:
    """Accumulates fp32 and bf16 gradients of one group. The first microbatch has no sync."""
    torch.manual_seed(5)
    reference = Dtypes()
    torch.manual_seed(5)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model = api.fully_shard(Dtypes(), mp_policy=policy)
    target_dtypes = {name: p.dtype for name, p in model.named_parameters()}
    sums: Gradients = dict.fromkeys(target_dtypes)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        loss_of(reference(batch(api.rank, step))).backward()
        sums = add_gradients(sums, take_gradients(reference))
        loss_of(model(batch(api.rank, step))).backward()
    expected = {n: g.to(target_dtypes[n]) for n, g in average(sums).items() if g is not None}
    return {"found": grads(model), "expected": expected}


# ---- CPU offload without an accelerator ----


@scenario()
def offload_without_an_accelerator(api: Api) -> dict[str, Any]:
    reference = blocks_and_head()
    model = shard(api, blocks_and_head(), offload_policy=CPUOffloadPolicy())
    results: dict[str, Any] = {"found": [], "expected": []}
    for step in range(2):
        loss_of(reference(batch(api.rank, step))).backward()
        expected = average(take_gradients(reference))
        loss_of(model(batch(api.rank, step))).backward()
        results["found"].append(grads(model))
        results["expected"].append(expected)
        step_by(reference, expected)
        step_by(model, {name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    return results


# ---- reset ----


@scenario()
def reset_in_accumulation(api: Api) -> dict[str, Any]:
    """A reset after a failure must drop the gradients of a microbatch without sync."""
    results: dict[str, Any] = {"found": [], "expected": []}
    for options in ({}, {"mp_policy": MIXED}):
        reference = in_bf16(blocks_and_head()) if options else blocks_and_head()
        model = shard(api, blocks_and_head(), **options)
        model.set_requires_gradient_sync(False)
        loss_of(model(batch(api.rank, 7))).backward()
        try:
            output = model(batch(api.rank, 8))
            output.register_hook(lambda grad: 1 / 0)
            loss_of(output).backward()
        except ZeroDivisionError:
            model.reset_iter_state()
            model.zero_grad()
        model.set_requires_gradient_sync(True)
        x = batch(api.rank, 9)
        loss_of(reference(x.to(reference[-1].weight.dtype))).backward()
        loss_of(model(x)).backward()
        results["found"].append(grads(model))
        results["expected"].append(average(take_gradients(reference)))
    return results


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@scenario()
def reentrant_checkpoints_of_two_forwards(api: Api) -> dict[str, Any]:
    """After two forwards, one backward and a step, the next forward must use new weights."""
    models = [shard(api, Recomputed(*blocks_and_head())) for _ in range(2)]
    model, reloaded = models
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model(batch(api.rank, 0)) + model(batch(api.rank, 1))).backward()
    optimizer.step()
    results = model(batch(api.rank, 2)).detach()
    reloaded.load_state_dict(model.state_dict())  # gives the expected results
    return {"found": results, "expected": reloaded(batch(api.rank, 2)).detach()}
