"""NVIDIA's GPUs, and the slices (MIG) that they may be divided into, as nvidia-smi shows them.

Formats: ``nvidia-smi --help-query-gpu``; for slices NVIDIA's MIG user guide (``nvidia-smi -L``), and the memory of
each in ``nvidia-smi -q -x``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from cluster.hardware.listing.tools import ListedDevice, ask, bus_id_of, whole_number

TOOL = "nvidia-smi"
_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.used", "pci.bus_id", "mig.mode.current")
_FORMAT = "--format=csv,noheader,nounits"
_GPU = re.compile(r"^GPU (\d+):")
_SLICE = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+(?P<number>\d+): \(UUID: (?P<uuid>MIG-[^)\s]+)\)")
_GIGABYTES = re.compile(r"(\d+)gb")
_DIVIDED = "it is divided (MIG), and its slices are used only where CUDA_VISIBLE_DEVICES names them"
_BARE = "it is in MIG mode without slices: create some with nvidia-smi mig, or end the mode with nvidia-smi -mig 0"
_LOST = "Unable to determine the device handle"


@dataclass(frozen=True, slots=True)
class _Gpu:
    device: ListedDevice
    is_divided: bool


def devices() -> list[ListedDevice]:
    """Whole GPUs; where there is none to use, the slices of those that are divided. A GPU of no use says why.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    gpus = list(_gpus())
    divided = {gpu.device.name: gpu.device for gpu in gpus if gpu.is_divided}
    whole = [gpu.device for gpu in gpus if not gpu.is_divided]
    if any(not gpu.trouble for gpu in whole):
        return [*whole, *(replace(gpu, trouble=_DIVIDED) for gpu in divided.values())]
    parts = list(_slices(divided)) if divided else []
    divided_up = {part.gpu_uuid for part in parts}
    bare = [replace(gpu, trouble=_BARE) for gpu in divided.values() if gpu.uuid not in divided_up]
    return [*whole, *parts, *bare]


def slices() -> list[ListedDevice]:
    """The slices of all GPUs that are divided.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    gpus = {gpu.device.name: gpu.device for gpu in _gpus() if gpu.is_divided}
    return list(_slices(gpus)) if gpus else []


def holders() -> list[tuple[str, str, str]]:
    """UUID of the GPU, process number and MiB of the processes that compute.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    rows = _rows(ask(TOOL, "--query-compute-apps=gpu_uuid,pid,used_memory", _FORMAT))
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def is_persistent() -> bool | None:
    """Whether persistence mode is on for all GPUs; None where nvidia-smi does not know of it.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    modes = {row[0] for row in _rows(ask(TOOL, "--query-gpu=persistence_mode", _FORMAT)) if row}
    return "Disabled" not in modes if modes & {"Enabled", "Disabled"} else None


def _gpus() -> Iterator[_Gpu]:
    for row in _rows(ask(TOOL, f"--query-gpu={','.join(_COLUMNS)}", _FORMAT)):
        if row[0].startswith(_LOST):
            yield _Gpu(ListedDevice(name="?", model="GPU", memory_bytes=0, trouble=" ".join(row)), is_divided=False)
        if len(row) != len(_COLUMNS):
            continue
        total, used = whole_number(row[3]), whole_number(row[4])
        device = ListedDevice(
            name=row[0],
            model="GPU" if row[2].startswith("[") else row[2],
            memory_bytes=(total or 0) << 20,
            used_bytes=None if used is None else used << 20,
            uuid=row[1],
            bus_id=bus_id_of(row[5]),
            trouble=_trouble(row[3]) if total is None else "",
        )
        yield _Gpu(device, is_divided=total is not None and row[6] == "Enabled")


def _trouble(told: str) -> str:
    """What a GPU without a figure of its memory lacks; ``told`` stands in the figure's place."""
    if "N/A" in told or "Not Supported" in told:
        return f"nvidia-smi shows no memory of its own ({told}), as of GPUs that share their host's"
    return f"nvidia-smi says {told}"


def _slices(gpus: dict[str, ListedDevice]) -> Iterator[ListedDevice]:
    """The slices of these GPUs, each known by its UUID."""
    memory = _memory_of_slices()
    gpu: ListedDevice | None = None
    for line in ask(TOOL, "-L").splitlines():
        if found := _GPU.match(line):
            gpu = gpus.get(found[1])
        elif gpu is not None and (found := _SLICE.match(line)):
            total, used = memory.get((gpu.bus_id, found["number"]), (_told_by(found["profile"]), None))
            yield ListedDevice(
                name=found["uuid"],
                model=f"{gpu.model} MIG {found['profile']}",
                memory_bytes=total,
                used_bytes=used,
                uuid=found["uuid"],
                bus_id=gpu.bus_id,
                is_slice=True,
                gpu_uuid=gpu.uuid,
            )


def _memory_of_slices() -> dict[tuple[str, str], tuple[int, int | None]]:
    """Memory and memory in use by bus address of the GPU and number of the slice; empty where it cannot be read."""
    try:
        log = ElementTree.fromstring(ask(TOOL, "-q", "-x"))
    except ElementTree.ParseError:
        return {}
    found = {}
    for gpu in log.iter("gpu"):
        for part in gpu.iter("mig_device"):
            total = whole_number((part.findtext("fb_memory_usage/total") or "").removesuffix("MiB"))
            used = whole_number((part.findtext("fb_memory_usage/used") or "").removesuffix("MiB"))
            if total is not None:
                key = bus_id_of(gpu.get("id", "")), (part.findtext("index") or "").strip()
                found[key] = total << 20, None if used is None else used << 20
    return found


def _told_by(profile: str) -> int:
    """Bytes that the name of a profile such as ``3g.40gb`` promises; the slice has a little more."""
    found = _GIGABYTES.search(profile)
    return int(found[1]) * 10**9 if found else 0


def _rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
