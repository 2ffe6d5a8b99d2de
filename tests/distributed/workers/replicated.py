"""Rank functions of test_replicate.py. Each function contains its assertions.

One seeded model trains under DDP, torch's ``replicate`` and fsdp_c's with several bucket sizes.
Losses, gradients and weights must have equal bits on two ranks. On more ranks the order of a sum
may depend on the position of an element in its message.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any

import releases
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard, replicate, set_transport

DIM = 6
MIB = 2**20
CAPS = {"one": 25.0, "several": 400 / MIB, "each": 1 / MIB}
"""Bucket sizes that give ``Net`` one bucket, several uneven ones, or one per parameter."""

Record = list[torch.Tensor]


class Net(nn.Module):
    """Residual layers of uneven sizes, an optional branch and a frozen scale.

    (batch, DIM) -> (batch, DIM). ``spare``: runs the optional branch. ``swapped``: runs the two
    halves in the opposite order. ``segments``: number of checkpointed calls of the last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.full((DIM,), 0.5), requires_grad=False)
        self.halves = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, DIM))
            for width in (3, 17)
        )
        self.spare = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, DIM)

    def forward(
        self, x: torch.Tensor, spare: bool = True, swapped: bool = False, segments: int = 0
    ) -> torch.Tensor:
        x = self.first(x) * self.scale
        order = (1, 0) if swapped else (0, 1)
        parts = {i: self.halves[i](x) for i in order}
        x = x + (parts[0] + parts[1])
        if spare:
            x = x + self.spare(x)
        for _ in range(segments):
            x = x + checkpoint(self.last, x, use_reentrant=True)
        return self.last(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def replicated_net(cap: float) -> Any:
    return replicate(net(), bucket_cap_mb=cap)


def batch(step: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + part)
    return torch.randn(4, DIM, generator=generator)


def plain(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def grads(model: nn.Module) -> Record:
    return [torch.empty(0) if p.grad is None else plain(p.grad) for p in model.parameters()]


def backward(model: Any, step: int, parts: int = 1, **kwargs: Any) -> Record:
    """Runs the backwards of one step, of which only the last reduces; returns the losses."""
    losses = []
    for part in range(parts):
        last = part == parts - 1
        sync_context: Any = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel):
            sync_context = sync_context if last else model.no_sync()
        else:
            model.set_requires_gradient_sync(last)
        with sync_context:
            loss = model(batch(step, part), **kwargs).float().square().mean()
            loss.backward()
        losses.append(loss.detach())
    return losses


def train(model: Any, steps: int = 3, **kwargs: Any) -> Record:
    """Trains ``steps`` steps; returns losses, gradients and weights."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    record = []
    for step in range(steps):
        record += backward(model, step, **kwargs)
        record += grads(model)
        optimizer.step()
        optimizer.zero_grad()
    return record + [plain(p) for p in model.parameters()]


def assert_same(expected: Record, actual: Record, label: object) -> None:
    assert len(expected) == len(actual), label
    for i, (a, b) in enumerate(zip(expected, actual)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{label}: item {i}: {a} and {b}"


def bucket_count(model: Any) -> int:
    [group] = model._get_fsdp_state()._fsdp_param_groups
    return len(group._buckets)


def outcomes(rank: int, world: int) -> dict[str, str]:
    """Runs all scenarios of this world size. Maps each scenario to its traceback, or to ""."""
    tracebacks = {}
    for scenario in SCENARIOS[world]:
        if scenario in SINCE_TORCH_2_13 and not releases.has("2.13"):
            continue  # the test is skipped, because torch's ranks would fail
        try:
            scenario(rank, world)
            tracebacks[scenario.__name__] = ""
        except Exception:
            tracebacks[scenario.__name__] = traceback.format_exc()
    return tracebacks


# ---- scenarios ----


def parity(rank: int, world: int) -> None:
    """Trains plainly, with accumulation, an unused parameter, and halves in both orders."""
    counts = {name: bucket_count(replicated_net(cap)) for name, cap in CAPS.items()}
    assert counts == {"one": 1, "several": 3, "each": 14}
    settings: list[dict[str, Any]] = [
        {},
        {"parts": 3},
        {"spare": False},
        {"spare": False, "parts": 2},
        {"swapped": True},
    ]
    for setting in settings:
        unused = not setting.get("spare", True)
        ddp = DistributedDataParallel(net(), find_unused_parameters=unused)
        expected = train(torch_replicate(net()), **setting)
        assert_same(train(ddp, **setting), expected, ("DDP", setting))
        for name, cap in CAPS.items():
            assert_same(expected, train(replicated_net(cap), **setting), (name, setting))


def orders(rank: int, world: int) -> None:
    """Autograd reaches the halves in different orders on the ranks."""
    expected = train(torch_replicate(net()), swapped=rank == 1)
    for name, cap in CAPS.items():
        assert_same(expected, train(replicated_net(cap), swapped=rank == 1), name)


def parameters_unused_on_one_rank(rank: int, world: int) -> None:
    """Parameters unused on one rank are reduced as zeros there, in the same order."""
    models = [torch_replicate(net()), *(replicated_net(cap) for cap in CAPS.values())]
    records = []
    for model in models:
        model.set_reduce_scatter_unused_params(True)
        records.append(train(model, spare=rank == 0))
    for record in records[1:]:
        assert_same(records[0], record, "unused on one rank")


def mixed_precision(rank: int, world: int) -> None:
    for reduce_dtype in (None, torch.float32):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        expected = train(torch_replicate(net(), mp_policy=policy), parts=2)
        for cap in CAPS.values():
            model = replicate(net(), mp_policy=policy, bucket_cap_mb=cap)
            assert_same(expected, train(model, parts=2), (reduce_dtype, cap))


def nested(rank: int, world: int) -> None:
    """Applies ``replicate`` to each half and the root, and below ``fully_shard``."""

    def build(call: Callable[..., Any], **kwargs: Any) -> Any:
        model = net()
        for half in model.halves:
            call(half, **kwargs)
        return call(model, **kwargs)

    expected = train(build(torch_replicate), parts=2)
    for cap in CAPS.values():
        assert_same(expected, train(build(replicate, bucket_cap_mb=cap), parts=2), cap)
    model = net()
    torch_replicate(model.halves[1])
    expected = train(torch_fully_shard(model))
    for cap in CAPS.values():
        model = net()
        replicate(model.halves[1], bucket_cap_mb=cap)
        assert_same(expected, train(fully_shard(model)), ("below fully_shard", cap))


def several_backwards(rank: int, world: int) -> None:
    """Two backwards of one graph both reduce; two forwards precede one backward."""

    def run(model: Any) -> Record:
        out = model(batch(0))
        out.square().mean().backward(retain_graph=True)
        out.sum().backward()
        record = grads(model)
        model.zero_grad()
        (model(batch(1)) + model(batch(2))).square().mean().backward()
        return record + grads(model)

    expected = run(torch_replicate(net()))
    for cap in CAPS.values():
        assert_same(expected, run(replicated_net(cap)), cap)


def recomputed_segments_sharing_parameters(rank: int, world: int) -> None:
    """Recomputed segments accumulate into shared parameters in separate backwards.

    Gradients that arrive after the reduction of their bucket must not be lost. Results are close,
    because sums of means round differently from means of sums.
    """
    expected = train(torch_replicate(net()), segments=3)
    for cap in CAPS.values():
        torch.testing.assert_close(train(replicated_net(cap), segments=3), expected)


def hooks_and_counts(rank: int, world: int) -> None:
    """Reductions start during backward, one per bucket. Gradient hooks get reduced gradients."""
    for name, cap in CAPS.items():
        _hooks_and_counts(name, replicated_net(cap))


def _hooks_and_counts(name: str, model: Any) -> None:
    model(batch(0)).square().mean().backward()
    expected = grads(model)
    model.zero_grad()
    hook_gradients: list[torch.Tensor] = []
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda p: hook_gradients.append(plain(p.grad)))
    early: list[int] = []
    with CommDebugMode() as mode:
        model.first.register_full_backward_pre_hook(
            lambda *_: early.append(mode.get_total_counts())
        )
        model(batch(0)).square().mean().backward()
    assert mode.get_total_counts() == bucket_count(model)
    # At this point backward has not reached the two parameters of the first layer.
    assert early == [{"one": 0, "several": 2, "each": 12}[name]]
    reduced = [grad for grad in expected if grad.numel()]
    assert sorted(map(_values_of, hook_gradients)) == sorted(map(_values_of, reduced))
    assert_same(expected, grads(model), name)


def _values_of(tensor: torch.Tensor) -> list[float]:
    return tensor.flatten().tolist()


def failure(rank: int, world: int) -> None:
    """A hook raises on both ranks in a backward, before the gradients of the first layer.

    With one bucket per parameter some buckets are reduced already, with one bucket none. With
    several, ranks can differ.
    """
    for name, cap in CAPS.items():
        expected = train(replicated_net(cap))
        model = replicated_net(cap)
        handle = model.first.register_full_backward_pre_hook(_raise_user_error)
        try:
            model(batch(5)).square().mean().backward()
            raise AssertionError("the hook did not run")
        except _UserError:
            pass
        handle.remove()
        [group] = model._get_fsdp_state()._fsdp_param_groups
        reduced = sum(param.sharded_param.grad is not None for param in group.fsdp_params)
        assert name == "several" or (reduced > 0) == (name == "each")
        model.reset_iter_state()
        model.zero_grad()
        assert_same(expected, train(model), name)


class _UserError(Exception):
    pass


def _raise_user_error(*unused: Any) -> None:
    raise _UserError


def more_ranks(rank: int, world: int) -> None:
    """On four ranks one bucket has torch's bits, and several buckets have close results."""
    expected = train(torch_replicate(net()))
    assert_same(expected, train(replicated_net(25)), "one bucket")
    for cap in CAPS.values():
        torch.testing.assert_close(train(replicated_net(cap)), expected)


def units_above_25_mib(rank: int, world: int) -> None:
    """Each of several units has one all-reduce, with torch's bits.

    gloo's order of a sum depends on the position of an element in its message, so that buckets of
    25 MiB change the bits.
    """

    def run(call: Callable[..., Any], **kwargs: Any) -> Record:
        torch.manual_seed(0)
        layers = [nn.Linear(1900, 1900, bias=False) for _ in range(6)]
        model = nn.Sequential(nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:]))
        for half in model:
            call(half, **kwargs)
        model = call(model, **kwargs)
        if call is replicate:
            set_transport(model, "gloo")
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(2, 1900, generator=generator)).sum().backward()
        return grads(model)

    expected = run(torch_replicate)
    assert_same(expected, run(replicate), "one all-reduce per unit")
    bucketed = run(replicate, bucket_cap_mb=25)
    assert not all(torch.equal(a, b) for a, b in zip(expected, bucketed, strict=True))


SCENARIOS: dict[int, list[Callable[[int, int], None]]] = {
    2: [
        parity,
        orders,
        parameters_unused_on_one_rank,
        mixed_precision,
        nested,
        several_backwards,
        recomputed_segments_sharing_parameters,
        hooks_and_counts,
        failure,
    ],
    4: [more_ranks, units_above_25_mib],
}

SINCE_TORCH_2_13 = [parameters_unused_on_one_rank]
"""Scenarios in which torch's ``replicate`` must reduce unused parameters."""
