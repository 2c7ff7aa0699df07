"""The accelerator of this process: waiting for it, its allocator's peaks; the memory of the process itself."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

_BACKENDS = ("cuda", "npu", "xpu", "musa", "mlu")
"""Modules of torch with ``synchronize`` and ``max_memory_allocated``, as far as they are there."""
MEMORY_LIMIT_VARIABLE = "TUNE_CLUSTER_MEMORY_LIMIT_BYTES"


def accelerator() -> Any | None:
    """The part of torch for the device that this process uses; None on CPU, or before anything ran on it."""
    torch = sys.modules.get("torch")
    for name in _BACKENDS:
        backend = getattr(torch, name, None)
        is_initialized = getattr(backend, "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return backend
    return None


def synchronize() -> None:
    """Waits until the device has done all that was asked of it."""
    backend = accelerator()
    if backend is not None:
        backend.synchronize()


def memory() -> dict[str, int]:
    """Peaks since the process began: of the device's allocator, or on CPU of the resident set."""
    backend = accelerator()
    if backend is None:
        return _resident()
    return {
        "allocated_bytes": int(backend.max_memory_allocated()),
        "reserved_bytes": int(backend.max_memory_reserved()),
    }


_status: dict[int, int] = {}
"""The open ``/proc/self/status`` by process."""


def _resident() -> dict[str, int]:
    """``VmHWM``; what ``getrusage`` says includes the program that started this one."""
    try:
        pid = os.getpid()
        if pid not in _status:
            _status[pid] = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        text = os.pread(_status[pid], 4096, 0)
        return {"rss_bytes": int(text.split(b"VmHWM:", 1)[1].split(None, 1)[0]) << 10}
    except (OSError, IndexError, ValueError):
        return {}


def limit_memory(torch: Any) -> None:
    """Lets this process take no more of its device than the trial is allowed to, from when it uses the device."""
    limit = os.environ.get(MEMORY_LIMIT_VARIABLE)
    for name in _BACKENDS if limit else ():
        backend = getattr(torch, name, None)
        lazy_call = getattr(backend, "_lazy_call", None)
        if lazy_call is not None:
            lazy_call(functools.partial(_limit, backend, int(limit or 0)))


def _limit(backend: Any, limit: int) -> None:
    try:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = local if local < backend.device_count() else 0
        total = backend.get_device_properties(device).total_memory
        backend.set_per_process_memory_fraction(min(1.0, limit / total), device)
    except Exception as failure:
        from .channel import note

        note(f"memory is not limited: {type(failure).__name__}: {failure}")
