"""What the vendors' tools say of the devices of this host, one module per kind. Imports no torch, starts no device."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree

# Asks a vendor's tool, with a time limit, and says how it fails.


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


# AMD's GPUs as rocm-smi or, where that is missing, amd-smi shows them.
#
# Formats: the JSON of ``rocm-smi --showproductname --showuniqueid --showbus --showmeminfo vram`` (ROCm 5 writes
# "Card series", ROCm 6 "Card Series"), and of ``amd-smi static`` and ``amd-smi metric --mem-usage`` (a list, in newer
# ones in ``gpu_data``). Written from these documented outputs, untried on hardware.


AMD_TOOLS = ("rocm-smi", "amd-smi")
_ROCM_QUERY = ("--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram", "--json")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "MIB": 1 << 20, "GB": 1 << 30, "GIB": 1 << 30}


def amd_devices() -> list[ListedDevice]:
    """All GPUs, in the order of their numbers.

    Raises:
        DeviceQueryError: the tool fails, or shows no memory.
    """
    return _by_rocm_smi() if is_installed(AMD_TOOLS[0]) else _by_amd_smi()


def _by_rocm_smi() -> list[ListedDevice]:
    cards = ask_json(AMD_TOOLS[0], *_ROCM_QUERY)
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
    answer = ask_json(AMD_TOOLS[1], *arguments)
    rows = answer.get("gpu_data", []) if isinstance(answer, Mapping) else answer
    return [row for row in rows if isinstance(row, Mapping)]


def _bytes(gpu: Mapping[str, Any], section: str, key: str) -> int | None:
    """A size, which has its unit beside it, or is in megabytes without one."""
    size = gpu.get(section, {}).get(key)
    value, unit = (size.get("value"), size.get("unit", "MB")) if isinstance(size, Mapping) else (size, "MB")
    number = whole_number(value)
    return None if number is None else number * _UNITS.get(str(unit).upper(), 1 << 20)


# Huawei's Ascend NPUs as ``npu-smi info`` shows them: a table of two lines per chip, name above, memory below.
#
# Chips are numbered in the order of the table, which is what ``ASCEND_RT_VISIBLE_DEVICES`` counts in; the tool's own
# numbers need not begin at 0. Written from the published outputs of npu-smi 23 to 25 (910, 910B and the two chips of
# the 910C, whose table has a column more), untried on hardware.


ASCEND_TOOL = "npu-smi"
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")


def ascend_devices() -> list[ListedDevice]:
    """All chips, in the order of the table.

    Raises:
        DeviceQueryError: npu-smi fails.
    """
    return parse(ask(ASCEND_TOOL, "info"))


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
                    model=_ascend_full_name(model),
                    memory_bytes=total << 20,
                    used_bytes=used << 20,
                    bus_id=bus_id_of(cells[1]),
                )
            )
    return found


def _ascend_full_name(model: str) -> str:
    """``Ascend910B3``, as the catalogue and torch_npu write it."""
    return f"Ascend{model.removeprefix('Ascend')}"


# Intel's GPUs as xpu-smi shows them: the JSON of ``xpu-smi discovery``, with and without the number of a card.
#
# A card of several tiles is as many devices, each with its share of the card's memory: that is how ranks see them,
# with ``ZE_FLAT_DEVICE_HIERARCHY=FLAT``, and how ``ZE_AFFINITY_MASK`` then counts, through all cards (Intel,
# "Flattening GPU Tile Hierarchy"). Written from the documented output, untried on hardware.


INTEL_TOOL = "xpu-smi"


def intel_devices() -> list[ListedDevice]:
    """All tiles of all cards, in the order of the cards' numbers.

    Raises:
        DeviceQueryError: xpu-smi fails, or shows no memory.
    """
    found: list[ListedDevice] = []
    for card in ask_json(INTEL_TOOL, "discovery", "-j").get("device_list", []):
        found += _tiles(card, ask_json(INTEL_TOOL, "discovery", "-d", str(card.get("device_id")), "-j"), len(found))
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


# NVIDIA's GPUs, and the slices (MIG) that they may be divided into, as nvidia-smi shows them.
#
# Formats: ``nvidia-smi --help-query-gpu``; for slices NVIDIA's MIG user guide (``nvidia-smi -L``), and the memory of
# each in ``nvidia-smi -q -x``.


NVIDIA_TOOL = "nvidia-smi"
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


def nvidia_devices() -> list[ListedDevice]:
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
    rows = _rows(ask(NVIDIA_TOOL, "--query-compute-apps=gpu_uuid,pid,used_memory", _FORMAT))
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def is_persistent() -> bool | None:
    """Whether persistence mode is on for all GPUs; None where nvidia-smi does not know of it.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    modes = {row[0] for row in _rows(ask(NVIDIA_TOOL, "--query-gpu=persistence_mode", _FORMAT)) if row}
    return "Disabled" not in modes if modes & {"Enabled", "Disabled"} else None


def _gpus() -> Iterator[_Gpu]:
    for row in _rows(ask(NVIDIA_TOOL, f"--query-gpu={','.join(_COLUMNS)}", _FORMAT)):
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
    for line in ask(NVIDIA_TOOL, "-L").splitlines():
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
        log = ElementTree.fromstring(ask(NVIDIA_TOOL, "-q", "-x"))
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
