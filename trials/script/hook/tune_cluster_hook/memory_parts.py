"""Takes a step's memory apart: bytes of gradients and of optimiser states, and of activations at their peak.

Gradients are read when an optimiser begins its step, optimiser states when the step has ended. Activations are the
tensors, other than gradients, that the inspected step creates, at the moment when they take the most memory. Tensors
are counted by their storages, which views share. Memory cached by the allocator and workspaces of kernels do not count.
"""

from __future__ import annotations

import functools
import weakref
from array import array
from typing import Any, Callable, Iterable, Iterator

from .steps import guarded

MAX_EVENTS = 400_000
"""Maximum number of allocations and releases to record in a step; beyond it, activations are unknown."""
SHARDS = ("_local_tensor", "ds_tensor")
"""Attributes in which DTensor and DeepSpeed's ZeRO-3 keep this process's shard of a tensor."""


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return bytes by address of the memory that tensors hold in this process."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = _storage(tensor)
        if storage is not None and storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _storage(tensor: Any) -> Any:
    """Return the storage of a tensor, or of its shard; None for anything else."""
    for name in SHARDS:
        shard = getattr(tensor, name, None)
        if shard is not None:
            tensor = shard
    read = getattr(tensor, "untyped_storage", None)
    return None if read is None else read()


class LiveTensors:
    """Lifetimes of the tensors that one step creates."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._bytes = array("q")
        """Bytes of each event, negative for a release; the number of the tensor is in ``_numbers``."""
        self._alive: dict[int, tuple[int, Any]] = {}
        """By address of the storage object: the tensor's number, and the weak reference that reports its release."""
        self._count = 0
        self._gradients: set[int] = set()
        self.is_paused = False
        """Whether an optimiser is stepping: tensors that it creates are not activations."""
        self._is_whole = True

    def saw(self, func: Any, out: Any) -> None:
        """Record the output of an operator."""
        if self._is_whole and not self.is_paused:
            self._is_whole = bool(self._saw(func, out))

    @guarded("activations")
    def _saw(self, func: Any, out: Any) -> bool:
        outputs, returns = out if isinstance(out, tuple) else (out,), func._schema.returns
        for place, output in enumerate(outputs):
            if place < len(returns) and returns[place].alias_info is not None:
                continue  # a view of an input, or the input itself
            for tensor in output if isinstance(output, (list, tuple)) else (output,):
                storage = _storage(tensor)
                if storage is not None and storage._cdata not in self._alive:
                    self._begins(storage)
        return len(self._bytes) < MAX_EVENTS

    def _begins(self, storage: Any) -> None:
        self._count += 1
        number, address, size = self._count, storage._cdata, storage.nbytes()

        def ends(_: Any) -> None:
            self._alive.pop(address, None)
            self._add(number, -size)

        self._add(number, size)
        self._alive[address] = number, weakref.ref(storage, ends)

    def _add(self, number: int, size: int) -> None:
        self._numbers.append(number)
        self._bytes.append(size)

    def mark_gradients(self, gradients: Iterable[Any]) -> None:
        """Exclude gradients from the activations."""
        for gradient in gradients:
            storage = _storage(gradient)
            known = None if storage is None else self._alive.get(storage._cdata)
            if known is not None:
                self._gradients.add(known[0])

    def peak_bytes(self) -> int | None:
        """Return the most bytes held at one time, without gradients; None if the record is incomplete."""
        if not self._is_whole or not self._count:
            return None
        held = peak = 0
        for number, size in zip(self._numbers, self._bytes):
            if number not in self._gradients:
                held += size
                peak = max(peak, held)
        return peak


class MemoryParts:
    """Bytes of gradients and optimiser states in the first steps."""

    def __init__(self) -> None:
        self.live: LiveTensors | None = None
        """Tensors of the inspected step; None in other steps."""
        self._is_on = True
        self._optimizers: dict[int, Callable[[], Any]] = {}
        self._gradients: dict[int, int] = {}
        """Gradients of the current step: bytes by address."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """Call before the step of an optimiser."""
        if self._is_on:
            self._begins(optimizer)

    @guarded("gradients")
    def _begins(self, optimizer: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = weakref.ref(optimizer)
        self._take(_parameters(optimizer))
        if self.live is not None:
            self.live.is_paused = True

    def _take(self, parameters: Iterable[Any]) -> None:
        gradients = [gradient for one in parameters if (gradient := _gradient(one)) is not None]
        self._gradients.update(storages(gradients))
        if self.live is not None:
            self.live.mark_gradients(gradients)

    def optimizer_ended(self) -> None:
        """Call after the step of an optimiser."""
        if self.live is not None:
            self.live.is_paused = False

    def within(self, optimizer: Any, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the closure of an optimiser's step, which runs a forward and a backward pass."""
        if not self._is_on:
            return closure

        @functools.wraps(closure)
        def computed(*args: Any, **kwargs: Any) -> Any:
            self.optimizer_ended()
            self._forget(optimizer)
            try:
                return closure(*args, **kwargs)
            finally:
                self.optimizer_begins(optimizer)

        return computed

    @guarded("gradients")
    def _forget(self, optimizer: Any) -> None:
        """Drop the gradients of the previous step, which the closure discards."""
        for place in storages(map(_gradient, _parameters(optimizer))):
            self._gradients.pop(place, None)

    def stop(self) -> None:
        """Stop recording."""
        self._is_on, self.live = False, None
        self._optimizers.clear()

    @guarded("memory of a step")
    def read(self, root: Any) -> dict[str, int]:
        """Return the bytes of gradients and of optimiser states, including master weights, at the end of a step."""
        gradients, self._gradients = self._gradients, {}
        if root is None or not self._optimizers:
            return {}
        weights = storages(root.parameters())
        gradients.update(storages(map(_gradient, root.parameters())))
        states: dict[int, int] = {}
        for optimizer in [found for reference in self._optimizers.values() if (found := reference()) is not None]:
            states.update(storages(_tensors(optimizer.state)))
            states.update(storages(_parameters(optimizer)))
        states = {place: size for place, size in states.items() if place not in weights and place not in gradients}
        return {"gradient_bytes": sum(gradients.values()), "optimizer_bytes": sum(states.values())}


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _gradient(parameter: Any) -> Any:
    """Return the gradient, or None. Reading ``grad`` of a tensor that is not a leaf would warn."""
    return parameter.grad if parameter.is_leaf else None


def _tensors(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield all tensors of an optimiser's state."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif depth and hasattr(value, "values"):
        for item in list(value.values()):
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth - 1)


MEMORY = MemoryParts()
