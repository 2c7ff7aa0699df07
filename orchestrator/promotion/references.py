"""References such as ``llama@production``, ``llama@3`` and ``sweep:trial``: resolved, read and checked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import check_tracking_uri
from orchestrator.program.user_program import Script
from orchestrator.promotion.manifest import (
    AGAIN,
    SWEEP_WRITTEN_OUT,
    Manifest,
    check_content,
    check_files,
    check_origin,
    check_record,
    label_of,
    parsed,
    ratio_of,
    script_of_spec,
    seen_inside,
    unproven,
    verdict_of,
)
from orchestrator.promotion.records import Record
from orchestrator.report.summary import result
from orchestrator.space.knobs import INSIDE
from orchestrator.space.notation import flat_params, short_name
from orchestrator.statistics import Interval
from orchestrator.sweep.checkpoint import requester
from orchestrator.sweep.snapshot import Home, check_name
from orchestrator.sweep.state import find_trial
from orchestrator.tracking.mlflow_store import Registered, Registry
from orchestrator.tracking.mlflow_tracker import Tracker
from orchestrator.units import trial_id
from trials.files import from_json, to_json
from trials.spec import Candidate, Workload

# The history of a name, and the records that can follow.


PRODUCTION, PREVIOUS, CANDIDATE = "production", "previous", "candidate"
"""Aliases: the version in use, the one before, and one registered for inspection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The resolved history of a name."""

    last: Record | None
    """The last record that took effect."""
    last_number: int
    """Number of the last record, including void ones; 0 if there is none."""
    carried: Record | None = None
    """An interrupted change that has just been completed."""

    @property
    def current(self) -> str:
        """The version in production; empty for none."""
        return self.last.to_version if self.last else ""


def promotion_of(name: str, manifest: Manifest, reason: str, past: Past) -> Record:
    """The record of promoting ``manifest``; its version is not known yet."""
    facts, ratio = manifest.content["evidence"], ratio_of(manifest.content["evidence"])
    return replace(
        _blank(name, past),
        reason=reason,
        forced=facts["forced"],
        missing=tuple(facts["missing"]),
        sweep=facts["sweep"],
        sweep_id=facts["sweep_id"],
        trial=str(facts["trial"]),
        short_name=manifest.content["short_name"],
        speedup=units.short_ratio(ratio.value, ratio.ci95) if ratio else "",
        recipe_sha256=manifest.sha256,
        files_sha256=manifest.files_sha256,
    )


def candidate_of(name: str, manifest: Manifest, reason: str, past: Past) -> Record:
    """The record of registering ``manifest`` without putting it into production."""
    return replace(promotion_of(name, manifest, reason, past), action="candidate", from_version="")


def rollback_to(target: Version, reason: str, past: Past) -> Record:
    """The record of putting an existing version into production."""
    facts = target.manifest["evidence"]  # verified by its digests; its tags may have been edited
    forced, missing = facts["forced"], tuple(facts["missing"])
    return replace(_to(target.registered, past), action="rollback", reason=reason, forced=forced, missing=missing)


def found_moved(name: str, found: Registered | None, past: Past) -> Record:
    """The record of finding the alias at a different version than expected, or at none."""
    record = _to(found, past) if found else _blank(name, past)
    reason = f"the alias {PRODUCTION} was moved outside tune-cluster"
    return replace(record, action="external", by="unknown", reason=reason)


def _to(target: Registered, past: Past) -> Record:
    tags = target.tags
    trial = tags.get("trial", "")
    return replace(
        _blank(target.name, past),
        to_version=target.version,
        speedup=_speedup_text(tags),
        forced=tags.get("forced") == "true",
        sweep=tags.get("sweep", ""),
        sweep_id=tags.get("sweep_id", ""),
        trial=trial if trial.isdigit() else "",
        short_name=tags.get("short_name", ""),
        recipe_sha256=tags.get("recipe_sha256", ""),
        files_sha256=tags.get("files_sha256", ""),
    )


def _speedup_text(tags: Mapping[str, str]) -> str:
    """The speed-up in a version's tags, like ``1.42x``; empty if missing or altered."""
    parts = (tags.get("speedup", ""), *re.findall(r"[\d.]+", tags.get("speedup_ci95", "")))
    try:
        value, *ends = map(float, parts)
    except ValueError:
        return ""
    return units.short_ratio(value, Interval(ends[0], ends[1]) if len(ends) == 2 else None)


def _blank(name: str, past: Past) -> Record:
    return Record(
        name=name,
        number=past.last_number + 1,
        action="promote",
        from_version=past.current,
        to_version="",
        by=requester(),
        at_s=time.time(),
        from_sweep=past.last.sweep if past.last else "",
        from_sweep_id=past.last.sweep_id if past.last else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version with its manifest, checked against its registered key."""

    registered: Registered
    manifest: Mapping[str, Any]
    candidate: Candidate
    spec: Mapping[str, Any] | None
    """The expanded sweep file; None if the sweep was not submitted from one."""

    @property
    def label(self) -> str:
        return label_of(self.registered)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``show --json``."""
        version = self.registered
        verified = {key: version.tags.get(f"verified_{key}") for key in ("at", "result", "run")}
        return {
            "name": version.name,
            "version": version.version,
            "aliases": list(version.aliases),
            "promoted_by": version.tags.get("promoted_by"),
            "recipe_sha256": version.tags.get("recipe_sha256"),
            "verified": verified if verified["at"] else None,
            **self.manifest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDescription:
    """A configuration for ``diff``: a registered version, or a trial of a sweep."""

    label: str
    candidate: Candidate
    workload: Workload
    hardware: str
    fingerprint: Mapping[str, str]
    speed: float | None
    unit: str
    verdict: str
    script: Script | None = None
    """The custom training program; None for the built-in runner."""
    seen: Mapping[str, Any] = field(default_factory=dict)
    """The hook's observations of a program in which it set knobs: see ``seen_inside`` of the manifest."""
    doubt: str = ""
    """The progress of its proof, if there is no verdict yet."""


def store(home: Home, tracking_uri: str | None) -> Tracker:
    """The MLflow store to use: the home's unless another is given.

    Raises:
        ConfigError: nothing has been recorded there, or the address is not a tracking URI.
    """
    if tracking_uri is not None:
        return Tracker(check_tracking_uri(tracking_uri))
    if not home.has_store:
        raise ConfigError(
            f"no MLflow store in {home.path}",
            remedy="Submit a sweep first. If the store is elsewhere, pass its directory with --home.",
        )
    return Tracker(home.default_tracking_uri)


def read(tracker: Tracker, reference: str) -> Version:
    """The version ``name@alias``, ``name@number`` or ``name``, which means ``name@production``.

    Raises:
        ConfigError: the version does not exist, or its manifest was altered.
    """
    name, _, which = reference.partition("@")
    check_name(name, "registered name")
    which = which or PRODUCTION
    with tracker.reached():
        registry = Registry(tracker.client())
        found = registry.find(name, version=which) if which.isdigit() else registry.find(name, alias=which)
        if found is None:
            raise ConfigError(
                f"the registry has no {name}@{which}", remedy="Promote a sweep first, or use a version number."
            )
        return checked(registry, found)


def checked(registry: Registry, found: Registered) -> Version:
    """The version with its files, after checking that they are unchanged since its registration, and valid.

    Raises:
        ConfigError: they are not, or cannot be read.
    """
    try:
        files = registry.read_files(found)
        record_tags = registry.run_tags(found.run_id)
    except LookupError as error:
        raise ConfigError(f"cannot read {label_of(found)}: {error}", remedy=AGAIN) from None
    check_origin(found, files)
    check_files(found, files)
    manifest = parsed(found, files)
    candidate = check_content(manifest, found)
    check_record(found, record_tags)
    spec = json.loads(files[SWEEP_WRITTEN_OUT]) if SWEEP_WRITTEN_OUT in files else None
    return Version(registered=found, manifest=manifest, candidate=candidate, spec=spec)


def describe(reference: str, home: Home, tracking_uri: str | None) -> VersionDescription:
    """The configuration of ``reference``: a registered version, or ``SWEEP:TRIAL``.

    Raises:
        ConfigError: it does not exist.
    """
    sweep, colon, trial = reference.partition(":")
    if colon:
        return _of_trial(sweep, trial, home)
    promoted = read(store(home, tracking_uri), reference)
    facts = promoted.manifest["evidence"]
    return VersionDescription(
        label=promoted.label,
        candidate=promoted.candidate,
        workload=from_json(Workload, promoted.manifest["workload"]),
        hardware=facts["hardware"],
        fingerprint=facts["fingerprint"],
        speed=facts["tokens_per_s_per_device"],
        unit=facts["unit"],
        verdict=verdict_of(facts)[0],
        script=script_of_spec(promoted.spec),
        seen=promoted.manifest.get("script", {}).get(INSIDE, {}),
    )


def _of_trial(sweep: str, trial: str, home: Home) -> VersionDescription:
    snapshot = home.read(sweep, begun=True)
    state = snapshot.state
    found = find_trial(state, trial, sweep)
    measured, verdict = result(found, state.objective), state.verdict
    return VersionDescription(
        label=f"{sweep}:{trial_id(found.number)}",
        candidate=found.candidate,
        workload=state.sweep.workload,
        hardware=state.sweep.hardware,
        fingerprint=state.sweep.fingerprint,
        speed=measured.figures.tokens_per_s_per_device if measured else None,
        unit=state.sweep.workload.speed_unit,
        script=script_of_spec(snapshot.spec),
        seen=seen_inside(found),
        verdict=state.virtual or ("confirmed" if verdict and verdict.winner == found.number else "not confirmed"),
        doubt="" if verdict or state.virtual or not found.number else unproven(state, found.number),
    )


# Differences between two configurations: knobs, workload, environment, evidence.


ABSENT = "–"  # noqa: RUF001
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The differences by part: name to the texts of both. Evidence is always shown."""

    a: str
    b: str
    parts: Mapping[str, Mapping[str, Pair]]

    @property
    def is_same(self) -> bool:
        """Whether both train the same thing in the same way."""
        return not self.parts["knobs"] and not self.parts["workload"]

    def to_json(self) -> dict[str, Any]:
        parts = {part: {name: list(pair) for name, pair in found.items()} for part, found in self.parts.items()}
        return {"a": self.a, "b": self.b, "same": self.is_same, **parts}


def compare(a: VersionDescription, b: VersionDescription) -> Difference:
    """The differences between two configurations."""
    parts = {
        "knobs": differing(flat_params(a.candidate), flat_params(b.candidate)),
        "workload": differing(flat_json(to_json(a.workload)), flat_json(to_json(b.workload))),
        "environment": differing({"hardware": a.hardware, **a.fingerprint}, {"hardware": b.hardware, **b.fingerprint}),
        "evidence": {name: (_evidence(a)[name], text) for name, text in _evidence(b).items()},
    }
    return Difference(a=a.label, b=b.label, parts=parts)


def flat_json(value: Any) -> dict[str, Any]:
    """The leaves of nested mappings by their dotted paths."""
    return dict(_flat(value))


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Keys with different values, or that only one of them has."""
    pairs = {name: (str(a.get(name, ABSENT)), str(b.get(name, ABSENT))) for name in {**a, **b}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _evidence(of: VersionDescription) -> dict[str, str]:
    speed = f"{units.rate(of.speed)} {of.unit}" if of.speed is not None else "not measured"
    return {"configuration": short_name(of.candidate), "speed": speed, "verdict": of.verdict}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value
