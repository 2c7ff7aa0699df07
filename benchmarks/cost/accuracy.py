"""How well the cost model predicts published measurements of sources it has not seen.

    python -m benchmarks.cost.accuracy --table measured.csv [--table more.csv ...] [--experts] [--min-length N] [--json]

For every source the prior is the one fitted without that source. Then 0, 3, 5 or 10 random rows of a family (same
source, software, device and number format) calibrate the model for the family's other rows: step times, by the
search's own posterior (``orchestrator/search/``), those of rows with a step time; memory those of rows with
a peak or that ran out of memory first, then others that are known to have run. Where a family is too small to keep two
rows for testing, fewer rows calibrate it, down to none.

Figures pool the tested rows of all families and of several draws, each row and draw counting once ("all"); and are
means of those of the sources, each source counting the same ("mean"), as one source may have most rows. Each
figure is printed with its goal.

mape           mean of abs(predicted - measured) / measured step time
spearman       mean over problems of the rank correlation of predicted and measured step times
mape_before, spearman_before   the same of the same rows, had none been measured
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
import functools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cost.believed import BelievedMemory, believed_memory
from benchmarks.cost.families import Family, add_tables, families_of, read_tables
from benchmarks.published.experts import is_mixture
from benchmarks.published.table import PublishedRow
from cluster.cost.cost_model import OUT_OF_MEMORY_THRESHOLD, log_step_predictor
from cluster.cost.inputs import Array, Prior, load_prior
from cluster.cost.peak_memory import structures_of_software
from orchestrator.search.acquisition import ErrorModel, condition
from orchestrator.search.predictor import COMMON_STD, LOCAL_STD, linearised, of_candidates, physical_places

SHOTS = (0, 3, 5, 10)
NUM_DRAWS = 3
NUM_PROCESSES = min(2, os.cpu_count() or 1)
MIN_TEST_ROWS = 2
MIN_RANKED = 4
"""Fewest configurations of a problem among the tested rows for which a rank correlation means anything."""
REPEATED_STD = 0.04
"""Standard deviation of the logarithms of published step times of one configuration: other days, nodes and releases."""

GOALS: Mapping[str, Mapping[str, float]] = {
    "0": {"mape": 0.09},
    "5": {"mape": 0.07, "spearman": 0.85, "memory_error": 0.06, "false_fit": 0.05, "false_alarm": 0.05},
}
"""What means over sources are to reach after so many rows: errors at most, rank correlations at least."""

FIGURES = (
    *("mape_before", "mape", "spearman_before", "spearman"),
    *("memory_error", "oom_precision", "oom_recall", "false_fit", "false_alarm"),
)

Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class Scores:
    """Errors of the predictions, collected over families and draws."""

    time_errors: list[float] = field(default_factory=list)
    memory_errors: list[float] = field(default_factory=list)
    correlations: list[float] = field(default_factory=list)
    time_errors_before: list[float] = field(default_factory=list)
    correlations_before: list[float] = field(default_factory=list)
    """The same of the same rows, as predicted before any was measured."""
    outcomes: dict[tuple[bool, bool], float] = field(default_factory=lambda: defaultdict(float))
    """Number of rows by whether they ran out of memory, and whether that was predicted."""

    def add(self, other: Scores) -> None:
        self.time_errors += other.time_errors
        self.memory_errors += other.memory_errors
        self.correlations += other.correlations
        self.time_errors_before += other.time_errors_before
        self.correlations_before += other.correlations_before
        for key, count in other.outcomes.items():
            self.outcomes[key] += count

    def summary(self) -> dict[str, float | None]:
        hit, missed = self.outcomes[True, True], self.outcomes[True, False]
        wrong, right = self.outcomes[False, True], self.outcomes[False, False]
        return {
            "mape_before": _mean(self.time_errors_before),
            "mape": _mean(self.time_errors),
            "spearman_before": _mean(self.correlations_before),
            "spearman": _mean(self.correlations),
            "memory_error": _mean(self.memory_errors),
            "oom_precision": hit / (hit + wrong) if hit + wrong else None,
            "oom_recall": hit / (hit + missed) if hit + missed else None,
            "false_fit": missed / (hit + missed) if hit + missed else None,
            "false_alarm": wrong / (wrong + right) if wrong + right else None,
        }


def score_family(family: Family, num_draws: int) -> dict[int, Scores]:
    """Calibrate on 0, 3, 5 and 10 random rows, judge on the others; all draws together."""
    found = {shots: Scores() for shots in SHOTS}
    memory = memory_of(family)
    for shots, scores in found.items():
        for draw in range(num_draws if shots else 1):
            _score_time(family, shots, draw, scores)
            _score_memory(family, memory, shots, draw, scores)
    return found


def memory_of(family: Family) -> BelievedMemory:
    """The belief about the memory of a family before any of its runs was seen."""
    reported, software = [row.reported for row in family.rows], family.rows[0]["framework"]
    return believed_memory(_prior("memory", family.source), family.x, reported, structures_of_software(software))


@functools.cache
def _prior(kind: str, without: str) -> Prior:
    return load_prior(kind, without)


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
    before, after = (expected_log_s(family, rows, test) for rows in (train[:0], train))
    scores.time_errors_before += _relative_errors(before, measured[test])
    scores.time_errors += _relative_errors(after, measured[test])
    scores.correlations_before += _correlations(family, test, before)
    scores.correlations += _correlations(family, test, after)


def _relative_errors(log_predicted: Array, measured: Array) -> list[float]:
    return list(np.abs(np.exp(log_predicted) / measured - 1))


def _correlations(family: Family, rows: Rows, log_s: Array) -> list[float]:
    """Rank correlation of each problem with enough configurations. Repeated runs of one configuration are one point."""
    problems: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        problems[family.rows[row]["problem"]].append(i)
    found, numbers, measured = [], family.configurations[rows], family.step_s[rows]
    for members in problems.values():
        _, index, counts = np.unique(numbers[members], return_inverse=True, return_counts=True)
        if len(counts) >= MIN_RANKED:
            expected, means = (np.bincount(index, values[members]) / counts for values in (log_s, measured))
            found.append(rank_correlation(expected.round(9), means))
    return found


def expected_log_s(family: Family, train: Rows, test: Rows) -> Array:
    """Logarithms of the step times that the search expects of ``test`` rows, having measured the ``train`` rows."""
    prior = _prior("time", family.source)
    if not len(train):
        return log_step_predictor(family.x.take(test))(prior.coefficients)
    x = family.x.take(np.concatenate([train, test]))
    measured_s = family.step_s[train] * x.world_size[: len(train)]
    prior = of_candidates(prior, LOCAL_STD["cuda"])
    log_time, features, _ = linearised(prior, x, dict(enumerate(measured_s.tolist())))
    model = ErrorModel(
        features=features,
        feature_std=np.ones(features.shape[1]),
        places=physical_places(x),
        local_std=LOCAL_STD["cuda"],
        common_std=COMMON_STD["cuda"],
        noise_std=REPEATED_STD,
    )
    seen, asked = np.arange(len(train)), np.arange(len(train), len(x))
    residual = condition(model, seen, np.log(measured_s) - log_time[seen], 1.0)
    return np.asarray(log_time[asked] + residual.mean(asked) - np.log(x.world_size[asked]))


def _score_memory(family: Family, prior: BelievedMemory, shots: int, draw: int, scores: Scores) -> None:
    peaks, outcomes = family.peak_bytes, family.out_of_memory
    telling = np.isfinite(peaks) | (outcomes == 1)
    train, test = _draw(np.flatnonzero(telling), np.flatnonzero(~telling & (outcomes == 0)), shots, draw)
    belief = prior.after(train, peaks[train], outcomes[train])
    known = test[np.isfinite(peaks[test])]
    scores.memory_errors += _relative_errors(belief.log_peak(known), peaks[known])
    exceeds = belief.probability_out_of_memory(test) > OUT_OF_MEMORY_THRESHOLD
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


def evaluate(rows: Sequence[PublishedRow], num_draws: int, num_processes: int = 1) -> dict[str, Any]:
    """Scores after 0, 3, 5 and 10 measured rows: of all rows, of each source, and the means over sources."""
    families = sorted(families_of(rows), key=lambda family: -len(family.rows))
    totals = {shots: Scores() for shots in SHOTS}
    per_source: dict[str, dict[int, Scores]] = {row["source"]: {s: Scores() for s in SHOTS} for row in rows}
    sound = {row["source"] for row in rows if row["quality"] != "C"}
    for family, found in zip(families, _scored(families, num_draws, num_processes), strict=True):
        for shots, scores in found.items():
            if not family.doubtful:
                totals[shots].add(scores)
            if not family.doubtful or family.source not in sound:
                per_source[family.source][shots].add(scores)
    sources = _sources(rows, per_source)
    return {
        "summary": {
            "after": {str(shots): scores.summary() for shots, scores in totals.items()},
            "mean_over_sources": _means([entry["after"] for entry in sources if entry["source"] in sound]),
            "goals": GOALS,
        },
        "sources": sources,
    }


def _scored(families: Sequence[Family], num_draws: int, num_processes: int) -> Iterator[dict[int, Scores]]:
    score = functools.partial(score_family, num_draws=num_draws)
    if num_processes == 1:
        yield from map(score, families)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(score, families)


def _means(sources: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, dict[str, float | None]]:
    """Of each figure the mean over the sources that have it."""
    return {
        shots: {name: _mean([f for source in sources if (f := source[shots][name]) is not None]) for name in FIGURES}
        for shots in map(str, SHOTS)
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
    print(
        f"{'source':21s} {'rows':>5s} {'out':>4s} {'C':>4s}  k " + " ".join(f"{_short(name):>6s}" for name in FIGURES)
    )
    summary = result["summary"]
    for title, figures in (("all", "after"), ("mean", "mean_over_sources"), ("goal", "goals")):
        _print_block({"source": title, "after": summary[figures]})
    for entry in result["sources"]:
        _print_block(entry)
    for entry in result["sources"]:
        for reason in entry["reasons"]:
            print(f"{entry['source']}: left out: {reason}")
    for note in result["notes"]:
        print(note)


def _print_block(block: Mapping[str, Any]) -> None:
    for shots, figures in block["after"].items():
        values = [figures.get(name) for name in FIGURES]
        cells = " ".join("     -" if value is None else f"{value:6.3f}" for value in values)
        counts = " ".join(f"{block.get(n, ''):>{w}}" for n, w in (("rows", 5), ("not_modelled", 4), ("doubtful", 4)))
        print(f"{block['source'][:21]:21s} {counts} {shots:>2s} {cells}")


def _short(name: str) -> str:
    """The figure's name in six letters."""
    return {
        "mape_before": "mape_0",
        "spearman_before": "rank_0",
        "spearman": "rank",
        "memory_error": "memory",
        "oom_precision": "oom_pr",
        "oom_recall": "oom_re",
        "false_fit": "f_fit",
        "false_alarm": "f_alrm",
    }.get(name, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_tables(parser)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--experts", action="store_true", help="only mixtures of experts")
    parser.add_argument("--min-length", type=int, default=0, help="only sequences of at least so many tokens")
    parser.add_argument("--draws", type=int, default=NUM_DRAWS)
    parser.add_argument("--processes", type=int, default=NUM_PROCESSES)
    options = parser.parse_args(argv)
    rows, notes = read_tables(options.tables, parser)
    if options.experts:
        rows = [row for row in rows if is_mixture(row.fields)]
    rows = [row for row in rows if float(row["seq_len"] or 0) >= options.min_length]
    result = {**evaluate(rows, options.draws, options.processes), "notes": notes}
    if options.json:
        json.dump(result, sys.stdout, indent=1)
        print()
    else:
        print_table(result)


if __name__ == "__main__":
    main()
