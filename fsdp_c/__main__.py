"""``python -m fsdp_c script.py args...``: runs a script as ``python`` does, with fsdp_c.

``python -m fsdp_c -m package.module args...`` runs a module. Both work below torchrun
(``torchrun --nproc-per-node 8 -m fsdp_c train.py``). ``sys.argv``, ``sys.path[0]``, ``__main__``,
tracebacks and exit codes are the same as without ``-m fsdp_c``; child processes
inherit ``FSDP_C=1``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Callable
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

import fsdp_c_autoload

from .install import install

USAGE = f"""\
usage: {os.path.basename(sys.executable)} -m fsdp_c [-m module | script.py] [arguments ...]

Runs the script (or module) with torch.distributed.fsdp.fully_shard replaced by fsdp_c's.

    {os.path.basename(sys.executable)} -m fsdp_c plan package.module:Model 8 --batch 2x2048:int64

prints the memory of the model on each of 8 ranks (plan --help; a script of that name is ./plan).

    {os.path.basename(sys.executable)} -m fsdp_c --version
    {os.path.basename(sys.executable)} -m fsdp_c --check

prints and checks the installation: extension, kernels, devices, torch, training on two ranks.
"""


def _exit_with(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status)


def _make_main_module(spec: importlib.machinery.ModuleSpec | None, file: str | None) -> ModuleType:
    """Returns a new ``__main__`` module with the attributes that the interpreter sets."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if "__annotations__" in globals():  # up to Python 3.13
        main.__annotations__ = {}
    main.__spec__ = spec
    main.__package__ = spec.parent if spec is not None else None
    if spec is not None:
        main.__loader__ = spec.loader
        main.__dict__["__cached__"] = spec.cached
    elif file is not None:
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
        main.__dict__["__cached__"] = None
    if file is not None:
        main.__file__ = file
    return main


def _find_module(name: str) -> tuple[ModuleType, CodeType]:
    """Finds the code of ``python -m name``: a module, or a package's ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                _exit_with(
                    f"{sys.executable}: No module named {name}.__main__; {name!r} is a package "
                    "and cannot be directly executed",
                    1,
                )
    except ModuleNotFoundError as error:
        _exit_with(
            f"{sys.executable}: Error while finding module specification for {name!r} "
            f"(ModuleNotFoundError: {error})",
            1,
        )
    if spec is None:
        _exit_with(f"{sys.executable}: No module named {name}", 1)
    return _make_main_module(spec, spec.origin), _get_code(spec)


def _get_code(spec: importlib.machinery.ModuleSpec) -> CodeType:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        _exit_with(f"{sys.executable}: No code object available for {spec.name}", 1)
    return code


def _read_script(path: str) -> tuple[ModuleType, CodeType]:
    """Returns the code of ``path``; for a directory or an archive, the code of its ``__main__``."""
    safe = getattr(sys.flags, "safe_path", False)  # under -P, sys.path[0] is not the current folder
    if os.path.isdir(path) or _is_archive(path):
        sys.path[0 : 0 if safe else 1] = [os.path.abspath(path)]
        spec = importlib.machinery.PathFinder.find_spec("__main__", sys.path[:1])
        if spec is None:
            _exit_with(f"{sys.executable}: can't find '__main__' module in {path!r}", 1)
        return _make_main_module(spec, spec.origin), _get_code(spec)
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as source:
            text = source.read()
    except OSError as error:
        _exit_with(
            f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", 2
        )
    if not safe:
        sys.path[0] = os.path.dirname(os.path.realpath(file))
    return _make_main_module(None, file), compile(text, file, "exec", dont_inherit=True)


def _is_archive(path: str) -> bool:
    import zipfile

    return os.path.isfile(path) and zipfile.is_zipfile(path)


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _hide_own_frames(previous_hook: Hook) -> Hook:
    """Returns an ``excepthook`` whose tracebacks begin at the script's frame."""

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        launcher_files = (__file__, "<frozen runpy>", runpy.__file__)
        script = traceback
        while script is not None and script.tb_frame.f_code.co_filename in launcher_files:
            script = script.tb_next
        if script is not None or isinstance(error, SyntaxError):  # else fsdp_c raised it
            error, traceback = error.with_traceback(script), script
        previous_hook(kind, error, traceback)

    return hook


def _run_plan(arguments: list[str]) -> int:
    from ._tools.plan_command import main as run

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
        _exit_with(
            f"unknown option {arguments[0]}: options of Python go before -m fsdp_c, options "
            f"of a script after the script\n{USAGE}",
            2,
        )
    if as_module and len(arguments) == 1:
        _exit_with("Argument expected for the -m option\n" + USAGE, 2)
    sys.argv[:] = arguments[1:] if as_module else arguments
    sys.excepthook = _hide_own_frames(sys.excepthook)
    os.environ[fsdp_c_autoload.ENVIRONMENT_SWITCH] = "1"
    install()
    module, code = _find_module(sys.argv[0]) if as_module else _read_script(sys.argv[0])
    if as_module and module.__file__ is not None:
        sys.argv[0] = module.__file__
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
