"""Unmodified libraries on two or four ranks, with and without ``FSDP_C=1``: equal bits and files.

torchrun runs each script twice, with all selected cases in one job. The runs differ only in
``FSDP_C=1`` in the environment of the second one. The scripts do not import fsdp_c.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from client_compare import differences
from site_dir import installed_environment

HERE = Path(__file__).parent
OUTPUT_CHARACTERS = 8000
"""Maximum number of characters at the end of a failed launch's output that are shown."""


@dataclass(frozen=True)
class Client:
    """A script, the cases to run, and the number of ranks."""

    script: str
    cases: tuple[str, ...]
    ranks: int = 2
    timeout: float = 400.0


CLIENTS: dict[str, Client] = {
    "pipelining": Client(
        "client_pipelining.py",
        (
            "gpipe",
            "1f1b",
            "1f1b_bf16_keep",
            "looped_bfs",
            "interleaved_1f1b",
            "interleaved_zero_bubble",
            "zbv_zero_bubble",
            "dualpipev",
        ),
        ranks=4,
    ),
    "checkpoint": Client(
        "client_checkpoint.py", ("sharded", "async", "full", "options", "formats")
    ),
    "accelerate": Client(
        "client_accelerate.py",
        (
            "plain",
            "tied",
            "accumulation",
            "no_sync",
            "no_reshard",
            "no_wrap",
            "sharded_checkpoint",
            "full_checkpoint",
            "activation_checkpointing",
            "bf16",
            "fp16",
            "ram_efficient",
            "ram_efficient_tied",
            "ignored",
            "compile",
            "compile_regions",
        ),
    ),
    "accelerate4": Client("client_accelerate.py", ("hybrid",), ranks=4),
    "transformers": Client(
        "client_transformers.py",
        (
            "train",
            "tied",
            "bf16",
            "activation_checkpointing",
            "compile",
            "resume_full",
            "resume_sharded",
            "lora",
            "lora_resume",
            "lora_bf16",
            "generate",
            "sharded_at_load",
        ),
    ),
    "lightning": Client(
        "client_lightning.py",
        (
            "fabric",
            "fabric_empty",
            "fabric_bf16",
            "fabric_no_sync",
            "fabric_shards",
            "fabric_full",
            "trainer",
            "trainer_accumulation",
            "trainer_bf16_compile",
            "trainer_resume_shards",
            "trainer_resume_full",
        ),
    ),
    "lightning4": Client("client_lightning.py", ("fabric_tensor_parallel",), ranks=4),
    "trl": Client(
        "client_trl.py", ("sft", "sft_packed_bf16", "sft_completions", "sft_lora", "dpo")
    ),
    "torchao": Client(
        "client_torchao.py",
        (
            "float8",
            "float8_precomputed",
            "float8_no_reshard",
            "int8_mixed",
            "int8_mixed_module",
            "int8_weights",
            "bitnet",
            "bitnet_precomputed",
            "nf4",
            "nf4_no_reshard",
            "adamw8bit",
            "adamw8bit_uneven",
            "adamw4bit",
            "adamwfp8",
        ),
    ),
}

PARAMETERS = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, client in CLIENTS.items()
    for case in client.cases
]


class Launches:
    """Runs each script twice on first use and keeps the folders of both runs."""

    def __init__(self, base: Path, selected: dict[str, list[str]]) -> None:
        self.base = base
        self.selected = selected
        self.folders: dict[tuple[str, bool], Path] = {}

    def folder(self, name: str, use_fsdp_c: bool) -> Path:
        """Returns the folder with the cases of client ``name``, run under one implementation."""
        if (name, use_fsdp_c) not in self.folders:
            # Both runs use the same path, because libraries write it into their files.
            job = self.base / name / "job"
            job.mkdir(parents=True)
            self._launch(name, use_fsdp_c, job)
            self.folders[name, use_fsdp_c] = job.rename(
                job.with_name("fsdp_c" if use_fsdp_c else "torch")
            )
        return self.folders[name, use_fsdp_c]

    def _launch(self, name: str, use_fsdp_c: bool, folder: Path) -> None:
        client = CLIENTS[name]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(client.ranks), str(HERE / client.script)]
        command += [str(folder), *self.selected[name]]
        site = self.base / "site"
        site.mkdir(exist_ok=True)
        extra = {"FSDP_C": "1"} if use_fsdp_c else {}
        # Some libraries write sets of names to files, in an order that depends on the hash seed.
        extra["PYTHONHASHSEED"] = "0"
        environment = installed_environment(site, OMP_NUM_THREADS="1", **extra)
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(client.timeout)
            except subprocess.TimeoutExpired:
                output.write(b"\nstopped at the time limit\n")
            finally:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates torchrun, which stops its workers on SIGTERM; kills the group after 20 s."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "client" in callspec.params:
            selected.setdefault(callspec.params["client"], []).append(callspec.params["case"])
    return Launches(tmp_path_factory.mktemp("clients"), selected)


def reports(folder: Path, case: str, ranks: int) -> list[dict[str, Any]]:
    """Returns the reports of all ranks. Fails with the ranks' errors if a report is missing."""
    paths = [folder / case / f"rank{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        errors = sorted((folder / case).glob("*.error.txt")) or [folder / "output.txt"]
        texts = [
            f"{path.name}:\n{path.read_text(errors='replace')[-OUTPUT_CHARACTERS:]}"
            for path in errors
        ]
        pytest.fail(f"{folder.name}, {case}\n" + "\n".join(texts), pytrace=False)
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("client", "case"), PARAMETERS)
def test_client_results_with_fsdp_c_match_torch(launches: Launches, client: str, case: str) -> None:
    ranks = CLIENTS[client].ranks
    folders = {use_fsdp_c: launches.folder(client, use_fsdp_c) for use_fsdp_c in (False, True)}
    torch_reports, fsdp_c_reports = (
        reports(folders[use_fsdp_c], case, ranks) for use_fsdp_c in (False, True)
    )
    for report in torch_reports:
        assert all(name.startswith("torch.distributed.") for name in report["states"])
    for report in fsdp_c_reports:
        assert all(name.startswith("fsdp_c") for name in report["states"])
    for rank, (from_torch, from_fsdp_c) in enumerate(zip(torch_reports, fsdp_c_reports)):
        labels = [label for label, _ in from_torch["entries"]]
        assert labels == [label for label, _ in from_fsdp_c["entries"]], f"rank {rank}"
        pairs = zip(labels, from_torch["entries"], from_fsdp_c["entries"])
        mismatches = [
            f"{label}: {torch_entry[1]} {fsdp_c_entry[1]}"
            for label, torch_entry, fsdp_c_entry in pairs
            if torch_entry != fsdp_c_entry
        ]
        assert not mismatches, f"rank {rank}: " + "\n".join(mismatches[:20])
    mismatches = list(differences(folders[False] / case / "files", folders[True] / case / "files"))
    assert not mismatches, "\n".join(mismatches[:20])
