"""Words and sentences of sources and documents: field terms, named subjects, short sentences.

Checked are comments, docstrings, Markdown outside of code, file names, names that Python sources
define, and identifiers of C sources. A word of the tables below is not used any more; its value is
the field's term.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.xdist_group("vocabulary")  # the tests share the sentences of all files

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".ci", "benchmarks", "build_support", "csrc", "docs", "examples", "tests")
FOLDERS += ("fsdp_c", "fsdp_c_autoload")
C_SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh"}
HASH_COMMENTS = {".sh", ".toml", ".yaml", ".yml"}
NAMES_WITH_COMMENTS = {"CMakeLists.txt", "Makefile", "run"}
MAX_WORDS = 25
"""A sentence of more words is long."""


PROSE = {
    r"offices?": "transport",
    r"correspondents?": "operation",
    r"suspicions?|suspicious": "warning",
    r"alike": "equal",
    r"at odds": "mismatch",
    r"whoever|whom": "the function, rank or caller by name",
    r"nobody|somebody": "no caller, a caller",
    r"oracle": "torch (the reference)",
    r"stock (?:torch|fsdp2?|functions?)|torch's stock": "torch",
    r"ours": "fsdp_c's",
    r"torn": "dirty",
    r"boards?": "ring buffer",
    r"bells?": "doorbell, futex",
    r"crowd(?:ed)?": "oversubscribed",
    r"hosted": "fallback",
    r"mend(?:s|ed)?": "repair",
    r"park(?:s|ed)?": "defer",
    r"admit(?:s|ted)?": "check",
    r"fold(?:s|ed)?": "accumulate",
    r"rooms?": "module, space",
    r"floors?": "layer",
    r"forecasts?": "dry run",
    r"stash(?:es|ed)?": "accumulate, store",
    r"the house|house rules?": "the project's rules",
    r"look(?:s|ed)? over": "check",
    r"(?:un)?conveniences?": "the function by name",
    r"behaviours?": "behavior (American spelling)",
    r"bomb": "fault",
}
"""Pattern of an old word in comments, docstrings and Markdown -> the term."""

NAME_PARTS = {
    "office": "transport",
    "correspondent": "operation",
    "suspicion": "lint",
    "suspicions": "lint",
    "alike": "template",
    "torn": "dirty",
    "mend": "repair",
    "board": "ring",
    "letter": "header",
    "bell": "doorbell",
    "crowd": "oversubscribed",
    "hosted": "fallback",
    "lane": "stream mode",
    "flight": "pending gather",
    "stash": "accumulate, store",
    "park": "defer release",
    "reap": "collect",
    "admit": "check thread",
    "via": "ops",
    "fold": "accumulate",
    "pieces": "chunks",
    "course": "backward kind",
    "unseen": "untracked",
    "room": "module, space",
    "house": "architecture",
    "news": "message",
    "question": "negotiation",
    "drawing": "plotting",
    "tell": "notify",
    "say": "warn once",
    "forecast": "dry run",
    "retire": "deferred decref",
    "retired": "deferred decref",
    "face": "registered state",
    "oracle": "torch",
    "stock": "torch",
    "ours": "fsdp_c",
    "bomb": "fault",
    "whoever": "a named subject",
    "conveniences": "the function by name",
    "behaviour": "behavior",
}
"""Word of a name, between underscores or capitals -> the term."""

NAMES = {
    "fc_host": "fc_callbacks",
    "fc_link": "fc_process_group",
    "fc_gather_follow": "fc_group_base_adopt_replaced_shards",
    "fcpy_retire": "fcpy_defer_decref",
    "fcpy_admit": "fcpy_check_thread",
    "fcpy_ready": "fcpy_check_initialized",
    "fcpy_seen": "version_cache, shard_identity",
    "host_moves": "uses_fallback",
    "is_copied": "is_cpu_bound",
    "look_over": "check_model",
}
"""Beginning of a C or Python name -> the beginning that replaces it."""

COMPOUNDS = re.compile(r"in_?flight|flight_recorder", re.I)
"""Terms of other projects that contain an old word. Names are checked without them."""

ALLOWED = {
    ("csrc/kernels/*", "lane"): "a lane of a SIMD register",
}
"""(pattern of a path, word) -> the reason why the word is the right one there."""


class Finding(NamedTuple):
    path: str
    line: int
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word}: {self.text}"


# ---- files ---------------------------------------------------------------------------------------


def source_files() -> list[Path]:
    """Returns all files with names, comments or prose, without build products."""
    suffixes = {".py", ".pyi", ".md", *C_SUFFIXES, *HASH_COMMENTS}
    found = [path for path in ROOT.iterdir() if has_text(path, suffixes)]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if has_text(path, suffixes)]
    return sorted(found)


def has_text(path: Path, suffixes: set[str]) -> bool:
    return path.is_file() and (path.suffix in suffixes or path.name in NAMES_WITH_COMMENTS)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


# ---- prose ---------------------------------------------------------------------------------------

C_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', re.S)
HASH_COMMENT = re.compile(r"(?P<code>|.*?\s)# ?(?P<comment>[^\s!].*)")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.M | re.S)
CODE_SPAN = re.compile(r"(`+)(?:(?!\1).)+\1", re.S)
LINK_TARGET = re.compile(r"\]\([^)]*\)")


class Prose(NamedTuple):
    line: int
    text: str


def prose_of(path: Path) -> Iterator[Prose]:
    """Yields the comments and docstrings of a source file, or the paragraphs of a document."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from markdown_blocks(text)
    elif path.suffix in (".py", ".pyi"):
        yield from docstrings(ast.parse(text))
        yield from python_comments(text)
    elif path.suffix in C_SUFFIXES:
        yield from c_comments(text)
    else:
        yield from hash_comments(text)


def join_lines(lines: Iterable[tuple[int, str]]) -> Iterator[Prose]:
    """Joins the texts of successive lines, since a sentence may continue in the next comment."""
    first, last, texts = 0, 0, list[str]()
    for number, text in lines:
        if texts and number != last + 1:
            yield Prose(first, "\n".join(texts))
            texts = []
        first = number if not texts else first
        last = number
        texts.append(text)
    if texts:
        yield Prose(first, "\n".join(texts))


def python_comments(text: str) -> Iterator[Prose]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    own_lines = [token for token in comments if not token.line[: token.start[1]].strip()]
    yield from join_lines((token.start[0], token.string.lstrip("#: ")) for token in own_lines)
    for token in comments:
        if token not in own_lines:
            yield Prose(token.start[0], token.string.lstrip("#: "))


def hash_comments(text: str) -> Iterator[Prose]:
    """Yields the comments of a shell script, Makefile, CMake, TOML or YAML file.

    Lines that are indented within a comment are rows of a table, and are left out.
    """
    own_lines = []
    for number, line in enumerate(text.split("\n"), 1):
        if match := HASH_COMMENT.match(line):
            if match["code"].strip():
                yield Prose(number, match["comment"])
            else:
                own_lines.append((number, match["comment"]))
    yield from join_lines(own_lines)


def docstrings(tree: ast.AST) -> Iterator[Prose]:
    """Yields every string that is a statement: docstrings, also those of attributes."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Prose(value.lineno, value.value)


def c_comments(text: str) -> Iterator[Prose]:
    """Yields block comments, and runs of line comments as one text."""
    line_comments = []
    for match in C_TOKEN.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        if match[0].startswith("//"):
            line_comments.append((number, match[0].strip("/ ")))
        elif match[0].startswith("/*"):
            yield Prose(number, re.sub(r"(?m)^[ \t]*\*(?!/)|/\*+|\*+/", "", match[0]))
    yield from join_lines(line_comments)


def markdown_blocks(text: str) -> Iterator[Prose]:
    """Yields paragraphs, list items and cells of tables, without code."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in re.finditer(r"(?:^[^\n]*\S[^\n]*\n?)+", text, re.M):
        line = text.count("\n", 0, match.start()) + 1
        for item in re.split(r"\n(?=\s*(?:[-*+|#]|\d+\.) ?)", match[0]):
            for part in item.strip(" |\n").split(" | ") if item.lstrip()[:1] == "|" else [item]:
                yield Prose(line, LINK_TARGET.sub("]", CODE_SPAN.sub("code", part)))
            line += item.count("\n") + 1


# ---- sentences -----------------------------------------------------------------------------------

BLOCK_END = re.compile(r"\n\s*\n|\n\s*(?=(?:[-*] |[\w=.`]+: |[\w=.`,]+ {2,}))")
SENTENCE_END = re.compile(r"(?<=[.!?:;])[`\"')]*\s+")
UNNAMED = re.compile(r"[`(\"]*(?:What|Who|Whoever|Whatever|Whose|That which)\b(?![^?]*\?)")


@functools.cache
def sentences_of(path: Path) -> list[tuple[int, str]]:
    """Returns (line of the text, sentence) of all comments, docstrings or paragraphs of a file."""
    return [
        (prose.line, " ".join(sentence.split()))
        for prose in prose_of(path)
        for block in BLOCK_END.split(prose.text)
        for sentence in SENTENCE_END.split(block)
        if sentence.strip()
    ]


def is_long(sentence: str) -> bool:
    return sum(any(c.isalnum() for c in word) for word in sentence.split()) > MAX_WORDS


def breaks(paths: Iterable[Path], rule: str) -> list[Finding]:
    """Returns the sentences that break a rule, ``long`` or ``unnamed subject``."""
    is_broken = is_long if rule == "long" else UNNAMED.match
    return [
        Finding(relative(path), line, rule, sentence)
        for path in paths
        for line, sentence in sentences_of(path)
        if is_broken(sentence)
    ]


# ---- names ---------------------------------------------------------------------------------------

C_IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*")
WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def names_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, name) for the file, names that a Python file defines, and C identifiers."""
    yield 0, path.stem
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        yield from python_names(ast.parse(text))
    elif path.suffix in C_SUFFIXES:
        code = C_TOKEN.sub(lambda match: "\n" * match[0].count("\n"), text)
        for number, line in enumerate(code.split("\n"), 1):
            yield from ((number, name) for name in C_IDENTIFIER.findall(line))


def python_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield getattr(node, "lineno", 0), node.asname


def old_words_of_name(name: str) -> Iterator[str]:
    yield from (old for old in NAMES if re.match(rf"_*{old}(?:_|$)", name, re.I))
    words = [word.lower() for word in WORD_OF_NAME.findall(COMPOUNDS.sub("", name))]
    yield from (word for word in words if word in NAME_PARTS)
    if re.search(r"_(?:what|who|whose)_", name):
        yield "clause"


def is_allowed(path: Path, word: str) -> bool:
    return any(word == allowed and path.match(pattern) for pattern, allowed in ALLOWED)


def old_names(paths: Iterable[Path]) -> list[Finding]:
    """Returns names with old words, each name once for each file."""
    found: dict[tuple[str, str, str], Finding] = {}
    for path in paths:
        for line, name in names_of(path):
            for word in old_words_of_name(name):
                if not is_allowed(path, word):
                    key = (relative(path), word, name)
                    found.setdefault(key, Finding(key[0], line, word, name))
    return list(found.values())


def old_words(paths: Iterable[Path]) -> list[Finding]:
    """Returns sentences with old words."""
    pattern = re.compile("|".join(rf"(?P<w{i}>\b(?:{old})\b)" for i, old in enumerate(PROSE)), re.I)
    return [
        Finding(relative(path), line, match[0].lower(), sentence)
        for path in paths
        for line, sentence in sentences_of(path)
        for match in pattern.finditer(sentence)
        if not is_allowed(path, match[0].lower())
    ]


def show(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


# ---- the tests -----------------------------------------------------------------------------------


def test_names_contain_no_old_words() -> None:
    found = old_names(source_files())
    assert not found, f"use the terms of NAMES and NAME_PARTS:\n{show(found)}"


def test_comments_docstrings_and_documents_contain_no_old_words() -> None:
    found = old_words(source_files())
    assert not found, f"use the terms of PROSE:\n{show(found)}"


def test_sentences_of_sources_and_documents_begin_with_named_subject() -> None:
    found = breaks(source_files(), "unnamed subject")
    assert not found, show(found)


def test_sentences_have_at_most_25_words() -> None:
    found = breaks(source_files(), "long")
    assert not found, show(found)


@pytest.mark.parametrize(("pattern", "word"), ALLOWED)
def test_vocabulary_exception_is_still_in_use(pattern: str, word: str) -> None:
    names = [name for path in ROOT.glob(pattern) for _, name in names_of(path)]
    assert any(word in old_words_of_name(name) for name in names), "remove the entry of ALLOWED"


LONG = "The rank " + "waits and " * 15 + "then stops, too."

PYTHON = f'''
"""What the office sends. Who reads it? {LONG}

Whoever calls returns `ours`."""
from os import path as stock
class Board:
    crowd: int = 0  # ours and theirs
    def _look_over(self, letter, in_flight):
        # A parameter is torn, that is,
        # hosted. "stock torch" has rooms.
        self.face = [lane for lane in "office"]
def test_says_what_is_read(): pass
'''
C = """
/* A letter is a message. What a rank reads
 * is the board. */
static fc_host *host; // the suspicions
int fcpy_admit(int pieces_of, const char *boardings) { return boardings == "office /* bell */"; }
"""
SHELL = """#!/bin/bell
# The letter is
# torn.
    # Whoever waits
run "$#" "a#stash" # ours
"""
MARKDOWN = """
# The crowd

Who waits is `the office`: [torn](office.md).

| oracle | `bell` |
| --- | --- |
| Whose boards | fine |

```
What the office does.
```
"""


def test_old_words_in_python_are_found(tmp_path: Path) -> None:
    path = tmp_path / "office_py.py"
    path.write_text(PYTHON)
    names = [(finding.line, finding.word) for finding in old_names([path])]
    assert sorted(names) == [
        *[(0, "office"), (5, "stock"), (6, "board"), (7, "crowd"), (8, "letter"), (8, "look_over")],
        *[(11, "face"), (11, "lane"), (12, "clause")],
    ]
    words = [(finding.line, finding.word) for finding in old_words([path])]
    assert sorted(words) == [
        *[(2, "office"), (2, "ours"), (2, "whoever"), (7, "ours")],
        *[(9, "hosted"), (9, "rooms"), (9, "stock torch"), (9, "torn")],
    ]
    openings = [finding.text for finding in breaks([path], "unnamed subject")]
    assert openings == ["What the office sends.", "Whoever calls returns `ours`."]
    assert [finding.text for finding in breaks([path], "long")] == [LONG]


def test_old_words_in_c_are_found(tmp_path: Path) -> None:
    path = tmp_path / "office.c"
    path.write_text(C)
    names = [(finding.line, finding.word) for finding in old_names([path])]
    assert names == [(0, "office"), (4, "fc_host"), (5, "fcpy_admit"), (5, "admit"), (5, "pieces")]
    words = [(finding.line, finding.word) for finding in old_words([path])]
    assert words == [(2, "board"), (4, "suspicions")]
    openings = [finding.text for finding in breaks([path], "unnamed subject")]
    assert openings == ["What a rank reads is the board."]


@pytest.mark.parametrize("name", ["x.sh", "x.toml", "x.yml", "Makefile", "CMakeLists.txt"])
def test_old_words_in_hash_comments_are_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(SHELL)
    assert has_text(path, HASH_COMMENTS)
    words = [(finding.line, finding.word) for finding in old_words([path])]
    assert sorted(words) == [(2, "torn"), (2, "whoever"), (5, "ours")]
    openings = [finding.text for finding in breaks([path], "unnamed subject")]
    assert openings == ["Whoever waits"]


def test_old_words_in_markdown_are_found_outside_of_code(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(MARKDOWN)
    words = [(finding.line, finding.word) for finding in old_words([path])]
    assert words == [(2, "crowd"), (4, "torn"), (6, "oracle"), (8, "boards")]
    openings = [finding.line for finding in breaks([path], "unnamed subject")]
    assert openings == [4, 8]
