"""How well the cost model predicts published measurements of sources it has not seen.

    python -m benchmarks.cost.accuracy --table measured.csv [--json]

For every source the prior is the one fitted without that source. Then 0, 3, 5 or 10 random rows of a family (same
source, software, device and number format) calibrate the model for the family's other rows: step times those of rows
with a step time; memory those of rows with a peak or that ran out of memory first, then others that are known to have
run. Where a family is too small to keep two rows for testing, fewer rows calibrate it, down to none.

Figures pool the tested rows of all families and of several draws; each row and draw counts once.

mape           mean of abs(predicted - measured) / measured step time
spearman       mean over problems of the rank correlation of predicted and measured step times
memory_error   mean of abs(predicted - measured) / measured peak, of the rank and by the counter that the source means
oom_precision  of the rows predicted to run out of memory, the share that did
oom_recall     of the rows that ran out of memory, the share predicted to
false_fit      of the rows that ran out of memory, the share predicted to fit: 1 - oom_recall
false_alarm    of the rows that ran, the share predicted to run out of memory

Hardly any source publishes what ran out of memory, so oom_precision mostly says how rare such rows are; false_alarm
says how many good candidates would be lost. Every source is listed; what of it cannot be modelled is counted and the
reasons are given. Columns that the table lacks are read as blank, which "notes" says. Rows of quality C count only in
the figures of a source that has no others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cost.priors import family_of
from cluster.cost.calibrate import (
    OUT_OF_MEMORY_THRESHOLD,
    calibrate_memory,
    calibrate_time,
    log_peak_predictor,
    log_step_predictor,
    probability_out_of_memory,
)
from cluster.cost.coefficients import load_prior
from cluster.cost.inputs import Array, CostInputs, from_rows
from cluster.cost.published.table import PublishedRow, TableError, read_what_can_be

SHOTS = (0, 3, 5, 10)
NUM_DRAWS = 3
MIN_TEST_ROWS = 2
MIN_RANKED = 4
"""Fewest configurations of a problem among the tested rows for which a rank correlation means anything."""


Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class Scores:
    """Errors of the predictions, collected over families and draws."""

    time_errors: list[float] = field(default_factory=list)
    memory_errors: list[float] = field(default_factory=list)
    correlations: list[float] = field(default_factory=list)
    outcomes: dict[tuple[bool, bool], float] = field(default_factory=lambda: defaultdict(float))
    """Number of rows by whether they ran out of memory, and whether that was predicted."""

    def add(self, other: Scores) -> None:
        self.time_errors += other.time_errors
        self.memory_errors += other.memory_errors
        self.correlations += other.correlations
        for key, count in other.outcomes.items():
            self.outcomes[key] += count

    def summary(self) -> dict[str, float | None]:
        hit, missed = self.outcomes[True, True], self.outcomes[True, False]
        wrong, right = self.outcomes[False, True], self.outcomes[False, False]
        return {
            "mape": _mean(self.time_errors),
            "spearman": _mean(self.correlations),
            "oom_precision": hit / (hit + wrong) if hit + wrong else None,
            "oom_recall": hit / (hit + missed) if hit + missed else None,
            "false_fit": missed / (hit + missed) if hit + missed else None,
            "false_alarm": wrong / (wrong + right) if wrong + right else None,
            "memory_error": _mean(self.memory_errors),
        }


@dataclass(frozen=True, slots=True)
class Family:
    """Rows of one source, software and hardware, which one calibration serves."""

    source: str
    rows: tuple[PublishedRow, ...]
    x: CostInputs

    @property
    def step_s(self) -> Array:
        return np.array([row.step_time_s or np.nan for row in self.rows], dtype=float)

    @property
    def peak_bytes(self) -> Array:
        return np.array([row.peak_bytes or np.nan for row in self.rows], dtype=float)

    @property
    def out_of_memory(self) -> Array:
        return np.array([np.nan if row.out_of_memory is None else row.out_of_memory for row in self.rows], dtype=float)


def families_of(rows: Iterable[PublishedRow]) -> list[Family]:
    """Modelled rows by family; the doubtful ones (quality C) as families of their own."""
    groups: dict[tuple[Any, ...], list[PublishedRow]] = defaultdict(list)
    for row in rows:
        if row.inputs is not None:
            groups[(*family_of(row), row["quality"] == "C")].append(row)
    return [
        Family(key[0], tuple(members), from_rows([row.inputs for row in members if row.inputs is not None]))
        for key, members in groups.items()
    ]


def score_family(family: Family, shots: int, draw: int) -> Scores:
    """Calibrate on ``shots`` random rows, judge on the others."""
    scores = Scores()
    _score_time(family, shots, draw, scores)
    _score_memory(family, shots, draw, scores)
    return scores


def _draw(figures: Rows, others: Rows, shots: int, draw: int) -> tuple[Rows, Rows]:
    """Random rows to learn from, those with a figure first, and the other rows.

    Two stay to be tested: of those with a figure, or where there is none, of the others.
    """
    rng = np.random.default_rng([draw, len(figures) + len(others)])
    figures, others = rng.permutation(figures), rng.permutation(others)
    learnable = figures[:-MIN_TEST_ROWS], others if len(figures) else others[:-MIN_TEST_ROWS]
    train = np.concatenate(learnable)[:shots]
    return np.sort(train), np.setdiff1d(np.concatenate([figures, others]), train)


def _score_time(family: Family, shots: int, draw: int, scores: Scores) -> None:
    measured = family.step_s
    train, test = _draw(np.flatnonzero(np.isfinite(measured)), np.array([], dtype=np.int64), shots, draw)
    if not len(test):
        return
    prior = load_prior("time", without=family.source)
    fitted = calibrate_time(prior, family.x.take(train), measured[train])
    predicted = np.exp(log_step_predictor(family.x.take(test))(fitted.coefficients))
    scores.time_errors += list(np.abs(predicted / measured[test] - 1))
    problems: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(test):
        problems[family.rows[row]["problem"]].append(i)
    for members in problems.values():
        configurations, index = np.unique(predicted[members], return_inverse=True)
        if len(configurations) >= MIN_RANKED:
            # Repeated runs of one configuration are one point.
            means = np.bincount(index, measured[test][members]) / np.bincount(index)
            scores.correlations.append(rank_correlation(configurations, means))


def _score_memory(family: Family, shots: int, draw: int, scores: Scores) -> None:
    peaks, outcomes = family.peak_bytes, family.out_of_memory
    telling = np.isfinite(peaks) | (outcomes == 1)
    train, test = _draw(np.flatnonzero(telling), np.flatnonzero(~telling & (outcomes == 0)), shots, draw)
    prior = load_prior("memory", without=family.source)
    reported = [family.rows[i].reported for i in train]
    fitted = calibrate_memory(prior, family.x.take(train), peaks[train], outcomes[train], reported)
    known = test[np.isfinite(peaks[test])]
    predict = log_peak_predictor(family.x.take(known), [family.rows[i].reported for i in known])
    scores.memory_errors += list(np.abs(np.exp(predict(fitted.coefficients)) / peaks[known] - 1))
    x = family.x.take(test)
    exceeds = probability_out_of_memory(fitted, x) > OUT_OF_MEMORY_THRESHOLD
    for outcome, too_much in zip(outcomes[test], exceeds, strict=True):
        if np.isfinite(outcome):
            scores.outcomes[bool(outcome), bool(too_much)] += 1


def rank_correlation(a: Array, b: Array) -> float:
    """Spearman's rank correlation, with mean ranks for ties; 0 where one side is constant."""
    ranks = [_ranks(values) for values in (a, b)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], dtype=float)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def evaluate(rows: Sequence[PublishedRow], num_draws: int) -> dict[str, Any]:
    """Scores after 0, 3, 5 and 10 measured rows: over all sources, and of each."""
    families = families_of(rows)
    totals = {shots: Scores() for shots in SHOTS}
    per_source: dict[str, dict[int, Scores]] = {row["source"]: {s: Scores() for s in SHOTS} for row in rows}
    for family in families:
        doubtful = family.rows[0]["quality"] == "C"
        only_doubtful = all(row["quality"] == "C" for row in rows if row["source"] == family.source)
        for shots in SHOTS:
            for draw in range(num_draws if shots else 1):
                scores = score_family(family, shots, draw)
                if not doubtful:
                    totals[shots].add(scores)
                if not doubtful or only_doubtful:
                    per_source[family.source][shots].add(scores)
    return {
        "summary": {"after": {str(shots): totals[shots].summary() for shots in SHOTS}},
        "sources": _sources(rows, per_source),
    }


def _sources(rows: Sequence[PublishedRow], per_source: dict[str, dict[int, Scores]]) -> list[dict[str, Any]]:
    """The scores of each source, the worst step time first."""
    entries = []
    for source, by_shots in per_source.items():
        members = [row for row in rows if row["source"] == source]
        modelled = [row for row in members if row.inputs is not None]
        reasons = [row.reason for row in members if row.inputs is None]
        entries.append(
            {
                "source": source,
                "rows": len(members),
                "not_modelled": len(reasons),
                "reasons": sorted(set(reasons)),
                "with_step_time": sum(row.step_time_s is not None for row in modelled),
                "with_peak": sum(row.peak_bytes is not None for row in modelled),
                "doubtful": sum(row["quality"] == "C" for row in members),
                "after": {str(shots): scores.summary() for shots, scores in by_shots.items()},
            }
        )
    return sorted(entries, key=lambda e: -(e["after"]["5"]["mape"] or 0))


def print_table(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    names = ("mape", "spearman", "oom_precision", "oom_recall", "false_fit", "false_alarm", "memory_error")
    print(f"{'source':24s} {'rows':>5s} {'out':>4s} {'C':>4s}  k " + " ".join(f"{name:>13s}" for name in names))
    blocks = [
        {"source": "all", "rows": "", "not_modelled": "", "doubtful": "", **result["summary"]},
        *result["sources"],
    ]
    for block in blocks:
        for shots in map(str, SHOTS):
            figures = [block["after"][shots][name] for name in names]
            cells = " ".join("            -" if value is None else f"{value:13.3f}" for value in figures)
            counts = f"{block['rows']:>5} {block['not_modelled']:>4} {block['doubtful']:>4}"
            print(f"{block['source']:24s} {counts} {shots:>2s} {cells}")
    for entry in result["sources"]:
        for reason in entry["reasons"]:
            print(f"{entry['source']}: left out: {reason}")
    for note in result["notes"]:
        print(f"table: {note}")


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--draws", type=int, default=NUM_DRAWS)
    options = parser.parse_args(argv)
    try:
        rows, notes = read_what_can_be(options.table)
    except (OSError, TableError) as error:
        parser.exit(2, f"{error}\n")
    result = {**evaluate(rows, options.draws), "notes": notes}
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print_table(result)


if __name__ == "__main__":
    main()
