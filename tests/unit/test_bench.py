"""benchmarks/bench.py writes a report, and benchmarks/meter.py measures memory, faults and time."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fork_server
import forked_python
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.mark.timeout(1500)  # other tests may use the cores, too
@pytest.mark.xdist_group("benchmark")  # begins before shorter tests
def test_quick_benchmark_writes_tables_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "report.md"
    program = forked_python.make_program()
    command = [program, "benchmarks/bench.py", "--quick", "--out", str(out)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert completed.returncode == 0, (completed.stdout + completed.stderr)[-3000:]
    text = out.read_text()
    assert json.loads((tmp_path / "report" / "host.json").read_text())["quick"] is True
    for line in ("- machine: ", "- load (", "- date: ", "python benchmarks/steps.py"):
        assert line in text
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert len(pictures) == 4
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG"), name
    for name in ("bare", "ddp", "torch", "fsdp_c"):
        rows = re.findall(rf"^\| {name} \|(.+)\|$", text, re.M)
        assert len(rows) == 2, "expected one row without and one with the optimizer"
        wall, ratio, *_ = (float(cell) for cell in rows[0].split("|"))
        assert wall > 0 and (ratio == 1.0 or name != "fsdp_c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--quick", "--only", "memory", "--out", "report.md"],
            "--quick does not run memory, only",
        ),
        (["--quick", "--out", "report"], "--out report needs a suffix: report.md"),
        (["--out", "report.md"], "FSDP_C_CUDA_PYTHON=/missing/python is not a program"),
    ],
)
def test_bench_rejects_wrong_options_before_it_writes(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    env = os.environ | {"FSDP_C_CUDA_PYTHON": "/missing/python"}
    script = ROOT / "benchmarks/bench.py"
    completed = fork_server.run_script(script, *arguments, env=env, cwd=tmp_path)
    assert completed.returncode == 2
    assert message in completed.stderr
    assert not list(tmp_path.iterdir())


def test_cuda_benchmark_runs_with_the_newest_environment_that_has_fsdp_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import bench

    monkeypatch.delenv("FSDP_C_CUDA_PYTHON", raising=False)
    monkeypatch.setenv("RELEASES_DIR", str(tmp_path))
    assert bench.find_python("cuda_steps") == ""
    for release, status in (("2.12.1", 0), ("2.14.1", 0), ("2.15.0", 1)):
        python = tmp_path / f"torch-{release}/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\nexit {status}\n")
        python.chmod(0o755)
        (tmp_path / f"torch-{release}/.fsdp_c-env").touch()
    assert bench.find_python("cuda_steps") == str(tmp_path / "torch-2.14.1/bin/python")
    monkeypatch.setenv("FSDP_C_CUDA_PYTHON", "python of a CUDA build")
    assert bench.find_python("cuda_steps") == "python of a CUDA build"
    assert bench.find_python("steps") == sys.executable


def test_benchmark_report_after_a_failed_benchmark_has_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import bench

    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "clip.py").write_text("raise SystemExit(3)")
    (tmp_path / "scripts" / "load.py").write_text(
        "import sys; print('a table'); open(sys.argv[2], 'w').write('{}')"
    )
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "clip.json").write_text("{}")
    out = tmp_path / "report.md"
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "scripts")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "clip", "load", "--out", str(out)])
    with pytest.raises(SystemExit, match="clip: exit status 3"):
        bench.main()
    assert "The benchmark failed: exit status 3." in out.read_text()
    assert "a table" in out.read_text()
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["load.json"]


def test_benchmark_meter_measures_memory_page_faults_and_time_of_allocation() -> None:
    import meter
    import torch

    meter.release_free_memory()
    started = meter.Meter()
    torch.ones(32 * meter.MIB, dtype=torch.uint8)
    cost = started.read()
    assert cost.wall > 0 and cost.cpu > 0
    if cost.peak is not None:  # None where the kernel does not allow a reset of the peak
        assert 31 < cost.peak < 64
        assert cost.faults > 0


def test_memory_sampler_that_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    import meter

    monkeypatch.setattr(meter, "_SAMPLER_SCRIPT", "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="the sampler ended with exit code 3"):
        meter.sample_memory_over_time(lambda: None)


def test_units_benchmark_ends_if_a_measured_peak_is_not_positive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.nn as nn
    import units

    measured = units.MeasuredModel.__new__(units.MeasuredModel)
    measured.model, measured.unit = nn.Sequential(nn.Linear(2, 2)), 16
    measured.bytes_before_step = 2**60  # as if the step freed memory of an earlier model
    monkeypatch.setattr(units, "reset_peak", lambda: True)
    with pytest.raises(SystemExit, match="the peak is -"):
        measured._measure_peak(lambda: None)


@pytest.mark.parametrize("option", [["--json", "out.json"], ["--json=out.json"]])
def test_recorded_command_omits_the_json_option(option: list[str]) -> None:
    import report

    found = report.format_command("/x/steps.py", ["--size", "8", *option, "a b"])
    assert found == 'python benchmarks/steps.py --size 8 "a b"'


def test_recorded_command_names_variables_of_fsdp_c(tmp_path: Path) -> None:
    code = "import report; report.write_json('out.json', 'x', {})"
    variables = {"FSDP_C_GUARD": "off", "FSDP_C_BENCH_STORE": "/tmp/store"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FSDP_C")}
    env = kept | variables | {"PYTHONPATH": str(ROOT / "benchmarks")}
    completed = fork_server.run_code(code, env, cwd=tmp_path)
    assert completed.returncode == 0, completed.stderr
    command = json.loads((tmp_path / "out.json").read_text())["command"]
    assert command.startswith("FSDP_C_GUARD=off python ")


def test_benchmark_with_redirected_torch_exits_with_error() -> None:
    code = "import fsdp_c; fsdp_c.install(); import report"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    completed = fork_server.run_code(code, env)
    assert completed.returncode == 1
    assert "so torch cannot be measured: unset FSDP_C\n" in completed.stderr


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_take_turns_gives_each_name_the_first_and_last_turn_equally_often(count: int) -> None:
    import ranks

    names = "abcde"[:count]
    turns = "".join(ranks.take_turns(names, 2 * count))
    rounds = [turns[i : i + count] for i in range(0, len(turns), count)]
    assert len(rounds) == 2 * count and all(sorted(r) == list(names) for r in rounds)
    assert sorted(r[0] for r in rounds) == sorted(r[-1] for r in rounds) == sorted(2 * names)


RANK_SCRIPT = """
import os, signal, sys
import ranks
if ranks.start_ranks(2):
    os.write(1, b"started\\n")  # one write, so that the lines of two ranks cannot mix
    ranks.dist.barrier()
    if os.environ["RANK"] == "1" and sys.argv[1:] == ["fail"]:
        os._exit(3)
    signal.pause()
"""


@pytest.mark.parametrize("arguments", [["fail"], []], ids=["rank fails", "SIGTERM"])
def test_benchmark_ranks_end_with_a_failed_rank_and_with_their_launcher(
    arguments: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK_SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    command = [forked_python.make_program(), str(script), *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(2)]
        if lines != ["started\n"] * 2:
            launcher.terminate()
        assert lines == ["started\n"] * 2
        if not arguments:
            launcher.terminate()
        # Ends when all ranks have closed their output. The limit of collectives is 120 seconds.
        assert launcher.communicate(timeout=90)[0] == ""
    assert launcher.returncode == (1 if arguments else 143)


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5"])
def test_benchmark_option_that_is_not_a_positive_integer_is_refused(text: str) -> None:
    import ranks

    for parse in (ranks.parse_positive, ranks.parse_tens):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a positive integer"):
            parse(text)


def test_parse_tens_accepts_only_multiples_of_10() -> None:
    import ranks

    with pytest.raises(argparse.ArgumentTypeError, match="15 is not a multiple of 10"):
        ranks.parse_tens("15")
    assert ranks.parse_tens("20") == 20


def test_plan_benchmark_without_a_matching_job_exits_with_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import plan

    monkeypatch.setattr(sys, "argv", ["plan.py", "--only", "nosuch"])
    with pytest.raises(SystemExit) as failed:
        plan.main()
    assert failed.value.code == 2


def test_pictures_script_draws_a_pair_of_bars_per_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    costs = {name: {"without": {"wall": wall}} for name, wall in (("torch", 20.0), ("fsdp_c", 5.0))}
    models = {kind: {"title": f"{kind} model", "costs": costs} for kind in ("small", "deep")}
    source, target = tmp_path / "steps.json", tmp_path / "images" / "steps.svg"
    source.write_text(json.dumps({"models": models}))
    command = [sys.executable, "benchmarks/pictures.py", str(source), str(target)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    text = target.read_text()
    for label in ("small model", "deep model", "fsdp_c", "torch's FSDP2"):
        assert f"<!-- {label} -->" in text
    assert text.count("<!--  20 ms -->") == text.count("<!--  5 ms -->") == 2
