"""Whether a promoted configuration has lost speed: rounds of today compared with those of its promotion.

Two ratios are looked at. The *lead* is today's speed-up over the baseline divided by that of the promotion: what a
round has in common cancels, so a slow hour of the machine does no harm, but the noise of both trials is in it. The
*own* speed, today's over that of the promotion, has the noise of one trial only and sees every slow hour. A loss is
ruled out once either interval leaves it out: whoever runs as fast as then has lost nothing, and neither has whoever
keeps the lead on a slower machine. A loss is shown by the lead alone; without a baseline, by the own speed.

Both are differences of means of logarithms, of rounds then and now. The noise is pooled over both, unless one of them
is noisier by itself. Intervals hold at all looks together in 95 %, with the levels of
:mod:`orchestrator.proof.confirmation` for rounds that are all compared with the same earlier ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from orchestrator.proof.confirmation import Design, critical_value, nominal_levels
from orchestrator.statistics import Estimate, ratio_of_logs

Loss = Literal["excluded", "shown", "open"]
"""A loss beyond the tolerance is ruled out; there is one; neither is shown."""

FIRST_LOOK = 3
"""Rounds before the first look."""
MAX_BUSY = 6
"""Rounds on a busy machine after which a verification without a baseline stops, if they are the majority."""
_MAX_FORECAST = 100
"""Rounds that are foreseen at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Speeds by round, in a unit that all share."""

    own: Sequence[float]
    """Speeds of the configuration."""
    baseline: Sequence[float] = ()
    """Those of the baseline in the same rounds; empty where the configuration is the baseline."""

    @property
    def leads(self) -> list[float]:
        """Speed-up over the baseline in each round."""
        return [one / other for one, other in zip(self.own, self.baseline, strict=True)] if self.baseline else []


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChange:
    """What rounds of today show beside those of the promotion."""

    loss: Loss
    tolerance: float
    num_rounds: int
    own: Estimate
    """Today's speed over that of the promotion."""
    lead: Estimate | None
    """Today's speed-up over that of the promotion; None without a baseline."""
    baseline: float | None
    """The baseline's speed today over that of then; None without one."""
    speedups: tuple[float, float] | None
    """Speed-up over the baseline then and today; None without a baseline."""
    is_hopeless: bool
    """Whether the rounds left are not expected to settle it."""
    more_rounds: int | None
    """About how many more rounds would settle it; None where it is settled, or no number of them would."""

    @property
    def excluded_loss(self) -> float | None:
        """The smallest relative loss that is ruled out, 0 to 1; None before the first look."""
        lows = [one.ci95.low for one in (self.own, self.lead) if one is not None and one.ci95 is not None]
        return max(0.0, 1.0 - max(lows)) if lows else None

    @property
    def shown_loss(self) -> float | None:
        """The relative loss that there is at least; None where none is shown."""
        of = self.lead or self.own
        return 1.0 - of.ci95.high if self.loss == "shown" and of.ci95 is not None else None

    @property
    def is_own_speed_lower(self) -> bool:
        """Whether the configuration itself runs slower by more than the tolerance."""
        return self.own.ci95 is not None and self.own.ci95.high < 1 - self.tolerance


def change(
    then: Rounds,
    now: Rounds,
    *,
    tolerance: float,
    max_rounds: int,
    first_look: int = FIRST_LOOK,
    rounded_away: tuple[float, float] = (0.0, 0.0),
) -> SpeedChange:
    """Compare rounds of today with those of the promotion.

    Args:
        tolerance: relative loss that does not count.
        max_rounds: rounds of today that may be measured.
        rounded_away: how far the logarithms of the speeds of configuration and baseline may be off today because their
            times were reported as rounded figures; those of the promotion are taken to be as coarse.
    """
    last_look = max(first_look, max_rounds, len(now.own))
    own_off, baseline_off = rounded_away
    own = _Difference.of(then.own, now.own, first_look, last_look, 2 * own_off)
    lead = None
    if then.baseline and now.baseline:
        lead = _Difference.of(then.leads, now.leads, first_look, last_look, 2 * (own_off + baseline_off))
    threshold = math.log1p(-tolerance)
    excluding, showing = [one for one in (own, lead) if one is not None], lead or own
    loss: Loss = "open"
    if showing.mean + showing.half_width < threshold:
        loss = "shown"
    elif any(one.mean - one.half_width > threshold for one in excluding):
        loss = "excluded"
    num_left = max(0, max_rounds - len(now.own))
    may_settle = showing.may_fall_below(threshold, num_left) or any(
        one.may_stay_above(threshold, num_left) for one in excluding
    )
    return SpeedChange(
        loss=loss,
        tolerance=tolerance,
        num_rounds=len(now.own),
        own=own.ratio,
        lead=lead.ratio if lead else None,
        baseline=_mean(now.baseline) / _mean(then.baseline) if lead else None,
        speedups=(_mean(then.leads), _mean(now.leads)) if lead else None,
        is_hopeless=loss == "open" and not may_settle,
        more_rounds=_more_rounds(excluding, showing, threshold) if loss == "open" else None,
    )


def _mean(speeds: Sequence[float]) -> float:
    return statistics.geometric_mean(speeds)


def is_too_busy(num_quiet: int, num_rounds: int) -> bool:
    """Whether so many rounds were measured on a busy machine that further ones are not worth measuring now."""
    num_busy = num_rounds - num_quiet
    return num_busy >= MAX_BUSY and num_busy > num_quiet


def _more_rounds(excluding: Sequence[_Difference], showing: _Difference, threshold: float) -> int | None:
    """Rounds after which it would be settled if means and noise stayed what they are."""
    num_rounds = showing.num_now
    for total in range(max(num_rounds, FIRST_LOOK) + 1, _MAX_FORECAST + 1):
        is_shown = showing.mean + showing.half_width_after(total) < threshold
        if is_shown or any(one.mean - one.half_width_after(total) > threshold for one in excluding):
            return total - num_rounds
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Mean logarithm of speeds of today less that of the promotion."""

    mean: float
    half_width: float
    """Half-width of its interval; infinite before the first look."""
    noise_then: float
    """Standard deviation of one round's logarithm."""
    noise_now: float
    num_then: int
    num_now: int
    last_level: float
    rounded: float

    @classmethod
    def of(
        cls, then: Sequence[float], now: Sequence[float], first_look: int, last_look: int, rounded: float
    ) -> _Difference:
        before, after = np.log(np.asarray(then)), np.log(np.asarray(now))
        degrees = len(before) + len(after) - 2
        squares_then, squares_now = (float(((logs - logs.mean()) ** 2).sum()) for logs in (before, after))
        pooled = math.sqrt((squares_then + squares_now) / degrees) if degrees else math.inf
        levels = nominal_levels(
            Design(num_finalists=1, first_look=first_look, last_look=last_look, family="earlier", num_then=len(before))
        )
        found = cls(
            mean=float(after.mean() - before.mean()),
            half_width=math.inf,
            noise_then=max(pooled, _deviation(squares_then, len(before))),
            noise_now=max(pooled, _deviation(squares_now, len(after))),
            num_then=len(before),
            num_now=len(after),
            last_level=levels[-1],
            rounded=rounded,
        )
        if len(after) < first_look:
            return found
        return replace(found, half_width=found._half_width(len(after), levels[len(after) - first_look]))

    @property
    def ratio(self) -> Estimate:
        return ratio_of_logs(self.mean, self.half_width)

    def half_width_after(self, num_now: int) -> float:
        """Half-width after so many rounds of today, as far as can be foreseen."""
        return self._half_width(num_now, self.last_level)

    def may_stay_above(self, threshold: float, num_left: int) -> bool:
        """Whether the rounds left could exclude ``threshold`` from below, if they were like the interval's upper end.

        Intervals hold whenever rounds end, so giving up early makes no claim less sure.
        """
        if self.half_width == math.inf:
            return True
        total = self.num_now + num_left
        best = self.mean + self.half_width * num_left / total
        return best - self.half_width_after(total) > threshold

    def may_fall_below(self, threshold: float, num_left: int) -> bool:
        """Whether the rounds left could exclude ``threshold`` from above; as :meth:`may_stay_above`."""
        if self.half_width == math.inf:
            return True
        total = self.num_now + num_left
        worst = self.mean - self.half_width * num_left / total
        return worst + self.half_width_after(total) < threshold

    def _half_width(self, num_now: int, level: float) -> float:
        error = math.sqrt(self.noise_then**2 / self.num_then + self.noise_now**2 / num_now)
        return critical_value(self.num_then + num_now - 2, level) * error + self.rounded


def _deviation(squares: float, count: int) -> float:
    return math.sqrt(squares / (count - 1)) if count > 1 else 0.0
