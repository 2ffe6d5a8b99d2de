"""Reads the shell commands of README.md and docs/. Tests run them, instead of copies of them.

A fenced block without a language is a list of commands. Output has the language ``text``.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^([ ]*)```([^\n]*)\n(.*?)^\1```[ ]*$", re.M | re.S)
ASSIGNMENT = re.compile(r"(\w+)=(.*)")
OUTSIDE_OF_CLONE = ["cd", "..", "&&"]
"""The first words of a command that runs in the parent folder of the clone."""


class Command(NamedTuple):
    """A command: the variables in front of it, the program, and its arguments."""

    variables: dict[str, str]
    program: str
    arguments: list[str]

    def make_words(self, *script: str) -> list[str]:
        """Returns the words to run with ``script`` in place of ``train.py``.

        A command with ``--nproc-per-node`` has two ranks. ``python`` and ``torchrun`` are
        those of the running interpreter.
        """
        programs = {
            "python": [sys.executable],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
        }
        words = [*programs[self.program], *self.arguments]
        if "--nproc-per-node" in words:
            words[words.index("--nproc-per-node") + 1] = "2"
        place = words.index("train.py")
        return [*words[:place], *script, *words[place + 1 :]]


def parse_words(words: list[str]) -> Command:
    """Parses the words of one command."""
    if words[: len(OUTSIDE_OF_CLONE)] == OUTSIDE_OF_CLONE:
        words = words[len(OUTSIDE_OF_CLONE) :]
    variables = {}
    while match := ASSIGNMENT.fullmatch(words[0]):
        variables[match[1]] = match[2]
        words = words[1:]
    return Command(variables, words[0], words[1:])


def read_commands(text: str) -> list[tuple[str, Command]]:
    """Returns the commands of a document, each with its text without comments."""
    commands = []
    for _, language, code in FENCE.findall(text):
        if not language:
            lines = code.replace("\\\n", " ").splitlines()
            words = [shlex.split(line, comments=True) for line in lines]
            commands += [(shlex.join(line), parse_words(line)) for line in words if line]
    return commands


def find_command(part: str, document: str = "README.md") -> Command:
    """Returns the only command of a document that contains ``part``."""
    commands = read_commands((ROOT / document).read_text())
    found = [command for text, command in commands if part in text]
    assert len(found) == 1, f"{document} has {len(found)} commands with {part!r}"
    return found[0]
