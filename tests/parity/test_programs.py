"""Random programs over the public interface, compared with torch; see workers/programs.py.

`make test` runs a fixed set of seeds. FSDP_C_PROGRAMS=1000 sets their number,
FSDP_C_PROGRAMS_SEED=7 the first seed. A program that differs is shortened and printed.
"""

from __future__ import annotations

import os
from typing import Any

import program_mistakes
import programs
import pytest
from program_known import RULES, find_rule
from program_ranks import RankOutcome, Step

COUNT = int(os.environ.get("FSDP_C_PROGRAMS", "40"))
SEED = int(os.environ.get("FSDP_C_PROGRAMS_SEED", "0"))
SHOWN = 3
END_OF_NO_BACKWARD = next(reason for reason in RULES if "end of a backward" in reason)

pytestmark = pytest.mark.xdist_group("programs")


@pytest.mark.torch("2.13")
@pytest.mark.timeout(300 + 10 * COUNT)
def test_random_programs_match_torch() -> None:
    report = programs.run_many(
        range(SEED, SEED + COUNT), programs.world_size_of, max_failures=SHOWN
    )
    differences = [
        f"seed {seed}, {programs.world_size_of(seed)} ranks:\n"
        f"{programs.format_program(program)}\n{difference.text}"
        for seed, (program, difference) in report.failures.items()
    ]
    assert not differences, "torch and fsdp_c differ:\n" + "\n\n".join(differences)
    assert report.programs == COUNT
    assert report.operations > 12 * COUNT, report
    assert set(report.rules) <= {*RULES, *programs.OTHER_RULES}


@pytest.mark.torch("2.13")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", program_mistakes.MISTAKES)
def test_random_programs_detect_a_seeded_mistake(mistake: str) -> None:
    is_detectable = program_mistakes.MISTAKES[mistake].is_detectable
    seeds = [seed for seed in range(2000) if is_detectable(programs.generate(seed))][:30]
    report = programs.run_many(seeds, lambda seed: 1, mistake=mistake, shorten=0, max_failures=1)
    assert report.failures, f"{report.programs} programs did not detect it: {report.rules}"


def test_generated_programs_are_equal_for_a_seed_and_after_formatting_and_parsing() -> None:
    program = programs.generate(5)
    assert program == programs.generate(5) != programs.generate(6)
    assert programs.parse_program(programs.format_program(program)) == program


class ScriptedServer:
    """Returns prepared outcomes in order, and repeats the last one."""

    def __init__(self, *outcomes: RankOutcome) -> None:
        self.outcomes = list(outcomes)
        self.runs = 0

    def send_program(
        self, program: list[Step], world: int, seconds: float, mistake: str = ""
    ) -> None:
        self.runs += 1

    def read_outcomes(self) -> list[RankOutcome]:
        return [self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]]


ENDED: RankOutcome = ([["gave None"]] * 100, "")
HUNG: RankOutcome = ([["gave None"]], "hung")
TIMED_OUT: RankOutcome = (
    [["gave None"], ["raised RuntimeError: Timed out waiting for a rank"]],
    "",
)


@pytest.mark.parametrize("late", [HUNG, TIMED_OUT], ids=["hung", "timed out"])
@pytest.mark.parametrize(
    ("torch_outcomes", "fsdp_c_hangs", "fails"),
    [
        pytest.param((ENDED,), "once", True, id="fsdp_c hangs once"),
        pytest.param((ENDED,), "always", True, id="fsdp_c hangs always"),
        pytest.param((ENDED, ENDED, ENDED, "late"), "once", False, id="torch hangs, too"),
    ],
)
def test_hang_of_a_program_passes_only_if_torch_hangs_in_a_rerun(
    monkeypatch: pytest.MonkeyPatch,
    late: RankOutcome,
    torch_outcomes: tuple[Any, ...],
    fsdp_c_hangs: str,
    fails: bool,
) -> None:
    servers = {
        "torch": ScriptedServer(
            *(late if outcome == "late" else outcome for outcome in torch_outcomes)
        ),
        "fsdp_c": ScriptedServer(*([late, ENDED] if fsdp_c_hangs == "once" else [late])),
    }
    monkeypatch.setattr(programs, "start_server", servers.__getitem__)
    report = programs.run_many([5], lambda seed: 1, shorten=0)
    assert bool(report.failures) == fails
    assert dict(report.rules) == ({} if fails else {programs.HANGS: 1})
    if fails:
        assert servers["torch"].runs == 1 + programs.HANG_RERUNS
        counts = "3 of 3" if fsdp_c_hangs == "always" else "0 of 20"
        assert f"fsdp_c in {counts}" in report.failures[5][1].text


def test_each_program_that_torch_runs_differently_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = (([[f"gave {number}"]] * 100, "") for number in range(3))
    # Each program is compared, and then torch runs it three more times.
    by_torch = ScriptedServer(*[first, first, second, first] * 2)
    servers = {"torch": by_torch, "fsdp_c": ScriptedServer(third)}
    monkeypatch.setattr(programs, "start_server", servers.__getitem__)
    report = programs.run_many([5, 6], lambda seed: 1, shorten=0)
    assert not report.failures
    assert dict(report.rules) == {programs.NONDETERMINISTIC: 2}


class PairWithEarlierDifference:
    """Programs differ in the first operation if its model is the usual one.

    Other programs of three operations differ in the last one.
    """

    def compare(self, program: list[Step], world: int) -> programs.Difference | None:
        if program[0][1]["model"] == -1:
            return programs.Difference(0, "step: values", "")
        return programs.Difference(2, "step: values", "") if len(program) == 3 else None


def test_simplified_program_that_differs_earlier_is_cut_there() -> None:
    program = programs.parse_program(str([("step", {"model": 1}) for _ in range(3)]))
    pair: Any = PairWithEarlierDifference()
    difference = pair.compare(program, 1)
    shortened, found = programs.shorten_program(pair, program, 1, difference, 10.0)
    assert shortened == programs.parse_program("[('step', {})]")
    assert found.at == 0


@pytest.mark.parametrize(
    ("first", "by_torch", "by_fsdp_c", "is_allowed"),
    [
        ("raised TypeError: Invariant", 12, 10, True),
        ("raised TypeError: Invariant", 10, 12, False),
        ("gave 'FSDPNet'", 12, 10, False),
    ],
)
def test_known_differences_allow_more_hooks_only_in_torch_after_failed_fully_shard(
    first: str, by_torch: int, by_fsdp_c: int, is_allowed: bool
) -> None:
    program: list[Step] = [("shard_one", {"module": 10}), ("forward_without_hooks", {"model": 1})]
    lines = [["gave None", f"hooks: {count}"] for count in (by_torch, by_fsdp_c)]
    reason = find_rule(2, program, [[first]], *lines)
    assert (reason is not None) == is_allowed, reason


@pytest.mark.torch("2.15")
@pytest.mark.parametrize(
    "call",
    [
        "('call_group', {'name': 'finalize_backward'})",
        "('call_state', {'name': '_root_post_backward_final_callback'})",
    ],
    ids=["group", "state"],
)
def test_end_of_backward_before_the_first_forward_is_a_known_difference(call: str) -> None:
    program = programs.parse_program(f"[('build', {{}}), ('shard', {{}}), {call}]")
    difference = programs.Pair().compare(program, 1)
    assert difference is not None
    assert difference.rule == END_OF_NO_BACKWARD


@pytest.mark.torch("2.15")
@pytest.mark.parametrize(
    ("by_torch", "by_fsdp_c"),
    [
        ("raised RuntimeError: closed", "raised AttributeError: 'FSDPCommContext' object has no"),
        ("gave None", "raised AttributeError: 'FSDPParam' object has no attribute"),
        ("gave None", "gave 1"),
    ],
)
def test_known_difference_of_finalize_backward_covers_no_other_difference(
    by_torch: str, by_fsdp_c: str
) -> None:
    program: list[Step] = [("call_group", {"name": "finalize_backward"})]
    assert find_rule(1, program, [], [by_torch], [by_fsdp_c]) is None
