"""``State``: the parts of an FSDP state that do not run in each step.

The module registers forward hooks and runs lazy init for all states below a root.
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp._fully_shard._fsdp_state as torch_state
import torch.nn as nn
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import Variable
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.utils import _to_kwargs

import fsdp_c._C as _C

from .._compat import patches
from .._compat.guard import follow_patches, is_overridden, warn_of_patches_without_effect
from .._compat.missing_members import MissingStateMembers, register_group_hooks
from .._compat.shutdown import register_at_exit
from . import stall_monitor
from .comm_context import CommContext
from .forward_hooks import replace_hooks
from .hints import add_hint, format_names, get_class_name, with_hint
from .kernels import log_kernels
from .lint import check_model
from .mixed_precision import REDUCES_IN_PARAM_DTYPE, check_policy, make_dtype_error
from .plan_hash import set_plans
from .serialization import refuse_deepcopy
from .typed_params import pause_type_check
from .weak_modules import WeakModules, leave_lists

_TRACERS = tuple(getattr(_TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def _is_input_device(device: torch.device) -> bool:
    """Whether the root moves its arguments to ``device``, as DistributedDataParallel does."""
    custom_backend = torch._C._get_privateuse1_backend_name()
    return device.type in ("cuda", "hpu", "xpu", "mtia", custom_backend)


def _disable_functorch() -> contextlib.AbstractContextManager[Any]:
    """Keeps functorch's transforms from wrapping the tensors that are allocated inside."""
    if torch._C._are_functorch_transforms_active():
        return torch._C._DisableFuncTorch()
    return contextlib.nullcontext()


def _check_real_params(class_name: str, params: list[Any]) -> None:
    """Raises if a forward on fake tensors would write into the gathered real parameters."""
    ranks = max(getattr(param.mesh_info, "shard_mesh_size", 1) for param in params)
    if ranks > 1:
        raise RuntimeError(
            f"{class_name} cannot gather its real parameters from {ranks} ranks on fake tensors\n"
            "Create and shard the model under the FakeTensorMode, or use real inputs."
        )
    if not all(hasattr(param, "_unsharded_param") for param in params):
        raise RuntimeError(
            f"the first forward of {class_name} cannot run on fake tensors: its parameters are "
            "real, and fsdp_c keeps the unsharded tensors\n"
            "Create and shard the model under the FakeTensorMode, or run a real forward first."
        )


def _undo_lazy_init(root: State, states: list[Any], groups: list[Any]) -> None:
    """Undoes lazy init: ``states`` have no root afterwards. ``groups``: those of all states."""
    for state in states:
        state._is_root = None
    root._state_ctx.all_states = []
    for group in groups:
        group._module_fqn = None


class IterationContext(_C.IterationContext, FSDPStateContext):
    """Data that the states under one root share (``_C.IterationContext``).

    The class is a subclass of torch's ``FSDPStateContext``.
    """

    def __init__(self) -> None:
        _C.IterationContext.__init__(self)


@follow_patches(FSDPState)
class State(_C.State, FSDPState, MissingStateMembers):
    """The state of the modules of one ``fully_shard`` call; a subclass of torch's ``FSDPState``.

    ``_C.State`` implements the forward hooks, pre-backward and the end of backward. Before lazy
    init each state has its own contexts. The first state whose forward runs becomes the root, and
    shares its contexts with all states below it.
    """

    _context_class: type[IterationContext] = IterationContext
    _reduction_handle: Any = None  # the GradientReductionHandle that was not waited for
    _modules = WeakModules(when_freed="_note_freed_modules")
    _leave_lists = leave_lists

    def __init__(self) -> None:
        self._patch_lease = patches.lease()
        # FSDPState.__init__ is not called: it would make torch's contexts.
        self._state_ctx = self._context_class()
        self._auto_reshard_after_forward: bool | None = True

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raises the exception that torch raises for the modules of a state."""
        refuse_deepcopy(*self._modules)

    def init(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard_after_forward: bool,
    ) -> None:
        """Adds ``modules`` to torch's state mapping and registers forward hooks on them."""
        self._modules = modules
        self._device = device
        self._device_handle = _get_device_handle(device.type)
        check_policy(mp_policy)
        self._mp_policy = mp_policy
        self._auto_reshard_after_forward = auto_reshard_after_forward
        self._comm_ctx = CommContext(device)
        self._moves_inputs = _is_input_device(device)
        for module in modules:
            _insert_module_state(module, self)
        self._register_hooks()
        if not any(is_overridden(self, FSDPState, n) for n in ("_pre_forward", "_post_forward")):
            replace_hooks(self)

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes of forward's inputs and outputs. A new value applies to the next forward."""
        return self._policy

    @_mp_policy.setter
    def _mp_policy(self, value: MixedPrecisionPolicy) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype"):
            if isinstance(dtype := getattr(value, field), str):
                raise make_dtype_error(dtype, field)
        self._policy = value
        self._input_dtype = value.param_dtype if value.cast_forward_inputs else None
        self._output_dtype = value.output_dtype

    def _register_hooks(self) -> None:
        """Registers torch's forward hooks for one module or for a list of modules."""
        if len(self._modules) > 1:
            handle = register_group_hooks(torch_state, self)
            self._pre_forward_hook_handle = self._post_forward_hook_handle = handle
            return
        module = self._modules[0]
        self._pre_forward_hook_handle: Any = module.register_forward_pre_hook(
            self._pre_forward, prepend=True, with_kwargs=True
        )
        self._post_forward_hook_handle: Any = module.register_forward_hook(
            self._post_forward, prepend=False
        )

    def _inputs_to_device(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves all tensors in the arguments of an iteration's first forward to the device."""
        if not args and not kwargs:
            return args, kwargs
        with torch.profiler.record_function("FSDP::inputs_to_device"):
            moved_args, moved_kwargs = _to_kwargs(args, kwargs, self._device, False)
        return moved_args[0], moved_kwargs[0]

    def _check_modes(self) -> None:
        """Checks that no dispatch mode or jit trace makes the iteration incorrect.

        Later forwards reuse unsharded parameters, so fake parameters would never be replaced.

        Raises:
            RuntimeError: The parameters are real and the forward is exported or traced, or their
                gather would be on fake tensors. Also raised if
                ``allow_mutation_on_saved_tensors`` would clone freed parameters.
        """
        if getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False):
            self._check_mutations()
        if not (torch.jit.is_tracing() or any(map(_get_dispatch_mode, _TRACERS))):
            return
        states = self._list_all_states()
        params = [p for state in states for g in state._fsdp_param_groups for p in g.fsdp_params]
        if all(is_fake(param._sharded_param_data) for param in params):
            return
        key = _TorchDispatchModeKey
        is_fake_mode = _get_dispatch_mode(key.FAKE) is not None
        is_graph = torch.compiler.is_exporting() or torch.jit.is_tracing()
        is_graph = is_graph or _get_dispatch_mode(key.FUNCTIONAL) is not None
        if is_graph or (is_fake_mode and _get_dispatch_mode(key.PROXY) is not None):
            raise RuntimeError(
                f"{type(self._modules[0]).__name__} cannot be exported or traced after "
                "fully_shard: a graph would miss the collectives that hooks issue\n"
                "Export the model before it is sharded, or an unsharded copy with the full "
                "parameters. torch.compile works, because it breaks graphs at the hooks."
            )
        if is_fake_mode:
            _check_real_params(type(self._modules[0]).__name__, params)

    def _check_mutations(self) -> None:
        """Raises under ``allow_mutation_on_saved_tensors`` if parameters are freed after forward.

        The context identifies saved tensors by address, and clones a saved tensor when its address
        is written. A clone of freed memory crashes the process. Aliases of shards are not freed.
        """
        self._lazy_init()  # sets dtypes, and the root's groups to stay unsharded
        for state in self._list_all_states():
            groups = state._fsdp_param_groups
            if any(g._reshard_after_forward and not g._aliases_shards for g in groups):
                raise RuntimeError(
                    f"{get_class_name(state._modules[0])} is resharded after forward, and "
                    "allow_mutation_on_saved_tensors() would clone parameters that were freed\n"
                    "Pass reshard_after_forward=False to fully_shard, or leave that context."
                )

    def _list_all_states(self) -> list[State]:
        """Returns all states in the module trees, including other roots and their states."""
        modules = chain.from_iterable(module.modules() for module in self._modules)
        states = dict.fromkeys(self._get_state_for_module(module) for module in modules)
        return [state for state in states if isinstance(state, State)]

    def _list_states_of_root(self) -> list[State]:
        """Returns all states in the root's tree, in ``named_modules()`` order.

        Raises:
            RuntimeError: A module was sharded by torch's ``fully_shard``, is a root itself, or has
                manual finalization, which is a setting of roots.
        """
        root = self._modules[0]
        states: list[State] = []
        for name, module in root.named_modules():
            state = self._get_state_for_module(module)
            if state is None or state in states:
                continue
            if not isinstance(state, State):
                raise RuntimeError(
                    f"module '{name}' was sharded by torch.distributed.fsdp.fully_shard, its "
                    "root by fsdp_c: use one of the two for all modules of a model"
                )
            if module is not root and state._is_root is not None:
                error = RuntimeError(
                    f"{self._state_name} state has already been lazily initialized for {name}\n"
                    f"{self._state_name} requires running forward through the root module first"
                )
                raise with_hint(
                    error,
                    f"'{name}' was called, or unsharded, before {get_class_name(root)}: run the "
                    "whole model first; after that, parts of it may be called alone.",
                )
            if state is not self and state._state_ctx.manual_finalization:
                raise RuntimeError(
                    "set_manual_backward_finalization must be called on the root "
                    f"{self._state_name} module: it was called on '{name}'"
                )
            states.append(state)
        return states

    def _complete_reset(self) -> None:
        """Drops reduced gradients if torch does so (2.15), and resets the other roots below.

        The core calls it at the end of ``_reset_iter_state``. Other roots are units that ran before
        this root, and ``fully_shard`` units below ``replicate``.
        """
        if REDUCES_IN_PARAM_DTYPE:
            for state in self._state_ctx.all_states:
                for group in state._fsdp_param_groups:
                    group._drop_sharded_grads()
        for state in self._list_all_states():
            if state._is_root and state._state_ctx is not self._state_ctx:
                state._reset_iter_state()

    def _lazy_init(self) -> None:
        """Makes this state the root: sets names, shares contexts, validates parameters.

        An exception leaves all states without a root.
        """
        if self._is_root is not None:
            return
        if len(self._modules) > 1:
            error = RuntimeError(
                f"{self._state_name} requires a single root module but got {self._modules}"
            )
            names = ", ".join(map(get_class_name, self._modules))
            raise with_hint(
                error,
                f"The unit of {names} was called without a root: call fully_shard on the whole "
                "model, too, after all other calls.",
            )
        warn_of_patches_without_effect()
        patches.apply(patches.Scope.EXIT, "atexit", register_at_exit)
        stall_monitor.watch(self)
        states = self._list_states_of_root()
        groups = [group for state in states for group in state._fsdp_param_groups]
        self._is_root = True
        try:
            self._state_ctx.all_states = states
            self._init_fqns()
            self._check_no_duplicates(groups)
            with _disable_functorch(), pause_type_check():
                for group in groups:
                    group.lazy_init()
            self._comm_ctx.lazy_init(self._device)
        except BaseException:
            _undo_lazy_init(self, [self], groups)
            raise
        mesh_infos = [group.post_forward_mesh_info for group in self._fsdp_param_groups]
        if self._auto_reshard_after_forward:
            # Backward needs the root's parameters first, so they stay unsharded after forward.
            for group in self._fsdp_param_groups:
                group.post_forward_mesh_info = None
        self._init_shared_state()
        for state in states:
            state._is_root = state is self
        try:
            set_plans(states)
        except BaseException:
            _undo_lazy_init(self, states, groups)
            for group, mesh_info in zip(self._fsdp_param_groups, mesh_infos):
                group.post_forward_mesh_info = mesh_info
            raise
        check_model(self._modules[0])
        log_kernels(self._device)

    def _check_no_duplicates(self, groups: list[Any]) -> None:
        try:
            self._validate_no_duplicate_params()
        except ValueError as error:
            names: dict[Any, list[str]] = {}
            for group in groups:
                for param in group.fsdp_params:
                    names.setdefault(param._orig_param_uid, []).append(param._param_fqn)
            names_of_tied = next(
                (format_names(fqns) for fqns in names.values() if len(fqns) > 1), "They"
            )
            add_hint(
                error,
                f"{names_of_tied} are one parameter in two units: shard their modules in one call, "
                "or leave all of them to the root; fsdp_c.auto_shard does so.",
            )
            raise

    def _register_root_post_backward_final_callback(self) -> None:
        """Queues the end of backward. The core does not call this method, but patches may."""
        if not self._state_ctx.post_backward_final_callback_queued:
            self._state_ctx.post_backward_final_callback_queued = True
            Variable._execution_engine.queue_callback(self._root_post_backward_final_callback)

    def _init_shared_state(self) -> None:
        groups = []
        for state in self._state_ctx.all_states:
            state._state_ctx = self._state_ctx
            state._comm_ctx = self._comm_ctx
            groups += state._fsdp_param_groups
        for group in groups:
            group.comm_ctx = self._comm_ctx
        self._comm_ctx.reduce_scatter_max_input_buffers = max(
            (group.reduce_scatter_max_input_buffers for group in groups), default=1
        )
