"""What a rank waits for before it begins, and how fast its weights are drawn."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.child import environment
from benchmarks.gpu.parts import Setting
from cluster.hardware.discovery import QUERY_TIMEOUT_S

IMPORTS = ("torch", "trials.worker", "trials.dryrun.simulate", "cluster.local")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits")


def start(setting: Setting) -> None:
    """The first tensor in a child of the fork server, the driver's tool, imports in fresh interpreters.

    What is least known comes first: imports with cold caches may take all of the part's time.
    """
    import trials.worker  # noqa: F401  # as the fork server has it

    _tell_forked(setting, "fork, then the first tensor on the device", _first_tensor)
    if shutil.which(NVIDIA_SMI[0]):
        for state in ("first", "again"):
            row = _timed(f"nvidia-smi, {state}", NVIDIA_SMI, setting.left_s)
            setting.tell(row | {"within what agents wait": row["worked"] and row["s"] < QUERY_TIMEOUT_S})
    for module in IMPORTS:
        setting.tell(_timed(f"import {module}", [sys.executable, "-c", f"import {module}"], setting.left_s))


def _timed(what: str, command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """A row: how long a command takes, and the first line of what it says or the last of why it fails."""
    start_s = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(), timeout=max(1.0, limit_s), check=False
        )
    except subprocess.TimeoutExpired as error:
        return {"what": what, "s": round(error.timeout, 2), "answer": "no answer by then", "worked": False}
    worked = done.returncode == 0
    lines = (done.stdout if worked else done.stderr or done.stdout).strip().splitlines()
    answer = "" if not lines else lines[0] if worked else lines[-1]
    return {"what": what, "s": round(time.monotonic() - start_s, 2), "answer": answer, "worked": worked}


def _first_tensor(kind: str) -> str:
    import torch

    from trials.accelerator.device import open_device, synchronize

    device = open_device(kind, 0)
    value = float((torch.ones(1024, device=device) * 2).sum())
    synchronize(device)
    assert value == 2048
    free = "" if device.type == "cpu" else str(torch.get_device_module(device).mem_get_info(device))
    return f"free and total bytes {free}" if free else ""


def _tell_forked(setting: Setting, what: str, function: Callable[[str], str]) -> None:
    """Call in a child that inherits everything imported here and no device."""
    start_s = time.monotonic()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            text = function(setting.device)
            code = 0
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(theirs, text.encode()[:4000])
        os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    seconds = round(time.monotonic() - start_s, 2)
    setting.tell({"what": what, "s": seconds, "answer": text, "worked": os.waitstatus_to_exitcode(status) == 0})


def weights(setting: Setting) -> None:
    """Values per second of a rank's start, whole rows and a part of every row, and whether bits are the CPU's."""
    import torch

    from trials.accelerator.device import open_device, synchronize
    from trials.models.model import Draws, Initial
    from trials.parallel.mesh import Piece, fill

    device = open_device(setting.device, 0)
    size = torch.Size((1 << 9, 1 << 13) if setting.is_small else (1 << 16, 1 << 13))
    draws = Draws(device)
    for what, columns in (("rows", size[1]), ("an eighth of every row", size[1] // 8)):
        part = torch.zeros(size[0], columns, device=device)
        piece = Piece(name="weight", size=size, start=(0, size[1] - columns), part=part)
        seconds = []
        for _ in range(3):
            synchronize(device)
            start_s = time.perf_counter()
            fill(piece, draws, Initial(std=0.02), 0)
            synchronize(device)
            seconds.append(time.perf_counter() - start_s)
        rows = torch.empty(64, columns)
        on_host = Piece(name="weight", size=size, start=piece.start, part=rows)
        fill(on_host, Draws(torch.device("cpu")), Initial(std=0.02), 0)
        rate = round(part.numel() / min(seconds) / 1e6)
        setting.tell(
            {"part": what, "million values/s": rate, "as on the CPU": bool(torch.equal(part[:64].cpu(), rows))}
        )
