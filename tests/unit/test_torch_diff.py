"""``build_support.torch_diff`` compares torch releases, and the record agrees with this torch.

If ``test_torch_diff_record_agrees_with_installed_torch`` fails, follow docs/torch-releases.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from build_support import torch_diff, torch_uses  # noqa: E402
from build_support.torch_source import TorchSource  # noqa: E402

INSTALLED = Path(torch.__file__).parents[1]
MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param"

OLD = '''
class FSDPParam:
    """A docstring."""

    size: int

    def __init__(self, param):
        self.state = None

    def reshard(self, mesh):
        if mesh is None:
            raise ValueError(f"no mesh for {self.size}")

    def removed(self): ...


def unchanged(tensor): return tensor
'''
NEW = '''
class FSDPParam:
    """Another docstring."""

    size: int

    def __init__(self, param):
        # A comment.
        self.state = None
        self.added_attribute = 0

    @torch.no_grad()
    def reshard(self, mesh, *, async_op: bool = False):
        if mesh is None:
            raise ValueError(
                f"no mesh for {self.size} "
                "bytes"
            )

    @property
    def added(self) -> int:
        return 0


def unchanged(tensor): return tensor  # a comment
'''


def write_release(folder: Path, version: str, text: str) -> Path:
    """Writes the sources of a release that contains one module of FSDP2."""
    file = folder / (MODULE.replace(".", "/") + ".py")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder


@pytest.fixture
def releases(tmp_path: Path) -> tuple[TorchSource, TorchSource]:
    old = write_release(tmp_path / "old", "2.0.0+cpu", OLD)
    new = write_release(tmp_path / "new", "2.1.0+cpu", NEW)
    return TorchSource(old), TorchSource(new)


def test_torch_diff_lists_added_removed_and_changed_definitions(
    releases: tuple[TorchSource, TorchSource],
) -> None:
    old, new = map(torch_diff.read_surface, releases)
    report = "\n".join(torch_diff.compare(old, new))
    marks = [line.split("[")[0].strip() for line in report.splitlines() if "[" in line]
    assert marks == [
        "~ FSDPParam.__init__",
        "+ FSDPParam.added",
        "+ FSDPParam.added_attribute",
        "- FSDPParam.removed",
        "~ FSDPParam.reshard",
    ]
    assert "message  - no mesh for {self.size}\n" in report
    assert "message  + no mesh for {self.size} bytes\n" in report
    assert "+ async_op: bool=False)" in report
    assert "property   (self) -> int" in report


def test_torch_diff_with_option_full_reports_changed_source_lines(
    releases: tuple[TorchSource, TorchSource],
) -> None:
    old, new = map(torch_diff.read_surface, releases)
    report = list(torch_diff.compare(old, new, full=True))
    assert "      +self.added_attribute = 0" in report


def test_torch_surface_of_wheel_equals_that_of_its_unpacked_files(
    tmp_path: Path, releases: tuple[TorchSource, TorchSource]
) -> None:
    wheel = tmp_path / "torch-2.0.0.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path in (tmp_path / "old").rglob("*.py"):
            file.write(path, path.relative_to(tmp_path / "old"))
    assert torch_diff.read_surface(TorchSource(wheel)) == torch_diff.read_surface(releases[0])


def test_torch_source_of_folder_without_torch_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="contains no torch"):
        TorchSource(tmp_path)


def test_torch_surface_record_keeps_digests_of_all_releases(
    tmp_path: Path, releases: tuple[TorchSource, TorchSource]
) -> None:
    file = tmp_path / "surface.txt"
    torch_diff.record_releases([releases[1]], file)
    torch_diff.record_releases([releases[0]], file)
    record = torch_diff.read_record(file)
    assert list(record) == ["2.0.0", "2.1.0"]
    assert record["2.0.0"][MODULE, "unchanged"] == record["2.1.0"][MODULE, "unchanged"]
    assert (
        record["2.0.0"][MODULE, "FSDPParam.reshard"] != record["2.1.0"][MODULE, "FSDPParam.reshard"]
    )
    assert record["2.0.0"][MODULE, "FSDPParam.added"] == "-"
    assert (MODULE, "FSDPParam.removed") not in record["2.1.0"]  # the file has "?"
    assert all(list(torch_diff.check(release, file)) == [] for release in releases)


def test_torch_surface_record_has_digest_of_name_that_only_another_release_uses(
    tmp_path: Path, releases: tuple[TorchSource, TorchSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsdp_c stops using ``torch.helper``; the environment of the older release is absent."""
    file = tmp_path / "surface.txt"
    for folder in ("old", "new"):
        (tmp_path / folder / "torch" / "__init__.py").write_text("def helper(): ...\n")
    monkeypatch.setattr(torch_uses, "list_names", lambda: {"torch.helper"})
    torch_diff.record_releases(list(releases), file)
    monkeypatch.setattr(torch_uses, "list_names", set)
    torch_diff.record_releases([releases[1]], file)
    assert torch_diff.read_record(file)["2.1.0"]["torch", "helper"] != "-"
    assert list(torch_diff.check(releases[1], file)) == []


def test_columns_of_torch_surface_record_have_prereleases_before_their_release(
    tmp_path: Path,
) -> None:
    file = tmp_path / "surface.txt"
    for version in ("2.10.0", "2.9.1", "2.11.0.dev20260101", "2.10.0a0"):
        release = write_release(tmp_path / version, f"{version}+cpu", OLD)
        torch_diff.record_releases([TorchSource(release)], file)
    columns = list(torch_diff.read_record(file))
    assert columns == ["2.9.1", "2.10.0a0", "2.10.0", "2.11.0.dev20260101"]


def test_torch_diff_check_reports_a_definition_that_differs_from_the_record(
    tmp_path: Path, releases: tuple[TorchSource, TorchSource]
) -> None:
    file = tmp_path / "surface.txt"
    torch_diff.record_releases([releases[0]], file)
    patch_release = write_release(tmp_path / "patch", "2.0.1", OLD.replace("tensor", "x"))
    [line] = torch_diff.check(TorchSource(patch_release), file)
    assert line.startswith(f"{MODULE}.unchanged changed since torch 2.0.0 was recorded")
    [line] = torch_diff.check(releases[1], file)
    assert "torch 2.1.0+cpu is not in surface.txt: follow docs/torch-releases.md" in line


def test_names_used_by_fsdp_c_include_imports_and_constant_names() -> None:
    names = torch_uses.list_names()
    assert "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam" in names
    assert "torch.distributed.reduce_scatter_single" in names  # hasattr(dist, "...")


def test_is_replaced_is_true_only_for_functions_that_fsdp_c_defines() -> None:
    assert torch_uses.is_replaced(MODULE, "FSDPParam.to_sharded")
    assert not torch_uses.is_replaced(MODULE, "FSDPParam._init_sharding_spec_spmd")


def test_torch_diff_record_agrees_with_installed_torch() -> None:
    command = [sys.executable, "-m", "build_support.torch_diff", "--check", str(INSTALLED)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # PYTHONSAFEPATH may be set
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
