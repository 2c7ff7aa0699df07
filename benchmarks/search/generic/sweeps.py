"""One sweep over a synthetic program by one of the product's samplers, with the facts that a cluster would report."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.search.generic.programs import Program
from cluster.hardware.topology import ClusterDescription, Device, catalogue
from orchestrator.search.knob_effects import RelativePredictor
from orchestrator.search.predictor import Predictor
from orchestrator.search.search import GuidedSearch, SamplerName, Search
from orchestrator.space.notation import flat_params
from orchestrator.sweep.events import (
    AttemptEnded,
    AttemptLaunched,
    Budget,
    Event,
    Hardware,
    SweepCreated,
    TrialProposed,
)
from orchestrator.sweep.fold import fold
from trials.outcome import Evidence, Measured, Measurement, Outcome, OutOfMemory, StepBreakdown
from trials.spec import Candidate, ScriptModel

RUN_STD = 0.008
"""Standard deviation of the log of a run's speed, the same for all of its steps."""
STEP_STD = 0.02
"""The same of a step within its run."""
SLOW_SHARE, SLOW = 0.05, (1.1, 1.5)
"""Share of steps that something else on the machine slows down, and by what factors."""
NUM_STEPS = 8
PEAK_STD = 0.01
"""How far, in log, a reported peak may lie below the true one."""
TOLERANCE = 0.02
LAST_REGRET = 20
"""Trials after which the last regret is reported: no search ends before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a sweep came to: device-seconds of its trials in order, infinite where memory ran out."""

    device_s: tuple[float, ...]
    best_s: float
    num_trials: int

    @property
    def to_best(self) -> int:
        """Trials until within 2% of the best; one more than allowed where that was never reached."""
        near = (i for i, value in enumerate(self.device_s, start=1) if value <= self.best_s * (1 + TOLERANCE))
        return next(near, self.num_trials + 1)

    def regret(self, number: int) -> float:
        """How much longer than the best the best of the first so many trials takes."""
        return min(self.device_s[:number]) / self.best_s - 1

    @property
    def num_oom(self) -> int:
        """Trials among the first ten that ran out of memory."""
        return sum(math.isinf(value) for value in self.device_s[:10])


def searched(program: Program, tried: Sequence[Candidate], num_trials: int) -> Searched:
    """What these trials came to by the truth."""
    return Searched(
        device_s=tuple(program.times_s.get(one, math.inf) * one.layout.world_size for one in tried),
        best_s=min(time_s * candidate.layout.world_size for candidate, time_s in program.times_s.items()),
        num_trials=num_trials,
    )


def is_settled(program: Program, tried: Sequence[Candidate]) -> bool:
    """Whether further trials change no figure."""
    return len(tried) >= LAST_REGRET and searched(program, tried, len(tried)).to_best <= len(tried)


def search(
    program: Program, sampler: SamplerName, seed: int, num_trials: int, *, reports_peaks: bool = True
) -> Searched:
    """A sweep of so many trials, the baseline first. ``reports_peaks``: whether those that ran state their peaks."""
    guide = GuidedSearch(_predictor(program)) if sampler == "guided" else None
    sweep = Search(program.candidates, features=flat_params, sampler=sampler, seed=seed, guide=guide)
    rng = random.Random(f"{program.name}/{seed}")
    events: list[Event] = [_created(program, num_trials)]
    seen = []
    for number in range(min(num_trials, len(program.candidates))):
        suggestion = None if number == 0 else sweep.suggest(number, fold(events))
        if number and suggestion is None:
            break
        candidate = program.baseline if suggestion is None else suggestion.candidate
        outcome = _outcome(program, candidate, rng, reports_peaks=reports_peaks)
        events += _trial(number, candidate, outcome)
        seen.append(candidate)
        if is_settled(program, seen):
            break
    return searched(program, seen, num_trials)


def step_times(true_s: float, rng: random.Random) -> tuple[float, ...]:
    """Return what the steps of one run measure."""
    run_s = true_s * math.exp(rng.gauss(0.0, RUN_STD))
    slowed = (rng.uniform(*SLOW) if rng.random() < SLOW_SHARE else 1.0 for _ in range(NUM_STEPS))
    return tuple(run_s * factor * math.exp(rng.gauss(0.0, STEP_STD)) for factor in slowed)


def _predictor(program: Program) -> Predictor | RelativePredictor:
    """What the product makes of the program: the generic cost model for our models, usual effects for scripts."""
    accelerator = catalogue()[program.device]
    others: Sequence[Candidate] = () if program.baseline in program.candidates else (program.baseline,)
    candidates = (*program.candidates, *others)
    if isinstance(program.workload.model, ScriptModel):
        return RelativePredictor(
            program.workload,
            candidates,
            baseline=program.baseline,
            features=flat_params,
            kind="cpu" if program.device == "cpu" else "accelerator",
            limit_bytes=program.limit_bytes,
        )
    cluster = ClusterDescription(
        name="made",
        accelerator=accelerator,
        num_nodes=1,
        devices_per_node=8,
        network_bytes_per_s=accelerator.network_bytes_per_s,
    )
    return Predictor(program.workload, candidates, cluster, features=flat_params)


def _created(program: Program, num_trials: int) -> SweepCreated:
    return SweepCreated(
        at_s=0.0,
        sweep="made",
        spec_hash="0" * 64,
        workload=program.workload,
        budget=Budget(max_trials=num_trials),
        max_concurrent=1,
        num_legal=len(program.candidates),
        hardware="made",
        devices=Hardware(num_nodes=1, devices_per_node=1, device_name="made", device_kind="cuda"),
        cluster_kind="simulated",
        fingerprint={},
    )


def _trial(number: int, candidate: Candidate, outcome: Outcome) -> list[Event]:
    origin: Literal["sampler", "baseline"] = "sampler" if number else "baseline"
    token, ranks = f"token-{number}", tuple(Device(node="made", index=i) for i in range(candidate.layout.world_size))
    return [
        TrialProposed(at_s=number, trial=number, candidate=candidate, origin=origin, reason="made"),
        AttemptLaunched(at_s=number, trial=number, attempt=0, token=token, ranks=ranks, num_devices=len(ranks)),
        AttemptEnded(at_s=number, trial=number, token=token, outcome=outcome, device_seconds=1.0),
    ]


def _outcome(program: Program, candidate: Candidate, rng: random.Random, *, reports_peaks: bool) -> Outcome:
    true_s = program.times_s.get(candidate)
    if true_s is None:
        return OutOfMemory(evidence=Evidence(rank=0, message="out of memory"))
    times_s = step_times(true_s, rng)
    peak = int(program.peaks[candidate] * math.exp(-abs(rng.gauss(0.0, PEAK_STD)))) if reports_peaks else 0
    return Measured(
        measurement=Measurement(
            world_size=candidate.layout.world_size,
            tokens_per_step=program.workload.tokens_per_step,
            step_times_s=times_s,
            breakdown=StepBreakdown(data_s=0.0, forward_s=0.0, backward_s=0.0, optimizer_s=0.0, other_s=true_s),
            peak_allocated_bytes=(peak,),
            peak_reserved_bytes=(peak,),
            num_warmup_steps=2,
            losses=(1.0,),
            grad_norms=(1.0,),
            model_flops_per_token=0.0,
        )
    )
