"""Sweep files for the tests of the planner."""

import copy

import yaml

from cluster.hardware.topology import Node, Topology
from tests.support import ROOT

_SWEEPS = yaml.safe_load((ROOT / "tests" / "data" / "sweeps.yaml").read_text(encoding="utf-8"))
FULL, SMALL, RESNET, LINEAR, TOKENS, SIMULATED, SCRIPT, OWN_MODULE = _SWEEPS.values()
"""FULL has every key that a file with a llama model may hold, none at its default where that can be helped; OWN_MODULE
has keys of modules of the user's and is no whole file by itself."""
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""Hundreds of files are written, and libyaml is several times faster."""


def write(folder, content):
    """Write ``content`` (a mapping, text or bytes) and the training data it may name; returns the path of the file."""
    (folder / "text.txt").write_text("x" * 100)
    (folder / "tokens.bin").write_bytes(bytes(100))
    (folder / "images" / "cat").mkdir(parents=True, exist_ok=True)
    (folder / "images" / "cat" / "1.JPEG").write_bytes(b"not looked at")
    path = folder / "sweep.yaml"
    if not isinstance(content, str | bytes):
        content = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10**6)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def changed(content, path, value):
    """A copy of ``content`` with the value at ``path`` replaced."""
    content = copy.deepcopy(content)
    node = content
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    return content


def topology(*num_devices, kind="cpu", name="some CPU"):
    """Nodes with that many devices each."""
    alike = {"device_kind": kind, "device_name": name, "device_memory_bytes": 2**30, "threads_per_device": 1}
    nodes = (
        Node(name=f"node{i}", address="127.0.0.1", num_devices=count, **alike) for i, count in enumerate(num_devices)
    )
    return Topology(nodes=tuple(nodes))


INSIDE = {
    "inside": dict.fromkeys(
        (
            *("num_workers", "dataloader", "precision", "recompute", "compile", "attention", "memory_format"),
            *("ddp_bucket_mb", "ddp_gradient_as_bucket_view", "ddp_static_graph", "allocator", "training_arguments"),
        )
    )
}
"""Keys of knobs within a program; by itself no whole file."""
