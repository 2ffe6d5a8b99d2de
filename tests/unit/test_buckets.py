"""Buckets of ``replicate`` and of ``set_bucket_cap``, tested on a fake process group."""

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
from fsdp_c._tools.dry_run import simulate_collectives
from fsdp_c._tools.unit_bytes import Sharding, make_sharded_layout

MIB = 2**20


def make_model(layers: int = 3) -> nn.Sequential:
    """Returns linear layers, each with a weight of 64 bytes and a bias of 16 bytes."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))


def group_of(module: Any) -> Any:
    [group] = module._get_fsdp_state()._fsdp_param_groups
    return group


def test_bucket_size_is_25_mib_if_the_model_has_one_unit(fake_group: int) -> None:
    def make_large_layers() -> nn.Sequential:
        """Returns three layers, each with 26 MiB of gradients."""
        return nn.Sequential(*(nn.Linear(2600, 2600, bias=False) for _ in range(3)))

    x = torch.ones(1, 2600)
    sole = replicate(make_large_layers())
    several = make_large_layers()
    replicate(several[0])
    replicate(several)
    for model, counts in (sole, [3]), (several, [1, 1]):
        assert sorted(unit.all_reduces for unit in fsdp_c.explain(model).units) == counts
        model(x)
        assert sorted(unit.all_reduces for unit in fsdp_c.explain(model).units) == counts
    assert group_of(sole)._bucket_bytes == 25 * MIB
    assert group_of(several[0])._bucket_bytes == group_of(several)._bucket_bytes == 0
    assert group_of(several)._buckets == [(0, 2)]


# 2**43 MiB are 2**63 bytes, more than the core can count.
@pytest.mark.parametrize("size", [0.5, 2**43, 1e30, math.inf])
def test_bucket_cap_mb_is_the_bucket_size_of_each_unit(fake_group: int, size: float) -> None:
    model, expected = make_model(), MIB // 2 if size == 0.5 else 0
    replicate(model[0], bucket_cap_mb=size)
    replicate(model)
    model(torch.ones(1, 4))
    assert group_of(model[0])._bucket_bytes == expected
    assert group_of(model)._bucket_bytes == 0
    fsdp_c.set_bucket_cap(model, size)
    assert group_of(model[0])._bucket_bytes == group_of(model)._bucket_bytes == expected


def test_replicate_above_units_of_fully_shard_keeps_its_default_buckets(fake_group: int) -> None:
    model = make_model()
    fully_shard(model[0])
    replicate(model)
    root = group_of(model)
    root._sole_bucket_bytes = 80
    layouts = [make_sharded_layout(model)]
    model(torch.ones(1, 4))
    layouts.append(make_sharded_layout(model))
    for layout in layouts:
        assert [unit.bucket_bytes for unit in layout.units] == [80, 0]
    assert root._buckets == [(2, 4), (0, 2)]


def test_default_bucket_limit_applies_to_the_sole_group_of_a_root(fake_group: int) -> None:
    model = make_model()
    replicate(model[0])
    [inner] = model[0]._get_fsdp_state()._fsdp_param_groups
    model[0](torch.ones(1, 4))  # lazy init as a root
    assert inner._bucket_bytes == 25 * MIB
    state = model[0]._get_fsdp_state()
    state._fsdp_param_groups = [inner, inner]
    assert inner._bucket_bytes == 0
    state._fsdp_param_groups = [inner]
    assert inner._bucket_bytes == 25 * MIB


@pytest.mark.parametrize("size", [0, -1, math.nan])
def test_bucket_cap_that_is_not_positive_raises_and_leaves_module_unchanged(
    fake_group: int, size: float
) -> None:
    module = make_model()
    params = list(module.parameters())
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive"):
        replicate(module, bucket_cap_mb=size)
    assert type(module) is nn.Sequential
    assert all(a is b for a, b in zip(params, module.parameters(), strict=True))


def test_buckets_are_filled_from_last_parameter_backwards(fake_group: int) -> None:
    def buckets_of(size: float, **kwargs: Any) -> list[tuple[int, int]]:
        module = replicate(make_model(), bucket_cap_mb=size / MIB, **kwargs)
        buckets: list[tuple[int, int]] = group_of(module)._buckets
        return buckets

    assert buckets_of(1000) == [(0, 6)]
    assert buckets_of(math.inf) == [(0, 6)]
    assert buckets_of(80) == [(4, 6), (2, 4), (0, 2)]
    assert buckets_of(81) == [(3, 6), (0, 3)]
    assert buckets_of(1) == [(5, 6), (4, 5), (3, 4), (2, 3), (1, 2), (0, 1)]


def test_buckets_depend_on_reduce_dtype_and_trained_parameters(fake_group: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    module = replicate(make_model(), mp_policy=policy, bucket_cap_mb=80 / MIB)
    x = torch.ones(2, 4)
    module(x).sum().backward()
    assert group_of(module)._buckets == [(2, 6), (0, 2)]
    group_of(module)._reduce_dtype = torch.float32
    assert group_of(module)._buckets == [(4, 6), (2, 4), (0, 2)]
    frozen = make_model()
    frozen[2].requires_grad_(False)
    assert group_of(replicate(frozen, bucket_cap_mb=80 / MIB))._buckets == [(2, 6), (0, 2)]


def make_large_model() -> nn.Sequential:
    """Returns three layers on the meta device, each with 64 KiB less than 1 GiB of gradients."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(2**14, 2**14 - 1, bias=False) for _ in range(3)))


def test_unit_over_1_gib_is_reduced_in_one_collective_by_default(fake_group: int) -> None:
    assert group_of(fully_shard(make_model()))._bucket_bytes == 0
    large = make_large_model()
    [planned] = fsdp_c.plan(large, lambda **_: False, world_size=8).units
    assert planned.reduce_scatters == 1
    fully_shard(large)
    assert group_of(large)._buckets == [(0, 3)]


def test_unit_over_1_gib_with_cap_of_1_gib_is_reduced_in_buckets(fake_group: int) -> None:
    large = fully_shard(make_large_model())
    fsdp_c.set_bucket_cap(large, 1024)
    assert group_of(large)._bucket_bytes == 2**30
    assert group_of(large)._buckets == [(1, 3), (0, 1)]
    [unit] = fsdp_c.explain(large).units
    assert unit.reduce_scatters == 2


def test_buckets_are_suggested_for_unit_over_1_gib_if_they_lower_the_peak(fake_group: int) -> None:
    def find_suggestions(explanation: fsdp_c.Explanation) -> list[int]:
        return [c.saves for c in explanation.changes if "set_bucket_cap(model, 1024)" in c.text]

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    large = fully_shard(make_large_model(), mp_policy=policy)
    before = fsdp_c.explain(large)
    fsdp_c.set_bucket_cap(large, 1024)
    after = fsdp_c.explain(large)
    assert find_suggestions(before) == [before.peak.total - after.peak.total]
    assert find_suggestions(after) == []
    assert find_suggestions(fsdp_c.explain(fully_shard(make_model()))) == []


def test_set_bucket_cap_changes_all_units_or_raises_and_changes_none(fake_group: int) -> None:
    module = make_model()
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
        fsdp_c.set_bucket_cap(make_model(), 1)
    mixed = make_model()
    torch.distributed.fsdp.fully_shard(mixed[1])
    fully_shard(mixed[0])
    with pytest.raises(TypeError, match="is a unit of torch's"):
        fsdp_c.set_bucket_cap(nn.ModuleList(mixed), 80 / MIB)
    assert group_of(mixed[0])._bucket_bytes == 0


def test_set_reduction_overlap_changes_all_units(fake_group: int) -> None:
    module = make_model()
    fully_shard(module[0])
    fully_shard(module)
    units = [group_of(module), group_of(module[0])]
    assert [unit._reduction_overlap for unit in units] == [None] * 2
    for overlap in (False, True, None):
        fsdp_c.set_reduction_overlap(module, overlap)
        assert [unit._reduction_overlap for unit in units] == [overlap] * 2
        module(torch.ones(2, 4)).sum().backward()
    values: list[Any] = ["off", 0]
    for value in values:
        with pytest.raises(TypeError, match=f"expects True, False or None, not {value!r}"):
            fsdp_c.set_reduction_overlap(module, value)
    with pytest.raises(ValueError, match="set_reduction_overlap expects a model"):
        fsdp_c.set_reduction_overlap(make_model(), overlap=False)


def test_planned_buckets_equal_those_of_runtime(fake_group: int) -> None:
    module = fully_shard(make_model())
    for size in (1000, 80, 81, 1):
        fsdp_c.set_bucket_cap(module, size / MIB)
        spans = group_of(module)._buckets
        layout = make_sharded_layout(module)
        sharding = Sharding(units=tuple(layout.units), states=tuple(layout.states))
        [unit] = simulate_collectives(sharding)
        # The 4 rows of a parameter are padded to 8, one for each rank.
        sizes = [2 * 64, 2 * 16] * 3
        assert unit.list_sizes("reduce_scatter") == [sum(sizes[slice(*span)]) for span in spans]


def test_reading_buckets_does_not_finalize_them(fake_group: int) -> None:
    """One rank may call ``explain`` before all ranks freeze parameters. Buckets stay equal."""
    results = []
    for reads_buckets in (False, True):
        module = fully_shard(make_model())
        module(torch.ones(2, 4)).sum().backward()
        fsdp_c.set_bucket_cap(module, 80 / MIB)
        if reads_buckets:
            assert group_of(module)._buckets == [(4, 6), (2, 4), (0, 2)]
        module[2].requires_grad_(False)
        module(torch.ones(2, 4)).sum().backward()
        results.append(group_of(module)._buckets)
    assert results[0] == results[1] == [(2, 6), (0, 2)]


def test_model_with_buckets_is_freed_after_its_retained_graph(fake_group: int) -> None:
    module = replicate(make_model(), bucket_cap_mb=1 / MIB)
    loss = module(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    group = weakref.ref(group_of(module))
    graph = loss.grad_fn
    del module, loss
    gc.collect()
    assert graph is not None
    del graph
    gc.collect()
    assert group() is None


def test_groups_states_and_contexts_own_no_list(fake_group: int) -> None:
    """The garbage collector would clear the lists of a reference cycle, in any order."""
    module = replicate(make_model(), bucket_cap_mb=1 / MIB)
    module(torch.ones(2, 4)).sum().backward()
    state, group = module._get_fsdp_state(), group_of(module)
    for owner in (state, group, state._state_ctx, group.comm_ctx):
        types = {type(referent) for referent in gc.get_referents(owner)}
        assert types and list not in types


def test_replaced_parameters_are_reduced_in_buckets(single_group: int) -> None:
    """``to`` replaces unsharded parameters; ``load_state_dict(assign=True)`` replaces shards."""
    module = replicate(make_model(), bucket_cap_mb=1 / MIB)
    x = torch.ones(2, 4)

    def train() -> list[torch.Tensor]:
        module.zero_grad()
        module(x).sum().backward()
        assert len(group_of(module)._buckets) == 6
        return [param.grad.to_local().clone() for param in module.parameters()]

    expected = train()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    for expected_grad, grad in zip(expected, train(), strict=True):
        assert torch.equal(expected_grad, grad)
    module.to(torch.float64)
    x = x.double()
    for expected_grad, grad in zip(expected, train(), strict=True):
        assert grad.dtype is torch.float64
        torch.testing.assert_close(grad.float(), expected_grad)  # up to rounding in float32
