"""Unchanged libraries on two ranks or more, with and without ``FSDP_C=1``: the same to the bit.

Each script is run twice, all wanted cases in one go, as torchrun would run any job; the second time
with ``FSDP_C=1`` in the environment and nothing else different. The scripts import nothing of ours.
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
SHOWN = 8000
"""Characters of a failed launch's output that are shown (the end of it)."""


@dataclass(frozen=True)
class Client:
    """A script, the cases it is to run, and on how many ranks."""

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
    """Runs each script twice, when it is first asked for, and keeps the folders."""

    def __init__(self, base: Path, wanted: dict[str, list[str]]) -> None:
        self.base = base
        self.wanted = wanted
        self.folders: dict[tuple[str, bool], Path] = {}

    def folder(self, name: str, ours: bool) -> Path:
        """Where the run of client ``name`` left its cases."""
        if (name, ours) not in self.folders:
            # Both run in a folder of the same name: libraries write it into their files.
            job = self.base / name / "job"
            job.mkdir(parents=True)
            self._launch(name, ours, job)
            self.folders[name, ours] = job.rename(job.with_name("fsdp_c" if ours else "torch"))
        return self.folders[name, ours]

    def _launch(self, name: str, ours: bool, folder: Path) -> None:
        client = CLIENTS[name]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(client.ranks), str(HERE / client.script)]
        command += [str(folder), *self.wanted[name]]
        site = self.base / "site"
        site.mkdir(exist_ok=True)
        extra = {"FSDP_C": "1"} if ours else {}
        # Some libraries write sets of names into their files, in the order of their hashes.
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
                output.write(b"\nstopped: out of time\n")
            finally:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and its ranks; torchrun takes its workers with it on SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "client" in callspec.params:
            wanted.setdefault(callspec.params["client"], []).append(callspec.params["case"])
    return Launches(tmp_path_factory.mktemp("clients"), wanted)


def reports(folder: Path, case: str, ranks: int) -> list[dict[str, Any]]:
    """What the ranks noted; fails with what went wrong where one has not come to its end."""
    paths = [folder / case / f"rank{rank}.json" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        errors = sorted((folder / case).glob("*.error.txt")) or [folder / "output.txt"]
        texts = [f"{path.name}:\n{path.read_text(errors='replace')[-SHOWN:]}" for path in errors]
        pytest.fail(f"{folder.name}, {case}\n" + "\n".join(texts), pytrace=False)
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("client", "case"), PARAMETERS)
def test_same_numbers_and_files(launches: Launches, client: str, case: str) -> None:
    ranks = CLIENTS[client].ranks
    folders = {ours: launches.folder(client, ours) for ours in (False, True)}
    stock, ours = (reports(folders[which], case, ranks) for which in (False, True))
    for report in stock:
        assert all(name.startswith("torch.distributed.") for name in report["states"])
    for report in ours:
        assert all(name.startswith("fsdp_c") for name in report["states"])
    for rank, (left, right) in enumerate(zip(stock, ours)):
        labels = [label for label, _ in left["entries"]]
        assert labels == [label for label, _ in right["entries"]], f"rank {rank}"
        pairs = zip(labels, left["entries"], right["entries"])
        wrong = [f"{label}: {one[1]} {other[1]}" for label, one, other in pairs if one != other]
        assert not wrong, f"rank {rank}: " + "\n".join(wrong[:20])
    found = list(differences(folders[False] / case / "files", folders[True] / case / "files"))
    assert not found, "\n".join(found[:20])
