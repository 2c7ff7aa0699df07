"""What grows with a sweep: memory, descriptors and processes of its controller, its ledger, and the cost of reading it.

    python -m benchmarks.scale.growth --trials 100000              # on a simulated cluster
    python -m benchmarks.scale.growth --minutes 60                 # real trials, with a fault every minute
    python -m benchmarks.scale.growth --plot a.json b.json --to docs/images/growth.svg

The controller is a process of its own, watched from outside. Of ten faults, nine kill a rank; the tenth kills the
controller, and the sweep is submitted again. Every run keeps its samples so far as JSON in ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.controller import slope
from benchmarks.scale.reading import timed
from cluster.processes import descendants
from orchestrator.errors import ConfigError
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_tracker import Tracker

REAL = {
    "name": "growth",
    "workload": {"model": {"kind": "linear", "num_layers": 1, "size": 8}, "global_batch_size": 8},
    "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 2, "device_memory": "1GiB"},
    "baseline": {"dp_replicate": 1, "micro_batch_size": 8},
    "space": {
        "world_size": [1],
        "micro_batch_size": [2, 4, 8],
        "precision": [
            {"level": "O1", "dtype": "float16", "loss_scale": {"initial": float(scale)}} for scale in range(1, 2001)
        ],
        "recompute": ["none", "full"],
    },
    "measure": {"min_warmup_steps": 1, "max_warmup_steps": 2, "num_steps": 3, "max_steps": 3},
    "search": {"sampler": "random", "max_concurrent": 2},
    "budget": {"max_trials": 100_000, "consecutive_failures": 50},
    "confirm": "off",
    "gate": "off",
    "tracking": {"report": False},
}
"""Two trials at a time, with steps of a few milliseconds, out of 12,000 candidates."""
WIDER = {"num_workers": [0, 1, 2, 3, 4, 6, 8, 12], "prefetch_factor": [1, 2, 4]}
"""Knobs of the simulated sweep, so that it has more than 100,000 legal candidates."""
FAULT_EVERY_S = 60.0
FAULTS_PER_CONTROLLER = 10
READING_EVERY = 1.5
"""Factor in the number of trials from one sample with the costs of reading to the next: reading takes CPU time from
the sweep."""
TITLES = {
    "rss_mib": "memory of the controller, MiB",
    "descriptors": "open descriptors of the controller",
    "processes": "processes of the sweep",
    "ledger_mib": "ledger, MiB",
    "status_s": "`status`, CPU s",
    "page_s": "`report --html`, CPU s",
    "query_s": "query of MLflow, CPU s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The sweep at one moment. The costs of reading are CPU seconds; None where they were not measured."""

    at_s: float
    trials: int
    rss_mib: float
    descriptors: int
    processes: int
    ledger_mib: float
    status_s: float | None = None
    page_s: float | None = None
    query_s: float | None = None


class Watcher:
    """Takes samples of a sweep and of the process that runs it, and keeps them in ``out``."""

    def __init__(self, folder: Path, name: str, out: Path) -> None:
        self.home = folder / "home"
        self.name = name
        self.samples: list[Sample] = []
        self._out = out
        self._page = folder / "page.html"
        self._began_s = time.monotonic()
        self._next_reading = 0.0
        """Number of trials from which the costs of reading are due."""

    def num_trials(self) -> int:
        try:
            return len(Home(self.home).read(self.name).state.trials)
        except ConfigError:  # not begun
            return 0

    def look(self, pid: int) -> None:
        """Add a sample; none if the process ends meanwhile."""
        try:
            memory = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
        except FileNotFoundError:
            return
        ledgers = (self.home / "sweeps" / self.name).glob("ledger.sqlite*")
        num_trials = self.num_trials()
        sample = Sample(
            at_s=time.monotonic() - self._began_s,
            trials=num_trials,
            rss_mib=memory / 2**20,
            descriptors=descriptors,
            processes=1 + len(descendants(pid)),
            ledger_mib=sum(path.stat().st_size for path in ledgers) / 2**20,
            **(self._reading() if num_trials >= self._next_reading else {}),
        )
        if sample.status_s is not None:
            self._next_reading = READING_EVERY * num_trials
        self.samples.append(sample)
        self._out.write_text(json.dumps([asdict(one) for one in self.samples]), encoding="utf-8")
        print(json.dumps(asdict(sample)), file=sys.stderr, flush=True)

    def _reading(self) -> dict[str, float | None]:
        place = ("--home", str(self.home))
        return {
            "status_s": timed("status", self.name, *place, repeats=1)["cpu_s"],
            "page_s": timed("report", self.name, *place, "--html", str(self._page), repeats=1)["cpu_s"],
            "query_s": self._query_s(),
        }

    def _query_s(self) -> float | None:
        """The ten fastest trials, as the table of MLflow's page requests them."""
        path = self.home / "mlflow.db"
        if not path.exists():
            return None
        client = Tracker(f"sqlite:///{path}").client()
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        began_s = time.process_time()
        client.search_runs(experiments, "tags.`tc.kind` = 'trial'", max_results=10, order_by=["metrics.step_time_ms"])
        return time.process_time() - began_s


def simulated(watcher: Watcher, folder: Path, args: argparse.Namespace) -> None:
    """A simulated sweep to its end, with a sample after every so many trials."""
    command = [sys.executable, "-m", "benchmarks.scale.controller", "--trials", str(args.trials)]
    command += ["--folder", str(folder), "--gangs", "50", "--sampler", args.sampler, "--narrower", json.dumps(WIDER)]
    command += ["--json", *(["--mlflow"] if args.mlflow else [])]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        number = 1
        while process.poll() is None:
            if watcher.num_trials() >= number * args.every:
                watcher.look(process.pid)
                number = 1 + watcher.samples[-1].trials // args.every
            time.sleep(5.0)
    if process.returncode:
        raise RuntimeError(f"the sweep ended with {process.returncode}")


def endured(watcher: Watcher, folder: Path, args: argparse.Namespace) -> None:
    """A real sweep for so many minutes, with a fault every minute and a sample before each."""
    (folder / "growth.yaml").write_text(json.dumps(REAL), encoding="utf-8")
    due_s = time.monotonic() + FAULT_EVERY_S
    ends_s = due_s + 60 * args.minutes
    process = submitted(folder)
    try:
        for number in itertools.count(1):
            time.sleep(max(0.0, due_s - time.monotonic()))
            if time.monotonic() >= ends_s:
                break
            due_s = time.monotonic() + FAULT_EVERY_S
            if process.poll() is not None:
                shown = (folder / "shown").read_text(encoding="utf-8")[-2000:]
                raise RuntimeError(f"the sweep ended by itself with {process.returncode}: {shown}")
            watcher.look(process.pid)
            if number % FAULTS_PER_CONTROLLER == 0:
                process.kill()
                process.wait()
                num_before = watcher.num_trials()
                process = submitted(folder)
                while process.poll() is None and watcher.num_trials() <= num_before + 2:
                    time.sleep(1.0)
            else:
                kill_a_rank(process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def kill_a_rank(controller: subprocess.Popen[bytes]) -> None:
    """Kill the youngest process of the sweep, as soon as there is one."""
    while controller.poll() is None:
        if below := descendants(controller.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(below[-1], signal.SIGKILL)
            return
        time.sleep(0.1)


def submitted(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "orchestrator", "submit", "growth.yaml", "--home", str(folder / "home")]
    with (folder / "shown").open("ab") as shown:
        return subprocess.Popen(command, cwd=folder, stdout=shown, stderr=shown)


def slopes(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Growth of each quantity per 1,000 trials, by least squares."""
    found = {}
    for name in TITLES:
        points = [(one["trials"], one[name]) for one in samples if one[name] is not None]
        if len(points) > 1:
            found[name] = 1000 * slope([x for x, _ in points], [y for _, y in points])
    return found


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One chart per quantity over trials, from zero; one line per run."""
    from matplotlib.figure import Figure

    shown = [name for name in TITLES if any(one[name] is not None for samples in runs.values() for one in samples)]
    figure = Figure(figsize=(11, 2.3 * -(-len(shown) // 2)), layout="constrained")
    charts = list(figure.subplots(-(-len(shown) // 2), 2).flat)
    for chart, name in zip(charts, shown, strict=False):
        for number, (run, samples) in enumerate(runs.items()):
            points = [(one["trials"], one[name]) for one in samples if one[name] is not None]
            if points:
                chart.plot(*zip(*points, strict=True), marker=".", label=run, color=f"C{number}")
        chart.set(title=TITLES[name].replace("`", ""), xlabel="trials", ylim=(0, None), xlim=(0, None))
    for chart in charts[len(shown) :]:
        chart.set_axis_off()
    charts[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, help="length of a simulated sweep")
    parser.add_argument("--every", type=int, default=2000, help="trials between samples; default %(default)s")
    parser.add_argument("--sampler", default="random", help="of the simulated sweep; default %(default)s")
    parser.add_argument("--mlflow", action="store_true", help="record the simulated sweep in MLflow, too")
    parser.add_argument("--minutes", type=float, help="length of a real sweep with faults")
    parser.add_argument("--out", type=Path, default=Path("growth.json"), help="samples; default %(default)s")
    parser.add_argument("--plot", type=Path, nargs="+", help="samples to draw")
    parser.add_argument("--to", type=Path, default=Path("growth.svg"), help="the picture; default %(default)s")
    args = parser.parse_args()
    if args.plot:
        runs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in args.plot}
        plot(runs, args.to)
        print(json.dumps({run: slopes(samples) for run, samples in runs.items()}, indent=1))
        return
    if (args.trials is None) == (args.minutes is None):
        parser.error("one of --trials, --minutes and --plot is needed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        watcher = Watcher(folder, "growth" if args.minutes else "scale", args.out)
        (endured if args.minutes else simulated)(watcher, folder, args)


if __name__ == "__main__":
    main()
