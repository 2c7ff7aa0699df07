"""The knobs that help against each kind of bottleneck, and the gain of their legal changes, measured or predicted."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.cost.cost_model import Calibrated, CostModel, fit
from cluster.cost.inputs import Array, CostInputs, load_prior
from cluster.cost.step_time import stage_seconds
from cluster.cost.usual import built_in_knob
from cluster.cost.work import work_of
from cluster.probing import Profile, with_probe
from orchestrator.diagnosis.values import Kind, Remedy
from orchestrator.objective import Objective
from orchestrator.search.acquisition import Posterior, Residual, Seen, condition, learn, probability_fits
from orchestrator.search.predictor import LOCAL_STD, Predictor, estimate_rows, log_device_seconds, of_candidates
from orchestrator.space.knobs import INSIDE
from orchestrator.space.notation import diff
from orchestrator.space.space import without_effect
from orchestrator.statistics import MIN_DIFFERENCE, Estimate, Interval, speed_ratio, verdict
from orchestrator.sweep.state import SweepState, Trial, weighted_step_s
from orchestrator.units import chance, changes_text, num_bytes, ratio_interval, status_label, trial_id
from trials.layout_rules import has_experts
from trials.outcome import OutOfMemory
from trials.spec import (
    Candidate,
    LlamaModel,
    Model,
    PythonModel,
    ResNetModel,
    ScriptModel,
    UserModel,
    Workload,
    decoder_of,
)

# Predictions of the cost model for a sweep's candidates, corrected by its trials, as used by the guided search.


MIN_FOR_ERROR = 4
"""Minimum number of trials for a leave-one-out estimate of the prediction error."""

ROWS_AT_ONCE = 1024
"""Number of rows whose covariances with all measured trials are held at a time."""

Rows = NDArray[np.intp]
"""Rows of candidates among the predictor's, shape (num_rows,)."""


class ModelView:
    """Predictions for a fixed list of candidates, which includes those of the sweep's trials.

    Args:
        predictor: for these candidates, from :func:`orchestrator.search.predictor.make_predictor`.
        trials: the sweep's trials that correct the model.
        profile: a probe's measurements of the nodes; the one that the predictor was made with.
    """

    def __init__(self, predictor: Predictor, trials: Sequence[Trial], profile: Profile | None = None) -> None:
        self._predictor = predictor
        self._profile = profile
        self._rows = {candidate.config_key: row for row, candidate in enumerate(predictor.candidates)}
        self._trials = [trial for trial in trials if trial.candidate.config_key in self._rows]
        measured = [trial for trial in self._trials if trial.measurement is not None]
        self._times_s = {self._row(trial.candidate): weighted_step_s(trial, predictor.objective) for trial in measured}

    @property
    def limit_bytes(self) -> float:
        """Device memory of a rank."""
        return self._predictor.limit_bytes

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on CPUs."""
        return self._predictor.on_cpu

    def step_terms_s(self, candidate: Candidate) -> dict[str, float]:
        """The cost model's terms of the step time in seconds, with coefficients fitted to this sweep's trials.

        On CPUs, the core that launches operators also runs them, so launching is part of computing.
        """
        row = self._row(candidate)
        x = self._predictor.inputs.take(slice(row, row + 1))
        model = CostModel(self._time, Calibrated.of_prior(load_prior("memory")))
        found = estimate_rows(model, x, on_cpu=self.on_cpu)
        terms = {name: float(values[0]) for name, values in found.step_terms_s.items()}
        if self.on_cpu:
            computing = "compute" if "compute" in terms else "forward"
            terms[computing] += terms.pop("launch")
        return terms

    def stage_loads_s(self, candidate: Candidate) -> list[float]:
        """Seconds of a micro-batch on each pipeline rank; empty without a pipeline."""
        row, inputs = self._row(candidate), self._predictor.inputs
        if not isinstance(inputs, CostInputs) or candidate.layout.pp == 1:
            return []
        x = inputs.take(slice(row, row + 1))
        loads = stage_seconds(x, work_of(x), self._time.coefficients).total[0]
        return [float(load) for load in loads[: candidate.layout.pp]]

    def gain(self, trial: Candidate, other: Candidate) -> tuple[float, float]:
        """Expected score of ``other`` over that of ``trial``, and the standard deviation of its logarithm."""
        here, there = self._row(trial), self._row(other)
        return float(np.exp(self._mean[here] - self._mean[there])), float(self._std[there])

    def peak_bytes(self, candidate: Candidate, *, like: Trial) -> float:
        """Predicted peak of the fullest rank, corrected by the measurement of trial ``like``."""
        peaks = self._predictor.estimates.peak_bytes
        expected = float(peaks[self._row(candidate)])
        peak = _peak(like)
        return expected * peak / float(peaks[self._row(like.candidate)]) if peak else expected

    def probability_fits(self, candidate: Candidate) -> float:
        """Probability that the candidate fits into memory, given which trials fitted and which did not."""
        return float(self._fits[self._row(candidate)])

    def distinguishes(self, one: Candidate, other: Candidate) -> bool:
        """Whether the model, corrected by the trials, predicts any difference."""
        seconds = self._predictor.estimates.step_s
        here, there = self._row(one), self._row(other)
        return bool(seconds[here] != seconds[there]) or abs(float(self._mean[here] - self._mean[there])) > 1e-3

    @functools.cached_property
    def error(self) -> float | None:
        """Typical relative error of predictions: the median over measured trials, each predicted from the others."""
        rows = np.array(sorted(self._times_s), dtype=np.intp)
        if len(rows) < MIN_FOR_ERROR:
            return None
        errors = np.log([self._times_s[row] for row in rows.tolist()]) - self._posterior.log_time[rows]
        kept = condition(self._posterior.error, rows, errors, self._residual.scale)
        own = (kept.inverse_factor**2).sum(axis=0)  # the diagonal of the inverse covariance
        misses = np.abs(np.expm1(kept.weights / own))  # the error of each trial's prediction from the others
        return float(np.median(misses))

    @functools.cached_property
    def _time(self) -> Calibrated:
        """The time coefficients after all measured trials."""
        prior = load_prior("time")
        if self._profile is not None:
            prior = with_probe(prior, self._profile, self._predictor.cluster)
        prior = of_candidates(prior, LOCAL_STD[self._predictor.device_kind])
        rows = np.array(sorted(self._known_s), dtype=np.intp)
        if not rows.size:
            return Calibrated.of_prior(prior)
        x = self._predictor.inputs.take(rows)
        device_s = self._predictor.inputs.world_size / self._predictor.weights
        times = np.log([self._known_s[row] * float(device_s[row]) for row in rows.tolist()])
        return fit(prior, functools.partial(log_device_seconds, x), times)

    @functools.cached_property
    def _known_s(self) -> dict[int, float]:
        """Weighted seconds per step by row, including trials of earlier sweeps."""
        return {**self._predictor.earlier_times_s, **self._times_s}

    @functools.cached_property
    def _posterior(self) -> Posterior:
        """The predictor's distribution over all candidates, given the measurements."""
        return self._predictor.posterior(self._known_s)

    @functools.cached_property
    def _seen(self) -> Seen:
        """The sweep's measurements of time and memory."""
        return Seen(
            times_s=self._times_s,
            peaks={self._row(t.candidate): peak / self.limit_bytes for t in self._trials if (peak := _peak(t))},
            oom=frozenset(self._row(t.candidate) for t in self._trials if isinstance(t.outcome, OutOfMemory)),
            history=self._predictor.earlier_times_s,
        )

    @functools.cached_property
    def _fits(self) -> Array:
        """Probability of fitting into memory, shape (num_candidates,)."""
        return probability_fits(self._posterior, self._seen, np.arange(len(self._predictor.candidates), dtype=np.intp))

    @functools.cached_property
    def _residual(self) -> Residual:
        """The errors of the cost model, learned from the trials."""
        rows = np.array(sorted(self._known_s), dtype=np.intp)
        errors = np.log([self._known_s[row] for row in rows.tolist()]) - self._posterior.log_time[rows]
        return learn(self._posterior.error, rows, errors)

    @functools.cached_property
    def _mean(self) -> Array:
        """Mean of the logarithm of the weighted seconds per step, shape (num_candidates,)."""
        rows: Rows = np.arange(len(self._predictor.candidates), dtype=np.intp)
        return np.asarray(self._posterior.log_time[rows] + self._residual.mean(rows))

    @functools.cached_property
    def _std(self) -> Array:
        """Its standard deviation, shape (num_candidates,)."""
        rows: Rows = np.arange(len(self._predictor.candidates), dtype=np.intp)
        parts = [self._residual.std(rows[i : i + ROWS_AT_ONCE]) for i in range(0, len(rows), ROWS_AT_ONCE)]
        return np.concatenate(parts)

    def _row(self, candidate: Candidate) -> int:
        return self._rows[candidate.config_key]


def _peak(trial: Trial) -> int:
    """Measured peak of the fullest rank in bytes; 0 if it was not measured."""
    return trial.measurement.peak_bytes if trial.measurement else 0


# Samples the trials of a long sweep for an explanation, so that its cost does not grow with the sweep.
#
# Forests, regressions and the cost model's residuals cost more than proportionally to the number of trials, and gain
# little beyond a thousand. The sample always includes the diagnosed trials, the fastest, and those most similar to the
# diagnosed ones, which show the effect of changing one knob.


MAX_TRIALS = 1000
"""Maximum number of trials in the sample; smaller sweeps are used in full."""
SHARE_ALIKE = 0.4
"""Share of the sample that is most similar to the diagnosed trials; the rest is spread evenly over the sweep."""
PARTS = ("layout", "micro_batch_size", "recompute", "precision", "offload", "loader", "kernels", "own")
"""Parts of a candidate."""


def num_parts(one: Candidate, other: Candidate) -> int:
    """Number of parts in which two candidates differ; cheap, unlike a comparison of all knobs."""
    return sum(getattr(one, name) != getattr(other, name) for name in PARTS)


def sample(searched: Sequence[Trial], named: Sequence[Trial], state: SweepState) -> list[Trial]:
    """At most about :data:`MAX_TRIALS` of the search's trials, in order, including ``named`` and the fastest."""
    if len(searched) <= MAX_TRIALS:
        return list(searched)
    kept = {trial.number for trial in named} | {one.number for one in state.fastest}
    kept |= {check.check.of for check in state.checks() if check.check is not None}
    kept |= _alike([trial for trial in searched if trial.measurement is not None], named)
    others = [trial.number for trial in searched if trial.number not in kept]
    step = -(-len(others) // max(1, MAX_TRIALS - len(kept)))
    kept |= set(others[::step])
    return [trial for trial in searched if trial.number in kept]


def spread(candidates: Sequence[Candidate], most: int) -> Sequence[Candidate]:
    """At most ``most`` of the candidates, evenly spaced."""
    return candidates[:: max(1, -(-len(candidates) // most))]


def _alike(measured: Sequence[Trial], named: Sequence[Trial]) -> set[int]:
    """Numbers of the measured trials that differ in the fewest parts from one of ``named``."""
    found: set[int] = set()
    for one in named:
        order = sorted(measured, key=lambda trial: num_parts(trial.candidate, one.candidate))
        found |= {trial.number for trial in order[: int(SHARE_ALIKE * MAX_TRIALS / len(named))]}
    return found


IMPLIED: Mapping[str, frozenset[str]] = {
    "pp": frozenset({"schedule", "num_virtual_stages", "stage_layers"}),
    "tp": frozenset({"sequence_parallel"}),
    "cp": frozenset({"cp_method", "ulysses_degree"}),
    "cp_method": frozenset({"ulysses_degree"}),
    "dp_shard": frozenset({"zero_stage", "replicate_with"}),
    "num_virtual_stages": frozenset({"schedule", "stage_layers"}),
    "schedule": frozenset({"num_virtual_stages", "stage_layers"}),
    "num_workers": frozenset({"prefetch_factor", "persistent_workers"}),
    "dataloader": frozenset({"num_workers", "prefetch_factor"}),
}
"""Maps a knob to those that may have to change with it."""

FOLLOWING = frozenset({"world_size", "tp_engine"})
"""Knobs that any other knob may imply: from degrees, or from schedule and recompute if the engine is auto."""

IN_DDP = tuple(f"{INSIDE}:{name}" for name in ("ddp_bucket_mb", "ddp_gradient_as_bucket_view", "ddp_static_graph"))
"""Knobs set inside programs that use DistributedDataParallel."""

HELPFUL_KNOBS: Mapping[Kind, tuple[str, ...]] = {
    "memory": (
        *("recompute", "zero_stage", "dp_shard", "micro_batch_size", "sequence_parallel", "shard_embedding"),
        *("pp", "tp", "ep", "dp_replicate", "cp", "offload_activations", "offload_optimizer"),
    ),
    "compute": (
        *("precision", "compile", "matmul_precision", "attention", "memory_format", "cudnn_benchmark"),
        *("compile_mode", "micro_batch_size"),
    ),
    "communication": (
        *("num_copies", "sequence_parallel", "zero_stage", "dp_shard", "dp_replicate", "tp", "ep", "pp", "cp"),
        *("tp_engine", "cp_method", "ulysses_degree", "replicate_with", "shard_embedding", "micro_batch_size", *IN_DDP),
    ),
    "io": ("num_workers", "dataloader", "prefetch_factor", "pin_memory", "persistent_workers", "full_batch"),
    "bubble": ("schedule", "num_virtual_stages", "micro_batch_size", "pp", "dp_replicate", "dp_shard"),
    "imbalance": ("stage_layers", "num_virtual_stages", "recompute", "schedule", "ep", "batching"),
    "padding": ("batching", "micro_batch_size"),
    "dispatch": ("compile", "compile_mode", "micro_batch_size", "num_copies"),
    "compilation": ("compile", "compile_mode"),
    "optimizer": ("dp_shard", "zero_stage", "micro_batch_size", "compile", "offload_optimizer"),
}
HELPFUL_KNOBS = {
    **HELPFUL_KNOBS,
    "passes": tuple(dict.fromkeys(knob for kind in ("compute", "dispatch", "memory") for knob in HELPFUL_KNOBS[kind])),
}
"""Maps each kind of bottleneck to the knobs that help against it, most direct first."""

MAX_PARTS = 3
"""Maximum number of parts of a candidate (layout, precision, loader, ...) in which a change may differ from it."""
MAX_NEAR = 2000
"""Maximum number of candidates searched for changes of a trial."""
MAX_EXAMINED = 1000
"""Maximum number of candidates examined to find knobs that must change."""
PENALTY = 0.02
"""Minimum gain in speed, as a share, for each additional knob to change."""
SURE_SPREADS = 0.67
"""Standard deviations by which a predicted gain must exceed zero: odds of three to one that it is real."""
MIN_FITS = 0.75
"""Minimum probability of fitting into memory for a proposed change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobChange:
    """A legal candidate, and the knobs in which it differs from a trial."""

    candidate: Candidate
    changed: Mapping[str, tuple[Any, Any]]
    """Maps knobs to pairs (value of the trial, value here)."""
    forced: frozenset[str]
    """Changed knobs that differ from the trial in every legal candidate."""
    trial: Trial | None
    """The sweep's trial of this candidate; None if it was not tried."""
    ratio: Estimate | None
    """Its measured score over the trial's; None if not measured."""
    num_rounds: int = 0
    """Rounds of confirmation behind the ratio; 0: one run of each."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Maps custom knobs to built-in ones, as in the sweep file."""

    @property
    def meant(self) -> frozenset[str]:
        """The changed knobs, custom ones by the built-in knob that they correspond to."""
        return frozenset(meaning(name, *values, roles=self.roles) for name, values in self.changed.items())


def meaning(name: str, *values: Any, roles: Mapping[str, str]) -> str:
    """The built-in knob that a custom one corresponds to, by the sweep file or by its name: ``num_workers`` for
    ``--num-workers``; else the name itself."""
    if name in roles:
        return roles[name]
    return next((knob for value in values if (knob := built_in_knob(name, value)) is not None), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmedRatio:
    """Speed of a trial over the baseline's, from rounds in which both were measured."""

    ratio: Estimate
    num_rounds: int

    @property
    def inverse(self) -> ConfirmedRatio:
        """Speed of the baseline over the trial's."""
        ci95 = self.ratio.ci95
        other = Interval(1 / ci95.high, 1 / ci95.low) if ci95 is not None and ci95.low > 0 else None
        return replace(self, ratio=Estimate(1 / self.ratio.value, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """Gains of the changes that help against one kind of bottleneck."""

    best: Remedy | None
    """The fastest that fits; None if none is known to be faster."""
    blocked: Remedy | None
    """The change that would be fastest with enough memory for it."""
    num_changes: int
    """Number of legal changes that were compared."""
    note: str
    """Why there is no best one; empty if there is."""


def _can_split_experts(model: Model) -> bool:
    if not isinstance(model, ScriptModel):
        return has_experts(model)
    return has_experts(model.shape) if model.shape is not None else any("{ep}" in word for word in model.run)


def applicable(kind: Kind, candidate: Candidate, workload: Workload) -> tuple[str, ...]:
    """Knobs that help against ``kind`` and have an effect on this candidate."""
    is_resnet, is_decoder = isinstance(workload.model, ResNetModel), isinstance(workload.model, LlamaModel)
    pointless = set() if is_resnet else {"memory_format", "cudnn_benchmark"}
    pointless |= set() if workload.lengths or isinstance(workload.model, PythonModel) else {"batching"}
    if not is_decoder:
        pointless |= {"sequence_parallel", "cp", "shard_embedding"}
        pointless |= {"attention"} if decoder_of(workload.model) is None else set()
        pointless |= set() if isinstance(workload.model, UserModel) else {"tp", "pp"}
    pointless |= set() if _can_split_experts(workload.model) else {"ep"}
    pointless |= set() if isinstance(workload.model, ScriptModel) and candidate.layout.dp > 1 else set(IN_DDP)
    return tuple(knob for knob in HELPFUL_KNOBS[kind] if knob not in pointless | without_effect(candidate))


def changes(
    trial: Trial,
    candidates: Sequence[Candidate],
    tried: Sequence[Trial],
    objective: Objective,
    confirmed: Mapping[int, ConfirmedRatio] | None = None,
    *,
    roles: Mapping[str, str],
) -> list[KnobChange]:
    """Candidates that differ from the trial only in knobs that help against one kind of bottleneck.

    Knobs whose value in the trial occurs in no candidate may differ as well, since a baseline may be outside the space.

    Args:
        candidates: legal ones, including those of ``tried``.
        tried: trials of the sweep, whose measurements are better evidence than predictions.
        confirmed: ratio of each finalist to the baseline in the rounds of confirmation, which override the search.
        roles: maps custom knobs to built-in ones, as in the sweep file.
    """
    by_candidate = {other.candidate: other for other in tried}
    forced = _forced(trial.candidate, candidates)
    allowed = [_closure(knobs) for knobs in HELPFUL_KNOBS.values()]
    found = []
    for candidate in _near(trial.candidate, candidates, by_candidate):
        other = by_candidate.get(candidate)
        again = _confirmed(other, trial, confirmed or {})
        change = KnobChange(
            candidate=candidate,
            changed=diff(candidate, trial.candidate),
            forced=forced,
            trial=other,
            ratio=again.ratio if again else _ratio(other, trial, objective),
            num_rounds=again.num_rounds if again else 0,
            roles=roles,
        )
        if any(_is_within(change, knobs) for knobs in allowed):
            found.append(change)
    return found


def _is_within(change: KnobChange, allowed: frozenset[str]) -> bool:
    """Whether only knobs of ``allowed`` change, apart from those that every candidate changes."""
    return all(
        name in change.forced or meaning(name, *values, roles=change.roles) in allowed
        for name, values in change.changed.items()
    )


def _ratio(other: Trial | None, trial: Trial, objective: Objective) -> Estimate | None:
    if other is None or other.measurement is None or trial.measurement is None:
        return None
    return speed_ratio(other.measurement, trial.measurement, objective)


def _confirmed(other: Trial | None, trial: Trial, confirmed: Mapping[int, ConfirmedRatio]) -> ConfirmedRatio | None:
    """The ratio of the two from the rounds of confirmation; None unless one of them is the baseline."""
    if other is None:
        return None
    if trial.number == 0:
        return confirmed.get(other.number)
    found = confirmed.get(trial.number) if other.number == 0 else None
    return found.inverse if found else None


def _near(
    candidate: Candidate, candidates: Sequence[Candidate], tried: Mapping[Candidate, Trial]
) -> Sequence[Candidate]:
    """Candidates that differ in few parts. If there are more than :data:`MAX_NEAR`, the tried ones and those that
    differ in the fewest parts, in their original order."""
    parts = {other: n for other in candidates if 0 < (n := num_parts(other, candidate)) <= MAX_PARTS}
    if len(parts) <= MAX_NEAR:
        return tuple(parts)
    order = sorted(parts, key=lambda other: (parts[other], other not in tried))
    kept = set(order[:MAX_NEAR])
    return tuple(other for other in parts if other in kept)


def _forced(candidate: Candidate, candidates: Sequence[Candidate]) -> frozenset[str]:
    """Knobs whose value in this candidate occurs in no other one, judged by an evenly spaced sample."""
    others = [other for other in spread(candidates, MAX_EXAMINED) if other != candidate]
    if not others:
        return frozenset()
    return frozenset.intersection(*(frozenset(diff(other, candidate)) for other in others))


def _closure(knobs: Sequence[str]) -> frozenset[str]:
    """The knobs, and those that may have to change with them."""
    implied = frozenset[str]().union(*(IMPLIED.get(knob, frozenset()) for knob in knobs))
    return frozenset(knobs) | implied | FOLLOWING


def find_remedies(kind: Kind, trial: Trial, all_changes: Sequence[KnobChange], view: ModelView | None) -> Remedies:
    """The best changes against bottlenecks of this kind, measured by the sweep or predicted by ``view``."""
    allowed, direct = _closure(HELPFUL_KNOBS[kind]), frozenset(HELPFUL_KNOBS[kind])
    own = [change for change in all_changes if _is_within(change, allowed) and not direct.isdisjoint(change.meant)]
    rated = [(change, rated) for change in own if (rated := _rate(trial, change, view)) is not None]
    fitting = [(change, found) for change, found in rated if _fits(change, found)]
    best = max((f for change, f in fitting if _is_faster(change, f)), key=_score, default=None)
    blocked = max((found for change, found in rated if _needs_memory(change, found)), key=_score, default=None)
    floor = best.gain if best is not None else 1.0
    nearest = max((found for _, found in fitting), key=_score, default=None)
    return Remedies(
        best=best,
        blocked=blocked if blocked is not None and blocked.gain > floor * (1 + MIN_DIFFERENCE) else None,
        num_changes=len(own),
        note="" if best is not None else _no_answer(own, nearest, is_known=bool(rated)),
    )


def _is_faster(change: KnobChange, found: Remedy) -> bool:
    """Whether a change is measured to be faster, or predicted with enough certainty to be worth a trial."""
    if found.log_spread is not None:
        return math.log(found.gain) > max(SURE_SPREADS * found.log_spread, MIN_DIFFERENCE)
    return change.ratio is not None and verdict(change.ratio) == "faster"


def _rate(trial: Trial, change: KnobChange, view: ModelView | None) -> Remedy | None:
    """The gain of a change: measured if the sweep tried it, else predicted; None if unknown."""
    assert trial.measurement is not None
    peak = fits = None
    if view is not None:
        peak = view.peak_bytes(change.candidate, like=trial)
        fits = view.probability_fits(change.candidate)
    made = Remedy(
        candidate=change.candidate,
        changed=change.changed,
        gain=1.0,
        source="measured",
        log_spread=None,
        peak_bytes=peak,
        probability_fits=fits,
        trial=change.trial.number if change.trial else None,
    )
    if change.ratio is not None:
        return replace(made, gain=change.ratio.value, ci95=change.ratio.ci95, num_rounds=change.num_rounds)
    if view is None or not view.distinguishes(trial.candidate, change.candidate):
        return None
    gain, log_spread = view.gain(trial.candidate, change.candidate)
    return replace(made, gain=gain, source="modelled", log_spread=log_spread)


def _fits(change: KnobChange, found: Remedy) -> bool:
    """Whether a change fits into memory: measured, else predicted. Trials that failed or were stopped early do not
    count."""
    if _has_ended(change):
        return change.trial is not None and change.trial.measurement is not None
    return found.probability_fits is None or found.probability_fits >= MIN_FITS


def _needs_memory(change: KnobChange, found: Remedy) -> bool:
    """Whether a change would need more memory than available: measured, else predicted."""
    if _has_ended(change):
        return change.trial is not None and isinstance(change.trial.outcome, OutOfMemory)
    return found.probability_fits is not None and found.probability_fits < MIN_FITS


def _has_ended(change: KnobChange) -> bool:
    return change.trial is not None and change.trial.outcome is not None


def _score(found: Remedy) -> float:
    num_changed = len(found.changed.keys() - FOLLOWING)
    return math.log(found.sure_gain) - PENALTY * (num_changed - 1)


def _no_answer(own: Sequence[KnobChange], best: Remedy | None, *, is_known: bool) -> str:
    if not own:
        return "the sweep has no candidate that differs only in these knobs"
    if best is None:
        failed = [c.trial for c in own if c.trial is not None and _has_ended(c)]
        if failed:
            tried = ", ".join(f"{trial_id(t.number)} {status_label(t.status)}" for t in failed[:3])
            return f"{_none_of(own)} and known to fit ({tried})"
        if is_known:
            return f"{_none_of(own)} and known to fit"
        which = f"{len(own)} possible changes" if len(own) > 1 else "one possible change"
        return f"the effect of {which} is unknown to the cost model and was not measured"
    if best.source == "measured" and best.trial is not None:
        return f"{_none_of(own)}; {change_text(best)} was measured in {trial_id(best.trial)}: {_between(best)}"
    return f"{_none_of(own)}; {change_text(best)} is predicted to give {_between(best)}"


def _between(found: Remedy) -> str:
    """The interval of a gain, even if it is not shown; two standard deviations to each side of a predicted gain."""
    if found.ci95 is not None or found.log_spread is None:
        return ratio_interval(found.ci95)
    factor = math.exp(2 * found.log_spread)
    return ratio_interval(Interval(found.gain / factor, found.gain * factor))


def change_text(found: Remedy) -> str:
    """The change of a remedy: ``precision O0 → O1-bf16``."""
    return changes_text(found.changed)


def memory_text(found: Remedy, limit_bytes: float | None) -> str:
    """The known memory need of a remedy; empty if unknown."""
    if found.peak_bytes is None or not limit_bytes:
        return ""
    words = f"peak {num_bytes(found.peak_bytes)} of {num_bytes(limit_bytes)}"
    sure = found.probability_fits
    return words if found.source == "measured" or sure is None else f"{words}, fits with {chance(sure)}"


def _none_of(own: Sequence[KnobChange]) -> str:
    if len(own) == 1:
        return "the only possible change is not known to be faster"
    return f"none of the {len(own)} possible changes is known to be faster"
