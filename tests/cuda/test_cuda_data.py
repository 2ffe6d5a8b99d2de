"""Gradients and parameters of fsdp_c equal torch's bit for bit on ranks of the simulated NCCL.

The ranks exchange data. The device executes operators, kernels, copies and collectives in an order
that streams and events allow. fsdp_c must give torch's bits in every order.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(900)]

Launch = Callable[..., list[Any]]
OWN_LAUNCH = "launch of fsdp_c"


@pytest.fixture(scope="module")
def launch(run_worker: Any, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs a worker on ``world`` ranks at the same time. Returns the results of all ranks.

    The arguments of a rank are those of ``before``, then rank, world and file, then ``after``.
    """

    def run(
        worker: str, world: int, before: tuple[str, ...] = (), after: tuple[str, ...] = ()
    ) -> Any:
        file = str(tmp_path_factory.mktemp("ranks") / "store")
        with concurrent.futures.ThreadPoolExecutor(world) as executor:
            arguments = [(*before, str(rank), str(world), file, *after) for rank in range(world)]
            runs = [executor.submit(run_worker, worker, *given) for given in arguments]
            return [run.result() for run in runs]

    return run


@pytest.mark.parametrize(("world", "seed", "least"), [(2, 1, 45), (4, 2, 30), (8, 3, 30)])
def test_training_with_each_operation_as_late_as_possible_matches_torch_bitwise(
    launch: Launch, world: int, seed: int, least: int
) -> None:
    torchs = launch("data", world, ("torch",), ("0",))
    own = launch("data", world, ("fsdp_c",), (str(seed),))
    for expected, actual in zip(torchs, own, strict=True):
        assert expected["findings"] == actual["findings"] == []
        records = expected["records"]
        assert len(records) >= least and records.keys() == actual["records"].keys()
        raised = [name for name, record in records.items() if "raised" in str(record[0])]
        assert raised == []
        differing = [name for name in records if records[name] != actual["records"][name]]
        assert differing == []
        assert actual["counts"][OWN_LAUNCH] > 500
    assert torchs[0]["records"] != torchs[1]["records"]


def test_faults_of_data_and_dropped_waits_change_the_bits(launch: Launch) -> None:
    results = launch("data_faults", 2)
    for result in results:
        assert not any(result["differs without fault"])
        assert result["findings"] == []
        trainings_until_found = result["trainings until found"]
        assert len(trainings_until_found) >= 18
        assert [fault for fault, number in trainings_until_found.items() if not number] == []


@pytest.mark.parametrize(
    ("world", "allocator", "jobs", "least"),
    [
        (2, "caching", {"fsdp", "replicate", "offload"}, 2),
        (2, "direct", {"fsdp", "replicate", "offload"}, 15),
        (4, "caching", {"hsdp"}, 2),
    ],
)
def test_step_after_a_failed_call_has_torchs_bits(
    launch: Launch, world: int, allocator: str, jobs: set[str], least: int
) -> None:
    """The call fails on all ranks. ``least`` is the smallest number of calls that fail, except for
    ``replicate``, which has one collective."""
    kinds = {"cudaMalloc"} if allocator == "direct" else {"cudaMalloc", "collective", OWN_LAUNCH}
    for result in launch("failed_steps", world, after=(allocator,)):
        assert result["findings"] == []
        assert set(result["steps"]) == jobs
        for job, by_kind in result["steps"].items():
            assert set(by_kind) == kinds
            for kind, steps in by_kind.items():
                outcome, digest = result["expected"][job][kind]
                assert (outcome is None) == (kind == OWN_LAUNCH)
                wanted = [outcome or "RuntimeError", digest]
                is_single = (job, kind) == ("replicate", "collective")
                assert len(steps) >= (1 if is_single else least), (job, kind)
                assert [step for step in steps if step != wanted] == [], (job, kind)


def test_collectives_reduce_in_the_order_of_the_ranks(launch: Launch) -> None:
    for result in launch("collectives", 3):
        assert len(result["results"]) == 30
        assert [name for name, is_equal in result["results"].items() if not is_equal] == []
        assert result["findings"] == result["files"] == []


CASES = {
    "ended": "NCCL: rank 0 waits for rank 1, which has ended",
    "differs": "NCCL: rank 0 issued ncclAllGather (4 elements, type 7, operation 0, root 0), "
    "rank 1 issued ncclAllReduce (4 elements, type 7, operation 0, root 0)",
}


@pytest.mark.parametrize("case", CASES)
def test_simulated_nccl_reports_peer_that_ended_or_differs(launch: Launch, case: str) -> None:
    """The step may return without an exception, because NCCL aborts the collective later.

    The worker fails if NCCL has not aborted it after 100 seconds. The process group would do so
    only after ten minutes.
    """
    first = launch("peers", 2, (case,))[0]
    assert first["findings"] == [CASES[case]]


def test_random_numbers_depend_on_the_seed_only(run_worker: Any) -> None:
    results = [run_worker("executed_operators", str(seed)) for seed in (0, 1)]
    assert results[0]["numbers"] == results[1]["numbers"]
    normal, *others = results[0]["numbers"]
    assert results[0]["again"] == normal
    assert len({str(numbers) for numbers in (normal, *others)}) == 4


def test_operator_that_waits_for_its_launches_is_reported(run_worker: Any) -> None:
    """``aten::equal`` waits in the operator ``aten::item``, which it calls."""
    before, after = run_worker("executed_operators", "0")["findings"]
    assert before == []
    assert after == ["not executed: aten::equal., which waits for its own launches"]
