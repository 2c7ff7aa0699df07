"""Intel's GPUs as xpu-smi shows them: the JSON of ``xpu-smi discovery``, with and without the number of a device.

Written from the documented output, untried on hardware.
"""

from __future__ import annotations

from cluster.hardware.listing.tools import DeviceQueryError, ListedDevice, ask_json, bus_id_of, whole_number

TOOL = "xpu-smi"


def devices() -> list[ListedDevice]:
    """All GPUs, in the order of their numbers.

    Raises:
        DeviceQueryError: xpu-smi fails, or shows no memory.
    """
    found = []
    for listed in ask_json(TOOL, "discovery", "-j").get("device_list", []):
        number = listed.get("device_id")
        facts = ask_json(TOOL, "discovery", "-d", str(number), "-j")
        total, free = (whole_number(facts.get(f"memory_{what}_size_byte")) for what in ("physical", "free"))
        if total is None:
            raise DeviceQueryError(f"xpu-smi shows no memory of device {number}")
        found.append(
            ListedDevice(
                name=str(number),
                model=str(listed.get("device_name") or facts.get("device_name") or "Intel GPU"),
                memory_bytes=total,
                used_bytes=None if free is None else max(0, total - free),
                uuid=str(listed.get("uuid", "")),
                bus_id=bus_id_of(listed.get("pci_bdf_address", "")),
            )
        )
    return found
