"""How often a named winner is not faster, how often the faster one is found, and what that costs.

    python -m benchmarks.confirmation [--json] [--cases 2000] [--seed 0] [--jobs 2]

A sweep of 50 trials, each measured once; its best three are the finalists. Ways to name a winner, in the same sweeps
and with the same runs:

best_trial  the best measurement, as tuners return that do not measure again (Ray Tune, Optuna)
naive       up to 8 rounds of baseline and finalists, a 95% t test after each, until one is found faster
fixed       8 rounds, then one t test per finalist with Bonferroni's correction
ours        orchestrator/proof/confirmation.py, 3 to 16 rounds
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

from benchmarks.confirmation.methods import METHODS, World, judged
from benchmarks.confirmation.schemes import schemes

_NULLS = (
    *(World(name=f"noise {noise:.0%}", noise=noise) for noise in (0.01, 0.02, 0.03, 0.05, 0.1)),
    *(World(name=f"noise 3%, finalists: {num}", noise=0.03, num_finalists=num) for num in (1, 2, 5)),
    *(World(name=f"noise {noise:.0%}, unequal", noise=noise, unequal=0.5) for noise in (0.01, 0.03, 0.1)),
    *(World(name=f"noise {noise:.0%}, baseline 3 x", noise=noise, baseline_noise=3.0) for noise in (0.01, 0.03)),
    *(World(name=f"noise {noise:.0%}, slow runs", noise=noise, slow_runs=0.1) for noise in (0.02, 0.05)),
    *(World(name=f"noise {noise:.0%}, heavy tails", noise=noise, tails=3.0) for noise in (0.01, 0.03)),
    *(World(name=f"noise {n:.0%}, drift {d:.0%}", noise=n, drift=d) for n in (0.01, 0.03) for d in (0.01, 0.03)),
    World(name="noise 2%, drift 0% ± 1%", noise=0.02, drift_spread=0.01),
    World(name="noise 2%, drift 1% ± 1%", noise=0.02, drift=0.01, drift_spread=0.01),
    World(name="noise 3%, drift 1%, 1 finalist", noise=0.03, drift=0.01, num_finalists=1),
    World(name="noise 2%, drift 1%, baseline always first", noise=0.02, drift=0.01, balanced=False),
)
_GAINS = (
    *(World(name=f"5% faster, noise {n:.0%}", noise=n, gain=0.05) for n in (0.01, 0.02, 0.03, 0.05)),
    *(World(name=f"5% faster, noise {n:.0%}, drift 1%", noise=n, gain=0.05, drift=0.01) for n in (0.01, 0.02, 0.03)),
    World(name="5% faster, noise 3%, drift 1% ± 1%", noise=0.03, gain=0.05, drift=0.01, drift_spread=0.01),
    World(name="5% faster, noise 3%, 1 finalist", noise=0.03, gain=0.05, num_finalists=1),
    World(name="5% faster, noise 3%, drift 1%, 1 finalist", noise=0.03, gain=0.05, drift=0.01, num_finalists=1),
    World(name="5% faster, noise 3%, unequal", noise=0.03, gain=0.05, unequal=0.5),
    World(name="5% faster, noise 2%, heavy tails", noise=0.02, gain=0.05, tails=3.0),
    World(name="3% faster, noise 1%", noise=0.01, gain=0.03),
    World(name="3% faster, noise 2%", noise=0.02, gain=0.03),
    *(World(name=f"20% faster, noise {noise:.0%}", noise=noise, gain=0.2) for noise in (0.02, 0.05, 0.1)),
    World(name="two 20% faster, noise 5%", noise=0.05, gain=0.2, num_faster=2),
    World(name="3 x as fast, noise 5%", noise=0.05, gain=2.0),
)
WORLDS = (*_NULLS, *_GAINS)
"""Worlds in which nothing differs from the baseline, and those with something faster."""


def compare(world: World, seeds: range, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """Figures of all methods in one world."""
    parts = [seeds[start : start + 100] for start in range(0, len(seeds), 100)]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*METHODS, "finals")}
    for part in pool.map(partial(judged, world), parts):
        for name, rows in part.items():
            found[name] += rows
    return {"world": world.name, "cases": len(seeds), **{name: mean(rows) for name, rows in found.items()}}


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
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case; the others count up from it")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; all CPU cores")
    options = parser.parse_args(argv)
    worlds = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for world in WORLDS:
            worlds.append(compare(world, range(options.seed, options.seed + options.cases), pool))
            print(world.name, file=sys.stderr, flush=True)
    found = {"worlds": worlds, "schemes": schemes(num_cases=5 * options.cases)}
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
