"""Finds what this host has to offer, by the tools of the devices' vendors and without importing torch."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.hardware.listing import amd, ascend, intel, nvidia
from cluster.hardware.listing.tools import DeviceQueryError, ListedDevice, is_installed
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
    "cuda": _Maker(tools=(nvidia.TOOL,), listed=nvidia.devices, driver_files=("/dev/nvidia0", "/dev/nvidiactl")),
    "npu": _Maker(tools=(ascend.TOOL,), listed=ascend.devices, driver_files=("/dev/davinci_manager",)),
    "rocm": _Maker(tools=amd.TOOLS, listed=amd.devices, driver_files=("/dev/kfd",)),
    "xpu": _Maker(tools=(intel.TOOL,), listed=intel.devices, driver_files=()),
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
    kind, listed = ("cpu", []) if device == "cpu" else _found(device)
    if kind == "cpu" and not may_be_cpu:
        raise DeviceError(f"none of {', '.join(all_tools())} lists a device here; install the tool of its driver")
    cores = num_usable_cores()
    if listed:
        count, first = num_devices or len(listed), listed[0]
        device_name, memory_bytes = first.model, min(one.memory_bytes for one in listed)
        if count > len(listed):
            raise DeviceError(f"devices_per_node is {count}, but this host has {words(kind, listed)}")
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
    return [*found, *nvidia.slices()] if with_slices and not any(one.is_slice for one in found) else found


def all_tools() -> tuple[str, ...]:
    """The tools that list devices."""
    return tuple(tool for maker in _MAKERS.values() for tool in maker.tools)


def words(kind: DeviceKind, listed: Sequence[ListedDevice]) -> str:
    """How many devices of what sort, for people."""
    what = "NPU(s)" if kind == "npu" else "slice(s) of GPUs" if listed[0].is_slice else "GPU(s)"
    return f"{len(listed)} {what}"


def _found(device: DeviceChoice) -> tuple[DeviceKind, list[ListedDevice]]:
    """The devices to be used: those asked for, or with ``auto`` the first kind that there is."""
    if device != "auto":
        kind: DeviceKind = device
        return kind, _asked_for(kind)
    for kind, maker in _MAKERS.items():
        if not any(map(is_installed, maker.tools)):
            if files := _driver_files(maker):
                logger.warning(
                    "%s is here, but no %s to list devices of kind %s: they are not used; install it, or say device: "
                    "cpu to train on cores on purpose",
                    files[0],
                    " or ".join(maker.tools),
                    kind,
                )
            continue
        if listed := _offered(kind, maker):
            return kind, listed
    return "cpu", []


def _offered(kind: DeviceKind, maker: _Maker) -> list[ListedDevice]:
    """Devices that ``auto`` may use. A tool that fails although its driver runs is an error: trials on cores would be
    taken for trials of this hardware."""
    try:
        return visible(kind, maker.listed())
    except DeviceQueryError as error:
        if _driver_files(maker):
            remedy = "mend the driver, or say device: cpu to train on cores on purpose"
            raise DeviceError(f"this host has devices of kind {kind} that cannot be used: {error}; {remedy}") from None
        logger.warning("%s: no device of kind %s is used", error, kind)
        return []


def _asked_for(kind: DeviceKind) -> list[ListedDevice]:
    maker, remedy = _MAKERS[kind], "use device: cpu, or another host"
    tool = " or ".join(maker.tools)
    if not any(map(is_installed, maker.tools)):
        raise DeviceError(f"device: {kind}, but there is no {tool} here; {remedy}")
    try:
        listed = visible(kind, maker.listed())
    except DeviceQueryError as error:
        raise DeviceError(f"device: {kind}, but {error}; {remedy}") from None
    if not listed:
        limits = FAMILIES[kind].visible_variable
        limited = f" within {limits}={os.environ[limits]}" if limits in os.environ else ""
        raise DeviceError(f"device: {kind}, but {tool} lists no device here{limited}; {remedy}")
    return listed


def _driver_files(maker: _Maker) -> list[str]:
    return [path for path in maker.driver_files if Path(path).exists()]


def visible(kind: DeviceKind, listed: Sequence[ListedDevice]) -> list[ListedDevice]:
    """Those of ``listed`` that this process may see, in the order in which its environment names them.

    Raises:
        DeviceError: they are slices of GPUs that are not alike, or numbered otherwise than their tool does.
    """
    if kind == "rocm":
        _check_numbers(listed)
    allowed = os.environ.get(FAMILIES[kind].visible_variable)
    found = list(listed) if allowed is None else _named(kind, allowed, listed)
    counts = Counter(one.model for one in found)
    if any(one.is_slice for one in found) and len(counts) > 1:
        what = ", ".join(f"{count} x {model}" for model, count in counts.items())
        raise DeviceError(f"slices of GPUs differ ({what}); name alike ones in CUDA_VISIBLE_DEVICES by their UUIDs")
    return found


def _check_numbers(listed: Sequence[ListedDevice]) -> None:
    """Refuse a host on which HIP counts from what ROCm's runtime lets it see, while the tools show all devices."""
    shown = os.environ.get("ROCR_VISIBLE_DEVICES")
    if shown is not None and [entry.strip() for entry in shown.split(",")] != [one.name for one in listed]:
        raise DeviceError(
            f"ROCR_VISIBLE_DEVICES={shown} numbers devices otherwise than their tool does; unset it, and name the same "
            "devices in HIP_VISIBLE_DEVICES"
        )


def _named(kind: DeviceKind, allowed: str, listed: Sequence[ListedDevice]) -> list[ListedDevice]:
    """As drivers read the variable: the first name that means no device ends the list."""
    entries = [entry.strip() for entry in allowed.split(",") if entry.strip()]
    if kind == "cuda" and any(entry.startswith("MIG-") for entry in entries) and not any(d.is_slice for d in listed):
        listed = [*listed, *nvidia.slices()]
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
    )
