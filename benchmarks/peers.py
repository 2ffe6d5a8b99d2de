"""Host cost of a training step per unit and per parameter, of fsdp_c and of other libraries.

Method. The model has ``--groups`` equal units of tiny parameters, as in host.py. A unit's forward
multiplies its input by each of its parameters. The simulated CUDA device of tests/cuda replaces a
GPU, and runs no kernel. The process is rank 0 of 8 NCCL ranks, whose other ranks are emulated. Each
library trains the model in float32 in a process of its own, with its default settings, resharded
after forward where the library shards parameters. There are two exceptions: ZeRO-3 also shards
small parameters, and DDP has ``gradient_as_bucket_view=True``.

A step is one forward and one backward, until the gradients are reduced. Its time is the CPU time of
the process, with all threads; the minimum over ``--steps`` steps counts. The device is idle when a
step begins. The garbage collector is off. Optimizers and zeroing are not timed. The cost of a
library is (its time - the bare model's time) / units. The cost per parameter is the slope of a
least-squares line over the numbers of parameters per unit.

The packages come from PyPI. A library that cannot run is listed with the reason. The
emulated ranks and the absence of kernels require substitutes during setup: ``all_gather_object``
returns equal objects, and the checks of models by DDP and of shards by Megatron-FSDP are left out.
The step itself is unchanged.

    python benchmarks/peers.py [--packages DIR] [--params 1 5 14] [--only NAME ...] [--json FILE]

The Python needs a CUDA build of torch, and fsdp_c for it (``make cuda-sim``). ``--packages`` is a
folder of ``pip install --target`` with deepspeed, megatron-fsdp and torchtitan.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZE = 8
WIDTH = 16
WARM_UP_STEPS = 5
ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": str(WORLD_SIZE),
    "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29999",
    "OMP_NUM_THREADS": "1",
}


class Step(NamedTuple):
    """The parts of a training step."""

    run: Callable[[Any], None]
    """Forward and backward of the input; timed."""
    finish: Callable[[], None]
    """Drops the gradients, or calls the optimizer (DeepSpeed); not timed."""


def make_model(groups: int, params: int) -> Any:
    """Returns a model of ``groups`` units of ``params`` vectors (WIDTH,)."""
    import torch
    import torch.nn as nn

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = [f"scale{index}" for index in range(params)]
            for name in self.names:
                self.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name in self.names:
                x = x * getattr(self, name)
            return x

    with torch.device("cuda"):
        return nn.Sequential(*(Unit() for _ in range(groups)))


def make_mesh(*sizes: int, names: tuple[str, ...] = ("dp",)) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda", sizes or (WORLD_SIZE,), mesh_dim_names=names)


def run_plain(model: Any) -> Step:
    """Returns a step that calls forward and backward only."""

    def run(x: Any) -> None:
        model(x).sum().backward()

    return Step(run, lambda: model.zero_grad(set_to_none=True))


# ---- libraries: each returns the step of a model -------------------------------------------------


def prepare_fsdp_c(model: Any) -> Step:
    from fsdp_c import fully_shard

    return shard_units(model, fully_shard)


def prepare_fsdp2(model: Any) -> Step:
    from torch.distributed.fsdp import fully_shard

    return shard_units(model, fully_shard)


def shard_units(model: Any, fully_shard: Callable[..., Any]) -> Step:
    mesh = make_mesh()
    for unit in model:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return run_plain(model)


def prepare_ddp(model: Any) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    # init_sync compares the models of the ranks, by results of kernels.
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": False}
    return run_plain(DistributedDataParallel(model, device_ids=[0], **options))


def prepare_simple_fsdp(model: Any) -> Step:
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    return run_plain(data_parallel(model, make_mesh(), mode="fully_shard"))


def prepare_megatron_fsdp(model: Any) -> Step:
    import megatron_fsdp.param_and_grad_buffer as buffers
    from megatron_fsdp import fully_shard_model

    # The check reads the result of a kernel.
    buffers.validate_uneven_dtensor = lambda *_: None
    sharded = fully_shard_model(
        model,
        device_mesh=make_mesh(WORLD_SIZE, 1, names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[type(model[0])],
    )

    def run(x: Any) -> None:
        sharded(x).sum().backward()
        sharded.finish_grad_sync()

    return Step(run, sharded.zero_grad_buffer)


def prepare_deepspeed(model: Any) -> Step:
    import deepspeed
    import torch

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": WORLD_SIZE,
        # By default, ZeRO-3 does not shard small parameters.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def run(x: Any) -> None:
        engine.backward(engine(x).sum())

    return Step(run, engine.step)


LIBRARIES: dict[str, tuple[str, Callable[[Any], Step]]] = {
    # name: (package, function)
    "bare": ("torch", run_plain),
    "fsdp_c": ("fsdp_c", prepare_fsdp_c),
    "torch FSDP2": ("torch", prepare_fsdp2),
    "torch DDP": ("torch", prepare_ddp),
    "SimpleFSDP, eager": ("torchtitan", prepare_simple_fsdp),
    "Megatron-FSDP": ("megatron-fsdp", prepare_megatron_fsdp),
    "DeepSpeed ZeRO-3": ("deepspeed", prepare_deepspeed),
}


# ---- measurement ---------------------------------------------------------------------------------


def join_group() -> Any:
    """Makes this process rank 0 of an emulated NCCL group. Returns the simulated device."""
    os.environ.update(ENVIRONMENT)
    sys.path.append(str(ROOT / "tests/cuda/workers"))
    import stub_runtime

    device = stub_runtime.start()
    import jobs
    import torch.distributed as dist

    jobs.join_group()

    def gather_object(results: list[Any], value: Any, group: Any = None) -> None:
        results[:] = [value] * len(results)

    # torch's function reads sizes that kernels compute, and no kernel runs.
    dist.all_gather_object = gather_object
    return device


def measure(name: str, groups: int, counts: list[int], steps: int) -> dict[str, Any]:
    """Returns CPU microseconds of a step by the number of parameters per unit, and the package."""
    device = join_group()
    import torch

    package, prepare = LIBRARIES[name]
    times: dict[str, float] = {}
    gc.disable()
    for count in counts:
        # Setup may read values. Steps execute no copies within device memory, and no kernels.
        device.set(copies=1)
        step = prepare(make_model(groups, count))
        device.set(copies=0)
        x = torch.ones(WIDTH, device="cuda")
        durations = []
        for _ in range(WARM_UP_STEPS + steps):
            torch.cuda.synchronize()
            begin = time.process_time_ns()
            step.run(x)
            durations.append(time.process_time_ns() - begin)
            step.finish()
        times[str(count)] = min(durations[WARM_UP_STEPS:]) / 1000
        gc.collect()
    return {"us": times, "package": f"{package} {find_version(package)}"}


def find_version(package: str) -> str:
    """Returns the version of an imported package."""
    module = sys.modules.get(package)
    return getattr(module, "__version__", None) or importlib.metadata.version(package)


def run_measurement(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs :func:`measure` in a new process. Returns its result, or the reason of a failure."""
    command = [sys.executable, __file__, "--measure", name]
    for option in ("groups", "steps", "packages"):
        command += [f"--{option}", str(getattr(arguments, option))]
    command += ["--params", *map(str, arguments.params)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "Error" in line]
        return {"reason": lines[-1].removeprefix("[rank0]: ") if lines else "the process ended"}
    return json.loads(result.stdout.splitlines()[-1])


def compute_costs(results: dict[str, dict[str, Any]], groups: int) -> dict[str, dict[str, Any]]:
    """Returns costs per unit by the number of parameters, and the line through them."""
    bare = results["bare"]["us"]
    costs = {}
    for name, result in results.items():
        if name == "bare" or "us" not in result:
            continue
        us_per_unit = {count: (time - bare[count]) / groups for count, time in result["us"].items()}
        counts = [int(count) for count in us_per_unit]
        line = statistics.linear_regression(counts, list(us_per_unit.values()))
        costs[name] = {
            "package": result["package"],
            "us_per_unit_step": us_per_unit,
            "fixed_us": line.intercept,
            "us_per_param": line.slope,
        }
    return costs


def main() -> None:
    packages_parser = argparse.ArgumentParser(add_help=False)
    packages_parser.add_argument("--packages", default="")
    parser = argparse.ArgumentParser(description=__doc__, parents=[packages_parser])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--params", type=int, nargs="+", default=[1, 5, 14])
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--json")
    parser.add_argument("--measure", choices=LIBRARIES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.packages:
        sys.path.append(given.packages)
    _, sys.argv[1:] = packages_parser.parse_known_args()  # results name no path of this machine
    if given.measure:
        result = measure(given.measure, given.groups, given.params, given.steps)
        print(json.dumps(result), flush=True)
        os._exit(0)  # without the destructors of the process group, which wait for the device
    if len(set(given.params)) < 2:
        parser.error("--params: the line through the costs needs two different numbers")
    import report  # imports torch, which a measured process must not do before the device is loaded

    results = {}
    for name in dict.fromkeys(["bare", *given.only]):
        results[name] = run_measurement(name, given)
        print(name, results[name], flush=True)
        if "reason" in results["bare"]:
            raise SystemExit("the costs cannot be computed without the time of the bare model")
    costs = compute_costs(results, given.groups)
    missing = {name: r["reason"] for name, r in results.items() if "reason" in r}
    rows = [[n, *c["us_per_unit_step"].values(), c["us_per_param"]] for n, c in costs.items()]
    titles = ["library", *(f"{count} parameters" for count in given.params), "per parameter"]
    print(f"\n{report.format_command(__file__, sys.argv[1:])}: us per unit and step\n")
    print(report.format_table(titles, rows))
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    report.write_json(given.json, "peers", {"costs": costs, "missing": missing})


if __name__ == "__main__":
    main()
