"""Fits the cost model's priors to a table of published measurements and writes them with their provenance.

    python -m benchmarks.cost.priors --table measured.csv [--table more.csv ...]

Rows of one source, software, device and number format form a family with coefficients of its own; the prior is the
distribution of these over families, normal in logarithms. That of time is fitted as ``benchmarks/cost/hierarchy.py``
says; that of memory by expectation-maximisation on the families' Laplace approximations. Both are also fitted without
each source in turn, so that the model can be judged on unseen sources. On one core it takes a minute.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost import hierarchy
from benchmarks.cost.families import Family, FamilyKey, add_tables, family_of
from benchmarks.cost.hierarchy import Evidence, distribution, own_evidence
from benchmarks.published.table import PublishedRow, read_table
from cluster.cost.cost_model import calibrate_memory, calibrate_time, log_step_predictor
from cluster.cost.inputs import MEMORY, PRIORS_FILE, TIME, CostInputs, Prior, assumed_prior, from_rows
from orchestrator.search.predictor import LOCAL_STD

MAX_ROWS_PER_FAMILY = 60
MIN_FOR_NOISE = 8
PSEUDO_FAMILIES = {"time": 3.0, "memory": 20.0}
"""How many families the assumed values and spreads count for: more for memory, of which few sources publish peaks."""
NOISE = {"time": 0.15, "memory": 0.08}
"""Standard deviations of rows' errors where families are fitted alone. Step times of a family err alike, so that each
says less than an independent one would: twice the deviation that is left inside a family. Sources that the prior has
not seen are predicted best with it."""

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


def fit_time(families: Families, sources: Sequence[str]) -> tuple[Prior, dict[str, Prior]]:
    """The prior of the time coefficients, and what it is without each source."""
    members = [_family(key[0], rows) for key, rows in families.items()]
    assumption = assumed_prior(TIME, NOISE["time"])
    own = [own_evidence(assumption, calibrate_time(assumption, family.x, family.step_s)) for family in members]
    start = distribution(own, assumption, PSEUDO_FAMILIES["time"])
    start = replace(start, covariance=assumption.covariance)
    alike = [hierarchy.alike_evidence(start, family) for family in members]
    counts = hierarchy.weights(members)

    def fitted(without: str | None) -> Prior:
        used = [i for i, family in enumerate(members) if family.source != without]
        mean = distribution([own[i] for i in used], assumption, PSEUDO_FAMILIES["time"]).mean
        covariance = hierarchy.spread([alike[i] for i in used], counts[used], mean, assumption)
        return Prior(TIME, mean, covariance, assumption.noise)

    everything = fitted(None)
    noise = residual_noise(replace(everything, noise=LOCAL_STD["cuda"]), families)
    return replace(everything, noise=noise), {source: fitted(source) for source in sources}


def _family(source: str, rows: Sequence[PublishedRow]) -> Family:
    """The rows in random order, so that the first stand for all."""
    mixed = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    return Family(source, tuple(mixed), from_rows([row.inputs for row in mixed if row.inputs is not None]))


def fit_memory(families: Families, sources: Sequence[str]) -> tuple[Prior, dict[str, Prior]]:
    """The prior of the memory coefficients, and what it is without each source."""
    parts = {key: _memory_evidence(rows) for key, rows in families.items()}
    without = {source: _memory_prior([part for key, part in parts.items() if key[0] != source]) for source in sources}
    return _memory_prior(list(parts.values())), without


def _memory_evidence(members: Sequence[PublishedRow]) -> Evidence:
    assumption = assumed_prior(MEMORY, NOISE["memory"])
    peaks = np.array([row.peak_bytes or np.nan for row in members], dtype=float)
    outcomes = np.array([np.nan if row.out_of_memory is None else row.out_of_memory for row in members], dtype=float)
    reported = [row.reported for row in members]
    return own_evidence(assumption, calibrate_memory(assumption, _inputs(members), peaks, outcomes, reported))


def _memory_prior(evidence: Sequence[Evidence]) -> Prior:
    return distribution(evidence, assumed_prior(MEMORY, NOISE["memory"]), PSEUDO_FAMILIES["memory"])


def residual_noise(prior: Prior, families: Families) -> float:
    """Typical standard deviation of log(measured / fitted step time) inside a family."""
    deviations = []
    for members in families.values():
        if len(members) < MIN_FOR_NOISE:
            continue
        x, measured_s = _inputs(members), np.array([row.step_time_s for row in members], dtype=float)
        fitted = calibrate_time(prior, x, measured_s).coefficients
        deviations.append(float(np.std(np.log(measured_s) - log_step_predictor(x)(fitted))))
    return float(np.median(deviations)) if deviations else NOISE["time"]


def _inputs(rows: Sequence[PublishedRow]) -> CostInputs:
    return from_rows([row.inputs for row in rows if row.inputs is not None])


def table_of(rows: Sequence[PublishedRow], kind: str) -> dict[str, Any]:
    """The entry of one kind in the priors' file."""
    families = usable(rows, kind)
    sources = sorted({key[0] for key in families})
    everything, without = (fit_time if kind == "time" else fit_memory)(families, sources)
    num_rows = {source: sum(len(m) for key, m in families.items() if key[0] == source) for source in sources}
    return {
        "noise": round(everything.noise, 3),
        "rows_by_source": num_rows,
        "all": _entry(everything),
        "without": {source: _entry(prior) for source, prior in without.items()},
    }


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
