"""Checks of the installed build, ``is_active``, ``python -m fsdp_c --check``, ``find_torch``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import forked_python
import pytest
import torch
import torch.nn as nn
from shell_commands import find_command
from site_dir import installed_environment
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_c
from fsdp_c import _C
from fsdp_c._compat import abi, build_info
from fsdp_c._runtime import kernels
from fsdp_c._tools import check

ROOT = Path(__file__).resolve().parents[2]
# Appended, because under the sanitizers fsdp_c must not be imported from this checkout.
sys.path.append(str(ROOT))

from build_support import find_torch  # noqa: E402


def run(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=280)


# ---- compatibility of a build with the installed torch and Python --------------------------------


def make_build(**overrides: Any) -> build_info.Build:
    """Returns the record of a build that fits, with ``overrides``."""
    fields: dict[str, Any] = {
        "torch": torch.__version__,
        "python": "3.11",
        "kernels": "CPU",
        "source": str(ROOT),
        "folder": "",
        "sizes": abi.read_sizes(),
    }
    return build_info.Build(**{**fields, **overrides})


COMMAND = f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall {ROOT}"


def test_installed_build_and_build_without_record_are_compatible() -> None:
    assert build_info.read_build() is not None
    assert build_info.find_mismatch(build_info.read_builds()) is None
    assert build_info.find_mismatch([]) is None  # the record is missing or invalid


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.13.0+cpu", True), ("2.13.1", True), ("2.13.0+cu130", True), ("2.14.0", False)],
)
def test_build_is_compatible_only_with_torch_of_the_same_minor_release(
    version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert (build_info.find_mismatch([make_build(torch=version)]) is None) == fits


def test_message_about_build_for_another_torch_names_versions_and_build_command() -> None:
    message = build_info.find_mismatch([make_build(torch="2.9.1")])
    assert message == (
        f"fsdp_c was built for torch 2.9 and this is torch {torch.__version__}: build it again "
        f"with  {COMMAND}"
    )
    for source in ("/nowhere", ""):
        message = build_info.find_mismatch([make_build(torch="2.9.1", source=source)])
        assert message is not None
        assert message.endswith("--force-reinstall PATH/TO/A/CLONE/OF/fsdp_c")


def test_builds_for_other_torch_releases_are_listed() -> None:
    message = build_info.find_mismatch([make_build(torch="2.8.0"), make_build(torch="2.9.1+cpu")])
    assert message is not None and message.startswith("fsdp_c was built for torch 2.8, 2.9 and ")


def test_find_mismatch_of_class_sizes_returns_class_and_build_command() -> None:
    sizes = abi.read_sizes()
    build = make_build(sizes=sizes | {"vtable of c10d::Backend": 8, "a class of another torch": 8})
    assert build_info.find_mismatch([build]) == (
        f"fsdp_c was built for torch {torch.__version__}, and torch {torch.__version__} has other "
        f"sizes of vtable of c10d::Backend ({sizes['vtable of c10d::Backend']} bytes instead of "
        f"8): build it again with  {COMMAND}"
    )


def test_class_sizes_are_those_of_readelf() -> None:
    folder = Path(torch.__file__).parent / "lib"
    sizes = abi.read_sizes()
    assert sizes["torch._C.TensorBase"] == torch._C.TensorBase.__basicsize__
    assert len(sizes) == 1 + sum(map(len, abi.SYMBOLS.values()))
    for library, symbols in abi.SYMBOLS.items():
        command = ["readelf", "-W", "--dyn-syms", str(folder / library)]
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        table = subprocess.run(command, capture_output=True, text=True, env=env).stdout
        expected = {
            fields[-1]: fields[2] for fields in map(str.split, table.splitlines()) if fields
        }
        assert {symbol: str(sizes[name]) for name, symbol in symbols.items()} == {
            symbol: expected[symbol] for symbol in symbols.values()
        }


def test_message_about_build_for_another_python_names_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_info, "has_extension", lambda folder: False)
    message = build_info.find_mismatch([make_build(python="3.8")])
    assert message is not None and ", but for Python 3.8: build it with" in message


def test_message_about_unbuilt_source_folder_names_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_info, "BUILD_RECORD", ROOT / "fsdp_c" / build_info.BUILD_RECORD.name)
    monkeypatch.setattr(build_info, "has_extension", lambda folder: False)
    message = build_info.find_mismatch([])
    assert message is not None and message.startswith(f"this is the source of fsdp_c, in {ROOT}: ")
    assert "leave that folder (cd ..)" in message and message.endswith(f"-e {ROOT}")


@pytest.fixture
def incompatible_env(tmp_path: Path) -> dict[str, str]:
    """Returns environment variables for a process whose fsdp_c was built for torch 1.0."""
    package = tmp_path / "fsdp_c"
    package.mkdir()
    for path in (ROOT / "fsdp_c").iterdir():
        if path.suffix in (".py", ".so") or (path.is_dir() and path.name != "__pycache__"):
            (package / path.name).symlink_to(path)
    (tmp_path / "fsdp_c_autoload").symlink_to(ROOT / "fsdp_c_autoload")
    record = json.loads(build_info.BUILD_RECORD.read_text())
    record["builds"][0]["torch"] = "1.0"
    (package / "_C.json").write_text(json.dumps(record))
    env = installed_environment(tmp_path)
    return env | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}


INCOMPATIBLE = "fsdp_c was built for torch 1.0 and this is torch "
JOB = """
import torch, torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
fully_shard(nn.Linear(2, 2))
"""


@pytest.mark.parametrize("how", ["import", "FSDP_C=1", "-m fsdp_c"])
def test_incompatible_build_raises_at_import(
    how: str, incompatible_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    env = incompatible_env
    if how == "import":
        completed = fork_server.run_code("import fsdp_c", env=env, cwd=tmp_path)
    elif how == "-m fsdp_c":
        completed = fork_server.run_module("fsdp_c", "job.py", env=env, cwd=tmp_path)
    else:
        completed = run("job.py", env=env | {"FSDP_C": "1"}, cwd=tmp_path)
    assert completed.returncode == 1
    assert INCOMPATIBLE in completed.stderr and "undefined symbol" not in completed.stderr
    assert "ImportError: fsdp_c was built" in completed.stderr.strip().splitlines()[-1]


# ---- is_active -----------------------------------------------------------------------------------


def test_is_active_is_true_only_for_models_sharded_by_fsdp_c_alone(fake_group: int) -> None:
    def model() -> Any:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    unsharded, by_fsdp_c, by_torch, by_both = (model() for _ in range(4))
    fsdp_c.fully_shard(by_fsdp_c)
    torch_fully_shard(by_torch)
    fsdp_c.fully_shard(by_both[0])
    torch_fully_shard(by_both[1])
    active = [fsdp_c.is_active(m) for m in (unsharded, by_fsdp_c, by_torch, by_both)]
    assert active == [False, True, False, False]
    assert fsdp_c.is_active(fsdp_c.replicate(model()))
    assert fsdp_c.is_active(nn.Sequential(by_fsdp_c))


def test_job_run_with_fsdp_c_logs_one_line_on_rank_0(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB + "fully_shard(nn.Linear(2, 2))\n")
    line = f"fsdp_c {fsdp_c.__version__} runs fully_shard and replicate (torch {torch.__version__})"
    env = installed_environment(tmp_path)
    by_module = fork_server.run_module("fsdp_c", "job.py", env=env, cwd=tmp_path)
    by_variable = run("job.py", env=env | {"FSDP_C": "1"}, cwd=tmp_path)
    for completed in (by_module, by_variable):
        assert completed.returncode == 0 and completed.stderr.splitlines().count(line) == 1, (
            completed.stderr
        )
    # A forked process has imported torch, so the program calls the entry point itself.
    job = "import fsdp_c_autoload; fsdp_c_autoload.autoload()\n" + JOB
    for variables, rank, count in (({"FSDP_C": "1"}, 0, 1), ({"FSDP_C": "1"}, 1, 0), ({}, 0, 0)):
        code = job.replace("rank=0", f"rank={rank}")
        completed = fork_server.run_code(code, env | variables, cwd=tmp_path)
        assert completed.returncode == 0, completed.stderr
        assert completed.stderr.splitlines().count(line) == count


# ---- the commands --------------------------------------------------------------------------------


def test_version_option_prints_versions_of_fsdp_c_torch_and_python() -> None:
    completed = fork_server.run_module("fsdp_c", "--version", cwd=ROOT)
    assert re.fullmatch(
        rf"fsdp_c {fsdp_c.__version__} \(built for torch .+\); torch .+, Python 3\.\d+\.\d+\n",
        completed.stdout,
    )


def test_check_option_reports_passed_checks() -> None:
    command = [forked_python.make_program(), *find_command("--check").arguments]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    passed = dict(re.findall(r"^  (\w[\w ]*?) +ok +(.+)$", completed.stdout, re.M))
    gpu = {0: [], 1: ["one GPU"]}.get(torch.cuda.device_count(), ["two GPUs"])
    expected = ["extension", "torch", "kernels", "devices", "entry point", "two ranks", *gpu]
    assert list(passed) == expected
    assert all(passed[name].endswith("the same bits") for name in ["two ranks", *gpu])


def test_failed_check_prints_reason_and_returns_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "_train", lambda *_: (False, "training on gloo failed: x"))
    assert check.main() == 1
    assert "two ranks    WRONG  training on gloo failed: x" in capsys.readouterr().out


@pytest.mark.parametrize(("devices", "subject"), [(1, "one GPU"), (2, "two GPUs"), (8, "two GPUs")])
def test_check_trains_on_cpu_and_on_at_most_two_gpus(
    devices: int, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(check, "_describe_kernels", lambda: "")
    monkeypatch.setattr(check, "_describe_devices", lambda: "")
    monkeypatch.setattr(check, "_train", lambda device, ranks: (True, f"{ranks} on {device}"))
    trainings = [(name, text) for name, _, text in check._run_checks() if " on " in text]
    assert trainings == [("two ranks", "2 on cpu"), (subject, f"{min(devices, 2)} on cuda")]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("", "CPU; on CUDA, fsdp_c's nvrtc kernels"),
        ("no NVRTC", "CPU; on CUDA, torch's operations move the data: no NVRTC"),
    ],
)
def test_check_on_a_cuda_device_compiles_missing_kernels(
    reason: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "CUDA_KERNELS", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "add_missing_kernels", lambda device: reason)
    monkeypatch.setattr(kernels, "describe_kernels", lambda device: "fsdp_c's nvrtc kernels")
    assert check._describe_kernels() == text


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exit 1", "training on gloo failed: nothing"),
        ("echo a warning >&2; kill -ABRT $$", "training on gloo failed (SIGABRT): a warning"),
        ("echo INFO; echo error >&2; exit 1", "training on gloo failed: error"),
        ("echo losses differ; echo a warning >&2", "training on gloo failed: losses differ"),
        # rank 1 fails while rank 0 waits for it
        ("[ $4 = 0 ] && exec sleep 100; echo error >&2; exit 1", "training on gloo failed: error"),
    ],
)
def test_check_with_failing_process_is_reported(
    command: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert check._train("cpu", 2) == (False, reason)


# ---- building ------------------------------------------------------------------------------------


def test_description_of_build_states_files_compilers_and_duration() -> None:
    text = find_torch.describe_build(57, "CPU", 2)
    assert f"torch {torch.__version__}, kernels for CPU: 57 files with 2 compilers" in text
    assert "takes about 1 min" in text
    assert "takes about 4 min" in find_torch.describe_build(57, "CPU and CUDA 13.0", 2)


def test_isolated_build_finds_torch_of_its_environment(tmp_path: Path) -> None:
    """pip's build isolation is simulated by a module search path without site-packages."""
    site = Path(torch.__file__).resolve().parents[1]
    code = (
        "import sys\n"
        f"sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(ROOT)!r}]\n"
        "import importlib.util as util\n"
        "assert util.find_spec('torch') is None\n"
        "from build_support import find_torch\n"
        "find_torch.add_to_path()\n"
        "print(util.find_spec('torch').origin)\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    completed = run("-c", code, env=env, cwd=tmp_path)
    assert completed.stdout.strip() == str(site / "torch/__init__.py"), completed.stderr


def test_build_without_torch_exits_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_torch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        SystemExit, match="install torch first, then fsdp_c with  pip install --no-"
    ):
        find_torch.add_to_path()


def test_pyproject_does_not_require_torch_for_the_build() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requires = re.search(r"^requires = \[(.*)\]$", text, re.M)
    assert requires is not None and "torch" not in requires[1]
