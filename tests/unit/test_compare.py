"""``python -m fsdp_c compare``: exit codes, reports and files of whole runs; processes that fail.

``compare_job.py`` is the script that the runs train. test_compare_observer.py tests the records.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fork_server
import forked_python
import pytest
from shell_commands import find_command

from fsdp_c._tools import compare, compare_report, compare_results, compare_runs
from fsdp_c._tools.compare_results import Comparison, Verdict, find_differences
from fsdp_c._tools.compare_runs import Exit, Run, find_first_failure

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("compare_job.py")


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def run(
    case: str, *options: str, ranks: int = 1, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Compares a case of compare_job.py, in one round of three steps unless ``options`` differ.

    This process is the supervisor: another one would import torch for two seconds.
    """
    arguments = ["--steps", "3", "--rounds", "1", "--nproc-per-node", str(ranks), *options]
    arguments += [str(JOB), case, *([] if folder is None else [str(folder)])]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
            code = compare.main(arguments)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the fork server start the processes of ``run``, because each imports torch.

    The order in which two of them end is not exact, so tests of that order start new processes.
    """

    def start_process(command: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> Any:
        observer, file = map(Path, command[-2:])
        settings = json.loads(file.read_text())
        # The process would exit at once if its parent were not the supervisor.
        file.write_text(json.dumps(settings | {"supervisor": fork_server.find_pid()}))
        return fork_server.start_script(observer, [str(file)], env, Path(stdout.name))

    replaced = SimpleNamespace(**vars(subprocess) | {"Popen": start_process})
    monkeypatch.setattr(compare_runs, "subprocess", replaced)


def last_line(completed: subprocess.CompletedProcess[str]) -> str:
    return completed.stdout.strip().splitlines()[-1]


# ---- equal and different numbers -----------------------------------------------------------------


def test_compare_of_equal_results_on_two_ranks_exits_0_with_table_json_and_picture(
    tmp_path: Path,
) -> None:
    json_file, picture = tmp_path / "result.json", tmp_path / "result.png"
    files = ("--json", str(json_file), "--plot", str(picture), "--logs", str(tmp_path / "logs"))
    words = find_command("compare").make_words(str(JOB), "equal", "{run}")
    place = words.index("compare") + 1
    words[place:place] = ["--steps", "3", "--rounds", "1", *files]
    completed = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert last_line(completed) == (
        "equal: losses, gradients and parameters of 3 steps have the same bits on 2 ranks"
    )
    rows = re.findall(r"^(\d)  +(\S+)  +(\S+)  +(\S+)  +(\S+)  +0 of 12  +0 of 12$",
                      completed.stdout, re.M)  # fmt: skip
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert all(row[1] == row[2] and row[3] == row[4] for row in rows)
    assert re.search(
        r"^ms per step \(median of 1\) +[\d.]+ +[\d.]+ +[\d.]+$", completed.stdout, re.M
    )
    assert re.search(r"^peak memory, MiB +[\d.]+ +[\d.]+ +[\d.]+$", completed.stdout, re.M)
    # Two blocks and the root: the root is gathered once, and a block in forward and backward.
    assert re.search(r"^collectives per step +8 +8 +1.00$", completed.stdout, re.M)
    result = json.loads(json_file.read_text())
    assert result["verdict"] == "equal" and result["ranks"] == 2 and result["steps"] == 3
    by_run = result["by_rank"][0]["runs"]
    uses_fsdp_c = {name: entry["uses_fsdp_c"] for name, entry in by_run.items()}
    assert uses_fsdp_c == {"torch-1": False, "fsdp_c-1": True}
    assert picture.read_bytes().startswith(b"\x89PNG")
    logs = (tmp_path / "logs" / "fsdp_c-1-rank1.log").read_text()
    assert "arguments equal fsdp_c-1" in logs and "trained to the end" not in logs


def test_compare_under_torchrun_prints_one_report_that_names_the_gradient_with_another_bit(
    tmp_path: Path,
) -> None:
    json_file = tmp_path / "result.json"
    command = [forked_python.make_program(), "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "fsdp_c", "compare", "--rounds", "1", "--steps", "2"]
    command += ["--json", str(json_file), str(JOB), "one_gradient_bit"]
    completed = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=280
    )
    # torchrun exits with status 1 after every failure.
    assert completed.returncode == 1, completed.stdout + completed.stderr
    found = re.findall(
        r"^different: the first difference is in step 2, rank 1: gradient of 'blocks.1.bias': ",
        completed.stdout,
        re.M,
    )
    assert len(found) == 1
    result = json.loads(json_file.read_text())
    expected = {"step": 2, "kind": "gradient", "name": "blocks.1.bias", "rank": 1}
    assert {key: result["first_difference"][key] for key in expected} == expected
    assert result["exit_code"] == 1
    assert "note: --rounds 2 also compares torch with itself" in completed.stdout
    assert re.search(r"^2 .* 1 of 12 +[01] of 12$", completed.stdout, re.M)


@pytest.mark.usefixtures("forked")
def test_compare_reports_a_different_loss_before_gradients() -> None:
    completed = run("scaled_loss")
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert re.match(
        r"different: the first difference is in step 2, rank 0: loss: torch (\S+), fsdp_c-1 (\S+)",
        last_line(completed),
    )


@pytest.mark.usefixtures("forked")
def test_compare_reports_a_script_with_random_numbers_as_inconclusive() -> None:
    completed = run("random_loss", "--rounds", "2")
    assert completed.returncode == 4, completed.stdout + completed.stderr
    assert (
        "note: the script does not repeat its own numbers under torch: step 2, " in completed.stdout
    )
    assert last_line(completed) == "inconclusive"


# ---- other ends of the script --------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
def test_compare_of_script_that_exits_before_the_last_step_succeeds() -> None:
    completed = run("exits_early")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "note: the script ended after 2 of 3 steps" in completed.stdout


def test_compare_of_script_that_fails_under_torch_exits_2_with_traceback_of_failed_rank() -> None:
    completed = run("raises", ranks=2)
    assert completed.returncode == 2
    assert "ValueError: raised by the script" in completed.stdout
    assert last_line(completed).endswith("the script fails under torch alone: torch-1, rank 1: "
                                    "exit code 1")  # fmt: skip


@pytest.mark.usefixtures("forked")
def test_compare_of_script_that_fails_only_under_fsdp_c_exits_with_status_3() -> None:
    completed = run("raises_under_fsdp_c")
    assert completed.returncode == 3
    assert "rank 0: " in completed.stdout and "ValueError: raised by the script" in completed.stdout
    assert "the script fails under fsdp_c only: fsdp_c-1, rank 0" in completed.stdout


def test_compare_ends_all_ranks_and_reports_a_killed_rank() -> None:
    completed = run("killed", ranks=2)
    assert completed.returncode == 2
    assert last_line(completed).endswith("torch-1, rank 1: killed by SIGKILL")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.usefixtures("forked")
def test_compare_ends_a_script_with_loader_workers_and_endless_thread(tmp_path: Path) -> None:
    completed = run("loader_workers_and_endless_thread", folder=tmp_path)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2 and not any(map(is_alive, pids))


@pytest.mark.usefixtures("forked")
def test_compare_stops_a_run_beyond_the_time_limit_with_stacks(tmp_path: Path) -> None:
    completed = run("hangs", "--timeout", "12", folder=tmp_path)
    assert completed.returncode == 2
    assert "in case_hangs" in completed.stdout
    assert last_line(completed).endswith("rank 0: still running after 12 s (--timeout)")


@pytest.mark.parametrize(
    ("number", "code", "ranks"),
    [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1), (signal.SIGKILL, -9, 1)],
)
def test_signal_to_compare_ends_all_its_processes(
    number: signal.Signals, code: int, ranks: int, tmp_path: Path
) -> None:
    script, output, errors = (tmp_path / name for name in ("main.py", "output", "errors"))
    script.write_text(fork_server.make_module_script("fsdp_c", ROOT))
    output.touch()
    errors.touch()
    arguments = ["compare", "--nproc-per-node", str(ranks), str(JOB), "hangs", str(tmp_path)]
    process = fork_server.start(
        ["--script", str(script), *arguments], environment(), output, errors=str(errors)
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("pid-?"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(30) == code, errors.read_text()
    assert "Traceback" not in errors.read_text()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-?")]
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == ranks and not any(map(is_alive, pids))


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a script or -m module is missing"),
        (["--steps", "0", "x.py"], "--steps: expected a number from 1, not '0'"),
        (["nowhere.py"], "can't open file 'nowhere.py': no such file"),
        (["--its", "x.py"], "unrecognized arguments: --its"),
        (["--timeout", "-1", str(JOB)], "--timeout: expected seconds above 0 and at"),
        (["--timeout", "inf", str(JOB)], "expected seconds above 0 and at most 1e+09, not inf"),
        (["--timeout", "1e10", str(JOB)], "at most 1e+09, not 1e+10"),
        (["--json", "/nowhere/x.json", str(JOB)], "cannot write '/nowhere/x.json': its folder"),
        (["--plot", str(ROOT), str(JOB)], f"cannot write '{ROOT}': it is a folder"),
        (["--logs", str(JOB), str(JOB)], f"File exists: '{JOB}'"),
        (["--logs", "/proc", str(JOB)], "'/proc/"),
        (["--seed", "-1", str(JOB)], "--seed: expected a number from 0 to 4294967295, not '-1'"),
        (["--seed", "4294967296", str(JOB)], "to 4294967295, not '4294967296'"),
    ],
)
def test_compare_with_wrong_arguments_exits_2_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        compare.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_compare_refuses_a_torchrun_option_in_a_process_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        compare.main(["--nproc-per-node", "2", str(JOB)])
    assert "give --nproc-per-node to torchrun" in capsys.readouterr().err


def test_rank_without_world_size_is_not_a_process_of_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    supervisor = compare_runs.Supervisor.connect(2)
    assert supervisor.ranks == [0, 1]
    variables = supervisor.make_environment(1)
    assert [variables[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["1", "1", "2"]


def test_options_of_compare_after_the_script_or_module_are_its_arguments() -> None:
    parser = compare._make_parser()
    options = parser.parse_args(["--steps", "2", str(JOB), "--steps", "9", "-m", "x"])
    job = compare._make_job(parser, options)
    assert job.arguments == (str(JOB), "--steps", "9", "-m", "x") and job.steps == 2
    options = parser.parse_args(["--rounds", "3", "-m", "package.module", "--rounds", "1"])
    job = compare._make_job(parser, options)
    assert job.arguments == ("package.module", "--rounds", "1") and job.as_module
    assert options.rounds == 3
    options = parser.parse_args(["--steps", "2", "--", str(JOB), "--", "x"])
    assert compare._make_job(parser, options).arguments == (str(JOB), "--", "x")


@pytest.mark.parametrize("option", ["--steps", "--seed"])
def test_compare_refuses_a_digit_that_is_no_decimal_number(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare._make_parser().parse_args([option, "²", str(JOB)])
    assert "expected a number" in capsys.readouterr().err


def test_help_of_compare_lists_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        compare.main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    codes = [*(verdict.value for verdict in Verdict), "130, 143"]
    assert all(re.search(rf"^  {code}  ", text, re.M) for code in codes)


# ---- differences between records -----------------------------------------------------------------


def make_record(step: int, optimizer: int = 0, **values: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "step": step,
        "optimizer": optimizer,
        "seconds": 0.1 * step,
        "losses": [[0.5, "a"]],
        "gradients": [["w", "b", 4.0, 1], ["v", "None", 0.0, 1]],
        "parameters": [["w", "c"], ["v", "d"]],
        "peak_memory": 2**20 * step,
        "peak_device_memory": 0,
        "uses_fsdp_c": False,
        "collectives": None,
    }
    return record | values


def list_differences(left: list[Any], right: list[Any]) -> list[tuple[Any, ...]]:
    return [(d.step, d.kind, d.name) for d in find_differences(left, right, 0, "fsdp_c-1")]


@pytest.mark.parametrize(
    ("values", "kind", "name"),
    [
        ({"losses": [[0.5, "z"]]}, "loss", "0"),
        ({"losses": []}, "loss", "0"),
        ({"losses": [[0.5, "a"], [0.5, "a"]]}, "loss", "1"),
        ({"gradients": [["w", "z", 4.0, 1], ["v", "None", 0.0, 1]]}, "gradient", "w"),
        ({"gradients": [["w", "b", 4.0, 1], ["v", "b", 4.0, 1]]}, "gradient", "v"),
        ({"gradients": [["w", "b", 4.0, 1]]}, "gradient", "v"),
        ({"parameters": [["w", "c"], ["v", "z"]]}, "parameter", "v"),
    ],
)
def test_compare_finds_a_difference_of_each_kind(
    values: dict[str, Any], kind: str, name: str
) -> None:
    left = [make_record(1), make_record(2)]
    assert list_differences(left, [make_record(1), make_record(2)]) == []
    assert list_differences(left, [make_record(1), make_record(2, **values)]) == [(2, kind, name)]


def test_missing_or_reordered_step_ends_the_comparison_of_two_runs() -> None:
    left = [make_record(1), make_record(2), make_record(3)]
    sequence = "sequence of steps"
    assert list_differences(left, left[:2]) == [(3, sequence, "")]
    assert list_differences(left[:2], left) == [(3, sequence, "")]
    swapped = [left[0], make_record(1, optimizer=1), *left[1:]]
    assert list_differences(left, swapped) == [(1, sequence, "")]


def compare_records(*runs: list[Any]) -> Comparison:
    """Compares runs of one rank: torch-1, fsdp_c-1, torch-2 and so on."""
    names = ("torch", "fsdp_c")
    pairs = [(Run(i, i // 2 + 1, names[i % 2]), records) for i, records in enumerate(runs)]
    for run_, records in pairs:
        records[:] = [r | {"uses_fsdp_c": run_.implementation == "fsdp_c"} for r in records]
    summary = compare_results.summarize_rank(0, pairs)
    return Comparison([run_ for run_, _ in pairs], [json.loads(json.dumps(summary))], 3)


def three_steps(**changes: Any) -> list[Any]:
    """Returns the records of three steps. ``s2={...}`` changes values of step 2."""
    return [make_record(step, **changes.get(f"s{step}", {})) for step in (1, 2, 3)]


OTHER_LOSS = {"losses": [[0.25, "z"]]}


def test_difference_before_torch_differs_from_itself_is_attributed_to_fsdp_c() -> None:
    result = compare_records(
        three_steps(), three_steps(s1=OTHER_LOSS), three_steps(s2=OTHER_LOSS), three_steps()
    )
    assert result.verdict is Verdict.DIFFERENT
    assert [d.step for d in result.differences] == [1]
    assert "fsdp_c did not differ in every round" in result.notes


def test_difference_after_torch_differs_from_itself_is_not_attributed_to_fsdp_c() -> None:
    result = compare_records(
        three_steps(), three_steps(s2=OTHER_LOSS), three_steps(s2=OTHER_LOSS), three_steps()
    )
    assert result.verdict is Verdict.INCONCLUSIVE and result.differences == []


def test_compare_finds_a_difference_in_the_second_round_only() -> None:
    result = compare_records(
        three_steps(), three_steps(), three_steps(), three_steps(s3=OTHER_LOSS)
    )
    assert result.verdict is Verdict.DIFFERENT
    assert [d.run for d in result.differences] == ["fsdp_c-2"]


def test_compare_without_steps_or_with_one_implementation_only_is_inconclusive() -> None:
    result = compare_records([], [])
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.notes == ["the script made no optimizer step, so nothing was compared"]
    pairs = [
        (Run(0, 1, "torch"), three_steps()),
        (Run(1, 1, "fsdp_c"), three_steps(s2=OTHER_LOSS)),
    ]
    summary = compare_results.summarize_rank(0, pairs)
    result = Comparison([run_ for run_, _ in pairs], [summary], 3)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.notes[0].startswith("fsdp_c ran no module: the script calls neither fully_shard")
    for records in (pairs[0][1], pairs[1][1]):
        records[:] = [record | {"uses_fsdp_c": True} for record in records]
    summary = compare_results.summarize_rank(0, pairs)
    result = Comparison([run_ for run_, _ in pairs], [summary], 3)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.notes[0].startswith("the script shards with fsdp_c itself")


def test_compare_of_run_without_steps_under_fsdp_c_reports_a_difference() -> None:
    result = compare_records(three_steps(), [])
    assert result.verdict is Verdict.DIFFERENT
    assert result.notes == ["--rounds 2 also compares torch with itself"]


def test_compare_draws_a_plot_of_runs_without_steps() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots()
    compare_report._draw_differences(axes, compare_records([], []))
    pyplot.close(figure)


def test_name_nonfinite_replaces_nonfinite_numbers_by_strings() -> None:
    value = {"losses": [1.5, float("nan"), (float("inf"), -float("inf"))], "steps": 3}
    named = compare_report._name_nonfinite(value)
    assert json.loads(json.dumps(named, allow_nan=False)) == {
        "losses": [1.5, "nan", ["inf", "-inf"]],
        "steps": 3,
    }


def test_compare_mean_of_losses_that_diverge_to_both_infinities_is_nan() -> None:
    losses = {"losses": [[float("inf"), "a"], [float("-inf"), "b"]]}
    result = compare_records(three_steps(s2=losses), three_steps(s2=losses))
    assert math.isnan(result.compute_mean_loss("torch-1", 2))  # type: ignore[arg-type]
    assert result.verdict is Verdict.EQUAL and compare_report.format_report((), result)


def test_compare_describes_a_rank_that_a_real_time_signal_ended(tmp_path: Path) -> None:
    child: Any = SimpleNamespace(process=SimpleNamespace(returncode=-40), record=tmp_path / "none")
    assert compare_runs.describe_end(child) == "killed by signal 40"
    child.process.returncode = -signal.SIGKILL
    assert compare_runs.describe_end(child) == "killed by SIGKILL"


def test_compare_times_neither_the_first_nor_the_profiled_step() -> None:
    result = compare_records(three_steps(), three_steps(), three_steps(), three_steps())
    assert result.list_step_seconds("torch") == [[pytest.approx(0.3)], pytest.approx([0.2, 0.3])]
    assert result.find_peak_memory("torch") == 3 * 2**20


def test_compare_reports_the_rank_that_failed_first_before_stopped_ranks() -> None:
    ends = [
        Exit(0, "stopped", order=1, is_secondary=True),
        Exit(1, "exit code 1", order=3),
        Exit(2, "killed by SIGKILL", order=2),
        Exit(3, ""),
    ]
    found = find_first_failure(ends)
    assert found is not None and found.rank == 2
    assert find_first_failure([Exit(0, "")]) is None
