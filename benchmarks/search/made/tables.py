"""The report of made problems: figures per family and overall, with the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.search.figures import GOALS, goal_line, over_problems, over_seeds, sampler_lines
from benchmarks.search.made.judge import BELIEFS, MAX_TRIALS, Judged
from orchestrator.units import count

BELIEF_GOALS: Mapping[str, float] = {"false_fits": 0.03, "false_alarms": 0.05}
"""Most that each figure may be."""


def report(judged: Sequence[Judged], samplers: Sequence[str], seed: int) -> dict[str, Any]:
    """Figures over all problems, by structure and by size class, and every problem; ``seed`` repeats them."""
    groups: dict[str, list[Judged]] = {"all": list(judged)}
    for one in judged:
        groups.setdefault(one.structure, []).append(one)
    for one in judged:
        groups.setdefault(one.name.split("/")[1], []).append(one)
    return {
        "seed": seed,
        "goals": {**GOALS, **BELIEF_GOALS},
        "max_trials": MAX_TRIALS,
        "families": {name: figures(members, samplers) for name, members in groups.items()},
        "problems": [_problem(one) for one in judged],
    }


def figures(judged: Sequence[Judged], samplers: Sequence[str]) -> dict[str, Any]:
    """Over problems, each counting the same; what depends on a seed is the mean over seeds."""
    return {
        "problems": len(judged),
        "samplers": {name: over_problems([over_seeds(one.runs[name]) for one in judged]) for name in samplers},
        "belief": {str(count): _belief(judged, count) for count in BELIEFS},
    }


def _belief(judged: Sequence[Judged], count: int) -> dict[str, float]:
    """Rates per problem, then the mean over problems; and of all candidates pooled."""
    beliefs = [one.beliefs[count] for one in judged]
    fits = [b.false_fits / b.num_oom for b in beliefs if b.num_oom]
    alarms = [b.false_alarms / b.num_fit for b in beliefs if b.num_fit]
    return {
        "false_fits": statistics.fmean(fits) if fits else 0.0,
        "false_alarms": statistics.fmean(alarms) if alarms else 0.0,
        "false_fits_pooled": sum(b.false_fits for b in beliefs) / max(1, sum(b.num_oom for b in beliefs)),
        "false_alarms_pooled": sum(b.false_alarms for b in beliefs) / max(1, sum(b.num_fit for b in beliefs)),
    }


def _problem(one: Judged) -> dict[str, Any]:
    return {
        "problem": one.name,
        "size": one.size,
        "share_oom": one.share_oom,
        "planted": list(one.planted),
        "samplers": {name: [run.trials_to_2pct for run in runs] for name, runs in one.runs.items()},
        "first_oom": {name: [run.first_oom for run in runs] for name, runs in one.runs.items()},
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The report as text of at most 80 columns."""
    yield f"seed {found['seed']}"
    for family, entry in found["families"].items():
        yield f"{family}: {count(entry['problems'], 'problem')}"
        yield from sampler_lines(entry["samplers"])
    goals = found["goals"]
    yield goal_line()
    yield ""
    yield f"{'of memory, by the search: false fits % / false alarms %':30}"
    yield f"  {'':18}" + "".join(f"{f'after {n} trials' if n else 'before any trial':>20}" for n in BELIEFS)
    for family, entry in found["families"].items():
        yield f"  {family:18}" + "".join(f"{_rates(entry['belief'][str(n)]):>20}" for n in BELIEFS)
    yield f"goals: {100 * goals['false_fits']:g} / {100 * goals['false_alarms']:g}"


def _rates(belief: Mapping[str, float]) -> str:
    return f"{100 * belief['false_fits']:.1f} / {100 * belief['false_alarms']:4.1f}"
