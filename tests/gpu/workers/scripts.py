"""Runs ``python -m fsdp_c --check``, and ``compare`` on training scripts, as a user would.

``compare`` runs scripts of ``examples`` and of libraries under torch's FSDP2 and under fsdp_c, on
one rank over NCCL. Losses, gradients and parameters must have equal bits. Libraries that are not
installed are listed. Without CUDA only ``compare`` of a small script runs, on the CPU. With small
sizes no library runs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcome import ON_CUDA, ROOT, SMALL, conclude

STEPS, ROUNDS = (2, 1) if SMALL else (5, 2)
LIBRARIES = ("accelerate", "transformers", "lightning")
GPT_SIZES = ("--layers", "1", "--width", "32", "--heads", "2")
EXAMPLES = {
    "train_gpt.py": GPT_SIZES,
    "lora.py": GPT_SIZES,
    "vision.py": ("--width", "2", "--size", "8", "--batch", "4"),
}
"""Maps each example to the arguments that select a small size."""
LIMIT = 200 if SMALL else 100
"""Seconds for all commands, which run at the same time."""


def make_scripts() -> dict[str, list[str]]:
    """Maps the name of each script to its path and arguments."""
    folder, device = ROOT / "examples", "cuda" if ON_CUDA else "cpu"
    options = ["--impl", "torch", "--device", device, "--steps", str(STEPS + 1)]
    scripts = {
        name: [str(folder / name), *options, *(sizes if SMALL else ())]
        for name, sizes in EXAMPLES.items()
        if ON_CUDA or name == "lora.py"
    }
    if SMALL:
        return scripts
    jobs = str(Path(__file__).with_name("library_jobs.py"))
    installed = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    if "transformers" in installed:
        scripts["finetune_hf.py"] = [str(folder / "finetune_hf.py"), *options]
    return scripts | {name: [jobs, name] for name in installed}


@dataclass
class Command:
    """A running command. Its working directory is removed at the end."""

    name: str
    arguments: list[str]
    expected: str = ""
    """Text that the output must contain."""

    def __post_init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        # The folders that gpu_check.sh adds to PYTHONPATH contain modules with common names.
        path = filter(None, [str(ROOT), os.environ.get("GPU_CHECK_PYTHONPATH")])
        # FSDP_C=1 of the caller would replace torch's functions in all runs.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "FSDP_C": "0"}
        self.log = Path(self.folder.name, "log.txt")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.arguments,
                cwd=self.folder.name,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, deadline: float) -> str:
        """Waits for the end of the command, until a time of ``time.monotonic()``.

        Returns ``""`` or the reason of its failure.
        """
        failure = ""
        try:
            status = self.process.wait(max(0.0, deadline - time.monotonic()))
            failure = f"{self.name}: exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # torchrun and its ranks
            failure = f"{self.name} did not end within {LIMIT} s"
        self.output = self.log.read_text(errors="replace")
        if not failure and self.expected not in self.output:
            failure = f"{self.name}: its output does not contain {self.expected!r}"
        print(f"== {failure or self.name}\n{self.output}", flush=True)
        return failure


def start_compare(name: str, script: list[str], result: Path) -> Command:
    """Starts ``python -m fsdp_c compare`` of the script on one rank.

    The script calls torch's functions, which ``compare`` replaces in every second run. ``compare``
    ends each run before the script's own last step.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    launch += ["-m", "fsdp_c", "compare"]
    launch += ["--steps", str(STEPS), "--rounds", str(ROUNDS), "--json", str(result)]
    return Command(name, [sys.executable, *launch, *script])


def read_comparison(result: Path) -> dict[str, Any]:
    """Returns the verdict, the first difference, and each implementation's fastest step in ms."""
    data = json.loads(result.read_text()) if result.exists() else {}
    runs = data.get("by_rank", [{}])[0].get("runs", {})
    fastest: dict[str, float] = {}
    for name, run in runs.items():
        implementation = name.rpartition("-")[0]  # a run is IMPLEMENTATION-ROUND
        ms = 1000 * min(run["seconds"])
        fastest[implementation] = min(ms, fastest.get(implementation, ms))
    return {
        "verdict": data.get("verdict"),
        "first_difference": data.get("first_difference"),
        "ms": fastest,
    }


def main() -> None:
    scripts = make_scripts()
    with tempfile.TemporaryDirectory() as folder:
        results = {name: Path(folder, f"{name}.json") for name in scripts}
        commands = [start_compare(name, script, results[name]) for name, script in scripts.items()]
        if ON_CUDA:
            check = [sys.executable, "-m", "fsdp_c", "--check"]
            commands.append(Command("--check", check, expected="trained on NCCL"))
        deadline = time.monotonic() + LIMIT
        failures = [reason for command in commands if (reason := command.wait(deadline))]
        comparisons = {name: read_comparison(result) for name, result in results.items()}
    failures += [
        f"{name}: {comparison['verdict']}, {comparison['first_difference']}"
        for name, comparison in comparisons.items()
        if comparison["verdict"] != "equal"
    ]
    missing = [name for name in LIBRARIES if not SMALL and name not in scripts]
    line = f"{', '.join(command.name for command in commands)}: "
    line += "; ".join(failures) if failures else "equal bits"
    line += f"; not installed: {', '.join(missing)}" if missing else ""
    outputs = {command.name: command.output.splitlines() for command in commands}
    conclude(not failures, line, comparisons=comparisons, failures=failures, outputs=outputs)


if __name__ == "__main__":
    main()
