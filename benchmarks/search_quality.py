"""Trials needed to find a published table's best configuration, by sampler.

    python -m benchmarks.search_quality --table measured.csv [--json] [--seeds 10]

Every problem of the table with at least 8 distinct configurations is searched by every sampler with the same seeds,
from the same baseline, which counts as the first trial. Reported: trials until within 2 % of the best (median over
seeds, then over problems), and on what share of the problems at least 97 % of the best was reached within 15 % of the
trials that exhaustive search would take (rounded up, at least 2: the baseline and one choice).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.search_priors import CostModel, Physical
from benchmarks.search_samplers import DETERMINISTIC, SAMPLERS, Trials
from benchmarks.search_tables import Problem, load_problems
from cluster.cost.coefficients import MEMORY, TIME, assumed_prior, load_prior

MAX_TRIALS = 3
"""Tables' sizes after which a search that may repeat itself is given up."""
TOLERANCE = 0.02
GOOD_SHARE = 0.97
TRIALS_SHARE = 0.15


def measure(problem: Problem, trials: Trials) -> tuple[int, bool]:
    """Trials until within 2 %, one more than allowed when never, and whether the share of the best came in time."""
    limit = MAX_TRIALS * len(problem)
    good_until = max(2, math.ceil(TRIALS_SHARE * len(problem)))
    is_good = False
    for number, row in enumerate(islice(trials, limit), start=1):
        time_s = None if row is None else problem.configurations[row].time_s
        if time_s is None:
            continue
        is_good = is_good or (number <= good_until and time_s <= problem.best_s / GOOD_SHARE)
        if time_s <= problem.best_s * (1 + TOLERANCE):
            return number, is_good
    return limit + 1, is_good


def compare(problem: Problem, model: CostModel, num_seeds: int, samplers: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": problem.name, "source": problem.source, "size": len(problem)}
    for name in samplers:
        results = [
            measure(problem, SAMPLERS[name](problem, model, seed))
            for seed in range(1 if name in DETERMINISTIC else num_seeds)
        ]
        found[name] = {
            "trials_to_2pct": statistics.median(trials for trials, _ in results),
            "share_97pct_within_15pct_of_trials": statistics.mean(good for _, good in results),
        }
    return found


def summarize(problems: Sequence[Mapping[str, Any]], samplers: Sequence[str]) -> dict[str, Any]:
    return {
        name: {
            "median_trials_to_2pct": statistics.median(p[name]["trials_to_2pct"] for p in problems),
            "mean_trials_to_2pct": round(statistics.mean(p[name]["trials_to_2pct"] for p in problems), 2),
            "share_97pct_within_15pct_of_trials": round(
                statistics.mean(p[name]["share_97pct_within_15pct_of_trials"] for p in problems), 3
            ),
        }
        for name in samplers
    }


def cost_model(problem: Problem, problems: Sequence[Problem], prior: str, *, history: bool) -> CostModel:
    """``history``: the source's other problems count as earlier sweeps on its cluster."""
    past = [p for p in problems if history and p.source == problem.source and p is not problem]
    if prior == "assumed":
        return Physical(assumed_prior(TIME, 0.1), assumed_prior(MEMORY, 0.1), past)
    without = problem.source if prior == "unseen" else None
    return Physical(load_prior("time", without), load_prior("memory", without), past)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--prior", choices=["unseen", "all", "assumed"], default="unseen")
    parser.add_argument("--history", action="store_true")
    parser.add_argument("--source", help="only problems of this source")
    options = parser.parse_args()
    problems = [p for p in load_problems(options.table) if options.source in (None, p.source)]
    results = []
    for number, problem in enumerate(problems, start=1):
        print(f"{number}/{len(problems)} {problem.name}", file=sys.stderr)
        model = cost_model(problem, problems, options.prior, history=options.history)
        results.append(compare(problem, model, options.seeds, options.samplers))
    summary = summarize(results, options.samplers)
    print(json.dumps({"summary": summary, "problems": results}, indent=1) if options.json else summary)


if __name__ == "__main__":
    main()
