"""Counts the collectives of a step, their bytes, and the time that the program waits in them.

Calls from Python are counted directly. ``DistributedDataParallel`` reduces its buckets in C++ and records the times of
its first iterations, which are read from it; a communication hook would change what it sends.
"""

from __future__ import annotations

import functools
import statistics
import threading
import weakref
from typing import Any, Callable

from .step_parts import COMMUNICATION, PARTS
from .steps import STEPS, guarded, is_compiling

CALLS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)
"""Functions of ``torch.distributed``."""
FIRST, LAST = 3, 10
"""Iterations of DistributedDataParallel to read: it records the first ten, and rebuilds its buckets in the second."""
NANOSECOND = 1e-9


class Collectives:
    """Collective calls of the current step."""

    def __init__(self) -> None:
        self._calls = 0
        self._bytes = 0
        self._inside = threading.local()

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``call`` to count its calls and to time it as a section of the step."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or getattr(self._inside, "is_call", False):
                return call(*args, **kwargs)
            self._inside.is_call = True
            PARTS.enter(COMMUNICATION)
            try:
                return call(*args, **kwargs)
            finally:
                PARTS.leave(COMMUNICATION)
                self._inside.is_call = False
                self._count(args, kwargs)

        return wrapped

    @guarded("collectives")
    def _count(self, args: Any, kwargs: Any) -> None:
        self._calls += 1
        given = [*args, *kwargs.values()]
        sizes = [size for value in given if (size := _bytes(value))]
        self._bytes += max(sizes, default=0)

    def take(self) -> dict[str, Any]:
        """Return calls and bytes since the last call; empty if there were none."""
        calls, size = self._calls, self._bytes
        self._calls = self._bytes = 0
        return {"collectives": calls, "collective_bytes": size} if calls else {}


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor or of a list of them."""
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


COLLECTIVES = Collectives()
STEPS.collectives = COLLECTIVES


def functions(module: Any) -> None:
    """Hook for ``torch.distributed.distributed_c10d``, before ``torch.distributed`` takes its functions from there."""
    for name in CALLS:
        if hasattr(module, name):
            setattr(module, name, COLLECTIVES.counted(getattr(module, name)))


# ---- DistributedDataParallel's records of its buckets


class Buckets:
    """Reads the times of a wrapper's first iterations."""

    def __init__(self) -> None:
        self._exposed: dict[int, float] = {}
        self._wrapper: Callable[[], Any] = lambda: None

    @property
    def is_read(self) -> bool:
        """Whether there may be something to read after each step."""
        return self._wrapper() is not None

    def watch(self, module: Any) -> None:
        """Watch a module that may be such a wrapper."""
        if type(module).__name__ == "DistributedDataParallel":
            self._wrapper = weakref.ref(module)

    @guarded("buckets")
    def read(self) -> dict[str, Any]:
        """Return facts after a step; empty if there is no wrapper, or nothing new."""
        wrapper = self._wrapper()
        return {} if wrapper is None else self._of(wrapper._get_ddp_logging_data())

    def _of(self, kept: dict[str, Any]) -> dict[str, Any]:
        iteration = int(kept.get("iteration", 0))
        if iteration >= LAST:
            self._wrapper = lambda: None
        together, whole = kept.get("backward_compute_comm_overlap_time"), kept.get("backward_comm_time")
        if iteration < FIRST or together is None or whole is None:
            return {}
        self._exposed[iteration] = max(0.0, (int(whole) - int(together)) * NANOSECOND)
        sizes = str(kept.get("rebuilt_bucket_sizes") or kept.get("bucket_sizes") or "").split(",")
        return {
            "buckets": len(sizes),
            "bucket_bytes": sum(int(size) for size in sizes if size.strip()),
            "bucket_exposed_s": statistics.median(self._exposed.values()),
        }
