"""Detection of the running module: by hooks in the forward pass, by autograd's node numbers in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trials.operators import in_backward, leaves_in
from trials.parallel.mesh import plain_name
from trials.profiling.traces import COLLECTIVES, GRADIENTS, STEP, general_path
from trials.reports import CollectiveCount, Redundancy
from trials.sizes import coordinates
from trials.spec import AXES, Layout
from trials.torch_support import parameter_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlace:
    """Position of the program in the step; see :class:`trials.reports.CollectiveCount`."""

    module: str
    phase: str


class ModuleTracker:
    """Follows the modules of ``models`` while entered.

    Autograd numbers its nodes in order of creation. The numbers used during a module's forward pass thus identify the
    module's nodes in the backward pass. That needs no hooks on tensors, which would change the graph.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._running: list[tuple[str, str | None]] = []
        self._starts: list[int] = []
        self._nodes: list[tuple[int, int, str]] = []
        """First and end number of a module's nodes, and its name; inner modules before outer ones."""
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> ModuleTracker:
        for model in self._models:
            for name, module in model.named_modules():
                self._follow(module, general_name(name))
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def place(self) -> ModulePlace:
        """Return the program's current position."""
        if self._running:
            module, phase = self._running[-1]
            return ModulePlace(module=module, phase=phase or ("recompute" if in_backward() else "forward"))
        if in_backward():
            return ModulePlace(module=self._module_of_node(), phase="backward")
        return ModulePlace(module=STEP, phase=STEP)

    def _module_of_node(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None or node.name().endswith("AccumulateGrad"):
            return GRADIENTS
        number = node._sequence_nr()
        return next((name for first, end, name in self._nodes if first <= number < end), STEP)

    def _follow(self, module: nn.Module, name: str) -> None:
        for handle in (
            module.register_forward_pre_hook(lambda *_: self._enter(name), prepend=True),
            module.register_forward_hook(lambda *_: self._leave(), always_call=True),
        ):
            self._undo.callback(handle.remove)
        if isinstance(module, FSDPModule):
            # It gathers in advance, for a module that is not yet running, and reduces afterwards.
            for group in parameter_groups(module._get_fsdp_state()):
                self._undo.enter_context(self._named(group, "unshard", name, None))
                self._undo.enter_context(self._named(group, "post_backward", name, "backward"))

    def _enter(self, name: str) -> None:
        self._running.append((name, None))
        self._starts.append(torch._C._autograd._get_sequence_nr())

    def _leave(self) -> None:
        name, _ = self._running.pop()
        start = self._starts.pop()
        if not in_backward():
            self._nodes.append((start, torch._C._autograd._get_sequence_nr(), name))

    @contextlib.contextmanager
    def _named(self, owner: Any, method: str, module: str, phase: str | None) -> Iterator[None]:
        """Attribute calls of the method to the module."""
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def named(*args: Any, **options: Any) -> Any:
            here = phase or self.place().phase
            self._running.append((module, "backward" if here == "recompute" else here))
            try:
                return original(*args, **options)
            finally:
                self._running.pop()

        setattr(owner, method, named)
        try:
            yield
        finally:
            delattr(owner, method)


def general_name(name: str) -> str:
    """Replace numbers in a module's path by ``*``, so that equal layers have one name; :data:`STEP` for the model."""
    return general_path(plain_name(name))


# Detection of avoidable communication, by following values from one collective to the next. Pure.
#
# A value is followed while it is only moved: viewed, copied, sliced, concatenated. Values with the same history have
# the same number, so a tensor gathered twice is recognised even if it was copied before each time. The caller chooses
# keys for values; a key always stands for the same value.


IDENTITY = frozenset({"clone", "contiguous", "alias", "detach", "lift_fresh", "wait_tensor", "_wrap_tensor_autograd"})
"""Moves whose result equals their input."""
_ROUND_TRIPS = {
    (
        "all_gather",
        "all_gather",
    ): "gathers again a tensor that was gathered and split before, without computation in between",
    ("all_to_all", "all_to_all"): "reverses the previous exchange, without computation in between",
    ("reduce_scatter", "all_gather"): "gathers the result of a reduce_scatter: one all_reduce does both",
    ("all_reduce", "all_reduce"): "sums over the group again what was already summed over it",
    ("all_reduce", "reduce_scatter"): "scatters the sum of what was already summed over the group",
}
_LINEAR = frozenset({"all_reduce", "reduce_scatter"})
_ADDED = "is only added to the result of another {kind}; add first, and a single {kind} is enough"
_PARTS = {
    "all_gather": "only this rank's part of the gathered tensor is used: no gather is needed",
    "all_reduce": "only this rank's part of the sum is used: a reduce_scatter moves half as much",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCollective:
    """A collective started on this rank."""

    module: str
    phase: str
    kind: str
    group: str
    group_size: int
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Source:
    """The collective that a value came from, and which parts of its result are used in computation."""

    started: StartedCollective
    size: int
    used: dict[int, int] = field(default_factory=dict)
    num_uses: int = 0

    def use(self, part: int, size: int) -> None:
        self.used[part] = size
        self.num_uses += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    number: int
    source: _Source | None = None


TensorId = tuple[Hashable, int]
"""Key of the value in a tensor, and its number of elements."""


class Flow:
    """Follows values through every operation of a step, in order."""

    def __init__(self) -> None:
        self._values: dict[Hashable, _Value] = {}
        self._sizes: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._sources: list[_Source] = []
        self._started: set[Hashable] = set()
        self._found: list[tuple[StartedCollective, str]] = []
        self._sums: list[tuple[_Source, _Source]] = []

    def move(self, name: str, arguments: Hashable, inputs: Sequence[TensorId], outputs: Sequence[TensorId]) -> None:
        """Follow an operation that only moves elements; equal ``name``, ``arguments`` and inputs give equal outputs."""
        values = [self._value(value) for value in inputs]
        sources = {id(value.source): value.source for value in values}
        if len(sources) > 1:
            self.compute(inputs)
        source = next(iter(sources.values())) if len(sources) == 1 else None
        for i, (key, size) in enumerate(outputs):
            if key in self._values:
                continue  # another view of the same elements
            if name in IDENTITY and len(values) == 1:
                number = values[0].number
            else:
                number = self._number((name, arguments, tuple(value.number for value in values), i))
            self._bind(key, _Value(number=number, source=source), size)

    def compute(self, inputs: Sequence[TensorId]) -> None:
        """Record any other operation: its inputs are used, and its results are new values."""
        for one in inputs:
            value = self._value(one)
            if value.source is not None:
                value.source.use(value.number, self._sizes[value.number])

    def add(self, inputs: Sequence[TensorId], output: TensorId) -> None:
        """Follow the sum of two tensors of the same shape."""
        self.compute(inputs)
        first, second = (self._value(one).source for one in inputs)
        if first is None or second is None or first is second:
            return
        kinds = {first.started.kind, second.started.kind}
        if len(kinds) == 1 and kinds <= _LINEAR and first.started.group == second.started.group:
            self._sums.append((first, second))
            total = _Source(started=second.started, size=output[1])
            self._bind(output[0], _Value(number=self._number(object()), source=total), output[1])

    def communicate(self, started: StartedCollective, sent: TensorId, received: TensorId) -> None:
        """Follow a collective that returns a new tensor."""
        value = self._value(sent)
        same = (started.kind, started.group, started.phase, value.number)
        if same in self._started:
            self._found.append((started, f"repeats the same {started.kind} of the same tensor"))
        self._started.add(same)
        before = value.source
        if before is not None:
            trip = (before.started.kind, started.kind)
            if before.started.group == started.group and trip in _ROUND_TRIPS:
                self._found.append((started, _ROUND_TRIPS[trip]))
            before.use(value.number, before.size)
        source = _Source(started=started, size=received[1])
        self._sources.append(source)
        self._bind(received[0], _Value(number=self._number(object()), source=source), received[1])

    def redundancies(self) -> tuple[Redundancy, ...]:
        """Return the findings, combined by module, the largest first."""
        totals: dict[tuple[str, str, str], tuple[int, int]] = {}
        for started, problem in [*self._found, *self._only_added(), *self._partly_used()]:
            key = started.module, started.phase, problem
            num_calls, num_bytes = totals.get(key, (0, 0))
            totals[key] = num_calls + 1, num_bytes + started.num_bytes
        found = [
            Redundancy(module=module, phase=phase, problem=problem, num_calls=num_calls, num_bytes=num_bytes)
            for (module, phase, problem), (num_calls, num_bytes) in totals.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.num_bytes, one.module, one.phase)))

    def _only_added(self) -> list[tuple[StartedCollective, str]]:
        return [
            (second.started, _ADDED.format(kind=second.started.kind))
            for first, second in self._sums
            if first.num_uses == second.num_uses == 1
        ]

    def _partly_used(self) -> list[tuple[StartedCollective, str]]:
        return [
            (source.started, _PARTS[source.started.kind])
            for source in self._sources
            if source.started.kind in _PARTS
            and source.started.group_size > 1
            and 0 < sum(source.used.values()) * source.started.group_size <= source.size
        ]

    def _value(self, one: TensorId) -> _Value:
        key, size = one
        if key not in self._values:
            self._bind(key, _Value(number=self._number(object())), size)
        return self._values[key]

    def _bind(self, key: Hashable, value: _Value, size: int) -> None:
        self._values[key] = value
        self._sizes[value.number] = size

    def _number(self, history: Hashable) -> int:
        return self._numbers.setdefault(history, len(self._numbers))


# Observation of a step's operators: counts collectives per module and detects redundant ones.


_SENT = ("input", "inputs", "input_tensor", "input_tensors", "tensors", "tensor", "self")
"""Names of the argument with the data sent or, for ``recv``, received."""
_MOVES = frozenset(
    {"_wrap_tensor_autograd", "clone", "contiguous", "lift_fresh", "wait_tensor", "cat", "stack", "flip", "roll"}
)
"""Operators that only move elements, in addition to all that return views."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """Facts about an operator from its schema."""

    name: str
    kind: str | None
    moves: bool
    returns_new: bool
    """Whether it is a collective whose result is a new tensor."""
    mutated: tuple[int, ...]
    """Positions of the arguments that it writes to."""


@functools.cache
def _operator(func: Any) -> _Operator:
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    aliases = [value.alias_info for value in (*schema.arguments, *schema.returns) if value.alias_info is not None]
    writes = any(alias.is_write for alias in aliases)
    kind = COLLECTIVES.get(f"{namespace}.{name}")
    # Schemas of process groups' own operators do not declare writes, but these write to all their arguments.
    in_place = [
        i
        for i, argument in enumerate(schema.arguments)
        if namespace == "c10d" or (argument.alias_info and argument.alias_info.is_write)
    ]
    return _Operator(
        name=name,
        kind=kind,
        moves=kind is None and not writes and (name in _MOVES or bool(aliases)),
        returns_new=kind is not None and not in_place,
        mutated=tuple(in_place),
    )


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts collectives that ``models`` and the surrounding step start on this rank."""

    def __init__(self, models: list[nn.Module], layout: Layout) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker = ModuleTracker(models)
        self._axes = functools.cache(functools.partial(group_axes, layout))
        self._keys = _Keys()
        self._flow = Flow()
        self._totals: dict[tuple[str, str, str, str, int], tuple[int, int]] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count collectives in the body."""
        with self._tracker, self:
            yield

    def counts(self) -> tuple[CollectiveCount, ...]:
        """Return the collectives counted so far, in the order of their first start."""
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
            return NotImplemented  # they become operators on plain tensors, which come here again
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
        self._observe(operator, started, (args, options), inputs, outputs)
        return result

    def _observe(
        self,
        operator: _Operator,
        started: StartedCollective | None,
        arguments: tuple[Any, Any],
        inputs: list[TensorId],
        outputs: list[TensorId],
    ) -> None:
        if started is not None and operator.returns_new and len(inputs) == len(outputs) == 1:
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
    """Keys of tensor contents: storage, number of writes to it, and view."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        """All storages seen, held so that no address is reused."""
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
    """Return the non-tensor arguments in a comparable form."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        return tuple(_constants(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _constants(item)) for key, item in value.items())
    return repr(value)


def _group_ranks(named: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks of the group among a collective's arguments, given by name or as an object."""
    group = named.get("process_group", named.get("pg", named.get("group_name")))
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    elif isinstance(group, str):
        group = torch._C._distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(group))
    return tuple(dist.get_process_group_ranks(group))


def group_axes(layout: Layout, ranks: tuple[int, ...]) -> tuple[str, int]:
    """Return the mesh axes along which a group's ranks differ, joined by underscores, and the number of ranks."""
    places = [coordinates(layout, rank) for rank in ranks]
    differing: list[str] = [axis for axis in AXES if len({getattr(place, axis) for place in places}) > 1]
    return "_".join(differing) or "self", len(ranks)
