"""Faults in gangs of the local backend, which needs no Ray: how each ends, how soon, and what is left of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import cases
from benchmarks.gpu.host import NVIDIA_SMI
from benchmarks.gpu.parts import LEFT_OUT, Setting
from cluster.base import Deadlines, GangEnded, GangLaunch, GangProgress
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import Pool
from cluster.local import LocalCluster
from trials.files import to_json
from trials.spec import Layout, TrialSpec

STALL_S = 12.0
WANTED = {
    "trains": "measured",
    "runs_out_of_memory": "oom",
    "is_killed": "gang_lost",
    "is_stopped": "timed_out",
    "lets_others_wait": "timed_out",
}
"""How the gang of each runner should end."""


def on_one_device(setting: Setting) -> None:
    spec = cases.trial(setting, precision=cases.O1, micro_batch_size=1)
    _run(setting, spec, [name for name in WANTED if name != "lets_others_wait"], blamed=None)


def hang(setting: Setting) -> None:
    n = setting.num_devices
    spec = cases.trial(setting, layout=Layout(dp_shard=n, zero_stage=3), precision=cases.O1)
    _run(setting, spec, ["lets_others_wait"], blamed=n - 1)


def _run(setting: Setting, spec: TrialSpec, runners: Sequence[str], *, blamed: int | None) -> None:
    """Tell a row for the gang of each runner; ``blamed`` is the rank at fault, None where that is not asked."""
    folder = Path(setting.folder) / f"cluster-{time.monotonic_ns()}"
    folder.mkdir()
    node = discover_node(device=setting.device, num_devices=setting.num_devices)  # type: ignore[arg-type]
    preload = ("trials.worker", "benchmarks.gpu.runners")
    with LocalCluster(folder, node, preload=preload) as cluster:
        for number, runner in enumerate(runners):
            row: dict[str, Any] = {"gang": runner, "wanted": WANTED[runner]}
            if setting.lacks_time(row):
                continue
            used_before = _used_mib()
            launch = GangLaunch(
                attempt_id=f"a{number}-{runner}",
                token=f"token{number}",
                runner=f"benchmarks.gpu.runners:{runner}",
                spec=to_json(spec),
                placement=Pool(cluster.topology).place(
                    world_size=spec.candidate.layout.world_size, tp=1, isolation="device"
                ),
                deadlines=Deadlines(stall_s=STALL_S),
            )
            row |= _watched(setting, cluster, launch)
            used_after = _used_mib()
            if used_before is not None and used_after is not None:
                row["MiB left behind"] = used_after - used_before
            if blamed is not None and LEFT_OUT not in row:
                row |= {"at fault": blamed, "blames it": row["rank"] == blamed}
            setting.tell(row)


def _watched(setting: Setting, cluster: LocalCluster, launch: GangLaunch) -> dict[str, Any]:
    """Launch, wait for the end, and tell it."""
    start_s = last_s = time.monotonic()
    cluster.launch(launch)
    while setting.left_s > 0:
        for event in cluster.poll(1.0):
            if isinstance(event, GangProgress):
                last_s = time.monotonic()
            elif isinstance(event, GangEnded):
                return _ended(event, time.monotonic() - start_s, time.monotonic() - last_s)
    return {LEFT_OUT: f"cut off after {time.monotonic() - start_s:.0f} s"}


def _ended(event: GangEnded, took_s: float, since_s: float) -> dict[str, Any]:
    evidence = getattr(event.outcome, "evidence", None)
    files = [path.name for path in Path(event.log_dir).rglob("*") if path.is_file()] if event.log_dir else []
    recorded = [name for name in files if "trace" in name or "flight" in name or "recorder" in name]
    return {
        "ended": event.outcome.kind,
        "s after its last sign of life": round(since_s, 1),
        "took s": round(took_s, 1),
        "rank": None if evidence is None else evidence.rank,
        "message": "" if evidence is None else evidence.message[:200],
        "recorder": ", ".join(sorted(recorded)),
    }


def _used_mib() -> int | None:
    """MiB in use on all devices, by the driver's tool; None where there is none."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True)
        return sum(int(line.rpartition(",")[2]) for line in done.stdout.splitlines())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
