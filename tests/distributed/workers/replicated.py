"""What the ranks of test_replicate.py do. Each function asserts by itself.

The same seeded model trains under DDP, stock ``replicate`` and ours with buckets of several sizes;
losses, gradients and weights have to be the same bits. (On two ranks: a sum of two has no order.
With more, a backend may add up in an order that depends on an element's place in its message.)
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
from torch.distributed._composable.replicate_with_fsdp import replicate as stock_replicate
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard, replicate

DIM = 6
MIB = 2**20
CAPS = {"one": 25.0, "several": 400 / MIB, "each": 1 / MIB}
"""Bucket sizes that give the model below one bucket, a few uneven ones, one for each parameter."""

Record = list[torch.Tensor]


class Net(nn.Module):
    """Residual layers of uneven sizes, a branch that can be left out, a frozen scale.

    (batch, DIM) -> (batch, DIM). ``swapped``: the two halves run in the other order.
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


def ours(cap: float, **kwargs: Any) -> Callable[[], Any]:
    return lambda: replicate(net(), bucket_cap_mb=cap, **kwargs)


def batch(step: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 10 * step + part)
    return torch.randn(4, DIM, generator=generator)


def plain(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def grads(model: nn.Module) -> Record:
    return [torch.empty(0) if p.grad is None else plain(p.grad) for p in model.parameters()]


def backward(model: Any, step: int, parts: int = 1, **kwargs: Any) -> Record:
    """The backwards of one step; only the last of its parts reduces. Its losses."""
    losses = []
    for part in range(parts):
        last = part == parts - 1
        quiet: Any = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel):
            quiet = quiet if last else model.no_sync()
        else:
            model.set_requires_gradient_sync(last)
        with quiet:
            loss = model(batch(step, part), **kwargs).float().square().mean()
            loss.backward()
        losses.append(loss.detach())
    return losses


def train(model: Any, steps: int = 3, **kwargs: Any) -> Record:
    """Losses, gradients and weights of a few steps."""
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    record = []
    for step in range(steps):
        record += backward(model, step, **kwargs)
        record += grads(model)
        optimizer.step()
        optimizer.zero_grad()
    return record + [plain(p) for p in model.parameters()]


def assert_same(expected: Record, found: Record, what: object) -> None:
    assert len(expected) == len(found), what
    for i, (a, b) in enumerate(zip(expected, found)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: item {i}: {a} and {b}"


def bucket_count(model: Any) -> int:
    [group] = model._get_fsdp_state()._fsdp_param_groups
    return len(group._buckets)


def outcomes(rank: int, world: int) -> dict[str, str]:
    """Runs all scenarios for this many ranks in one launch; what went wrong in each, or ""."""
    found = {}
    for scenario in SCENARIOS[world]:
        if scenario in OF_TORCH_2_13 and not releases.has("2.13"):
            continue  # its test is skipped; torch's ranks would fail, and all others with them
        try:
            scenario(rank, world)
            found[scenario.__name__] = ""
        except Exception:
            found[scenario.__name__] = traceback.format_exc()
    return found


# ---- what the ranks do ----


def parity(rank: int, world: int) -> None:
    """Plain training, accumulation, a parameter that nobody uses, halves in any order."""
    counts = {name: bucket_count(ours(cap)()) for name, cap in CAPS.items()}
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
        expected = train(stock_replicate(net()), **setting)
        assert_same(train(ddp, **setting), expected, ("stock", setting))
        for name, cap in CAPS.items():
            assert_same(expected, train(ours(cap)(), **setting), (name, setting))


def orders(rank: int, world: int) -> None:
    """The ranks' autograds reach the halves in different orders."""
    expected = train(stock_replicate(net()), swapped=rank == 1)
    for name, cap in CAPS.items():
        assert_same(expected, train(ours(cap)(), swapped=rank == 1), name)


def parameters_unused_on_one_rank(rank: int, world: int) -> None:
    """They are reduced as zeros there, in the same place of the order."""
    models = [stock_replicate(net()), *(ours(cap)() for cap in CAPS.values())]
    records = []
    for model in models:
        model.set_reduce_scatter_unused_params(True)
        records.append(train(model, spare=rank == 0))
    for record in records[1:]:
        assert_same(records[0], record, "unused on one rank")


def mixed_precision(rank: int, world: int) -> None:
    for reduce_dtype in (None, torch.float32):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        expected = train(stock_replicate(net(), mp_policy=policy), parts=2)
        for cap in CAPS.values():
            model = replicate(net(), mp_policy=policy, bucket_cap_mb=cap)
            assert_same(expected, train(model, parts=2), (reduce_dtype, cap))


def nested(rank: int, world: int) -> None:
    """A call for each half and one for the rest; and below ``fully_shard``."""

    def build(call: Callable[..., Any], **kwargs: Any) -> Any:
        model = net()
        for half in model.halves:
            call(half, **kwargs)
        return call(model, **kwargs)

    expected = train(build(stock_replicate), parts=2)
    for cap in CAPS.values():
        assert_same(expected, train(build(replicate, bucket_cap_mb=cap), parts=2), cap)
    results = []
    for cap in CAPS.values():
        model = net()
        replicate(model.halves[1], bucket_cap_mb=cap)
        results.append(train(fully_shard(model)))
    assert_same(results[0], results[2], "below fully_shard")


def several_backwards(rank: int, world: int) -> None:
    """Each of two backwards over one graph reduces; two forwards go before one backward."""

    def run(model: Any) -> Record:
        out = model(batch(0))
        out.square().mean().backward(retain_graph=True)
        out.sum().backward()
        record = grads(model)
        model.zero_grad()
        (model(batch(1)) + model(batch(2))).square().mean().backward()
        return record + grads(model)

    expected = run(stock_replicate(net()))
    for cap in CAPS.values():
        assert_same(expected, run(ours(cap)()), cap)


def recomputed_segments_sharing_parameters(rank: int, world: int) -> None:
    """Recomputed segments accumulate into shared parameters one after the other, in backwards of
    their own: what comes after a bucket's reduction must not be lost. Sums of means have other last
    bits than means of sums."""
    expected = train(stock_replicate(net()), segments=3)
    for cap in CAPS.values():
        torch.testing.assert_close(train(ours(cap)(), segments=3), expected)


def hooks_and_counts(rank: int, world: int) -> None:
    """Reductions are issued while backward goes on, in stock's number where one bucket is enough;
    hooks on gradients see the reduced ones, at once."""
    for name, cap in CAPS.items():
        _hooks_and_counts(name, ours(cap)())


def _hooks_and_counts(name: str, model: Any) -> None:
    model(batch(0)).square().mean().backward()
    expected = grads(model)
    model.zero_grad()
    seen: list[torch.Tensor] = []
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda p: seen.append(plain(p.grad)))
    early: list[int] = []
    with CommDebugMode() as mode:
        model.first.register_full_backward_pre_hook(
            lambda *_: early.append(mode.get_total_counts())
        )
        model(batch(0)).square().mean().backward()
    assert mode.get_total_counts() == bucket_count(model)
    # Backward still has to reach the first layer's two parameters.
    assert early == [{"one": 0, "several": 2, "each": 12}[name]]
    reduced = [grad for grad in expected if grad.numel()]
    assert sorted(map(_digest, seen)) == sorted(map(_digest, reduced))
    assert_same(expected, grads(model), name)


def _digest(tensor: torch.Tensor) -> list[float]:
    return tensor.flatten().tolist()


def failure(rank: int, world: int) -> None:
    """User code raises after some buckets were reduced, on both ranks."""
    for name, cap in CAPS.items():
        expected = train(ours(cap)())
        model: Any = ours(cap)()
        x = model.first.register_full_backward_pre_hook(_fail)
        try:
            model(batch(5)).square().mean().backward()
            raise AssertionError("the hook did not run")
        except _UserError:
            pass
        x.remove()
        [group] = model._get_fsdp_state()._fsdp_param_groups
        reduced = sum(param.sharded_param.grad is not None for param in group.fsdp_params)
        assert name == "several" or (reduced > 0) == (name == "each")
        model.reset_iter_state()
        model.zero_grad()
        assert_same(expected, train(model), name)


class _UserError(Exception):
    pass


def _fail(*unused: Any) -> None:
    raise _UserError


def more_ranks(rank: int, world: int) -> None:
    """With one bucket stock's bits on any number of ranks, else its numbers."""
    expected = train(stock_replicate(net()))
    assert_same(expected, train(ours(25)()), "one bucket")
    for cap in CAPS.values():
        torch.testing.assert_close(train(ours(cap)()), expected)


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
    4: [more_ranks],
}

OF_TORCH_2_13 = [parameters_unused_on_one_rank]
"""Torch's own replicate has to reduce what is unused, too."""
