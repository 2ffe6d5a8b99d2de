"""Trials of ranks that diverge: each kind of difference of ``divergence.py``, with random models.

    python tests/faults/workers/divergence_trials.py [--seeds 20] [--ranks 3] [--hsdp] \
        [--transport gloo] [--slack 1]

Needs ``tests/harness`` and ``tests/distributed/workers`` in PYTHONPATH. The seed of a trial chooses
the number and the sizes of the blocks, the rank and the block that differ, and the step. A
difference begins in the first step, or after five to nine equal steps. With ``--hsdp``, four ranks
are two replicas. Requirements for each trial:

- Every rank raises a Python exception. No process ends by a signal.
- Each message names the rank that differs and another rank of its process group. Not required of
  the rank that differs in ``unshard_in_backward``: it may read freed parameters first, and then
  raises torch's exception.
- The last rank raises within a second after the difference. ``--slack`` adds seconds to this limit,
  for machines with other load.

Prints a table. The exit status is 1 if a trial misses a requirement.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass, field

import divergence
from divergence import DYNAMIC, OWN_ERROR, OWN_ERROR_KIND, STATIC, Variation
from launch import RanksFailed, run_ranks

TRANSPORTS = {"shared memory": "direct", "gloo": "gloo"}
"""Name -> value of FSDP_C_TRANSPORT."""
FIRST, LATER = "the first step", "a later step"
KINDS = {FIRST: (*STATIC, *DYNAMIC), LATER: DYNAMIC}
"""Begin of the difference -> kinds. A model differs before the first step only."""
NAMED = (
    re.compile(r"ranks (\d+) and (\d+) of process group '.*' have different models: "),
    re.compile(r"collective mismatch: rank (\d+) .*, rank (\d+) "),
)
"""The two ranks that a message names."""
LIMIT = 1.0
"""Seconds until the last rank raises."""

Results = list[dict[str, tuple[str, float]]]
"""Exception and seconds of each kind, by rank."""


@dataclass
class Options:
    transport: str
    world: int
    begin: str
    slack: float = 0.0
    """Seconds that are added to the time limit."""
    hsdp: bool = False


@dataclass
class Score:
    """The outcomes of trials."""

    trials: int = 0
    silent: int = 0
    """Trials in which a rank raised no exception."""
    signals: int = 0
    """Trials in which a process died."""
    unnamed: int = 0
    """Trials with a message that does not name the rank that differs and another rank."""
    seconds: list[float] = field(default_factory=list)
    """Time until the last rank raised, by trial."""
    misses: list[str] = field(default_factory=list)

    def add(
        self,
        trial: str,
        kind: str,
        outcomes: list[tuple[str, float]],
        differing_rank: int,
        options: Options,
    ) -> None:
        """Adds a trial. ``outcomes``: exception and seconds, by rank."""
        self.trials += 1
        texts = [
            text
            for rank, (text, _) in enumerate(outcomes)
            if not (rank == differing_rank and kind == OWN_ERROR_KIND and OWN_ERROR in text)
        ]
        last = max(seconds for _, seconds in outcomes)
        if "silent" in texts:
            self.silent += 1
        elif not all(names_both(text, None if options.hsdp else differing_rank) for text in texts):
            self.unnamed += 1
        else:
            self.seconds.append(last)
            if last <= LIMIT + options.slack:
                return
        self.misses.append(f"{trial}: rank {differing_rank} differs, {last:.2f} s: {texts}")

    def format(self, options: Options) -> str:
        late = sum(seconds > LIMIT for seconds in self.seconds)
        ranks = "2 x 2" if options.hsdp else options.world
        cells = [options.transport, ranks, options.begin, self.trials, self.silent]
        cells += [self.signals, self.unnamed, late]
        times = [statistics.median(self.seconds), max(self.seconds)] if self.seconds else []
        cells += [f"{seconds:.2f}" for seconds in times] or ["-", "-"]
        return "| " + " | ".join(map(str, cells)) + " |"


COLUMNS = (
    "transport",
    "ranks",
    "begin",
    "trials",
    "silent",
    "signals",
    "not naming both",
    "later than 1 s",
    "median, s",
    "maximum, s",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def names_both(text: str, differing_rank: int | None) -> bool:
    """Whether the message names the rank that differs, and another rank.

    None: the rank has another number in its process group of two ranks.
    """
    pairs = [match.groups() for pattern in NAMED if (match := pattern.search(text))]
    return any(
        pair[0] != pair[1] and (differing_rank is None or str(differing_rank) in pair)
        for pair in pairs
    )


def run(options: Options, seed: int, kinds: tuple[str, ...]) -> Results:
    variation = Variation.choose(seed, options.world, options.begin == FIRST)
    variation.hsdp = options.hsdp
    return run_ranks(
        divergence.run,
        options.world,
        ("fsdp_c", kinds, variation),
        env={"FSDP_C_TRANSPORT": TRANSPORTS[options.transport]},
        timeout=20 + 15 * len(kinds),
    )


def run_seed(options: Options, seed: int, kinds: tuple[str, ...], score: Score) -> None:
    """Runs all kinds in the same processes. If a process dies, each kind has its own processes."""
    try:
        results = run(options, seed, kinds)
    except RanksFailed as error:
        if len(kinds) > 1:
            for kind in kinds:
                run_seed(options, seed, (kind,), score)
        else:
            score.trials += 1
            score.signals += 1
            score.misses.append(f"{options}, seed {seed}, {kinds[0]}: {error}")
        return
    differing_rank = Variation.choose(seed, options.world, options.begin == FIRST).differing_rank
    for kind in kinds:
        outcomes = [of_rank[kind] for of_rank in results]
        score.add(f"{options}, seed {seed}, {kind}", kind, outcomes, differing_rank, options)


def run_trials(options: Options, seeds: range) -> Score:
    score = Score()
    for seed in seeds:
        run_seed(options, seed, KINDS[options.begin], score)
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description="Trials of ranks that diverge.")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, choices=(2, 3, 4), action="append")
    parser.add_argument("--hsdp", action="store_true")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--slack", type=float, default=0.0, help="seconds added to the limit")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    print(f"{len(STATIC) + len(DYNAMIC)} kinds, seeds {seeds}\n\n{HEADER}", flush=True)
    failed = False
    for transport in arguments.transport or TRANSPORTS:
        for world in (4,) if arguments.hsdp else arguments.ranks or (2, 3, 4):
            for begin in KINDS:
                options = Options(transport, world, begin, arguments.slack, arguments.hsdp)
                score = run_trials(options, seeds)
                print(score.format(options), flush=True)
                print(*score.misses, sep="\n", file=sys.stderr, flush=True)
                failed = failed or bool(score.misses)
    sys.exit(failed)


if __name__ == "__main__":
    main()
