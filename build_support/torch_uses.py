"""Lists the names of torch that fsdp_c uses, from the sources of fsdp_c."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable")
"""Packages whose internals fsdp_c replaces. Each of their definitions counts as used."""

_PYTHON = ("fsdp_c", "fsdp_c_autoload")
_C = ("csrc/python", "csrc/bridge")
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r'"([A-Za-z_]\w*)"')
# Names in tables of C types, and in macros such as GROUP_FLAG and FCPY_NAMES.
_C_METHOD = re.compile(
    r'\{\s*"([A-Za-z_]\w*)"|(?:METHOD|GETSET|FLAG|ENTRY|X)\w*\(\s*"?([A-Za-z_]\w*)'
)
_INCLUDE = re.compile(r"^\s*#include <((?:ATen|c10|torch)/[^>]+)>", re.M)


@functools.cache
def _list_files(folders: tuple[str, ...], suffixes: tuple[str, ...]) -> dict[str, str]:
    """Returns the text of each source file by its path from the root."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    found = sorted(file for file in files if file.suffix in suffixes)
    return {str(file.relative_to(ROOT)): file.read_text() for file in found}


def _list_python() -> dict[str, str]:
    return _list_files(_PYTHON, (".py",))


def _list_c() -> dict[str, str]:
    return _list_files(_C, (".c", ".h", ".cpp", ".hpp"))


class _Imports(ast.NodeVisitor):
    """Collects the dotted names of torch that one file uses."""

    def __init__(self) -> None:
        self._aliases: dict[str, str] = {}
        self.names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            if name.name.split(".")[0] == "torch":
                self._aliases[name.asname or "torch"] = name.name if name.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                self._aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                self.names.add(f"{node.module}.{name.name}")

    def _get_dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        owner = self._get_dotted(node.value) if isinstance(node, ast.Attribute) else None
        return None if owner is None else f"{owner}.{node.attr}"  # type: ignore[attr-defined]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        dotted = self._get_dotted(node)
        if dotted is not None:
            self.names.add(dotted)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Also collects ``getattr(module, "name")`` and calls with other constant names."""
        owners = [self._get_dotted(argument) for argument in node.args]
        for argument in node.args[1:]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and owners[0]:
                self.names.add(f"{owners[0]}.{argument.value}")
        self.generic_visit(node)


def list_names() -> set[str]:
    """Returns the dotted names of torch that fsdp_c imports or reads from imported objects."""
    names: set[str] = set()
    for text in _list_python().values():
        visitor = _Imports()
        visitor.visit(ast.parse(text))
        names |= visitor.names
    return names


@functools.cache
def _index_words() -> dict[str, list[str]]:
    """Returns the files that mention each word: Python sources, and strings of C sources."""
    index: dict[str, list[str]] = {}
    for texts, pattern in ((_list_python(), _WORD), (_list_c(), _STRING)):
        for file, text in texts.items():
            for word in set(pattern.findall(text)):
                index.setdefault(word, []).append(file)
    for file, text in _list_c().items():
        for word in {a or b for a, b in _C_METHOD.findall(text)}:
            if file not in index.setdefault(word, []):
                index[word].append(file)
    return index


def list_words() -> set[str]:
    """Returns the words of the sources that can be names of members."""
    return set(_index_words())


def find_files(qualified: str) -> list[str]:
    """Returns the files that mention the last part of a name, or the class of ``__init__``."""
    owner, _, member = qualified.rpartition(".")
    word = owner.rpartition(".")[2] if member.startswith("__") and owner else member
    return _index_words().get(word, [])


@functools.cache
def _list_defined() -> set[str]:
    """Returns the names of functions that fsdp_c defines, in Python and in tables of C types."""
    texts = _list_python().values()
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for text in _list_c().values():
        names |= {a or b for a, b in _C_METHOD.findall(text)}
    return names


def is_replaced(module: str, qualified: str) -> bool:
    """Whether fsdp_c has its own definition in place of one of torch.

    True for names of ``PACKAGES`` that fsdp_c defines, too: ``_compat/guard.py`` redirects methods
    by name, and ``fsdp_c_autoload/redirect.py`` redirects functions.
    """
    member = qualified.rpartition(".")[2]
    is_internal = any(f"{module}.".startswith(f"{package}.") for package in PACKAGES)
    return is_internal and not member.startswith("__") and member in _list_defined()


def list_headers() -> list[str]:
    """Returns the headers of torch that the bridge includes."""
    return sorted({header for text in _list_c().values() for header in _INCLUDE.findall(text)})
