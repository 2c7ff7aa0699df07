"""The report of made problems: figures per family and over all, the goals beside them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.search.made.judge import BELIEFS, MAX_TRIALS, NUM_FIRST, REGRETS, Judged, Run
from orchestrator.units import count

GOALS: Mapping[str, float] = {"mean_trials_to_2pct": 5.0, "first_oom": 1.5, "false_fits": 0.03, "false_alarms": 0.05}
"""Most that each figure may be."""


def report(judged: Sequence[Judged], samplers: Sequence[str]) -> dict[str, Any]:
    """Figures over all problems, by structure and by size class, and every problem."""
    groups: dict[str, list[Judged]] = {"all": list(judged)}
    for one in judged:
        groups.setdefault(one.structure, []).append(one)
    for one in judged:
        groups.setdefault(one.name.split("/")[1], []).append(one)
    return {
        "goals": dict(GOALS),
        "max_trials": MAX_TRIALS,
        "families": {name: figures(members, samplers) for name, members in groups.items()},
        "problems": [_problem(one) for one in judged],
    }


def figures(judged: Sequence[Judged], samplers: Sequence[str]) -> dict[str, Any]:
    """Over problems, each counting the same; what depends on a seed is the mean over seeds."""
    return {
        "problems": len(judged),
        "samplers": {name: _over_problems([one.runs[name] for one in judged]) for name in samplers},
        "belief": {str(count): _belief(judged, count) for count in BELIEFS},
    }


def _over_problems(runs: Sequence[Sequence[Run]]) -> dict[str, Any]:
    trials = [statistics.fmean(run.trials_to_2pct for run in seeds) for seeds in runs]
    regrets = [[statistics.fmean(run.regret[i] for run in seeds) for seeds in runs] for i in range(len(REGRETS))]
    return {
        "mean_trials_to_2pct": statistics.fmean(trials),
        "median_trials_to_2pct": statistics.median(trials),
        "not_reached": statistics.fmean(t > MAX_TRIALS for t in trials),
        **{f"regret_after_{n}": statistics.fmean(r) for n, r in zip(REGRETS, regrets, strict=True)},
        "first_oom": statistics.fmean(statistics.fmean(run.first_oom for run in seeds) for seeds in runs),
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
    for family, entry in found["families"].items():
        yield f"{family}: {count(entry['problems'], 'problem')}"
        yield from _sampler_lines(entry["samplers"])
    goals = found["goals"]
    yield f"goals: {goals['mean_trials_to_2pct']:g} trials in the mean, {goals['first_oom']:g} out of memory"
    yield ""
    yield f"{'of memory, by the search: false fits % / false alarms %':30}"
    yield f"  {'':18}" + "".join(f"{f'after {n} trials' if n else 'before any trial':>20}" for n in BELIEFS)
    for family, entry in found["families"].items():
        yield f"  {family:18}" + "".join(f"{_rates(entry['belief'][str(n)]):>20}" for n in BELIEFS)
    yield f"goals: {100 * goals['false_fits']:g} / {100 * goals['false_alarms']:g}"


def _sampler_lines(samplers: Mapping[str, Any]) -> Iterator[str]:
    regrets = "".join(f"{n:>7}" for n in REGRETS)
    yield f"  {'':14} {'trials to 2 %':>14} {'never':>6} {'regret % after':>21} {'OOM of':>8}"
    yield f"  {'sampler':14} {'mean':>6} {'median':>7} {'%':>6} {regrets} {'first ' + str(NUM_FIRST):>8}"
    for name, row in samplers.items():
        regret = "".join(f"{100 * row[f'regret_after_{n}']:7.1f}" for n in REGRETS)
        trials = (
            f"{row['mean_trials_to_2pct']:6.1f} {row['median_trials_to_2pct']:7.1f} {100 * row['not_reached']:6.0f}"
        )
        yield f"  {name:14} {trials} {regret} {row['first_oom']:8.2f}"


def _rates(belief: Mapping[str, float]) -> str:
    return f"{100 * belief['false_fits']:.1f} / {100 * belief['false_alarms']:4.1f}"
