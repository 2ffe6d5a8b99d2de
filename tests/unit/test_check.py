"""Does the extension fit this torch, is it active, does it work; what a build finds and notes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from site_dir import installed_environment
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import fsdp_c
from fsdp_c import built_for, check

ROOT = Path(__file__).resolve().parents[2]
# Behind everything: under the sanitizers fsdp_c is not this checkout's.
sys.path.append(str(ROOT))

import build_torch  # noqa: E402


def run(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=280)


# ---- does it fit? --------------------------------------------------------------------------------


def noted(**other: str) -> built_for.Build:
    facts = {"torch": torch.__version__, "python": "3.11", "kernels": "CPU", "source": str(ROOT)}
    return built_for.Build(**{**facts, **other})


def test_this_build_fits() -> None:
    assert built_for.build() is not None
    assert built_for.what_is_wrong(built_for.build(), True) is None
    assert built_for.what_is_wrong(None, True) is None  # of before there were notes


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.13.0+cpu", True), ("2.13.1", True), ("2.13.0+cu130", True), ("2.14.0", False)],
)
def test_a_release_is_what_counts(
    version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert (built_for.what_is_wrong(noted(torch=version), True) is None) == fits


def test_another_torch_is_named_with_the_command_that_mends_it() -> None:
    wrong = built_for.what_is_wrong(noted(torch="2.9.1"), True)
    assert wrong == (
        f"fsdp_c was built for torch 2.9.1 and this is torch {torch.__version__}: build it again "
        f"with  {sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall "
        f"{ROOT}"
    )
    gone = built_for.what_is_wrong(noted(torch="2.9.1", source="/nowhere"), True)
    assert gone is not None and gone.endswith("--force-reinstall PATH/TO/A/CLONE/OF/fsdp_c")


def test_another_python_is_named() -> None:
    wrong = built_for.what_is_wrong(noted(python="3.8"), False)
    assert wrong is not None and ", but for Python 3.8: build it with" in wrong


def test_the_source_is_told_from_what_pip_has_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_for, "NOTE", ROOT / "fsdp_c" / built_for.NOTE.name)
    wrong = built_for.what_is_wrong(None, False)
    assert wrong is not None and wrong.startswith(f"this is the source of fsdp_c, in {ROOT}: ")
    assert "leave that folder (cd ..)" in wrong and wrong.endswith(f"-e {ROOT}")


@pytest.fixture
def misfit(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose fsdp_c was built for torch 1.0."""
    package = tmp_path / "fsdp_c"
    package.mkdir()
    for path in (ROOT / "fsdp_c").iterdir():
        if path.suffix in (".py", ".so"):
            (package / path.name).symlink_to(path)
    for path in ROOT.glob("fsdp_c_*.py"):
        (tmp_path / path.name).symlink_to(path)
    facts = json.loads(built_for.NOTE.read_text())
    (package / "_C.json").write_text(json.dumps(facts | {"torch": "1.0"}))
    env = installed_environment(tmp_path)
    return env | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}


SENTENCE = "fsdp_c was built for torch 1.0 and this is torch "
JOB = """
import torch, torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
fully_shard(nn.Linear(2, 2))
"""


@pytest.mark.parametrize("how", ["import", "FSDP_C=1", "-m fsdp_c"])
def test_a_misfit_is_refused_at_import(how: str, misfit: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    arguments = {
        "import": ["-c", "import fsdp_c"],
        "FSDP_C=1": ["job.py"],
        "-m fsdp_c": ["-m", "fsdp_c", "job.py"],
    }[how]
    env = misfit | ({"FSDP_C": "1"} if how == "FSDP_C=1" else {})
    done = run(*arguments, env=env, cwd=tmp_path)
    assert done.returncode == 1
    assert SENTENCE in done.stderr and "undefined symbol" not in done.stderr
    assert "ImportError: fsdp_c was built" in done.stderr.strip().splitlines()[-1]


# ---- is it active? -------------------------------------------------------------------------------


def test_who_runs_a_model(fake_group: int) -> None:
    def model() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    plain, ours, theirs, mixed = (model() for _ in range(4))
    fsdp_c.fully_shard(ours)
    stock_fully_shard(theirs)
    fsdp_c.fully_shard(mixed[0])
    stock_fully_shard(mixed[1])
    found = [fsdp_c.is_active(one) for one in (plain, ours, theirs, mixed)]
    assert found == [False, True, False, False]
    assert fsdp_c.is_active(fsdp_c.replicate(model()))
    assert fsdp_c.is_active(nn.Sequential(ours))


def test_a_job_that_is_switched_over_says_so_once_on_rank_0(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB + "fully_shard(nn.Linear(2, 2))\n")
    line = f"fsdp_c {fsdp_c.__version__} runs fully_shard and replicate (torch {torch.__version__})"
    for switch, arguments in (({}, ["-m", "fsdp_c", "job.py"]), ({"FSDP_C": "1"}, ["job.py"])):
        done = run(*arguments, env=installed_environment(tmp_path, **switch), cwd=tmp_path)
        assert done.returncode == 0 and done.stderr.splitlines().count(line) == 1, done.stderr
    (tmp_path / "job.py").write_text(JOB.replace("rank=0", "rank=1"))
    done = run("job.py", env=installed_environment(tmp_path, FSDP_C="1"), cwd=tmp_path)
    assert done.returncode == 0 and line not in done.stderr
    done = run("job.py", env=installed_environment(tmp_path), cwd=tmp_path)
    assert line not in done.stderr


# ---- the commands --------------------------------------------------------------------------------


def test_the_version() -> None:
    done = run("-m", "fsdp_c", "--version")
    assert re.fullmatch(
        rf"fsdp_c {fsdp_c.__version__} \(built for torch .+\); torch .+, Python 3\.\d+\.\d+\n",
        done.stdout,
    )


def test_the_check() -> None:
    done = run("-m", "fsdp_c", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"^  (\w[\w ]*?) +ok +(.+)$", done.stdout, re.M))
    assert list(found) == ["extension", "torch", "kernels", "devices", "entry point", "two ranks"]
    assert found["two ranks"].endswith("the same bits")


def test_a_check_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "_two_ranks", lambda: (False, "training on gloo failed: x"))
    assert check.main() == 1
    assert "two ranks    WRONG  training on gloo failed: x" in capsys.readouterr().out


def test_a_self_test_that_fails_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert check._two_ranks() == (False, "training on gloo failed: nothing")


# ---- building ------------------------------------------------------------------------------------


def test_the_version_names_the_torch_that_it_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "fsdp_c/version.py"
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert build_torch.version(file) == f"{fsdp_c.__version__}+torch2.13.0.cu130"
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist"])
    assert build_torch.version(file) == fsdp_c.__version__


def test_a_build_says_what_it_does_and_how_long_it_takes() -> None:
    sources = ["a.c"] * 50 + ["b.cpp"] * 7
    text = build_torch.plan(sources, "CPU", 2)
    assert f"torch {torch.__version__}, kernels for CPU: 57 files with 2 compilers" in text
    assert "takes about 2 min" in text
    assert "takes about 5 min" in build_torch.plan(sources, "CPU and CUDA 13.0", 2)


def test_an_isolated_build_finds_the_torch_of_its_environment(tmp_path: Path) -> None:
    """As pip isolates: no site-packages, but for what the build asked for."""
    site = Path(torch.__file__).resolve().parents[1]
    code = (
        "import sys\n"
        f"sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(ROOT)!r}]\n"
        f"sys.argv = ['setup.py']\n"
        "import importlib.util as util\n"
        "assert util.find_spec('torch') is None\n"
        "import build_torch\n"
        "print(util.find_spec('torch').origin)\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = run("-c", code, env=env, cwd=tmp_path)
    assert done.stdout.strip() == str(site / "torch/__init__.py"), done.stderr


def test_a_build_without_torch_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_torch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        SystemExit, match="install torch first, then fsdp_c with  pip install --no-"
    ):
        build_torch.find([])


def test_pip_is_told_of_no_torch_to_build_with() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"^requires = \[(.*)\]$", text, re.M)
    assert requires is not None and "torch" not in requires[1]
