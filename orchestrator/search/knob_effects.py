"""Usual effects of knobs: prior beliefs about them, and predictions relative to the baseline.

The usual effects of built-in knobs (:mod:`cluster.cost.usual`) are drawn for many programs. Their mean and covariance
are kept as a mean and as features with weights of standard deviation 1. Every knob also has its own effect of known
size
only: similar for neighbouring values if they are numbers, independent if they are names.

The guided sampler uses these like :class:`~orchestrator.search.predictor.Predictor`. The first trial shows the
program's speed, and the Gaussian process learns how its knobs deviate from their usual effects. Trials of earlier
sweeps of the same program are rows of that process, next to the candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.generic import GenericInputs, generic_step_seconds
from cluster.cost.inputs import Coefficients
from cluster.cost.usual import (
    Kind,
    KnobColumns,
    MemoryShares,
    column_of,
    drawn_memory,
    drawn_programs,
    relative_peak,
    relative_step,
    usual_program,
)
from orchestrator.objective import Objective
from orchestrator.search.acquisition import ErrorModel, Posterior
from orchestrator.search.memory_belief import Array, MemoryBelief, Structured
from orchestrator.space.knobs import INHERITED
from orchestrator.space.notation import Features, Scalar, feature_columns
from trials.outcome import Measured, Measurement, Outcome, OutOfMemory
from trials.reports import ScriptFacts
from trials.spec import Candidate, CustomChoice, ScriptModel, Workload

# Prior beliefs about the effects of knobs, in the Gaussian process's form

KEPT_VARIANCE = 0.999
"""Share of the drawn programs' variance that the features keep."""
MAX_FEATURES = 40
ROWS_AT_ONCE = 2048
OWN_STD = 0.3
"""Standard deviation of the effect of a custom knob's value: most do little, some a factor of two."""
NAMED_STD = 0.3
"""The same, in addition to the usual effect of a known name, which is a guess."""
KNOWN_STD = 0.05
"""The same for built-in knobs, in addition to their usual effects; `ep` has none, as experts differ."""
SMOOTHNESS = 0.5
"""Share of the range of a knob's numbers over which its effect stays similar."""
MAX_LEVELS = 6
"""Components for the effect of a knob with many numbers."""
PLACE_SPAN = 1.4
"""Distance between the ends of a knob's numbers, or between two of its names, for effects of combinations: errors at
distance 1 correlate with ``exp(-1/2)``."""


@dataclass(frozen=True, slots=True)
class Believed:
    """Mean of a logarithm over drawn programs, shape (n,), and features of unit weight around it, shape (n, d)."""

    mean: Array
    features: Array


def believed(matrix: Array, draw: Callable[[NDArray[np.intp]], Array]) -> Believed:
    """Return mean and features of the draws.

    Args:
        matrix: description of n candidates, shape (n, k); equal rows are drawn once.
        draw: function from indices of rows to logarithms, shape (draws, len(rows)).
    """
    _, first, place = np.unique(matrix, axis=0, return_index=True, return_inverse=True)
    parts = [draw(first[i : i + ROWS_AT_ONCE]) for i in range(0, len(first), ROWS_AT_ONCE)]
    drawn = np.concatenate(parts, axis=1)
    mean = drawn.mean(axis=0)
    centred = (drawn - mean) / np.sqrt(len(drawn))
    values, vectors = np.linalg.eigh(centred @ centred.T)
    share = np.cumsum(values[::-1]) / max(values.sum(), 1e-300)
    num = min(MAX_FEATURES, int(np.searchsorted(share, KEPT_VARIANCE)) + 1)
    features = centred.T @ vectors[:, ::-1][:, :num]
    where = place.reshape(-1)
    return Believed(mean[where], features[where])


def usual_errors(x: GenericInputs, coefficients: Coefficients) -> Believed:
    """Return the deviation of step times from the generic cost model by unusual effects of data loading and kernels."""

    def log_step(rows: NDArray[np.intp], many: bool) -> Array:
        usual = drawn_programs(x.kind) if many else usual_program(x.kind)
        terms = generic_step_seconds(x.take(rows), coefficients, usual).values()
        return np.asarray(np.log(sum(terms, np.zeros((1, len(rows))))))

    return believed(x.matrix, lambda rows: log_step(rows, True) - log_step(rows, False))


class CustomEffects:
    """Effects of knobs with known size only: a row per candidate of the table, and of ``others``.

    Args:
        known: names of knobs that are described elsewhere.
        stds: standard deviations of the effects of some built-in knobs.

    ``features`` have weights of standard deviation 1; ``places``: coordinates, close for similar combinations.
    """

    def __init__(
        self,
        table: CandidateTable,
        others: Sequence[Candidate],
        features: Features,
        *,
        known: Collection[str] = (),
        stds: Mapping[str, float] | None = None,
    ) -> None:
        requested, rest = feature_columns(table, features), [features(candidate) for candidate in others]
        names = [
            name for name in dict.fromkeys([*requested, *(name for row in rest for name in row)]) if name not in known
        ]
        own = {choice.name for chosen in (*table.values["own"], *(c.own for c in others)) for choice in chosen}
        columns, places = [np.zeros((len(table) + len(rest), 0))], [np.zeros((len(table) + len(rest), 0))]
        for name in names:
            found_values, codes = requested.get(name, ([INHERITED], np.zeros(len(table), dtype=np.int32)))
            last = [row.get(name, INHERITED) for row in rest]
            distinct = sorted({*found_values, *last}, key=_sort_key)
            if len(distinct) < 2:
                continue
            place_of = np.array([distinct.index(value) for value in [*found_values, *last]], dtype=np.intp)
            where = np.concatenate([place_of[: len(found_values)][codes], place_of[len(found_values) :]])
            spots = _spots(distinct)
            std = (stds or {}).get(name) or _std(name, distinct, is_own=name in own)
            columns.append((_effect_of(spots) * std)[where])
            places.append(spots[where] * PLACE_SPAN)
        self.features: Array = np.hstack(columns)
        self.places: Array = np.hstack(places)

    def take(self, rows: slice) -> CustomEffects:
        """Select ``rows``."""
        found = object.__new__(CustomEffects)
        found.features, found.places = self.features[rows], self.places[rows]
        return found


def _spots(values: Sequence[Scalar]) -> Array:
    """Return coordinates of values, shape (values, k): numbers on a line from 0 to 1, names at equal distances of 1."""
    if not all(_is_number(value) for value in values):
        return np.asarray(np.eye(len(values)) / np.sqrt(2))
    numbers = np.array([float(value) for value in values])
    if numbers.min() > 0:
        line = np.log(numbers)
    elif numbers.min() == 0:
        line = np.log1p(numbers / numbers[numbers > 0].min())
    else:
        line = np.arange(len(numbers), dtype=np.float64)
    shares = np.asarray((line - line[0]) / (line[-1] - line[0]), dtype=np.float64)
    return shares.reshape(len(shares), 1)


def _effect_of(spots: Array) -> Array:
    """Return features with weights of standard deviation 1, for an effect of that size at each of the spots."""
    is_line = spots.shape[1] == 1
    squares = (spots - spots.T) ** 2 if is_line else 2 * spots.max() ** 2 * (1 - np.eye(len(spots)))
    scale = SMOOTHNESS if is_line and len(spots) > 2 else 0.3
    values, vectors = np.linalg.eigh(np.exp(-0.5 * squares / scale**2))
    num = min(MAX_LEVELS if is_line else len(spots), len(spots))
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :num])


def _std(name: str, values: Sequence[Scalar], *, is_own: bool) -> float:
    if not is_own:
        return KNOWN_STD
    found_values = [column_of(name, value) for value in values if value != INHERITED]
    return NAMED_STD if all(found_values) else OWN_STD


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sort_key(value: Scalar) -> tuple[bool, float, str]:
    return (not _is_number(value), float(value) if _is_number(value) else 0.0, str(value))


MODELLED = frozenset(
    (
        "world_size",
        "pp",
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "ep",
        "zero_stage",
        "sequence_parallel",
        "micro_batch_size",
        "num_virtual_stages",
        "stage_layers",
        "recompute",
    )
)
"""Features covered by the cost model's terms, or by :func:`physical_places`."""


class UnmodelledKnobs:
    """Candidates' values of knobs unknown to the cost model, one row per candidate.

    ``one_hot`` has a column per value of each knob; in ``places``, a numeric knob has one column.
    """

    def __init__(self, candidates: CandidateTable, others: Sequence[Candidate], features: Features) -> None:
        known = feature_columns(candidates, functools.partial(_unmodelled, features=features))
        rest = [_unmodelled(candidate, features) for candidate in others]
        names = dict.fromkeys([*known, *(name for row in rest for name in row)])
        num = len(candidates) + len(rest)
        hot, places = [np.zeros((num, 0))], [np.zeros((num, 0))]
        for name in names:
            found_values, codes = known.get(name, ([INHERITED], np.zeros(len(candidates), dtype=np.int32)))
            last = [row.get(name, INHERITED) for row in rest]
            distinct = sorted({*found_values, *last}, key=str)
            if len(distinct) < 2:
                continue
            where = np.array([distinct.index(value) for value in [*found_values, *last]])
            code = np.concatenate([where[codes], where[len(found_values) :]])
            columns = np.eye(len(distinct))[code]
            hot.append(columns)
            if all(isinstance(value, int | float) for value in distinct):
                numbers = np.array(distinct, dtype=float)
                columns = (np.sign(numbers) * np.log2(1.0 + np.abs(numbers)) / 1.5)[code][:, None]
            places.append(columns)
        self.one_hot: Array = np.hstack(hot)
        self.places: Array = np.hstack(places)


def _unmodelled(candidate: Candidate, features: Features) -> dict[str, Scalar]:
    own = {name: value for name, value in features(candidate).items() if name not in MODELLED}
    own["selective"] = " ".join(sorted(part.pattern for part in candidate.recompute.selective))
    return own


# Predictions without a cost model: usual speed-ups of knobs over the baseline

LEVEL_STD = 3.0
"""Standard deviation of the log of the baseline's step time: unknown."""
LOCAL_STD = 0.08
"""Standard deviation of effects of combinations: interactions are small compared to single effects."""
SWEEP_STD = 0.05
"""Standard deviation of the error shared by all trials of an earlier sweep on the same hardware."""
NOISE_STD = 0.01
"""Standard deviation of the log of a repeated measurement."""
MAX_COUNTED_SHARE = 1.1
"""Largest ratio of counted tensors to the peak, which may exceed 1 by rounding and the choice of the step."""
OVERHEAD_STEPS = 20.0
"""Cost of a trial in steps, half of it for its start."""
USED_SHARE = 0.35
"""Assumed share of memory used by the baseline, which is known to run."""
USED_STD = 0.7
"""Standard deviation of the log of that share."""
CUSTOM_MEMORY_SHARE = 0.5
"""Effect of unknown knobs on the peak, relative to that on time."""
CUSTOM_MEMORY_STDS = {0.02: 0.5, 0.08: 0.5}
"""Possible standard deviations of peaks' own errors, with prior probabilities. Trials decide between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeEstimates:
    """Predictions for all rows before any trial of the sweep."""

    step_s: Array
    """Step time in units of the baseline's: geometric mean."""
    peak_bytes: Array
    """Peak memory of the fullest rank, from a guess of the baseline's."""


def _by_role(candidate: Candidate, roles: Mapping[str, str]) -> Candidate:
    return replace(candidate, own=_called_by_role(candidate.own, roles))


def _called_by_role(own: tuple[CustomChoice, ...], roles: Mapping[str, str]) -> tuple[CustomChoice, ...]:
    """Rename each choice to its built-in counterpart, because names determine usual effects."""
    return tuple(CustomChoice(name=roles.get(choice.name, choice.name), value=choice.value) for choice in own)


def memory_shares(measurement: Measurement) -> MemoryShares | None:
    """Decompose the peak of a user's program by the tensors that its hook counted; None if it counted none."""
    script = measurement.findings.script
    if script is None:
        return None
    is_allocator = script.source_of("allocated_bytes") is not None
    return shares_of_peak(script.facts, measurement.peak_bytes, is_allocator=is_allocator)


def shares_of_peak(facts: ScriptFacts, peak_bytes: int, *, is_allocator: bool) -> MemoryShares | None:
    """Decompose a peak. Uncounted activations, as in compiled programs, are the rest of the allocator's memory."""
    weights, states = facts.parameter_bytes_local or 0, facts.optimizer_bytes or 0
    gradients, activations = facts.gradient_bytes or 0, facts.activation_bytes
    if not peak_bytes or not weights or facts.optimizer_bytes is None:
        return None
    if activations is None:
        if not is_allocator:
            return None
        activations = max(0, peak_bytes - weights - gradients - states)
    if activations + weights + states > MAX_COUNTED_SHARE * peak_bytes:
        # Untouched storage, such as DeepSpeed's flat buckets on a host: the parts do not match the peak.
        return None
    # When activations are largest, gradients may not exist yet.
    gradients = min(gradients, max(0, peak_bytes - activations - weights - states))
    whole = max(peak_bytes, activations + weights + gradients + states)
    return MemoryShares(
        activations=activations / whole,
        weights=weights / whole,
        gradients=gradients / whole,
        states=states / whole,
    )


class RelativePredictor:
    """Predictions for a fixed list of candidates by usual effects of knobs.

    Rows of results are the candidates, in order, followed by earlier trials of the same program.

    Args:
        baseline: the candidate that times are relative to.
        features: flat description of a candidate.
        kind: kind of device, which selects the usual effects.
        limit_bytes: memory of a device.
        earlier: trials of other sweeps on the same hardware; those of the same program count.
        objective: weights the times to compare.
        roles: the built-in counterparts of custom knobs, if their names do not imply them.
    """

    is_absolute = False
    """Whether times are known before the first trial."""

    def __init__(
        self,
        workload: Workload,
        candidates: Sequence[Candidate],
        *,
        baseline: Candidate,
        features: Features,
        kind: Kind = "accelerator",
        limit_bytes: float = np.inf,
        earlier: Sequence[EarlierTrial] = (),
        objective: Objective | None = None,
        roles: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.candidates = CandidateTable.of(candidates)
        self.earlier = tuple(trial for trial in earlier if same_program(trial.workload, workload))
        self.objective = objective or Objective()
        self.limit_bytes = float(limit_bytes)
        known = [(trial.workload, _by_role(trial.candidate, roles)) for trial in self.earlier]
        own = tuple(_called_by_role(choices, roles) for choices in self.candidates.values["own"])
        called = CandidateTable({**self.candidates.values, "own": own}, self.candidates.codes)
        self._columns = KnobColumns.of_table(workload, called).followed_by(KnobColumns.of_pairs(known))
        self._baseline = KnobColumns.of_pairs([(workload, _by_role(baseline, roles))])
        self._kind = kind
        self._taken_apart: tuple[tuple[int, MemoryShares], MemoryBelief | None] | None = None
        self._baseline_weight = self.objective.weight(baseline.layout.world_size)
        others = [*(trial.candidate for trial in self.earlier), baseline]
        described = CustomEffects(self.candidates, others, features, stds={"ep": OWN_STD})
        self._own, self._own_baseline = described.take(slice(0, -1)), described.features[-1]
        sizes, places = self.candidates.each(("layout",), lambda candidate: candidate.layout.world_size)
        last = [trial.candidate.layout.world_size for trial in self.earlier]
        self._world_size = np.concatenate([np.array(sizes, dtype=np.float64)[places], last])

    @functools.cached_property
    def time(self) -> Believed:
        """Return the log of the step time relative to the baseline's."""
        drawn = drawn_programs(self._kind)
        return believed(
            self._columns.matrix, lambda rows: relative_step(self._columns.take(rows), self._baseline, drawn)
        )

    @functools.cached_property
    def relative_memory(self) -> Believed:
        """Return the log of the peak relative to the baseline's."""
        return self._relative_memory(self._baseline, None)

    def _relative_memory(self, reference: KnobColumns, shares: MemoryShares | None) -> Believed:
        drawn = drawn_memory(self._kind, shares)
        return believed(
            self._columns.matrix, lambda rows: relative_peak(self._columns.take(rows), reference, drawn, shares)
        )

    @functools.cached_property
    def memory(self) -> MemoryBelief | None:
        """Return the belief about memory before any measurement of this sweep; None: memory is not limited."""
        return self._memory(self.relative_memory)

    def memory_given(self, shares: Mapping[int, MemoryShares]) -> MemoryBelief | None:
        """Return the belief about memory given decomposed peaks, by row, but not the peaks themselves.

        The row with the largest share of activations in its peak shows best how they grow.
        """
        if not shares:
            return self.memory
        row = max(shares, key=lambda row: (shares[row].activations, -row))
        known = row, shares[row]
        if self._taken_apart is None or self._taken_apart[0] != known:
            relative = self._relative_memory(self._columns.take([row]), shares[row])
            self._taken_apart = known, self._memory(relative)
        return self._taken_apart[1]

    def _memory(self, relative: Believed) -> MemoryBelief | None:
        if not np.isfinite(self.limit_bytes):
            return None
        level = np.full((len(relative.mean), 1), USED_STD)
        structures = tuple(
            Structured(
                name="usual",
                log_weight=float(np.log(share)),
                mean=np.log(USED_SHARE) + relative.mean,
                features=np.hstack([relative.features, level, CUSTOM_MEMORY_SHARE * self._own.features]),
                own_std=own_std,
            )
            for own_std, share in CUSTOM_MEMORY_STDS.items()
        )
        known = list(enumerate(self.earlier, len(self.candidates)))
        peaks = {row: trial.peak_bytes / self.limit_bytes for row, trial in known if trial.peak_bytes}
        ran = [row for row, one in known if one.step_time_s is not None and not (one.peak_bytes or one.is_foreign)]
        oom = [row for row, trial in known if trial.step_time_s is None]
        return MemoryBelief(structures=structures, places=self._own.places).after(peaks, ran, oom)

    @functools.cached_property
    def weights(self) -> Array:
        """Return the objective's factor on each row's step time."""
        return self.objective.weights(self._world_size)

    @functools.cached_property
    def estimates(self) -> RelativeEstimates:
        """Return predictions before any trial of this sweep."""
        peak = USED_SHARE * self.limit_bytes * np.exp(self.relative_memory.mean)
        return RelativeEstimates(step_s=np.exp(self.time.mean), peak_bytes=peak)

    @functools.cached_property
    def probability_fits(self) -> Array:
        """Return the probability that each candidate fits in memory, before any measurement of this sweep."""
        return np.ones(len(self._columns)) if self.memory is None else self.memory.probability_fits()

    @functools.cached_property
    def earlier_rows(self) -> frozenset[int]:
        """Return the rows of earlier sweeps' trials, which are not candidates."""
        return frozenset(range(len(self.candidates), len(self._columns)))

    @functools.cached_property
    def earlier_times_s(self) -> Mapping[int, float]:
        """Return the weighted seconds per step of the earlier trials most similar to any candidate, by row."""
        first = len(self.candidates)
        known = [(first + i, t.step_time_s) for i, t in enumerate(self.earlier) if t.step_time_s is not None]
        if not known:
            return {}
        times = [(row, step_time_s * float(self.weights[row])) for row, step_time_s in known]
        near = nearest(self._own.places[[row for row, _ in times]], self._own.places[:first])
        return dict(times[i] for i in near.tolist())

    @functools.cached_property
    def earlier_noise(self) -> Mapping[int, float]:
        """Standard deviations of the logarithms of these times, where they differ from the usual one."""
        return foreign_noise(self.earlier, len(self.candidates))

    def gain_of(self, row: int) -> float:
        """Return the expected score relative to the baseline's before any trial: the median over programs."""
        return self._baseline_weight / float(self.estimates.step_s[row] * self.weights[row])

    def log_spread_of(self, row: int) -> float:
        """Return the standard deviation of log(measured / expected time), both relative to the baseline's."""
        own = self._own.features[row] - self._own_baseline
        effects = np.r_[self.time.features[row], own]
        return float(np.sqrt(effects @ effects + LOCAL_STD**2))

    def posterior(self, times_s: Mapping[int, float]) -> Posterior:
        """Return the distribution over candidates. ``times_s``: weighted seconds per step by row, for trials' costs."""
        log_time = self.time.mean + np.log(self.weights / self._baseline_weight)
        level = np.median([np.log(time_s) - log_time[row] for row, time_s in times_s.items()]) if times_s else 0.0
        device_s = np.exp(log_time + level) * self._world_size / self.weights
        features = np.hstack([self.time.features, self._own.features, self._sweeps()])
        return Posterior(
            log_time=log_time,
            error=ErrorModel(
                features=features,
                feature_std=np.ones(features.shape[1]),
                places=self._own.places,
                local_std=LOCAL_STD,
                common_std=LEVEL_STD,
                noise_std=NOISE_STD,
            ),
            cost_s=OVERHEAD_STEPS * (device_s + np.median(device_s / self._world_size) * self._world_size),
            memory=self.memory,
        )

    def _sweeps(self) -> Array:
        """Return a column per earlier sweep, with the shared error in the rows of its trials."""
        names = list(dict.fromkeys(trial.sweep for trial in self.earlier))
        columns = np.zeros((len(self._columns), len(names)))
        for i, trial in enumerate(self.earlier):
            std = FOREIGN_LEVEL_STD if trial.is_foreign else SWEEP_STD
            columns[len(self.candidates) + i, names.index(trial.sweep)] = std
        return columns


# ---- Transfer: trials of earlier sweeps on the same hardware, which the guided sampler learns from before its own
#
# They are read once, when a sweep is created, and kept in its ledger. Later records elsewhere change nothing.

MEASURED_ON = ("hardware", "device_memory_bytes", "threads_per_device", "driver", "torch", "virtual", "variables")
"""Parts of the fingerprint that affect step times and memory: measurements are comparable if these are equal."""


MAX_TRIALS = 384
"""Most earlier trials to keep, newest sweeps first."""
MAX_PER_SWEEP = 32
"""Most earlier trials to keep of one sweep."""
MAX_NEAREST = 96
"""Most earlier trials whose times are learned from: those most similar to any candidate. Further ones add little, and
cost time at every proposal."""

FOREIGN_NOISE_STD = 0.1
"""Standard deviation of the log of a time that was recorded outside of tune-cluster."""
FOREIGN_LEVEL_STD = 1.0
"""The same of the error that all such runs of an experiment have in common: other hardware, other settings."""

_ROWS_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrial:
    """One trial of an earlier sweep: measured, or out of memory."""

    sweep: str
    """Id of that sweep."""
    workload: Workload
    candidate: Candidate
    step_time_s: float | None
    """Seconds per step; None: it ran out of memory."""
    peak_bytes: int | None = None
    """Peak memory of the fullest rank, if measured."""
    is_foreign: bool = False
    """Whether it is a run that tune-cluster did not measure: its hardware and settings are unverified. Only its speed
    relative to other such runs counts, with more noise, and it shows nothing about memory."""

    @classmethod
    def of_outcome(
        cls, sweep: str, workload: Workload, candidate: Candidate, outcome: Outcome | None
    ) -> EarlierTrial | None:
        """Convert an outcome to an earlier trial; None if the outcome does not depend on the hardware."""
        match outcome:
            case Measured(measurement=found):
                peak = found.peak_bytes or None
                time_s: float | None = found.step_time_s
            case OutOfMemory():
                peak, time_s = None, None
            case _:
                return None
        return cls(sweep=sweep, workload=workload, candidate=candidate, step_time_s=time_s, peak_bytes=peak)


def nearest(past: NDArray[np.float64], here: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return up to ``MAX_NEAREST`` rows of ``past`` with the least distance to any row of ``here``, in ascending order.

    Both are coordinates of the cost model's errors, of shapes (n, d) and (m, d).
    """
    closest = np.full(len(past), np.inf)
    for start in range(0, len(here), _ROWS_AT_ONCE):
        part = here[start : start + _ROWS_AT_ONCE]
        squares = (past**2).sum(1)[:, None] + (part**2).sum(1)[None, :] - 2 * past @ part.T
        closest = np.minimum(closest, squares.min(axis=1))
    return np.sort(np.argsort(closest.round(9), kind="stable")[:MAX_NEAREST])


def num_sweeps(earlier: Iterable[EarlierTrial]) -> int:
    """Return the number of sweeps that the trials come from."""
    return len({trial.sweep for trial in earlier if not trial.is_foreign})


def num_foreign(earlier: Iterable[EarlierTrial]) -> int:
    """Return the number of runs that tune-cluster did not measure."""
    return sum(trial.is_foreign for trial in earlier)


def foreign_noise(earlier: Sequence[EarlierTrial], first_row: int) -> dict[int, float]:
    """Map rows of foreign runs to standard deviations of their log times; ``earlier`` begins at ``first_row``."""
    return {row: FOREIGN_NOISE_STD for row, trial in enumerate(earlier, first_row) if trial.is_foreign}


def same_program(one: Workload, other: Workload) -> bool:
    """Whether two workloads train the same thing, so that one's times apply to the other.

    User programs may differ in what trials fill in: other sweeps try other arguments of them.
    """
    if isinstance(one.model, ScriptModel) and isinstance(other.model, ScriptModel):
        return _program(one.model) == _program(other.model) and one.seq_length == other.seq_length
    return one.model == other.model and one.seq_length == other.seq_length


def _program(model: ScriptModel) -> tuple[object, ...]:
    """Return a program's identity: its command without the arguments that trials fill in."""
    words = [word for word, following in zip(model.run, (*model.run[1:], ""), strict=True) if not _is_filled(following)]
    fixed = tuple(word for word in words if "{" not in word)
    return model.recipe, fixed, model.cwd, model.env, model.files, model.launcher


def _is_filled(word: str) -> bool:
    return word.startswith("{") and word.endswith("}")


def same_hardware(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether measurements from these two environments are comparable."""
    return all(one.get(name) == other.get(name) for name in MEASURED_ON)
