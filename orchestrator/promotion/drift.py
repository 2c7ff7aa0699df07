"""Drift: environment, speed and losses of today compared with those of the promotion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit

from orchestrator import units
from orchestrator.promotion.diff import differing
from orchestrator.proof.loss_gate import GateTrajectories, Trajectory, judge_gate
from orchestrator.statistics import Estimate, Interval
from orchestrator.sweep.values import GateSettings
from trials.codec import from_json
from trials.spec import Precision, Workload

Kind = Literal["driver", "library", "hardware", "training", "speed", "loss"]
KINDS: tuple[Kind, ...] = ("driver", "library", "hardware", "training", "speed", "loss")
"""Kinds of drift; ``training``: it does not run any more."""

_HARDWARE = ("hardware", "device_memory_bytes", "threads_per_device", "virtual")
MIN_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """One thing that was looked at."""

    kind: Kind
    is_drift: bool
    text: str
    """One sentence for people, without full stop."""


def environment(then: Mapping[str, str], now: Mapping[str, str]) -> list[DriftFinding]:
    """Findings for every name whose value is different; one finding without drift where none is."""
    found = [
        DriftFinding(kind=_kind(name), is_drift=True, text=f"{name} was {before}, is {after}")
        for name, (before, after) in sorted(differing(then, now).items())
    ]
    return found or [DriftFinding(kind="library", is_drift=False, text="the environment is the same")]


def _kind(name: str) -> Kind:
    return "driver" if name == "driver" else "hardware" if name in _HARDWARE else "library"


def speed(then: Sequence[float], now: Sequence[float], tolerance: float) -> tuple[DriftFinding, Estimate]:
    """Drift of the speed: shown slower, with 95 % confidence, by more than ``tolerance`` (relative)."""
    ratio = speed_ratio(then, now)
    if ratio.ci95 is None:
        slower = ratio.value < 1 - tolerance
        words = "without an interval: a single run then and now says nothing about the noise"
    else:
        slower = ratio.ci95.high < 1 - tolerance
        words = f"95 %: {units.ratio_interval(ratio.ci95)}"
    verdict = "slower by more than" if slower else "not shown slower by more than"
    text = f"{ratio.value:.3f}x the promoted speed ({words}), {verdict} {tolerance:.0%}"
    return DriftFinding(kind="speed", is_drift=slower, text=text), ratio


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
    runs = GateTrajectories(baseline=_trajectory(then), finalist=_trajectory(now))
    report = judge_gate(0, runs, gate, workload)
    if report.answer == "inconclusive":
        doubts = "; ".join(report.doubts).replace("the baseline's", "the promoted one's")
        return DriftFinding(kind="loss", is_drift=False, text=f"could not be told: {doubts}")
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
    )


def _numbers(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)
