"""Splits the time of a step: data, forward, backward, recompute, communication, optimiser, and the rest.

Sections nest, and the time of an inner one does not count in the outer one: Lightning runs forward and backward passes
in the optimiser's closure, and recomputation runs in the backward pass. On an accelerator, each change of section
records an event in the stream, which is read after the end of the step, so nothing waits for it.
"""

from __future__ import annotations

import functools
import threading
import time
import types
from collections import defaultdict
from typing import Any, Callable

from .memory_parts import MEMORY
from .roots import ROOTS, in_backward
from .steps import STEPS, guarded, is_compiling

DATA, FORWARD, BACKWARD, RECOMPUTE, COMMUNICATION, OPTIMIZER, OTHER = (
    "data",
    "forward",
    "backward",
    "recompute",
    "communication",
    "optimizer",
    "other",
)
MAX_EVENTS = 2048
"""Maximum timed changes of section per step on an accelerator; a step with more has no parts."""


class PartsClock:
    """Clock of the current step's sections, which count only in the thread whose steps are counted."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = 0.0
        self._thread: int | None = None
        self._device: Any = None
        self._stream: Any = None
        self._events: list[Any] = []
        """Events reused from step to step: one more than there are changes of section."""
        self._ended: list[str] = []
        """The section that ended with each event but the first."""
        self.has_loader = False

    # ---- Sections

    def enter(self, name: str) -> None:
        """Begin a section."""
        if self._thread == threading.get_ident() or self._works_for_it():
            self._change()
            self._open.append(name)

    def leave(self, name: str) -> None:
        """End the innermost open section of this name, and those still open inside it."""
        opened = self._open
        if name in opened and (self._thread == threading.get_ident() or self._works_for_it()):
            self._change()
            while opened and opened.pop() != name:
                pass

    def during(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Time ``call`` as a section; leaves no trace in compiled code."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return call(*args, **kwargs)
            self.enter(name)
            try:
                return call(*args, **kwargs)
            finally:
                self.leave(name)

        return timed

    def _works_for_it(self) -> bool:
        """Whether the training thread waits for this one in a backward pass. False before the first step has ended,
        whose time is unknown anyway."""
        return self._thread is not None and BACKWARD in self._open and in_backward()

    def _change(self) -> None:
        now = time.perf_counter()
        name = self._open[-1] if self._open else OTHER
        self._seconds[name] += now - self._since
        self._since = now
        if self._device is not None:
            self._record(name)

    @guarded("events of a step")
    def _record(self, ended: str) -> None:
        if len(self._ended) < MAX_EVENTS and self._device.current_stream() == self._stream:
            self._ended.append(ended)
            self._event(len(self._ended)).record()

    def _event(self, number: int) -> Any:
        while len(self._events) <= number:
            self._events.append(self._device.Event(enable_timing=True))
        return self._events[number]

    # ---- Steps

    def close(self) -> None:
        """End the step, before waiting for the device."""
        self._change()

    def take(self) -> dict[str, float]:
        """Return the seconds of every section of the closed step, after waiting for the device."""
        found = self._on_device() if self._device is not None else self._seconds
        if found is None:
            return {}
        if self.has_loader:
            found.setdefault(DATA, 0.0)
        return {f"{name}_s": round(seconds, 7) for name, seconds in found.items() if name != OTHER}

    @guarded("times on the device")
    def _on_device(self) -> dict[str, float] | None:
        if len(self._ended) >= MAX_EVENTS:
            return None
        found: dict[str, float] = {}
        for number, name in enumerate(self._ended):
            elapsed_ms = self._events[number].elapsed_time(self._events[number + 1])
            found[name] = found.get(name, 0.0) + elapsed_ms / 1e3
        return found

    def restart(self, backend: Any | None) -> None:
        """Begin the next step, on this device."""
        self._open.clear()
        self._seconds.clear()
        self._ended.clear()
        self._thread = threading.get_ident()
        self._device = None
        if backend is not None and hasattr(backend, "Event") and hasattr(backend, "current_stream"):
            self._begin_on(backend)
        self._since = time.perf_counter()

    @guarded("events of a step")
    def _begin_on(self, backend: Any) -> None:
        self._device, self._stream = backend, backend.current_stream()
        try:
            self._event(0).record()
        except Exception:
            self._device = None
            raise


PARTS = PartsClock()
STEPS.parts = PARTS


# ---- Boundaries of sections in PyTorch itself


def forward_begins(root: Any, args: Any, kwargs: Any) -> None:
    """Hook before the call of a root module, or of a frozen model, whose forward pass is part of the step."""
    if root.module.training or root.is_frozen:
        PARTS.enter(FORWARD)


def forward_ended(root: Any, output: Any) -> None:
    """Hook after the call."""
    PARTS.leave(FORWARD)


ROOTS.observe(forward_begins, forward_ended)


def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Hook of every optimiser before its step, which excludes the work in its closure."""
    if is_compiling():
        return None
    PARTS.enter(OPTIMIZER)
    MEMORY.optimizer_begins(optimizer)
    return _with_closure(optimizer, args, kwargs)


_CLOSURES = (types.FunctionType, types.MethodType, functools.partial)
"""Types of closures that may be wrapped in a function. To an optimiser, other callables may be more than that."""


@guarded("closure")
def _with_closure(optimizer: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 1 and isinstance(args[-1], _CLOSURES):  # the first is the optimiser itself
        return (*args[:-1], PARTS.during(OTHER, MEMORY.within(optimizer, args[-1]))), kwargs
    if isinstance(kwargs.get("closure"), _CLOSURES):
        return args, {**kwargs, "closure": PARTS.during(OTHER, MEMORY.within(optimizer, kwargs["closure"]))}
    return None


def after_step() -> None:
    """Hook after an optimiser step."""
    PARTS.leave(OPTIMIZER)
    MEMORY.optimizer_ended()


def checkpoints(module: Any) -> None:
    """Hook for ``torch.utils.checkpoint``: both ways to recompute, below its public functions."""
    frame = getattr(module, "_CheckpointFrame", None)
    if frame is not None:
        made = frame.__init__

        @functools.wraps(made)
        def initialise(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
            made(self, PARTS.during(RECOMPUTE, recompute_fn), *args, **kwargs)

        frame.__init__ = initialise
    again = getattr(module, "CheckpointFunction", None)
    if again is not None:
        again.backward = staticmethod(PARTS.during(RECOMPUTE, again.backward))
