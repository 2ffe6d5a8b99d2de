"""fsdp_c in an unmodified job: FSDP_C=1, ``python -m fsdp_c``, ``install()``."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import IO, Any

import fork_server
import pytest
import torch
import torch.distributed._composable.fsdp as composable
import torch.distributed.fsdp as public
import torch.distributed.fsdp._fully_shard._fully_shard as torch_fully_shard
import torch.nn as nn
import torch.nn.utils.clip_grad as clip_grad
from site_dir import installed_environment
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

import fsdp_c
import fsdp_c_autoload
from fsdp_c._runtime import env as env_module
from fsdp_c_autoload import redirect

pytestmark = pytest.mark.xdist_group("install")  # the tests share launched processes
State = importlib.import_module("fsdp_c._runtime.state").State
LOGGER = "torch.distributed.fsdp.fully_shard"


@pytest.fixture
def installed() -> Iterator[None]:
    fsdp_c.install()
    try:
        yield
    finally:
        fsdp_c.uninstall()


# ---- install and uninstall -----------------------------------------------------------------------


def test_install_replaces_fully_shard_for_all_importers(fake_group: int, installed: None) -> None:
    holders = (
        fully_shard,  # imported above, before install()
        public.fully_shard,
        torch_fully_shard.fully_shard,
        composable.fully_shard,
        importlib.import_module("torch.distributed._composable.fsdp.fully_shard").fully_shard,
    )
    stage = importlib.import_module("torch.distributed.pipelining.stage")
    if hasattr(stage, "fully_shard"):  # before torch 2.15
        holders += (stage.fully_shard,)
    for function in holders:
        module = nn.Linear(3, 4)
        assert function(module, reshard_after_forward=False) is module
        assert isinstance(fully_shard.state(module), State)
        assert isinstance(module, FSDPModule)
        assert not module._get_fsdp_state()._fsdp_param_group._reshard_after_forward


def test_install_keeps_the_function_object_and_its_metadata(installed: None) -> None:
    assert (
        public.fully_shard is torch_fully_shard.fully_shard is composable.fully_shard is fully_shard
    )
    assert fully_shard.__module__ == "torch.distributed.fsdp"
    assert fully_shard.__name__ == fully_shard.__wrapped__.__name__ == "fully_shard"
    assert "reshard_after_forward" in inspect.signature(fully_shard).parameters
    assert pickle.loads(pickle.dumps(fully_shard)) is fully_shard


def test_uninstall_restores_functions_and_import_hooks(fake_group: int) -> None:
    def facts() -> list[Any]:
        functions = [
            value
            for module in (public, torch_fully_shard, composable, clip_grad)
            for value in vars(module).values()
            if isinstance(value, FunctionType)
        ]
        return [
            *((f, f.__code__, f.__closure__, dict(f.__dict__)) for f in functions),
            *sys.meta_path,
        ]

    before = facts()
    fsdp_c.install()
    assert facts() != before
    fsdp_c.uninstall()
    assert facts() == before
    module = fully_shard(nn.Linear(3, 4))
    assert type(fully_shard.state(module)) is FSDPState


def test_repeated_install_and_uninstall_change_nothing(fake_group: int) -> None:
    codes = fully_shard.__code__, fsdp_c.fully_shard.__code__
    for _ in range(2):
        fsdp_c.install()
        installed_code = fully_shard.__code__
        fsdp_c.install()
        assert fully_shard.__code__ is installed_code
        assert isinstance(fully_shard.state(fully_shard(nn.Linear(2, 2))), State)
        fsdp_c.uninstall()
        fsdp_c.uninstall()
        assert (fully_shard.__code__, fsdp_c.fully_shard.__code__) == codes


def test_repeated_install_and_uninstall_adds_no_redirection() -> None:
    fsdp_c.install()
    before = len(redirect.active)
    fsdp_c.uninstall()
    for _ in range(3):
        fsdp_c.install()
        fsdp_c.uninstall()
    assert len(redirect.active) == before


def test_fsdp_c_clip_environment_variable_controls_clipping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = clip_grad.clip_grad_norm_.__code__
    for value, expected in (("0", False), ("No", False), ("1", True)):
        monkeypatch.setenv("FSDP_C_CLIP", value)
        fsdp_c.install()
        try:
            assert (clip_grad.clip_grad_norm_.__code__ is not code) is expected
        finally:
            fsdp_c.uninstall()
    assert clip_grad.clip_grad_norm_.__code__ is code


def test_patched_get_total_norm_is_called_by_clipping(
    fake_group: int, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = fully_shard(nn.Linear(8, 8))
    layer(torch.ones(2, 8)).sum().backward()
    assert isinstance(clip_grad.clip_grad_norm_(layer.parameters(), 1.0), DTensor)
    monkeypatch.setattr(clip_grad, "_get_total_norm", lambda *args: torch.tensor(7.0))
    assert clip_grad.clip_grad_norm_(layer.parameters(), 1.0).item() == 7.0


def test_compiled_clip_grad_norm_matches_torch(fake_group: int, installed: None) -> None:
    layer = nn.Linear(8, 8)
    for grad in (0.25, 0.5):
        for param in layer.parameters():
            param.grad = torch.full_like(param, grad)
        expected = redirect.original(clip_grad.clip_grad_norm_)(layer.parameters(), 1e9)
        compiled = torch.compile(
            lambda: clip_grad.clip_grad_norm_(list(layer.parameters()), 1e9), backend="eager"
        )
        assert torch.equal(compiled(), expected)


def test_original_returns_torchs_function(fake_group: int, installed: None) -> None:
    module = redirect.original(fully_shard)(nn.Linear(3, 4))
    assert type(fully_shard.state(module)) is FSDPState
    assert redirect.original(print) is print


def test_modules_keep_the_implementation_they_were_sharded_with(fake_group: int) -> None:
    torch_module = fully_shard(nn.Linear(8, 8))
    fsdp_c.install()
    with_fsdp_c = fully_shard(nn.Linear(8, 8))
    fsdp_c.uninstall()
    for module, kind in ((torch_module, FSDPState), (with_fsdp_c, State)):
        x = torch.ones(2, 8)
        module(x).sum().backward()
        assert type(fully_shard.state(module)) is kind
        assert module.weight.grad is not None


def test_torch_functions_without_replacement_accept_modules_of_fsdp_c(
    fake_group: int, installed: None
) -> None:
    class Twice(nn.Linear):
        def twice(self, x: Any) -> Any:
            return self(self(x))

    module = fully_shard(Twice(8, 8))
    public.register_fsdp_forward_method(module, "twice")
    with pytest.raises(ValueError, match="does not have a method thrice"):
        public.register_fsdp_forward_method(module, "thrice")
    module.reshard()
    assert module.twice(torch.ones(2, 8)).shape == (2, 8)
    other = fully_shard(nn.Linear(8, 8))
    public.share_comm_ctx([module, other])
    assert module._get_fsdp_state()._comm_ctx is other._get_fsdp_state()._comm_ctx


def test_install_logs_one_line_with_replaced_functions(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(2):
            fsdp_c.install()
        fsdp_c.uninstall()
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(lines) == 1
    assert lines[0].startswith(f"fsdp_c {fsdp_c.__version__} replaces ")
    assert "torch.distributed.fsdp._fully_shard._fully_shard.fully_shard" in lines[0]


class _BrokenPipe(io.StringIO):
    """A pipe whose reading end is closed."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def _closed_file() -> IO[str]:
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize(
    "stderr", [None, _closed_file(), _BrokenPipe()], ids=["none", "closed", "unread"]
)
def test_fsdp_c_environment_variable_takes_effect_without_stderr(
    stderr: IO[str] | None,
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FSDP_C", "1")
    module = importlib.import_module("fsdp_c.install")
    monkeypatch.setattr(module, "_has_printed", False)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert module.get_replacement("fully_shard") is fsdp_c.fully_shard
    assert capsys.readouterr().out == ""


# ---- a redirected function -----------------------------------------------------------------------


def make_counter(start: int) -> FunctionType:
    cell = [start]

    def count(step: int = 1, *, twice: bool = False) -> int:
        cell[0] += step + (step if twice else 0)
        return cell[0]

    count.note = "kept"  # type: ignore[attr-defined]
    return count


def test_redirection_applies_to_all_references_until_undone() -> None:
    count = held = make_counter(10)
    calls: list[Any] = []
    code = count.__code__

    def target(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "target"

    redirection = redirect.Redirection(count, target)
    assert held(3, twice=True) == "target" and calls == [((3,), {"twice": True})]
    assert redirection.original(3, twice=True) == 16  # the copy shares the closure cell
    redirection.undo()
    assert held() == 17  # the function runs its own code again
    assert count.__code__ is code and count.note == "kept"


def test_redirections_of_functions_with_equal_code_are_independent() -> None:
    first, second = make_counter(1), make_counter(2)
    redirections = [redirect.Redirection(f, lambda f=f: f) for f in (first, second)]
    assert first() is first and second() is second
    for redirection in redirections:
        redirection.undo()
    assert (first(), second()) == (2, 3)


# ---- FSDP_C=1 ------------------------------------------------------------------------------------

CALL_ENTRY_POINT = "import fsdp_c_autoload; fsdp_c_autoload.autoload()\n"
PROBE = """
import json, os, sys
import torch
facts = {}
facts["after torch"] = sorted(n for n in sys.modules if n.startswith("fsdp_c"))
facts["finders"] = sum(type(f).__module__ == "fsdp_c_autoload.redirect" for f in sys.meta_path)
facts["torch imported torch.distributed.fsdp"] = "torch.distributed.fsdp" in sys.modules
from torch.distributed.fsdp import fully_shard, FSDPModule
facts["after fsdp"] = sorted(n for n in sys.modules if n.startswith("fsdp_c"))
import torch.nn as nn
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
module = fully_shard(nn.Linear(2, 2))
facts["state"] = type(fully_shard.state(module)).__module__
facts["FSDPModule"] = isinstance(module, FSDPModule)
import torch.distributed._composable.replicate_with_fsdp as late
facts["loader"] = type(late.__spec__.loader).__name__
from fsdp_c_autoload import redirect
facts["late"] = redirect.is_redirected(late.replicate)
print(json.dumps(facts))
"""


def run(*arguments: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that runs PROBE under a value of FSDP_C (None: unset).

    For None and 1, PROBE runs in a new interpreter, where the import of torch calls the entry
    point. For other values, a process that has imported torch calls the entry point, then PROBE.
    """
    folder = tmp_path_factory.mktemp("site")
    outcomes_by_value: dict[str | None, dict[str, Any]] = {}

    def facts(value: str | None) -> dict[str, Any]:
        if value not in outcomes_by_value:
            env = installed_environment(folder, **({} if value is None else {"FSDP_C": value}))
            if value in (None, "1"):
                completed = run("-c", PROBE, env=env, cwd=folder)
            else:
                completed = fork_server.run_code(CALL_ENTRY_POINT + PROBE, env=env, cwd=folder)
            assert completed.returncode == 0, completed.stderr
            outcomes_by_value[value] = json.loads(completed.stdout.splitlines()[-1])
        return outcomes_by_value[value]

    return facts


@pytest.mark.parametrize("value", [None, "0", "", "False"])
def test_fsdp_c_is_not_imported_if_environment_variable_is_unset_or_off(
    probe: Any, value: str | None
) -> None:
    facts = probe(value)
    assert facts["after torch"] == facts["after fsdp"] == ["fsdp_c_autoload"]
    assert facts["finders"] == 0
    assert facts["state"] == "torch.distributed.fsdp._fully_shard._fsdp_state"
    assert not facts["late"]


def test_off_values_of_fsdp_c_autoload_and_runtime_env_are_equal() -> None:
    assert fsdp_c_autoload.OFF == env_module.OFF


def test_environment_variable_imports_fsdp_c_at_the_first_call_of_fully_shard(probe: Any) -> None:
    facts = probe("1")
    assert facts["after torch"] == ["fsdp_c_autoload", "fsdp_c_autoload.redirect"]
    assert facts["after fsdp"] == facts["after torch"]
    assert facts["finders"] == 1
    assert not facts["torch imported torch.distributed.fsdp"]
    assert facts["state"] == "fsdp_c._runtime.state" and facts["FSDPModule"]
    assert facts["loader"] == "SourceFileLoader"  # not the loader of the import hook
    assert facts["late"]


@pytest.mark.parametrize("module", [fsdp_c_autoload, redirect], ids=lambda m: m.__name__)
def test_entry_point_modules_import_only_the_standard_library(module: ModuleType) -> None:
    """The new interpreter would find torch and fsdp_c, because PYTHONPATH has their folders."""
    code = f"import sys, {module.__name__}; print(*{{n.partition('.')[0] for n in sys.modules}})"
    folder = Path(str(fsdp_c_autoload.__file__)).parents[1]
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    completed = run("-S", "-c", code, env=environment, cwd=folder)
    found = set(completed.stdout.split()) - sys.stdlib_module_names - {"__main__"}
    assert found == {"fsdp_c_autoload"}, completed.stderr


# ---- python -m fsdp_c ----------------------------------------------------------------------------

FACTS = """
import json, os, pickle, sys
class Here: pass
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__,
    "main": main.__dict__ is globals(), "doc": __doc__, "package": __package__,
    "spec": __spec__ and __spec__.name, "cached": __cached__ and "set",
    "pickled": type(pickle.loads(pickle.dumps(Here()))) is Here,
    "loader": type(__loader__).__name__, "others": sorted(
        k for k in globals() if k not in ("json", "os", "pickle", "sys", "Here", "main")),
    "annotations": "__annotations__" in globals(),
}))
"""
PRINT_REDIRECTION = """
from torch.distributed.fsdp import fully_shard
import os
from fsdp_c_autoload import redirect
print(redirect.is_redirected(fully_shard), os.environ["FSDP_C"])
"""
SCRIPTS = {
    "facts.py": FACTS,
    "uses_fully_shard.py": PRINT_REDIRECTION,
    "raises.py": "def f(x):\n    return 1 / x\n\n\nf(0)\n",
    "chained.py": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e\n",
    "syntax.py": "print('never')\nx = = 2\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "exits_with_message.py": "raise SystemExit('a message')\n",
    "interrupted.py": "raise KeyboardInterrupt\n",
    "excepthook.py": (
        "import sys\nsys.excepthook = lambda k, e, t: print('hook', k)\nraise OSError\n"
    ),
    "package/__init__.py": "",
    "package/__main__.py": FACTS,
    "package/module.py": FACTS,
    "package/broken.py": "def f():\n    raise TypeError('t')\n\n\nf()\n",
    "folder/__main__.py": FACTS,
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    return folder


class Commands:
    """Runs ``python -m fsdp_c`` in the folder of the scripts."""

    def __init__(self, scripts: Path, folder: Path) -> None:
        self.scripts = scripts
        self.env = installed_environment(scripts)
        self._server = fork_server.ModuleServer("fsdp_c", folder, self.env)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._server.run(*arguments, env=self.env, cwd=self.scripts)


@pytest.fixture(scope="module")
def commands(scripts: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(scripts, tmp_path_factory.mktemp("server"))


def run_plain_and_fsdp_c(commands: Commands, *arguments: str) -> tuple[Any, Any]:
    """Runs a command line under plain python and under ``python -m fsdp_c``.

    Returns (status, stdout, lines of stderr) of each.
    """
    outcomes = []
    plain = run(*arguments, env=commands.env, cwd=commands.scripts)
    for completed in (plain, commands.run(*arguments)):
        # The frames of runpy in a traceback depend on the version of Python.
        lines = [line for line in completed.stderr.splitlines() if "<frozen runpy>" not in line]
        outcomes.append((completed.returncode, completed.stdout, lines))
    return outcomes[0], outcomes[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("facts.py", "-x", "a b"),
        ("-m", "package.module", "--flag"),
        ("-m", "package"),
        ("folder", "1"),
        ("raises.py",),
        ("chained.py",),
        ("syntax.py",),
        ("exits.py",),
        ("exits_with_message.py",),
        ("interrupted.py",),
        ("excepthook.py",),
        ("missing.py",),
        ("-m", "missing"),
        ("-m", "package.broken"),
    ],
    ids=" ".join,
)
def test_script_run_by_python_m_fsdp_c_behaves_as_under_plain_python(
    commands: Commands, arguments: tuple[str, ...]
) -> None:
    plain, with_fsdp_c = run_plain_and_fsdp_c(commands, *arguments)
    assert plain[0] != 0 or plain[1], "the script must print or fail: otherwise nothing is compared"
    assert with_fsdp_c == plain


def test_script_run_by_python_m_fsdp_c_and_its_children_use_fsdp_c(commands: Commands) -> None:
    arguments = ("-m", "fsdp_c", "uses_fully_shard.py")
    completed = run(*arguments, env=commands.env, cwd=commands.scripts)  # a new interpreter
    assert completed.stdout.split("\n")[0] == "True 1", completed.stderr


def test_python_m_fsdp_c_with_help_or_missing_script_prints_usage(commands: Commands) -> None:
    with_help, empty = commands.run("--help"), commands.run()
    assert (
        with_help.returncode == 0
        and with_help.stdout.startswith("usage: ")
        and with_help.stderr == ""
    )
    assert empty.returncode == 2 and empty.stderr == with_help.stdout


def test_python_m_fsdp_c_with_unknown_option_exits_with_usage(commands: Commands) -> None:
    completed = commands.run("--chek")
    assert completed.returncode == 2 and completed.stdout == ""
    assert completed.stderr.startswith("unknown option --chek: ")
    assert "\nusage: " in completed.stderr
