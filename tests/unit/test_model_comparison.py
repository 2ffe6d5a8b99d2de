"""Plans are compared through the store of an NCCL process group.

The ranks are threads that share a store. tests/cuda/test_cuda_divergence.py has NCCL's groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_c import fully_shard
from fsdp_c._runtime import plan_hash, plan_store
from fsdp_c._runtime.plan_store import OFF, exchange

EQUAL = "equal"


def run_ranks(
    plans: list[str | None], seconds: float = 20, delays: dict[int, float] | None = None
) -> list[Any]:
    """Runs a thread for each plan. Returns results or exceptions. None: the rank is missing."""
    store = dist.HashStore()
    results: list[Any] = [None] * len(plans)

    def run(rank: int, plan: str) -> None:
        time.sleep((delays or {}).get(rank, 0))
        try:
            deadline = time.monotonic() + seconds
            results[rank] = exchange(store, rank, len(plans), plan, deadline)
        except TimeoutError as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank, plan))
        for rank, plan in enumerate(plans)
        if plan is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("late", range(3))
def test_equal_plans_are_reported_as_equal_on_all_ranks(late: int) -> None:
    assert run_ranks(["a1"] * 3, delays={late: 0.1}) == [EQUAL] * 3


@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize("other", range(3))
def test_rank_that_differs_from_rank_0_is_named_on_all_ranks(other: int, late: int) -> None:
    plans = ["a1"] * 3
    plans[other] = "b2"
    results = run_ranks(plans, delays={late: 0.1})
    assert len(set(results)) == 1
    rank, plan = results[0].split()
    assert plan == plans[int(rank)] != plans[0]


@pytest.mark.parametrize("off", range(3))
def test_rank_without_guard_ends_the_comparison_of_models_on_all_ranks(off: int) -> None:
    plans = ["a1"] * 3
    plans[off] = OFF
    assert run_ranks(plans) == [OFF] * 3


@pytest.mark.parametrize("missing", range(2))
def test_comparison_of_models_without_one_rank_raises_at_the_time_limit(missing: int) -> None:
    plans: list[str | None] = ["a1"] * 2
    plans[missing] = None
    results = run_ranks(plans, seconds=0.1)
    assert isinstance(results[1 - missing], TimeoutError)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["a1", "b2", OFF]), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
)
def test_ranks_that_compare_their_models_get_the_same_result(plans: list[str], random: Any) -> None:
    results = run_ranks([*plans], delays={rank: random.choice([0, 0.003]) for rank in range(5)})
    compared = {result for rank, result in enumerate(results) if plans[rank] != OFF}
    if len(set(plans)) == 1:
        assert compared <= {EQUAL}
    else:
        assert len(compared) <= 1 and EQUAL not in compared


class Group:
    """A fake process group, for rank 1 of 2. The fixture ``store`` supplies its store."""

    group_name = "7"

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def _get_backend(self, device: Any) -> None:
        return None


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    store = dist.HashStore()
    monkeypatch.setattr(plan_store, "_get_process_group_store", lambda group: store)
    return store


def test_each_comparison_of_a_process_group_has_its_own_keys(store: dist.HashStore) -> None:
    group: Any = Group()
    for number in (1, 2):
        peer = dist.PrefixStore(f"fsdp_c/plans/{number}", store)
        assert exchange(peer, 0, 2, OFF, 0) == OFF
        assert plan_store.compare(group, "a1") is None
    peer = dist.PrefixStore("fsdp_c/plans/3", store)
    peer.set("first", "b2")
    assert plan_store.compare(group, "a1") == (1, (0xB2, 0xA1))


@pytest.mark.parametrize("plan", ["a1", "b2", OFF])
def test_last_rank_deletes_the_keys_of_a_comparison(plan: str, store: dist.HashStore) -> None:
    """A later process group of the same name finds no result of an earlier one."""
    peer = dist.PrefixStore("fsdp_c/plans/1", store)
    peer.set("first", plan)
    if plan == "a1":
        peer.add("equal", 1)
    peer.add("read", 1)
    expected = (1, (0xB2, 0xA1)) if plan == "b2" else None
    for _ in range(2):
        assert plan_store.compare(Group(), "a1") == expected  # type: ignore[arg-type]
        assert store.num_keys() == 0
        peer.set("first", plan)
        peer.add("equal", 1)
        peer.add("read", 1)


def fail_at_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plan_store, "get_timeout", lambda group, device_type: plan_store.datetime.timedelta(0)
    )


def fail_in_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> None:
        raise dist.DistNetworkError("connection reset")

    monkeypatch.setattr(plan_store, "exchange", lose)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (fail_at_deadline, "not all ranks have begun their first forward within 0 s"),
        (fail_in_store, "connection reset"),
    ],
)
def test_failed_comparison_of_models_logs_a_warning_and_finds_no_difference(
    fail: Callable[[pytest.MonkeyPatch], None],
    reason: str,
    store: dist.HashStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail(monkeypatch)
    assert plan_store.compare(Group(), "a1") is None  # type: ignore[arg-type]
    assert f"process group '7' are not compared: {reason}" in caplog.text


def test_rank_that_an_exception_interrupts_repeats_the_comparison_of_models(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*unused: Any) -> str:
        raise KeyboardInterrupt

    group: Any = Group()
    exchange(dist.PrefixStore("fsdp_c/plans/1", store), 0, 2, OFF, 0)
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(plan_store, "exchange", interrupt)
        plan_store.compare(group, "a1")
    assert plan_store.compare(group, "a1") is None
    assert plan_store._comparisons[group] == 1


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a'b"])
def test_plan_difference_is_found_in_unit_with_any_name(name: str, fake_group: int) -> None:
    def describe(dtype: torch.dtype) -> list[str]:
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        layer: Any = fully_shard(nn.Linear(8, 8), mp_policy=policy)
        state = layer._get_fsdp_state()
        (group,) = state._fsdp_param_groups
        group._module_fqn = name
        return list(plan_hash._describe_plan([state], {group: ("0",)}, "0"))

    first, second = describe(torch.bfloat16), describe(torch.float16)
    assert plan_hash.find_difference(first, second, (0, 1)) == (
        f"param_dtype of unit {name!r}: rank 0 has torch.bfloat16; rank 1 has torch.float16"
    )


def test_process_group_that_torch_does_not_know_has_no_nccl() -> None:
    assert not plan_store.uses_nccl(dist.ProcessGroup(dist.HashStore(), 0, 2))
