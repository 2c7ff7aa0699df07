"""A device's queues, on a machine without one: permitted accesses follow from waits, not from luck.

All work runs at once on the CPU. Every stream also has a clock, and records for each other stream up to where it
has waited for it (vector clocks: Mattern, 1989; race detection by them: Flanagan and Freund, PLDI 2009). An operator is
launched on the stream that is current. Where it reads what a stream wrote that its own has not waited for, or writes
what such a stream still reads, a real device may do both at once: that is a :class:`StreamRaceError`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo  # takes torch.Event for a class when it is imported
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)


class StreamRaceError(AssertionError):
    """Two streams may be at the same memory at once."""


class WatchedEvent:
    """A moment of a stream, after all that the stream has waited for."""

    def __init__(self, watch: StreamWatch, *_: Any, **__: Any) -> None:
        self._watch = watch
        self.clock: Counter[str] = Counter()

    def record(self, stream: WatchedStream | None = None) -> None:
        self.clock = (stream or self._watch.current).clock.copy()

    def wait(self, stream: WatchedStream | None = None) -> None:
        (stream or self._watch.current).wait_event(self)

    def synchronize(self) -> None:
        """The host waits: whatever it launches from now on comes after, on any stream."""
        self._watch.host.wait_event(self)


class WatchedStream:
    """A queue of work, the current one inside its context; ``launches`` names what it was given, in order."""

    def __init__(self, watch: StreamWatch, name: str) -> None:
        self._watch = watch
        self.name = name
        self.device = torch.device("cpu")
        self.clock: Counter[str] = Counter()
        self.launches: list[str] = []
        self._outer: list[WatchedStream] = []

    @property
    def outer(self) -> WatchedStream:
        """The stream that was current before this one."""
        return self._outer[-1]

    def wait_event(self, event: WatchedEvent) -> None:
        self.clock |= event.clock

    def wait_stream(self, other: WatchedStream) -> None:
        self.clock |= other.clock

    def record_event(self, event: WatchedEvent | None = None) -> WatchedEvent:
        found = event or WatchedEvent(self._watch)
        found.record(self)
        return found

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def launch(self, name: str) -> int:
        """One more piece of work, which comes after all that the host has waited for; its number."""
        self.clock |= self._watch.host.clock
        self.clock[self.name] += 1
        self.launches.append(name)
        self._watch.log.append(name)
        return self.clock[self.name]

    def __enter__(self) -> WatchedStream:
        self._outer.append(self._watch.current)
        self._watch.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.current = self._outer.pop()


class WatchedWork:
    """A collective under way on its own stream. Waiting for it lets the current stream wait, as NCCL does."""

    def __init__(self, watch: StreamWatch, work: Any) -> None:
        self._watch, self._work = watch, work
        self._name, self._done = watch.communication.launches[-1], watch.communication.record_event()

    def wait(self, *_: Any) -> bool:
        with self._watch.paused():  # gloo copies its result out only now
            self._work.wait()
        self._watch.current.wait_event(self._done)
        self._watch.log.append(f"wait {self._name}")
        return True


class _Memory:
    """Who wrote a storage last, and who has read it since; stream and number of the launch."""

    def __init__(self, maker: WatchedStream) -> None:
        self.maker = maker
        self.last: tuple[str, int, str] | None = None
        self.reads: list[tuple[str, int, str]] = []
        self.is_recorded = False


class StreamWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device: its streams, and every access to memory while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams: list[WatchedStream] = []
        self.host = WatchedStream(self, "host")
        self.compute = self.new_stream()
        self.current = self.compute
        self.communication = WatchedStream(self, "communication")
        self.log: list[str] = []
        """What was launched on all streams, and which collectives were waited for, in order."""
        self.faults: list[str] = []
        """Memory that was let go of while a stream other than its own was still at it. Raised at the end."""
        self._memory: Any = WeakIdKeyDictionary()
        self._paused = 0

    def new_stream(self, *_: Any, **__: Any) -> WatchedStream:
        self.streams.append(WatchedStream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not looked at."""
        self._paused += 1
        yield
        self._paused -= 1

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """What runs inside is done by the host when it is called; where it touches the device's memory, by the current
        stream, and the host waits, as it does for a copy that is not asynchronous."""
        with self.host:
            yield

    def installed(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> StreamWatch:
        """Let ``modules`` use these streams in place of the device's, and all collectives run on theirs."""
        given: dict[str, Callable[..., Any]] = {
            "new_stream": self.new_stream,
            "current_stream": lambda _device=None: self.current,
            "on_stream": _on_stream,
        }
        for module in modules:
            for name, function in given.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, function)
            for name in ("_all_gather", "_reduce_scatter"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, self.collective(getattr(module, name)))
        for name in COLLECTIVES:
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self.collective(getattr(dist, name)))
        monkeypatch.setattr(torch, "Event", functools.partial(WatchedEvent, self))
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, _stream: self._record(tensor))
        return self

    def collective(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The collective on a separate stream, behind what the current one was given so far."""

        def run(*args: Any, async_op: bool = False, **options: Any) -> WatchedWork | None:
            self.communication.wait_stream(self.current)
            with self.communication:
                work = function(*args, async_op=True, **options)
            pending = WatchedWork(self, work)
            if async_op:
                return pending
            pending.wait()
            return None

        return run

    def __exit__(self, kind: Any, *rest: Any) -> None:
        super().__exit__(kind, *rest)  # type: ignore[no-untyped-call]
        if kind is None and self.faults:
            raise StreamRaceError("\n".join(self.faults))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        name = func.__name__
        writes, reads = _accesses(func, args, kwargs)
        stream = self._doer([*writes, *reads])
        number = stream.launch(name) if writes or reads else 0
        self._touch((stream.name, number, name), stream, writes, reads)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.device.type != "meta"]
        for tensor in made:
            if tensor.untyped_storage() not in self._memory:
                memory = self._of(tensor)
                if not name.startswith("empty"):
                    memory.last = (stream.name, number or stream.launch(name), name)
        if stream is not self.current:
            self.host.wait_stream(stream)
        return result

    def _doer(self, tensors: list[Tensor]) -> WatchedStream:
        is_on_device = any(self._of(tensor).maker is not self.host for tensor in tensors)
        return self.host.outer if self.current is self.host and is_on_device else self.current

    def _touch(
        self, access: tuple[str, int, str], stream: WatchedStream, writes: list[Tensor], reads: list[Tensor]
    ) -> None:
        name = access[2]
        for tensor in reads:
            memory = self._of(tensor)
            self._check(stream, name, "reads what was written by", [memory.last] if memory.last else [])
            memory.reads.append(access)
        for tensor in writes:
            memory = self._of(tensor)
            self._check(stream, name, "overwrites what was written by", [memory.last] if memory.last else [])
            self._check(stream, name, "overwrites what is read by", memory.reads)
            memory.last, memory.reads = access, []

    def _check(self, stream: WatchedStream, name: str, words: str, before: list[tuple[str, int, str]]) -> None:
        for other, number, what in before:
            if stream.clock[other] < number:
                raise StreamRaceError(f"{name} on {stream.name} {words} {what} on {other}, which it has not waited for")

    def _of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage)
        if memory is None:
            memory = self._memory[storage] = _Memory(self.current)
            weakref.finalize(storage, self._freed, memory).atexit = False
        return memory  # type: ignore[no-any-return]

    def _record(self, tensor: Tensor) -> None:
        self._of(tensor).is_recorded = True

    def _freed(self, memory: _Memory) -> None:
        """The allocator gives the memory to whatever the stream that made it is given next."""
        if memory.is_recorded or memory.maker is self.host:
            return
        for other, number, what in [*memory.reads, *([memory.last] if memory.last else [])]:
            if other != "host" and memory.maker.clock[other] < number:
                self.faults.append(f"memory of {memory.maker.name} let go of while {what} on {other} is at it")


def _on_stream(stream: WatchedStream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def _is_view(func: Any) -> bool:
    """Whether the operator gives other views of its inputs and touches no memory."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _accesses(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operator writes, and those that it reads."""
    writes: list[Tensor] = []
    reads: list[Tensor] = []
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False), *((one, kwargs[one.name]) for one in schema if one.name in kwargs)]
    for argument, value in given:
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.device.type != "meta"]
        (writes if is_write else reads).extend(tensors)
    if "empty" in func.__name__ or func.__name__.endswith(("zeros_like.default", "ones_like.default")):
        reads = []  # they read shapes only
    if func.namespace == "c10d":  # whose schemas do not mark the first argument as the result
        writes = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
    return writes, reads
