"""What a trial of a user's training program costs beyond the bare command, side by side in one run.

The program is ``configs/examples/train.py`` on two ranks for a fixed number of steps, after which it ends. Bare: its
two processes, started with torchrun's variables and nothing else. Ours: the same command as a gang on a cluster that
stands already, with the reporting hook. Both take turns; each line gives the median over all turns and the range.

    python -m benchmarks.foreign_overhead --repeats 5

* seconds: from the start of the command to its end, for ours from the launch to the end that the cluster reports;
* step: the program's own clock, as it prints it, the median over the measured steps of a run;
* hook: processor time per step of a training whose steps take a fraction of a millisecond, in one process, without and
  with the hook: the fastest tenth, which depends least on other load.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

from cluster.base import Deadlines, GangEnded, GangLaunch
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import Pool, cpu_model
from cluster.local import LocalCluster
from configs import CONFIGS
from orchestrator.program.candidate_command import RUNNER
from trials.files import to_json
from trials.outcome import Measured
from trials.script.command import REPORT_VARIABLE, ScriptCommand, with_hook
from trials.spec import Protocol

RANKS = 2
WARMUP = 4
ARGUMENTS = ("--batch-size", "4", "--accumulation", "1")
SAMPLES = 8
SEQ_LENGTH = 128
TINY = """
import sys, time, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.randint(0, 10, (512,)))
batches = (batch for _ in range(10**9) for batch in torch.utils.data.DataLoader(data, batch_size=8))
def block(steps):
    began = time.thread_time()
    for _ in range(steps):
        inputs, labels = next(batches)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.thread_time() - began) / steps
block(200)
print(sorted(block(50) for _ in range(60))[6])
"""
_STEP = re.compile(r"^step (\d+): loss \S+ (\S+) ms$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps of a run, warm-up included")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    options = parser.parse_args()
    runs = alternate(options.repeats, options.steps)
    _report(runs, options.steps)
    _report_hook(options.repeats)
    if options.json is not None:
        options.json.write_text(json.dumps(runs, indent=2))


def alternate(repeats: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds from start to end and milliseconds of a step, of both ways in turn; the first turn is not counted."""
    argv = (sys.executable, "train.py", *ARGUMENTS, "--steps", str(steps))
    runs: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory(prefix="foreign-overhead-") as folder:
        node = discover_node(device="cpu", num_devices=RANKS)
        with LocalCluster(Path(folder), node, preload=()) as cluster:
            for turn in range(repeats + 1):  # the first turn fills the page cache
                order = ("bare", "ours") if turn % 2 == 0 else ("ours", "bare")
                for kind in order:
                    found = _bare(argv) if kind == "bare" else _ours(cluster, argv, steps, Path(folder))
                    if turn:
                        runs[kind].append(found)
                    print(f"turn {turn} {kind}: {found[0]:.2f} s, step {found[1]:.2f} ms", file=sys.stderr, flush=True)
    return runs


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _bare(argv: tuple[str, ...]) -> tuple[float, float]:
    """Seconds from start to end, and milliseconds of a step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**_environment(), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    begun_s = time.perf_counter()
    ranks = [
        subprocess.Popen(
            argv,
            cwd=CONFIGS / "examples",
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(RANKS)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    seconds = time.perf_counter() - begun_s
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("the bare command failed")
    return seconds, _step_ms(printed[0])


def _ours(cluster: LocalCluster, argv: tuple[str, ...], steps: int, folder: Path) -> tuple[float, float]:
    """The same of a gang that runs the command."""
    command = ScriptCommand(
        argv=argv,
        cwd=str(CONFIGS / "examples"),
        protocol=Protocol(
            min_warmup_steps=WARMUP, max_warmup_steps=WARMUP, num_steps=steps - WARMUP, max_steps=steps - WARMUP
        ),
        num_devices=RANKS,
        tokens_per_step=SAMPLES * SEQ_LENGTH,
        samples_per_step=SAMPLES,
        env=(("OMP_NUM_THREADS", "1"),),
    )
    placement = Pool(cluster.topology).place(world_size=RANKS, tp=1, isolation="node")
    assert placement is not None, "the cluster was made for as many"
    attempt = uuid4().hex[:8]
    launch = GangLaunch(
        attempt_id=attempt,
        token=attempt,
        runner=RUNNER,
        spec=to_json(command),
        placement=placement,
        deadlines=Deadlines(),
    )
    begun_s = time.perf_counter()
    cluster.launch(launch)
    while True:
        for event in cluster.poll(1.0):
            if isinstance(event, GangEnded):
                seconds = time.perf_counter() - begun_s
                if not isinstance(event.outcome, Measured):
                    raise RuntimeError(f"the trial failed: {event.outcome}")
                return seconds, _step_ms((folder / attempt / "rank0.log").read_text(errors="replace"))


def _step_ms(printed: str) -> float:
    times = {int(step): float(text) for step, text in _STEP.findall(printed)}
    return statistics.median(value for step, value in times.items() if step > WARMUP)


def _report(runs: dict[str, list[tuple[float, float]]], steps: int) -> None:
    print(f"{RANKS} ranks, {steps} steps, {len(runs['bare'])} turns of each on {os.cpu_count()} cores of {cpu_model()}")
    print(f"load when it ended: {os.getloadavg()[0]:.1f}")
    for place, (what, unit) in enumerate((("seconds", "s"), ("step", "ms"))):
        bare, ours = ([run[place] for run in runs[kind]] for kind in ("bare", "ours"))
        print(f"{what:<8} bare {_spread(bare)} {unit}   ours {_spread(ours)} {unit}")
    beyond = [ours[0] - bare[0] for bare, ours in zip(runs["bare"], runs["ours"], strict=True)]
    ratio = [ours[1] / bare[1] for bare, ours in zip(runs["bare"], runs["ours"], strict=True)]
    print(f"beyond   {_spread(beyond)} s from start to end (goal 0.5)")
    print(f"ratio    {_spread(ratio)} of step times, ours / bare (goal 1.01)")


def _report_hook(repeats: int) -> None:
    """The tiny training without and with the hook, alternating."""
    bare: list[float] = []
    ours: list[float] = []
    with tempfile.TemporaryDirectory(prefix="foreign-overhead-") as folder:
        for turn in range(repeats):
            report = Path(folder) / str(turn)
            report.mkdir()
            hooked = {REPORT_VARIABLE: str(report), "PYTHONPATH": with_hook(None, hook=True)}
            bare.append(_tiny_step_us({}))
            ours.append(_tiny_step_us(hooked))
    beyond = [one - other for one, other in zip(ours, bare, strict=True)]
    print(f"hook     bare {_spread(bare)} us   ours {_spread(ours)} us of processor time per step")
    print(f"hook     {_spread(beyond)} us per step")


def _tiny_step_us(variables: dict[str, str]) -> float:
    argv = [sys.executable, "-c", TINY]
    return 1e6 * float(subprocess.check_output(argv, env={**_environment(), **variables}, stderr=subprocess.DEVNULL))


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
