"""Hooks of mkdocs that add the files of the repository that pages link to.

Pages link to files outside of docs/ by relative paths, so that the links also work in the
repository. The site gets a copy of each such file below ``repository/``: a page of each Markdown
file, and the text of each other file. The links are changed accordingly.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"
LINK = re.compile(r"(\[[^\]\n]*(?:\n[^\]\n]*)?\]\()([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^[ ]*```.*?^[ ]*```[ ]*$", re.M | re.S)
# Pages that the navigation names, with or without a link from a page.
PAGES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "csrc/MODULES.md",
    "csrc/README.md",
    "csrc/transport/README.md",
    "fsdp_c/README.md",
    "tests/README.md",
    "tests/TORCH_BUGS.md",
)


def find_site_path(repository_path: str) -> str:
    """Returns the site's source path of a file, given its path from the root of the repository."""
    if repository_path.startswith("docs/"):
        return repository_path.removeprefix("docs/")
    suffix = "" if repository_path.endswith(".md") else ".txt"
    return f"{COPIES}/{repository_path}{suffix}"


def rewrite_links(markdown: str, repository_path: str, linked: set[str]) -> str:
    """Changes links to files of the repository into links inside of the site.

    Args:
        markdown: The text of a document. Fenced code is not changed.
        repository_path: The document's path from the root of the repository.
        linked: Receives the paths of the linked files outside of docs/.
    """
    start = posixpath.dirname(find_site_path(repository_path))

    def rewrite(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target or target.startswith("/"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path), target))
        if not (ROOT / path).is_file():
            return match[0]  # mkdocs reports the broken link
        if not path.startswith("docs/"):
            linked.add(path)
        return f"{opening}{posixpath.relpath(find_site_path(path), start or '.')}{anchor})"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(rewrite, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewrite, markdown[end:])])


def on_files(files: Files, config: Any) -> Files:
    """Adds the linked files of the repository, and the files that linked files link to."""
    linked = set(PAGES)
    for page in files.documentation_pages():
        rewrite_links(page.content_string, f"docs/{page.src_uri}", linked)
    copied: set[str] = set()
    while missing := sorted(linked - copied):
        for path in missing:
            copied.add(path)
            text = (ROOT / path).read_text()
            if path.endswith(".md"):
                text = rewrite_links(text, path, linked)
            files.append(File.generated(config, find_site_path(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Changes the links of a page of docs/. The copies were changed when they were added."""
    if page.file.src_uri.startswith(f"{COPIES}/"):
        return markdown
    return rewrite_links(markdown, f"docs/{page.file.src_uri}", set())
