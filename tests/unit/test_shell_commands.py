"""The shell commands of README.md and docs/ have programs, files and arguments that exist.

tests/unit/test_documents.py checks the targets of ``make``. Tests run the other commands of
README.md; ``RUN_BY`` has their files. The exception is ``pip install .``: tests/unit/test_wheel.py
installs a wheel, and ``make wheels-check`` does so for several torch releases.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from shell_commands import DOCUMENTS, ROOT, Command, parse_words, read_commands
from torch.distributed.run import get_args_parser

from fsdp_c import __main__ as command_line
from fsdp_c._tools import compare, plan_command, stall

USER_FILES = ("train.py", "./run_train.sh")
RUN_BY = {
    "pip install": "tests/unit/test_wheel.py",
    "--check": "tests/unit/test_check.py",
    "FSDP_C=1 torchrun": "tests/distributed/test_dropin.py",
    "compare": "tests/unit/test_compare.py",
    "make": "tests/unit/test_documents.py",
}
"""A part of each command of README.md, and the test that runs it or checks its target."""


def find_missing_file(name: str) -> str | None:
    if name in USER_FILES or (ROOT / name.partition("::")[0]).exists():
        return None
    return f"{name} does not exist"


def check_pip(words: list[str]) -> str | None:
    project = (ROOT / "pyproject.toml").read_text()
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = [word[2:-1] for word in words if word.startswith(".[")]
    missing = [extra for extra in extras if not re.search(rf"^{extra} = ", section, re.M)]
    return f"pyproject.toml has no extra {missing[0]}" if missing else None


def check_torchrun(words: list[str]) -> str | None:
    options = get_args_parser().parse_args(words)
    if not options.module:
        return find_missing_file(options.training_script)
    return check_python(["-m", options.training_script, *options.training_script_args])


def check_plan(words: list[str]) -> object:
    options = plan_command._make_parser().parse_args(words)
    return plan_command._parse_ranks(options.ranks), plan_command._parse_batch(options.batch)


def check_compare(words: list[str]) -> object:
    parser = compare._make_parser()
    words = [__file__ if word in USER_FILES else word for word in words]
    return compare._make_job(parser, parser.parse_args(words))


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "plan": check_plan,
    "compare": check_compare,
    "stall": lambda words: stall._make_parser().parse_args(words),
}


def check_python(words: list[str]) -> str | None:
    if words[0] != "-m":
        return find_missing_file(words[0])
    if words[1] != "fsdp_c":
        return f"no module {words[1]}"
    name, arguments = words[2], words[3:]
    if name in PARSERS:
        PARSERS[name](arguments)
    return None if name in command_line._COMMANDS else find_missing_file(name)


def check_nothing(words: list[str]) -> None:
    return None


PROGRAMS: dict[str, Callable[[list[str]], str | None]] = {
    "make": check_nothing,
    "pip": check_pip,
    "pytest": lambda words: find_missing_file(words[0]),
    "python": check_python,
    "torchrun": check_torchrun,
    "./run_train.sh": check_nothing,
}


def find_mistake(command: Command) -> str | None:
    """Returns a sentence if the command cannot run as the document states it."""
    check = PROGRAMS.get(command.program.removeprefix(".venv/bin/"))
    if check is None:
        return f"unknown program {command.program}"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            return check(command.arguments)
    except (SystemExit, ValueError) as error:
        if getattr(error, "code", 2) == 0:  # --help
            return None
        return f"{errors.getvalue()}{error}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.name))
def test_commands_of_document_have_valid_programs_files_and_arguments(document: Path) -> None:
    commands = read_commands(document.read_text())
    mistakes = {line: find_mistake(command) for line, command in commands}
    assert {line: mistake for line, mistake in mistakes.items() if mistake} == {}


def test_each_command_of_readme_has_one_entry_in_run_by() -> None:
    for line, _ in read_commands((ROOT / "README.md").read_text()):
        assert sum(part in line for part in RUN_BY) == 1, line


@pytest.mark.parametrize("part", ["--check", "FSDP_C=1 torchrun", "compare"])
def test_command_of_the_readme_is_run_by_its_test(part: str) -> None:
    assert f'find_command("{part}")' in (ROOT / RUN_BY[part]).read_text()


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("pip install .[safetensor]", "no extra safetensor"),
        ("pyhton -m fsdp_c --check", "unknown program pyhton"),
        ("cd .. && python -m fsdp_c --chek", "--chek does not exist"),
        ("python -m fsdpc --check", "no module fsdpc"),
        ("FSDP_C=1 torchrun --nproc-per-rank 8 train.py", "unrecognized|ambiguous|required"),
        ("torchrun --nproc-per-node 8 -m fsdp train.py", "no module fsdp"),
        ("torchrun --nproc-per-node 2 examples/lara.py", "examples/lara.py does not exist"),
        ("torchrun -m fsdp_c compare --step 5 train.py", "arguments: --step"),
        ("python -m fsdp_c compare", "a script or -m module is missing"),
        ("python -m fsdp_c plan a:B 8 --batch 1x2048:int65", "int65"),
        ("python -m fsdp_c plan a:B", "required: ranks"),
        ("python -m fsdp_c stall --plot", "expected one argument|required"),
        ("pytest tests/nowhere.py", "tests/nowhere.py does not exist"),
    ],
)
def test_mistake_in_a_documented_command_is_found(line: str, mistake: str) -> None:
    found = find_mistake(parse_words(line.split()))
    assert found is not None and re.search(mistake, found), found


def test_read_commands_drops_comments_and_output_and_separates_variables() -> None:
    text = (
        "```\nA=1 B= python x.py  # a comment\n\nmake a \\\n    b\n```\n\n```text\noutput\n```\n\n"
        "   ```\n   cd .. && python y.py\n   ```\n"
    )
    assert [command for _, command in read_commands(text)] == [
        Command({"A": "1", "B": ""}, "python", ["x.py"]),
        Command({}, "make", ["a", "b"]),
        Command({}, "python", ["y.py"]),
    ]
