"""Pass-through wrappers that are applied to torch's FSDP2 before fsdp_c is imported.

The default run wraps all targets at once, and the targets of each part at once.
``FSDP_C_PATCH_SWEEP=single`` wraps each target alone.
``patch_effects.py`` lists the targets that fsdp_c does not call.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patch_effects import CALLED_LESS_OFTEN, NOT_CALLED

pytestmark = pytest.mark.xdist_group("patch-sweep")  # the tests share one process
WORKER = Path(__file__).with_name("workers") / "patch_sweep.py"
STYLES = ("plain", "wraps")
PARTS = 6
"""Number of parts of the targets. A run wraps the targets of one part together."""
FOREACH_REDUCE = "_fsdp_collectives.foreach_reduce"


class Sweep:
    """The worker process, torch's outcome, and its number of calls of each target."""

    def __init__(self, work: Path) -> None:
        self._worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "FSDP_C"},
        )
        assert self._worker.stdout is not None
        self.targets: list[str] = json.loads(self._worker.stdout.readline())
        self.torch = self.run([], "plain", by_fsdp_c=False)
        wrapped = self.run(self.targets, "plain", by_fsdp_c=False)
        assert difference(self.torch, wrapped) == ""
        self.calls: dict[str, int] = wrapped[0]["calls"]
        self.called = [name for name in self.targets if self.calls[name] > 0]

    def run(
        self, targets: list[str], style: str, *, by_fsdp_c: bool = True
    ) -> list[dict[str, Any]]:
        """Returns the outcomes of both ranks."""
        assert self._worker.stdin is not None and self._worker.stdout is not None
        case = {"targets": targets, "style": style, "by_fsdp_c": by_fsdp_c}
        print(json.dumps(case), file=self._worker.stdin, flush=True)
        path = Path(self._worker.stdout.readline().strip())
        outcomes: list[dict[str, Any]] = pickle.loads(path.read_bytes())
        return outcomes

    def problems(self, targets: list[str], style: str) -> list[str]:
        """Returns a line for each target that breaks a run or that fsdp_c does not call."""
        outcomes = self.run(targets, style)
        found = difference(self.torch, outcomes)
        if not found:
            calls = outcomes[0]["calls"]
            return [line for name in targets if (line := self.missing_calls(name, calls[name]))]
        if len(targets) == 1:
            return [f"{targets[0]} ({style}): {found}"]
        middle = len(targets) // 2
        parts = (targets[:middle], targets[middle:])
        single = [line for part in parts for line in self.problems(part, style)]
        return single or [f"{targets} ({style}), only together: {found}"]

    def missing_calls(self, name: str, calls: int) -> str:
        """Returns a message if only torch calls the target, and NOT_CALLED does not list it."""
        missing = self.calls[name] > 0 and calls == 0 and name not in NOT_CALLED
        return f"{name}: torch calls it {self.calls[name]} times, fsdp_c never" if missing else ""

    def close(self) -> None:
        """Ends the worker."""
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait(60)


def difference(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    """Describes the first difference of the ranks' outcomes, or returns an empty text."""
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        for outcome in (one, other):
            if "error" in outcome:
                return f"rank {rank}: {outcome['error'][-2000:]}"
        if len(one["tensors"]) != len(other["tensors"]):
            return f"rank {rank}: {len(other['tensors'])} tensors"
        for index, (a, b) in enumerate(zip(one["tensors"], other["tensors"])):
            if a.dtype != b.dtype or not torch.equal(a, b):
                return f"rank {rank}: tensor {index} is {b}, expected {a}"
    return ""


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    running = Sweep(tmp_path_factory.mktemp("sweep"))
    yield running
    running.close()


def test_training_without_wrappers_runs_fsdp_c_and_matches_torch(sweep: Sweep) -> None:
    outcomes = sweep.run([], "plain")
    assert difference(sweep.torch, outcomes) == ""
    assert all(outcome["by_fsdp_c"] for outcome in outcomes)
    assert not any(outcome["by_fsdp_c"] for outcome in sweep.torch)


def test_foreach_reduce_wrapped_as_by_nemo_automodel_is_called_and_bits_are_equal(
    sweep: Sweep,
) -> None:
    assert sweep.problems([FOREACH_REDUCE], "nemo") == []


@pytest.mark.parametrize("style", STYLES)
def test_wrapping_all_patch_targets_keeps_bits_and_calls_each_wrapper(
    sweep: Sweep, style: str
) -> None:
    assert sweep.problems(sweep.targets, style) == []


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("style", STYLES)
def test_wrapping_part_of_patch_targets_keeps_bits_and_calls_each_wrapper(
    sweep: Sweep, style: str, part: int
) -> None:
    assert sweep.problems(sweep.called[part::PARTS], style) == []


def test_tables_of_patch_targets_name_only_functions_that_torch_calls(sweep: Sweep) -> None:
    assert [n for n in (*NOT_CALLED, *CALLED_LESS_OFTEN) if sweep.calls.get(n, 0) == 0] == []


@pytest.mark.timeout(7200)
@pytest.mark.skipif(
    os.environ.get("FSDP_C_PATCH_SWEEP") != "single",
    reason="runs for 10 minutes or more; FSDP_C_PATCH_SWEEP=single runs it",
)
@pytest.mark.parametrize("style", STYLES)
def test_each_patch_target_wrapped_alone_is_called_as_the_tables_state(
    sweep: Sweep, style: str
) -> None:
    problems = []
    for name in sweep.called:
        outcomes = sweep.run([name], style)
        found = difference(sweep.torch, outcomes)
        if found:
            problems.append(f"{name}: {found}")
            continue
        calls, by_torch = outcomes[0]["calls"][name], sweep.calls[name]
        if name in NOT_CALLED:
            is_expected = calls == 0
        elif name in CALLED_LESS_OFTEN:
            is_expected = 0 < calls < by_torch
        else:
            is_expected = calls >= by_torch
        if not is_expected:
            problems.append(f"{name}: torch calls it {by_torch} times, fsdp_c {calls} times")
    never = [name for name in sweep.targets if name not in sweep.called]
    assert problems + sweep.problems(never, style) == []
