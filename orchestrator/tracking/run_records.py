"""The content of a sweep's MLflow records, as plain values: names, params, tags, metrics, notes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator import units
from orchestrator.mlflow_urls import PAGE, charts_view, table_view
from orchestrator.objective import ObjectiveName
from orchestrator.process_support import user_name
from orchestrator.report import descriptions
from orchestrator.report.curves import finalists
from orchestrator.report.descriptions import findings_lines, findings_metrics
from orchestrator.report.sources import MAX_PARAM_CHARS, log_tail
from orchestrator.report.tables import versus_baseline
from orchestrator.space.notation import flat_params, short_name
from orchestrator.statistics import relative_spread, speed, tokens_per_s_per_device
from orchestrator.sweep.events import (
    ConfirmationRun,
    GateRun,
    ProfileRun,
    RatioInterval,
    SoakRun,
    SweepCreated,
    sweep_id,
)
from orchestrator.sweep.ledger import Ledger, MeasuredProgram
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from orchestrator.text import plain
from orchestrator.units import rounded, watermark, watermark_line
from trials.files import to_json
from trials.health import UsageKind
from trials.outcome import Measured, Measurement, Outcome, StoppedEarly
from trials.reports import Findings
from trials.secrets import redact_all
from trials.spec import HuggingFaceModel, LinearModel, LlamaModel, Model, PythonModel, ResNetModel, ScriptModel

# Records of a proof as plain values: roles, tags and notes of checks, verdict and promotions.


def role_tags(trial: Trial) -> dict[str, str]:
    """The purpose of a run: ``tc.role``, and details for a check. For the roles that the proof adds to trials, see
    :func:`proof_tags`."""
    match trial.check:
        case None:
            return {"tc.role": "baseline" if trial.number == 0 else "trial"}
        case ConfirmationRun() as check:
            return {"tc.role": "confirmation", "tc.of": units.trial_id(check.of), "tc.round": str(check.round + 1)}
        case GateRun() as check:
            return {"tc.role": "gate", "tc.of": units.trial_id(check.of), "tc.gate_role": check.role}
        case SoakRun() as check:
            return {"tc.role": "soak", "tc.of": units.trial_id(check.of), "tc.finalist": units.trial_id(check.finalist)}
        case ProfileRun() as check:
            return {"tc.role": "profile", "tc.of": units.trial_id(check.of)}


def check_note(trial: Trial, name: str, score: float, unit: str) -> str:
    """The measurement of a check called ``name``, in Markdown."""
    if trial.measurement is None:
        return f"**{units.status_label(trial.status)}** — {name}\n\n{descriptions.failure(trial)}".rstrip()
    if isinstance(trial.check, ConfirmationRun | SoakRun):
        return f"**{units.rate(score)} {unit}** — {name}"
    if isinstance(trial.check, GateRun):
        losses = trial.measurement.losses
        if not losses:
            return f"**{len(trial.measurement.step_times_s)} steps trained**, losses unknown — {name}"
        return f"**{len(losses)} steps trained**, last loss {losses[-1]:.4g} — {name}"
    return f"**Profiled** — {name}"


def verdict_tags(state: SweepState) -> dict[str, str]:
    """Tags of the sweep's run with its verdict; empty before there is one."""
    verdict = state.verdict
    if verdict is None:
        return {}
    winner = "none" if verdict.winner is None else units.trial_id(verdict.winner)
    return {"tc.verdict": verdict.conclusion, "tc.winner": winner, "tc.verdict_reason": verdict.reason}


def proof_tags(state: SweepState) -> dict[int, dict[str, str]]:
    """Number of each trial in the proof to the tags with its result."""
    if state.proof is None:
        return {}
    proofs = (*state.set_aside, state.proof)
    tags = {number: {"tc.role": "finalist"} for proof in proofs for number in proof.finalists}
    if state.verdict is not None and state.verdict.winner is not None:
        tags[state.verdict.winner] = {"tc.role": "winner"}
    for report in state.verdict.gates if state.verdict else ():
        tags.setdefault(report.trial, {})["tc.gate"] = report.answer
    for one in state.verdict.disqualified if state.verdict else ():
        tags.setdefault(one.trial, {})["tc.disqualified"] = one.reason
    for evaluation in (one for proof in proofs for one in proof.evaluations):
        tags.setdefault(evaluation.trial, {})["tc.evaluation"] = "passed" if evaluation.passed else "failed"
    return tags


def promotion_tags(record: Mapping[str, str]) -> dict[str, str]:
    """Tags of the sweep's and the trial's run with its versions in production."""
    version = f"{record['name']} version {record['to_version']}"
    return {"tc.promoted": version if record["action"] == "promote" else f"rolled back to {version}"}


# Records of a sweep as plain values: names, params, tags, metrics, notes.
#
# Every value except the user depends only on the ledger, so that a replay writes the same.


MAX_TAG_CHARS = 5000
MAX_NAME_CHARS = 250
"""Maximum number of characters of the name of a param."""


_MAX_RUN_NAME_CHARS = 200


def experiment_name(created: SweepCreated) -> str:
    """One experiment per model and hardware: ``llama-h128-l4 on 1x2 AMD EPYC 7B13``."""
    name = f"{_model_name(created.workload.model)} on {created.hardware}"
    return re.sub(r"\s+", " ", re.sub(r"[^A-Za-z0-9 ._-]", " ", name)).strip()


def experiment_note() -> str:
    """Description of the experiment in Markdown: its content and how to read it."""
    return (
        "One run per sweep, with trials and checks as child runs. For the verdict, see the sweep's run, *Artifacts*, "
        f"`{PAGE}`. For trials as a table or as charts, use the saved views in the menu above the run table."
    )


def _model_name(model: Model) -> str:
    match model:
        case LlamaModel():
            return f"llama-h{model.hidden_size}-l{model.num_layers}"
        case ResNetModel():
            return f"resnet{model.depth}-w{model.width}-i{model.image_size}"
        case LinearModel():
            return f"linear-{model.size}-l{model.num_layers}"
        case PythonModel():
            return model.model.replace(":", "-")
        case HuggingFaceModel():
            return f"{json.loads(model.config)['model_type']}-l{model.num_layers}"
        case ScriptModel():
            return model.recipe


def slug(name: str) -> str:
    """The name as a folder: lower case, no spaces."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")


def sweep_tags(created: SweepCreated) -> dict[str, str]:
    environment = {f"tc.env.{key}": value for key, value in created.fingerprint.items()}
    own = {"tc.kind": "sweep", "tc.role": "sweep", "tc.spec_hash": created.spec_hash}
    return _common_tags(created) | own | environment


def origin_tags(ledger: Ledger) -> dict[str, str]:
    """The user who recorded the sweep, and the commit of the training program, by MLflow's names."""
    program = MeasuredProgram.read(ledger)
    commit = program.commit.removesuffix("+") if program is not None else ""
    return {"mlflow.user": user_name(), **({"mlflow.source.git.commit": commit} if commit else {})}


def trial_name(trial: Trial) -> str:
    """``t014 dp2 z3 mbs4``; the purpose of the run is in its tag ``tc.role``."""
    return f"{units.trial_id(trial.number)} {short_name(trial.candidate)}"[:_MAX_RUN_NAME_CHARS]


def trial_tags(created: SweepCreated, trial: Trial, parent_run_id: str) -> dict[str, str]:
    return _common_tags(created) | {
        "mlflow.parentRunId": parent_run_id,
        "tc.kind": "trial" if trial.check is None else "check",
        **role_tags(trial),
        "tc.trial": str(trial.number),
        "tc.origin": trial.origin,
        "tc.reason": trial.reason,
        "tc.config_key": trial.candidate.config_key,
        "tc.trial_key": created.trial_key(trial.candidate),
        **attempt_tags(trial),
        **(trial.note.tags if trial.note else {}),
    }


def attempt_tags(trial: Trial) -> dict[str, str]:
    """Nodes and result of the last attempt; how earlier ones were lost."""
    attempt = trial.attempts[-1]
    lost = {f"tc.attempt.{i}": _end_text(a.outcome) for i, a in enumerate(trial.attempts[:-1])}
    return {
        "tc.state": trial.status,
        "tc.attempts": str(len(trial.attempts)),
        "tc.attempt_token": attempt.token,
        "tc.nodes": ", ".join(dict.fromkeys(device.node for device in attempt.ranks)),
        **_outcome_tags(attempt.outcome),
        **({"tc.disturbed": why} if (why := descriptions.disturbed(trial.measurement)) else {}),
        **({"tc.trend": how} if (how := descriptions.trend(trial.measurement)) else {}),
        **lost,
    }


def _outcome_tags(outcome: Outcome | None) -> dict[str, str]:
    """How the attempt ended, and why if without a measurement; empty while it is running."""
    match outcome:
        case None:
            return {}
        case Measured():
            return {"tc.outcome": outcome.kind, "tc.outcome_reason": ""}
        case _:
            return {"tc.outcome": outcome.kind, "tc.outcome_reason": describe_failure(outcome)}


def trial_params(trial: Trial) -> dict[str, str]:
    """The knobs, flat, as text."""
    named = flat_params(trial.candidate)
    return {param_name(key): str(value)[:MAX_PARAM_CHARS] for key, value in named.items()}


def param_name(knob: str) -> str:
    """A knob's name in the form MLflow accepts: custom knobs may be ``$NAME``, or have a plus sign."""
    return re.sub(r"[^\w\-. :/]", "_", f"env:{knob[1:]}" if knob.startswith("$") else knob)[:MAX_NAME_CHARS]


def trial_record(state: SweepState, trial: Trial) -> dict[str, Any]:
    """The trial's raw data: candidate, attempts, step times, losses."""
    return {
        "sweep": state.sweep.sweep,
        "trial": trial.number,
        "reason": trial.reason,
        "expected": to_json(trial.expected),
        "short_name": short_name(trial.candidate),
        "config_key": trial.candidate.config_key,
        "workload": to_json(state.sweep.workload),
        "candidate": to_json(trial.candidate),
        "attempts": redact_all(to_json(trial.attempts)),
    }


def trial_files(state: SweepState, trial: Trial) -> dict[str, str]:
    """Artifacts of an ended trial: name to text."""
    files = {"trial.json": json_text(trial_record(state, trial))}
    if trial.measurement and trial.measurement.findings != Findings():
        files["findings.json"] = json_text(to_json(trial.measurement.findings))
    if tail := log_tail(trial):
        files["log_tail.txt"] = tail
    return files


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1)


def trial_note(state: SweepState, trial: Trial) -> str:
    """Note of a trial's run in Markdown: the result in its first line, the reason for the trial in its last."""
    if trial.check is not None:
        name = f"{descriptions.check_text(trial.check)}, `{short_name(trial.candidate)}`"
        result = check_note(trial, name, state.score(trial), state.unit)
    else:
        result = _result_note(state, trial)
    noted = descriptions.note_text(trial.note)
    parts = (watermark_line(state.virtual), result, noted, f"Proposed: {trial.reason}.")
    return plain("\n\n".join(part for part in parts if part))


def _result_note(state: SweepState, trial: Trial) -> str:
    name = f"`{short_name(trial.candidate)}`"
    if trial.measurement is None:
        return "\n\n".join(
            part for part in (f"**{units.status_label(trial.status)}** — {name}", descriptions.failure(trial)) if part
        )
    found = speed(trial.measurement, state.objective)
    compared = versus_baseline(trial, state)
    against = f", {units.ratio(compared.ratio.value, compared.ratio.ci95)} against the baseline" if compared else ""
    unit = state.unit
    head = f"**{units.rate(found.value)} {unit}**{against} — {name}\n\n95% CI {units.interval(found.ci95)}"
    return "\n".join([head, "", *(f"- {line}" for line in findings_lines(trial.measurement.findings))]).rstrip()


def _common_tags(created: SweepCreated) -> dict[str, str]:
    return {
        "tc.sweep": created.sweep,
        "tc.page": f"tune-cluster ui {created.sweep}",
        "tc.sweep_id": sweep_id(created),
        "tc.hardware": created.hardware,
        **({"tc.watermark": watermark(created.virtual)} if created.virtual else {}),
        "mlflow.source.name": "tune-cluster",
        "mlflow.source.type": "LOCAL",
    }


def _end_text(outcome: Any) -> str:
    """``gang_lost: rank 3 on n1: node died``."""
    why = describe_failure(outcome)
    return f"{outcome.kind}: {why}" if why else str(outcome.kind)


# Metrics of runs in MLflow: one name for one meaning, with the unit in the name; ``docs/review.md`` lists them.
#
# Single figures have four significant digits, since MLflow's tables show every digit; the run's ``trial.json`` has the
# exact measurements. A name before a slash is a section on MLflow's pages.


PER_DEVICE = "tokens_per_s_per_device"
SCORES: Mapping[ObjectiveName, str] = {
    "tokens_per_s_per_device": PER_DEVICE,
    "step_time": "tokens_per_s",
    "device_cost": "tokens_per_s_per_paid_device",
}
"""The metric with the score of each objective, which the search maximizes."""
SEARCH_SPEEDUP = "search_speedup"
"""Speed-up over the baseline, measured by the search once each."""
REMEASURED_SPEEDUP = "remeasured_speedup"
"""A finalist's speed-up over the baseline, measured again interleaved, regardless of the verdict."""
CONFIRMED_SPEEDUP = "confirmed_speedup"
"""The same, only of the confirmed winner."""
REHEARSED_SPEEDUP = "rehearsed_speedup"
"""Replaces all of these on a simulated cluster, where nothing is measured."""
RANK = "rank"
"""Rank of a measured trial when the sweep ends: 1 is the winner, then the finalists, then the others by score."""
RETRACTED = {f"{CONFIRMED_SPEEDUP}{end}": math.nan for end in ("", "_low", "_high")}
"""Replaces a confirmed speed-up that a later verdict revokes; metrics cannot be deleted from MLflow."""

_MS, _GIB, _MIN = 1e3, 2.0**30, 60.0
_CURVE_DIGITS = 6
"""More digits: losses of two trials differ only in late ones."""


def trial_metrics(state: SweepState, trial: Trial) -> dict[str, float]:
    """Single figures of a trial's run, if known and finite."""
    values: dict[str, float | None] = {"device_min": trial.device_seconds / _MIN}
    if isinstance(trial.outcome, StoppedEarly):
        values["step_time_at_least_ms"] = trial.outcome.at_least_s * _MS
        values["saved_device_min"] = trial.outcome.saved_device_seconds / _MIN
    if trial.measurement and not isinstance(trial.check, ProfileRun):  # its times include the profiler's overhead
        values |= _measured(trial.measurement)
        values[SCORES[state.objective.name]] = state.objective.score(trial.measurement)
        if trial.expected is not None:
            values["step_time_over_predicted"] = trial.measurement.step_time_s / trial.expected.step_time_s
        compared = versus_baseline(trial, state) if trial.check is None else None
        values[SEARCH_SPEEDUP] = compared.ratio.value if compared else None
    return _finite(values)


def _measured(measurement: Measurement) -> dict[str, float | None]:
    speed = tokens_per_s_per_device(measurement)
    parts: dict[str, float] = to_json(measurement.breakdown)
    allocated, reserved = measurement.peak_allocated_bytes, measurement.peak_reserved_bytes
    return {
        PER_DEVICE: speed.value,
        f"{PER_DEVICE}_low": speed.ci95.low if speed.ci95 else None,
        f"{PER_DEVICE}_high": speed.ci95.high if speed.ci95 else None,
        "tokens_per_s": speed.value * measurement.world_size,
        "samples_per_s": measurement.samples_per_s_per_device * measurement.world_size or None,
        "num_devices": measurement.world_size,
        "step_time_ms": measurement.step_time_s * _MS,
        "step_time_spread": relative_spread(measurement.counted_step_times_s, measurement.step_time_resolution_s),
        "step_time_trend": measurement.trend.change if measurement.trend else None,
        "peak_memory_gib": max(allocated, default=0) / _GIB or None,
        "peak_reserved_gib": max(reserved, default=0) / _GIB or None,
        **_device_memory(measurement),
        "mfu": measurement.mfu,
        "final_loss": measurement.losses[-1] if measurement.losses else None,
        "num_measured_steps": len(measurement.step_times_s),
        "num_skipped_steps": measurement.num_skipped_steps or None,
        **_compilation(measurement),
        **{f"parts/{name.removesuffix('_s')}_ms": seconds * _MS or None for name, seconds in parts.items()},
        **_disturbance(measurement),
        **{f"found/{name}": value for name, value in findings_metrics(measurement.findings).items()},
    }


def _compilation(measurement: Measurement) -> dict[str, float | None]:
    """Seconds of compilation, each kind under its own name: their times are not comparable."""
    graph = measurement.findings.graph
    if graph is None or graph.cache is None:
        return {"compile_s": measurement.compile_s or None}
    mixed_s = graph.compile_s if graph.cache == "mixed" else None
    return {"compile_cold_s": graph.cold_s, "compile_warm_s": graph.warm_s, "compile_mixed_s": mixed_s}


def _device_memory(measurement: Measurement) -> dict[str, float | None]:
    """Memory of the devices apart from the allocator's peaks, maximum over ranks."""
    found = measurement.device_memory
    if found is None:
        return {}
    return {
        "outside_allocator_gib": found.outside_bytes / _GIB,
        "num_alloc_retries": found.num_retries,
        "num_failed_allocations": found.num_ooms or None,
    }


def _disturbance(measurement: Measurement) -> dict[str, float | None]:
    """Other load on the most disturbed node, as shares of its CPU time."""
    if not measurement.disturbances:
        return {}
    worst = measurement.disturbances[0]
    return {
        "busy/foreign_cpu_share": worst.foreign_cpu,
        "busy/steal_share": worst.steal,
        "busy/cpu_pressure_share": worst.pressure,
        "busy/lowest_device_clock_share": worst.lowest_clock,
        "busy/highest_device_temperature_c": worst.highest_temperature_c,
    }


def expected_metrics(created: SweepCreated, trial: Trial) -> dict[str, float]:
    """The trial's predictions, named like the measurements, in a separate section."""
    found = trial.expected
    if found is None:
        return {}
    devices = trial.candidate.layout.world_size
    return _finite(
        {
            f"predicted/{PER_DEVICE}": created.workload.tokens_per_step / (found.step_time_s * devices),
            "predicted/step_time_ms": found.step_time_s * _MS,
            "predicted/log_spread": found.log_spread,
            "predicted/peak_memory_gib": None if found.peak_bytes is None else found.peak_bytes / _GIB,
            "predicted/probability_fits": found.probability_fits,
        }
    )


def trial_curves(trial: Trial) -> dict[str, dict[int, float]]:
    """Curves over the steps of a trial, from its first warm-up step, number 1: name to step to value.

    Step times start after the warm-up; a trial stopped early has the observed ones.
    """
    if isinstance(trial.outcome, StoppedEarly):
        return _drawn({"curve/step_time_ms": _numbered([s * _MS for s in trial.outcome.step_times_s], first=2)})
    found = trial.measurement
    if found is None:
        return {}
    curves = {
        "curve/loss": _numbered(found.losses),
        "curve/grad_norm": _numbered(found.grad_norms),
        "curve/memory_gib": _numbered(size / _GIB for size in found.step_memory_bytes),
    }
    if not isinstance(trial.check, ProfileRun):
        curves["curve/step_time_ms"] = _numbered(
            (s * _MS for s in found.step_times_s), first=1 + found.num_warmup_steps
        )
    return _drawn(curves)


_SYSTEM: Mapping[UsageKind, tuple[str, float]] = {
    "cpu_percent": ("cpu_utilization_percentage", 1),
    "memory_bytes": ("system_memory_usage_megabytes", 1e-6),
    "device_percent": ("gpu_{device}_utilization_percentage", 1),
    "device_memory_bytes": ("gpu_{device}_memory_usage_megabytes", 1e-6),
    "device_power_w": ("gpu_{device}_power_usage_watts", 1),
}
"""MLflow's own names of system metrics, and their units."""


def system_curves(trial: Trial) -> dict[str, dict[float, float]]:
    """The values of MLflow's tab *System metrics* for a trial: name to seconds since the epoch to value.

    With several nodes, the metric's name contains the node's, as in MLflow itself.
    """
    if trial.measurement is None:
        return {}
    nodes, began_s = trial.measurement.disturbances, trial.attempts[-1].launched_at_s
    curves = {}
    for node in nodes:
        place = "system/" if len(nodes) == 1 else f"system/{node.node}/"
        for usage in node.usage:
            name, scale = _SYSTEM[usage.kind]
            curves[place + name.format(device=usage.device)] = {
                began_s + i * usage.period_s: rounded(value * scale, _CURVE_DIGITS)
                for i, value in enumerate(usage.values, start=1)
            }
    return curves


def _numbered(values: Iterable[float], first: int = 1) -> dict[int, float]:
    return dict(enumerate(values, start=first))


def _drawn(curves: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Curves with significant digits only, without non-finite points."""
    return {
        name: {step: rounded(value, _CURVE_DIGITS) for step, value in points.items() if math.isfinite(value)}
        for name, points in curves.items()
    }


def verdict_metrics(state: SweepState) -> dict[str, float]:
    """Figures of the sweep's run: the speed-up of the winner, or of the fastest finalist if none is confirmed."""
    verdict = state.verdict
    if verdict is None:
        return {}
    name = REMEASURED_SPEEDUP if verdict.winner is None else CONFIRMED_SPEEDUP
    name = REHEARSED_SPEEDUP if state.virtual else name
    return _finite({"confirmation_rounds": verdict.num_rounds, **_speedup(name, verdict.speedup)})


def finalist_metrics(state: SweepState) -> dict[int, dict[str, float]]:
    """Number of each finalist that was measured again to its speed-up; the winner's is also confirmed."""
    if state.verdict is None:
        return {}
    again = REHEARSED_SPEEDUP if state.virtual else REMEASURED_SPEEDUP
    found = {one.trial: _speedup(again, one.overall) for one in finalists(state)}
    if (winner := state.verdict.winner) is not None and state.virtual is None:
        found[winner] = {**found.get(winner, {}), **_speedup(CONFIRMED_SPEEDUP, state.verdict.speedup)}
    return {number: _finite(values) for number, values in found.items()}


def ranks(state: SweepState) -> dict[int, int]:
    """Number of each measured trial to its :data:`RANK`."""
    again = {one.trial: one.overall.value for one in finalists(state) if one.overall is not None}
    winner = state.verdict.winner if state.verdict is not None else None

    def place(trial: Trial) -> tuple[bool, bool, float, float]:
        score = state.objective.score(trial.measurement) if trial.measurement is not None else 0.0
        return trial.number != winner, trial.number not in again, -again.get(trial.number, 0.0), -score

    measured = sorted((trial for trial in state.searched() if trial.measurement is not None), key=place)
    return {trial.number: i for i, trial in enumerate(measured, start=1)}


def best_metrics(state: SweepState) -> dict[str, float]:
    """The best score so far, as a curve over trials; empty before there is one."""
    if state.best is None or state.best.measurement is None:
        return {}
    return _finite({f"best_{SCORES[state.objective.name]}": state.objective.score(state.best.measurement)})


def cost_metrics(state: SweepState) -> dict[str, float]:
    """The cost of a sweep, as figures of its run."""
    trials = state.searched()
    return _finite(
        {
            "num_trials": len(trials),
            "num_checks": len(state.trials) - len(trials),
            "device_hours": sum(trial.device_seconds for trial in state.trials) / 3600,
            "duration_min": state.duration_s / _MIN,
            "paused_min": state.paused_s / _MIN,
        }
    )


def _speedup(name: str, found: RatioInterval | None) -> dict[str, float | None]:
    if found is None:
        return {}
    return {
        name: found.value,
        f"{name}_low": found.low,
        f"{name}_high": found.high,
    }


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    """The known, finite values with four significant digits."""
    return {key: rounded(float(value)) for key, value in values.items() if value is not None and math.isfinite(value)}


# Saved views of MLflow's run table: the columns, order and charts of a sweep's trials.
#
# By default the table shows neither metrics nor params. A saved view is a tag of the experiment that the links refer to
# (``viewStateShareKey``); MLflow's own menu also lists it. The format is that of MLflow 3.17's pages: other versions
# that do not support it show their own default.


TAG_PREFIX = "mlflow.sharedViewState."
_COLUMNS = {
    "tags.`tc.role`": 85,
    "tags.`tc.outcome`": 110,
    f"metrics.`{PER_DEVICE}`": 175,
    "metrics.`step_time_ms`": 110,
    "metrics.`num_devices`": 105,
    f"metrics.`{SEARCH_SPEEDUP}`": 125,
    f"metrics.`{REMEASURED_SPEEDUP}`": 155,
    f"metrics.`{CONFIRMED_SPEEDUP}`": 150,
    "metrics.`peak_memory_gib`": 140,
    "tags.`tc.gate`": 80,
    "tags.`tc.outcome_reason`": 320,
}
"""Columns of the table in order, with their widths in pixels; the score is first among the metrics."""
MAX_KNOB_COLUMNS = 6
_KNOBS, _SPEED = "tune-cluster-knobs", "tune-cluster-speed"


def _section(uuid: str, name: str, columns: int) -> dict[str, Any]:
    common = {"display": True, "isReordered": True, "deleted": False, "isGenerated": False}
    return {"uuid": uuid, "name": name, "columns": columns, "cardHeight": 420, **common}


_SECTIONS = [_section(_KNOBS, "Knobs against speed", 1), _section(_SPEED, "Speed, memory, steps", 2)]
"""The first has one column: the axes of many knobs need the full width for their labels."""


def view_tags(created: SweepCreated, run_id: str, knobs: Sequence[str], *, is_ranked: bool = False) -> dict[str, str]:
    """Tags of the experiment: a table of the sweep's trials, best first, and charts of them.

    Args:
        run_id: the sweep's own run.
        knobs: params of those that vary, for the parallel coordinates; the first are also columns of the table.
        is_ranked: order by :data:`RANK`: the winner first, even if the search measured another trial as faster.
    """
    sweep, at_ms = created.sweep, round(1000 * created.at_s)
    score = SCORES[created.objective.name]
    role, outcome, *others = _COLUMNS.items()
    varying = [(f"params.`{knob}`", 130) for knob in knobs[:MAX_KNOB_COLUMNS]]
    *figures, reason = others
    columns = dict([role, outcome, (f"metrics.`{score}`", 175), *figures, *varying, reason])
    facets = {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{run_id}' AND tags.`tc.kind` = 'trial'",
        "orderByKey": f"metrics.`{RANK if is_ranked else score}`",
        "orderByAsc": is_ranked,
    }
    table = {**facets, "selectedColumns": list(columns), "columnOrder": list(columns), "columnWidths": columns}
    charts = {
        **table,
        "compareRunCharts": _charts(knobs, score),
        "compareRunSections": _SECTIONS,
        "isAccordionReordered": True,  # otherwise MLflow sorts its sections of further metrics among these, by name
        "runsHiddenMode": "SHOW_ALL",
    }
    return {
        f"{TAG_PREFIX}{table_view(sweep, run_id)}": _saved(f"{sweep}: trials", at_ms, table),
        f"{TAG_PREFIX}{charts_view(sweep, run_id)}": _saved(f"{sweep}: charts", at_ms, charts),
    }


def _saved(name: str, at_ms: int, state: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "createdAt": at_ms, "updatedAt": at_ms, "state": json.dumps(state)})


def _charts(knobs: Sequence[str], score: str) -> list[dict[str, Any]]:
    speed = {"key": score, "type": "METRIC"}
    memory = {"key": "peak_memory_gib", "type": "METRIC"}
    lines: dict[str, Any] = {"selectedParams": list(knobs), "selectedMetrics": [speed["key"]], "showAllRuns": True}
    return [
        _chart("parallel", "PARALLEL", "Knobs against speed", section=_KNOBS, **lines),
        _chart("pareto", "SCATTER", "Memory against speed", xaxis=memory, yaxis=speed),
        _chart("speed", "BAR", score, metricKey=speed["key"]),
        _curve("curve/step_time_ms", "Step time in ms, step by step"),
        _curve("curve/loss", "Loss"),
        _curve("curve/grad_norm", "Gradient norm"),
        _curve("curve/memory_gib", "Peak memory of the step in GiB"),
    ]


def _curve(metric: str, name: str) -> dict[str, Any]:
    axes: dict[str, Any] = {
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": False,
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "selectedYAxisMetrics": [metric],
    }
    return _chart(metric.replace("/", "-"), "LINE", name, metricKey=metric, selectedMetricKeys=[metric], **axes)


def _chart(uuid: str, kind: str, name: str, *, section: str = _SPEED, **more: Any) -> dict[str, Any]:
    common = {"runsCountToCompare": 100, "metricSectionId": section, "deleted": False, "isGenerated": False}
    return {"uuid": f"tc-{uuid}", "type": kind, "displayName": name, **common, **more}
