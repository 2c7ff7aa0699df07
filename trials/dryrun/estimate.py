"""Requests to simulate a rank and the replies, which cross process boundaries as JSON. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trials.spec import Layout, TrialSpec

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


# Estimates: memory, FLOPs and collectives that a dry run counted for a candidate. Standard library only.


FRAGMENTATION = 0.05
"""Share of its live memory that an allocator holds beyond it. See docs/dry-run.md for where the figure comes from."""

HOST_FRAGMENTATION = 0.1
"""Share of what a rank has in its host's memory that is locked beyond it: what is left of slabs
(:mod:`trials.offload`), under 9% for decoders of 16 layers and more."""

CUDA_CONTEXT_BYTES = 512 << 20
"""Device memory of a process without its tensors: the context, torch's kernels, cuBLAS's handles. An assumption: some
hundred MiB, by device and by torch's build."""
COMMUNICATOR_BYTES = 200_000_000
"""Buffers of one communicator: HCCL keeps 200 MB for each direction by default (HCCL_BUFFSIZE), NCCL 4 MiB for each
direction and peer of some 20 channels (NCCL_BUFFSIZE)."""


def num_communicators(layout: Layout) -> int:
    """About how many communicators a rank has: the gang's, and one of every axis along which ranks communicate."""
    degrees = (layout.dp, layout.tp, layout.cp, layout.pp, layout.world_size)
    return sum(degree > 1 for degree in degrees)


def context_bytes(layout: Layout) -> int:
    """Device memory that a rank of this layout takes in addition to its tensors."""
    return CUDA_CONTEXT_BYTES + COMMUNICATOR_BYTES * num_communicators(layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Estimate for one rank of a pipeline stage; its peers on the other mesh axes are alike."""

    stage: int
    rank: int
    peak_bytes: int
    """Largest sum of live tensors on the device, be it while the rank is built or in a step."""
    peak_by_category: Mapping[str, int]
    """Bytes by category at the moment of the peak; the sum is ``peak_bytes``."""
    peak_phase: str
    """When the peak came: ``build``, or the step's phase ``forward``, ``backward``, ``other`` or ``optimizer``."""
    flops: Mapping[str, int]
    """FLOPs per step, by ``forward``, ``backward`` and ``recompute``."""
    collectives: Mapping[str, Traffic]
    """Collectives per step, by type."""
    num_parameters: int
    """Elements stored on the rank."""
    host_bytes: int = 0
    """Peak of what the rank has in its host's memory: activations, states of the optimiser."""

    @classmethod
    def of_run(cls, stage: int, run: RankRun) -> StageEstimate:
        """Estimate from a simulated rank: its peak is the largest over building it and all places of a step."""
        place, peak = max(run.peaks.items(), key=lambda item: item[1].total_bytes)
        return cls(
            stage=stage,
            rank=run.rank,
            peak_bytes=peak.total_bytes,
            peak_by_category=peak.by_category,
            peak_phase=place.partition("/")[0],
            flops=run.flops,
            collectives=run.collectives,
            num_parameters=run.num_parameters,
            host_bytes=run.host_bytes,
        )

    def needed_bytes(self, fragmentation: float, context_bytes: int) -> int:
        """Device memory to set aside for the rank: the peak, what the allocator wastes, what is no tensor's."""
        return round(self.peak_bytes * (1.0 + fragmentation)) + context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunEstimate:
    """The estimate for a candidate, one entry per pipeline stage."""

    stages: tuple[StageEstimate, ...]
    source: Literal["dryrun"] = "dryrun"
    extrapolated: bool = False
    """Whether stages were computed from smaller models instead of being run through in full."""
    cpu_s: float = 0.0
    """CPU seconds that the simulations took."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the stage that needs most."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Host memory of a rank of the stage that needs most."""
        return max(stage.host_bytes for stage in self.stages)

    def needed_bytes(self, fragmentation: float, context_bytes: int) -> int:
        """Device memory to set aside for the stage that needs most; see :meth:`StageEstimate.needed_bytes`."""
        return max(stage.needed_bytes(fragmentation, context_bytes) for stage in self.stages)

    def fits(self, limit_bytes: int, fragmentation: float, context_bytes: int) -> bool:
        """Whether every stage stays within ``limit_bytes`` of device memory."""
        return self.needed_bytes(fragmentation, context_bytes) <= limit_bytes
