"""Trials needed to find a published table's best configuration, by sampler.

    python -m benchmarks.search.quality --table measured.csv [--json] [--seeds 10] [--jobs 2] [--source vtrain-single]

Every problem of the table with at least 8 distinct configurations is searched by every sampler with the same seeds,
from the same baseline: plain data parallelism with the most recompute and the smallest micro-batch, as far as the
table has it. Reported, over problems:

median_trials_to_2pct               trials until within 2 % of the table's best, the baseline being the first trial;
                                    median over seeds, then over problems
share_97pct_within_15pct_of_trials  share of problems (mean over seeds) on which at least 97 % of the best speed was
                                    reached within 15 % of the trials that exhaustive search takes, that is of the
                                    problem's size: rounded up, the baseline counted, and at least 2, since with the
                                    baseline alone there is nothing to choose

Problems of one cluster (source, device, interconnect) are sweeps one after the other, in an order the seed shuffles:
as `submit` does, guided starts with what the earlier sweeps on the cluster measured. These are guided's own trials of
other problems until its own stopping rule ended each sweep; never the table, and nothing of the problem itself. TPE is
given the same: its warm start is ranked with what they taught. `--no-transfer` searches every problem from nothing;
the figures of guided and TPE without transfer are part of either report. The cost model's prior leaves out the source
(`--prior unseen`).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.search.runs import ALONE, Comparison, Result, Results, compare
from benchmarks.search.samplers import SAMPLERS
from benchmarks.search.tables import FIGURES, Problem, load_problems
from cluster.cost.published.table import TableError

logger = logging.getLogger(__name__)


def describe(problem: Problem, by_sampler: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": problem.name, "source": problem.source, "size": len(problem)}
    if notes := notes_on(problem):
        found["notes"] = notes
    for name, results in by_sampler.items():
        found[name] = {
            "median_trials_to_2pct": statistics.median(trials for trials, _ in results),
            "share_97pct_within_15pct_of_trials": statistics.mean(good for _, good in results),
        }
    return found


def notes_on(problem: Problem) -> list[str]:
    """What keeps the cost model out of it, wholly or in part."""
    reasons = Counter(c.row.reason for c in problem.configurations if c.inputs is None)
    notes = [f"{count} of {len(problem)} configurations are not modelled: {why}" for why, count in reasons.items()]
    if problem.figure != FIGURES[0]:
        notes.append(f"compared by {problem.figure}: it states no step times, so nothing is learned from or for others")
    return notes


def summarize(problems: Sequence[Mapping[str, Any]], samplers: Sequence[str]) -> dict[str, Any]:
    def over_problems(name: str) -> dict[str, float]:
        trials = [p[name]["median_trials_to_2pct"] for p in problems]
        shares = [p[name]["share_97pct_within_15pct_of_trials"] for p in problems]
        return {
            "median_trials_to_2pct": statistics.median(trials),
            "mean_trials_to_2pct": round(statistics.mean(trials), 2),
            "share_97pct_within_15pct_of_trials": round(statistics.mean(shares), 3),
        }

    return {name: over_problems(name) for name in samplers}


def report(problems: Sequence[Problem], results: Results, samplers: Sequence[str]) -> dict[str, Any]:
    """Summary over all problems and by source, and every problem."""
    rows = [describe(problem, results[problem.name]) for problem in problems]
    names = sorted(
        results[problems[0].name], key=lambda name: (ALONE in name, samplers.index(name.removesuffix(ALONE)))
    )
    by_source = defaultdict(list)
    for row in rows:
        by_source[row["source"]].append(row)
    return {
        "summary": summarize(rows, names),
        "sources": [
            {"source": source, "problems": len(members), **summarize(members, names)}
            for source, members in by_source.items()
        ],
        "problems": rows,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The report as text: a table per source, then that of all problems."""
    everything = {"source": "all sources", "problems": len(found["problems"]), **found["summary"]}
    for entry in (*found["sources"], everything):
        yield f"{entry['source']}: {entry['problems']} problems"
        yield f"  {'':24} {'trials to 2 %':>22} {'97 % of the best within'}"
        yield f"  {'sampler':24} {'median':>12} {'mean':>9} {'15 % of the trials':>23}"
        for name, figures in entry.items():
            if isinstance(figures, Mapping):
                median, mean, share = figures.values()
                yield f"  {name:24} {median:12g} {mean:9.2f} {share:23.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--prior", choices=["unseen", "all", "assumed"], default="unseen")
    parser.add_argument("--transfer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--source", help="only problems of this source")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; all CPU cores")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        problems = [p for p in load_problems(options.table) if options.source in (None, p.source)]
    except (TableError, OSError) as error:
        parser.error(str(error))
    if not problems:
        parser.error("the table has no problem with at least 8 distinct configurations")
    for problem in problems:
        for note in notes_on(problem):
            logger.warning("%s: %s", problem.name, note)
    comparison = Comparison(
        problems=problems,
        samplers=options.samplers,
        prior=options.prior,
        seeds=options.seeds,
        transfer=options.transfer,
    )
    found = report(problems, compare(comparison, options.jobs), options.samplers)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
