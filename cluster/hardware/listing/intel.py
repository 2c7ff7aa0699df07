"""Intel's GPUs as xpu-smi shows them: the JSON of ``xpu-smi discovery``, with and without the number of a device.

Written from the documented output, untried on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.hardware.listing.tools import DeviceQueryError, ListedDevice, ask_json, bus_id_of, whole_number

TOOL = "xpu-smi"


def devices() -> list[ListedDevice]:
    """All GPUs, in the order of their numbers.

    Raises:
        DeviceQueryError: xpu-smi fails, or shows no memory.
    """
    listed = ask_json(TOOL, "discovery", "-j").get("device_list", [])
    return [_device(one, ask_json(TOOL, "discovery", "-d", str(one.get("device_id")), "-j")) for one in listed]


def _device(listed: Mapping[str, Any], facts: Mapping[str, Any]) -> ListedDevice:
    """One device from its line in the list and its own page, which alone tells of memory."""
    number = listed.get("device_id")
    total = whole_number(facts.get("memory_physical_size_byte"))
    free = whole_number(facts.get("memory_free_size_byte"))
    if total is None:
        raise DeviceQueryError(f"xpu-smi shows no memory of device {number}")
    return ListedDevice(
        name=str(number),
        model=str(listed.get("device_name") or facts.get("device_name") or "Intel GPU"),
        memory_bytes=total,
        used_bytes=None if free is None else max(0, total - free),
        uuid=str(listed.get("uuid", "")),
        bus_id=bus_id_of(listed.get("pci_bdf_address", "")),
    )
