"""Runs small training programs as a trial does, with the reporting hook or without it, and reads what they reported."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials.script.command import with_hook

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 380
SEEN = ("facts", "options")
"""Events of what is seen in the program, except its steps."""


@dataclass
class HookedRun:
    """What one rank reported, and printed."""

    lines: list[dict[str, Any]]
    code: int
    output: str
    errors: str = ""
    facts: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.facts = {key: value for line in self.lines if line.get("event") == "facts" for key, value in line.items()}

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def printed_losses(self) -> list[float]:
        return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", self.output)]

    @property
    def printed(self) -> tuple[str, str]:
        """Output and errors, without the times and processes that torch's log lines begin with."""
        return self.output, re.sub(r"(?m)^([A-Z])\d{4} [\d:.]+ \d+ ", r"\1 ", self.errors)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == name]


def launch(
    argv: list[str], folder: Path, *, ranks: int = 1, hook: bool = True, python: str = sys.executable, **env: str
) -> list[HookedRun]:
    """Start ``argv`` once per rank under torchrun's variables, and wait.

    Args:
        argv: Arguments of the Python; the first may be the name of a program in ``programs/``.
        folder: For the report.
        ranks: 1: without torchrun's variables.
        hook: False: as if there were no trial.
        python: An interpreter.
        **env: Further variables.
    """
    folder.mkdir(exist_ok=True)
    argv = [str(PROGRAMS / argv[0]) if argv[0].endswith(".py") else argv[0], *argv[1:]]
    started = [
        subprocess.Popen(
            [python, *argv],
            env=_environment(folder, hook) | variables | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in _rank_variables(ranks)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [
        HookedRun(_lines(folder / f"rank{rank}.jsonl"), process.returncode, *printed[rank])
        for rank, process in enumerate(started)
    ]


def _environment(folder: Path, hook: bool) -> dict[str, str]:
    dropped = ("PYTHONPATH", "RANK", "PYTHONWARNINGS")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", PYTHONHASHSEED="0")
    if hook:
        env.update(PYTHONPATH=with_hook(None), TUNE_CLUSTER_REPORT=str(folder))
    return env


def _rank_variables(ranks: int) -> list[dict[str, str]]:
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["TORCHELASTIC_RUN_ID"] = "test"
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
