"""The clocks of a gang's ranks on one node: which of them have to keep which deadlines, and who has missed one."""

from __future__ import annotations

import math
from dataclasses import replace

from cluster.base import Deadlines
from cluster.gang.deadlines import CompileTime, RankClock, due_at_s, overdue_reason
from cluster.gang.messages import NodeLaunch, RankProgress
from cluster.node.ranks.forked import ForkedRank


class GangClocks:
    """Follows the ranks of ``launch``, to which ``ranks`` is added as they are forked."""

    def __init__(self, launch: NodeLaunch, ranks: list[ForkedRank]) -> None:
        self._launch = launch
        self._ranks = ranks
        self._compiling = CompileTime(left_s=launch.deadlines.compile_s)

    def unsettled(self) -> list[ForkedRank]:
        """The ranks without a result."""
        return [rank for rank in self._ranks if rank.result is None]

    def watched(self) -> list[ForkedRank]:
        """The ranks that have to keep deadlines: all that are not done, but of a program of the user's own those that
        say anything, once any does. The others follow them."""
        waiting = self.unsettled()
        return [rank for rank in waiting if self.speaks(rank)] or waiting

    def speaks(self, rank: ForkedRank) -> bool:
        """Whether what the rank has reported tells how far it is: of a program of the user's own it need not report."""
        return not self._launch.is_script or rank.clock.reported_at_s is not None

    def slowest(self) -> RankClock:
        """The clock of the rank that is least far; there has to be a rank."""
        return min(self.watched() or self._ranks, key=lambda rank: rank.clock.position).clock

    def advance(self, rank: ForkedRank, progress: RankProgress, now_s: float) -> float:
        """Take in what a rank reports; gives the seconds of compiling that it brings to account."""
        since_s = rank.clock.compiles_since_s
        seconds = 0.0 if since_s is None else self.stand_still(now_s - since_s, now_s)
        rank.clock.advance(progress, now_s, is_sign=not progress.is_compiling or self._compiling.left_s > 0)
        return seconds

    def stand_still(self, seconds: float, now_s: float) -> float:
        """Leave out of all clocks so many seconds for which a rank of the gang has compiled, as far as they have not
        been yet; gives how many those were."""
        passed_s = self._compiling.passed(now_s - seconds, now_s)
        for rank in self._ranks:
            rank.clock.stand_still(passed_s, now_s)
        return passed_s

    def due_at_s(self) -> float:
        """When (monotonic) the next deadline is missed unless somebody reports before."""
        deadlines = self._deadlines
        return min((due_at_s(rank.clock, deadlines) for rank in self.watched()), default=math.inf)

    def overdue_reason(self, now_s: float) -> str | None:
        """Which deadline has been missed, for people; None where none has."""
        deadlines = self._deadlines
        overdue = min(self.watched(), key=lambda rank: due_at_s(rank.clock, deadlines), default=None)
        if overdue is None or now_s < due_at_s(overdue.clock, deadlines):
            return None
        compiling = next((rank.clock for rank in self.watched() if rank.clock.compiles_since_s is not None), None)
        if compiling is not None and self._compiling.left_s <= 0:  # the others wait for it
            where = f"in phase {compiling.phase} at step {compiling.step}"
            return f"compiling took longer than {deadlines.compile_s:g} s, {where}"
        return overdue_reason(overdue.clock, deadlines)

    @property
    def _deadlines(self) -> Deadlines:
        """Those of the launch. Of programs that tell of themselves on one node only, the others hear nothing."""
        found = self._launch.deadlines
        if not self._launch.is_script or self._launch.num_nodes == 1:
            return found
        return replace(found, starting_s=found.starting_s + found.warmup_s + found.measuring_s)
