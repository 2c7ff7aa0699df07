"""Requests to simulate a rank and the replies, which cross process boundaries as JSON. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trials.spec import TrialSpec

VERSION = 6
"""Version of the simulation; results of other versions are not comparable."""

Category = Literal["param", "grad", "optimizer", "activation", "temporary", "communication", "input"]
CATEGORIES: tuple[Category, ...] = (
    "param",
    "grad",
    "optimizer",
    "activation",
    "temporary",
    "communication",
    "input",
)
"""Categories of live memory. ``param`` counts buffers too, ``optimizer`` fp32 masters; ``activation`` is what the
forward pass leaves, ``temporary`` what the backward pass and the optimiser allocate on the way; ``communication`` holds
gathered parameters, buckets and buffers of collectives."""

BUILD = "build/0/"
"""The place of a peak from before the first step."""

Mode = Literal["accelerator", "cpu"]
"""``accelerator``: memory behaviour of CUDA kernels and of its caching allocator's rounding. ``cpu``: exactly what the
CPU kernels do, to be compared with real runs there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunRequest:
    """Simulate ``rank`` of the trial's world."""

    spec: TrialSpec
    rank: int
    mode: Mode = "accelerator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Largest sum of live memory while the rank was at one place of the step."""

    total_bytes: int
    by_category: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one type, of one rank in one step.

    The bytes of a call are those of its larger side on this rank: the output of a gather, the input of a scatter.
    """

    num_calls: int
    num_bytes: int


PassKind = Literal["forward", "backward", "input", "weights"]
"""A backward pass may go through in one, or gradients of its input first and those of weights later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """One micro-batch going one way through a chunk of layers, and what follows until the next pass begins."""

    kind: PassKind
    chunk: int
    live: Mapping[str, int]
    """Bytes on the device as it begins, by category."""
    host_bytes: int
    """Bytes of the host's memory as it begins."""
    peak_host_bytes: int
    flops: Mapping[str, int]
    collectives: Mapping[str, Traffic]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What a simulated step of one rank in steady state takes."""

    rank: int
    num_parameters: int
    """Elements stored on this rank."""
    peaks: Mapping[str, Peak]
    """Peaks by place of the step, ``phase/pass/where``: ``backward/3/0.1 first+0`` is the step's third pass, in chunk
    0, in its second run of equal layers, in the first of those. Before the first pass it is pass 0. :data:`BUILD` is
    what building the rank took."""
    flops: Mapping[str, int]
    """FLOPs by ``forward``, ``backward`` and ``recompute``."""
    collectives: Mapping[str, Traffic] = field(default_factory=dict)
    passes: tuple[PassRun, ...] = ()
    """Those of the step, in their order."""
    host_bytes: int = 0
    """Peak of what waits in the host's memory."""
    cpu_s: float = 0.0
    """CPU seconds the simulation took."""

    @property
    def peak_bytes(self) -> int:
        return max(peak.total_bytes for peak in self.peaks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """A simulation that did not get through."""

    reason: Literal["infeasible", "error", "timeout", "died"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a :class:`DryRunRequest`: exactly one of the two."""

    run: RankRun | None = None
    failure: RunFailure | None = None
