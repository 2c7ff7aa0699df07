"""The cheapest recompute that fits the layers of one pipeline rank into its memory: the balancer's inner problem.

Most ranks have one or two chunks and a handful of states. Few choices are then not dominated in both time and memory,
and all of them are tried. Other problems are small integer programs, solved by HiGHS through ``scipy.optimize.milp``,
whose set-up alone takes about 10 ms.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.cost.work import in_flight_peaks
from trials.spec import Counts, Recompute, Schedule, SelectiveRecompute

EVENNESS_WEIGHT = 1e-6
"""Weight of the difference between largest and smallest chunk, in layer times; only a tie-breaker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One treatment of a layer's activations, with its costs."""

    name: str
    activation_bytes: float
    """Bytes kept per layer and micro-batch from forward to backward."""
    extra_s: float = 0.0
    """Seconds of recomputation per layer and micro-batch."""
    transient_bytes: float = 0.0
    """Bytes held once per rank while a layer is recomputed."""
    patterns: tuple[str, ...] = ()
    """Operators recomputed (:class:`trials.spec.SelectiveRecompute`)."""
    is_full: bool = False
    communication: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """The layers and the memory of one pipeline rank. Equal problems have equal answers on any rank."""

    states: tuple[LayerState, ...]
    peaks: tuple[tuple[float, ...], ...]
    """Micro-batches in flight per chunk, at each moment at which memory must suffice."""
    layer_s: float
    """Seconds of forward and backward of one layer and micro-batch, without recompute."""
    layer_bytes: float
    """Bytes of weights, gradients and optimiser states of one layer."""
    available_bytes: float
    """Memory for layers: the limit minus the rank's fixed part."""
    step_layer_bytes: float
    """Bytes of one layer at the optimiser step, without activations."""
    step_available_bytes: float
    """Memory for layers at the optimiser step: the limit minus the rank's fixed part then."""
    min_layers: int
    """Fewest layers per chunk."""
    max_difference: int
    """Largest difference of layers between two chunks."""
    fixed_layers: tuple[int, ...] = ()
    """Layers per chunk, if fixed."""
    fixed_counts: Counts = ()
    """``[state][chunk]``: layers of every state except the first, if fixed."""

    @property
    def num_chunks(self) -> int:
        return len(self.peaks[0])

    def step_excess_bytes(self, num_layers: int) -> float:
        """Return the bytes by which the optimiser step exceeds memory, whatever the recompute; 0 if it fits."""
        return max(0.0, num_layers * self.step_layer_bytes - self.step_available_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswer:
    """Layers by state and chunk, ``counts[state][chunk]``, and their recompute time per micro-batch, with its lower
    bound ``bound_s``."""

    counts: Counts
    recompute_s: float
    bound_s: float


def solve_stage(problem: StageProblem, num_layers: int, time_limit_s: float) -> StageAnswer | None:
    """Split ``num_layers`` over chunks and states with the least recompute time; None if they cannot fit.

    Raises:
        TimeoutError: nothing was found within ``time_limit_s``.
    """
    if problem.step_excess_bytes(num_layers):
        return None
    if answer := _keep_everything(problem, num_layers):
        return answer
    if (tried := _all_tried(problem, num_layers)) is not None:
        return tried.answer
    costs = np.array([[state.extra_s] * problem.num_chunks for state in problem.states])
    found = _milp(problem, num_layers, costs, EVENNESS_WEIGHT * problem.layer_s, time_limit_s)
    if found is None:
        return None
    counts, bound = found
    seconds = float((counts * costs).sum())
    return StageAnswer(counts=as_counts(counts), recompute_s=seconds, bound_s=min(seconds, max(0.0, bound)))


def excess_bytes(problem: StageProblem, num_layers: int) -> float:
    """Return the least bytes by which ``num_layers`` layers exceed memory; 0 if they fit."""
    rows, shape = _constraints(problem, num_layers)
    result = _solve(
        np.eye(shape.num)[shape.excess], rows, shape.upper(num_layers, may_exceed=True), shape.integer, 60.0
    )
    during_passes = 0.0 if result.x is None else float(result.x[shape.excess]) * _unit_bytes(problem)
    return max(during_passes, problem.step_excess_bytes(num_layers))


def _dot(a: tuple[float, ...], b: tuple[int, ...]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _keep_everything(problem: StageProblem, num_layers: int) -> StageAnswer | None:
    """Return the answer without recompute and with even chunks, the cheapest possible, if allowed and fitting."""
    v = problem.num_chunks
    layers = problem.fixed_layers or tuple(num_layers // v + (chunk < num_layers % v) for chunk in range(v))
    if problem.fixed_counts or sum(layers) != num_layers or min(layers) < problem.min_layers:
        return None
    held = max(_dot(moment, layers) for moment in problem.peaks)
    if held * problem.states[0].activation_bytes + num_layers * problem.layer_bytes > problem.available_bytes:
        return None
    nothing = ((0,) * v,) * (len(problem.states) - 1)
    return StageAnswer(counts=(layers, *nothing), recompute_s=0.0, bound_s=0.0)


MAX_COMBINATIONS = 1 << 18
"""Most combinations of the chunks' choices to enumerate. Beyond it the integer program is faster."""


@dataclass(frozen=True, slots=True)
class _Tried:
    answer: StageAnswer | None


def _all_tried(problem: StageProblem, num_layers: int) -> _Tried | None:
    """Return the best of all choices, exactly; None if there are too many, or counts are fixed."""
    if problem.fixed_counts or (problem.max_difference > 1 and problem.num_chunks > 1 and not problem.fixed_layers):
        return None
    best: tuple[float, float] | None = None
    counts: NDArray[np.int64] | None = None
    for transient in sorted({state.transient_bytes for state in problem.states}):
        choices = _Choices.of(tuple(state for state in problem.states if state.transient_bytes <= transient))
        room = problem.available_bytes - num_layers * problem.layer_bytes - transient
        for layers in _chunk_sizes(problem, num_layers):
            chunks = [choices.of_layers(count) for count in layers]
            if np.prod([len(chunk) for chunk in chunks], dtype=np.float64) > MAX_COMBINATIONS:
                return None
            picked = _cheapest(problem, choices.states, chunks, room)
            if picked is not None and (best is None or picked[0] < best):
                best, counts = picked[0], _in_order_of(problem.states, choices.states, picked[1])
    if best is None or counts is None:
        return _Tried(None)
    return _Tried(StageAnswer(counts=as_counts(counts), recompute_s=best[0], bound_s=best[0]))


def _chunk_sizes(problem: StageProblem, num_layers: int) -> Iterator[tuple[int, ...]]:
    """Yield the layers per chunk in every allowed way if chunks differ by at most one layer."""
    v = problem.num_chunks
    if problem.fixed_layers:
        if sum(problem.fixed_layers) == num_layers:
            yield problem.fixed_layers
        return
    least, larger = divmod(num_layers, v)
    if least < problem.min_layers or (larger and problem.max_difference < 1):
        return
    for chosen in itertools.combinations(range(v), larger):
        yield tuple(least + (chunk in chosen) for chunk in range(v))


def _cheapest(
    problem: StageProblem, states: tuple[LayerState, ...], chunks: list[NDArray[np.int64]], room_bytes: float
) -> tuple[tuple[float, float], NDArray[np.int64]] | None:
    """Return time, memory and counts ``[state, chunk]`` of the fastest combination of the chunks' choices that fits; of
    equals, the one with the least memory."""
    seconds = _sums([chunk @ np.array([state.extra_s for state in states]) for chunk in chunks])
    kept = [chunk @ np.array([state.activation_bytes for state in states]) for chunk in chunks]
    held = functools.reduce(
        np.maximum,
        (_sums([part * count for part, count in zip(kept, moment, strict=True)]) for moment in problem.peaks),
    )
    fitting = np.flatnonzero(held <= room_bytes)
    if not fitting.size:
        return None
    pick = fitting[np.lexsort((held.flat[fitting], seconds.flat[fitting]))[0]]
    rows = np.unravel_index(pick, seconds.shape)
    counts = np.array([chunk[row] for chunk, row in zip(chunks, rows, strict=True)]).T
    return (float(seconds.flat[pick]), float(held.flat[pick])), counts


def _sums(parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the sums of one entry of each part, for all combinations: an axis per part."""
    total = parts[0]
    for part in parts[1:]:
        total = total[..., None] + part
    return np.asarray(total)


def _in_order_of(
    states: tuple[LayerState, ...], some: tuple[LayerState, ...], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    rows = np.zeros((len(states), counts.shape[1]), dtype=np.int64)
    rows[[states.index(state) for state in some]] = counts
    return rows


class _Choices:
    """Counts per state for a chunk, without those dominated in both recompute time and memory."""

    def __init__(self, states: tuple[LayerState, ...]) -> None:
        self.states = states
        self._seconds = np.array([state.extra_s for state in states])
        self._bytes = np.array([state.activation_bytes for state in states])
        self._of_layers = [np.zeros((1, len(states)), dtype=np.int64)]

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(states: tuple[LayerState, ...]) -> _Choices:
        """Return the cached choices: those for n layers extend those for n - 1."""
        return _Choices(states)

    def of_layers(self, num_layers: int) -> NDArray[np.int64]:
        """Return rows of counts, one column per state."""
        one_layer = np.eye(len(self.states), dtype=np.int64)
        while len(self._of_layers) <= num_layers:
            rows = (self._of_layers[-1][:, None, :] + one_layer).reshape(-1, len(self.states))
            self._of_layers.append(self._unbeaten(rows))
        return self._of_layers[num_layers]

    def _unbeaten(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        kept = rows @ self._bytes
        rows = rows[np.lexsort((kept, rows @ self._seconds))]
        kept = rows @ self._bytes
        return np.asarray(rows[kept < np.concatenate(([np.inf], np.minimum.accumulate(kept)[:-1]))])


@dataclass(frozen=True, slots=True)
class _Variables:
    """Columns of the integer program: ``counts[state, chunk]``, and whether a state is used. The rest are not integers:
    transient bytes, excess bytes, smallest and largest chunk."""

    num_states: int
    num_chunks: int

    @property
    def num_counts(self) -> int:
        return self.num_states * self.num_chunks

    @property
    def num(self) -> int:
        return self.num_counts + self.num_states + 4

    def count(self, state: int, chunk: int) -> int:
        return state * self.num_chunks + chunk

    def used(self, state: int) -> int:
        return self.num_counts + state

    @property
    def transient(self) -> int:
        return self.num - 4

    @property
    def excess(self) -> int:
        return self.num - 3

    @property
    def smallest(self) -> int:
        return self.num - 2

    @property
    def largest(self) -> int:
        return self.num - 1

    @property
    def integer(self) -> NDArray[np.float64]:
        return (np.arange(self.num) < self.num - 4).astype(np.float64)

    def upper(self, num_layers: int, *, may_exceed: bool) -> NDArray[np.float64]:
        bound = np.full(self.num, float(num_layers))
        bound[self.num_counts : self.transient] = 1
        bound[self.transient] = np.inf
        bound[self.excess] = np.inf if may_exceed else 0.0
        return bound


class _Rows:
    """Constraints ``low <= coefficients . x <= high``."""

    def __init__(self, num_variables: int) -> None:
        self._num = num_variables
        self.matrix: list[NDArray[np.float64]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, coefficients: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        row = np.zeros(self._num)
        row[list(coefficients)] = list(coefficients.values())
        self.matrix.append(row)
        self.low.append(low)
        self.high.append(high)


def _milp(
    problem: StageProblem, num_layers: int, costs: NDArray[np.float64], evenness_s: float, time_limit_s: float
) -> tuple[NDArray[np.int64], float] | None:
    """Return counts ``[state, chunk]`` and a lower bound of their cost; None if no counts fit."""
    rows, shape = _constraints(problem, num_layers)
    objective = np.zeros(shape.num)
    objective[: costs.size] = costs.ravel()
    objective[shape.smallest], objective[shape.largest] = -evenness_s, evenness_s
    upper = shape.upper(num_layers, may_exceed=False)
    result = _solve(objective, rows, upper, shape.integer, time_limit_s)
    if result.status == _INFEASIBLE:
        return None
    if result.x is None:
        raise TimeoutError(f"no stage of {num_layers} layers was found in {time_limit_s:g} s: {result.message}")
    counts = np.rint(result.x[: costs.size]).astype(np.int64).reshape(costs.shape)
    is_proven = result.status == _OPTIMAL
    return counts, float((counts * costs).sum()) if is_proven else float(
        result.mip_dual_bound
    ) - evenness_s * num_layers


_OPTIMAL, _INFEASIBLE = 0, 2
"""Status codes of ``scipy.optimize.milp``."""


def _constraints(problem: StageProblem, num_layers: int) -> tuple[_Rows, _Variables]:
    shape = _Variables(len(problem.states), problem.num_chunks)
    rows = _Rows(shape.num)
    _add_layers(rows, shape, problem, num_layers)
    _add_memory(rows, shape, problem, num_layers)
    return rows, shape


def _unit_bytes(problem: StageProblem) -> float:
    """Return the program's unit of memory: the tolerances of HiGHS are absolute."""
    return max(1.0, abs(problem.available_bytes))


def _add_layers(rows: _Rows, shape: _Variables, problem: StageProblem, num_layers: int) -> None:
    """Add the constraints that every layer has one state, and those on chunk sizes."""
    cells = range(shape.num_chunks)
    rows.add({shape.count(k, c): 1.0 for k in range(shape.num_states) for c in cells}, num_layers, num_layers)
    for chunk in cells:
        in_chunk = {shape.count(k, chunk): 1.0 for k in range(shape.num_states)}
        given = problem.fixed_layers[chunk] if problem.fixed_layers else None
        rows.add(in_chunk, problem.min_layers if given is None else given, num_layers if given is None else given)
        rows.add({**in_chunk, shape.smallest: -1.0}, low=0.0)
        rows.add({**in_chunk, shape.largest: -1.0}, high=0.0)
    rows.add({shape.largest: 1.0, shape.smallest: -1.0}, high=problem.max_difference)
    for state, given_counts in enumerate(problem.fixed_counts, start=1):
        for chunk in cells:
            rows.add({shape.count(state, chunk): 1.0}, given_counts[chunk], given_counts[chunk])


def _add_memory(rows: _Rows, shape: _Variables, problem: StageProblem, num_layers: int) -> None:
    """Add the constraints that every moment fits, with space to recompute a layer if any is recomputed."""
    states = list(enumerate(problem.states))
    scale = 1.0 / _unit_bytes(problem)
    for moment in problem.peaks:
        row = {
            shape.count(k, c): (moment[c] * state.activation_bytes + problem.layer_bytes) * scale
            for k, state in states
            for c in range(shape.num_chunks)
        }
        rows.add({**row, shape.transient: 1.0, shape.excess: -1.0}, high=problem.available_bytes * scale)
    for k, state in states:
        if state.transient_bytes:
            in_state = {shape.count(k, c): 1.0 for c in range(shape.num_chunks)}
            rows.add({**in_state, shape.used(k): -float(num_layers)}, high=0.0)
            rows.add({shape.used(k): state.transient_bytes * scale, shape.transient: -1.0}, high=0.0)


def _solve(
    objective: NDArray[np.float64],
    rows: _Rows,
    upper: NDArray[np.float64],
    integer: NDArray[np.float64],
    time_limit_s: float,
) -> Any:
    # scipy has no type stubs, and imports much more slowly than numpy.
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped, unused-ignore]

    scale = float(np.abs(objective).max()) or 1.0
    result = milp(
        objective / scale,
        constraints=LinearConstraint(np.array(rows.matrix), rows.low, rows.high),
        bounds=Bounds(0, upper),
        integrality=integer,
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    if result.x is not None:
        result.mip_dual_bound *= scale
    return result


def as_counts(counts: NDArray[np.int64]) -> Counts:
    """Convert the array to nested tuples of plain integers."""
    return tuple(tuple(int(count) for count in row) for row in counts)


# Problem and solution of the stage balancer, :func:`cluster.cost.balancer.balance`.


class DoesNotFitError(ValueError):
    """No choice of layers and recompute fits. The rank ``stage`` lacks ``shortage_bytes``."""

    def __init__(self, message: str, *, stage: int, shortage_bytes: float) -> None:
        super().__init__(message)
        self.stage = stage
        self.shortage_bytes = shortage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceProblem:
    """A pipeline to balance. Times are seconds per micro-batch, forward and backward; all layers are equal."""

    num_layers: int
    pp: int
    num_microbatches: int
    schedule: Schedule = "1f1b"
    num_virtual_stages: int = 1
    layer_s: float
    head_s: float = 0.0
    """Seconds of final norm, head and loss on the last virtual stage, in addition to its layers."""
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
    """True: memory must also suffice if every chunk of a rank had their mean number of micro-batches in flight, as in
    the cost model."""
    states: tuple[LayerState, ...]
    """From keeping everything to keeping the least: each state recomputes more than its predecessor."""
    min_layers: int = 1
    """Fewest layers per chunk."""
    max_chunk_difference: int = 1
    """Largest difference of layers between a rank's chunks: interleaving stays in step only with similar chunks."""
    stage_layers: Counts = ()
    """Fixed layers; only recompute is then chosen."""
    state_counts: tuple[Counts, ...] = ()
    """Fixed layers of every state except the first; only the split of layers is then chosen."""

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
        """Seconds per micro-batch of each rank in addition to its layers: the head's, on its rank."""
        seconds = [0.0] * self.pp
        seconds[0 if self.schedule == "zbv" else -1] = self.head_s
        return tuple(seconds)

    def step_s(self, stage_s: NDArray[np.float64]) -> float:
        """Return the step time from the seconds per micro-batch of every rank."""
        slowest = float(stage_s.max())
        return self.num_microbatches * slowest + (float(stage_s.sum()) - slowest) * self.bubble_share

    def moments(self, stage: int) -> tuple[tuple[float, ...], ...]:
        """Return the micro-batches in flight per chunk of a rank, at every moment at which memory must suffice."""
        pp, v, m = self.pp, self.num_virtual_stages, self.num_microbatches
        peaks = in_flight_peaks(self.schedule, pp=pp, num_virtual_stages=v, num_microbatches=m)[stage]
        mean = (max(map(sum, peaks)) / v,) * v
        return (*peaks, mean) if self.counts_chunks_alike and v > 1 else peaks

    def step_bytes(self, stage: int, num_layers: int) -> float:
        """Return a rank's bytes at the optimiser step."""
        fixed = self.step_fixed_bytes[stage] if self.step_fixed_bytes else 0.0
        return fixed + num_layers * self.step_layer_bytes

    @property
    def bubble_share(self) -> float:
        """Waiting of a rank while the pipeline fills and drains, as a share of the other ranks' time."""
        return 0.0 if self.schedule == "zbv" else 1.0 / self.num_virtual_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The best split and the terms of its step time: the four terms sum to ``step_s``."""

    stage_layers: Counts
    """``[chunk][stage]``."""
    state_counts: dict[str, Counts]
    """Layers by state, including the first; they sum to ``stage_layers``."""
    stage_s: tuple[float, ...]
    """Seconds per micro-batch of every rank."""
    step_s: float
    ideal_s: float
    """Seconds with all ranks equally busy, nothing recomputed and no bubble."""
    recompute_s: float
    """Seconds of recomputation, mean over ranks."""
    imbalance_s: float
    """Seconds by which the slowest rank exceeds the mean."""
    bubble_s: float
    """Seconds to fill and drain the pipeline."""
    bound_s: float
    """Lower bound of the step time of any split."""
    peak_bytes: tuple[float, ...]
    recompute: Recompute
    offset: Counts
    """``stage_layers`` in MindFormers' form: differences from ``num_layers // (pp * v)``."""

    @property
    def gap(self) -> float:
        """Largest relative distance of the step from the optimum: 0 unless the time limit ended the search."""
        return max(0.0, 1.0 - self.bound_s / self.step_s)

    @property
    def step_terms_s(self) -> dict[str, float]:
        """Return the terms that sum to ``step_s``."""
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
    """Return the peak bytes of each rank: its worst moment while its largest layer is recomputed, or the step."""
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
    """Return the recompute for these counts of states. The heaviest states take the first layers of each chunk."""

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
