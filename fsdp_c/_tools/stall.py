"""``python -m fsdp_c stall FILE...``: compares the records of collectives of several ranks.

Ranks write the files when they wait long, when a collective fails, when the process ends within a
step, and on a signal (``fsdp_c/_runtime/stall_monitor.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from .._runtime.records import ABANDONED, COMPLETE, FAILED, ISSUED, WAITING, Record, read_file
from .._runtime.stall_report import describe_wait, format_ranks
from . import trace_spans
from .plotting import require_matplotlib
from .timeline import make_chrome_trace
from .timeline_plot import plot_timeline
from .trace_spans import Span

DESCRIPTION = """\
Prints the oldest collective that each rank has not completed, or else its last one, and the first
difference between the ranks of each process group. The files are <port>-rank<N>.records in the
folder FSDP_C_STALL_DIR, by default fsdp_c-<user id> in the folder for temporary files.
Exit code 1: the ranks differ. 2: a file cannot be read or written."""


@dataclass(frozen=True)
class RankRecords:
    """The file of one rank. Records are in the order of issue."""

    rank: int
    facts: dict[str, Any]
    records: list[Record]

    @property
    def clock_offset(self) -> int:
        """Nanoseconds to add to the times of records for wall time."""
        return int(self.facts["clock_offset"])

    def describe(self) -> str:
        name = f"rank {self.rank} (process {self.facts['pid']} on {self.facts['host']})"
        if not self.records:
            return f"{name} has no collective"
        last = self.records[-1]
        unfinished = [r for r in self.records if r.state in (WAITING, ISSUED)]
        current = unfinished[0] if unfinished else last
        verbs = {WAITING: "waits for", ISSUED: "has issued, and does not wait for,",
                 COMPLETE: "has completed", FAILED: "failed in",
                 ABANDONED: "has abandoned"}  # fmt: skip
        return f"{name} {verbs[current.state]} {describe_wait(current)}"


def read_ranks(paths: list[str]) -> list[RankRecords]:
    """Reads one file per rank of a job and sorts them. Raises ``OSError`` or ``ValueError``."""
    ranks: dict[int, RankRecords] = {}
    world = 0
    for path in paths:
        facts, records = read_file(path)
        rank, world = int(facts["rank"]), world or int(facts["world"])
        if not 0 <= rank < facts["world"] or facts["world"] != world:
            raise ValueError(
                f"{path} is of another job: it is of rank {rank} of {facts['world']} ranks, and "
                f"{paths[0]} is of a job with {world} ranks. Pass the files of one job"
            )
        if rank in ranks:
            raise ValueError(f"{path}: another file is of rank {rank}, too")
        ranks[rank] = RankRecords(rank, facts, records[::-1])
    return [ranks[rank] for rank in sorted(ranks)]


# ---- first difference ----------------------------------------------------------------------------


def find_differences(ranks: list[RankRecords]) -> list[str]:
    """Returns the first difference of each process group that at least two files contain."""
    groups = sorted({record.group for rank in ranks for record in rank.records})
    found = (_find_difference(group, ranks) for group in groups)
    return [text for text in found if text]


def _find_difference(group: str, ranks: list[RankRecords]) -> str:
    """Compares the collectives of one process group, from the oldest that all files contain.

    Files contain only the latest collectives, and modules of two models may have equal names. So
    the oldest collective of one file may be equal to an earlier one of another file. A collective
    that each file contains exactly once is preferred.
    """
    sequences = {
        rank.rank: [record.describe() for record in rank.records if record.group == group]
        for rank in ranks
    }
    sequences = {rank: texts for rank, texts in sequences.items() if texts}
    if len(sequences) < 2:
        return ""
    counts = [Counter(texts) for texts in sequences.values()]
    common = [text for text in next(iter(sequences.values())) if all(c[text] for c in counts)]
    if not common:
        return f"process group '{group}': the ranks have no collective in common"
    unique = (text for text in common if all(c[text] == 1 for c in counts))
    first = next(unique, common[0])
    starts = {rank: texts.index(first) for rank, texts in sequences.items()}
    previous = first
    for i in range(max(len(texts) - starts[rank] for rank, texts in sequences.items())):
        current = {rank: texts[starts[rank] + i : starts[rank] + i + 1]
                   for rank, texts in sequences.items()}  # fmt: skip
        if len({tuple(texts) for texts in current.values()}) > 1:
            lines = [f"process group '{group}', after {previous}:"]
            for rank, texts in current.items():
                lines.append(f"  rank {rank}: {texts[0] if texts else 'no further collective'}")
            return "\n".join(lines)
        previous = next(iter(current.values()))[0]
    return ""


# ---- timeline ------------------------------------------------------------------------------------


def make_spans(ranks: list[RankRecords], last: int) -> dict[int, list[Span]]:
    """Returns spans of the last ``last`` collectives by rank, in ns since the first one."""
    shown = [rank.records[-last:] for rank in ranks]
    times = [
        time + rank.clock_offset
        for rank, records in zip(ranks, shown)
        for record in records
        for time in (record.begin, record.waiting, record.end)
        if time
    ]
    start = min(times)
    end = max(start + 1, *times, *(rank.facts.get("written", 0) for rank in ranks))
    return {
        rank.rank: [
            span
            for record in records
            for span in _make_spans(record, rank.clock_offset - start, end - start)
        ]
        for rank, records in zip(ranks, shown)
    }


def _make_spans(record: Record, offset: int, end: int) -> list[Span]:
    """Returns spans of a collective and of the wait for it.

    If these have not ended, the spans end when the last file was written.
    """
    kind = trace_spans.GATHER if "gather" in record.kind else trace_spans.REDUCE
    unit = record.modules or trace_spans.ROOT
    until = record.end + offset if record.end else end
    spans = [Span(kind, kind, unit, record.begin + offset, until)]
    if record.state == WAITING or record.end:
        begin = record.waiting + offset
        spans.append(Span(trace_spans.HOST, trace_spans.WAITS[kind], unit, begin, until))
    return spans


# ---- command -------------------------------------------------------------------------------------


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c stall",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--plot", metavar="PATH", help="draw a timeline; needs matplotlib")
    parser.add_argument("--trace", metavar="PATH", help="write Chrome's trace format")
    parser.add_argument(
        "--last", type=int, default=200, metavar="N",
        help="collectives per rank in timeline and trace (default: 200)",
    )  # fmt: skip
    return parser


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _make_parser().parse_args(arguments)
    try:
        if options.plot:
            require_matplotlib()
        ranks = read_ranks(options.files)
        differences = _print_report(ranks)
        if options.plot or options.trace:
            _write_timeline(ranks, differences, options)
    except (OSError, ValueError, ImportError) as error:
        print(f"python -m fsdp_c stall: {error}", file=sys.stderr)
        return 2
    return 1 if differences else 0


def _print_report(ranks: list[RankRecords]) -> list[str]:
    """Prints ``RankRecords.describe`` of each rank, and the differences. Returns these."""
    for rank in ranks:
        print(rank.describe())
    missing = set(range(ranks[0].facts["world"])) - {rank.rank for rank in ranks}
    if missing:
        print(f"no file of {format_ranks(sorted(missing))}")
    differences = find_differences(ranks)
    found = "\n".join(differences)
    print(found or "found no difference between collectives that at least two files contain")
    return differences


def _write_timeline(
    ranks: list[RankRecords], differences: list[str], options: argparse.Namespace
) -> None:
    """Writes plot and trace. Raises ``OSError`` or ``ValueError``."""
    if not any(rank.records for rank in ranks):
        raise ValueError("cannot write a timeline: no file contains a collective")
    spans = make_spans(ranks, max(1, options.last))
    if options.trace:
        with open(options.trace, "w") as file:
            json.dump(make_chrome_trace(spans, "; ".join(differences)), file)
    if options.plot:
        plot_timeline("Last collectives of each rank", spans, options.plot)
