"""How often a named winner is not faster, how often the faster one is found, and what that costs.

    python -m benchmarks.confirmation [--json] [--cases 2000] [--jobs 2]

A sweep of 50 trials, each measured once; its best three are the finalists. Ways to name a winner, in the same sweeps
and with the same runs:

best_trial  the best measurement, as tuners return that do not measure again (Ray Tune, Optuna)
naive       rounds of baseline and finalists, a 95% t test after each, until one is found faster
fixed       all 8 rounds, then one t test per finalist with Bonferroni's correction
ours        orchestrator/proof/confirmation.py, 3 to 8 rounds
patient     the same without giving up finalists that cannot be expected to be shown faster any more

false    share of cases with a winner that is not faster than the baseline
found    share of cases that name a candidate that is faster; `finals`: in which one is among the finalists at all
missed   share of winners that are faster, but whose interval leaves out their true speed-up
claimed  the winner's speed-up as claimed, over the true one: mean
split    share of cases in which a finalist as fast as the winner is called slower than it
rounds, runs  mean per case

and, below, what led to the statistics of `ours`: see benchmarks/confirmation/schemes.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from benchmarks.confirmation.methods import METHODS, Case, Claim, World, draw
from benchmarks.confirmation.schemes import schemes

WORLDS = (
    *(World(name=f"no difference, noise {noise:.0%}", noise=noise) for noise in (0.01, 0.02, 0.05, 0.1)),
    World(name="no difference, noise 3%, unequal", noise=0.03, unequal=0.5),
    World(name="no difference, noise 3%, baseline 3 x", noise=0.03, baseline_noise=3.0),
    World(name="no difference, noise 2%, slow runs", noise=0.02, slow_runs=0.1),
    World(name="no difference, noise 2%, each run 1% faster", noise=0.02, drift=0.01),
    World(name="the same, baseline always first", noise=0.02, drift=0.01, balanced=False),
    *(World(name=f"one 5% faster, noise {noise:.0%}", noise=noise, gain=0.05) for noise in (0.01, 0.02, 0.05)),
    *(World(name=f"one 20% faster, noise {noise:.0%}", noise=noise, gain=0.2) for noise in (0.02, 0.05, 0.1)),
    World(name="two 20% faster, noise 5%", noise=0.05, gain=0.2, num_faster=2),
    World(name="one 3 x as fast, noise 5%", noise=0.05, gain=2.0),
)


def judged(world: World, seeds: range) -> dict[str, list[dict[str, float]]]:
    """Figures of one world, one row per case, by method."""
    cases = [draw(world, seed) for seed in seeds]
    found = {name: [row(case, method(case)) for case in cases] for name, method in METHODS.items()}
    return found | {"finals": [{"share": float(case.is_faster_among_finalists)} for case in cases]}


def row(case: Case, claim: Claim) -> dict[str, float]:
    """NaN where a figure says nothing about this case."""
    found = {"false": 0.0, "found": 0.0, "missed": np.nan, "claimed": np.nan, "split": np.nan}
    if claim.slower is not None:
        found["split"] = float(any(case.truth[number] >= case.truth[claim.winner] for number in claim.slower))
    if claim.winner is not None and claim.ratio is not None:
        truth = case.truth[claim.winner]
        found["false"], found["claimed"] = float(truth <= 1.0), claim.ratio.value / truth
        found["found"] = float(truth > 1.0)
        if truth > 1 and claim.ratio.ci95:
            found["missed"] = float(not claim.ratio.ci95.low <= truth <= claim.ratio.ci95.high)
    return found | {"rounds": claim.num_rounds, "runs": claim.num_runs}


def compare(world: World, num_cases: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Figures of all methods in one world."""
    parts = [range(start, min(start + 100, num_cases)) for start in range(0, num_cases, 100)]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*METHODS, "finals")}
    for part in pool.map(partial(judged, world), parts):
        for name, rows in part.items():
            found[name] += rows
    return {"world": world.name, "cases": num_cases, **{name: mean(rows) for name, rows in found.items()}}


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    figures = {name: [row[name] for row in rows if not np.isnan(row[name])] for name in rows[0]}
    return {name: round(float(np.mean(values)), 4) if values else None for name, values in figures.items()}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    for world in found["worlds"]:
        yield f"{world['world']}: {world['cases']} cases, finals {world['finals']['share']:.1%}"
        yield "  " + " " * 10 + "".join(f"{name:>10}" for name in world["ours"])
        for method in METHODS:
            yield f"  {method:10}" + "".join(shown(name, value) for name, value in world[method].items())
    names = list(found["schemes"][0])
    yield "schemes: " + ", ".join(names[2:])
    for scheme in found["schemes"]:
        yield f"  {scheme['noise']:8}{scheme['boundary']:12}" + "".join(f"{scheme[name]:10.3f}" for name in names[2:])


def shown(name: str, value: float | None) -> str:
    if value is None:
        return f"{'-':>10}"
    return f"{value:10.1%}" if name in ("false", "found", "missed", "split") else f"{value:10.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; all CPU cores")
    options = parser.parse_args(argv)
    worlds = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for world in WORLDS:
            worlds.append(compare(world, options.cases, pool))
            print(world.name, file=sys.stderr, flush=True)
    found = {"worlds": worlds, "schemes": schemes(num_cases=5 * options.cases)}
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
