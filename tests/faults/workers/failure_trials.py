"""Trials of failing ranks: one of three ranks is killed, is stopped, raises or pauses at a random
point.

    python tests/faults/workers/failure_trials.py [--trials 100] [--seed 0] [--fault kill] \
        [--transport gloo] [--stall-seconds 1] [--fresh]

Needs ``tests/harness`` in PYTHONPATH. Each trial trains a small model until the fault. Requirements
for each survivor:

- It raises within the time limit of the process group plus 0.5 s, after its wait began. Over shared
  memory it raises within 1 s after the death of the failing process. gloo may wait until the time
  limit, because it fails only the operations with the dead process.
- Its exception and its reports name the unit, the pass and the failing rank.
- Its process ends by itself.
- It logs a report within FSDP_C_STALL_SECONDS plus 1 s, unless the failing process ends.
- Each report names the failing rank as such, and no other rank.

If the rank only pauses, no rank raises, and all of them continue.

Prints a table. The exit status is 1 if a trial misses a requirement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fork_server import start_script
from trial_rank import BLOCKS, Plan

SCRIPT = Path(__file__).with_name("trial_rank.py")
WORLD = 3
STALL_LIMIT = 1.0
"""Default of FSDP_C_STALL_SECONDS in the trials."""
GROUP_LIMIT, PAUSE, PAUSE_LIMIT = 1.5, 0.9, 9.0
"""Seconds after FSDP_C_STALL_SECONDS: time limit of the process group, end of a pause, and time
limit of the process group if a rank pauses."""
MARGIN, DEATH_MARGIN, REPORT_MARGIN, EXIT_MARGIN = 0.5, 1.0, 1.0, 10.0
"""Seconds after the group's limit, after a death, after the limit of the report, and after the
exception of a survivor."""
HANG_SECONDS = 20.0
"""Seconds after the time limit of the process group until a survivor counts as hanging."""
MAX_DELAY = 0.5
"""Largest time from the begin of the training to a signal, in seconds. A step takes about 5 ms."""
MAX_STEPS = 30
"""The step of an exception or a pause is below this number."""
TRANSPORTS = {"shared memory": "direct", "gloo": "gloo"}
"""Name -> value of FSDP_C_TRANSPORT."""


@dataclass(frozen=True)
class Fault:
    """How a rank fails."""

    place: str
    """Regular expression of the failing rank's place in a report."""
    number: int = 0
    """The signal that the rank gets, 0: none."""
    raises_and: str = ""
    """As in ``trial_rank.Plan``."""
    ends: bool = True
    """Whether the process ends by the fault."""
    pauses: bool = False
    """The rank pauses in forward, then continues."""


FAULTS = {
    "kill": Fault("has ended", signal.SIGKILL),
    "stop": Fault("is stopped by a signal", signal.SIGSTOP, ends=False),
    "raise": Fault("left the forward by an exception|has ended", raises_and="ends"),
    "raise, caught": Fault("left the forward by an exception", raises_and="stays", ends=False),
    "pause": Fault(
        "waits for no collective of fsdp_c.* in raise_or_pause$", ends=False, pauses=True
    ),
}


@dataclass
class Survivor:
    """The events of one survivor. Times are seconds after the fault or the death of the rank."""

    rank: int
    raised: float | None = None
    text: str = ""
    exited: float | None = None
    """Seconds from its exception to the end of its process."""
    finished: bool = False
    """Whether it continued after the fault, and ended without an exception."""
    reports: list[tuple[float, str]] = field(default_factory=list)

    @property
    def waited_from(self) -> float:
        """Begin of the wait for the failing rank, by the first report.

        On a busy machine it may be late. It is negative if the failing rank was late itself.
        """
        for at, text in self.reports[:1]:
            waited = re.search(r"has waited (\d+\.\d) s", text)
            return at - float(waited[1]) if waited else 0.0
        return 0.0


@dataclass
class Trial:
    transport: str
    fault: str
    failing_rank: int
    place: str
    """As in ``Fault``."""
    survivors: list[Survivor]
    output: str


@dataclass
class Options:
    transport: str
    fault: str
    seed: int
    fresh: bool = False
    """Whether ranks are new interpreters. Otherwise a process that has imported torch is forked."""
    slack: float = 0.0
    """Seconds that are added to each time limit, for machines with other load."""
    stall_seconds: float = STALL_LIMIT

    @property
    def group_limit(self) -> float:
        """Time limit of the process group in seconds."""
        return self.stall_seconds + (PAUSE_LIMIT if FAULTS[self.fault].pauses else GROUP_LIMIT)


# ---- a trial ----


class Rank:
    """The process of a rank, and its files."""

    def __init__(self, plan: Plan, folder: Path, options: Options) -> None:
        self.events = Path(plan.events)
        self.events.touch()
        self.output = folder / f"output{plan.rank}"
        env = os.environ | {
            "FSDP_C_TRANSPORT": TRANSPORTS[options.transport],
            "FSDP_C_STALL_SECONDS": str(options.stall_seconds),
            "FSDP_C_STALL_DIR": str(folder / "records"),
            "OMP_NUM_THREADS": "1",
            "RANK": str(plan.rank),
        }
        self.process: Any
        if options.fresh:
            command = [sys.executable, str(SCRIPT), plan.to_json()]
            with self.output.open("wb") as file:
                self.process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        else:
            self.process = start_script(SCRIPT, [plan.to_json()], env, self.output)
        self.exited: float | None = None

    def poll(self) -> bool:
        """Returns whether the process has ended."""
        if self.exited is None and self.process.poll() is not None:
            self.exited = time.monotonic()
        return self.exited is not None

    def read_events(self, kind: str) -> list[dict[str, Any]]:
        lines = self.events.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["kind"] == kind]

    def find_event(self, kind: str) -> float | None:
        return next((event["at"] for event in self.read_events(kind)), None)


def wait_for(ranks: Sequence[Rank], condition: Any, seconds: float) -> bool:
    """Waits until all ranks fulfill the condition. Returns False after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        fulfilled = [condition(rank) for rank in ranks]  # Rank.poll records when each rank ends
        if all(fulfilled):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.005)


def run_trial(number: int, options: Options, port: int) -> Trial:
    """Runs one trial. Seed and number determine the failing rank and the point of the fault."""
    rng = random.Random(f"{options.seed} {options.transport} {options.fault} {number}")
    fault = FAULTS[options.fault]
    failing_rank = rng.randrange(WORLD)
    step, block, delay = rng.randrange(MAX_STEPS), rng.randrange(BLOCKS), rng.random() * MAX_DELAY
    with tempfile.TemporaryDirectory(prefix="fsdp_c_trial_") as name:
        folder = Path(name)
        ranks = []
        for rank in range(WORLD):
            events = f"{name}/events{rank}"
            plan = Plan(rank, WORLD, port, f"{options} {number}", options.group_limit, events)
            if rank == failing_rank:
                plan.raises_and, plan.block = fault.raises_and, block
                plan.pause = (options.stall_seconds + PAUSE) if fault.pauses else 0.0
            plan.step, plan.finishes = step, fault.pauses
            ranks.append(Rank(plan, folder, options))
        try:
            fault_time = origin = cause_fault(ranks, failing_rank, fault, delay)
            others = [rank for rank in ranks if rank is not ranks[failing_rank]]
            ending = ranks if fault.ends or fault.pauses else others
            if not wait_for(ending, Rank.poll, HANG_SECONDS + options.group_limit):
                print_stacks(ranks)
        finally:
            for rank in ranks:
                if not rank.poll():
                    os.kill(rank.process.pid, signal.SIGKILL)
                    rank.process.wait()
        if fault.raises_and == "ends":
            origin = ranks[failing_rank].exited or origin
        place = fault.place
        if not ranks[failing_rank].find_event("began"):  # the first forward
            place += "|has no model of fsdp_c that ran"
        survivors = [
            observe(i, rank, fault_time, origin)
            for i, rank in enumerate(ranks)
            if i != failing_rank
        ]
        output = "".join(rank.output.read_text(errors="replace") for rank in ranks)
    return Trial(options.transport, options.fault, failing_rank, place, survivors, output)


def cause_fault(ranks: list[Rank], failing_rank: int, fault: Fault, delay: float) -> float:
    """Returns the time of the fault."""
    if not wait_for(ranks, lambda rank: rank.find_event("ready"), 60):
        raise RuntimeError("a rank did not start: " + ranks[0].output.read_text())
    if fault.number != 0:
        time.sleep(delay)
        at = time.monotonic()
        os.kill(ranks[failing_rank].process.pid, fault.number)
        return at
    if not wait_for([ranks[failing_rank]], lambda rank: rank.find_event("fault"), 60):
        raise RuntimeError("a rank did not fail: " + ranks[failing_rank].output.read_text())
    return ranks[failing_rank].find_event("fault") or 0.0


def print_stacks(ranks: list[Rank]) -> None:
    """Makes each running rank write the stacks of its threads to its output."""
    for rank in ranks:
        if not rank.poll():
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)


def observe(index: int, rank: Rank, fault_time: float, origin: float) -> Survivor:
    """Returns the rank's exception, and its reports after ``fault_time``.

    Times are seconds after ``origin``: the fault, or the death of a rank that ends by an exception.
    """
    survivor = Survivor(index)
    for event in rank.read_events("raised")[:1]:
        survivor.raised, survivor.text = event["at"] - origin, event["text"]
        if rank.process.poll() != -signal.SIGKILL:
            survivor.exited = (rank.exited or 0.0) - event["at"]
    survivor.finished = rank.process.poll() == 0
    # A rank that a busy machine delays may have caused a report before.
    reports = [event for event in rank.read_events("report") if event["at"] >= fault_time]
    survivor.reports = [(event["at"] - origin, event["text"]) for event in reports]
    return survivor


# ---- requirements ----


def find_misses(trial: Trial, options: Options) -> list[str]:
    """Returns the requirements that the trial misses."""
    return [
        f"rank {survivor.rank}: {miss}"
        for survivor in trial.survivors
        for miss in find_misses_of(survivor, trial, options)
    ]


def find_misses_of(survivor: Survivor, trial: Trial, options: Options) -> list[str]:
    fault, failing_rank, place = FAULTS[trial.fault], trial.failing_rank, trial.place
    slack, waited_from = options.slack, survivor.waited_from
    delay = max(0.0, waited_from)  # the wait began so long after the fault
    misses = []
    if not fault.ends:
        at = survivor.reports[0][0] if survivor.reports else HANG_SECONDS
        if at - delay > options.stall_seconds + REPORT_MARGIN + slack:
            misses.append(f"reported {at:.2f} s after the fault")
    misses += {
        miss for _, text in survivor.reports for miss in find_wrong_lines(text, failing_rank, place)
    }
    if fault.pauses:
        return misses if survivor.finished else [*misses, f"did not continue: {survivor.text}"]
    if survivor.raised is None:
        return [*misses, "did not raise"]
    detects_death = fault.ends and trial.transport == "shared memory"
    limit = slack + (DEATH_MARGIN if detects_death else options.group_limit + MARGIN)
    if survivor.raised - delay > limit:
        misses.append(f"raised {survivor.raised:.2f} s after the fault")
    if not fault.ends and survivor.raised - min(0.0, waited_from) < options.group_limit - MARGIN:
        misses.append(f"raised early, {survivor.raised:.2f} s after the fault")
    if survivor.exited is None:
        misses.append("did not exit")
    elif survivor.exited > EXIT_MARGIN + slack:
        misses.append(f"exited {survivor.exited:.2f} s after its exception")
    texts = [survivor.text, *(text for _, text in survivor.reports)]
    misses += [f"does not name the {name}" for name in find_unnamed(texts, failing_rank, place)]
    return misses + find_wrong_ranks(survivor.text, failing_rank)


def find_unnamed(texts: list[str], failing_rank: int, place: str) -> list[str]:
    text = "\n".join(texts)
    patterns = {
        "unit": r"parameter group|-(gather|scatter) of '",
        "pass": r"\b(forward|backward)\b",
        "rank": rf"rank {failing_rank} has (ended|closed)|process of rank {failing_rank} has|"
        rf"^  rank {failing_rank}: .*({place})",
    }
    return [name for name, pattern in patterns.items() if not re.search(pattern, text, re.M)]


def find_wrong_ranks(text: str, failing_rank: int) -> list[str]:
    """Returns the parts of an exception's message that name a rank that has not failed."""
    named = re.finditer(r"(process of )?rank (\d+) has (ended|closed)", text)
    return [f"wrong rank: {match[0]}" for match in named if int(match[2]) != failing_rank]


def find_wrong_lines(report: str, failing_rank: int, place: str) -> list[str]:
    """Returns the lines of a report about places at which the ranks are not."""
    wrong = []
    for line in report.splitlines():
        match = re.match(r"  ranks? ([0-9, -]+): (.*)", line)
        if match:
            spans = [[int(end) for end in span.split("-")] for span in match[1].split(", ")]
            is_failing = any(span[0] <= failing_rank <= span[-1] for span in spans)
            right = place if is_failing else "^(waits? for|left the wait for) "
            if not re.search(right, match[2]) or (is_failing and spans != [[failing_rank]]):
                wrong.append(f"wrong line in a report: {line}")
    return wrong


# ---- table ----


def format_row(options: Options, trials: list[Trial], missed: int) -> str:
    survivors = [survivor for trial in trials for survivor in trial.survivors]
    raised = [s.raised for s in survivors if s.raised is not None]
    exited = [s.exited for s in survivors if s.exited is not None]
    first = [s.reports[0][0] for s in survivors if s.reports]
    hangs = sum(not s.finished and (s.raised is None or s.exited is None) for s in survivors)
    late = sum(time > DEATH_MARGIN for time in raised) if FAULTS[options.fault].ends else "-"
    cells = [options.transport, options.fault, len(trials), hangs, _format_times(raised), late]
    cells += [_format_times(exited), f"{len(first)} of {len(survivors)}", _format_times(first)]
    return "| " + " | ".join(map(str, [*cells, missed])) + " |"


def _format_times(times: list[float]) -> str:
    """Formats the median and the maximum."""
    return f"{sorted(times)[len(times) // 2]:.2f}, {max(times):.2f}" if times else "-"


COLUMNS = (
    "transport",
    "fault",
    "trials",
    "hangs",
    "raised after, s",
    "later than 1 s",
    "exited after, s",
    "reports",
    "reported after, s",
    "missed",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def run_trials(options: Options, count: int) -> tuple[str, list[str]]:
    """Prints the misses. Returns the row of the table, and the misses of all trials."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    trials, misses, missed = [], [], 0
    for number in range(count):
        trial = run_trial(number, options, store.port)
        trials.append(trial)
        found = find_misses(trial, options)
        missed += bool(found)
        for miss in found:
            misses.append(f"{options.transport}, {options.fault}, trial {number}: {miss}")
            print(misses[-1], file=sys.stderr)
        if found:
            print(trial.output, file=sys.stderr, flush=True)
    return format_row(options, trials, missed), misses


def main() -> None:
    parser = argparse.ArgumentParser(description="Trials of failing ranks.")
    parser.add_argument("--trials", type=int, default=100, help="per fault and transport")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--slack", type=float, default=0.0, help="seconds added to each limit")
    parser.add_argument("--stall-seconds", type=float, default=STALL_LIMIT)
    parser.add_argument("--fresh", action="store_true", help="start new interpreters, no forks")
    arguments = parser.parse_args()
    print("Times are medians and maxima over the survivors.\n\n" + HEADER, flush=True)
    failed = False
    for transport in arguments.transport or TRANSPORTS:
        for fault in arguments.fault or FAULTS:
            options = Options(
                transport,
                fault,
                arguments.seed,
                arguments.fresh,
                arguments.slack,
                arguments.stall_seconds,
            )
            row, misses = run_trials(options, arguments.trials)
            print(row, flush=True)
            failed = failed or bool(misses)
    sys.exit(failed)


if __name__ == "__main__":
    main()
