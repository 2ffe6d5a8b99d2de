"""``python -m fsdp_c script.py args...``: runs a script as ``python`` does, with fsdp_c.

``python -m fsdp_c -m package.module args...`` runs a module. Both work below torchrun (``torchrun
--nproc-per-node 8 -m fsdp_c train.py``). ``sys.argv``, ``sys.path[0]``, ``__main__``, tracebacks
and exit codes are the same as without ``-m fsdp_c``; child processes inherit ``FSDP_C=1``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import fsdp_c_autoload

from ._tools import script_loader
from ._tools.script_loader import exit_with, find_module, read_script
from .install import install

USAGE = f"""\
usage: {os.path.basename(sys.executable)} -m fsdp_c [-m module | script.py] [arguments ...]

Runs the script (or module) with torch.distributed.fsdp.fully_shard replaced by fsdp_c's.

    {os.path.basename(sys.executable)} -m fsdp_c plan package.module:Model 8 --batch 2x2048:int64

prints the memory of the model on each of 8 ranks (plan --help). A script of that name is ./plan.

    {os.path.basename(sys.executable)} -m fsdp_c compare --nproc-per-node 2 train.py

runs a script under torch's FSDP2 and under fsdp_c, and compares numbers, time and memory
(compare --help). A script of that name is ./compare.

    {os.path.basename(sys.executable)} -m fsdp_c stall *.records

compares the last collectives of ranks that waited or failed (stall --help). A script of that name
is ./stall.

    {os.path.basename(sys.executable)} -m fsdp_c --version
    {os.path.basename(sys.executable)} -m fsdp_c --check

prints and checks the installation: extension, kernels, devices, torch, training on two ranks.
"""


ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _hide_own_frames(previous_hook: ExceptHook) -> ExceptHook:
    """Returns an ``excepthook`` whose tracebacks begin at the script's frame."""

    def hook(
        error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        launcher_files = (__file__, script_loader.__file__, "<frozen runpy>", runpy.__file__)
        script_traceback = traceback
        while (
            script_traceback is not None
            and script_traceback.tb_frame.f_code.co_filename in launcher_files
        ):
            script_traceback = script_traceback.tb_next
        if script_traceback is not None or isinstance(error, SyntaxError):  # else fsdp_c raised it
            error, traceback = error.with_traceback(script_traceback), script_traceback
        previous_hook(error_type, error, traceback)

    return hook


def _run_plan(arguments: list[str]) -> int:
    from ._tools.plan_command import main as run

    return run(arguments)


def _run_compare(arguments: list[str]) -> int:
    from ._tools.compare import main as run

    return run(arguments)


def _run_stall(arguments: list[str]) -> int:
    from ._tools.stall import main as run

    return run(arguments)


def _run_check(arguments: list[str]) -> int:
    from ._tools.check import main as run

    return run()


def _print_version(arguments: list[str]) -> int:
    from ._tools.check import format_version

    print(format_version())
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": _run_plan,
    "compare": _run_compare,
    "stall": _run_stall,
    "--check": _run_check,
    "--version": _print_version,
}


def main() -> None:
    """Runs the script or command of the command line. Exceptions of the script propagate."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    if arguments[0] in _COMMANDS:
        raise SystemExit(_COMMANDS[arguments[0]](arguments[1:]))
    as_module = arguments[0] == "-m"
    if arguments[0].startswith("-") and not as_module:
        exit_with(
            f"unknown option {arguments[0]}: options of Python go before -m fsdp_c, options "
            f"of a script after the script\n{USAGE}",
            2,
        )
    if as_module and len(arguments) == 1:
        exit_with("Argument expected for the -m option\n" + USAGE, 2)
    sys.argv[:] = arguments[1:] if as_module else arguments
    sys.excepthook = _hide_own_frames(sys.excepthook)
    os.environ[fsdp_c_autoload.ENVIRONMENT_SWITCH] = "1"
    install()
    module, code = find_module(sys.argv[0]) if as_module else read_script(sys.argv[0])
    if as_module and module.__file__ is not None:
        sys.argv[0] = module.__file__
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
