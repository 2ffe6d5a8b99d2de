"""Records the allocations of one model step on fake tensors, and when it enters its units.

The step needs no process group, computes nothing and uses no memory. The model runs with unsharded
fake parameters in the units' compute dtypes. Hooks record where a sharded run would gather and
reduce. ``forecast.py`` computes the memory from these events.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
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
"""(event name, number of the piece or storage, value). The events and their arguments:

``alloc`` (storage, bytes), ``free`` (storage), ``grad`` (storage, piece: the storage is now a
parameter's gradient), ``pre_forward`` (piece), ``post_forward`` (piece, storages of the output),
``pre_backward`` (piece), ``post_backward`` (piece), ``backward`` (starts), ``end`` (of the step).
"""


@dataclass(frozen=True, eq=False)
class Piece:
    """Modules that are, or might become, one unit.

    The unit casts floating-point inputs to ``input_dtype`` and outputs to ``output_dtype``.
    ``None`` means no cast.
    """

    modules: tuple[nn.Module, ...]
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


@dataclass
class Trace:
    """The events of one step, in order."""

    events: list[Event] = field(default_factory=list)

    def note(self, what: str, which: int = -1, value: Any = None) -> None:
        self.events.append((what, which, value))


class Storages(TorchDispatchMode):
    """Records the allocation and the end of each storage that operations make."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._known: dict[int, Any] = {}
        self._count = 0

    def forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Excludes the storages of ``tensors``, which exist before the step."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = (-1, weakref.ref(storage))

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number of the tensor's storage; -1 if it existed before the step."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return known[0] if known is not None else -1

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
        if key in self._known:
            return
        number, self._count = self._count, self._count + 1

        def on_free(_: Any) -> None:
            del self._known[key]
            self._trace.note("free", number)

        self._known[key] = (number, weakref.ref(storage, on_free))
        self._trace.note("alloc", number, storage.nbytes())


class _PieceInputs(torch.autograd.Function):
    """Identity on the inputs of a piece. Its backward records the end of the piece's backward."""

    @staticmethod
    def forward(ctx: Any, trace: Trace, piece: int, *tensors: torch.Tensor) -> Any:
        ctx.trace, ctx.piece = trace, piece
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.trace.note("post_backward", ctx.piece)
        return (None, None, *grads)


def record(
    model: nn.Module,
    pieces: Sequence[Piece],
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Trace:
    """Records the events of one forward and backward of ``model``.

    Args:
        model: The model, on any device, sharded or not. It is restored afterwards.
        pieces: The modules whose forward and backward are recorded.
        dtype_of: Returns the compute dtype of a parameter.
        args, kwargs: The arguments of forward. Only sizes and dtypes of tensors matter.
        loss: Returns the loss of the output. ``None`` uses the output's ``loss``, or else the sum
            of its tensors.

    Raises:
        ValueError: The step cannot run on fake tensors. The message has the original exception.
    """
    trace = Trace()
    storages = Storages(trace)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_without_hooks(model))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(fake)
        tensors, params = _fake_state(model, dtype_of, undo)
        storages.forget(tensors)
        args, kwargs = pytree.tree_map_only(torch.Tensor, _make_fake, (args, dict(kwargs)))
        storages.forget([t for t in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)])
        _register_piece_hooks(pieces, trace, storages, undo)
        _register_gradient_hooks(pieces, params, trace, storages, undo)
        undo.enter_context(storages)
        undo.enter_context(_quiet())
        try:
            output = model(*args, **kwargs)
            total = (loss or _loss)(output)
            del output
            trace.note("backward")
            total.backward()
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be run on tensors without values, of the batch's "
                f"sizes and dtypes, to see what it allocates: {type(error).__name__}: {error}"
            ) from error
        del total
        trace.note("end")
    return trace


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Disables the log of torch's fake tensors: the exception has the same information."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _make_fake(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _loss(output: Any) -> torch.Tensor:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    leaves = [t for t in pytree.tree_leaves(output) if torch.is_tensor(t) and t.requires_grad]
    if not leaves:
        raise TypeError("no tensor of its output requires grad")
    return torch.stack([leaf.sum().float() for leaf in leaves]).sum()


def _fake_state(
    model: nn.Module,
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    undo: contextlib.ExitStack,
) -> tuple[list[torch.Tensor], dict[int, nn.Parameter]]:
    """Replaces parameters and buffers by fake tensors.

    Returns all fake tensors, and the fake parameters by the ``id`` of the original parameter.
    """
    made: dict[int, Any] = {}
    params: dict[int, nn.Parameter] = {}
    for module in model.modules():
        undo.callback(module.__dict__["_parameters"].update, dict(module._parameters))
        undo.callback(module.__dict__["_buffers"].update, dict(module._buffers))
        for name, param in list(module._parameters.items()):
            if param is None:
                continue
            if id(param) not in made:
                whole = torch.empty(param.shape, dtype=dtype_of(param), device="cpu")
                made[id(param)] = nn.Parameter(whole, requires_grad=param.requires_grad)
            params[id(param)] = module._parameters[name] = made[id(param)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                made.setdefault(id(buffer), _make_fake(buffer))
                module._buffers[name] = made[id(buffer)]
    return list(made.values()), params


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Removes fsdp_c's forward hooks inside the context."""
    taken: list[tuple[Any, dict[int, Any]]] = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                own_keys = {key: hook for key, hook in hooks.items() if isinstance(hook, _C.Hook)}
                if own_keys:
                    taken.append((hooks, dict(hooks)))
                    for key in own_keys:
                        del hooks[key]
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)


def _register_piece_hooks(
    pieces: Sequence[Piece], trace: Trace, storages: Storages, undo: contextlib.ExitStack
) -> None:
    for number, piece in enumerate(pieces):
        first, last = piece.modules[0], piece.modules[-1]
        for module in piece.modules:
            entering = _entering(trace, number, piece, notes=module is first)
            leaving = _leaving(trace, number, piece, storages, notes=module is last)
            undo.callback(
                module.register_forward_pre_hook(entering, prepend=True, with_kwargs=True).remove
            )
            undo.callback(module.register_forward_hook(leaving).remove)


def _entering(trace: Trace, number: int, piece: Piece, notes: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if notes:
            trace.note("pre_forward", number, torch._C._current_graph_task_id() != -1)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        dtype = piece.input_dtype
        for i, leaf in enumerate(leaves):
            if dtype is not None and torch.is_tensor(leaf) and leaf.is_floating_point():
                leaves[i] = leaf.to(dtype)
        tracked = [i for i, t in enumerate(leaves) if torch.is_tensor(t) and t.requires_grad]
        if tracked and torch.is_grad_enabled():
            through: Any = _PieceInputs.apply(trace, number, *(leaves[i] for i in tracked))
            for i, tensor in zip(tracked, through):
                leaves[i] = tensor
        return pytree.tree_unflatten(leaves, spec)

    return hook


def _leaving(
    trace: Trace, number: int, piece: Piece, storages: Storages, notes: bool
) -> Callable[..., Any]:
    def announce(grad: torch.Tensor) -> None:
        trace.note("pre_backward", number)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        dtype = piece.output_dtype
        for i, leaf in enumerate(leaves):
            if dtype is not None and torch.is_tensor(leaf) and leaf.is_floating_point():
                leaves[i] = leaf.to(dtype)
        tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
        if notes:
            trace.note("post_forward", number, tuple(map(storages.number, tensors)))
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(announce)
        return pytree.tree_unflatten(leaves, spec)

    return hook


def _register_gradient_hooks(
    pieces: Sequence[Piece],
    params: dict[int, nn.Parameter],
    trace: Trace,
    storages: Storages,
    undo: contextlib.ExitStack,
) -> None:
    """Records which storages become gradients of parameters, and of which piece."""
    owner: dict[int, int] = {}
    sizes = [sum(1 for m in piece.modules for _ in m.modules()) for piece in pieces]
    for number in sorted(range(len(pieces)), key=lambda n: -sizes[n]):  # inner pieces last
        for module in pieces[number].modules:
            owner.update((id(param), number) for param in module.parameters())
    for fake in {id(p): p for p in params.values()}.values():
        if fake.requires_grad and id(fake) in owner:
            number = owner[id(fake)]

            def noted(param: torch.Tensor, number: int = number) -> None:
                if param.grad is not None:
                    trace.note("grad", storages.number(param.grad), number)

            undo.callback(fake.register_post_accumulate_grad_hook(noted).remove)
