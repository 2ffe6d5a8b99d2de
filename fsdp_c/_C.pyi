"""Types of the extension module. The docstrings of the module and csrc/README.md describe them."""

from collections.abc import Callable, MutableSet, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from typing_extensions import Self

def bind(**objects: Any) -> None: ...
def clip_collect(
    tensors: list[torch.Tensor], are_params: bool, /
) -> tuple[list[torch.Tensor], list[tuple[Any, Any]], list[int]]: ...
def clip_norm(
    gradients: list[torch.Tensor],
    indices: list[int],
    groups: list[tuple[tuple[str, ...], Any]],
    /,
) -> float | None: ...
def clip_scale(
    gradients: list[torch.Tensor],
    max_norm: float,
    total: float,
    max_numel: int,
    all_or_none: bool,
    /,
) -> tuple[float, list[torch.Tensor]] | None: ...

GROUP_METHODS: tuple[str, ...]
STATE_METHODS: tuple[str, ...]
CALL_GATHER: int
CALL_REDUCE: int
CALL_MEMORY: int
CALL_SWAP: int
CALL_GRADS: int
CALL_NODE_CLASS: int
CALL_NODE: int
CUDA_KERNELS: int  # 1: built with nvcc; 0: NVRTC's kernels (use_jit), or torch's operations

def guard_bind(
    group_methods: tuple[Any, ...],
    state_methods: tuple[Any, ...],
    entries: tuple[Any, ...],
    log_cache: dict[int, bool],
    log_enabled: Callable[[], bool],
    /,
) -> None: ...
def bump_shard_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, /) -> None: ...
def local_group(
    params: list[torch.Tensor],
    state: dict[Any, Any],
    keys: tuple[str | None, ...],
    layout_cache: dict[int, tuple[Any, Any]],
    layouts_equal: Callable[[Any, Any], bool],
    /,
) -> tuple[list[Any], ...] | None: ...
def make_dtensors(local: torch.Tensor, spec: Any, /) -> bool: ...
def local_lists(
    lists: tuple[list[Any], ...],
    layout_cache: dict[int, tuple[Any, Any]],
    layouts_equal: Callable[[Any, Any], bool],
    /,
) -> tuple[list[Any], ...] | None: ...
def has_memory(tensor: torch.Tensor, /) -> bool: ...
def recorder_read(count: int, /) -> tuple[int, bytes]: ...
def recorder_write(path: str, header: bytes, /) -> None: ...
def recorder_write_on_signal(signum: int, path: str, header: bytes, /) -> None: ...
def collective_entries(group: str, /) -> tuple[int, bytes]: ...
def collective_signature(group: str, number: int, /) -> int: ...
def checksum_intervals(group: str, /) -> list[tuple[int, int]]: ...
def checksum_entries(group: str, number: int, /) -> tuple[int, bytes]: ...
def label_blocks(group: str, /) -> list[tuple[int, int, int]]: ...
def collective_difference(
    a: tuple[int, int, bytes], b: tuple[int, int, bytes], issued: bool, /
) -> str: ...
def stop_collectives(group: str, text: str, /) -> None: ...
def shm_group(group: ProcessGroup, /) -> ProcessGroup | None: ...
def enter_shm(group: ProcessGroup, use: int, nbytes: int, /) -> object: ...
def set_gradient_all_reduce(enabled: bool, /) -> bool: ...
def leave_shm(entered: object, /) -> None: ...
def pause_shm(group: ProcessGroup, paused: bool, /) -> None: ...
def memory() -> dict[str, int]: ...
def trim_memory() -> None: ...
def use_jit(
    *,
    launch: int = 0,
    moves: int = 0,
    casts: int = 0,
    checksums: int = 0,
    capture: int = 0,
    bind: int = 0,
    context: int = 0,
    many_moves: int = 0,
    many_casts: int = 0,
) -> None: ...
def kernels_of(device: torch.device, /) -> str: ...

class _testing:  # a module
    assertions: bool
    @staticmethod
    def fault_arm(n: int, /) -> None: ...
    @staticmethod
    def kernels(type: int = 0, /) -> Any: ...
    @staticmethod
    def simulate_kernels(capsule: Any, /) -> None: ...
    @staticmethod
    def hide_kernels(on: bool, /) -> None: ...
    @staticmethod
    def set_min_owned_chunk_bytes(bytes: int, /) -> None: ...
    @staticmethod
    def overrides(group_or_state: ParamGroup | State, /) -> int: ...

class Param:
    sharded_param: Any
    _sharded_param_data: torch.Tensor
    _accumulated: torch.Tensor | None
    _partial: torch.Tensor | None
    all_gather_outputs: list[torch.Tensor]
    is_dtensor: Any
    orig_dtype: torch.dtype
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    _grad_dtype: torch.dtype | None
    sharded_grad_dtype: torch.dtype | None
    _has_sharded_grad_dtype_override: bool
    _defers_cast: bool
    _unsharded_param: nn.Parameter
    _sharded_post_forward_param: nn.Parameter | None
    _sharded_post_forward_param_data: torch.Tensor | None
    _sharding_spec: DTensorSpec
    _param_fqn: str | None
    _extended: bool
    _unsharded_inner_tensors: list[torch.Tensor]
    offload_to_cpu: bool
    pin_memory: bool
    _swapping: bool
    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        world: int,
        rank: int,
        post_forward: tuple[int, int] | None = None,
    ) -> None: ...
    @property
    def unsharded_param(self) -> nn.Parameter: ...
    def _drop_grad(self) -> None: ...
    @property
    def padded_numel(self) -> int: ...
    @property
    def chunk_rows(self) -> int: ...
    @property
    def local_rows(self) -> int: ...
    @property
    def rows(self) -> int: ...
    def _set_slots(self, pairs: list[tuple[nn.Module, str]], direct: list[bool], /) -> None: ...
    def _register_sharded(self) -> None: ...
    def _release_unsharded(self) -> None: ...
    def _cut(self, tensor: torch.Tensor, dim: int) -> torch.Tensor: ...
    def _note_shard(self) -> None: ...

class CommContext:
    reduce_scatter_max_input_buffers: int
    post_forward_order: list[Any]
    def __new__(cls, device: torch.device) -> Self: ...
    @property
    def reductions_in_flight(self) -> int: ...
    @property
    def deferred_collectives(self) -> int: ...
    def lazy_init(self, device: torch.device = ..., /) -> None: ...
    def _stream_numbers(self, role: int, /) -> tuple[int, int, int] | None: ...

class IterationContext:
    all_states: list[Any]
    iter_forward_root: State | None
    post_optim_event: Any
    post_backward_final_callback_queued: bool
    is_last_backward: bool
    manual_finalization: bool
    @property
    def reduction_pending(self) -> bool: ...

class ParamGroup:
    fsdp_params: Any
    comm_ctx: Any
    _sharded_state: Any
    _all_gather_result: Any
    _post_forward_indices: Any
    _partial_reduce_output: Any
    _param_group_index: int
    _bucket_bytes: int
    _sole_bucket_bytes: int
    _reduction_overlap: bool | None
    @property
    def _buckets(self) -> list[tuple[int, int]]: ...
    _num_param_groups: int
    @property
    def _aliases_shards(self) -> bool: ...
    @property
    def _deferred(self) -> bool: ...
    _uses_fallback_gather: bool
    _param_calls: int
    _uses_fallback_reduce: bool
    _has_reduce_hook: bool
    gradient_divide_factor: float | None
    reduce_grads: bool
    all_reduce_grads: bool
    reshard_after_backward: bool
    unshard_async_op: bool
    unshard_in_backward: bool
    force_sum_reduction_for_comms: bool
    reduce_scatter_unused_params: bool
    _keep_unsharded_storage: bool
    _training_state: TrainingState
    _module_fqn: str | None
    _orig_dtype: torch.dtype | None
    _reduce_dtype: torch.dtype | None
    _reshard_after_forward: bool
    def __init__(
        self,
        params: Sequence[Param],
        comm_ctx: CommContext,
        device: torch.device,
        pg_name: str | None,
        world: int,
        rank: int,
        module_count: int,
    ) -> None: ...
    @property
    def is_sharded(self) -> bool: ...
    @property
    def is_sharded_post_forward(self) -> bool: ...
    @property
    def is_unsharded(self) -> bool: ...
    def unshard(self, async_op: bool = False) -> None: ...
    def wait_for_unshard(self) -> None: ...
    def reshard(self) -> None: ...
    def _to_sharded(self) -> None: ...
    def _to_unsharded(self) -> None: ...
    def _to_sharded_post_forward(self) -> None: ...
    def pre_backward(self, default_prefetch: bool = True, *unused: Any) -> None: ...
    def post_backward(self, *unused: Any) -> None: ...
    def finalize_backward(self) -> None: ...
    def _reset_iter_state(self) -> None: ...
    def _invalidate(self) -> None: ...
    def _drop_sharded_grads(self) -> None: ...
    def _set_process_group(
        self, kind: str, name: str | None, world: int, rank: int, group: Any = None, /
    ) -> None: ...
    def _set_plans(
        self,
        shard: int,
        scatter: int,
        replicate: int,
        post_forward: int,
        root: int,
        checksums: bool,
        /,
    ) -> None: ...
    def _set_memory(self, gather: Any, reduce: Any, /) -> None: ...
    def _set_unit(self, state: State, index: int, siblings: int, /) -> None: ...
    def _check(self) -> None: ...

class State:
    _fsdp_param_groups: list[Any]
    _states_to_forward_prefetch: list[Any]
    _states_to_backward_prefetch: list[Any]
    _state_ctx: Any
    _comm_ctx: Any
    _training_state: TrainingState
    _is_root: bool | None
    _input_dtype: torch.dtype | None
    _output_dtype: torch.dtype | None
    _moves_inputs: bool
    _modules_to_run_forward: set[nn.Module]
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
    def _post_forward(self, module: nn.Module, args: Any, output: Any, /) -> Any: ...
    def _pre_backward(self, grad: torch.Tensor, /) -> torch.Tensor: ...
    def _root_post_backward_final_callback(self) -> None: ...
    def _start_finalization(self) -> None: ...
    def _complete_finalization(self) -> None: ...
    def _reset_iter_state(self) -> None: ...
    def _note_freed_modules(self) -> None: ...

class Hook:
    __call__: Callable[..., Any]
    def __new__(
        cls,
        state: State,
        post: bool,
        torch_hook: Callable[..., Any],
        modules: MutableSet[nn.Module] | None = None,
    ) -> Hook: ...
    def __getattr__(self, name: str) -> Any: ...
