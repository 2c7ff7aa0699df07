"""Two published tuning cases: the cost model against the expert's steps, and what simulated sweeps reach.

    python -m benchmarks.acceptance [--seeds 5] [--case llama2-13b-ascend] [--table measured.csv] [--json]

Runs configs/sweeps/llama2-13b-ascend.yaml and llama-1024-ascend.yaml as `submit` does, in virtual time, once per seed,
on the machine that the cost model assumes and on machines that deviate from it by 0.3 standard deviations of its prior,
in a direction of their own per seed. Reports

steps     each published step: tokens/s/p published and predicted, both relative to the start, and how far they differ
measures  each published measure: speed after it and those before it relative to the start (cumulative), its own factor
          therein, and how much the best configuration found loses without it (alone); refused: the runner would not
          run it on top of those before, with the reason
runs      per sweep: best measured speed relative to the expert's start, to the sweep's baseline and to the expert's
          last configuration on the same machine; trials until the goal and until the expert's speed (within 1%)
summary   the same over seeds; sweeps that did not get there count as one trial more than they had
table     with --table: rows of every problem of published measurements in their order, speeds relative to the problem's
          first row, predicted by a cost model that has not seen the source
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.acceptance.cases import CASES, Case
from benchmarks.acceptance.model import Model, measure_shares, predicted_steps
from benchmarks.acceptance.sweeps import Variant, run_sweep, summaries
from benchmarks.acceptance.table import table_steps
from orchestrator.config.sweep import load_sweep

DEVIATIONS = (0.0, 0.3)
"""A whole standard deviation makes machines ten times as slow: the prior spans all of the published clusters."""


ONE_MODEL = (
    "Simulator and searcher are one model: this shows that the machinery finds the model's best in few trials, and says"
    " nothing of these cards."
)


def run_case(case: Case, num_seeds: int) -> dict[str, Any]:
    """Model and sweeps of one case."""
    model = Model(load_sweep(case.file))
    max_trials = model.spec.budget.max_trials
    variants = [
        Variant(seed=seed, deviation=deviation) for deviation, seed in itertools.product(DEVIATIONS, range(num_seeds))
    ]
    runs = [run_sweep(case, model, variant) for variant in variants]
    candidates = [run.pop("best_candidate") for run in runs]
    others = {start.name: model.predict_step(start).figures.tokens_per_s_per_device for start in case.other_starts}
    return {
        "case": case.name,
        "goal": case.goal,
        "num_candidates": len(model.plan.candidates),
        "num_balanced": len(model.plan.balances),
        "max_trials": max_trials,
        "other_starts": {name: {"predicted": s, "ratio": runs[0]["reached"] / s} for name, s in others.items()},
        "steps": predicted_steps(model, case.steps) if case.steps else [],
        "measures": measure_shares(model, candidates[0]) if case.measures else [],
        "summary": summaries(runs),
        "runs": runs,
    }


def print_case(result: Mapping[str, Any]) -> None:
    """The same for people."""
    first = result["runs"][0]
    print(
        f"{result['case']}: goal {result['goal']} x the start; {result['num_candidates']} candidates, of them ", end=""
    )
    print(f"{result['num_balanced']} balanced; at most {result['max_trials']} trials")
    for row in result["steps"]:
        print(
            f"  {row['step']:44s} published {row['published']:5.0f} {row['published_ratio']:.3f}"
            f"  predicted {row['predicted']:5.0f} {row['predicted_ratio']:.3f}  {row['deviation']:+.1%}"
        )
    for name, other in result["other_starts"].items():
        print(f"  another start, {name}: {other['predicted']:.0f} predicted, {other['ratio']:.3f} x reached")
    for row in result["measures"]:
        used = f"alone in the best {row['alone']:.3f}" if row["in_best"] else "not in the best"
        print(f"  {row['measure']:20s} factor {row['factor']:.3f}  cumulative {row['cumulative']:.3f}  {used}")
        if row["refused"]:
            print(f"    refused by the runner on top of those before: {row['refused']}")
    print(f"  best of the first sweep: {first['best']}")
    print(f"    {first['ratio_to_baseline']:.3f} x the sweep's own baseline, {first['ratio']:.3f} x the expert's start")
    for row in result["summary"]:
        print_summary(row, result["goal"])


def print_summary(row: Mapping[str, Any], goal: float) -> None:
    """One machine, over seeds."""
    machine = "the assumed machine" if not row["deviation"] else f"machines {row['deviation']:g} std off"
    own = f"{row['ratio_to_baseline_median']:.3f} (least {row['ratio_to_baseline_min']:.3f}) x the sweep's own baseline"
    print(f"  {machine}: {own},")
    print(f"    {row['ratio_median']:.3f} (least {row['ratio_min']:.3f}) x the expert's start, ", end="")
    print(f"{row['ratio_to_expert_median']:.3f} (least {row['ratio_to_expert_min']:.3f}) x the expert's last step")
    for what, words in (("goal", f"{goal} x"), ("expert", "the expert's speed")):
        print(
            f"    {words}: {row[f'{what}_num_reached']} of {row['num_seeds']} seeds, trials: median "
            f"{row[f'{what}_median_trials']:g}, most {row[f'{what}_max_trials']}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, metavar="NUM")
    parser.add_argument("--case", choices=[case.name for case in CASES])
    parser.add_argument("--table", type=Path, metavar="CSV")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    cases = [run_case(case, options.seeds) for case in CASES if options.case in (None, case.name)]
    table = table_steps(options.table) if options.table else None
    if options.json:
        json.dump({"cases": cases, "table": table}, sys.stdout, indent=1)
        print()
        return
    print(ONE_MODEL)
    for result in cases:
        print_case(result)
    if table:
        print(
            f"{options.table.name}: {table['num_rows']} steps of {table['num_problems']} problems; ratios within 10%: "
        )
        print(
            f"  {table['share_within_10pct']:.0%}; pairs of steps in the published order: {table['share_in_order']:.0%}"
        )


if __name__ == "__main__":
    main()
