"""Where a process spends its CPU time, by part of the program: exclusive times of chosen functions."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class CpuParts:
    """CPU seconds by part. A part's time leaves out that of the parts it calls; ``rest`` is what no part claims."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside: list[str] = ["rest"]
        self._since_s = time.process_time()

    def snapshot(self) -> dict[str, float]:
        """CPU seconds by part so far."""
        self._charge()
        return dict(self.seconds)

    @contextmanager
    def watching(self, parts: dict[str, list[tuple[Any, str]]]) -> Iterator[None]:
        """Charge calls of these functions, given as (module or class, name), to their parts while inside."""
        places = [(part, owner, name) for part, listed in parts.items() for owner, name in listed]
        originals = [getattr(owner, name) for _, owner, name in places]
        for (part, owner, name), function in zip(places, originals, strict=True):
            setattr(owner, name, self._charged(part, function))
        try:
            yield
        finally:
            for (_, owner, name), function in zip(places, originals, strict=True):
                setattr(owner, name, function)

    def _charged(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._inside.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._inside.pop()

        return call

    def _charge(self) -> None:
        now_s = time.process_time()
        self.seconds[self._inside[-1]] = self.seconds.get(self._inside[-1], 0.0) + now_s - self._since_s
        self._since_s = now_s
