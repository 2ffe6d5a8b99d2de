"""Finds the code of ``python script.py`` and ``python -m module``, as the interpreter does.

Imports only the standard library: the processes of ``compare`` load this file without fsdp_c.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import sys
from types import CodeType, ModuleType
from typing import NoReturn


def exit_with(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(status)


def _make_main_module(spec: importlib.machinery.ModuleSpec | None, file: str | None) -> ModuleType:
    """Returns a new ``__main__`` module with the attributes that the interpreter sets."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if sys.version_info < (3, 14):
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


def find_module(name: str) -> tuple[ModuleType, CodeType]:
    """Returns a new ``__main__`` module, and the code of ``python -m name``.

    ``name`` is a module, or a package with a ``__main__``. Exits with the interpreter's messages.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                exit_with(
                    f"{sys.executable}: No module named {name}.__main__; {name!r} is a package "
                    "and cannot be directly executed",
                    1,
                )
    except ModuleNotFoundError as error:
        exit_with(
            f"{sys.executable}: Error while finding module specification for {name!r} "
            f"(ModuleNotFoundError: {error})",
            1,
        )
    if spec is None:
        exit_with(f"{sys.executable}: No module named {name}", 1)
    return _make_main_module(spec, spec.origin), _get_code(spec)


def _get_code(spec: importlib.machinery.ModuleSpec) -> CodeType:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        exit_with(f"{sys.executable}: No code object available for {spec.name}", 1)
    return code


def read_script(path: str) -> tuple[ModuleType, CodeType]:
    """Returns a new ``__main__`` module, and the code of ``python path``.

    For a directory or an archive, the code is that of its ``__main__``.
    """
    # Under -P, sys.path[0] is not the current folder.
    is_safe_path = getattr(sys.flags, "safe_path", False)
    if os.path.isdir(path) or _is_archive(path):
        sys.path[0 : 0 if is_safe_path else 1] = [os.path.abspath(path)]
        spec = importlib.machinery.PathFinder.find_spec("__main__", sys.path[:1])
        if spec is None:
            exit_with(f"{sys.executable}: can't find '__main__' module in {path!r}", 1)
        return _make_main_module(spec, spec.origin), _get_code(spec)
    file = os.path.abspath(path)
    try:
        with io.open_code(file) as source:
            text = source.read()
    except OSError as error:
        exit_with(
            f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", 2
        )
    if not is_safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(file))
    return _make_main_module(None, file), compile(text, file, "exec", dont_inherit=True)


def _is_archive(path: str) -> bool:
    import zipfile

    return os.path.isfile(path) and zipfile.is_zipfile(path)
