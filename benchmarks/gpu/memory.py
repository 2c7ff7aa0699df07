"""The dry run's peak against the allocator's, for every trial that was measured, now or by an earlier call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import TRAINED
from benchmarks.gpu.child import environment
from benchmarks.gpu.parts import LEFT_OUT, NotHereError, Setting
from benchmarks.gpu.ranks import ALLOCATED, MIB
from trials.accelerator.kinds import without_devices
from trials.files import to_json
from trials.spec import TrialSpec

ENDING_S = 2.0
"""Seconds that ending the simulations may take."""
Measured = tuple[str, TrialSpec, float]
"""A trial's name, its settings, its peak in MiB."""


def dry_runs(setting: Setting) -> None:
    """Tell a row as each simulation ends, so that a slow one costs no other's."""
    found = measured(setting)
    if not found:
        raise NotHereError("no trial was measured before; run it together with training, knobs or layouts")
    waiting = dict(enumerate(found))
    for index, reply in _replies(setting, [spec for _, spec, _ in waiting.values()]):
        name, _, peak = waiting.pop(index)
        row: dict[str, Any] = {"trial": name, "measured MiB": peak}
        if reply["run"] is None:
            row["failed"] = reply["failure"]["message"]
        else:
            simulated = max(peak["total_bytes"] for peak in reply["run"]["peaks"].values()) / MIB
            row["dry run MiB"] = round(simulated, 1)
            row["difference %"] = round(100 * (simulated / peak - 1), 1) if peak else None
        setting.tell(row)
    for name, _, _ in waiting.values():
        setting.tell({"trial": name, LEFT_OUT: "no reply in time"})


def measured(setting: Setting) -> list[Measured]:
    """The trials that have figures, without those that were tried with variables."""
    found = []
    for part, cases in TRAINED.items():
        peaks = {row["trial"]: row.get(ALLOCATED) for row in setting.rows_of(part)}
        for case in cases(setting):
            peak = peaks.get(case.name)
            if peak is not None and not case.env:
                found.append((f"{part}: {case.name}", case.spec, peak))
    return found


def _replies(setting: Setting, specs: list[TrialSpec]) -> Iterator[tuple[int, Any]]:
    """Index and reply of ``python -m trials.dryrun`` for rank 0 of each trial, as they come; it sees no device."""
    mode = "cpu" if setting.device == "cpu" else "accelerator"
    requests = [{"spec": to_json(spec), "rank": 0, "mode": mode} for spec in specs]
    body = {"requests": requests, "timeout_s": setting.left_s, "max_children": len(os.sched_getaffinity(0))}
    wanted, log = Path(setting.folder, "dryrun.json"), Path(setting.folder, "dryrun.log")
    wanted.write_text(json.dumps(body), encoding="utf-8")
    env = without_devices(environment({"OMP_NUM_THREADS": "1"}))
    with wanted.open("rb") as asked, log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "trials.dryrun"],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            text=True,
        )
    assert process.stdout is not None
    ending = threading.Timer(setting.left_s - ENDING_S, process.terminate)  # which ends its children too
    ending.start()
    num_replies = 0
    try:
        for line in process.stdout:
            answer = json.loads(line)
            num_replies += 1
            yield answer["index"], answer["reply"]
    finally:
        ending.cancel()
        process.terminate()
        process.stdout.close()
        code = process.wait()
    if code > 0 and not num_replies and setting.left_s > ENDING_S:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise NotHereError(f"the dry run cannot start with this torch: {lines[-1] if lines else 'no output'}")
