"""AMD's GPUs as rocm-smi or, where that is missing, amd-smi shows them.

Formats: the JSON of ``rocm-smi --showproductname --showuniqueid --showbus --showmeminfo vram`` (ROCm 5 writes
"Card series", ROCm 6 "Card Series"), and of ``amd-smi static`` and ``amd-smi metric --mem-usage`` (a list, in newer
ones in ``gpu_data``). Written from these documented outputs, untried on hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cluster.hardware.listing.tools import (
    DeviceQueryError,
    ListedDevice,
    ask_json,
    bus_id_of,
    is_installed,
    whole_number,
)

TOOLS = ("rocm-smi", "amd-smi")
_ROCM_QUERY = ("--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram", "--json")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "MIB": 1 << 20, "GB": 1 << 30, "GIB": 1 << 30}


def devices() -> list[ListedDevice]:
    """All GPUs, in the order of their numbers.

    Raises:
        DeviceQueryError: the tool fails, or shows no memory.
    """
    return _by_rocm_smi() if is_installed(TOOLS[0]) else _by_amd_smi()


def _by_rocm_smi() -> list[ListedDevice]:
    cards = ask_json(TOOLS[0], *_ROCM_QUERY)
    found = []
    for card, facts in sorted(_cards(cards), key=lambda one: one[0]):
        known = {key.lower(): value for key, value in facts.items()}
        total = whole_number(known.get("vram total memory (b)"))
        if total is None:
            raise DeviceQueryError(f"rocm-smi shows no memory of card {card}")
        found.append(
            ListedDevice(
                name=str(card),
                model=_full_name(known),
                memory_bytes=total,
                used_bytes=whole_number(known.get("vram total used memory (b)")),
                uuid=str(known.get("unique id", "")),
                bus_id=bus_id_of(known.get("pci bus", "")),
            )
        )
    return found


def _cards(answer: Any) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for name, facts in answer.items() if isinstance(answer, Mapping) else ():
        number = str(name).removeprefix("card")
        if number.isdigit() and isinstance(facts, Mapping):
            yield int(number), facts


def _full_name(known: Mapping[str, Any]) -> str:
    """What the card calls itself; with its maker, as catalogue and torch write it."""
    for key in ("card series", "card model", "device name"):
        name = str(known.get(key, "")).strip()
        if name and name.upper() != "N/A" and not name.startswith("0x"):
            return name if name.upper().startswith(("AMD", "RADEON")) else f"AMD {name}"
    return "AMD GPU"


def _by_amd_smi() -> list[ListedDevice]:
    used = {gpu.get("gpu"): _bytes(gpu, "mem_usage", "used_vram") for gpu in _listed("metric", "--mem-usage", "--json")}
    found = []
    for gpu in _listed("static", "--json"):
        number, total = gpu.get("gpu"), _bytes(gpu, "vram", "size")
        if total is None:
            raise DeviceQueryError(f"amd-smi shows no memory of GPU {number}")
        asic = gpu.get("asic", {})
        found.append(
            ListedDevice(
                name=str(number),
                model=_full_name({"card series": asic.get("market_name", "")}),
                memory_bytes=total,
                used_bytes=used.get(number),
                uuid=str(asic.get("asic_serial", "")),
                bus_id=bus_id_of(gpu.get("bus", {}).get("bdf", "")),
            )
        )
    return found


def _listed(*arguments: str) -> list[Mapping[str, Any]]:
    answer = ask_json(TOOLS[1], *arguments)
    rows = answer.get("gpu_data", []) if isinstance(answer, Mapping) else answer
    return [row for row in rows if isinstance(row, Mapping)]


def _bytes(gpu: Mapping[str, Any], section: str, key: str) -> int | None:
    """A size, which has its unit beside it, or is in megabytes without one."""
    size = gpu.get(section, {}).get(key)
    value, unit = (size.get("value"), size.get("unit", "MB")) if isinstance(size, Mapping) else (size, "MB")
    number = whole_number(value)
    return None if number is None else number * _UNITS.get(str(unit).upper(), 1 << 20)
