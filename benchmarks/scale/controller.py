"""CPU time and memory of the controller over a long sweep on a large simulated cluster, window by window.

The sweep is a real one: ``submit`` with file, plan, ledger, search and runtime; only the cluster is simulated, with
noise, slow nodes, faults and a lost node. Simulating it costs CPU time in the same process, which a real cluster's
controller does not spend; it is counted apart, as ``simulation``. So is MLflow, where it takes part (``--mlflow``),
and what is spent once per command: planning before the first trial, and the result after the last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from benchmarks.scale.cpu_parts import CpuParts
from cluster.base import GangProgress
from cluster.hardware.topology import Pool, cpu_model
from cluster.virtual import VirtualCluster
from orchestrator.config.sweep import load_sweep
from orchestrator.controller import controller, runtime
from orchestrator.controller import runtime as launcher
from orchestrator.search.search import Search
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from orchestrator.sweep.state import SweepState
from orchestrator.tracking.mlflow_tracker import Tracker

MODEL = {
    "kind": "llama",
    "hidden_size": 5120,
    "num_layers": 40,
    "num_heads": 40,
    "num_kv_heads": 8,
    "ffn_hidden_size": 13824,
    "vocab_size": 32000,
}
SPACE = {
    "world_size": [16, 32, 64],
    "pp": [1, 2, 4, 8],
    "schedule": ["1f1b", "interleaved"],
    "num_virtual_stages": [1, 2],
    "tp": [1, 2, 4, 8],
    "sequence_parallel": [False, True],
    "dp_shard": [2, 4, 8, 16],
    "dp_replicate": [1, 2, 4],
    "zero_stage": [1, 3],
    "micro_batch_size": [1, 2, 4],
    "recompute": ["none", "full", {"full": 4}],
    "precision": ["O1", "O2"],
    "compile": ["off", "block"],
    "num_workers": [0, 4],
}
PARTS: dict[str, list[tuple[Any, str]]] = {
    "search": [(Search, "suggest"), (Search, "newly_pruned"), (Search, "is_converged")],
    "ledger": [(Ledger, "append"), (Ledger, "following"), (Ledger, "cursor"), (Ledger, "advance")],
    "decide": [(runtime, "step"), (controller, "fold"), (runtime, "fold")],
    "placement": [(Pool, "place"), (Pool, "take"), (Pool, "give_back"), (Pool, "set_nodes")],
    "launch": [(launcher._GangBuilder, "build")],
    "simulation": [(VirtualCluster, "launch"), (VirtualCluster, "poll"), (VirtualCluster, "kill")],
    "mlflow": [(Tracker, "sync")],
}
"""Functions whose CPU time is charged to each part; what no part claims is ``rest``."""
NOT_CONTROLLER = ("simulation", "mlflow")
EXAMPLE = "example: python -m benchmarks.scale.controller --trials 10000 --nodes 1000 --json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Trials ``first`` to ``last``, in the order in which they were proposed."""

    first: int
    last: int
    cpu_ms_per_trial: dict[str, float]
    """CPU milliseconds per trial, by part of the program."""
    rss_mib: float
    """Resident memory at the window's end."""

    @property
    def controller_ms_per_trial(self) -> float:
        return sum(value for part, value in self.cpu_ms_per_trial.items() if part not in NOT_CONTROLLER)


@dataclass(slots=True)
class Meter:
    """An observer of the runtime that closes a window every ``size`` trials."""

    parts: CpuParts
    size: int
    shows_progress: bool = False
    """Whether each window is reported in a line on stderr."""
    windows: list[Window] = field(default_factory=list)
    start_s: float = 0.0
    """CPU seconds spent before the first trial."""
    _before: dict[str, float] = field(default_factory=dict)
    _first: int | None = None

    def on_state(self, state: SweepState) -> None:
        if self._first is None:  # planning and reading the ledger are over
            self._first, self._before = len(state.trials), self.parts.snapshot()
            self.start_s = sum(self._before.values())
        elif len(state.trials) - self._first >= self.size or (state.is_over and len(state.trials) > self._first):
            self._close(len(state.trials))

    def on_lease(self, *_: object) -> None:
        pass

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        pass

    def _close(self, num_trials: int) -> None:
        assert self._first is not None
        now = self.parts.snapshot()
        count = num_trials - self._first
        spent = {part: 1e3 * (value - self._before.get(part, 0.0)) / count for part, value in now.items()}
        self.windows.append(
            Window(first=self._first, last=num_trials - 1, cpu_ms_per_trial=spent, rss_mib=resident_bytes() / 2**20)
        )
        self._before, self._first = now, num_trials
        if self.shows_progress:
            print(row(self.windows[-1], sorted(spent)), file=sys.stderr, flush=True)

    def end_s(self) -> float:
        """CPU seconds since the last window."""
        return sum(self.parts.snapshot().values()) - sum(self._before.values())


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def sweep_file(args: argparse.Namespace) -> dict[str, Any]:
    """The content of the sweep file."""
    slow = {f"node{i:04d}": 1.15 for i in range(7, args.nodes, 50)}
    return {
        "name": "scale",
        "workload": {"model": MODEL, "seq_length": 4096, "global_batch_size": 1024},
        "cluster": {
            "kind": "simulated",
            "num_nodes": args.nodes,
            "simulation": {
                "accelerator": "h100",
                "noise": 0.02,
                "deviation": 1.0,
                "slow_nodes": slow,
                "node_losses": {f"node{args.nodes // 2:04d}": 2e4},
                "faults": {"crash": 0.01, "hang": 0.003, "start_hang": 0.002, "exit": 0.005},
                "seed": args.seed,
            },
        },
        "baseline": {"dp_shard": 16, "tp": 2, "zero_stage": 3, "recompute": "full", "precision": "O1"},
        "space": SPACE | args.narrower,
        "search": {"sampler": args.sampler, "max_concurrent": args.gangs, "seed": args.seed},
        "budget": {"max_trials": args.trials, "consecutive_failures": 50},
        "confirm": "off",
        "gate": "off",
        "deadlines": {"starting_s": 600.0, "warmup_s": 3600.0, "measuring_s": 7200.0, "stall_s": 1800.0},
    }


class Unrecorded(Tracker):
    """A tracker that records nothing, so that only the controller is measured."""

    def sync(self, ledger: Ledger, state: SweepState) -> int:  # noqa: ARG002
        return 0


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[Window]]:
    """Run the sweep, or go on with it, and say what each window of trials cost."""
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(sweep_file(args)), encoding="utf-8")
    parts = CpuParts()
    meter = Meter(parts, args.window, shows_progress=args.progress)
    tracker = Tracker if args.mlflow else Unrecorded
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    with mock.patch.object(controller, "Tracker", tracker), parts.watching(PARTS):
        result = controller.submit(load_sweep(file), Home(folder / "home"), meter)
    found = {
        "trials": len(result.state.trials),
        "legal": result.state.sweep.num_legal,
        "counts": result.state.counts(),
        "lost_attempts": sum(len(trial.attempts) - 1 for trial in result.state.trials),
        "best_over_baseline": result.summary.speedup.ratio.value if result.summary.speedup else None,
        "virtual_hours": result.state.active_s / 3600,
        "wall_s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "start_cpu_s": meter.start_s,
        "end_cpu_s": meter.end_s(),
        "windows": [to_json(window) for window in meter.windows],
        "summary": summarize(meter.windows),
    }
    return found, meter.windows


def to_json(window: Window) -> dict[str, Any]:
    return {
        "first": window.first,
        "last": window.last,
        "controller_ms_per_trial": window.controller_ms_per_trial,
        "cpu_ms_per_trial": window.cpu_ms_per_trial,
        "rss_mib": window.rss_mib,
    }


def summarize(windows: Sequence[Window]) -> dict[str, float]:
    """Means over all trials; slopes by least squares over the windows after the first, which fills caches."""
    sizes = [window.last - window.first + 1 for window in windows]
    total = sum(sizes)
    costs = [window.controller_ms_per_trial for window in windows]
    parts = sorted({part for window in windows for part in window.cpu_ms_per_trial})
    means = {
        part: sum(n * w.cpu_ms_per_trial.get(part, 0.0) for n, w in zip(sizes, windows, strict=True)) / total
        for part in parts
    }
    at = [float(window.last) for window in windows]
    return {
        "controller_ms_per_trial": sum(n * cost for n, cost in zip(sizes, costs, strict=True)) / total,
        "controller_ms_per_trial_and_1000_trials": 1e3 * slope(at[1:], costs[1:]),
        "rss_kib_per_trial": 1024 * slope(at[1:], [window.rss_mib for window in windows[1:]]),
        **{f"{part}_ms_per_trial": value for part, value in means.items()},
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope; 0 for fewer than two points."""
    if len(x) < 2:
        return 0.0
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def table(windows: Sequence[Window]) -> str:
    """Markdown: one row per window, one column per part."""
    parts = sorted({part for window in windows for part in window.cpu_ms_per_trial})
    lines = [
        f"| trials | controller ms/trial | {' | '.join(parts)} | RSS MiB |",
        "|---" * (len(parts) + 3) + "|",
    ]
    return "\n".join([*lines, *(row(window, parts) for window in windows)])


def row(window: Window, parts: Sequence[str]) -> str:
    """One row of the table."""
    cells = [f"{window.cpu_ms_per_trial.get(part, 0.0):.2f}" for part in parts]
    shown = [f"{window.first}-{window.last}", f"{window.controller_ms_per_trial:.2f}", *cells, f"{window.rss_mib:.0f}"]
    return f"| {' | '.join(shown)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10_000, help="default %(default)s")
    parser.add_argument("--nodes", type=int, default=1000, help="of 8 devices; default %(default)s")
    parser.add_argument("--gangs", type=int, default=200, help="trials in flight; default %(default)s")
    parser.add_argument("--sampler", choices=["guided", "tpe", "random", "grid"], default="guided")
    parser.add_argument("--window", type=int, default=1000, help="trials per window; default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mlflow", action="store_true", help="record into a real MLflow store, too")
    parser.add_argument("--folder", type=Path, help="where the sweep is kept; one that is there goes on")
    parser.add_argument("--narrower", type=json.loads, default={}, help="JSON: knobs of the space to replace")
    parser.add_argument("--progress", action="store_true", help="a line on stderr after every window")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found, windows = measure(args, folder)
    found |= {"machine": f"{os.cpu_count()} cores, {cpu_model()}, Python {platform.python_version()}"}
    if args.json:
        print(json.dumps(found))
        return
    print(table(windows))
    print(json.dumps({key: value for key, value in found.items() if key != "windows"}, indent=1))


if __name__ == "__main__":
    main()
