"""The device of a process, whatever its kind: choosing it, waiting for it, its clocks, streams and names.

``torch.accelerator`` tells which kind there is; all else is asked of the device's own module (:func:`module_of`), which
those who add a device to torch all provide under the same names, as they do not yet all of ``torch.accelerator``.
Everything takes the CPU too, for which there is nothing to choose or wait for.
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
    """This process cannot compute on the kind of device that its trial asks for: the node's fault, not the trial's."""


class Mark(Protocol):
    """A moment on the device's clock, once the device has come to it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to ``end``, when the device has come to both."""

    def synchronize(self) -> None:
        """Wait until the device has come here."""


def is_host(device: torch.device) -> bool:
    """Whether ranks compute on the processor: its work is done when a call returns, its memory is the host's."""
    return device.type == "cpu"


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a device of this process; a build of torch for ROCm calls its devices ``cuda``."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "rocm"
    return family_of(device.type).kind


def installed_kind() -> DeviceKind:
    """The kind of device that torch finds in this process; the CPU where it finds none.

    Packages that add a device to torch are imported where they are installed.
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
    """The device of this kind that is number ``index`` among those the process sees, made its current one.

    Raises:
        DeviceUnavailableError: torch does not support the kind, or sees no such device. Says which, and what to do.
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
    """Whether this torch can compute on such devices at all."""
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
    """What torch keeps for this type of device: ``torch.cuda``, ``torch.xpu``, ``torch.npu`` or ``torch.cpu``."""
    return torch.get_device_module(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; the CPU always has."""
    if not is_host(device):
        module_of(device).synchronize(device)


def collectives_of(device: torch.device) -> str:
    """The backend of process groups over such devices."""
    return family_of(device.type).collectives


def widest_float(device: torch.device) -> torch.dtype:
    """Number format for sums over many elements, and over the gang: the widest that the device's kind takes."""
    found: torch.dtype = getattr(torch, family_of(device.type).widest)
    return found


class _HostMark:
    """A moment on the host's clock, at which the CPU has done all that came before."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: _HostMark) -> float:
        return (end._at_s - self._at_s) * 1e3

    def synchronize(self) -> None:
        """The CPU is always there."""


def mark(device: torch.device) -> Mark:
    """A mark behind all that the current stream of the device was given; on the CPU the host's clock now."""
    if is_host(device):
        return _HostMark()
    event: Mark = module_of(device).Event(enable_timing=True)
    event.record(module_of(device).current_stream(device))  # type: ignore[attr-defined]
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another that the device has come to."""
    return start.elapsed_time(end) / 1e3


def new_stream(device: torch.device) -> torch.Stream | None:
    """A queue of work beside the current one; None on the CPU, which has none."""
    return None if is_host(device) else module_of(device).Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream | None:
    """The queue that work is given to now; None on the CPU."""
    return None if is_host(device) else module_of(device).current_stream(device)


def on_stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Give work to ``stream`` inside; to the current one if it is None."""
    return contextlib.nullcontext() if stream is None else module_of(stream.device).stream(stream)


def device_name(device: torch.device) -> str:
    """What the hardware calls itself; "cpu" for the CPU."""
    return "cpu" if is_host(device) else str(module_of(device).get_device_name(device))


def device_uuid(device: torch.device) -> str | None:
    """What tells the device from all others, as its tools print it; None where torch does not know.

    Of a slice of a GPU (MIG) it is the slice's name among the devices that the process may see: torch gives digits, and
    whose they are, the device's model says.
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
    """Whether this process has used devices of the module of torch."""
    is_initialized = getattr(module, "is_initialized", None)
    return bool(is_initialized is not None and is_initialized())


def current_device() -> torch.device | None:
    """The device that this process computes on; None where it has used none."""
    for name in dict.fromkeys(family.torch_device for family in FAMILIES.values() if family.kind != "cpu"):
        module = getattr(torch, name, None)
        if module is not None and is_started(module):
            return torch.device(name, module.current_device())
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA's compute capability; None on other kinds of devices, which have no such number."""
    if kind_of(device) != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def architecture(device: torch.device) -> str:
    """What ROCm calls the device's architecture, like ``gfx942``; empty on other kinds of devices."""
    return str(getattr(module_of(device).get_device_properties(device), "gcnArchName", ""))


def has_cudnn(device: torch.device) -> bool:
    """Whether convolutions there are cuDNN's, or on ROCm what stands in for it."""
    return device.type == "cuda" and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]


def profiler_activity(device: torch.device) -> ProfilerActivity | None:
    """What torch's profiler calls the work of such devices; None for the CPU, whose work it always records."""
    name = {"cuda": "CUDA", "xpu": "XPU"}.get(device.type, "PrivateUse1")
    return None if is_host(device) else getattr(ProfilerActivity, name)


# Memory of a device as its allocator and its driver count it. For the CPU, which has no such allocator, see
# :mod:`trials.training.measure`.
#
# Asked of the device's module rather than of ``torch.accelerator``: those who add a device to torch all have its
# names.


@dataclass(frozen=True, slots=True)
class MemoryPeaks:
    """Bytes at most allocated and reserved over some time."""

    allocated: int = 0
    reserved: int = 0

    def __or__(self, other: MemoryPeaks) -> MemoryPeaks:
        """Those over both times."""
        return MemoryPeaks(max(self.allocated, other.allocated), max(self.reserved, other.reserved))


def allocator_peaks(device: torch.device) -> MemoryPeaks:
    """What torch's caching allocator handed out and what it held at most, since the last reset."""
    module = module_of(device)
    return MemoryPeaks(int(module.max_memory_allocated(device)), int(module.max_memory_reserved(device)))


def reset_peaks(device: torch.device) -> None:
    """Let peaks be what is in use now."""
    module_of(device).reset_peak_memory_stats(device)


def release_cached(device: torch.device) -> None:
    """Return the allocator's unused memory to the device."""
    module_of(device).empty_cache()


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """What the driver says is free on the device, whoever uses the rest, and all that it has."""
    free, total = module_of(device).mem_get_info(device)
    return int(free), int(total)


def limit_allocator(device: torch.device, limit_bytes: int) -> None:
    """Have the allocator fail as out of memory beyond ``limit_bytes``; what lies outside of it is not bounded."""
    module = module_of(device)
    total_bytes = int(module.get_device_properties(device).total_memory)
    module.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def record_history(device: torch.device) -> None:
    """Have the allocator remember every allocation with the place in the code, as far as the device's allocator can."""
    if (recorder := _recorder(device)) is not None:
        recorder._record_memory_history()


def write_history(device: torch.device, path: Path) -> bool:
    """Write what was remembered for PyTorch's memory viewer, and remember no more; whether there was anything."""
    if (recorder := _recorder(device)) is None:
        return False
    recorder._dump_snapshot(str(path))
    recorder._record_memory_history(enabled=None)
    return True


def _recorder(device: torch.device) -> Any:
    found = getattr(module_of(device), "memory", None)
    return found if hasattr(found, "_record_memory_history") and hasattr(found, "_dump_snapshot") else None
