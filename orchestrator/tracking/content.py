"""What MLflow is told about a sweep as plain values: names, params, tags, metrics, notes.

Every value follows from the ledger alone, so that a replay writes the same again.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from orchestrator import units
from orchestrator.report import words
from orchestrator.report.artifacts import MAX_PARAM_CHARS, log_tail
from orchestrator.report.findings import findings_lines, findings_metrics
from orchestrator.report.trials import versus_baseline
from orchestrator.space.naming import flat_params, short_name
from orchestrator.statistics import relative_spread, speed, tokens_per_s_per_device
from orchestrator.sweep.events import SweepCreated, sweep_id
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from orchestrator.sweep.values import ProfileRun
from orchestrator.tracking.checks import check_note, check_prefix, check_tags
from orchestrator.virtual import watermark, watermark_line
from trials.codec import to_json
from trials.outcome import Measured, Measurement, Outcome, StoppedEarly
from trials.reports.findings import Findings
from trials.secrets import redact_all
from trials.spec import LinearModel, LlamaModel, Model, ResNetModel

OBJECTIVE = "tokens_per_s_per_device"
"""Name of the metric that the search maximises by default."""


BEST = f"best_{OBJECTIVE}"


MAX_TAG_CHARS = 5000


_MAX_RUN_NAME_CHARS = 200


def experiment_name(created: SweepCreated) -> str:
    """One experiment per model and hardware: ``llama-h128-l4 on 1x2 AMD EPYC 7B13``."""
    name = f"{_model_name(created.workload.model)} on {created.hardware}"
    return re.sub(r"\s+", " ", re.sub(r"[^A-Za-z0-9 ._-]", " ", name)).strip()


def _model_name(model: Model) -> str:
    match model:
        case LlamaModel():
            return f"llama-h{model.hidden_size}-l{model.num_layers}"
        case ResNetModel():
            return f"resnet{model.depth}-w{model.width}-i{model.image_size}"
        case LinearModel():
            return f"linear-{model.size}-l{model.num_layers}"


def slug(name: str) -> str:
    """The name as a folder: lower case, no spaces."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")


def sweep_tags(created: SweepCreated) -> dict[str, str]:
    environment = {f"tc.env.{key}": value for key, value in created.fingerprint.items()}
    return _common_tags(created) | {"tc.kind": "sweep", "tc.spec_hash": created.spec_hash} | environment


def trial_name(trial: Trial) -> str:
    """``t014 dp2 z3 mbs4``, ``confirm r1 t004 dp2 mbs4``: all that MLflow's default tables show of a run."""
    of = units.trial_id(trial.check.of if trial.check else trial.number)
    return f"{check_prefix(trial.check)}{of} {short_name(trial.candidate)}"[:_MAX_RUN_NAME_CHARS]


def trial_tags(created: SweepCreated, trial: Trial, parent_run_id: str) -> dict[str, str]:
    return _common_tags(created) | {
        "mlflow.parentRunId": parent_run_id,
        "tc.kind": "trial" if trial.check is None else "check",
        **check_tags(trial.check),
        **({"tc.role": "baseline"} if trial.number == 0 else {}),
        "tc.trial": str(trial.number),
        "tc.origin": trial.origin,
        "tc.reason": trial.reason,
        "tc.config_key": trial.candidate.config_key,
        "tc.trial_key": created.trial_key(trial.candidate),
        **attempt_tags(trial),
    }


def attempt_tags(trial: Trial) -> dict[str, str]:
    """Where the last attempt runs or ran and what came of it; how earlier ones were lost."""
    attempt = trial.attempts[-1]
    lost = {f"tc.attempt.{i}": _ended_words(a.outcome) for i, a in enumerate(trial.attempts[:-1])}
    return {
        "tc.state": trial.status,
        "tc.attempts": str(len(trial.attempts)),
        "tc.attempt_token": attempt.token,
        "tc.nodes": ", ".join(dict.fromkeys(device.node for device in attempt.ranks)),
        **_why_not_measured(attempt.outcome),
        **({"tc.disturbed": why} if (why := words.disturbed(trial.measurement)) else {}),
        **lost,
    }


def _why_not_measured(outcome: Outcome | None) -> dict[str, str]:
    match outcome:
        case None | Measured():
            return {}
        case StoppedEarly():
            return {"tc.stopped": outcome.evidence.message}
        case _:
            return {"tc.failure": _ended_words(outcome)}


def trial_params(trial: Trial) -> dict[str, str]:
    """The knobs, flat, as text."""
    return {key: str(value)[:MAX_PARAM_CHARS] for key, value in flat_params(trial.candidate).items()}


def trial_metrics(state: SweepState, trial: Trial) -> dict[str, float]:
    """Metrics of a trial's run with their units in the name; those that are not finite are left out."""
    values: dict[str, float | None] = {"device_s": trial.device_seconds}
    if isinstance(trial.outcome, StoppedEarly):
        values["step_time_at_least_s"] = trial.outcome.at_least_s
        values["saved_device_s"] = trial.outcome.saved_device_seconds
    if trial.measurement and not isinstance(trial.check, ProfileRun):  # the profiler's own cost is in its times
        values |= _measured_metrics(trial.measurement)
        if trial.expected is not None:
            values["step_time_over_predicted"] = trial.measurement.step_time_s / trial.expected.step_time_s
        compared = versus_baseline(trial, state) if trial.check is None else None
        values["speedup"] = compared.ratio.value if compared else None
    return {key: float(value) for key, value in values.items() if value is not None and math.isfinite(value)}


def expected_metrics(created: SweepCreated, trial: Trial) -> dict[str, float]:
    """What was predicted of the trial, named as the measured metrics with ``predicted_`` before them."""
    found = trial.expected
    if found is None:
        return {}
    devices = trial.candidate.layout.world_size
    return {
        f"predicted_{OBJECTIVE}": created.workload.tokens_per_step / (found.step_time_s * devices),
        "predicted_step_time_s": found.step_time_s,
        "predicted_log_spread": found.log_spread,
        "predicted_peak_memory_bytes": found.peak_bytes,
        "predicted_probability_fits": found.probability_fits,
    }


def trial_record(state: SweepState, trial: Trial) -> dict[str, Any]:
    """Everything known about the trial, raw: candidate, attempts, step times, losses."""
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
    """Note of a trial's run in Markdown: the result in its first line, why the trial was made in its last."""
    if trial.check is not None:
        result = check_note(trial, trial_name(trial), state.score(trial), state.unit)
    else:
        result = _result_note(state, trial)
    parts = (watermark_line(state.virtual), result, f"Proposed: {trial.reason}.")
    return "\n\n".join(part for part in parts if part)


def _result_note(state: SweepState, trial: Trial) -> str:
    name = f"`{short_name(trial.candidate)}`"
    if trial.measurement is None:
        return "\n\n".join(
            part for part in (f"**{units.status_words(trial.status)}** — {name}", words.failure(trial)) if part
        )
    found = speed(trial.measurement, state.objective)
    compared = versus_baseline(trial, state)
    against = f", {units.ratio(compared.ratio.value, compared.ratio.ci95)} against the baseline" if compared else ""
    unit = state.unit
    head = f"**{units.rate(found.value)} {unit}**{against} — {name}\n\n95 % interval {units.interval(found.ci95)}"
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


def _ended_words(outcome: Any) -> str:
    """``gang_lost: rank 3 on n1: node died``."""
    why = describe_failure(outcome)
    return f"{outcome.kind}: {why}" if why else str(outcome.kind)


def _measured_metrics(measurement: Measurement) -> dict[str, float | None]:
    found = tokens_per_s_per_device(measurement)
    breakdown: dict[str, float] = to_json(measurement.breakdown)
    return {
        **findings_metrics(measurement.findings),
        OBJECTIVE: found.value,
        "samples_per_s_per_device": measurement.samples_per_s_per_device or None,
        f"{OBJECTIVE}_ci95_low": found.ci95.low if found.ci95 else None,
        f"{OBJECTIVE}_ci95_high": found.ci95.high if found.ci95 else None,
        "step_time_s": measurement.step_time_s,
        "step_time_spread": relative_spread(measurement.step_times_s),
        **breakdown,
        "peak_memory_bytes": max(measurement.peak_allocated_bytes, default=None),
        "peak_reserved_bytes": max(measurement.peak_reserved_bytes, default=None),
        "mfu": measurement.mfu,
        "final_loss": measurement.losses[-1] if measurement.losses else None,
        "num_skipped_steps": measurement.num_skipped_steps,
        "compile_s": measurement.compile_s,
        **_disturbance_metrics(measurement),
        "num_measured_steps": len(measurement.step_times_s),
    }


def _disturbance_metrics(measurement: Measurement) -> dict[str, float | None]:
    """What else the most disturbed node did; shares of its processors' time."""
    if not measurement.disturbances:
        return {}
    worst = measurement.disturbances[0]
    return {
        "foreign_cpu_share": worst.foreign_cpu,
        "steal_share": worst.steal,
        "cpu_pressure_share": worst.pressure,
        "lowest_device_clock_share": worst.lowest_clock,
        "highest_device_temperature_c": worst.highest_temperature_c,
    }
