"""The program of each rank in one run of ``compare``: runs a script and records its steps.

    python compare_observer.py SETTINGS.json

The file is run by its path, so that a run under torch alone imports nothing of fsdp_c. Under fsdp_c
the file installs fsdp_c as ``python -m fsdp_c`` does. The file of records gets one line of JSON for
each ``optimizer.step()``.

The optimizer that steps first counts the steps. Global hooks of torch's optimizers run at each
step, and a wrapper of ``torch.autograd.backward`` records each loss. Digests are computed outside
of the measured time.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent

GRACE_SECONDS = 5.0
"""Seconds that a rank waits for the other ranks after its last step, and again for the script."""


class ScriptFinished(SystemExit):
    """Ends the script after its last step, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


def import_file(name: str) -> ModuleType:
    """Imports ``name.py`` of this folder under a module name that no script uses."""
    module_name = f"_fsdp_c_{name}"
    spec = importlib.util.spec_from_file_location(module_name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def disable_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that dynamo does not trace. Does not import dynamo."""
    untraced: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not untraced and "torch._dynamo.eval_frame" in sys.modules:
            untraced.append(sys.modules["torch._dynamo"].disable(function))
        return (untraced[0] if untraced else function)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def read_peak_memory() -> int:
    """Returns the largest resident memory of this process so far, in bytes. 0 if unknown."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class Clock:
    """Adds up the time outside of :meth:`pause`, in seconds."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize
        self.measured = 0.0
        self.resumed = time.perf_counter()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Waits for the device, then excludes the time of the block."""
        self.synchronize()
        self.measured += time.perf_counter() - self.resumed
        try:
            yield
        finally:
            self.resumed = time.perf_counter()

    def read_seconds(self) -> float:
        """Returns the seconds since the last call. Called inside a pause."""
        seconds, self.measured = self.measured, 0.0
        return seconds


class Observer:
    """Records the steps of all optimizers of this process, and ends the script after the last."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        self.torch = torch
        self.digests = import_file("compare_digests")
        self.settings = settings
        self.pid = os.getpid()
        self.numbers: Any = weakref.WeakKeyDictionary()
        """Maps each optimizer to a number, in the order of the first steps. A number may be given
        again after its optimizer was freed."""
        self.names: dict[int, str] = {}
        self.step = 0  # completed steps of optimizer 0
        self.followers: set[int] = set()  # optimizers that step after optimizer 0
        self.awaited: set[int] | None = None  # followers whose last step is still to come
        self.losses: list[Any] = []
        self.gradients: list[Any] = []
        self.stopping = False
        self.uses_device = False
        self.counter: Any = None
        self.clock = Clock(self._synchronize)
        self.file = open(settings["record"], "w", buffering=1)  # noqa: SIM115

    def install(self) -> None:
        """Adds the hooks. They stay until the end of the process."""
        from torch.optim import optimizer

        self.step_code = optimizer.Optimizer.profile_hook_step(lambda: None).__code__
        optimizer.register_optimizer_step_pre_hook(disable_dynamo(self.before_step))
        optimizer.register_optimizer_step_post_hook(disable_dynamo(self.after_step))
        backward = self.torch.autograd.backward

        @functools.wraps(backward)
        def record_and_run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, Iterator):
                tensors = tuple(tensors)
            self._record_losses(tensors)
            return backward(tensors, *args, **kwargs)

        self.torch.autograd.backward = disable_dynamo(record_and_run_backward)

    # ---- hooks -----------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Records the gradients that the optimizer receives, or wraps the closure that makes them.

        Raises:
            ScriptFinished: The script continued after its last step.
        """
        if os.getpid() != self.pid:  # a process that the script has forked
            return None
        if self.stopping or (self.awaited is not None and self.numbers.get(optimizer) == 0):
            self.stop()
        if self._is_nested(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        with self.clock.pause():
            self._register(optimizer)
            self.gradients = []
            if not callable(closure):  # args[1] is not a closure
                self._record_gradients(optimizer)
                return None
        wrapped = self._wrap_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Writes the record of one step.

        Raises:
            ScriptFinished: It was the last step.
        """
        if os.getpid() != self.pid or self._is_nested(optimizer):
            return
        number = self.numbers[optimizer]
        with self.clock.pause():
            if number == 0:
                self.step += 1
            else:
                self.followers.add(number)
            self._write_record(optimizer, number)
            if self._is_last(number):
                self.stop()
            if number == 0 and self.step == 1 and self.settings["count_collectives"]:
                with self._report_failure("the profiler does not start"):
                    self.counter = import_file("compare_collectives").CollectiveCounter()

    def _is_nested(self, optimizer: Any) -> bool:
        """Whether the ``step()`` of the optimizer's class has called that of a base class."""
        frame, running = sys._getframe(), 0
        while frame is not None:
            if frame.f_code is self.step_code and frame.f_locals.get("self") is optimizer:
                running += 1
            frame = frame.f_back  # type: ignore[assignment]
        return running > 1

    def _wrap_closure(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run_closure_and_record() -> Any:
            result = closure()
            with self.clock.pause():
                self._record_gradients(optimizer)
            return result

        return run_closure_and_record

    def _is_last(self, number: int) -> bool:
        """Whether optimizer 0 has made all steps, and each follower has stepped after the last."""
        if self.step < self.settings["steps"]:
            return False
        if self.awaited is None:
            self.awaited = set(self.followers)
        self.awaited.discard(number)
        return not self.awaited

    # ---- records ---------------------------------------------------------------------------------

    def _record_losses(self, tensors: Any) -> None:
        """Copies scalars, in the order of the calls. Their values are read after the step."""
        if os.getpid() != self.pid:
            return
        if isinstance(tensors, self.torch.Tensor):
            tensors = [tensors]
        for tensor in tensors:
            if isinstance(tensor, self.torch.Tensor) and tensor.numel() == 1:
                with self.torch.no_grad():
                    plain = self.digests.list_plain_tensors(tensor.detach())
                    self.losses += [value.clone() for value in plain]

    def _register(self, optimizer: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.uses_device = self.uses_device or any(p.device.type != "cpu" for p in params)
        is_new = optimizer not in self.numbers
        if is_new:
            used = set(self.numbers.values())
            self.numbers[optimizer] = next(i for i in itertools.count() if i not in used)
        if is_new or any(id(param) not in self.names for param in params):
            self.names = self.digests.find_parameter_names()
            self.names |= {id(p): "" for p in params if id(p) not in self.names}

    def _list_params(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        """Yields (name, parameter). Parameters without a model are named by their position."""
        for i, group in enumerate(optimizer.param_groups):
            own_names = group.get("param_names") or [""] * len(group["params"])
            for j, param in enumerate(group["params"]):
                default_name = f"parameter {j} of group {i}, shape {tuple(param.shape)}"
                yield self.names.get(id(param)) or own_names[j] or default_name, param

    def _record_gradients(self, optimizer: Any) -> None:
        dist = self.torch.distributed
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        for name, param in self._list_params(optimizer):
            grad = param.grad
            squares = self.digests.compute_squared_norm(grad)
            replicas = 1 if grad is None else self.digests.count_replicas(grad, world)
            self.gradients.append([name, self.digests.compute_digest(grad), squares, replicas])

    def _write_record(self, optimizer: Any, number: int) -> None:
        collectives = None
        if self.counter is not None and number == 0:
            with self._report_failure("the profiler does not stop"):
                collectives = self.counter.finish()
            self.counter = None
        patches = sys.modules.get("fsdp_c._compat.patches")
        cuda = self.torch.cuda
        record = {
            "step": max(self.step, 1),
            "optimizer": number,
            "seconds": self.clock.read_seconds(),
            "losses": [[float(loss), self.digests.compute_digest(loss)] for loss in self.losses],
            "gradients": self.gradients,
            "parameters": [
                [n, self.digests.compute_digest(p)] for n, p in self._list_params(optimizer)
            ],
            "peak_memory": read_peak_memory(),
            "peak_device_memory": cuda.max_memory_allocated() if cuda.is_initialized() else 0,
            "uses_fsdp_c": patches is not None and patches.has_live_models(),
            "collectives": collectives,
        }
        self.losses, self.gradients = [], []
        self.file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def _report_failure(self, subject: str) -> Iterator[None]:
        """Prints and suppresses an exception of a measurement that the comparison does not need."""
        try:
            yield
        except Exception as error:
            print(f"compare: {subject}: {type(error).__name__}: {error}", file=sys.stderr)

    def _synchronize(self) -> None:
        if self.uses_device:
            self.torch.accelerator.synchronize()

    # ---- the end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the script. The process ends after ``GRACE_SECONDS`` even if the script continues.

        Raises:
            ScriptFinished: Always.
        """
        if not self.stopping:
            self.stopping = True
            self.file.write(json.dumps({"stopped": True}) + "\n")
            with contextlib.suppress(Exception):
                self._wait_for_ranks()
            threading.Thread(target=_exit_after_grace, daemon=True).start()
        raise ScriptFinished

    def _wait_for_ranks(self) -> None:
        """Waits until all ranks stop: an early exit would break connections of the others."""
        from datetime import timedelta

        world = self.settings["world_size"]
        store = self.torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
            timeout=timedelta(seconds=GRACE_SECONDS), wait_for_workers=False,
        )  # fmt: skip
        store.add("fsdp_c_compare/stopped", 1)
        deadline = time.monotonic() + GRACE_SECONDS
        while store.add("fsdp_c_compare/stopped", 0) < world and time.monotonic() < deadline:
            time.sleep(0.01)


def _exit_after_grace() -> None:
    time.sleep(GRACE_SECONDS)
    sys.stdout.flush()
    os._exit(0)


def die_with_parent(parent: int) -> None:
    """Linux only: makes the kernel kill this process when its supervisor dies."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def install_fsdp_c(package_root: str) -> None:
    """Installs fsdp_c as ``python -m fsdp_c`` does. ``FSDP_C=1`` is set already."""
    sys.path.insert(0, package_root)
    from fsdp_c.install import install

    sys.path.remove(package_root)
    install()


def seed_everything(seed: int) -> None:
    """Seeds the random numbers of Python, numpy (if torch has imported it) and torch."""
    import torch

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    """Runs the script of the settings as ``__main__``. Its exceptions propagate."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    die_with_parent(settings["supervisor"])
    faulthandler.dump_traceback_later(settings["stacks_after"])
    sys.modules["_fsdp_c_compare_observer"] = sys.modules["__main__"]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    sys.argv[:] = settings["arguments"]
    loader = import_file("script_loader")
    if settings["implementation"] == "fsdp_c":
        install_fsdp_c(settings["package_root"])
    Observer(settings).install()
    seed_everything(settings["seed"])
    if settings["as_module"]:
        module, code = loader.find_module(sys.argv[0])
        sys.argv[0] = module.__file__ or sys.argv[0]
    else:
        module, code = loader.read_script(sys.argv[0])
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
