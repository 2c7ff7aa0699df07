"""Finds communication that need not be, by following values from one collective to the next. Pure.

A value is followed as long as it is only moved: viewed, copied, cut, joined. Two values with the same history have the
same number, so that a tensor gathered twice is known even where a copy was made before each time. Values are named by
keys of the caller's choice; a key always means the same value.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from trials.reports.profile import Redundancy

IDENTITY = frozenset({"clone", "contiguous", "alias", "detach", "lift_fresh", "wait_tensor", "_wrap_tensor_autograd"})
"""Moves whose result equals their input."""
_ROUND_TRIPS = {
    ("all_gather", "all_gather"): "gathers again what had been gathered and cut before, with nothing computed between",
    ("all_to_all", "all_to_all"): "exchanges back what had just been exchanged, with nothing computed between",
    ("reduce_scatter", "all_gather"): "gathers what had just been reduced and scattered: one all_reduce does both",
    ("all_reduce", "all_reduce"): "sums over the group again what had been summed over it already",
    ("all_reduce", "reduce_scatter"): "scatters the sum of what had been summed over the group already",
}
_LINEAR = frozenset({"all_reduce", "reduce_scatter"})
_ADDED = "is only added to the result of another {kind}: added first, one {kind} does both"
_PARTS = {
    "all_gather": "only this rank's share of what is gathered is used: nothing need be gathered",
    "all_reduce": "only this rank's share of the sum is used: a reduce_scatter moves half as much",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedCollective:
    """A collective, as it was started on this rank."""

    module: str
    phase: str
    kind: str
    group: str
    group_size: int
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Source:
    """The collective that a value came from, and which parts of its result are computed with."""

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
"""Key of the value that a tensor holds, and its number of elements."""


class Flow:
    """Follows values; is told of every operation of a step, in order."""

    def __init__(self) -> None:
        self._values: dict[Hashable, _Value] = {}
        self._sizes: dict[int, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._sources: list[_Source] = []
        self._started: set[Hashable] = set()
        self._found: list[tuple[StartedCollective, str]] = []
        self._sums: list[tuple[_Source, _Source]] = []

    def move(self, name: str, arguments: Hashable, inputs: Sequence[TensorId], outputs: Sequence[TensorId]) -> None:
        """Follow an operation that only moves elements: ``name`` with equal ``arguments`` moves equal values alike."""
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
        """Take note of any other operation, whose inputs are used and whose results are new values."""
        for one in inputs:
            value = self._value(one)
            if value.source is not None:
                value.source.use(value.number, self._sizes[value.number])

    def add(self, inputs: Sequence[TensorId], output: TensorId) -> None:
        """Follow the sum of two tensors of one shape."""
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
        """Follow a collective that gives a new tensor."""
        value = self._value(sent)
        same = (started.kind, started.group, started.phase, value.number)
        if same in self._started:
            self._found.append((started, f"starts the same {started.kind} of the same tensor again"))
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
        """What was found, equal findings of a module together, the largest first."""
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
