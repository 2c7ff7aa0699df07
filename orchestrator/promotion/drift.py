"""Drift: environment, speed and losses of today compared with those of the promotion."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit

from orchestrator import units
from orchestrator.promotion.diff import differing
from orchestrator.proof.loss_gate import GateTrajectories, Trajectory, judge_gate
from orchestrator.proof.script_gate import ScriptRuns, judge_script
from orchestrator.scripts.source import PROGRAM
from orchestrator.statistics import Estimate, Interval
from orchestrator.sweep.values import GateSettings
from trials.codec import from_json
from trials.spec import Precision, ScriptModel, Workload

Kind = Literal["driver", "library", "program", "hardware", "training", "speed_up", "speed", "loss"]
KINDS: tuple[Kind, ...] = ("driver", "library", "program", "hardware", "training", "speed_up", "speed", "loss")
"""What is compared; ``program``: the source of the user's own training program, ``training``: whether it still runs,
``speed_up``: its speed over the baseline's, ``speed``: its own."""

_HARDWARE = ("hardware", "device_memory_bytes", "threads_per_device", "virtual")
MIN_STEPS = 2

Standing = Literal["same", "slower", "unclear"]
"""What a ratio of speeds shows with 95 % confidence: not slower by more than the tolerance, slower by more, neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """One thing that was looked at."""

    kind: Kind
    is_drift: bool
    text: str
    """One sentence for people, without full stop."""
    is_open: bool = False
    """Whether it could not be told: then nothing is verified unless something else has drifted."""


def environment(then: Mapping[str, str], now: Mapping[str, str]) -> list[DriftFinding]:
    """Findings for every name whose value is different; one finding without drift where none is.

    Other hardware is no drift: it is another machine, on which nothing of the first can be verified.
    """
    found = []
    for name, (before, after) in sorted(differing(then, now).items()):
        kind, text = _kind(name), f"{name} was {before}, is {after}"
        is_other = kind == "hardware"
        found.append(DriftFinding(kind=kind, is_drift=not is_other, is_open=is_other, text=text))
    return found or [DriftFinding(kind="library", is_drift=False, text="the environment is the same")]


def _kind(name: str) -> Kind:
    if name in ("driver", PROGRAM):
        return "driver" if name == "driver" else "program"
    return "hardware" if name in _HARDWARE else "library"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds of whole runs, in tokens/s/p."""

    configuration: Sequence[float]
    baseline: Sequence[float]
    """Runs of the same rounds, in their order; empty where there is no baseline."""

    @property
    def ratios(self) -> list[float]:
        """Speed-up in each round."""
        return [one / other for one, other in zip(self.configuration, self.baseline, strict=True)]


def speeds(then: Speeds, now: Speeds, tolerance: float, busy: str) -> list[DriftFinding]:
    """Drift of the speed-up over the baseline, and of the speed itself.

    The first is what belongs to the configuration: both were measured interleaved. A speed that is lower while the
    speed-up holds is the machine's, for an hour or for good, which one look cannot tell apart.

    Args:
        tolerance: relative loss that does not count.
        busy: what the machine was busy with meanwhile; empty where it was quiet.
    """
    ratio = _speed_up(then, now, tolerance) if then.baseline and now.baseline else None
    own, told = standing(speed_ratio(then.configuration, now.configuration), tolerance)
    text = f"{told} of the promoted speed"
    if busy:
        found = [*([ratio] if ratio else []), DriftFinding(kind="speed", is_drift=False, text=text)]
        return [replace(one, is_drift=False, is_open=True, text=f"{one.text}, but {busy}") for one in found]
    if ratio is None:
        return [DriftFinding(kind="speed", is_drift=own == "slower", is_open=own == "unclear", text=text)]
    if own == "slower" and not ratio.is_drift and not ratio.is_open:
        _, baseline = standing(speed_ratio(then.baseline, now.baseline), tolerance)
        text += f"; the baseline's is {baseline}: the machine is slower, the configuration keeps its lead"
        return [ratio, DriftFinding(kind="speed", is_drift=False, is_open=True, text=text)]
    if own == "unclear" and not ratio.is_open:
        text += "; the speed-up beside the baseline is what counts"
    is_drift, is_open = own == "slower" and ratio.is_drift, own == "unclear" and ratio.is_open
    return [ratio, DriftFinding(kind="speed", is_drift=is_drift, is_open=is_open, text=text)]


def _speed_up(then: Speeds, now: Speeds, tolerance: float) -> DriftFinding:
    found, told = standing(speed_ratio(then.ratios, now.ratios), tolerance)
    before, after = (statistics.geometric_mean(one.ratios) for one in (then, now))
    text = f"{after:.2f}x the baseline, {before:.2f}x then: {told}"
    return DriftFinding(kind="speed_up", is_drift=found == "slower", is_open=found == "unclear", text=text)


def standing(ratio: Estimate, tolerance: float) -> tuple[Standing, str]:
    """What a ratio of today's speed over that of the promotion shows, and that in words."""
    if ratio.ci95 is None:
        return "unclear", f"{ratio.value:.3f}x (a single run then and now says nothing about the noise)"
    words = f"{ratio.value:.3f}x (95 %: {units.ratio_interval(ratio.ci95)})"
    if ratio.ci95.high < 1 - tolerance:
        return "slower", f"{words}, slower by more than {tolerance:.0%}"
    if ratio.ci95.low > 1 - tolerance:
        return "same", f"{words}, not slower by more than {tolerance:.0%}"
    return "unclear", f"{words}, too noisy to tell a loss of {tolerance:.0%}"


def speed_ratio(then: Sequence[float], now: Sequence[float]) -> Estimate:
    """Today's speed over that of the promotion, from the logarithms of whole runs.

    Their noise is pooled (Student's t with equal variances): there are few runs, and they are alike.
    """
    before, after = np.log(np.asarray(then)), np.log(np.asarray(now))
    mean = float(after.mean() - before.mean())
    degrees = len(before) + len(after) - 2
    if degrees < 1:
        return Estimate(math.exp(mean), None)
    squares = float(((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum())
    error = math.sqrt(squares / degrees * (1 / len(before) + 1 / len(after)))
    half_width = float(stdtrit(degrees, 0.975)) * error
    return Estimate(math.exp(mean), Interval(math.exp(mean - half_width), math.exp(mean + half_width)))


def loss(then: Mapping[str, Any], now: Mapping[str, Any], settings: GateSettings, workload: Workload) -> DriftFinding:
    """Drift of the training: losses or gradient norms beyond the limits of the loss gate.

    Both are :func:`orchestrator.promotion.evidence.trajectory_json` of runs with one seed and one configuration.
    """
    num_steps = min(len(then.get("losses", ())), len(now.get("losses", ())))
    if num_steps < MIN_STEPS:
        return DriftFinding(kind="loss", is_drift=False, text="no losses were kept to compare with")
    gate = GateSettings(
        num_steps=num_steps,
        loss_tolerance=settings.loss_tolerance,
        grad_norm_tolerance=settings.grad_norm_tolerance,
    )
    before, after = _trajectory(then), _trajectory(now)
    if isinstance(workload.model, ScriptModel):
        report = judge_script(0, ScriptRuns(baseline=before, again=None, finalist=after, splits_alike=True), gate)
    else:
        report = judge_gate(0, GateTrajectories(baseline=before, finalist=after), gate, workload)
    if report.answer == "inconclusive":
        doubts = "; ".join(report.doubts).replace("the baseline's", "the promoted one's")
        return DriftFinding(kind="loss", is_drift=False, is_open=True, text=doubts)
    if report.passed:
        deviation = f"{report.loss_deviation:.2g}" if report.loss_deviation is not None else "unknown"
        return DriftFinding(kind="loss", is_drift=False, text=f"the same in {num_steps} steps (within {deviation})")
    reasons = "; ".join(report.reasons).replace("the baseline's", "the promoted one's")
    return DriftFinding(kind="loss", is_drift=True, text=reasons)


def _trajectory(stored: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        losses=_numbers(stored["losses"]),
        grad_norms=_numbers(stored["grad_norms"]),
        num_skipped_steps=stored["num_skipped_steps"],
        precision=from_json(Precision, stored["precision"]),
        matmul_precision=stored["matmul_precision"],
        micro_batch_size=stored["micro_batch_size"],
        loss_resolution=stored.get("loss_resolution", 0.0),
    )


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)
