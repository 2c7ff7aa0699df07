"""What it costs to read sweeps of many trials: ``status``, ``ps``, ``explain`` and looking again, as ``watch`` does.

Each command is timed as people run it: a Python process of its own, from start to end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale.wide import fill_wide
from cluster.hardware.topology import Device, cpu_model
from orchestrator.sweep.checkpoint import CheckpointWriter
from orchestrator.sweep.events import (
    AttemptEnded,
    AttemptLaunched,
    Budget,
    ControllerStarted,
    LeaseChanged,
    LedgerEvent,
    TrialProposed,
)
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.support.story import created, failures, measured
from trials.outcome import Outcome
from trials.spec import Candidate, Layout, Precision

EXAMPLE = "example: python -m benchmarks.scale.reading --trials 20000 --sweeps 3"
START_S = 1_700_000_000.0
NUM_RANKS = 16
REPEATS = 3


def story(num_trials: int, name: str, seed: int = 0) -> Iterator[LedgerEvent]:
    """A sweep of gangs of 16 ranks: most trials measured, some of every kind of failure; the last one still runs."""
    rng = random.Random(seed)
    failing = list(failures().values())
    at_s = START_S
    yield created(at_s=at_s, sweep=name, budget=Budget(max_trials=2 * num_trials, lost_attempts_per_trial=1))
    yield ControllerStarted(at_s=at_s, epoch=1, pid=1, host="head")
    yield LeaseChanged(at_s=at_s, nodes=("n0", "n1"))
    ranks = tuple(Device(node=f"n{i // 8}", index=i % 8) for i in range(NUM_RANKS))
    for number in range(num_trials):
        at_s += 60.0
        token = f"{seed:04x}{number:028x}"
        yield TrialProposed(
            at_s=at_s,
            trial=number,
            candidate=_candidate(number),
            origin="sampler" if number else "baseline",
            reason="the cost model expects the most of it",
        )
        yield AttemptLaunched(at_s=at_s + 1.0, trial=number, attempt=0, token=token, ranks=ranks, num_devices=NUM_RANKS)
        if number < num_trials - 1:
            outcome = _measured(rng) if number == 0 or rng.random() < 0.8 else rng.choice(failing)
            yield AttemptEnded(at_s=at_s + 50.0, trial=number, token=token, outcome=outcome, device_seconds=800.0)


def _candidate(number: int) -> Candidate:
    layout = Layout(dp_shard=8, tp=2, zero_stage=3)
    return Candidate(layout=layout, micro_batch_size=1 + number, precision=Precision(level="O1", dtype="bfloat16"))


def _measured(rng: random.Random) -> Outcome:
    peaks = tuple(60_000_000_000 + rng.randrange(10**9) for _ in range(NUM_RANKS))
    return measured(rng.uniform(0.5, 2.0), world_size=NUM_RANKS, peak_allocated_bytes=peaks, peak_reserved_bytes=peaks)


def fill(home: Home, name: str, num_trials: int, *, seed: int = 0, copied: bool = True) -> tuple[Path, float]:
    """The ledger of such a sweep, as its controller leaves it behind when it is killed, and the CPU seconds that went
    into copies of the state. Without ``copied`` there is none, as in ledgers of old."""
    copying_s = 0.0
    with Ledger(home.sweep_folder(name)) as ledger:
        writer = CheckpointWriter(ledger)
        for event in story(num_trials, name, seed):
            ledger.append(event)
            if copied:
                before_s = time.process_time()
                writer.write_if_due()
                copying_s += time.process_time() - before_s
        ledger.put_document("tracking", {"uri": None})
        ledger.put_document("spec", {"cluster": {"num_nodes": 2}})
        return ledger.path, copying_s


def timed(*arguments: str, repeats: int = REPEATS) -> dict[str, float]:
    """Least wall-clock and CPU seconds of the command, over some repetitions, and its largest resident memory."""
    walls, cpus, peaks = [], [], []
    for _ in range(repeats):
        began_s = time.perf_counter()
        command = [sys.executable, "-m", "orchestrator", *arguments]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        walls.append(time.perf_counter() - began_s)
        cpus.append(used.ru_utime + used.ru_stime)
        peaks.append(used.ru_maxrss / 2**10)
    return {"wall_s": min(walls), "cpu_s": min(cpus), "peak_mib": max(peaks)}


def measure(num_trials: int, num_sweeps: int, folder: Path) -> dict[str, Any]:
    """The figures, by what is read."""
    home = Home(folder)
    made = [fill(home, f"long-{i}", num_trials, seed=i) for i in range(num_sweeps)]
    fill(home, "short", 1)
    fill(Home(folder / "old"), "old", num_trials, copied=False)
    fill_wide(Home(folder / "wide"), "wide", num_trials, folder)
    at = ("--home", str(folder))
    return {
        "ledger_mib": made[0][0].stat().st_size / 2**20,
        "copying_ms_per_trial": 1e3 * made[0][1] / num_trials,
        "status of one trial": timed("status", "short", *at),
        "status": timed("status", "long-0", *at),
        "status --json": timed("status", "long-0", "--json", *at),
        "status without a copy": timed("status", "old", "--home", str(folder / "old")),
        "explain TRIAL": timed("explain", "long-0", "t003", *at),
        "explain SWEEP": timed("explain", "wide", "--home", str(folder / "wide")),
        f"ps of {num_sweeps + 1} sweeps": timed("ps", *at),
        **looking_again(home, "long-0"),
    }


def looking_again(home: Home, name: str) -> dict[str, dict[str, float]]:
    """The first look of a process and one after it, when nothing is new."""
    found = {}
    seen = None
    for what in ("first look", "second look"):
        began_s, before_s = time.perf_counter(), time.process_time()
        seen = home.read(name, seen)
        found[what] = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - before_s}
    return found


def table(found: dict[str, Any]) -> str:
    """Markdown: one row per thing read."""
    rows: Sequence[tuple[str, Any]] = [(what, cost) for what, cost in found.items() if isinstance(cost, dict)]
    lines = ["| what | wall s | CPU s | peak MiB |", "|---|---|---|---|"]
    for what, cost in rows:
        peak = f"{cost['peak_mib']:.0f}" if "peak_mib" in cost else ""
        lines.append(f"| {what} | {cost['wall_s']:.3f} | {cost['cpu_s']:.3f} | {peak} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20_000, help="per sweep; default %(default)s")
    parser.add_argument("--sweeps", type=int, default=3, help="long sweeps in the home; default %(default)s")
    parser.add_argument("--folder", type=Path, help="an empty folder to keep the home in")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(args.trials, args.sweeps, args.folder or Path(scratch))
    found |= {"machine": f"{os.cpu_count()} cores, {cpu_model()}, Python {platform.python_version()}"}
    if args.json:
        print(json.dumps(found))
        return
    print(table(found))
    size, copying = f"{found['ledger_mib']:.0f} MiB", f"{found['copying_ms_per_trial']:.2f} CPU ms/trial"
    print(f"\n{args.trials} trials, ledger {size}, copying the state {copying}; {found['machine']}")


if __name__ == "__main__":
    main()
