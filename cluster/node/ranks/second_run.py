"""The second run of a gang that had to compile, on one node: what compiling takes from a cache that is warm."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import selectors
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster.gang.environment import started_again
from cluster.gang.messages import NodeLaunch, RankResult, RankSlot, RankSuccess
from cluster.node.ranks.forked import ForkedRank, fork_process
from cluster.node.ranks.rank import RankPipes, result_file
from trials.codec import CodecError, from_json
from trials.files import make_private_folder
from trials.outcome import RankReport
from trials.reports.findings import GraphReport
from trials.secrets import redact_file

MARGIN_S = 10.0
"""How much longer a second run may take than what it repeats: nodes need not begin it at the same moment."""
NUM_STEPS = 2
"""Steps that it takes, see :func:`trials.worker.compile_again`."""


class SecondRun:
    """The ranks of a gang on this node, started once more with another runner when those before are gone: they compile
    what those have compiled, from the cache that those left warm.

    Nobody listens to them. A rank leaves its result in a file, or the reason why there is none in its log.

    Args:
        ranks: those of the first run, each of which has a report.
        starting_s: seconds that those took until they had started.
    """

    def __init__(self, launch: NodeLaunch, ranks: Sequence[ForkedRank], starting_s: float) -> None:
        reports = {rank.slot.rank: rank.result.report for rank in ranks if isinstance(rank.result, RankSuccess)}
        self._launch = started_again(launch, asked_again(ranks))
        self._attempt = launch.directory
        self._folder = Path(self._launch.directory)
        self._ranks = ranks
        self._graphs = {rank: report.findings.graph for rank, report in reports.items()}
        self._limit_s = second_limit_s(list(reports.values()), starting_s)
        self._running: dict[int, RankSlot] = {}
        """By the descriptor that tells when the rank's process has ended."""
        self._has_failed = False
        self.due_at_s = math.inf
        """When (monotonic) it has to have ended."""

    def start(self, selector: selectors.BaseSelector) -> None:
        """Fork the ranks, and have ``selector`` tell when they end. Where that fails, there is nothing to wait for."""
        self._selector = selector
        self.due_at_s = time.monotonic() + self._limit_s
        _touch(self._attempt)
        try:
            make_private_folder(self._folder)
            nobody = os.open(os.devnull, os.O_RDWR)
            try:
                for slot in self._launch.slots:
                    self._fork(slot, nobody)
            finally:
                os.close(nobody)
        except OSError:  # no space for their files, no further process or descriptor
            self._has_failed = True

    def _fork(self, slot: RankSlot, nobody: int) -> None:
        pid = fork_process(self._launch, slot, RankPipes(told=nobody, asked=nobody))
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = slot
        self._selector.register(pidfd, selectors.EVENT_READ, functools.partial(self._note_end, pidfd))

    @property
    def is_running(self) -> bool:
        """Whether there is something to wait for: after the first rank without a result there is not."""
        return bool(self._running) and not self._has_failed and time.monotonic() < self.due_at_s

    def end(self) -> None:
        """Wait for nothing any more, and put what compiling took into the results of the first run; nothing where any
        rank found out nothing. No process of it may be left. Secrets go from the logs."""
        for pidfd in list(self._running):
            self._forget(pidfd)
        _touch(self._attempt)
        seconds = {slot.rank: self._compile_s(slot) for slot in self._launch.slots}
        for rank in self._ranks:
            if None not in seconds.values() and isinstance(rank.result, RankSuccess):
                rank.result = with_second_compilation(rank.result, seconds[rank.slot.rank])
            with contextlib.suppress(OSError):
                redact_file(self._folder / rank.log.name)

    def _note_end(self, pidfd: int, _: int) -> None:
        self._has_failed |= self._compile_s(self._forget(pidfd)) is None

    def _forget(self, pidfd: int) -> RankSlot:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        return self._running.pop(pidfd)

    def _compile_s(self, slot: RankSlot) -> float | None:
        """Seconds that the rank says compiling took from the cache; None where it has not said so."""
        try:
            kept = json.loads((self._folder / result_file(slot)).read_text())
            result: RankResult = from_json(RankResult, kept["result"])
        except (OSError, ValueError, KeyError, CodecError):
            return None
        if not isinstance(result, RankSuccess):
            return None
        return warm_compile_s(result.report, self._graphs[slot.rank])


def warm_compile_s(again: RankReport, first: GraphReport | None) -> float | None:
    """Seconds of compilation that a rank tells of its second run; None unless all came from the cache, as far as there
    is anything in it of the rank's code: a stage of a pipeline may have nothing that the compiler keeps."""
    graph = again.findings.graph
    if graph is None or first is None or not 0.0 <= again.compile_s < math.inf:
        return None
    is_warm = graph.cache == "warm" or (graph.cache is None and first.cache is None)
    return again.compile_s if is_warm else None


def second_limit_s(reports: Sequence[RankReport], starting_s: float) -> float:
    """Seconds that the second run of ranks with these reports may take: as long as their start, their compilation and
    their slowest steps have taken, and :data:`MARGIN_S`."""
    compile_s = max((report.compile_s for report in reports), default=0.0)
    step_s = max((max(report.step_times_s, default=0.0) for report in reports), default=0.0)
    return starting_s + compile_s + NUM_STEPS * step_s + MARGIN_S


def asked_again(ranks: Sequence[ForkedRank]) -> str:
    """The runner with which the ranks, each of which has a report, ask to be started once more; empty if none does."""
    asked = {rank.result.report.again if isinstance(rank.result, RankSuccess) else "" for rank in ranks}
    return asked.pop() if len(asked) == 1 else ""


def with_second_compilation(success: RankSuccess, seconds: float | None) -> RankSuccess:
    """The report, with how long compiling took once more."""
    report, graph = success.report, success.report.findings.graph
    if graph is None:
        return success
    findings = replace(report.findings, graph=replace(graph, again_s=seconds))
    return replace(success, report=replace(report, findings=findings))


def _touch(folder: str) -> None:
    """Show for how long the attempt holds its devices, should the controller die."""
    with contextlib.suppress(OSError):
        os.utime(folder)
