"""How wrong the cost model is before a search has measured much, and whether the search knows it.

    python -m benchmarks.search.calibration --table measured.csv

For each family of measurements (source, software, device, number format), with a prior that has not seen its source:
one and three measurements, drawn at random, teach the search's posterior, which then predicts the others. Reported over
families, each counting the same, for a grid of what the posterior assumes of errors
(``orchestrator/search/predictor.py``): the mean log density of a measurement (the higher the better; what
is too sure and what is too vague both lose), the error of the predicted log time (RMS), and the median of (error /
expected error)^2, 1 where the posterior knows how wrong it is.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.table import PublishedRow, read_table
from cluster.cost.inputs import Array, CostInputs, Prior, from_rows, load_prior
from orchestrator.search.acquisition import ErrorModel, condition
from orchestrator.search.predictor import COMMON_STD, LOCAL_STD, NOISE_STD, linearised, physical_places

NUM_SEEN = (1, 3)
MIN_ROWS, MAX_ROWS = 5, 45
"""Distinct configurations that a family must have."""
SHARES = (0.35, 0.5, 0.7, 1.0)
LOCAL_STDS = (0.08, 0.11, 0.15)
COMMON_STDS = (0.1, 0.2, 0.4)
OUTLIER = -4.0
"""Log densities count no less: one measurement in error must not decide."""

Assumed = tuple[float, float, float]
"""Share of the prior's spread, local and common standard deviation."""
Figures = tuple[float, float, float]
"""Mean log density, RMS error, mean square of error / expected error."""


@dataclass(frozen=True, slots=True)
class Family:
    """Distinct configurations of one source, software, device and number format, in random order."""

    source: str
    inputs: CostInputs
    times_s: Array
    """Device-seconds per step."""


def families(table: Path) -> list[Family]:
    members: dict[tuple[str, ...], dict[tuple[str, ...], PublishedRow]] = defaultdict(dict)
    for row in read_table(table):
        if row.inputs is not None and row.step_time_s and row["quality"] != "C":
            family = tuple(row[name] for name in ("source", "framework", "gpu", "precision"))
            configuration = tuple(f"{name}={value}" for name, value in row.inputs.items())
            members[family].setdefault(configuration, row)
    return [_family(list(rows.values())) for rows in members.values() if len(rows) >= MIN_ROWS]


def _family(rows: Sequence[PublishedRow]) -> Family:
    chosen = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[:MAX_ROWS]]
    x = from_rows([row.inputs for row in chosen if row.inputs is not None])
    return Family(chosen[0]["source"], x, np.array([row.step_time_s for row in chosen], dtype=float) * x.world_size)


def judge(family: Family, share: float, num_seen: int) -> Iterator[tuple[Assumed, Figures]]:
    """Predictions of what is left after ``num_seen`` measurements, for every local and common deviation."""
    learned = load_prior("time", family.source)
    seen, unseen = np.arange(num_seen), np.arange(num_seen, len(family.times_s))
    prior = Prior(learned.group, learned.mean, share**2 * learned.covariance, LOCAL_STD["cuda"])
    log_time, features, _ = linearised(prior, family.inputs, dict(enumerate(family.times_s[:num_seen].tolist())))
    errors = np.log(family.times_s) - log_time
    for local_std, common_std in product(LOCAL_STDS, COMMON_STDS):
        model = ErrorModel(
            features=features,
            feature_std=np.ones(features.shape[1]),
            places=physical_places(family.inputs),
            local_std=local_std,
            common_std=common_std,
            noise_std=NOISE_STD,
        )
        yield (share, local_std, common_std), _figures(model, seen, unseen, errors)


def _figures(model: ErrorModel, seen: NDArray[np.intp], unseen: NDArray[np.intp], errors: Array) -> Figures:
    residual = condition(model, seen, errors[seen], 1.0)
    misses = errors[unseen] - residual.mean(unseen)
    variance = residual.std(unseen) ** 2 + model.noise_std**2
    density = -0.5 * (misses**2 / variance + np.log(2 * np.pi * variance))
    return max(OUTLIER, float(density.mean())), float(np.sqrt((misses**2).mean())), float((misses**2 / variance).mean())


def compare(found: Sequence[Family], num_seen: int) -> Mapping[Assumed, Figures]:
    """Over families: mean, mean and median."""
    by_assumed: dict[Assumed, list[Figures]] = defaultdict(list)
    for family, share in product(found, SHARES):
        for assumed, figures in judge(family, share, num_seen):
            by_assumed[assumed].append(figures)
    return {
        assumed: (statistics.fmean(density), statistics.fmean(rms), statistics.median(squares))
        for assumed, rows in by_assumed.items()
        for density, rms, squares in [tuple(zip(*rows, strict=True))]
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    options = parser.parse_args(argv)
    found = families(options.table)
    used = 1.0, LOCAL_STD["cuda"], COMMON_STD["cuda"]
    for num_seen in NUM_SEEN:
        print(f"after {num_seen} measured, {len(found)} families; * is what the search assumes")
        print(f"  {'share':>6} {'local':>6} {'common':>6} {'log density':>12} {'error':>8} {'(error/expected)^2':>19}")
        by_density = sorted(compare(found, num_seen).items(), key=lambda item: -item[1][0])
        for assumed, (density, rms, squares) in by_density:
            share, local, common = assumed
            mark = "*" if assumed == used else " "
            print(f"{mark} {share:6g} {local:6g} {common:6g} {density:12.3f} {rms:8.1%} {squares:19.2f}")


if __name__ == "__main__":
    main()
