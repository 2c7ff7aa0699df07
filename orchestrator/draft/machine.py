"""The hardware of a draft: this host, a running Ray cluster, or a described cluster."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import CatalogueError, Topology, find_accelerator, load_cluster, uniform_topology
from orchestrator.errors import ConfigError
from trials.accelerator.kinds import FAMILIES

MAX_CORES = 8
"""Cores that a draft for a host without GPUs uses as devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedMachine:
    """Where the trials run, as the draft writes it."""

    topology: Topology
    """The nodes, as needed by the cost model."""
    section: str
    """The section ``cluster`` of the sweep file, in one line."""
    label: str
    """The hardware in words."""
    remarks: tuple[str, ...] = ()
    """Comment lines: whether trials are real, and how to run real ones."""

    @property
    def is_simulated(self) -> bool:
        return "simulated" in self.section

    @property
    def is_gpu(self) -> bool:
        return self.topology.nodes[0].device_kind != "cpu"

    @property
    def num_nodes(self) -> int:
        return len(self.topology.nodes)

    @property
    def devices_per_node(self) -> int:
        return self.topology.nodes[0].num_devices

    @property
    def number_format(self) -> str:
        """The 16-bit format in which its matrix units are fast; bfloat16 if the device is not in the catalogue."""
        try:
            peaks = find_accelerator(self.topology.nodes[0].device_name).peak_flops_per_s
        except CatalogueError:
            return "bfloat16"
        return "bfloat16" if "bfloat16" in peaks else "float16"


def described_machine(name: str, num_nodes: int | None, devices_per_node: int | None) -> DraftedMachine:
    """A cluster of ``configs/clusters``, or of a file; simulated, unless it is one node like this host.

    Raises:
        ConfigError: the description does not exist.
    """
    try:
        cluster = load_cluster(name)
    except CatalogueError as error:
        raise ConfigError(
            str(error),
            key="--cluster",
            remedy="To use a file, pass its path, such as ./mine.yaml.",
        ) from None
    nodes, devices = num_nodes or cluster.num_nodes, devices_per_node or cluster.devices_per_node
    topology = uniform_topology(
        nodes,
        devices,
        device_name=cluster.accelerator.name,
        memory_bytes=int(cluster.accelerator.usable_memory_bytes),
    )
    here = discover_node()
    is_here = here.device_kind != "cpu" and nodes == 1 and devices <= here.num_devices
    if is_here and _same_device(here.device_name, cluster.accelerator.name):
        return replace(machine_here(devices), topology=topology)
    kind = cluster.accelerator.name
    return DraftedMachine(
        topology=topology,
        section=f"{{kind: simulated, num_nodes: {nodes}, devices_per_node: {devices}, "
        f"simulation: {{accelerator: {kind}, noise: 0.01}}}}",
        label=f"{nodes} x {devices} {cluster.accelerator.aliases[0]}",
        remarks=(
            "This sweep simulates the cluster: its figures are predictions of the cost model, not measurements.",
            f"To measure on it: cluster: {{kind: ray, address: HOST:PORT, num_nodes: {nodes}}}, and another name.",
        ),
    )


def _same_device(name: str, accelerator: str) -> bool:
    try:
        return find_accelerator(name).name == accelerator
    except CatalogueError:
        return False


def machine_here(devices_per_node: int | None = None) -> DraftedMachine:
    """This host: its GPUs, or its cores if it has none.

    Raises:
        DeviceError: it has fewer devices than requested.
    """
    node = discover_node(num_devices=devices_per_node)
    if devices_per_node is None and node.device_kind == "cpu" and node.num_devices > MAX_CORES:
        node = discover_node(num_devices=MAX_CORES)
    section = f"{{kind: local, device: {node.device_kind}, devices_per_node: {node.num_devices}}}"
    what = {"cpu": "core", "npu": "NPU"}.get(node.device_kind, "GPU")
    remarks = ("On a Ray cluster: cluster: {kind: ray, address: HOST:PORT, num_nodes: N}",)
    label = f"{node.num_devices} {what}{'s' if node.num_devices > 1 else ''} of this host ({node.device_name})"
    return DraftedMachine(topology=Topology(nodes=(node,)), section=section, label=label, remarks=remarks)


def machine_at(address: str, num_nodes: int | None, devices_per_node: int | None) -> DraftedMachine:
    """The Ray cluster at ``address``: the largest group of identical nodes, and the fastest of equal groups.

    Raises:
        ClusterError: it does not respond.
        ConfigError: it has fewer nodes than requested.
    """
    from cluster.ray.leases import survey

    hosts = survey(address)
    able = [host for host in hosts if host.num_gpus] or [host for host in hosts if host.num_cpus]
    alike = Counter((host.num_gpus or host.num_cpus, host.accelerator, host.device) for host in able)
    if not alike:
        raise ConfigError(f"the Ray cluster at {address} has no node with devices", key="--address")
    (count, accelerator, device), most = max(alike.items(), key=lambda kind: kind[0][0] * kind[1])
    if (num_nodes or 1) > most or (devices_per_node or 1) > count:
        raise ConfigError(
            f"the Ray cluster at {address} has {most} nodes with {count} devices",
            key="--nodes",
            remedy="Lower the number of nodes.",
        )
    nodes, devices = num_nodes or most, devices_per_node or count
    is_gpu = device != "cpu"
    what = f"{FAMILIES[device].ray_resource}s" if is_gpu else "cores"
    requested = f", devices_per_node: {devices}" if devices_per_node else ""
    return DraftedMachine(
        topology=_topology(nodes, devices, accelerator, is_gpu=is_gpu),
        section=f"{{kind: ray, address: {address!r}, num_nodes: {nodes}, device: {device}{requested}}}",
        label=f"{nodes} x {devices} {accelerator or what} at {address}",
    )


def _topology(num_nodes: int, devices: int, accelerator: str | None, *, is_gpu: bool) -> Topology:
    """The nodes as reported by Ray: GPUs by Ray's names; cores are assumed to be like those of this host."""
    if not is_gpu:
        node = discover_node(device="cpu", num_devices=devices)
        return Topology(nodes=tuple(replace(node, name=f"node{i:04d}") for i in range(num_nodes)))
    try:
        memory_bytes = int(find_accelerator(accelerator or "unknown").usable_memory_bytes)
    except CatalogueError:
        memory_bytes = 0
    return uniform_topology(num_nodes, devices, device_name=accelerator or "unknown", memory_bytes=memory_bytes)


# How drafts are written: commented YAML of at most thirty lines, one line per key.


MAX_LINES = 30
_WIDTH = 116
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "~", ".", ".inf", ".nan"}
"""Plain words that YAML 1.1 does not read as text."""
_PLAIN = re.compile(r"(?:[A-Za-z./_$]|--?[A-Za-z])[\w./+@$-]*")


def sweep_text(lines: Sequence[str]) -> str:
    """The lines as a file; without empty ones if there are too many."""
    kept = lines if len(lines) <= MAX_LINES else [line for line in lines if line]
    return "\n".join(kept) + "\n"


def comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def value_text(value: Any) -> str:
    """A value as YAML in one line; ``off`` and the like in quotes, as they are words here."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{quoted(str(key))}: {value_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def yaml_words(words: Sequence[str]) -> str:
    """The words of a command; whole numbers need no quotes."""
    return f"[{', '.join(word if re.fullmatch('0|[1-9][0-9]{0,15}', word) else quoted(word) for word in words)}]"


def quoted(text: str) -> str:
    """Text as a plain scalar if that is equivalent; in single quotes if it contains a backslash."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "'" + text.replace("'", "''") + "'" if "\\" in text else json.dumps(text, ensure_ascii=False)


def safe_name(name: str) -> str:
    """A sweep name derived from that of a model or script."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:63] or "sweep"
