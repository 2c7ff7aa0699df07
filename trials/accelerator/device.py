"""The device of a process, of any kind: choosing it, waiting for it, its clocks, streams and names.

``torch.accelerator`` identifies the kind; everything else uses the device's module (:func:`module_of`). All packages
that add a device to torch provide that module's functions, but not yet all of ``torch.accelerator``. All functions also
accept the CPU, which needs no choice and no waiting.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity

from trials.accelerator.kinds import FAMILIES, DeviceKind, Family, family_of


class DeviceUnavailableError(RuntimeError):
    """This process cannot compute on the trial's kind of device: the node's fault, not the trial's."""


class Mark(Protocol):
    """A moment on the device's clock, defined when the device has reached it."""

    def elapsed_time(self, end: Any) -> float:
        """Return milliseconds from here to ``end``, after the device has reached both."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


def is_host(device: torch.device) -> bool:
    """Whether ranks compute on the processor: its work is done when a call returns, and its memory is the host's."""
    return device.type == "cpu"


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of this process's device; ROCm builds of torch call their devices ``cuda``."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "rocm"
    return family_of(device.type).kind


def installed_kind() -> DeviceKind:
    """Return the kind of device that torch finds in this process; the CPU if none.

    Installed packages that add a device to torch are imported.
    """
    for family in FAMILIES.values():
        if family.package:
            with contextlib.suppress(ImportError):
                importlib.import_module(family.package)
    found = torch.accelerator.current_accelerator()
    if found is None or found.type not in {family.torch_device for family in FAMILIES.values()}:
        return "cpu"
    return kind_of(found) if module_of(found).is_available() else "cpu"


def open_device(kind: str, index: int) -> torch.device:
    """Return visible device number ``index`` of this kind, and make it the current one.

    Raises:
        DeviceUnavailableError: torch does not support the kind, or sees no such device; the message has the remedy.
    """
    family = family_of(kind)
    if family.kind == "cpu":
        return torch.device("cpu")
    _require_support(kind, family)
    module = getattr(torch, family.torch_device)
    if not module.is_available():
        raise DeviceUnavailableError(
            f"the trial requires device {kind!r}, but this process sees no such device; check "
            f"{family.query_tool}, {family.visible_variable}, and the devices passed to a container"
        )
    if index >= (count := module.device_count()):
        raise DeviceUnavailableError(
            f"the trial requires device {kind!r} number {index}, but this process sees {count}; check "
            f"{family.query_tool} and {family.visible_variable}"
        )
    device = torch.device(family.torch_device, index)
    module.set_device(device)
    return device


def _require_support(kind: str, family: Family) -> None:
    """Raise if this torch does not support such devices."""
    if family.package:
        try:
            importlib.import_module(family.package)
        except ImportError as error:
            raise DeviceUnavailableError(
                f"device {kind!r} requires the package {family.package}, which cannot be imported: {error}; "
                f"install the version for torch {torch.__version__}"
            ) from error
    if not hasattr(torch, family.torch_device):
        raise DeviceUnavailableError(f"torch {torch.__version__} does not support the device {family.torch_device!r}")
    is_for_rocm = torch.version.hip is not None
    if kind == "rocm" and not is_for_rocm:
        raise DeviceUnavailableError(
            f"device 'rocm' requires a torch built for ROCm, but this is {torch.__version__}; install it from "
            "https://download.pytorch.org/whl/ for the ROCm version of the driver"
        )
    if kind == "cuda" and is_for_rocm:
        raise DeviceUnavailableError(f"torch {torch.__version__} is built for ROCm; set device: rocm")


def module_of(device: torch.device) -> Any:
    """Return torch's module for this type of device: ``torch.cuda``, ``torch.xpu``, ``torch.npu`` or ``torch.cpu``."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work; the CPU always has."""
    if not is_host(device):
        module_of(device).synchronize(device)


def collectives_of(device: torch.device) -> str:
    """Return the backend of process groups over such devices."""
    return family_of(device.type).collectives


def widest_float(device: torch.device) -> torch.dtype:
    """Return the number format for large sums: the widest that this kind of device supports, also in collectives."""
    found: torch.dtype = getattr(torch, family_of(device.type).widest)
    return found


class _HostMark:
    """A moment on the host's clock, when the CPU has finished all previous work."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: _HostMark) -> float:
        return (end._at_s - self._at_s) * 1e3

    def synchronize(self) -> None:
        """Return at once: the CPU has finished."""


def mark(device: torch.device) -> Mark:
    """Put a mark after all work on the device's current stream; on the CPU, read the host's clock."""
    if is_host(device):
        return _HostMark()
    event: Mark = module_of(device).Event(enable_timing=True)
    event.record(module_of(device).current_stream(device))  # type: ignore[attr-defined]
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return seconds between two marks that the device has reached."""
    return start.elapsed_time(end) / 1e3


def new_stream(device: torch.device) -> torch.Stream | None:
    """Create a stream; None on the CPU, which has none."""
    return None if is_host(device) else module_of(device).Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream; None on the CPU."""
    return None if is_host(device) else module_of(device).current_stream(device)


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Use ``stream`` in the body; the current one if it is None."""
    return contextlib.nullcontext() if stream is None else module_of(stream.device).stream(stream)


def device_name(device: torch.device) -> str:
    """Return the hardware's name for itself; "cpu" for the CPU."""
    return "cpu" if is_host(device) else str(module_of(device).get_device_name(device))


def device_uuid(device: torch.device) -> str | None:
    """Return the device's unique id, as its tools print it; None if torch does not have it.

    For a slice of a GPU (MIG), it is the slice's name in the list of visible devices, if present. torch returns bare
    digits; the device's name shows whether they are a GPU's or a slice's.
    """
    if is_host(device):
        return None
    uuid = getattr(module_of(device).get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    if kind_of(device) != "cuda" or str(uuid).startswith(("GPU-", "MIG-")):
        return str(uuid)
    seen = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    index = device.index or 0
    if index < len(seen) and seen[index].startswith("MIG-"):
        return seen[index]
    return f"{'MIG' if ' MIG ' in device_name(device) else 'GPU'}-{uuid}"


def is_started(module: Any) -> bool:
    """Whether this process has used devices of this torch module."""
    is_initialized = getattr(module, "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


def current_device() -> torch.device | None:
    """Return the device that this process computes on; None if it has used none."""
    for name in dict.fromkeys(family.torch_device for family in FAMILIES.values() if family.kind != "cpu"):
        module = getattr(torch, name, None)
        if module is not None and is_started(module):
            return torch.device(name, module.current_device())
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability; None on other kinds of devices."""
    if kind_of(device) != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def architecture(device: torch.device) -> str:
    """Return ROCm's name of the architecture, such as ``gfx942``; empty on other kinds of devices."""
    return str(getattr(module_of(device).get_device_properties(device), "gcnArchName", ""))


def has_cudnn(device: torch.device) -> bool:
    """Whether convolutions use cuDNN or, on ROCm, its equivalent."""
    return device.type == "cuda" and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]


def profiler_activity(device: torch.device) -> ProfilerActivity | None:
    """Return the activity of torch's profiler for such devices; None for the CPU, which it always records."""
    name = {"cuda": "CUDA", "xpu": "XPU"}.get(device.type, "PrivateUse1")
    return None if is_host(device) else getattr(ProfilerActivity, name)


# Memory of a device as counted by its allocator and its driver. For the CPU, which has no such allocator, see
# :mod:`trials.training.measure`.
#
# These use the device's module instead of ``torch.accelerator``, because all packages that add a device provide it.


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """Largest allocated and reserved bytes over some time."""

    allocated: int = 0
    reserved: int = 0

    def __or__(self, other: MemoryPeaks) -> MemoryPeaks:
        """Peaks over both times."""
        return MemoryPeaks(max(self.allocated, other.allocated), max(self.reserved, other.reserved))


def allocator_peaks(device: torch.device) -> MemoryPeaks:
    """Return the peaks of allocated and reserved memory since the last reset."""
    module = module_of(device)
    return MemoryPeaks(int(module.max_memory_allocated(device)), int(module.max_memory_reserved(device)))


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks to the memory in use now."""
    module_of(device).reset_peak_memory_stats(device)


def release_cached(device: torch.device) -> None:
    """Return the allocator's unused memory to the device."""
    module_of(device).empty_cache()


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return the driver's free and total bytes of the device, over all processes."""
    free, total = module_of(device).mem_get_info(device)
    return int(free), int(total)


def limit_allocator(device: torch.device, limit_bytes: int) -> None:
    """Make the allocator fail as out of memory beyond ``limit_bytes``; memory outside of it is not limited."""
    module = module_of(device)
    total_bytes = int(module.get_device_properties(device).total_memory)
    module.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def record_history(device: torch.device) -> None:
    """Record every allocation with its place in the code, if the device's allocator supports that."""
    if (recorder := _recorder(device)) is not None:
        recorder._record_memory_history()


def write_history(device: torch.device, path: Path) -> bool:
    """Write the records for PyTorch's memory viewer and stop recording; return whether there were any."""
    if (recorder := _recorder(device)) is None:
        return False
    recorder._dump_snapshot(str(path))
    recorder._record_memory_history(enabled=None)
    return True


def _recorder(device: torch.device) -> Any:
    found = getattr(module_of(device), "memory", None)
    return found if hasattr(found, "_record_memory_history") and hasattr(found, "_dump_snapshot") else None
