"""Takes note of every forward and backward pass of a simulated step: what is live as it begins, what work follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trials.dryrun.records import CATEGORIES, PassKind, PassRun, Traffic
from trials.dryrun.tracker import MemoryTracker, TrafficCounter
from trials.training.pipeline import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The tracker's counts as a pass begins."""

    kind: PassKind
    chunk: int
    live: dict[str, int]
    host_bytes: int
    flops: Counter[str]
    tally: TrafficCounter


class PassLog:
    """The passes of a step so far."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._moments: list[_Moment] = []
        self._host_peaks: list[int] = []
        """Those of passes that are over."""

    def watch(self, stages: list[Stage]) -> None:
        """Log the passes of a pipeline's stages."""
        for chunk, stage in enumerate(stages):
            for name, function in (
                ("forward_one_chunk", self._forward),
                ("backward_one_chunk", self._backward),
                ("backward_weight_one_chunk", self._weights),
            ):
                setattr(stage, name, function(chunk, getattr(stage, name)))

    def begin(self, kind: PassKind, chunk: int) -> None:
        """Note that a pass begins, and with that the one before is over."""
        tracker = self._tracker
        if self._moments:
            self._host_peaks.append(tracker.peak_host_bytes)
        self._moments.append(
            _Moment(
                kind=kind,
                chunk=chunk,
                live={name: tracker.live_bytes[name] for name in CATEGORIES},
                host_bytes=tracker.host_bytes,
                flops=Counter(tracker.flops),
                tally=tracker.tally(),
            )
        )
        tracker.begin_pass()

    def count(self, kind: PassKind) -> int:
        """How many passes of that kind have begun."""
        return sum(moment.kind == kind for moment in self._moments)

    def runs(self) -> tuple[PassRun, ...]:
        """All passes, once the step is over."""
        ends = [(moment.flops, moment.tally) for moment in self._moments[1:]]
        ends.append((Counter(self._tracker.flops), self._tracker.tally()))
        peaks = [*self._host_peaks, self._tracker.peak_host_bytes]
        return tuple(
            PassRun(
                kind=moment.kind,
                chunk=moment.chunk,
                live=moment.live,
                host_bytes=moment.host_bytes,
                peak_host_bytes=peak,
                flops=flops - moment.flops,
                collectives=_traffic(tally - moment.tally),
            )
            for moment, (flops, tally), peak in zip(self._moments, ends, peaks, strict=False)
        )

    def _forward(self, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.begin("forward", chunk)
            return function(*args, **options)

        return run

    def _backward(self, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
            self.begin("backward" if full_backward else "input", chunk)
            return function(number, loss, full_backward, last_backward)

        return run

    def _weights(self, chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.begin("weights", chunk)
            return function(*args, **options)

        return run


def _traffic(counter: TrafficCounter) -> dict[str, Traffic]:
    names = sorted({name for name, _ in counter})
    return {name: Traffic(num_calls=counter[name, "calls"], num_bytes=counter[name, "bytes"]) for name in names}
