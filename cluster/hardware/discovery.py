"""Finds what this host has to offer, by the tools of the devices' vendors and without importing torch."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.hardware import listing
from cluster.hardware.listing import DeviceQueryError, ListedDevice, is_installed
from cluster.hardware.topology import (
    DeviceChoice,
    DeviceHandle,
    Node,
    cpu_model,
    num_usable_cores,
    path_safe,
    usable_memory_bytes,
)
from trials.accelerator.kinds import FAMILIES, DeviceKind

logger = logging.getLogger(__name__)


class DeviceError(ValueError):
    """This host does not have the devices asked for. The message says what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Who lists devices of one kind."""

    tools: tuple[str, ...]
    listed: Callable[[], list[ListedDevice]]
    driver_files: tuple[str, ...]
    """Files that are there only where a driver of such devices runs."""


_MAKERS: Mapping[DeviceKind, _Maker] = {
    "cuda": _Maker(
        tools=(listing.NVIDIA_TOOL,), listed=listing.nvidia_devices, driver_files=("/dev/nvidia0", "/dev/nvidiactl")
    ),
    "npu": _Maker(tools=(listing.ASCEND_TOOL,), listed=listing.ascend_devices, driver_files=("/dev/davinci_manager",)),
    "rocm": _Maker(tools=listing.AMD_TOOLS, listed=listing.amd_devices, driver_files=("/dev/kfd",)),
    "xpu": _Maker(tools=(listing.INTEL_TOOL,), listed=listing.intel_devices, driver_files=()),
}
"""In the order in which ``auto`` looks."""


def discover_node(
    *,
    name: str | None = None,
    address: str = "127.0.0.1",
    device: DeviceChoice = "auto",
    num_devices: int | None = None,
    device_memory_bytes: int | None = None,
    may_be_cpu: bool = True,
) -> Node:
    """Describe this host.

    Without accelerators (or with ``device="cpu"``) every core is a device unless ``num_devices`` says otherwise, and
    the host's cores and memory are shared out evenly. ``device_memory_bytes`` overrides what the hardware reports.

    Args:
        may_be_cpu: whether ``auto`` may find no accelerator.

    Raises:
        DeviceError: accelerators are asked for that are not there, or are there and cannot be used.
    """
    found = _Found(kind="cpu") if device == "cpu" else _found(device)
    kind, listed = found.kind, found.devices
    if kind == "cpu" and not may_be_cpu:
        raise DeviceError(f"none of {', '.join(all_tools())} lists a device here; install the tool of its driver")
    cores = num_usable_cores()
    if listed:
        count, first = num_devices or len(listed), listed[0]
        device_name, memory_bytes = first.model, min(one.memory_bytes for one in listed)
        if count > len(listed):
            raise DeviceError(f"devices_per_node is {count}, but this host has {words(kind, listed)}{found.but()}")
    else:
        count, device_name = num_devices or cores, cpu_model()
        memory_bytes = usable_memory_bytes() // count
    return Node(
        name=name or path_safe(socket.gethostname()),
        address=address,
        num_devices=count,
        device_kind=kind,
        device_name=device_name,
        device_memory_bytes=device_memory_bytes or memory_bytes,
        threads_per_device=max(1, cores // count),
        host_memory_bytes=usable_memory_bytes(),
        handles=tuple(map(_handle, listed[:count])),
    )


def listed(kind: DeviceKind, *, with_slices: bool = False) -> list[ListedDevice]:
    """All devices of the kind that their tool shows, whatever this process may see; none where it is not installed.

    Args:
        with_slices: list the slices of divided GPUs beside whole ones.

    Raises:
        DeviceQueryError: the tool fails.
    """
    maker = _MAKERS[kind]
    if not any(map(is_installed, maker.tools)):
        return []
    found = maker.listed()
    return [*found, *listing.slices()] if with_slices and not any(one.is_slice for one in found) else found


def all_tools() -> tuple[str, ...]:
    """The tools that list devices."""
    return tuple(tool for maker in _MAKERS.values() for tool in maker.tools)


def hidden() -> str | None:
    """What in this process's environment hides the devices that a tool or a driver of this host is for; None where
    nothing does."""
    for kind, maker in _MAKERS.items():
        limit = _limit(kind)
        if limit and _are_hidden(kind) and (any(map(is_installed, maker.tools)) or _driver_files(maker)):
            return f"{limit[0]}={limit[1]!r} hides all devices of kind {kind}"
    return None


def words(kind: DeviceKind, listed: Sequence[ListedDevice]) -> str:
    """How many devices of what sort, for people."""
    what = "NPU(s)" if kind == "npu" else "slice(s) of GPUs" if listed[0].is_slice else "GPU(s)"
    return f"{len(listed)} {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The devices of one kind that ranks can use, and those that they cannot though the environment names them."""

    kind: DeviceKind
    devices: Sequence[ListedDevice] = ()
    left_out: Sequence[ListedDevice] = ()

    def but(self) -> str:
        """What is left out and why, to be said after what there is; empty where nothing is."""
        return f", for {_troubles(self.left_out)}" if self.left_out else ""


@functools.cache
def _tell(warning: str) -> None:
    """Warn once: a command looks at its host several times."""
    logger.warning(warning)


def _found(device: DeviceChoice) -> _Found:
    """The devices to be used: those asked for, or with ``auto`` the first kind that there is."""
    if device != "auto":
        kind: DeviceKind = device
        return _asked_for(kind)
    for kind, maker in _MAKERS.items():
        if not any(map(is_installed, maker.tools)):
            if files := _driver_files(maker):
                _tell(
                    f"{files[0]} is here, but no {' or '.join(maker.tools)} to list devices of kind {kind}: they are "
                    "not used; install it, or say device: cpu to train on cores on purpose"
                )
            continue
        if (found := _offered(kind, maker)).devices:
            return found
    return _Found(kind="cpu")


def _offered(kind: DeviceKind, maker: _Maker) -> _Found:
    """Devices that ``auto`` may use. Where there are some, or their driver, but none that can be used, that is an error
    unless the environment hides them: trials on cores would be taken for trials of this hardware."""
    try:
        listed = maker.listed()
    except DeviceQueryError as error:
        if _driver_files(maker):
            raise _unusable(kind, str(error)) from None
        _tell(f"{error}: no device of kind {kind} is used")
        return _Found(kind=kind)
    found = _usable(kind, listed)
    if not found.devices and not _are_hidden(kind):
        if listed or _driver_files(maker):
            raise _unusable(kind, _why_none(kind, found, listed))
        _tell(_why_none(kind, found, listed))
    return found


def _unusable(kind: DeviceKind, why: str) -> DeviceError:
    remedy = "mend that, or say device: cpu to train on cores on purpose"
    return DeviceError(f"this host has devices of kind {kind} that cannot be used: {why}; {remedy}")


def _asked_for(kind: DeviceKind) -> _Found:
    maker, remedy = _MAKERS[kind], "use device: cpu, or another host"
    if not any(map(is_installed, maker.tools)):
        raise DeviceError(f"device: {kind}, but there is no {' or '.join(maker.tools)} here; {remedy}")
    try:
        listed = maker.listed()
    except DeviceQueryError as error:
        raise DeviceError(f"device: {kind}, but {error}; {remedy}") from None
    found = _usable(kind, listed)
    if not found.devices:
        raise DeviceError(f"device: {kind}, but {_why_none(kind, found, listed)}; {remedy}")
    return found


def _usable(kind: DeviceKind, listed: Sequence[ListedDevice]) -> _Found:
    """Those of ``listed`` that this process may see and ranks can use; of the others it may see a warning tells."""
    seen = _visible(kind, listed)
    found = _Found(
        kind=kind,
        devices=[one for one in seen if not one.trouble],
        left_out=[one for one in seen if one.trouble],
    )
    if found.devices and found.left_out:
        _tell(f"{words(kind, found.devices)} used{found.but()}")
    return found


def _why_none(kind: DeviceKind, found: _Found, listed: Sequence[ListedDevice]) -> str:
    """Why none of the devices that the kind's tool lists can be used."""
    tool = " or ".join(_MAKERS[kind].tools)
    if found.left_out:
        return _troubles(found.left_out)
    if listed and (limit := _limit(kind)) is not None:
        names = ", ".join(one.name for one in listed)
        return f"{tool} lists {names}, of which {limit[0]}={limit[1]} names none"
    return f"{tool} lists no device here"


def _troubles(left_out: Sequence[ListedDevice]) -> str:
    """Each device with what is the matter, for people."""
    return "; ".join(f"{one.name} ({one.model}) is of no use: {one.trouble}" for one in left_out)


def _driver_files(maker: _Maker) -> list[str]:
    return [path for path in maker.driver_files if Path(path).exists()]


def _limit(kind: DeviceKind) -> tuple[str, str] | None:
    """The variable of this process that says which devices of the kind it sees, and what it says; None without one."""
    for name in _variables(kind):
        if name in os.environ and (os.environ[name] or FAMILIES[kind].empty_hides):
            return name, os.environ[name]
    return None


def _variables(kind: DeviceKind) -> list[str]:
    """The variables that limit what a process sees of the kind; the first that does counts."""
    return [name for name in (FAMILIES[kind].visible_variable, FAMILIES[kind].visible_otherwise) if name]


def _are_hidden(kind: DeviceKind) -> bool:
    """Whether this process is to see no device of the kind, by what people and schedulers say for that."""
    limit = _limit(kind)
    return limit is not None and limit[1].strip() in ("", "-1", "NoDevFiles")


def _visible(kind: DeviceKind, listed: Sequence[ListedDevice]) -> list[ListedDevice]:
    """Those of ``listed`` that this process may see, in the order in which its environment names them.

    Raises:
        DeviceError: they are slices of GPUs that are not alike, or numbered otherwise than their tool does.
    """
    _check_numbers(kind, listed)
    limit = _limit(kind)
    empty = [name for name in _variables(kind) if os.environ.get(name) == ""]
    if listed and limit is None and empty:
        _tell(
            f"{empty[0]} is empty, which hides no device of kind {kind}; say device: cpu to train on cores on purpose"
        )
    found = list(listed) if limit is None else _named(kind, limit[1], listed)
    counts = Counter(one.model for one in found if one.is_slice)
    if len(counts) > 1:
        what = ", ".join(f"{count} x {model}" for model, count in counts.items())
        raise DeviceError(f"slices of GPUs differ ({what}); name alike ones in CUDA_VISIBLE_DEVICES by their UUIDs")
    return found


def _check_numbers(kind: DeviceKind, listed: Sequence[ListedDevice]) -> None:
    """Refuse a host whose environment numbers devices otherwise than ``listed`` does: ranks would find other ones."""
    shown = os.environ.get("ROCR_VISIBLE_DEVICES")
    if kind == "rocm" and shown is not None and _entries(shown) != [one.name for one in listed]:
        raise DeviceError(
            f"ROCR_VISIBLE_DEVICES={shown} numbers devices otherwise than their tool does; unset it, and name the same "
            "devices in HIP_VISIBLE_DEVICES"
        )
    levels = os.environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT")
    if kind == "xpu" and levels != "FLAT" and (limit := _limit(kind)) is not None:
        raise DeviceError(
            f"{limit[0]}={limit[1]} numbers cards under ZE_FLAT_DEVICE_HIERARCHY={levels}, but ranks get single tiles; "
            f"unset the latter, and number tiles through all cards in {limit[0]}"
        )


def _entries(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",") if entry.strip()]


def _named(kind: DeviceKind, allowed: str, listed: Sequence[ListedDevice]) -> list[ListedDevice]:
    """As drivers read the variable: the first name that means no device ends the list."""
    entries = _entries(allowed)
    if kind == "cuda" and any(entry.startswith("MIG-") for entry in entries) and not any(d.is_slice for d in listed):
        listed = [*listed, *listing.slices()]
    found: list[ListedDevice] = []
    for entry in entries:
        match = next((one for one in listed if _is_called(one, entry)), None)
        if match is None:
            break
        found.append(match)
    return found


def _is_called(device: ListedDevice, entry: str) -> bool:
    """Whether the entry is the device's number, or the beginning of its UUID."""
    return device.name == entry or (entry.startswith(("GPU-", "MIG-")) and device.uuid.startswith(entry))


def _handle(device: ListedDevice) -> DeviceHandle:
    return DeviceHandle(
        name=device.name,
        memory_bytes=device.memory_bytes,
        idle_bytes=device.used_bytes or 0,
        uuid=device.uuid,
        bus_id=device.bus_id,
        gpu_uuid=device.gpu_uuid,
    )
