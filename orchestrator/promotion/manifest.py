"""The manifest of a version in the registry: configuration, workload, evidence, sweep file and exports, with checks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from orchestrator import units
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.objective import Objective
from orchestrator.promotion.evidence import Chosen, evidence
from orchestrator.recipes import export_all
from orchestrator.recipes.variables import with_exports
from orchestrator.scripts.artifact import ScriptArtifact, artifact
from orchestrator.scripts.overlay import START
from orchestrator.scripts.script import Script
from orchestrator.scripts.source import program_source
from orchestrator.space.naming import short_name
from orchestrator.statistics import Estimate, Interval
from orchestrator.sweep.documents import SPEC, MeasuredProgram, SweepFile
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState
from orchestrator.sweep.values import GateReport, Verdict
from orchestrator.tracking.registry import MAX_DESCRIPTION_CHARS, Registered
from orchestrator.virtual import watermark, watermark_line
from trials.codec import digest, from_json, to_json
from trials.secrets import redact, redact_all
from trials.spec import Candidate, Workload

JSON, YAML = "recipe.json", "recipe.yaml"
COMMAND = "command"
"""Format of the exports of a user's own training program: its own command."""
SWEEP_AS_WRITTEN, SWEEP_WRITTEN_OUT = "sweep.yaml", "sweep.json"
AGAIN = "Promote the sweep again."
WATERMARK_TAG = "watermark"
"""Tag of versions from clusters that do not exist."""
FILES = "files.json"
"""List of a version's other files with their digests; the version's tag ``files_sha256`` is the digest of the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a version is made of, and nothing that depends on when it is promoted, or by whom."""

    content: Mapping[str, Any]
    """Content of ``recipe.json``."""
    files: Mapping[str, str]
    """Texts to be stored, by their paths; the list of them among them."""

    @property
    def sha256(self) -> str:
        return digest(self.content)

    @property
    def files_sha256(self) -> str:
        return digest(list_files({path: text.encode() for path, text in self.files.items()}))


def list_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Path to SHA-256 of every file of a version, sorted, without the file that holds this list."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in sorted(files.items()) if path != FILES}


def build_manifest(ledger: Ledger, state: SweepState, chosen: Chosen) -> Manifest:
    """The manifest of a trial, with its files as they are to be stored."""
    candidate, workload = chosen.trial.candidate, state.sweep.workload
    script, fingerprint = script_of(ledger), state.sweep.fingerprint
    made = None if script is None else artifact(script, candidate, short_name(candidate))
    kept = {"script": {**made.to_json(script), **_origin(ledger, chosen)}} if made and script else {}
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
    """The sweep's file as it was written, and written out: a verification is made from the latter."""
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
    """The user's own training program, as it was read when the sweep was created; None where ours trains."""
    return script_said(ledger.document(SPEC))


def script_said(spec: Mapping[str, Any] | None) -> Script | None:
    """The user's own training program of a sweep that was stored or promoted; None where ours trains, or for none."""
    return SweepSpec.from_json(spec).script if spec and is_of_script(spec) else None


def is_of_script(spec: Mapping[str, Any]) -> bool:
    """Whether a sweep that was stored or promoted trains a program of the user's own."""
    return "run" in spec.get("workload", {})


def _command_files(made: ScriptArtifact, fingerprint: Mapping[str, str]) -> dict[str, str]:
    """The user's own command with the configuration laid over it, ready to start, and what differs from theirs."""
    lines = [f"{COMMAND}: sh {START}", *(f"  {note}" for note in made.notes)]
    files = {f"exports/{COMMAND}/{path}": text for path, text in with_exports(made.files, fingerprint).items()}
    return files | {"exports/README.txt": "\n".join(lines) + "\n"}


def _origin(ledger: Ledger, chosen: Chosen) -> dict[str, Any]:
    """Which program it was: digests of its source when the sweep was created, and versions of what it used."""
    source, measurement = MeasuredProgram.read(ledger), chosen.trial.measurement
    told = measurement.findings.script if measurement else None
    return {
        "source": None if source is None else {"sha256": source.sha256, "commit": source.commit},
        "versions": {pair[0]: pair[1] for pair in told.versions} if told else {},
    }


def source_changes(ledger: Ledger, script: Script | None) -> tuple[str, ...]:
    """Why the program that lies here is not the one that was measured; empty where it is, or lies elsewhere."""
    measured = MeasuredProgram.read(ledger)
    today = None if script is None else program_source(script)
    if measured is None or today is None or today.sha256 == measured.sha256:
        return ()
    names = today.changed(dict(measured.files))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (f"your program was changed since it was measured ({', '.join(names[:3])}{more})",)


def version_tags(manifest: Manifest) -> dict[str, str]:
    """What the registry's pages show beside a version, and what it is checked against later."""
    facts = manifest.content["evidence"]
    ratio = ratio_of(facts)
    return {
        "tokens_per_s_per_device": f"{units.rounded(facts['tokens_per_s_per_device']):.10g}",
        "objective": facts.get("objective", Objective().name),
        "speedup": f"{ratio.value:.4g}" if ratio else "unknown",
        "speedup_ci95": units.ratio_interval(ratio.ci95) if ratio else "unknown",
        **({WATERMARK_TAG: watermark(facts["virtual"])} if facts.get("virtual") else {}),
        "verdict": verdict_of(facts)[0],
        "gate": gate_words(facts),
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
    """Speed over the baseline's in the evidence: the confirmation's where it won, else the search's; None without."""
    verdict, searched = facts["verdict"] or {}, facts["speedup"]
    confirmed = verdict.get("speedup") if verdict.get("winner") == facts["trial"] else None
    if confirmed:
        low, high = confirmed["low"], confirmed["high"]
        return Estimate(confirmed["value"], Interval(low, high) if low is not None and high is not None else None)
    if not searched:
        return None
    return Estimate(searched["ratio"], Interval(*searched["ci95"]) if searched["ci95"] else None)


def verdict_of(facts: Mapping[str, Any]) -> tuple[str, str]:
    """Verdict about the promoted trial: ``confirmed`` or ``not confirmed``, and why."""
    verdict = facts["verdict"]
    if facts.get("virtual"):
        return facts["virtual"], "nothing was measured, nothing is proven"
    if verdict is None:
        return "not confirmed", "it was not measured again"
    is_winner = verdict["winner"] == facts["trial"]
    return ("confirmed", verdict["reason"]) if is_winner else ("not confirmed", f"in its sweep, {verdict['reason']}")


def gate_words(facts: Mapping[str, Any]) -> str:
    if facts["gate"] is None or facts.get("virtual"):
        return "not run"
    report = facts["gate"]["report"]
    if report["passed"]:
        return "passed"
    return "failed" if report["reasons"] else "could not be told"


def speed_words(facts: Mapping[str, Any]) -> str:
    """``3,200 tokens/s/p, 1.42x (1.38x – 1.46x) against the baseline``: both from the confirmation where it won."""  # noqa: RUF002
    ratio, speed = ratio_of(facts), facts["tokens_per_s_per_device"]
    if facts.get("confirmed") and (facts["verdict"] or {}).get("winner") == facts["trial"]:
        speed = facts["confirmed"]["figures"]["tokens_per_s_per_device"]
    objective = facts.get("objective", Objective().name)
    by = "" if objective == Objective().name else f" by {objective.replace('_', ' ')}"
    against = f", {units.ratio(ratio.value, ratio.ci95)} against the baseline{by}" if ratio else ""
    mark = f"{watermark(facts['virtual'])} " if facts.get("virtual") else ""
    return f"{mark}{units.rate(speed)} {facts['unit']}{against}"


def describe(manifest: Manifest) -> str:
    """Markdown for the registry's pages, which show no files; the configuration's YAML where there is room."""
    facts = manifest.content["evidence"]
    head = f"**{speed_words(facts)}** — `{manifest.content['short_name']}`"
    lines = [
        f"- {': '.join(verdict_of(facts))}",
        f"- loss gate: {gate_words(facts)}",
        f"- trial {facts['trial']} of sweep {facts['sweep']} on {facts['hardware']}",
    ]
    if facts["forced"]:
        lines.append(f"- **promoted by force**: {'; '.join(facts['missing'])}")
    body = yaml.safe_dump({"candidate": manifest.content["candidate"]}, sort_keys=False, allow_unicode=True)
    mark = [f"# {watermark_line(facts['virtual'])}", ""] if facts.get("virtual") else []
    text = "\n".join([*mark, head, "", *lines])
    whole = f"{text}\n\n```yaml\n{body}```\n"
    return whole if len(whole) <= MAX_DESCRIPTION_CHARS else text


def check_origin(registered: Registered, files: Mapping[str, bytes]) -> None:
    """Check that the version was registered by this program.

    Raises:
        ConfigError: it was not, or the tags that tell so are gone.
    """
    if JSON not in files and not {"recipe_sha256", "files_sha256"} <= set(registered.tags):
        remedy = "Name another version, or promote the sweep again."
        raise ConfigError(f"{label_of(registered)} was not registered by tune-cluster", remedy=remedy)


def parsed(registered: Registered, files: Mapping[str, bytes]) -> Mapping[str, Any]:
    """Content of the version's ``recipe.json``, of the form that :func:`build_manifest` gives it.

    Raises:
        ConfigError: it has another.
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
        raise ConfigError(f"{label_of(registered)} holds no valid manifest: {why}", remedy=AGAIN) from None
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What every evidence holds, for checking its form; see :func:`orchestrator.promotion.evidence.evidence`."""

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
    """Check the version's digests against those that the record of its registration holds, a second witness.

    Raises:
        ConfigError: they differ.
    """
    for name in ("recipe_sha256", "files_sha256"):
        if registered.tags.get(name) != record_tags.get(f"tc.{name}"):
            raise altered(label_of(registered), f"its {name} is not that of the record of its promotion")


def label_of(registered: Registered) -> str:
    return f"{registered.name} version {registered.version}"


def check_files(registered: Registered, files: Mapping[str, bytes]) -> None:
    """Check that the files of a version are those it was registered with, through the digest of their list.

    Raises:
        ConfigError: they are not.
    """
    found = list_files(files)
    listed = _listed(files)
    if digest(found) == registered.tags.get("files_sha256") and listed in (None, found):
        return
    odd = sorted(path for path in {*(listed or {}), *found} if (listed or {}).get(path) != found.get(path))
    what = ", ".join(odd[:5]) if listed and odd else "the list of its files"
    raise altered(label_of(registered), f"{what} differs")


def _listed(files: Mapping[str, bytes]) -> dict[str, str] | None:
    """The digests as the list among the files gives them, which the registry's tag vouches for; None without one."""
    try:
        return dict(json.loads(files[FILES])) if FILES in files else None
    except (ValueError, TypeError):
        return {}


def altered(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where} was altered after its promotion: {why}", remedy="Do not use it; promote again.")
