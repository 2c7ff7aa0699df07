"""The published cases as sweeps: submitted in virtual time, on the machine that the cost model assumes or on others."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.acceptance.cases import Case
from benchmarks.acceptance.model import Model
from cluster.hardware.topology import describe_topology
from cluster.virtual import ModelledCost
from orchestrator.config.sweep import SweepSpec
from orchestrator.controller import controller
from orchestrator.space.notation import short_name
from orchestrator.sweep.snapshot import Home
from orchestrator.sweep.state import SweepState
from trials.spec import Candidate, TrialSpec

NOISE = 0.01
"""Relative, within which a measured speed counts as that of the expert's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a shipped sweep is run."""

    seed: int = 0
    deviation: float = 0.0
    """Deviation of the simulated machine from what the cost model assumes; see the key ``cluster.simulation``."""


class _Silent:
    """Observer that ignores everything."""

    def on_state(self, state: Any) -> None:
        pass

    def on_lease(self, *_: object) -> None:
        pass

    def on_progress(self, trial: int, progress: Any) -> None:
        pass


def submit(spec: SweepSpec, variant: Variant) -> SweepState:
    """Run the sweep as ``tune-cluster submit`` does, in a folder of its own."""
    data = spec.to_json()
    data["cluster"]["simulation"] |= {"seed": variant.seed, "deviation": variant.deviation}
    data["search"] |= {"seed": variant.seed}
    with tempfile.TemporaryDirectory() as folder:
        return controller.submit(SweepSpec.from_json(data), Home(Path(folder) / "home"), _Silent()).state


def run_sweep(case: Case, model: Model, variant: Variant) -> dict[str, Any]:
    """What one sweep reached, and after how many trials, the baseline included."""
    state = submit(model.spec, variant)
    speeds = {t.number: t.measurement.tokens_per_s_per_device for t in state.searched() if t.measurement is not None}
    best = max(speeds, key=lambda number: speeds[number], default=0)
    reached = speeds.get(best, 0.0)
    machine = _Machine(model, variant)
    start, expert = machine.start(case), machine.speed(model.candidate(case.expert))
    return {
        "seed": variant.seed,
        "deviation": variant.deviation,
        "start": start,
        "reached": reached,
        "ratio": reached / start,
        "ratio_to_baseline": reached / speeds[0] if 0 in speeds else None,
        "ratio_to_expert": reached / expert,
        "trials": state.num_searched,
        "out_of_memory": sum(trial.status == "oom" for trial in state.searched()),
        "trials_to_goal": _first(speeds, case.goal * start),
        "trials_to_expert": _first(speeds, expert * (1 - NOISE)),
        "best_trial": best,
        "best": short_name(state.trials[best].candidate),
        "best_candidate": state.trials[best].candidate,
    }


def _first(speeds: Mapping[int, float], wanted: float) -> int | None:
    """Trials until one was at least so fast."""
    return min((number + 1 for number, speed in speeds.items() if speed >= wanted), default=None)


class _Machine:
    """The simulated machine of a variant, without noise."""

    def __init__(self, model: Model, variant: Variant) -> None:
        assert model.topology is not None
        self._model = model
        described = describe_topology(model.topology)
        self._cost = ModelledCost(described, deviation=variant.deviation, seed=variant.seed)

    def start(self, case: Case) -> float:
        """The expert's, in tokens/s/p: the first published step, or the sweep's baseline."""
        if not case.steps:
            return self.speed(self._model.plan.baseline)
        first = case.steps[0]
        return self.speed(self._model.candidate(first.knobs), first.global_batch_size)

    def speed(self, candidate: Candidate, global_batch_size: int | None = None) -> float:
        workload = self._model.workload(global_batch_size)
        step_s = self._cost(TrialSpec(workload=workload, candidate=candidate)).step_time_s
        return workload.tokens_per_step / step_s / candidate.layout.world_size


def summaries(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figures over seeds, by machine."""
    deviations = dict.fromkeys(run["deviation"] for run in runs)
    return [_summary([run for run in runs if run["deviation"] == deviation]) for deviation in deviations]


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "deviation": runs[0]["deviation"],
        "num_seeds": len(runs),
        **{f"{what}_{name}": figure for what in ("goal", "expert") for name, figure in _trials_to(runs, what).items()},
        "ratio_to_baseline_min": min(run["ratio_to_baseline"] or math.nan for run in runs),
        "ratio_to_baseline_median": statistics.median(run["ratio_to_baseline"] or math.nan for run in runs),
        "ratio_min": min(run["ratio"] for run in runs),
        "ratio_median": statistics.median(run["ratio"] for run in runs),
        "ratio_to_expert_min": min(run["ratio_to_expert"] for run in runs),
        "ratio_to_expert_median": statistics.median(run["ratio_to_expert"] for run in runs),
        "out_of_memory_median": statistics.median(run["out_of_memory"] for run in runs),
    }


def _trials_to(runs: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """Seeds that got there, and after how many trials; others count as one trial more than they had."""
    found = [run[f"trials_to_{what}"] for run in runs]
    trials = [run["trials"] + 1 if number is None else number for run, number in zip(runs, found, strict=True)]
    return {
        "num_reached": sum(number is not None for number in found),
        "median_trials": statistics.median(trials),
        "max_trials": max(trials),
    }
