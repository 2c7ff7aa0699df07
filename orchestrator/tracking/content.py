"""What MLflow is told about a sweep as plain values: names, params, tags, metrics, notes.

Every value follows from the ledger alone, so that a replay writes the same again.
"""

from __future__ import annotations

import json
import re
from typing import Any

from orchestrator import units
from orchestrator.mlflow_urls import PAGE
from orchestrator.report import words
from orchestrator.report.artifacts import MAX_PARAM_CHARS, log_tail
from orchestrator.report.findings import findings_lines
from orchestrator.report.trials import versus_baseline
from orchestrator.space.naming import flat_params, short_name
from orchestrator.statistics import speed
from orchestrator.sweep.events import SweepCreated, sweep_id
from orchestrator.sweep.state import SweepState, Trial, describe_failure
from orchestrator.tracking.checks import check_note, role_tags
from orchestrator.virtual import watermark, watermark_line
from trials.codec import to_json
from trials.outcome import Measured, Outcome
from trials.reports.findings import Findings
from trials.secrets import redact_all
from trials.spec import HuggingFaceModel, LinearModel, LlamaModel, Model, PythonModel, ResNetModel, ScriptModel

MAX_TAG_CHARS = 5000
MAX_NAME_CHARS = 250
"""Characters of the name of a param."""


_MAX_RUN_NAME_CHARS = 200


def experiment_name(created: SweepCreated) -> str:
    """One experiment per model and hardware: ``llama-h128-l4 on 1x2 AMD EPYC 7B13``."""
    name = f"{_model_name(created.workload.model)} on {created.hardware}"
    return re.sub(r"\s+", " ", re.sub(r"[^A-Za-z0-9 ._-]", " ", name)).strip()


def experiment_note() -> str:
    """Description of the experiment in Markdown: what lies in it and how to read it."""
    return (
        "A run per sweep, with its trials and checks as child runs. Verdict: the sweep's run, *Artifacts*, "
        f"`{PAGE}`. Trials as a table or as charts: the saved views in the menu above the run table."
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


def trial_name(trial: Trial) -> str:
    """``t014 dp2 z3 mbs4``; what the run is for stands beside it, in its tag ``tc.role``."""
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
        **_outcome_tags(attempt.outcome),
        **({"tc.disturbed": why} if (why := words.disturbed(trial.measurement)) else {}),
        **lost,
    }


def _outcome_tags(outcome: Outcome | None) -> dict[str, str]:
    """How the attempt ended, and why where that is not with a measurement; empty while it runs."""
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
    return {_param_name(key): str(value)[:MAX_PARAM_CHARS] for key, value in named.items()}


def _param_name(knob: str) -> str:
    """A knob's name as MLflow takes it: knobs of the user's own may be ``$NAME``, or have a plus sign."""
    return re.sub(r"[^\w\-. :/]", "_", f"env:{knob[1:]}" if knob.startswith("$") else knob)[:MAX_NAME_CHARS]


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
        name = f"{words.check_words(trial.check)}, `{short_name(trial.candidate)}`"
        result = check_note(trial, name, state.score(trial), state.unit)
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
