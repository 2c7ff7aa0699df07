"""Runs the ranks of a trial as plain processes, by the commands that torchrun would give them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.gpu.child import environment
from benchmarks.gpu.parts import LEFT_OUT, Setting
from trials.files import to_json
from trials.spec import TrialSpec

GIB = 2**30
MIB = 2**20
ALLOCATED = "allocated MiB"
"""Column of what a trial's allocator handed out at its peak."""
LOSS_STEP = 4
"""Step whose loss is shown; every trial has it, whatever the number of its warm-up steps, so that losses compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of the ranks of a command."""

    report: Any
    """What rank 0 wrote; None where the ranks failed."""
    why: str
    """What went wrong; empty where nothing did."""
    cut_off: bool
    """Whether that is only that the part's time was up."""
    took_s: float

    def failure(self) -> dict[str, Any]:
        """Columns that say why there is no report."""
        return {LEFT_OUT if self.cut_off else "failed": self.why}


def run_ranks(
    setting: Setting,
    module: str,
    arguments: Sequence[str],
    *,
    world_size: int,
    env: Mapping[str, str] | None = None,
) -> Run:
    """Run ``python -m MODULE ARGUMENTS --out FILE`` as each rank; the first failure ends them all."""
    folder = Path(setting.folder) / f"ranks-{uuid4().hex[:8]}"
    folder.mkdir()
    out, start_s = folder / "out.json", time.monotonic()
    shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    shared["TUNE_CLUSTER_RENDEZVOUS"] = f"file://{folder}/rendezvous"
    processes = []
    for rank in range(world_size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", module, *arguments, "--out", str(out)]
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment({**shared, **own, **(env or {})}))
            )
    why = _wait(processes, folder, setting.left_s)
    took_s = time.monotonic() - start_s
    if why is None:
        return Run(report=None, why=f"cut off after {took_s:.0f} s", cut_off=True, took_s=took_s)
    report = json.loads(out.read_text(encoding="utf-8")) if not why else None
    return Run(report=report, why=why, cut_off=False, took_s=took_s)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> str | None:
    """Wait until all have ended, or one has failed; what went wrong, None where the time was up."""
    until_s = time.monotonic() + limit_s
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return f"rank {failed[0]}: {_reason(folder / f'rank{failed[0]}.log', codes[failed[0]])}"
            if all(code == 0 for code in codes):
                return ""
            if time.monotonic() > until_s:
                return None
            time.sleep(0.05)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _reason(log: Path, code: int | None) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    words = lines[-1][:300] if lines else "no output"
    return f"{words} ({signal.Signals(-code).name})" if code is not None and code < 0 else words


def run_trial(setting: Setting, spec: TrialSpec, *, env: Mapping[str, str] | None = None) -> Run:
    """Run a trial by ``python -m trials.worker``; what is compiled is kept for later ones unless ``env`` says where."""
    path = Path(setting.folder) / f"spec-{uuid4().hex[:8]}.json"
    path.write_text(json.dumps(to_json(spec)), encoding="utf-8")
    world_size = spec.candidate.layout.world_size
    threads = {"OMP_NUM_THREADS": "1" if setting.is_small else str(max(1, (os.cpu_count() or 1) // world_size))}
    env = {**threads, **caches(Path(setting.folder, "compiled")), **(env or {})}
    return run_ranks(setting, "trials.worker", ["--spec", str(path)], world_size=world_size, env=env)


def caches(folder: Path) -> dict[str, str]:
    """Variables that have compilers keep what they make in a folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


def figures(report: Mapping[str, Any], device_peak: Any = None) -> dict[str, Any]:
    """What a rank's report says, as columns of a table."""
    times = report["step_times_s"]
    step_s = statistics.median(times)
    rate = report["tokens_per_step"] / (step_s * report["world_size"])
    memory = report["device_memory"]
    peak = None if device_peak is None else device_peak(report["device_name"], report["matmul_format"])
    return {
        "step ms": round(step_s * 1e3, 2),
        "spread %": round(100 * (max(times) - min(times)) / step_s, 1),
        "tokens/s/p": round(rate, 1),
        "MFU %": None if not peak else round(100 * rate * report["model_flops_per_token"] / peak, 1),
        "data ms": round(report["breakdown"]["data_s"] * 1e3, 2),
        "optimizer ms": round(report["breakdown"]["optimizer_s"] * 1e3, 2),
        "compile s": round(report["compile_s"], 1) or None,
        ALLOCATED: round(report["peak_allocated_bytes"] / MIB, 1),
        "reserved MiB": round(report["peak_reserved_bytes"] / MIB, 1),
        "outside MiB": None if not memory else round(memory["outside_bytes"] / MIB, 1),
        "retries": (memory or {}).get("num_retries") or None,
        f"loss of step {LOSS_STEP}": round(report["losses"][LOSS_STEP - 1], 4),
    }
