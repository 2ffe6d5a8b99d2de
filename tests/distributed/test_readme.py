"""Every Python block of the documents runs unmodified on two ranks.

Blocks that need a library of another environment have a comment ``<!-- not run: reason -->``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import readme
from launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("*/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

MIXED_DTYPES = """
    ```python
    policy = fsdp_c.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fsdp_c.fully_shard(block, mp_policy=policy)
    fsdp_c.fully_shard(model)
    ```
"""
"""A block that runs, but after which the model's forward fails: the root has another dtype."""

LEAF_WRITE = """
```python
with fsdp_c.full_params(model) as full:
    full["head.weight"].mul_(0.5)
```
"""
FAILING = (
    f"Words.\n{MIXED_DTYPES}\n{LEAF_WRITE}\n```python\nnothing_of_this_name\n```\n"
    "```\nno Python\n```\n"
)


def assert_run(folder: Path, draw: bool) -> None:
    """Runs all blocks that draw a diagram, or all others, and asserts that none fails."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
    for failures in run_ranks(readme.run_blocks, 2, (texts, str(folder), draw)):
        assert failures == [], "\n".join(failures)


def test_document_blocks_run_and_models_train_afterwards(tmp_path: Path) -> None:
    assert_run(tmp_path, draw=False)


def test_document_blocks_that_plot_run_and_models_train_afterwards(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert_run(tmp_path, draw=True)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "memory.png",
        "explain.png",
        "step.png",
    }


def test_failing_document_blocks_are_reported(tmp_path: Path) -> None:
    for failures in run_ranks(readme.run_blocks, 2, ({"broken.md": FAILING}, str(tmp_path))):
        assert [failure.partition(": ")[0] for failure in failures] == [
            "broken.md:4",
            "broken.md:12",
            "broken.md:17",
        ]
        for failure, match in zip(
            failures, ["same dtype", "a leaf Variable that requires grad", "NameError"], strict=True
        ):
            assert match in failure
        assert 'File "broken.md", line 13' in failures[1]


def test_readme_blocks_finds_every_python_fence() -> None:
    assert len(readme.blocks((ROOT / "README.md").read_text())) == 1
    assert sum(len(readme.blocks(path.read_text())) for path in DOCUMENTS) >= 15
    for path in DOCUMENTS:
        text = path.read_text()
        assert text.count("```python") + text.count("```py\n") == len(readme.blocks(text)), path


def test_document_blocks_that_are_not_run_need_another_environment() -> None:
    reasons = []
    for path in DOCUMENTS:
        text = path.read_text()
        found = [readme.reason_not_to_run(text, line) for line, _ in readme.blocks(text)]
        assert text.count("<!-- not run") == len([reason for reason in found if reason]), path
        reasons += [reason for reason in found if reason]
    assert [reason.partition(";")[0] for reason in reasons] == [
        "needs CUDA",
        "needs accelerate",
        "needs transformers",
        "needs TRL",
        "needs Lightning",
    ]


def test_exclusion_comment_must_be_directly_before_its_document_block() -> None:
    block = "```python\nx = 1\n```\n"
    text = f"<!-- not run: a -->\n{block}\n<!-- not run: b -->\n\n{block}"
    assert [readme.reason_not_to_run(text, line) for line, _ in readme.blocks(text)] == ["a", ""]
