"""What is believed of the effects of knobs before any trial, in the form that the Gaussian process takes.

The effects that the built-in knobs usually have (:mod:`cluster.cost.usual`) are drawn for many programs; mean and
covariance over these are kept as a mean and as features with weights of standard deviation 1. Besides, every knob has
an effect of its own about which nothing is known but its size: alike for neighbours where its values are numbers, and
none like another where they are names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from cluster.cost.coefficients import Coefficients
from cluster.cost.generic import GenericInputs, generic_step_seconds
from cluster.cost.usual.effects import drawn_programs, usual_program
from cluster.cost.usual.knobs import column_of
from orchestrator.search.prediction.gaussian_process import Array
from orchestrator.space.knobs.own import INHERITED
from orchestrator.space.naming import Features, Scalar, feature_columns
from trials.spec import Candidate

KEPT_VARIANCE = 0.999
"""Share of the drawn programs' variance that the features have to keep."""
MAX_FEATURES = 40
ROWS_AT_ONCE = 2048
OWN_STD = 0.3
"""Standard deviation of the effect of a value of one of the user's own knobs: most do little, some a factor of two."""
NAMED_STD = 0.3
"""The same, beyond what its name says that it usually does: names are guessed at."""
KNOWN_STD = 0.05
"""The same of the built-in knobs, beyond what they usually do."""
SMOOTHNESS = 0.5
"""Share of the range of a knob's numbers over which its effect stays alike."""
MAX_LEVELS = 6
"""Components by which the effect of a knob with many numbers is described."""
PLACE_SPAN = 1.4
"""Distance between the ends of a knob's numbers, or two of its names, for effects that only combinations have: errors
at distance 1 correlate with ``exp(-1/2)``."""


@dataclass(frozen=True, slots=True)
class Believed:
    """Mean of a logarithm over drawn programs, shape (n,), and features of unit weight around it, shape (n, d)."""

    mean: Array
    features: Array


def believed(matrix: Array, draw: Callable[[NDArray[np.intp]], Array]) -> Believed:
    """Mean and features of what ``draw`` gives.

    Args:
        matrix: description of n candidates, shape (n, k); equal rows are drawn once.
        draw: from indices of rows to logarithms, shape (draws, len(rows)).
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
    """How far step times may lie from the generic cost model's because data loading and kernels do not do the usual."""

    def log_step(rows: NDArray[np.intp], many: bool) -> Array:
        usual = drawn_programs(x.kind) if many else usual_program(x.kind)
        terms = generic_step_seconds(x.take(rows), coefficients, usual).values()
        return np.asarray(np.log(sum(terms, np.zeros((1, len(rows))))))

    return believed(x.matrix, lambda rows: log_step(rows, True) - log_step(rows, False))


class OwnEffects:
    """The effects of knobs of which only the size is known: a row per candidate of the table, and of ``others``.

    Args:
        known: names of knobs that are described otherwise.
        stds: standard deviations of the effects of some built-in knobs.

    ``features`` have weights of standard deviation 1; ``places`` tell how alike combinations are.
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
        asked, rest = feature_columns(table, features), [features(candidate) for candidate in others]
        names = [name for name in dict.fromkeys([*asked, *(name for row in rest for name in row)]) if name not in known]
        own = {choice.name for chosen in (*table.values["own"], *(c.own for c in others)) for choice in chosen}
        columns, places = [np.zeros((len(table) + len(rest), 0))], [np.zeros((len(table) + len(rest), 0))]
        for name in names:
            told, codes = asked.get(name, ([INHERITED], np.zeros(len(table), dtype=np.int32)))
            last = [row.get(name, INHERITED) for row in rest]
            distinct = sorted({*told, *last}, key=_sort_key)
            if len(distinct) < 2:
                continue
            place_of = np.array([distinct.index(value) for value in [*told, *last]], dtype=np.intp)
            where = np.concatenate([place_of[: len(told)][codes], place_of[len(told) :]])
            spots = _spots(distinct)
            std = (stds or {}).get(name) or _std(name, distinct, is_own=name in own)
            columns.append((_effect_of(spots) * std)[where])
            places.append(spots[where] * PLACE_SPAN)
        self.features: Array = np.hstack(columns)
        self.places: Array = np.hstack(places)

    def take(self, rows: slice) -> OwnEffects:
        """The rows that ``rows`` selects."""
        found = object.__new__(OwnEffects)
        found.features, found.places = self.features[rows], self.places[rows]
        return found


def _spots(values: Sequence[Scalar]) -> Array:
    """Where values lie, shape (values, k): numbers on a line from 0 to 1, names at equal distances of 1."""
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
    """Features whose weights, of standard deviation 1, give an effect of that size at each of the spots."""
    squares = ((spots[:, None, :] - spots[None, :, :]) ** 2).sum(-1)
    scale = SMOOTHNESS if spots.shape[1] == 1 and len(spots) > 2 else 0.3
    values, vectors = np.linalg.eigh(np.exp(-0.5 * squares / scale**2))
    num = min(MAX_LEVELS if spots.shape[1] == 1 else len(spots), len(spots))
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0)))[:, ::-1][:, :num])


def _std(name: str, values: Sequence[Scalar], *, is_own: bool) -> float:
    if not is_own:
        return KNOWN_STD
    told = [column_of(name, value) for value in values if value != INHERITED]
    return NAMED_STD if all(told) else OWN_STD


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
        "zero_stage",
        "sequence_parallel",
        "micro_batch_size",
        "num_virtual_stages",
        "stage_layers",
        "recompute",
    )
)
"""Features that the cost model's own terms, or :func:`physical_places`, cover."""


class UnmodelledKnobs:
    """What candidates are in the knobs that the cost model knows nothing of, one row per candidate.

    ``one_hot`` has a column per value of each knob; in ``places`` knobs that are numbers have one column.
    """

    def __init__(self, candidates: CandidateTable, others: Sequence[Candidate], features: Features) -> None:
        known = feature_columns(candidates, functools.partial(_unmodelled, features=features))
        rest = [_unmodelled(candidate, features) for candidate in others]
        names = dict.fromkeys([*known, *(name for row in rest for name in row)])
        num = len(candidates) + len(rest)
        hot, places = [np.zeros((num, 0))], [np.zeros((num, 0))]
        for name in names:
            told, codes = known.get(name, ([INHERITED], np.zeros(len(candidates), dtype=np.int32)))
            last = [row.get(name, INHERITED) for row in rest]
            distinct = sorted({*told, *last}, key=str)
            if len(distinct) < 2:
                continue
            where = np.array([distinct.index(value) for value in [*told, *last]])
            code = np.concatenate([where[codes], where[len(told) :]])
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
