"""Peak of live tensors in one step on a CPU, whose allocator keeps no statistics.

The definition is that of accelerators and of dry runs: the largest sum of live tensors. The resident set also includes
freed memory that the C library keeps, code, and Python's objects.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

MAX_PASSES = 16
"""Most micro-batches of a traced step: the trace grows with them, and counts towards the memory limit of the rank."""


def peak_of_step(step: Callable[[], object], others: object = None) -> int:
    """Run a step in steady state, which ends with the tensors that it began with. Return the largest sum of live
    tensors during it, in bytes. Tensors that are attributes of ``others`` do not count.

    Allocations are those of this thread, which runs all operators of a step on a CPU. Releases by threads of gloo are
    not seen: its copies of what ranks exchange may count until the end of the step.
    """
    gc.collect()
    live = live_storages()
    for address in _attributes(others):
        live.pop(address, None)
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        step()
    finally:
        records = _disable_profiler_legacy()
    total = highest = 0
    for event in (event for thread in records for event in thread):
        if str(event.kind()) == "memory_alloc":
            total += event.cpu_memory_usage()
            highest = max(highest, total)
    return sum(live.values()) + highest


def live_storages() -> dict[int, int]:
    """Return address and bytes of all storages that Python's tensors on the CPU lead to."""
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, torch.nn.Parameter) and item.device.type == "cpu":
            storage = item.untyped_storage()
            # Compiled graphs leave tensors behind whose storage they have taken.
            with contextlib.suppress(RuntimeError):
                storages[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in storages.items() if size}


def _attributes(owner: object) -> list[int]:
    values = vars(owner).values() if hasattr(owner, "__dict__") else ()
    return [value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)]
