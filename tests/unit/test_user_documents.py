"""Documents: lengths, links, navigation, and the generated table of variables."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_README_LINES = 150
MAX_TOUR_LINES, MAX_TOUR_WORDS = 120, 1100  # two printed pages
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(
        path
        for folder in ("csrc", "docs", "fsdp_c")
        for path in sorted((ROOT / folder).rglob("*.md"))
    ),
]
FENCE = re.compile(r"^[ ]*```.*?^[ ]*```[ ]*$", re.M | re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.M)


def prose(path: Path) -> str:
    """Returns a document without fenced code and comments."""
    return COMMENT.sub("", FENCE.sub("", path.read_text()))


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """Returns the anchors that GitHub and MkDocs generate for a document's headings."""
    names = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(prose(path)))
    return frozenset(name.replace(" ", "-") for name in names)


def find_broken_links(text: str, path: Path) -> list[str]:
    """Returns the relative links in ``text`` whose file or heading does not exist."""
    broken = []
    for link in LINK.findall(text):
        target, _, anchor = link.partition("#")
        if ":" in target:  # a URL
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    return broken


@functools.cache
def load_configuration_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "configuration_table", ROOT / "docs" / "configuration_table.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_without_the_end_marker_of_its_tables_is_refused() -> None:
    table = load_configuration_table()
    with pytest.raises(SystemExit, match=r"configuration\.md lacks"):
        table.insert_tables(f"# Page\n{table.BEGIN}\nthe rest of the page\n")


@pytest.mark.parametrize("name", ["configuration_table", "compatibility_table"])
def test_script_that_writes_documented_tables_rejects_unknown_options(name: str) -> None:
    command = [sys.executable, str(ROOT / "docs" / f"{name}.py"), "--chek"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 2 and "--chek" in completed.stderr


def test_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_tour_of_the_c_code_has_at_most_two_pages() -> None:
    tour = ROOT / "csrc" / "README.md"
    assert len(tour.read_text().splitlines()) <= MAX_TOUR_LINES
    assert len(prose(tour).split()) <= MAX_TOUR_WORDS


def test_library_versions_of_readme_are_those_of_the_clients() -> None:
    requirements = (ROOT / "tests" / "clients" / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^(\w+)==([\d.]+)$", requirements, re.M))
    _, _, table = (ROOT / "README.md").read_text().partition("| library | version |")
    rows = re.findall(r"^\| ([\w, ]+) \| ([\d., ]+) \|", table, re.M)
    named = {
        name.lower(): version
        for names, versions in rows
        for name, version in zip(names.split(", "), versions.split(", "), strict=True)
    }
    del pinned["tokenizers"]  # a part of transformers
    assert named == pinned


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(path: Path) -> None:
    assert find_broken_links(prose(path), path) == []


def test_broken_links_and_anchors_are_found() -> None:
    text = "[a](README.md) [b](nowhere.md) [c](#install) [d](#nowhere) [e](docs/memory.md#nowhere)"
    broken = ["nowhere.md", "#nowhere", "docs/memory.md#nowhere"]
    assert find_broken_links(text, ROOT / "README.md") == broken


def test_tests_that_documents_link_to_are_in_the_linked_file() -> None:
    links = [
        (name, (path.parent / target).resolve())
        for path in DOCUMENTS
        for name, target in re.findall(r"\[`(test_\w+)`\]\(([^)]+\.py)\)", prose(path))
    ]
    assert len(links) > 30
    for name, file in links:
        assert re.search(rf"^ *(async )?def {name}\(", file.read_text(), re.M), (name, file)


def test_navigation_contains_each_page_once() -> None:
    pages = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_configuration_page_lists_each_variable_of_the_code() -> None:
    table = load_configuration_table()
    assert list(table.find_mistakes()) == []
    text = table.PAGE.read_text()
    assert table.insert_tables(text) == text, "run python docs/configuration_table.py"


def test_undescribed_and_unread_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    table = load_configuration_table()
    unread = "FSDP_C_" + "NOWHERE"  # in one piece, the script would find it in this file
    monkeypatch.setitem(table.RUN, unread, table.RUN["FSDP_C_OPTIM"])
    monkeypatch.delitem(table.RUN, "FSDP_C_OPTIM")
    assert list(table.find_mistakes()) == [
        "FSDP_C_OPTIM has no description in RUN",
        f"{unread} of RUN is not read",
    ]
