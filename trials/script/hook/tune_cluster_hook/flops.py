"""Floating-point operations of one step, by PyTorch's own formulas: forward, backward and what is recomputed."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from .channel import guarded

COUNT_FLOPS_VARIABLE = "TUNE_CLUSTER_COUNT_FLOPS"


def is_wanted() -> bool:
    """Whether the tuner asked for the number."""
    return os.environ.get(COUNT_FLOPS_VARIABLE) == "1"


def _mode() -> Any:
    """A dispatch mode that adds up. PyTorch's ``FlopCounterMode`` would hook into every module."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Sees every operation of the step."""

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.total = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            formula = flop_registry.get(getattr(func, "_overloadpacket", None))
            if formula is not None:
                self._add(formula, args, kwargs or {}, out)
            return out

        @guarded("FLOPs")
        def _add(self, formula: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            self.total += int(formula(*args, **kwargs, out_val=out))

    return Counting()


def uncounted() -> Any:
    """A context in which tensors are read as if nobody counted; some that autograd made cannot be otherwise."""
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    pause = getattr(dispatch, "_disable_current_modes", None)
    return contextlib.nullcontext() if pause is None or not _counting else pause()


_counting: set[int] = set()
"""The counting mode that is on, by identity."""


class FlopsOfStep:
    """Counts from one step's end to the next one's."""

    def __init__(self) -> None:
        self._counting: Any = None
        self._done = False

    @property
    def is_counting(self) -> bool:
        """Whether the present step is counted."""
        return self._counting is not None

    def step_ended(self, compiled: bool) -> int | None:
        """Begins at the end of a step; at the end of the next, the number."""
        if self._counting is not None:
            return self._end()
        if not self._done and is_wanted() and not compiled and "torch" in sys.modules:
            counting = _mode()
            counting.__enter__()
            self._counting = counting
            _counting.add(id(counting))
        self._done = True
        return None

    def _end(self) -> int:
        counting, self._counting = self._counting, None
        counting.__exit__(None, None, None)
        _counting.discard(id(counting))
        return int(counting.total)
