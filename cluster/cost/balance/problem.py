"""Question and answer of the stage balancer, :func:`cluster.cost.balance.balancer.balance`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.cost.balance.stage_recompute import LayerState, StageAnswer, as_counts
from cluster.cost.pipeline import in_flight_peaks
from trials.spec import Counts, Recompute, Schedule, SelectiveRecompute


class DoesNotFitError(ValueError):
    """No choice of layers and recompute fits. ``stage`` is the rank that is short of ``shortage_bytes``."""

    def __init__(self, message: str, *, stage: int, shortage_bytes: float) -> None:
        super().__init__(message)
        self.stage = stage
        self.shortage_bytes = shortage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceProblem:
    """A pipeline to balance. Times are seconds per micro-batch, forward and backward; all layers are alike."""

    num_layers: int
    pp: int
    num_microbatches: int
    schedule: Schedule = "1f1b"
    num_virtual_stages: int = 1
    layer_s: float
    head_s: float = 0.0
    """Seconds of final norm, head and loss, which the last virtual stage has besides its layers."""
    layer_bytes: float
    """Bytes of weights, gradients and optimiser states of a layer on one rank."""
    fixed_bytes: tuple[float, ...]
    """Bytes per rank that do not depend on its layers (embedding, head, logits, device context, buffers)."""
    memory_limit_bytes: float
    step_layer_bytes: float = 0.0
    """Bytes of one layer at the optimiser step, with the step's workspace and without activations."""
    step_fixed_bytes: tuple[float, ...] = ()
    """Bytes per rank at the optimiser step that do not depend on its layers. Empty: none."""
    counts_chunks_alike: bool = False
    """True: memory must also suffice if every chunk of a rank had the mean of their micro-batches in flight, which is
    how the cost model counts."""
    states: tuple[LayerState, ...]
    """From keeping everything to keeping the least: each state recomputes what its predecessor does, and more."""
    min_layers: int = 1
    """The least that every chunk must have."""
    max_chunk_difference: int = 1
    """Most layers by which a rank's chunks may differ: the interleaved schedule runs in step only with like chunks."""
    stage_layers: Counts = ()
    """Layers, where given: then only recompute is chosen."""
    state_counts: tuple[Counts, ...] = ()
    """Layers of every state but the first, where given: then only the split of layers is chosen."""

    def __post_init__(self) -> None:
        self._check_shapes()
        for lighter, heavier in zip(self.states, self.states[1:], strict=False):
            if not heavier.is_full and not (
                set(lighter.patterns) <= set(heavier.patterns) and lighter.communication <= heavier.communication
            ):
                raise ValueError(f"state {heavier.name!r} must also recompute what {lighter.name!r} does")

    def _check_shapes(self) -> None:
        if len(self.fixed_bytes) != self.pp:
            raise ValueError(f"fixed_bytes has {len(self.fixed_bytes)} entries for pp {self.pp}")
        if self.step_fixed_bytes and len(self.step_fixed_bytes) != self.pp:
            raise ValueError(f"step_fixed_bytes has {len(self.step_fixed_bytes)} entries for pp {self.pp}")
        if not self.states or self.states[0].extra_s:
            raise ValueError("the first state keeps everything: its extra_s must be 0")
        if self.state_counts and len(self.state_counts) != len(self.states) - 1:
            raise ValueError("state_counts needs counts for every state but the first")
        if self.schedule == "zbv" and self.num_virtual_stages != 2:
            raise ValueError("schedule zbv has 2 virtual stages per rank")
        if self.num_layers < self.pp * self.num_virtual_stages * self.min_layers:
            raise ValueError(f"{self.num_layers} layers do not fill {self.pp} x {self.num_virtual_stages} chunks")
        for counts in (self.stage_layers, *self.state_counts):
            if counts and [len(row) for row in counts] != [self.pp] * self.num_virtual_stages:
                raise ValueError(f"counts must be {self.num_virtual_stages} rows of {self.pp}")
        if self.stage_layers and sum(map(sum, self.stage_layers)) != self.num_layers:
            raise ValueError(f"stage_layers sum to {sum(map(sum, self.stage_layers))}, not {self.num_layers}")

    @property
    def edge_s(self) -> tuple[float, ...]:
        """Seconds per micro-batch of each rank beyond its layers: those of the head, on the rank that has it."""
        seconds = [0.0] * self.pp
        seconds[0 if self.schedule == "zbv" else -1] = self.head_s
        return tuple(seconds)

    def step_s(self, stage_s: NDArray[np.float64]) -> float:
        """Step time from the seconds per micro-batch of every rank."""
        slowest = float(stage_s.max())
        return self.num_microbatches * slowest + (float(stage_s.sum()) - slowest) * self.bubble_share

    def moments(self, stage: int) -> tuple[tuple[float, ...], ...]:
        """Micro-batches in flight per chunk of a rank, at every moment that its memory has to survive."""
        pp, v, m = self.pp, self.num_virtual_stages, self.num_microbatches
        peaks = in_flight_peaks(self.schedule, pp=pp, num_virtual_stages=v, num_microbatches=m)[stage]
        mean = (max(map(sum, peaks)) / v,) * v
        return (*peaks, mean) if self.counts_chunks_alike and v > 1 else peaks

    def step_bytes(self, stage: int, num_layers: int) -> float:
        """Bytes of a rank at the optimiser step."""
        fixed = self.step_fixed_bytes[stage] if self.step_fixed_bytes else 0.0
        return fixed + num_layers * self.step_layer_bytes

    @property
    def bubble_share(self) -> float:
        """Share of the other ranks' time for which a rank waits while the pipeline fills and drains."""
        return 0.0 if self.schedule == "zbv" else 1.0 / self.num_virtual_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The best split and where its step time goes: the four terms sum to ``step_s``."""

    stage_layers: Counts
    """``[chunk][stage]``."""
    state_counts: dict[str, Counts]
    """Layers by state, the first state included; they sum to ``stage_layers``."""
    stage_s: tuple[float, ...]
    """Seconds per micro-batch of every rank."""
    step_s: float
    ideal_s: float
    """Seconds with all ranks equally busy, nothing recomputed and no bubble."""
    recompute_s: float
    """Seconds of recomputation, the mean over ranks."""
    imbalance_s: float
    """Seconds by which the slowest rank exceeds the mean."""
    bubble_s: float
    """Seconds to fill and drain the pipeline."""
    bound_s: float
    """A step time that no split can beat."""
    peak_bytes: tuple[float, ...]
    recompute: Recompute
    offset: Counts
    """``stage_layers`` as MindFormers spells it: differences from ``num_layers // (pp * v)``."""

    @property
    def gap(self) -> float:
        """How far, relatively, the step may be from the best: 0 unless the time limit cut the search short."""
        return max(0.0, 1.0 - self.bound_s / self.step_s)

    @property
    def step_terms_s(self) -> dict[str, float]:
        """The terms that sum to ``step_s``."""
        return {
            "ideal": self.ideal_s,
            "imbalance": self.imbalance_s,
            "recompute": self.recompute_s,
            "bubble": self.bubble_s,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "stage_layers": self.stage_layers,
            "offset": self.offset,
            "layers_by_state": self.state_counts,
            "step_time_s": self.step_s,
            "step_terms_s": self.step_terms_s,
            "gap": self.gap,
            "peak_bytes": self.peak_bytes,
        }


def explain(problem: BalanceProblem, answers: list[StageAnswer], bound_s: float) -> Balance:
    p = problem
    by_state = [
        tuple(tuple(answer.counts[k][chunk] for answer in answers) for chunk in range(p.num_virtual_stages))
        for k in range(len(p.states))
    ]
    counts = np.array(by_state)  # [state, chunk, stage]
    layers = counts.sum(axis=0)
    extra = np.array([state.extra_s for state in p.states]) @ counts.sum(axis=1)
    plain = layers.sum(axis=0) * p.layer_s + np.array(p.edge_s)
    stage_s = plain + extra
    step_s = p.step_s(stage_s)
    slowest = float(stage_s.max())
    stage_layers = as_counts(layers)
    return Balance(
        stage_layers=stage_layers,
        state_counts={state.name: rows for state, rows in zip(p.states, by_state, strict=True)},
        stage_s=tuple(float(seconds) for seconds in stage_s),
        step_s=step_s,
        ideal_s=p.num_microbatches * float(plain.mean()),
        recompute_s=p.num_microbatches * float(extra.mean()),
        imbalance_s=p.num_microbatches * (slowest - float(stage_s.mean())),
        bubble_s=step_s - p.num_microbatches * slowest,
        bound_s=min(bound_s, step_s),
        peak_bytes=_peak_bytes(p, counts),
        recompute=_recompute(p.states, counts),
        offset=as_counts(layers - p.num_layers // (p.pp * p.num_virtual_stages)),
    )


def _peak_bytes(p: BalanceProblem, counts: NDArray[np.int64]) -> tuple[float, ...]:
    """Peak bytes of each rank: its worst moment, while its largest layer is recomputed, or the optimiser step."""
    kept = np.array([state.activation_bytes for state in p.states]) @ counts.transpose(1, 0, 2)  # [chunk, stage]
    used = counts.sum(axis=1) > 0
    again = np.array([state.transient_bytes for state in p.states])[:, None] * used
    during_passes = (
        p.fixed_bytes[stage]
        + p.layer_bytes * float(counts[:, :, stage].sum())
        + float(again[:, stage].max())
        + max(float(np.dot(moment, kept[:, stage])) for moment in p.moments(stage))
        for stage in range(p.pp)
    )
    at_step = (p.step_bytes(stage, int(counts[:, :, stage].sum())) for stage in range(p.pp))
    return tuple(map(max, during_passes, at_step))


def _recompute(states: tuple[LayerState, ...], counts: NDArray[np.int64]) -> Recompute:
    """The recompute that these counts of states mean. The heaviest states take the first layers of each chunk."""

    def layers_in(chosen: list[bool]) -> Counts:
        total = counts[np.array(chosen)].sum(axis=0)
        return as_counts(total) if total.any() else ()

    patterns = dict.fromkeys(pattern for state in states for pattern in state.patterns)
    selective = [
        SelectiveRecompute(pattern=name, num_layers=found)
        for name in patterns
        if (found := layers_in([name in state.patterns or state.is_full for state in states]))
        and any(counts[k].any() for k, state in enumerate(states) if name in state.patterns)
    ]
    return Recompute(
        full=layers_in([state.is_full for state in states]),
        selective=tuple(selective),
        communication=layers_in([state.communication or state.is_full for state in states])
        if any(state.communication and counts[k].any() for k, state in enumerate(states))
        else (),
    )
