"""Typical mistakes of users: the exception that torch raises, and the note that fsdp_c adds to it.

Each mistake is a function of an :class:`Api`. An :class:`Api` defines its module classes anew,
because torch caches one sharded class per module class.

Mistakes during which no fsdp_c code runs are not listed:

- A second ``backward()`` through a freed graph fails in a node of the loss. torch's message names
  the remedy, ``retain_graph=True``.
- A method other than ``forward`` that uses parameters of the root fails in DTensor.
- ``model.no_sync()`` fails in ``nn.Module``.
- ``DDP(model)`` of a sharded model fails in DTensor. test_configuration_warnings.py tests it.

A compiled model trains, so torch.compile is no mistake.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import Shard


class Api:
    """``fully_shard`` and ``replicate`` of one implementation, and modules to call them on."""

    def __init__(self, fully_shard: Any, replicate: Any) -> None:
        self.shard = fully_shard
        self.replicate = replicate

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Linear(8, 16)
                self.down = nn.Linear(16, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.down(torch.relu(self.up(x)))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Linear(8, 8)
                self.blocks = nn.ModuleList([Block(), Block()])
                self.head = nn.Linear(8, 8, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.embed(x)
                for block in self.blocks:
                    x = block(x)
                return self.head(x)

        self.Model: Any = Model
        self.Block: Any = Block
        self.Linear: Any = type("Linear", (nn.Linear,), {})

    def sharded(self, **kwargs: Any) -> Any:
        model = self.Model()
        for block in model.blocks:
            self.shard(block, **kwargs)
        return self.shard(model, **kwargs)

    def train(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()


class Mistake(NamedTuple):
    """A mistake and the expected messages."""

    first_line: str
    """The exception's type and the beginning of its message."""
    note: str
    """A substring of the note that fsdp_c adds."""
    make: Callable[[Api], Any]
    """Makes the mistake and raises torch's exception."""


MISTAKES: dict[str, Mistake] = {}


def mistake(first_line: str, note: str) -> Callable[[Callable[[Api], Any]], Callable[[Api], Any]]:
    """Returns a decorator that adds the function to MISTAKES under its name."""

    def register(make: Callable[[Api], Any]) -> Callable[[Api], Any]:
        MISTAKES[make.__name__] = Mistake(first_line, note, make)
        return make

    return register


# ---- the first argument --------------------------------------------------------------------------


@mistake("ValueError: Error initializing torch.distributed using env://", "with torchrun, and call")
def no_process_group(api: Api) -> None:
    dist.destroy_process_group()
    api.shard(api.Model())


@mistake("TypeError: 'type' object is not iterable", "Model is a class: pass an instance")
def module_class_instead_of_module(api: Api) -> None:
    api.shard(api.Model)


@mistake("AttributeError: 'str' object has no attribute 'modules'", "or a list of modules, not a s")
def string_instead_of_module(api: Api) -> None:
    api.shard("model")


@mistake(
    "AttributeError: 'Parameter' object has no attribute 'modules'", "modules, not a generator"
)
def parameters_instead_of_module(api: Api) -> None:
    api.shard(api.Model().parameters())


@mistake("AttributeError: 'NoneType' object has no attribute 'modules'", "list with a NoneType in")
def none_in_list_of_modules(api: Api) -> None:
    api.shard([nn.Linear(2, 2), None])


@mistake("IndexError: tuple index out of range", "The list of modules is empty")
def empty_list_of_modules(api: Api) -> None:
    api.shard([])


@mistake("ValueError: fully_shard does not support containers", "for block in blocks: fully_shard(")
def module_list(api: Api) -> None:
    api.shard(api.Model().blocks)


@mistake(
    "ValueError: fully_shard does not support containers", "unit, fully_shard([*blocks.values()])"
)
def module_dict(api: Api) -> None:
    api.shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))


@mistake("AssertionError: Each distinct composable distributed API", "contains a module twice")
def module_twice_in_list(api: Api) -> None:
    layer = api.Linear(8, 8)
    api.shard([api.Linear(4, 4), layer, layer])


@mistake("AssertionError: Each distinct composable distributed API", "Model is already sharded")
def fully_shard_twice(api: Api) -> None:
    api.shard(api.sharded())


@mistake(
    "TypeError: Invariant encountered", "'up.weight', 'up.bias', 'down.weight' and 1 more of B"
)
def root_sharded_before_child(api: Api) -> None:
    model = api.shard(api.Model())
    api.shard(model.blocks[0])


@mistake(
    "RuntimeError: register_forward_pre_hook is not supported on", "is scripted: shard the mod"
)
def scripted_module(api: Api) -> None:
    api.shard(torch.jit.script(nn.Linear(8, 8)))


@mistake(
    "RuntimeError: Cannot apply `replicate()` on a Module already", "Model is already sharded or"
)
def replicate_after_fully_shard(api: Api) -> None:
    api.replicate(api.sharded())


@mistake("AssertionError: Inserting ReplicateModel(", "For HSDP pass a 2-D mesh to fully_shard")
def fully_shard_after_replicate(api: Api) -> None:
    api.shard(api.replicate(api.Model()))


# ---- meshes --------------------------------------------------------------------------------------


@mistake("AttributeError: 'int' object has no attribute 'ndim'", "a DeviceMesh, not the int 8")
def int_instead_of_mesh(api: Api) -> None:
    api.shard(api.Model(), mesh=8)


@mistake("AttributeError: 'tuple' object has no attribute 'ndim'", "not the tuple (2, 4)")
def shape_instead_of_mesh(api: Api) -> None:
    api.shard(api.Model(), mesh=(2, 4))


@mistake("AttributeError: 'str' object has no attribute 'ndim'", "a DeviceMesh, not the str 'cpu'")
def device_name_instead_of_mesh(api: Api) -> None:
    api.shard(api.Model(), mesh="cpu")


@mistake(
    "AttributeError: 'torch._C._distributed_c10d.ProcessGroup' object", "DeviceMesh.from_group("
)
def process_group_instead_of_mesh(api: Api) -> None:
    api.shard(api.Model(), mesh=dist.group.WORLD)


@mistake("ValueError: fully_shard expects a 1D or 2D DeviceMesh but got", "such as mesh['c']")
def mesh_of_three_dimensions(api: Api) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    api.shard(api.Model(), mesh=mesh)


@mistake(
    "AssertionError: Please init the 2D mesh for HSDP", "mesh_dim_names=('replicate', 'shard')"
)
def two_dimensional_mesh_without_names(api: Api) -> None:
    api.shard(api.Model(), mesh=init_device_mesh("cpu", (2, 4)))


@mistake("ValueError: replicate expects a 1D DeviceMesh but got", "such as mesh['a']")
def two_dimensional_mesh_for_replicate(api: Api) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    api.replicate(api.Model(), mesh=mesh)


@mistake(
    "ValueError: replicate expects a 1D DeviceMesh but got", "pass a 1-D submesh; the mesh has"
)
def two_dimensional_mesh_without_names_for_replicate(api: Api) -> None:
    api.replicate(api.Model(), mesh=init_device_mesh("cpu", (2, 4)))


@mistake("IndexError: list index out of range", "rank 0 is not in the mesh [1, 2]")
def mesh_without_this_rank(api: Api) -> None:
    api.shard(api.Model(), mesh=DeviceMesh("cpu", [1, 2]))


@mistake(
    "TypeError: fully_shard() takes 1 positional argument but 2", "Pass all arguments but the m"
)
def mesh_as_positional_argument(api: Api) -> None:
    api.shard(api.Model(), init_device_mesh("cpu", (8,)))


# ---- policies ------------------------------------------------------------------------------------


@mistake(
    "AttributeError: 'torch.dtype' object has no attribute 'param_dtype'", "not torch.bfloat16"
)
def dtype_instead_of_policy(api: Api) -> None:
    api.train(api.shard(api.Model(), mp_policy=torch.bfloat16))


@mistake(
    "AttributeError: 'dict' object has no attribute 'param_dtype'", "MixedPrecisionPolicy(para"
)
def dict_instead_of_policy(api: Api) -> None:
    api.train(api.shard(api.Model(), mp_policy={"param_dtype": torch.bfloat16}))


@mistake(
    "AttributeError: 'NoneType' object has no attribute 'param_dtype'", "leave it out for full"
)
def none_instead_of_policy(api: Api) -> None:
    api.train(api.shard(api.Model(), mp_policy=None))


@mistake(
    "AttributeError: 'MixedPrecision' object has no attribute 'output_dtype'", "mp_policy: pass"
)
def policy_of_fsdp1(api: Api) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    api.train(api.shard(api.Model(), mp_policy=policy), torch.bfloat16)


@mistake(
    "RuntimeError: Invalid device string: 'bfloat16'", "mp_policy.param_dtype: a torch.dtype, n"
)
def dtype_name_in_policy(api: Api) -> None:
    api.train(api.shard(api.Model(), mp_policy=MixedPrecisionPolicy(param_dtype="bfloat16")))  # type: ignore[arg-type]


@mistake(
    "TypeError: empty(): argument 'dtype' must be torch.dtype, not str", "mp_policy.reduce_dtype: a"
)
def reduce_dtype_name_in_policy(api: Api) -> None:
    api.train(api.shard(api.Model(), mp_policy=MixedPrecisionPolicy(reduce_dtype="float32")))  # type: ignore[arg-type]


@mistake("RuntimeError: Invalid device string: 'bf16'", "mp_policy.output_dtype: a torch.dtype, n")
def output_dtype_name_in_policy(api: Api) -> None:
    api.train(api.shard(api.Model(), mp_policy=MixedPrecisionPolicy(output_dtype="bf16")))  # type: ignore[arg-type]


# ---- ignored parameters --------------------------------------------------------------------------


@mistake(
    "RuntimeError: The size of tensor a (16) must match", "a set of parameters, not a Parameter"
)
def single_ignored_parameter(api: Api) -> None:
    model = api.Model()
    api.shard(model, ignored_params=model.head.weight)


@mistake(
    "RuntimeError: Boolean value of Tensor with more than one", "of parameters, not a generator"
)
def generator_of_ignored_parameters(api: Api) -> None:
    model = api.Model()
    api.shard(model, ignored_params=model.head.parameters())


@mistake(
    "RuntimeError: Boolean value of Tensor with more than one", "a set of parameters, not a list"
)
def list_of_ignored_parameters(api: Api) -> None:
    model = api.Model()
    api.shard(model, ignored_params=list(model.head.parameters()))


@mistake("TypeError: argument of type 'Linear' is not", "set(model.linear.parameters()), for")
def ignored_module(api: Api) -> None:
    model = api.Model()
    api.shard(model, ignored_params=model.head)


# ---- keyword arguments of FSDP1 and other libraries ----------------------------------------------

_FOREIGN_KEYWORDS: dict[str, tuple[Any, str]] = {
    "ignored_modules": ([], "ignored_params=set(module.parameters())"),
    "auto_wrap_policy": (None, "fsdp_c.auto_shard(model, policy)"),
    "sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP is reshard_after_forward=False"),
    "mixed_precision": (None, "mp_policy=MixedPrecisionPolicy("),
    "cpu_offload": (True, "offload_policy=CPUOffloadPolicy()"),
    "device_id": (0, "torch.cuda.set_device(local_rank)"),
    "process_group": (None, "mesh=DeviceMesh.from_group(group"),
    "use_orig_params": (True, "leave it out"),
    "sync_module_states": (True, "fsdp_c.load_full_state_dict(model, state)"),
    "mixed_precision_policy": (None, "help(fully_shard) lists the arguments"),
}


def _call_with_keyword(keyword: str, value: Any) -> Callable[[Api], Any]:
    return lambda api: api.shard(api.Model(), **{keyword: value})


for _keyword, (_value, _note) in _FOREIGN_KEYWORDS.items():
    MISTAKES[f"argument_{_keyword}"] = Mistake(
        f"TypeError: fully_shard() got an unexpected keyword argument '{_keyword}'",
        _note,
        _call_with_keyword(_keyword, _value),
    )


# ---- reshard_after_forward and shard_placement_fn ------------------------------------------------


@mistake("ValueError: If passing reshard_after_forward as an int, it", "that many ranks: 2, 4 here")
def reshard_after_forward_not_dividing_world_size(api: Api) -> None:
    api.shard(api.Model(), reshard_after_forward=3)


@mistake("ValueError: If passing reshard_after_forward as an int, it", "that many ranks: none here")
def reshard_after_forward_not_dividing_shard_dimension(api: Api) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
    api.shard(api.Model(), mesh=mesh, reshard_after_forward=4)


@mistake(
    "ValueError: reshard_after_forward should be a bool or an int", "True frees the parameters"
)
def string_for_reshard_after_forward(api: Api) -> None:
    api.shard(api.Model(), reshard_after_forward="yes")


@mistake(
    "ValueError: Invalid shard_placement_fn result: 1", "gave 1 for 'embed.weight': return Sha"
)
def int_returned_by_shard_placement_fn(api: Api) -> None:
    api.shard(api.Model(), shard_placement_fn=lambda param: 1)


@mistake("TypeError: 'Shard' object is not callable", "lambda param: Shard(dim=0), for example")
def placement_instead_of_shard_placement_fn(api: Api) -> None:
    api.shard(api.Model(), shard_placement_fn=Shard(0))


@mistake(
    "NotImplementedError: FSDP does not support uneven sharding on", "'weight' of (8, 9) cannot"
)
def uneven_shard(api: Api) -> None:
    api.shard(nn.Linear(9, 8), shard_placement_fn=lambda param: Shard(param.ndim - 1))


@mistake(
    "AssertionError: Shard dim 1 is invalid for 1D tensor", "'bias' has 1 dimensions: return S"
)
def shard_dimension_out_of_range(api: Api) -> None:
    api.shard(nn.Linear(8, 8), shard_placement_fn=lambda param: Shard(1))


# ---- the model's parameters ----------------------------------------------------------------------


@mistake(
    "ValueError: fully_shard doesn't support scalar parameters", "'scale' of Model: use nn.Param"
)
def scalar_parameter(api: Api) -> None:
    model = api.Model()
    model.scale = nn.Parameter(torch.tensor(1.0))
    api.shard(model)


@mistake(
    "NotImplementedError: FSDP does not support non-contiguous", "'head.weight': make it contiguo"
)
def transposed_parameter(api: Api) -> None:
    model = api.Model()
    model.head.weight = nn.Parameter(model.head.weight.detach().t())
    api.shard(model)


@mistake("RuntimeError: FSDP parameters should be materialized from meta", "to_empty(device=...)")
def parameters_on_meta(api: Api) -> None:
    with torch.device("meta"):
        model = api.sharded()
    model(torch.ones(2, 8))


@mistake(
    "ValueError: Parameter 'blocks.1.up.weight' is shared with", "'blocks.0.up.weight', 'blocks.1"
)
def weights_tied_across_units(api: Api) -> None:
    model = api.Model()
    model.blocks[0].up.weight = model.blocks[1].up.weight
    for block in model.blocks:
        api.shard(block)
    api.train(api.shard(model))


@mistake(
    "AttributeError: 'Parameter' object has no attribute '_local_tensor'", "'weight' of Linear wa"
)
def parameter_replaced_after_sharding(api: Api) -> None:
    model = api.sharded()
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    api.train(model)


@mistake(
    "AttributeError: 'NoneType' object has no attribute '_local_tensor'", "'bias' of Linear was set"
)
def parameter_set_to_none_after_sharding(api: Api) -> None:
    model = api.sharded()
    model.embed.bias = None
    api.train(model)


class Renaming(nn.Linear):
    """A layer that lists its parameters under names without attributes."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, param in super().named_parameters(*args, **kwargs):
            yield f"{name}_of_layer", param


@mistake(
    "RuntimeError: Checking parameters: Composable distributed API implementations cannot modify",
    "named_parameters() of Renaming returns",
)
def parameters_renamed_by_named_parameters(api: Api) -> None:
    api.shard(Renaming(8, 8))


# ---- forward and backward ------------------------------------------------------------------------


@mistake(
    "RuntimeError: FSDP state has already been lazily initialized for", "'blocks.0' was called, o"
)
def child_called_before_root(api: Api) -> None:
    model = api.sharded()
    model.blocks[0](torch.ones(2, 8))
    api.train(model)


@mistake(
    "RuntimeError: FSDP requires a single root module but got", "The unit of Linear, Linear was"
)
def list_of_modules_without_root(api: Api) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    api.shard([model[0], model[1]])
    api.train(model)


# ---- copies, saving and loading ------------------------------------------------------------------


@mistake("AssertionError: FSDP does not support deepcopy", "Copy Model before it is sharded")
def deep_copy(api: Api) -> None:
    copy.deepcopy(api.sharded())


@mistake("PicklingError: Can't pickle <class", "Save the state of Model, not the module")
def pickling_a_module(api: Api) -> None:
    torch.save({"model": api.sharded()}, io.BytesIO())


@mistake(
    "RuntimeError: Error(s) in loading state_dict for FSDPModel", "'embed.weight', 'embed.bias'"
)
def loading_full_tensors(api: Api) -> None:
    api.sharded().load_state_dict(api.Model().state_dict())


@mistake(
    "AttributeError: 'Parameter' object has no attribute '_local_tensor'", "'weight' of Linear wa"
)
def assigning_full_tensors(api: Api) -> None:
    api.sharded().load_state_dict(api.Model().state_dict(), assign=True)


@mistake(
    "RuntimeError: Error(s) in loading state_dict for FSDPModel", "clean_tensor_name(name, ddp=T"
)
def loading_state_dict_of_ddp(api: Api) -> None:
    state = {f"module.{name}": value for name, value in api.sharded().state_dict().items()}
    api.sharded().load_state_dict(state)


@mistake(
    "RuntimeError: Error(s) in loading state_dict for FSDPModel", "clean_tensor_name(name, ddp=T"
)
def loading_state_dict_of_compiled_ddp(api: Api) -> None:
    values = api.sharded().state_dict().items()
    api.sharded().load_state_dict({f"_orig_mod.module.{name}": value for name, value in values})


@mistake(
    "RuntimeError: Error(s) in loading state_dict for FSDPLinear",
    "weight: (24, 8) in the state dict, (16, 8)",
)
def loading_state_dict_of_another_shape(api: Api) -> None:
    state = api.shard(api.Linear(8, 24)).state_dict()
    api.shard(api.Linear(8, 16)).load_state_dict(state)
