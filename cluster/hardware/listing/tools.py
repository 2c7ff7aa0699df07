"""Asks a vendor's tool, with a time limit, and says how it fails."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

QUERY_TIMEOUT_S = 90.0
"""Longer than a driver takes that has to start all devices of a large host first: NVIDIA's does at every question, for
some seconds per device, where its persistence mode is off and nobody uses the devices."""
PERSISTENCE = (
    "; without persistence mode the driver starts all GPUs at every question: nvidia-smi -pm 1, or nvidia-persistenced"
)
_MAX_WORDS = 300


class DeviceQueryError(RuntimeError):
    """A vendor's tool fails or hangs: no trial should run on its devices. The message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDevice:
    """One device as its vendor's tool shows it."""

    name: str
    """Its name for the variable that says which devices a process sees: a number, or the UUID of a part of a GPU."""
    model: str
    """What the hardware calls itself."""
    memory_bytes: int
    used_bytes: int | None = None
    """Memory in use by everybody; None where the tool gives no figure."""
    uuid: str = ""
    bus_id: str = ""
    """Address on the PCI bus as sysfs writes it, ``0000:c1:00.0``."""
    is_slice: bool = False
    """Whether it is a part of a GPU (MIG) rather than a whole one."""
    gpu_uuid: str = ""
    """UUID of the GPU that a slice is a part of; empty for a whole one."""
    trouble: str = ""
    """Why no rank can use it; empty where one can."""


def is_installed(tool: str) -> bool:
    """Whether the tool is on the PATH."""
    return shutil.which(tool) is not None


def ask(tool: str, *arguments: str) -> str:
    """What the tool answers.

    Raises:
        DeviceQueryError: it is not there, fails, or gives no answer in time.
    """
    if (program := shutil.which(tool)) is None:
        raise DeviceQueryError(f"{tool} is not on the PATH")
    process = subprocess.Popen(
        [program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=QUERY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _abandon(process)
        hint = PERSISTENCE if tool == "nvidia-smi" else ""
        raise DeviceQueryError(f"{tool} gave no answer within {QUERY_TIMEOUT_S:g} s{hint}") from None
    if process.returncode != 0:
        said = " ".join(output.split())[:_MAX_WORDS]
        raise DeviceQueryError(f"{tool} failed with code {process.returncode}: {said}")
    return output


def ask_json(tool: str, *arguments: str) -> Any:
    """The JSON in what the tool answers; warnings may stand before it.

    Raises:
        DeviceQueryError: as :func:`ask`, or there is none.
    """
    output = ask(tool, *arguments)
    starts = [place for place in (output.find("{"), output.find("[")) if place >= 0]
    try:
        value, _ = json.JSONDecoder().raw_decode(output[min(starts) :]) if starts else (None, 0)
    except ValueError:
        value = None
    if value is None:
        said = " ".join(output.split())[:_MAX_WORDS] or "nothing"
        raise DeviceQueryError(f"{tool} answers without JSON: {said}")
    return value


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill the process without insisting on its end: nothing can end what hangs in a broken driver."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    if process.stdout is not None:
        process.stdout.close()


def whole_number(text: Any) -> int | None:
    """The number that the text is; None for "N/A" and the like."""
    cleaned = str(text).strip()
    return int(cleaned) if cleaned.isdigit() else None


def bus_id_of(text: Any) -> str:
    """An address on the PCI bus as sysfs writes it: four digits of domain, lower case."""
    domain, _, rest = str(text).strip().lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}" if rest.count(":") == 1 else ""
