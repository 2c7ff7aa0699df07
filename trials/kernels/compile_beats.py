"""Signs of life of a rank that compiles: a cold compilation takes minutes, in which no step ends.

torch calls back when it begins and ends to compile a graph, forward or backward, and to record CUDA graphs. Kernels of
Triton are tuned when they first run, of which it says nothing: their tuning is wrapped here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.callback import callback_handler

from trials.outcome import Phase, ProgressSink

BEAT_S = 5.0
"""How often a rank that compiles says so."""
_TRITON = "torch._inductor.runtime.triton_heuristics"
_TUNINGS = ("autotune_to_one_config", "coordinate_descent_tuning")
"""Methods of its ``CachingAutotuner`` that try out configurations of a kernel on the device."""


class CompileBeats:
    """A :class:`ProgressSink` that hands on to another one, and tells it every :data:`BEAT_S` of a compilation."""

    def __init__(self, progress: ProgressSink) -> None:
        self._progress = progress
        self._phase: Phase = "starting"
        self._step = 0
        self._step_time_s: float | None = None
        self._lock = threading.RLock()
        self._depth = 0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._tunings: dict[str, Callable[..., Any]] = {}
        """Triton's own methods by name, as long as they are wrapped."""

    def __call__(
        self, phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
    ) -> None:
        with self._lock:
            self._phase, self._step, self._step_time_s = phase, step, step_time_s
            self._tell(is_compiling=is_compiling)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Beat for what is compiled in the body, wherever in this process."""
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # somebody has reset dynamo, which forgets who listens
                callback_handler.remove_start_callback(self._begin)
                callback_handler.remove_end_callback(self._end)
            self._is_over.set()
            self._leave_triton()

    def _begin(self, *_: object) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._tell(is_compiling=True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="compile-beats", daemon=True)
            self._thread.start()

    def _end(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._tell(is_compiling=False)
        self._watch_triton()

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with self._lock:
                if self._depth:
                    self._tell(is_compiling=True)

    def _tell(self, *, is_compiling: bool) -> None:
        more: dict[str, Any] = {"is_compiling": True} if is_compiling else {}
        self._progress(self._phase, step=self._step, step_time_s=self._step_time_s, **more)

    def _watch_triton(self) -> None:
        """Beat while kernels of Triton are tuned, from their first compilation on: until then it is not imported."""
        tuner: Any = getattr(sys.modules.get(_TRITON), "CachingAutotuner", None)
        for name in () if self._tunings else _TUNINGS:
            if (tune := getattr(tuner, name, None)) is not None:
                self._tunings[name] = tune
                setattr(tuner, name, self._watched(tune))

    def _leave_triton(self) -> None:
        tuner: Any = getattr(sys.modules.get(_TRITON), "CachingAutotuner", None)
        for name, tune in self._tunings.items():
            setattr(tuner, name, tune)

    def _watched(self, tune: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(tune)
        def watched(*args: Any, **options: Any) -> Any:
            self._begin()
            try:
                return tune(*args, **options)
            finally:
                self._end()

        return watched
