"""The dry run's peak against the allocator's, for every trial that earlier parts have measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.gpu.child import environment
from benchmarks.gpu.parts import NotHereError, Setting
from benchmarks.gpu.ranks import GIB


def dry_runs(setting: Setting) -> None:
    measured = setting.notes("trials")
    if not measured:
        raise NotHereError("no trial was measured before; run it together with the part training")
    replies = _simulate(setting, [note["spec"] for note in measured])
    for index, note in enumerate(measured):
        reply = replies.get(index)
        row: dict[str, Any] = {"trial": note["name"], "measured GiB": round(note["peak_bytes"] / GIB, 3)}
        if reply is None:
            row["failed"] = "no reply in time"
        elif reply["run"] is None:
            row["failed"] = reply["failure"]["message"]
        else:
            simulated = max(peak["total_bytes"] for peak in reply["run"]["peaks"].values())
            row["dry run GiB"] = round(simulated / GIB, 3)
            row["difference %"] = round(100 * (simulated / note["peak_bytes"] - 1), 1)
        setting.tell(row)


def _simulate(setting: Setting, specs: list[Any]) -> dict[int, Any]:
    """Replies of ``python -m trials.dryrun`` for rank 0 of each trial; it sees no device."""
    mode = "cpu" if setting.device == "cpu" else "accelerator"
    requests = [{"spec": spec, "rank": 0, "mode": mode} for spec in specs]
    body = {"requests": requests, "timeout_s": setting.left_s, "max_children": len(os.sched_getaffinity(0))}
    done = subprocess.run(
        [sys.executable, "-m", "trials.dryrun"],
        input=json.dumps(body),
        capture_output=True,
        text=True,
        env=environment({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
        check=False,
    )
    if done.returncode and not done.stdout:
        lines = done.stderr.strip().splitlines()
        raise NotHereError(f"the dry run cannot start with this torch: {lines[-1] if lines else 'no output'}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    return {answer["index"]: answer["reply"] for answer in answers}
