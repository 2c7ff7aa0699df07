"""Fits the cost model's priors to a table of published measurements and writes them with their provenance.

    python -m benchmarks.cost.priors --table measured.csv [--table more.csv ...]

Rows of one source, software, device and number format form a family with coefficients of its own; the prior is the
distribution of these over families (normal in logarithms, fitted by expectation-maximisation on the families' Laplace
approximations). It is also fitted without each source in turn, so that the model can be judged on unseen sources.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost.families import FamilyKey, add_tables, family_of
from cluster.cost.calibrate import Calibrated, calibrate_memory, calibrate_time, log_peak_predictor, log_step_predictor
from cluster.cost.coefficients import MEMORY, PRIORS_FILE, TIME, Prior, assumed_prior
from cluster.cost.inputs import Array, from_rows
from cluster.cost.published.table import PublishedRow, read_table

NUM_ROUNDS = 100
NUM_PROCESSES = min(2, os.cpu_count() or 1)
MAX_ROWS_PER_FAMILY = 150
PSEUDO_FAMILIES = {"time": 3.0, "memory": 20.0}
"""How many families the assumed values and spreads count for: more for memory, of which few sources publish peaks."""
NOISE = {"time": 0.05, "memory": 0.08}

GROUPS = {"time": TIME, "memory": MEMORY}

Families = Mapping[FamilyKey, Sequence[PublishedRow]]


def usable(rows: Sequence[PublishedRow], kind: str) -> Families:
    """Rows to fit to, by family: modelled, not doubtful, with a figure of the wanted kind."""
    families: dict[FamilyKey, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        figure = row.step_time_s if kind == "time" else (row.peak_bytes or row.out_of_memory)
        if row.inputs is not None and row["quality"] != "C" and figure:
            families[family_of(row)].append(row)
    rng = np.random.default_rng(0)
    return {
        key: [members[i] for i in sorted(rng.permutation(len(members))[:MAX_ROWS_PER_FAMILY])]
        for key, members in families.items()
    }


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of one family: its log likelihood near the best fit, -theta' H theta / 2 + theta' b."""

    information: Array
    vector: Array


def evidence_of(families: Families, kind: str) -> dict[FamilyKey, Evidence]:
    """The evidence of each family."""
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        found = pool.map(functools.partial(_evidence, kind=kind), families.values())
        return dict(zip(families, found, strict=True))


def _evidence(members: Sequence[PublishedRow], kind: str) -> Evidence:
    """Fit a family alone, with only the assumed values as a prior, and take that prior out again."""
    assumption = assumed_prior(GROUPS[kind], NOISE[kind])
    precision = np.linalg.inv(assumption.covariance)
    fitted = fit_family(assumption, members, kind)
    theta = fitted.coefficients.log_values
    information = np.linalg.inv(fitted.covariance) - precision
    return Evidence(information, information @ theta + precision @ (theta - assumption.mean))


def fit_prior(evidence: Sequence[Evidence], kind: str) -> Prior:
    """Distribution of the coefficients over families; the assumed values count as some more families."""
    assumption = assumed_prior(GROUPS[kind], NOISE[kind])
    mean, covariance = assumption.mean, assumption.covariance
    pseudo = PSEUDO_FAMILIES[kind]
    total = len(evidence) + pseudo
    information, vectors = (np.array([getattr(part, name) for part in evidence]) for name in ("information", "vector"))
    for _ in range(NUM_ROUNDS):
        precision = np.linalg.inv(covariance)
        covariances = np.linalg.inv(information + precision)
        values = np.einsum("fij,fj->fi", covariances, vectors + precision @ mean)
        mean = (values.sum(axis=0) + pseudo * assumption.mean) / total
        moved = values - mean
        covariance = (moved.T @ moved + covariances.sum(axis=0) + pseudo * assumption.covariance) / total
    return Prior(GROUPS[kind], mean, covariance, assumption.noise)


def fit_family(prior: Prior, members: Sequence[PublishedRow], kind: str) -> Calibrated:
    """Coefficients of one family, with what is known of the others as prior."""
    x = from_rows([row.inputs for row in members if row.inputs is not None])
    if kind == "time":
        return calibrate_time(prior, x, np.array([row.step_time_s for row in members], dtype=float))
    peaks = np.array([row.peak_bytes or np.nan for row in members], dtype=float)
    outcomes = np.array([np.nan if row.out_of_memory is None else row.out_of_memory for row in members], dtype=float)
    return calibrate_memory(prior, x, peaks, outcomes, [row.reported for row in members])


def residual_noise(prior: Prior, families: Families, kind: str) -> float:
    """Typical standard deviation of log(measured / fitted) inside a family."""
    deviations = []
    for members in families.values():
        known = [row for row in members if (row.step_time_s if kind == "time" else row.peak_bytes)]
        if len(known) < 8:
            continue
        fitted = fit_family(prior, members, kind).coefficients
        x = from_rows([row.inputs for row in known if row.inputs is not None])
        figures = [row.step_time_s if kind == "time" else row.peak_bytes for row in known]
        predict = log_step_predictor(x) if kind == "time" else log_peak_predictor(x, [row.reported for row in known])
        deviations.append(float(np.std(np.log(np.array(figures, dtype=float)) - predict(fitted))))
    return float(np.median(deviations)) if deviations else NOISE[kind]


def table_of(rows: Sequence[PublishedRow], kind: str) -> dict[str, Any]:
    """The entry of one kind in the priors' file."""
    families = usable(rows, kind)
    evidence = evidence_of(families, kind)
    sources = sorted({key[0] for key in families})
    everything = fit_prior(list(evidence.values()), kind)
    without = {
        source: _entry(fit_prior([part for key, part in evidence.items() if key[0] != source], kind))
        for source in sources
    }
    print(f"{kind}: noise inside families {residual_noise(everything, families, kind):.3f}")
    num_rows = {source: sum(len(m) for key, m in families.items() if key[0] == source) for source in sources}
    return {"noise": NOISE[kind], "rows_by_source": num_rows, "all": _entry(everything), "without": without}


def _entry(prior: Prior) -> dict[str, Any]:
    spreads = np.sqrt(np.diag(prior.covariance))
    correlations = prior.covariance / np.outer(spreads, spreads)
    pairs = zip(prior.group, np.exp(prior.mean), spreads, strict=True)
    return {
        "coefficients": {c.name: [float(f"{value:.4g}"), float(f"{spread:.3g}")] for c, value, spread in pairs},
        "correlations": [[round(float(r), 3) for r in row[:i]] for i, row in enumerate(correlations)],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Fit and write the priors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tables(parser)
    parser.add_argument("--output", type=Path, default=PRIORS_FILE)
    parser.add_argument("--only", choices=tuple(GROUPS), help="fit this half; the file keeps its other half")
    options = parser.parse_args(argv)
    rows = [row for path in options.tables for row in read_table(path)]
    fitted = {kind: table_of(rows, kind) for kind in GROUPS if options.only in (None, kind)}
    # Read after fitting, which takes minutes.
    kept = json.loads(options.output.read_text(encoding="utf-8")) if options.only else {}
    table = {
        "fitted_by": "python -m benchmarks.cost.priors",
        "fitted_to": "published training measurements; rows_by_source counts those of each source",
        "meaning": "coefficient: [value, standard deviation of its logarithm over families]",
        **{kind: fitted.get(kind) or kept[kind] for kind in GROUPS},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
