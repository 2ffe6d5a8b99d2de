"""Scenarios of all-gather extensions: hook calls, with arguments and state, around each gather."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behavior import Api, grads, scenario, weights
from releases import groups_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 8
PreGatherResult = tuple[tuple[torch.Tensor, ...], Any]


def halves(shard: torch.Tensor) -> PreGatherResult:
    """Returns half of the shard in its dtype and in float64, and integers."""
    half = shard / 2
    return (half, half.double(), torch.arange(3) + shard.numel()), "halves"


def halves_without_integers(shard: torch.Tensor) -> PreGatherResult:
    return halves(shard)[0][:2], None


def sum_up(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return outputs[0] + outputs[1].to(outputs[0].dtype)


def send_unchanged(shard: torch.Tensor) -> PreGatherResult:
    return (shard,), {"kind": "as it is"}


def first(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns a copy of the first output."""
    return outputs[0].clone()


def first_of_columns(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """As ``first``. Reshapes the output of the weight that is sharded on dim 1 to 3 x 4."""
    return outputs[0].reshape(3, 4) if outputs[0].numel() == 12 else outputs[0].clone()


def narrow(shard: torch.Tensor) -> PreGatherResult:
    return (shard.bfloat16(),), None


def send_padded(
    param: Any, send: Callable[[torch.Tensor], PreGatherResult]
) -> Callable[[torch.Tensor], PreGatherResult]:
    """Wraps ``send`` so that a smaller shard is padded to the size of the others."""

    def sent(shard: torch.Tensor) -> PreGatherResult:
        padded = shard.new_zeros(param.padded_sharded_param_size)
        padded[: len(shard)] = shard
        return send(padded)

    return sent


class Hooks:
    """Installs extension hooks on the shards of a model and records their calls."""

    def __init__(self, model: nn.Module, which: Callable[[str], bool] | None = None) -> None:
        self.calls: list[Any] = []
        self.model = model
        self.which = which or (lambda name: name.endswith("weight"))
        self.fails = ""  # kind of the hook whose calls raise; "": none

    def install(
        self,
        send: Callable[[torch.Tensor], PreGatherResult] = halves,
        make: Callable[..., Any] = sum_up,
    ) -> Hooks:
        for module in self.model.modules():
            for group in groups_of(module._get_fsdp_state()) if _is_unit(module) else ():
                for param in group.fsdp_params:
                    name = f"{param._module_info.param_name} of {tuple(param._orig_size)}"
                    if self.which(param._module_info.param_name):
                        self._install(name, group, param, send_padded(param, send), make)
        return self

    def _install(self, name: str, group: Any, param: Any, send: Any, make: Any) -> None:
        local = param.sharded_param._local_tensor
        local.fsdp_pre_all_gather = functools.partial(self._pre, name, group, local, send)
        local.fsdp_post_all_gather = functools.partial(self._post, name, group, make)

    def _record(self, kind: str, name: str, group: Any, *more: Any) -> None:
        state = str(group._training_state)
        self.calls.append((kind, name, state, torch.is_grad_enabled(), *more))
        if self.fails == kind:
            raise KeyError(f"the hook {kind} failed")

    def _pre(
        self,
        name: str,
        group: Any,
        local: torch.Tensor,
        send: Callable[[torch.Tensor], PreGatherResult],
        mesh: Any,
        size: Any,
        stride: Any,
        module: nn.Module,
        policy: Any,
    ) -> PreGatherResult:
        facts = (mesh.size(), mesh.ndim, tuple(size), tuple(stride), type(module).__name__)
        self._record("pre", name, group, *facts, policy.param_dtype)
        return send(local.detach())

    def _post(
        self,
        name: str,
        group: Any,
        make: Callable[..., torch.Tensor],
        outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        facts = [(tuple(output.shape), output.dtype) for output in outputs]
        given = None if out is None else (tuple(out.shape), out.dtype, type(out).__name__)
        self._record("post", name, group, facts, metadata, dtype, given)
        made = make(tuple(output.detach().clone() for output in outputs)).to(dtype)
        if out is None:
            return made, (made,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(made[: len(out)])
        return None


def _is_unit(module: nn.Module) -> bool:
    return hasattr(module, "_get_fsdp_state")


def layers(bias: bool = True, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(11)
    head = nn.Linear(width, width // 2)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(3)), head)


def batch(rank: int, step: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * rank + step))


def shard_layers(api: Api, model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    for layer in list(model)[:-1]:
        api.fully_shard(layer, **kwargs)
    return api.fully_shard(model, **kwargs)


def steps(
    model: nn.Module, rank: int, count: int = 2, micro: int = 1, width: int = WIDTH
) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record: list[Any] = []
    for step in range(count):
        for part in range(micro):
            model.set_requires_gradient_sync(part + 1 == micro)  # type: ignore[operator]
            loss = model(batch(rank, 7 * step + part, width)).square().mean()
            loss.backward()
            record.append(loss.detach())
        record.append(grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*record, weights(model)]


def memory(model: nn.Module) -> list[int]:
    """Returns the bytes of the all-gather outputs and inner tensors of all parameters."""
    return [
        tensor.untyped_storage().nbytes()
        for module in model.modules()
        for group in (groups_of(module._get_fsdp_state()) if _is_unit(module) else ())
        for param in group.fsdp_params
        for tensor in (*param.all_gather_outputs, *param._unsharded_inner_tensors)
    ]


def train_with_hooks(api: Api, send: Any = halves, make: Any = sum_up, **kwargs: Any) -> list[Any]:
    micro, width = kwargs.pop("micro", 1), kwargs.pop("width", WIDTH)
    model = shard_layers(api, layers(width=width), **kwargs)
    hooks = Hooks(model).install(send, make)
    return [steps(model, api.rank, micro=micro, width=width), hooks.calls, memory(model)]


@scenario()
def hooks_of_extensions(api: Api) -> dict[str, Any]:
    columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and len(p) == 3 else None}
    pair = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    return {
        "plain": train_with_hooks(api),
        "uneven rows": train_with_hooks(api, halves_without_integers, width=5),
        "uneven rows, mixed precision": train_with_hooks(
            api, halves_without_integers, width=5, mp_policy=MIXED
        ),
        "one input": train_with_hooks(api, send_unchanged, first),
        "in bf16": train_with_hooks(api, narrow, first),
        "mixed precision": train_with_hooks(api, mp_policy=MIXED),
        "mixed precision, in bf16": train_with_hooks(api, narrow, first, mp_policy=MIXED),
        "kept after forward": train_with_hooks(api, reshard_after_forward=False),
        "accumulated": train_with_hooks(api, micro=2),
        "accumulated, mixed precision": train_with_hooks(api, micro=2, mp_policy=MIXED),
        "replicas": train_with_hooks(api, mesh=pair),
        "offloaded": train_with_hooks(api, offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "some columns": _train_columns(api, columns),
    }


def _train_columns(api: Api, kwargs: dict[str, Any]) -> list[Any]:
    """Trains a model with one weight of 4 columns sharded on dim 1."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 3))
    for layer in model:
        api.fully_shard(layer, **kwargs)
    hooks = Hooks(api.fully_shard(model, **kwargs)).install(send_unchanged, first_of_columns)
    return [steps(model, api.rank), hooks.calls]


@scenario()
def hooks_of_extensions_in_groups_of_one(api: Api) -> list[Any]:
    model = shard_layers(api, layers(bias=False))
    hooks = Hooks(model).install()
    return [steps(model, api.rank), hooks.calls]


@scenario()
def hooks_of_extensions_when_prefetched(api: Api) -> list[Any]:
    model = shard_layers(api, layers())
    hooks = Hooks(model).install()
    for index in range(2):
        model[index].set_modules_to_forward_prefetch([model[index + 1]])
        model[index + 1].set_modules_to_backward_prefetch([model[index]])
    return [steps(model, api.rank), hooks.calls]


@scenario()
def hooks_of_extensions_unsharded_directly(api: Api) -> list[Any]:
    model = shard_layers(api, layers())
    hooks = Hooks(model).install()
    record: list[Any] = []
    for _ in range(2):
        handles = [unit.unshard(async_op=True) for unit in (*list(model)[:-1], model)]
        hooks.calls.append("started")
        handles[0].wait()
        hooks.calls.append("waited")
        record.append(steps(model, api.rank, count=1))
        model.reshard()
    return [*record, hooks.calls, memory(model)]


@scenario()
def hooks_of_extensions_in_evaluations(api: Api) -> list[Any]:
    model = shard_layers(api, layers())
    hooks = Hooks(model).install()
    with torch.no_grad():
        record = [model(batch(api.rank))]
    record += steps(model, api.rank)
    with torch.no_grad():
        record.append(model(batch(api.rank)))
    return [record, steps(model, api.rank), hooks.calls]


@scenario()
def hooks_of_extensions_in_two_dtypes(api: Api) -> list[Any]:
    """Gathers biases in bfloat16, which represents their values, and weights in float32."""
    model = layers()
    for layer in model:
        layer.bias.requires_grad_(False)
        layer.bias.data = layer.bias.data.bfloat16().float()
    hooks = Hooks(shard_layers(api, model), lambda name: name == "bias").install(narrow, first)
    return [steps(model, api.rank), hooks.calls]


@scenario(1)
def hooks_of_extensions_on_one_rank(api: Api) -> list[Any]:
    model = shard_layers(api, layers())
    hooks = Hooks(model).install(send_unchanged, first)
    results = [steps(model, api.rank)]
    plain = shard_layers(api, layers())
    return [*results, steps(plain, api.rank), [call[0] for call in hooks.calls]]


@scenario(1)
def several_inputs_on_one_rank(api: Api) -> list[Any]:
    model = shard_layers(api, layers())
    hooks = Hooks(model).install()
    plain = shard_layers(api, layers())
    results = [steps(model, api.rank), steps(plain, api.rank)]
    return [*results, [call[0] for call in hooks.calls]]


@scenario()
def hooks_of_extensions_that_are_replicated(api: Api) -> list[Any]:
    model = layers()
    for layer in list(model)[:-1]:
        api.replicate(layer)
    hooks = Hooks(api.replicate(model)).install(send_unchanged, first)
    return [steps(model, api.rank), [call[:2] for call in hooks.calls]]


# ---- changing and invalid results ----------------------------------------------------------------


@scenario()
def extension_inputs_of_varying_size(api: Api) -> list[Any]:
    """Each call of the pre hook makes the second input, and its output, one element longer.

    Returns results with the hooks and without, the lengths of each second output and of its
    input, and the memory that remains.
    """
    model = shard_layers(api, layers())
    sizes: list[int] = []

    def growing(shard: torch.Tensor) -> PreGatherResult:
        sizes.append(len(sizes) + 1)
        return (shard, torch.full((len(sizes),), float(len(sizes)))), len(sizes)

    hooks = Hooks(model).install(growing, first)
    results = steps(model, api.rank)
    plain = steps(shard_layers(api, layers()), api.rank)
    lengths = []
    for kind, _, _, _, outputs_or_mesh, metadata, *_ in hooks.calls:
        if kind == "post":
            _, ((length,), _) = outputs_or_mesh
            lengths.append((length, metadata))
    return [results, plain, lengths, memory(model)]


@scenario()
def outputs_changed_while_a_parameter_shares_their_memory(api: Api) -> Any:
    """The parameter shares memory with the outputs, whose dtype changes in the next gather."""
    model = shard_layers(api, layers())
    types = [torch.float32, torch.float64]

    def send_in_another_dtype(shard: torch.Tensor) -> PreGatherResult:
        return (shard.to(types[0]),), None

    local = model[0].weight._local_tensor
    local.fsdp_pre_all_gather = lambda *args: send_in_another_dtype(local.detach())
    local.fsdp_post_all_gather = lambda outputs, meta, dtype, out=None: (outputs[0], outputs)
    model(batch(api.rank)).sum().backward()
    types.reverse()
    return error_of(lambda: model(batch(api.rank)))


def error_of(call: Callable[[], Any]) -> Any:
    """Returns the type of the exception and the first line of its message, or None."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[:1]
    return None


INVALID_PRE: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda shard: None,
    "no pair": lambda shard: (shard, shard, shard),
    "no tensors": lambda shard: ((3,), None),
    "transposed": lambda shard: ((torch.ones(4, 3).t(),), None),
    "too small": lambda shard: ((shard[:1],), None),
}
INVALID_POST: dict[str, Callable[..., Any]] = {
    "nothing": lambda *args, out=None: None,
    "a tensor instead of a pair": lambda outputs, *args, out=None: outputs[0],
    "too few elements": lambda outputs, *args, out=None: (torch.ones(2), ()),
    "no tensor": lambda outputs, *args, out=None: (3, ()),
}


def shard_with_invalid_hooks(api: Api, pre: Any = None, make: Any = None) -> nn.Sequential:
    model = shard_layers(api, layers())
    hooks = Hooks(model).install(send_unchanged, first)
    local = model[0].weight._local_tensor
    if pre is not None:
        local.fsdp_pre_all_gather = lambda mesh, size, stride, module, policy: pre(local.detach())
    if make is not None:
        local.fsdp_post_all_gather = make
    hooks.calls.clear()
    return model


@scenario()
def hooks_with_invalid_results(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, pre in INVALID_PRE.items():
        model = shard_with_invalid_hooks(api, pre)
        results[f"pre: {name}"] = error_of(lambda m=model: m(batch(0)))  # type: ignore[misc]
    for name, make in INVALID_POST.items():
        model = shard_with_invalid_hooks(api, make=make)
        results[f"post: {name}"] = error_of(lambda m=model: m(batch(0)))  # type: ignore[misc]
    model = shard_layers(api, layers())
    model[0].weight._local_tensor.fsdp_pre_all_gather = lambda a, b: None
    results["only the pre hook"] = error_of(lambda: model(batch(0)))
    model = shard_with_invalid_hooks(api)
    model[0].weight._local_tensor.fsdp_pre_all_gather = lambda a, b: None
    results["two arguments"] = error_of(lambda: model(batch(0)))
    return results


@scenario(4)
def extensions_resharded_to_a_smaller_group(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, send, make in (("one", send_unchanged, first), ("several", halves, sum_up)):
        model = shard_layers(api, layers(), reshard_after_forward=2)
        Hooks(model).install(send, make)
        results[name] = error_of(lambda m=model: m(batch(0)).sum().backward())  # type: ignore[misc]
    return results


@scenario()
def failing_hooks(api: Api) -> dict[str, Any]:
    """A hook raises. After a reset all gathered memory is freed and training has equal bits."""
    results: dict[str, Any] = {}
    for kind in ("pre", "post"):
        for when in ("first", "second"):
            model = shard_layers(api, layers())
            hooks = Hooks(model).install()
            if when == "second":
                model(batch(api.rank)).sum().backward()
                model.zero_grad()
            hooks.fails = kind
            raised = error_of(lambda m=model: m(batch(0)))  # type: ignore[misc]
            hooks.fails = ""
            after: Any = None
            if api.is_fsdp_c:
                allocated = memory(model)
                retry_error = error_of(lambda m=model: m(batch(0)))  # type: ignore[misc]
                model.reset_iter_state()
                after = [sum(allocated), retry_error, sum(memory(model)), steps(model, api.rank)]
            results[f"{kind}, {when}"] = [raised, after]
    if api.is_fsdp_c:
        plain = shard_layers(api, layers())
        Hooks(plain).install()
        results["plain"] = steps(plain, api.rank)
    return results
