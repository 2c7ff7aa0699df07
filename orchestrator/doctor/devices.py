"""Checks of what trials compute with: torch, its devices and collectives, the driver."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.gang.defaults import defaults_of
from cluster.hardware.discovery import DeviceError, discover_node, hidden
from cluster.hardware.listing import nvidia
from cluster.hardware.listing.tools import DeviceQueryError
from cluster.hardware.topology import Node, is_slice_name
from cluster.processes import python_module
from orchestrator import units
from orchestrator.doctor.check import TroubleError
from trials.accelerator.kinds import FAMILIES, DeviceKind
from trials.torch_support import REMEDY, TESTED, installed_version, problem

TORCH_S = 90.0
"""How long importing torch may take on a loaded machine with cold disks."""
_LISTED = 3


_asking = threading.Lock()


def _probe() -> Mapping[str, Any]:
    """What torch says of itself; asked once, whichever check comes first.

    Raises:
        TroubleError: it cannot be imported.
    """
    with _asking:
        return _ask()


@functools.cache
def _ask() -> Mapping[str, Any]:
    """What torch says, in a process of its own: a broken driver can hang or end the one that asks."""
    try:
        asked = subprocess.run(
            python_module("trials.torch_support"), capture_output=True, timeout=TORCH_S - 5, check=False
        )
    except subprocess.TimeoutExpired:
        raise TroubleError(
            "importing torch takes over a minute", "Is the driver hung, or the disk slow?", "fail"
        ) from None
    if asked.returncode != 0:
        lines = asked.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {asked.returncode}"]
        raise TroubleError(f"torch cannot be imported: {lines[-1]}", REMEDY, "fail")
    answer: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return answer


def torch() -> str:
    """Which torch there is, and whether it has all that trials need."""
    version = installed_version()
    if known := problem(version):
        raise TroubleError(known, REMEDY, "fail")
    found = _probe()
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['hip']}" if found["hip"] else "CPU only"
    words = f"{found['version']} ({build})"
    if missing := found["lacking"]:
        raise TroubleError(f"{words} lacks {', '.join(missing[:_LISTED])}, which trials need", REMEDY, "fail")
    if missing := found["lacking_for_dry_runs"]:
        raise TroubleError(
            f"{words}: trials run, dry runs do not: no {missing[0]}", "Plan without them, or update torch."
        )
    tested = ".".join(map(str, TESTED))
    return words if found["version"].startswith(tested) else f"{words}; tested with {tested}"


def devices() -> str:
    """What trials would run on here, whether torch sees what the driver does, and whether its tool answers quickly."""
    node = _node()
    if node.device_kind == "cpu":
        if hides := hidden():
            raise TroubleError(f"{hides}: trials run on cores", "Unset it, unless they are to.")
        if Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
            remedy = "Look at what nvidia-smi says; in a container: --gpus all."
            raise TroubleError("nvidia-smi lists no GPU, though there is a driver or a tool of it", remedy)
        return f"{node.num_devices} CPU cores ({node.device_name}), no GPU"
    words = f"{node.num_devices} x {node.device_name}, {units.num_bytes(node.device_memory_bytes)} each"
    _check_torch(node, words)
    if node.device_kind == "cuda" and _is_slow():
        raise TroubleError(f"{words}; persistence mode is off: every question starts the GPUs anew", _PERSISTENCE)
    return words


_PERSISTENCE = "nvidia-smi -pm 1, or run nvidia-persistenced."


def _node() -> Node:
    try:
        return discover_node()
    except DeviceError as error:
        raise TroubleError(str(error), "Mend the driver; cluster.device: cpu trains on cores on purpose.") from None


def _check_torch(node: Node, words: str) -> None:
    """Refuse a torch that was built for other devices, or sees fewer."""
    found = _probe()
    if found["kind"] != node.device_kind:
        sees = "no such device" if found["kind"] == "cpu" else f"devices of kind {found['kind']}"
        raise TroubleError(f"{words}; torch {found['version']} sees {sees}", _BUILDS[node.device_kind], "fail")
    num_seen = len(found["devices"])
    if num_seen != node.num_devices and not is_slice_name(node.device_name):  # of slices CUDA shows one
        raise TroubleError(f"{words}; torch sees {num_seen} of them", _BUILDS[node.device_kind], "fail")


_BUILDS: Mapping[DeviceKind, str] = {
    "cuda": "Install the build of torch for this driver (https://pytorch.org/get-started).",
    "rocm": "Install the build of torch for this ROCm (https://pytorch.org/get-started).",
    "xpu": "Install the build of torch for Intel GPUs (https://pytorch.org/get-started).",
    "npu": "Install the torch_npu that belongs to this torch, and source CANN's set_env.sh.",
}


def _is_slow() -> bool:
    try:
        return nvidia.is_persistent() is False
    except DeviceQueryError:
        return False


def environment() -> str:
    """What ranks get in their environment here by default, and what this host says instead."""
    found = defaults_of(_node().device_kind, num_nodes=1)
    words = [f"{one.name}={os.environ.get(one.name, one.value)}" for one in found]
    own = [one.name for one in found if one.name in os.environ]
    return " ".join(words) + (f"; {', '.join(own)} by this host" if own else "")


def driver() -> str:
    """The GPU driver's version; other sweeps' figures compare only with the same one."""
    path = Path("/sys/module/nvidia/version")
    if path.exists():
        return f"NVIDIA {path.read_text(encoding='ascii').strip()}"
    kind = _node().device_kind
    return "none, and no GPU that needs one" if kind == "cpu" else f"not told by the kernel ({kind})"


def collectives() -> str:
    """NCCL among GPUs, HCCL among NPUs, gloo among cores."""
    if installed_version() is None:
        raise TroubleError("nobody knows without torch", REMEDY, "fail")
    found = _probe()
    if found["kind"] in ("xpu", "npu"):
        return FAMILIES[found["kind"]].collectives.upper()
    if found["devices"]:
        if not found["nccl"]:
            raise TroubleError(
                "this torch has no NCCL", "Install a build of torch with NCCL; trials of several GPUs need it."
            )
        return f"NCCL {found['nccl']}"
    if not found["gloo"]:
        raise TroubleError(
            "this torch has no gloo", "Install a usual build of torch; ranks on CPUs meet through gloo.", "fail"
        )
    return "gloo"
