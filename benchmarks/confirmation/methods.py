"""Sweeps and confirmations in numbers, and ways to name a winner. Nothing runs; speeds are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from orchestrator.proof import confirmation
from orchestrator.proof.confirmation import Judgement, critical_value, judge, order
from orchestrator.statistics import Estimate, Interval, verdict

NUM_TRIALS = 50
MIN_ROUNDS = 3
MAX_ROUNDS = 16
NUM_FIXED = 8
"""Rounds of the methods that do not plan theirs."""
BASELINE = 0
ROUND_NOISE = 0.05
"""What the runs of a round have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Speeds, and what blurs them. Relative standard deviations throughout."""

    name: str
    noise: float
    """Noise between runs."""
    gain: float | None = None
    """Gain in speed of the candidates that are faster than the baseline; None: all are exactly as fast as it."""
    num_faster: int = 1
    unequal: float = 0.0
    """Spread of the logarithm of the noise over trials."""
    baseline_noise: float = 1.0
    """Noise of the baseline, relative to that of the others."""
    tails: float | None = None
    """Degrees of freedom of Student's t, of which the noise is drawn; None: normal."""
    num_finalists: int = 3
    slow_runs: float = 0.0
    """Share of runs that are 15% slower, for example next to a busy neighbour."""
    drift: float = 0.0
    """How much faster a run is than the one before it in its round."""
    drift_spread: float = 0.0
    """Spread of the drift over rounds."""
    balanced: bool = True
    """Whether rounds take turns in their order; otherwise the baseline is always first."""


@dataclass(frozen=True, slots=True)
class Case:
    """One sweep, and the runs that a confirmation of its finalists would see. By trial; 0 is the baseline."""

    truth: NDArray[np.float64]
    """True speed of each trial over the baseline's."""
    searched: NDArray[np.float64]
    """Speeds as the search measured them, once each."""
    finalists: tuple[int, ...]
    speeds: NDArray[np.float64]
    """Log speed by round and trial, without drift."""
    drifts: NDArray[np.float64]
    """How much faster a run is than the one before it, by round."""
    world: World

    def round(self, number: int, trials: Sequence[int]) -> Mapping[int, float]:
        """Speeds of one round; which run of the round it is matters where there is drift."""
        measured = order(trials, number if self.world.balanced else 0)
        drift = self.drifts[number]
        return {who: float(self.speeds[number, who] * math.exp(drift * n)) for n, who in enumerate(measured)}

    @property
    def is_faster_among_finalists(self) -> bool:
        return bool((self.truth[list(self.finalists)] > 1).any())

    def rounds(self, count: int) -> list[Mapping[int, float]]:
        """The first ``count`` rounds with the baseline and all finalists."""
        return [self.round(number, (BASELINE, *self.finalists)) for number in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """How a method ended."""

    winner: int | None
    ratio: Estimate | None = None
    """Estimated ratio of the winner's speed to the baseline's."""
    slower: tuple[int, ...] | None = None
    """Finalists found slower than the winner; None where that is not asked."""
    num_rounds: int = 0
    num_runs: int = 0


def draw(world: World, seed: int) -> Case:
    """Search, then as many rounds as any method may ask for."""
    rng = np.random.default_rng(seed)
    truth = np.ones(NUM_TRIALS)
    if world.gain is not None:
        truth = rng.uniform(0.7, 1.0, NUM_TRIALS)
        truth[BASELINE], truth[1 : 1 + world.num_faster] = 1.0, 1 + world.gain
    noise = world.noise * np.exp(world.unequal * rng.standard_normal(NUM_TRIALS))
    noise[BASELINE] *= world.baseline_noise

    def runs(count: int) -> NDArray[np.float64]:
        shape = (count, NUM_TRIALS)
        logs = noise * (rng.standard_normal(shape) if world.tails is None else rng.standard_t(world.tails, shape))
        logs += math.log(0.85) * (rng.random(logs.shape) < world.slow_runs)
        return np.asarray(truth * np.exp(logs))

    searched = runs(1)[0]
    best_first = np.argsort(-searched[1:]) + 1
    common = np.exp(ROUND_NOISE * rng.standard_normal((MAX_ROUNDS, 1)))
    finalists = tuple(int(number) for number in best_first[: world.num_finalists])
    speeds = 1e3 * common * runs(MAX_ROUNDS)
    drifts = world.drift + world.drift_spread * rng.standard_normal(MAX_ROUNDS)
    return Case(truth, searched, finalists, speeds, drifts, world)


def best_trial(case: Case) -> Claim:
    """What a tuner without confirmation returns: the trial with the best measurement."""
    winner = int(np.argmax(case.searched))
    if winner == BASELINE:
        return Claim(winner=None)
    return Claim(winner=winner, ratio=Estimate(float(case.searched[winner] / case.searched[BASELINE]), None))


def naive(case: Case) -> Claim:
    """An ordinary paired t test after every round, until one of the finalists is found faster."""
    for num_rounds in range(MIN_ROUNDS, NUM_FIXED + 1):
        claim = _paired(case, num_rounds, level=0.05)
        if claim.winner is not None:
            break
    return claim


def fixed(case: Case) -> Claim:
    """Eight rounds, then one paired t test per finalist with Bonferroni's correction."""
    return _paired(case, NUM_FIXED, level=0.05 / case.world.num_finalists)


def ours(case: Case) -> Claim:
    """The product."""
    rounds: list[Mapping[int, float]] = []
    while not (found := _judge(case, rounds)).is_decided:
        rounds.append(case.round(len(rounds), found.to_measure))
    runs = sum(len(measured) for measured in rounds)
    ratio = found.against_baseline[found.leader].ratio if found.leader is not None else None
    slower = tuple(number for number, other in found.against_leader.items() if other.verdict == "slower")
    return Claim(winner=found.leader, ratio=ratio, slower=slower, num_rounds=len(rounds), num_runs=runs)


def patient(case: Case) -> Claim:
    """The product, had it no way of giving up a finalist that cannot be expected to be shown faster any more."""
    with patch.object(
        confirmation._Effect, "may_be_shown", lambda self, what: what == "slower" or not self.is_not_faster
    ):
        return ours(case)


def _judge(case: Case, rounds: Sequence[Mapping[int, float]]) -> Judgement:
    return judge(rounds, baseline=BASELINE, finalists=case.finalists, min_rounds=MIN_ROUNDS, max_rounds=MAX_ROUNDS)


def _paired(case: Case, num_rounds: int, *, level: float) -> Claim:
    rounds = case.rounds(num_rounds)
    ratios = {finalist: _ratio(rounds, finalist, level) for finalist in case.finalists}
    faster = [finalist for finalist, ratio in ratios.items() if verdict(ratio) == "faster"]
    winner = max(faster, key=lambda finalist: ratios[finalist].value, default=None)
    return Claim(
        winner=winner,
        ratio=ratios[winner] if winner is not None else None,
        num_rounds=num_rounds,
        num_runs=num_rounds * (case.world.num_finalists + 1),
    )


def _ratio(rounds: Sequence[Mapping[int, float]], finalist: int, level: float) -> Estimate:
    logs = np.log([measured[finalist] / measured[BASELINE] for measured in rounds])
    half_width = critical_value(len(logs) - 1, level) * logs.std(ddof=1) / math.sqrt(len(logs))
    low, middle, high = (math.exp(logs.mean() + side * half_width) for side in (-1, 0, 1))
    return Estimate(middle, Interval(low, high))


METHODS: Mapping[str, Callable[[Case], Claim]] = {
    "best_trial": best_trial,
    "naive": naive,
    "fixed": fixed,
    "patient": patient,
    "ours": ours,
}


def judged(world: World, seeds: range) -> dict[str, list[dict[str, float]]]:
    """Figures of one world, one row per case, by method."""
    cases = [draw(world, seed) for seed in seeds]
    found = {name: [row(case, method(case)) for case in cases] for name, method in METHODS.items()}
    return found | {"finals": [{"share": float(case.is_faster_among_finalists)} for case in cases]}


def row(case: Case, claim: Claim) -> dict[str, float]:
    """NaN where a figure says nothing about this case."""
    found = {"false": 0.0, "found": 0.0, "missed": np.nan, "claimed": np.nan, "split": np.nan}
    if claim.slower is not None:
        found["split"] = float(any(case.truth[number] >= case.truth[claim.winner] for number in claim.slower))
    if claim.winner is not None and claim.ratio is not None:
        truth = case.truth[claim.winner]
        found["false"], found["claimed"] = float(truth <= 1.0), claim.ratio.value / truth
        found["found"] = float(truth > 1.0)
        if truth > 1 and claim.ratio.ci95:
            found["missed"] = float(not claim.ratio.ci95.low <= truth <= claim.ratio.ci95.high)
    return found | {"rounds": claim.num_rounds, "runs": claim.num_runs}
