"""What the product makes of a made problem: its predictor, what trials tell, what they rule out."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from benchmarks.search.made.problem import MadeProblem
from orchestrator.search.acquisition import Posterior, Seen
from orchestrator.search.predictor import Predictor
from orchestrator.search.search import RUN_STD
from orchestrator.space.notation import flat_params
from orchestrator.space.rules import Pruner


class MadeKnowledge:
    """The product's predictor on a made problem, which knows what a sweep knows, and of trials what they report."""

    def __init__(self, problem: MadeProblem) -> None:
        self._problem = problem
        self._predictor = Predictor(problem.setup.workload, problem.candidates, problem.cluster, features=flat_params)
        self._ruled_out: dict[int, frozenset[int]] = {}

    @property
    def is_modelled(self) -> bool:
        """All of it."""
        return True

    @functools.cached_property
    def posterior(self) -> Posterior:
        """Predictions before any trial."""
        return self._predictor.posterior({})

    def seen(self, times_s: Mapping[int, float], oom: frozenset[int]) -> Seen:
        """``times_s``, what else those trials reported, and the candidates that ``oom`` rules out."""
        problem = self._problem
        peaks = problem.measured_bytes / problem.limit_bytes
        ruled_out = frozenset().union(*(self._rules_out(row) for row in oom)) - times_s.keys() - oom
        return Seen(
            times_s=times_s,
            noise_std=dict.fromkeys(times_s, max(problem.noise_std, RUN_STD)),
            peaks={row: float(peaks[row]) for row in times_s} if problem.reports_peaks else {},
            oom=oom,
            excluded=ruled_out,
        )

    def _rules_out(self, row: int) -> frozenset[int]:
        """What the product concludes from that candidate's having run out of memory."""
        if row not in self._ruled_out:
            candidates = self._problem.candidates
            batch = self._problem.setup.workload.global_batch_size
            found = Pruner(candidates, global_batch_size=batch).add(candidates[row])
            self._ruled_out[row] = frozenset(found)
        return self._ruled_out[row]
