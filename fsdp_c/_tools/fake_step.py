"""Records the allocations and the hooks of one model step on fake tensors.

The step requires no process group, computes no values and allocates no tensor memory. The model
runs with unsharded fake parameters in the compute dtypes of its units. The recorded hook events are
those of the hooks of a sharded model. ``dry_run.py`` passes the events to the core.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_c._C as _C

Event = tuple[str, int, Any]
"""(event name, index of a state or storage, value). The events and their arguments:

- ``alloc``: storage, bytes
- ``free``: storage
- ``grad``: storage, (unit, parameter of the unit, bytes of the gradient)
- ``pre_forward``: state, whether the hook runs within backward (recomputation)
- ``post_forward``: state, storages of the output
- ``pre_backward``, ``post_backward``: state
- ``backward``: backward begins
- ``end``: the step ends
"""


@dataclass(frozen=True, eq=False)
class StateModules:
    """Modules that ``fully_shard`` was, or would be, called on together.

    Their hooks cast floating-point inputs to ``input_dtype`` and outputs to ``output_dtype``.
    ``None`` means no cast.
    """

    modules: tuple[nn.Module, ...]
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


@dataclass
class Trace:
    """The events of one step, in order."""

    events: list[Event] = field(default_factory=list)

    def add_event(self, name: str, number: int = -1, value: Any = None) -> None:
        self.events.append((name, number, value))


class StorageRecorder(TorchDispatchMode):
    """Records the allocation and the deallocation of each storage that operations create."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._entries: dict[int, Any] = {}
        self._count = 0

    def exclude(self, tensors: Sequence[torch.Tensor]) -> None:
        """Excludes the storages of ``tensors``, which exist before the step."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._entries[storage._cdata] = (-1, weakref.ref(storage))

    def get_number(self, tensor: torch.Tensor) -> int:
        """Returns the index of the tensor's storage; -1 if the storage existed before the step."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry is not None else -1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self._record_storage(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._record_storage(item)
        return out

    def _record_storage(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return
        number, self._count = self._count, self._count + 1

        def on_free(_: Any) -> None:
            del self._entries[key]
            self._trace.add_event("free", number)

        self._entries[key] = (number, weakref.ref(storage, on_free))
        self._trace.add_event("alloc", number, storage.nbytes())


class _StateInputs(torch.autograd.Function):
    """Identity on the inputs of a state. ``backward`` records the end of the state's backward."""

    @staticmethod
    def forward(ctx: Any, trace: Trace, state: int, *tensors: torch.Tensor) -> Any:
        ctx.trace, ctx.state = trace, state
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.trace.add_event("post_backward", ctx.state)
        return (None, None, *grads)


def record_events(
    model: nn.Module,
    states: Sequence[StateModules],
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    param_indices: Mapping[int, tuple[int, int]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    compute_loss: Callable[[Any], torch.Tensor] | None = None,
) -> Trace:
    """Records the events of one forward and backward of ``model``.

    Args:
        model: The model, on any device, sharded or not. The function restores the attributes of
            its modules at the end. Tensors that forward stores elsewhere, for example in
            ``functools.lru_cache``, stay fake.
        states: The modules whose forward and backward are recorded.
        dtype_of: Function that returns the compute dtype of a parameter.
        param_indices: Maps the ``id`` of a parameter to (unit, index in the unit).
        args, kwargs: The arguments of forward. Only sizes and dtypes of tensors are used.
        compute_loss: Returns the loss of the output. ``None`` uses the output's ``loss``, or
            else the sum of its tensors.

    Raises:
        ValueError: The step cannot run on fake tensors. The message has the original exception.
    """
    trace = Trace()
    storages = StorageRecorder(trace)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_remove_fsdp_c_hooks(model))
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(fake_mode)
        tensors, params = _replace_by_fake_tensors(model, dtype_of, undo)
        storages.exclude(tensors)
        _register_state_hooks(states, trace, storages, undo)
        _register_gradient_hooks(params, param_indices, trace, storages, undo)
        undo.enter_context(_disable_fake_tensor_log())
        try:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _make_fake, (args, dict(kwargs)))
            storages.exclude([t for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)])
            undo.enter_context(storages)
            output = model(*args, **kwargs)
            loss = (compute_loss or _get_loss)(output)
            del output
            trace.add_event("backward")
            loss.backward()
        except Exception as error:
            raise ValueError(
                f"cannot record the memory of {type(model).__name__}: it cannot run on fake "
                f"tensors of the batch's sizes and dtypes: {type(error).__name__}: {error}"
            ) from error
        del loss
        trace.add_event("end")
    return trace


@contextlib.contextmanager
def _disable_fake_tensor_log() -> Iterator[None]:
    """Disables torch's log of fake tensors: the raised exception has the same information."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _make_fake(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _get_loss(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = [t for t in pytree.tree_leaves(output) if torch.is_tensor(t) and t.requires_grad]
    if not leaves:
        raise TypeError("no tensor of its output requires grad")
    return torch.stack([leaf.sum().float() for leaf in leaves]).sum()


def _replace_by_fake_tensors(
    model: nn.Module,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    undo: contextlib.ExitStack,
) -> tuple[list[torch.Tensor], dict[int, nn.Parameter]]:
    """Replaces parameters and buffers by fake tensors.

    Returns all fake tensors, and the fake parameters by the ``id`` of the original parameter.
    """
    fakes: dict[int, Any] = {}
    params: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        _restore_attributes_at_end(module, undo)
        for name, param in list(module._parameters.items()):
            if param is None:
                continue
            if id(param) not in fakes:
                unsharded = torch.empty(param.shape, dtype=dtype_of(param), device="cpu")
                fakes[id(param)] = nn.Parameter(unsharded, requires_grad=param.requires_grad)
            params[id(param)] = module._parameters[name] = fakes[id(param)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                fakes.setdefault(id(buffer), _make_fake(buffer))
                module._buffers[name] = fakes[id(buffer)]
    return list(fakes.values()), params


_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


def _restore_attributes_at_end(module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Restores the attributes of a module, also the elements of its dicts, lists and sets.

    Forward may store tensors there, for example cached masks or new buffers.
    """
    attributes = vars(module)
    containers = [value for value in attributes.values() if type(value) in _CONTAINERS]
    for container in [*containers, attributes]:
        undo.callback(_replace_elements, container, container.copy())


def _replace_elements(container: Any, elements: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(elements)
    else:
        container.update(elements)


@contextlib.contextmanager
def _remove_fsdp_c_hooks(model: nn.Module) -> Iterator[None]:
    """Removes fsdp_c's forward hooks within the context."""
    removed_hooks: list[tuple[Any, dict[int, Any]]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                own_keys = [key for key, hook in hooks.items() if isinstance(hook, _C.Hook)]
                if own_keys:
                    removed_hooks.append((hooks, dict(hooks)))
                    for key in own_keys:
                        del hooks[key]
        yield
    finally:
        for hooks, saved_hooks in removed_hooks:
            hooks.clear()
            hooks.update(saved_hooks)


def _register_state_hooks(
    states: Sequence[StateModules],
    trace: Trace,
    storages: StorageRecorder,
    undo: contextlib.ExitStack,
) -> None:
    for number, state in enumerate(states):
        hooks = _StateHooks(number, state, trace, storages)
        for module in state.modules:
            handle = module.register_forward_pre_hook(
                hooks.pre_forward, prepend=True, with_kwargs=True
            )
            undo.callback(handle.remove)
            undo.callback(module.register_forward_hook(hooks.post_forward).remove)


class _StateHooks:
    """The forward hooks of one state's modules."""

    def __init__(
        self, number: int, state: StateModules, trace: Trace, storages: StorageRecorder
    ) -> None:
        self._number = number
        self._state = state
        self._trace = trace
        self._storages = storages
        # Modules that have not run in the current forward. Empty between forwards.
        self._modules_to_run: set[nn.Module] = set()
        # A recomputed forward registers no autograd hooks, as in fsdp_c and torch.
        self._in_backward = False

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._trace.add_event("pre_forward", self._number, torch._C._current_graph_task_id() != -1)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        _cast_in_place(leaves, self._state.input_dtype)
        if not self._modules_to_run:
            self._modules_to_run.update(self._state.modules)
            if torch.is_grad_enabled() and not self._in_backward:
                self._insert_node(leaves)
        return pytree.tree_unflatten(leaves, spec)

    def _insert_node(self, leaves: list[Any]) -> None:
        indices = [i for i, t in enumerate(leaves) if torch.is_tensor(t) and t.requires_grad]
        if indices:
            tensors = [leaves[i] for i in indices]
            outputs: Any = _StateInputs.apply(self._trace, self._number, *tensors)
            for i, tensor in zip(indices, outputs):
                leaves[i] = tensor

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        _cast_in_place(leaves, self._state.output_dtype)
        tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
        self._modules_to_run.discard(module)
        if not self._modules_to_run:
            outputs = tuple(map(self._storages.get_number, tensors))
            self._trace.add_event("post_forward", self._number, outputs)
            for tensor in tensors:
                if tensor.requires_grad and not self._in_backward:
                    tensor.register_hook(self._pre_backward)
        return pytree.tree_unflatten(leaves, spec)

    def _pre_backward(self, grad: torch.Tensor) -> None:
        self._in_backward = True
        self._trace.add_event("pre_backward", self._number)


def _cast_in_place(leaves: list[Any], dtype: torch.dtype | None) -> None:
    """Replaces floating-point tensors of the list by casts to ``dtype``. ``None``: no cast."""
    for i, leaf in enumerate(leaves):
        if dtype is not None and torch.is_tensor(leaf) and leaf.is_floating_point():
            leaves[i] = leaf.to(dtype)


def _register_gradient_hooks(
    params: dict[int, nn.Parameter],
    param_indices: Mapping[int, tuple[int, int]],
    trace: Trace,
    storages: StorageRecorder,
    undo: contextlib.ExitStack,
) -> None:
    """Records which storages become gradients of parameters."""
    for original, fake in params.items():
        position = param_indices.get(original)
        if position is None or not fake.requires_grad:
            continue

        def record_gradient(param: torch.Tensor, position: tuple[int, int] = position) -> None:
            grad = param.grad
            if grad is not None:
                value = (*position, grad.numel() * grad.itemsize)
                trace.add_event("grad", storages.get_number(grad), value)

        undo.callback(fake.register_post_accumulate_grad_hook(record_gradient).remove)
