"""The catalogue of accelerators and descriptions of clusters: figures of data sheets, read from ``configs/``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.hardware.topology import Topology
from configs import CONFIGS
from trials.files import read_regular


class CatalogueError(ValueError):
    """A catalogue file is incomplete, or a name is not in the catalogue. The message says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of device. Peaks are dense; bandwidths are per device and per direction."""

    name: str
    aliases: tuple[str, ...]
    """Texts by which data sets and drivers call it; a device name matches the longest one it contains."""
    peak_flops_per_s: Mapping[str, float]
    """FLOPs per second by number format: float32, tf32, float16, bfloat16, float8, float4; absent where it has none."""
    memory_bytes: float
    usable_memory_bytes: float
    """The memory that a process can use: the total less what the driver keeps."""
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """Between device and host memory: PCIe, or NVLink-C2C."""
    link_bytes_per_s: float
    network_bytes_per_s: float
    """Network bandwidth of the machine in which the device usually comes; a cluster's file overrides it."""
    devices_per_node: int
    domain_size: int
    """Devices joined by the fast links; above ``devices_per_node`` in rack-scale systems."""
    sources: Mapping[str, str]
    """Where each figure comes from, by its name."""
    models: tuple[str, ...] = ()
    """The aliases, as drivers say them, of which the peaks are; empty where that holds of all aliases."""
    multiprocessors: Mapping[str, int] = field(default_factory=dict)
    """Number of them in the whole accelerator ("whole") and in its slices (MIG) by profile ("3g.40gb"); empty where
    nobody says."""

    @property
    def is_core(self) -> bool:
        """Whether the device is a core of a processor."""
        return self.name == "cpu"

    def peak(self, number_format: str) -> float | None:
        """Dense peak; a format without units of its own runs as the next wider one. None when that is unknown too."""
        for name in _WIDER[number_format]:
            if name in self.peak_flops_per_s:
                return self.peak_flops_per_s[name]
        return None


_WIDER = {
    "float4": ("float4", "float8", "bfloat16", "float16"),
    "float8": ("float8", "bfloat16", "float16"),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16",),
    "tf32": ("tf32", "float32"),
    "float32": ("float32",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDescription:
    """A cluster as the cost model sees it: nodes that are all alike."""

    name: str
    accelerator: Accelerator
    num_nodes: int
    devices_per_node: int
    network_bytes_per_s: float

    @property
    def domain_size(self) -> int:
        return max(self.devices_per_node, self.accelerator.domain_size)


@functools.cache
def catalogue() -> Mapping[str, Accelerator]:
    """All accelerators by name.

    Raises:
        CatalogueError: a file lacks a figure or the source of one.
    """
    return {path.stem: _accelerator(path) for path in sorted((CONFIGS / "accelerators").glob("*.yaml"))}


def find_accelerator(device_name: str) -> Accelerator:
    """The accelerator that ``device_name`` (a label, or what the driver says) means; of a MIG slice, its share of the
    whole one: by multiprocessors where those are known, else by sevenths.

    Raises:
        CatalogueError: no alias is part of the name.
    """
    found = _match(device_name)
    if found is None:
        raise CatalogueError(f"no accelerator called {device_name!r}; the catalogue has {', '.join(catalogue())}")
    part = _MIG.search(device_name)
    return found[1] if part is None else _slice(found[1], part)


def dense_peak(device_name: str, number_format: str) -> float | None:
    """Dense peak of a device in this very number format, by what the driver calls it; None where that is not known.

    Unlike :meth:`Accelerator.peak` it is never that of another format, but for float32 products that may run as TF32 on
    a device before TF32; nor that of another model or form of the device, as PCIe and NVL cards have lower peaks; nor
    that of a slice whose number of multiprocessors is not known, as of compute instances within one.
    """
    found = _match(device_name)
    if found is None or any(form in _words(device_name) and form not in _words(found[0]) for form in _FORMS):
        return None
    whole, part = found[1], _MIG.search(device_name)
    if not any(_is_whole_word(model, device_name) for model in whole.models or [found[0]]):
        return None
    if part is not None and (part["instance"] is not None or part["profile"].lower() not in whole.multiprocessors):
        return None
    if number_format == "tf32" and whole.name.startswith(_BEFORE_TF32):
        number_format = "float32"
    return find_accelerator(device_name).peak_flops_per_s.get(number_format)


def outruns_flash_attention_2(name: str) -> bool:
    """Whether an accelerator of the catalogue is of NVIDIA's Hopper generation or a later one, whose asynchronous
    matmuls FlashAttention-2, PyTorch's own kernel, does not use (Shah et al., arXiv 2407.08608)."""
    return re.match(r"g?[hb]\d", name) is not None


_FORMS = ("pcie", "nvl", "ti", "super", "d")
"""Words in a driver's names that tell forms of an accelerator apart which differ in their peaks."""
_OTHERS = re.compile(r"\blaptop\b|\bmax[ -]?q\b", re.IGNORECASE)
"""Words that tell another accelerator of the same name: those of laptops have half of everything, or less."""
_BEFORE_TF32 = ("v100",)
"""Accelerators that take a request for TF32 for nothing. Others without it may emulate it, at rates of their own: AMD's
from the MI350 on with bfloat16."""
_MIG = re.compile(r"\bMIG (?P<instance>\dc\.)?(?P<profile>(?P<compute>\d)g\.(?P<gigabytes>\d+)gb)", re.IGNORECASE)
"""A slice in a driver's name, and the compute instance within it where it is not the whole slice."""
_MIG_SLICES = 7
"""Slices of compute that an accelerator is divided into (NVIDIA Multi-Instance GPU user guide, GPU instance profiles);
together they have at most all multiprocessors."""


def _match(device_name: str) -> tuple[str, Accelerator] | None:
    """The accelerator with the longest alias in the name, and that alias."""
    if _OTHERS.search(device_name):
        return None
    wanted = device_name.lower().replace(" ", "-")
    matches = [
        (alias, accelerator)
        for accelerator in catalogue().values()
        for alias in (accelerator.name, *accelerator.aliases)
        if _is_part(alias.lower(), wanted)
    ]
    return max(matches, key=lambda match: len(match[0]), default=None)


def _is_part(alias: str, name: str) -> bool:
    """Whether the name has the alias as a word: an H200 is no GH200, an A100 no A1000 and an A10G no A10. A size or
    a socket may follow, or an "s"."""
    end = r"(?!\d|(?!gb|sxm|s\b|x\d)[a-z])" if alias[-1].isdigit() else ""
    return re.search(rf"(?:^|[^a-z]|\dx){re.escape(alias)}{end}", name) is not None


def _is_whole_word(alias: str, name: str) -> bool:
    wanted = name.lower().replace(" ", "-")
    return re.search(rf"(?<![a-z0-9]){re.escape(alias.lower())}(?![a-z0-9])", wanted) is not None


def _words(name: str) -> list[str]:
    return re.split(r"[\s-]+", name.lower())


def _slice(whole: Accelerator, part: re.Match[str]) -> Accelerator:
    """A MIG slice: compute by multiprocessors, or by sevenths, and bandwidth like memory by eighths."""
    compute = int(part["compute"] if part["instance"] is None else part["instance"][0])
    known = whole.multiprocessors.get(part["profile"].lower()) if part["instance"] is None else None
    share = compute / _MIG_SLICES if known is None else known / whole.multiprocessors["whole"]
    memory_bytes = min(float(part["gigabytes"]) * 2**30, whole.memory_bytes)
    eighths = max(1, round(8 * memory_bytes / whole.memory_bytes))
    return replace(
        whole,
        name=f"{whole.name}-mig-{compute}g",
        peak_flops_per_s={name: peak * share for name, peak in whole.peak_flops_per_s.items()},
        memory_bytes=memory_bytes,
        usable_memory_bytes=min(memory_bytes, whole.usable_memory_bytes),
        memory_bytes_per_s=whole.memory_bytes_per_s * eighths / 8,
    )


def load_cluster(name: str) -> ClusterDescription:
    """The cluster described in ``configs/clusters/<name>.yaml``, or in a file of the user's, like ``./mine.yaml``.

    Raises:
        CatalogueError: there is no such file, or its accelerator is unknown.
    """
    is_file = "/" in name or name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else CONFIGS / "clusters" / f"{name}.yaml"
    if not path.is_file():
        raise CatalogueError(
            f"no cluster {'file' if is_file else 'called'} {name!r}; there are {', '.join(clusters())}"
        )
    data = _read(path, {"accelerator", "num_nodes"}, {"devices_per_node", "network_bytes_per_s", "sources"})
    for key in ("num_nodes", "devices_per_node"):
        if not isinstance(size := data.get(key, 1), int) or isinstance(size, bool) or size < 1:
            raise CatalogueError(f"{path.name}: {key} is {str(size)[:40]!r}, no number of them")
    accelerator = find_accelerator(str(data["accelerator"]))
    return ClusterDescription(
        name=path.stem,
        accelerator=accelerator,
        num_nodes=int(data["num_nodes"]),
        devices_per_node=int(data.get("devices_per_node", accelerator.devices_per_node)),
        network_bytes_per_s=float(data.get("network_bytes_per_s", accelerator.network_bytes_per_s)),
    )


def clusters() -> tuple[str, ...]:
    """Names of the clusters that are described in ``configs/clusters``."""
    return tuple(sorted(path.stem for path in (CONFIGS / "clusters").glob("*.yaml")))


def describe_topology(topology: Topology) -> ClusterDescription:
    """The cluster as the cost model sees it; the memory is the least of any node's devices.

    Raises:
        CatalogueError: the catalogue does not have the device.
    """
    first = topology.nodes[0]
    accelerator = catalogue()["cpu"] if first.device_kind == "cpu" else find_accelerator(first.device_name)
    memory_bytes = float(min(node.device_memory_bytes for node in topology.nodes))
    if first.device_kind != "cpu":
        memory_bytes = min(memory_bytes, accelerator.usable_memory_bytes)
    return ClusterDescription(
        name=topology.label,
        accelerator=replace(accelerator, usable_memory_bytes=memory_bytes),
        num_nodes=len(topology.nodes),
        devices_per_node=max(node.num_devices for node in topology.nodes),
        network_bytes_per_s=accelerator.network_bytes_per_s,
    )


_FIGURES = {
    "peak_flops_per_s",
    "memory_bytes",
    "usable_memory_bytes",
    "memory_bytes_per_s",
    "host_bytes_per_s",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "devices_per_node",
    "domain_size",
}


def _accelerator(path: Path) -> Accelerator:
    data = _read(path, _FIGURES | {"aliases", "sources"}, {"models", "multiprocessors"})
    multiprocessors = data.get("multiprocessors", {})
    if multiprocessors and "whole" not in multiprocessors:
        raise CatalogueError(f"{path.name}: multiprocessors without those of the whole")
    if missing := (_FIGURES | {"multiprocessors"} & set(data)) - set(data["sources"]):
        raise CatalogueError(f"{path.name}: no source for {', '.join(sorted(missing))}")
    if unknown := set(data["peak_flops_per_s"]) - set(_WIDER):
        raise CatalogueError(f"{path.name}: unknown number format {', '.join(sorted(unknown))}")
    return Accelerator(
        name=path.stem,
        aliases=tuple(data["aliases"]),
        peak_flops_per_s={name: float(value) for name, value in data["peak_flops_per_s"].items()},
        sources=dict(data["sources"]),
        models=tuple(data.get("models", ())),
        multiprocessors={str(name): int(number) for name, number in multiprocessors.items()},
        devices_per_node=int(data["devices_per_node"]),
        domain_size=int(data["domain_size"]),
        **{name: float(data[name]) for name in _FIGURES if name.endswith(("bytes", "bytes_per_s"))},
    )


def _read(path: Path, required: set[str], optional: set[str]) -> Any:
    import yaml  # agents come without it as long as nobody asks for a figure

    try:
        data = yaml.safe_load(read_regular(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise CatalogueError(f"{path}{line}: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise CatalogueError(f"{path.name}: not a mapping")
    if missing := required - set(data):
        raise CatalogueError(f"{path.name}: missing {', '.join(sorted(missing))}")
    if unknown := set(data) - required - optional:
        raise CatalogueError(f"{path.name}: unknown key {', '.join(sorted(unknown))}")
    return data
