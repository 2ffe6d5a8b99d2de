"""Every Python block of the documents runs, as it stands, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import readme
from launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))]

FIRST = """
    ```python
    policy = fsdp_c.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fsdp_c.fully_shard(block, mp_policy=policy)
    fsdp_c.fully_shard(model)
    ```
"""
"""What the README once began with: it runs, but the model does not."""

WRITES = """
```python
with fsdp_c.full_params(model) as full:
    full["head.weight"].mul_(0.5)
```
"""
BROKEN = f"Words.\n{FIRST}\n{WRITES}\n```python\nnothing_of_this_name\n```\n```\nno Python\n```\n"


def assert_run(folder: Path, draw: bool) -> None:
    """Of all blocks those that draw a picture, or the others."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
    for wrong in run_ranks(readme.run_blocks, 2, (texts, str(folder), draw)):
        assert wrong == [], "\n".join(wrong)


def test_blocks_run_and_leave_models_that_train(tmp_path: Path) -> None:
    assert_run(tmp_path, draw=False)


def test_blocks_that_draw_run_and_leave_models_that_train(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert_run(tmp_path, draw=True)
    assert {path.name for path in tmp_path.glob("*.png")} == {"memory.png", "step.png"}


def test_blocks_that_fail_are_found(tmp_path: Path) -> None:
    for wrong in run_ranks(readme.run_blocks, 2, ({"broken.md": BROKEN}, str(tmp_path))):
        assert [one.partition(": ")[0] for one in wrong] == [
            "broken.md:4",
            "broken.md:12",
            "broken.md:17",
        ]
        for one, match in zip(
            wrong, ["same dtype", "a leaf Variable that requires grad", "NameError"], strict=True
        ):
            assert match in one
        assert 'File "broken.md", line 13' in wrong[1]


def test_no_block_is_overlooked() -> None:
    """Every fence of Python opens a block that is run."""
    assert len(readme.blocks((ROOT / "README.md").read_text())) >= 5
    for path in DOCUMENTS:
        text = path.read_text()
        assert text.count("```python") + text.count("```py\n") == len(readme.blocks(text)), path
