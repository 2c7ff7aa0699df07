"""Watches the operators of a step: counts its collectives per module and has the redundant ones found."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trials.operators import leaves_in
from trials.profiling.modules import ModuleTracker
from trials.profiling.redundancy import Flow, StartedCollective, TensorId
from trials.reports.profile import CollectiveCount, Redundancy
from trials.spec import AXES, Layout
from trials.stages import coordinates

_KINDS = {
    "c10d.allreduce_": "all_reduce",
    "c10d.allreduce_coalesced_": "all_reduce",
    "c10d.allgather_": "all_gather",
    "c10d._allgather_base_": "all_gather",
    "c10d.allgather_coalesced_": "all_gather",
    "c10d.allgather_into_tensor_coalesced_": "all_gather",
    "c10d.reduce_scatter_": "reduce_scatter",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "c10d.reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d.alltoall_": "all_to_all",
    "c10d.alltoall_base_": "all_to_all",
    "c10d.broadcast_": "broadcast",
    "c10d.reduce_": "reduce",
    "c10d.gather_": "gather",
    "c10d.scatter_": "scatter",
    "c10d.send": "send",
    "c10d.recv_": "recv",
    "c10d.recv_any_source_": "recv",
    "c10d.barrier": "barrier",
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_reduce_": "all_reduce",
    "_c10d_functional.all_reduce_coalesced": "all_reduce",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.all_gather_into_tensor_out": "all_gather",
    "_c10d_functional.all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional.reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional.all_to_all_single": "all_to_all",
    "_c10d_functional.broadcast": "broadcast",
    "_c10d_functional.broadcast_": "broadcast",
    "_dtensor.shard_dim_alltoall": "all_to_all",
}
_SENT = ("input", "inputs", "input_tensor", "input_tensors", "tensors", "tensor", "self")
"""Names of the argument that holds what is sent, or for ``recv`` what arrives."""
_MOVES = frozenset(
    {"_wrap_tensor_autograd", "clone", "contiguous", "lift_fresh", "wait_tensor", "cat", "stack", "flip", "roll"}
)
"""Operators that only move elements, besides all that give views."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """What an operator's schema says about it."""

    name: str
    kind: str | None
    moves: bool
    gives_new: bool
    """Whether it is a collective whose result is a new tensor."""
    mutated: tuple[int, ...]
    """Positions of the arguments it writes to."""


@functools.cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    aliases = [value.alias_info for value in (*schema.arguments, *schema.returns) if value.alias_info is not None]
    writes = any(alias.is_write for alias in aliases)
    kind = _KINDS.get(f"{namespace}.{name}")
    # Schemas of process groups' own operators do not say that they write, and these write to all they get.
    in_place = [
        i
        for i, argument in enumerate(schema.arguments)
        if namespace == "c10d" or (argument.alias_info and argument.alias_info.is_write)
    ]
    return _Operator(
        name=name,
        kind=kind,
        moves=kind is None and not writes and (name in _MOVES or bool(aliases)),
        gives_new=kind is not None and not in_place,
        mutated=tuple(in_place),
    )


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts what ``models`` and the step around them start on this rank."""

    def __init__(self, models: list[nn.Module], layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = ModuleTracker(models)
        self._axes = functools.cache(functools.partial(group_axes, layout))
        self._keys = _Keys()
        self._flow = Flow()
        self._totals: dict[tuple[str, str, str, str, int], tuple[int, int]] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is done in the body."""
        with self._tracker, self:
            yield

    def counts(self) -> tuple[CollectiveCount, ...]:
        """Collectives counted so far, in the order of their first start."""
        return tuple(
            CollectiveCount(
                module=module,
                phase=phase,
                kind=kind,
                axis=axis,
                group_size=size,
                num_calls=num_calls,
                num_bytes=num_bytes,
            )
            for (module, phase, kind, axis, size), (num_calls, num_bytes) in self._totals.items()
        )

    def redundancies(self) -> tuple[Redundancy, ...]:
        return self._flow.redundancies()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they turn it into operators on plain tensors, which come here again
        options = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **options)
        operator = _operator(func)
        inputs = [self._keys.of(tensor) for tensor in leaves_in([args, options], Tensor)]
        started = self._start(func, operator.kind, args, options) if operator.kind else None
        result = func(*args, **options)
        for i in operator.mutated:
            self._keys.written(args[i] if i < len(args) else options.get(func._schema.arguments[i].name))
        outputs = [self._keys.of(tensor) for tensor in leaves_in(result, Tensor)]
        self._tell(operator, started, (args, options), inputs, outputs)
        return result

    def _tell(
        self,
        operator: _Operator,
        started: StartedCollective | None,
        arguments: tuple[Any, Any],
        inputs: list[TensorId],
        outputs: list[TensorId],
    ) -> None:
        if started is not None and operator.gives_new and len(inputs) == len(outputs) == 1:
            self._flow.communicate(started, inputs[0], outputs[0])
        elif operator.name in ("add", "add_") and len(inputs) == 2 and len(outputs) == 1:
            self._flow.add(inputs, outputs[0])
        elif operator.moves:
            self._flow.move(operator.name, _constants(arguments), inputs, outputs)
        else:
            self._flow.compute(inputs)

    def _start(self, func: Any, kind: str, args: Any, options: Any) -> StartedCollective:
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | options
        sent = next((named[name] for name in _SENT if name in named), ())
        num_bytes = sum(tensor.nbytes for tensor in leaves_in(sent, Tensor))
        axis, size = self._axes(_group_ranks(named))
        place = self._tracker.place()
        key = place.module, place.phase, kind, axis, size
        num_calls, before = self._totals.get(key, (0, 0))
        self._totals[key] = num_calls + 1, before + num_bytes
        return StartedCollective(
            module=place.module, phase=place.phase, kind=kind, group=axis, group_size=size, num_bytes=num_bytes
        )


class _Keys:
    """Names what a tensor holds now: its storage, how often that was written to, and which part of it."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        """Every storage met, held so that no address is used again."""
        self._writes: dict[int, int] = {}

    def of(self, tensor: Tensor) -> TensorId:
        if tensor.layout is not torch.strided:
            return object(), tensor.numel()
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._storages:
            self._storages[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        part = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        return (address, self._writes.get(address, 0), part), tensor.numel()

    def written(self, argument: Any) -> None:
        for tensor in leaves_in(argument, Tensor):
            address = tensor.untyped_storage()._cdata
            self._writes[address] = self._writes.get(address, 0) + 1


def _constants(value: Any) -> Hashable:
    """The arguments that are no tensors, in a form that can be compared."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        return tuple(_constants(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _constants(item)) for key, item in value.items())
    return repr(value)


def _group_ranks(named: dict[str, Any]) -> tuple[int, ...]:
    """Ranks of the group among a collective's arguments, by the name or as an object."""
    group = named.get("process_group", named.get("pg", named.get("group_name")))
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    elif isinstance(group, str):
        group = torch._C._distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return tuple(dist.get_process_group_ranks(group))


def group_axes(layout: Layout, ranks: tuple[int, ...]) -> tuple[str, int]:
    """The mesh axes along which the ranks of a group differ, joined by underscores, and the number of ranks."""
    places = [coordinates(layout, rank) for rank in ranks]
    differing: list[str] = [axis for axis in AXES if len({getattr(place, axis) for place in places}) > 1]
    return "_".join(differing) or "self", len(ranks)
