"""Trials needed to find a published table's best configuration, by sampler.

    python -m benchmarks.search.quality --table measured.csv [--table more.csv] [--json] [--seeds 10] [--jobs 2]

Every problem of the tables with at least 8 distinct configurations is searched by every sampler with the same seeds,
from the same baseline, the first trial: plain data parallelism with the most recompute and the smallest micro-batch, as
far as the table has it. Configurations that ran out of memory are trials that run out of memory.

guided         the product's search
tpe            Optuna's TPE, restricted to configurations that exist, and started with the three best of plain_order
plain_order    the cost model's order x the probability to fit, both before any trial; learns nothing
optuna_default Optuna as it comes
random         every configuration once

trials_to_2pct                      trials until within 2% of the table's best; mean over seeds
regret_after_5, 10, 20              best so far / best of the table, less 1
first_oom                           trials out of memory among the first ten
share_97pct_within_15pct_of_trials  share of the seeds with 97% of the best speed within 15% of the trials that
                                    exhaustive search takes: rounded up, the baseline counted, and at least 2

Figures are means over problems (trials also medians), and means of those of the sources, as one source may have most
problems. Where the baseline is within 2% of the best there is nothing to find: the other problems stand apart.

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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.table import TableError
from benchmarks.search.figures import GOALS, Run, goal_line, over_problems, over_seeds, over_sources, sampler_lines
from benchmarks.search.runs import ALONE, Comparison, Runs, compare
from benchmarks.search.samplers import SAMPLERS
from benchmarks.search.tables import FIGURES, Problem, load_problems
from orchestrator.units import count

logger = logging.getLogger(__name__)

NON_TRIVIAL = "baseline not within 2% of the best"


def describe(problem: Problem, by_sampler: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """One problem with every sampler's figures."""
    found: dict[str, Any] = {
        "problem": problem.name,
        "source": problem.source,
        "size": len(problem),
        "out_of_memory": sum(configuration.time_s is None for configuration in problem.configurations),
        "trivial": problem.is_trivial,
    }
    if notes := notes_on(problem):
        found["notes"] = notes
    return {**found, "samplers": {name: over_seeds(runs) for name, runs in by_sampler.items()}}


def notes_on(problem: Problem) -> list[str]:
    """What keeps the cost model out of it, wholly or in part."""
    reasons = Counter(c.row.reason for c in problem.configurations if c.inputs is None)
    notes = [f"{count} of {len(problem)} configurations are not modelled: {why}" for why, count in reasons.items()]
    if problem.figure != FIGURES[0]:
        notes.append(f"compared by {problem.figure}: it states no step times, so nothing is learned from or for others")
    return notes


def report(problems: Sequence[Problem], runs: Runs, samplers: Sequence[str]) -> dict[str, Any]:
    """Figures pooled over problems and as means over sources, of all and of those that are not trivial; of every
    source, and every problem."""
    rows = [describe(problem, runs[problem.name]) for problem in problems]
    names = sorted(runs[problems[0].name], key=lambda name: (ALONE in name, samplers.index(name.removesuffix(ALONE))))
    hard = [row for row in rows if not row["trivial"]]
    return {
        "goals": dict(GOALS),
        "summary": {**_summary("all problems", rows, names), **_summary(NON_TRIVIAL, hard, names)},
        "sources": [{"source": source, **entry} for source, entry in _by_source(rows, names).items()],
        "problems": rows,
    }


def _summary(title: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    if not rows:
        return {}
    sources = _by_source(rows, names)
    means = over_sources([entry["samplers"] for entry in sources.values()])
    counted = {"problems": len(rows), "samplers": means, "sources": len(sources)}
    return {title: _figures(rows, names), f"{title}, mean over sources": counted}


def _by_source(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    members: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        members[row["source"]].append(row)
    return {source: _figures(found, names) for source, found in members.items()}


def _figures(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    samplers = {name: over_problems([row["samplers"][name] for row in rows]) for name in names}
    return {"problems": len(rows), "samplers": samplers}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The report as text: a table per source, then those over all."""
    titled = {entry["source"]: entry for entry in found["sources"]} | dict(found["summary"])
    for title, entry in titled.items():
        over = f" of {count(entry['sources'], 'source')}" if "sources" in entry else ""
        yield f"{title}: {count(entry['problems'], 'problem')}{over}"
        yield from sampler_lines(entry["samplers"])
    yield goal_line()


def main(argv: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, action="append", help="may be given several times")
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
        problems = [p for p in load_problems(*options.table) if options.source in (None, p.source)]
    except (TableError, OSError) as error:
        parser.error(str(error))
    if not problems:
        parser.error("the tables have no problem with at least 8 distinct configurations")
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
