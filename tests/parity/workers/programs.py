"""Random programs over FSDP2's public interface, under torch and under fsdp_c, beside each other.

A program is a list of operations (``program_operations.py``, ``program_changes.py``) on models of
all kinds (``program_models.py``). After each of them everything that users can see must be the same
in both (``program_world.py``): results and gradients to the bit, types, layouts and flags, or what
was raised; and after that the program goes on. What is known to differ is in ``program_known.py``.

    python programs.py --count 1000 --seed 7 --world 2
    python programs.py --show 7     # one program and what becomes of it, shortened
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
from program_known import goes_on, known, paired
from program_operations import OPERATIONS
from program_ranks import Rank, Server, Step

SECONDS = 50.0
"""After which a program hangs."""
HANG_RERUNS = 20
"""Runs under each implementation that judge a hang."""
HANGS_COUNTED = 3
"""Hangs of ours after which no more runs are needed."""
HANGS, UNSTEADY = "torch hangs or crashes", "torch does not do the same each time"
OTHER_RULES = (HANGS, UNSTEADY)
"""Why programs are left out, besides what is known to differ."""


# ---- programs ----

ALWAYS = ("forward", "backward", "step")
"""What no program goes without."""


def generate(seed: int) -> list[Step]:
    """A model, its units, mostly an optimizer, then anything: of half of the operations, so that
    some of them come often."""
    rng = random.Random(seed)
    program = [drawn(rng, "build")]
    if rng.random() < 0.1:
        program.append(drawn(rng, "build"))
    if rng.random() < 0.85:
        program.append(drawn(rng, "shard"))
    if rng.random() < 0.7:
        program.append(drawn(rng, "optimizer"))
    names = [name for name in OPERATIONS if name in ALWAYS or rng.random() < 0.5]
    weights = [OPERATIONS[name].weight for name in names]
    count = rng.randint(8, 36)
    return program + [drawn(rng, name) for name in rng.choices(names, weights, k=count)]


def drawn(rng: random.Random, name: str) -> Step:
    """An operation with arguments: the usual one, or any."""
    arguments = {}
    for key, choices in OPERATIONS[name].choices.items():
        if isinstance(choices, list):
            value: Any = [rng.choice(some) for some in choices]
        else:
            value = choices[0] if rng.random() < 0.35 else rng.choice(choices)
        arguments[key] = packed(value)
    return name, arguments


def packed(value: Any) -> Any:
    """As JSON has it."""
    return str(value) if isinstance(value, torch.dtype) else value


def unpacked(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """With the choice itself in the place of what JSON made of it; those not given are usual."""
    found = {}
    for key, choices in OPERATIONS[name].choices.items():
        usual = usual_of(choices)
        value = arguments.get(key, usual)
        if isinstance(value, str) and value.startswith("torch."):
            value = getattr(torch, value.removeprefix("torch."))
        found[key] = value
    return found


def usual_of(choices: Any) -> Any:
    return [some[0] for some in choices] if isinstance(choices, list) else choices[0]


def written(program: Iterable[Step]) -> str:
    """A program to be read: what is as usual is left out."""
    lines = []
    for name, arguments in program:
        choices = OPERATIONS[name].choices
        odd = {k: v for k, v in arguments.items() if v != packed(usual_of(choices[k]))}
        lines.append(f"    ({name!r}, {odd!r}),")
    return "\n".join(["[", *lines, "]"])


def read(text: str) -> list[Step]:
    """What has been written."""
    found = []
    for name, odd in ast.literal_eval(text):
        usual = {key: packed(usual_of(some)) for key, some in OPERATIONS[name].choices.items()}
        found.append((name, {**usual, **odd}))
    return found


def ranks_of(seed: int) -> int:
    """One rank finds most: each fifth program has two."""
    return 2 if seed % 5 == 4 else 1


# ---- comparing ----


@dataclass
class Difference:
    """The first thing that is not the same: at which operation, what, and a word for its kind."""

    at: int
    kind: str
    text: str
    rule: str | None = None

    @property
    def counted(self) -> bool:
        return self.rule is None

    @property
    def is_hang(self) -> bool:
        """Whether a rank hung, or a collective of it timed out."""
        return mentions_hang(self.kind) or mentions_hang(self.text)


def mentions_hang(text: str) -> bool:
    return any(word in text for word in ("hung", "imed out", "imeout"))


def is_hung(ranks: Iterable[Rank]) -> bool:
    """Whether a rank did not end, or an operation of it raised a collective's timeout."""
    return any(
        end.startswith("hung") or any(mentions_hang(found[0]) for found in lines)
        for lines, end in ranks
    )


server_of = functools.cache(Server)
"""They stay for as long as this process."""


class Pair:
    """torch and fsdp_c, which may have a mistake (``program_mistakes.py``)."""

    def __init__(self, mistake: str = "") -> None:
        self.servers = [server_of("torch"), server_of("fsdp_c")]
        self.mistakes = ["", mistake]

    def run(self, program: list[Step], world: int, seconds: float = SECONDS) -> list[list[Rank]]:
        """Both at the same time where that is two processes."""
        found = []
        for server, mistake in zip(self.servers, self.mistakes):
            server.ask(program, world, seconds, mistake)
            if world > 1:
                found.append(server.answer())
        return found or [server.answer() for server in self.servers]

    def compare(self, program: list[Step], world: int) -> Difference | None:
        stock, ours = self.run(program, world)
        found = None
        for left, right in zip(stock, ours):
            one = difference(world, program, left, right)
            if one is not None and (found is None or one.at < found.at):
                found = one
        return found

    def steady(self, program: list[Step], world: int, found: Difference) -> bool:
        """Whether stock itself does the same each time."""
        server = self.servers[0]
        runs = []
        for _ in range(3):
            server.ask(program, world, SECONDS)
            runs.append([lines[: found.at + 1] for lines, _ in server.answer()])
        return runs[0] == runs[1] == runs[2]

    def judge_hang(self, program: list[Step], world: int, found: Difference) -> Difference:
        """Runs a program that hung again under both. It passes only if torch hangs, too.

        A hang that does not come again is a failure all the same: a race hangs rarely.
        """
        hung = [0, 0]
        for index, (server, mistake) in enumerate(zip(self.servers, self.mistakes)):
            for _ in range(HANG_RERUNS):
                server.ask(program, world, SECONDS, mistake)
                hung[index] += is_hung(server.answer())
                if hung[0] or hung[1] == HANGS_COUNTED:
                    break
            if hung[0]:
                return replace(found, rule=HANGS)
        again = f"  {HANG_RERUNS} more runs: torch hangs in none, ours in {hung[1]}"
        return replace(found, text=f"{found.text}\n{again}")


def difference(world: int, program: list[Step], stock: Rank, ours: Rank) -> Difference | None:
    (left, left_end), (right, right_end) = stock, ours
    passed = None
    for at, (a, b) in enumerate(zip(left, right)):
        if a != b:
            one = told(world, program, left[:at], a, b)
            if one.counted or not goes_on(program[at][0], a, b):
                return one
            passed = one
    if len(left) == len(right) and left_end == right_end == "":
        return passed
    at = min(len(left), len(right))
    if left_end and len(left) <= len(right):
        return Difference(at, "stock ended", f"stock {left_end}", HANGS)
    return Difference(at, f"ours {right_end.splitlines()[0]}", f"ours {right_end}")


def told(
    world: int,
    program: list[Step],
    before: list[list[str]],
    stock: list[str],
    ours: list[str],
) -> Difference:
    """A difference in what one operation gave or left behind."""
    pairs = paired(stock, ours)
    if not pairs:
        return Difference(len(before), f"{program[-1][0]}: order", "  the lines' order")
    text = "\n".join(f"  stock: {a[:300]}\n  ours:  {b[:300]}" for a, b in pairs[:6])
    at = len(before)
    rule = known(world, program[: at + 1], before, stock, ours)
    return Difference(at, kind_of(program[at][0], *pairs[0]), text, rule)


def kind_of(name: str, stock: str, ours: str) -> str:
    """Which differences are likely the same one: those are shown once."""
    if "raised" in stock or "raised" in ours:
        return f"{name}: {stock[:60]} | {ours[:60]}"
    words = [a for a, b in zip(stock.split(), ours.split()) if a != b and not a.startswith("[")]
    return f"{name}: {stock.split(':')[0].split('.')[-1]} {len(words)}"


def shorter(
    pair: Pair, program: list[Step], world: int, found: Difference, seconds: float
) -> tuple[list[Step], Difference]:
    """As few operations with as usual arguments as still differ, not by a rule."""
    end = time.monotonic() + seconds
    program = program[: found.at + 1]
    size = max(1, len(program) // 2)

    def tried(candidate: list[Step]) -> Difference | None:
        one = pair.compare(candidate, world)
        return one if one is not None and one.counted and alike(one, found) else None

    while time.monotonic() < end:
        for start in range(len(program) - size, -1, -size):
            candidate = program[:start] + program[start + size :]
            one = tried(candidate) if candidate else None
            if one is not None:
                program, found = candidate[: one.at + 1], one
            if time.monotonic() > end:
                break
        if size == 1:
            break
        size //= 2
    for at, (name, arguments) in enumerate(program):
        for key, usual in simpler(name, arguments):
            candidate = [*program]
            candidate[at] = (name, {**program[at][1], key: usual})
            one = tried(candidate) if time.monotonic() < end else None
            if one is not None:
                program, found = candidate[: one.at + 1], one
    return program, found


def alike(one: Difference, other: Difference) -> bool:
    """Shortening does not go from one fault to another one."""
    return one.kind.split(":")[0] == other.kind.split(":")[0]


def simpler(name: str, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, choices in OPERATIONS[name].choices.items():
        usual = packed(usual_of(choices))
        if isinstance(choices, list):
            value = arguments[key]
            for index in range(len(value)):
                if value[index]:
                    found.append((key, value[:index] + [""] + value[index + 1 :]))
        if arguments[key] != usual:
            found.append((key, usual))
    return found


# ---- running many ----


@dataclass
class Report:
    """What became of many programs."""

    programs: int
    operations: int
    failures: dict[int, tuple[list[Step], Difference]]
    rules: Counter[str]


def run_many(
    seeds: Iterable[int],
    worlds: Callable[[int], int],
    mistake: str = "",
    shorten: float = 40.0,
    say: Callable[[str], None] = lambda line: None,
    until: float = float("inf"),
    enough: int = 10**9,
    tell_rules: bool = False,
) -> Report:
    """Runs the programs of the seeds; each kind of difference is shortened once."""
    pair = Pair(mistake=mistake)
    report = Report(0, 0, {}, Counter())
    kinds: Counter[str] = Counter()
    for seed in seeds:
        if time.monotonic() > until or len(report.failures) >= enough:
            break
        program, world = generate(seed), worlds(seed)
        found = pair.compare(program, world)
        report.programs += 1
        report.operations += len(program) if found is None else found.at
        if found is None:
            continue
        if found.rule is None and found.is_hang:
            found = pair.judge_hang(program, world, found)
        if found.rule is not None:
            report.rules[found.rule] += 1
            if tell_rules:
                say(f"seed {seed}, {program[found.at][0]}: {found.rule}\n{found.text}")
            continue
        kinds[found.kind] += 1
        if kinds[found.kind] > 1:
            say(f"seed {seed}, world {world}: again {found.kind}")
            report.failures[seed] = (program, found)
            continue
        if not found.is_hang and not pair.steady(program, world, found):
            report.rules[UNSTEADY] += 1
            continue
        if shorten:
            program, found = shorter(pair, program, world, found, shorten)
        report.failures[seed] = (program, found)
        say(f"seed {seed}, world {world}: {found.kind}\n{written(program)}\n{found.text}\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=0, help="0: one rank, each fifth two")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shorten", type=float, default=40.0)
    parser.add_argument("--rules", action="store_true", help="show what comes under a rule, too")
    parser.add_argument("--show", type=int)
    parser.add_argument("--program", help="a file with a program as it is printed")
    parser.add_argument("--verbose", action="store_true", help="with --show: all lines")
    chosen = parser.parse_args()

    def worlds(seed: int) -> int:
        return chosen.world or ranks_of(seed)

    if chosen.program or chosen.show is not None:
        show(chosen.program, chosen.show, worlds(chosen.show or 0), chosen.verbose)
        return
    began = time.monotonic()
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    report = run_many(
        seeds,
        worlds,
        shorten=chosen.shorten,
        say=lambda line: print(line, flush=True),
        until=began + chosen.seconds,
        tell_rules=chosen.rules,
    )
    print(
        f"{report.programs} programs, {report.operations} operations compared, "
        f"{len(report.failures)} differ, {time.monotonic() - began:.0f} s"
    )
    for rule, count in report.rules.most_common():
        print(f"  {count} {rule}")
    sys.exit(bool(report.failures))


def show(file: str | None, seed: int | None, world: int, verbose: bool = False) -> None:
    """One program, and all that both have seen."""
    if file is not None:
        program = read(Path(file).read_text())
    else:
        program = generate(seed or 0)
    pair = Pair()
    stock, ours = pair.run(program, world)
    for rank, (left, right) in enumerate(zip(stock, ours)):
        for at, (name, arguments) in enumerate(program):
            a, b = (lines[at] if at < len(lines) else [] for lines in (left[0], right[0]))
            print(rank, at, name, json.dumps(arguments), a[:1] or "-", "" if a == b else b[:1])
            for x, y in zip(a, b):
                if x != y or verbose:
                    print(f"    stock: {x}\n    ours:  {y}")
        print("ends:", left[1], "|", right[1])
    print(pair.compare(program, world))


if __name__ == "__main__":
    main()
