"""Discovers this host's devices through their vendors' tools, without importing torch."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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

# ---- The devices of this host according to their vendors' tools. Imports no torch, starts no device

# Runs a vendor's tool with a time limit, and reports how it fails.


QUERY_TIMEOUT_S = 90.0
"""Time limit of a query, in seconds. NVIDIA's driver starts all devices on every query, some seconds each, if
persistence mode is off and no process uses them."""
PERSISTENCE = (
    "; without persistence mode the driver initializes all GPUs on every query: run nvidia-smi -pm 1, or "
    "nvidia-persistenced"
)
_MAX_WORDS = 300


class DeviceQueryError(RuntimeError):
    """Failure or hang of a vendor's tool: no trial should run on its devices. The message describes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDevice:
    """One device as listed by its vendor's tool."""

    name: str
    """Name in the variable that makes devices visible: a number, or the UUID of a MIG slice."""
    model: str
    """Name reported by the hardware."""
    memory_bytes: int
    used_bytes: int | None = None
    """Memory in use by all processes; None if the tool gives no figure."""
    uuid: str = ""
    bus_id: str = ""
    """Address on the PCI bus in the format of sysfs, ``0000:c1:00.0``."""
    is_slice: bool = False
    """Whether it is a MIG slice rather than a whole GPU."""
    gpu_uuid: str = ""
    """UUID of the slice's GPU; empty for a whole GPU."""
    trouble: str = ""
    """Reason why no rank can use it; empty if usable."""


def is_installed(tool: str) -> bool:
    """Whether the tool is on the PATH."""
    return shutil.which(tool) is not None


def query(tool: str, *arguments: str) -> str:
    """Return the tool's output.

    Raises:
        DeviceQueryError: it is missing, fails, or times out.
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
        raise DeviceQueryError(f"{tool} did not respond within {QUERY_TIMEOUT_S:g} s{hint}") from None
    if process.returncode != 0:
        message = " ".join(output.split())[:_MAX_WORDS]
        raise DeviceQueryError(f"{tool} failed with code {process.returncode}: {message}")
    return output


def query_json(tool: str, *arguments: str) -> Any:
    """Return the JSON in the tool's output, which warnings may precede.

    Raises:
        DeviceQueryError: as :func:`query`, or there is no JSON.
    """
    output = query(tool, *arguments)
    starts = [place for place in (output.find("{"), output.find("[")) if place >= 0]
    try:
        value, _ = json.JSONDecoder().raw_decode(output[min(starts) :]) if starts else (None, 0)
    except ValueError:
        value = None
    if value is None:
        message = " ".join(output.split())[:_MAX_WORDS] or "nothing"
        raise DeviceQueryError(f"{tool} did not print JSON: {message}")
    return value


def _abandon(process: subprocess.Popen[str]) -> None:
    """Kill the process without waiting for its end: one that hangs in a broken driver never ends."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    if process.stdout is not None:
        process.stdout.close()


def whole_number(text: Any) -> int | None:
    """Parse a whole number; None for "N/A" and the like."""
    cleaned = str(text).strip()
    return int(cleaned) if cleaned.isdigit() else None


def bus_id_of(text: Any) -> str:
    """Convert an address on the PCI bus to the format of sysfs: four digits of domain, lower case."""
    domain, _, rest = str(text).strip().lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}" if rest.count(":") == 1 else ""


# AMD's GPUs according to rocm-smi or, if that is missing, amd-smi.
#
# Formats: the JSON of ``rocm-smi --showproductname --showuniqueid --showbus --showmeminfo vram`` (ROCm 5 writes
# "Card series", ROCm 6 "Card Series"), and of ``amd-smi static`` and ``amd-smi metric --mem-usage`` (a list; newer
# versions wrap it in ``gpu_data``). Based on this documented output, untried on hardware.


AMD_TOOLS = ("rocm-smi", "amd-smi")
_ROCM_QUERY = ("--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram", "--json")
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "MIB": 1 << 20, "GB": 1 << 30, "GIB": 1 << 30}


def amd_devices() -> list[ListedDevice]:
    """Return all GPUs, in the order of their numbers.

    Raises:
        DeviceQueryError: the tool fails, or shows no memory.
    """
    return _by_rocm_smi() if is_installed(AMD_TOOLS[0]) else _by_amd_smi()


def _by_rocm_smi() -> list[ListedDevice]:
    cards = query_json(AMD_TOOLS[0], *_ROCM_QUERY)
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
    """Return the card's name with its maker, as in the catalogue and torch."""
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
    answer = query_json(AMD_TOOLS[1], *arguments)
    rows = answer.get("gpu_data", []) if isinstance(answer, Mapping) else answer
    return [row for row in rows if isinstance(row, Mapping)]


def _bytes(gpu: Mapping[str, Any], section: str, key: str) -> int | None:
    """Parse a size with its unit, or in megabytes without one."""
    size = gpu.get(section, {}).get(key)
    value, unit = (size.get("value"), size.get("unit", "MB")) if isinstance(size, Mapping) else (size, "MB")
    number = whole_number(value)
    return None if number is None else number * _UNITS.get(str(unit).upper(), 1 << 20)


# Huawei's Ascend NPUs according to ``npu-smi info``: a table of two lines per chip, name above, memory below.
#
# Chips are numbered in the order of the table, as in ``ASCEND_RT_VISIBLE_DEVICES``. The tool's own numbers need not
# begin at 0. Based on the published output of npu-smi 23 to 25 (910, 910B and the two chips of the 910C, whose table
# has an extra column), untried on hardware.


ASCEND_TOOL = "npu-smi"
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_BUS = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")


def ascend_devices() -> list[ListedDevice]:
    """Return all chips, in the order of the table.

    Raises:
        DeviceQueryError: npu-smi fails.
    """
    return parse(query(ASCEND_TOOL, "info"))


def parse(table: str) -> list[ListedDevice]:
    """Parse the chips in the table."""
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
            used, total = map(int, usage[-1])  # the last pair is the device's own memory, others are the host's
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
    """Return the full name, such as ``Ascend910B3``, as in the catalogue and torch_npu."""
    return f"Ascend{model.removeprefix('Ascend')}"


# Intel's GPUs according to xpu-smi: the JSON of ``xpu-smi discovery``, with and without the number of a card.
#
# A card of several tiles counts as several devices, each with its share of the card's memory. Ranks see them so with
# ``ZE_FLAT_DEVICE_HIERARCHY=FLAT``, and ``ZE_AFFINITY_MASK`` then counts tiles through all cards (Intel, "Flattening
# GPU Tile Hierarchy"). Based on the documented output, untried on hardware.


INTEL_TOOL = "xpu-smi"


def intel_devices() -> list[ListedDevice]:
    """Return all tiles of all cards, in the order of the cards' numbers.

    Raises:
        DeviceQueryError: xpu-smi fails, or shows no memory.
    """
    found: list[ListedDevice] = []
    for card in query_json(INTEL_TOOL, "discovery", "-j").get("device_list", []):
        found += _tiles(card, query_json(INTEL_TOOL, "discovery", "-d", str(card.get("device_id")), "-j"), len(found))
    return found


def _tiles(card: Mapping[str, Any], facts: Mapping[str, Any], first: int) -> list[ListedDevice]:
    """Return the tiles of a card, numbered from ``first``. Only the card's own page, not its line in the list, has
    memory and tiles. Memory in use is reported for whole cards only."""
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


# NVIDIA's GPUs and their MIG slices according to nvidia-smi.
#
# Formats: ``nvidia-smi --help-query-gpu``; for slices NVIDIA's MIG user guide (``nvidia-smi -L``), and the memory of
# each in ``nvidia-smi -q -x``.


NVIDIA_TOOL = "nvidia-smi"
_COLUMNS = ("index", "uuid", "name", "memory.total", "memory.used", "pci.bus_id", "mig.mode.current")
_FORMAT = "--format=csv,noheader,nounits"
_GPU = re.compile(r"^GPU (\d+):")
_SLICE = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+(?P<number>\d+): \(UUID: (?P<uuid>MIG-[^)\s]+)\)")
_GIGABYTES = re.compile(r"(\d+)gb")
_DIVIDED = "it is partitioned (MIG), and its slices are used only if listed in CUDA_VISIBLE_DEVICES"
_BARE = "it is in MIG mode without slices: create some with nvidia-smi mig, or disable the mode with nvidia-smi -mig 0"
_LOST = "Unable to determine the device handle"


@dataclass(frozen=True, slots=True)
class _Gpu:
    device: ListedDevice
    is_divided: bool


def nvidia_devices() -> list[ListedDevice]:
    """Return whole GPUs; if none is usable, the slices of divided ones. Unusable GPUs have a reason.

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
    """Return the slices of all divided GPUs.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    gpus = {gpu.device.name: gpu.device for gpu in _gpus() if gpu.is_divided}
    return list(_slices(gpus)) if gpus else []


def holders() -> list[tuple[str, str, str]]:
    """Return GPU UUID, pid and MiB of every compute process.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    rows = _rows(query(NVIDIA_TOOL, "--query-compute-apps=gpu_uuid,pid,used_memory", _FORMAT))
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def is_persistent() -> bool | None:
    """Whether persistence mode is on for all GPUs; None if nvidia-smi does not report it.

    Raises:
        DeviceQueryError: nvidia-smi fails.
    """
    modes = {row[0] for row in _rows(query(NVIDIA_TOOL, "--query-gpu=persistence_mode", _FORMAT)) if row}
    return "Disabled" not in modes if modes & {"Enabled", "Disabled"} else None


def _gpus() -> Iterator[_Gpu]:
    for row in _rows(query(NVIDIA_TOOL, f"--query-gpu={','.join(_COLUMNS)}", _FORMAT)):
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


def _trouble(profile_name: str) -> str:
    """Explain why a GPU has no memory figure; ``profile_name`` is the value shown instead."""
    if "N/A" in profile_name or "Not Supported" in profile_name:
        return f"nvidia-smi shows no dedicated memory ({profile_name}), as for GPUs that share host memory"
    return f"nvidia-smi reports {profile_name}"


def _slices(gpus: dict[str, ListedDevice]) -> Iterator[ListedDevice]:
    """Yield the slices of these GPUs, identified by UUID."""
    memory = _memory_of_slices()
    gpu: ListedDevice | None = None
    for line in query(NVIDIA_TOOL, "-L").splitlines():
        if found := _GPU.match(line):
            gpu = gpus.get(found[1])
        elif gpu is not None and (found := _SLICE.match(line)):
            total, used = memory.get((gpu.bus_id, found["number"]), (_bytes_of_profile(found["profile"]), None))
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
    """Return memory and memory in use, by the GPU's bus address and the slice's number; empty if unreadable."""
    try:
        log = ElementTree.fromstring(query(NVIDIA_TOOL, "-q", "-x"))
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


def _bytes_of_profile(profile: str) -> int:
    """Return the bytes in the name of a profile such as ``3g.40gb``; the slice has slightly more."""
    found = _GIGABYTES.search(profile)
    return int(found[1]) * 10**9 if found else 0


def _rows(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]


logger = logging.getLogger(__name__)


class DeviceError(ValueError):
    """Request for devices that this host lacks. The message lists what it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """The tool and driver of one kind of devices."""

    tools: tuple[str, ...]
    listed: Callable[[], list[ListedDevice]]
    driver_files: tuple[str, ...]
    """Files that exist only while a driver of such devices runs."""


_MAKERS: Mapping[DeviceKind, _Maker] = {
    "cuda": _Maker(tools=(NVIDIA_TOOL,), listed=nvidia_devices, driver_files=("/dev/nvidia0", "/dev/nvidiactl")),
    "npu": _Maker(tools=(ASCEND_TOOL,), listed=ascend_devices, driver_files=("/dev/davinci_manager",)),
    "rocm": _Maker(tools=AMD_TOOLS, listed=amd_devices, driver_files=("/dev/kfd",)),
    "xpu": _Maker(tools=(INTEL_TOOL,), listed=intel_devices, driver_files=()),
}
"""In the search order of ``auto``."""


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

    Without accelerators (or with ``device="cpu"``) every core is a device unless ``num_devices`` is given, and the
    host's cores and memory are divided evenly. ``device_memory_bytes`` overrides the hardware's figure.

    Args:
        may_be_cpu: whether ``auto`` may find no accelerator.

    Raises:
        DeviceError: the requested accelerators are missing or unusable.
    """
    found = _Found(kind="cpu") if device == "cpu" else _found(device)
    kind, listed = found.kind, found.devices
    if kind == "cpu" and not may_be_cpu:
        raise DeviceError(f"none of {', '.join(all_tools())} lists a device; install the tool of its driver")
    cores = num_usable_cores()
    if listed:
        count, first = num_devices or len(listed), listed[0]
        device_name, memory_bytes = first.model, min(one.memory_bytes for one in listed)
        if count > len(listed):
            raise DeviceError(f"devices_per_node is {count}, but this host has {words(kind, listed)}{found.omitted()}")
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
    """Return all devices of the kind, visible to this process or not; none if their tool is not installed.

    Args:
        with_slices: also list the slices of divided GPUs.

    Raises:
        DeviceQueryError: the tool fails.
    """
    maker = _MAKERS[kind]
    if not any(map(is_installed, maker.tools)):
        return []
    found = maker.listed()
    return [*found, *slices()] if with_slices and not any(one.is_slice for one in found) else found


def all_tools() -> tuple[str, ...]:
    """Return the tools that list devices."""
    return tuple(tool for maker in _MAKERS.values() for tool in maker.tools)


def hidden() -> str | None:
    """Return the part of this process's environment that hides devices for which this host has a tool or driver; None
    if there is none."""
    for kind, maker in _MAKERS.items():
        limit = _limit(kind)
        if limit and _are_hidden(kind) and (any(map(is_installed, maker.tools)) or _driver_files(maker)):
            return f"{limit[0]}={limit[1]!r} hides all devices of kind {kind}"
    return None


def words(kind: DeviceKind, listed: Sequence[ListedDevice]) -> str:
    """Describe number and model of devices, for display."""
    what = "NPU(s)" if kind == "npu" else "slice(s) of GPUs" if listed[0].is_slice else "GPU(s)"
    return f"{len(listed)} {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Usable devices of one kind, and unusable ones that the environment names."""

    kind: DeviceKind
    devices: Sequence[ListedDevice] = ()
    left_out: Sequence[ListedDevice] = ()

    def omitted(self) -> str:
        """Describe omitted devices with reasons, to follow the list of devices; empty if none."""
        return f", for {_troubles(self.left_out)}" if self.left_out else ""


@functools.cache
def _warn(warning: str) -> None:
    """Warn once: a command inspects its host several times."""
    logger.warning(warning)


def _found(device: DeviceChoice) -> _Found:
    """Return the requested devices; with ``auto``, those of the first kind found."""
    if device != "auto":
        kind: DeviceKind = device
        return _query_kind(kind)
    for kind, maker in _MAKERS.items():
        if not any(map(is_installed, maker.tools)):
            if files := _driver_files(maker):
                _warn(
                    f"{files[0]} exists, but there is no {' or '.join(maker.tools)} to list devices of kind "
                    f"{kind}, so they are not used; install it, or set device: cpu to train on CPU cores"
                )
            continue
        if (found := _offered(kind, maker)).devices:
            return found
    return _Found(kind="cpu")


def _offered(kind: DeviceKind, maker: _Maker) -> _Found:
    """Return the devices that ``auto`` may use. Raise an error if there are devices, or their driver, but none is
    usable, unless the environment hides them: results of trials on cores would be mistaken for results of this
    hardware."""
    try:
        listed = maker.listed()
    except DeviceQueryError as error:
        if _driver_files(maker):
            raise _unusable(kind, str(error)) from None
        _warn(f"{error}: no device of kind {kind} is used")
        return _Found(kind=kind)
    found = _usable(kind, listed)
    if not found.devices and not _are_hidden(kind):
        if listed or _driver_files(maker):
            raise _unusable(kind, _reason_for_none(kind, found, listed))
        _warn(_reason_for_none(kind, found, listed))
    return found


def _unusable(kind: DeviceKind, why: str) -> DeviceError:
    remedy = "fix that, or set device: cpu to train on CPU cores"
    return DeviceError(f"this host has devices of kind {kind} that cannot be used: {why}; {remedy}")


def _query_kind(kind: DeviceKind) -> _Found:
    maker, remedy = _MAKERS[kind], "set device: cpu, or use another host"
    if not any(map(is_installed, maker.tools)):
        raise DeviceError(f"device: {kind}, but {' or '.join(maker.tools)} is not installed; {remedy}")
    try:
        listed = maker.listed()
    except DeviceQueryError as error:
        raise DeviceError(f"device: {kind}, but {error}; {remedy}") from None
    found = _usable(kind, listed)
    if not found.devices:
        raise DeviceError(f"device: {kind}, but {_reason_for_none(kind, found, listed)}; {remedy}")
    return found


def _usable(kind: DeviceKind, listed: Sequence[ListedDevice]) -> _Found:
    """Return those of ``listed`` that are visible and usable; warn about visible but unusable ones."""
    seen = _visible(kind, listed)
    found = _Found(
        kind=kind,
        devices=[one for one in seen if not one.trouble],
        left_out=[one for one in seen if one.trouble],
    )
    if found.devices and found.left_out:
        _warn(f"{words(kind, found.devices)} used{found.omitted()}")
    return found


def _reason_for_none(kind: DeviceKind, found: _Found, listed: Sequence[ListedDevice]) -> str:
    """Explain why none of the listed devices is usable."""
    tool = " or ".join(_MAKERS[kind].tools)
    if found.left_out:
        return _troubles(found.left_out)
    if listed and (limit := _limit(kind)) is not None:
        names = ", ".join(one.name for one in listed)
        return f"{tool} lists {names}, none of which is in {limit[0]}={limit[1]}"
    return f"{tool} lists no device"


def _troubles(left_out: Sequence[ListedDevice]) -> str:
    """List the devices with their problems, for display."""
    return "; ".join(f"{one.name} ({one.model}) is unusable: {one.trouble}" for one in left_out)


def _driver_files(maker: _Maker) -> list[str]:
    return [path for path in maker.driver_files if Path(path).exists()]


def _limit(kind: DeviceKind) -> tuple[str, str] | None:
    """Return this process's variable that limits the visible devices of the kind, and its value; None if unset."""
    for name in _variables(kind):
        if name in os.environ and (os.environ[name] or FAMILIES[kind].empty_hides):
            return name, os.environ[name]
    return None


def _variables(kind: DeviceKind) -> list[str]:
    """Return the variables that can limit the visible devices of the kind; the first that is set counts."""
    return [name for name in (FAMILIES[kind].visible_variable, FAMILIES[kind].visible_otherwise) if name]


def _are_hidden(kind: DeviceKind) -> bool:
    """Whether the environment hides all devices of the kind, in any form used by people and schedulers."""
    limit = _limit(kind)
    return limit is not None and limit[1].strip() in ("", "-1", "NoDevFiles")


def _visible(kind: DeviceKind, listed: Sequence[ListedDevice]) -> list[ListedDevice]:
    """Return the visible devices of ``listed``, in the environment's order.

    Raises:
        DeviceError: they are slices of different GPUs, or their numbering differs from their tool's.
    """
    _check_numbers(kind, listed)
    limit = _limit(kind)
    empty = [name for name in _variables(kind) if os.environ.get(name) == ""]
    if listed and limit is None and empty:
        _warn(f"{empty[0]} is empty, which hides no device of kind {kind}; set device: cpu to train on CPU cores")
    found = list(listed) if limit is None else _named(kind, limit[1], listed)
    counts = Counter(one.model for one in found if one.is_slice)
    if len(counts) > 1:
        what = ", ".join(f"{count} x {model}" for model, count in counts.items())
        raise DeviceError(f"GPU slices differ ({what}); list identical ones in CUDA_VISIBLE_DEVICES by their UUIDs")
    return found


def _check_numbers(kind: DeviceKind, listed: Sequence[ListedDevice]) -> None:
    """Refuse a host whose environment numbers devices differently from ``listed``: ranks would use others."""
    shown = os.environ.get("ROCR_VISIBLE_DEVICES")
    if kind == "rocm" and shown is not None and _entries(shown) != [one.name for one in listed]:
        raise DeviceError(
            f"ROCR_VISIBLE_DEVICES={shown} numbers devices differently from their tool; unset it, and list the "
            "same devices in HIP_VISIBLE_DEVICES"
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
    """Parse the variable as drivers do: the first name without a device ends the list."""
    entries = _entries(allowed)
    if kind == "cuda" and any(entry.startswith("MIG-") for entry in entries) and not any(d.is_slice for d in listed):
        listed = [*listed, *slices()]
    found: list[ListedDevice] = []
    for entry in entries:
        match = next((one for one in listed if _is_called(one, entry)), None)
        if match is None:
            break
        found.append(match)
    return found


def _is_called(device: ListedDevice, entry: str) -> bool:
    """Whether the entry is the device's number or the beginning of its UUID."""
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
