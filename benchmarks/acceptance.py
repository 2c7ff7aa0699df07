"""Two published tuning cases: the cost model against the expert's steps, and what a simulated sweep reaches.

    python -m benchmarks.acceptance [--json] [--case llama2-13b-ascend]

Runs configs/sweeps/llama2-13b-ascend.yaml and llama-1024-ascend.yaml through `submit`, in virtual time, and reports

steps     each published step: tokens/s/p published and predicted, both relative to the start, and how far they differ
measures  each published measure: speed after it and those before it relative to the start (cumulative), its own factor
          therein, and how much the sweep's best loses without it (alone); measures the runner refuses say why
reached   the best measured tokens/s/p of the sweep relative to the expert's start and to its own baseline, trials run,
          and the trial at which the goal was first met
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.acceptance_measures import MEASURES, is_used, without
from cluster.connect import describe
from cluster.topology import Topology
from orchestrator import service
from orchestrator.forecast import Prediction, make_predictor, prediction
from orchestrator.hardware import cluster_options
from orchestrator.home import Home
from orchestrator.plan import Plan, make_plan
from orchestrator.rules import check
from orchestrator.space import short_name
from orchestrator.sweep import SweepSpec, load_sweep
from orchestrator.why import find
from trials.spec import Candidate

SWEEPS = Path(__file__).parents[1] / "configs" / "sweeps"
SILU_MUL = {r"feed_forward\.(silu|mul)": "all"}
NEARLY_ALL = r"feed_forward|add|.*norm|attention\.(wo|scaled_dot_product_attention)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A published configuration, as knobs that differ from the sweep's baseline."""

    name: str
    published: float
    """tokens/s/p"""
    knobs: Mapping[str, Any]
    global_batch_size: int | None = None
    """None: the sweep's."""


TWO_NODES = {"pp": 2, "zero_stage": 1}
LLAMA2_13B = (
    Step(name="one node, full recompute", published=1860, knobs={"zero_stage": 1}, global_batch_size=8),
    Step(name="two nodes, PP2, full recompute", published=2136, knobs=TWO_NODES),
    Step(
        name="selective recompute",
        published=2189,
        knobs={**TWO_NODES, "recompute": {"select": {NEARLY_ALL: "all"}}},
    ),
    Step(
        name="uneven recompute, [20, 8] layers",
        published=2210,
        knobs={
            **TWO_NODES,
            "recompute": {"select": {NEARLY_ALL: [20, 0], r"feed_forward\.(silu|mul)": [20, 8]}},
        },
    ),
    Step(
        name="13 / 5 layers in full, SiLU x Mul elsewhere",
        published=2353,
        knobs={**TWO_NODES, "recompute": {"full": [13, 5], "select": SILU_MUL}},
    ),
    Step(
        name="4 / 0 layers in full, SiLU x Mul elsewhere",
        published=2562,
        knobs={**TWO_NODES, "recompute": {"full": [4, 0], "select": SILU_MUL}},
    ),
)


TWO_SEQUENCES = Step(
    name="one node, micro-batches of two sequences",
    published=1860,
    knobs={"zero_stage": 1, "micro_batch_size": 2},
    global_batch_size=16,
)
"""The first step under the other plausible assumption, which the published text leaves open."""


@dataclass(frozen=True, slots=True)
class Case:
    """A shipped sweep with what was published of it."""

    name: str
    goal: float
    """Speed over the expert's start."""
    steps: tuple[Step, ...] = ()
    other_start: Step | None = None
    measures: bool = False


CASES = (
    Case("llama2-13b-ascend", 1.37, steps=LLAMA2_13B, other_start=TWO_SEQUENCES),
    Case("llama-1024-ascend", 1.7, measures=True),
)


@dataclass(slots=True)
class Model:
    """The cost model on one sweep's workload and cluster."""

    spec: SweepSpec
    topology: Topology | None = field(init=False)
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        self.topology = describe(**cluster_options(self.spec))
        self.plan = make_plan(self.spec, self.topology)

    def candidate(self, knobs: Mapping[str, Any]) -> Candidate:
        """The baseline with ``knobs`` changed."""
        return find(yaml.safe_dump(dict(knobs), default_flow_style=True, width=10**6), self.plan, self.spec)

    def predict(self, candidate: Candidate, global_batch_size: int | None = None) -> Prediction:
        workload = self.spec.to_workload()
        if global_batch_size is not None:
            workload = replace(workload, global_batch_size=global_batch_size)
        return prediction(make_predictor(workload, (candidate,), self.topology), 0, workload)

    def predict_step(self, step: Step) -> Prediction:
        return self.predict(self.candidate(step.knobs), step.global_batch_size)

    def speed(self, candidate: Candidate) -> float:
        """tokens/s/p"""
        return self.predict(candidate).tokens_per_s_per_device

    def refusal(self, candidate: Candidate) -> str:
        """Why the runner would not run it; empty where it would."""
        return "; ".join(v.reason for v in check(candidate, self.spec.to_workload(), self.topology))


def predicted_steps(model: Model, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Published and predicted speeds, also relative to the first step's."""
    found = [model.predict_step(step) for step in steps]
    start = found[0].tokens_per_s_per_device
    rows = []
    for step, predicted in zip(steps, found, strict=True):
        ratio, published_ratio = predicted.tokens_per_s_per_device / start, step.published / steps[0].published
        rows.append(
            {
                "step": step.name,
                "published": step.published,
                "predicted": predicted.tokens_per_s_per_device,
                "published_ratio": published_ratio,
                "predicted_ratio": ratio,
                "deviation": ratio / published_ratio - 1,
                "peak_bytes": predicted.peak_bytes,
            }
        )
    return rows


def measure_shares(model: Model, best: Candidate) -> list[dict[str, Any]]:
    """Of each published measure: added in the published order, and taken away alone from ``best``."""
    start, best_speed = model.speed(model.plan.baseline), model.speed(best)
    knobs: dict[str, Any] = {}
    before, rows = start, []
    for name, changes in MEASURES.items():
        knobs |= changes
        candidate = model.candidate(knobs)
        speed = model.speed(candidate)
        reduced = without(name, best, model.plan.baseline)
        rows.append(
            {
                "measure": name,
                "cumulative": speed / start,
                "factor": speed / before,
                "peak_bytes": model.predict(candidate).peak_bytes,
                "refused": model.refusal(candidate),
                "in_best": is_used(name, best, model.plan.baseline),
                "alone": best_speed / model.speed(reduced),
                "peak_bytes_without": model.predict(reduced).peak_bytes,
            }
        )
        before = speed
    return rows


class Silent:
    """Watches nothing."""

    def on_state(self, state: Any) -> None:
        pass

    def on_progress(self, trial: int, progress: Any) -> None:
        pass


def run_case(case: Case) -> dict[str, Any]:
    """Model and sweep of one case."""
    file = SWEEPS / f"{case.name}.yaml"
    model = Model(load_sweep(file))
    with tempfile.TemporaryDirectory() as folder:
        state = service.submit(file, Home(Path(folder) / "home"), Silent()).state
    workload = model.spec.to_workload()
    speeds = {
        trial.number: workload.tokens_per_step / trial.measurement.step_time_s / trial.measurement.world_size
        for trial in state.trials
        if trial.measurement is not None
    }
    steps = predicted_steps(model, case.steps) if case.steps else []
    start = steps[0]["predicted"] if steps else speeds[0]
    other = model.predict_step(case.other_start).tokens_per_s_per_device if case.other_start else None
    best = max(speeds, key=lambda number: speeds[number])
    met = [number + 1 for number, speed in speeds.items() if speed >= case.goal * start]
    candidate = state.trials[best].candidate
    return {
        "case": case.name,
        "goal": case.goal,
        "start": start,
        "start_with_two_sequences": other,
        "reached": speeds[best],
        "ratio": speeds[best] / start,
        "ratio_to_baseline": speeds[best] / speeds[0],
        "trials": len(state.trials),
        "trials_to_goal": min(met, default=None),
        "best": short_name(candidate),
        "steps": steps,
        "measures": measure_shares(model, candidate) if case.measures else [],
    }


def print_case(result: Mapping[str, Any]) -> None:
    """The same for people."""
    print(f"{result['case']}: {result['ratio']:.3f} x the start, goal {result['goal']}", end="")
    print(f" ({result['ratio_to_baseline']:.3f} x the sweep's baseline)")
    print(f"  {result['trials']} trials, goal met at trial {result['trials_to_goal']}; best: {result['best']}")
    if other := result["start_with_two_sequences"]:
        print(
            f"  {result['reached'] / other:.3f} x a start with micro-batches of two sequences ({other:.0f} predicted)"
        )
    for row in result["steps"]:
        print(
            f"  {row['step']:46s} published {row['published']:5.0f} {row['published_ratio']:.3f}"
            f"  predicted {row['predicted']:5.0f} {row['predicted_ratio']:.3f}  {row['deviation']:+.1%}"
        )
    for row in result["measures"]:
        used = f"alone {row['alone']:.3f}" if row["in_best"] else "not in the best"
        print(f"  {row['measure']:20s} factor {row['factor']:.3f} cumulative {row['cumulative']:.3f}  {used}", end="")
        print(f"  (refused by the runner: {row['refused']})" if row["refused"] else "")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", choices=[case.name for case in CASES])
    options = parser.parse_args(argv)
    results = [run_case(case) for case in CASES if options.case in (None, case.name)]
    if options.json:
        json.dump({"cases": results}, sys.stdout, indent=1)
        print()
    else:
        for result in results:
            print_case(result)


if __name__ == "__main__":
    main()
