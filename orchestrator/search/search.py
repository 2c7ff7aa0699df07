"""The search: which candidate to measure next, by any of the samplers. The one module of search that imports optuna.

A sampler only ever chooses from the enumerated legal candidates, never one that was proposed before or that needs at
least the memory of one that ran out of it, and its choice is a function of (seed, trial number, state) alone: the
Optuna study is rebuilt from the state for every question, so a sweep that was interrupted proposes what it would have
proposed anyway.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from orchestrator.search.guided import GuidedSearch, OpenCandidates
from orchestrator.space.knobs import INHERITED
from orchestrator.space.notation import FeatureColumns, Features, Scalar, feature_columns
from orchestrator.space.rules import OwnMemory, Pruner
from orchestrator.space.space import LargeSpace, Lookup, without_effect
from orchestrator.sweep.events import CandidatesPruned, PredictedResult, Suggestion
from orchestrator.sweep.state import SweepState, Trial
from trials.files import digest
from trials.outcome import Diverged, Infeasible, NotBelieved, OutOfMemory
from trials.spec import Candidate

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

SamplerName = Literal["guided", "tpe", "random", "grid"]
logger = logging.getLogger(__name__)

_CONSTRAINTS = {"memory": OutOfMemory, "legality": Infeasible, "numerics": Diverged, "clock": NotBelieved}
"""Constraint name -> outcome that violates it. Every told trial sets all of them, as Optuna's samplers require."""

_MAX_DRAWS = 16
"""Draws from TPE before its last one is moved to the nearest legal candidate that was not proposed yet."""
_MAX_TOLD = 256
"""Ended trials that TPE learns from. It tells at most 25 good ones from the rest, which are always among them."""
_MAX_RANDOM_DRAWS = 256
"""Draws from a space too large to enumerate before it counts as exhausted."""


class Search:
    """Proposes legal candidates, each at most once.

    Args:
        candidates: every legal candidate, in a fixed order.
        features: flat description of a candidate; knobs that never differ are left out of the search space.
        sampler: ``guided`` (the cost model, corrected by what was measured), ``tpe`` (Optuna's TPE over the knobs,
            restricted to legal candidates), ``random``, or ``grid`` (the candidates in their order).
        guide: the guided sampler; without one ``guided`` proposes as ``tpe``.
        stop_when_converged: end when the guide expects nothing better, rather than with the budget.
        beyond: the space of which ``candidates`` are a part, where it was too large to enumerate. Then conditional TPE
            and random draws range over the whole space; ``guided`` goes there when its guide knows nothing more.
        own_memory: what is known of the memory that the user's own knobs take.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        features: Features,
        sampler: SamplerName = "tpe",
        seed: int = 0,
        guide: GuidedSearch | None = None,
        stop_when_converged: bool = False,
        beyond: LargeSpace | None = None,
        own_memory: OwnMemory | None = None,
    ) -> None:
        if not isinstance(candidates, CandidateTable):
            candidates = CandidateTable.of(dict.fromkeys(candidates))
        self._candidates = candidates
        self._features = features
        self._sampler: SamplerName = "tpe" if sampler == "guided" and guide is None else sampler
        self._seed = seed
        self._guide = guide if sampler == "guided" else None
        self._stop_when_converged = stop_when_converged
        self._own_memory = own_memory
        self._open = OpenCandidates(self._candidates, own_memory)
        self._beyond = beyond
        if beyond is not None and sampler == "guided":
            logger.warning("%s", beyond.message)

    def ask(self, trial: int, state: SweepState) -> Suggestion | None:
        """The candidate for trial number ``trial``; None when every legal one has been proposed or ruled out."""
        self._open.follow(state)
        found = None if self._guide is None else self._guide.ask(state, self._open)
        if found is not None:
            return found
        if self._beyond is not None and self._sampler != "grid":
            return self._ask_beyond(self._beyond, trial, state)
        unseen = self._open.open_rows
        if not unseen.size:
            return None
        if self._sampler == "grid":
            return Suggestion(self._open.candidates[unseen[0]], "next in the grid")
        rng = random.Random(digest([self._seed, trial]))
        if self._sampler in ("random", "guided"):
            return Suggestion(self._open.candidates[rng.choice(unseen)], "drawn at random")
        return self._ask_tpe(state, unseen, rng)

    def predict(self, candidate: Candidate) -> PredictedResult | None:
        """The prediction of a candidate before any trial; None without a guide or where the guide knows it not."""
        return None if self._guide is None else self._guide.predict(candidate)

    def is_converged(self, state: SweepState) -> bool:
        """Whether the sweep should stop because nothing better is expected. Only ever so when asked for."""
        if self._guide is None or not self._stop_when_converged:
            return False
        self._open.follow(state)
        return bool(self._open.open_rows.size) and self._guide.is_converged(state, self._open)

    def newly_pruned(self, state: SweepState) -> tuple[CandidatesPruned, ...]:
        """Events for what out-of-memory outcomes have ruled out that no event speaks of yet, one per witness."""
        return tuple(
            CandidatesPruned(at_s=state.now_s, witness=witness, rules=rules)
            for witness, rules in self._open.newly_ruled_out(state)
        )

    @functools.cached_property
    def _space(self) -> _Space:
        return _Space(feature_columns(self._candidates, self._features))

    @functools.cached_property
    def _codes(self) -> NDArray[np.int32]:
        """Encoded candidates, shape (candidates, knobs)."""
        return self._space.codes

    def _row_at(self, point: tuple[int, ...]) -> int:
        """The row of the candidate with these encoded knobs, -1 where there is none."""
        rows = np.arange(len(self._open.candidates))
        for column, code in zip(self._codes.T, point, strict=True):
            rows = rows[column[rows] == code]
        return int(rows[0]) if rows.size else -1

    def _ask_tpe(self, state: SweepState, unseen: NDArray[np.intp], rng: random.Random) -> Suggestion:
        study = self._rebuild_study(state, seed=rng.randrange(2**31))
        remaining = set(unseen.tolist())
        point: tuple[int, ...] = ()
        for _ in range(_MAX_DRAWS):
            params = study.ask(self._space.distributions).params
            point = tuple(params[name] for name in self._space.names)
            if (row := self._row_at(point)) in remaining:
                return Suggestion(self._open.candidates[row], "proposed by TPE")
        distance = self._space.distances(self._codes[unseen], np.array(point))
        nearest = rng.choice(np.flatnonzero(distance <= distance.min() + 1e-9).tolist())
        return Suggestion(self._open.candidates[unseen[nearest]], "nearest legal candidate to TPE's proposal")

    def _ask_beyond(self, large: LargeSpace, trial: int, state: SweepState) -> Suggestion | None:
        rng = random.Random(digest([self._seed, trial]))
        tried = {known.candidate for known in state.trials}
        if self._sampler != "random":
            study = self._rebuild_study(state, seed=rng.randrange(2**31))
            for _ in range(_MAX_DRAWS):
                candidate = self._lookup.nearest(study.ask(self._space.distributions).params, rng)
                if candidate not in tried and large.is_legal(candidate) and not self._is_ruled_out(candidate, state):
                    return Suggestion(candidate, "proposed by conditional TPE")
        for _ in range(_MAX_RANDOM_DRAWS):
            drawn = large.draw(rng)
            if drawn is not None and drawn not in tried and not self._is_ruled_out(drawn, state):
                return Suggestion(drawn, "drawn at random")
        return None

    def _is_ruled_out(self, candidate: Candidate, state: SweepState) -> bool:
        """Whether it needs at least the memory of one that ran out of it."""
        batch = state.sweep.workload.global_batch_size
        pruner = Pruner((candidate,), global_batch_size=batch, own=self._own_memory)
        return any(isinstance(trial.outcome, OutOfMemory) and pruner.add(trial.candidate) for trial in state.trials)

    @functools.cached_property
    def _lookup(self) -> Lookup:
        assert self._beyond is not None
        return Lookup(self._beyond, self._features, self._space.encode, self._space.spans)

    def _rebuild_study(self, state: SweepState, seed: int) -> optuna.Study:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_num_startup_trials(state))
        study = optuna.create_study(direction="maximize", sampler=sampler)
        counting = (t for t in state.searched() if not state.is_disqualified(t.number))
        scores = [state.objective.score(t.measurement) for t in counting if t.measurement]
        for number in _told(state):
            trial = state.trials[number]
            score = state.objective.score(trial.measurement) if trial.measurement else min(scores, default=0.0)
            self._tell(study, trial, score)
        for trial in state.searched():
            if trial.outcome is None:
                self._tell(study, trial, 0.0)
        return study

    def _tell(self, study: optuna.Study, trial: Trial, score: float) -> None:
        """Add a trial to the study. Faults and lost gangs say nothing about the candidate; running trials repel TPE."""
        import optuna

        outcome = trial.outcome
        if outcome is not None and outcome.consequence not in ("objective", "constraint"):
            return
        point = self._space.encode(self._features(trial.candidate))
        if self._beyond is not None:
            idle = without_effect(trial.candidate)
            point = {name: value for name, value in point.items() if value >= 0 and name not in idle}
        if any(value < 0 for value in point.values()):
            return  # the baseline may lie outside the space
        constraints = {name: float(isinstance(outcome, kind)) for name, kind in _CONSTRAINTS.items()}
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.RUNNING if outcome is None else optuna.trial.TrialState.COMPLETE,
                value=None if outcome is None else score,
                params=point,
                distributions={name: self._space.distributions[name] for name in point},
                constraints=constraints,
            )
        )


class _Space:
    """Knobs that differ between candidates; each choice is encoded as its index in sorted order.

    An own knob that a candidate does not set has a value of its own there.
    """

    def __init__(self, columns: FeatureColumns) -> None:
        choices = {name: sorted(values, key=_sort_key) for name, (values, _) in columns.items()}
        self._choices = {name: values for name, values in choices.items() if len(values) > 1}
        self._columns = columns

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._choices)

    def encode(self, row: Mapping[str, Scalar]) -> dict[str, int]:
        """Index of each knob's value; -1 for one that no candidate has."""
        return {
            name: values.index(value) if (value := row.get(name, INHERITED)) in values else -1
            for name, values in self._choices.items()
        }

    @property
    def codes(self) -> NDArray[np.int32]:
        """Encoded candidates, shape (candidates, knobs)."""
        num = max((len(places) for _, places in self._columns.values()), default=0)
        found = np.zeros((num, len(self._choices)), dtype=np.int32, order="F")
        for column, (name, choices) in enumerate(self._choices.items()):
            values, places = self._columns[name]
            found[:, column] = np.array([choices.index(value) for value in values], dtype=np.int32)[places]
        return found

    @property
    def spans(self) -> dict[str, float]:
        """Largest index distance of ordered knobs, 0 for others."""
        return {n: len(values) - 1.0 if self._is_ordered(n) else 0.0 for n, values in self._choices.items()}

    @functools.cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Ordered choices (numbers) as integers, others as categories."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        return {
            name: IntDistribution(0, len(values) - 1)
            if self._is_ordered(name)
            else CategoricalDistribution(range(len(values)))
            for name, values in self._choices.items()
        }

    def distances(self, codes: NDArray[np.int32], point: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum over knobs of 0..1: relative index distance for ordered knobs, equal or not for others."""
        total = np.zeros(len(codes))
        for column, (span, wanted) in enumerate(zip(self.spans.values(), point.tolist(), strict=True)):
            miss = np.abs(codes[:, column] - wanted)
            total += miss / max(span, 1.0) if span > 0 else miss > 0
        return total

    def _is_ordered(self, name: str) -> bool:
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self._choices[name])


def _sort_key(value: Scalar) -> tuple[str, Scalar]:
    return ("number" if isinstance(value, int | float) else "text", value)


def _told(state: SweepState) -> list[int]:
    """Ended trials TPE learns from, in the order they ended: of too many the fastest ones and the latest."""
    ended = (n for n in state.end_order if not state.is_disqualified(n))
    telling = [n for n in ended if _consequence(state.trials[n]) in ("objective", "constraint")]
    if len(telling) <= _MAX_TOLD:
        return telling
    scores = {n: state.objective.score(m) for n in telling if (m := state.trials[n].measurement)}
    fastest = sorted(scores, key=lambda n: (-scores[n], n))[: _MAX_TOLD // 4]
    kept = {*fastest, *telling[-3 * _MAX_TOLD // 4 :]}
    return [n for n in telling if n in kept]


def _consequence(trial: Trial) -> str:
    assert trial.outcome is not None
    return trial.outcome.consequence


def _num_startup_trials(state: SweepState) -> int:
    """Random trials before TPE models anything: a third of the budget, between 4 and Optuna's default of 10."""
    budget = state.sweep.budget.max_trials if state.created else None
    return max(4, min(10, (budget or 30) // 3))
