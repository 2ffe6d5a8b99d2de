"""``python -m fsdp_c compare``: runs a training script under torch's FSDP2 and under fsdp_c."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from . import compare_report
from .compare_results import Comparison, Verdict, summarize_rank
from .compare_runs import (
    Exit,
    Job,
    Launch,
    Run,
    Supervisor,
    SupervisorLost,
    find_first_failure,
    read_records,
)
from .plotting import require_matplotlib

EPILOG = """\
exit codes:
  0  all numbers are equal
  1  numbers differ
  2  the script fails under torch alone, an argument is wrong, all numbers are equal but a file
     cannot be written, or the supervisor of another rank is lost
  3  the script fails under fsdp_c only
  4  inconclusive: no optimizer step, no sharded module, or numbers that torch does not repeat
  130, 143  interrupted, terminated
torchrun itself exits with 1 for all codes but 0. Use --nproc-per-node without torchrun for the
codes of a job on one host.

The script runs 2 x ROUNDS times, and each run writes the files of the script. "{run}" in its
arguments is replaced by the name of the run (torch-1, fsdp_c-1, torch-2, ...).
"""

_FAILED = 2  # exit code of failures that are not a script's, as for wrong arguments
_MAX_SEED = 2**32 - 1  # of PYTHONHASHSEED and numpy.random.seed
_MAX_TIMEOUT = 1e9  # seconds; faulthandler and time limits of torch raise above


def main(arguments: Sequence[str]) -> int:
    """Compares and prints the report on rank 0. Returns the exit code, see ``--help``.

    Raises:
        SystemExit: 2, with a message, for invalid arguments; 143 after SIGTERM.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    job = _make_job(parser, options)
    try:
        if options.plot is not None:
            require_matplotlib()
        _check_folders(options)
        supervisor = Supervisor.connect(options.nproc_per_node)
    except (ImportError, ValueError, OSError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, _exit_on_signal)
    with _open_folder(options.logs) as folder:
        try:
            return _compare(job, options, supervisor, folder)
        except KeyboardInterrupt:
            _print_on_rank_0(supervisor, "compare: interrupted")
            return 128 + signal.SIGINT
        except SupervisorLost as error:
            print(f"compare: {error}", file=sys.stderr)
            return _FAILED


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_c compare",
        usage="%(prog)s [options] [-m module | script.py] [arguments ...]\n"
        "       torchrun [options of torchrun] -m fsdp_c compare [options] script.py ...",
        description="Runs a training script for some optimizer steps under torch's FSDP2 and "
        "under fsdp_c, in turns on the same ranks. Compares losses, gradients and parameters bit "
        "by bit, and measures time, memory and collectives.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--steps", type=_parse_count, default=5, help="optimizer steps per run (default 5)")
    add("--rounds", type=_parse_count, default=2, help="runs per implementation (default 2)")
    add("--nproc-per-node", type=_parse_count, metavar="N", help="ranks, without torchrun")
    add("--seed", type=_parse_seed, default=0, help="seed of random, numpy, torch and str hashes")
    add("--timeout", type=float, default=600, metavar="S", help="seconds per run (default 600)")
    add("--json", type=Path, metavar="FILE", help="file for all results")
    add("--plot", type=Path, metavar="FILE", help="file for a picture: compare.png")
    add("--logs", type=Path, metavar="DIR", help="folder for the output of each run and rank")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="a module instead of a script")
    add("script", nargs=argparse.REMAINDER, help="the script and its arguments")
    return parser


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1, not {text!r}")
    return int(text)


def _parse_seed(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_SEED:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to {_MAX_SEED}, not {text!r}")
    return int(text)


def _make_job(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Job:
    as_module = options.module is not None
    arguments = tuple(options.module if as_module else options.script)
    if arguments[:1] == ("--",):  # argparse.REMAINDER keeps it before Python 3.12
        arguments = arguments[1:]
    if not arguments:
        parser.error("a script or -m module is missing")
    if not as_module and not os.path.exists(arguments[0]):
        parser.error(f"can't open file {arguments[0]!r}: no such file")
    if not 0 < options.timeout <= _MAX_TIMEOUT:
        parser.error(
            f"--timeout: expected seconds above 0 and at most {_MAX_TIMEOUT:g}, "
            f"not {options.timeout:g}"
        )
    return Job(arguments, as_module, options.steps, options.seed, options.timeout)


def _check_folders(options: argparse.Namespace) -> None:
    """Creates the folder of logs before the runs.

    Raises:
        ValueError: The folder of a file does not exist, or the file is a folder.
        OSError: The folder of logs cannot be created, or no file can be created in it.
    """
    for path in (options.json, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {str(path)!r}: its folder does not exist")
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {str(path)!r}: it is a folder")
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.logs).close()


@contextlib.contextmanager
def _open_folder(logs: Path | None) -> Iterator[Path]:
    """Yields the folder for records and logs. Removes a temporary folder at the end."""
    if logs is not None:
        yield logs.absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="fsdp_c_compare_") as name:
            yield Path(name)


def _print_on_rank_0(supervisor: Supervisor, text: str) -> None:
    if supervisor.is_first:
        print(text, flush=True)


# ---- the runs ------------------------------------------------------------------------------------


def _compare(job: Job, options: argparse.Namespace, supervisor: Supervisor, folder: Path) -> int:
    """Runs the script under both implementations in turns, and reports."""
    implementations = [name for _ in range(options.rounds) for name in ("torch", "fsdp_c")]
    runs = [Run(i, i // 2 + 1, name) for i, name in enumerate(implementations)]
    records: dict[int, list[tuple[Run, list[dict[str, Any]]]]] = {r: [] for r in supervisor.ranks}
    for run in runs:
        if supervisor.is_first:
            print(f"compare: run {run.number + 1} of {len(runs)}, {run.name}", file=sys.stderr)
        launch = Launch(job, run, supervisor, folder)
        failure = find_first_failure(launch.execute())
        if failure is not None:
            return supervisor.finish(_report_failure(job, run, failure, supervisor))
        for child in launch.children:
            steps = [record for record in read_records(child.record) if "step" in record]
            records[child.rank].append((run, steps))
    for rank, rank_records in records.items():
        supervisor.put(f"summary/{rank}", summarize_rank(rank, rank_records))
    if not supervisor.is_first:
        return supervisor.finish(None)
    summaries = [supervisor.get(f"summary/{rank}") for rank in range(supervisor.world_size)]
    result = Comparison(runs, summaries, job.steps)
    return supervisor.finish(_report(job, options, result))


def _report(job: Job, options: argparse.Namespace, result: Comparison) -> int:
    """Prints the report and writes the files. Returns the exit code."""
    print(compare_report.format_report(job.arguments, result), flush=True)
    try:
        if options.json is not None:
            compare_report.write_json(options.json, job.arguments, result)
        if options.plot is not None:
            compare_report.plot_comparison(options.plot, job.arguments, result)
    except (OSError, ValueError) as error:
        print(f"compare: cannot write a file: {error}", file=sys.stderr, flush=True)
        return result.verdict.value or _FAILED
    return result.verdict.value


def _report_failure(job: Job, run: Run, failure: Exit, supervisor: Supervisor) -> int:
    """Prints the output of the rank that failed first. Returns the exit code."""
    is_torch = run.implementation == "torch"
    condition = "under torch alone" if is_torch else "under fsdp_c only"
    lines = [f"rank {failure.rank}: {line}" for line in failure.tail.splitlines()]
    end = f"the script fails {condition}: {run.name}, rank {failure.rank}: {failure.error}"
    _print_on_rank_0(supervisor, "\n".join([*lines, f"{' '.join(job.arguments)}: {end}"]))
    return (Verdict.TORCH_FAILED if is_torch else Verdict.FSDP_C_FAILED).value
