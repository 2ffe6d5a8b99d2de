"""Merges wheels of several torch releases, and installs the wheel for the present torch.

The wheel is built from the objects of ``make build``. It is installed and runs without a compiler
and without a network. ``make wheels-check`` does the same for several releases of torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# Appended, because under the sanitizers fsdp_c must not be imported from this checkout.
sys.path += [str(ROOT), str(ROOT / "tests/wheels")]

import wheel_table  # noqa: E402

from build_support import merge_wheels  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("wheel"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

VERSION = re.search(r'"(.+)"', (ROOT / "fsdp_c/version.py").read_text().splitlines()[-1])
MAX_MEBIBYTES = 6
"""The maximum size of a wheel with extensions for five torch releases."""


# ---- merging -------------------------------------------------------------------------------------


def make_wheel(folder: Path, release: str, source: str = "x = 1\n") -> Path:
    """Writes a wheel with a package, an extension and a record for one torch release."""
    tree = folder / "tree"
    info = tree / "fsdp_c-1.0.dist-info"
    files = {
        info / "METADATA": "Metadata-Version: 2.1\nName: fsdp_c\nVersion: 1.0\n",
        info
        / "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n",
        info / "RECORD": "",
        tree / "fsdp_c/__init__.py": source,
        tree / "fsdp_c/_C.cpython-311.so": f"for {release}",
        tree / "fsdp_c/_dry_run.cpython-311.so": f"built beside {release}",
        tree / merge_wheels.RECORD: json.dumps(
            {"python": "3.11", "source": "/a/folder", "builds": [{"torch": release, "folder": ""}]}
        ),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    merge_wheels.run_wheel("pack", str(tree), "--dest-dir", str(folder))
    return next(folder.glob("*.whl"))


def test_merged_wheel_has_one_extension_for_each_torch_release(tmp_path: Path) -> None:
    releases = ["2.15.0", "2.9.1+cpu"]
    wheels = [make_wheel(tmp_path / release, release) for release in releases]
    merge_wheels.main([str(tmp_path / "out"), *map(str, wheels)])
    [merged] = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(merged) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        record = json.loads(archive.read(merge_wheels.RECORD))
        contents = {name: archive.read(name).decode() for name in names if name.endswith(".so")}
    assert names == {"fsdp_c/__init__.py", merge_wheels.RECORD, *contents}
    assert contents == {
        "fsdp_c/_extensions/torch2.9/_C.cpython-311.so": "for 2.9.1+cpu",
        "fsdp_c/_extensions/torch2.15/_C.cpython-311.so": "for 2.15.0",
        "fsdp_c/_dry_run.cpython-311.so": "built beside 2.15.0",
    }
    assert record == {
        "python": "3.11",
        "source": "",
        "builds": [
            {"torch": "2.9.1+cpu", "folder": "_extensions/torch2.9"},
            {"torch": "2.15.0", "folder": "_extensions/torch2.15"},
        ],
    }


def test_wheels_of_different_sources_are_not_merged(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path / str(i), f"2.{i}.0", f"x = {i}\n") for i in range(2)]
    with pytest.raises(SystemExit, match=r"the wheels to merge differ in fsdp_c/__init__\.py: "):
        merge_wheels.merge(wheels, tmp_path / "out")


def test_merge_without_wheels_prints_its_usage(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="usage: python -m build_support"):
        merge_wheels.main([str(tmp_path)])


def test_wheels_for_one_torch_release_are_not_merged(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path / version, version) for version in ("2.13.0+cpu", "2.13.1")]
    with pytest.raises(SystemExit, match=r"two wheels for one torch release: 2.13.0\+cpu, 2.13.1"):
        merge_wheels.merge(wheels, tmp_path / "out")


# ---- the records of make wheels-check ------------------------------------------------------------


def test_results_of_wheels_replace_those_with_the_same_versions_only() -> None:
    def row(python: str, torch: str, **facts: str) -> dict[str, str]:
        return {"python": python, "torch": torch, **facts}

    old = {
        "wheels": {"b-cp311.whl": {"bytes": 1}, "a-cp310.whl": {"bytes": 2}},
        "environments": [row("3.11.7", "2.9.1+cpu"), row("3.11.7", "2.15.0", date="old")],
        "ways": [row("3.11.7", "2.15.0", way="x"), row("3.10.1", "2.9.1", way="x")],
    }
    new = {
        "wheels": {"b-cp311.whl": {"bytes": 3}},
        "environments": [row("3.11.7", "2.15.0", date="new")],
        "ways": [row("3.11.7", "2.15.0", way="y"), row("3.11.7", "2.15.0", way="z")],
    }
    assert wheel_table.merge(old, new) == {
        "wheels": {"a-cp310.whl": {"bytes": 2}, "b-cp311.whl": {"bytes": 3}},
        "environments": [row("3.11.7", "2.9.1+cpu"), row("3.11.7", "2.15.0", date="new")],
        "ways": [row("3.10.1", "2.9.1", way="x"), *new["ways"]],
    }


# ---- the wheel for the present torch -------------------------------------------------------------


def run(*arguments: str, cwd: Path, env: dict[str, str]) -> str:
    """Runs Python. Returns its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_setup(folder: Path, *arguments: str) -> None:
    """Runs setup.py of this repository. Metadata is written to ``folder``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FSDP_C") and k != "LD_PRELOAD"}
    options = ["-q", "egg_info", "--egg-base", str(folder)]
    run("setup.py", *options, *arguments, cwd=ROOT, env={**kept, "FSDP_C_NO_CUDA": "1"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of ``make wheels`` for the present torch, before auditwheel changes its tag."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["build", "--build-lib", f"{folder}/lib", "bdist_wheel", "--dist-dir", f"{folder}/dist"]
    run_setup(folder, *build, "--bdist-dir", f"{folder}/bdist")
    merge_wheels.main([f"{folder}/out", *map(str, folder.glob("dist/*.whl"))])
    return next(folder.glob("out/*.whl"))


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, bytes]:
    """The files of the wheel by path."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Site:
    """A folder with the installed wheel, and an environment without a compiler that imports it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.root = folder
        self.packages = folder / "site"
        (folder / "programs").mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FSDP_C", "PYTHON"))}
        self.env = kept | {"PATH": str(folder / "programs"), "PYTHONSAFEPATH": "1"}
        install = ["install", "-q", "--no-index", "--no-deps", "--target", str(self.packages)]
        run("-m", "pip", *install, str(wheel), cwd=folder, env=self.env)

    def run(self, *arguments: str, path: tuple[Path, ...] = ()) -> str:
        """Runs Python with the installed wheel. Returns the output."""
        paths = os.pathsep.join(map(str, (self.packages, *path)))
        return run(*arguments, cwd=self.root, env=self.env | {"PYTHONPATH": paths})

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.packages / merge_wheels.RECORD).read_text())
        return record


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"), wheel)


@pytest.fixture
def broken_site(site: Site) -> Iterator[Site]:
    """The installed wheel. The test may change the record and the extension."""
    [extension] = site.packages.glob("fsdp_c/_extensions/*/_C.*.so")
    files = {path: path.read_bytes() for path in (site.packages / merge_wheels.RECORD, extension)}
    yield site
    for path, content in files.items():
        path.write_bytes(content)


def test_wheel_has_no_local_version_and_requires_supported_torch(
    wheel: Path, contents: dict[str, bytes]
) -> None:
    assert VERSION is not None and wheel.name.startswith(f"fsdp_c-{VERSION[1]}-cp3")
    metadata = next(text for name, text in contents.items() if name.endswith("/METADATA")).decode()
    assert f"\nVersion: {VERSION[1]}\n" in metadata
    required = re.findall(r"^Requires-Dist: (torch[^;\n]*)$", metadata, re.M)
    assert [sorted(line.removeprefix("torch").split(",")) for line in required] == [
        ["<2.16", ">=2.11"]
    ]


def test_wheel_and_sdist_have_the_files_of_the_repository(
    contents: dict[str, bytes], tmp_path: Path
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    packages = [
        name for name in tracked if re.match(r"fsdp_c(_autoload)?/.*\.(py|pyi|typed)$", name)
    ]
    kernels = [name for name in tracked if re.match(r"csrc/kernels/[^/]*\.(h|cuh)$", name)]
    expected = {*packages, *(f"fsdp_c/kernel_sources/{Path(name).name}" for name in kernels)}
    installed = {name for name in contents if ".dist-info/" not in name}
    compiled = {name for name in installed if name.endswith(".so")} | {merge_wheels.RECORD}
    assert installed - compiled == expected
    assert len(compiled) == 3

    run_setup(tmp_path, "sdist", "--formats", "zip", "--dist-dir", str(tmp_path))
    with zipfile.ZipFile(next(tmp_path.glob("*.zip"))) as archive:
        names = {name.partition("/")[2] for name in archive.namelist()}
    sources = {name for name in tracked if re.match(r"(csrc|build_support)/.*\.\w+$", name)}
    assert {*packages, *sources, "setup.py", "pyproject.toml", "CMakeLists.txt"} <= names
    assert not [name for name in names if name.endswith((".so", "/_C.json"))]


def test_wheel_with_five_extensions_would_have_at_most_6_mebibytes(wheel: Path) -> None:
    assert 5 * wheel.stat().st_size <= MAX_MEBIBYTES * 2**20


def test_extension_of_wheel_links_no_cuda_library(site: Site) -> None:
    [extension] = site.packages.glob("fsdp_c/_extensions/*/_C.*.so")
    dynamic = subprocess.check_output(["readelf", "-d", str(extension)], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(lib(?:torch|c10|cu|nv).*)\]", dynamic)
    assert sorted(needed) == ["libc10.so", "libtorch_cpu.so", "libtorch_python.so"]


def test_installed_wheel_passes_check_without_a_compiler(site: Site) -> None:
    assert shutil.which("gcc", path=site.env["PATH"]) is None
    output = site.run("-m", "fsdp_c", "--check")
    release = ".".join(torch.__version__.split(".")[:2])
    assert str(site.packages / f"fsdp_c/_extensions/torch{release}/_C.") in output
    assert output.count(" ok ") == 6 + torch.cuda.is_available(), output


def test_installed_wheel_trains_to_the_bits_of_torch(site: Site) -> None:
    tests = ROOT / "tests"
    script = str(tests / "wheels/short_parity.py")
    output = site.run(script, "12", path=(tests / "harness", tests / "parity/workers"))
    assert f"extension {site.packages}/fsdp_c/_extensions/" in output
    assert output.endswith("12 settings on 1 and 2 ranks: equal\n")


IMPORT = """
try:
    import fsdp_c
except ImportError as error:
    print(error)
"""


def test_import_without_extension_for_installed_torch_names_the_releases_in_the_wheel(
    broken_site: Site,
) -> None:
    record = broken_site.record
    [build] = record["builds"]
    record["builds"] = [build | {"torch": "2.8.0+cu128"}, build | {"torch": "2.9.1"}]
    (broken_site.packages / merge_wheels.RECORD).write_text(json.dumps(record))
    output = broken_site.run("-c", IMPORT)
    assert output == (
        f"fsdp_c was built for torch 2.8, 2.9 and this is torch {torch.__version__}: build it "
        f"again with  {sys.executable} -m pip install --no-build-isolation --no-deps "
        "--force-reinstall PATH/TO/A/CLONE/OF/fsdp_c\n"
    )


def test_extension_that_does_not_load_is_reported_with_build_command(broken_site: Site) -> None:
    [extension] = broken_site.packages.glob("fsdp_c/_extensions/*/_C.*.so")
    extension.write_bytes(b"no library")
    output = broken_site.run("-c", IMPORT)
    assert output.startswith(
        f"the extension of fsdp_c does not load with torch {torch.__version__} ("
    )
    assert output.endswith("--force-reinstall PATH/TO/A/CLONE/OF/fsdp_c\n")


def test_table_of_wheels_in_compatibility_page_is_current() -> None:
    output = run("tests/wheels/wheel_table.py", "--check", cwd=ROOT, env=dict(os.environ))
    assert output == ""
