"""Measures the memory of an optimizer's states and of its step, with small tensors."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer

from .compare_digests import count_bytes
from .fake_step import StorageRecorder, Trace

OptimizerArgument: TypeAlias = "str | Optimizer | Callable[..., Optimizer] | None"


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer per byte of trained parameters.

    Attributes:
        name: The optimizer's class.
        state_ratio: Bytes of states.
        step_ratio: Bytes that a step allocates temporarily.
        counts_all_parameters: Whether ``step_ratio`` is per byte of all parameters; else per byte
            of the largest parameter.
    """

    name: str
    state_ratio: float
    step_ratio: float
    counts_all_parameters: bool


def measure_optimizer(
    choice: OptimizerArgument, dtype: torch.dtype, on_cpu: bool
) -> OptimizerBytes:
    """Returns the memory of an optimizer, measured by steps of small parameters.

    Args:
        choice: An optimizer, an optimizer class, a function that makes an optimizer from
            parameters, or a class name of ``torch.optim`` in upper or lower case. ``None``: AdamW.
        dtype: The dtype of the parameters.
        on_cpu: Whether the step runs on the CPU. On other devices torch's default is ``foreach``.

    Raises:
        ValueError: torch has no such class, or its step requires more than gradients.
        TypeError: ``choice`` has another type.
    """
    make = _make_constructor(choice)
    try:
        one_param_bytes, optimizer, parameters = _measure_step(make, 1, dtype, on_cpu)
        two_param_bytes = _measure_step(make, 2, dtype, on_cpu)[0]
    except Exception as error:
        name = getattr(choice, "__name__", choice)
        raise ValueError(
            f"cannot measure the memory of {name}: a step of two small parameters raised "
            f"{type(error).__name__}: {error}"
        ) from error
    size = parameters[0].numel() * dtype.itemsize
    state_bytes = sum(
        count_bytes(value)
        for value in optimizer.state[parameters[0]].values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    return OptimizerBytes(
        type(optimizer).__name__,
        state_bytes / size,
        one_param_bytes / size,
        two_param_bytes > one_param_bytes * 1.5,
    )


def count_state_bytes(optimizer: Optimizer) -> int:
    """Returns the bytes of the states that an optimizer has now, on this rank."""
    return sum(
        count_bytes(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _make_constructor(choice: OptimizerArgument) -> Callable[[list[torch.Tensor]], Optimizer]:
    settings: dict[str, Any] = {}
    if choice is None:
        choice = torch.optim.AdamW
    if isinstance(choice, str):
        classes_by_name = {name.lower(): cls for name, cls in vars(torch.optim).items()}
        classes_by_name = {name: cls for name, cls in classes_by_name.items() if _is_optimizer(cls)}
        if choice.lower() not in classes_by_name:
            matches = difflib.get_close_matches(choice.lower(), classes_by_name, 1)
            suggestion = (
                f": did you mean {classes_by_name[matches[0]].__name__}?" if matches else ""
            )
            raise ValueError(f"torch.optim has no optimizer '{choice}'{suggestion}")
        choice = classes_by_name[choice.lower()]
    while isinstance(inner := getattr(choice, "optimizer", None), Optimizer):
        choice = inner  # a wrapper, such as accelerate's AcceleratedOptimizer
    if isinstance(choice, Optimizer):
        parameters = inspect.signature(type(choice).__init__).parameters
        settings = {key: value for key, value in choice.defaults.items() if key in parameters}
        choice = type(choice)
    if not callable(choice):
        raise TypeError(
            f"an optimizer is a class, its name, or a function that makes one, not {choice!r}"
        )
    constructor = choice
    return lambda parameters: constructor(parameters, **settings)


def _adapt_options(options: dict[str, Any], on_cpu: bool) -> None:
    """Sets options so that a step on the CPU allocates what a step on the device would.

    ``capturable`` needs the device, and ``differentiable`` a graph.
    """
    is_loop = on_cpu or options.get("fused") or options.get("differentiable")
    if options.get("foreach", False) is None and not is_loop:
        options["foreach"] = True
    for name in ("capturable", "differentiable"):
        if name in options:
            options[name] = False


def _is_optimizer(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer


def _measure_step(
    make: Callable[[list[torch.Tensor]], Optimizer], count: int, dtype: torch.dtype, on_cpu: bool
) -> tuple[int, Optimizer, list[torch.Tensor]]:
    """Returns the peak of temporary bytes of the second step.

    Also returns the optimizer and its parameters.
    """
    parameters = [torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype)) for _ in range(count)]
    optimizer = make([*parameters])
    for options in (optimizer.defaults, *optimizer.param_groups):
        _adapt_options(options, on_cpu)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    trace = Trace()
    storages = StorageRecorder(trace)
    existing_values = [value for state in optimizer.state.values() for value in state.values()]
    existing_values += [*parameters, *(parameter.grad for parameter in parameters)]
    storages.exclude([value for value in existing_values if isinstance(value, torch.Tensor)])
    with storages:
        optimizer.step()
    live, total, peak = {}, 0, 0
    for name, storage, value in trace.events:
        if name == "alloc":
            live[storage] = value
            total += value
        else:
            total -= live.pop(storage)
        peak = max(peak, total)
    return peak, optimizer, [*parameters]
