"""The manifest of a registered version: configuration, workload, evidence, sweep file and exports, with checks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from orchestrator import units
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.frameworks.catalog import export_all
from orchestrator.frameworks.shell import with_exports
from orchestrator.objective import Objective, noun_of
from orchestrator.program.candidate_command import START, ScriptArtifact, artifact
from orchestrator.program.user_program import Script, program_source
from orchestrator.proof.loss_gate import trajectory
from orchestrator.proof.progress import confirmation, gate_runs
from orchestrator.report import descriptions
from orchestrator.report.summary import confirmed_figures, interval_json, result, speedup
from orchestrator.space.knobs import INSIDE
from orchestrator.space.notation import short_name
from orchestrator.statistics import Estimate, Interval, tokens_per_s_per_device
from orchestrator.sweep.events import GateReport, Verdict, sweep_id
from orchestrator.sweep.ledger import SPEC, Ledger, MeasuredProgram, SweepFile
from orchestrator.sweep.state import SweepState, Trial, find_trial
from orchestrator.tracking.mlflow_store import MAX_DESCRIPTION_CHARS, Registered
from orchestrator.units import watermark, watermark_line
from trials.files import digest, from_json, to_json
from trials.outcome import Measurement
from trials.secrets import redact, redact_all
from trials.spec import Candidate, Workload

# Evidence: which trial of a sweep may be promoted, its evidence, and what is missing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A measured trial, and what is missing for a promotion without force."""

    trial: Trial
    missing: tuple[str, ...]
    remedy: str

    @property
    def forced(self) -> bool:
        return bool(self.missing)


def choose(
    state: SweepState,
    trial: str | None,
    *,
    force: bool,
    is_candidate: bool = False,
    objections: Sequence[str] = (),
) -> Chosen:
    """The confirmed winner of a sweep, or the given trial.

    Args:
        is_candidate: only register it, without production: needs no proof.
        objections: further objections, apart from the evidence.

    Raises:
        ConfigError: the trial does not exist, was not measured or is a check; or, without force, it is not the
            confirmed winner, or has not passed the loss gate. Even with force: the cluster is simulated.
    """
    name = state.sweep.sweep
    if state.virtual is not None and not is_candidate:
        raise ConfigError(
            f"{name} is {state.virtual}: nothing was measured, so it cannot be promoted, even with --force",
            remedy="Submit the sweep on a real cluster. With --candidate, the configuration is registered under the "
            "alias 'candidate' and marked as simulated.",
        )
    chosen = find_trial(state, trial, name) if trial is not None else state.winner
    if chosen is None:
        raise ConfigError(
            f"the sweep {name!r} has no measurements", remedy=f"To see why, run: tune-cluster report {name}"
        )
    if chosen.check is not None:
        of = units.trial_id(chosen.check.of)
        raise ConfigError(f"trial {units.trial_id(chosen.number)} is only a check of {of}", remedy=f"Promote {of}.")
    if chosen.measurement is None:
        why = f"{units.status_label(chosen.status)}: {descriptions.failure(chosen)}"
        raise ConfigError(
            f"trial {units.trial_id(chosen.number)} in the sweep {name!r} was not measured ({why})",
            remedy="Choose another trial.",
        )
    remedy = _remedy(state, chosen, is_changed=bool(objections))
    found = Chosen(trial=chosen, missing=(*_missing(state, chosen), *objections), remedy=remedy)
    if found.missing and not force and not is_candidate:
        subject = f"{units.trial_id(chosen.number)} of {name} cannot go to production: "
        raise ConfigError(subject + "; ".join(found.missing), remedy=found.remedy)
    return found


def _missing(state: SweepState, chosen: Trial) -> tuple[str, ...]:
    """What is missing for a promotion without force: clauses without full stops."""
    missing = [] if state.is_over else [f"the sweep is {state.status}, its proof is not finished"]
    verdict = state.verdict
    if state.virtual is not None:
        return (*missing, f"the sweep is {state.virtual}: nothing was measured or proven")
    if chosen.number == 0:
        why = f" ({verdict.reason})" if verdict and verdict.conclusion == "keep" else ""
        return (*missing, f"it is the current configuration{why}")
    if verdict is None:
        return (*missing, unproven(state, chosen.number), _gate_missing(None))
    if verdict.winner == chosen.number:
        return (*missing, *_gate_doubt(verdict, chosen.number))
    if verdict.conclusion != "confirmed" and not _is_judged(state, chosen):
        return (*missing, "it was not part of the sweep's last proof", _gate_missing(None))
    return (*missing, _not_the_winner(verdict, chosen.number), *_gate_doubt(verdict, chosen.number))


def unproven(state: SweepState, number: int) -> str:
    """The progress of the proof of a trial without a verdict."""
    found = confirmation(state)
    if found is None or number not in found.finalists:
        return "it was not measured again, interleaved with the baseline"
    rounds = sum(number in one.runs for one in found.complete)
    measured = f"{units.count(rounds, 'round')} of its confirmation {'is' if rounds == 1 else 'are'} measured"
    if state.is_over:
        return f"{measured}, without a conclusion"
    return f"{measured}, {'its loss gate' if found.judgement.is_decided else 'the confirmation'} is still running"


def _is_judged(state: SweepState, chosen: Trial) -> bool:
    """Whether the last proof included this trial; without finalists it included all: none was as fast."""
    return state.proof is None or not state.proof.finalists or chosen.number in state.proof.finalists


def _not_the_winner(verdict: Verdict, number: int) -> str:
    match verdict.conclusion:
        case "confirmed":
            assert verdict.winner is not None, "a confirmed verdict has a winner"
            tied = ", but the two are tied" if number in verdict.tied_with else ""
            return f"the confirmed winner is {units.trial_id(verdict.winner)}{tied}"
        case "keep":
            return f"it is not shown to be faster than the current configuration ({verdict.reason})"
        case "unconfirmed" | "rehearsed":
            return f"the confirmation was inconclusive ({verdict.reason})"


def _gate_doubt(verdict: Verdict, number: int) -> tuple[str, ...]:
    """The loss gate's objections; a passed user evaluation resolves an inconclusive gate."""
    report = gate_of(verdict, number)
    is_settled = any(one.trial == number and one.passed for one in verdict.evaluations)
    if report is not None and (report.passed or (report.answer == "inconclusive" and is_settled)):
        return ()
    return (_gate_missing(report),)


def _gate_missing(report: GateReport | None) -> str:
    if report is None:
        return "the loss gate did not check whether it trains the same model"
    if report.answer == "inconclusive":
        return f"the loss gate is inconclusive: {report.objections[0]}"
    if not report.precision_class:
        return f"it failed during the loss gate: {report.reasons[0]}"
    return f"it failed the loss gate: {report.reasons[0]}"


def _remedy(state: SweepState, chosen: Trial, *, is_changed: bool = False) -> str:
    name, verdict = state.sweep.sweep, state.verdict
    force = "--force promotes it anyway, and this is recorded."
    if is_changed:
        return f"Submit the sweep under another name to measure the current program. {force}"
    if not state.is_over:
        return f"Wait for it: tune-cluster status {name}. {force}"
    report = gate_of(verdict, chosen.number) if verdict else None
    is_refuted = verdict is not None and verdict.conclusion == "keep" and _is_judged(state, chosen)
    if chosen.number == 0 or is_refuted or (report is not None and report.answer == "failed"):
        return f"Keep your current configuration. {force}"
    if report is not None and report.answer == "inconclusive":
        return f"{report.remedy}. {force}" if report.remedy else force
    if verdict is not None and verdict.winner == chosen.number:
        return f"Submit the sweep under another name with `gate:` on. {force}"
    return f"To confirm it: tune-cluster confirm {name} {units.trial_id(chosen.number)}. {force}"


def gate_of(verdict: Verdict, number: int) -> GateReport | None:
    """The gate's report on a finalist; None if not judged."""
    return next((report for report in verdict.gates if report.trial == number), None)


def evidence(state: SweepState, chosen: Chosen) -> dict[str, Any]:
    """The trial's measurements, as JSON values: enough to judge it, and for later comparisons."""
    trial = chosen.trial
    measured, compared = result(trial, state.objective), speedup(trial, state.baseline, state.objective)
    assert measured is not None and trial.measurement is not None, "only measured trials are chosen"
    return {
        "sweep": state.sweep.sweep,
        "sweep_id": sweep_id(state.sweep),
        "virtual": state.virtual,
        "trial": trial.number,
        "tokens_per_s_per_device": measured.figures.tokens_per_s_per_device,
        "objective": state.objective.name,
        "confirmed": _confirmed(state, trial.number),
        "unit": state.sweep.workload.speed_unit,
        "ci95": interval_json(tokens_per_s_per_device(trial.measurement).ci95),
        "speedup": compared.to_json() if compared else None,
        "verdict": to_json(state.verdict),
        "confirmation": _confirmation(state, trial.number),
        "gate": _gate(state, trial.number),
        "training": trajectory_json(trial.measurement, trial.candidate),
        "forced": chosen.forced,
        "missing": list(chosen.missing),
        "hardware": state.sweep.hardware,
        "fingerprint": dict(state.sweep.fingerprint),
    }


def _confirmed(state: SweepState, number: int) -> dict[str, Any] | None:
    """The last proof's measurements of the trial and the baseline, the basis of its ratio; None without a proof."""
    found = confirmed_figures(state)
    noun = noun_of(state.sweep.workload.speed_unit)
    return {**found.to_json(noun)} if found is not None and found.trial == number else None


def _confirmation(state: SweepState, number: int) -> list[dict[str, Any]]:
    """Runs of the trial and of the baseline in the rounds that count of the last proof."""
    found = confirmation(state)
    return [
        {
            "trial": run.number,
            "of": of,
            "round": one.number,
            "tokens_per_s_per_device": run.measurement.tokens_per_s_per_device,
        }
        for one in (found.complete if found else ())
        for of, run in one.runs.items()
        if of in (0, number) and run.measurement is not None
    ]


def _gate(state: SweepState, number: int) -> dict[str, Any] | None:
    """The gate's result for the trial and its comparisons; None if not judged."""
    report = gate_of(state.verdict, number) if state.verdict else None
    if report is None:
        return None
    runs = {
        role: {"trial": run.number, **trajectory_json(run.measurement, run.candidate)}
        for role, run in gate_runs(state, number).items()
        if run.measurement is not None
    }
    return {"report": to_json(report), "runs": runs}


def trajectory_json(measurement: Measurement | None, candidate: Candidate) -> dict[str, Any]:
    """The training curve of a run from its first step, for :class:`orchestrator.proof.loss_gate.Trajectory`."""
    if measurement is None:
        return {}
    run = trajectory(measurement, candidate)
    return {
        "losses": _finite(run.losses),
        "grad_norms": _finite(run.grad_norms),
        "num_skipped_steps": run.num_skipped_steps,
        "precision": to_json(run.precision),
        "matmul_precision": run.matmul_precision,
        "micro_batch_size": run.micro_batch_size,
        "loss_resolution": run.loss_resolution,
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    """The values, None for non-finite ones, which JSON does not support."""
    return [value if math.isfinite(value) else None for value in values]


JSON, YAML = "recipe.json", "recipe.yaml"
COMMAND = "command"
"""Export format of a custom training program: its own command."""
SWEEP_AS_WRITTEN, SWEEP_WRITTEN_OUT = "sweep.yaml", "sweep.json"
AGAIN = "Promote the sweep again."
WATERMARK_TAG = "watermark"
"""Tag of versions from simulated clusters."""
FILES = "files.json"
"""List of a version's other files with their digests; the version's tag ``files_sha256`` is the digest of the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The full content of a version, independent of when and by whom it is promoted."""

    content: Mapping[str, Any]
    """Content of ``recipe.json``."""
    files: Mapping[str, str]
    """Texts to store, by path, including the list of files."""

    @property
    def sha256(self) -> str:
        return digest(self.content)

    @property
    def files_sha256(self) -> str:
        return digest(list_files({path: text.encode() for path, text in self.files.items()}))


def list_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Path to SHA-256 of every file of a version, sorted, without the list itself."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items()) if path != FILES}


def build_manifest(ledger: Ledger, state: SweepState, chosen: Chosen) -> Manifest:
    """The manifest of a trial, with its files to store."""
    candidate, workload = chosen.trial.candidate, state.sweep.workload
    script, fingerprint = script_of(ledger), state.sweep.fingerprint
    origin = _origin(ledger, chosen)
    made = None if script is None else artifact(script, candidate, short_name(candidate), seen=origin[INSIDE])
    kept = {"script": {**made.to_json(script), **origin}} if made and script else {}
    content = redact_all(
        {
            "config_key": candidate.config_key,
            "short_name": short_name(candidate),
            "candidate": to_json(candidate),
            "evidence": evidence(state, chosen),
            "workload": to_json(workload),
            **kept,
        }
    )
    files = {
        JSON: json.dumps(content, indent=1, sort_keys=True) + "\n",
        YAML: yaml.safe_dump(content, sort_keys=False, allow_unicode=True),
        **_sweep_files(ledger),
        **(_exports(candidate, workload, fingerprint) if made is None else _command_files(made, fingerprint)),
    }
    files = {path: redact(text) for path, text in files.items()}
    listed = list_files({path: text.encode() for path, text in files.items()})
    return Manifest(content=content, files=files | {FILES: json.dumps(listed, indent=1) + "\n"})


def _sweep_files(ledger: Ledger) -> dict[str, str]:
    """The sweep's file as written, and in expanded form, which verifications use."""
    written, spec = SweepFile.read(ledger), ledger.document(SPEC)
    as_written = {SWEEP_AS_WRITTEN: written.text} if written else {}
    return as_written | ({SWEEP_WRITTEN_OUT: json.dumps(redact_all(spec), indent=1) + "\n"} if spec else {})


def _exports(candidate: Candidate, workload: Workload, fingerprint: Mapping[str, str]) -> dict[str, str]:
    """The configuration of every framework that can express it, and why the others cannot."""
    files: dict[str, str] = {}
    lines: list[str] = []
    for name, made in export_all(candidate, workload).items():
        if isinstance(made, ConfigError):
            lines += [f"{name}: none", *(f"  {line}" for line in str(made).splitlines())]
            continue
        lines += [f"{name}: {made.command}", *(f"  {note}" for note in made.notes)]
        files |= {f"exports/{name}/{path}": text for path, text in with_exports(made.files, fingerprint).items()}
    return files | {"exports/README.txt": "\n".join(lines) + "\n"}


def script_of(ledger: Ledger) -> Script | None:
    """The custom training program, as parsed when the sweep was created; None for the built-in runner."""
    return script_of_spec(ledger.document(SPEC))


def script_of_spec(spec: Mapping[str, Any] | None) -> Script | None:
    """The custom training program of a stored or promoted sweep; None for the built-in runner, or without a sweep."""
    return SweepSpec.from_json(spec).script if spec and is_of_script(spec) else None


def is_of_script(spec: Mapping[str, Any]) -> bool:
    """Whether a stored or promoted sweep runs a custom training program."""
    return "run" in spec.get("workload", {})


def _command_files(made: ScriptArtifact, fingerprint: Mapping[str, str]) -> dict[str, str]:
    """The user's command with the configuration applied, ready to run, and the differences from the original."""
    lines = [f"{COMMAND}: sh {START}", *(f"  {note}" for note in made.notes)]
    files = {f"exports/{COMMAND}/{path}": text for path, text in with_exports(made.files, fingerprint).items()}
    return files | {"exports/README.txt": "\n".join(lines) + "\n"}


def _origin(ledger: Ledger, chosen: Chosen) -> dict[str, Any]:
    """Identity of the program: digests of its source when the sweep was created, and versions of its dependencies."""
    source, measurement = MeasuredProgram.read(ledger), chosen.trial.measurement
    reported = measurement.findings.script if measurement else None
    return {
        "source": None if source is None else {"sha256": source.sha256, "commit": source.commit},
        "versions": {pair[0]: pair[1] for pair in reported.versions} if reported else {},
        INSIDE: seen_inside(chosen.trial),
    }


def seen_inside(trial: Trial) -> dict[str, Any]:
    """``fingerprint`` and ``expect`` of a program with knobs set by our hook, from the trial's observations; empty if
    there are none."""
    reported = trial.measurement.findings.script if trial.measurement else None
    if reported is None or not reported.knobs:
        return {}
    fingerprint = json.loads(reported.fingerprint) if reported.fingerprint else None
    return {"fingerprint": fingerprint, "expect": {pair[0]: pair[1] for pair in reported.knobs}}


def source_changes(ledger: Ledger, script: Script | None) -> tuple[str, ...]:
    """Why the program on this host is not the measured one; empty if it is, or is elsewhere."""
    measured = MeasuredProgram.read(ledger)
    today = None if script is None else program_source(script)
    if measured is None or today is None or today.sha256 == measured.sha256:
        return ()
    names = today.changed(dict(measured.files))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (f"your program has changed since it was measured ({', '.join(names[:3])}{more})",)


def version_tags(manifest: Manifest) -> dict[str, str]:
    """Tags of a version, shown on the registry's pages and used for later checks."""
    facts = manifest.content["evidence"]
    ratio = ratio_of(facts)
    return {
        "tokens_per_s_per_device": f"{units.rounded(facts['tokens_per_s_per_device']):.10g}",
        "objective": facts.get("objective", Objective().name),
        "speedup": f"{ratio.value:.4g}" if ratio else "unknown",
        "speedup_ci95": units.ratio_interval(ratio.ci95) if ratio else "unknown",
        **({WATERMARK_TAG: watermark(facts["virtual"])} if facts.get("virtual") else {}),
        "verdict": verdict_of(facts)[0],
        "gate": gate_text(facts),
        "sweep": facts["sweep"],
        "sweep_id": facts["sweep_id"],
        "trial": str(facts["trial"]),
        "config_key": manifest.content["config_key"],
        "short_name": manifest.content["short_name"],
        "hardware": facts["hardware"],
        "forced": str(facts["forced"]).lower(),
        "recipe_sha256": manifest.sha256,
        "files_sha256": manifest.files_sha256,
    }


def ratio_of(facts: Mapping[str, Any]) -> Estimate | None:
    """Speed-up over the baseline in the evidence: the confirmation's if it won, else the search's; None without."""
    verdict, searched = facts["verdict"] or {}, facts["speedup"]
    confirmed = verdict.get("speedup") if verdict.get("winner") == facts["trial"] else None
    if confirmed:
        low, high = confirmed["low"], confirmed["high"]
        return Estimate(confirmed["value"], Interval(low, high) if low is not None and high is not None else None)
    if not searched:
        return None
    low, high = searched["low"], searched["high"]
    return Estimate(searched["value"], Interval(low, high) if low is not None and high is not None else None)


def verdict_of(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Verdict on the promoted trial: ``confirmed`` or ``not confirmed``, and why."""
    verdict = facts["verdict"]
    if facts.get("virtual"):
        return facts["virtual"], "nothing was measured or proven"
    if verdict is None:
        rounds = len({run["round"] for run in facts["confirmation"] if run["of"] == facts["trial"]})
        return (
            "not confirmed",
            f"{units.count(rounds, 'round')} measured, no verdict" if rounds else "not measured again",
        )
    is_winner = verdict["winner"] == facts["trial"]
    return ("confirmed", verdict["reason"]) if is_winner else ("not confirmed", f"in its sweep, {verdict['reason']}")


def gate_text(facts: Mapping[str, Any]) -> str:
    if facts["gate"] is None or facts.get("virtual"):
        return "not run"
    report = facts["gate"]["report"]
    if report["passed"]:
        return "passed"
    return "failed" if report["reasons"] else "inconclusive"


def speed_text(facts: Mapping[str, Any]) -> str:
    """``3,200 tokens/s/p, 1.42x (95% CI: 1.38x–1.46x) against the baseline``: both from the confirmation if it won."""  # noqa: RUF002
    ratio, speed = ratio_of(facts), facts["tokens_per_s_per_device"]
    if facts.get("confirmed") and (facts["verdict"] or {}).get("winner") == facts["trial"]:
        speed = facts["confirmed"]["figures"][f"{noun_of(facts['unit'])}_per_s_per_device"]
    objective = facts.get("objective", Objective().name)
    by = "" if objective == Objective().name else f" by {objective.replace('_', ' ')}"
    against = f", {units.ratio(ratio.value, ratio.ci95)} against the baseline{by}" if ratio else ""
    mark = f"{watermark(facts['virtual'])} " if facts.get("virtual") else ""
    return f"{mark}{units.rate(speed)} {facts['unit']}{against}"


def describe(manifest: Manifest) -> str:
    """Markdown for the registry's pages, which show no files; includes the configuration's YAML if it fits."""
    facts = manifest.content["evidence"]
    head = f"**{speed_text(facts)}** — `{manifest.content['short_name']}`"
    lines = [
        f"- {': '.join(verdict_of(facts))}",
        f"- loss gate: {gate_text(facts)}",
        f"- trial {facts['trial']} of sweep {facts['sweep']} on {facts['hardware']}",
    ]
    if facts["forced"]:
        lines.append(f"- **promoted with --force**: {'; '.join(facts['missing'])}")
    body = yaml.safe_dump({"candidate": manifest.content["candidate"]}, sort_keys=False, allow_unicode=True)
    mark = [f"# {watermark_line(facts['virtual'])}", ""] if facts.get("virtual") else []
    text = "\n".join([*mark, head, "", *lines])
    whole = f"{text}\n\n```yaml\n{body}```\n"
    return whole if len(whole) <= MAX_DESCRIPTION_CHARS else text


def check_origin(registered: Registered, files: Mapping[str, bytes]) -> None:
    """Check that the version was registered by this program.

    Raises:
        ConfigError: it was not, or its tags are missing.
    """
    if JSON not in files and not {"recipe_sha256", "files_sha256"} <= set(registered.tags):
        remedy = "Use another version, or promote the sweep again."
        raise ConfigError(f"{label_of(registered)} was not registered by tune-cluster", remedy=remedy)


def parsed(registered: Registered, files: Mapping[str, bytes]) -> Mapping[str, Any]:
    """Content of the version's ``recipe.json``, in the form of :func:`build_manifest`.

    Raises:
        ConfigError: it has a different form.
    """
    try:
        content: Mapping[str, Any] = json.loads(files[JSON])
        facts = content["evidence"]
        from_json(_Facts, {name: facts[name] for name in _Facts.__annotations__})
        for kind, value in ((Candidate, content["candidate"]), (Workload, content["workload"])):
            from_json(kind, value)
        if facts["gate"] is not None:
            from_json(GateReport, facts["gate"]["report"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        why = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error).split(";")[0]
        raise ConfigError(f"{label_of(registered)} has no valid manifest: {why}", remedy=AGAIN) from None
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """Required fields of the evidence; see :func:`orchestrator.promotion.manifest.evidence`."""

    sweep: str
    sweep_id: str
    trial: int
    tokens_per_s_per_device: float
    unit: str
    speedup: dict[str, Any] | None
    verdict: Verdict | None
    confirmation: tuple[dict[str, Any], ...]
    gate: dict[str, Any] | None
    training: dict[str, Any]
    forced: bool
    missing: tuple[str, ...]
    hardware: str
    fingerprint: dict[str, str]


def check_content(content: Mapping[str, Any], registered: Registered) -> Candidate:
    """The manifest's candidate, after checking that manifest, key and registry agree.

    Raises:
        ConfigError: they do not.
    """
    candidate: Candidate = from_json(Candidate, content["candidate"])
    keys = {candidate.config_key, content.get("config_key"), registered.tags.get("config_key")}
    if len(keys) != 1 or digest(content) != registered.tags.get("recipe_sha256"):
        raise altered(label_of(registered), "its manifest does not match the key it was registered with")
    mark = watermark(content["evidence"].get("virtual"))
    if registered.tags.get(WATERMARK_TAG, "") != mark:
        raise altered(label_of(registered), f"its tag {WATERMARK_TAG} should be {mark or 'absent'}")
    return candidate


def check_record(registered: Registered, record_tags: Mapping[str, str]) -> None:
    """Check the version's digests against those in the record of its registration.

    Raises:
        ConfigError: they differ.
    """
    for name in ("recipe_sha256", "files_sha256"):
        if registered.tags.get(name) != record_tags.get(f"tc.{name}"):
            raise altered(label_of(registered), f"its {name} does not match the record of its promotion")


def label_of(registered: Registered) -> str:
    return f"{registered.name} version {registered.version}"


def check_files(registered: Registered, files: Mapping[str, bytes]) -> None:
    """Check that the files of a version are unchanged since its registration, using the digest of their list.

    Raises:
        ConfigError: they have changed.
    """
    found = list_files(files)
    listed = _listed(files)
    if digest(found) == registered.tags.get("files_sha256") and listed in (None, found):
        return
    odd = sorted(path for path in {*(listed or {}), *found} if (listed or {}).get(path) != found.get(path))
    what = ", ".join(odd[:5]) if listed and odd else "the list of its files"
    raise altered(label_of(registered), f"{what} differs")


def _listed(files: Mapping[str, bytes]) -> dict[str, str] | None:
    """The digests in the list of files, which is verified by the registry's tag; None without one."""
    try:
        return dict(json.loads(files[FILES])) if FILES in files else None
    except (ValueError, TypeError):
        return {}


def altered(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where} was altered after its promotion: {why}", remedy="Do not use this version; promote the sweep again."
    )
