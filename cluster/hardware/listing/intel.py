"""Intel's GPUs as xpu-smi shows them: the JSON of ``xpu-smi discovery``, with and without the number of a card.

A card of several tiles is as many devices, each with its share of the card's memory: that is how ranks see them, with
``ZE_FLAT_DEVICE_HIERARCHY=FLAT``, and how ``ZE_AFFINITY_MASK`` then counts, through all cards (Intel, "Flattening GPU
Tile Hierarchy"). Written from the documented output, untried on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.hardware.listing.tools import DeviceQueryError, ListedDevice, ask_json, bus_id_of, whole_number

TOOL = "xpu-smi"


def devices() -> list[ListedDevice]:
    """All tiles of all cards, in the order of the cards' numbers.

    Raises:
        DeviceQueryError: xpu-smi fails, or shows no memory.
    """
    found: list[ListedDevice] = []
    for card in ask_json(TOOL, "discovery", "-j").get("device_list", []):
        found += _tiles(card, ask_json(TOOL, "discovery", "-d", str(card.get("device_id")), "-j"), len(found))
    return found


def _tiles(card: Mapping[str, Any], facts: Mapping[str, Any], first: int) -> list[ListedDevice]:
    """The tiles of a card, from its line in the list and its own page, which alone tells of memory and tiles; numbered
    from ``first``. Memory in use is told of whole cards only."""
    total = whole_number(facts.get("memory_physical_size_byte"))
    free = whole_number(facts.get("memory_free_size_byte"))
    if total is None:
        raise DeviceQueryError(f"xpu-smi shows no memory of device {card.get('device_id')}")
    num_tiles = whole_number(facts.get("number_of_tiles")) or 1
    return [
        ListedDevice(
            name=str(first + tile),
            model=str(card.get("device_name") or facts.get("device_name") or "Intel GPU"),
            memory_bytes=total // num_tiles,
            used_bytes=None if free is None or num_tiles > 1 else max(0, total - free),
            uuid=str(card.get("uuid", "")) if num_tiles == 1 else "",
            bus_id=bus_id_of(card.get("pci_bdf_address", "")),
        )
        for tile in range(num_tiles)
    ]
