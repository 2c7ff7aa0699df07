"""The cheapest recompute with which the layers of one pipeline rank fit its memory: the balancer's inner question.

A small integer program per rank and number of layers, solved by HiGHS through ``scipy.optimize.milp``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trials.spec import Counts

EVENNESS_WEIGHT = 1e-6
"""Weight, in layer times, of the difference between largest and smallest chunk: decides between equals only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One way to treat a layer's activations, with its price."""

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
    """The layers and the memory of one pipeline rank. Equal problems have equal answers, whatever the rank."""

    states: tuple[LayerState, ...]
    peaks: tuple[tuple[float, ...], ...]
    """Moments at which memory must suffice: micro-batches in flight per chunk at each of them."""
    layer_s: float
    """Seconds of forward and backward of one layer and micro-batch, without recompute."""
    layer_bytes: float
    """Bytes of weights, gradients and optimiser states of one layer."""
    available_bytes: float
    """Memory for layers: the limit less the rank's fixed part."""
    step_layer_bytes: float
    """Bytes of one layer at the optimiser step, when no activations are held."""
    step_available_bytes: float
    """Memory for layers at the optimiser step: the limit less the rank's fixed part then."""
    min_layers: int
    """The least that every chunk must have."""
    max_difference: int
    """Most layers by which two chunks may differ."""
    fixed_layers: tuple[int, ...] = ()
    """Layers per chunk where given."""
    fixed_counts: Counts = ()
    """``[state][chunk]``: layers of every state but the first, where given."""

    @property
    def num_chunks(self) -> int:
        return len(self.peaks[0])

    def step_excess_bytes(self, num_layers: int) -> float:
        """Bytes by which the optimiser step exceeds the memory, which no recompute lowers; 0 when it fits."""
        return max(0.0, num_layers * self.step_layer_bytes - self.step_available_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswer:
    """Layers by state and chunk, ``counts[state][chunk]``, with their recompute time per micro-batch, which no choice
    brings below ``bound_s``."""

    counts: Counts
    recompute_s: float
    bound_s: float


def solve_stage(problem: StageProblem, num_layers: int, time_limit_s: float) -> StageAnswer | None:
    """Split ``num_layers`` over chunks and states at the least recompute time; None when they cannot fit.

    Raises:
        TimeoutError: nothing was found within ``time_limit_s``.
    """
    if problem.step_excess_bytes(num_layers):
        return None
    if answer := _keep_everything(problem, num_layers):
        return answer
    costs = np.array([[state.extra_s] * problem.num_chunks for state in problem.states])
    found = _milp(problem, num_layers, costs, EVENNESS_WEIGHT * problem.layer_s, time_limit_s)
    if found is None:
        return None
    counts, bound = found
    seconds = float((counts * costs).sum())
    return StageAnswer(counts=as_counts(counts), recompute_s=seconds, bound_s=min(seconds, max(0.0, bound)))


def excess_bytes(problem: StageProblem, num_layers: int) -> float:
    """Bytes by which ``num_layers`` layers exceed the memory at the least; 0 when they fit."""
    rows, shape = _constraints(problem, num_layers)
    result = _solve(
        np.eye(shape.num)[shape.excess], rows, shape.upper(num_layers, may_exceed=True), shape.integer, 60.0
    )
    during_passes = 0.0 if result.x is None else float(result.x[shape.excess]) * _unit_bytes(problem)
    return max(during_passes, problem.step_excess_bytes(num_layers))


def _dot(a: tuple[float, ...], b: tuple[int, ...]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _keep_everything(problem: StageProblem, num_layers: int) -> StageAnswer | None:
    """The answer without recompute and with even chunks, if that is allowed and fits: nothing can be cheaper."""
    v = problem.num_chunks
    layers = problem.fixed_layers or tuple(num_layers // v + (chunk < num_layers % v) for chunk in range(v))
    if problem.fixed_counts or sum(layers) != num_layers or min(layers) < problem.min_layers:
        return None
    held = max(_dot(moment, layers) for moment in problem.peaks)
    if held * problem.states[0].activation_bytes + num_layers * problem.layer_bytes > problem.available_bytes:
        return None
    nothing = ((0,) * v,) * (len(problem.states) - 1)
    return StageAnswer(counts=(layers, *nothing), recompute_s=0.0, bound_s=0.0)


@dataclass(frozen=True, slots=True)
class _Variables:
    """Columns of the integer program: ``counts[state, chunk]``, whether a state is used; then what is not integer:
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
    """Counts ``[state, chunk]`` and a lower bound of their cost; None when no counts fit."""
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
    """The unit in which the program counts memory: the tolerances of HiGHS are absolute."""
    return max(1.0, abs(problem.available_bytes))


def _add_layers(rows: _Rows, shape: _Variables, problem: StageProblem, num_layers: int) -> None:
    """Add the constraints that every layer has one state, and that chunks are as large as they must be."""
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
    """Add the constraints that every moment fits, with room to recompute a layer where any is recomputed."""
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
    # scipy has no type stubs, and its import is slow beside that of numpy.
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
    """The array as nested tuples of plain integers."""
    return tuple(tuple(int(count) for count in row) for row in counts)
