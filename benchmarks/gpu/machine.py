"""What the machine is: devices, driver, versions. torch is asked in a process of its own.

``python -m benchmarks.gpu.machine KIND`` prints what torch knows, as JSON.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.child import run_process
from trials.torch_support import NEEDED, installed_version, lacking, problem

ASKING_S = 120.0
"""Seconds in which torch must have found its devices."""


def describe(kind: str, folder: Path) -> dict[str, Any]:
    """The machine, as far as it is known; ends the program where it has no devices of the kind."""
    ended = run_process([sys.executable, "-m", __name__, kind], folder / "machine.log", timeout_s=ASKING_S)
    if ended.code:
        raise SystemExit(f"error: {ended.last_line}")
    if ended.code is None:
        raise SystemExit(f"error: torch has not found the devices within {ASKING_S:.0f} s")
    return {
        **json.loads(ended.last_line),
        "driver": _driver(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "commit": _commit(),
        "packages": {name: _version(name) for name in ("torchao", "nvidia-ml-py", "triton", "numpy", "PyYAML")},
    }


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    return ""


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Print what torch finds; says in a line what is wrong with it where trials cannot run with it."""
    try:
        import torch
    except ImportError as error:
        sys.exit(f"torch cannot be imported by {sys.executable}: {error}")
    if known := problem(installed_version()):
        sys.exit(known)
    if missing := lacking(NEEDED):
        sys.exit(f"torch {torch.__version__} lacks {', '.join(missing[:3])}, which trials need")
    from trials.accelerator.device import DeviceUnavailableError, device_name, installed_kind, open_device

    kind = installed_kind() if sys.argv[1] == "auto" else sys.argv[1]
    try:
        device = open_device(kind, 0)
    except DeviceUnavailableError as error:
        sys.exit(str(error))
    on_host = device.type == "cpu"
    module = None if on_host else torch.get_device_module(device)
    facts = {
        "kind": kind,
        "name": (_cpu_model() if on_host else device_name(device)),
        "num_devices": 2 if on_host else module.device_count(),
        "device_memory_bytes": None if on_host else module.get_device_properties(device).total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
    }
    print(json.dumps(facts))


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
