"""Buckets, ``replicate``'s and those of large units, before and without real ranks."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp_c
from fsdp_c import MixedPrecisionPolicy, fully_shard, replicate
from fsdp_c.sizes import BUCKET_LIMIT, layout_of

MIB = 2**20


def model(layers: int = 3) -> nn.Sequential:
    """Layers of 4 x 4 weights and biases: 64 and 16 bytes."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def group_of(module: Any) -> Any:
    [group] = module._get_fsdp_state()._fsdp_param_groups
    return group


def test_a_bucket_has_25_mib_unless_one_asks_for_another_size(fake_group: int) -> None:
    assert group_of(replicate(model()))._bucket_bytes == 25 * MIB
    assert group_of(replicate(model(), bucket_cap_mb=0.5))._bucket_bytes == MIB // 2
    assert group_of(replicate(model(), bucket_cap_mb=math.inf))._bucket_bytes == 0


@pytest.mark.parametrize("size", [0, -1, math.nan])
def test_other_sizes_are_refused_and_leave_the_module_as_it_was(
    fake_group: int, size: float
) -> None:
    module = model()
    params = list(module.parameters())
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive"):
        replicate(module, bucket_cap_mb=size)
    assert type(module) is nn.Sequential
    assert all(a is b for a, b in zip(params, module.parameters(), strict=True))


def test_buckets_are_cut_from_the_last_parameter_on(fake_group: int) -> None:
    def cut(size: float, **kwargs: Any) -> list[tuple[int, int]]:
        buckets: list[tuple[int, int]] = group_of(
            replicate(model(), bucket_cap_mb=size / MIB, **kwargs)
        )._buckets
        return buckets

    assert cut(1000) == [(0, 6)]
    assert cut(math.inf) == [(0, 6)]
    assert cut(80) == [(4, 6), (2, 4), (0, 2)]
    assert cut(81) == [(3, 6), (0, 3)]
    assert cut(1) == [(5, 6), (4, 5), (3, 4), (2, 3), (1, 2), (0, 1)]


def test_the_cut_follows_the_reduce_type_and_what_is_trained(fake_group: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    module = replicate(model(), mp_policy=policy, bucket_cap_mb=80 / MIB)
    x = torch.ones(2, 4)
    module(x).sum().backward()
    assert group_of(module)._buckets == [(2, 6), (0, 2)]
    frozen = model()
    frozen[2].requires_grad_(False)
    assert group_of(replicate(frozen, bucket_cap_mb=80 / MIB))._buckets == [(2, 6), (0, 2)]


def test_units_are_cut_from_a_gibibyte_on(fake_group: int) -> None:
    assert group_of(fully_shard(model()))._bucket_bytes == BUCKET_LIMIT == 2**30
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(2**14, 2**14 - 1, bias=False) for _ in range(3)))
    [planned] = fsdp_c.plan(large, lambda **_: False, world_size=8).units
    assert planned.reduce_scatters == 2
    fully_shard(large)
    assert group_of(large)._buckets == [(1, 3), (0, 1)]  # the limit, and 64 KiB less, each


def test_a_cap_is_set_for_all_units_or_for_none(fake_group: int) -> None:
    module = model()
    fully_shard(module[0])
    fully_shard(module)
    fsdp_c.set_bucket_cap(module, 80 / MIB)
    assert group_of(module)._buckets == [(2, 4), (0, 2)]
    assert group_of(module[0])._buckets == [(0, 2)]
    fsdp_c.set_bucket_cap(module, math.inf)
    assert group_of(module)._buckets == [(0, 4)]
    for size in (0, -1, math.nan):
        with pytest.raises(ValueError, match="bucket_cap_mb must be positive"):
            fsdp_c.set_bucket_cap(module, size)
    with pytest.raises(ValueError, match="set_bucket_cap expects a model"):
        fsdp_c.set_bucket_cap(model(), 1)
    stock = model()
    torch.distributed.fsdp.fully_shard(stock[1])
    fully_shard(stock[0])
    holder = nn.ModuleList(stock)
    with pytest.raises(TypeError, match="is a unit of torch's"):
        fsdp_c.set_bucket_cap(holder, 80 / MIB)
    assert group_of(stock[0])._bucket_bytes == BUCKET_LIMIT


def test_reductions_overlap_where_they_may(fake_group: int) -> None:
    module = model()
    fully_shard(module[0])
    fully_shard(module)
    units = [group_of(module), group_of(module[0])]
    assert [unit._reduction_overlap for unit in units] == [None] * 2
    for overlap in (False, True, None):
        fsdp_c.set_reduction_overlap(module, overlap)
        assert [unit._reduction_overlap for unit in units] == [overlap] * 2
        module(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="set_reduction_overlap expects a model"):
        fsdp_c.set_reduction_overlap(model(), overlap=False)


def test_a_forecast_deals_as_the_core_does(fake_group: int) -> None:
    module = fully_shard(model())
    for size in (1000, 80, 81, 1):
        fsdp_c.set_bucket_cap(module, size / MIB)
        spans = group_of(module)._buckets
        [unit] = layout_of(module).units
        sizes = [64, 16] * 3
        assert list(unit.buckets) == [sum(sizes[slice(*span)]) for span in spans]
        assert sum(unit.dealt(unit.rows)) == unit.rows


def test_looking_does_not_decide_the_cut(fake_group: int) -> None:
    """``explain`` on one rank, then parameters are frozen on all: ranks must still agree."""
    cuts = []
    for looks in (False, True):
        module = fully_shard(model())
        module(torch.ones(2, 4)).sum().backward()
        fsdp_c.set_bucket_cap(module, 80 / MIB)
        if looks:
            assert group_of(module)._buckets == [(4, 6), (2, 4), (0, 2)]
        module[2].requires_grad_(False)
        module(torch.ones(2, 4)).sum().backward()
        cuts.append(group_of(module)._buckets)
    assert cuts[0] == cuts[1] == [(2, 6), (0, 2)]


def test_a_model_with_buckets_is_collected_even_while_its_graph_lives(fake_group: int) -> None:
    module = replicate(model(), bucket_cap_mb=1 / MIB)
    loss = module(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    group = weakref.ref(group_of(module))
    kept = loss.grad_fn
    del module, loss
    gc.collect()
    assert kept is not None
    del kept
    gc.collect()
    assert group() is None


def test_a_group_keeps_its_parameters_when_the_collector_empties_lists(fake_group: int) -> None:
    """Of a cycle the collector empties what can be emptied, in an order of its own."""
    module = replicate(model(), bucket_cap_mb=1 / MIB)
    module(torch.ones(2, 4)).sum().backward()
    group = group_of(module)
    for part in gc.get_referents(group):
        if isinstance(part, list):
            part.clear()
    assert len(group.fsdp_params) == 6
    module(torch.ones(2, 4)).sum().backward()


def test_parameters_that_were_replaced_are_watched_anew(single_group: int) -> None:
    """``.data`` elsewhere gives a new unsharded parameter, a load with assign a new sharded one."""
    module = replicate(model(), bucket_cap_mb=1 / MIB)
    x = torch.ones(2, 4)

    def gradients() -> list[torch.Tensor]:
        module.zero_grad()
        module(x).sum().backward()
        return [param.grad.to_local().clone() for param in module.parameters()]

    before = gradients()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    for a, b in zip(before, gradients(), strict=True):
        assert torch.equal(a, b)
    module.to(torch.float64)
    x = x.double()
    for a, b in zip(before, gradients(), strict=True):
        assert b.dtype is torch.float64
        torch.testing.assert_close(b.float(), a)  # within what float32 rounds
