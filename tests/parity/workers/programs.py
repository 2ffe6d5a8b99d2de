"""Random programs over FSDP2's public interface, run and compared under torch and fsdp_c.

A program is a list of operations (``program_operations.py``, ``program_changes.py``) on models of
many kinds (``program_models.py``). After each operation the state visible to users must be equal
(``program_world.py``): bits of results and gradients, types, layouts, flags, and errors. A program
continues after an error. ``program_known.py`` has the rules for known differences.

    python programs.py --count 1000 --seed 7 --world 2
    python programs.py --show 7     # one program and its results
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import program_changes  # noqa: F401 - it registers operations
import program_internals  # noqa: F401 - it registers operations
import torch
from program_known import can_continue, find_rule, pair_lines
from program_operations import OPERATIONS
from program_ranks import RankOutcome, Server, Step

SECONDS = 50.0
"""Time after which a program counts as hung."""
HANG_RERUNS = 20
"""Reruns of a hung program under each implementation."""
HANGS_COUNTED = 3
"""Hangs of fsdp_c after which the reruns stop."""
HANGS, NONDETERMINISTIC = "torch hangs or crashes", "torch is not deterministic"
OTHER_RULES = (HANGS, NONDETERMINISTIC)
"""Reasons to skip a program, besides the rules of ``program_known.py``."""


# ---- programs ----

ALWAYS = ("forward", "backward", "step")
"""Operations that every program can draw."""


def generate(seed: int) -> list[Step]:
    """Returns a program: a model, its units, usually an optimizer, then random operations.

    Each program uses half of the operations, so that some of them repeat.
    """
    rng = random.Random(seed)
    program = [draw_operation(rng, "build")]
    if rng.random() < 0.1:
        program.append(draw_operation(rng, "build"))
    if rng.random() < 0.85:
        program.append(draw_operation(rng, "shard"))
    if rng.random() < 0.7:
        program.append(draw_operation(rng, "create_optimizer"))
    names = [name for name in OPERATIONS if name in ALWAYS or rng.random() < 0.5]
    weights = [OPERATIONS[name].weight for name in names]
    count = rng.randint(8, 36)
    return program + [draw_operation(rng, name) for name in rng.choices(names, weights, k=count)]


def draw_operation(rng: random.Random, name: str) -> Step:
    """Draws the arguments of an operation: the usual one, or any choice."""
    arguments = {}
    for key, choices in OPERATIONS[name].choices.items():
        if isinstance(choices, list):
            value: Any = [rng.choice(some) for some in choices]
        else:
            value = choices[0] if rng.random() < 0.35 else rng.choice(choices)
        arguments[key] = pack(value)
    return name, arguments


def pack(value: Any) -> Any:
    """Converts an argument for JSON."""
    return str(value) if isinstance(value, torch.dtype) else value


def unpack_arguments(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Converts arguments from JSON. Missing arguments get their usual value."""
    values = {}
    for key, choices in OPERATIONS[name].choices.items():
        usual = usual_of(choices)
        value = arguments.get(key, usual)
        if isinstance(value, str) and value.startswith("torch."):
            value = getattr(torch, value.removeprefix("torch."))
        values[key] = value
    return values


def usual_of(choices: Any) -> Any:
    return [some[0] for some in choices] if isinstance(choices, list) else choices[0]


def format_program(program: Iterable[Step]) -> str:
    """Formats a program without its usual arguments."""
    lines = []
    for name, arguments in program:
        choices = OPERATIONS[name].choices
        unusual = {k: v for k, v in arguments.items() if v != pack(usual_of(choices[k]))}
        lines.append(f"    ({name!r}, {unusual!r}),")
    return "\n".join(["[", *lines, "]"])


def parse_program(text: str) -> list[Step]:
    """Parses a program formatted by ``format_program``."""
    program = []
    for name, unusual in ast.literal_eval(text):
        usual = {key: pack(usual_of(some)) for key, some in OPERATIONS[name].choices.items()}
        program.append((name, {**usual, **unusual}))
    return program


def world_size_of(seed: int) -> int:
    """Returns 2 for each fifth program and 1 for the others. Most faults show on one rank."""
    return 2 if seed % 5 == 4 else 1


# ---- comparing ----


@dataclass
class Difference:
    """The first difference of a program: operation index, kind, description and rule."""

    at: int
    kind: str
    text: str
    rule: str | None = None

    @property
    def is_failure(self) -> bool:
        return self.rule is None

    @property
    def is_hang(self) -> bool:
        """Returns whether a rank hung, or a collective of the rank timed out."""
        return mentions_hang(self.kind) or mentions_hang(self.text)


def mentions_hang(text: str) -> bool:
    return any(word in text for word in ("hung", "imed out", "imeout"))


def is_hung(ranks: Iterable[RankOutcome]) -> bool:
    """Returns whether a rank did not end, or one of its operations raised a timeout."""
    return any(
        end.startswith("hung") or any(mentions_hang(entry[0]) for entry in lines)
        for lines, end in ranks
    )


start_server = functools.cache(Server)
"""Servers live as long as this process."""


class Pair:
    """The servers of torch and fsdp_c. fsdp_c may have a mistake (``program_mistakes.py``)."""

    def __init__(self, mistake: str = "") -> None:
        self.servers = [start_server("torch"), start_server("fsdp_c")]
        self.mistakes = ["", mistake]

    def run(
        self, program: list[Step], world: int, seconds: float = SECONDS
    ) -> list[list[RankOutcome]]:
        """Runs a program under both; concurrently on one rank, in sequence on two."""
        outcomes = []
        for server, mistake in zip(self.servers, self.mistakes):
            server.send_program(program, world, seconds, mistake)
            if world > 1:
                outcomes.append(server.read_outcomes())
        return outcomes or [server.read_outcomes() for server in self.servers]

    def compare(self, program: list[Step], world: int) -> Difference | None:
        """Returns the earliest difference on any rank."""
        by_torch, by_fsdp_c = self.run(program, world)
        earliest = None
        for left, right in zip(by_torch, by_fsdp_c):
            difference = find_difference(world, program, left, right)
            if difference is not None and (earliest is None or difference.at < earliest.at):
                earliest = difference
        return earliest

    def is_deterministic(self, program: list[Step], world: int, difference: Difference) -> bool:
        """Returns whether torch gives equal lines in three runs."""
        server = self.servers[0]
        runs = []
        for _ in range(3):
            server.send_program(program, world, SECONDS)
            runs.append([lines[: difference.at + 1] for lines, _ in server.read_outcomes()])
        return runs[0] == runs[1] == runs[2]

    def judge_hang(self, program: list[Step], world: int, difference: Difference) -> Difference:
        """Reruns a program that hung. The program passes only if torch hangs, too.

        A hang that does not repeat is still a failure, because a race hangs rarely.
        """
        torch_server, server = self.servers
        for _ in range(HANG_RERUNS):
            torch_server.send_program(program, world, SECONDS)
            if is_hung(torch_server.read_outcomes()):
                return replace(difference, rule=HANGS)
        runs = hangs = 0
        while runs < HANG_RERUNS and hangs < HANGS_COUNTED:
            server.send_program(program, world, SECONDS, self.mistakes[1])
            hangs += is_hung(server.read_outcomes())
            runs += 1
        again = f"  more runs: torch hangs in 0 of {HANG_RERUNS}, fsdp_c in {hangs} of {runs}"
        return replace(difference, text=f"{difference.text}\n{again}")


def find_difference(
    world: int, program: list[Step], by_torch: RankOutcome, by_fsdp_c: RankOutcome
) -> Difference | None:
    """Returns the first difference without a rule, or the last one that a rule allows."""
    (left, left_end), (right, right_end) = by_torch, by_fsdp_c
    allowed = None
    for at, (a, b) in enumerate(zip(left, right)):
        if a != b:
            difference = describe_difference(world, program, left[:at], a, b)
            if difference.is_failure or not can_continue(program[at][0], a, b):
                return difference
            allowed = difference
    if len(left) == len(right) and left_end == right_end == "":
        return allowed
    at = min(len(left), len(right))
    if left_end and len(left) <= len(right):
        return Difference(at, "torch ended", f"torch {left_end}", HANGS)
    return Difference(at, f"fsdp_c {right_end.splitlines()[0]}", f"fsdp_c {right_end}")


def describe_difference(
    world: int,
    program: list[Step],
    before: list[list[str]],
    by_torch: list[str],
    by_fsdp_c: list[str],
) -> Difference:
    """Describes the difference in the lines of one operation."""
    at = len(before)
    pairs = pair_lines(by_torch, by_fsdp_c)
    if not pairs:
        return Difference(at, f"{program[at][0]}: order", "  the lines' order")
    text = "\n".join(f"  torch:  {a[:300]}\n  fsdp_c: {b[:300]}" for a, b in pairs[:6])
    rule = find_rule(world, program[: at + 1], before, by_torch, by_fsdp_c)
    return Difference(at, difference_kind(program[at][0], *pairs[0]), text, rule)


def difference_kind(name: str, by_torch: str, by_fsdp_c: str) -> str:
    """Returns a key that groups differences of likely the same cause."""
    if "raised" in by_torch or "raised" in by_fsdp_c:
        return f"{name}: {by_torch[:60]} | {by_fsdp_c[:60]}"
    words = [
        a for a, b in zip(by_torch.split(), by_fsdp_c.split()) if a != b and not a.startswith("[")
    ]
    return f"{name}: {by_torch.split(':')[0].split('.')[-1]} {len(words)}"


def shorten_program(
    pair: Pair, program: list[Step], world: int, difference: Difference, seconds: float
) -> tuple[list[Step], Difference]:
    """Shortens a program to few operations with usual arguments that still differ."""
    end = time.monotonic() + seconds
    program = program[: difference.at + 1]
    size = max(1, len(program) // 2)

    def compare_candidate(candidate: list[Step]) -> Difference | None:
        candidate_result = pair.compare(candidate, world)
        return (
            candidate_result
            if candidate_result is not None
            and candidate_result.is_failure
            and same_operation(candidate_result, difference)
            else None
        )

    while time.monotonic() < end:
        for start in range(len(program) - size, -1, -size):
            candidate = program[:start] + program[start + size :]
            candidate_result = compare_candidate(candidate) if candidate else None
            if candidate_result is not None:
                program, difference = candidate[: candidate_result.at + 1], candidate_result
            if time.monotonic() > end:
                break
        if size == 1:
            break
        size //= 2
    for at, (name, arguments) in enumerate(program):
        for key, simpler in simplifications(name, arguments):
            if at >= len(program):  # a simpler program differs before this operation
                return program, difference
            candidate = [*program]
            candidate[at] = (name, {**program[at][1], key: simpler})
            candidate_result = compare_candidate(candidate) if time.monotonic() < end else None
            if candidate_result is not None:
                program, difference = candidate[: candidate_result.at + 1], candidate_result
    return program, difference


def same_operation(difference: Difference, other: Difference) -> bool:
    """Returns whether both are differences of the same operation."""
    return difference.kind.split(":")[0] == other.kind.split(":")[0]


def simplifications(name: str, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments that can be simplified, each with a simpler value."""
    simpler: list[tuple[str, Any]] = []
    for key, choices in OPERATIONS[name].choices.items():
        usual = pack(usual_of(choices))
        if isinstance(choices, list):
            value = arguments[key]
            for index in range(len(value)):
                if value[index]:
                    simpler.append((key, value[:index] + [""] + value[index + 1 :]))
        if arguments[key] != usual:
            simpler.append((key, usual))
    return simpler


# ---- running many ----


@dataclass
class Report:
    """Results of many programs."""

    programs: int
    operations: int
    failures: dict[int, tuple[list[Step], Difference]]
    rules: Counter[str]


def run_many(
    seeds: Iterable[int],
    world_size: Callable[[int], int],
    mistake: str = "",
    shorten: float = 40.0,
    log: Callable[[str], None] = lambda line: None,
    until: float = float("inf"),
    max_failures: int = 10**9,
    log_rules: bool = False,
) -> Report:
    """Runs the programs of the seeds. Shortens one difference of each kind.

    Args:
        world_size: Returns the number of ranks for a seed.
        shorten: Seconds for shortening a program; 0: no program is shortened.
        until: Time of ``time.monotonic()`` after which no program starts.
    """
    pair = Pair(mistake=mistake)
    report = Report(0, 0, {}, Counter())
    kinds: Counter[str] = Counter()
    for seed in seeds:
        if time.monotonic() > until or len(report.failures) >= max_failures:
            break
        program, world = generate(seed), world_size(seed)
        difference = pair.compare(program, world)
        report.programs += 1
        report.operations += len(program) if difference is None else difference.at
        if difference is None:
            continue
        if difference.rule is None and difference.is_hang:
            difference = pair.judge_hang(program, world, difference)
        if difference.rule is not None:
            report.rules[difference.rule] += 1
            if log_rules:
                log(
                    f"seed {seed}, {program[difference.at][0]}: {difference.rule}\n"
                    f"{difference.text}"
                )
            continue
        if not difference.is_hang and not pair.is_deterministic(program, world, difference):
            report.rules[NONDETERMINISTIC] += 1
            continue
        kinds[difference.kind] += 1
        if kinds[difference.kind] > 1:
            log(f"seed {seed}, world {world}: again {difference.kind}")
            report.failures[seed] = (program, difference)
            continue
        if shorten:
            program, difference = shorten_program(pair, program, world, difference, shorten)
        report.failures[seed] = (program, difference)
        log(
            f"seed {seed}, world {world}: {difference.kind}\n"
            f"{format_program(program)}\n{difference.text}\n"
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=0, help="0: one rank, each fifth two")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shorten", type=float, default=40.0)
    parser.add_argument(
        "--rules", action="store_true", help="also print differences that a rule allows"
    )
    parser.add_argument("--show", type=int)
    parser.add_argument("--program", help="a file with a printed program")
    parser.add_argument("--verbose", action="store_true", help="with --show: all lines")
    arguments = parser.parse_args()

    def world_size(seed: int) -> int:
        return arguments.world or world_size_of(seed)

    if arguments.program or arguments.show is not None:
        show(arguments.program, arguments.show, world_size(arguments.show or 0), arguments.verbose)
        return
    began = time.monotonic()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    report = run_many(
        seeds,
        world_size,
        shorten=arguments.shorten,
        log=lambda line: print(line, flush=True),
        until=began + arguments.seconds,
        log_rules=arguments.rules,
    )
    print(
        f"{report.programs} programs, {report.operations} operations compared, "
        f"{len(report.failures)} differ, {time.monotonic() - began:.0f} s"
    )
    for rule, count in report.rules.most_common():
        print(f"  {count} {rule}")
    sys.exit(bool(report.failures))


def show(file: str | None, seed: int | None, world: int, verbose: bool = False) -> None:
    """Prints the lines of one program under both implementations."""
    if file is not None:
        program = parse_program(Path(file).read_text())
    else:
        program = generate(seed or 0)
    pair = Pair()
    by_torch, by_fsdp_c = pair.run(program, world)
    for rank, (left, right) in enumerate(zip(by_torch, by_fsdp_c)):
        for at, (name, arguments) in enumerate(program):
            a, b = (lines[at] if at < len(lines) else [] for lines in (left[0], right[0]))
            print(rank, at, name, json.dumps(arguments), a[:1] or "-", "" if a == b else b[:1])
            for x, y in zip(a, b):
                if x != y or verbose:
                    print(f"    torch:  {x}\n    fsdp_c: {y}")
        print("ends:", left[1], "|", right[1])
    print(pair.compare(program, world))


if __name__ == "__main__":
    main()
