"""When a rank has missed a deadline, from the reports seen and the clock. No effects."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.base import Deadlines
from cluster.gang.messages import PHASES, RankProgress
from trials.outcome import Phase


@dataclass(slots=True, kw_only=True)
class RankClock:
    """The phase and step that a rank has reported last, and when (monotonic seconds)."""

    entered_at_s: float
    """When the present phase began."""
    reported_at_s: float | None = None
    """When the last report came; None before the first, while only the starting deadline counts."""
    phase: Phase = "starting"
    step: int = 0
    step_time_s: float | None = None
    compiles_since_s: float | None = None
    """When it told last that it compiles; None while it does not."""

    def advance(self, progress: RankProgress, now_s: float, *, is_sign: bool = True) -> None:
        """Take in a report; ``is_sign``: whether it is a sign of life, which compiling is not for ever."""
        if progress.phase != self.phase:
            self.entered_at_s = now_s
        self.phase, self.step, self.step_time_s = progress.phase, progress.step, progress.step_time_s
        self.compiles_since_s = now_s if progress.is_compiling else None
        if is_sign:
            self.reported_at_s = now_s

    def stand_still(self, seconds: float, now_s: float) -> None:
        """Leave out so many seconds that have just passed: neither of the deadlines counts them."""
        self.entered_at_s = min(now_s, self.entered_at_s + seconds)
        if self.reported_at_s is not None:
            self.reported_at_s = min(now_s, self.reported_at_s + seconds)

    def wait_anew(self, now_s: float) -> None:
        """Begin the phase again, if nothing was ever reported: a peer is done, and this rank will be."""
        if self.reported_at_s is None:
            self.entered_at_s = now_s

    @property
    def position(self) -> tuple[int, int]:
        """Phase and step as numbers: larger means further."""
        return PHASES.index(self.phase), self.step


@dataclass(slots=True, kw_only=True)
class CompileTime:
    """The time for which ranks of a gang compile, one or several at a time: it counts towards no deadline but its
    own."""

    left_s: float
    """Seconds that it may still take."""
    counted_until_s: float = -math.inf
    """Until when (monotonic) it has been counted, so that ranks that compile side by side count once."""

    def passed(self, since_s: float, now_s: float) -> float:
        """Count the time between, during which a rank has compiled; gives the seconds that are new and allowed."""
        seconds = min(max(0.0, now_s - max(since_s, self.counted_until_s)), self.left_s)
        self.counted_until_s = max(self.counted_until_s, now_s)
        self.left_s -= seconds
        return seconds


def due_at_s(clock: RankClock, deadlines: Deadlines) -> float:
    """When the rank will be overdue unless it reports before."""
    phase_end = clock.entered_at_s + _allowed_s(clock.phase, deadlines)
    return phase_end if clock.reported_at_s is None else min(phase_end, clock.reported_at_s + deadlines.stall_s)


def overdue_reason(clock: RankClock, deadlines: Deadlines) -> str:
    """Which of the two deadlines :func:`due_at_s` is about, for people."""
    allowed_s = _allowed_s(clock.phase, deadlines)
    if due_at_s(clock, deadlines) < clock.entered_at_s + allowed_s:
        return f"no progress for {deadlines.stall_s:g} s in phase {clock.phase} at step {clock.step}"
    return f"phase {clock.phase} took longer than {allowed_s:g} s, at step {clock.step}"


def _allowed_s(phase: Phase, deadlines: Deadlines) -> float:
    return {
        "starting": deadlines.starting_s,
        "warmup": deadlines.warmup_s,
        "measuring": deadlines.measuring_s,
    }[phase]
