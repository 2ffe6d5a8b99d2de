"""Random programs over the public interface, beside torch: workers/programs.py says what they are.

`make test` runs a fixed set of seeds; FSDP_C_PROGRAMS=1000 as many, FSDP_C_PROGRAMS_SEED=7 from
another one on. What differs is shortened, and shown with the program.
"""

from __future__ import annotations

import os

import program_mistakes
import programs
import pytest
from program_known import RULES

COUNT = int(os.environ.get("FSDP_C_PROGRAMS", "40"))
SEED = int(os.environ.get("FSDP_C_PROGRAMS_SEED", "0"))
SHOWN = 3

pytestmark = pytest.mark.xdist_group("programs")


@pytest.mark.torch("2.13")
@pytest.mark.timeout(300 + 10 * COUNT)
def test_programs_do_what_they_do_under_torch() -> None:
    report = programs.run_many(range(SEED, SEED + COUNT), programs.ranks_of, enough=SHOWN)
    shown = [
        f"seed {seed}, {programs.ranks_of(seed)} ranks:\n{programs.written(program)}\n{found.text}"
        for seed, (program, found) in report.failures.items()
    ]
    assert not shown, "torch's and ours differ:\n" + "\n\n".join(shown)
    assert report.programs == COUNT
    assert report.operations > 12 * COUNT, report
    assert set(report.rules) <= {*RULES, *programs.OTHER_RULES}


@pytest.mark.torch("2.13")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", program_mistakes.MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    can_be_seen = program_mistakes.MISTAKES[mistake].can_be_seen
    seeds = [seed for seed in range(2000) if can_be_seen(programs.generate(seed))][:30]
    report = programs.run_many(seeds, lambda seed: 1, mistake=mistake, shorten=0, enough=1)
    assert report.failures, f"{report.programs} programs did not find it: {report.rules}"


def test_a_program_is_its_seeds_and_what_is_written_is_the_program() -> None:
    program = programs.generate(5)
    assert program == programs.generate(5) != programs.generate(6)
    assert programs.read(programs.written(program)) == program
