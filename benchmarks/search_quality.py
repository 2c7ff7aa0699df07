"""Trials needed to find a published table's best configuration, by sampler.

    python -m benchmarks.search_quality --table measured.csv [--json] [--seeds 10] [--source vtrain-single]

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
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.search_priors import Beliefs, Priors
from benchmarks.search_samplers import DETERMINISTIC, SAMPLERS, Trials
from benchmarks.search_tables import Problem, load_problems
from benchmarks.search_transfer import in_sequence

MAX_TRIALS = 3
"""Tables' sizes after which a search that may repeat itself is given up."""
TOLERANCE = 0.02
GOOD_SHARE = 0.97
TRIALS_SHARE = 0.15
ALONE = "_without_transfer"
"""Ends the names of samplers that know nothing of earlier sweeps, where others do."""
TRANSFERS = ("guided", "tpe")
"""Samplers that make use of earlier sweeps."""

Result = tuple[int, bool]
"""Trials to 2 %, and whether 97 % came within 15 % of the trials."""
Results = Mapping[str, Mapping[str, list[Result]]]
"""By problem and sampler, one per seed."""


def measure(problem: Problem, trials: Trials) -> Result:
    """Trials are one more than allowed where 2 % is never reached."""
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


def compare(problems: Sequence[Problem], prior: str, seeds: int, samplers: Sequence[str], *, transfer: bool) -> Results:
    """Every problem from nothing, and with ``transfer`` also after sweeps over the others of its cluster."""
    found: dict[str, dict[str, list[Result]]] = defaultdict(dict)
    for number, problem in enumerate(problems, start=1):
        print(f"{number}/{len(problems)} {problem.name}", file=sys.stderr)
        beliefs = Beliefs(problem, Priors.named(prior, problem.source))
        for name in samplers:
            alone = name + ALONE * (transfer and name in TRANSFERS)
            tried = range(1 if name in DETERMINISTIC else seeds)
            found[problem.name][alone] = [measure(problem, SAMPLERS[name](problem, beliefs, seed)) for seed in tried]
    for seed in range(seeds if transfer else 0):
        print(f"in sequence, order {seed + 1}/{seeds}", file=sys.stderr)
        for problem, beliefs in in_sequence(problems, prior, seed):
            for name in (name for name in samplers if name in TRANSFERS):
                result = measure(problem, SAMPLERS[name](problem, beliefs, seed))
                found[problem.name].setdefault(name, []).append(result)
    return found


def describe(problem: Problem, by_sampler: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": problem.name, "source": problem.source, "size": len(problem)}
    for name, results in by_sampler.items():
        found[name] = {
            "median_trials_to_2pct": statistics.median(trials for trials, _ in results),
            "share_97pct_within_15pct_of_trials": statistics.mean(good for _, good in results),
        }
    return found


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
    names = sorted(rows[0].keys() - {"problem", "source", "size"}, key=lambda n: (ALONE in n, samplers.index(_base(n))))
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


def _base(name: str) -> str:
    return name.removesuffix(ALONE)


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
    options = parser.parse_args(argv)
    problems = [p for p in load_problems(options.table) if options.source in (None, p.source)]
    if not problems:
        parser.error("the table has no problem with at least 8 distinct configurations")
    results = compare(problems, options.prior, options.seeds, options.samplers, transfer=options.transfer)
    found = report(problems, results, options.samplers)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
