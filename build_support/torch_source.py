"""Reads the definitions of a torch release from its source files, without importing torch.

A definition is a function, a class, a value of a module, or a member of a class. A release is an
environment, a folder that contains ``torch``, or a wheel.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_REPORTERS = {"warn", "warning", "error", "info", "debug", "warning_once", "warn_once"}
_MAX_IMPORTS = 8  # modules between an import and the definition
_COMMENT = re.compile(r"(^|\s+)#\s.*$")


class TorchSource:
    """The source files of one torch release.

    Args:
        path: An environment, a folder that contains ``torch``, or a wheel of torch.

    Raises:
        FileNotFoundError: ``path`` contains no torch. The message has the path.
    """

    def __init__(self, path: Path) -> None:
        self._wheel: zipfile.ZipFile | None = None
        if path.suffix == ".whl" and path.is_file():
            self._wheel = zipfile.ZipFile(path)
            self._names = set(self._wheel.namelist())
        else:
            folders = [path, *path.glob("lib/python3*/site-packages")]
            found = [folder for folder in folders if (folder / "torch" / "version.py").is_file()]
            if not found:
                raise FileNotFoundError(
                    f"{path} contains no torch: expected {path}/torch/version.py"
                )
            self._folder = found[0]
        version = re.search(r"__version__ = '([^']+)'", self._read("torch/version.py") or "")
        if version is None:
            raise FileNotFoundError(f"torch/version.py of {path} has no __version__")
        self.version = version[1]

    def _read(self, name: str) -> str | None:
        if self._wheel is not None:
            return self._wheel.read(name).decode() if name in self._names else None
        file = self._folder / name
        return file.read_text() if file.is_file() else None

    def read_header(self, header: str) -> str | None:
        """Returns the text of a C++ header, or ``None`` if the release lacks it."""
        return self._read(f"torch/include/{header}") or self._read(
            f"torch/include/torch/csrc/api/include/{header}"
        )

    def list_modules(self, package: str) -> list[str]:
        """Returns ``package`` and the modules below it."""
        start = package.replace(".", "/") + "/"
        if self._wheel is not None:
            names = [name for name in self._names if name.startswith(start)]
        else:
            files = (self._folder / start).rglob("*.py")
            names = [str(file.relative_to(self._folder)) for file in files]
        modules = [n[:-3].replace("/", ".") for n in names if n.endswith(".py")]
        return sorted(module.removesuffix(".__init__") for module in modules)

    @functools.cache  # noqa: B019 - a process reads two releases
    def _find_file(self, module: str) -> tuple[str, str] | None:
        """Returns the text of a module's source or stub file, and its package."""
        base = module.replace(".", "/")
        for name in (f"{base}.py", f"{base}/__init__.py", f"{base}/__init__.pyi", f"{base}.pyi"):
            text = self._read(name)
            if text is not None:
                return text, module if "/__init__." in name else module.rpartition(".")[0]
        return None

    def has_module(self, module: str) -> bool:
        """Whether the release has the module, as a source or stub file."""
        return self._find_file(module) is not None

    @functools.cache  # noqa: B019
    def list_definitions(self, module: str) -> dict[str, Definition]:
        """Returns the definitions of a module by qualified name; empty without its source."""
        file = self._find_file(module)
        return {} if file is None else _Reader(file[0]).definitions

    @functools.cache  # noqa: B019
    def _list_imports(self, module: str) -> dict[str, tuple[str, str]]:
        """Maps each name that ``module`` imports to the module and the name of its origin."""
        file = self._find_file(module)
        imports: dict[str, tuple[str, str]] = {}
        for node in ast.walk(ast.parse(file[0])) if file is not None else ():
            if isinstance(node, ast.ImportFrom) and file is not None:
                parents = file[1].split(".")
                origin = parents[: len(parents) - node.level + 1] if node.level else []
                source = ".".join([*origin, *([node.module] if node.module else [])])
                for name in node.names:
                    imports[name.asname or name.name] = (source, name.name)
        return imports

    def find(self, dotted: str) -> tuple[str, str] | None:
        """Returns the module that defines the first name after the module, and that name there.

        Of ``torch.nn.Module.forward`` this is ``Module`` in ``torch.nn.modules.module``. Follows
        imports. Returns ``None`` for modules, and for names without source, such as those of C
        code.
        """
        parts = dotted.split(".")
        lengths = range(len(parts), 0, -1)
        count = next((n for n in lengths if self.has_module(".".join(parts[:n]))), len(parts))
        module, name = ".".join(parts[:count]), ".".join(parts[count : count + 1])
        for _ in range(_MAX_IMPORTS):
            if not name or name in self.list_definitions(module):
                return (module, name) if name else None
            source, imported = self._list_imports(module).get(name, ("", ""))
            if not source or self.has_module(f"{source}.{imported}"):
                return None
            module, name = source, imported
        return None


# ---- definitions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """One definition.

    Attributes:
        kind: ``function``, ``property``, ``class`` or ``value``.
        signature: Arguments and result of a function, bases of a class, or the statement that
            sets a value.
        messages: The texts of its exceptions, warnings and log lines, without duplicates.
        lines: Its source without docstrings, comments, indentation and blank lines. For a class,
            the lines outside of its members.
    """

    kind: str
    signature: str
    messages: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that depend on ``lines``."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:8]


def _format_text(node: ast.expr) -> str | None:
    """Returns the text of a string expression, with the expressions of f-strings in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
            for part in node.values
        ]
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        texts = (_format_text(node.left), _format_text(node.right))
        return "".join(text or "..." for text in texts) if any(texts) else None
    return None


def _list_messages(function: ast.AST) -> tuple[str, ...]:
    messages: dict[str, None] = {}
    for node in ast.walk(function):
        call: ast.expr | None = None
        if isinstance(node, ast.Raise):
            call = node.exc
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            call = node if name in _REPORTERS or name.startswith("_raise") else None
        if isinstance(call, ast.Call):
            for argument in call.args:
                text = _format_text(argument)
                if text is not None:
                    messages[" ".join(text.split())] = None
    return tuple(messages)


def _find_targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class _Reader:
    """Reads the definitions of one file into ``definitions``."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self.definitions: dict[str, Definition] = {}
        self._read_body(ast.parse(text).body, "")

    def _read_body(self, body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, _FUNCTIONS):
                self._add_function(node, prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                self._add_class(node, prefix + node.name)
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                for child in self._list_branches(node):
                    self._read_body(child, prefix)
            else:
                for target in _find_targets(node):
                    if isinstance(target, ast.Name):
                        text = " ".join(ast.unparse(node).split())
                        self._add(prefix + target.id, "value", text, (), (text,))

    @staticmethod
    def _list_branches(node: ast.stmt) -> list[list[ast.stmt]]:
        branches = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        return branches + [handler.body for handler in getattr(node, "handlers", [])]

    def _add(
        self,
        name: str,
        kind: str,
        signature: str,
        messages: tuple[str, ...],
        lines: tuple[str, ...],
    ) -> None:
        """Adds a definition, or joins it with an earlier one of that name (overloads, branches)."""
        earlier = self.definitions.get(name)
        if earlier is not None:
            messages, lines = earlier.messages + messages, earlier.lines + lines
        self.definitions[name] = Definition(kind, signature, messages, lines)

    def _add_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        kind = "property" if {"property", "cached_property"} & set(decorators) else "function"
        result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        signature = f"({ast.unparse(node.args)}){result}"
        self._add(name, kind, signature, _list_messages(node), self._get_lines(node, []))

    def _add_class(self, node: ast.ClassDef, name: str) -> None:
        bases = ", ".join(map(ast.unparse, [*node.bases, *(key.value for key in node.keywords)]))
        members = [n for n in node.body if not _is_docstring(n) and not isinstance(n, ast.Pass)]
        self._add(name, "class", f"({bases})", (), self._get_lines(node, members))
        self._read_body(node.body, name + ".")
        for method in (n for n in node.body if isinstance(n, _FUNCTIONS)):
            for child in ast.walk(method):
                for target in _find_targets(child) if isinstance(child, ast.stmt) else ():
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == "self"
                        and f"{name}.{target.attr}" not in self.definitions
                    ):
                        text = f"set by {method.name}"
                        self._add(f"{name}.{target.attr}", "value", text, (), ("attribute",))

    def _get_lines(self, node: ast.stmt, without: list[ast.stmt]) -> tuple[str, ...]:
        """Returns ``Definition.lines`` of the node, without the lines of some statements."""
        skipped: set[int] = set()
        docstrings = [
            body[0]
            for child in ast.walk(node)
            if isinstance(child, (*_FUNCTIONS, ast.ClassDef))
            and _is_docstring((body := child.body)[0])
        ]
        for statement in [*docstrings, *without]:
            decorators = getattr(statement, "decorator_list", [])
            first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
            skipped.update(range(first, (statement.end_lineno or first) + 1))
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        numbers = range(first, (node.end_lineno or first) + 1)
        lines = (self._lines[n - 1] for n in numbers if n not in skipped)
        return tuple(line for line in (_COMMENT.sub("", text).strip() for text in lines) if line)
