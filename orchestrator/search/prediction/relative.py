"""What is expected of candidates without a cost model: how much faster than the baseline knobs usually make programs.

Asked by the guided sampler as the :class:`~orchestrator.search.prediction.predictor.Predictor` is. How fast the program
is at all, its first trial tells; what its knobs do beyond what they usually do, the Gaussian process learns. Trials of
earlier sweeps of the same program are rows of that process beside the candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.candidate_table import CandidateTable
from cluster.cost.usual.effects import Kind, drawn_programs
from cluster.cost.usual.knobs import KnobColumns
from cluster.cost.usual.memory import drawn_memory, relative_peak
from cluster.cost.usual.step import relative_step
from orchestrator.objective import Objective
from orchestrator.search.prediction.gaussian_process import Array, ErrorModel
from orchestrator.search.prediction.knob_effects import Believed, OwnEffects, believed
from orchestrator.search.prediction.memory_belief import MemoryBelief, Structured
from orchestrator.search.prediction.posterior import Posterior
from orchestrator.search.prediction.transfer import EarlierTrial, nearest, same_program
from orchestrator.space.naming import Features
from trials.spec import Candidate, Workload

LEVEL_STD = 3.0
"""Standard deviation of the log of the baseline's step time: nobody knows it."""
LOCAL_STD = 0.08
"""Standard deviation of what only combinations of knobs do: interactions are small beside the effects themselves."""
SWEEP_STD = 0.05
"""Standard deviation of the error that all trials of an earlier sweep on the same hardware have in common."""
NOISE_STD = 0.01
"""Standard deviation of the log of a repeated measurement."""
OVERHEAD_STEPS = 20.0
"""Steps that a trial takes, and as many again for its start."""
USED_SHARE = 0.35
"""Share of the memory that the baseline is taken to use: it runs, or its user would not run it."""
USED_STD = 0.7
"""Standard deviation of the log of that share."""
OWN_MEMORY_SHARE = 0.5
"""How far knobs of which nothing is known move the peak, relative to the time."""
OWN_MEMORY_STDS = {0.02: 0.5, 0.08: 0.5}
"""Standard deviations that the own errors of peaks may have, which trials decide on, and how likely each is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeEstimates:
    """Expectations of all rows before any trial of the sweep."""

    step_s: Array
    """Step time in units of the baseline's: geometric mean."""
    peak_bytes: Array
    """Peak memory of the fullest rank, from a guess of the baseline's."""


class RelativePredictor:
    """What usual effects of knobs say of a fixed list of candidates.

    Rows of what it returns are the candidates, in their order, and after them the earlier trials of the same program.

    Args:
        baseline: what times are relative to.
        features: flat description of a candidate.
        kind: what of usual effects holds for the device.
        limit_bytes: memory of a device.
        earlier: trials of other sweeps on the same hardware; those of the same program count.
        objective: what candidates are compared by; times that are compared are weighted by it.
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
    ) -> None:
        self.candidates = CandidateTable.of(candidates)
        self.earlier = tuple(trial for trial in earlier if same_program(trial.workload, workload))
        self.objective = objective or Objective()
        self.limit_bytes = float(limit_bytes)
        known = KnobColumns.of_pairs([(trial.workload, trial.candidate) for trial in self.earlier])
        self._columns = KnobColumns.of_table(workload, self.candidates).followed_by(known)
        self._baseline = KnobColumns.of_pairs([(workload, baseline)])
        self._kind = kind
        self._baseline_weight = self.objective.weight(baseline.layout.world_size)
        others = [*(trial.candidate for trial in self.earlier), baseline]
        described = OwnEffects(self.candidates, others, features)
        self._own, self._own_baseline = described.take(slice(0, -1)), described.features[-1]
        sizes, places = self.candidates.each(("layout",), lambda candidate: candidate.layout.world_size)
        last = [trial.candidate.layout.world_size for trial in self.earlier]
        self._world_size = np.concatenate([np.array(sizes, dtype=np.float64)[places], last])

    @functools.cached_property
    def time(self) -> Believed:
        """Log of the step time relative to the baseline's."""
        drawn = drawn_programs(self._kind)
        return believed(
            self._columns.matrix, lambda rows: relative_step(self._columns.take(rows), self._baseline, drawn)
        )

    @functools.cached_property
    def relative_memory(self) -> Believed:
        """Log of the peak relative to the baseline's."""
        drawn = drawn_memory()
        return believed(
            self._columns.matrix, lambda rows: relative_peak(self._columns.take(rows), self._baseline, drawn)
        )

    @functools.cached_property
    def memory(self) -> MemoryBelief | None:
        """What is believed of memory before any measurement of this sweep; None: there is no limit."""
        if not np.isfinite(self.limit_bytes):
            return None
        mean, features = self.relative_memory.mean, self.relative_memory.features
        level = np.full((len(mean), 1), USED_STD)
        structures = tuple(
            Structured(
                name="usual",
                log_weight=float(np.log(share)),
                mean=np.log(USED_SHARE) + mean,
                features=np.hstack([features, level, OWN_MEMORY_SHARE * self._own.features]),
                own_std=own_std,
            )
            for own_std, share in OWN_MEMORY_STDS.items()
        )
        known = list(enumerate(self.earlier, len(self.candidates)))
        peaks = {row: trial.peak_bytes / self.limit_bytes for row, trial in known if trial.peak_bytes}
        ran = [row for row, trial in known if trial.step_time_s is not None and not trial.peak_bytes]
        oom = [row for row, trial in known if trial.step_time_s is None]
        return MemoryBelief(structures=structures, places=self._own.places).after(peaks, ran, oom)

    @functools.cached_property
    def weights(self) -> Array:
        """By what the objective multiplies each row's step time."""
        return self.objective.weights(self._world_size)

    @functools.cached_property
    def estimates(self) -> RelativeEstimates:
        """Expectations before any trial of this sweep."""
        peak = USED_SHARE * self.limit_bytes * np.exp(self.relative_memory.mean)
        return RelativeEstimates(step_s=np.exp(self.time.mean), peak_bytes=peak)

    @functools.cached_property
    def probability_fits(self) -> Array:
        """Probability that each candidate fits in memory, before any measurement of this sweep."""
        return np.ones(len(self._columns)) if self.memory is None else self.memory.probability_fits()

    @functools.cached_property
    def earlier_rows(self) -> frozenset[int]:
        """Rows of trials of earlier sweeps, which are no candidates."""
        return frozenset(range(len(self.candidates), len(self._columns)))

    @functools.cached_property
    def earlier_times_s(self) -> Mapping[int, float]:
        """Weighted seconds per step of the earlier trials most like any candidate, by row."""
        first = len(self.candidates)
        known = [(first + i, t.step_time_s) for i, t in enumerate(self.earlier) if t.step_time_s is not None]
        if not known:
            return {}
        times = [(row, step_time_s * float(self.weights[row])) for row, step_time_s in known]
        near = nearest(self._own.places[[row for row, _ in times]], self._own.places[:first])
        return dict(times[i] for i in near.tolist())

    def gain_of(self, row: int) -> float:
        """Score relative to the baseline's that is expected before any trial: the median over programs."""
        return self._baseline_weight / float(self.estimates.step_s[row] * self.weights[row])

    def log_spread_of(self, row: int) -> float:
        """Standard deviation of log(measured / expected time), both relative to the baseline's."""
        own = self._own.features[row] - self._own_baseline
        effects = np.r_[self.time.features[row], own]
        return float(np.sqrt(effects @ effects + LOCAL_STD**2))

    def posterior(self, times_s: Mapping[int, float]) -> Posterior:
        """The distribution over candidates. Weighted seconds per step ``times_s``, by row, tell what trials cost."""
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
        """A column per earlier sweep, in the rows of its trials the error they have in common."""
        names = list(dict.fromkeys(trial.sweep for trial in self.earlier))
        columns = np.zeros((len(self._columns), len(names)))
        for i, trial in enumerate(self.earlier):
            columns[len(self.candidates) + i, names.index(trial.sweep)] = SWEEP_STD
        return columns
