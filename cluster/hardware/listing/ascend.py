"""Huawei's Ascend NPUs as ``npu-smi info`` shows them: a table of two lines per chip, name above, memory below.

Chips are numbered in the order of the table, which is what ``ASCEND_RT_VISIBLE_DEVICES`` counts in; the tool's own
numbers need not begin at 0. Written from the published outputs of npu-smi 23 to 25 (910, 910B and the two chips of the
910C, whose table has a column more), untried on hardware.
"""

from __future__ import annotations

import re

from cluster.hardware.listing.tools import ListedDevice, ask, bus_id_of

TOOL = "npu-smi"
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")


def devices() -> list[ListedDevice]:
    """All chips, in the order of the table.

    Raises:
        DeviceQueryError: npu-smi fails.
    """
    return parse(ask(TOOL, "info"))


def parse(table: str) -> list[ListedDevice]:
    """The chips of the table."""
    found: list[ListedDevice] = []
    model = ""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        if _BUS.fullmatch(cells[1]) is None:
            words = cells[0].split()
            model = words[1] if len(words) == 2 and words[0].isdigit() else model
        elif usage := _USAGE.findall(cells[2]):
            used, total = map(int, usage[-1])  # the last pair is the device's own memory, others are its host's
            found.append(
                ListedDevice(
                    name=str(len(found)),
                    model=_full_name(model),
                    memory_bytes=total << 20,
                    used_bytes=used << 20,
                    bus_id=bus_id_of(cells[1]),
                )
            )
    return found


def _full_name(model: str) -> str:
    """``Ascend910B3``, as the catalogue and torch_npu write it."""
    return f"Ascend{model.removeprefix('Ascend')}"
