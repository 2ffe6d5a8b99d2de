"""``full_params``: context with unsharded parameters to read or change, one unit at a time.

Forward gathers in the compute dtype. This module gathers in the dtype of the shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from ._runtime.fsdp_units import (
    iterate_registrations,
    list_groups,
    list_sharded_modules,
    reshard_all,
)
from ._runtime.full_tensors import gather_full, get_first_rank, write_back
from ._runtime.param import Param
from ._runtime.transaction import restore_attribute_at_end
from .names import clean_tensor_name


@contextlib.contextmanager
def full_params(
    model: nn.Module,
    *,
    writeback: bool | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    all_units: bool = False,
) -> Iterator[FullParams]:
    """Context that yields the full parameters of ``model`` by name, in the dtype of the shards.

    ::

        with full_params(model, writeback=False) as full:
            for name, param in full.items():  # gathers unit after unit
                print(name, param.norm())
        with torch.no_grad(), full_params(model) as full:
            full["head.weight"].mul_(0.5)     # gathers the head's unit, frees the former one
        with full_params(model, all_units=True):
            model.reset_parameters()          # all units are gathered

    Full parameters require grad as the shards do, so change them under ``torch.no_grad()``, as in
    FSDP1's ``summon_full_params``.

    While a unit is gathered, its full parameters are also registered on the modules. All ranks must
    access the same units in the same order. With ``writeback`` they must make the same changes.

    Args:
        writeback: Whether to copy changes to the shards when a unit is freed. ``None``: True unless
            ``rank0_only``. An exception in the block drops the changes to gathered units.
        rank0_only: Whether only the first rank of the parameters' mesh gets full parameters. Other
            ranks take part in the gathers, but their iteration yields no items.
        offload_to_cpu: Whether full parameters are on the CPU.
        all_units: Whether to gather all units at the start.

    Raises:
        ValueError: ``model`` has no sharded module, ``writeback`` is combined with ``rank0_only``,
            or a full parameter was replaced by a tensor of another shape.
        RuntimeError: A forward, a backward or another such block is active, or a parameter is on
            the meta device. Or a forward, backward or ``unshard()`` of a unit runs inside (use
            :func:`fsdp_c.generate_with`).
    """
    if writeback and rank0_only:
        raise ValueError(
            "full_params cannot write back with rank0_only=True: only one rank has values"
        )
    groups = list_groups(model, "full_params")
    modules = list_sharded_modules(model)
    states: dict[Any, None] = dict.fromkeys(module._get_fsdp_state() for module in modules)
    _check_idle(states, groups)
    reshard_all(model)
    _adopt_assigned_params(groups)
    write = not rank0_only if writeback is None else writeback
    device = torch.device("cpu") if offload_to_cpu else None
    full = FullParams(model, groups, write, rank0_only, device, all_units)
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, full, "_has_ended", True)
        _refuse_gathers(modules, states, groups, undo)
        for state in states:
            undo.callback(setattr, state, "_full_params", None)
            state._full_params = full
        try:
            if all_units:
                full.open_all()
            yield full
        except BaseException:
            full.close(write=False)
            raise
        full.close()


def _check_idle(states: dict[Any, None], groups: list[Any]) -> None:
    for state in states:
        if getattr(state, "_full_params", None) is not None:
            raise RuntimeError(
                "full_params is already active for a part of this model: leave that block first"
            )
    for holder in (*states, *groups):
        if holder._training_state != TrainingState.IDLE:
            raise RuntimeError(
                "full_params cannot be used during forward or backward: a unit is in state "
                f"{holder._training_state.name}; use it between steps"
            )


def _adopt_assigned_params(groups: list[Any]) -> None:
    """Adopts sharded parameters that were assigned to modules before lazy init, as lazy init does.

    Raises:
        RuntimeError: A parameter is on the meta device.
    """
    for group in groups:
        if not group._reset_sharded_params:
            for param in group.fsdp_params:
                param.reset_sharded_param()
        for param in group.fsdp_params:
            if param.sharded_param.is_meta:
                raise RuntimeError(
                    "full_params needs parameters with values, but "
                    f"'{param._module_info.param_name}' is on the meta device: call to_empty() on "
                    "the model and initialize it first"
                )


def _refuse_gathers(
    modules: list[Any], states: dict[Any, None], groups: list[Any], undo: contextlib.ExitStack
) -> None:
    """Makes forward, forward methods, backward and ``unshard()`` raise until ``undo`` runs."""
    for module in modules:
        refuse = _make_refusal(f"forward of {type(module).__name__}")
        undo.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
    for state in states:
        _override(state, "_pre_forward", _make_refusal("forward method"), undo)
    for group in groups:
        refuse = _make_refusal("forward, backward or unshard() of a unit")
        _override(group, "lazy_init", refuse, undo)
        _override(group, "unshard", refuse, undo)


def _make_refusal(operation: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{operation} inside full_params, which would gather the shards over the full "
            "parameters; for generation use fsdp_c.generate_with(model)"
        )

    return refuse


def _override(owner: Any, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Sets an attribute of the object ``owner`` until ``undo`` runs."""
    restore_attribute_at_end(owner, name, undo)
    setattr(owner, name, value)


class FullParams(Mapping[str, torch.Tensor]):
    """Maps names to full parameters. A lookup or iteration step may gather a unit.

    A tied parameter is listed under its first name. A lookup accepts each of its names.
    Parameters outside of units are returned unchanged. On ranks without full parameters
    (``rank0_only``), a lookup returns the sharded parameter. ``in`` gathers nothing.

    Raises:
        RuntimeError: A lookup after the block would gather a unit.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[Any],
        writeback: bool,
        rank0_only: bool,
        device: torch.device | None,
        all_units: bool,
    ) -> None:
        self._writeback = writeback
        self._opens_all_units = all_units
        self._has_ended = False
        self._units = [_Unit(group, rank0_only, device) for group in groups]
        self._plain_params: list[nn.Parameter] = []
        position: dict[int, tuple[_Unit | None, int]] = {
            id(param.sharded_param): (unit, i)
            for unit in self._units
            for i, param in enumerate(unit.params)
        }
        by_name: dict[str, tuple[_Unit | None, int]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if id(param) not in position:
                position[id(param)] = (None, len(self._plain_params))
                self._plain_params.append(param)
            by_name[clean_tensor_name(name)] = position[id(param)]
        self._positions: dict[str, tuple[_Unit | None, int]] = {}
        for unit in (*self._units, None):  # unit by unit, in the order of gathers
            self._positions |= {name: entry for name, entry in by_name.items() if entry[0] is unit}
        first_names: dict[tuple[_Unit | None, int], str] = {}
        for name, entry in self._positions.items():
            first_names.setdefault(entry, name)
        self._names = list(first_names.values())
        mesh = next((unit.mesh for unit in self._units if unit.params), None)
        self._has_values = not rank0_only or mesh is None or dist.get_rank() == get_first_rank(mesh)

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._positions

    def __getitem__(self, name: str) -> torch.Tensor:
        unit, i = self._positions[name]
        if unit is None:
            return self._plain_params[i]
        self._open(unit)
        return unit.get_registered(i)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        """Yields names and full parameters by unit. Ranks without values yield no items."""
        for name in self:
            param = self[name]
            if self._has_values:
                yield name, param

    def values(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        """Yields full parameters, as :meth:`items` does."""
        return (param for _, param in self.items())

    def _open(self, unit: _Unit) -> None:
        if unit.is_open:
            return
        if self._has_ended:  # the full parameters would stay registered
            raise RuntimeError("full_params: the block has ended; look up parameters inside of it")
        if not self._opens_all_units:
            self.close()
        unit.open()

    def open_all(self) -> None:
        """Gathers every unit."""
        for unit in self._units:
            self._open(unit)

    @torch.no_grad()
    def close(self, write: bool = True) -> None:
        """Registers the shards of all units. Then copies changes to them if ``write``.

        Without writeback no changes are copied. Raises the first failure, after all copies.
        """
        changes = [change for unit in self._units for change in unit.close()]
        if not (write and self._writeback):
            return
        failure: Exception | None = None
        for shard, full_param, has_new_version in changes:
            try:
                write_back(shard, full_param, has_new_version)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


class _Unit:
    """A parameter group that can be gathered and freed."""

    def __init__(self, group: Any, rank0_only: bool, device: torch.device | None) -> None:
        self.params: list[Any] = list(group.fsdp_params)
        self.mesh = self.params[0].sharded_param.device_mesh if self.params else None
        self._device = group.device
        self._rank0_only = rank0_only
        self._output_device = device
        self._full: list[nn.Parameter | None] = []
        self._versions: list[int] = []

    @property
    def is_open(self) -> bool:
        return bool(self._full)

    def get_registered(self, i: int) -> Any:
        """Returns the parameter that the modules have now; None if the program has deleted it.

        If the program has replaced some registrations of a tied parameter, returns the first new
        parameter.
        """
        registrations = iterate_registrations(self.params[i])
        values = [module._parameters.get(name) for module, name in registrations]
        return next((value for value in values if value is not self._full[i]), values[0])

    @torch.inference_mode(False)  # inference tensors have no version counter
    @torch.no_grad()
    def open(self) -> None:
        """Gathers on all ranks, and registers the full parameters that this rank gets."""
        shards = [param.sharded_param for param in self.params]
        tensors = gather_full(shards, self._device, self._rank0_only)
        full: list[nn.Parameter | None] = []
        for tensor, param in zip(tensors, self.params):
            if tensor is None:
                full.append(None)
                continue
            tensor = tensor.to(device=self._output_device)
            new_param = nn.Parameter(tensor, param.sharded_param.requires_grad)
            full.append(param._restore_class(new_param) if isinstance(param, Param) else new_param)
        self._full = full
        self._versions = [0 if full_param is None else full_param._version for full_param in full]
        for param, full_param in zip(self.params, full):
            if full_param is not None:
                _register_param(param, full_param)

    def close(self) -> list[tuple[DTensor, Any, bool]]:
        """Registers all shards.

        Returns the shards, the parameters that were registered before, and whether these were
        replaced or have a new version.
        """
        changes = []
        for i, full_param in enumerate(self._full):
            if full_param is None:
                continue
            param, current = self.params[i], self.get_registered(i)
            _register_param(param, param.sharded_param)
            is_new = (
                current is not full_param
                or full_param.is_inference()  # has no version counter
                or full_param._version != self._versions[i]
            )
            changes.append((param.sharded_param, current, is_new))
        self._full = []
        return changes


def _register_param(param: Any, value: nn.Parameter) -> None:
    for module, name in iterate_registrations(param):
        module._parameters[name] = value
