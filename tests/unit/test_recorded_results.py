"""The figures of README.md, docs/benchmarks.md and the picture are those of the recorded JSON."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import result_goals  # noqa: E402
import result_releases  # noqa: E402
import result_tables  # noqa: E402

README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"


def read_main() -> dict[str, Any]:
    return result_tables.read_results(result_tables.MAIN)


def copy_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets the tables be made from a copy of the results. Returns the copied main folder."""
    shutil.copytree(result_tables.RESULTS, tmp_path / "results")
    main = tmp_path / "results" / result_tables.MAIN.name
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(result_tables, "MAIN", main)
    monkeypatch.setattr(result_tables, "pending", {})
    return main


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("document", [README, PAGE], ids=["README", "benchmarks"])
def test_figures_of_document_are_the_recorded_ones(document: Path) -> None:
    assert document in result_tables.DOCUMENTS
    updated = result_tables.insert_tables(document)
    assert document.read_text() == updated, "run python benchmarks/result_tables.py"


@pytest.mark.parametrize("document", [README, PAGE], ids=["README", "benchmarks"])
def test_changed_benchmark_result_makes_document_out_of_date(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = copy_results(tmp_path, monkeypatch)
    models = json.loads((main / "steps.json").read_text())["models"]
    models["medium"]["costs"]["fsdp_c"]["without"]["wall"] *= 2
    edit(main / "steps.json", models=models)
    assert result_tables.insert_tables(document) != document.read_text()


def test_readme_refuses_results_of_two_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = copy_results(tmp_path, monkeypatch)
    edit(main / "host.json", date="2020-01-01")
    with pytest.raises(SystemExit, match="one machine, day and torch release"):
        result_tables.insert_tables(README)


def test_update_of_document_without_table_markers_exits_with_error(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("# fsdp_c\n")
    with pytest.raises(SystemExit, match=r"README\.md lacks"):
        result_tables.insert_tables(document)


def test_picture_of_readme_has_the_recorded_benchmark_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import pictures
    import record_results

    pictures.draw_overview(read_main()["steps"], tmp_path / "steps.svg")
    recorded, drawn = (
        re.findall(r"<!-- (.*?) -->", path.read_text(), re.S)
        for path in (record_results.PICTURE, tmp_path / "steps.svg")
    )
    assert recorded == drawn, "run make bench-record"
    assert sum(label.endswith(" ms") for label in drawn) == 8


def test_recorded_benchmark_results_omit_memory_samples_and_round_floats() -> None:
    pytest.importorskip("matplotlib")
    import record_results

    data = {
        "json": "/tmp/x.json",
        "memory": {"torch": [[0.0, 1.0]]},
        "models": {"memory": {"torch": {"forward": 1.23456789}}},
        "ms": [12345.678, 2],
    }
    assert record_results.shorten(data) == {
        "models": {"memory": {"torch": {"forward": 1.2346}}},
        "ms": [12346.0, 2],
    }


def test_folder_of_recorded_benchmark_results_has_the_name_of_the_torch_release() -> None:
    pytest.importorskip("matplotlib")
    import record_results

    assert record_results.find_folder({"torch": "2.15.0+cu132"}).name == "torch-2.15"


def test_benchmark_results_without_machine_and_date_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import record_results

    source = tmp_path / "host.json"
    source.write_text(json.dumps({"benchmark": "host", "torch": "2.13.0"}))
    monkeypatch.setattr(sys, "argv", ["record_results.py", str(source)])
    with pytest.raises(SystemExit, match="has no command, date, commit, machine, load, python: "):
        record_results.main()


def test_results_of_a_quick_benchmark_run_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import record_results

    source = tmp_path / "steps.json"
    source.write_text(json.dumps(read_main()["steps"] | {"quick": True}))
    monkeypatch.setattr(sys, "argv", ["record_results.py", str(source)])
    with pytest.raises(SystemExit, match=r"is of bench\.py --quick"):
        record_results.main()


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["steps.json"], "one machine, day and torch release"),
        (["steps.json", "missing.json"], "missing.json does not exist: run make bench first"),
    ],
    ids=["host.json is older", "a file is missing"],
)
def test_recording_of_benchmarks_that_fails_writes_nothing(
    sources: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import record_results

    main = copy_results(tmp_path, monkeypatch)
    before = (main / "steps.json").read_text()
    (tmp_path / "steps.json").write_text(json.dumps(json.loads(before) | {"date": "2099-01-01"}))
    monkeypatch.setattr(sys, "argv", ["record_results.py", *(str(tmp_path / s) for s in sources)])
    with pytest.raises(SystemExit, match=message):
        record_results.main()
    assert (main / "steps.json").read_text() == before


def test_recording_of_benchmarks_writes_results_picture_and_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    import record_results

    copy_results(tmp_path, monkeypatch)
    page = tmp_path / "benchmarks.md"
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(result_tables, "DOCUMENTS", (page,))
    monkeypatch.setattr(record_results, "PICTURE", tmp_path / "images" / "steps.svg")
    source = tmp_path / "host.json"
    source.write_text(json.dumps(read_main()["host"] | {"torch": "2.99.0", "commit": "0123abc"}))
    monkeypatch.setattr(sys, "argv", ["record_results.py", str(source)])
    record_results.main()
    assert (
        json.loads((tmp_path / "results/torch-2.99/host.json").read_text())["commit"] == "0123abc"
    )
    assert "## torch 2.13 beside torch 2.99" in page.read_text()
    assert (tmp_path / "images" / "steps.svg").is_file()


def test_benchmark_goal_without_a_recorded_value_is_shown_as_not_measured() -> None:
    rows = {row[0]: row[2:] for row in result_goals.make_rows({})}
    assert len(rows) == len(result_goals.GOALS)
    assert set(map(tuple, rows.values())) == {("not measured", "-")}


def test_benchmarks_page_prefers_the_results_of_the_main_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = copy_results(tmp_path, monkeypatch)
    other = tmp_path / "results" / result_tables.CUDA.name / "cuda_steps.json"
    assert result_tables.select_results()["cuda_steps"] == json.loads(other.read_text())
    shutil.copy(other, main / "cuda_steps.json")
    edit(main / "cuda_steps.json", commit="0123abc")
    assert result_tables.select_results()["cuda_steps"]["commit"] == "0123abc"


def test_result_tables_rejects_unknown_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["result_tables.py", "--chek"])
    with pytest.raises(SystemExit) as failed:
        result_tables.main()
    assert failed.value.code == 2


def test_results_of_gpu_check_become_tables() -> None:
    pytest.importorskip("matplotlib")
    import record_results

    step = {"verdict": "PASS", "seconds": 2.5, "line": "done"}
    gpu = {"name": "GPU", "driver_version": "1"}
    facts = {"gpu": gpu, "cpus": 4, "date": "2026-01-02", "commit": "abc", "torch": "2.11.0"}
    pairs = {"torch": 3.0, "fsdp_c": 1.5}
    peaks = {"torch": 2**30, "fsdp_c": 2**29}
    kernels = {"pack": {"tb_per_s": 2.0, "of_memcpy": 0.9, "torch_of_memcpy": 0.6}}
    data = {
        "facts": step | facts | {"python": "3.12.3", "packages": {}},
        "races": step | {"digests": {"plain": {}}},
        "bandwidth": step | {"memcpy_tb_per_s": 2.5, "kernels": kernels},
        "host": step | {"us_per_group_step": {"fp32 cpu": pairs}},
        "gpt": step | {"sizes": {"small": {"ms": pairs, "peak_bytes": peaks, "losses": {}}}},
    }
    recorded = record_results.convert_gpu_check(data)
    assert not [key for key in record_results.REQUIRED if key not in recorded]
    assert recorded["steps"]["races"] == step and "races" not in recorded
    lines = list(result_tables.format_gpu(recorded))
    assert "| `races` | PASS | 2.50 | done |" in lines
    assert "| `gpt` | PASS | 2.50 | below |" in lines
    assert "| small | 3.00 | 1.50 | 2.00 | 1.00 | 0.50 |" in lines
    assert "| fp32 cpu | 3.00 | 1.50 | 2.00 |" in lines
    assert "| pack | 2.00 | 0.90 | 0.60 |" in lines


def make_other_release(**values: Any) -> dict[str, Any]:
    other = copy.deepcopy(read_main())
    for data in other.values():
        data.update(torch="2.99.0", **values)
    return other


def test_benchmark_table_of_two_torch_releases_has_columns_of_both() -> None:
    main = read_main()
    names = [name for name in result_releases.COMPARED if name in main]
    for name in names:
        main[name].update(date="2026-01-02", machine="one machine")
    other = make_other_release(date="2026-01-02", machine="one machine")
    titles, rows, origin = result_releases.make_table(main, other)
    assert [title for title in titles if title.startswith("torch")] == [
        f"torch {main['host']['torch']}",
        "torch 2.99.0",
    ]
    assert origin.startswith("2026-01-02. Machine: ")
    by_title = {row[0]: row[1:] for row in rows}
    time = by_title["host time, fp32, 9 parameters, us"]
    values = main["host"]["fp32"]["us_per_group_step"]["9"]
    pair = [values["torch"], values["fsdp_c"], values["torch"] / values["fsdp_c"]]
    assert time == [*pair, *pair]
    assert len(rows) >= len(names)


@pytest.mark.parametrize("key", ["date", "machine"])
def test_benchmark_results_of_another_day_or_machine_are_not_compared(key: str) -> None:
    main = read_main()
    assert result_releases.make_table(main, make_other_release(**{key: "another"})) == ([], [], "")


def test_benchmark_results_of_the_last_day_only_are_compared() -> None:
    main, other = read_main(), make_other_release()
    for results in (main, other):
        for name in ("host", "steps", "units", "optim"):
            results[name]["date"] = "2026-01-01" if name != "units" else "2026-01-02"
        results.pop("cold", None)
    assert result_releases.find_comparable(main, other) == ["units"]


def test_find_comparable_omits_only_the_benchmark_with_another_date() -> None:
    main, other = read_main(), make_other_release()
    for results in (main, other):
        for data in results.values():
            data.update(date="2026-01-01", machine="one machine")
    other["host"]["date"] = "2026-01-02"
    expected = [name for name in result_releases.COMPARED if name in main and name != "host"]
    assert expected and result_releases.find_comparable(main, other) == expected
