"""Reads the C and C++ sources of csrc: functions, exported prototypes and mutable globals.

The sources are in clang-format's style: a block at file scope ends with ``}`` in column 0.
``tests/unit/test_c_rules.py`` checks the results against the rules of csrc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}

_COMMENT_OR_LITERAL = re.compile(
    r"""/\*.*?\*/ | //[^\n]* | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'""", re.S | re.X
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
_PROTOTYPE = re.compile(
    r"(?:^|[;}])\s*(?P<returns>[A-Za-z_][\w \t\n*]*?[ *\n])(?P<name>\w+)"
    r"\((?P<args>(?:[^(){}]|\([^(){}]*\))*)\)(?:\s*FC_PRINTF\([^)]*\))?\s*(?=;)"
)
_SCOPE = re.compile(r"^(?:extern \"[^\"]*\"|(?:inline )?namespace\b[\w: ]*)$")
_TYPE = re.compile(r"\b(?:struct|class|union|enum)\b")
_NOT_A_VARIABLE = re.compile(
    r"^(?:typedef|namespace|using|template|friend|static_assert|_Static_assert|enum\b|return\b|goto\b"
    r"|(?:struct|class|union) \w+$)"
)
_ACCESS_LABELS = re.compile(r"^(?:(?:public|protected|private): ?)+")
_FUNCTION_POINTER = re.compile(r"[^(=]*\(\*+ ?(const )?(\w+)(?:\[[^\]]*\])*\)\(")
_VARIABLE = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=.*|\{.*\})?$", re.S)


@dataclass(frozen=True)
class Function:
    """A function with a body. ``lines`` counts from the signature to the closing brace."""

    name: str
    lines: int
    body: str


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    keep = {'"': '""', "'": "0"}.get(text[0], " ")
    return keep + "\n" * text.count("\n")


def strip(text: str) -> str:
    """Removes comments, literals and directives and keeps the number of lines."""
    text = _COMMENT_OR_LITERAL.sub(_blank, text)
    return _DIRECTIVE.sub(lambda match: "\n" * match.group().count("\n"), text)


def list_files(*folders: str) -> list[Path]:
    """Returns all sources in the folders of csrc; in all folders if none is named."""
    roots = [CSRC / folder for folder in folders] if folders else [CSRC]
    return [p for root in roots for p in sorted(root.rglob("*")) if p.suffix in SUFFIXES]


def list_exported(header: Path) -> dict[str, str]:
    """Maps each function that a C header declares to its parameters."""
    text = strip(header.read_text()).replace('extern "" {', ";")
    return {
        match["name"]: " ".join(match["args"].split())
        for match in _PROTOTYPE.finditer(text)
        if not re.search(r"\b(?:typedef|return)\b", match["returns"])
    }


def is_mutating(parameters: str) -> bool:
    """Returns true if the first pointer among the parameters is not a pointer to const."""
    pointers = [p.strip() for p in parameters.split(",") if "*" in p]
    return bool(pointers) and not pointers[0].startswith("const ")


def _end_of_statement(text: str, at: int) -> int:
    """Returns the index of the ``;`` that ends a declaration whose block ended at ``at``.

    Returns -1 if neither ``;`` nor a declarator follows the block.
    """
    if re.match(r"\s*(?:;|\w+\s*(?:;|=|\[|\{)|,)", text[at:]) is None:
        return -1
    depth = 0
    while at < len(text) and (depth > 0 or text[at] != ";"):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def _statements(text: str) -> list[tuple[str, int, int, str]]:
    """Splits stripped text at ``;`` and blocks: (head, start, end, body), at one nesting level.

    ``body`` is the contents of a block, and empty for a statement without one. A block that
    continues with a declarator or initializer (``struct {...} name;``) is one statement.
    """
    found = []
    start = at = 0
    while at < len(text):
        if text[at] == ";":
            found.append((text[start:at], start, at, ""))
            start = at + 1
        elif text[at] == "{":
            depth, close = 1, at + 1
            while depth and close < len(text):
                depth += {"{": 1, "}": -1}.get(text[close], 0)
                close += 1
            head = text[start:at]
            is_value = (
                "=" in head
                or _TYPE.search(head)
                or not head.rstrip().endswith(
                    (")", "const", "noexcept", "override", "else", "try", "do", '""')
                )
            )
            is_scope = _SCOPE.match(" ".join(head.split())) or not head.strip()
            body = text[at + 1 : close - 1]
            if is_value and not is_scope and ")" not in head.partition("=")[0]:
                rest = _end_of_statement(text, close)
                if rest >= 0:
                    found.append((head + " {} " + text[close:rest], start, rest, body))
                    start = at = rest + 1
                    continue
            found.append((head, start, close, body))
            start = at = close
            continue
        at += 1
    return found


def _first_line(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return text.count("\n", 0, start)


def list_functions(path: Path) -> list[Function]:
    """Returns the functions that a file defines, also in namespaces and classes.

    Functions with an empty body are omitted.
    """
    found: list[Function] = []

    def visit(text: str) -> None:
        for head, start, end, body in _statements(text):
            words = " ".join(head.split())
            words = re.sub(r"\boperator\s*(?:\(\)|[^\w\s(]+)", "operator", words)
            words = re.sub(r"^template <[^()]*> ", "", words)
            name = re.search(r"([\w~]+)\s*\(", words)
            if not body:
                continue
            if _SCOPE.match(words) or not words or (_TYPE.search(words) and "(" not in words):
                visit(body)
            elif name is not None and "=" not in words.partition("(")[0]:
                lines = text.count("\n", 0, end) - _first_line(text, start) + 1
                found.append(Function(name.group(1), lines, body))

    visit(strip(path.read_text()))
    return found


def _is_constant(declaration: str) -> bool:
    """Returns true if neither the object nor one that ``new`` creates for it can change."""
    specifiers, _, value = declaration.partition("=")
    if "constexpr" in specifiers:
        return True
    pointee, star, declarator = specifiers.rpartition("*")
    checked = [declarator, pointee] if value.lstrip().startswith("new ") else [declarator]
    return all(re.search(r"\bconst\b", part) for part in (checked if star else [specifiers]))


def _split_declarators(declaration: str) -> list[str]:
    """Splits ``static int a = 1, *b`` into ``static int a = 1`` and ``static int *b``."""
    parts, depth = [""], 0
    for character in declaration:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    specifiers = re.sub(r"[\s*]*\w+\s*(?:\[[^\]]*\]\s*)*$", "", parts[0].partition("=")[0].strip())
    return [parts[0], *(f"{specifiers} {part.strip()}" for part in parts[1:])]


def _variable(declaration: str) -> str | None:
    """Returns the name of the mutable variable of a declaration of one name, or None."""
    words = " ".join(declaration.split())
    before = words.partition("=")[0].strip()
    if not words or _NOT_A_VARIABLE.match(words) or re.search(r"\boperator\b", words):
        return None
    pointer = _FUNCTION_POINTER.match(before)
    if pointer is not None:
        return None if pointer[1] or "constexpr" in before else pointer[2]
    if _is_constant(words):
        return None
    if "(" in re.sub(r"(?:_Atomic|alignas|_Alignas|__attribute__\()\([^)]*\)\)?", "", before):
        return None  # a prototype
    match = _VARIABLE.search(before if "=" in words else re.sub(r"\{.*\}\s*$", "", words).strip())
    return match.group(1) if match and " " in before.strip() else None


def list_mutable_globals(path: Path) -> dict[str, str]:
    """Maps each variable with static storage that can change to the head of its declaration.

    Static and thread-local variables of functions and static members of classes are included.
    """
    found: dict[str, str] = {}

    def visit(text: str, scope: str) -> None:
        for head, _, _, body in _statements(text):
            words = _ACCESS_LABELS.sub("", " ".join(head.split()))
            is_static = re.match(r"(?:inline )?(?:static|thread_local|_Thread_local)\b", words)
            if _SCOPE.match(words) or not words:
                visit(body, scope)
                continue
            is_type = bool(_TYPE.search(words.partition("=")[0])) and "(" not in words
            if scope == "file" or is_static:
                declared = re.sub(r"\b(?:struct|union|class)\b[^{=]*\{\}\s*", "int ", words)
                declared = re.sub(r"\b(?:struct|union) (\w+ \w+)", r"\1", declared)
                if declared.strip() != "int" and not words.startswith("extern"):
                    for part in _split_declarators(declared):
                        if (name := _variable(part)) is not None:
                            found[name] = part.partition("=")[0].strip()
            if body:
                visit(body, "type" if is_type else "function")

    visit(strip(path.read_text()), "file")
    return found
