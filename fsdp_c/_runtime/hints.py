"""Notes on exceptions: the module or parameter concerned, and the remedy.

The exception type and the first line of its message are torch's, so that code that catches torch's
exceptions works unchanged. A call's arguments are analyzed only after the call has failed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from .fsdp_units import get_original_class

P = ParamSpec("P")
Result = TypeVar("Result")

_POLICY = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
_FSDP1_ARGUMENTS = {
    "auto_wrap_policy": "fsdp_c.auto_shard(model, policy) takes the same policies",
    "backward_prefetch": "leave it out; set_modules_to_backward_prefetch() sets the units",
    "cpu_offload": "pass offload_policy=CPUOffloadPolicy()",
    "device_id": "parameters go to the mesh's device: call torch.cuda.set_device(local_rank) first",
    "device_mesh": "pass mesh",
    "forward_prefetch": "call set_modules_to_forward_prefetch()",
    "ignored_modules": "pass ignored_params=set(module.parameters()), or use fsdp_c.auto_shard, "
    "which has ignored_modules",
    "ignored_states": "pass ignored_params=set(...)",
    "limit_all_gathers": "leave it out: fsdp_c always limits the all-gathers in flight",
    "mixed_precision": f"pass mp_policy={_POLICY}",
    "param_init_fn": "shard the model on the meta device, then model.to_empty(device=...) and "
    "initialize it",
    "policy": "call fsdp_c.auto_shard(model, policy)",
    "process_group": "pass mesh=DeviceMesh.from_group(group, device_type)",
    "sharding_strategy": "FULL_SHARD is the default. SHARD_GRAD_OP is reshard_after_forward=False, "
    "HYBRID_SHARD is a 2-D mesh, and NO_SHARD is fsdp_c.replicate",
    "sync_module_states": "load weights with fsdp_c.load_full_state_dict(model, state)",
    "use_orig_params": "leave it out: FSDP2 keeps the original parameters, as DTensors",
}
"""Maps arguments of FSDP1 (and DDP) to their FSDP2 equivalents."""


def add_hint(error: BaseException, note: str) -> None:
    """Adds a note to an exception; before Python 3.11, a second line to its message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def with_hint(error: BaseException, note: str) -> BaseException:
    """Adds a note to ``error`` and returns it."""
    add_hint(error, note)
    return error


def format_names(names: Iterable[str], limit: int = 3) -> str:
    """Returns the first ``limit`` names in quotes, and the number of further names."""
    listed_names = list(names)
    text = ", ".join(f"'{name}'" for name in listed_names[:limit])
    return text + (f" and {len(listed_names) - limit} more" if len(listed_names) > limit else "")


def get_class_name(module: Any) -> str:
    """Returns the name of the class that a module had before it was sharded."""
    return get_original_class(module).__name__


@dataclass(frozen=True)
class _FailedCall:
    """The arguments and the exception of a failed call."""

    name: str
    module: Any
    kwargs: dict[str, Any]
    error: Exception

    @property
    def modules(self) -> list[Any]:
        return [*self.module] if isinstance(self.module, (list, tuple)) else [self.module]

    @property
    def classes(self) -> str:
        """The distinct class names of the modules."""
        return ", ".join(dict.fromkeys(map(get_class_name, self.modules)))

    @property
    def is_spmd(self) -> bool:
        """Whether ``mesh`` is a full SPMD mesh, in which ``dp_mesh_dims`` names dimensions."""
        return self.kwargs.get("dp_mesh_dims") is not None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self.modules:
            yield from module.named_parameters()


def hint_on_errors(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorator of ``fully_shard`` and ``replicate`` that adds remedies to their exceptions."""
    name = function.__name__

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            module = args[0] if args else kwargs.get("module")
            note = _find_hint(_FailedCall(name, module, dict(kwargs), error))
            if note is not None:
                add_hint(error, note)
            raise

    return run


def _find_hint(call: _FailedCall) -> str | None:
    try:
        return next((note for rule in _RULES if (note := rule(call)) is not None), None)
    except Exception:  # arguments may be of any type; a rule must not raise another exception
        return None


# ---- the arguments -------------------------------------------------------------------------------


def _hint_on_keywords(call: _FailedCall) -> str | None:
    if not isinstance(call.error, TypeError):
        return None
    text = str(call.error)
    if f"{call.name}()" not in text:
        return None
    if "positional argument" in text:
        return f"Pass all arguments but the module by keyword: {call.name}(model, mesh=mesh)."
    if "unexpected keyword" not in text:
        return None
    remedies = [
        f"{key}: {_FSDP1_ARGUMENTS[key]}." for key in call.kwargs if key in _FSDP1_ARGUMENTS
    ]
    return "\n".join(remedies) or f"help({call.name}) lists the arguments."


def _hint_on_module(call: _FailedCall) -> str | None:
    if isinstance(call.module, (list, tuple)) and not call.module:
        return f"The list of modules is empty: {call.name} needs at least one module."
    for item in call.modules:
        kind = type(item).__name__
        if isinstance(item, type) and issubclass(item, nn.Module):
            return f"{item.__name__} is a class: pass an instance, {item.__name__}(...)."
        if isinstance(item, torch.jit.ScriptModule):
            return f"{kind} is scripted: shard the module before torch.jit.script."
        if not isinstance(item, nn.Module):
            return (
                f"{call.name} takes a module or a list of modules, and got "
                f"a {type(call.module).__name__} with a {kind} in it."
                if item is not call.module
                else f"{call.name} takes a module or a list of modules, not a {kind}."
            )
    return None


def _hint_on_container(call: _FailedCall) -> str | None:
    if "do not implement forward" not in str(call.error):
        return None
    blocks = "blocks.values()" if isinstance(call.module, nn.ModuleDict) else "blocks"
    return (
        f"A {call.classes} has no forward. Shard each element, for block in {blocks}: "
        f"{call.name}(block), or all elements as one unit, {call.name}([*{blocks}])."
    )


def _hint_on_process_group(call: _FailedCall) -> str | None:
    if not dist.is_available() or dist.is_initialized():
        return None
    return (
        f"There is no process group for {call.classes}: start the script with torchrun, and call "
        f"torch.distributed.init_process_group() before {call.name}."
    )


def _hint_on_mesh(call: _FailedCall) -> str | None:
    mesh = call.kwargs.get("mesh")
    if mesh is None:
        return None
    if isinstance(mesh, dist.ProcessGroup):
        return "mesh: pass a mesh of the process group, DeviceMesh.from_group(group, 'cuda')."
    if not isinstance(mesh, DeviceMesh):
        return (
            f"mesh: a DeviceMesh, not the {type(mesh).__name__} {mesh!r}. For example "
            f"init_device_mesh('cuda', (torch.distributed.get_world_size(),)); None is all ranks."
        )
    if mesh.get_coordinate() is None:
        return (
            f"mesh: rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}: call "
            f"{call.name} on the ranks of the mesh only."
        )
    if call.is_spmd:
        return None
    names = mesh.mesh_dim_names
    if call.name == "replicate" and (mesh.ndim > 2 or (mesh.ndim == 2 and mesh.size(1) > 1)):
        return (
            f"mesh: pass the dimension to replicate over, such as mesh['{names[0]}']"
            if names
            else "mesh: pass a 1-D submesh"
        ) + f"; the mesh has {mesh.ndim} dimensions, and replicate uses one."
    if mesh.ndim > 2:
        return (
            f"mesh: pass the dimensions to shard over, such as mesh['{names[-1]}']"
            if names
            else "mesh: pass a 1-D or 2-D submesh"
        ) + f"; the mesh has {mesh.ndim} dimensions, and fully_shard uses at most 2."
    if mesh.ndim == 2 and not names:
        return (
            "mesh: name its dimensions, init_device_mesh(device, shape, "
            "mesh_dim_names=('replicate', 'shard'))."
        )
    return None


def _hint_on_policies(call: _FailedCall) -> str | None:
    policy = call.kwargs.get("mp_policy", MixedPrecisionPolicy())
    if not isinstance(policy, MixedPrecisionPolicy):
        return f"mp_policy: pass {_POLICY}, not {policy!r}; leave it out for full precision."
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            return f"mp_policy.{name}: a torch.dtype, not {dtype!r}: torch.bfloat16, for example."
    return None


def _hint_on_offload(call: _FailedCall) -> str | None:
    policy = call.kwargs.get("offload_policy", OffloadPolicy())
    if not isinstance(policy, OffloadPolicy):
        return f"offload_policy: pass CPUOffloadPolicy(), not {policy!r}."
    return None


def _hint_on_ignored(call: _FailedCall) -> str | None:
    ignored = call.kwargs.get("ignored_params")
    if ignored is None or isinstance(ignored, (set, frozenset)):
        return None
    owner = "head" if not isinstance(ignored, nn.Module) else type(ignored).__name__.lower()
    return (
        f"ignored_params: a set of parameters, not a {type(ignored).__name__}: "
        f"set(model.{owner}.parameters()), for example."
    )


def _hint_on_reshard(call: _FailedCall) -> str | None:
    if "reshard_after_forward" not in str(call.error) or call.is_spmd:
        return None
    mesh = call.kwargs.get("mesh")  # the last dimension is the one to shard over
    size = mesh.size(mesh.ndim - 1) if isinstance(mesh, DeviceMesh) else dist.get_world_size()
    sizes = [str(n) for n in range(2, size) if size % n == 0]
    return (
        "reshard_after_forward: True frees the parameters after forward, False keeps them; a "
        f"number keeps a shard for a group of that many ranks: {', '.join(sizes) or 'none'} here."
    )


def _hint_on_placement(call: _FailedCall) -> str | None:
    function = call.kwargs.get("shard_placement_fn")
    if function is None or call.is_spmd:
        return None
    if not callable(function):
        return (
            f"shard_placement_fn: a function of a parameter, not {function!r}: "
            f"lambda param: {function!r}, for example."
        )
    mesh = call.kwargs.get("mesh")  # the last dimension is the one to shard over
    world = mesh.size(mesh.ndim - 1) if isinstance(mesh, DeviceMesh) else dist.get_world_size()
    for name, param in call.parameters():
        result = function(param)
        dim = getattr(result, "dim", None)
        if result is not None and dim is None and not hasattr(result, "placement"):
            return f"shard_placement_fn gave {result!r} for '{name}': return Shard(dim) or None."
        if dim is None:
            continue
        if not -param.ndim <= dim < param.ndim:
            return f"'{name}' has {param.ndim} dimensions: return Shard(0) or None for it."
        if dim % param.ndim and param.size(dim) % world:
            return (
                f"'{name}' of {tuple(param.shape)} cannot be sharded evenly on dimension {dim}: "
                "return None for it, which shards dimension 0, also unevenly."
            )
    return None


# ---- the model -----------------------------------------------------------------------------------


def _hint_on_second_call(call: _FailedCall) -> str | None:
    text = str(call.error)
    if len({*map(id, call.modules)}) < len(call.modules):
        return "The list of modules contains a module twice: pass each module once."
    if "can only be applied to a module once" in text:
        return (
            f"{call.classes} is already sharded: remove the second call of {call.name}, or the "
            "call of auto_shard or of a trainer that shards the module, too."
        )
    if "already managed by `fully_shard`" in text or "more than once" in text:
        return (
            f"{call.classes} is already sharded or replicated: apply only one of fully_shard and "
            "replicate to a module. For HSDP pass a 2-D mesh to fully_shard."
        )
    return None


def _hint_on_order(call: _FailedCall) -> str | None:
    if call.is_spmd:
        return None
    names = [name for name, param in call.parameters() if isinstance(param, DTensor)]
    managed_modules = [m for m in call.modules if hasattr(m, "_is_fsdp_managed_module")]
    if not names or not managed_modules:
        return None
    verb = "was" if len(names) == 1 else "were"
    return (
        f"{format_names(names)} of {call.classes} {verb} sharded by the {call.name} call of a "
        "module around it: shard inner modules first, the whole model last."
    )


def _hint_on_scalar(call: _FailedCall) -> str | None:
    names = [name for name, param in call.parameters() if param.ndim == 0]
    if not names or "scalar" not in str(call.error):
        return None
    return (
        f"{format_names(names)} of {call.classes}: use nn.Parameter(torch.ones(1)) instead, which "
        "broadcasts equally, or add the parameter to ignored_params."
    )


_RULES: tuple[Callable[[_FailedCall], str | None], ...] = (
    _hint_on_keywords,
    _hint_on_module,
    _hint_on_process_group,
    _hint_on_container,
    _hint_on_mesh,
    _hint_on_policies,
    _hint_on_ignored,
    _hint_on_reshard,
    _hint_on_second_call,
    _hint_on_order,
    _hint_on_scalar,
    _hint_on_placement,
    _hint_on_offload,
)
"""The exception gets the note of the first rule that does not return None."""
